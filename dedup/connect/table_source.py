"""Implements a source that reads all rows of a growing table or of a query in the order of their row numbers.

A row gets its number before its transaction commits, so a lower number may become visible after a higher number. In
PostgreSQL, the source therefore takes the greatest number as a bound, and waits until all transactions with a write
lock on the table have ended, as CREATE INDEX CONCURRENTLY does (docs/decisions/0012-edges.md). The source then reads
the rows up to the bound. With `settle`, the source first waits for a fixed time. If the source cannot see other
transactions, it waits only for the `settle` time, and may miss rows that are committed later.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import msgspec
import orjson

from dedup.connect.database import DatabaseAway, DatabaseConnection, RowsRefused
from dedup.connect.open_database import POSTGRES, RetryingDatabase, SqliteConnection
from dedup.connect.source import DeadRecord, SourceRecords
from dedup.errors import DatabaseUnavailable, StateIncompatible
from dedup.topology.ingest_file import settle_sentence
from dedup.topology.schema import TableSource

MOST_ROWS: Final = 5_000
LOOK_AGAIN_S: Final = 0.02
PART: Final = "table"
FIRST_USER_OID: Final = 16_384
"""Relations with lower OIDs belong to PostgreSQL itself."""
WRITE_LOCKS: Final = "'RowExclusiveLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock'"
_SEQUENCES: Final = (
    "SELECT a.attname::text, seqrelid::regclass::text, seqcache, seqcycle, seqincrement FROM pg_sequence "
    "JOIN pg_depend d ON d.refclassid = 'pg_class'::regclass AND d.refobjid = seqrelid "
    "AND d.classid = 'pg_attrdef'::regclass JOIN pg_attrdef f ON f.oid = d.objid "
    "JOIN pg_attribute a ON a.attrelid = f.adrelid AND a.attnum = f.adnum "
    "WHERE f.adrelid::bigint = ANY(%s::bigint[]) UNION "
    "SELECT a.attname::text, seqrelid::regclass::text, seqcache, seqcycle, seqincrement FROM pg_sequence "
    "JOIN pg_depend d ON d.classid = 'pg_class'::regclass AND d.objid = seqrelid AND d.deptype IN ('a', 'i') "
    "AND d.refclassid = 'pg_class'::regclass "
    "JOIN pg_attribute a ON a.attrelid = d.refobjid AND a.attnum = d.refobjsubid "
    "WHERE d.refobjid::bigint = ANY(%s::bigint[])"
)
"""The sequences that the column defaults of some tables use, and the sequences that these columns own."""
_Columns = Mapping[str, tuple[bool, bool]]
"""Maps each column to two flags: whether it has an integer type, and whether it is never null."""
log: Final = logging.getLogger(__name__)


class _RowPosition(msgspec.Struct, frozen=True):
    """The numbers of the last row read, and the numbered table and columns, stored as JSON in the positions topic."""

    table: str | None
    """The table as written in the ingest file, or None for a query, which may be edited."""
    columns: list[str]
    at: list[int]

    def __str__(self) -> str:
        numbered = f"{'column' if len(self.columns) == 1 else 'columns'} {' and '.join(self.columns)}"
        return f"{numbered} of {'a query' if self.table is None else f'table {self.table}'}"


class NumberedRows:
    """A `RecordSource` that reads the rows of one table or query in the order of one or two integer columns."""

    def __init__(self, name: str, spec: TableSource, url: str, stopped: Callable[[], bool]) -> None:
        self._name: Final = name
        self._spec: Final = spec
        self._stopped: Final = stopped
        self._postgres: Final = url.startswith(POSTGRES)
        self._checked = False
        """True once `_check` has accepted the table or query."""
        # After a failover, a new connection may reach a standby, or a table that has changed.
        self._database: Final = RetryingDatabase(url, stopped, read_only=True, prepare=self._check)
        self._at: tuple[int, ...] | None = None
        self._bound: int | None = None
        self._names: list[str] = []
        self._order: Final = [spec.column] if spec.unique is None else [spec.column, spec.unique]
        """The one or two columns that number the rows."""
        self._listed: Final = ", ".join(f't."{name}"' for name in self._order)
        query = spec.query or ""
        self._from: Final = spec.table or f"({query.replace('%', '%%') if self._postgres else query})"
        self._knows_writers = False
        """True if the server is a PostgreSQL primary, which knows all writing transactions."""
        if spec.settle_ms:
            log.warning("%s: %s", name, settle_sentence(spec))
        try:
            self._database.first(lambda _: None)
            self._checked = True
        except BaseException:
            self._database.close()
            raise

    def restore(self, positions: Mapping[str, bytes]) -> None:
        """Continue from the committed position. Raises StateIncompatible if the position belongs to another source."""
        committed = positions.get(PART)
        if committed is None and positions:
            raise self._of_another(f"hold a position of {min(positions)!r}, which is not a table")
        self._at = None if committed is None else tuple(self._numbers(committed))
        self._bound = None

    def _numbers(self, committed: bytes) -> list[int]:
        try:
            found = msgspec.json.decode(committed, type=list[int] | _RowPosition)
        except msgspec.DecodeError:
            raise self._of_another(f"hold a position of {PART!r} that is not the number of a row") from None
        if isinstance(found, _RowPosition):
            here = self._position(found.at)
            if here != found:
                raise self._of_another(f"end at row {_place(found.at)}, {found}, but the ingest file names {here}")
            return found.at
        # Earlier versions stored only the numbers, without the table.
        if len(found) != len(self._order):
            raise self._of_another(f"have {len(found)} numbers per row: `unique` was added or removed")
        return found

    def _position(self, numbers: Sequence[int]) -> _RowPosition:
        return _RowPosition(self._spec.table, self._order, list(numbers))

    def _of_another(self, what: str) -> StateIncompatible:
        return StateIncompatible(
            f"{self._name}: the source offsets {what}. Nothing was sent, because rows might be skipped. Put the source "
            f"back as it was; or give it another name, which sends the table from its first row (and a `query` with "
            f"`WHERE {self._spec.column} > N` from the row after N)."
        )

    def poll(self) -> SourceRecords | None:
        """Return the next rows, or None if the source has no new rows. Waits while the database is unavailable."""
        try:
            return self._database.insist(self._next)
        except RowsRefused as why:
            raise self._unfit(f"{why.detail}; correct the row, or the query") from why
        except DatabaseUnavailable:  # The source was stopped.
            return None

    def committed(self, positions: Mapping[str, bytes]) -> None:
        """Do nothing, because no resources are kept for rereading rows."""

    def waiting(self) -> list[str]:
        """Return an empty list, because every visible row can be read."""
        return []

    def close(self) -> None:
        """Close the database connection."""
        self._database.close()

    def _next(self, connection: DatabaseConnection) -> SourceRecords | None:
        if self._bound is None and not self._set_bound(connection):
            return None
        if not self._postgres:  # PostgreSQL names the columns itself. Any of the next rows may have a new one.
            self._names = _sqlite_names(connection, self._spec)
        where, parameters = self._after(connection)
        # Without ".*", the name t would refer to a column t instead of the row.
        values = "row_to_json(t.*)::text" if self._postgres else ", ".join(f't."{name}"' for name in self._names)
        rows = connection.query(
            f"SELECT {self._listed}, {values} FROM {self._from} t WHERE {where} "  # noqa: S608  # checked names, or a query
            f'AND t."{self._spec.column}" <= {connection.mark} ORDER BY {self._listed} LIMIT {MOST_ROWS + 1}',
            (*parameters, self._bound),
        )
        if len(rows) <= MOST_ROWS:
            self._bound = None
        width = len(self._order)
        for one, other in pairwise(rows if self._spec.query else ()):
            if one[:width] == other[:width]:
                remedy = "" if self._spec.unique else "; name a second column with `unique`"
                raise self._unfit(f"two rows have {' and '.join(self._order)} {_place(one[:width])}{remedy}")
        return self._records(rows[:MOST_ROWS]) if rows else None

    def _after(self, connection: DatabaseConnection) -> tuple[str, tuple[int, ...]]:
        if self._at is None:
            # psycopg requires every "%" in a query to be doubled if the query has parameters, so always return a
            # parameter.
            return f"{connection.mark} = 1", (1,)
        marks = ", ".join(connection.mark for _ in self._order)
        return f"({self._listed}) > ({marks})", self._at

    def _set_bound(self, connection: DatabaseConnection) -> bool:
        where, parameters = self._after(connection)
        null = " OR ".join(f't."{name}" IS NULL' for name in self._order)
        ((most, nulls),) = connection.query(
            f'SELECT max(t."{self._spec.column}"), count(CASE WHEN {null} THEN 1 END) '  # noqa: S608  # as above
            f"FROM {self._from} t WHERE {where} OR {null}"
            if self._spec.query
            else f'SELECT max(t."{self._spec.column}"), 0 FROM {self._from} t WHERE {where}',  # noqa: S608  # as above
            parameters,
        )
        if nulls:
            raise self._unfit(f"{' or '.join(self._order)} of {nulls} rows is null; exclude these rows with WHERE")
        if most is None:
            if self._at:
                self._refuse(_restarted(connection, self._spec, self._at[0]))
            return False
        if not isinstance(most, int):
            raise self._unfit(f"{self._spec.column} contains a value that is not an integer; correct that row")
        if not self._decided(connection):
            return False
        self._bound = most
        return True

    def _decided(self, connection: DatabaseConnection) -> bool:
        """Wait until no open transaction can still commit a row below the bound. Return False if the source stops."""
        until_s = time.monotonic() + self._spec.settle_ms / 1000
        while time.monotonic() < until_s and not self._stopped():
            time.sleep(LOOK_AGAIN_S)
        if self._stopped() or not self._knows_writers:
            return not self._stopped()
        relations = _relations_of(connection, self._spec)
        writing = _writers(connection, relations)
        while writing and not self._stopped():
            time.sleep(LOOK_AGAIN_S)
            writing &= _writers(connection, relations)
        return not writing

    def _unfit(self, why: str) -> StateIncompatible:
        return StateIncompatible(f"{self._name}: {self._spec.named}: {why}. No later rows were sent.")

    def _records(self, rows: Sequence[tuple[Any, ...]]) -> SourceRecords:
        width = len(self._order)
        values: list[bytes] = []
        places: list[str] = []
        dead: list[DeadRecord] = []
        prefix = f"{self._name}/{self._spec.named}/"
        for row in rows:
            if not all(type(number) is int for number in row[:width]):
                what = f"{' and '.join(self._order)} of a row after {self._at} is not an integer"
                raise self._unfit(f"{what}; correct that row")
            place = _place(row[:width])
            try:
                value = row[width].encode() if self._postgres else _as_json(self._names, row[width:])
            except (TypeError, ValueError) as error:
                code = "not_utf8" if isinstance(error, _NotUtf8) else "not_json"
                text = f"the row cannot be written as JSON: {error}"
                dead.append(DeadRecord(place, code, text, None, row=len(values)))
                continue
            values.append(value)
            places.append(place)
        self._at = tuple(rows[-1][:width])

        def after(row: int) -> bytes:
            return msgspec.json.encode(self._position([int(number) for number in places[row].split("/")]))

        position = msgspec.json.encode(self._position(self._at))
        return SourceRecords(PART, prefix, values, places, position, after, dead)

    def _check(self, connection: DatabaseConnection) -> None:
        """Raise StateIncompatible if the source might never read some rows of the table or query."""
        self._bound = None  # Another server, after a failover, may still have open transactions below the bound.
        if self._postgres:
            ((standby,),) = connection.query("SELECT pg_is_in_recovery()")
            self._knows_writers = not standby
            if standby and self._checked and not self._spec.settle_ms:
                raise DatabaseAway("the server is a standby now; waiting for a primary")
            relations = _relations_of(connection, self._spec)
            self._refuse(_unordered(connection, relations, self._spec))
            if not self._spec.settle_ms:
                self._refuse(_unknown_writers(connection, relations, standby=standby))
        if self._spec.query:
            self._refuse(_misfits_of_query(connection.columns(self._spec.query), self._order))
            return
        table, reused = self._spec.table or "", None
        if self._postgres:
            columns, keys = _postgres_shape(connection, table)
            self._refuse(_children(connection, table))
        else:
            columns, keys, reused = _sqlite_shape(connection, table.rpartition(".")[2])
        self._refuse(_misfits(columns, keys, self._order))
        if reused == self._spec.column and not self._checked:
            text = (
                "%s: %s.%s is not AUTOINCREMENT: SQLite reuses the number of a deleted last row for a new row, which "
                "is then not read. The source is exact only if the last row is never deleted."
            )
            log.warning(text, self._name, table, reused)

    def _refuse(self, reasons: Iterator[str]) -> None:
        what = f"table {self._spec.table}" if self._spec.table else "the query"
        for why in reasons:
            sent = "Nothing was sent" if self._at is None else "No later rows were sent"
            raise StateIncompatible(f"{self._name}: {what}: {why}. {sent}.")


def _place(numbers: Sequence[int]) -> str:
    return "/".join(map(str, numbers))


def _writers(connection: DatabaseConnection, relations: Sequence[int]) -> set[str]:
    """Return the transactions that hold a write lock on one of the tables."""
    rows = connection.query(
        "SELECT virtualtransaction FROM pg_locks WHERE locktype = 'relation' AND granted AND "  # noqa: S608
        "database = (SELECT oid FROM pg_database WHERE datname = current_database()) AND "
        f"mode IN ({WRITE_LOCKS}) AND relation::bigint = ANY(%s::bigint[])",
        (list(relations),),
    )
    return {name for (name,) in rows}


class _NotUtf8(ValueError):
    """A text in SQLite, which stores any bytes as text, is not UTF-8."""


def _as_json(names: Sequence[str], row: Sequence[Any]) -> bytes:
    found = dict(zip(names, row, strict=True))
    for name, value in found.items():
        match value:
            case bytes():
                found[name] = value.hex()
            case float() if value - value != 0:
                raise ValueError(f"column {name} contains an infinite number")
            case str() if not value.isascii() and value != value.encode(errors="ignore").decode():
                raise _NotUtf8(f"the text in column {name} is not UTF-8")
    return orjson.dumps(found)


# Each of the following functions yields the reasons why rows cannot be read by number.


def _misfits(columns: _Columns, keys: Sequence[Sequence[str]], order: Sequence[str]) -> Iterator[str]:
    if not columns:
        yield "there is no such table"
    for each in order:
        if each not in columns:
            yield f"it has no column {each!r}; it has {', '.join(columns)}"
        whole, never_null = columns[each]
        if not whole:
            yield f"column {each!r} is not of an integer type such as BIGINT"
        if not never_null:
            yield f"column {each!r} may be null, and such rows would never be read; make it NOT NULL"
    if not any(set(key) <= set(order) for key in keys):
        remedy = "add one" if len(order) > 1 else "add one, or name a second column with `unique`"
        yield f"no unique index on {' and '.join(order)}, so two rows may be equal there: {remedy}"


def _misfits_of_query(columns: Sequence[str], order: Sequence[str]) -> Iterator[str]:
    for each in columns:
        if columns.count(each) > 1:
            yield f"it has two columns {each!r}; rename one with AS"
    for each in order:
        if each not in columns:
            yield f"it has no column {each!r}; it has {', '.join(columns)}"


def _unknown_writers(connection: DatabaseConnection, relations: list[int], *, standby: bool) -> Iterator[str]:
    """Yield the reasons why PostgreSQL cannot determine which transactions may still add rows below the bound."""
    if standby:
        yield "this server is a standby, which does not know the open transactions; use the primary, or set `settle`"
    if not relations:
        yield "it reads no table, so PostgreSQL cannot say who writes its rows; set `settle`"
    foreign = connection.query(
        "SELECT relname FROM pg_class WHERE relkind = 'f' AND oid::bigint = ANY(%s::bigint[])", (relations,)
    )
    for (name,) in foreign:
        yield f"{name} is a foreign table, whose writers this server does not know; set `settle`"


def _sequences(
    connection: DatabaseConnection, relations: list[int], spec: TableSource
) -> tuple[bool, list[tuple[Any, ...]]]:
    """Return whether the server knows the origin of the number column, and the sequences that may fill the column."""
    origin = connection.origin(spec.query or f"SELECT * FROM {spec.table}", spec.column)  # noqa: S608  # a checked name
    named = connection.query(
        "SELECT attname::text FROM pg_attribute JOIN pg_class c ON c.oid = attrelid "
        "WHERE attrelid::bigint = %s AND attnum = %s AND relkind IN ('r', 'p')",
        origin,
    )
    # A view's column or an expression may come from any column of any table.
    tables = _with_children(connection, str(origin[0])) if named else relations
    found = connection.query(_SEQUENCES, (tables, tables))
    return bool(named), [each for each in found if not named or each[:1] == named[0]]


def _unordered(connection: DatabaseConnection, relations: list[int], spec: TableSource) -> Iterator[str]:
    """Yield the reasons why the tables' sequences may give a new row a lower number than an existing row."""
    for column, sequence, cache, cycles, step in _sequences(connection, relations, spec)[1]:
        if cache > 1 and not spec.settle_ms:
            yield (
                f"the sequence {sequence} of {column!r} has CACHE {cache}: a session uses numbers that it reserved "
                f"earlier, so a new row may get a lower number than a row that was already read; set CACHE 1, or set "
                f"`settle`"
            )
        if cycles or step < 0:
            why = "begins again after its last number" if cycles else f"has INCREMENT {step}"
            yield f"the sequence {sequence} of {column!r} {why}, so later rows would not be read"


