"""Decodes single JSON values exactly (RFC 8259), finds values by path, and computes canonical JSON.

The column extractor (extract.py) is faster, but passes a row to this module whenever the results could differ.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Final, NoReturn

import msgspec
import orjson

from dedup.core.tracking_id import Path, format_path

MAX_DEPTH: Final = 512
"""The maximum nesting depth of containers. `decode` refuses more deeply nested values before it recurses."""

SHORT_BYTES: Final = 2 * MAX_DEPTH
"""A value of at most this many bytes cannot be nested deeper than MAX_DEPTH, because each level takes two brackets."""
DECODE_REFUSALS: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""The exceptions that msgspec's decoder raises for values that it does not accept."""
_EXPONENT_DIGITS: Final = 18
"""The maximum number of digits in an exponent, without leading zeros. RFC 8259, section 6, allows such limits."""

_BRACKETS: Final = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{}]', re.DOTALL)
"""Matches a bracket, or a string up to its end or to the end of the text.

The quantifiers are possessive and the last quote is optional, so that matching a truncated value takes linear time.
Otherwise, every escaped quote in an unterminated string would begin another search up to the end of the text.
"""
_BLANK: Final = " \t\n\r"
_FRAME_BYTES: Final = 5
"""The length of Schema Registry framing, which consists of a zero byte and the schema ID in big-endian order."""
_OPENINGS: Final = b'{["'
"""The usual first bytes of JSON values in records."""


@dataclass(frozen=True, slots=True)
class _Foreign:
    name: str
    """A stable name in snake_case. The name is also a metric label, so there must be only a few such names."""
    words: str
    """The value's first bytes and their meaning, in words that follow "it begins with"."""


_MAGIC: Final[tuple[tuple[bytes, _Foreign], ...]] = (
    # The order matters, because one UTF-32 byte order mark begins with the bytes of a UTF-16 byte order mark.
    (b"\x00\x00\xfe\xff", _Foreign("utf_32", "bytes 0000feff: the byte order mark of UTF-32")),
    (b"\xff\xfe\x00\x00", _Foreign("utf_32", "bytes fffe0000: the byte order mark of UTF-32")),
    (b"\xff\xfe", _Foreign("utf_16", "bytes fffe: the byte order mark of UTF-16")),
    (b"\xfe\xff", _Foreign("utf_16", "bytes feff: the byte order mark of UTF-16")),
    (b"\xef\xbb\xbf", _Foreign("utf_8_bom", "bytes efbbbf: the byte order mark of UTF-8")),
    (b"\x1f\x8b", _Foreign("gzip", "bytes 1f8b: gzip")),
    (b"\x28\xb5\x2f\xfd", _Foreign("zstd", "bytes 28b52ffd: Zstandard")),
    (b"\x04\x22\x4d\x18", _Foreign("lz4", "bytes 04224d18: LZ4")),
    (b"\xff\x06\x00\x00sNaPpY", _Foreign("snappy", "bytes ff060000: Snappy in frames")),
    (b"\x82SNAPPY\x00", _Foreign("snappy", "bytes 82534e41: Snappy as Java writes it")),
    (b"BZh", _Foreign("bzip2", 'the text "BZh": bzip2')),
    (b"\xfd7zXZ\x00", _Foreign("xz", "bytes fd377a58: xz")),
    (b"PK\x03\x04", _Foreign("zip", 'the text "PK": a zip file')),
    (b"Obj\x01", _Foreign("avro_file", 'the text "Obj" and byte 1: an Avro object container')),
    (b"\xc3\x01", _Foreign("avro_single_object", "bytes c301: Avro's single-object encoding")),
    (b"PAR1", _Foreign("parquet", 'the text "PAR1": Parquet')),
    (b"\xac\xed\x00\x05", _Foreign("java_object", "bytes aced0005: a serialized Java object")),
    (b"<?xml", _Foreign("xml", 'the text "<?xml": XML')),
)


def foreign_format(value: bytes) -> _Foreign | None:
    """Guess the actual format of an unreadable value from its first bytes, or return None if no format is likely."""
    for magic, found in _MAGIC:
        if value.startswith(magic):
            return found
    if len(value) >= 4 and value[0] == 0 and value[1] in _OPENINGS and value[2] == 0 and value[3]:  # noqa: PLR2004
        return _Foreign("utf_16", "byte 0 before a character: UTF-16 without a byte order mark")
    if len(value) >= 4 and value[0] in _OPENINGS and value[1] == 0 and value[2] and value[3] == 0:  # noqa: PLR2004
        return _Foreign("utf_16", "a character before byte 0: UTF-16 without a byte order mark")
    if len(value) >= _FRAME_BYTES and value[0] == 0:
        schema = int.from_bytes(value[1:_FRAME_BYTES])
        return _Foreign("schema_registry", f"byte 0: Schema Registry framing, schema id {schema}")
    return None


