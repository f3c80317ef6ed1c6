"""Checks and creates the topics of a topology in a cluster, and determines their partitions, routes, and retention.

By default, the topics that dedup creates keep records at least as long as the source topics do. Forwarded records keep
their timestamps, so a topic with a shorter retention would soon lose old records.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, NamedTuple

from dedup.core.event_time import RecordTime, create_time_fault
from dedup.core.window import Feed
from dedup.errors import BrokerUnavailable, StateIncompatible
from dedup.kafka.client import KafkaWire
from dedup.kafka.connection import Connection
from dedup.kafka.record_batch import Limit
from dedup.kafka.topic_admin import BROKER_DEFAULT, Admin, Group, Topic, WantedTopic
from dedup.kafka.wire import TopicPartition, Wire
from dedup.quantities import format_duration
from dedup.settings import Settings
from dedup.topology.lint import Finding
from dedup.topology.model import LateForward, LateTo, Topology, auto_group_size
from dedup.worker.offsets import (
    MOST_AT_ONCE,
    answered,
    at_once,
    bounds_of,
    committed_offset,
    committed_position,
    ends_of,
    first_record,
    offset_metadata,
    refuse_half_reset,
)
from dedup.worker.record_collector import SLACK_BYTES, Route, Routes

log: Final = logging.getLogger(__name__)
FOR_EVER: Final = "-1"
_BROKERS_DEFAULT_MS: Final = 604_800_000
"""Kafka's default retention (7 days), which is assumed for a topic whose configs the worker is not permitted to read.
"""
_FLAG: Final = "--onto-existing-output"
_ANOTHER_OUTPUT: Final = (
    "name another output topic, which dedup creates with the right number of partitions; the state is kept, so nothing "
    "is forwarded twice. Consumers read the old output to its end, and then the new one"
)


class Retention(NamedTuple):
    """Describes how long a topic keeps a record after the record's timestamp, and the reason."""

    ms: float
    """The retention in ms, which is infinite if the topic keeps records forever."""
    why: str = ""

    def configs(self) -> dict[str, str]:
        """Return explicit retention configs, because a broker's defaults could delete records too early."""
        return {"retention.ms": self.text, "retention.bytes": FOR_EVER, "cleanup.policy": "delete"}

    @property
    def text(self) -> str:
        """The value of `retention.ms`."""
        return FOR_EVER if math.isinf(self.ms) else str(self.ms)


def _retention_ms_of(configs: Mapping[str, str]) -> float:
    kept_ms = int(configs.get("retention.ms", _BROKERS_DEFAULT_MS))
    return kept_ms if kept_ms >= 0 and "delete" in configs.get("cleanup.policy", "delete") else math.inf


def _source_retention(source: Topic) -> Retention:
    if "compact" in source.configs.get("cleanup.policy", ""):
        return Retention(math.inf, f"source topic {source.name!r} is compacted")
    kept_ms = _retention_ms_of(source.configs)
    length = "forever" if math.isinf(kept_ms) else f"for {format_duration(int(kept_ms))}"
    return Retention(kept_ms, f"source topic {source.name!r} keeps records {length}")


def _longest_retention(sources: Iterable[Topic]) -> Retention:
    return max(map(_source_retention, sources), key=lambda each: each.ms)


def losing(topology: Topology, have: Mapping[str, Topic], wanted: Sequence[WantedTopic]) -> Iterator[tuple[str, str]]:
    """Yield the name of each topic that would delete records too early, with a sentence that describes the problem.

    ``have`` contains the existing topics with their configs, and ``wanted`` contains the topics to create.
    """
    longest = _longest_retention(have[name] for name in topology.source.topics)
    output = topology.output.topic if topology.output is not None else None
    to_make = {each.name: each.configs for each in wanted}
    copies = ((topology.duplicates, "duplicates"), (topology.conflicts, "conflicts"))
    for name, role in ((output, "output"), *((route, "route") for route in topology.routes), *copies):
        configs = None if name is None else have[name].configs if name in have else to_make.get(name)
        # Empty configs mean that the worker is not permitted to read them.
        if name is None or not configs or configs.get("message.timestamp.type") == "LogAppendTime":
            continue
        kept_ms = _retention_ms_of(configs)
        if kept_ms >= longest.ms:
            continue
        mend = "`topics.retention` sets this: increase it or omit it"
        if name in have:
            mend = (
                f"Run `kafka-configs.sh --bootstrap-server BROKER --alter --entity-type topics --entity-name {name} "
                f"--add-config retention.ms={longest.text}`"
            )
        sentence = (
            f"Topic {name!r} ({role}) keeps records for {format_duration(int(kept_ms))} after their timestamps "
            f"(retention.ms {kept_ms}), but {longest.why}: the brokers delete older records at their next check, "
            f"however recently these were sent. {mend}."
        )
        yield name, sentence


