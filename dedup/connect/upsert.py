"""Creates a sink's table, turns records into rows, and upserts the rows by tracking ID."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Any, Final, cast
from uuid import UUID

from dedup.connect.database import (
    OFFSETS,
    OFFSETS_STATEMENT,
    STAGED,
    DatabaseConnection,
    FencedOffsets,
    Row,
    RowsRefused,
    Table,
    WriteOutcome,
    make,
    make_staging,
    quoted,
)
from dedup.connect.dead_letter_producer import RejectedRecord
from dedup.core.avro import Instant, Leaf, Refused
from dedup.core.csv_row import number_of
from dedup.core.event_time import rfc3339_ms
from dedup.core.exact_json import Absent, Number, Unreadable, canonical_json, decode, decode_quickly
from dedup.core.extract_one import Headers, Recipe, reader_for
from dedup.core.formats import Reader
from dedup.core.framing import SchemaBook, SchemaRef, payload_of, payloads_of, refs_of, rows_by_ref
from dedup.core.odd_rows import NotInColumns, at_rows
from dedup.core.proto_schema import TIMESTAMP
from dedup.core.tracking_id import FieldsRule, Path, TrackingId
from dedup.core.varint import Damaged, varint
from dedup.errors import StateIncompatible
from dedup.kafka.record_batch import Columns
from dedup.kafka.wire import TopicPartition
from dedup.topology.model import SinkColumn, SinkSpec, Topology, extractor_of, schema_of

ID: Final = "tracking_id"
TIME: Final = "event_time_ms"
_INT64: Final = 1 << 63
_MOST_DIGITS: Final = 20
_MOST_PLACES: Final = 2_500
"""The maximum number of digits, and the maximum exponent, of a number in a column. An Avro decimal may have 2,466
digits.
"""
_KINDS: Final[Mapping[type, str]] = {
    bool: "true or false",
    str: "text",
    bytes: "bytes",
    list: "a list",
    dict: "an object",
}
_EPOCH: Final = datetime(1970, 1, 1)  # noqa: DTZ001  # local dates and times have no zone
_LOCAL_NS: Final[Mapping[str, int]] = {
    "date": 86_400 * 10**9,
    **dict.fromkeys(("time-millis", "local-timestamp-millis"), 10**6),
    **dict.fromkeys(("time-micros", "local-timestamp-micros"), 10**3),
    "local-timestamp-nanos": 1,
}
"""Maps each Avro type for dates and times without a zone to the length of the type's unit, in nanoseconds."""
_FLOAT_BYTES: Final = {"float": 4, "double": 8}
_SECONDS, _NANOS = 8, 16
"""The tags of the fields of `google.protobuf.Timestamp`."""


@dataclass(frozen=True, slots=True)
class SinkRows:
    """The rows made from several batches of records."""

    rows: list[Row] = field(default_factory=list)
    records: list[tuple[TopicPartition, Columns, int]] = field(default_factory=list)
    """For each row, its record's source partition, batch, and index in the batch."""
    bad: list[RejectedRecord] = field(default_factory=list)
    """Records that cannot become rows."""


