"""Reads members of CBOR values by path, from one value (`CborReader.read`) or as columns from a batch of values.

A value is exactly one item, usually a map, with no bytes after it. The steps of a path are text keys of maps and
indexes of arrays. Items that are not on a path are skipped without recursion and without allocating memory for
announced lengths, so their depth and length are not limited.

Source: RFC 8949, and IANA's registry of CBOR tags.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator
from functools import lru_cache
from typing import Final, cast
from uuid import UUID

from dedup.core.avro import Instant, Leaf, Refused
from dedup.core.content_tree import Scalar, Tree, TypedValue, deeper
from dedup.core.event_time import FieldTime, rfc3339_ms
from dedup.core.exact_json import ABSENT, Absent, Number
from dedup.core.member_reader import (
    INVALID_TIMESTAMP,
    MANY,
    MS_NS,
    Cursor,
    ItemReader,
    PathTree,
    ended,
    integer,
    no_item,
    one_of,
    runs_of,
)
from dedup.core.tracking_id import Path
from dedup.core.varint import Damaged

_UNSIGNED, _NEGATIVE, _BYTES, _TEXT, _ARRAY, _MAP, _TAG, _SIMPLE = range(8)
_SHORT: Final = 24
"""An argument below this number is part of an item's first byte."""
_INDEFINITE: Final = 31
_BREAK: Final = b"\xff"
_WIDTHS: Final = {24: 1, 25: 2, 26: 4, 27: 8}
"""Maps the additional information in an item's first byte to the number of bytes of the item's argument."""
_FLOATS: Final = {25: ">e", 26: ">f", 27: ">d"}


def _size_of(first: int) -> int:
    """Return the length of an item that begins with a given byte, or 0 if the byte does not determine the length."""
    major, info = first >> 5, first & 0x1F
    if major in {_BYTES, _TEXT}:
        return 1 + info if info < _SHORT else 0
    if major in {_UNSIGNED, _NEGATIVE} or (major == _SIMPLE and info != _SHORT):
        return 1 if info < _SHORT else 1 + _WIDTHS[info] if info in _WIDTHS else 0
    return 0


_SIZES: Final = bytes(map(_size_of, range(256)))
_RUNS: Final = runs_of(_SIZES)
_SIMPLES: Final[dict[int, Leaf]] = {20: False, 21: True, 22: None, 23: ABSENT}
"""Maps the supported simple values to leaves. The value ``undefined`` becomes ABSENT, as a missing member does."""
_LEAST_LONG_SIMPLE: Final = 32

_TIME_TEXT, _TIME_NUMBER, _BIGNUM, _NEGATIVE_BIGNUM, _DECIMAL, _UUID, _SELF_DESCRIBED = 0, 1, 2, 3, 4, 37, 55_799
_NUMBERS: Final = {_BIGNUM, _NEGATIVE_BIGNUM, _DECIMAL}
"""The tags whose content is a number. Two encodings of one number count as equal content."""
_UUID_BYTES: Final = 16
_MOST_BIGNUM_BYTES: Final = 1_024
_SECOND_NS: Final = 10**9
_SECOND_US: Final = 10**6
_US_NS: Final = 1_000

_ELEMENTS, _KEYS, _VALUES = -1, -2, -3
_NEXT: Final = {_ELEMENTS: _ELEMENTS, _KEYS: _VALUES, _VALUES: _KEYS}
"""Maps each kind of item in an array or a map of indefinite length to the kind of item that follows it."""
_KNOWN: Final = b"|".join(b"(?:%s)" % pattern for pattern in one_of(_SIZES).values())
_PAIRED: Final = {_ELEMENTS: re.compile(b"(?s)(?:%s)++" % _KNOWN), _KEYS: re.compile(b"(?s)(?:(?:%s){2})++" % _KNOWN)}
"""Maps each kind of item that an end marker may replace to a pattern for items, after which this kind is due again."""
_NESTED: Final = re.compile(rb"(?s)(?:[\xc0-\xd7\x81]|\xd8.|\xd9.{2}|\xda.{4}|\xdb.{8})++")
"""Matches the heads of tags and of arrays with one element, each of which contains exactly one item."""
_ENTRY_ITEMS: Final = {_ARRAY: 1, _MAP: 2}
_INSIDE: Final = {
    **{_ARRAY << 5 | count: count for count in range(_SHORT) if count != 1},
    **{_MAP << 5 | count: 2 * count for count in range(_SHORT)},
    _ARRAY << 5 | _INDEFINITE: _ELEMENTS,
    _MAP << 5 | _INDEFINITE: _KEYS,
}
"""Maps the first byte of an array or a map to what must follow inside it, if the first byte determines this."""

