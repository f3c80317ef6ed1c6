"""Extracts the tracking ID, event time, and fingerprint of one record in a slow but straightforward way.

Tests check that the column extractor (extract.py) agrees with this module on every record.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from hashlib import blake2b
from typing import Final, assert_never
from uuid import UUID

from dedup.core import exact_json
from dedup.core import tracking_id as encoding
from dedup.core.avro import Instant, Leaf, Refused
from dedup.core.event_time import BadTime, EventTime, FieldTime, RecordTime, rfc3339_ms, time_ms_of
from dedup.core.exact_json import (
    ABSENT,
    Absent,
    JsonValue,
    Members,
    NotJudged,
    Number,
    Unreadable,
    canonical_json,
    look_up,
)
from dedup.core.formats import MEMBERWISE, Format, Reader, Schema, content_reader, reader_of
from dedup.core.framing import SchemaBook, SchemaIdPlace, SchemaRef, payload_of, split
from dedup.core.key_members import KeyFormat, read_key
from dedup.core.member_reader import INVALID_TIMESTAMP
from dedup.core.tracking_id import (
    CodeRule,
    ContentRule,
    FieldRule,
    FieldsRule,
    FirstOfRule,
    HeaderRule,
    IdFunction,
    KeyFieldRule,
    KeyRule,
    Part,
    PartsRule,
    Path,
    RawContentRule,
    StateKey,
    TrackingId,
    alternatives_of,
    format_path,
    key_paths,
    member_paths,
    normalizer,
    state_key,
)
from dedup.errors import InvariantBroken, Terminated

Headers = Sequence[tuple[str, bytes | None]]

_FRACTION: Final = re.compile(r"\.(\d+)")
_FINGERPRINT_BYTES: Final = 8
_LACKING: Final = {"id_missing": encoding.ABSENT, "id_null": encoding.NULL, "id_empty": encoding.TEXT}
"""Maps the fault code of a part without a value to the canonical bytes that stand for the part."""
_CONTAINERS: Final = ("record", "array", "map", "message")


class FaultKind(Enum):
    """The kinds of faults that prevent a record from being judged."""

    MISSING_ID = "missing_id"
    UNREADABLE = "unreadable"
    TOMBSTONE = "tombstone"
    BAD_TIME = "bad_time"


@dataclass(frozen=True, slots=True)
class Fault:
    """The reason why one record cannot be judged."""

    kind: FaultKind
    code: str
    """A stable code in snake_case, for the header ``dedup-reason``."""
    detail: str
    """A sentence that does not reveal the payload. It may contain a path and a schema ID."""
    format_name: str = ""
    """The unexpected format that the value seems to have, or an empty string if the format is unknown."""


ODD_HEADER_NAME: Final = Fault(
    FaultKind.UNREADABLE,
    "header_not_utf8",
    "the name of a header is not UTF-8; each invalid byte is shown as \\x and two hexadecimal digits",
)
"""The fault of a record with a header name that is not UTF-8. Most clients cannot read such a record."""


@dataclass(frozen=True, slots=True)
class One:
    """The ID, event time, and fingerprint of one record."""

    id: bytes
    """The state key, at most 33 bytes."""
    time_ms: int
    fingerprint: bytes
    """The fingerprint of eight bytes, or no bytes if fingerprints were not requested."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Defines how to find the ID and the event time in a record, and which format the record's value has."""

    tracking_id: TrackingId
    event_time: EventTime = field(default_factory=RecordTime)
    fmt: Format = "json"
    fingerprint: bool = False
    compared: ContentRule | None = None
    """The content by which payloads are compared, or None to compare payloads as JSON or as bytes."""
    schema_id: SchemaIdPlace = "auto"
    """The place of a value's schema ID, if the format has schema IDs."""
    schema: Schema = ""
    """For Avro and Protobuf, the schema of all values or the schemas that framings refer to; for CSV, the columns."""
    keys: KeyFormat | None = None
    """The format of keys, which is required if members of keys are part of the ID."""

    @property
    def compared_without(self) -> tuple[Path, ...]:
        """The members that are ignored when JSON payloads are compared."""
        return () if self.compared is None else self.compared.exclude

    @property
    def indexed(self) -> bool:
        """True if message indexes follow the schema ID."""
        return self.fmt == "protobuf"

    def alternatives(self) -> list[Recipe]:
        """Return one recipe for each alternative of the ID rule."""
        rules = alternatives_of(self.tracking_id.rule)
        return [replace(self, tracking_id=replace(self.tracking_id, rule=rule)) for rule in rules]


