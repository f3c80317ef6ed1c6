"""Reads named members of many JSON values together; extract.py explains why the result is certain.

The checks count how often member names occur in joined values that are known to be well-formed. A check may fail for
valid values, for example if a string in a value looks like a member name, but it never passes for a value with a
repeated member.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any, Final, Literal, assert_never

import msgspec
import numpy as np
import numpy.typing as npt

from dedup.core.event_time import MAX_MS, MIN_MS, FieldTime, TimeUnit, rfc3339_column_ms, rfc3339_ms
from dedup.core.exact_json import MAX_DEPTH
from dedup.core.json_path import Path

_WORD_BYTES: Final = 4
_MARGIN_BYTES: Final = 2
"""A member name is always followed by at least a colon and a brace."""

_Int64 = Annotated[int, msgspec.Meta(ge=MIN_MS, le=MAX_MS)]
_Seconds = Annotated[int, msgspec.Meta(ge=-(MAX_MS // 1000), le=MAX_MS // 1000)]
_Id = str | _Int64
_TIME_TYPES: Final[dict[TimeUnit, tuple[Any, ...]]] = {
    "ms": (_Int64,),
    "us": (_Int64,),
    "s": (_Seconds, msgspec.Raw),
    "rfc3339": (str,),
}
"""The types to decode a time with, by unit. For seconds, whole numbers are tried first, and then numbers with a
fraction as written.
"""

_SHORT_BYTES: Final = 2 * MAX_DEPTH
"""A value of at most this length cannot exceed MAX_DEPTH, because each level has two brackets."""

_REFUSALS: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


@dataclass(frozen=True, slots=True)
class _Name:
    """A member name on the path of an ID or a time."""

    text: str
    depths: tuple[int, ...]
    """The nesting depths of the name, with one entry per place in the paths."""

    @property
    def quoted(self) -> bytes:
        """The quoted name as it appears in values if no character is escaped."""
        return f'"{self.text}"'.encode()


def _occurs_at_most(joined: bytes, quoted: bytes, times: int) -> bool:
    """Tell whether a quoted name occurs at most ``times`` times in total."""
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


def _occur_in_places(joined: bytes, names: tuple[_Name, ...], count: int) -> bool:
    """Tell whether each name occurs at most once per value at the depths of its paths. Other depths do not count.

    The text must have no backslashes, so that every quote begins or ends a string.
    """
    text = np.frombuffer(joined, np.uint8)
    quotes = text == ord('"')
    # The parity of the number of quotes so far is 1 from the first quote of a string, and 0 from its last quote.
    inside = np.cumsum(quotes, dtype=np.uint8) & 1
    outside = inside == 0
    # `[` and `{`, `]` and `}` differ in one bit.
    folded = text | 0x20
    steps = ((folded == ord("{")) & outside).view(np.int8) - ((folded == ord("}")) & outside).view(np.int8)
    depths = np.cumsum(steps, dtype=np.int32)
    openings = np.flatnonzero(quotes & (inside == 1))
    at_depth = depths[openings]
    return all(
        _members_at(text, openings[at_depth == depth], name.quoted) <= name.depths.count(depth) * count
        for name in names
        for depth in set(name.depths)
    )


def _members_at(text: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], quoted: bytes) -> int:
    """Count the strings that begin at these positions, equal the name, and may be the name of a member."""
    starts = starts[starts < len(text) - len(quoted) - _MARGIN_BYTES]
    for at, char in enumerate(quoted):
        starts = starts[text[starts + at] == char]
    behind = text[starts + len(quoted)]
    # A string before a comma or before the end of its container is a value. White space in between is not skipped.
    is_value = (behind == ord(",")) | (behind == ord("}")) | (behind == ord("]"))
    return int(np.count_nonzero(~is_value))


@dataclass(frozen=True, slots=True)
class JsonColumns:
    """Decodes the members that contain IDs and times, either for a whole batch or not at all."""

    decoders: tuple[msgspec.json.Decoder[Any], ...]
    ids: tuple[Callable[[Any], Any], ...]
    time: Callable[[Any], Any] | None
    unit: TimeUnit
    names: tuple[_Name, ...]
    escapes: tuple[bytes, ...]
    """Escapes that no value may contain, because they could spell a name differently."""

    def decode(self, values: Sequence[bytes | None]) -> tuple[list[list[str | int]], list[int] | None] | None:
        """Return a column for each ID path, and the times; None unless the result is certain for every row."""
        joined = _joined(values)
        if joined is None or not _is_utf8(joined) or self._is_spelled_oddly(joined):
            return None
        rows = self._rows(joined)
        if rows is None or len(rows) != len(values) or not self._is_once_a_row(joined, len(rows)):
            return None
        columns = [list(map(member, rows)) for member in self.ids]
        if self.time is None:
            return columns, None
        times_ms = _times_ms(list(map(self.time, rows)), self.unit)
        return None if times_ms is None else (columns, times_ms)

    def _is_spelled_oddly(self, joined: bytes) -> bool:
        # Searching for one byte is 50 times as fast as for two.
        return b"\\" in joined and any(escape in joined for escape in self.escapes)

    def _is_once_a_row(self, joined: bytes, count: int) -> bool:
        """Tell whether no named member is repeated. Every row is known to have each member at least once."""
        if all(_occurs_at_most(joined, name.quoted, len(name.depths) * count) for name in self.names):
            return True
        return b"\\" not in joined and _occur_in_places(joined, self.names, count)

    def _rows(self, joined: bytes) -> list[Any] | None:
        for decoder in self.decoders:
            try:
                return decoder.decode_lines(joined)
            except _REFUSALS:
                continue
        return None


def compile_columns(ids: Sequence[Path], time: FieldTime | None) -> JsonColumns | None:
    r"""Return the decoder for these paths; None if only the slow path can read values at these paths.

    Only the slow path can read array positions, a path below another path, and names that JSON can spell in several
    ways even without ``\u``.
    """
    paths = [*ids, time.path] if time is not None else list(ids)
    tree = _Node({}, None)
    for path in paths:
        if not tree.grow(path, is_time=time is not None and path == time.path):
            return None
    names = tree.names()
    if any(not _has_one_spelling(name) for name in names):
        return None
    time_types: tuple[Any, ...] = (None,) if time is None else _TIME_TYPES[time.unit]
    if time is not None and time.path in ids:  # a part of an ID is text or an integer
        time_types = time_types[:1]
    return JsonColumns(
        decoders=tuple(msgspec.json.Decoder(tree.struct(time_type)) for time_type in time_types),
        ids=tuple(attrgetter(tree.attribute(path)) for path in ids),
        time=None if time is None else attrgetter(tree.attribute(time.path)),
        unit="ms" if time is None else time.unit,
        names=tuple(_Name(name, tuple(depths)) for name, depths in names.items()),
        escapes=_escapes(names),
    )


@dataclass(slots=True)
class _Node:
    """An object in the value, or a member that contains an ID or the event time."""

    members: dict[str, _Node]
    leaf: Literal["id", "time"] | None

    def grow(self, path: Path, *, is_time: bool) -> bool:
        """Add a path. Return False if the fast path cannot read values at that path."""
        here = self
        for step in path:
            if isinstance(step, int) or here.leaf is not None:
                return False
            here = here.members.setdefault(step, _Node({}, None))
        if here.members:
            return False
        here.leaf = "time" if is_time else "id"
        return True

    def names(self, depth: int = 1) -> dict[str, list[int]]:
        """Return the depths at which each name occurs in the tree."""
        found: dict[str, list[int]] = {}
        for name, node in self.members.items():
            found.setdefault(name, []).append(depth)
            for below, depths in node.names(depth + 1).items():
                found.setdefault(below, []).extend(depths)
        return found

    def struct(self, time_type: object) -> object:
        """Return the msgspec type that decodes this node."""
        if self.leaf is not None:
            return time_type if self.leaf == "time" else _Id
        fields = [
            (f"m{at}", node.struct(time_type), msgspec.field(name=name))
            for at, (name, node) in enumerate(self.members.items())
        ]
        # Reference counting frees the rows before the next batch, so the garbage collector can ignore them.
        return msgspec.defstruct("Row", fields, gc=False)

    def attribute(self, path: Path) -> str:
        """Return the dotted attribute name of a path."""
        here, steps = self, []
        for step in path:
            steps.append(f"m{list(here.members).index(str(step))}")
            here = here.members[str(step)]
        return ".".join(steps)


def _has_one_spelling(name: str) -> bool:
    r"""Tell whether no character of a name has a short escape, so that only ``\u`` could spell it differently."""
    return not any(char in '"\\/' or char < " " for char in name)


def _escapes(names: Iterable[str]) -> tuple[bytes, ...]:
    """Return the beginnings of the escapes that could spell a character of these names."""
    if all(name.isascii() for name in names):
        return tuple(b"\\u00%d" % high for high in range(2, 8))
    return (b"\\u",)


def _joined(values: Sequence[bytes | None]) -> bytes | None:
    """Return the values joined by line feeds; None unless each, if it is JSON, is an object of depth 512 or less."""
    try:
        joined = b"\n".join(values)  # type: ignore[arg-type]
    except TypeError:  # a null value
        return None
    lengths = np.fromiter(map(len, values), np.int64, len(values))  # type: ignore[arg-type]
    if lengths.min() == 0:
        return None
    ends = np.cumsum(lengths + 1) - 1
    text = np.frombuffer(joined, np.uint8)
    if not ((text[ends - lengths] == ord("{")).all() and (text[ends - 1] == ord("}")).all()):
        return None
    if lengths.max() > _SHORT_BYTES and any(may_be_deep(value) for value in values if value is not None):
        return None
    return joined


def may_be_deep(value: bytes) -> bool:
    """Tell whether a value may be nested more than `MAX_DEPTH` deep. If the result is False, the value certainly is
    not.
    """
    return len(value) > _SHORT_BYTES and value.count(b"{") + value.count(b"[") > MAX_DEPTH


def _is_utf8(joined: bytes) -> bool:
    if joined.isascii():
        return True
    try:
        joined.decode()
    except UnicodeDecodeError:
        return False
    return True


def _times_ms(column: list[Any], unit: TimeUnit) -> list[int] | None:
    match unit:
        case "ms":
            return column
        case "us":
            return [time // 1000 for time in column]
        case "s":
            if isinstance(column[0], int):
                return [time * 1000 for time in column]
            return _seconds_ms(column)
        case "rfc3339":
            return rfc3339_column_ms(column) or _rfc3339_each_ms(column)
        case never:
            assert_never(never)


def _seconds_ms(column: list[msgspec.Raw]) -> list[int] | None:
    """Convert numbers of seconds to milliseconds; None if a number has a sign or an exponent, or is not a number."""
    times_ms: list[int] = []
    for raw in column:
        whole, point, fraction = bytes(raw).partition(b".")
        if not whole.isdigit() or len(whole) > 15 or not (fraction.isdigit() if point else True):  # noqa: PLR2004
            return None
        times_ms.append(int(whole) * 1000 + int(fraction[:3].ljust(3, b"0")))
    return times_ms


def _rfc3339_each_ms(column: list[str]) -> list[int] | None:
    times_ms = [time_ms for time_ms in map(rfc3339_ms, column) if time_ms is not None]
    return times_ms if len(times_ms) == len(column) else None
