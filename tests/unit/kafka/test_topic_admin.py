"""What brokers say of topics, and how long they are told to keep a group's offsets that are set from outside."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiokafka.errors import KafkaConnectionError, NodeNotReadyError, TopicAuthorizationFailedError
from aiokafka.protocol.commit import OffsetCommitRequest_v3

from dedup.errors import BrokerUnavailable, CommitUnknown
from dedup.kafka.authorization import Rights
from dedup.kafka.client import KafkaWire
from dedup.kafka.connection import Connection
from dedup.kafka.topic_admin import FOR_EVER_MS, Admin, Group, WantedTopic, connected
from dedup.kafka.wire import TopicPartition
from dedup.settings import Security


class Coordinator:
    """Takes every commit, and remembers it."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def ask_group(self, group: str, request: Any, codes: Any) -> Any:
        self.asked.append(request.build(OffsetCommitRequest_v3))
        return 0, SimpleNamespace(topics=[("letters", [(0, 0)])])


@pytest.mark.parametrize(("for_ever", "kept_ms"), [(False, -1), (True, FOR_EVER_MS)])
def test_offsets_are_kept_as_long_as_the_broker_keeps_them_or_for_ever(for_ever: bool, kept_ms: int) -> None:
    coordinator = Coordinator()
    group = Group(cast("KafkaWire", coordinator), "orders.replay-mark")
    asyncio.run(group.set_offsets({TopicPartition("letters", 0): 17}, for_ever=for_ever))
    (request,) = coordinator.asked
    assert request.retention_time == kept_ms
    assert request.topics == [("letters", [(0, 17, "")])]


class OneLeaderLeft:
    """Describes a topic of four partitions, of which one has a leader."""

    async def _send_request(self, _request: Any) -> Any:
        partitions = [(0 if number == 1 else 5, number, 1 if number == 1 else -1, 0) for number in (3, 1, 0, 2)]
        return SimpleNamespace(topics=[(0, "letters", bytes(16), False, partitions, 0)])

    async def describe_configs(self, _resources: Any) -> list[Any]:
        return []

    async def close(self) -> None:
        pass


def test_partitions_without_a_leader_are_known() -> None:
    async def topics() -> Any:
        admin = Admin(Connection(("localhost:1",), Security()))
        admin._client = cast("Any", OneLeaderLeft())
        return await admin.topics(["letters"])

    found = asyncio.run(topics())["letters"]
    assert (found.partitions, found.leaderless) == (4, (0, 2, 3))


class Election:
    """An admin client whose cluster has no controller for the first updates of the metadata, and then a silent one."""

    def __init__(self, *codes: int | Exception, updates: int = 0) -> None:
        self.codes = list(codes)
        """What the controller answers to one request after the other; the last answer is repeated."""
        self.updates = updates
        """How many updates name no controller."""
        self.asked = 0
        self.cluster = SimpleNamespace(controller=None)
        self._client = self

    async def force_metadata_update(self) -> bool:
        self.updates -= 1
        self.cluster.controller = SimpleNamespace(nodeId=1) if self.updates < 0 else None
        return True

    async def _send_to_controller(self, _request: Any) -> Any:
        assert self.cluster.controller.nodeId == 1
        return self.answer()

    def answer(self) -> Any:
        self.asked += 1
        code = self.codes[min(self.asked, len(self.codes)) - 1]
        if isinstance(code, Exception):
            raise code
        return SimpleNamespace(topic_errors=[("letters", code, None)], topic_error_codes=[("letters", code)])

    async def delete_topics(self, _names: list[str]) -> Any:
        return await self._send_to_controller(None)

    async def _send_request(self, _request: Any) -> Any:
        self.answer()
        return SimpleNamespace(topics=[])

    async def describe_configs(self, _resources: list[Any]) -> list[Any]:
        return []

    async def close(self) -> None:
        pass


Call = Callable[[Admin], Awaitable[Any]]


def create(admin: Admin) -> Awaitable[list[str]]:
    return admin.create([WantedTopic("letters", 1, 1, {})])


def delete(admin: Admin) -> Awaitable[None]:
    return admin.delete(["letters"])


def topics(admin: Admin) -> Awaitable[object]:
    return admin.topics(["letters"])


