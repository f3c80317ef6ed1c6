"""Rows of a growing table as a source, read in the order of their numbers, none left out.

A row with a lower number may be committed after one with a higher number was read: its transaction took the number
first. So a bound is set before rows are read. PostgreSQL: the greatest number there is; then every transaction that
holds a lock on the table by which rows are written is waited for, as CREATE INDEX CONCURRENTLY does. A transaction
takes that lock before it takes a number, so whoever comes later gets a greater one, and all below the bound is decided.
(The snapshot's xmin would not do: a transaction that has its number may not have its transaction id yet, and then no
snapshot knows of it; see docs/decisions/0012-edges.md.) SQLite has one writer at a time: there all is decided at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
import orjson

from dedup.edges.database import Connection
from dedup.edges.opening import POSTGRES, connect
from dedup.edges.patience import Patient
from dedup.edges.source import Dead, Found
from dedup.errors import StateIncompatible
from dedup.topology.ingest import TableSource

MOST_ROWS: Final = 5_000
LOOK_AGAIN_S: Final = 0.02
PART: Final = "table"
WRITING: Final = "'RowExclusiveLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock'"
log: Final = logging.getLogger(__name__)

Numbers = tuple[int, ...]


class TableRows:
    """See `Source`."""

    def __init__(self, name: str, spec: TableSource, url: str, stopped: Callable[[], bool]) -> None:
        self._name: Final = name
        self._spec: Final = spec
        self._stopped: Final = stopped
        self._postgres: Final = url.startswith(POSTGRES)
        self._database: Final = Patient(lambda: connect(url, read_only=True), stopped)
        self._at: Numbers | None = None
        self._bound: int | None = None
        self._names: list[str] = []
        self._order: Final = [spec.column] if spec.unique is None else [spec.column, spec.unique]
        self._database.first(self._check)

    def restore(self, positions: Mapping[str, bytes]) -> None:
        """See `Source`."""
        kept = positions.get(PART)
        self._at = None if kept is None else tuple(msgspec.json.decode(kept, type=list[int]))
        if self._at is not None and len(self._at) != len(self._order):
            raise StateIncompatible(
                f"{self._name}: the source offsets have {len(self._at)} numbers a row, and `source.table` has "
                f"{len(self._order)} columns: `unique` was added or removed. Nothing was sent; put it back as it was, "
                f"or give the source another name, which sends the table again."
            )
        self._bound = None

    def poll(self) -> Found | None:
        """See `Source`; waits while the database is away."""
        return self._database.insist(self._next)

    def waiting(self) -> list[str]:
        """See `Source`."""
        return []

    def close(self) -> None:
        """See `Source`."""
        self._database.close()

    def _next(self, connection: Connection) -> Found | None:
        if self._bound is None and not self._set_bound(connection):
            return None
        where, parameters = self._after(connection)
        listed = ", ".join(f't."{name}"' for name in self._order)
        values = "row_to_json(t)::text" if self._postgres else ", ".join(f't."{name}"' for name in self._names)
        rows = connection.query(
            f"SELECT {listed}, {values} FROM {self._spec.table} t "  # noqa: S608  # checked names
            f'WHERE {where} AND t."{self._spec.column}" <= {connection.mark} ORDER BY {listed} LIMIT {MOST_ROWS}',
            (*parameters, self._bound),
        )
        if len(rows) < MOST_ROWS:
            self._bound = None
        return self._found(rows) if rows else None

    def _after(self, connection: Connection) -> tuple[str, Numbers]:
        if self._at is None:
            return "true" if self._postgres else "1", ()
        listed = ", ".join(f't."{name}"' for name in self._order)
        marks = ", ".join(connection.mark for _ in self._order)
        return f"({listed}) > ({marks})", self._at

    def _set_bound(self, connection: Connection) -> bool:
        where, parameters = self._after(connection)
        ((most,),) = connection.query(
            f'SELECT max(t."{self._spec.column}") FROM {self._spec.table} t WHERE {where}',  # noqa: S608  # checked names
            parameters,
        )
        if most is None:
            return False
        if not isinstance(most, int):
            raise StateIncompatible(
                f"{self._spec.table}.{self._spec.column} holds something that is no whole number. Nothing was sent "
                f"after it; correct that row."
            )
        if self._postgres:
            writing = self._writers(connection)
            while writing and not self._stopped():
                time.sleep(LOOK_AGAIN_S)
                writing &= self._writers(connection)
            if writing:
                return False
        self._bound = most
        return True

    def _writers(self, connection: Connection) -> set[str]:
        """Return the transactions that hold a lock by which rows of the table, or of a part of it, are written."""
        rows = connection.query(
            "SELECT virtualtransaction FROM pg_locks WHERE locktype = 'relation' AND granted AND "  # noqa: S608
            "database = (SELECT oid FROM pg_database WHERE datname = current_database()) AND "
            f"mode IN ({WRITING}) AND relation IN "
            "(SELECT %s::regclass::oid UNION SELECT relid::oid FROM pg_partition_tree(%s::regclass))",
            (self._spec.table, self._spec.table),
        )
        return {name for (name,) in rows}

    def _found(self, rows: Sequence[tuple[Any, ...]]) -> Found:
        width = len(self._order)
        values: list[bytes] = []
        places: list[str] = []
        dead: list[Dead] = []
        prefix = f"{self._name}/{self._spec.table}/"
        for row in rows:
            if not all(type(number) is int for number in row[:width]):
                raise StateIncompatible(
                    f"{self._spec.table}: {' and '.join(self._order)} of a row after {self._at} hold something that is "
                    f"no whole number. Nothing was sent after it; correct that row."
                )
            place = "/".join(map(str, row[:width]))
            try:
                value = row[width].encode() if self._postgres else _as_json(self._names, row[width:])
            except (TypeError, ValueError) as error:
                dead.append(Dead(prefix + place, "not_json", f"the row can not be written as JSON: {error}", None))
                continue
            values.append(value)
            places.append(place)
        self._at = tuple(rows[-1][:width])
        return Found(PART, prefix, values, places, {PART: msgspec.json.encode(self._at)}, dead)

    def _check(self, connection: Connection) -> None:
        """The table can be read without leaving a row out. Raises StateIncompatible."""
        found = self._postgres_shape(connection) if self._postgres else self._sqlite_shape(connection)
        self._names, whole, never_null, keys = found
        for name in self._order:
            if name not in self._names:
                raise self._unfit(f"it has no column {name!r}; it has {', '.join(self._names)}")
            if name not in whole:
                raise self._unfit(f"column {name!r} is not of a type of whole numbers, such as BIGINT")
            if name not in never_null:
                raise self._unfit(f"column {name!r} may be null, and such rows would never be read; make it NOT NULL")
        if not any(set(key) <= set(self._order) for key in keys):
            remedy = "add a unique index" if self._spec.unique else "name a second column with `unique`, or add one"
            raise self._unfit(f"{' and '.join(self._order)} tell no two rows apart for sure: {remedy}")

    def _unfit(self, why: str) -> StateIncompatible:
        return StateIncompatible(f"{self._name}: table {self._spec.table}: {why}. Nothing was sent.")

    def _postgres_shape(self, connection: Connection) -> tuple[list[str], set[str], set[str], list[list[str]]]:
        table = (self._spec.table,)
        ((standby,),) = connection.query("SELECT pg_is_in_recovery()")
        if standby:
            raise self._unfit("this server is a standby, which does not know who writes; name the primary")
        columns = connection.query(
            "SELECT attname, atttypid::regtype::text, attnotnull FROM pg_attribute "
            "WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
            table,
        )
        keys = connection.query(
            "SELECT array(SELECT attname::text FROM pg_attribute WHERE attrelid = indrelid AND attnum = ANY(indkey)) "
            "FROM pg_index WHERE indrelid = %s::regclass AND indisunique AND indisvalid "
            "AND indpred IS NULL AND indexprs IS NULL",
            table,
        )
        whole = {name for name, kind, _ in columns if kind in {"smallint", "integer", "bigint"}}
        return (
            [name for name, *_ in columns],
            whole,
            {name for name, _, never in columns if never},
            [k for (k,) in keys],
        )

    def _sqlite_shape(self, connection: Connection) -> tuple[list[str], set[str], set[str], list[list[str]]]:
        table = self._spec.table.rpartition(".")[2]
        columns = connection.query('SELECT name, upper(type), "notnull", pk FROM pragma_table_info(?)', (table,))
        if not columns:
            raise self._unfit("there is no such table")
        primary = [name for name, _, _, position in columns if position]
        whole = {name for name, kind, *_ in columns if "INT" in kind}
        keys = [primary] if primary else []
        for (index,) in connection.query(
            'SELECT name FROM pragma_index_list(?) WHERE "unique" AND NOT partial', (table,)
        ):
            keys.append([name for (name,) in connection.query("SELECT name FROM pragma_index_info(?)", (index,))])
        # An INTEGER PRIMARY KEY is the row's own number: it is never null.
        row_number = [
            name for name, kind, _, position in columns if position and kind == "INTEGER" and len(primary) == 1
        ]
        never_null = {name for name, _, never, _ in columns if never} | set(row_number)
        if self._spec.column in row_number:
            self._warn_of_numbers_given_again(connection, table)
        return [name for name, *_ in columns], whole, never_null, keys

    def _warn_of_numbers_given_again(self, connection: Connection, table: str) -> None:
        ((sql,),) = connection.query("SELECT sql FROM sqlite_master WHERE type = 'table' AND name = ?", (table,))
        if "AUTOINCREMENT" not in sql.upper():
            log.warning(
                "%s: %s.%s is not AUTOINCREMENT: SQLite gives the number of a deleted last row to another one, which "
                "is then not read. This is exact only if such rows are never deleted.",
                self._name,
                table,
                self._spec.column,
            )


def _as_json(names: Sequence[str], row: Sequence[Any]) -> bytes:
    found = dict(zip(names, row, strict=True))
    for name, value in found.items():
        match value:
            case bytes():
                found[name] = value.hex()
            case float() if value - value != 0:
                raise ValueError(f"column {name} holds an infinite number")
    return orjson.dumps(found)
