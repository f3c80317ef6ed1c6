"""One contract for every wire: the simulated cluster answers as a real broker does, so what it proves is worth something.

Both transaction versions: with version 2 (KIP-890), what is written joins the transaction, which has its own epoch. And
brokers before Kafka 3.6, which append a batch without asking the coordinator whether its transaction is open.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from dedup.errors import StateIncompatible
from dedup.kafka.client import KafkaWire
from dedup.kafka.connection import Connection
from dedup.kafka.memory_wire import MemoryWire
from dedup.kafka.record_batch import Line, fill
from dedup.kafka.topic_admin import Topic
from dedup.kafka.transactional_producer import AGAIN_ANNOUNCING, FENCED, OK, OUT_OF_SEQUENCE, STILL_ENDING
from dedup.kafka.wire import (
    UNSTABLE_OFFSET,
    NoAnswer,
    Position,
    Produced,
    ProducerIdentity,
    TopicNow,
    TopicPartition,
    Wire,
)
from dedup.settings import Security
from tests.brokers import RELEASE, unique
from tests.simulation.cluster import INVALID_STATE, OUT_OF_ORDER, TOO_LARGE, Cluster
from tests.simulation.process import SimWire

LARGEST = 1_000
NEVER = ProducerIdentity(-1, -1)


class AtOnce:
    """In place of a simulated process: nothing is parked."""

    def park(self, name: str, lane: str, effect: Callable[[], Any], **_options: object) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().create_future()
        future.set_result(effect())
        return future


class OldWire(KafkaWire):
    """A wire that takes its cluster for one whose transactions are of version 1."""

    async def transaction_version(self) -> int:
        assert await super().transaction_version() >= 2, "the broker of the tests finalizes version 2"
        return 1


class Place:
    """A wire with two topics and a group of its own."""

    def __init__(
        self,
        wire: Wire,
        make_topic: Callable[[str], Any],
        make_again: Callable[[str], Any] = lambda _: None,
        *,
        verifies: bool = True,
    ) -> None:
        self.wire = wire
        self.verifies = verifies
        """Whether a leader asks the coordinator about a batch."""
        self.next = NEVER
        """What EndTxn answered: the identity for the next transaction."""
        self.make_again = make_again
        self.target = TopicPartition(unique("wire"), 0)
        self.other = TopicPartition(unique("wire"), 0)
        self.group = unique("group")
        self.id = unique("id")
        for partition in (self.target, self.other):
            make_topic(partition.topic)

    async def begin(self, name: str = "") -> ProducerIdentity:
        """Start an epoch, as patiently as a session."""
        while True:
            code, identity = await self.wire.init_producer_id(name or self.id, 60_000)
            if code == OK:
                return identity
            assert code in AGAIN_ANNOUNCING
            await self.wire.pause(5)

    async def asked(self, ask: Callable[[], Awaitable[int]]) -> int:
        """Return the first answer that is not "try again"."""
        while True:
            code = await ask()
            if code not in AGAIN_ANNOUNCING:
                return code
            await self.wire.pause(5)

    async def announced(self, identity: ProducerIdentity, *targets: TopicPartition, name: str = "") -> int:
        if identity.implicit:
            return OK

        async def ask() -> int:
            return max((await self.wire.add_partitions(name or self.id, identity, targets)).values())

        return await self.asked(ask)

    async def produced(
        self, identity: ProducerIdentity, target: TopicPartition, *values: bytes, sequence: int = 0, name: str = ""
    ) -> Produced:
        lines: list[Line] = [(-1, 1_000 + at, b"k", value, [("h", b"1")]) for at, value in enumerate(values)]
        (batch,) = fill(target, lines, compression="none")
        while True:
            answer = await self.wire.produce(name or self.id, identity, [(target, batch.sealed(identity, sequence))])
            produced = (await answer)[target]
            if produced.error_code != STILL_ENDING:
                return produced
            await self.wire.pause(5)

    async def wrote(self, identity: ProducerIdentity, *values: bytes, sequence: int = 0, name: str = "") -> Produced:
        """Announce the target and write to it."""
        assert await self.announced(identity, self.target, name=name) == OK
        return await self.produced(identity, self.target, *values, sequence=sequence, name=name)

    async def ended(self, identity: ProducerIdentity, *, commit: bool, name: str = "") -> int:
        async def ask() -> int:
            code, self.next = await self.wire.end_transaction(name or self.id, identity, commit=commit)
            return code

        return await self.asked(ask)

    async def values(self, end: int, offset: int = 0) -> list[bytes | None]:
        """Return committed values up to an offset, which must be reached."""
        found: list[bytes | None] = []
        for _ in range(200):
            try:
                fetched = await self.wire.fetch(self.target, offset, max_bytes=1 << 20, wait_ms=50)
            except NoAnswer:
                continue
            found += [record.value for record in fetched.records]
            offset = fetched.next_offset
            if offset >= end:
                return found
            await self.wire.pause(5)
        raise AssertionError(f"offset {end} was not reached, but {offset}")

    async def ends(self) -> tuple[int, int]:
        """Return high watermark and last stable offset."""
        fetched = await self.wire.fetch(self.target, 0, max_bytes=1 << 20, wait_ms=50)
        return (await self.wire.bounds(self.target)).end, fetched.last_stable_offset

    async def committed(self, *, stable: bool = False) -> int | None:
        assert await self.stability(stable=stable) == OK
        return (await self.wire.committed_offset(self.group, self.target, stable=stable)).offset

    async def stability(self, *, stable: bool) -> int:
        async def ask() -> int:
            return (await self.wire.committed_offset(self.group, self.target, stable=stable)).error_code

        return await self.asked(ask)

    async def with_offset(self, identity: ProducerIdentity, offset: int) -> int:
        if not identity.implicit:
            assert await self.asked(lambda: self.wire.add_offsets(self.id, identity, self.group)) == OK
        places = {self.target: Position(offset, 0, "a note")}
        return await self.asked(lambda: self.wire.commit_offsets(self.id, identity, self.group, places))


UNVERIFIED = "simulated, before Kafka 3.6, version 1"
SIMULATED = ("simulated, version 1", "simulated, version 2", UNVERIFIED)
IN_MEMORY = "in memory, version 2"
BROKER = ("broker, version 1", "broker, version 2") if RELEASE >= (4, 0) else ("broker, version 1",)


@pytest.fixture(params=[*SIMULATED, IN_MEMORY, *(pytest.param(each, marks=pytest.mark.broker) for each in BROKER)])
async def place(request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    implicit = request.param.endswith("2")
    if request.param in SIMULATED:
        verifies = request.param != UNVERIFIED
        too_large = lambda _topic, record: len(record.value or b"") > LARGEST  # noqa: E731
        cluster = Cluster(refuses=too_large, implicit=implicit, verifies=verifies)
        make = lambda name: cluster.partition(TopicPartition(name, 0))  # noqa: E731
        wire = SimWire(AtOnce(), cluster)  # type: ignore[arg-type]  # all it needs
        yield Place(wire, make, cluster.make_again, verifies=verifies)
        return
    if request.param == IN_MEMORY:
        memory = MemoryWire(lambda: 0)

        def create(name: str) -> None:
            memory.create(Topic(name, unique("id"), 1, {"max.message.bytes": str(LARGEST)}))

        yield Place(memory, create, create)
        return
    kafka, admin = request.getfixturevalue("kafka"), request.getfixturevalue("admin")
    real = (OldWire if RELEASE >= (4, 0) and not implicit else KafkaWire)(Connection((kafka.bootstrap,), Security()))
    await real.start()

    def make(name: str) -> None:
        admin.create_topic(name, config={"max.message.bytes": str(LARGEST)})

    def make_again(name: str) -> None:
        admin.delete_topic(name)
        make(name)

    try:
        yield Place(real, make, make_again, verifies=RELEASE >= (3, 6))
    finally:
        await real.stop()


async def test_a_new_epoch_fences_the_older_one(place: Place) -> None:
    old = await place.begin()
    assert (await place.wrote(old, b"open")).error_code == OK
    new = await place.begin()
    assert (new.producer_id, new.epoch) > (old.producer_id, old.epoch)
    assert (await place.produced(old, place.target, b"late", sequence=1)).error_code in FENCED
    if old.implicit:
        places = {place.target: Position(1)}
        assert await place.asked(lambda: place.wire.commit_offsets(place.id, old, place.group, places)) in FENCED
    else:
        assert await place.announced(old, place.other) in FENCED
        assert await place.asked(lambda: place.wire.add_offsets(place.id, old, place.group)) in FENCED
    assert await place.ended(old, commit=True) in FENCED
    assert (await place.wrote(new, b"new")).error_code == OK
    assert await place.ended(new, commit=True) == OK
    assert await place.values(4) == [b"new"]


async def test_a_zombie_writes_nothing_into_a_partition_it_never_wrote_to(place: Place) -> None:
    """Where leaders do not verify, it is not announced either: a session writes after the answer to its announcement."""
    old = await place.begin()
    await place.begin()
    if place.verifies:
        assert (await place.produced(old, place.target, b"late")).error_code in FENCED
    else:
        assert await place.announced(old, place.target) in FENCED
    assert (await place.wire.bounds(place.target)).end == 0


@pytest.mark.parametrize("sequence", [0, 1])
async def test_a_batch_that_was_delayed_over_the_abort_of_its_transaction_is_fenced(
    place: Place, sequence: int
) -> None:
    """Before Kafka 3.6, only the epoch of the abort markers rejects it: no broker asks the coordinator (KIP-890)."""
    old = await place.begin()
    if sequence:
        await place.wrote(old, b"aborted")
    assert await place.announced(old, place.target) == OK
    new = await place.begin()
    ended = await place.wire.bounds(place.target)
    assert (await place.produced(old, place.target, b"late", sequence=sequence)).error_code in FENCED
    assert await place.wire.bounds(place.target) == ended
    assert (await place.wrote(new, b"new")).error_code == OK
    assert await place.ended(new, commit=True) == OK
    assert await place.values(ended.end + 2) == [b"new"]


async def test_commit_makes_visible_and_a_marker_takes_an_offset(place: Place) -> None:
    identity = await place.begin()
    written = await place.wrote(identity, b"one", b"two")
    assert written == Produced(OK, 0)
    assert await place.ends() == (2, 0)
    assert (await place.wire.fetch(place.target, 0, max_bytes=1 << 20, wait_ms=50)).records == []
    assert await place.ended(identity, commit=True) == OK
    assert await place.values(3) == [b"one", b"two"]
    assert await place.ends() == (3, 3)
    assert await place.values(3, offset=1) == [b"two"]


async def test_what_was_open_is_aborted_by_the_next_epoch_and_skipped_by_readers(place: Place) -> None:
    first = await place.begin()
    await place.wrote(first, b"aborted")
    second = await place.begin()
    assert await place.ends() == (2, 2)
    assert await place.values(2) == []
    # Sequence numbers begin again in the new epoch.
    assert (await place.wrote(second, b"kept")).base_offset == 2
    assert await place.ended(second, commit=True) == OK
    assert await place.values(4) == [b"kept"]


async def test_an_open_transaction_of_another_id_hides_what_was_committed_after_it(place: Place) -> None:
    other = unique("id")
    theirs = await place.begin(other)
    await place.wrote(theirs, b"theirs", name=other)
    ours = await place.begin()
    await place.wrote(ours, b"ours")
    assert await place.ended(ours, commit=True) == OK
    for _ in range(100):
        high, stable = await place.ends()
        if high == 3:
            break
        await place.wire.pause(5)
    assert (high, stable) == (3, 0)
    await place.begin(other)
    assert await place.values(4) == [b"ours"]


async def test_offsets_are_committed_with_the_transaction(place: Place) -> None:
    first = await place.begin()
    assert await place.committed() is None
    await place.wrote(first, b"one")
    assert await place.with_offset(first, 1) == OK
    assert await place.committed() is None
    assert await place.ended(first, commit=True) == OK
    second = await place.begin()  # answers only when all markers are written, the group's too
    assert await place.committed() == 1
    await place.wrote(second, b"two")
    assert await place.with_offset(second, 2) == OK
    await place.begin()
    assert await place.committed() == 1


async def test_an_offset_on_its_way_is_no_stable_one(place: Place) -> None:
    """KIP-447: whoever takes over after another id's transaction must not begin where it began."""
    identity = await place.begin()
    assert await place.committed(stable=True) is None
    await place.wrote(identity, b"one")
    assert await place.with_offset(identity, 1) == OK
    assert await place.committed() is None
    assert await place.stability(stable=True) == UNSTABLE_OFFSET
    assert await place.ended(identity, commit=True) == OK
    await place.begin()
    assert await place.committed(stable=True) == 1


