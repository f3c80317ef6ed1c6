"""Describes, creates, and deletes topics, and manages consumer groups without joining them.

This module checks every error code, because aiokafka's admin client ignores failures to create topics.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment
from aiokafka.errors import KafkaError, NodeNotReadyError, for_code
from aiokafka.protocol.admin import DeleteGroupsRequest, DescribeGroupsRequest
from aiokafka.protocol.commit import OffsetCommitRequest
from aiokafka.structs import TopicPartition as AiokafkaTopicPartition

from dedup.errors import BrokerUnavailable, CommitUnknown, DedupError
from dedup.kafka.client import Codes, KafkaWire, back_off, grouped, metadata_request, sendable
from dedup.kafka.connection import Connection, connect
from dedup.kafka.record_batch import BATCH_BYTES, Limit
from dedup.kafka.requests import READ_CONFIGS, UNKNOWN_TOPIC, CreateTopicsRequest_v4
from dedup.kafka.wire import COORDINATOR_MOVED, NoAnswer, TopicPartition, error_name, patience

if TYPE_CHECKING:
    from dedup.settings import Settings

T = TypeVar("T")

LOOK_AGAIN_S: Final = 0.1
_ALREADY_EXISTS: Final = 36
_NO_CONTROLLER: Final = frozenset({7, 41})
"""Error codes for a request that timed out at the controller or that went to a former controller."""
_NON_EMPTY: Final = 68
_NOT_FOUND: Final = 69
PAUSE_MS: Final = 100
DEADLINE_MS: Final = 30_000
_BROKERS_RETENTION: Final = -1
BROKER_DEFAULT: Final = -1
"""The replication factor or partition count that stands for the brokers' default (KIP-464)."""
FOR_EVER_MS: Final = 100 * 365 * 86_400_000
"""A retention of 100 years. Brokers add the retention to the current time, so the largest integer would overflow."""
_MADE_BY_THE_BROKER: Final = re.compile(r"-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic that exists in the cluster."""

    name: str
    topic_id: str
    partitions: int
    configs: Mapping[str, str] = field(default_factory=dict)
    leaderless: tuple[int, ...] = ()
    """The numbers of the partitions without a leader, which nobody can read from or write to."""

    @property
    def places(self) -> list[TopicPartition]:
        """All partitions of the topic."""
        return [TopicPartition(self.name, number) for number in range(self.partitions)]

    @property
    def max_record_bytes(self) -> int:
        """The maximum size of a batch, and thus of a record, that the topic accepts (`max.message.bytes`)."""
        return int(self.configs.get("max.message.bytes", 1_048_588))

    @property
    def limit(self) -> Limit | None:
        """The topic's batch limits, or None if the principal may not read the topic's configs."""
        return Limit.of(self.configs)

    @property
    def fitting_bytes(self) -> int:
        """The maximum uncompressed size at which the topic certainly accepts a batch of several records."""
        limit = self.limit
        return BATCH_BYTES if limit is None else limit.surely_fits_bytes


@dataclass(frozen=True, slots=True)
class WantedTopic:
    """A topic that `Admin.create` should create."""

    name: str
    partitions: int
    replication_factor: int
    configs: Mapping[str, str]


class Admin:
    """Administers topics. Use `Admin` with ``async with``, which raises BrokerUnavailable if no broker responds; see
    `connect`.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection: Final = connection
        self._client = AIOKafkaAdminClient(**connection.client_options())
        back_off(self._client._client)  # noqa: SLF001  # the admin client has no public API for this

    async def __aenter__(self) -> Self:
        try:
            await connect(self._connection, self._client._client, self._client.start)  # noqa: SLF001  # as in `__init__`
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def topics(self, names: Iterable[str]) -> dict[str, Topic]:
        """Return the named topics that exist, including their IDs and the configs that `READ_CONFIGS` lists.

        Raises BrokerUnavailable if no broker answers within `patience_ms`, or if a broker rejects the request.
        """
        request = metadata_request(sorted(set(names)))
        # The client has no request for topic IDs.
        answer = await self._insist("describing topics", lambda: self._client._send_request(sendable(request)))  # noqa: SLF001
        found: dict[str, tuple[str, int, tuple[int, ...]]] = {}
        for code, name, topic_id, _, partitions, *_rest in answer.topics:
            if code not in {0, UNKNOWN_TOPIC}:
                raise _refused(f"describing topic {name!r}", code)
            if code == 0:
                leaderless = sorted(number for _, number, leader, *_ in partitions if leader < 0)
                found[name] = topic_id.hex(), len(partitions), tuple(leaderless)
        configs = await self._configs(sorted(found))
        return {
            name: Topic(name, topic_id, count, configs.get(name, {}), leaderless)
            for name, (topic_id, count, leaderless) in found.items()
        }

    async def settled(self, names: Iterable[str]) -> dict[str, Topic]:
        """Wait until the named topics exist, and return them.

        Raises BrokerUnavailable if a topic is still missing after `patience_ms`.
        """
        wanted = set(names)
        deadline = asyncio.get_running_loop().time() + self._connection.patience_ms / 1000
        while True:
            have = await self.topics(wanted)
            missing = sorted(wanted - set(have))
            if not missing:
                return have
            if asyncio.get_running_loop().time() >= deadline:
                raise BrokerUnavailable(
                    f"topics {', '.join(map(repr, missing))} were created, but the broker does not know them after "
                    f"{self._connection.patience_ms / 1000:.0f} s. Look at the controller's log."
                )
            await asyncio.sleep(LOOK_AGAIN_S)

    async def _configs(self, names: Sequence[str]) -> dict[str, dict[str, str]]:
        if not names:
            return {}
        resources = [ConfigResource(ConfigResourceType.TOPIC, name, dict.fromkeys(READ_CONFIGS, "")) for name in names]
        found: dict[str, dict[str, str]] = {}
        what = "describing the configs of topics"
        for answer in await self._insist(what, lambda: self._client.describe_configs(resources)):
            for code, _, _, name, entries in answer.resources:
                # Without permission to describe the configs, defaults are assumed.
                if code == 0:
                    found[name] = {entry[0]: entry[1] for entry in entries if entry[1] is not None}
        return found

    async def create(self, topics: Sequence[WantedTopic]) -> list[str]:
        """Create the missing topics, and return their names.

        Raises BrokerUnavailable if no controller answers within `patience_ms`, or if the broker rejects a topic.
        """
        if not topics:
            return []
        wanted: list[Any] = [
            (topic.name, topic.partitions, topic.replication_factor, [], list(topic.configs.items()))
            for topic in topics
        ]
        request = CreateTopicsRequest_v4(wanted, self._connection.request_timeout_ms, False)  # noqa: FBT003  # positional protocol fields
        created = {0}

        async def ask() -> list[str]:
            await self._find_controller()
            try:
                # The client's own `create_topics` does not accept -1, which means the brokers' default.
                answer = await self._client._send_to_controller(sendable(request))  # noqa: SLF001
                made: list[str] = []
                for name, code, *rest in answer.topic_errors:
                    if code in created:
                        made.append(name)
                    elif code != _ALREADY_EXISTS:
                        raise _failed(f"creating topic {name!r}", code, str(rest[0]) if rest else "")
            except (KafkaError, OSError):
                # This attempt may have created topics, which the next attempt then finds.
                created.add(_ALREADY_EXISTS)
                raise
            return made

        return await self._insist(f"creating topics {', '.join(topic.name for topic in topics)}", ask)

    async def delete(self, names: Sequence[str]) -> None:
        """Delete the named topics that exist.

        Raises BrokerUnavailable if no controller answers within `patience_ms`, or if the broker refuses to delete a
        topic.
        """
        if not names:
            return

        async def ask() -> None:
            await self._find_controller()
            answer = await self._client.delete_topics(list(names))
            for name, code in answer.topic_error_codes:
                if code not in {0, UNKNOWN_TOPIC}:
                    raise _failed(f"deleting topic {name!r}", code, "")

        await self._insist(f"deleting topics {', '.join(names)}", ask)

    async def _find_controller(self) -> None:
        """Raise NodeNotReadyError if the brokers name no controller, because the client does not check this."""
        client = self._client._client  # noqa: SLF001  # the admin client has no public API for this
        if client.cluster.controller is None:
            await client.force_metadata_update()
        if client.cluster.controller is None:
            raise NodeNotReadyError("the brokers name no controller")

    async def _insist(self, what: str, ask: Callable[[], Awaitable[T]]) -> T:
        """Repeat an idempotent request until it succeeds, and return the response.

        Raises BrokerUnavailable after `patience_ms` or after a permanent error.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._connection.patience_ms / 1000
        while True:
            try:
                return await ask()
            except (KafkaError, OSError) as error:  # TimeoutError is an OSError
                passes = error.retriable if isinstance(error, KafkaError) else True
                if not passes or loop.time() >= deadline_s:
                    raise BrokerUnavailable(
                        f"{what} failed, because the brokers gave no usable answer: {error!r}. Check that all brokers "
                        "and the controller are running; then run the command again."
                    ) from error
            await asyncio.sleep(LOOK_AGAIN_S)
            # With new metadata, the client sends the request to another broker if the first one is gone.
            await self._client._client.force_metadata_update()  # noqa: SLF001

    async def delete_records(self, before: Mapping[TopicPartition, int]) -> None:
        """Delete the records below the given offset of each partition (KIP-107)."""
        wanted = {AiokafkaTopicPartition(*tp): RecordsToDelete(before_offset=offset) for tp, offset in before.items()}
        if not wanted:
            return
        try:
            await self._client.delete_records(wanted)
        except (KafkaError, OSError) as error:
            raise BrokerUnavailable(
                f"deleting records of {', '.join(sorted({tp.topic for tp in before}))} failed: {error!r}. "
                f"Check that the principal may delete there."
            ) from error


def _failed(what: str, code: int, why: str) -> Exception:
    """Return the error for a controller's error code. The error is retriable if another attempt may succeed."""
    passing: Exception = for_code(code)(what)
    return passing if code in _NO_CONTROLLER else _refused(what, code, why)


def _refused(what: str, code: int, why: str = "") -> BrokerUnavailable:
    return BrokerUnavailable(
        f"{what} was refused: {error_name(code)} {why}".rstrip()
        + ". Check the principal's permissions and the cluster's limits, or create the topic by hand."
    )


def in_event_loop() -> bool:
    """Return whether this thread runs an event loop, as a notebook's kernel does."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def run_in_new_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a new event loop, and return its result. If this thread already runs an event loop, block it,
    and run the new event loop in another thread.
    """
    if not in_event_loop():
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def on_cluster(settings: Settings, client_id: str, work: Callable[[KafkaWire, Admin], Awaitable[T]]) -> T:
    """Connect to the cluster, call ``work``, and return its result. Raises BrokerUnavailable if no broker responds."""
    return run_in_new_loop(connected(Connection.of(settings, client_id=client_id), work))


async def connected(connection: Connection, work: Callable[[KafkaWire, Admin], Awaitable[T]]) -> T:
    """Do the same as `on_cluster`, but in the current event loop.

    The requests that ``work`` sends are repeated for at most the connection's `patience_ms`. ``work`` must be safe to
    repeat after CommitUnknown, for which `connected` raises BrokerUnavailable.
    """
    wire = KafkaWire(connection)
    await wire.start()
    try:
        with patience(connection.patience_ms / 1000):
            async with Admin(wire.connection) as admin:
                return await work(wire, admin)
    except CommitUnknown as error:
        raise BrokerUnavailable(
            f"the brokers did not confirm a transaction, so it is unknown whether it took effect: {error} Check the "
            "brokers, and that each partition has a leader; then run the same command again, which finds out and "
            "completes what is left."
        ) from error
    finally:
        await wire.stop()


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A member of a consumer group."""

    member_id: str
    """The ID that the broker gave the member. A restarted process gets a new member ID."""
    worker_id: str
    """The member's static ID, or its client ID if it has no static ID."""
    host: str
    partitions: tuple[TopicPartition, ...]


class Group:
    """Manages a consumer group without joining it. Every method raises BrokerUnavailable if its request fails."""

    def __init__(self, wire: KafkaWire, name: str) -> None:
        self._wire: Final = wire
        self._name: Final = name

    async def members(self) -> list[GroupMember]:
        """Return the members with their assignments, or an empty list if the group does not exist."""
        request = DescribeGroupsRequest([self._name])
        answer = await self._insist("describing", request, lambda answer: [answer.groups[0][0]])
        members = answer.groups[0][5]
        return sorted((_member(*fields[:5]) for fields in members), key=lambda member: member.worker_id)

    async def refuse_members(self) -> None:
        """Raise DedupError if the group has members."""
        members = await self.members()
        if members:
            names = ", ".join(f"{member.worker_id} at {member.host}" for member in members)
            raise DedupError(
                f"the group {self._name!r} has members: {names}. Nothing was changed; stop these workers. If one of "
                "them was killed, wait for its session timeout."
            )

    async def delete(self) -> None:
        """Delete the group and its offsets if the group exists. Raises BrokerUnavailable if the group has members."""
        if not await self.delete_unless_joined():
            raise self._refused("deleting", _NON_EMPTY)

    async def delete_unless_joined(self) -> bool:
        """Delete the group and its offsets unless the group has members. Return True if the group no longer exists."""
        request = DeleteGroupsRequest([self._name])
        fine = {_NON_EMPTY, _NOT_FOUND}
        answer = await self._insist("deleting", request, lambda answer: [answer.results[0][1]], fine)
        return bool(answer.results[0][1] != _NON_EMPTY)

    async def set_offsets(
        self, offsets: Mapping[TopicPartition, int], *, metadata: str = "", for_ever: bool = False
    ) -> None:
        """Set the offsets of a group that has no members, and store ``metadata`` with each offset.

        If ``for_ever`` is set, the broker keeps the offsets regardless of `offsets.retention.minutes`, because
        OffsetCommit versions 2 to 4 carry their own retention time (KIP-211).
        """
        topics = grouped((topic, (partition, offset, metadata)) for (topic, partition), offset in offsets.items())
        kept_ms = FOR_EVER_MS if for_ever else _BROKERS_RETENTION
        request = OffsetCommitRequest(self._name, -1, "", kept_ms, topics)
        await self._insist(
            "setting offsets of", request, lambda answer: [code for _, parts in answer.topics for _, code in parts]
        )

    async def _insist(self, what: str, request: object, codes: Codes, fine: Collection[int] = ()) -> Any:  # noqa: ANN401  # untyped protocol structures
        """Send a request, and repeat it until the coordinator is available.

        Repeating any request that `Group` sends is safe.
        """
        deadline_s = asyncio.get_running_loop().time() + DEADLINE_MS / 1000
        while True:
            try:
                code, answer = await self._wire.ask_group(self._name, request, codes)
            except NoAnswer as error:
                why = str(error)
            else:
                if code == 0 or code in fine:
                    return answer
                why = error_name(code)
                if code not in COORDINATOR_MOVED:
                    raise self._refused(what, code)
            if asyncio.get_running_loop().time() > deadline_s:
                raise BrokerUnavailable(f"{what} the group {self._name!r}: no answer in {DEADLINE_MS} ms ({why}).")
            await self._wire.pause(PAUSE_MS)

    def _refused(self, what: str, code: int) -> BrokerUnavailable:
        return BrokerUnavailable(
            f"{what} the group {self._name!r} was refused: {error_name(code)}. Check the principal's "
            f"permissions on the group, and that no worker has joined the group in the meantime."
        )


def group_members(settings: Settings, client_id: str, group: str) -> list[GroupMember]:
    """Connect to the cluster, and return what `Group.members` returns.

    Call this instead of librdkafka's admin client, which ends the process with SIGABRT if a request about a group times
    out, and with SIGSEGV if the coordinator is loading or has moved (librdkafka issue 5040; both seen with 2.16.0).
    Raises BrokerUnavailable if no broker responds.
    """

    async def ask(wire: KafkaWire, _admin: Admin) -> list[GroupMember]:
        return await Group(wire, group).members()

    return on_cluster(settings, client_id, ask)


def _member(member_id: str, client_id: str, host: str, _metadata: bytes, assignment: bytes) -> GroupMember:
    # The broker appends a UUID to the static ID of a static member, and to the client ID of any other member.
    name = _MADE_BY_THE_BROKER.sub("", member_id) or client_id
    partitions = ConsumerProtocolMemberAssignment.decode(assignment).partitions() if assignment else []
    return GroupMember(member_id, name, host.lstrip("/"), tuple(sorted(TopicPartition(*tp) for tp in partitions)))
