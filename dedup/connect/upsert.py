"""Creates a sink's table, turns records into rows, and upserts the rows by tracking ID.

`RowMaker` turns records into rows. `plan_tables` lists the missing tables, and `make_tables` creates them. `write_rows`
upserts rows, and finds those that the database refuses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

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
    make_offsets,
    make_staging,
)
from dedup.connect.dead_letter_producer import RejectedRecord
from dedup.core.event_time import rfc3339_ms
from dedup.core.exact_json import Number, Unreadable, canonical_json, decode
from dedup.core.json_path import Path
from dedup.errors import StateIncompatible
from dedup.kafka.record_batch import Columns
from dedup.kafka.wire import TopicPartition
from dedup.topology.model import SinkColumn, SinkSpec, Topology, extractor_of

ID: Final = "tracking_id"
TIME: Final = "event_time_ms"
_INT64: Final = 1 << 63
_MOST_DIGITS: Final = 20
_KINDS: Final[Mapping[type, str]] = {bool: "true or false", str: "text", list: "a list", dict: "an object"}


@dataclass(frozen=True, slots=True)
class SinkRows:
    """The rows of several batches of records."""

    rows: list[Row] = field(default_factory=list)
    records: list[tuple[TopicPartition, Columns, int]] = field(default_factory=list)
    """The record of each row, as its source partition, its batch, and its index in the batch."""
    bad: list[RejectedRecord] = field(default_factory=list)
    """Records that cannot become rows."""


class RowMaker:
    """Makes rows from a topology's records, with the tracking ID, the event time, and the columns of the payload."""

    def __init__(self, topology: Topology, columns: Sequence[SinkColumn]) -> None:
        self._extract: Final = extractor_of(topology)
        self._columns: Final = [(column.name, _CONVERTERS[column.type], column.path) for column in columns]
        self._exact: Final = any(column.type == "json" for column in columns)

    def rows(self, batches: Sequence[tuple[TopicPartition, Columns]]) -> SinkRows:
        """Return the rows of the batches in the order of their records, and the records that cannot become rows."""
        made = SinkRows()
        for source, columns in batches:
            found = self._extract(columns.keys, columns.values, columns.headers, columns.timestamps_ms)
            records = zip(found.ids, found.times_ms, columns.keys, columns.values, strict=True)
            for at, (tracking_id, time_ms, key, value) in enumerate(records):
                fault = found.faults.get(at)
                if fault is not None:
                    made.bad.append(RejectedRecord(source, columns, at, fault.code, fault.detail))
                    continue
                payload = self._payload(value) if self._columns else (key, value)
                if isinstance(payload, tuple):
                    made.rows.append((tracking_id, time_ms, *payload))
                    made.records.append((source, columns, at))
                else:
                    made.bad.append(RejectedRecord(source, columns, at, "wrong_type", payload))
        return made

    def _payload(self, value: bytes | None) -> Row | str:
        """Return the values of the columns, or a sentence about a value that has the wrong type."""
        if value is None:
            return (None,) * len(self._columns)
        try:
            # Decoding numbers exactly takes time, and only columns of type json need it.
            record = decode(value) if self._exact else orjson.loads(value)
        except (ValueError, Unreadable) as error:
            return f"its value cannot be read: {error}"
        values: list[Any] = []
        for name, convert, path in self._columns:
            found = look_up(record, path)
            try:
                values.append(None if found is None else convert(found))
            except (TypeError, ValueError, Unreadable) as error:
                return f"column {name}: {error}"
        return tuple(values)


def look_up(record: Any, path: Path) -> Any:  # noqa: ANN401 - any JSON value
    """Return the value at a path; None if there is none."""
    for step in path:
        match record, step:
            case dict(), str():
                record = record.get(step)
            case list(), int() if step < len(record):
                record = record[step]
            case _:
                return None
    return record


def _text(found: Any) -> str:  # noqa: ANN401 - any JSON value
    if type(found) is not str:
        raise TypeError(f"it is {_kind(found)}, not text")
    return found