async def test_a_record_too_large_is_refused_and_its_neighbours_are_not(place: Place) -> None:
    identity = await place.begin()
    assert (await place.wrote(identity, b"small")).error_code == OK
    refused = await place.produced(identity, place.target, bytes(range(256)) * 40, sequence=1)
    assert refused.error_code == TOO_LARGE
    # A refused batch uses up no sequence number.
    assert (await place.produced(identity, place.target, b"next", sequence=1)).error_code == OK
    assert await place.ended(identity, commit=True) == OK
    assert await place.values(3) == [b"small", b"next"]


async def test_what_follows_a_refused_batch_is_out_of_sequence_and_refused_for_its_size_all_the_same(
    place: Place,
) -> None:
    """So a session learns of every refused batch of a transaction at once."""
    identity = await place.begin()
    large = bytes(range(256)) * 40
    assert (await place.wrote(identity, b"small")).error_code == OK
    assert (await place.produced(identity, place.target, large, sequence=1)).error_code == TOO_LARGE
    assert (await place.produced(identity, place.target, b"next", sequence=2)).error_code in OUT_OF_SEQUENCE
    assert (await place.produced(identity, place.target, large, sequence=3)).error_code == TOO_LARGE


async def test_a_batch_out_of_sequence_is_refused(place: Place) -> None:
    identity = await place.begin()
    await place.wrote(identity, b"one")
    assert (await place.produced(identity, place.target, b"three", sequence=2)).error_code == OUT_OF_ORDER