@dataclass(frozen=True, slots=True)
class Cluster:
    """The existing topics that a topology reads and writes."""

    topics: Mapping[str, Topic]
    begun_with: Mapping[str, int] = field(default_factory=dict)
    """The partition counts when the state was created, according to the layout; empty if no layout was ever written."""

    def feeds(self, topology: Topology) -> tuple[Feed, ...]:
        """Return every source partition that existed when the state was created."""
        topics, counts = topology.source.topics, self.source_partitions(topology)
        return tuple(Feed(at, number) for at, topic in enumerate(topics) for number in range(counts[topic]))

    def may_grow(self, topology: Topology) -> tuple[str, ...]:
        """Return the topics to which partitions may be added while workers run.

        With a repartition topic, every ID stays in its partition when partitions are added to a source topic. The
        layout shows which partitions are new.
        """
        return () if topology.direct or not self.begun_with else topology.source.topics

    def is_new(self, place: TopicPartition) -> bool:
        """Return whether the partition was added to its topic after the state was created."""
        return place.partition >= self.begun_with.get(place.topic, place.partition + 1)

    def places(self, names: Iterable[str]) -> list[TopicPartition]:
        """Return every partition of the named topics."""
        return [place for name in names for place in self.topics[name].places]

    def offset_metadata(self, topology: Topology, feeding: TopicPartition) -> str:
        """Return the metadata with which the partition's task commits offsets."""
        has_state = feeding.topic in topology.feeding_topics
        changelog_id = self.topics[topology.changelog_topic].topic_id if has_state else None
        return offset_metadata(self.topics[feeding.topic].topic_id, changelog_id)

    def source_partitions(self, topology: Topology) -> dict[str, int]:
        """Return the partition counts of the source topics and the repartition topic when the state was created."""
        names = (*topology.source.topics, *topology.feeding_topics)
        return {name: self.begun_with.get(name, self.topics[name].partitions) for name in names}

    @property
    def limits(self) -> dict[str, Limit]:
        """Maps topics to their size limits, except topics whose configs the worker is not permitted to read."""
        return {name: topic.limit for name, topic in self.topics.items() if topic.limit is not None}

    def route(self, name: str | None) -> Route | None:
        """Return the route to a topic, or None if ``name`` is None."""
        return None if name is None else Route(name, self.topics[name].partitions)


def routes_of(topology: Topology, cluster: Cluster, settings: Settings) -> Routes:
    """Return the routes of a topology, which name the target topic of each verdict."""
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
    """Return every topic that the topology reads or writes."""
    return list(dict.fromkeys((*topology.source.topics, *topology.written_topics)))


def known_names(topology: Topology) -> list[str]:
    """Return every topic that the topology uses, and the layout topic even if the topology does not use it."""
    return list(dict.fromkeys((*topic_names(topology), topology.layout_topic)))