def _integer(found: Any) -> int:  # noqa: ANN401 - any JSON value
    number = _plain(found)
    if type(number) is not int:
        raise TypeError(f"it is {_kind(found)}, not an integer of at most 64 bits")
    if not -_INT64 <= number < _INT64:
        raise ValueError("it is an integer of more than 64 bits")
    return number


def _number(found: Any) -> float:  # noqa: ANN401 - any JSON value
    number = _plain(found)
    if type(number) not in {int, float} or not math.isfinite(number):
        raise TypeError(f"it is {_kind(found)}, not a number")
    return float(number)


def _boolean(found: Any) -> bool:  # noqa: ANN401 - any JSON value
    if type(found) is not bool:
        raise TypeError(f"it is {_kind(found)}, not true or false")
    return found


def _time(found: Any) -> str:  # noqa: ANN401 - any JSON value
    if type(found) is not str or rfc3339_ms(found) is None:
        raise TypeError(f"it is {_kind(found)}, not a time such as 2024-01-31T00:00:00Z")
    return found


def _json(found: Any) -> str:  # noqa: ANN401 - any JSON value
    return canonical_json(found, {}).decode()


def _kind(found: Any) -> str:  # noqa: ANN401 - any JSON value
    return _KINDS.get(type(found), "a number")


