"""What a topology file says, checked and complete: past `parse` nothing asks again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Final, Literal, assert_never

from dedup.core.event_time import EventTime, FieldTime, RecordTime
from dedup.core.fold import OnConflict, OnFuture, OnMissing, OnTombstone, Rules
from dedup.core.paths import Path, format_path
from dedup.core.tracking_id import (
    ENCODING_VERSION,
    ContentRule,
    FieldRule,
    FieldsRule,
    HeaderRule,
    KeyRule,
    RawContentRule,
    Rule,
    TrackingId,
)
from dedup.core.window import Window

_FINGERPRINT_BYTES: Final = 16
_WINDOW_RULE: Final = 1
"""Version of what a stored sighting means; another number can not read today's state."""

Format = Literal["json", "bytes"]
Start = Literal["earliest", "latest"] | int
"""Where a topology without state begins to read; a number is a record time in ms."""
SubTopology = Literal["dedup", "repartition"]
"""The two kinds of task."""


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """Where records come from."""

    topics: tuple[str, ...]
    format: Format = "json"
    partitioned_by_tracking_id: bool = False
    """Equal IDs are in equal partitions already: the producers see to it."""
    start: Start = "earliest"


@dataclass(frozen=True, slots=True)
class Output:
    """Where unique records go."""

    topic: str
    headers: bool = False
    """Adds `dedup-source` to every record."""


@dataclass(frozen=True, slots=True)
class LateTo:
    """Late records go to a topic of their own."""

    topic: str


@dataclass(frozen=True, slots=True)
class LateForward:
    """Late records go to the output, marked; duplicates among them are not found."""


@dataclass(frozen=True, slots=True)
class LateDrop:
    """Late records are counted and gone."""


Late = LateTo | LateForward | LateDrop


@dataclass(frozen=True, slots=True)
class StateSpec:
    """How state is kept."""

    standby_replicas: int = 1
    max_bytes_per_partition: int | None = None
    """The worker stops, with nothing lost, before a partition's state grows beyond; None: no bound."""


SinkType = Literal["text", "integer", "number", "boolean", "time", "json"]


@dataclass(frozen=True, slots=True)
class SinkColumn:
    """A column of a sink's table: where its value stands, and what it must be."""

    name: str
    path: Path
    type: SinkType


@dataclass(frozen=True, slots=True)
class SinkSpec:
    """The table with one row per tracking ID that `dedup sink` fills."""

    url: str
    """As written: a reference such as ``${env:DATABASE_URL}`` is resolved where it is used."""
    table: str
    columns: tuple[SinkColumn, ...]
    """Empty: the record's key and value, as bytes."""
    topic: str
    append: bool
    """An ID forwarded again after its guard period makes another row, told apart by its event time."""
    dead_letter: str


