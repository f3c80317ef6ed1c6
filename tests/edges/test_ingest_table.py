"""A table as a source: ties, gaps, and rows that are committed after rows with greater numbers."""

from __future__ import annotations

import contextlib
import sqlite3
import threading

import psycopg
import pytest

from dedup.errors import SettingsError, StateIncompatible, TopologyError
from tests.edges.stage import until

pytestmark = pytest.mark.broker


SOURCE = "${env:SOURCE_URL}"


def table(url, more=""):
    return f'table: {{url: "{url}", table: rows, column: n{more}}}'


@pytest.fixture
def lite(stage):
    """Return the address of a SQLite file with an empty table, and a connection to it."""
    path = stage.directory / "source.db"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("CREATE TABLE rows (n INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT, data BLOB, price REAL)")
        yield f"sqlite:///{path}", connection


@pytest.fixture
def pg(postgres, monkeypatch):
    """Return the address of a PostgreSQL with an empty table, and a connection to it; `SOURCE` refers to it."""
    monkeypatch.setenv("SOURCE_URL", postgres)
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute(
            "CREATE TABLE rows (n BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, id TEXT, at TIMESTAMPTZ, price NUMERIC)"
        )
        yield postgres, connection


def numbers(stage):
    return sorted(value["n"] for value in stage.values())


async def test_rows_of_sqlite_with_gaps_are_sent_once(stage, lite):
    url, connection = lite
    connection.executemany(
        "INSERT INTO rows (id, data, price) VALUES (?, ?, 1.5)", [(f"e{n}", b"\x00\xff") for n in range(50)]
    )
    connection.execute("DELETE FROM rows WHERE n % 3 = 0")
    done = await stage.ingest(table(url))
    assert done.records == connection.execute("SELECT count(*) FROM rows").fetchone()[0]
    # AUTOINCREMENT: the number of the last row is not given again, so its successor is read.
    connection.execute("DELETE FROM rows WHERE n = (SELECT max(n) FROM rows)")
    connection.execute("INSERT INTO rows (id) VALUES ('next')")
    assert (await stage.ingest(table(url))).records == 1
    assert len(numbers(stage)) == len(set(numbers(stage)))
    assert {"n": 1, "id": "e0", "data": "00ff", "price": 1.5} in stage.values()


async def test_ties_need_a_second_column(stage, lite):
    url, connection = lite
    connection.execute("DROP TABLE rows")
    connection.execute("CREATE TABLE rows (n INTEGER NOT NULL, m INTEGER NOT NULL, id TEXT)")
    with pytest.raises(
        StateIncompatible, match="n tell no two rows apart for sure: name a second column with `unique`"
    ):
        await stage.ingest(table(url))
    with pytest.raises(StateIncompatible, match="n and m tell no two rows apart for sure: add a unique index"):
        await stage.ingest(table(url, ", unique: m"))
    connection.execute("CREATE UNIQUE INDEX both ON rows (n, m)")
    rows = [(7, m, f"e{m}") for m in range(12_000)]
    connection.execute("BEGIN")
    connection.executemany("INSERT INTO rows VALUES (?, ?, ?)", rows)
    connection.execute("COMMIT")
    assert (await stage.ingest(table(url, ", unique: m"))).records == 12_000
    connection.execute("INSERT INTO rows VALUES (7, 12000, 'e12000')")
    assert (await stage.ingest(table(url, ", unique: m"))).records == 1
    assert sorted(value["m"] for value in stage.values()) == list(range(12_001))
    connection.execute("CREATE UNIQUE INDEX one ON rows (m)")
    with pytest.raises(StateIncompatible, match="`unique` was added or removed"):
        await stage.ingest(table(url).replace("column: n", "column: m"))


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ("k INTEGER PRIMARY KEY", "it has no column 'n'; it has k"),
        ("n TEXT NOT NULL UNIQUE", "column 'n' is not of a type of whole numbers"),
        ("n INTEGER UNIQUE", "column 'n' may be null, and such rows would never be read"),
    ],
)
async def test_a_table_that_can_not_be_read_without_a_loss_is_refused(stage, lite, columns, said):
    url, connection = lite
    connection.execute("DROP TABLE rows")
    connection.execute(f"CREATE TABLE rows ({columns})")
    with pytest.raises(StateIncompatible, match=said):
        await stage.ingest(table(url))


