"""What a store of one task's sightings is; it knows bytes and times, not Kafka.

State is cut into *segments*: a sighting ending at ``last_ms`` is kept under its state key in the segment that starts
at ``Window.segment_of(last_ms)``. Segments are dropped whole. The store never holds an uncommitted sighting, and its
changelog position is never newer than its keys: ``apply`` writes keys, task record and position in one atomic write.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from dedup.errors import InvariantBroken

Writes = Mapping[int, Mapping[bytes, bytes]]
"""Segment start in ms -> state key -> encoded value: *all* sightings of that ID that end in that segment."""


NOT_SAID: Final = -1


@dataclass(frozen=True, slots=True)
class FeedTime:
    """How far one feed (a partition of a source topic) has brought stream time."""

    topic: int
    """Position of the topic in ``source.topics``."""
    partition: int
    max_ms: int
    idle: bool


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """What a task must know to go on as if it had never stopped; one is written in every transaction."""

    fingerprint: bytes
    """Of the topology; state under another fingerprint is refused."""
    stream_time_ms: int
    feeds: tuple[FeedTime, ...]
    next_offset: int
    """Of the feeding partition: everything below it was judged."""
    segment_ms: int
    """Width of the segments that new sightings go to."""
    kept_from: int = NOT_SAID
    """The changelog offset from which on everything that live segments hold was written; `NOT_SAID` by a new state."""
    feeding_topic_id: str = ""
    """Kafka's id of the topic that ``next_offset`` is of, 32 hex digits; empty in records of earlier releases."""

    def counts_on_more(self, begin: int) -> bool:
        """Whether live segments hold what was written below ``begin``, where the changelog starts."""
        return NOT_SAID < self.kept_from < begin


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """Whose state a directory holds; a store of anybody else is refused."""

    topology: str
    partition: int
    changelog_topic_id: str
    """Kafka's id of the changelog topic: a topic deleted and made again has another."""

    def __str__(self) -> str:
        return f"{self.topology} partition {self.partition} (changelog topic id {self.changelog_topic_id})"


class Store(Protocol):
    """The applied state of one task. Not thread-safe: one task owns it."""

    @property
    def task_record(self) -> TaskRecord | None:
        """The last applied task record; None in a fresh store."""

    @property
    def position(self) -> int:
        """The changelog offset to restore from; 0 in a fresh store."""

    def get_many(self, segment: int, ids: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return the encoded values of the IDs that the segment holds; unknown IDs are absent."""

    def get_each(self, segments: Sequence[int], ids: Sequence[bytes]) -> dict[int, dict[bytes, bytes]]:
        """Return ``get_many`` per segment, segments without a hit left out; the quick way to ask several."""

    def segments(self) -> tuple[int, ...]:
        """Return the starts of the segments held, ascending; of every grid that was in use."""

    def apply(self, writes: Writes, record: TaskRecord | None, position: int) -> None:
        """Make sightings, task record and position durable in one atomic write, also over a SIGKILL.

        ``record`` None keeps the stored one. Raises InvariantBroken if the position moves back.
        """

    def drop_below(self, oldest_live_ms: int, segment_ms: int) -> tuple[int, ...]:
        """Drop every segment that ends at or before ``oldest_live_ms``; return their starts, ascending.

        A segment ends at its start plus the greatest of ``segment_ms`` and the widths it was written under.
        """

    def clear(self) -> None:
        """Forget sightings, task record and position in one atomic write, also over a SIGKILL; the store stays open."""

    def warm(self, ids: int) -> bool:
        """Make look-ups of up to ``ids`` more IDs as quick as they get; True when there is nothing left to do."""

    def first_offset(self, segment: int) -> int | None:
        """Return a changelog offset at or below the first that wrote into the segment; None if it is not held."""

    def approximate_bytes(self) -> int:
        """Return roughly what the state takes on disk (in memory, for the memory store)."""

    def count_ids(self) -> int:
        """Return an estimate of the number of (segment, ID) pairs."""

    def sightings(self) -> Iterator[tuple[int, bytes, bytes]]:
        """Yield (segment, state key, encoded value), ordered; raises TaskCorrupted on an unreadable one."""

    def close(self) -> None:
        """Release the store; closing twice is allowed."""

    def wipe(self) -> None:
        """Close the store and delete all of it."""


def refuse_unstorable(stored: int, writes: Writes, position: int) -> None:
    """Raise InvariantBroken if the changelog position moves back from ``stored``, or a state key is empty."""
    if any(b"" in values for values in writes.values()):
        raise InvariantBroken("an empty state key was to be stored: no tracking ID encodes to nothing.")
    if position < stored:
        raise InvariantBroken(
            f"a store at changelog position {stored} was to be moved back to {position}: two owners write one store, "
            "or a batch was applied twice. Stop the worker; the changelog holds the truth, restart restores from it."
        )
