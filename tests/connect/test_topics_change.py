"""A topic that is made again, or given partitions, under a running `dedup sink` or `IdempotentReader`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from pathlib import Path

import pytest
from confluent_kafka.cimpl import NewPartitions

import dedup
from dedup.errors import StateIncompatible
from tests.connect.stage import lines, sqlite_rows
from tests.waiting import until

pytestmark = pytest.mark.broker
COLUMNS = "  columns: {id: id, n: {field: n, type: integer}}"
KEPT = {"retention.ms": "-1"}
INCOMPATIBLE = 3
BASE_MS = 1_700_000_000_000


def events(first, count):
    return [
        (b"e%d" % number, b'{"id":"e%d","n":%d}' % (number, number), BASE_MS + number)
        for number in range(first, first + count)
    ]


def change(stage, admin, how):
    """The topic is another one, or has a partition more; then records come."""
    if how == "made again":
        admin.delete_topic(stage.topic)
        admin.create_topic(stage.topic, 1, KEPT)
    else:
        for future in admin.client.create_partitions([NewPartitions(stage.topic, 2)]).values():
            future.result(timeout=30)
        admin.until_led(stage.topic, 2)
    stage.send(events(100, 100), partition=0)


@pytest.mark.parametrize(
    ("how", "says"), [("made again", "recreated"), ("partitions", "has 2 partitions now, and had 1 at the start")]
)
def test_the_sink_stops_before_it_writes_what_came_after(stage, admin, how, says):
    """Was: of a topic made again 90 of 100 rows were written, those above the old topic's offset."""
    admin.create_topic(stage.topic, 1, KEPT)
    path = stage.directory / "rows.db"
    file = stage.directory / "sink.yaml"
    file.write_text(stage.topology_text(f"sqlite:///{path}", COLUMNS), encoding="utf-8")
    stage.send(events(0, 10))
    sink = stage.start("sink", str(file))
    until(lambda: path.exists() and _count(path) == 10, "ten rows are written")
    sink.pause()
    change(stage, admin, how)
    sink.resume()
    assert sink.wait() == INCOMPATIBLE, sink.log
    assert says in sink.log
    # Was: that a restart reads the new partition, too, which a restart with the same `--partitions` does not.
    assert how != "partitions" or "add those from 1 on to the option of one process" in sink.log
    assert "Traceback" not in sink.log
    assert _count(path) == 10


async def test_a_sink_goes_on_without_the_records_that_retention_has_deleted(stage, admin):
    """Was: it named `dedup reset`, which resets the worker, but not the position of the sink."""
    admin.create_topic(stage.topic, 1, KEPT)
    path = stage.directory / "rows.db"
    topology = stage.topology(f"sqlite:///{path}", COLUMNS)
    stage.send(events(0, 10))
    await stage.sink(topology)
    stage.send(events(10, 20))
    admin.delete_below(stage.topic, {0: 15})
    says = f"delete the row of reader '{stage.name}', topic '{stage.topic}', and this partition .* table dedup_offsets"
    with pytest.raises(StateIncompatible, match=f"{stage.topic}/0 no longer holds offset 10.*{says}"):
        await stage.sink(topology)
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        where = (stage.name, stage.topic, 0)
        connection.execute("DELETE FROM dedup_offsets WHERE reader = ? AND topic = ? AND part = ?", where)
    assert (await stage.sink(topology)).inserted == 15
    assert _count(path) == 25


async def test_records_that_retention_deletes_before_the_first_was_read_are_missed(stage, admin):
    """Was: a sink that had not read anything yet began at the oldest record that was left, without a word."""
    admin.create_topic(stage.topic, 1, KEPT)
    topology = stage.topology(f"sqlite:///{stage.directory / 'rows.db'}", COLUMNS)
    await stage.sink(topology)
    stage.send(events(0, 10))
    admin.delete_below(stage.topic, {0: 5})
    with pytest.raises(StateIncompatible, match=f"{stage.topic}/0 no longer holds offset 0"):
        await stage.sink(topology)


