"""Defines what a worker shows in addition to metrics, as values that `worker` creates and `web` renders as pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, Self

from dedup.metrics import TaskNumbers

Kind = Literal["duplicate", "conflict", "late", "dead_letter"]
"""The verdicts whose latest cases are kept for inspection."""
_MOST_SHOWN_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Noted:
    """A record with a committed verdict other than unique, and the reason for the verdict."""

    kind: Kind
    source: str
    """Position of the record, as topic/partition/offset."""
    id: str | None
    """The ID in the form that `dedup lookup` accepts; None if the record has no ID or only its digest is known."""
    event_time_ms: int | None
    """None if the record has no event time that could be judged."""
    judged_ms: int
    """Time of the verdict by the worker's clock."""
    why: str


@dataclass(frozen=True, slots=True)
class Peer:
    """A group member in the last assignment; each member announces where it can be queried (as in KIP-67)."""

    worker: str
    url: str | None
    """URL of the member's pages; None if the member serves none."""
    partitions: tuple[tuple[str, int], ...]
    """The feeding topic and partition of each of the member's tasks."""
    here: bool
    """True if this member is the worker that returns the list."""


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
    """Position of the record that was forwarded, as topic/partition/offset."""
    live: bool
    """Whether the sighting still counts, because stream time has not passed its retention."""
    went: str | None
    """The output topic, with the partition if it is known; None for an observe-only topology."""


@dataclass(frozen=True, slots=True)
class LookedUp:
    """Everything that one worker knows about an ID."""

    topology: str
    worker: str
    id: str
    sightings: tuple[SeenId, ...]
    asked: tuple[int, ...]
    """The partitions that were searched, which are those of this worker."""
    partitions: int
    """Total number of partitions; if fewer were searched, another worker may know the ID. 0 while the worker has no
    assignment.
    """
    belongs_to: int | None
    """The ID's partition, if dedup itself placed it (repartitioned); None if the producers did."""
    candidates: tuple[int, ...]
    """The partitions that the ID may be in."""
    feeding_topics: tuple[str, ...]
    """The topics of these partitions."""


@dataclass(frozen=True, slots=True)
class ShownRecord:
    """A source record that a user asked to see. Pages show no other payloads."""

    place: str
    timestamp_ms: int
    key: str | None
    value: str | None
    """The first 4,096 bytes of the value at most; bytes that are not UTF-8 are replaced."""
    value_bytes: int
    """Length of the whole value."""

    @classmethod
    def of(cls, place: str, timestamp_ms: int, key: bytes | None, value: bytes | None) -> Self:
        """Return the record with its key and value as text."""
        return cls(place, timestamp_ms, _text(key), _text(value), len(value or b""))


def _text(content: bytes | None) -> str | None:
    return None if content is None else content[:_MOST_SHOWN_BYTES].decode(errors="replace")