NO_ALTERNATIVE: Final = Fault(FaultKind.MISSING_ID, "id_missing", "no alternative of the tracking ID has a value")
"""The fault of a record for which every alternative of a `FirstOfRule` is absent, null, or empty."""


def leads_on(fault: Fault) -> bool:
    """Return whether a fault means that the record lacks a value for an alternative and the next one must be tried."""
    return fault.kind is FaultKind.TOMBSTONE or fault.code in _LACKING


def may_identify(recipe: Recipe, key: bytes | None, value: bytes | None, headers: Headers) -> bool:
    """Return whether a record might have an ID, without decoding the record's value.

    If the result is False, the record certainly has no ID, or its value is unreadable.
    """
    match recipe.tracking_id.rule:
        case KeyRule():
            return bool(key)
        case KeyFieldRule():
            return key is not None
        case HeaderRule(name):
            return any(header == name for header, _ in headers)
        case FieldRule((str(name), *_)) if value is not None and recipe.fmt in {"json", "json_schema"}:
            # Search only for the first name of the path, because a repeated first name is a fault by itself.
            return b"\\" in value or name.encode() in value
        case _:
            return True


ID_FUNCTION_FAILED: Final = "id_function_failed"
"""The fault code for a record for which the function of a `CodeRule` raised an exception."""
_MOST_DETAIL_CHARS: Final = 500


EXTRACTED: Final = "dedup-extracted"
"""The header in which a repartition task passes on the state key or the fault if a user's function returns the IDs."""


class _MissingId(NotJudged):
    """Raised if a record has no ID."""

    kind = "missing_id"


def extract_one(
    recipe: Recipe, key: bytes | None, value: bytes | None, headers: Headers, timestamp_ms: int
) -> One | Fault:
    """Return the ID, time, and fingerprint of a record, or the record's first fault.

    If a record has several faults, the first one in this order is returned: TOMBSTONE, UNREADABLE, MISSING_ID,
    BAD_TIME. A null value is a TOMBSTONE if the ID or the event time comes from the value. If the ID comes from the key
    or a header, MISSING_ID takes precedence over TOMBSTONE. A value without the expected format is UNREADABLE even if
    neither the ID nor the event time comes from the value. The key is read after the value, and only if a member of the
    key is part of the ID.
    """
    if isinstance(recipe.tracking_id.rule, FirstOfRule):
        return _first_of(recipe, key, value, headers, timestamp_ms)
    try:
        if value is None:
            return _of_tombstone(recipe, key, headers, timestamp_ms)
        rule, time = recipe.tracking_id.rule, recipe.event_time
        if recipe.fmt in MEMBERWISE:
            ref, payload = _split(recipe, value, headers)
            return of_leaves(recipe, key, value, headers, timestamp_ms, reader_for(recipe, ref).read(payload))
        payload = payload_of(recipe.schema_id, value, headers) if recipe.fmt == "json_schema" else value
        content = ABSENT if recipe.fmt == "bytes" else exact_json.decode(payload)
        found = look_up(content, time.path) if isinstance(time, FieldTime) else ABSENT
        members = (look_up(content, path) for path in member_paths(rule))
        canonical = _canonical_id(recipe, key, value, headers, content, members)
        time_ms = time_ms_of(found, time) if isinstance(time, FieldTime) else timestamp_ms
        return One(state_key(canonical), time_ms, _fingerprint(recipe, payload, content))
    except NotJudged as refused:
        return fault_of(refused)


def _first_of(
    recipe: Recipe, key: bytes | None, value: bytes | None, headers: Headers, timestamp_ms: int
) -> One | Fault:
    tombstone: Fault | None = None
    for index, alternative in enumerate(recipe.alternatives()):
        found = extract_one(alternative, key, value, headers, timestamp_ms)
        if isinstance(found, One):
            return replace(found, id=state_key(encoding.encode_alternative(index, found.id)))
        if not leads_on(found):
            return found
        if tombstone is None and found.kind is FaultKind.TOMBSTONE:
            tombstone = found
    return tombstone or NO_ALTERNATIVE