def _plain(found: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Convert a losslessly decoded number to a Python int or float; a number that is too large becomes infinity."""
    if not isinstance(found, Number):
        return found
    return int(found.text) if found.is_integer and len(found.text) <= _MOST_DIGITS else float(found.text)


_CONVERTERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "text": _text,
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "time": _time,
    "json": _json,
}


def table_of(spec: SinkSpec, types: Mapping[str, str]) -> Table:
    """Return the table of a sink; ``types`` are the types of the database, as in `DatabaseConnection.types`."""
    columns = [(column.name, types[column.type]) for column in spec.columns]
    payload = columns or [("key", types["bytes"]), ("value", types["bytes"])]
    fixed = ((ID, types["bytes"]), (TIME, types["integer"]))
    return Table(spec.table, (*fixed, *payload), (ID, TIME) if spec.append else (ID,), spec.append)


def _create_statement(table: Table) -> str:
    columns = [f'"{name}" {kind}{" NOT NULL" if name in {ID, TIME} else ""}' for name, kind in table.columns]
    key = ", ".join(f'"{name}"' for name in table.key)
    return f"CREATE TABLE IF NOT EXISTS {table.name} ({', '.join(columns)}, PRIMARY KEY ({key}))"


def make_table(connection: DatabaseConnection, table: Table) -> None:
    """Create the staging table, and the table if it is missing.

    Raises StateIncompatible if the table exists with different columns or a different key.
    """
    make(connection, table.name, _create_statement(table))
    make_staging(connection, table)
    # Without rows, this statement changes nothing, but it fails now if a column or the key is missing, not at the first
    # record.
    connection.execute(_upsert_statement(table))


def refuse_lost_table(connection: DatabaseConnection, table: Table, offsets: FencedOffsets) -> None:
    """Raise StateIncompatible if rows were written but the table was dropped or renamed."""
    if connection.has(table.name):
        return
    mark = connection.mark
    read = connection.query(
        f"SELECT part, position FROM {OFFSETS} "  # noqa: S608  # our own names
        f"WHERE reader = {mark} AND topic = {mark} AND position >= 0 ORDER BY part",
        (offsets.reader, offsets.topic),
    )
    if read:
        partition, position = read[0]
        raise StateIncompatible(
            f"there is no table {table.name}, but {OFFSETS} says that {offsets.reader!r} has read "
            f"{offsets.topic}/{partition} up to offset {position}: the table was dropped, or `sink.table` has another "
            f"name now. Nothing was changed. Restore the table; or, to fill a new one from the topic's start, delete "
            f"the rows of reader {offsets.reader!r} from {OFFSETS}."
        )


def plan_tables(connection: DatabaseConnection, spec: SinkSpec) -> dict[str, str]:
    """Return the CREATE statements of the sink's missing tables by name, without running them."""
    table = table_of(spec, connection.types)
    statements = {OFFSETS: OFFSETS_STATEMENT, table.name: _create_statement(table)}
    return {name: statement for name, statement in statements.items() if not connection.has(name)}


def make_tables(connection: DatabaseConnection, spec: SinkSpec) -> None:
    """Create the sink's missing tables. Raises StateIncompatible if an existing table is unsuitable."""
    make_offsets(connection)
    make_table(connection, table_of(spec, connection.types))


def _upsert_statement(table: Table) -> str:
    key = ", ".join(f'"{name}"' for name in table.key)
    insert = f"INSERT INTO {table.name} ({table.listed}) SELECT {table.listed} FROM {STAGED} WHERE true"  # noqa: S608
    if table.append:
        return f"{insert} ON CONFLICT ({key}) DO NOTHING"
    changed = ", ".join(f'"{name}" = excluded."{name}"' for name, _ in table.columns if name not in table.key)
    # Only a later event changes a row, so reading a topic twice changes nothing.
    newer = f'excluded."{TIME}" > {table.name.rpartition(".")[2]}."{TIME}"'
    return f"{insert} ON CONFLICT ({key}) DO UPDATE SET {changed} WHERE {newer}"


def write_rows(connection: DatabaseConnection, table: Table, rows: Sequence[Row]) -> WriteOutcome:
    """Upsert rows in the open transaction. Rows that the database rejects are skipped, and the outcome lists them."""
    written = WriteOutcome()
    left = list(range(len(rows)))
    while left:
        chosen = _one_a_key(table, rows, left)
        found = _write(connection, table, rows, chosen)
        written.add(found)
        written.unchanged += len(left) - len(chosen)
        # If the newest row of a key is refused, the row before it is written.
        keys = {rows[number][: len(table.key)] for number in found.refused}
        left = [number for number in left if rows[number][: len(table.key)] in keys and number not in found.refused]
        written.unchanged -= len(left)
    return written


def _one_a_key(table: Table, rows: Sequence[Row], numbers: Sequence[int]) -> list[int]:
    """Return the index of the newest row of each key, and of the first one if several are equally new."""
    chosen: dict[Row, int] = {}
    width = len(table.key)
    for number in numbers:
        row = rows[number]
        key = row[:width]
        before = chosen.get(key)
        if before is None or row[1] > rows[before][1]:
            chosen[key] = number
    return sorted(chosen.values())


def _write(connection: DatabaseConnection, table: Table, rows: Sequence[Row], numbers: list[int]) -> WriteOutcome:
    """Write the rows, and bisect them to find those that the database refuses."""
    connection.execute("SAVEPOINT dedup_rows")
    try:
        written = _write_all(connection, table, [rows[number] for number in numbers])
    except RowsRefused as refused:
        connection.execute("ROLLBACK TO SAVEPOINT dedup_rows")
        connection.execute("RELEASE SAVEPOINT dedup_rows")
        if len(numbers) == 1:
            return WriteOutcome(refused={numbers[0]: refused})
        middle = len(numbers) // 2
        written = _write(connection, table, rows, numbers[:middle])
        written.add(_write(connection, table, rows, numbers[middle:]))
        return written
    connection.execute("RELEASE SAVEPOINT dedup_rows")
    return written


def _write_all(connection: DatabaseConnection, table: Table, rows: Sequence[Row]) -> WriteOutcome:
    connection.stage(table, rows)
    same = " AND ".join(f't."{name}" = s."{name}"' for name in table.key)
    ((known,),) = connection.query(f"SELECT count(*) FROM {STAGED} s JOIN {table.name} t ON {same}")  # noqa: S608
    changed = connection.execute(_upsert_statement(table))
    inserted = len(rows) - known
    return WriteOutcome(inserted, changed - inserted, known - (changed - inserted))