def missing_topics(topology: Topology, settings: Settings, have: Mapping[str, Topic]) -> list[WantedTopic]:
    """Return the topics to create. Raises StateIncompatible if a source topic is missing."""
    absent = [name for name in topology.source.topics if name not in have]
    if absent:
        raise StateIncompatible(
            f"source topic {', '.join(map(repr, absent))} does not exist. Create it, or correct `source.topics`; "
            "dedup creates every topic except its sources."
        )
    sources = [have[name] for name in topology.source.topics]
    count = max(topic.partitions for topic in sources)
    changelog = count if topology.direct else (settings.topics.partitions or count)
    chosen = topology.transactions.partitions
    size = auto_group_size(max(count, changelog)) if chosen == "auto" else chosen
    largest = max(topic.max_record_bytes for topic in sources)
    least = settings.topics.min_insync_replicas
    base = {} if least is None else {"min.insync.replicas": str(least)}
    large = {"max.message.bytes": str(largest + SLACK_BYTES)}
    longest = _longest_retention(sources)
    chosen_ms = settings.topics.retention_ms
    like_source = {**base, **large, **(longest if chosen_ms is None else Retention(chosen_ms)).configs()}
    # People have to examine the records in side topics, so these records are kept at least for Kafka's default
    # retention.
    unhurried = Retention(max(longest.ms, _BROKERS_DEFAULT_MS)).configs()
    side = {**base, **large, **unhurried, "message.timestamp.type": "LogAppendTime"}
    whole = {**base, **Retention(math.inf).configs()}
    # Without LogAppendTime, the broker would refuse every record from a worker whose clock is an hour ahead (KIP-937).
    kept = {**whole, "cleanup.policy": "compact,delete", "message.timestamp.type": "LogAppendTime"}
    output = None if topology.output is None else topology.output.topic
    configs: dict[str | None, tuple[int, dict[str, str]]] = {
        topology.changelog_topic: (changelog, kept),
        topology.layout_topic if topology.has_layout(size) else None: (1, {**whole, "cleanup.policy": "compact"}),
        topology.dead_letter: (count, side),
        None if topology.direct else topology.repartition_topic: (changelog, {**side, **whole}),
        topology.late.topic if isinstance(topology.late, LateTo) else None: (count, side),
        **dict.fromkeys((output, *topology.routes, topology.duplicates, topology.conflicts), (count, like_source)),
    }
    factor = settings.topics.replication_factor or BROKER_DEFAULT
    return [
        WantedTopic(name, partitions, factor, options)
        for name, (partitions, options) in configs.items()
        if name is not None and name not in have
    ]


def refuse_misfits(topology: Topology, have: Mapping[str, Topic]) -> None:
    """Raise StateIncompatible if the partition counts of the topics do not match each other."""
    feeding, changelog = have[topology.feeding_topics[0]], have[topology.changelog_topic]
    checks = [(changelog, "changelog", "IDs would be looked up in partitions where they were not seen")]
    mended = "fix the topics or run `dedup reset`"
    if topology.direct and topology.output is not None:
        output = have[topology.output.topic]
        checks.append((output, "output", "an output record keeps its source partition"))
        # If the changelog also does not match, no output can bring the IDs back into their partitions.
        if changelog.partitions == feeding.partitions:
            less = output.partitions < feeding.partitions
            mended = "add partitions to the output" if less else _ANOTHER_OUTPUT
    problems = [
        f"the {role} {topic.name!r} has {topic.partitions} partitions, but {feeding.name!r} has {feeding.partitions}: "
        f"{why}"
        for topic, role, why in checks
        if topic.partitions != feeding.partitions
    ]
    if problems:
        raise StateIncompatible("; ".join(problems) + f". Nothing was changed; {mended}.")


def _created(topology: Topology, have: Mapping[str, Topic]) -> Iterator[str]:
    """Yield a sentence for each source topic whose new records lack the append time that the topology needs."""
    for name in topology.source.topics if topology.by_arrival else ():
        # Empty configs mean that the worker is not permitted to read them. In any case, the tasks check every batch.
        if have[name].configs.get("message.timestamp.type") == "CreateTime":
            yield create_time_fault(name, f"Every new record of source topic {name!r}")


async def group_is_new(topology: Topology, wire: Wire, admin: Admin) -> bool:
    """Return whether the group has judged no record yet, and thus has no offset for any source or feeding topic."""
    have = await admin.topics([*topology.source.topics, *topology.feeding_topics])
    places = [place for topic in have.values() for place in topic.places]

    async def committed(place: TopicPartition) -> int | None:
        return await committed_offset(wire, topology.name, place, stable=False)

    for begin in range(0, len(places), MOST_AT_ONCE):
        found = await at_once(committed, places[begin : begin + MOST_AT_ONCE])
        if any(offset is not None for offset in found.values()):
            return False
    return True


def state_topics(topology: Topology) -> tuple[str, ...]:
    """Return the changelog and, if the topology has one, the repartition topic."""
    return (topology.changelog_topic, *(() if topology.direct else (topology.repartition_topic,)))