def reader_for(recipe: Recipe, ref: SchemaRef) -> Reader:
    """Return the reader for values with a given schema ID. Raises Unreadable if the schema is unknown or unusable."""
    time = recipe.event_time if isinstance(recipe.event_time, FieldTime) else None
    paths = member_paths(recipe.tracking_id.rule)
    return reader_of(recipe.fmt, recipe.schema, ref, paths, time, zeros=recipe.tracking_id.zeros)


def of_leaves(
    recipe: Recipe, key: bytes | None, value: bytes, headers: Headers, timestamp_ms: int, leaves: Sequence[Leaf]
) -> One | Fault:
    """Return the result of `extract_one` for a record whose members have already been read.

    ``leaves`` contains the members that form the ID and then, if the event time is a field, the event time.
    """
    time = recipe.event_time
    try:
        canonical = _canonical_id(recipe, key, value, headers, ABSENT, leaves)
        if isinstance(time, FieldTime):
            if leaves[-1] == INVALID_TIMESTAMP and time.unit == "timestamp":
                raise BadTime("time_unparsable", f"the event time at {format_path(time.path)} is an invalid timestamp")
            if isinstance(leaves[-1], Refused):
                text = f"the event time at {format_path(time.path)} has the type {leaves[-1].type_name}"
                raise BadTime("time_ill_typed", f"{text}, which is no time of unit {time.unit}")
            timestamp_ms = time_ms_of(leaves[-1], time)
        fingerprint = typed_fingerprint(recipe, value, headers) if recipe.fingerprint else b""
        return One(state_key(canonical), timestamp_ms, fingerprint)
    except NotJudged as refused:
        return fault_of(refused)


def typed_content(recipe: Recipe, rule: ContentRule, value: bytes, headers: Headers) -> bytes:
    """Return the canonical content of a value whose format is in `MEMBERWISE`. Raises Unreadable if it has none."""
    ref, payload = _split(recipe, value, headers)
    return content_reader(recipe.fmt, recipe.schema, ref, rule)(payload)


def typed_fingerprint(recipe: Recipe, value: bytes, headers: Headers) -> bytes:
    """Return the fingerprint of a value whose format is in `MEMBERWISE`."""
    if recipe.compared is not None:
        with suppress(Unreadable):
            return content_digest(typed_content(recipe, recipe.compared, value, headers))
    return value_digest(_split(recipe, value, headers)[1])


def _split(recipe: Recipe, value: bytes, headers: Headers) -> tuple[SchemaRef, bytes]:
    """Return the schema ID and the payload of a value whose format is in `MEMBERWISE`."""
    if isinstance(recipe.schema, SchemaBook):
        return split(recipe.schema_id, value, headers, indexed=recipe.indexed)
    return b"", value


def fault_of(refused: NotJudged) -> Fault:
    """Return the `Fault` for an error that prevents a record from being judged."""
    return Fault(FaultKind(refused.kind), refused.code, refused.detail, refused.format_name)


def _of_tombstone(recipe: Recipe, key: bytes | None, headers: Headers, timestamp_ms: int) -> One | Fault:
    if encoding.needs_value(recipe.tracking_id.rule):
        return Fault(FaultKind.TOMBSTONE, "tombstone", "the value is null, and the tracking ID is read from it")
    canonical = _canonical_id(recipe, key, None, headers, ABSENT, ())
    if isinstance(recipe.event_time, FieldTime):
        return Fault(FaultKind.TOMBSTONE, "tombstone", "the value is null, and the event time is read from it")
    return One(state_key(canonical), timestamp_ms, _digest(b"") if recipe.fingerprint else b"")


