"""A topology laid over a cluster: partition counts, routes, the topics that are missing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dedup.core.event_time import RecordTime
from dedup.core.stream_time import Feed
from dedup.errors import StateIncompatible
from dedup.session.admin import Admin, Topic, WantedTopic
from dedup.session.wire import TopicPartition, Wire
from dedup.topology.model import LateForward, LateTo, Topology
from dedup.worker.publish import SLACK_BYTES, Route, Routes
from dedup.worker.starting import committed_offset

if TYPE_CHECKING:
    from dedup.settings import Settings

FOR_EVER: Final = "-1"


@dataclass(frozen=True, slots=True)
class Cluster:
    """The topics a topology touches, as they are."""

    topics: Mapping[str, Topic]

    def feeds(self, topology: Topology) -> tuple[Feed, ...]:
        """Return every source partition."""
        return tuple(
            Feed(position, partition)
            for position, topic in enumerate(topology.source.topics)
            for partition in range(self.topics[topic].partitions)
        )

    def source_partitions(self, topology: Topology) -> dict[str, int]:
        """Return the partition count of each source topic, and of the repartition topic where there is one."""
        names = (*topology.source.topics, *topology.feeding_topics)
        return {name: self.topics[name].partitions for name in names}

    def route(self, name: str | None) -> Route | None:
        """Return the way to a topic; None for None."""
        if name is None:
            return None
        topic = self.topics[name]
        return Route(name, topic.partitions, topic.max_record_bytes)


def routes_of(topology: Topology, cluster: Cluster, settings: Settings) -> Routes:
    """Return where each verdict goes."""
    dead_letter = cluster.route(topology.dead_letter)
    if dead_letter is None:
        raise StateIncompatible(f"topic {topology.dead_letter!r} is missing; run `dedup apply`.")
    late = topology.late
    return Routes(
        source_topics=topology.source.topics,
        output=cluster.route(topology.output.topic) if topology.output else None,
        dead_letter=dead_letter,
        late=cluster.route(late.topic) if isinstance(late, LateTo) else None,
        late_forward=isinstance(late, LateForward),
        duplicates=cluster.route(topology.duplicates),
        conflicts=cluster.route(topology.conflicts),
        output_headers=topology.output.headers if topology.output else False,
        keep_partition=topology.direct,
        time_is_record=isinstance(topology.event_time, RecordTime),
        compression=settings.topics.compression,
    )


def topic_names(topology: Topology) -> list[str]:
    """Return every topic the topology reads or writes."""
    return list(dict.fromkeys((*topology.source.topics, *topology.written_topics)))


def missing_topics(topology: Topology, settings: Settings, have: Mapping[str, Topic]) -> list[WantedTopic]:
    """Return the topics to make; raises StateIncompatible where a source topic is missing."""
    absent = [name for name in topology.source.topics if name not in have]
    if absent:
        raise StateIncompatible(
            f"source topic {', '.join(map(repr, absent))} does not exist. Make it, or correct `source.topics`; "
            f"dedup makes every topic but its sources."
        )
    sources = [have[name] for name in topology.source.topics]
    count = max(topic.partitions for topic in sources)
    changelog = count if topology.direct else (settings.topics.partitions or count)
    largest = max(topic.max_record_bytes for topic in sources)
    least = settings.topics.min_insync_replicas
    base = {} if least is None else {"min.insync.replicas": str(least)}
    ours = {**base, "retention.ms": FOR_EVER}
    beside = {**base, "message.timestamp.type": "LogAppendTime", "max.message.bytes": str(largest + SLACK_BYTES)}
    like_source = {
        **base,
        "retention.ms": str(settings.topics.retention_ms or sources[0].configs.get("retention.ms", "604800000")),
        "max.message.bytes": str(largest + SLACK_BYTES),
    }
    # The broker's time: by a worker's clock that is an hour ahead every record would be refused (KIP-937).
    kept = {**ours, "cleanup.policy": "compact,delete", "message.timestamp.type": "LogAppendTime"}
    configs: dict[str, tuple[int, dict[str, str]]] = {
        topology.changelog_topic: (changelog, kept),
        topology.dead_letter: (count, beside),
    }
    if not topology.direct:
        large = {"message.timestamp.type": "LogAppendTime", "max.message.bytes": str(largest + SLACK_BYTES)}
        configs[topology.repartition_topic] = (changelog, {**ours, **large})
    if isinstance(topology.late, LateTo):
        configs[topology.late.topic] = (count, beside)
    if topology.output is not None:
        configs[topology.output.topic] = (count, like_source)
    for name in (topology.duplicates, topology.conflicts):
        if name is not None:
            configs[name] = (count, like_source)
    factor = settings.topics.replication_factor
    return [
        WantedTopic(name, partitions, factor, options)
        for name, (partitions, options) in configs.items()
        if name not in have
    ]


def refuse_misfits(topology: Topology, have: Mapping[str, Topic]) -> None:
    """Raise StateIncompatible where partition counts do not fit each other."""
    feeding = have[topology.feeding_topics[0]]
    problems = []
    if have[topology.changelog_topic].partitions != feeding.partitions:
        problems.append(
            f"the changelog {topology.changelog_topic!r} has {have[topology.changelog_topic].partitions} partitions, "
            f"but {feeding.name!r} has {feeding.partitions}: IDs would be looked up where they were not seen"
        )
    if topology.direct and topology.output is not None and have[topology.output.topic].partitions != feeding.partitions:
        problems.append(
            f"the output {topology.output.topic!r} has {have[topology.output.topic].partitions} partitions, "
            f"but {feeding.name!r} has {feeding.partitions}: output keeps the source's partition"
        )
    if problems:
        raise StateIncompatible("; ".join(problems) + ". Nothing was touched; mend the topics or `dedup reset`.")


async def group_is_new(topology: Topology, wire: Wire, admin: Admin) -> bool:
    """Tell whether the group has judged nothing yet: it has no offset of a source or a feeding topic."""
    have = await admin.topics([*topology.source.topics, *topology.feeding_topics])
    for topic in have.values():
        for partition in range(topic.partitions):
            place = TopicPartition(topic.name, partition)
            offset = await committed_offset(wire, topology.name, place, stable=False)
            if offset is not None:
                return False
    return True


def state_topics(topology: Topology) -> tuple[str, ...]:
    """Return the topics that hold what has been judged, or read and not judged yet."""
    return (topology.changelog_topic, *(() if topology.direct else (topology.repartition_topic,)))


def refuse_deleted(topology: Topology, have: Collection[str], *, done: str = "touched") -> None:
    """Raise StateIncompatible where a state topic is missing; ``done`` says of nothing what was not done to it."""
    if topology.changelog_topic not in have:
        raise StateIncompatible(
            f"the changelog topic {topology.changelog_topic!r} does not exist, but the group {topology.name!r} has "
            f"committed offsets or this worker has local state: it was deleted. Nothing was {done}. Bring it back, or "
            f"start anew with `dedup reset`."
        )
    if not topology.direct and topology.repartition_topic not in have:
        raise StateIncompatible(
            f"the repartition topic {topology.repartition_topic!r} does not exist, but the group {topology.name!r} has "
            f"committed offsets or this worker has local state: it was deleted, with what was not judged yet. Nothing "
            f"was {done}. Start anew with `dedup reset`, `--to` a time before that."
        )


async def prepare(topology: Topology, settings: Settings, admin: Admin, *, may_create_changelog: bool) -> Cluster:
    """Return the cluster with every topic in place, making those that are missing.

    Raises StateIncompatible where changelog or repartition topic is missing although the group has offsets or there is
    local state.
    """
    have = await admin.topics(topic_names(topology))
    wanted = missing_topics(topology, settings, have)
    if not may_create_changelog:
        refuse_deleted(topology, have)
    if wanted and not settings.topics.create:
        names = ", ".join(repr(topic.name) for topic in wanted)
        raise StateIncompatible(f"missing topics {names}, and `topics.create` is false. Run `dedup apply` first.")
    if wanted:
        await admin.create(wanted)
        have = await admin.settled(topic_names(topology))
    refuse_misfits(topology, have)
    return Cluster(have)