def _restarted(connection: DatabaseConnection, spec: TableSource, read_to: int) -> Iterator[str]:
    """Yield the reason why new rows get numbers that were already read, as after TRUNCATE … RESTART IDENTITY."""
    last: list[tuple[Any, ...]] = []
    if not isinstance(connection, SqliteConnection):
        known, sequences = _sequences(connection, [], spec)
        last = connection.query(
            "SELECT max(pg_sequence_last_value(name::regclass)) FROM unnest(%s::text[]) name "
            "WHERE has_sequence_privilege(name, 'SELECT, USAGE')",
            ([each[1] for each in sequences if known],),
        )
    elif spec.table and connection.has("sqlite_sequence"):
        last = connection.query(
            "SELECT max(seq) FROM sqlite_sequence s JOIN pragma_table_info(s.name) i ON i.pk AND i.name = ? "
            "WHERE s.name = ? COLLATE NOCASE",
            (spec.column, spec.table.rpartition(".")[2]),
        )
    for (number,) in last:
        if number is not None and number < read_to:
            yield (
                f"its last row got the number {number}, but rows up to {read_to} were read: the table was emptied or "
                f"created again, and no new row would be read until its number is greater. Let the numbers continue "
                f"after {read_to}; or give the source another name, which sends the table from its first row"
            )


