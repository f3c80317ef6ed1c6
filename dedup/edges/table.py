"""Rows of a growing table, or of a query, as a source, read in the order of their numbers, none left out.

A row with a lower number may be committed after one with a higher number was read: its transaction took the number
first. So a bound is set before rows are read. PostgreSQL: the greatest number there is; then every transaction that
holds a lock on the table by which rows are written is waited for, as CREATE INDEX CONCURRENTLY does. A transaction
takes that lock before it takes a number, so whoever comes later gets a greater one, and all below the bound is decided.
(The snapshot's xmin would not do: a transaction that has its number may not have its transaction id yet, and then no
snapshot knows of it; see docs/decisions/0012-edges.md.) SQLite has one writer at a time: there all is decided at once.
Where numbers are not taken by the INSERT itself, `settle` waits for as long as the author says: not exact, and said so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import msgspec
import orjson

from dedup.edges.database import Connection
from dedup.edges.opening import POSTGRES, connect
from dedup.edges.patience import Patient
from dedup.edges.source import Dead, Found
from dedup.edges.table_checks import readable_columns, relations_of
from dedup.errors import StateIncompatible
from dedup.topology.ingest import TableSource, settle_sentence

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
        self._from: Final = spec.table or f"({spec.query.replace('%', '%%') if self._postgres else spec.query})"
        self._tells_writers = False
        """PostgreSQL's primary."""
        if spec.settle_ms:
            log.warning("%s: %s", name, settle_sentence(spec))
        try:
            self._database.first(self._check)
        except BaseException:
            self._database.close()
            raise

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
            f"SELECT {listed}, {values} FROM {self._from} t "  # noqa: S608  # checked names, or the author's query
            f'WHERE {where} AND t."{self._spec.column}" <= {connection.mark} ORDER BY {listed} LIMIT {MOST_ROWS + 1}',
            (*parameters, self._bound),
        )
        if len(rows) <= MOST_ROWS:
            self._bound = None
        for one, other in pairwise(rows if self._spec.query else ()):
            if one[: len(self._order)] == other[: len(self._order)]:
                remedy = "" if self._spec.unique else "; name a second column with `unique`"
                raise self._unfit(f"two rows have {' and '.join(self._order)} {self._place(one)}{remedy}")
        return self._found(rows[:MOST_ROWS]) if rows else None

    def _after(self, connection: Connection) -> tuple[str, Numbers]:
        if self._at is None:
            # There is always a parameter: so a "%" in a query is always to be doubled for psycopg.
            return f"{connection.mark} = 1", (1,)
        listed = ", ".join(f't."{name}"' for name in self._order)
        marks = ", ".join(connection.mark for _ in self._order)
        return f"({listed}) > ({marks})", self._at

    def _set_bound(self, connection: Connection) -> bool:
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
            raise self._unfit(f"{' or '.join(self._order)} of {nulls} rows is null; leave them out by WHERE")
        if most is None:
            return False
        if not isinstance(most, int):
            raise StateIncompatible(
                f"{self._spec.named}.{self._spec.column} holds something that is no whole number. Nothing was sent "
                f"after it; correct that row."
            )
        if not self._settled() or not self._decided(connection):
            return False
        self._bound = most
        return True

    def _settled(self) -> bool:
        """Wait as long as `settle` says; False when we are to stop."""
        until_s = time.monotonic() + self._spec.settle_ms / 1000
        while time.monotonic() < until_s and not self._stopped():
            time.sleep(LOOK_AGAIN_S)
        return not self._stopped()

    def _decided(self, connection: Connection) -> bool:
        """Wait until whoever may have taken a lower number has ended; False when we are to stop."""
        if not self._tells_writers:
            return True
        relations = relations_of(connection, self._spec)
        writing = _writers(connection, relations)
        while writing and not self._stopped():
            time.sleep(LOOK_AGAIN_S)
            writing &= _writers(connection, relations)
        return not writing

    def _unfit(self, why: str) -> StateIncompatible:
        return StateIncompatible(f"{self._name}: {self._spec.named}: {why}. Nothing was sent after it.")

    def _place(self, row: Sequence[Any]) -> str:
        return "/".join(map(str, row[: len(self._order)]))

    def _found(self, rows: Sequence[tuple[Any, ...]]) -> Found:
        width = len(self._order)
        values: list[bytes] = []
        places: list[str] = []
        dead: list[Dead] = []
        prefix = f"{self._name}/{self._spec.named}/"
        for row in rows:
            if not all(type(number) is int for number in row[:width]):
                raise StateIncompatible(
                    f"{self._spec.named}: {' and '.join(self._order)} of a row after {self._at} hold something that is "
                    f"no whole number. Nothing was sent after it; correct that row."
                )
            place = self._place(row)
            try:
                value = row[width].encode() if self._postgres else _as_json(self._names, row[width:])
            except (TypeError, ValueError) as error:
                text = f"the row can not be written as JSON: {error}"
                dead.append(Dead(prefix + place, "not_json", text, None, row=len(values)))
                continue
            values.append(value)
            places.append(place)
        self._at = tuple(rows[-1][:width])

        def after(row: int) -> dict[str, bytes | None]:
            return {PART: msgspec.json.encode([int(number) for number in places[row].split("/")])}

        return Found(PART, prefix, values, places, {PART: msgspec.json.encode(self._at)}, after, dead)

    def _check(self, connection: Connection) -> None:
        self._names = readable_columns(connection, self._name, self._spec, postgres=self._postgres)
        if self._postgres:
            ((standby,),) = connection.query("SELECT pg_is_in_recovery()")
            self._tells_writers = not standby


def _writers(connection: Connection, relations: Sequence[int]) -> set[str]:
    """Return the transactions that hold a lock by which rows of the relations are written."""
    rows = connection.query(
        "SELECT virtualtransaction FROM pg_locks WHERE locktype = 'relation' AND granted AND "  # noqa: S608
        "database = (SELECT oid FROM pg_database WHERE datname = current_database()) AND "
        f"mode IN ({WRITING}) AND relation::bigint = ANY(%s::bigint[])",
        (list(relations),),
    )
    return {name for (name,) in rows}


def _as_json(names: Sequence[str], row: Sequence[Any]) -> bytes:
    found = dict(zip(names, row, strict=True))
    for name, value in found.items():
        match value:
            case bytes():
                found[name] = value.hex()
            case float() if value - value != 0:
                raise ValueError(f"column {name} holds an infinite number")
    return orjson.dumps(found)