def refuse_deleted(topology: Topology, have: Collection[str], *, done: str = "changed") -> None:
    """Raise StateIncompatible if a state topic is missing. ``done`` is the verb in the message, such as "changed"."""
    if topology.changelog_topic not in have:
        raise StateIncompatible(
            f"the changelog topic {topology.changelog_topic!r} does not exist, but the group {topology.name!r} has "
            f"committed offsets or this worker has local state: it was deleted. Nothing was {done}. Bring it back, or "
            f"start over with `dedup reset`."
        )
    if not topology.direct and topology.repartition_topic not in have:
        raise StateIncompatible(
            f"the repartition topic {topology.repartition_topic!r} does not exist, but the group {topology.name!r} has "
            f"committed offsets or this worker has local state: it was deleted, and with it any records that were not "
            f"judged yet. Nothing was {done}. Start over with `dedup reset --to` a time before the deletion."
        )


async def prepare(topology: Topology, settings: Settings, admin: Admin, *, may_create_changelog: bool) -> Cluster:
    """Create the missing topics, and return the cluster with all topics.

    Raises StateIncompatible if a state topic is missing even though the group has offsets or local state exists.
    """
    have = await admin.topics(known_names(topology))
    wanted = missing_topics(topology, settings, have)
    if not may_create_changelog:
        refuse_deleted(topology, have)
    created = "\n".join(_created(topology, have))
    if created:
        raise StateIncompatible(created)
    if wanted and not settings.topics.create:
        names = ", ".join(repr(topic.name) for topic in wanted)
        raise StateIncompatible(f"missing topics {names}, and `topics.create` is false. Run `dedup apply` first.")
    if wanted:
        await admin.create(wanted)
        have = await admin.settled(have.keys() | {topic.name for topic in wanted})
    refuse_misfits(topology, have)
    for _, sentence in losing(topology, have, ()):
        log.warning("%s", sentence)
    return Cluster(have)


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between an existing topic, which stays unchanged, and the topic that `dedup apply` would create."""

    topic: str
    what: str
    found: str
    wanted: str


@dataclass(frozen=True, slots=True)
class TopicPlan:
    """Lists the topics that `dedup apply` will create, and the differences between existing and wanted topics."""

    make: tuple[WantedTopic, ...] = ()
    as_wanted: tuple[str, ...] = ()
    differences: tuple[Difference, ...] = ()
    sources: tuple[str, ...] = ()

    def with_topics(self, wanted: Sequence[WantedTopic], have: Mapping[str, Topic]) -> TopicPlan:
        """Return the plan with more topics, compared with the existing topics ``have``."""
        differences = [each for topic in wanted if topic.name in have for each in _differences(have[topic.name], topic)]
        differing = {each.topic for each in differences}
        as_wanted = [topic.name for topic in wanted if topic.name in have and topic.name not in differing]
        return TopicPlan(
            make=(*self.make, *(topic for topic in wanted if topic.name not in have)),
            as_wanted=(*self.as_wanted, *as_wanted),
            differences=(*self.differences, *differences),
            sources=self.sources,
        )


def plan_topics(topology: Topology, settings: Settings, have: Mapping[str, Topic]) -> TopicPlan:
    """Return the plan of `dedup apply`. Raises StateIncompatible if a source topic is missing."""
    sources = {name: topic for name, topic in have.items() if name in topology.source.topics}
    wanted = missing_topics(topology, settings, sources)
    log_topic = None if topology.direct else have.get(topology.repartition_topic)
    if log_topic is not None:
        # Source topics may have more partitions by now, but only the changelog must match the repartition topic.
        fitting = {name: topic.partitions for name, topic in have.items()}
        fitting[topology.changelog_topic] = log_topic.partitions
        wanted = [replace(topic, partitions=fitting.get(topic.name, topic.partitions)) for topic in wanted]
    return TopicPlan(sources=topology.source.topics).with_topics(wanted, have)


def _differences(found: Topic, wanted: WantedTopic) -> Iterator[Difference]:
    if wanted.partitions not in (found.partitions, BROKER_DEFAULT):
        yield Difference(found.name, "partitions", str(found.partitions), str(wanted.partitions))
    for key, value in wanted.configs.items():
        known = found.configs.get(key)
        if known is None or set(known.split(",")) == set(value.split(",")):
            continue
        if key == "max.message.bytes" and int(known) >= int(value):
            continue  # a larger limit causes no problem
        yield Difference(found.name, key, known, value)


async def refuse_plan(topology: Topology, plan: TopicPlan, wire: Wire, admin: Admin) -> None:
    """Raise StateIncompatible if the topics of the plan must not be created.

    The topics must not be created if the changelog or the repartition topic is missing even though the group has read
    records, or if the partition counts of the existing topics and the planned topics do not match.
    """
    planned = {topic.name: Topic(topic.name, "", topic.partitions) for topic in plan.make}
    if not planned.keys().isdisjoint(state_topics(topology)) and not await group_is_new(topology, wire, admin):
        refuse_deleted(topology, set(topic_names(topology)) - planned.keys(), done="created")
    refuse_misfits(topology, {**planned, **await admin.topics(topic_names(topology))})


async def make(topology: Topology, plan: TopicPlan, wire: Wire, admin: Admin) -> list[str]:
    """Create the topics of the plan, and return their names.

    Raises StateIncompatible before any topic is created, as `refuse_plan` does, or afterward if partition counts do not
    match because another process has created topics.
    """
    await refuse_plan(topology, plan, wire, admin)
    made = await admin.create(plan.make)
    refuse_misfits(topology, await admin.settled(topic_names(topology)))
    return made


async def broker_findings(topology: Topology, settings: Settings) -> list[Finding]:
    """Return the findings of `dedup check --broker`. Raises BrokerUnavailable if the cluster does not respond."""
    async with Admin(Connection.of(settings)) as admin:
        have = await admin.topics(known_names(topology))
    return compare(topology, settings, have)


def compare(topology: Topology, settings: Settings, have: Mapping[str, Topic]) -> list[Finding]:
    """Return the findings about a topology's topics. A finding is an error if it makes a worker refuse to start."""
    try:
        plan = plan_topics(topology, settings, have)
    except StateIncompatible as error:
        return [Finding("error", "source_missing", str(error))]
    findings = [
        Finding("warning", "topic_missing", f"Topic {topic.name!r} does not exist; `run` or `apply` creates it.")
        for topic in plan.make
    ]
    output = topology.output.topic if topology.output is not None and topology.direct else None
    must_fit = {topology.changelog_topic, output}
    lost = dict(losing(topology, have, plan.make))
    findings += [Finding("warning", "forwarded_deleted", sentence) for sentence in lost.values()]
    for each in plan.differences:
        if each.topic in lost and each.what == "retention.ms":
            continue
        misfit = each.what == "partitions" and each.topic in must_fit
        level: Literal["error", "warning"] = "error" if misfit else "warning"
        text = f"Topic {each.topic!r} has {each.what} {each.found}, not {each.wanted}."
        findings.append(Finding(level, "topic_differs", text))
    findings += _sources(topology, have)
    return sorted(findings, key=lambda finding: finding.level != "error")