def _children(connection: DatabaseConnection, table: str) -> Iterator[str]:
    found = connection.query(
        "SELECT inhrelid::regclass::text FROM pg_inherits JOIN pg_class ON pg_class.oid = inhparent "
        "WHERE inhparent = %s::regclass AND relkind = 'r'",
        (table,),
    )
    for (child,) in found:
        yield (
            f"{child} inherits from it, and no unique index covers the rows of both, so two rows may be equal there; "
            f"read each table, with `FROM ONLY` in a `query`"
        )


def _with_children(connection: DatabaseConnection, table: str) -> list[int]:
    """Return the OIDs of a table, given by name or OID, and of its partitions or the tables that inherit from it."""
    rows = connection.query(
        "WITH RECURSIVE tree(oid) AS (SELECT %s::regclass::oid UNION "
        "SELECT inhrelid FROM pg_inherits JOIN tree ON inhparent = tree.oid) SELECT oid::bigint FROM tree",
        (table,),
    )
    return [oid for (oid,) in rows]


def _relations_of(connection: DatabaseConnection, spec: TableSource) -> list[int]:
    """Return the OIDs of the tables that contain the rows, except tables that only a function in the query reads."""
    if spec.table:
        return _with_children(connection, spec.table)
    connection.begin()
    try:
        connection.query(f"EXPLAIN SELECT * FROM ({spec.query}) t")  # noqa: S608  # the author's query
        rows = connection.query(
            "SELECT DISTINCT relation::bigint FROM pg_locks WHERE locktype = 'relation' AND pid = pg_backend_pid() "
            "AND relation::bigint >= %s",
            (FIRST_USER_OID,),
        )
    finally:
        connection.rollback()
    return [oid for (oid,) in rows]