class RowMaker:
    """Turns records into rows that contain the tracking ID, the event time, and the columns of the payload."""

    def __init__(self, topology: Topology, columns: Sequence[SinkColumn]) -> None:
        self._extract: Final = extractor_of(topology)
        self._framing: Final = topology.source.framing
        self._columns: Final = [(column.name, _CONVERTERS[column.type], column.path) for column in columns]
        self._types: Final = [column.type for column in columns]
        self._exact: Final = "json" in self._types
        self._members: Final = self._memberwise(topology) if topology.source.is_memberwise and columns else None

    def rows(self, batches: Sequence[tuple[TopicPartition, Columns]]) -> SinkRows:
        """Return the rows of the batches in the order of their records, and the records that cannot become rows."""
        made = SinkRows()
        for source, columns in batches:
            found = self._extract(columns.keys, columns.values, columns.headers, columns.timestamps_ms)
            records = zip(found.ids, found.times_ms, self.payloads(columns), strict=True)
            for at, (tracking_id, time_ms, payload) in enumerate(records):
                fault = found.faults.get(at)
                if fault is not None:
                    made.bad.append(RejectedRecord(source, columns, at, fault.code, fault.detail))
                    continue
                if isinstance(payload, tuple):
                    made.rows.append((tracking_id, time_ms, *payload))
                    made.records.append((source, columns, at))
                else:
                    made.bad.append(RejectedRecord(source, columns, at, "wrong_type", payload))
        return made

    def payloads(self, columns: Columns) -> Iterable[Row | str]:
        """Return each record's column values, or a sentence that says which value has the wrong type."""
        if not self._columns:
            return zip(columns.keys, columns.values, strict=True)
        if self._members is not None:
            return self._of_members(self._members, columns)
        return map(self._of_json, columns.values, columns.headers)

    def _of_json(self, value: bytes | None, headers: Headers) -> Row | str:
        if value is None:
            return (None,) * len(self._columns)
        try:
            if self._framing is not None:
                value = payload_of(self._framing, value, headers)
            # Decoding numbers exactly takes time, and only columns of type json need exact numbers.
            record = decode(value) if self._exact else decode_quickly(value)
        except (ValueError, Unreadable) as error:
            return f"its value cannot be read: {error}"
        return self._converted([look_up(record, path) for _, _, path in self._columns])

    def _converted(self, members: Sequence[Any]) -> Row | str:
        values: list[Any] = []
        for (name, convert, _), found in zip(self._columns, members, strict=True):
            try:
                values.append(None if found is None else convert(found))
            except (TypeError, ValueError, Unreadable) as error:
                return f"column {name}: {error}"
        return tuple(values)

    def _memberwise(self, topology: Topology) -> Recipe:
        # A Protobuf field that was not sent has the value 0, false, or empty, unless it has presence.
        rule = TrackingId(FieldsRule(tuple(path for _, _, path in self._columns)), zeros=True)
        source = topology.source
        return Recipe(rule, fmt=source.format, schema_id=source.schema_id, schema=schema_of(source))

    def _of_members(self, recipe: Recipe, columns: Columns) -> list[Row | str]:
        """Do the same as `_of_json`, one column at a time, for values that are never decoded as a whole."""
        values, headers, place, indexed = columns.values, columns.headers, recipe.schema_id, recipe.indexed
        refs: list[SchemaRef | None] = [None if value is None else b"" for value in values]
        payloads: Sequence[bytes | None] = values
        if isinstance(recipe.schema, SchemaBook):
            refs = refs_of(place, values, headers, indexed=indexed)
            payloads = payloads_of(place, values, headers, indexed=indexed)
        made: list[Row | str] = [(None,) * len(self._columns)] * len(values)
        for rows in rows_by_ref(refs):
            ref = refs[rows[0]]
            if ref is None:
                continue  # null values; the extractor has refused a damaged framing
            found = _leaves(partial(reader_for, recipe, ref), cast("Sequence[bytes]", at_rows(rows, payloads)))
            for row, leaves in zip(rows, found, strict=True):
                made[row] = leaves if isinstance(leaves, str) else self._of_leaves(leaves, is_csv=recipe.fmt == "csv")
        return made

    def _of_leaves(self, leaves: Sequence[Leaf], *, is_csv: bool) -> Row | str:
        members: list[Any] = []
        for (name, _, _), kind, leaf in zip(self._columns, self._types, leaves, strict=True):
            try:
                members.append(_plain_cell(leaf, kind) if is_csv else _plain_leaf(leaf, kind))
            except (TypeError, ValueError, ArithmeticError, Unreadable) as error:
                return f"column {name}: {error}"
        return self._converted(members)


def _leaves(reader_of: Callable[[], Reader], payloads: Sequence[bytes]) -> list[Sequence[Leaf] | str]:
    """Return the members of each value, or a sentence about a value that cannot be read."""
    try:
        reader = reader_of()
    except Unreadable as error:
        return [f"its value cannot be read: {error}"] * len(payloads)
    with suppress(NotInColumns):
        if reader.columnar:
            return list(zip(*reader.columns(payloads), strict=True))
    found: list[Sequence[Leaf] | str] = []
    for payload in payloads:
        try:
            found.append(reader.read(payload))
        except Unreadable as error:
            found.append(f"its value cannot be read: {error}")
    return found


