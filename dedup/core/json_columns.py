"""Decodes the JSON members that contain IDs and event times from a whole batch of values at once.

The columns are used only if `extract_one` would certainly give the same result. These checks find the rows for which
the result might differ:

* One msgspec call decodes all values, joined by line feeds. Apart from surrounding white space, every value must begin
  with ``{`` and end with ``}``. The sequence ``}`` LF ``{`` can occur only between two values. Therefore, if the
  decoder returns as many structs as there are rows, each struct belongs to exactly one row.
* msgspec accepts invalid UTF-8 in members that it skips, so the joined bytes must be valid UTF-8.
* msgspec keeps the last of several members with the same name, so each name on a path may occur only once per row. A
  value is not read in columns if it contains an escape sequence for a character of such a name.
* A value that is long enough for excessive nesting may have at most `MAX_DEPTH` opening brackets.
* An ID must be a string or a 64-bit integer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np

from dedup.core.event_time import MAX_MS, MIN_MS, FieldTime, TimeUnit, times_ms_of
from dedup.core.exact_json import DECODE_REFUSALS, SHORT_BYTES, may_be_deep
from dedup.core.odd_rows import NotInColumns, is_utf8
from dedup.core.tracking_id import Path

_OPENING, _CLOSING = b"{}"
_BLANK: Final = b" \t\n\r"
_WORD_BYTES: Final = 4
_MEMBERS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])

_Int64 = Annotated[int, msgspec.Meta(ge=MIN_MS, le=MAX_MS)]
_Seconds = Annotated[int, msgspec.Meta(ge=-(MAX_MS // 1000), le=MAX_MS // 1000)]
_Id = str | _Int64
_TIME_TYPES: Final[dict[TimeUnit, tuple[Any, ...]]] = {
    "ms": (_Int64,),
    "us": (_Int64,),
    "s": (_Seconds, msgspec.Raw),
    "rfc3339": (str,),
    "timestamp": (),
}
"""Maps each unit to the types that the decoder tries for a time. For seconds, it tries whole numbers first."""


def _occurs_at_most(joined: bytes, quoted: bytes, times: int) -> bool:
    # Comparing the first four bytes as one word, vectorized at each of four offsets, is twice as fast as bytes.count.
    # If other names begin with the same bytes, only bytes.count is exact.
    if len(quoted) >= _WORD_BYTES:
        word = np.frombuffer(quoted, "<u4", 1)
        found = 0
        for offset in range(_WORD_BYTES):
            words = np.frombuffer(joined, "<u4", (len(joined) - offset) // _WORD_BYTES, offset)
            found += int(np.count_nonzero(words == word))
        if found <= times:
            return True
    return joined.count(quoted) <= times


def _rows_repeating(joined: bytes, objects: Sequence[bytes | msgspec.Raw], node: _Node) -> list[int]:
    """Return the rows in which an object, or an object nested in it, might repeat a member on a path.

    msgspec keeps the last of several members with the same name. A name that is not repeated occurs exactly once more
    in the object's text than in the values that msgspec kept.
    """
    kept = _MEMBERS.decode_lines(joined)
    values = b"\n".join(chain.from_iterable(map(dict.values, kept)))
    for name in node.members:
        quoted = f'"{name}"'.encode()
        if joined.count(quoted) != values.count(quoted) + len(objects):
            return [
                row
                for row, (text, members) in enumerate(zip(objects, kept, strict=True))
                if (found := bytes(text).count(quoted)) > 1
                and found != sum(bytes(value).count(quoted) for value in members.values()) + 1
            ]
    for name, below in node.members.items():
        if below.members:
            inner = [members[name] for members in kept]
            repeating = _rows_repeating(b"\n".join(inner), inner, below)
            if repeating:
                return repeating
    return []


@dataclass(frozen=True, slots=True)
class JsonColumns:
    """Decodes the members that contain IDs and event times from a whole batch of values at once."""

    decoders: tuple[msgspec.json.Decoder[Any], ...]
    ids: tuple[Callable[[Any], Any], ...]
    time: Callable[[Any], Any] | None
    unit: TimeUnit
    tree: _Node
    """The names on the paths, as a tree."""
    names: tuple[tuple[bytes, int], ...]
    """Each name on a path in quotes, as in a value, and the number of places on the paths where the name occurs."""
    spelling: re.Pattern[bytes]
    """The escape sequences that no value may contain, because they could spell a name on a path."""

    def decode(self, values: Sequence[bytes]) -> tuple[list[list[str | int]], list[int] | None]:
        """Return one column per ID path, and the column of event times.

        Raises NotInColumns if any row requires `extract_one`.
        """
        joined = b"\n".join(values)
        objects = _are_objects(joined, values)
        if not objects:
            values = [value.strip(_BLANK) for value in values]
            joined = b"\n".join(values)
            objects = _are_objects(joined, values)
        rows = self._rows(joined) if objects and self._is_plain(joined) else None
        if rows is None or len(rows) != len(values):
            raise NotInColumns(self._odd_rows(joined, values))
        # No member on a path may be repeated. At this point, every row has each of these members.
        if not all(_occurs_at_most(joined, quoted, places * len(values)) for quoted, places in self.names):
            repeating = _rows_repeating(joined, values, self.tree)
            if repeating:
                raise NotInColumns(repeating)
        columns = [list(map(member, rows)) for member in self.ids]
        return columns, None if self.time is None else times_ms_of(list(map(self.time, rows)), self.unit)

    def _is_plain(self, joined: bytes) -> bool:
        """Return whether values are UTF-8 and contain no escape sequence that could spell a name on a path."""
        # Searching for one byte is many times as fast as searching for a sequence.
        return (joined.isascii() or is_utf8(joined)) and (b"\\" not in joined or self.spelling.search(joined) is None)

    def _odd_rows(self, joined: bytes, values: Sequence[bytes]) -> list[int]:
        """Return rows that cannot be read in columns even on their own. Values must have no surrounding white space."""
        odd: list[int] = []
        plain = self._is_plain(joined) and max(map(len, values)) <= SHORT_BYTES
        decode = self.decoders[-1].decode  # it accepts everything that the other decoders accept
        for row, value in enumerate(values):
            try:
                decode(value)
            except DECODE_REFUSALS:
                odd.append(row)
                continue
            # For most values, this expression makes the calls below unnecessary.
            certainly = plain or (value.isascii() and b"\\" not in value and len(value) <= SHORT_BYTES)
            if not certainly and (may_be_deep(value) or not self._is_plain(value)):
                odd.append(row)
        return odd

    def _rows(self, joined: bytes) -> list[Any] | None:
        for decoder in self.decoders:
            try:
                return decoder.decode_lines(joined)
            except DECODE_REFUSALS:
                continue
        return None


def compile_columns(ids: Sequence[Path], time: FieldTime | None) -> JsonColumns | None:
    r"""Return the decoder for the fields of the ID and the time, or None if only `extract_one` can read the fields.

    Only `extract_one` can read an array element, or a field inside another requested field. `extract_one` is also
    needed for members whose names contain a character that JSON can write in several ways even without ``\u``. For
    example, JSON can write a slash as ``/`` or ``\/``.
    """
    paths = [*ids, time.path] if time is not None else list(ids)
    tree = _Node({}, None)
    for path in paths:
        if not tree.grow(path, is_time=time is not None and path == time.path):
            return None
    names = tree.names()
    if any(char in '"\\/' or char < " " for name in names for char in name):  # JSON has short escapes for these
        return None
    time_types: tuple[Any, ...] = (None,) if time is None else _TIME_TYPES[time.unit]
    if not time_types:
        return None
    if time is not None and time.path in ids:  # a part of an ID is a string or an integer
        time_types = time_types[:1]
    return JsonColumns(
        decoders=tuple(msgspec.json.Decoder(tree.struct(time_type)) for time_type in time_types),
        ids=tuple(attrgetter(tree.attribute(path)) for path in ids),
        time=None if time is None else attrgetter(tree.attribute(time.path)),
        unit="ms" if time is None else time.unit,
        tree=tree,
        names=tuple((f'"{name}"'.encode(), places) for name, places in names.items()),
        spelling=_escapes_for("".join(names)),
    )


def _escapes_for(text: str) -> re.Pattern[bytes]:
    """Return a pattern that matches each escape sequence that can spell a character of the text."""
    units = text.encode("utf-16-be")
    digits = sorted({units[at : at + 2].hex() for at in range(0, len(units), 2)})
    if not digits:
        return re.compile(b"(?!)")  # which never matches
    # A pattern that ignores case would take ten times as long.
    either = ["".join(f"[{digit}{digit.upper()}]" if digit.isalpha() else digit for digit in each) for each in digits]
    return re.compile(rf"\\u(?:{'|'.join(either)})".encode())


@dataclass(slots=True)
class _Node:
    members: dict[str, _Node]
    leaf: Literal["id", "time"] | None

    def grow(self, path: Path, *, is_time: bool) -> bool:
        here = self
        for step in path:
            if isinstance(step, int) or here.leaf is not None:
                return False
            here = here.members.setdefault(step, _Node({}, None))
        if here.members:
            return False
        here.leaf = "time" if is_time else "id"
        return True

    def names(self) -> Counter[str]:
        """Return each name in this tree, with the number of places where it occurs."""
        found = Counter(list(self.members))
        for node in self.members.values():
            found += node.names()
        return found

    def struct(self, time_type: object) -> object:
        if self.leaf is not None:
            return time_type if self.leaf == "time" else _Id
        fields = [
            (f"m{at}", node.struct(time_type), msgspec.field(name=name))
            for at, (name, node) in enumerate(self.members.items())
        ]
        # Reference counting frees the rows before the next batch, so the garbage collector can ignore them.
        return msgspec.defstruct("Row", fields, gc=False)

    def attribute(self, path: Path) -> str:
        here, steps = self, []
        for step in path:
            steps.append(f"m{list(here.members).index(str(step))}")
            here = here.members[str(step)]
        return ".".join(steps)


def _are_objects(joined: bytes, values: Sequence[bytes]) -> bool:
    """Return whether every value begins and ends like an object and is certainly not nested too deeply."""
    lengths = np.fromiter(map(len, values), np.int64, len(values))
    if lengths.min() == 0:
        return False
    ends = np.cumsum(lengths + 1) - 1
    text = np.frombuffer(joined, np.uint8)
    if not ((text[ends - lengths] == _OPENING).all() and (text[ends - 1] == _CLOSING).all()):
        return False
    return bool(lengths.max() <= SHORT_BYTES) or not any(map(may_be_deep, values))
