"""Defines the interface of the sources of `dedup ingest`, and the records that each source returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

DIGEST_BYTES: Final = 32
"""The length of the BLAKE2b digest that replaces a value that is too large for the dead-letter topic."""


@dataclass(frozen=True, slots=True)
class DeadRecord:
    """A line or row of the source that becomes a dead letter because it cannot become a record."""

    place: int | str
    """The place in the source, such as a byte offset, without the prefix from `SourceRecords`."""
    code: str
    detail: str
    value: bytes | None
    """The value, or None if the value is too large; ``detail`` then contains the value's length and digest."""
    row: int = 0
    """The number of records of the same poll that precede the dead record."""


@dataclass(frozen=True, slots=True)
class SourceRecords:
    """The result of one poll: records from one part of the source, such as a file, in the order of the source."""

    part: str
    """Identifies a file or a table. Without tracking IDs, all records of a part go to one partition, in order."""
    prefix: str
    values: list[bytes]
    places: Sequence[int | str]
    """The place of each record, without the prefix. Each place is unique in the source and never changes."""
    position: bytes
    """The position in the part after these records, which applies once all these records are committed."""
    after: Callable[[int], bytes]
    """Maps a row to the position that applies if only records and dead records up to this row are committed."""
    dead: list[DeadRecord] = field(default_factory=list)
    path: str = ""
    """The path of the records' file, for log messages, or an empty string if the records do not come from a file."""


class RecordSource(Protocol):
    """A source of records: files or a table. All methods block, and only one thread may use a source at a time."""

    def restore(self, positions: Mapping[str, bytes]) -> None:
        """Go back to the committed positions, so that `poll` returns uncommitted records again."""

    def poll(self) -> SourceRecords | None:
        """Return the next records, or None if no records are available yet.

        Raises AuthorMistake or StateIncompatible if the source cannot be read without loss.
        """

    def committed(self, positions: Mapping[str, bytes]) -> None:
        """Release the resources for rereading the records before ``positions``, because they are now committed."""

    def waiting(self) -> list[str]:
        """Return a sentence for each part of the source whose last data is incomplete, and therefore unreadable."""

    def close(self) -> None:
        """Close files and connections."""