async def test_a_partition_joins_a_transaction_by_a_request_or_by_a_batch(place: Place) -> None:
    identity = await place.begin()
    assert await place.announced(identity, place.other) == OK
    written = await place.produced(identity, place.target, b"one")
    assert written.error_code == (INVALID_STATE if place.verifies and not identity.implicit else OK)


async def test_the_end_of_a_transaction_may_be_asked_for_twice(place: Place) -> None:
    identity = await place.begin()
    await place.wrote(identity, b"one")
    assert await place.ended(identity, commit=True) == OK
    first = place.next
    assert await place.ended(identity, commit=True) == OK  # which is why a delayed repetition is dangerous
    assert place.next == first
    assert await place.ended(identity, commit=False) == INVALID_STATE


async def test_a_repeated_end_commits_the_transaction_after_it(place: Place) -> None:
    """What a session must never let happen with version 1, and what an epoch for each transaction (version 2) fences."""
    identity = await place.begin()
    await place.wrote(identity, b"first")
    assert await place.ended(identity, commit=True) == OK
    following, implicit = place.next, identity.implicit
    assert (following.producer_id, following.epoch) == (identity.producer_id, identity.epoch + implicit)
    await place.wrote(following, b"half of the next", sequence=0 if implicit else 1)
    late = await place.ended(identity, commit=True)
    if implicit:
        assert late in FENCED
        assert (await place.produced(following, place.target, b"the rest", sequence=1)).error_code == OK
        assert await place.ended(following, commit=True) == OK
        assert await place.values(5) == [b"first", b"half of the next", b"the rest"]
    else:
        assert late == OK
        assert await place.values(4) == [b"first", b"half of the next"]