def _plain_cell(cell: Leaf, kind: str) -> Any:  # noqa: ANN401 - any JSON value
    """Return a CSV cell as the JSON value that a column of this type accepts, or as text if none exists."""
    if isinstance(cell, Absent):
        return None
    match kind:
        case "integer" | "number" | "json":
            found = number_of(cell)
            return _plain_number(found, kind) if isinstance(found, int | Number) else found
        case "boolean":
            return {"true": True, "false": False}.get(str(cell), cell)
        case _:
            return cell


def _plain_leaf(leaf: Leaf, kind: str) -> Any:  # noqa: ANN401 - any JSON value
    """Return the JSON value that represents a member: times in RFC 3339, UUIDs and local times as text.

    A decimal becomes text for a text column, and a number for any other column. Raises TypeError for a type without a
    JSON value, and OverflowError for a time outside the years 1 to 9999.
    """
    match leaf:
        case Absent():
            return None
        case UUID():
            return str(leaf)
        case Instant(nanoseconds):
            return _instant(nanoseconds)
        case Number():
            return _plain_number(leaf, kind)
        case int() if kind == "json" and not isinstance(leaf, bool):
            return _plain_number(leaf, kind)
        case Refused(name, raw):
            found = _refused_by_ids(name, raw)
            return _plain_number(found, kind) if isinstance(found, float) else found
        case _:
            return leaf


def _plain_number(number: float | Number, kind: str) -> float | Number | str:
    """Return a number in the form that a column of this type accepts. Raises TypeError if the number is too long."""
    if not isinstance(number, Number):
        return Number(repr(number)) if kind == "json" and math.isfinite(number) else number
    _, digits, exponent = number.parts()
    if max(len(digits), abs(exponent)) > _MOST_PLACES:
        raise TypeError(f"it is a number of more than {_MOST_PLACES:,} places")
    exact = Decimal(number.text)
    if kind == "text":
        return f"{exact:f}"
    is_whole = kind == "integer" and exact == exact.to_integral_value() and exact.adjusted() < _MOST_DIGITS
    return Number(str(int(exact))) if is_whole else number


def _refused_by_ids(name: str, raw: Any) -> Any:  # noqa: ANN401 - any type of a format
    if isinstance(raw, Instant):
        return _instant(raw.nanoseconds)
    if name in _FLOAT_BYTES and raw is not None:
        return _floating(raw, _FLOAT_BYTES[name])
    if name in _LOCAL_NS:
        if name[:4] == "time" and not 0 <= raw * _LOCAL_NS[name] < _LOCAL_NS["date"]:
            raise TypeError(f"it has the type {name}, but is no time of a day")
        moment = _after_epoch(raw * _LOCAL_NS[name])
        return (moment.date() if name == "date" else moment.time() if name[:4] == "time" else moment).isoformat()
    if name == TIMESTAMP and isinstance(raw, bytes):
        return _instant(_nanoseconds(raw))
    raise TypeError(f"it has the type {name}, which a column cannot hold; name a member of another type")


def _floating(raw: Any, size: int) -> float:  # noqa: ANN401 - the bits, the bytes, or the number itself
    """Return the number that a format's reader has read.

    The Protobuf reader returns a number's bits as an int, the Avro reader returns bytes, and other readers return a
    float.
    """
    if isinstance(raw, float):
        return raw
    encoded: bytes = raw if isinstance(raw, bytes) else raw.to_bytes(size, "little")
    found: float = struct.unpack("<f" if len(encoded) == _FLOAT_BYTES["float"] else "<d", encoded)[0]
    return found


def _nanoseconds(message: bytes) -> int:
    """Return the time in an encoded `google.protobuf.Timestamp`. Raises TypeError if the encoding is damaged."""
    parts, at = {_SECONDS: 0, _NANOS: 0}, 0
    try:
        while at < len(message):
            tag, at = varint(message, at, len(message))
            number, at = varint(message, at, len(message))
            parts[tag] = number if number < _INT64 else number - (1 << 64)
    except Damaged as damage:
        raise TypeError(f"it is not a valid {TIMESTAMP}: {damage}") from None
    return parts[_SECONDS] * 10**9 + parts[_NANOS]


def _instant(nanoseconds: int) -> str:
    return f"{_after_epoch(nanoseconds).isoformat()}Z"


