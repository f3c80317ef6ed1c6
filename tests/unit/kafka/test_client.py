"""What an error code in a response to a read means for the worker, a topic that no broker has any more, and the
pauses before the next attempt to connect.
"""

import asyncio
from types import SimpleNamespace

import pytest
from aiokafka import errors as kafka_errors
from aiokafka.client import AIOKafkaClient, CoordinationType
from aiokafka.structs import BrokerMetadata

from dedup.errors import BrokerUnavailable, StateIncompatible
from dedup.kafka import client as client_module
from dedup.kafka.client import KafkaWire, back_off
from dedup.kafka.transactional_producer import AGAIN_ANNOUNCING, COMPRESSION, EPOCH_OVER, FENCED, REFUSED
from dedup.kafka.wire import LEADER_MOVED, UNSTABLE_OFFSET, NoAnswer, TopicNow, TopicPartition, error_name

PLACE = TopicPartition("t.changelog", 0)


@pytest.mark.parametrize(
    ("codes", "kind"),
    [
        (sorted(LEADER_MOVED), NoAnswer),
        # An unknown error of the broker, and a timeout: the same request may succeed later.
        ([-1, 7], NoAnswer),
        ([29], BrokerUnavailable),
        ([1, 2], StateIncompatible),
    ],
)
def test_an_error_code_of_a_read(codes, kind):
    wire = KafkaWire.__new__(KafkaWire)
    wire._client = SimpleNamespace(force_metadata_update=lambda: None)
    for code in codes:
        error = wire._read_failed(PLACE, code, 5)
        assert type(error) is kind, code
        assert "t.changelog/0" in str(error)


@pytest.mark.parametrize("pinned", [True, False])
async def test_a_topic_that_no_response_has_was_deleted(monkeypatch, pinned):
    """Was: a restore waited for ever, because brokers name no leader, as during an election; and then, a worker with 64
    partitions stopped after 2 s, when a broker responded before it knew its topics."""
    answers = {"now": 3}

    async def topics(names):
        return dict.fromkeys(names, answers["now"])

    async def nothing(*_):
        pass

    wire = KafkaWire.__new__(KafkaWire)
    cluster = SimpleNamespace(leader_for_partition=lambda _: None)
    wire._client = SimpleNamespace(cluster=cluster, add_topic=nothing, force_metadata_update=nothing)
    wire._topic_ids, wire._absent_s = ({PLACE.topic: "id"} if pinned else {}), {}
    monkeypatch.setattr(wire, "topics", topics)
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr(client_module.asyncio, "get_running_loop", lambda: SimpleNamespace(time=lambda: clock.now_s))

    async def asked(seconds):
        for _ in range(seconds):
            with pytest.raises(NoAnswer, match="no leader is known"):
                await wire.leader(PLACE)
            clock.now_s += 1

    await asked(20)
    answers["now"] = TopicNow("id", 1)  # one broker was starting
    await asked(1)
    answers["now"] = 3
    await asked(5)
    clock.now_s += 60  # nothing was read in the meantime
    for _ in range(64):  # as many partitions ask at the same time
        await asked(1)
        clock.now_s -= 1
    await asked(20)
    with pytest.raises(StateIncompatible if pinned else NoAnswer, match="was deleted" if pinned else "no leader"):
        await wire.leader(PLACE)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (kafka_errors.GroupAuthorizationFailedError, BrokerUnavailable),
        (kafka_errors.TransactionalIdAuthorizationFailed, BrokerUnavailable),
        (kafka_errors.GroupCoordinatorNotAvailableError, NoAnswer),
    ],
)
async def test_a_coordinator_that_may_not_be_looked_up_is_no_outage(error, expected):
    """Was: a worker without rights to its transactional IDs looked for their coordinator for ever."""

    async def coordinator_lookup(*_):
        raise error

    wire = KafkaWire.__new__(KafkaWire)
    wire._client = SimpleNamespace(coordinator_lookup=coordinator_lookup)
    wire.connection, wire._coordinators = SimpleNamespace(request_timeout_ms=0), {}
    with pytest.raises(expected, match=r"t\.dedup\.0"):
        await wire._coordinator(CoordinationType.TRANSACTION, "t.dedup.0")


class Listener:
    """Stands for aiokafka's `create_conn`: notes when it was asked, and refuses while it is closed."""

    def __init__(self):
        self.asked_s, self.open, self.up = [], False, True

    async def __call__(self, *_, **__):
        self.asked_s.append(asyncio.get_running_loop().time())
        await asyncio.sleep(0)
        if not self.open:
            raise ConnectionRefusedError
        return self

    def connected(self):
        return self.up


@pytest.fixture
async def listener(monkeypatch):
    made = Listener()
    monkeypatch.setattr("aiokafka.client.create_conn", made)
    return made


NODE = 7


def client():
    made = AIOKafkaClient()
    made.cluster._brokers[NODE] = BrokerMetadata(NODE, "127.0.0.1", 1, None)
    back_off(made)
    return made


async def until_ready(client):
    while not await client.ready(NODE):  # noqa: ASYNC110  # nothing but an attempt tells
        await asyncio.sleep(0.001)


async def test_an_unreachable_node_is_tried_after_pauses_that_double(listener):
    one = client()
    while len(listener.asked_s) < 5:
        # Several requests at once, as a worker's.
        assert not any(await asyncio.gather(*(one.ready(NODE) for _ in range(3))))
        await asyncio.sleep(0.001)
    # The first three were under way before the first one had failed.
    first_s, _, _, second_s, third_s = listener.asked_s
    assert second_s - first_s >= 0.05
    assert third_s - second_s >= 0.1


async def test_a_node_that_no_connection_can_be_made_to_is_noted_until_somebody_has_looked(listener):
    one = AIOKafkaClient()
    one.cluster._brokers[NODE] = BrokerMetadata(NODE, "127.0.0.1", 1, None)
    failed = back_off(one)
    assert not await one.ready(NODE)
    assert failed == {NODE}
    failed.clear()
    listener.open = True
    await until_ready(one)
    assert not failed


async def test_a_node_that_is_reachable_again_is_used_at_once(listener):
    one = client()
    while len(listener.asked_s) < 3:
        assert not await one.ready(NODE)
        await asyncio.sleep(0.001)
    listener.open = True
    await until_ready(one)
    asked = len(listener.asked_s)
    assert await one.ready(NODE)
    assert len(listener.asked_s) == asked
    listener.up = False
    # The connection was lost, and the next attempt needs no pause.
    assert await one.ready(NODE)
    assert len(listener.asked_s) == asked + 1


async def test_a_connection_that_is_open_is_used_while_another_one_to_its_node_fails(listener):
    one = client()
    listener.open = True
    assert await one.ready(NODE)
    listener.open = False
    assert not await one.ready(NODE, group="restore")
    assert not await one.ready(NODE, group="restore")
    assert await one.ready(NODE)


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (-1, "UnknownError"),
        (47, "InvalidProducerEpoch"),
        (90, "ProducerFenced"),
        (87, "InvalidRecord"),
        (999, "error 999"),
    ],
)
def test_an_error_has_its_name_also_if_aiokafka_does_not_know_it(code: int, name: str) -> None:
    """Was: a fenced worker logged that the coordinator answered UnknownError."""
    assert error_name(code) == name


def test_the_codes_that_a_session_tells_apart_have_names() -> None:
    codes = FENCED | REFUSED | EPOCH_OVER | AGAIN_ANNOUNCING | LEADER_MOVED | {COMPRESSION, UNSTABLE_OFFSET}
    assert [code for code in codes if error_name(code).startswith(("error ", "UnknownError"))] == []