async def test_a_batch_of_the_epoch_before_is_fenced(place: Place) -> None:
    """KIP-890: a produce request that was delayed must not end up in the next transaction."""
    identity = await place.begin()
    await place.wrote(identity, b"one")
    assert await place.ended(identity, commit=True) == OK
    following = place.next
    await place.wrote(following, b"two", sequence=0 if identity.implicit else 1)
    late = await place.produced(identity, place.target, b"late", sequence=1 if identity.implicit else 2)
    assert (late.error_code in FENCED) == identity.implicit


async def test_nothing_can_be_ended_that_was_not_begun(place: Place) -> None:
    identity = await place.begin()
    assert await place.ended(identity, commit=True) in FENCED
    assert await place.ended(NEVER, commit=True) in FENCED


async def test_a_time_finds_the_first_record_at_or_after_it(place: Place) -> None:
    identity = await place.begin()
    await place.wrote(identity, b"one", b"two", b"three")
    assert await place.ended(identity, commit=True) == OK
    await place.values(4)
    assert await place.wire.offset_at(place.target, 1_001) == 1
    assert await place.wire.offset_at(place.target, 1 << 50) is None


async def test_a_position_is_kept_with_its_leader_epoch_and_note(place: Place) -> None:
    identity = await place.begin()
    await place.wrote(identity, b"one")
    assert await place.with_offset(identity, 1) == OK
    assert await place.ended(identity, commit=True) == OK
    await place.begin()
    found = (await place.wire.committed_offset(place.group, place.target, stable=True)).position
    assert found == Position(1, 0, "a note")