def _canonical_id(
    recipe: Recipe,
    key: bytes | None,
    value: bytes | None,
    headers: Headers,
    content: JsonValue | Absent,
    members: Iterable[JsonValue | Leaf],
) -> bytes:
    """Return the canonical bytes of an ID, given the members of the value at the rule's paths in path order."""
    tracking_id = recipe.tracking_id
    inside = _inside_key(recipe, key, headers)
    match tracking_id.rule:
        case KeyRule() | KeyFieldRule() | HeaderRule() as rule:
            return _of_outside(rule, tracking_id, key, headers, inside, _of_field)
        case FieldRule(path):
            return _of_fields((path,), tracking_id, members)[0]
        case FieldsRule(paths):
            return encoding.encode_composite(_of_fields(paths, tracking_id, members))
        case PartsRule(parts):
            return _of_parts(parts, tracking_id, key, headers, inside, members)
        case ContentRule() as rule:
            return _of_content(recipe, rule, value, headers, content)
        case RawContentRule():
            return _of_raw(value)
        case CodeRule() as rule:
            return _of_returned(call_function(rule.load(), rule.name, key, value, headers), tracking_id, rule)
        case FirstOfRule():
            raise InvariantBroken("an ID with alternatives is extracted with the recipe of one alternative at a time.")


def _inside_key(recipe: Recipe, key: bytes | None, headers: Headers) -> Iterator[JsonValue | Absent | Leaf]:
    """Return the members of the key that form the ID, in path order. A null key has no members."""
    paths = key_paths(recipe.tracking_id.rule)
    if not paths or key is None:
        return iter(())
    if recipe.keys is None:
        raise InvariantBroken("a member of the key is part of the ID, and the format of keys is not known.")
    return iter(read_key(recipe.keys, paths, key, headers, zeros=recipe.tracking_id.zeros))


def _of_outside(
    rule: KeyRule | KeyFieldRule | HeaderRule,
    tracking_id: TrackingId,
    key: bytes | None,
    headers: Headers,
    inside: Iterator[JsonValue | Absent | Leaf],
    of_member: Callable[[JsonValue | Leaf, TrackingId, str], bytes],
) -> bytes:
    """Return the canonical bytes of an ID, or of a part of an ID, that is not read from the value."""
    match rule:
        case KeyFieldRule(path) if key is not None:
            return of_member(next(inside), tracking_id, f"{format_path(path)} of the record's key")
        case KeyRule() | KeyFieldRule():
            return _of_bytes(key, tracking_id, "the record's key")
        case HeaderRule(name):
            return _of_bytes(_header(headers, name), tracking_id, f"the header {name}")
        case never:
            assert_never(never)


def _of_raw(value: bytes | None) -> bytes:
    if not value:
        raise _MissingId("id_empty", "the value is empty")
    return encoding.encode_bytes(value)


def call_function(function: IdFunction, name: str, key: bytes | None, value: bytes | None, headers: Headers) -> object:
    """Call the user's function ``name`` for a record. Return the result, or a fault if the function raises an error."""
    try:
        return function(key, value, tuple(headers))
    except (KeyboardInterrupt, Terminated):
        raise
    except BaseException as error:  # noqa: BLE001  # any exception in user code, even SystemExit, makes a dead letter
        return Fault(FaultKind.UNREADABLE, ID_FUNCTION_FAILED, f"{name} raised {described(error)}")


def id_of_returned(found: object, tracking_id: TrackingId, rule: CodeRule) -> bytes | Fault:
    """Return the state key of the ID that `call_function` returned, or a fault if this value is not a usable ID."""
    try:
        return state_key(_of_returned(found, tracking_id, rule))
    except NotJudged as refused:
        return fault_of(refused)


def _of_returned(found: object, tracking_id: TrackingId, rule: CodeRule) -> bytes:
    place = f"what {rule.name} returned"
    if isinstance(found, Fault):
        raise _Found(found)
    if isinstance(found, StateKey):
        return bytes(found)
    if type(found) is bytes or found is None:
        return _of_bytes(found, tracking_id, place)
    if type(found) is str:
        return _of_text(found, tracking_id, place)
    if type(found) is not int:
        raise _MissingId(
            "id_ill_typed", f"{place} has the type {type(found).__name__}; return str, bytes, int, or None"
        )
    try:
        return encoding.encode_integer_text(str(found))
    except ValueError:  # Python refuses to write more than a few thousand digits
        raise _MissingId("id_out_of_range", f"{place} is an integer of {found.bit_length()} bits") from None


def passed_on(found: bytes | Fault) -> bytes:
    """Return the content of the header `EXTRACTED` for a record with the given state key or fault."""
    if isinstance(found, bytes):
        return found
    return json.dumps([found.kind.value, found.code, found.detail, found.format_name]).encode()