_Head = tuple[int, int, int]
"""The decoded head of an item: its major type, its additional information, and its argument (0 if indefinite)."""


class _Cursor(Cursor):
    """A read position in one CBOR value."""

    def item(self, wanted: PathTree) -> None:
        """Read one item, and store the requested values in `found`."""
        start, head = self.at, self._marked_head()
        if (head[0] == _ARRAY and wanted.elements) or (head[0] == _MAP and wanted.members):
            leaf: Leaf = Refused("map" if head[0] == _MAP else "array")
            self._inside(wanted, head)
        elif wanted.slots:
            leaf = self._leaf(head, start)
        else:
            self.at = start
            self._skip()
            return
        for slot in wanted.slots:
            self.found[slot] = leaf

    def tree(self, depth: int) -> Tree:
        """Read one item and everything in it. A tag that only marks an item as CBOR is not part of the item."""
        first = self._value[self.at] if self.at < len(self._value) else 0
        if first >> 5 == _TEXT and first & 0x1F < _SHORT:
            self.at += 1
            return self.text(self._bytes(first & 0x1F))
        head = self._marked_head()
        major, _, argument = head
        match major:
            case 4:
                below = deeper(depth)
                return [self.tree(below) for _ in self._each(head)]
            case 5:
                members: dict[bytes, Tree] = {}
                below = deeper(depth)
                for _ in self._each(head):
                    self.member(members, below)
                return members
            case 6:
                start = self.at
                number = self._meaning(argument, self._marked_head()) if argument in _NUMBERS else None
                if isinstance(number, int | Number):
                    return number
                self.at = start
                return TypedValue(f"tag {argument}", self.tree(deeper(depth)))
            case 7:
                simple = self._simple(head)
                if isinstance(simple, Refused):
                    return simple.raw if head[1] in _FLOATS else TypedValue(f"simple {argument}", None)
                return TypedValue("undefined", None) if isinstance(simple, Absent) else simple
            case _:
                return cast("Scalar", self._leaf(head, self.at))

    def _inside(self, wanted: PathTree, head: _Head) -> None:
        if head[0] == _ARRAY:
            for position in self._each(head):
                self._below(wanted.elements.get(position))
            return
        seen: set[bytes] = set()
        for _ in self._each(head):
            name = self.name()
            below = None if name is None else wanted.members.get(name)
            if name is not None and below is not None:
                self.is_repeated |= name in seen
                seen.add(name)
            self._below(below)

    def _below(self, wanted: PathTree | None) -> None:
        if wanted is None:
            self._skip()
        else:
            self.item(wanted)

    def _each(self, head: _Head) -> Iterator[int]:
        """Yield the position of each array element or map member. The caller must read each item before advancing."""
        _, info, count = head
        if info != _INDEFINITE:
            yield from range(count)
            return
        position = 0
        while not self._is_over():
            yield position
            position += 1

    def _is_over(self) -> bool:
        """Return whether an item of indefinite length ends at this position, and if so, skip the end marker."""
        over = self._value[self.at : self.at + 1] == _BREAK
        self.at += over
        return over

    def at_text(self) -> bool:
        """Return whether the first byte of the next item is that of a text."""
        return self.at < len(self._value) and self._value[self.at] >> 5 == _TEXT

    def name(self) -> bytes | None:
        """Read a map key. Return the bytes of a text key, or None for any other key."""
        start = self.at
        first = self._value[start] if start < len(self._value) else 0
        if first >> 5 == _TEXT and first & 0x1F < _SHORT:
            self.at = start + 1
            return self._bytes(first & 0x1F)
        head = self._marked_head()
        if head[0] == _TEXT:
            return b"".join(self._chunks(head))
        self.at = start
        self._skip()
        return None

    def _skip(self) -> None:
        """Skip one item and everything that it contains."""
        value, size = self._value, len(self._value)
        if self.at < size:
            end = self.at + _SIZES[value[self.at]]
            if self.at < end <= size:
                self.at = end
                return
        # ``due`` says what must follow: a number of items or, in an item of indefinite length, one key of `_NEXT`.
        due, outer = 1, list[int]()
        while due or outer:
            if due == 0:
                due = outer.pop()
                continue
            # Each item takes at least one byte, so the value cannot contain more items than bytes.
            if due > size - self.at or self.at == size:
                raise ended(size)
            first = value[self.at]
            known = _SIZES[first]
            if known and self.at + known <= size:
                due = self._skip_known(due, known)
                continue
            if first == _BREAK[0] and due in _PAIRED:
                self.at += 1
                due = 0
                continue
            due = due - 1 if due > 0 else _NEXT[due]
            inside = self._enter(first)
            if inside > 0 and due >= 0:
                due += inside
            elif inside:
                outer.append(due)
                due = inside

    def _skip_known(self, due: int, known: int) -> int:
        """Skip an item of ``known`` bytes and, if a pattern matches, further items of known size.

        Return what must follow, in the form of ``due`` in `_skip`.
        """
        at = self.at
        self.at += known
        if due in _PAIRED:
            run = _PAIRED[due].match(self._value, at)
            if run is not None:
                self.at = run.end()
                return due
        elif due >= MANY:
            run = _RUNS[known].match(self._value, at, at + due * known)
            if run is not None:
                self.at = run.end()
                return due - (self.at - at) // known
        return due - 1 if due > 0 else _NEXT[due]

    def _enter(self, first: int) -> int:
        """Skip a string, or only the head of any other item. Return what must follow, like ``due`` in `_skip`."""
        inside = _INSIDE.get(first)
        if inside is not None:
            self.at += 1
            return inside
        nested = _NESTED.match(self._value, self.at)
        if nested is not None:
            self.at = nested.end()
            return 1
        head = self._head()
        if head[0] in {_BYTES, _TEXT}:
            for _ in self._chunks(head):
                pass
        return head[2] * _ENTRY_ITEMS.get(head[0], 0)

    def _leaf(self, head: _Head, start: int) -> Leaf:
        major, _, argument = head
        match major:
            case 0 | 1:
                return integer(argument if major == _UNSIGNED else -1 - argument)
            case 2:
                return b"".join(self._chunks(head))
            case 3:
                # A character must not be split across two chunks.
                return "".join(map(self.text, self._chunks(head)))
            case 6:
                return self._tagged(argument)
            case 7:
                return self._simple(head)
            case _:
                self.at = start
                self._skip()
                return Refused("map" if major == _MAP else "array")

    def _simple(self, head: _Head) -> Leaf:
        _, info, argument = head
        if info in _FLOATS:
            raw = self._value[self.at - _WIDTHS[info] : self.at]
            return Refused("float", struct.unpack(_FLOATS[info], raw)[0])
        return _SIMPLES.get(argument, Refused("simple value"))

    def _tagged(self, tag: int) -> Leaf:
        """Return the value that a tag and its content represent, or `Refused` for a tag that the reader cannot use."""
        start = self.at
        leaf = self._meaning(tag, self._marked_head())
        if leaf is not None:
            return leaf
        self.at = start
        self._skip()
        return Refused(f"tag {tag}")

    def _meaning(self, tag: int, head: _Head) -> Number | int | UUID | Instant | Refused | None:
        major, info, _ = head
        match tag:
            case 0 if major == _TEXT:
                time_ms = rfc3339_ms("".join(map(self.text, self._chunks(head))))
                return INVALID_TIMESTAMP if time_ms is None else Instant(time_ms * MS_NS)
            case 1 if major == _SIMPLE and info in _FLOATS:
                return _instant_of(struct.unpack(_FLOATS[info], self._value[self.at - _WIDTHS[info] : self.at])[0])
            case 1 if major in {_UNSIGNED, _NEGATIVE}:
                return Instant(_whole(head) * _SECOND_NS)
            case 2 | 3 if major == _BYTES:
                number = self._bignum(tag, head)
                return None if number is None else integer(number)
            case 4 if major == _ARRAY:
                return self._decimal(head)
            case 37 if major == _BYTES:
                raw = b"".join(self._chunks(head))
                return UUID(bytes=raw) if len(raw) == _UUID_BYTES else None
        return None

    def _bignum(self, tag: int, head: _Head) -> int | None:
        raw = b"".join(self._chunks(head))
        if len(raw) > _MOST_BIGNUM_BYTES:
            return None
        return int.from_bytes(raw) if tag == _BIGNUM else -1 - int.from_bytes(raw)

    def _decimal(self, head: _Head) -> Number | None:
        """Return the number that a decimal fraction's exponent and mantissa represent, or None if they are invalid."""
        _, info, count = head
        if info != _INDEFINITE and count != 2:  # noqa: PLR2004 - RFC 8949, section 3.4.4
            return None
        if self._ends_early(info):
            return None
        first = self._marked_head()
        if first[0] not in {_UNSIGNED, _NEGATIVE} or self._ends_early(info):
            return None
        second = self._marked_head()
        mantissa = None
        if second[0] in {_UNSIGNED, _NEGATIVE}:
            mantissa = _whole(second)
        elif second[0] == _TAG and second[2] in {_BIGNUM, _NEGATIVE_BIGNUM}:
            content = self._marked_head()
            mantissa = self._bignum(second[2], content) if content[0] == _BYTES else None
        if mantissa is None or (info == _INDEFINITE and not self._is_over()):
            return None
        return Number(f"{mantissa}e{_whole(first)}")

    def _ends_early(self, info: int) -> bool:
        return info == _INDEFINITE and self._is_over()

    def _chunks(self, head: _Head) -> Iterator[bytes]:
        """Yield the content of a text or byte string, in several chunks if the string has an indefinite length."""
        major, info, size = head
        if info != _INDEFINITE:
            yield self._bytes(size)
            return
        while not self._is_over():
            inner, info, size = self._head()
            if inner != major or info == _INDEFINITE:
                raise Damaged(f"a string of indefinite length has another item in it (before byte {self.at})")
            yield self._bytes(size)

    def _marked_head(self) -> _Head:
        """Return the head of the next item, after skipping all tags that only mark the item as CBOR."""
        head = self._head()
        while head[0] == _TAG and head[2] == _SELF_DESCRIBED:
            head = self._head()
        return head

    def _head(self) -> _Head:
        if self.at >= len(self._value):
            raise ended(self.at)
        first = self._value[self.at]
        self.at += 1
        major, info = first >> 5, first & 0x1F
        if info < _SHORT:
            return major, info, info
        if info in _WIDTHS:
            argument = int.from_bytes(self._bytes(_WIDTHS[info]))
            if major == _SIMPLE and info == _SHORT and argument < _LEAST_LONG_SIMPLE:
                raise Damaged(f"a simple value has two bytes instead of one (before byte {self.at})")
            return major, info, argument
        if info != _INDEFINITE or major not in {_BYTES, _TEXT, _ARRAY, _MAP}:
            raise no_item(first, self.at - 1)
        return major, info, 0

    def _bytes(self, size: int) -> bytes:
        start = self.at
        if size > len(self._value) - start:
            raise Damaged(f"it ends inside an item of {size} bytes (byte {start})")
        self.at = start + size
        return self._value[start : self.at]


def _whole(head: _Head) -> int:
    return head[2] if head[0] == _UNSIGNED else -1 - head[2]


def _instant_of(seconds: float) -> Instant | Refused:
    if not math.isfinite(seconds):
        return INVALID_TIMESTAMP
    # Round to microseconds, because the double nearest to 1700000000.123 is less than this number.
    numerator, denominator = seconds.as_integer_ratio()
    return Instant((2 * numerator * _SECOND_US + denominator) // (2 * denominator) * _US_NS)


class CborReader(ItemReader):
    """Reads the members at given paths, and the event time, from CBOR values."""

    code = "not_cbor"
    name = "CBOR"
    cursor = _Cursor


@lru_cache(maxsize=256)
def cbor_reader(ids: tuple[Path, ...], time: FieldTime | None) -> CborReader:
    """Return the CBOR reader for the members at the given paths."""
    return CborReader(ids, time)
