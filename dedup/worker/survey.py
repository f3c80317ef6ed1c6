"""`dedup status`: a topology's tasks as the brokers see them, without asking any worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dedup.session.admin import Admin, Topic
from dedup.session.client import KafkaWire
from dedup.session.group import Group, Member
from dedup.session.wire import NoAnswer, TopicPartition
from dedup.worker.plan import topic_names
from dedup.worker.starting import bounds_of, committed_offset

if TYPE_CHECKING:
    from dedup.topology.model import Topology


@dataclass(frozen=True, slots=True)
class SurveyedTask:
    """One feeding partition."""

    task: str
    topic: str
    partition: int
    owner: str | None
    committed: int | None
    end: int
    lag: int
    """Offsets not committed; 0 where only transaction markers are left."""
    changelog_begin: int | None
    changelog_end: int | None


@dataclass(frozen=True, slots=True)
class Survey:
    """A topology at one moment."""

    topology: str
    members: tuple[Member, ...]
    tasks: tuple[SurveyedTask, ...]
    missing_topics: tuple[str, ...]


async def survey(topology: Topology, wire: KafkaWire, admin: Admin) -> Survey:
    """Return what the group and the topics say."""
    have = await admin.topics(topic_names(topology))
    members = await Group(wire, topology.name).members()
    owners = {partition: member.worker_id for member in members for partition in member.partitions}
    kinds = {"dedup": topology.feeding_topics}
    if not topology.direct:
        kinds = {"repartition": topology.source.topics, **kinds}
    tasks = [
        await _task(topology, wire, have, owners, (kind, TopicPartition(name, partition)))
        for kind, names in kinds.items()
        for name in names
        if name in have
        for partition in range(have[name].partitions)
    ]
    missing = tuple(name for name in topic_names(topology) if name not in have)
    return Survey(topology.name, tuple(members), tuple(tasks), missing)


async def _task(
    topology: Topology,
    wire: KafkaWire,
    have: Mapping[str, Topic],
    owners: Mapping[TopicPartition, str],
    at: tuple[str, TopicPartition],
) -> SurveyedTask:
    kind, feeding = at
    bounds = await bounds_of(wire, feeding)
    committed = await committed_offset(wire, topology.name, feeding, stable=False)
    begin = end = None
    changelog = have.get(topology.changelog_topic)
    if kind == "dedup" and changelog is not None and feeding.partition < changelog.partitions:
        kept = await bounds_of(wire, TopicPartition(changelog.name, feeding.partition))
        begin, end = kept.start, kept.end
    lag = bounds.end - max(bounds.start, committed or 0)
    if lag and committed is not None and await _only_markers(wire, feeding, max(bounds.start, committed)):
        lag = 0
    return SurveyedTask(
        kind, feeding.topic, feeding.partition, owners.get(feeding), committed, bounds.end, lag, begin, end
    )


async def _only_markers(wire: KafkaWire, feeding: TopicPartition, offset: int) -> bool:
    """Tell whether nothing but markers and aborted records follows: no task ever sees those, so none commits them."""
    try:
        found = await wire.fetch(feeding, offset, max_bytes=1, wait_ms=0)
    except NoAnswer:
        return False
    return not found.records and found.next_offset >= found.high_watermark
