"""Defines what a worker shows besides its metrics, as values that `worker` creates and `web` renders as pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, Self

from dedup.metrics import TaskNumbers

Kind = Literal["duplicate", "conflict", "late", "dead_letter"]
"""The verdicts whose latest cases are kept for inspection."""
_MOST_SHOWN_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Noted:
    """A record with a committed verdict other than unique, and the reason."""

    kind: Kind
    source: str
    """topic/partition/offset."""
    id: str | None
    """The ID in the form that `dedup lookup` accepts; None if the record has no ID or only its digest is known."""
    event_time_ms: int | None
    """None if the record has no event time that could be judged."""
    judged_ms: int
    """Time by the worker's clock."""
    why: str


@dataclass(frozen=True, slots=True)
class Peer:
    """A group member in the last assignment; each member announces where it can be queried (as in KIP-67)."""

    worker: str
    url: str | None
    """URL of its pages; None if it serves none."""
    partitions: tuple[tuple[str, int], ...]
    """The feeding topic and partition of each of its tasks."""
    here: bool
    """Whether this is the worker itself."""


@dataclass(frozen=True, slots=True)
class TaskPulse:
    """The metrics of one task that are cheap to read every second."""

    numbers: TaskNumbers
    """The task's live counters, not a copy; a rebuilt task has new ones."""
    lag_records: int | None


@dataclass(frozen=True, slots=True)
class SeenId:
    """One sighting of an ID."""

    partition: int
    first_ms: int
    last_ms: int
    guarded_until_ms: int
    source: str
    """topic/partition/offset of the record that was forwarded."""
    live: bool
    """Whether the sighting still counts, because stream time has not passed its retention."""
    went: str | None
    """The output topic, with the partition if it is known; None for an observe-only topology."""


@dataclass(frozen=True, slots=True)
class LookedUp:
    """Everything one worker knows about an ID."""

    topology: str
    worker: str
    id: str
    sightings: tuple[SeenId, ...]
    asked: tuple[int, ...]
    """The partitions that were searched, which are this worker's."""
    partitions: int
    """Number of all partitions; if fewer were searched, another worker may know the ID. 0 while there is no assignment.
    """
    belongs_to: int | None
    """The ID's partition, if dedup itself placed it (repartitioned); None if the producers did."""
    candidates: tuple[int, ...]
    """The partitions it may be in."""
    feeding_topics: tuple[str, ...]
    """The topics of these partitions."""


@dataclass(frozen=True, slots=True)
class ShownRecord:
    """A source record that a user asked to see. No other payload is shown on a page."""

    place: str
    timestamp_ms: int
    key: str | None
    value: str | None
    """At most 4,096 bytes of it; bytes that are not UTF-8 are replaced."""
    value_bytes: int
    """Length of the whole value."""

    @classmethod
    def of(cls, place: str, timestamp_ms: int, key: bytes | None, value: bytes | None) -> Self:
        """Return the record with key and value as text."""
        return cls(place, timestamp_ms, _text(key), _text(value), len(value or b""))


def _text(content: bytes | None) -> str | None:
    return None if content is None else content[:_MOST_SHOWN_BYTES].decode(errors="replace")
