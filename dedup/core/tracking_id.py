"""Defines the rules that find the tracking ID in a record, encodes IDs as canonical bytes, and displays IDs.

A path within a value is written in a form such as ``a.b[0].c`` or ``a["b.c"]``.

Equal IDs have equal canonical bytes. The encoding never changes. Canonical bytes consist of a tag and a value:

    01 text            UTF-8
    02 bytes           a record's key, a header's value, a raw value
    03 UUID            16 bytes, for canonical lower-case UUID text wherever it comes from
    04 integer         within 64 bits: two's complement, big-endian, as few bytes as possible
    05 big integer     beyond 64 bits: its decimal digits, any number of them
    06 decimal         a number with a fraction or an exponent: ``<sign><digits>e<exponent>``, no trailing zeros
    07 true, 08 false
    09 composite       per part: its canonical length (LEB128), its canonical bytes
    0a content         canonical JSON text (exact_json.canonical_json), or else canonical content (content_tree.py)
    0b null, 0c absent a part of a composite ID whose rule says `absent: as_value`
    0d alternative     the index of the alternative (1 byte), the state key of the ID that it gives
    0e instant         RFC 3339 text in UTC, its exact fraction of a second without trailing zeros

The sightings of an ID are stored under the ID's state key. If the canonical bytes are at most 32 bytes long, they are
the state key. Otherwise, the state key is the byte ``00`` followed by the BLAKE2b-256 digest of the canonical bytes. No
canonical bytes begin with ``00``. Therefore, no short ID has the same state key as a long ID, so nobody can suppress an
event by choosing such an ID.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cache
from hashlib import blake2b
from itertools import chain, groupby
from re import compile as compile_pattern
from typing import Final, Literal
from uuid import UUID as Uuid  # noqa: N811  # the tag has the name

Path = tuple[str | int, ...]
"""A path: one or more member names or array positions, outermost first."""

ENCODING_VERSION: Final = 1
"""The version of the encoding. The state fingerprint contains it, so a task cannot use state of another version."""

Normalizing = Literal["trim", "lower", "nfc", "instant"]

TEXT: Final = b"\x01"
BYTES: Final = b"\x02"
UUID: Final = b"\x03"
INTEGER: Final = b"\x04"
BIG_INTEGER: Final = b"\x05"
DECIMAL: Final = b"\x06"
TRUE: Final = b"\x07"
FALSE: Final = b"\x08"
COMPOSITE: Final = b"\x09"
CONTENT: Final = b"\x0a"
NULL: Final = b"\x0b"
ABSENT: Final = b"\x0c"
ALTERNATIVE: Final = b"\x0d"
INSTANT: Final = b"\x0e"
DIGEST: Final = b"\x00"

KEPT_BYTES: Final = 32
"""The maximum length of canonical bytes that serve as the state key. A digest replaces longer canonical bytes."""

_BLANKS: Final = (
    "\t\n\v\f\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)
"""The characters that `trim` removes. The list is fixed, because Python's definition of white space may change."""

_NAME: Final = compile_pattern(r'[^.\[\]"\s]+')
_INDEX: Final = compile_pattern(r"\[(0|[1-9][0-9]{0,8})\]")
_QUOTED: Final = compile_pattern(r'\[("(?:[^"\\]|\\.)*")\]')

