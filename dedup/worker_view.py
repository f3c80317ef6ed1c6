"""Defines the data, other than metrics, that a worker reports about itself to the web pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, Self

from dedup.errors import Problem, SettingsError
from dedup.metrics import TaskNumbers

Kind = Literal["duplicate", "conflict", "late", "dead_letter"]
"""The kinds of records whose latest examples are kept for inspection."""
STUCK_S: Final = 30.0
"""A task is considered stuck if it commits nothing while records wait for this many seconds longer than the commit
interval.
"""
_MOST_SHOWN_BYTES: Final = 4096


def id_bytes(text: str) -> bytes:
    """Encode an ID that a user has entered. Raises SettingsError if the ID cannot be encoded as UTF-8."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        said = f"{text!r} is not UTF-8; only an ID that is UTF-8 can be looked up"
        raise SettingsError([Problem("ID", said)]) from None


@dataclass(frozen=True, slots=True)
class Noted:
    """A record with a committed verdict other than unique, and the reason for the verdict."""

    kind: Kind
    source: str
    """Position of the record, as topic/partition/offset."""
    id: str | None
    """The ID in the form that `dedup lookup` accepts, or None without an ID or if only its digest is known."""
    event_time_ms: int | None
    """The event time in milliseconds, or None if the record has no usable event time."""
    judged_ms: int
    """The time when the record was judged, according to the worker's clock."""
    why: str


@dataclass(frozen=True, slots=True)
class Peer:
    """A member of the consumer group, with the URL of its web pages, announced in the last rebalance (as in KIP-67)."""

    worker: str
    url: str | None
    """URL of the member's pages, or None if the member serves no pages."""
    partitions: tuple[tuple[str, int], ...]
    """The feeding topic and partition of each of the member's tasks."""
    here: bool
    """True if this member is the worker that returns the list."""


@dataclass(frozen=True, slots=True)
class TaskPulse:
    """The metrics of one task that are cheap enough to read every second."""

    numbers: TaskNumbers
    """The task's live counters, not a copy. A task that is recreated has new counters."""
    lag_records: int | None
    topic: str
    """The topic that feeds the task."""
    partition: int
    state: str
    unstable_records: int | None = None
    """See `TaskSeen.unstable_records`."""


@dataclass(frozen=True, slots=True)
class SeenId:
    """One sighting of an ID."""

    partition: int
    first_ms: int
    last_ms: int
    guarded_until_ms: int
    source: str
    """Position of the forwarded record in its source, as topic/partition/offset."""
    live: bool
    """True until stream time has passed the sighting's retention, after which the sighting no longer counts."""
    went: str | None
    """The output topic, with the partition if known, or None for an observe-only topology."""


@dataclass(frozen=True, slots=True)
class LookedUp:
    """Everything that one worker knows about an ID."""

    topology: str
    worker: str
    id: str
    sightings: tuple[SeenId, ...]
    asked: tuple[int, ...]
    """The partitions that were searched, which are this worker's partitions."""
    partitions: int
    """Total number of partitions, or 0 while the worker has no assignment."""
    belongs_to: int | None
    """The ID's partition if dedup repartitions the records, or None if the producers choose the partition."""
    candidates: tuple[int, ...]
    """The partitions that the ID may be in."""
    feeding_topics: tuple[str, ...]
    """The topics that dedup tasks read. The partition numbers in the other fields refer to these topics."""


@dataclass(frozen=True, slots=True)
class ShownRecord:
    """A source record that a user asked to see. The web pages show no other record's payload."""

    place: str
    timestamp_ms: int
    key: str | None
    value: str | None
    """At most the first 4,096 bytes of the value, with bytes that are not UTF-8 replaced."""
    value_bytes: int
    """Length of the whole value in bytes."""

    @classmethod
    def of(cls, place: str, timestamp_ms: int, key: bytes | None, value: bytes | None) -> Self:
        """Return the record with its key and value as strings."""
        return cls(place, timestamp_ms, _text(key), _text(value), len(value or b""))


def _text(content: bytes | None) -> str | None:
    return None if content is None else content[:_MOST_SHOWN_BYTES].decode(errors="replace")