def _count(path: Path) -> int:
    tables = sqlite_rows(path, "SELECT name FROM sqlite_master WHERE name = 'rows'")
    return len(sqlite_rows(path)) if tables else 0


@pytest.mark.parametrize(("how", "says"), [("made again", "recreated|deleted"), ("partitions", "has 2 partitions now")])
async def test_the_reader_stops_before_it_hands_over_what_came_after(stage, admin, how, says):
    admin.create_topic(stage.topic, 1, KEPT)
    stage.send(events(0, 10))
    seen: list[str] = []
    reader = dedup.IdempotentReader(
        "books",
        topic=stage.topic,
        topology=stage.topology("sqlite:///unused.db", COLUMNS),
        url=f"sqlite:///{stage.directory / 'reader.db'}",
        settings=stage.settings,
    )

    def handle(_work, found):
        seen.extend(json.loads(event.value)["id"] for event in found)

    async with reader:
        assert await reader.run(handle, until_end=True) == 10
        await asyncio.to_thread(change, stage, admin, how)
        with pytest.raises(StateIncompatible, match=says):
            await reader.run(handle)
    assert seen == [f"e{number}" for number in range(10)]


@pytest.mark.parametrize("how", ["deleted", "made again"])
async def test_ingest_does_not_go_on_in_a_topic_that_lacks_what_it_sent(stage, admin, how):
    """Was: it made the topic and sent only new lines, or said that all was sent."""
    (stage.incoming / "a.jsonl").write_bytes(lines(0, 10))
    assert (await stage.ingest()).records == 10
    assert (await stage.ingest()).records == 0
    admin.delete_topic(stage.topic)
    if how == "made again":
        admin.create_topic(stage.topic, 1, KEPT)
    for _ in range(2):
        with pytest.raises(StateIncompatible, match=r"was deleted and created again.* Nothing was sent"):
            await stage.ingest()
    admin.delete_topic(f"{stage.name}-source-offsets")
    assert (await stage.ingest()).records == len(stage.read()) == 10


@pytest.mark.parametrize("how", ["deleted", "made again"])
@pytest.mark.parametrize("which", ["output", "positions", "dead letters"])
def test_ingest_stops_if_one_of_its_topics_is_another_one(stage, admin, which, how):
    """Was: it went on in the new topic, which lacks what was sent before, or waited for ever for the deleted one.

    Without the positions, the next start would send everything again.
    """
    topic = {"positions": f"{stage.name}-source-offsets", "dead letters": f"{stage.name}.dead-letter"}.get(
        which, stage.topic
    )
    path = stage.incoming / "a.jsonl"
    path.write_bytes(lines(0, 10))
    ingest = stage.start("ingest", str(stage.ingest_file(stage.files())))
    until(lambda: len(stage.read()) == 10, lambda: f"ten lines are sent:\n{ingest.log}")
    ingest.pause()
    partitions = len(admin.end_offsets(topic))
    admin.delete_topic(topic)
    if how == "made again":
        admin.create_topic(topic, partitions, KEPT)
    with path.open("ab") as file:
        file.write(lines(10, 10) + b"no json\n")
    ingest.resume()
    assert ingest.wait() == INCOMPATIBLE, ingest.log
    assert f"topic {topic!r} was deleted" in ingest.log
    assert "restore it first: without the positions in it, a restart sends everything again" in ingest.log
    assert "Traceback" not in ingest.log
    if which != "output":
        assert len(stage.read()) == 10
    elif how == "made again":
        assert stage.read() == []


async def test_ingest_says_that_it_sends_everything_again(stage, admin, caplog):
    (stage.incoming / "a.jsonl").write_bytes(lines(0, 10))
    await stage.ingest()
    assert caplog.messages == []
    admin.delete_topic(f"{stage.name}-source-offsets")
    assert (await stage.ingest()).records == 10
    says = f"topic '{stage.name}-source-offsets' holds no position, so the source is sent from its start"
    assert any(says in message for message in caplog.messages)
