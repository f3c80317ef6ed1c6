"""What an error code in a response to a read means for the worker, and a topic that no broker has any more."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
from aiokafka import errors as kafka_errors
from aiokafka.client import CoordinationType

from dedup.errors import BrokerUnavailable, StateIncompatible
from dedup.kafka.client import KafkaWire
from dedup.kafka.wire import LEADER_MOVED, NoAnswer, TopicNow, TopicPartition

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
    """Was: a restore waited for ever, because brokers name no leader, as during an election."""
    answers = {"now": 3}

    async def topics(names):
        return dict.fromkeys(names, answers["now"])

    async def nothing(*_):
        pass

    wire = KafkaWire.__new__(KafkaWire)
    cluster = SimpleNamespace(leader_for_partition=lambda _: None)
    wire._client = SimpleNamespace(cluster=cluster, add_topic=nothing, force_metadata_update=nothing)
    wire._topic_ids, wire._absent = ({PLACE.topic: "id"} if pinned else {}), defaultdict(int)
    monkeypatch.setattr(wire, "topics", topics)

    async def asked(times):
        for _ in range(times):
            with pytest.raises(NoAnswer, match="no leader is known"):
                await wire.leader(PLACE)

    await asked(399)
    answers["now"] = TopicNow("id", 1)  # one broker was starting
    await asked(1)
    answers["now"] = 3
    await asked(399)
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
