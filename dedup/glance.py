"""What a worker shows of itself beside its numbers: values that `worker` makes and `web` turns into pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, Self

from dedup.metrics import TaskNumbers

Kind = Literal["duplicate", "conflict", "late", "dead_letter"]
"""The verdicts whose latest cases are kept for a look."""

MOST_SHOWN_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Noted:
    """One record that was not simply forwarded, and why; its verdict is committed."""

    kind: Kind
    source: str
    """topic/partition/offset."""
    id: str | None
    """As `dedup lookup` takes it; None where there is none, or only its digest is known."""
    event_time_ms: int | None
    """None where the record has none that could be judged."""
    judged_ms: int
    """By the worker's clock."""
    why: str


@dataclass(frozen=True, slots=True)
class Peer:
    """A member of the group, as the last assignment told of it (KIP-67: each member says where it can be asked)."""

    worker: str
    url: str | None
    """Where its pages are; None: it has none."""
    partitions: tuple[tuple[str, int], ...]
    """(feeding topic, partition) of its tasks."""
    here: bool
    """This worker itself."""


@dataclass(frozen=True, slots=True)
class TaskPulse:
    """The numbers of one task that are cheap to read every second."""

    numbers: TaskNumbers
    """The task's own counters, which go on counting: a task built anew has others."""
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
    """It still counts: stream time has not passed its retention."""
    went: str | None
    """The output topic, with the partition where that is known; None: observe only."""


@dataclass(frozen=True, slots=True)
class LookedUp:
    """What one worker knows of an ID."""

    topology: str
    worker: str
    id: str
    sightings: tuple[SeenId, ...]
    asked: tuple[int, ...]
    """The partitions whose state was asked: those of this worker."""
    partitions: int
    """Of how many; an ID that is not found in fewer may be another worker's. 0 while no assignment is in force."""
    belongs_to: int | None
    """Its partition, where dedup itself has placed it; None where the producers did."""
    candidates: tuple[int, ...]
    """The partitions it may be in."""
    feeding_topics: tuple[str, ...]
    """Of the dedup tasks, whose partitions these are."""


@dataclass(frozen=True, slots=True)
class ShownRecord:
    """A source record that somebody asked to see: the only way a payload gets onto a page."""

    place: str
    timestamp_ms: int
    key: str | None
    value: str | None
    """Bytes that are no UTF-8 are replaced; cut after `MOST_SHOWN_BYTES`."""
    value_bytes: int
    """Of the whole value."""

    @classmethod
    def of(cls, place: str, timestamp_ms: int, key: bytes | None, value: bytes | None) -> Self:
        """Return the record as text."""
        return cls(place, timestamp_ms, _text(key), _text(value), len(value or b""))


def _text(content: bytes | None) -> str | None:
    return None if content is None else content[:MOST_SHOWN_BYTES].decode(errors="replace")
