"""JSON read exactly, one value at a time: RFC 8259 on bytes, every number as it was written.

Slow and sure. The column extractor (extract.py) is fast because it decides only what it can decide as this module
would, and hands every other row to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, NoReturn

from dedup.core.paths import Path, format_path

MAX_DEPTH: Final = 512
"""Nested containers in one value; deeper ones are refused before anything recurses."""

EXPONENT_DIGITS: Final = 18
"""Longer exponents are refused where the number matters (RFC 8259, section 6 leaves the range to us)."""

_BRACKETS: Final = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)
_BLANK: Final = " \t\n\r"


class Unreadable(Exception):
    """The value can not be judged; carries a stable code and a sentence without payload."""

    def __init__(self, code: str, detail: str) -> None:
        self.code: Final = code
        self.detail: Final = detail
        super().__init__(detail)


@dataclass(frozen=True, slots=True)
class Number:
    """A number as the document writes it; nothing is rounded and no size is too large."""

    text: str

    @property
    def is_integer(self) -> bool:
        """Whether it is written without fraction and exponent, which makes ``1`` and ``1.0`` different."""
        text = self.text
        return "." not in text and "e" not in text and "E" not in text

    def integer_text(self) -> str:
        """Return the digits of an integer, sign first; ``-0`` is ``0``."""
        return "0" if self.text == "-0" else self.text

    def parts(self) -> tuple[str, str, int]:
        """Return sign ("" or "-"), digits without zeros at either end, and the power of ten they count.

        Zero is ("", "0", 0). Raises Unreadable when the exponent has more than 18 digits.
        """
        mantissa, _, power = self.text.lower().partition("e")
        negative = mantissa.startswith("-")
        whole, _, fraction = mantissa.removeprefix("-").partition(".")
        digits = (whole + fraction).lstrip("0")
        if not digits:
            return "", "0", 0
        exponent = _exponent(power) - len(fraction)
        short = digits.rstrip("0")
        return "-" if negative else "", short, exponent + len(digits) - len(short)

    def decimal_text(self) -> str:
        """Return the canonical text of a number with a fraction or an exponent, such as ``-15e-1``."""
        sign, digits, exponent = self.parts()
        return f"{sign}{digits}e{exponent}"


class Members(dict[str, "JsonValue"]):
    """A JSON object that remembers which names it held more than once; the last one is kept."""

    __slots__ = ("repeated",)

    repeated: frozenset[str]

    def __init__(self, pairs: list[tuple[str, JsonValue]]) -> None:
        super().__init__(pairs)
        self.repeated = frozenset() if len(self) == len(pairs) else _repeated(pairs)


JsonValue = None | bool | str | Number | list["JsonValue"] | Members


class Absent:
    """Nothing stands at a path."""

    __slots__ = ()


ABSENT: Final = Absent()


def decode(value: bytes) -> JsonValue:
    """Return the whole value, exactly as written. Raises Unreadable unless RFC 8259 allows every byte of it."""
    try:
        text = value.decode()
    except UnicodeDecodeError as error:
        raise Unreadable("not_utf8", f"the value is not UTF-8 (byte {error.start})") from None
    if len(text) > MAX_DEPTH and _depth(text) > MAX_DEPTH:
        raise Unreadable("too_deep", f"the value is nested more than {MAX_DEPTH} deep")
    # Not json.loads: it guesses encodings. Not DecoderError's text: it would carry the payload's shape at length.
    stripped = text.strip(_BLANK)
    try:
        decoded, end = _DECODER.raw_decode(stripped)
    except json.JSONDecodeError as error:
        raise Unreadable("not_json", f"the value is not JSON (character {error.pos} of {len(stripped)})") from None
    if end != len(stripped):
        raise Unreadable("not_json", f"the value goes on after its JSON ends (character {end} of {len(stripped)})")
    found: JsonValue = decoded
    return found


def look_up(value: JsonValue, path: Path) -> JsonValue | Absent:
    """Return what stands at a path, or ABSENT. Raises Unreadable when a member on the way is repeated."""
    here: JsonValue = value
    for step in path:
        if isinstance(here, Members) and isinstance(step, str):
            if step in here.repeated:
                raise Unreadable("repeated_member", f"a member on the path {format_path(path)} is there twice")
            if step not in here:
                return ABSENT
            here = here[step]
        elif isinstance(here, list) and isinstance(step, int) and step < len(here):
            here = here[step]
        else:
            return ABSENT
    return here


Excluded = Mapping[str | int, "Excluded | None"]
"""Paths to leave out, as a tree; None at the end of a path."""


@cache
def excluded(paths: tuple[Path, ...]) -> Excluded:
    """Return the tree of these paths; a path below another one adds nothing."""
    tree: dict[str | int, Excluded | None] = {}
    heads: dict[str | int, list[Path]] = {}
    for path in paths:
        heads.setdefault(path[0], []).append(path[1:])
    for head, tails in heads.items():
        tree[head] = None if () in tails else excluded(tuple(tails))
    return tree


def canonical_json(value: JsonValue, exclude: Excluded) -> bytes:
    """Return the content as bytes that are equal exactly when the content is.

    Members sorted by name at every depth, no white space, text escaped only where JSON demands it, integers as
    written (``-0`` is ``0``), other numbers as `Number.decimal_text`. Excluded members and elements are left out.
    Raises Unreadable for a repeated member anywhere, and for text that UTF-8 can not hold.
    """
    parts: list[str] = []
    # A stack of our own: a value may be nested deeper than Python likes to recurse.
    todo: list[_Verbatim | tuple[JsonValue, Excluded]] = [(value, exclude)]
    while todo:
        item = todo.pop()
        if isinstance(item, _Verbatim):
            parts.append(item.text)
            continue
        here, without = item
        if isinstance(here, Members):
            todo.extend(reversed(_members(here, without)))
        elif isinstance(here, list):
            todo.extend(reversed(_elements(here, without)))
        else:
            parts.append(_scalar(here))
    try:
        return "".join(parts).encode()
    except UnicodeEncodeError:
        raise Unreadable("lone_surrogate", "the content holds half a surrogate pair, which UTF-8 can not") from None


@dataclass(frozen=True, slots=True)
class _Verbatim:
    text: str


_COMMA: Final = _Verbatim(",")


def _members(here: Members, without: Excluded) -> list[_Verbatim | tuple[JsonValue, Excluded]]:
    if here.repeated:
        raise Unreadable("repeated_member", "a member is there twice in one object of the content")
    items: list[_Verbatim | tuple[JsonValue, Excluded]] = [_Verbatim("{")]
    for name in sorted(here):
        below = without.get(name, _NOTHING)
        if below is None:
            continue
        if len(items) > 1:
            items.append(_COMMA)
        items.append(_Verbatim(_quoted(name) + ":"))
        items.append((here[name], below))
    items.append(_Verbatim("}"))
    return items


def _elements(here: list[JsonValue], without: Excluded) -> list[_Verbatim | tuple[JsonValue, Excluded]]:
    items: list[_Verbatim | tuple[JsonValue, Excluded]] = [_Verbatim("[")]
    for index, element in enumerate(here):
        below = without.get(index, _NOTHING)
        if below is None:
            continue
        if len(items) > 1:
            items.append(_COMMA)
        items.append((element, below))
    items.append(_Verbatim("]"))
    return items


_NOTHING: Final[Excluded] = {}


def _scalar(value: bool | str | Number | None) -> str:  # noqa: FBT001 - a JSON value
    match value:
        case None:
            return "null"
        case True:
            return "true"
        case False:
            return "false"
        case Number():
            return value.integer_text() if value.is_integer else value.decimal_text()
        case str():
            return _quoted(value)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _exponent(power: str) -> int:
    if not power:
        return 0
    digits = power.lstrip("+-").lstrip("0")
    if len(digits) > EXPONENT_DIGITS:
        raise Unreadable("number_out_of_range", f"a number's exponent has more than {EXPONENT_DIGITS} digits")
    size = int(digits or "0")
    return -size if power.startswith("-") else size


def _repeated(pairs: Sequence[tuple[str, JsonValue]]) -> frozenset[str]:
    seen: set[str] = set()
    repeated: set[str] = set()
    for name, _ in pairs:
        (repeated if name in seen else seen).add(name)
    return frozenset(repeated)


def _depth(text: str) -> int:
    """Nesting up to the first syntax error, at least: strings are skipped as the decoder skips them."""
    depth = deepest = 0
    for match in _BRACKETS.finditer(text):
        found = match[0]
        if found in "[{":
            depth += 1
            deepest = max(deepest, depth)
            if deepest > MAX_DEPTH:
                break
        elif found in "]}":
            depth -= 1
    return deepest


def _refuse_constant(name: str) -> NoReturn:
    raise Unreadable("not_json", f"{name} is not JSON")


_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=Members,
    parse_int=Number,
    parse_float=Number,
    parse_constant=_refuse_constant,
)
