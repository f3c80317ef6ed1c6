"""Contains code shared by the readers for formats without a schema.

A MessagePack or CBOR value contains the types of its members, and all members of a CSV value are text. A reader skips
all members that are not on a path.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Final, assert_never
from uuid import UUID

from dedup.core.avro import Instant, Leaf, Refused
from dedup.core.content_tree import KeyCache, Tree, Without, encode_content, key_of, text_key
from dedup.core.event_time import FieldTime, TimeUnit
from dedup.core.exact_json import ABSENT, Absent, NotJudged, Number, Unreadable, with_foreign_format
from dedup.core.odd_rows import NotInColumns, at_rows, in_order, in_pieces, ordered
from dedup.core.tracking_id import Path
from dedup.core.varint import Damaged

MS_NS: Final = 1_000_000
MANY: Final = 8
"""The minimum number of items for which searching for a run of equally long items is worthwhile."""
INVALID_TIMESTAMP: Final = Refused("invalid timestamp")
"""Represents an item that has a timestamp type but contains no valid time."""
_INT64: Final = 1 << 63
_NAMES: Final = KeyCache(lambda name: text_key(name.decode()))


@dataclass(slots=True)
class PathTree:
    """The requested parts of an item: the item itself, some of its members, or some of its elements."""

    slots: list[int] = field(default_factory=list)
    """The positions of the item in the result."""
    members: dict[bytes, PathTree] = field(default_factory=dict)
    """The members to read if the item is a map, by their names in UTF-8."""
    elements: dict[int, PathTree] = field(default_factory=dict)
    """The elements to read if the item is an array, by their positions."""

    def at(self, path: Path) -> PathTree:
        """Return the node at a path below this item, creating the node if it does not exist."""
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
        """Return the members at the paths, followed by the event time.

        Raises Unreadable if the value does not have the expected format.
        """

    def at_once(self, values: Sequence[bytes]) -> list[list[Leaf]]:
        """Return a batch's columns, if all values have the most common form. This is much faster than `read`.

        Raises NotInColumns if any value must be passed to `read` instead. The default implementation always raises
        NotInColumns.
        """
        raise NotInColumns(range(len(values)))

    def columns(self, values: Sequence[bytes]) -> list[list[Leaf]]:
        """Return one column per path, followed by the event times.

        Raises NotInColumns with the rows whose values cannot be read.
        """

        def at_once(rows: Sequence[int]) -> list[list[Leaf]]:
            return self.at_once(at_rows(rows, values))

        each = partial(self._read, values)
        try:
            return self.at_once(values)
        except NotInColumns as refused:
            odd = refused.rows
        pieces = in_pieces(len(values), odd, at_once, each, each)
        places = in_order(len(values), pieces)
        return [ordered(places, parts, ABSENT) for parts in zip(*(columns for _, columns in pieces), strict=True)]

    def _read(self, values: Sequence[bytes], rows: Sequence[int]) -> list[list[Leaf]]:
        """Read the values in the given rows one by one. Raises NotInColumns with the rows that cannot be read."""
        columns: list[list[Leaf]] = [[] for _ in range(self.count)]
        refused: list[int] = []
        for row in rows:
            try:
                found = self.read(values[row])
            except NotJudged:
                refused.append(row)
                continue
            for column, leaf in zip(columns, found, strict=True):
                column.append(leaf)
        if refused:
            raise NotInColumns(refused)
        return columns

    def leaves(self, found: list[Leaf]) -> list[Leaf]:
        """Return the values, with `Refused` in place of each value whose type an ID or event time cannot have."""
        ids = len(found) - self.has_time
        leaves: list[Leaf] = [Refused("timestamp", leaf) if isinstance(leaf, Instant) else leaf for leaf in found[:ids]]
        return leaves if self._time is None else [*leaves, time_leaf(found[ids], self._time.unit)]


class Cursor(ABC):
    """A read position in one encoded value. Each method advances the position past the bytes that it reads."""

    def __init__(self, value: bytes, found: list[Leaf]) -> None:
        self._value: Final = value
        self.found: Final = found
        self.at = 0
        self.is_repeated = False
        """Whether a map has two members with the same name on a path."""
        self.not_utf8: Unreadable | None = None
        """The error for the first requested text that is not UTF-8."""

    @abstractmethod
    def item(self, wanted: PathTree) -> None:
        """Read one item, and store the requested values in `found`. Raises Damaged if the item is not valid."""

    @abstractmethod
    def tree(self, depth: int) -> Tree:
        """Read one item and everything in it. Raises Damaged if the item is not valid.

        Raises Unreadable if the item is nested too deeply.
        """

    @abstractmethod
    def name(self) -> bytes | None:
        """Read the key of a member of a map. Return the UTF-8 of a text, or None for any other key."""

    @abstractmethod
    def at_text(self) -> bool:
        """Return whether the first byte of the next item is that of a text."""

    def member(self, members: dict[bytes, Tree], depth: int) -> None:
        """Read the key and the value of one member of a map, and add them to ``members``."""
        name = self.name() if self.at_text() else None
        if name is None:
            key = key_of(self.tree(depth))
        else:
            key = _NAMES[name] if name.isascii() else text_key(self.text(name))
        self.is_repeated |= key in members
        members[key] = self.tree(depth)

    def text(self, raw: bytes) -> str:
        """Decode UTF-8 text. If this fails, store the error instead of raising it, because damage is reported first."""
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            said = f"a string of the value is not UTF-8 (byte {error.start} of the string)"
            self.not_utf8 = self.not_utf8 or Unreadable("not_utf8", said)
            return ""


class ItemReader(MemberReader):
    """Reads members from values of a binary format, in which a value is one item."""

    code: ClassVar[str]
    """The dead-letter reason for a value that does not have the format."""
    name: ClassVar[str]
    cursor: ClassVar[type[Cursor]]

    def __init__(self, ids: Sequence[Path], time: FieldTime | None) -> None:
        super().__init__(ids, time)
        self._without_ids: Final = PathTree()
        if time is not None:
            self._without_ids.at(time.path).slots.append(len(ids))

    def read(self, value: bytes) -> list[Leaf]:
        """Return the members at the paths, then the event time. Raises Unreadable unless the value is one item."""
        found: list[Leaf] = [ABSENT] * self.count
        fault = self._fault(value, self.wanted, found)
        if fault is None:
            return self.leaves(found)
        try:
            # If a value has several faults, all alternatives of an ID must report the same fault, so the ID's own
            # faults come last.
            raise self._fault(value, self._without_ids, found) or fault
        finally:
            del fault  # otherwise, the exception and this frame would refer to each other

    def content(self, without: Without, value: bytes) -> bytes:
        """Return the canonical content of a value. Raises Unreadable unless the value is one item."""
        cursor = self.cursor(value, [])
        try:
            tree = cursor.tree(0)
            self._end(cursor, value)
        except Damaged as damage:
            raise not_of_format(value, self.code, self.name, damage) from None
        if cursor.not_utf8 is not None:  # first, because names that are not UTF-8 seem to be repeated
            raise cursor.not_utf8
        if cursor.is_repeated:
            raise Unreadable("repeated_member", "a member is repeated in a map of the content")
        return encode_content(tree, without)

    def _fault(self, value: bytes, wanted: PathTree, found: list[Leaf]) -> Unreadable | None:
        """Store the requested parts of a value in ``found``, and return an error if the value cannot be read."""
        cursor = self.cursor(value, found)
        try:
            cursor.item(wanted)
            self._end(cursor, value)
        except Damaged as damage:
            return not_of_format(value, self.code, self.name, damage)
        if cursor.is_repeated:
            text = "a member on the path of the tracking ID or the event time is repeated"
            return Unreadable("repeated_member", text)
        return cursor.not_utf8

    def _end(self, cursor: Cursor, value: bytes) -> None:
        if cursor.at < len(value):
            raise Damaged(f"bytes follow its end (byte {cursor.at} of {len(value)})")


def one_of(sizes: bytes) -> dict[int, bytes]:
    """Map each item size in bytes to a regular expression, not yet compiled, that matches one item of this size.

    ``sizes`` contains, for each first byte of an item, the item's size, or 0 if the first byte does not determine the
    size.
    """
    firsts: dict[int, bytes] = {}
    for first, size in enumerate(sizes):
        firsts[size] = firsts.get(size, b"") + b"\\x%02x" % first
    return {size: b"[%s].{%d}" % (firsts[size], size - 1) for size in sorted(firsts) if size}


def runs_of(sizes: bytes) -> dict[int, re.Pattern[bytes]]:
    """Map each item size in bytes to a pattern that matches consecutive items of this size.

    ``sizes`` has the same form as in `one_of`. Skipping a run of items with such a pattern is a hundred times as fast
    as skipping the items one by one.
    """
    # The quantifier is possessive, because a run can have any number of items and a match never needs to backtrack.
    return {size: re.compile(b"(?s)(?:%s)++" % item) for size, item in one_of(sizes).items()}


def time_leaf(found: Leaf, unit: TimeUnit) -> Leaf:
    """Return a value as an event time in the given unit, or `Refused` for a value of another type."""
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
    """Return an integer as an int if it fits into 64 bits, and otherwise as a `Number`."""
    return number if -_INT64 <= number < _INT64 else Number(str(number))


def not_of_format(value: bytes, code: str, name: str, damage: Damaged) -> Unreadable:
    """Return the error for a value that does not have the expected format. ``name`` names this format."""
    text = f"the value is not {name}: {damage}"
    if value[:1] == b"{" and value[-1:] == b"}":
        return Unreadable(code, f"{text}; it looks like JSON", format_name="json")
    return with_foreign_format(value, code, text)


def no_item(first: int, at: int) -> Damaged:
    """Return the error for a value in which the byte ``first``, at position ``at``, cannot begin an item."""
    return Damaged(f"byte {first:02x} begins no item (byte {at})")


def ended(at: int) -> Damaged:
    """Return the error for a value that ends where an item must follow."""
    return Damaged(f"it ends where an item must follow (byte {at})")
