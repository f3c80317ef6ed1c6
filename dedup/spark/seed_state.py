"""What a seed finds in the cluster before it writes, and the first things it writes there."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from dedup.errors import DedupError, Problem, SettingsError, StateIncompatible
from dedup.session.group import Group
from dedup.session.transaction import Session
from dedup.session.wire import NoAnswer, TopicPartition
from dedup.spark.seed_writer import DEADLINE_MS, WritePlan, announce
from dedup.store.changelog import SeedMarkKey, parse_key
from dedup.store.seed_mark import SeedMark, decode_seed_mark
from dedup.worker.plan import Cluster, group_is_new, prepare
from dedup.worker.starting import bounds_of, committed_offset, first_offset

if TYPE_CHECKING:
    from dedup.session.admin import Admin
    from dedup.session.client import KafkaWire
    from dedup.session.wire import FetchedRecord
    from dedup.settings import Settings
    from dedup.topology.model import Topology

Until = Mapping[TopicPartition, int] | int | Literal["earliest", "latest"]
"""Where the fleet begins: an offset for each source partition, a record time in ms, or the ends as they are now."""

FETCH_BYTES: Final = 1 << 16
PAUSE_MS: Final = 50


@dataclass(frozen=True, slots=True)
class Found:
    """A cluster that can be seeded, or whose seed can be finished."""

    cluster: Cluster
    tasks: int
    begins: Mapping[TopicPartition, int]
    """Where the fleet is to read on in each source partition."""
    next_offsets: Mapping[int, int]
    """Task -> the offset of its feeding partition at which it begins."""
    judged_at_ms: int
    marks: Mapping[int, SeedMark] = field(default_factory=dict)
    """Of an earlier run, by partition; none where this is the first."""


async def look(
    topology: Topology, settings: Settings, wire: KafkaWire, admin: Admin, *, until: Until, now_ms: int | None
) -> Found:
    """Return what is there, with every topic in place.

    Raises StateIncompatible where the group has offsets or the changelog has records that are no seed's, DedupError
    while the group has members.
    """
    members = await Group(wire, topology.name).members()
    if members:
        names = ", ".join(f"{member.worker_id} at {member.host}" for member in members)
        raise DedupError(f"the group {topology.name!r} has members: {names}. Nothing was touched; stop these workers.")
    fresh = await group_is_new(topology, wire, admin)
    cluster = await prepare(topology, settings, admin, may_create_changelog=fresh)
    tasks = cluster.topics[topology.feeding_topics[0]].partitions
    marks = {task: mark for task in range(tasks) if (mark := await _mark(topology, wire, task)) is not None}
    if marks:
        begins = _begins_of(next(iter(marks.values())))
        refuse_other_begins(topology, until, begins)
        offsets = {task: mark.next_offset for task, mark in marks.items()}
        at_ms = next(iter(marks.values())).judged_at_ms
        if len(marks) == tasks:
            return Found(cluster, tasks, begins, offsets, at_ms, marks)
        raise _not_new(topology, f"{tasks - len(marks)} of {tasks} partitions have no seed mark")
    if not fresh:
        raise _not_new(topology, "its group has committed offsets")
    if not topology.direct:
        await _refuse_used_sources(topology, cluster, wire)
    begins = await _begins(topology, cluster, wire, until)
    offsets = {task: await _feeding_start(topology, wire, begins, task) for task in range(tasks)}
    return Found(cluster, tasks, begins, offsets, int(time.time() * 1000) if now_ms is None else now_ms)


def _not_new(topology: Topology, why: str) -> StateIncompatible:
    return StateIncompatible(
        f"{topology.name} can not be seeded: {why}. A seed needs a group without offsets and a new changelog. Nothing "
        f"was touched. `dedup reset` gives up what there is; then seed."
    )


async def _mark(topology: Topology, wire: KafkaWire, task: int) -> SeedMark | None:
    """Return the mark with which a changelog partition begins; None where it holds no record at all."""
    first = await _first_record(wire, TopicPartition(topology.changelog_topic, task))
    if first is None:
        return None
    if first.key is not None and first.value is not None and isinstance(parse_key(first.key), SeedMarkKey):
        return decode_seed_mark(first.value)
    raise _not_new(topology, f"{topology.changelog_topic}/{task} holds the state of a fleet")


async def _first_record(wire: KafkaWire, partition: TopicPartition) -> FetchedRecord | None:
    bounds = await bounds_of(wire, partition)
    position = bounds.start
    while position < bounds.end:
        try:
            fetched = await wire.fetch(partition, position, max_bytes=FETCH_BYTES, wait_ms=PAUSE_MS)
        except NoAnswer:
            await wire.pause(PAUSE_MS)
            continue
        if fetched.records:
            return fetched.records[0]
        position = fetched.next_offset
    return None


def refuse_other_begins(topology: Topology, until: Until, begins: Mapping[TopicPartition, int]) -> None:
    """Raise StateIncompatible where other offsets are asked for than those at which an earlier run had the fleet begin.

    `latest`, `earliest` and a time are resolved once, by the first run: there is nothing to compare them with.
    """
    if not isinstance(until, Mapping) or dict(until) == dict(begins):
        return
    first, now = (
        ",".join(f"{topic}/{partition}={offset}" for (topic, partition), offset in sorted(places.items()))
        for places in (begins, until)
    )
    raise StateIncompatible(
        f"{topology.changelog_topic} holds a seed behind which the fleet begins at {first}, and --until says {now}. "
        f"Nothing was touched. Finish that seed with --until {first}, or `dedup reset` and seed anew."
    )


def _begins_of(mark: SeedMark) -> dict[TopicPartition, int]:
    return {
        TopicPartition(topic, partition): offset
        for topic, offsets in mark.begins.items()
        for partition, offset in enumerate(offsets)
    }


async def _refuse_used_sources(topology: Topology, cluster: Cluster, wire: KafkaWire) -> None:
    for name in topology.source.topics:
        for partition in range(cluster.topics[name].partitions):
            if await committed_offset(wire, topology.name, TopicPartition(name, partition)) is not None:
                raise _not_new(topology, f"its group has committed an offset of {name}/{partition}")
    topic = topology.repartition_topic
    for partition in range(cluster.topics[topic].partitions):
        if await _first_record(wire, TopicPartition(topic, partition)) is not None:
            raise _not_new(topology, f"{topic}/{partition} holds records")


async def _begins(topology: Topology, cluster: Cluster, wire: KafkaWire, until: Until) -> dict[TopicPartition, int]:
    places = [
        TopicPartition(name, partition)
        for name in topology.source.topics
        for partition in range(cluster.topics[name].partitions)
    ]
    if isinstance(until, int | str):
        return {place: await first_offset(wire, place, until) for place in places}
    problems = []
    for place in dict.fromkeys([*places, *until]):
        bounds = await bounds_of(wire, place) if place in places else None
        name = f"{place.topic}/{place.partition}"
        if bounds is None:
            problems.append(f"{name} is no source partition of {topology.name}")
        elif place not in until:
            problems.append(f"{name} is missing: give an offset for every source partition")
        elif not bounds.start <= until[place] <= bounds.end:
            problems.append(f"{name} holds offsets {bounds.start} to {bounds.end}, {until[place]} is none of them")
    if problems:
        raise SettingsError([Problem("--until", text) for text in problems])
    return dict(until)


async def _feeding_start(topology: Topology, wire: KafkaWire, begins: Mapping[TopicPartition, int], task: int) -> int:
    feeding = TopicPartition(topology.feeding_topics[0], task)
    return begins[feeding] if topology.direct else (await bounds_of(wire, feeding)).start


async def begin(plan: WritePlan, settings: Settings, wire: KafkaWire, found: Found) -> None:
    """Every partition is marked, and where records are repartitioned the source offsets are committed.

    The offsets come before the first partition that a task could start on: a fleet started in between must not bring
    the history in once more.
    """
    topology = plan.topology
    if not found.marks:
        await announce(topology, settings, wire, plan.marks)
    if topology.direct:
        return
    for place, offset in found.begins.items():
        transactional_id = topology.transactional_id("repartition", place.partition, place.topic)
        timeout_ms = settings.transaction_timeout_ms
        session = Session(wire, transactional_id, topology.name, timeout_ms=timeout_ms, deadline_ms=DEADLINE_MS)
        await session.open()
        if await committed_offset(wire, topology.name, place) is None:
            await session.commit({place: offset})
        await session.drop()
