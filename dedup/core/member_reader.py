"""Defines what the readers of formats without a schema share: which members of a value are read, and as what.

The values of these formats say the types of their members. A reader passes over all members that no path names.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final, assert_never
from uuid import UUID

from dedup.core.avro import Instant, Leaf, Refused
from dedup.core.event_time import FieldTime, TimeUnit
from dedup.core.exact_json import ABSENT, Absent, NotJudged, Number, Unreadable, with_foreign_format
from dedup.core.tracking_id import Path
from dedup.core.varint import Damaged

MS_NS: Final = 1_000_000
MANY: Final = 8
"""From this number of items, it pays to look for a run of items of one size."""
_INT64: Final = 1 << 63


@dataclass(slots=True)
class PathTree:
    """What is read of one item of a value: the item itself, members of it, or elements of it."""

    slots: list[int] = field(default_factory=list)
    """The positions of the item in the result."""
    members: dict[bytes, PathTree] = field(default_factory=dict)
    """The members to read if the item is a map, by their names in UTF-8."""
    elements: dict[int, PathTree] = field(default_factory=dict)
    """The elements to read if the item is an array, by their positions."""

    def at(self, path: Path) -> PathTree:
        """Return what is read at a path below the item, and add it if there is nothing yet."""
        here = self
        for step in path:
            if isinstance(step, int):
                here = here.elements.setdefault(step, PathTree())
            else:
                here = here.members.setdefault(step.encode(), PathTree())
        return here


class MemberReader(ABC):
    """Reads the members at given paths, and the event time, from values of one format."""

    columnar: Final = True

    def __init__(self, ids: Sequence[Path], time: FieldTime | None) -> None:
        self.has_time: Final = time is not None
        self.count: Final = len(ids) + self.has_time
        self._time: Final = time
        self.wanted: Final = PathTree()
        for slot, path in enumerate([*ids, *([] if time is None else [time.path])]):
            self.wanted.at(path).slots.append(slot)

    @abstractmethod
    def read(self, value: bytes) -> list[Leaf]:
        """Return the members at the paths, the time last. Raises Unreadable if the value does not have the format."""

    def columns(self, values: Sequence[bytes]) -> list[list[Leaf]] | None:
        """Return one column per path, followed by the event times; return None if any value cannot be read."""
        try:
            rows = list(map(self.read, values))
        except NotJudged:
            return None
        return [list(column) for column in zip(*rows, strict=True)]

    def leaves(self, found: list[Leaf]) -> list[Leaf]:
        """Replace the items that cannot be an ID or, in the last place, cannot be an event time of the unit."""
        ids = len(found) - self.has_time
        leaves: list[Leaf] = [Refused("timestamp") if isinstance(leaf, Instant) else leaf for leaf in found[:ids]]
        return leaves if self._time is None else [*leaves, time_leaf(found[ids], self._time.unit)]


class Cursor(ABC):
    """A position in one value. Each method advances the position past what it reads."""

    def __init__(self, value: bytes, found: list[Leaf]) -> None:
        self._value: Final = value
        self.found: Final = found
        self.at = 0
        self.is_repeated = False
        """Whether a map has two members with the same name on a path."""

    @abstractmethod
    def item(self, wanted: PathTree) -> None:
        """Read one item, and put what is wanted of it into `found`. Raises Damaged if no item is there."""


class ItemReader(MemberReader):
    """Reads members from values of a binary format, in which a value is one item."""

    code: ClassVar[str]
    """The reason of a dead letter whose value does not have the format."""
    name: ClassVar[str]
    cursor: ClassVar[type[Cursor]]

    def read(self, value: bytes) -> list[Leaf]:
        """Return the members at the paths, the time last. Raises Unreadable if the value is not one item."""
        cursor = self.cursor(value, [ABSENT] * self.count)
        try:
            cursor.item(self.wanted)
            if cursor.at < len(value):
                raise Damaged(f"bytes follow its end (byte {cursor.at} of {len(value)})")
        except Damaged as damage:
            raise not_of_format(value, self.code, self.name, damage) from None
        if cursor.is_repeated:
            text = "a member on the path of the tracking ID or the event time is repeated"
            raise Unreadable("repeated_member", text)
        return self.leaves(cursor.found)


def runs_of(sizes: bytes) -> dict[int, re.Pattern[bytes]]:
    """Return, for each size of an item in bytes, a pattern of consecutive items of this size.

    ``sizes`` contains, for each first byte of an item, the item's size, or 0 if the first byte does not say it. Passing
    over a run in C is a hundred times as fast as passing over each of its items.
    """
    firsts: dict[int, bytes] = {}
    for first, size in enumerate(sizes):
        firsts[size] = firsts.get(size, b"") + b"\\x%02x" % first
    # Possessive, because the number of items in a run has no limit, and a run never has to be given back.
    return {size: re.compile(b"(?s)(?:[%s].{%d})++" % (firsts[size], size - 1)) for size in firsts if size}


def time_leaf(found: Leaf, unit: TimeUnit) -> Leaf:
    """Return an item as the event time in the given unit, or the refusal of an item of another type."""
    if found is None or isinstance(found, Absent | Refused):
        return found
    match unit:
        case "timestamp":
            return found.nanoseconds // MS_NS if isinstance(found, Instant) else Refused(_type_name(found))
        case "rfc3339":
            return found if isinstance(found, str) else Refused(_type_name(found))
        case "s" | "ms" | "us":
            is_number = isinstance(found, int | Number) and not isinstance(found, bool)
            return found if is_number else Refused(_type_name(found))
        case never:
            assert_never(never)


def _type_name(found: Leaf) -> str:
    names = {bool: "boolean", int: "integer", str: "text", bytes: "bytes", UUID: "uuid", Instant: "timestamp"}
    return names.get(type(found), "number")


def integer(number: int) -> int | Number:
    """Return an integer as it is represented among leaves: 64-bit integers as int, longer ones by their digits."""
    return number if -_INT64 <= number < _INT64 else Number(str(number))


def text_of(raw: bytes) -> str:
    """Return a string of a value. Raises Unreadable if the string is not UTF-8."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise Unreadable("not_utf8", f"a string of the value is not UTF-8 (byte {error.start} of the string)") from None


def not_of_format(value: bytes, code: str, name: str, damage: Damaged) -> Unreadable:
    """Return the error of a value that does not have its format. ``name`` is the name of the format."""
    text = f"the value is not {name}: {damage}"
    if value[:1] == b"{" and value[-1:] == b"}":
        return Unreadable(code, f"{text}; it looks like JSON", format_name="json")
    return with_foreign_format(value, code, text)


def no_item(first: int, at: int) -> Damaged:
    """Return the error of a value in which no item begins with the byte at a position."""
    return Damaged(f"byte {first:02x} begins no item (byte {at})")


def ended(at: int) -> Damaged:
    """Return the error of a value that ends where an item must follow."""
    return Damaged(f"it ends where an item must follow (byte {at})")
