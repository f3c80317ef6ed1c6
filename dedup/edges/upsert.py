"""Rows into the target table on their tracking ID, those the database refuses found one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dedup.edges.database import (
    OFFSETS,
    OFFSETS_STATEMENT,
    STAGED,
    Connection,
    Owned,
    Row,
    RowsRefused,
    Table,
    Written,
    make,
    make_offsets,
    make_staging,
)
from dedup.errors import StateIncompatible
from dedup.topology.model import SinkSpec

ID: Final = "tracking_id"
TIME: Final = "event_time_ms"


def table_of(spec: SinkSpec, types: dict[str, str]) -> Table:
    """Return the table that a sink's rows go into."""
    own = [(column.name, types[column.type]) for column in spec.columns]
    columns = ((ID, types["bytes"]), (TIME, types["integer"]))
    payload = own or [("key", types["bytes"]), ("value", types["bytes"])]
    return Table(spec.table, (*columns, *payload), (ID, TIME) if spec.append else (ID,), spec.append)


def statement_of(table: Table) -> str:
    """Return what makes the table."""
    columns = [f'"{name}" {kind}{" NOT NULL" if name in {ID, TIME} else ""}' for name, kind in table.columns]
    key = ", ".join(f'"{name}"' for name in table.key)
    return f"CREATE TABLE IF NOT EXISTS {table.name} ({', '.join(columns)}, PRIMARY KEY ({key}))"


def make_table(connection: Connection, table: Table) -> bool:
    """The table is there, and takes an upsert; tell whether it was made now.

    Raises StateIncompatible for one with other columns or another key.
    """
    made = make(connection, table.name, statement_of(table))
    make_staging(connection, table)
    # With no row it changes nothing, but a missing column or key is told now, not with the first record.
    connection.execute(_statement(table))
    return made


def refuse_lost_table(connection: Connection, table: Table, owned: Owned) -> None:
    """Raise StateIncompatible where rows were written, but the table is not there: dropped, or renamed."""
    if connection.has(table.name):
        return
    mark = connection.mark
    read = connection.query(
        f"SELECT part, position FROM {OFFSETS} "  # noqa: S608  # our own names
        f"WHERE reader = {mark} AND topic = {mark} AND position >= 0 ORDER BY part",
        (owned.reader, owned.topic),
    )
    if read:
        partition, position = read[0]
        raise StateIncompatible(
            f"there is no table {table.name}, but {OFFSETS} says that {owned.reader!r} has read "
            f"{owned.topic}/{partition} up to offset {position}: the table was dropped, or `sink.table` has another "
            f"name now. Nothing was touched. Bring the table back; or, to fill it anew from the topic's start, delete "
            f"the rows of reader {owned.reader!r} from {OFFSETS}."
        )


def plan_tables(connection: Connection, spec: SinkSpec) -> dict[str, str]:
    """Return the statements for the tables of a sink that are missing, by their names; nothing is made."""
    table = table_of(spec, dict(connection.types))
    statements = {OFFSETS: OFFSETS_STATEMENT, table.name: statement_of(table)}
    return {name: statement for name, statement in statements.items() if not connection.has(name)}


def make_tables(connection: Connection, spec: SinkSpec) -> None:
    """The tables of a sink are there, and take its rows. Raises StateIncompatible for one that does not."""
    make_offsets(connection)
    make_table(connection, table_of(spec, dict(connection.types)))


def _statement(table: Table) -> str:
    key = ", ".join(f'"{name}"' for name in table.key)
    insert = f"INSERT INTO {table.name} ({table.listed}) SELECT {table.listed} FROM {STAGED} WHERE true"  # noqa: S608
    if table.append:
        return f"{insert} ON CONFLICT ({key}) DO NOTHING"
    changed = ", ".join(f'"{name}" = excluded."{name}"' for name, _ in table.columns if name not in table.key)
    # Only a later event changes a row: so a topic that is read again, or twice, changes nothing.
    newer = f'excluded."{TIME}" > {table.name.rpartition(".")[2]}."{TIME}"'
    return f"{insert} ON CONFLICT ({key}) DO UPDATE SET {changed} WHERE {newer}"


def write_rows(connection: Connection, table: Table, rows: Sequence[Row]) -> Written:
    """The open transaction also holds the rows, but for those that the database refuses; these are named."""
    written = Written()
    left = list(range(len(rows)))
    while left:
        chosen = _one_a_key(table, rows, left)
        found = _write(connection, table, rows, chosen)
        written.add(found)
        written.unchanged += len(left) - len(chosen)
        # Where the newest of a key is refused, the one before it counts.
        keys = {rows[number][: len(table.key)] for number in found.refused}
        left = [number for number in left if rows[number][: len(table.key)] in keys and number not in found.refused]
        written.unchanged -= len(left)
    return written


def _one_a_key(table: Table, rows: Sequence[Row], numbers: Sequence[int]) -> list[int]:
    """Return the rows that count: of one key the newest, of equally new ones the first."""
    chosen: dict[Row, int] = {}
    width = len(table.key)
    for number in numbers:
        row = rows[number]
        key = row[:width]
        before = chosen.get(key)
        if before is None or row[1] > rows[before][1]:
            chosen[key] = number
    return sorted(chosen.values())


def _write(connection: Connection, table: Table, rows: Sequence[Row], numbers: list[int]) -> Written:
    connection.execute("SAVEPOINT dedup_rows")
    try:
        written = _write_all(connection, table, [rows[number] for number in numbers])
    except RowsRefused as refused:
        connection.execute("ROLLBACK TO SAVEPOINT dedup_rows")
        connection.execute("RELEASE SAVEPOINT dedup_rows")
        if len(numbers) == 1:
            return Written(refused={numbers[0]: refused})
        middle = len(numbers) // 2
        written = _write(connection, table, rows, numbers[:middle])
        written.add(_write(connection, table, rows, numbers[middle:]))
        return written
    connection.execute("RELEASE SAVEPOINT dedup_rows")
    return written


def _write_all(connection: Connection, table: Table, rows: Sequence[Row]) -> Written:
    connection.stage(table, rows)
    same = " AND ".join(f't."{name}" = s."{name}"' for name in table.key)
    ((known,),) = connection.query(f"SELECT count(*) FROM {STAGED} s JOIN {table.name} t ON {same}")  # noqa: S608
    changed = connection.execute(_statement(table))
    inserted = len(rows) - known
    return Written(inserted, changed - inserted, known - (changed - inserted))