def _sources(topology: Topology, have: Mapping[str, Topic]) -> Iterator[Finding]:
    for sentence in _created(topology, have):
        yield Finding("error", "source_create_time", sentence)
    for name in topology.source.topics:
        configs = have[name].configs
        kept_ms = int(configs.get("retention.ms", -1))
        if 0 <= kept_ms < topology.window.guard_ms:
            yield Finding(
                "warning",
                "retention_below_guard",
                f"Source topic {name!r} keeps records for {kept_ms} ms, less than the guard period: after `dedup "
                "reset` its sightings could not be rebuilt.",
            )
        if "compact" in configs.get("cleanup.policy", ""):
            yield Finding(
                "warning",
                "source_compacted",
                f"Source topic {name!r} is compacted: records may be removed before they are judged, and `verify` "
                "cannot distinguish that from a loss.",
            )


# A renamed topology, or a second topology with the same output, begins at `start` without state, and would forward
# records that the output already contains. The order of the following two checks prevents races. The first check looks
# for records below the output's last stable offset. The second check finds out whether this fleet has written to its
# changelog, as every transaction of a task does before it ends. `dedup reset` and `--onto-existing-output` mark all
# records below the output's ends as old. Therefore, workers that start later need no option, and `dedup verify` skips
# these records.


async def refuse_used_output(topology: Topology, wire: KafkaWire, admin: Admin, *, meant: bool) -> None:
    """Check that a new group may write to the output.

    Raises StateIncompatible and changes nothing if the output contains committed records that this topology has not
    written, unless these records are marked as old. If ``meant`` is True, the user wants to write to the existing
    output, so the function marks the existing records as old instead of raising the error.
    """
    if topology.output is None:
        return
    written = [name for name in topology.written_topics if name not in state_topics(topology)]
    have = await admin.topics(written)
    places = [place for topic in have.values() for place in topic.places]
    ends = await at_once(lambda place: answered(wire, lambda: wire.stable_end(place)), places)
    outputs = sorted(place for place in places if place.topic in topology.forwards_to)
    holding = await at_once(lambda place: _holds_records(topology, wire, place, ends[place]), outputs)
    used = [place for place, holds in holding.items() if holds]
    if not used or await _has_written(topology, wire, admin):
        return
    if not meant:
        raise _refusal(topology, used, ends)
    await _leave_mark(topology, wire, ends)