def asked_of(cluster: Election, call: Call, *, patience_ms: int) -> Any:
    async def ask() -> Any:
        admin = Admin(Connection(("localhost:1",), Security(), patience_ms=patience_ms))
        admin._client = cast("Any", cluster)
        return await call(admin)

    return asyncio.run(ask())


@pytest.mark.parametrize(("call", "answer"), [(create, ["letters"]), (delete, None), (topics, {})])
def test_a_controller_that_dies_is_asked_again_once_there_is_another(call: Call, answer: object) -> None:
    cluster = Election(TimeoutError(), NodeNotReadyError(), 0, updates=1)
    assert asked_of(cluster, call, patience_ms=60_000) == answer
    assert cluster.asked == 3


@pytest.mark.parametrize("first", [TimeoutError(), 7, 41])
def test_a_topic_that_an_unanswered_attempt_has_created_counts_as_created(first: int | Exception) -> None:
    exists = 36
    assert asked_of(Election(first, exists), create, patience_ms=60_000) == ["letters"]
    assert asked_of(Election(exists), create, patience_ms=60_000) == []


@pytest.mark.parametrize("call", [create, delete])
@pytest.mark.parametrize("cluster", [Election(TimeoutError()), Election(41), Election(updates=1_000_000)])
def test_a_cluster_without_a_controller_is_told_in_a_sentence(call: Call, cluster: Election) -> None:
    with pytest.raises(BrokerUnavailable, match="Check that all brokers and the controller are running"):
        asked_of(cluster, call, patience_ms=0)


def test_a_refusal_is_not_repeated() -> None:
    cluster = Election(TopicAuthorizationFailedError())
    with pytest.raises(BrokerUnavailable, match="TopicAuthorizationFailed"):
        asked_of(cluster, topics, patience_ms=60_000)
    assert cluster.asked == 1


class Late:
    """Stands for aiokafka's clients: no broker answers their first attempt to connect."""

    def __init__(self) -> None:
        self.attempts = 0
        self.closed = False
        self.cluster = SimpleNamespace(brokers=lambda: {1})
        self._client = self

    async def start(self) -> None:
        self.attempts += 1
        if self.attempts == 1:
            raise KafkaConnectionError("Unable to bootstrap")

    bootstrap = start

    async def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("kind", [Admin, Rights])
async def test_a_broker_that_does_not_answer_at_once_is_waited_for(kind: type[Admin | Rights]) -> None:
    """Was: exit code 5 at the first attempt, though the process had just been connected."""
    client = Late()
    made = kind(Connection(("localhost:1",), Security()))
    made._client = cast("Any", client)  # type: ignore[misc]
    async with made:
        assert client.attempts == 2
    assert client.closed


@pytest.mark.parametrize("kind", [Admin, Rights])
async def test_a_client_that_cannot_connect_is_closed(kind: type[Admin | Rights]) -> None:
    client = Late()
    made = kind(Connection(("localhost:1",), Security(), patience_ms=0))
    made._client = cast("Any", client)  # type: ignore[misc]
    with pytest.raises(BrokerUnavailable, match=r"^no broker answers at localhost:1\. localhost:1: nothing"):
        await made.__aenter__()
    assert client.closed


async def test_a_command_whose_transaction_is_not_confirmed_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Was: exit code 1, and `a new epoch will reveal the outcome`."""

    class Wire:
        def __init__(self, connection: Connection) -> None:
            self.connection = connection
            self.stopped = False
            wires.append(self)

        async def start(self) -> None:
            """Connect at once."""

        async def stop(self) -> None:
            self.stopped = True

    class There(Late):
        async def start(self) -> None:
            """Connect at once."""

    async def work(_wire: object, _admin: Admin) -> None:
        raise CommitUnknown("t.layout: EndTxn got no answer.")

    wires: list[Wire] = []
    monkeypatch.setattr("dedup.kafka.topic_admin.KafkaWire", Wire)
    monkeypatch.setattr("dedup.kafka.topic_admin.AIOKafkaAdminClient", lambda **_: There())
    monkeypatch.setattr("dedup.kafka.topic_admin.back_off", lambda _: set())
    with pytest.raises(
        BrokerUnavailable, match=r"EndTxn got no answer\. Check the brokers, .* run the same command again"
    ):
        await connected(Connection(("localhost:1",), Security()), work)
    assert [wire.stopped for wire in wires] == [True]