_UUID_TEXT: Final = compile_pattern(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_UUID_BYTES: Final = compile_pattern(rb"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_UUID_CHARS: Final = 36
_MOST_STEPS: Final = 200
"""The maximum number of steps of a path. Functions that follow paths recurse once per step."""
_INT64: Final = 1 << 63
_EPOCH: Final = datetime(1970, 1, 1)  # noqa: DTZ001 - text in UTC gets its Z from `encode_instant`
_LENGTH_BITS: Final = 7
_MORE: Final = 1 << _LENGTH_BITS
"""The bit of a LEB128 byte that is set if another byte follows."""
_ONE_BYTE: Final = tuple(bytes((count,)) for count in range(_MORE))


def parse_path(text: str) -> Path:
    """Parse a path. Raises ValueError, with a message that says what to write instead, if the path is not valid."""
    if not text:
        raise ValueError('the path is empty; write a member name, such as "order.id"')
    steps: list[str | int] = []
    at = 0
    while at < len(text):
        step, at = _step(text, at, first=not steps)
        steps.append(step)
    if len(steps) > _MOST_STEPS:
        raise ValueError(f"the path has {len(steps)} steps, more than {_MOST_STEPS}; name a member closer to the top")
    return tuple(steps)


@cache
def format_path(path: Path) -> str:
    """Return a path in the notation of topology files, which `parse_path` reads."""
    parts: list[str] = []
    for step in path:
        match step:
            case int():
                parts.append(f"[{step}]")
            case _ if _NAME.fullmatch(step):
                parts.append(f".{step}" if parts else step)
            case _:
                parts.append(f"[{json.dumps(step, ensure_ascii=False)}]")
    return "".join(parts)


def _step(text: str, at: int, *, first: bool) -> tuple[str | int, int]:
    if index := _INDEX.match(text, at):
        return int(index[1]), index.end()
    if quoted := _QUOTED.match(text, at):
        return _unquote(text, quoted[1]), quoted.end()
    if text[at] == "[":
        raise ValueError(f'path {text}: after "[" write a position or a quoted name, such as [0] or ["b.c"]')
    start = at if first else at + 1
    if not first and text[at] != ".":
        raise ValueError(f'path {text}: write "." or "[" before position {at + 1}')
    name = _NAME.match(text, start)
    if name is None:
        raise ValueError(f'path {text}: a member name is missing at position {start + 1}; quote odd names: a["b.c"]')
    return name[0], name.end()


def _unquote(text: str, quoted: str) -> str:
    try:
        name = json.loads(quoted)
    except ValueError:
        raise ValueError(f"path {text}: {quoted} is not a JSON string; escape it as JSON does") from None
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"path {text}: {quoted} has an unpaired surrogate, which no UTF-8 value can contain") from None
    return str(name)


@dataclass(frozen=True, slots=True)
class KeyRule:
    """The rule that a record's key is its ID."""


@dataclass(frozen=True, slots=True)
class KeyFieldRule:
    """The rule that one member of a record's key is the ID."""

    path: Path


@dataclass(frozen=True, slots=True)
class HeaderRule:
    """The rule that the ID is the value of one header. This header must not occur more than once in a record."""

    name: str


@dataclass(frozen=True, slots=True)
class FieldRule:
    """The rule that one member of the value is the ID."""

    path: Path


@dataclass(frozen=True, slots=True)
class FieldsRule:
    """The rule that several members of the value, in a given order, together form the ID."""

    paths: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """One part of an ID: the record's key, a member of the key, a header, or a member of the value."""

    rule: KeyRule | KeyFieldRule | HeaderRule | FieldRule
    absent_is_value: bool = False
    """True if a part that is absent, null, or empty is compared like a value, instead of making the ID unusable."""


@dataclass(frozen=True, slots=True)
class PartsRule:
    """The rule that several parts of the record, in a given order, together form the ID.

    At least one part must have a value that is neither null nor empty. Objects and arrays are compared as canonical
    JSON. Source: `deduplicateByKeyValue` of KIP-655, whose ID is the record's key and a member of the value.
    """

    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class SchemaFile:
    """The content of a schema file that a topology file names."""

    name: str
    """The name of the file as written in the topology file."""
    text: str
    imports: tuple[tuple[str, str], ...] = ()
    """The names and texts of the files that a .proto file imports, directly or not. Each file comes after its own
    imports.
    """


@dataclass(frozen=True, slots=True)
class ContentRule:
    """The rule that the canonical content of the value, without the excluded paths, is the ID."""

    exclude: tuple[Path, ...] = ()
    schema: SchemaFile | None = None
    """The schema with which Avro and Protobuf values are read, or None to read each value with its own schema."""


@dataclass(frozen=True, slots=True)
class RawContentRule:
    """The rule that the unchanged bytes of the value are the ID."""


IdFunction = Callable[[bytes | None, bytes | None, Sequence[tuple[str, bytes | None]]], object]
"""A user's function that returns the ID of a record with the given key, value, and headers."""


@dataclass(frozen=True, slots=True)
class CodeRule:
    """The rule that a user's function returns the ID: a string, bytes, an integer, or None for no ID.

    The function must depend only on its arguments. The name and the version identify the function's behavior, so a
    function that starts to return different IDs needs a new version.
    """

    name: str
    """The function as module:attribute."""
    version: int
    load: Callable[[], IdFunction] = field(compare=False, repr=False)
    """Imports and returns the function. Raises TopologyError if the function cannot be loaded."""
    digest: str = field(default="", compare=False)
    """The digest of the module next to the topology file, or an empty string if no such module exists."""
    file: str = field(default="the topology", compare=False)
    """The name of the topology file, for error messages."""


class StateKey(bytes):
    """A state key that was extracted earlier. If an ID function returns a state key, dedup uses it unchanged."""

    __slots__ = ()


# The checklist for a new rule is in CONTRIBUTING.md; mypy reports only some of the places to extend.
Alternative = (
    KeyRule | KeyFieldRule | HeaderRule | FieldRule | FieldsRule | PartsRule | ContentRule | RawContentRule | CodeRule
)


@dataclass(frozen=True, slots=True)
class FirstOfRule:
    """The rule that the ID comes from the first of several alternatives for which the record has a value.

    If the value that an alternative needs is absent, null, or empty, the next alternative is tried. IDs from different
    alternatives are never equal.
    """

    alternatives: tuple[Alternative, ...]


Rule = Alternative | FirstOfRule


def alternatives_of(rule: Rule) -> tuple[Alternative, ...]:
    """Return the alternatives of a `FirstOfRule`. For any other rule, return a tuple that contains only this rule."""
    return rule.alternatives if isinstance(rule, FirstOfRule) else (rule,)


def code_rules(rule: Rule) -> tuple[CodeRule, ...]:
    """Return the alternatives that call a user's function. A rule without alternatives counts as one."""
    return tuple(each for each in alternatives_of(rule) if isinstance(each, CodeRule))


def key_paths(rule: Rule) -> tuple[Path, ...]:
    """Return the paths of the members of the key that form the ID, in the order of the rule."""
    match rule:
        case FirstOfRule(alternatives):
            return tuple(dict.fromkeys(path for each in alternatives for path in key_paths(each)))
        case KeyFieldRule(path):
            return (path,)
        case PartsRule(parts):
            return tuple(part.rule.path for part in parts if isinstance(part.rule, KeyFieldRule))
        case _:
            return ()


def member_paths(rule: Rule) -> tuple[Path, ...]:
    """Return the paths of the members of the value that form the ID, in the order of the rule."""
    match rule:
        case FirstOfRule(alternatives):
            return tuple(dict.fromkeys(path for each in alternatives for path in member_paths(each)))
        case FieldRule(path):
            return (path,)
        case FieldsRule(paths):
            return paths
        case PartsRule(parts):
            return tuple(part.rule.path for part in parts if isinstance(part.rule, FieldRule))
        case _:
            return ()


def needs_value(rule: Rule) -> bool:
    """Return whether the rule, or one of its alternatives, reads the ID from the value."""
    return bool(member_paths(rule)) or any(
        isinstance(each, ContentRule | RawContentRule) for each in alternatives_of(rule)
    )


def has_key(rule: Rule) -> bool:
    """Return whether records with equal IDs always have equal keys, provided that IDs are not normalized.

    Keys with an equal member may differ, for example in the schema ID of their framing.
    """
    return all(
        isinstance(each, KeyRule) or (isinstance(each, PartsRule) and Part(KeyRule()) in each.parts)
        for each in alternatives_of(rule)
    )


@dataclass(frozen=True, slots=True)
class TrackingId:
    """The rule that finds the ID in a record, and the normalization of IDs before they are compared."""

    rule: Rule
    normalize: tuple[Normalizing, ...] = ()
    """The normalization steps, which apply in this order to strings in the value and to keys and headers in UTF-8.

    `instant`, the last step, converts RFC 3339 strings to instants, and leaves other strings unchanged.
    """
    zeros: bool = False
    """Whether an unsent Protobuf field without presence has its type's default value or is missing."""


def state_key(canonical: bytes) -> bytes:
    """Return the state key (at most 33 bytes) for an ID's canonical bytes. A `StateKey` is returned unchanged."""
    if len(canonical) <= KEPT_BYTES or canonical[:1] == DIGEST:
        return canonical
    return DIGEST + blake2b(canonical, digest_size=32).digest()


def encode_text(text: str) -> bytes:
    """Return the canonical bytes of a string ID. Raises UnicodeEncodeError for an unpaired surrogate."""
    if len(text) == _UUID_CHARS and _UUID_TEXT.fullmatch(text):
        return UUID + bytes.fromhex(text.replace("-", ""))
    return TEXT + text.encode()


def encode_bytes(value: bytes) -> bytes:
    """Return the canonical bytes of an ID in a record's key, a header, or a raw value."""
    if len(value) == _UUID_CHARS and _UUID_BYTES.fullmatch(value):
        return UUID + bytes.fromhex(value.replace(b"-", b"").decode())
    return BYTES + value


def encode_integer(value: int) -> bytes:
    """Return the canonical bytes of a signed 64-bit integer."""
    return INTEGER + value.to_bytes((value if value >= 0 else ~value).bit_length() // 8 + 1, "big", signed=True)


def encode_integer_text(digits: str) -> bytes:
    """Return the canonical bytes of an integer in JSON notation, with any number of digits."""
    if len(digits) <= 20:  # noqa: PLR2004 - a sign and 19 digits hold every 64-bit number
        value = int(digits)
        if -_INT64 <= value < _INT64:
            return encode_integer(value)
    return BIG_INTEGER + digits.encode()


def encode_instant(nanoseconds: int) -> bytes:
    """Return the canonical bytes of an instant. Raises OverflowError if the instant is outside the years 1 to 9999."""
    seconds, fraction = divmod(nanoseconds, 10**9)
    return encode_moment(seconds, f"{fraction:09}")


def encode_moment(seconds: int, fraction: str) -> bytes:
    """Return the canonical bytes of an instant, given whole seconds since 1970 UTC and the digits of the fraction.

    Raises OverflowError if the instant is outside the years 1 to 9999.
    """
    digits = fraction.rstrip("0")
    text = (_EPOCH + timedelta(seconds=seconds)).isoformat() + (f".{digits}" if digits else "")
    return INSTANT + text.encode() + b"Z"


def encode_composite(parts: Sequence[bytes]) -> bytes:
    """Return the canonical bytes of a composite ID, given the canonical bytes of its parts."""
    return COMPOSITE + b"".join(map(prefixed, parts))


def encode_alternative(index: int, key: bytes) -> bytes:
    """Return the canonical bytes of an ID that comes from alternative ``index``, given the ID's state key."""
    return ALTERNATIVE + bytes((index,)) + key


def prefixed(part: bytes) -> bytes:
    """Return the canonical bytes of one part of a composite ID, preceded by their length in LEB128."""
    return length(len(part)) + part


def length(count: int) -> bytes:
    """Return a length, or another number that is not negative, in LEB128."""
    if count < _MORE:
        return _ONE_BYTE[count]
    head = bytearray()
    while count >= _MORE:
        head.append(count & (_MORE - 1) | _MORE)
        count >>= _LENGTH_BITS
    head.append(count)
    return bytes(head)


_LONG_CHARS: Final = 1_000


def _nfc(text: str) -> str:
    """Normalize a string to NFC in linear time.

    `unicodedata.normalize` sorts each run of combining marks by insertion, which would take minutes for a million
    marks. Therefore, the marks of long strings are decomposed and sorted beforehand (UAX #15, section 1.3).
    """
    if len(text) > _LONG_CHARS:
        decomposed = chain.from_iterable(unicodedata.normalize("NFD", char) for char in text)
        runs = groupby(decomposed, key=lambda char: unicodedata.combining(char) > 0)
        text = "".join(char for _, run in runs for char in sorted(run, key=unicodedata.combining))
    return unicodedata.normalize("NFC", text)


_STEPS: Final[Mapping[str, Callable[[str], str]]] = {
    "trim": lambda text: text.strip(_BLANKS),
    "lower": str.lower,
    "nfc": _nfc,
}


@cache
def normalizer(steps: tuple[Normalizing, ...]) -> Callable[[str], str] | None:
    """Return a function that applies all steps except `instant` to a string, or None without such steps."""
    functions = [_STEPS[step] for step in steps if step != "instant"]
    if not functions:
        return None

    def apply(text: str) -> str:
        for function in functions:
            text = function(text)
        return text

    return apply


def id_text(key: bytes) -> str | None:
    """Return the ID in the form that `dedup lookup` accepts, or None if the state key is a digest.

    In a composite ID, ``{}`` stands for an absent part.

    Bytes that are not UTF-8 become replacement characters, so `dedup lookup` cannot find such an ID by the result.
    """
    tag, body = key[:1], key[1:]
    if tag == ALTERNATIVE:
        return id_text(body[1:])
    if tag == CONTENT and body[:1] == DIGEST:  # content that is not JSON
        return None
    if tag == COMPOSITE:
        parts = [_json(part) for part in _parts(body)]
        return None if None in parts else f"[{', '.join(filter(None, parts))}]"
    if tag in {TEXT, BYTES, CONTENT, BIG_INTEGER, DECIMAL, INSTANT}:
        return body.decode(errors="replace")
    if tag == UUID:
        return str(Uuid(bytes=body))
    if tag == INTEGER:
        return str(int.from_bytes(body, "big", signed=True))
    return {TRUE: "true", FALSE: "false", NULL: "null", ABSENT: "{}"}.get(tag)


def _json(key: bytes) -> str | None:
    text = id_text(key)
    if text is None or key[:1] not in {TEXT, BYTES, UUID, INSTANT}:
        return text
    return json.dumps(text, ensure_ascii=False)


def _parts(body: bytes) -> list[bytes]:
    parts = []
    at = 0
    while at < len(body):
        length = shift = 0
        while True:
            byte = body[at]
            at += 1
            length |= (byte & (_MORE - 1)) << shift
            shift += _LENGTH_BITS
            if byte < _MORE:
                break
        parts.append(body[at : at + length])
        at += length
    return parts