@dataclass(frozen=True)
class Topology:
    """One deduplication job."""

    name: str
    source: SourceSpec
    tracking_id: TrackingId
    window: Window
    dead_letter: str
    late: Late
    output: Output | None = None
    event_time: EventTime = field(default_factory=RecordTime)
    missing: OnMissing = OnMissing.DEAD_LETTER
    tombstones: OnTombstone = OnTombstone.FORWARD
    future: OnFuture = OnFuture.DEAD_LETTER
    max_clock_skew_ms: int = 3_600_000
    idle_after_ms: int = 60_000
    duplicates: str | None = None
    conflicts: str | None = None
    conflicts_counted: bool = False
    """`conflicts` was written, with a topic or without: payloads are compared."""
    fingerprint_exclude: tuple[Path, ...] = ()
    """Members left out when payloads are compared."""
    on_conflict: OnConflict = OnConflict.DUPLICATE
    state: StateSpec = StateSpec()
    sink: SinkSpec | None = None

    @property
    def direct(self) -> bool:
        """Whether dedup tasks feed on the source topic itself."""
        return len(self.source.topics) == 1 and self.source.partitioned_by_tracking_id

    @property
    def changelog_topic(self) -> str:
        """The topic that state is restored from."""
        return f"{self.name}.changelog"

    @property
    def reset_group(self) -> str:
        """The group whose offsets say where the last `dedup reset` left off, in sources and in topics written."""
        return f"{self.name}.reset"

    @property
    def repartition_topic(self) -> str:
        """The topic in which equal IDs meet; used unless `direct`."""
        return f"{self.name}.repartition"

    @property
    def feeding_topics(self) -> tuple[str, ...]:
        """The topics that the dedup tasks read."""
        return self.source.topics if self.direct else (self.repartition_topic,)

    @property
    def written_topics(self) -> tuple[str, ...]:
        """Every topic that tasks write, in the order of the topology file."""
        topics = [] if self.direct else [self.repartition_topic]
        if self.output is not None:
            topics.append(self.output.topic)
        topics += [topic for topic in (self.duplicates, self.conflicts) if topic is not None]
        if isinstance(self.late, LateTo):
            topics.append(self.late.topic)
        return (*topics, self.dead_letter, self.changelog_topic)

    @property
    def fingerprints_wanted(self) -> bool:
        """Whether payloads are compared; costs eight bytes an ID."""
        return self.conflicts_counted or self.on_conflict is not OnConflict.DUPLICATE

    @property
    def conflicts_go_to(self) -> str | None:
        """The topic of duplicates with another payload: their own, else that of all duplicates; None: counted only."""
        return self.duplicates if self.conflicts is None else self.conflicts

    @property
    def id_in_value(self) -> bool:
        """Whether the tracking ID is read from a JSON value, so that a null value has none."""
        return isinstance(self.tracking_id.rule, FieldRule | FieldsRule | ContentRule)

    @cached_property
    def rules(self) -> Rules:
        """What `fold` needs of this topology."""
        return Rules(
            self.window, self.missing, self.tombstones, self.future, self.on_conflict, self.fingerprints_wanted
        )

    def transactional_id(self, sub_topology: SubTopology, partition: int, source_topic: str | None = None) -> str:
        """Return a task's transactional id; ``source_topic`` is given for repartition tasks, and only for them."""
        parts = [self.name, sub_topology, source_topic, str(partition)]
        return ".".join(part for part in parts if part is not None)

    def state_fingerprint(self, partitions: Mapping[str, int]) -> bytes:
        """Return 16 bytes that differ where state of one topology can not be used by the other.

        ``partitions`` has the partition count of every source topic and feeding topic. The event time and the payload
        comparison are part of it: sightings stored by another clock, or without payloads, would give wrong verdicts.
        """
        return blake2b(self.state_identity(partitions).encode(), digest_size=_FINGERPRINT_BYTES).digest()

    def state_identity(self, partitions: Mapping[str, int]) -> str:
        """Return the text behind `state_fingerprint`, so that a message can say what differs."""
        identity = {
            "encoding": ENCODING_VERSION,
            "window_rule": _WINDOW_RULE,
            "tracking_id": rule_text(self.tracking_id.rule),
            "normalize": list(self.tracking_id.normalize),
            "event_time": event_time_text(self.event_time),
            "source_topics": list(self.source.topics),
            "direct": self.direct,
            "partitions": dict(sorted(partitions.items())),
            "payloads": [format_path(path) for path in self.fingerprint_exclude] if self.fingerprints_wanted else None,
        }
        return json.dumps(identity, sort_keys=True, separators=(",", ":"))


def rule_text(rule: Rule) -> str:
    """Return a tracking-ID rule as the topology file writes it. Part of the state fingerprint: do not reword."""
    match rule:
        case KeyRule():
            return "key: true"
        case HeaderRule(name):
            return f"header: {name}"
        case FieldRule(path):
            return f"field: {format_path(path)}"
        case FieldsRule(paths):
            return f"fields: [{', '.join(map(format_path, paths))}]"
        case ContentRule(exclude):
            return f"content: {{exclude: [{', '.join(map(format_path, exclude))}]}}"
        case RawContentRule():
            return "content: true"
        case never:
            assert_never(never)


def event_time_text(event_time: EventTime) -> str:
    """Return an event time as the topology file writes it. Part of the state fingerprint: do not reword."""
    match event_time:
        case RecordTime():
            return "record"
        case FieldTime(path, unit):
            return f"{{field: {format_path(path)}, unit: {unit}}}"
        case never:
            assert_never(never)