def _postgres_shape(connection: DatabaseConnection, table: str) -> tuple[_Columns, list[list[str]]]:
    """Return the columns of a table, and the columns of each unique index."""
    columns = connection.query(
        "SELECT attname, atttypid::regtype::text IN ('smallint', 'integer', 'bigint'), attnotnull FROM pg_attribute "
        "WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
        (table,),
    )
    keys = connection.query(
        # The columns of INCLUDE follow the key columns in `indkey`, whose first index is 0.
        "SELECT array(SELECT attname::text FROM pg_attribute "
        "WHERE attrelid = indrelid AND attnum = ANY((indkey::int2[])[0:indnkeyatts - 1])) FROM pg_index "
        "WHERE indrelid = %s::regclass AND indisunique AND indisvalid AND indpred IS NULL AND indexprs IS NULL",
        (table,),
    )
    return {name: (whole, never_null) for name, whole, never_null in columns}, [key for (key,) in keys]


def _sqlite_names(connection: DatabaseConnection, spec: TableSource) -> list[str]:
    """Return the names of the columns, including generated columns, of a table or query in SQLite."""
    if spec.query:
        return connection.columns(spec.query)
    return list(_sqlite_shape(connection, (spec.table or "").rpartition(".")[2])[0])


def _sqlite_shape(connection: DatabaseConnection, table: str) -> tuple[_Columns, list[list[str]], str | None]:
    """Return a table's columns, the columns of each unique index, and any column whose numbers SQLite may reuse."""
    read = 'SELECT name, upper(type), "notnull", pk FROM pragma_table_xinfo(?) WHERE hidden <> 1'
    found = connection.query(read, (table,))
    primary = [(name, kind) for name, kind, _, position in found if position]
    # An INTEGER PRIMARY KEY is SQLite's row number, so it is never null.
    row_number = primary[0][0] if len(primary) == 1 and primary[0][1] == "INTEGER" else None
    columns = {name: ("INT" in kind, bool(never) or name == row_number) for name, kind, never, _ in found}
    keys = [[name for name, _ in primary]] if primary else []
    for (index,) in connection.query('SELECT name FROM pragma_index_list(?) WHERE "unique" AND NOT partial', (table,)):
        keys.append([name for (name,) in connection.query("SELECT name FROM pragma_index_info(?)", (index,))])
    kept = connection.query("SELECT 1 FROM sqlite_master WHERE name = ? AND sql LIKE '%AUTOINCREMENT%'", (table,))
    return columns, keys, None if kept else row_number