class NotJudged(Exception):
    """Raised if a record cannot be judged.

    The error has a stable code and a message that does not reveal the payload.
    """

    kind: ClassVar[str]
    """The value of `FaultKind` for records with this error."""

    def __init__(self, code: str, detail: str, *, format_name: str = "") -> None:
        self.code: Final = code
        self.detail: Final = detail
        self.format_name: Final = format_name
        """The unexpected format that a value seems to have, or an empty string if the format is unknown."""
        super().__init__(detail)


class Unreadable(NotJudged):
    """Raised if the value of a record cannot be read."""

    kind = "unreadable"


@dataclass(frozen=True, slots=True)
class Number:
    """A number of any size, kept as written in the JSON value and never rounded."""

    text: str

    @property
    def is_integer(self) -> bool:
        """True for a number that is written without a fraction or an exponent, such as ``1`` but not ``1.0``."""
        text = self.text
        return "." not in text and "e" not in text and "E" not in text

    def integer_text(self) -> str:
        """Return an integer as written, except that ``-0`` becomes ``0``."""
        return "0" if self.text == "-0" else self.text

    def parts(self) -> tuple[str, str, int]:
        """Split the number into a sign ("" or "-"), digits without leading and trailing zeros, and a decimal exponent.

        Zero is split into ("", "0", 0). Raises Unreadable if the exponent has more than 18 digits, not
        counting leading zeros.
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
    """A JSON object that keeps the last value of a repeated member name, and records which names are repeated."""

    __slots__ = ("repeated",)

    repeated: frozenset[str]

    def __init__(self, pairs: list[tuple[str, JsonValue]]) -> None:
        super().__init__(pairs)
        times = Counter(name for name, _ in pairs) if len(self) < len(pairs) else {}
        self.repeated = frozenset(name for name in times if times[name] > 1)


JsonValue = None | bool | str | Number | list["JsonValue"] | Members


class Absent:
    """The type of ABSENT, which `look_up` returns if the path has no value."""

    __slots__ = ()


ABSENT: Final = Absent()


def decode(value: bytes) -> JsonValue:
    """Decode a JSON value, keeping every number as written. Raises Unreadable if the value is not JSON (RFC 8259)."""
    try:
        text = value.decode()
    except UnicodeDecodeError as error:
        raise with_foreign_format(value, "not_utf8", f"the value is not UTF-8 (byte {error.start})") from None
    if len(text) > MAX_DEPTH and _depth(text) > MAX_DEPTH:
        raise Unreadable("too_deep", f"the value is nested more than {MAX_DEPTH} levels deep")
    # json.loads is not used, because it guesses encodings. The text of JSONDecodeError is not used, because it reveals
    # part of the payload.
    stripped = text.strip(_BLANK)
    try:
        decoded, end = _DECODER.raw_decode(stripped)
    except json.JSONDecodeError as error:
        text = f"the value is not JSON (character {error.pos} of {len(stripped)})"
        raise with_foreign_format(value, "not_json", text) from None
    if end != len(stripped):
        raise Unreadable("not_json", f"the value continues after its JSON ends (character {end} of {len(stripped)})")
    found: JsonValue = decoded
    return found


def decode_quickly(value: bytes) -> Any:  # noqa: ANN401  # any JSON value
    """Decode a JSON value with orjson or, if orjson refuses it, with `decode`. Raises Unreadable, like `decode`.

    orjson refuses some valid JSON, such as an unpaired surrogate or a number that is out of range for a double.
    """
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        return decode(value)


def with_foreign_format(value: bytes, code: str, detail: str) -> Unreadable:
    """Return an error that also names the value's likely format if the first bytes suggest one."""
    found = foreign_format(value)
    if found is None:
        return Unreadable(code, detail)
    return Unreadable(code, f"{detail}; it begins with {found.words}", format_name=found.name)


def look_up(value: JsonValue | Absent, path: Path) -> JsonValue | Absent:
    """Return the value at a path, or ABSENT. Raises Unreadable if a member name on the path is repeated."""
    here = value
    for step in path:
        if isinstance(here, Members) and isinstance(step, str):
            if step in here.repeated:
                raise Unreadable("repeated_member", f"a member on the path {format_path(path)} is repeated")
            if step not in here:
                return ABSENT
            here = here[step]
        elif isinstance(here, list) and isinstance(step, int) and step < len(here):
            here = here[step]
        else:
            return ABSENT
    return here


Excluded = Mapping[str | int, "Excluded | None"]
"""The paths to exclude, as a tree that has None at the end of each path."""


