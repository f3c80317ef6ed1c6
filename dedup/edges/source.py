"""What a source hands over: records to be, dead letters, and where it stands after them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Dead:
    """Something that can be no record."""

    place: str
    """Where it stands in the source."""
    code: str
    detail: str
    value: bytes | None
    """None where it is too large; then ``detail`` has length and digest."""
    row: int = 0
    """How many records of the piece come before it."""


@dataclass(frozen=True, slots=True)
class Found:
    """Records of one part of the source, in its order."""

    part: str
    """Records without a tracking ID of their own keep their order by going to one partition, this part's."""
    prefix: str
    values: list[bytes]
    places: Sequence[int | str]
    """Of each record, after the prefix: unique in the source for ever, the same whenever it is read."""
    positions: Mapping[str, bytes | None]
    """What `restore` is to get when all of this is committed."""
    after: Callable[[int], Mapping[str, bytes | None]]
    """Returns the same, for when only the records up to a row are committed, and the dead ones before it."""
    dead: list[Dead] = field(default_factory=list)

    def place(self, row: int) -> str:
        """Return where a record stands in the source."""
        return f"{self.prefix}{self.places[row]}"


class Source(Protocol):
    """Files or a table. Blocking; used from one thread at a time."""

    def restore(self, positions: Mapping[str, bytes]) -> None:
        """Go on from committed positions: what was polled and not committed is polled again."""

    def poll(self) -> Found | None:
        """Return what comes next; None where nothing has come since.

        Raises AuthorMistake or StateIncompatible where the source can not be read without a loss.
        """

    def waiting(self) -> list[str]:
        """Say what is there and can not be read yet."""

    def close(self) -> None:
        """Let go of files and connections."""
