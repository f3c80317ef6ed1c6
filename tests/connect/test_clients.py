"""`IdempotentWriter` and `IdempotentReader`: retries, restarts, lost answers, and business logic that counts once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import sqlite3
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from confluent_kafka import Producer

import dedup
from dedup.connect import fenced_consumer
from dedup.connect import transactional_outbox as outbox
from dedup.connect.database import (
    OFFSETS,
    OFFSETS_STATEMENT,
    DatabaseAway,
    FencedOffsets,
    Table,
    make,
    make_staging,
    transaction,
)
from dedup.connect.idempotent_writer import Transaction
from dedup.connect.open_database import SqliteConnection, connect
from dedup.connect.postgres import PostgresConnection
from dedup.connect.source_connector import ended_by_refusal
from dedup.core.partitioner import partitions
from dedup.embedded.kafka_node import EmbeddedKafka
from dedup.errors import (
    BrokerUnavailable,
    CommitUnknown,
    DatabaseUnavailable,
    InvariantBroken,
    RecordRefused,
    SettingsError,
    StateIncompatible,
    TaskMigrated,
)
from dedup.kafka.client import KafkaWire
from dedup.kafka.consumer import FeedFetcher
from dedup.kafka.memory_wire import MemoryWire
from dedup.kafka.topic_admin import Topic
from dedup.kafka.wire import NoAnswer
from dedup.settings import Settings
from tests.brokers import admin_of, read_all
from tests.connect.stage import sqlite_rows
from tests.connect.test_sink import event, sinking
from tests.fault_proxy import RoughProxy
from tests.waiting import until

pytestmark = pytest.mark.broker


async def test_records_and_positions_are_visible_together_or_not_at_all(stage, admin):
    admin.create_topic(stage.topic, 2, {"retention.ms": "-1"})
    async with dedup.IdempotentWriter(stage.name, topics=[stage.topic], settings=stage.settings) as writer:
        assert writer.kept("orders.db") is None
        async with writer.transaction() as transaction:
            transaction.send(stage.topic, b"1", tracking_id="a", headers=[("h", b"x")])
            transaction.send(stage.topic, b"2", key=b"k", timestamp_ms=5)
            transaction.keep("orders.db", "2")
        with pytest.raises(ZeroDivisionError):  # noqa: PT012  # the block is what raises
            async with writer.transaction() as transaction:
                transaction.send(stage.topic, b"3")
                transaction.keep("orders.db", "3")
                _ = 1 / 0
        with pytest.raises(InvariantBroken, match="was not passed to the writer"):
            async with writer.transaction() as transaction:
                transaction.send("other", b"4")
        assert writer.kept("orders.db") == "2"
    found = {message.value(): message for message in stage.read()}
    assert set(found) == {b"1", b"2"}
    assert found[b"1"].headers() == [("h", b"x"), ("dedup-id", b"a")]
    assert found[b"2"].timestamp()[1] == 5
    async with dedup.IdempotentWriter(stage.name, topics=[stage.topic], settings=stage.settings) as writer:
        assert writer.kept("orders.db") == "2"


async def test_a_writer_places_records_by_the_partitions_that_the_topic_has_now(stage, admin):
    """Was: by the count at its start, so two instances of a service could send one ID to two partitions."""
    admin.create_topic(stage.topic, 1, {"retention.ms": "-1"})
    ids = [f"order-{number}" for number in range(40)]
    async with dedup.IdempotentWriter(stage.name, topics=[stage.topic], settings=stage.settings) as writer:

        async def send_all():
            async with writer.transaction() as transaction:
                for each in ids:
                    transaction.send(stage.topic, b"1", tracking_id=each)

        await send_all()
        admin.add_partitions(stage.topic, 4)
        await send_all()  # this commit hears of the new partitions
        await send_all()
    async with dedup.IdempotentWriter(f"{stage.name}-2", topics=[stage.topic], settings=stage.settings) as writer:
        await send_all()
    places = defaultdict(Counter)
    for message in stage.read():
        places[dict(message.headers())["dedup-id"]][message.partition()] += 1
    expected = dict(zip(ids, partitions([each.encode() for each in ids], 4), strict=True))
    assert len(places) == len(ids)
    for each, count_of in places.items():
        assert count_of[expected[each.decode()]] >= 2, "of the third and the fourth time"


@pytest.mark.parametrize("committed", [False, True])
async def test_a_writer_whose_commit_was_cancelled_does_not_say_what_was_committed(
    stage, admin, monkeypatch, committed
):
    """Was: `kept` returned the position before it, so that the application sent the same records again."""
    admin.create_topic(stage.topic, 1, {"retention.ms": "-1"})
    stuck, end = asyncio.Event(), KafkaWire.end_transaction

    async def no_answer(*args, **options):
        if committed:
            await end(*args, **options)
        stuck.set()
        await asyncio.Event().wait()

    async def write(writer):
        async with writer.transaction() as transaction:
            begin = int(writer.kept("input") or 0)
            transaction.send(stage.topic, b"%d" % begin)
            transaction.keep("input", str(begin + 1))

    make = lambda: dedup.IdempotentWriter(stage.name, topics=[stage.topic], settings=stage.settings)  # noqa: E731
    async with make() as writer:
        await write(writer)
        with monkeypatch.context() as patched:
            patched.setattr(KafkaWire, "end_transaction", no_answer)
            cancelled = asyncio.create_task(write(writer))
            await stuck.wait()
            beside = asyncio.create_task(write(writer))
            await asyncio.sleep(0)
            cancelled.cancel()
            await asyncio.gather(cancelled, return_exceptions=True)
            with pytest.raises(InvariantBroken, match="interrupted"):
                await beside
        for _ in range(2):
            with pytest.raises(InvariantBroken, match="open a new one: its `kept` returns what was committed"):
                writer.kept("input")
            with pytest.raises(InvariantBroken, match="whoever sends them again may send them twice"):
                await write(writer)
    async with make() as writer:
        assert writer.kept("input") == ("2" if committed else "1")
        await write(writer)
    assert [message.value() for message in stage.read()] == ([b"0", b"1", b"2"] if committed else [b"0", b"1"])


async def test_a_writer_whose_record_was_refused_goes_on(stage, admin):
    admin.create_topic(stage.topic, 1, {"retention.ms": "-1", "max.message.bytes": "1000"})
    async with dedup.IdempotentWriter(stage.name, topics=[stage.topic], settings=stage.settings) as writer:
        for value in [b"one", random.Random(1).randbytes(5_000), b"two"]:
            expected = pytest.raises(RecordRefused) if len(value) > 1_000 else contextlib.nullcontext()
            with expected:
                async with writer.transaction() as transaction:
                    transaction.send(stage.topic, value)
                    transaction.keep("input", value[:3].hex())
        assert writer.kept("input") == b"two".hex()
    assert [message.value() for message in stage.read()] == [b"one", b"two"]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"value": "text"}, "its value is str, not bytes or None; encode it"),
        ({"value": 7}, "its value is int, not bytes or None; encode it"),
        ({"value": b"v", "key": "k"}, "its key is str, not bytes or None; encode it"),
        ({"value": b"v", "tracking_id": b"a"}, "its tracking_id is bytes, not str"),
        ({"value": b"v", "timestamp_ms": "now"}, "its timestamp_ms is str, not a number of milliseconds"),
        ({"value": b"v", "headers": [("h", "x")]}, "its header ('h', 'x') is not a pair of a str and bytes (or None)"),
        ({"value": b"v", "headers": [(b"h", b"x")]}, "its header (b'h', b'x') is not a pair of a str and bytes"),
        ({"value": b"v", "headers": {"h": b"x"}}, "its header 'h' is not a pair of a str and bytes (or None)"),
    ],
)
def test_a_record_that_is_not_of_bytes_is_refused_when_it_is_sent(record, said):
    """Was: the commit failed without naming the record, and the writer did not know what was committed."""
    made = Transaction({"t": 2})
    with pytest.raises(TypeError, match=re.escape(f"a record to topic 't' was not added to the transaction: {said}")):
        made.send("t", **record)
    assert not made.lines
    made.send("t", bytearray(b"v"), key=memoryview(b"k"), headers=[("h", None), ("h", b"x")], timestamp_ms=5)
    made.send("t", None, tracking_id="a")
    assert sum(map(len, made.lines.values())) == 2


def test_the_topics_of_a_writer_are_no_text():
    """Was: topic 'p' does not exist."""
    settings = dedup.load_settings(None, ["brokers=localhost:1"])
    with pytest.raises(
        TypeError, match=r"`topics` is the string 'payments', not a list .* write topics=\['payments'\]"
    ):
        dedup.IdempotentWriter("w", topics="payments", settings=settings)


async def test_transactions_side_by_side_are_one_after_the_other(stage, admin):
    admin.create_topic(stage.topic, 1, {"retention.ms": "-1"})

    async def write(writer, number):
        async with writer.transaction() as transaction:
            for _ in range(3):
                transaction.send(stage.topic, b"%d" % number)
            transaction.keep("last", str(number))

    async with dedup.IdempotentWriter(stage.name, topics=[stage.topic], settings=stage.settings) as writer:
        await asyncio.gather(*(write(writer, number) for number in range(10)))
    assert sorted(message.value() for message in stage.read()) == sorted(b"%d" % (n // 3) for n in range(30))


async def test_a_newer_writer_of_the_name_fences_the_older(stage, admin):
    admin.create_topic(stage.topic, 1, {"retention.ms": "-1"})
    make = lambda: dedup.IdempotentWriter(stage.name, topics=[stage.topic], settings=stage.settings)  # noqa: E731
    async with make() as older, make() as newer:
        for _ in range(2):
            with pytest.raises(TaskMigrated):
                async with older.transaction() as transaction:
                    transaction.send(stage.topic, b"older")
        async with newer.transaction() as transaction:
            transaction.send(stage.topic, b"newer")
    assert [message.value() for message in stage.read()] == [b"newer"]


FORGETS = {
    "transactional.id.expiration.ms": "1000",
    "transaction.remove.expired.transaction.cleanup.interval.ms": "100",
}


@pytest.mark.parametrize("overtaken", [False, True])
async def test_a_writer_that_was_idle_for_too_long_goes_on_unless_another_has_its_name(stage, overtaken):
    """Was: after 7 days without a record, a writer and `dedup ingest` stopped as if another process had taken over."""
    with EmbeddedKafka(properties=FORGETS) as node:
        admin_of(node.bootstrap).create_topic(stage.topic, 1, {"retention.ms": "-1"})
        settings = stage.settings.model_copy(update={"brokers": (node.bootstrap,)})
        make = lambda: dedup.IdempotentWriter(stage.name, topics=[stage.topic], settings=settings)  # noqa: E731

        async def write(writer, value):
            async with writer.transaction() as transaction:
                transaction.send(stage.topic, value)
                transaction.keep("last", value.decode())

        def forgotten():
            states = read_all(node.bootstrap, "__transaction_state")
            return any(f"{stage.name}.writer.0".encode() in each.key() and each.value() is None for each in states)

        async with make() as writer:
            await write(writer, b"one")
            await asyncio.to_thread(until, forgotten, "the coordinator has forgotten the writer")
            if overtaken:
                async with make() as newer:
                    with pytest.raises(TaskMigrated, match="another process has taken over"):
                        await write(writer, b"older")
                    await write(newer, b"two")
            else:
                await write(writer, b"two")
                assert writer.kept("last") == "two"
        assert [message.value() for message in read_all(node.bootstrap, stage.topic)] == [b"one", b"two"]


async def test_a_writer_that_is_overtaken_while_it_opens_does_not_fence_the_newer(monkeypatch):
    wire, topic = MemoryWire(lambda: 0), Topic("x-source-offsets", "0" * 32, 1)
    wire.create(topic)
    settings = Settings(brokers=["localhost:1"])
    make = lambda: outbox.TransactionalOutbox(wire, "x.writer.0", topic.name, settings, {topic.name: topic})  # noqa: E731
    older, newer = make(), make()

    async def overtaken():
        wire._ids["x.writer.0"].producer_id += 1_000  # as after the last epoch of a producer ID, or after its expiry
        await newer.open()

    monkeypatch.setattr(older, "_warn_if_sent_before", overtaken)
    with pytest.raises(TaskMigrated, match="another process has taken over"):
        await older.open()
    await newer.commit({}, {"input": b"1"})
    assert newer.positions == {"input": b"1"}


async def test_a_topic_that_is_not_there(stage):
    with pytest.raises(StateIncompatible, match="does not exist"):
        async with dedup.IdempotentWriter(stage.name, topics=[stage.topic], settings=stage.settings):
            pass


async def test_answers_lost_a_hundred_times_leave_each_record_once_and_in_order(stage, monkeypatch):
    """The connection is cut when the broker answers, so the writer can not know what arrived."""
    monkeypatch.setattr(outbox, "PAUSE_S", 0.01)
    with EmbeddedKafka(proxied=True) as node:
        listener = node.proxied
        admin_of(node.bootstrap).create_topic(stage.topic, 3)
        with RoughProxy(listener.broker_port, port=listener.proxy_port) as proxy:
            settings = stage.settings.model_copy(update={"brokers": (listener.bootstrap,)})
            sent = await write_through_cuts(stage, settings, proxy)
        found = read_all(node.bootstrap, stage.topic)
    numbers = [(message.partition(), int(message.value())) for message in found]
    assert sorted(number for _, number in numbers) == list(range(sent))
    for partition in range(3):
        own = [number for at, number in numbers if at == partition]
        assert own == sorted(own)
        assert own


async def test_a_stop_is_heard_while_no_broker_answers(stage, admin, monkeypatch):
    """A commit without a response is looked for in the positions topic, whose broker may be away for hours."""
    admin.create_topic(stage.topic, 1, {"retention.ms": "-1"})

    async def silent(_partition):
        raise NoAnswer("the broker is away")

    async with dedup.IdempotentWriter(stage.name, topics=[stage.topic], settings=stage.settings) as writer:
        monkeypatch.setattr(outbox, "DEADLINE_MS", 300)
        monkeypatch.setattr(writer._wire, "bounds", silent)
        monkeypatch.setattr(writer._outbox, "_stopped", lambda: True)
        with pytest.raises(BrokerUnavailable, match="stopped while no broker answered: topic"):
            await writer._outbox._happened(CommitUnknown("no answer"))


async def test_a_stop_is_heard_while_a_partition_is_offline(monkeypatch):
    """Was: as long as the coordinator answered, it tried again without a pause, and did not end."""
    stop, tries = asyncio.Event(), []

    class Offline:
        transactional_id = "x.ingest.0"

        async def prepare(self, _offsets):
            tries.append(1)
            if len(tries) == 3:
                stop.set()
            raise CommitUnknown("no leader is known.")

        def add(self, _batches):
            pass

    async def no(_unknown):
        return False

    settings = Settings(brokers=["localhost:1"])
    sender = outbox.TransactionalOutbox(None, "x.ingest.0", "x-source-offsets", settings, {}, stop.is_set)
    monkeypatch.setattr(sender, "_session", Offline())
    monkeypatch.setattr(sender, "_happened", no)
    with pytest.raises(BrokerUnavailable, match=r"stopped while no transaction could be committed: no leader is known"):
        await asyncio.wait_for(sender.commit({}, {}), 30)
    assert len(tries) == 3


async def write_through_cuts(stage, settings, proxy) -> int:
    dice, number = random.Random(6), 0
    async with dedup.IdempotentWriter(stage.name, topics=[stage.topic], settings=settings) as writer:
        while proxy.counts().cut < 100:
            cutting = asyncio.create_task(cut_soon(proxy, dice.random() * 0.01))
            async with writer.transaction() as transaction:
                for _ in range(20):
                    transaction.send(stage.topic, b"%d" % number, key=b"%d" % (number % 7))
                    number += 1
            await cutting
    return number


async def cut_soon(proxy, after_s):
    await asyncio.sleep(after_s)
    proxy.swallow_answers()


def count(work, events):
    for each in events:
        work.execute("INSERT INTO totals (n) VALUES (?)", (json.loads(each.value)["n"],))


def reader_of(stage, name="billing"):
    url = f"sqlite:///{stage.directory}/app.db"
    return dedup.IdempotentReader(
        name, topic=stage.topic, topology=sinking(stage, "sqlite:///unused"), url=url, settings=stage.settings
    )


def create_totals(stage):
    connection = sqlite3.connect(stage.directory / "app.db")
    connection.execute("CREATE TABLE IF NOT EXISTS totals (n INTEGER)")
    connection.commit()
    connection.close()


async def test_business_logic_counts_each_event_once(stage, admin):
    admin.create_topic(stage.topic, 2, {"retention.ms": "-1"})
    create_totals(stage)
    stage.send([event(number % 50) for number in range(200)])
    async with reader_of(stage) as reader:
        assert await reader.run(count, until_end=True) == 50
    stage.send([event(number) for number in range(40, 60)])
    failed = []

    def failing(work, events):
        count(work, events)
        failed.append(len(events))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        async with reader_of(stage) as reader:
            await reader.run(failing, until_end=True)
    assert failed
    async with reader_of(stage) as reader:
        assert await reader.run(count, until_end=True) == 10
    # Another application has its own view.
    async with reader_of(stage, "shipping") as reader:
        assert await reader.run(lambda *_: None, until_end=True) == 60
    totals = sqlite_rows(stage.directory / "app.db", "SELECT n FROM totals ORDER BY n")
    assert totals == [(number,) for number in range(60)]


@pytest.fixture
def fetched_ahead(monkeypatch):
    """The next answer has come before the last one is looked at, as where an application takes its time."""
    poll = FeedFetcher.poll

    async def and_the_next(fetcher, wanted):
        found = await poll(fetcher, wanted)
        await asyncio.wait(fetcher._flights.values())
        return found

    monkeypatch.setattr(FeedFetcher, "poll", and_the_next)


async def test_a_reader_is_at_the_end_when_it_has_handed_over_all_that_was_fetched(stage, admin, fetched_ahead):
    """Was: it left with records that were fetched, because the position of the fetch counted as its own."""
    admin.create_topic(stage.topic, 1, {"retention.ms": "-1"})
    stage.send([event(number, pad="x" * 100_000) for number in range(40)])  # in several answers of at most 1 MiB
    async with reader_of(stage) as reader:
        assert await reader.run(lambda *_: None, until_end=True) == 40


async def test_a_sink_is_at_the_end_when_it_has_written_all_that_was_fetched(stage, admin, fetched_ahead):
    """Was: behind an answer without records, such as one of an aborted transaction, it left with the next one."""
    admin.create_topic(stage.topic, 1, {"retention.ms": "-1"})
    producer = Producer({"bootstrap.servers": stage.kafka.bootstrap, "transactional.id": stage.name})
    producer.init_transactions(30)
    producer.begin_transaction()
    stage.send([event(number, pad="x" * 100_000) for number in range(15)], producer=producer)
    producer.abort_transaction(30)
    stage.send([event(number) for number in range(40)])
    assert (await stage.sink(sinking(stage, f"sqlite:///{stage.directory}/sink.db"))).inserted == 40


async def test_events_whose_commit_has_lost_its_answer_are_counted(stage, admin, monkeypatch):
    """Was: counted as 0, because the batch is not handed over again."""
    admin.create_topic(stage.topic, 1, {"retention.ms": "-1"})
    create_totals(stage)
    stage.send([event(number) for number in range(10)])
    commit, lost = SqliteConnection.commit, []

    def committed_in_silence(connection):
        commit(connection)
        if not lost:
            lost.append(connection)
            raise DatabaseAway("no answer")

    async with reader_of(stage) as reader:
        monkeypatch.setattr(SqliteConnection, "commit", committed_in_silence)
        assert await reader.run(count, until_end=True) == 10
    assert lost
    assert len(sqlite_rows(stage.directory / "app.db", "SELECT n FROM totals")) == 10


async def test_a_reader_that_was_broken_off_does_not_go_on_behind_what_it_dropped(stage, admin):
    admin.create_topic(stage.topic, 1, {"retention.ms": "-1"})
    create_totals(stage)
    stage.send([event(1)])
    async with reader_of(stage) as reader:
        with pytest.raises(ZeroDivisionError):
            await reader.run(lambda *_: 1 / 0, until_end=True)
        stage.send([event(2)])
        with pytest.raises(InvariantBroken, match="open a new one"):
            await reader.run(count)
    async with reader_of(stage) as reader:
        assert await reader.run(count, until_end=True) == 2


async def test_a_function_that_would_not_run_loses_no_event(stage, admin):
    """Was: the coroutine was never awaited, but its events were marked as seen."""
    admin.create_topic(stage.topic, 1, {"retention.ms": "-1"})
    create_totals(stage)
    stage.send([event(1), event(2)])

    async def coroutine(work, events):
        count(work, events)

    def generator(work, events):
        yield count(work, events)

    def handed_on(work, events):
        return coroutine(work, events)

    async with reader_of(stage) as reader:
        for wrong in (coroutine, generator):
            with pytest.raises(TypeError, match="Make it an ordinary function"):
                await reader.run(wrong, until_end=True)
        with pytest.raises(TypeError, match="No event was marked as seen"):
            await reader.run(handed_on, until_end=True)
    async with reader_of(stage) as reader:
        assert await reader.run(count, until_end=True) == 2


async def test_a_newer_reader_of_the_name_fences_the_older(stage, admin):
    admin.create_topic(stage.topic, 1, {"retention.ms": "-1"})
    create_totals(stage)
    async with reader_of(stage) as older, reader_of(stage) as newer:
        stage.send([event(1)])
        with pytest.raises(TaskMigrated):
            await older.run(count)
        assert await newer.run(count, until_end=True) == 0  # it looked at the end when it started
    async with reader_of(stage) as last:
        assert await last.run(count, until_end=True) == 1


async def test_a_reader_of_a_second_topic_needs_a_name_of_its_own(stage, admin):
    """Was: an event was skipped without a word if the other topic had an event with its ID."""
    admin.create_topic(stage.topic, 1, {"retention.ms": "-1"})
    admin.create_topic(f"{stage.topic}-refunds", 1, {"retention.ms": "-1"})
    create_totals(stage)
    stage.send([event(1)])
    async with reader_of(stage) as reader:
        assert await reader.run(count, until_end=True) == 1

    def refunds(name):
        url = f"sqlite:///{stage.directory}/app.db"
        rules = sinking(stage, "sqlite:///unused")
        return dedup.IdempotentReader(
            name, topic=f"{stage.topic}-refunds", topology=rules, url=url, settings=stage.settings
        )

    with pytest.raises(StateIncompatible, match=rf"'billing' reads topic '{stage.topic}'.*its own reader name"):
        await refunds("billing").__aenter__()
    async with refunds("refunds") as reader:
        assert await reader.run(count, until_end=True) == 0


async def test_a_reader_without_new_records_notices_added_partitions(stage, admin, monkeypatch):
    """Was: while all new records went to the added partition, nobody read them, and nothing was said."""
    monkeypatch.setattr(fenced_consumer, "_CHECK_EVERY_S", 0.0)
    admin.create_topic(stage.topic, 1, {"retention.ms": "-1"})
    create_totals(stage)
    async with reader_of(stage) as reader:
        assert await reader.run(count, until_end=True) == 0
        admin.add_partitions(stage.topic, 2)
        with pytest.raises(StateIncompatible, match="A restart reads the new partitions, too"):
            await reader.run(count)


async def test_a_record_without_an_id_stops_the_reader(stage, admin):
    admin.create_topic(stage.topic, 1, {"retention.ms": "-1"})
    create_totals(stage)
    stage.send([event(1), (b"k", b'{"n":1}', 1)])
    async with reader_of(stage) as reader:
        with pytest.raises(StateIncompatible, match="offset 1 has no usable tracking ID"):
            await reader.run(count, until_end=True)
    assert sqlite_rows(stage.directory / "app.db", "SELECT * FROM totals") == []


async def test_a_partition_without_a_leader_is_told_at_the_start(tmp_path, monkeypatch):
    """Was: `dedup sink` waited without a word, and no signal but SIGKILL ended it."""

    class Leaderless:
        async def bounds(self, partition):
            raise NoAnswer(f"{partition} has no leader")

        async def pause(self, pause_ms):
            await asyncio.sleep(pause_ms / 1000)

    monkeypatch.setattr(fenced_consumer, "START_WITHIN_S", 0.1, raising=False)
    topic, url = Topic("in", "id", 2), f"sqlite:///{tmp_path}/x.db"
    consumer = fenced_consumer.FencedConsumer(
        Leaderless(), FencedOffsets("x", topic.name, topic.topic_id), topic, url, lambda *_: None, gather_ms=0
    )
    with pytest.raises(BrokerUnavailable, match=r"has no leader.* Check the brokers, and that each partition"):
        await asyncio.wait_for(consumer.open([0, 1]), 10)
    await consumer.close()


def test_the_constraints_of_an_application_stay_deferred(postgres):
    """Was: the reader made them immediate, so its application could not write a child before its parent."""
    table = Table("dedup_seen", (("tracking_id", "BYTEA"),), ("tracking_id",), append=False)
    with contextlib.closing(connect(postgres)) as connection:
        connection.execute("CREATE TABLE dedup_seen (tracking_id BYTEA); CREATE TABLE parents (n INT PRIMARY KEY)")
        connection.execute("CREATE TABLE children (n INT REFERENCES parents DEFERRABLE INITIALLY DEFERRED)")
        make_staging(connection, table)
        with transaction(connection):
            connection.stage(table, [(b"a",)])
            connection.execute("INSERT INTO children VALUES (1)")
            connection.execute("INSERT INTO parents VALUES (1)")


def test_a_commit_without_a_response_that_is_still_under_way_is_waited_for(postgres):
    """Was: taken for one that had not happened, so the writer stopped as if another process had its partition."""
    offsets = FencedOffsets("billing", "orders", "id")
    opened = [contextlib.closing(connect(postgres)) for _ in range(3)]
    with opened[0] as lost, opened[1] as other, opened[2] as looking:
        make(lost, OFFSETS, OFFSETS_STATEMENT)
        offsets.take(lost, [0])
        lost.begin()
        offsets.advance(lost, {0: 7})
        with ThreadPoolExecutor() as pool:
            asked = pool.submit(offsets.happened, other, {0: 7})
            until(lambda: waiting_for_a_lock(looking), "the second connection waits")
            assert not asked.done()
            lost.commit()
            assert asked.result(timeout=30) is True


@pytest.mark.parametrize("change", ["UPDATE {} SET position = 3", "UPDATE {} SET epoch = 0", "DELETE FROM {}"])
def test_a_database_that_lost_commits_is_not_another_process(tmp_path, change):
    """Was: a failover to a replica that lagged behind was told as another process that had taken over."""
    offsets = FencedOffsets("billing", "orders", "id")
    with contextlib.closing(connect(f"sqlite:///{tmp_path}/x.db")) as connection:
        make(connection, OFFSETS, OFFSETS_STATEMENT)
        offsets.take(connection, [0])
        with transaction(connection):
            offsets.advance(connection, {0: 7})
        offsets.positions[0] = 7
        connection.execute(change.format(OFFSETS))
        with pytest.raises(DatabaseUnavailable, match="had committed 7: the database has lost commits"):
            offsets.advance(connection, {0: 9})
        connection.execute(f"DELETE FROM {OFFSETS}")
        FencedOffsets("billing", "orders", "id").take(connection, [0])
        connection.execute(f"UPDATE {OFFSETS} SET epoch = 2")
        with pytest.raises(TaskMigrated):
            offsets.happened(connection, {0: 9})


def waiting_for_a_lock(connection):
    return connection.query(
        "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%FOR UPDATE'"
    )


@pytest.mark.parametrize(
    ("url", "said"), [("a?b.db", "write '?' as %3F"), ("a#b.db", "'#' as %23"), ("5%.db", "'%' as %25")]
)
def test_an_address_that_sqlite_would_cut_is_refused(url, said):
    """Was: another file was opened, without what followed the character."""
    with pytest.raises(SettingsError, match=re.escape(said)):
        connect(f"sqlite:///{url}")


def test_an_address_may_be_quoted(tmp_path):
    with contextlib.closing(connect(f"sqlite:///{tmp_path}/a%3Fb%23c%25.db")) as connection:
        connection.execute("CREATE TABLE t (n INTEGER)")
    assert (tmp_path / "a?b#c%.db").exists()


def test_the_address_of_postgresql_may_say_how_long_to_wait(monkeypatch):
    given = {}

    def connected(**options):
        given.update(options)
        return SimpleNamespace(cursor=lambda: SimpleNamespace(execute=lambda *_: SimpleNamespace(rowcount=0)))

    monkeypatch.setattr("psycopg.connect", connected)
    PostgresConnection("postgresql://me@host/db?keepalives_idle=5&connect_timeout=3")
    assert (given["host"], given["dbname"]) == ("host", "db")
    waits = {name: str(given[name]) for name in ("keepalives_idle", "connect_timeout", "keepalives_count")}
    assert waits == {"keepalives_idle": "5", "connect_timeout": "3", "keepalives_count": "3"}


@pytest.mark.parametrize("waiting", [False, True])
async def test_a_connector_that_the_brokers_refuse_ends_and_says_why(waiting):
    """Was: after a change of the password, it waited for ever."""

    async def until_refused():
        raise BrokerUnavailable("the broker refuses the credentials")

    async def connector():
        stop = asyncio.Event()
        async with ended_by_refusal(SimpleNamespace(until_refused=until_refused), stop):
            await stop.wait()
            if waiting:
                raise BrokerUnavailable("stopped while no broker answered")

    with pytest.raises(BrokerUnavailable, match="refuses the credentials"):
        await connector()


async def test_a_connector_that_the_brokers_accept_ends_as_it_does():
    stop = asyncio.Event()
    accepting = SimpleNamespace(until_refused=asyncio.Event().wait)
    async with ended_by_refusal(accepting, stop):
        pass
    with pytest.raises(BrokerUnavailable, match="no broker answered"):
        async with ended_by_refusal(accepting, stop):
            raise BrokerUnavailable("no broker answered")
    assert not stop.is_set()