@cache
def excluded(paths: tuple[Path, ...]) -> Excluded:
    """Return the paths to exclude as a tree. A path inside an excluded member or element adds nothing to the tree."""
    tree: dict[str | int, Excluded | None] = {}
    heads: dict[str | int, list[Path]] = {}
    for path in paths:
        heads.setdefault(path[0], []).append(path[1:])
    for head, tails in heads.items():
        tree[head] = None if () in tails else excluded(tuple(tails))
    return tree


def canonical_json(value: JsonValue, exclude: Excluded) -> bytes:
    """Return a value as canonical JSON, which does not depend on the original's white space, escapes, or member order.

    Members are sorted by name at every level. The text has no white space, and strings have only the escapes that JSON
    requires. Integers stay as written (but ``-0`` becomes ``0``), and other numbers have the form of
    `Number.decimal_text`. Excluded members and elements are left out. Raises Unreadable if a member name is repeated in
    any object, or if a string cannot be encoded as UTF-8.
    """
    try:
        return _written(value, exclude).encode()
    except UnicodeEncodeError:
        raise Unreadable("lone_surrogate", "the content has an unpaired surrogate, which UTF-8 cannot encode") from None


_NOTHING: Final[Excluded] = {}


def _written(value: JsonValue, without: Excluded) -> str:
    # Like the decoder, this function recurses once per level, so `MAX_DEPTH` limits the recursion of both.
    if not isinstance(value, Members | list):
        return _scalar(value)
    pairs: Iterable[tuple[str | int, JsonValue]] = enumerate(value)
    if isinstance(value, Members):
        if value.repeated:
            raise Unreadable("repeated_member", "a member is repeated in an object of the content")
        pairs = ((name, value[name]) for name in sorted(value))
    parts: list[str] = []
    for step, inner in pairs:
        below = without.get(step, _NOTHING)
        if below is not None:
            name = f"{_scalar(step)}:" if isinstance(step, str) else ""
            parts.append(name + _written(inner, below))
    return f"{{{','.join(parts)}}}" if isinstance(value, Members) else f"[{','.join(parts)}]"


def _scalar(value: bool | str | Number | None) -> str:  # noqa: FBT001 - a JSON value
    if isinstance(value, Number):
        return value.integer_text() if value.is_integer else value.decimal_text()
    return json.dumps(value, ensure_ascii=False)


def _exponent(power: str) -> int:
    if not power:
        return 0
    digits = power.lstrip("+-").lstrip("0")
    if len(digits) > _EXPONENT_DIGITS:
        raise Unreadable("number_out_of_range", f"a number's exponent has more than {_EXPONENT_DIGITS} digits")
    size = int(digits or "0")
    return -size if power.startswith("-") else size


def _depth(text: str) -> int:
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
    object_pairs_hook=Members, parse_int=Number, parse_float=Number, parse_constant=_refuse_constant
)


def content_of(value: bytes, exclude: tuple[Path, ...]) -> bytes:
    """Return the canonical JSON of a value. Raises Unreadable in the same cases as `decode` and `canonical_json`."""
    without = excluded(exclude)
    quick = _quick_content(value, without)
    return canonical_json(decode(value), without) if quick is None else quick


def may_be_deep(value: bytes) -> bool:
    """Return False if a value certainly has at most `MAX_DEPTH` nesting levels, or True if the value may have more."""
    return len(value) > SHORT_BYTES and value.count(b"{") + value.count(b"[") > MAX_DEPTH


def _quick_content(value: bytes, without: Excluded) -> bytes | None:
    if b"\\" in value or may_be_deep(value):
        return None
    try:
        content = _QUICK_DECODER.decode(value)
        whole = _QUICK_ENCODER.encode(content)
        if whole.count(b'"') != value.count(b'"'):  # the decoder has dropped a repeated member
            return None
        if not without:
            return whole
        _leave_out(content, without)
        return _QUICK_ENCODER.encode(content)
    except _QUICK_REFUSALS:
        return None


def _leave_out(content: object, without: Excluded) -> None:
    if isinstance(content, dict):
        steps: list[Any] = [step for step in without if step in content]
    elif isinstance(content, list):
        # Elements are removed from the end, so that earlier positions stay valid.
        steps = sorted((step for step in without if isinstance(step, int) and step < len(content)), reverse=True)
    else:
        return
    for step in steps:
        below = without[step]
        if below is None:
            del content[step]
        else:
            _leave_out(content[step], below)


def _as_written(text: str) -> msgspec.Raw:
    # msgspec encodes a Raw unchanged, but would encode a Number, which is a dataclass, as an object.
    return msgspec.Raw(Number(text).decimal_text().encode())


_QUICK_REFUSALS: Final = (*DECODE_REFUSALS, OverflowError, Unreadable)
_QUICK_DECODER: Final = msgspec.json.Decoder(float_hook=_as_written)
_QUICK_ENCODER: Final = msgspec.json.Encoder(order="sorted")