async def begins_anew(topology: Topology, settings: Settings, wire: KafkaWire, admin: Admin, *, meant: bool) -> bool:
    """Return whether a worker that starts now begins without any state, neither in the cluster nor on this machine.

    Raises StateIncompatible if a reset was interrupted, or if `refuse_used_output` raises it. ``meant`` is passed on.
    """
    marked = TopicPartition(topology.source.topics[0], 0)
    found = await committed_position(wire, topology.name, marked, stable=False)
    if found is not None:
        refuse_half_reset(found.metadata, marked)
    fresh = await group_is_new(topology, wire, admin) and not (settings.state_dir / topology.name).exists()
    if fresh:
        await refuse_used_output(topology, wire, admin, meant=meant)
    return fresh


async def _has_written(topology: Topology, wire: KafkaWire, admin: Admin) -> bool:
    """Return whether a fleet of this topology has ever written to its changelog or committed offsets."""
    for topic in (await admin.topics([topology.changelog_topic])).values():
        if any((await ends_of(wire, topic.places)).values()):
            return True
    return not await group_is_new(topology, wire, admin)


async def _holds_records(topology: Topology, wire: KafkaWire, place: TopicPartition, end: int) -> bool:
    """Return whether the partition contains a committed record below ``end`` that is not marked as old."""
    try:
        marked = await committed_offset(wire, topology.reset_group, place, stable=False) or 0
    except BrokerUnavailable:
        marked = 0  # the worker is not permitted to read the mark
    try:
        return await first_record(wire, place, max((await bounds_of(wire, place)).start, marked), end) is not None
    except StateIncompatible:
        return True  # without permission to read the output, `_has_written` alone decides


async def _leave_mark(topology: Topology, wire: KafkaWire, ends: Mapping[TopicPartition, int]) -> None:
    try:
        await Group(wire, topology.reset_group).set_offsets(ends, for_ever=True)
    except BrokerUnavailable as error:
        log.warning(
            "the current ends of the output and side topics were not recorded: %s Until the first commit, every worker "
            "that starts needs %s, and `dedup verify` counts the records before these ends as this topology's.",
            error,
            _FLAG,
        )
        return
    log.warning(
        "%s: the group %r begins on topics that hold records; records below their current ends do not count as this "
        "topology's. Their IDs are not known, so they are forwarded again if they arrive again.",
        _FLAG,
        topology.name,
    )


def _refusal(topology: Topology, used: list[TopicPartition], ends: Mapping[TopicPartition, int]) -> StateIncompatible:
    first = used[0]
    return StateIncompatible(
        f"the group {topology.name!r} has judged nothing yet, but its output {first.topic!r} already holds records "
        f"({first} up to offset {ends[first]}; partitions with records: {len(used)}). Another "
        "topology writes there, or this one did under another name; the new group knows none of these IDs, so "
        "forwarded records would be forwarded again. Nothing was changed. Use the old name, or give this topology "
        "its own output; to rename it permanently, see Rename in docs/operations.md. If this is intended, run "
        f"`dedup run {_FLAG}`."
    )