async def test_no_table_and_no_database(stage, lite):
    with pytest.raises(StateIncompatible, match="there is no such table"):
        await stage.ingest(table(lite[0]).replace("rows", "nothing"))
    with pytest.raises(SettingsError, match="the environment variable NOWHERE is not set"):
        await stage.ingest(table("${env:NOWHERE}"))
    with pytest.raises(TopologyError, match="a password must not be written here"):
        await stage.ingest(table("postgresql://me:secret@host/db"))


async def test_rows_of_postgresql_are_sent_once(stage, pg):
    _, connection = pg
    connection.execute(
        "INSERT INTO rows (id, at, price) SELECT 'e' || i, now(), i / 7.0 FROM generate_series(1, 12000) i"
    )
    assert (await stage.ingest(table(SOURCE))).records == 12_000
    connection.execute("INSERT INTO rows (id, price) VALUES ('nan', 'NaN')")
    assert (await stage.ingest(table(SOURCE))).records == 1
    assert numbers(stage) == list(range(1, 12_002))


@pytest.mark.parametrize("has_id", [True, False], ids=["it has written", "it has only its number"])
async def test_a_row_that_is_committed_late_is_not_passed_by(stage, pg, has_id):
    """A transaction has taken number 1 and is open while number 2 is committed.

    Without a write of its own it has no transaction id yet: the snapshot's xmin would let number 2 be read.
    """
    url, connection = pg
    connection.execute(
        "SELECT nextval(pg_get_serial_sequence('rows', 'n'))"
    )  # logs the sequence: the next call needs no id
    with psycopg.connect(url) as late:
        if has_id:
            late.execute("INSERT INTO rows (id) VALUES ('late')")
        else:
            # What an INSERT does before it writes: the lock, then the number.
            late.execute("LOCK TABLE rows IN ROW EXCLUSIVE MODE")
            late.execute("SELECT nextval(pg_get_serial_sequence('rows', 'n'))")
            assert late.execute("SELECT pg_current_xact_id_if_assigned()").fetchone() == (None,)
        connection.execute("INSERT INTO rows (id) VALUES ('early')")
        file = stage.ingest_file(table(SOURCE))
        process = stage.start("ingest", str(file))
        until(lambda: waits(stage, connection), f"it waits for the writer; log:\n{process.log}")
        assert stage.read() == []
        if not has_id:
            late.execute("INSERT INTO rows (n, id) OVERRIDING SYSTEM VALUE VALUES (2, 'late')")
        late.commit()
    until(lambda: len(stage.read()) == 2, f"both rows; log:\n{process.log}")
    assert process.stop() == 0
    assert [value["id"] for value in sorted(stage.values(), key=lambda value: value["n"])] == ["late", "early"]


def waits(stage, connection):
    """Tell whether ingest is looking at locks, as it does for a writer only."""
    sql = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'dedup' AND query LIKE '%pg_locks%'"
    return connection.execute(sql).fetchone()[0] == 1


async def test_rows_of_many_writers_at_once_are_all_sent(stage, pg):
    url, connection = pg

    def write(number: int) -> None:
        with psycopg.connect(url) as writer:
            for each in range(100):
                writer.execute("INSERT INTO rows (id) VALUES (%s)", (f"{number}-{each}",))
                (writer.rollback if each % 10 == 3 else writer.commit)()

    process = stage.start("ingest", str(stage.ingest_file(table(SOURCE))))
    threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    written = {row[0] for row in connection.execute("SELECT n FROM rows").fetchall()}
    assert len(written) == 540
    until(lambda: len(stage.read()) >= 540, f"all rows; log:\n{process.log}")
    assert process.stop() == 0
    assert numbers(stage) == sorted(written)
