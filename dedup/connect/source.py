"""The interface between a source and the source connector: records, dead records, and positions to commit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class DeadRecord:
    """A part of the source that cannot become a record; it becomes a dead letter."""

    place: str
    """Its place in the source, with the prefix."""
    code: str
    detail: str
    value: bytes | None
    """None if it is too large; then ``detail`` has its length and digest."""
    row: int = 0
    """How many records of the same poll come before it."""


@dataclass(frozen=True, slots=True)
class SourceRecords:
    """What one poll returns: records of one part of the source, in its order."""

    part: str
    """A file or table. Records without a tracking ID keep their order because a part goes to one partition."""
    prefix: str
    values: list[bytes]
    places: Sequence[int | str]
    """The place of each record, after the prefix: unique in the source, and the same whenever it is read."""
    positions: Mapping[str, bytes | None]
    """What `restore` needs once all of this is committed; None for a position to delete."""
    after: Callable[[int], Mapping[str, bytes | None]]
    """Returns the positions for when only the records up to a row, and the dead ones before it, are committed."""
    dead: list[DeadRecord] = field(default_factory=list)

    def place(self, row: int) -> str:
        """Return a record's place in the source, with the prefix."""
        return f"{self.prefix}{self.places[row]}"


class RecordSource(Protocol):
    """Files or a table. Blocking; used from one thread at a time."""

    def restore(self, positions: Mapping[str, bytes]) -> None:
        """Continue from committed positions: what was polled and not committed is polled again."""

    def poll(self) -> SourceRecords | None:
        """Return what comes next; None if nothing has come since.

        Raises AuthorMistake or StateIncompatible when the source cannot be read without loss.
        """

    def waiting(self) -> list[str]:
        """Return what cannot be read yet, one sentence each."""

    def close(self) -> None:
        """Close files and connections."""