class _Found(NotJudged):
    """Raised for a fault that `call_function` or a repartition task returned instead of an ID."""

    def __init__(self, fault: Fault) -> None:
        self.kind = fault.kind.value  # type: ignore[misc]  # each fault has its own kind
        super().__init__(fault.code, fault.detail, format_name=fault.format_name)


def _found_before(_key: bytes | None, _value: bytes | None, headers: Headers) -> StateKey | Fault | None:
    """Return the state key or the fault in the record's last header."""
    name, content = headers[-1] if headers else ("", None)
    if name != EXTRACTED or content is None:
        return None  # an idle marker, which is not a record
    if content[:1] == b"[":
        kind, *said = json.loads(content)
        return Fault(FaultKind(kind), *said)
    return StateKey(content)


def _load_found_before() -> IdFunction:
    return _found_before


FOUND_BEFORE: Final = TrackingId(CodeRule(EXTRACTED, 1, _load_found_before))
"""The rule for records of a repartition topic whose last header is `EXTRACTED`. The header's content is used as is."""


def described(error: BaseException) -> str:
    """Return the type and message of an exception in user code, in at most 500 printable characters."""
    try:
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
    except BaseException:  # noqa: BLE001  # the error's own __str__ fails
        text = type(error).__name__
    return text.encode("utf-8", "backslashreplace").decode()[:_MOST_DETAIL_CHARS]


def _of_content(
    recipe: Recipe, rule: ContentRule, value: bytes | None, headers: Headers, content: JsonValue | Absent
) -> bytes:
    if recipe.fmt in MEMBERWISE and value is not None:
        return encoding.CONTENT + typed_content(recipe, rule, value, headers)
    if isinstance(content, Absent):
        raise Unreadable("not_json", "bytes have no canonical content")
    return encoding.CONTENT + canonical_json(content, exact_json.excluded(rule.exclude))


def _header(headers: Headers, name: str) -> bytes | None:
    values = [value for header, value in headers if header == name]
    if not values:
        raise _MissingId("id_missing", f"the header {name} is missing")
    if len(values) > 1:
        raise Unreadable("repeated_header", f"the header {name} occurs {len(values)} times")
    return values[0]


def _of_bytes(value: bytes | None, tracking_id: TrackingId, place: str) -> bytes:
    if value is None:
        raise _MissingId("id_null", f"{place} is null")
    normalize = normalizer(tracking_id.normalize)
    if normalize is not None:
        value = normalize_bytes(value, normalize)
    if not value:
        raise _MissingId("id_empty", f"{place} is empty")
    return encode_scalar(value, instants="instant" in tracking_id.normalize)


def encode_scalar(value: str | int | bytes, *, instants: bool) -> bytes:
    """Return the canonical bytes of a normalized value. With ``instants``, an RFC 3339 time becomes an instant.

    Raises UnicodeEncodeError for an unpaired surrogate.
    """
    match value:
        case int():
            return encoding.encode_integer(value)
        case str():
            instant = _instant_of(value) if instants else None
            return instant or encoding.encode_text(value)
        case bytes():
            instant = _instant_of(value.decode(errors="replace")) if instants else None
            return instant or encoding.encode_bytes(value)
        case never:
            assert_never(never)


