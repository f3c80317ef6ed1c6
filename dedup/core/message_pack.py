"""Reads members of MessagePack values by path, from one value (`read`) or as columns from a batch (`columns`).

A value is exactly one item, usually a map, with no bytes after it. The steps of a path are text keys of maps and
indexes of arrays. Items that are not on a path are skipped without recursion and without allocating memory for declared
lengths, so their depth and length are unlimited.

`columns` decodes values with msgspec, and uses `MessagePackReader.read` for values whose results might differ. If a map
repeats a name, msgspec keeps only the last member with this name. Therefore, `columns` checks that the bytes of a batch
contain each name on a path no more often than expected, and only in its shortest encoding. If this check fails,
`columns` checks that msgspec finds as many different names in each map on a path as the map announces. Source:
github.com/msgpack/msgpack/blob/master/spec.md.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Annotated, Any, Final, NamedTuple, cast

import msgspec

from dedup.core.avro import Instant, Leaf, Refused
from dedup.core.content_tree import KeyCache, Scalar, Tree, TypedValue, Without, deeper, encode_content, text_key
from dedup.core.event_time import MAX_MS, MIN_MS, FieldTime, TimeUnit
from dedup.core.exact_json import DECODE_REFUSALS
from dedup.core.member_reader import (
    INVALID_TIMESTAMP,
    MANY,
    Cursor,
    ItemReader,
    PathTree,
    ended,
    integer,
    no_item,
    runs_of,
    time_leaf,
)
from dedup.core.odd_rows import NotInColumns
from dedup.core.tracking_id import Path
from dedup.core.varint import Damaged

_FIXMAP, _FIXARRAY, _FIXSTR, _NIL = 0x80, 0x90, 0xA0, 0xC0
_NEGATIVE: Final = 0xE0
_FALSE, _TRUE = 0xC2, 0xC3
_BIN: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4}
_EXT: Final = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_FIXEXT: Final = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_STR: Final = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_ARRAY: Final = {0xDC: 2, 0xDD: 4}
_MAP: Final = {0xDE: 2, 0xDF: 4}
_FLOAT: Final = {0xCA: 4, 0xCB: 8}
_FLOATS: Final = {0xCA: ">f", 0xCB: ">d"}
_UNSIGNED: Final = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
_SIGNED: Final = {0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_FIXED: Final = {**_FLOAT, **_UNSIGNED, **_SIGNED, **{first: size + 1 for first, size in _FIXEXT.items()}}
"""Maps the first byte of each kind of item with a fixed length to the number of bytes that follow this byte."""
_SIZED: Final = {**_BIN, **_STR, **_EXT}
"""Maps the first byte of each kind of item with an announced length to the number of bytes that encode the length."""

_SINGLES: Final = {*range(_FIXMAP), _NIL, _FALSE, _TRUE, *range(_NEGATIVE, 0x100)}
_SIZES: Final = bytes(
    1 + _FIXED.get(first, first & 0x1F if first & 0xE0 == _FIXSTR else 0)
    if first in _SINGLES or first in _FIXED or first & 0xE0 == _FIXSTR
    else 0
    for first in range(256)
)
"""For each first byte of an item, the length of the item, or 0 if the first byte does not determine the length."""
_RUNS: Final = runs_of(_SIZES)

_TIMESTAMP: Final = -1
_SECOND_NS: Final = 10**9
_LOW_34: Final = (1 << 34) - 1
_MOST_FIXSTR: Final = 31
_NO_FIELD: Final = re.compile(r'["\\\x00-\x1f]')
"""The characters that msgspec refuses in the name of a field."""

_Int64 = Annotated[int, msgspec.Meta(ge=MIN_MS, le=MAX_MS)]
_ITEM: Final[msgspec.msgpack.Decoder[Any]] = msgspec.msgpack.Decoder()
_ENCODER: Final = msgspec.msgpack.Encoder()
_MOST_QUICK_BYTES: Final = 1 << 14
"""The maximum length of values whose content msgspec reads, because keys with equal hashes take it quadratic time."""
_PLAIN: Final = frozenset({str, int, float, bool, bytes, type(None)})
_NAMES: Final = KeyCache(text_key)
_MEMBERS: Final = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_TIME_TYPES: Final[dict[TimeUnit, Any]] = {"rfc3339": str, "timestamp": msgspec.msgpack.Ext}


class _Columns(NamedTuple):
    """Decodes the requested members of a whole batch of values with msgspec."""

    decoder: msgspec.msgpack.Decoder[Any]
    members: tuple[Any, ...]
    """For each path, a function that returns the member at the path in a decoded value."""
    names: tuple[tuple[bytes, bytes, int], ...]
    """For each name on a path, its shortest encoding, the end of all longer encodings, and its number of places."""
    tree: dict[str, Any]
    """The names on the paths, each with the names below it or, at the end of a path, with the type of the member."""
    has_timestamps: bool
    """Whether the last path leads to timestamps."""

    def decode(self, values: Sequence[bytes]) -> list[list[Leaf]]:
        """Return one column per path.

        Raises NotInColumns if any value must be read with `MessagePackReader.read`.
        """
        try:
            rows = list(map(self.decoder.decode, values))
        except DECODE_REFUSALS:
            raise NotInColumns(_undecodable(self.decoder, values)) from None
        # At this point, every row has each of these members.
        joined, count = b"".join(values), len(values)
        often = any(
            joined.count(shortest) > times * count or longer in joined for shortest, longer, times in self.names
        )
        repeating = _repeating(values, self.tree) if often else None
        if repeating:
            raise NotInColumns(repeating)
        columns = [list(map(member, rows)) for member in self.members]
        if self.has_timestamps:
            columns[-1] = [time_leaf(_extension(each.code, each.data), "timestamp") for each in columns[-1]]
        return columns


def _compiled(ids: Sequence[Path], time: FieldTime | None) -> _Columns | None:
    """Return the decoder for columns, or None without paths or if msgspec cannot follow a path."""
    paths = [*ids, *([] if time is None else [time.path])]
    if not paths:
        return None
    tree: dict[str, Any] = {}
    for path in paths:
        here = tree
        for step in path[:-1]:
            below = here.setdefault(str(step), {})
            if not isinstance(step, str) or not isinstance(below, dict):
                return None
            here = below
        if not isinstance(path[-1], str) or path[-1] in here:
            return None
        here[path[-1]] = str | _Int64
    if time is not None:
        here[str(paths[-1][-1])] = _TIME_TYPES.get(time.unit, _Int64)
    names = Counter(_names(tree))
    if any(not 0 < len(name.encode()) <= _MOST_FIXSTR or _NO_FIELD.search(name) for name in names):
        return None
    encoded = [(name.encode(), times) for name, times in names.items()]
    return _Columns(
        msgspec.msgpack.Decoder(_struct(tree)),
        tuple(attrgetter(_attribute(tree, path)) for path in paths),
        tuple((bytes((_FIXSTR + len(raw),)) + raw, bytes((len(raw),)) + raw, times) for raw, times in encoded),
        tree,
        time is not None and time.unit == "timestamp",
    )


def _undecodable(decoder: msgspec.msgpack.Decoder[Any], values: Sequence[bytes | msgspec.Raw]) -> list[int]:
    odd: list[int] = []
    for row, value in enumerate(values):
        try:
            decoder.decode(value)
        except DECODE_REFUSALS:
            odd.append(row)
    return odd


def _repeating(maps: Sequence[bytes | msgspec.Raw], tree: dict[str, Any]) -> list[int]:
    """Return the rows in which a map on a path may repeat a name, because msgspec found fewer names than the map
    announces.

    Every map must contain every name in ``tree``. This check takes as long as decoding the batch a second time.
    """
    try:
        members = list(map(_MEMBERS.decode, maps))
    except DECODE_REFUSALS:  # a map has a key that is not text
        return _undecodable(_MEMBERS, maps)
    # msgspec keeps one of several members with the same name, regardless of the name's encodings.
    odd = [
        row
        for row, (each, one) in enumerate(zip(members, maps, strict=True))
        if len(each) != _announced(memoryview(one))
    ]
    inside = [(name, below) for name, below in tree.items() if isinstance(below, dict)]
    return odd or [row for name, below in inside for row in _repeating([each[name] for each in members], below)]


def _announced(encoded: memoryview) -> int:
    """Return the number of members that the first bytes of a map announce."""
    first = encoded[0]
    return int.from_bytes(encoded[1 : 1 + _MAP[first]]) if first in _MAP else first & 0x0F


def _names(tree: dict[str, Any]) -> list[str]:
    below = [each for inner in tree.values() if isinstance(inner, dict) for each in _names(inner)]
    return [*tree, *below]


def _struct(tree: dict[str, Any]) -> Any:  # noqa: ANN401 - a type that is made here
    fields = [
        (f"m{at}", _struct(inner) if isinstance(inner, dict) else inner, msgspec.field(name=name))
        for at, (name, inner) in enumerate(tree.items())
    ]
    # Reference counting frees the rows before the next batch, so the garbage collector can ignore them.
    return msgspec.defstruct("Row", fields, gc=False)


def _attribute(tree: dict[str, Any], path: Path) -> str:
    here, steps = tree, []
    for step in map(str, path):
        steps.append(f"m{list(here).index(step)}")
        here = here[step]
    return ".".join(steps)


class _Cursor(Cursor):
    """A read position in one MessagePack value."""

    def item(self, wanted: PathTree) -> None:
        """Read one item, and store the requested values in `found`."""
        if not (wanted.members or wanted.elements):
            if not wanted.slots:
                self._skip()
                return
            self._put(wanted, self._leaf())
            return
        start = self.at
        first = self._first()
        count, is_map = self._entries(first)
        if count is None:
            self.at = start
            self._put(wanted, self._leaf())
            return
        self._put(wanted, Refused("map" if is_map else "array"))
        if is_map and wanted.members:
            self._members(wanted, count)
        elif not is_map and wanted.elements:
            self._elements(wanted, count)
        else:
            self.at = start
            self._skip()

    def tree(self, depth: int) -> Tree:
        """Read one item and everything in it."""
        start, first = self.at, self._first()
        if first in _EXT or first in _FIXEXT:
            return self._named(first)
        count, is_map = self._entries(first)
        if count is None:
            self.at = start
            leaf = self._leaf()
            return cast("Scalar", leaf.raw if isinstance(leaf, Refused) else leaf)  # a floating-point number
        below = deeper(depth)
        if is_map:
            members: dict[bytes, Tree] = {}
            for _ in range(count):
                self.member(members, below)
            return members
        return [self.tree(below) for _ in range(count)]

    def _named(self, first: int) -> Instant | TypedValue:
        size = _FIXEXT[first] if first in _FIXEXT else self._number(_EXT[first])
        kind, content = int.from_bytes(self._bytes(1), "big", signed=True), self._bytes(size)
        time = _extension(kind, content)
        return time if isinstance(time, Instant) else TypedValue(f"extension {kind}", content)

    def _put(self, wanted: PathTree, leaf: Leaf) -> None:
        for slot in wanted.slots:
            self.found[slot] = leaf

    def _members(self, wanted: PathTree, count: int) -> None:
        seen: set[bytes] = set()
        for _ in range(count):
            name = self.name()
            below = None if name is None else wanted.members.get(name)
            if name is None or below is None:
                self._skip()
                continue
            self.is_repeated |= name in seen
            seen.add(name)
            self.item(below)

    def _elements(self, wanted: PathTree, count: int) -> None:
        for position in range(count):
            below = wanted.elements.get(position)
            if below is None:
                self._skip()
            else:
                self.item(below)

    def at_text(self) -> bool:
        """Return whether the first byte of the next item is that of a text."""
        first = self._value[self.at] if self.at < len(self._value) else _NIL
        return first & 0xE0 == _FIXSTR or first in _STR

    def name(self) -> bytes | None:
        """Read a map key. Return the bytes of a text key, or None for any other key."""
        first = self._value[self.at] if self.at < len(self._value) else _NIL
        if first & 0xE0 == _FIXSTR:
            self.at += 1
            return self._bytes(first & 0x1F)
        if first in _STR:
            self.at += 1
            return self._bytes(self._number(_STR[first]))
        self._skip()
        return None

    def _skip(self) -> None:
        """Skip one item and everything that it contains."""
        left = 1
        value, size = self._value, len(self._value)
        while left:
            # Each item takes at least one byte, so the value cannot contain more items than bytes.
            if left > size - self.at:
                raise Damaged(f"it ends inside a map or an array (byte {size})") if left > 1 else ended(size)
            first = value[self.at]
            known = _SIZES[first]
            if known and left >= MANY:
                run = _RUNS[known].match(value, self.at, self.at + left * known)
                if run is not None:
                    left -= (run.end() - self.at) // known
                    self.at = run.end()
                    continue
            left -= 1
            if known and self.at + known <= size:
                self.at += known
                continue
            self.at += 1
            if first & 0xE0 == _FIXSTR:
                self._pass(first & 0x1F)
                continue
            count, is_map = self._entries(first)
            if count is not None:
                left += 2 * count if is_map else count
            else:
                self._pass(self._size(first))

    def _size(self, first: int) -> int:
        """Return the number of bytes that remain in an item that is neither a container nor a single byte."""
        if first in _FIXED:
            return _FIXED[first]
        if first not in _SIZED:
            raise no_item(first, self.at - 1)
        return self._number(_SIZED[first]) + (first in _EXT)

    def _entries(self, first: int) -> tuple[int | None, bool]:
        """Return the number of entries in a map or an array (None for other items), and whether the item is a map."""
        if first & 0xF0 in {_FIXMAP, _FIXARRAY}:
            return first & 0x0F, first < _FIXARRAY
        if first in _MAP or first in _ARRAY:
            return self._number(_MAP.get(first) or _ARRAY[first]), first in _MAP
        return None, False

    def _leaf(self) -> Leaf:
        start, first = self.at, self._first()
        if first < _FIXMAP or first >= _NEGATIVE:
            return first if first < _FIXMAP else first - 0x100
        if first & 0xE0 == _FIXSTR or first in _STR:
            return self.text(self._bytes(self._number(_STR[first]) if first in _STR else first & 0x1F))
        if first in {_NIL, _FALSE, _TRUE}:
            return None if first == _NIL else first == _TRUE
        if first in _FLOAT or self._entries(first)[0] is not None:
            self.at = start
            self._skip()
            if first in _FLOAT:
                return Refused("float", struct.unpack(_FLOATS[first], self._value[start + 1 : self.at])[0])
            return Refused("map" if first & 0xF0 == _FIXMAP or first in _MAP else "array")
        return self._sized_leaf(first)

    def _sized_leaf(self, first: int) -> Leaf:
        if first in _UNSIGNED:
            return integer(self._number(_UNSIGNED[first]))
        if first in _SIGNED:
            return int.from_bytes(self._bytes(_SIGNED[first]), "big", signed=True)
        if first in _BIN:
            return self._bytes(self._number(_BIN[first]))
        if first in _EXT or first in _FIXEXT:
            size = _FIXEXT[first] if first in _FIXEXT else self._number(_EXT[first])
            return _extension(int.from_bytes(self._bytes(1), "big", signed=True), self._bytes(size))
        raise no_item(first, self.at - 1)

    def _first(self) -> int:
        return self._bytes(1)[0]

    def _number(self, width: int) -> int:
        return int.from_bytes(self._bytes(width))

    def _bytes(self, size: int) -> bytes:
        start = self.at
        self._pass(size)
        return self._value[start : self.at]

    def _pass(self, size: int) -> None:
        if size > len(self._value) - self.at:
            if size == 1:
                raise ended(self.at)
            raise Damaged(f"it ends inside an item of {size} bytes (byte {self.at})")
        self.at += size


def _extension(kind: int, content: bytes) -> Instant | Refused:
    """Return the instant in a timestamp extension, or `Refused` for an invalid timestamp or another extension."""
    if kind != _TIMESTAMP:
        return Refused("extension")
    match len(content):
        case 4:
            seconds, nanoseconds = int.from_bytes(content), 0
        case 8:
            packed = int.from_bytes(content)
            seconds, nanoseconds = packed & _LOW_34, packed >> 34
        case 12:
            nanoseconds, seconds = struct.unpack(">Iq", content)
        case _:
            return INVALID_TIMESTAMP
    return INVALID_TIMESTAMP if nanoseconds >= _SECOND_NS else Instant(seconds * _SECOND_NS + nanoseconds)


class _NotPlain(Exception):
    """Raised for an item that msgspec does not decode to the result of `_Cursor.tree`."""


def _plain(item: Any, depth: int) -> Tree:  # noqa: ANN401 - what msgspec decodes
    """Convert an item that msgspec has decoded to the result of `_Cursor.tree`. Raises _NotPlain if impossible."""
    if isinstance(item, dict):
        below = deeper(depth)
        if any(type(name) is not str for name in item):
            raise _NotPlain
        return {_NAMES[name]: inner if type(inner) in _PLAIN else _plain(inner, below) for name, inner in item.items()}
    if isinstance(item, list):
        below = deeper(depth)
        return [_plain(inner, below) for inner in item]
    if type(item) not in _PLAIN:
        raise _NotPlain
    return cast("Scalar", item)


class MessagePackReader(ItemReader):
    """Reads the members at given paths, and the event time, from MessagePack values."""

    code = "not_msgpack"
    name = "MessagePack"
    cursor = _Cursor

    def __init__(self, ids: Sequence[Path], time: FieldTime | None) -> None:
        super().__init__(ids, time)
        self._columns: Final = _compiled(ids, time)

    def content(self, without: Without, value: bytes) -> bytes:
        """Return the canonical content of a value. Raises Unreadable unless the value is one item."""
        if len(value) > _MOST_QUICK_BYTES:
            return super().content(without, value)
        try:
            item = _ITEM.decode(value)
            # Equal bytes show that no map repeats a name, and that no number has more or fewer bits than Python's.
            if _ENCODER.encode(item) == value:
                return encode_content(_plain(item, 0), without)
        except (*DECODE_REFUSALS, _NotPlain):
            pass
        return super().content(without, value)

    def at_once(self, values: Sequence[bytes]) -> list[list[Leaf]]:
        """Return the columns of a batch. Raises NotInColumns if msgspec might not read every value exactly."""
        return super().at_once(values) if self._columns is None else self._columns.decode(values)


@lru_cache(maxsize=256)
def message_pack_reader(ids: tuple[Path, ...], time: FieldTime | None) -> MessagePackReader:
    """Return the MessagePack reader for the members at the given paths."""
    return MessagePackReader(ids, time)