def _after_epoch(nanoseconds: int) -> datetime:
    # Databases store at most microseconds.
    return _EPOCH + timedelta(microseconds=nanoseconds // 1_000)


def look_up(record: Any, path: Path) -> Any:  # noqa: ANN401 - any JSON value
    """Return the value at a JSON path, or None if the record has no value there."""
    for step in path:
        match record, step:
            case dict(), str():
                record = record.get(step)
            case list(), int() if step < len(record):
                record = record[step]
            case _:
                return None
    return record


def _only(
    accepts: Callable[[Any], bool], what: str, convert: Callable[[Any], Any] = lambda value: value
) -> Callable[[Any], Any]:
    """Return a function that converts the values that ``accepts`` accepts, and raises TypeError for all others."""

    def converted(found: Any) -> Any:  # noqa: ANN401 - any JSON value
        value = _plain(found)
        if not accepts(value):
            raise TypeError(f"it is {_KINDS.get(type(found), 'a number')}, not {what}")
        return convert(value)

    return converted


def _plain(found: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Convert an exactly decoded number to an int or a float. The float is infinite if the number is too large."""
    if not isinstance(found, Number):
        return found
    return int(found.text) if found.is_integer and len(found.text) <= _MOST_DIGITS else float(found.text)


_CONVERTERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "text": _only(lambda value: type(value) is str, "text"),
    "integer": _only(lambda value: type(value) is int and -_INT64 <= value < _INT64, "an integer of at most 64 bits"),
    "number": _only(lambda value: type(value) in {int, float} and math.isfinite(value), "a finite number", float),
    "boolean": _only(lambda value: type(value) is bool, "true or false"),
    "time": _only(
        lambda value: type(value) is str and rfc3339_ms(value) is not None, "a time such as 2024-01-31T00:00:00Z"
    ),
    "json": lambda found: canonical_json(found, {}).decode(),
}


def table_of(spec: SinkSpec, types: Mapping[str, str]) -> Table:
    """Return the table of a sink. ``types`` maps each column type of a topology to its SQL type."""
    columns = [(column.name, types[column.type]) for column in spec.columns]
    payload = columns or [("key", types["bytes"]), ("value", types["bytes"])]
    fixed = ((ID, types["bytes"]), (TIME, types["integer"]))
    return Table(spec.table, (*fixed, *payload), (ID, TIME) if spec.append else (ID,), spec.append)


def refuse_lost_table(connection: DatabaseConnection, offsets: FencedOffsets) -> None:
    """Raise StateIncompatible if the sink has written rows to another table, or to a table that no longer exists."""
    if not connection.has(OFFSETS):
        return
    mark = connection.mark
    read = connection.query(
        f"SELECT part, position, table_name FROM {OFFSETS} "  # noqa: S608  # our own names
        f"WHERE reader = {mark} AND topic = {mark} AND position > 0 ORDER BY part",
        (offsets.reader, offsets.topic),
    )
    for written in read:
        offsets.refuse_other_table(*written)
    if read and not connection.has(offsets.table):
        partition, position, _ = read[0]
        raise StateIncompatible(
            f"there is no table {offsets.table}, but {OFFSETS} says that {offsets.reader!r} has read "
            f"{offsets.topic}/{partition} up to offset {position}: the table was dropped or renamed. Nothing was "
            f"changed. Restore the table; or, to fill a new one from the topic's start, delete the rows of reader "
            f"{offsets.reader!r} from {OFFSETS}."
        )


def plan_tables(connection: DatabaseConnection, spec: SinkSpec) -> dict[str, str]:
    """Return the CREATE statements for the sink's missing tables, by table name."""
    table = table_of(spec, connection.types)
    columns = [f'"{name}" {kind}{" NOT NULL" if name in {ID, TIME} else ""}' for name, kind in table.columns]
    create = f"CREATE TABLE IF NOT EXISTS {table.name} ({', '.join(columns)}, PRIMARY KEY ({quoted(table.key)}))"
    statements = {OFFSETS: OFFSETS_STATEMENT, table.name: create}
    return {name: statement for name, statement in statements.items() if not connection.has(name)}


def make_tables(connection: DatabaseConnection, spec: SinkSpec) -> None:
    """Create the staging table and any missing tables. Raises StateIncompatible if an existing table is unsuitable."""
    for name, statement in plan_tables(connection, spec).items():
        make(connection, name, statement)
    table = table_of(spec, connection.types)
    make_staging(connection, table)
    # The staging table is empty, so this statement changes nothing, but it fails if a column or the key is missing.
    connection.execute(_upsert_statement(table))
    _refuse_unfilled_columns(connection, table)


def _refuse_unfilled_columns(connection: DatabaseConnection, table: Table) -> None:
    """Raise StateIncompatible if the database would refuse every row, because the sink does not fill a column."""
    filled = {name for name, _ in table.columns}
    unfilled = [name for name in connection.required(table.name) if name not in filled]
    if unfilled:
        raise StateIncompatible(
            f"the table {table.name} has the column {unfilled[0]!r}, which may not be null and has no default, and "
            f"which the sink does not fill, so the database would refuse every row. Nothing more was written. Give the "
            f"column a default, let it be null, or add it to `sink.columns`."
        )


def _upsert_statement(table: Table) -> str:
    insert = f"INSERT INTO {table.name} ({table.listed}) SELECT {table.listed} FROM {STAGED} WHERE true"  # noqa: S608
    if table.append:
        return f"{insert} ON CONFLICT ({quoted(table.key)}) DO NOTHING"
    changed = ", ".join(f'"{name}" = excluded."{name}"' for name, _ in table.columns if name not in table.key)
    # Only a record with a later event time changes a row, so reading a topic twice changes nothing.
    newer = f'excluded."{TIME}" > {table.name.rpartition(".")[2]}."{TIME}"'
    return f"{insert} ON CONFLICT ({quoted(table.key)}) DO UPDATE SET {changed} WHERE {newer}"


def write_rows(connection: DatabaseConnection, table: Table, rows: Sequence[Row]) -> WriteOutcome:
    """Upsert rows in the open transaction. Rows that the database rejects are skipped and listed in the outcome."""
    written = WriteOutcome()
    width = len(table.key)
    left: Sequence[int] = range(len(rows))
    if connection.check_at_once:
        # A deferred constraint would reject the commit, when it is too late to find the row that violates the
        # constraint.
        connection.execute(connection.check_at_once)
    while left:
        refused = _write(connection, table, rows, _one_a_key(rows, left, width), written)
        written.refused |= refused
        # If the newest row of a key is refused, the next older row of the key is written.
        keys = {rows[number][:width] for number in refused}
        left = [number for number in left if rows[number][:width] in keys and number not in refused]
    written.unchanged = len(rows) - written.inserted - written.updated - len(written.refused)
    return written


def _one_a_key(rows: Sequence[Row], numbers: Sequence[int], width: int) -> list[int]:
    """Return the index of each key's newest row, or the first index if several rows are equally new."""
    chosen: dict[Row, int] = {}
    for number in numbers:
        row = rows[number]
        before = chosen.setdefault(row[:width], number)
        if row[1] > rows[before][1]:
            chosen[row[:width]] = number
    return sorted(chosen.values())


def _write(
    connection: DatabaseConnection, table: Table, rows: Sequence[Row], numbers: list[int], written: WriteOutcome
) -> dict[int, RowsRefused]:
    """Write the rows, and find rejected rows by bisection."""
    refused: dict[int, RowsRefused] = {}
    parts = [numbers]
    while parts:
        part = parts.pop()
        connection.execute("SAVEPOINT dedup_rows")
        try:
            _write_all(connection, table, [rows[number] for number in part], written)
        except RowsRefused as why:
            connection.execute("ROLLBACK TO SAVEPOINT dedup_rows")
            middle = len(part) // 2
            if not connection.is_staged_as(table):  # The table was altered, so it may accept rows that were rejected.
                make_staging(connection, table)
                parts.append(part)
            elif middle:
                parts += [part[middle:], part[:middle]]
            else:
                _refuse_unfilled_columns(connection, table)  # the table may have been altered while the sink runs
                refused[part[0]] = why
        connection.execute("RELEASE SAVEPOINT dedup_rows")
    return refused


def _write_all(connection: DatabaseConnection, table: Table, rows: Sequence[Row], written: WriteOutcome) -> None:
    connection.stage(table, rows)
    same = " AND ".join(f't."{name}" = s."{name}"' for name in table.key)
    ((known,),) = connection.query(f"SELECT count(*) FROM {STAGED} s JOIN {table.name} t ON {same}")  # noqa: S608
    changed = connection.execute(_upsert_statement(table))
    written.inserted += len(rows) - known
    written.updated += changed - (len(rows) - known)