def _instant_of(text: str) -> bytes | None:
    """Return the canonical bytes of the instant in an RFC 3339 string, or None for any other string.

    As in `rfc3339_ms`, a time in a leap second counts as a time in the next second.
    """
    time_ms = rfc3339_ms(text)
    if time_ms is None:
        return None
    digits = _FRACTION.search(text)
    with suppress(OverflowError):
        return encoding.encode_moment(time_ms // 1000, digits[1] if digits else "")
    return None


def normalize_bytes(value: bytes, normalize: Callable[[str], str]) -> bytes:
    """Normalize a string that is encoded as UTF-8. Bytes that are not UTF-8 are returned unchanged."""
    with suppress(UnicodeDecodeError):
        return normalize(value.decode()).encode()
    return value


def _of_fields(paths: Sequence[Path], tracking_id: TrackingId, members: Iterable[JsonValue | Leaf]) -> list[bytes]:
    parts: list[bytes] = []
    missing: tuple[str, str] | None = None  # not the exception, which would refer to this frame
    for path, found in zip(paths, members, strict=False):  # an event time may follow the members
        try:
            parts.append(_of_field(found, tracking_id, format_path(path)))
        except _MissingId as first:
            missing = missing or (first.code, first.detail)
    if missing is not None:
        raise _MissingId(*missing)
    return parts


def _of_parts(
    parts: Sequence[Part],
    tracking_id: TrackingId,
    key: bytes | None,
    headers: Headers,
    inside: Iterator[JsonValue | Absent | Leaf],
    members: Iterable[JsonValue | Leaf],
) -> bytes:
    found, present, left = list[bytes](), False, iter(members)
    missing: tuple[str, str] | None = None
    for part in parts:
        try:
            match part.rule:
                case FieldRule(path):
                    one = _of_part(next(left), tracking_id, format_path(path))
                case rule:
                    one = _of_outside(rule, tracking_id, key, headers, inside, _of_part)
            present = True
        except _MissingId as lacking:
            one = _LACKING.get(lacking.code, b"") if part.absent_is_value else b""
            missing = missing or (None if one else (lacking.code, lacking.detail))
        found.append(one)
    if missing is not None:
        raise _MissingId(*missing)
    if not present:
        raise _MissingId("id_missing", "every part of the tracking ID is absent, null, or empty")
    return encoding.encode_composite(found)


def _of_part(found: JsonValue | Leaf, tracking_id: TrackingId, place: str) -> bytes:
    if isinstance(found, Members | list):
        return encoding.CONTENT + canonical_json(found, exact_json.excluded(()))
    return _of_field(found, tracking_id, place)


def _of_field(found: JsonValue | Leaf, tracking_id: TrackingId, place: str) -> bytes:
    match found:
        case Absent():
            raise _MissingId("id_missing", f"there is no value at {place}")
        case None:
            raise _MissingId("id_null", f"{place} is null")
        case bool():
            return encoding.TRUE if found else encoding.FALSE
        case str():
            return _of_text(found, tracking_id, place)
        case Number():
            if found.is_integer:
                return encoding.encode_integer_text(found.integer_text())
            return encoding.DECIMAL + found.decimal_text().encode()
        case int() | bytes() | UUID() | Instant():
            return _of_typed(found, place)
        case Refused(name) if name not in _CONTAINERS:
            raise _MissingId("id_ill_typed", f"{place} has the type {name}, which cannot be a tracking ID")
        case Members() | list() | Refused():
            raise _MissingId("id_container", f"{place} is an object or an array; name a member inside it")
        case never:
            assert_never(never)


def _of_typed(found: int | bytes | UUID | Instant, place: str) -> bytes:
    match found:
        case int():
            return encoding.encode_integer(found)
        case bytes():
            if not found:
                raise _MissingId("id_empty", f"{place} is empty")
            return encoding.encode_bytes(found)
        case UUID():
            return encoding.UUID + found.bytes
        case Instant(nanoseconds):
            try:
                return encoding.encode_instant(nanoseconds)
            except OverflowError:
                raise _MissingId("id_out_of_range", f"{place} is no time in the years 1 to 9999") from None
        case never:
            assert_never(never)


def _of_text(text: str, tracking_id: TrackingId, place: str) -> bytes:
    normalize = normalizer(tracking_id.normalize)
    normalized = text if normalize is None else normalize(text)
    if not normalized:
        raise _MissingId("id_empty", f"{place} is empty")
    try:
        return encode_scalar(normalized, instants="instant" in tracking_id.normalize)
    except UnicodeEncodeError:
        raise Unreadable("lone_surrogate", f"{place} has an unpaired surrogate, which UTF-8 cannot encode") from None


def _fingerprint(recipe: Recipe, payload: bytes, content: JsonValue | Absent) -> bytes:
    """Return the fingerprint of a payload's canonical JSON, or of the raw bytes if it has no canonical JSON."""
    if not recipe.fingerprint:
        return b""
    if not isinstance(content, Absent):
        with suppress(Unreadable):
            return content_digest(canonical_json(content, exact_json.excluded(recipe.compared_without)))
    return value_digest(payload)


def content_digest(canonical: bytes) -> bytes:
    """Return the fingerprint of a value, given its canonical JSON."""
    return _digest(encoding.CONTENT + canonical)


def value_digest(value: bytes) -> bytes:
    """Return the fingerprint of a value that has no canonical JSON."""
    return _digest(encoding.BYTES + value)


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=_FINGERPRINT_BYTES).digest()
