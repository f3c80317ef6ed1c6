"""Whether rows can be read by their numbers without leaving one out: told before the first is sent."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from dedup.edges.database import Connection
from dedup.errors import StateIncompatible
from dedup.topology.ingest import TableSource

FIRST_OWN_OID: Final = 16_384
"""Below are PostgreSQL's own relations."""
log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Shape:
    columns: list[str]
    whole: set[str]
    never_null: set[str]
    keys: list[list[str]]


def refusal(name: str, spec: TableSource, why: str) -> StateIncompatible:
    """Return the error that says why a table or query can not be read."""
    what = f"table {spec.table}" if spec.table else "the query"
    return StateIncompatible(f"{name}: {what}: {why}. Nothing was sent.")


def readable_columns(connection: Connection, name: str, spec: TableSource, *, postgres: bool) -> list[str]:
    """Return the columns of a table or query that can be read by its numbers. Raises StateIncompatible."""
    if postgres and not spec.settle_ms:
        _refuse_what_hides_its_writers(connection, name, spec)
    if spec.query:
        return _columns_of_query(connection, name, spec)
    shape = _postgres_shape(connection, spec) if postgres else _sqlite_shape(connection, name, spec)
    order = [spec.column] if spec.unique is None else [spec.column, spec.unique]
    for each in order:
        if each not in shape.columns:
            raise refusal(name, spec, f"it has no column {each!r}; it has {', '.join(shape.columns)}")
        if each not in shape.whole:
            raise refusal(name, spec, f"column {each!r} is not of a type of whole numbers, such as BIGINT")
        if each not in shape.never_null:
            text = f"column {each!r} may be null, and such rows would never be read; make it NOT NULL"
            raise refusal(name, spec, text)
    if not any(set(key) <= set(order) for key in shape.keys):
        remedy = "add a unique index" if spec.unique else "name a second column with `unique`, or add one"
        raise refusal(name, spec, f"{' and '.join(order)} tell no two rows apart for sure: {remedy}")
    return shape.columns


def relations_of(connection: Connection, spec: TableSource) -> list[int]:
    """Return the relations of PostgreSQL whose writers may still add rows with lower numbers.

    Those of a query are the ones that planning it locks: views are seen through, partitions are there; what a function
    reads is not.
    """
    if spec.table:
        rows = connection.query(
            "SELECT %s::regclass::oid::bigint UNION SELECT relid::oid::bigint FROM pg_partition_tree(%s::regclass)",
            (spec.table, spec.table),
        )
        return [oid for (oid,) in rows]
    connection.begin()
    try:
        connection.query(f"EXPLAIN SELECT * FROM ({spec.query}) t")  # noqa: S608  # the author's query
        rows = connection.query(
            "SELECT DISTINCT relation::bigint FROM pg_locks WHERE locktype = 'relation' AND pid = pg_backend_pid() "
            "AND relation::bigint >= %s",
            (FIRST_OWN_OID,),
        )
    finally:
        connection.rollback()
    return [oid for (oid,) in rows]


def _refuse_what_hides_its_writers(connection: Connection, name: str, spec: TableSource) -> None:
    """Raise StateIncompatible where PostgreSQL can not tell who may still add a lower number."""
    ((standby,),) = connection.query("SELECT pg_is_in_recovery()")
    if standby:
        text = "this server is a standby, which does not know who writes; name the primary, or write `settle`"
        raise refusal(name, spec, text)
    relations = relations_of(connection, spec)
    if not relations:
        raise refusal(name, spec, "it names no table, so nobody can tell who writes its rows; write `settle`")
    foreign = connection.query(
        "SELECT relname FROM pg_class WHERE relkind = 'f' AND oid::bigint = ANY(%s::bigint[])", (relations,)
    )
    if foreign:
        text = f"{foreign[0][0]} is a foreign table, whose writers this server does not know; write `settle`"
        raise refusal(name, spec, text)
    if not spec.table:
        return
    caching = connection.query(
        "SELECT s.seqcache FROM pg_sequence s JOIN pg_attribute a ON a.attrelid = %s::regclass AND a.attname = %s "
        "WHERE s.seqcache > 1 AND s.seqrelid = pg_get_serial_sequence(%s, a.attname)::regclass",
        (spec.table, spec.column, spec.table),
    )
    if caching:
        text = (
            f"the sequence of {spec.column!r} has CACHE {caching[0][0]}: a session uses numbers that it took long "
            f"before, and a row may get a lower number than one that was read; make it CACHE 1, or write `settle`"
        )
        raise refusal(name, spec, text)


def _columns_of_query(connection: Connection, name: str, spec: TableSource) -> list[str]:
    columns = connection.columns(spec.query)
    for each in columns:
        if columns.count(each) > 1:
            raise refusal(name, spec, f"it has two columns {each!r}; name them apart with AS")
    for each in [spec.column] if spec.unique is None else [spec.column, spec.unique]:
        if each not in columns:
            raise refusal(name, spec, f"it has no column {each!r}; it has {', '.join(columns)}")
    return columns


def _postgres_shape(connection: Connection, spec: TableSource) -> _Shape:
    columns = connection.query(
        "SELECT attname, atttypid::regtype::text, attnotnull FROM pg_attribute "
        "WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
        (spec.table,),
    )
    keys = connection.query(
        "SELECT array(SELECT attname::text FROM pg_attribute WHERE attrelid = indrelid AND attnum = ANY(indkey)) "
        "FROM pg_index WHERE indrelid = %s::regclass AND indisunique AND indisvalid "
        "AND indpred IS NULL AND indexprs IS NULL",
        (spec.table,),
    )
    return _Shape(
        [name for name, *_ in columns],
        {name for name, kind, _ in columns if kind in {"smallint", "integer", "bigint"}},
        {name for name, _, never in columns if never},
        [key for (key,) in keys],
    )


def _sqlite_shape(connection: Connection, name: str, spec: TableSource) -> _Shape:
    table = spec.table.rpartition(".")[2]
    columns = connection.query('SELECT name, upper(type), "notnull", pk FROM pragma_table_info(?)', (table,))
    if not columns:
        raise refusal(name, spec, "there is no such table")
    primary = [name for name, _, _, position in columns if position]
    keys = [primary] if primary else []
    for (index,) in connection.query('SELECT name FROM pragma_index_list(?) WHERE "unique" AND NOT partial', (table,)):
        keys.append([name for (name,) in connection.query("SELECT name FROM pragma_index_info(?)", (index,))])
    # An INTEGER PRIMARY KEY is the row's own number: it is never null.
    row_number = [name for name, kind, _, position in columns if position and kind == "INTEGER" and len(primary) == 1]
    if spec.column in row_number:
        _warn_of_numbers_given_again(connection, name, table, spec.column)
    return _Shape(
        [name for name, *_ in columns],
        {name for name, kind, *_ in columns if "INT" in kind},
        {name for name, _, never, _ in columns if never} | set(row_number),
        keys,
    )


def _warn_of_numbers_given_again(connection: Connection, name: str, table: str, column: str) -> None:
    ((sql,),) = connection.query("SELECT sql FROM sqlite_master WHERE type = 'table' AND name = ?", (table,))
    if "AUTOINCREMENT" not in sql.upper():
        log.warning(
            "%s: %s.%s is not AUTOINCREMENT: SQLite gives the number of a deleted last row to another one, which "
            "is then not read. This is exact only if such rows are never deleted.",
            name,
            table,
            column,
        )