async def test_a_topic_made_again_has_another_id_and_is_not_read_for_the_old_one(place: Place) -> None:
    """KIP-516: by its name it would be read from an offset that is another record's."""
    identity = await place.begin()
    await place.wrote(identity, b"one")
    assert await place.ended(identity, commit=True) == OK
    topic = place.target.topic
    before = (await place.wire.topics((topic, place.other.topic)))[topic]
    assert isinstance(before, TopicNow)
    assert before.partitions == 1
    place.wire.pin({topic: before.topic_id})
    assert await place.values(2) == [b"one"]
    place.make_again(topic)
    after = (await place.wire.topics((topic, place.other.topic)))[topic]
    assert isinstance(after, TopicNow)
    assert after.topic_id != before.topic_id
    with pytest.raises(StateIncompatible):
        await place.values(2)


async def test_a_reader_that_depends_on_no_id_reads_the_topic_that_was_made_again(place: Place) -> None:
    for value in (b"one", b"two"):
        identity = await place.begin(value.decode())
        assert (await place.wrote(identity, value, name=value.decode())).error_code == OK
        assert await place.ended(identity, commit=True, name=value.decode()) == OK
        assert await place.values(2) == [value]
        place.make_again(place.target.topic)


async def test_a_coordinator_that_answers_that_it_moved_is_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = KafkaWire(Connection(("unused:9",), Security()))
    found = iter([1, 2])
    wire._client = SimpleNamespace(
        coordinator_lookup=AsyncMock(side_effect=lambda *_: next(found)),
        cluster=SimpleNamespace(broker_metadata=lambda node: node),
    )

    async def send(node: int, _request: object, _group: object) -> SimpleNamespace:
        return SimpleNamespace(error_code=16 if node == 1 else 0)

    monkeypatch.setattr(wire, "send", send)
    assert [(await wire.ask_group("group", object()))[0] for _ in range(3)] == [16, 0, 0]
