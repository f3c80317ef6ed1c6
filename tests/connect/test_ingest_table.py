"""A table as a source: ties, gaps, and rows that are committed after rows with greater numbers."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import threading
import time
from types import SimpleNamespace

import psycopg
import pytest

from dedup.connect import open_database, table_source
from dedup.connect.file_source import Files
from dedup.connect.table_source import NumberedRows
from dedup.errors import SettingsError, StateIncompatible, TopologyError
from dedup.topology.schema import FilesSource, TableSource
from tests.waiting import until

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


def querying(url, query, more=""):
    return f'table: {{url: "{url}", query: "{query}", column: n{more}}}'


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
        StateIncompatible, match="no unique index on n, so two rows may be equal there: add one, or name a second"
    ):
        await stage.ingest(table(url))
    with pytest.raises(StateIncompatible, match="no unique index on n and m, so two rows may be equal there: add one"):
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
    with pytest.raises(
        StateIncompatible, match=r"end at row 7/12000, columns n and m of table rows, but .* column m of"
    ):
        await stage.ingest(table(url).replace("column: n", "column: m"))


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ("k INTEGER PRIMARY KEY", "it has no column 'n'; it has k"),
        ("n TEXT NOT NULL UNIQUE", "column 'n' is not of an integer type"),
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


QUERY = "SELECT r.n, upper(r.id) AS name, 'a%' AS percent FROM rows r WHERE r.id LIKE '%e%'"


async def test_rows_of_a_query_of_sqlite_are_sent_once(stage, lite):
    url, connection = lite
    connection.execute("BEGIN")
    connection.executemany("INSERT INTO rows (id) VALUES (?)", [(f"{'xe'[n % 2]}{n}",) for n in range(12_000)])
    connection.execute("COMMIT")
    more = "tracking_id: {field: name}"
    assert (await stage.ingest(querying(url, QUERY), more)).records == 6_000
    connection.execute("INSERT INTO rows (id) VALUES ('e-last')")
    assert (await stage.ingest(querying(url, QUERY), more)).records == 1
    assert numbers(stage) == [*range(2, 12_001, 2), 12_001]
    assert {"n": 12_001, "name": "E-LAST", "percent": "a%"} in stage.values()


async def test_rows_of_a_query_of_postgresql_are_sent_once(stage, pg):
    _, connection = pg
    connection.execute(
        "INSERT INTO rows (id) SELECT CASE i % 2 WHEN 1 THEN 'e' END || i FROM generate_series(1, 12000) i"
    )
    more = "tracking_id: {field: name}"
    assert (await stage.ingest(querying(SOURCE, QUERY), more)).records == 6_000
    connection.execute("INSERT INTO rows (id) VALUES ('e-last')")
    assert (await stage.ingest(querying(SOURCE, QUERY), more)).records == 1
    assert numbers(stage) == [*range(1, 12_001, 2), 12_001]


@pytest.mark.parametrize(
    ("query", "more", "said"),
    [
        ("SELECT id FROM rows", "", "the query: it has no column 'n'; it has id"),
        ("SELECT n, id, id FROM rows", "", "it has two columns 'id'; rename one with AS"),
        ("SELECT n / 20 AS n, id FROM rows", "", "two rows have n 0; name a second column with `unique`"),
        ("SELECT n / 20 AS n, n % 5 AS m, id FROM rows", ", unique: m", "two rows have n and m 0/0. No later rows"),
        ("SELECT nullif(n, 7) AS n, id FROM rows", "", "n of 1 rows is null; exclude these rows with WHERE"),
        ("SELECT n, nullif(n, 7) AS m, id FROM rows", ", unique: m", "n or m of 1 rows is null"),
        ("SELECT id AS n, id FROM rows", "", "contains a value that is not an integer"),
        ("SELECT n FROM nowhere", "", "nowhere"),
    ],
)
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_a_query_that_can_not_be_read_without_a_loss_is_refused(stage, request, kind, query, more, said):
    url, connection = request.getfixturevalue("lite" if kind == "sqlite" else "pg")
    for number in range(1, 31):
        connection.execute(f"INSERT INTO rows (id) VALUES ('e{number}')")
    with pytest.raises(StateIncompatible, match=said):
        await stage.ingest(querying(url if kind == "sqlite" else SOURCE, query, more))
    assert stage.values() == []


@pytest.mark.parametrize("view", [False, True], ids=["a table", "a view"])
async def test_a_query_waits_for_those_who_write_its_tables(stage, pg, view):
    url, connection = pg
    connection.execute("CREATE VIEW seen AS SELECT * FROM rows")
    connection.execute("CREATE TABLE others (k INT)")
    with psycopg.connect(url) as late, psycopg.connect(url) as elsewhere:
        elsewhere.execute("INSERT INTO others VALUES (1)")
        late.execute("INSERT INTO rows (id) VALUES ('late')")
        connection.execute("INSERT INTO rows (id) VALUES ('early')")
        file = stage.ingest_file(querying(SOURCE, f"SELECT n, id FROM {'seen' if view else 'rows'}"))
        process = stage.start("ingest", str(file))
        until(lambda: waits(stage, connection), f"it waits for the writer; log:\n{process.log}")
        assert stage.read() == []
        late.commit()
        # Whoever writes another table is not waited for.
        until(lambda: len(stage.read()) == 2, f"both rows; log:\n{process.log}")
    assert process.stop() == 0
    assert sorted(value["id"] for value in stage.values()) == ["early", "late"]


async def test_who_hides_its_writers_needs_settle(stage, pg, caplog):
    _, connection = pg
    connection.execute("INSERT INTO rows (id) VALUES ('e1')")
    connection.execute(
        "CREATE FUNCTION read() RETURNS SETOF rows LANGUAGE plpgsql AS 'BEGIN RETURN QUERY TABLE rows; END'"
    )
    hidden = querying(SOURCE, "SELECT n, id FROM read()")
    with pytest.raises(
        StateIncompatible, match="reads no table, so PostgreSQL cannot say who writes its rows; set `settle`"
    ):
        await stage.ingest(hidden)
    connection.execute("ALTER TABLE rows ALTER n SET CACHE 10")
    with pytest.raises(StateIncompatible, match="the sequence rows_n_seq of 'n' has CACHE 10"):
        await stage.ingest(table(SOURCE))
    assert stage.values() == []
    assert (await stage.ingest(querying(SOURCE, "SELECT n, id FROM read()", ", settle: 10ms"))).records == 1
    assert "settle: 10ms is not exact: a row of query that becomes visible more than 10ms" in caplog.text


async def test_with_settle_a_row_is_read_that_comes_within_it(stage, lite, monkeypatch):
    """The application chooses numbers before it writes: 2 is there, and 1 comes while that settles."""
    url, connection = lite
    connection.execute("INSERT INTO rows (n, id) VALUES (2, 'early')")
    slept_s = []

    def sleep(pause_s):
        if not slept_s:
            with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)) as late:
                late.execute("INSERT INTO rows (n, id) VALUES (1, 'late')")
        slept_s.append(pause_s)

    # A clock that only a pause moves on: it is within the hour, however slow the machine is.
    monkeypatch.setattr(table_source, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: sum(slept_s)))
    monkeypatch.setattr(table_source, "LOOK_AGAIN_S", 60)
    assert (await stage.ingest(table(url, ", settle: 1h"))).records == 2
    assert numbers(stage) == [1, 2]
    assert sum(slept_s) >= 3600


def rows_of(url, spec="table: rows"):
    """Return a source, as ingest has it, that begins at the first row."""
    key, value = spec.split(": ", 1)
    source = NumberedRows("in", TableSource(url=SOURCE, column="n", **{key: value}), url, lambda: False)
    source.restore({})
    return source


@pytest.mark.parametrize("spec", ["table: rows", "query: SELECT * FROM rows"])
def test_a_column_may_be_called_t(pg, spec):
    """Was: that column was sent in place of the row, or refused."""
    url, connection = pg
    connection.execute("CREATE TYPE pair AS (x INT, y INT); ALTER TABLE rows DROP at, DROP price, ADD t pair")
    connection.execute("INSERT INTO rows (id, t) VALUES ('e1', (1, 2))")
    with contextlib.closing(rows_of(url, spec)) as source:
        assert source.poll().values == [b'{"n":1,"id":"e1","t":{"x":1,"y":2}}']


@pytest.mark.parametrize(("key", "fits"), [("(n) INCLUDE (id)", True), ("(n, id)", False), ("(id) INCLUDE (n)", False)])
def test_only_the_key_of_a_unique_index_matters_not_what_it_includes(pg, key, fits):
    """Was: a primary key with INCLUDE was refused as no unique index on n."""
    url, connection = pg
    connection.execute("ALTER TABLE rows DROP CONSTRAINT rows_pkey")
    connection.execute(f"ALTER TABLE rows ADD PRIMARY KEY {key}")
    connection.execute("INSERT INTO rows (id) VALUES ('e1')")
    refused = contextlib.nullcontext() if fits else pytest.raises(StateIncompatible, match="no unique index on n,")
    with refused, contextlib.closing(rows_of(url)) as source:
        assert source.poll().places == ["1"]


def test_the_number_of_a_live_table_may_become_a_bigint(pg):
    """Was: the source stopped, because PostgreSQL had prepared its statements for the earlier type."""
    url, connection = pg
    connection.execute("ALTER TABLE rows ALTER n TYPE INT")
    with contextlib.closing(rows_of(url)) as source:
        for _ in range(12):
            connection.execute("INSERT INTO rows DEFAULT VALUES")
            assert len(source.poll().values) == 1
        connection.execute("ALTER TABLE rows ALTER n TYPE BIGINT")
        connection.execute("INSERT INTO rows (n) OVERRIDING SYSTEM VALUE VALUES (3000000000)")
        assert source.poll().places == ["3000000000"]


RESTARTS = {
    "postgresql": ["TRUNCATE rows RESTART IDENTITY"],
    "sqlite": ["DROP TABLE rows", "CREATE TABLE rows (n INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT)"],
}


@pytest.mark.parametrize("kind", RESTARTS)
@pytest.mark.parametrize("restarted", [False, True])
def test_a_table_whose_numbers_begin_again_stops_ingest(request, tmp_path, kind, restarted):
    """Was: the new rows were never read, and nothing told of it."""
    insert = "INSERT INTO rows (id) VALUES ('e1'), ('e2'), ('e3')"
    with contextlib.ExitStack() as stack:
        if kind == "sqlite":
            url = f"sqlite:///{tmp_path}/source.db"
            connection = stack.enter_context(
                contextlib.closing(sqlite3.connect(tmp_path / "source.db", isolation_level=None))
            )
            connection.execute(RESTARTS[kind][1])
        else:
            url, connection = request.getfixturevalue("pg")
        connection.execute(insert)
        source = stack.enter_context(contextlib.closing(rows_of(url)))
        found = source.poll()
        connection.execute("DELETE FROM rows")
        assert source.poll() is None
        for sql in RESTARTS[kind]:
            connection.execute(sql)
        assert source.poll() is None  # Whether there will be rows can not be known yet.
        connection.execute("INSERT INTO rows (id) VALUES ('e4')")
        if restarted:
            source = stack.enter_context(contextlib.closing(rows_of(url)))
            source.restore({found.part: found.position})
        with pytest.raises(StateIncompatible, match="its last row got the number 1, but rows up to 3 were read"):
            source.poll()
        connection.execute(insert)
        connection.execute(insert)
        assert len(source.poll().values) == 4


def test_the_counter_of_another_column_does_not_matter(tmp_path, pg):
    url, connection = pg
    connection.execute("ALTER TABLE rows ADD other SERIAL")
    connection.execute("INSERT INTO rows (n, id) OVERRIDING SYSTEM VALUE VALUES (70, 'e1')")
    path = tmp_path / "source.db"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as lite:
        lite.execute("CREATE TABLE rows (k INTEGER PRIMARY KEY AUTOINCREMENT, n BIGINT NOT NULL UNIQUE)")
        lite.execute("INSERT INTO rows (n) VALUES (70)")
    for each in (url, f"sqlite:///{path}"):
        with contextlib.closing(rows_of(each)) as source:
            assert len(source.poll().values) == 1
            assert source.poll() is None


def test_columns_of_sqlite_may_be_added_and_computed(tmp_path):
    """Was: a column that was added under ingest was left out until the next start, and a computed one always."""
    path = tmp_path / "source.db"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as lite:
        lite.execute("CREATE TABLE rows (n INTEGER PRIMARY KEY AUTOINCREMENT, twice AS (2 * n))")
        lite.execute("INSERT INTO rows DEFAULT VALUES")
        for spec in ("table: rows", "query: SELECT * FROM rows"):
            with contextlib.closing(rows_of(f"sqlite:///{path}", spec)) as source:
                assert source.poll().values[0] == b'{"n":1,"twice":2}'
                lite.execute("ALTER TABLE rows ADD more TEXT")
                lite.execute("INSERT INTO rows (more) VALUES ('x')")
                assert source.poll().values == [b'{"n":2,"twice":4,"more":"x"}']
            lite.execute("DELETE FROM rows WHERE n = 2")
            lite.execute("ALTER TABLE rows DROP more")
            lite.execute("UPDATE sqlite_sequence SET seq = 1")


def test_a_row_that_a_query_can_not_read_stops_ingest(pg):
    """Was: an uncaught error."""
    url, connection = pg
    connection.execute("INSERT INTO rows (id) VALUES ('1'), ('x')")
    query = "query: SELECT n, id::numeric AS amount FROM rows"
    with (
        contextlib.closing(rows_of(url, query)) as source,
        pytest.raises(StateIncompatible, match=r"in: query: PostgreSQL rejects this value: InvalidTextRep.* No later"),
    ):
        source.poll()


async def test_a_text_of_sqlite_that_is_not_utf8_makes_its_row_a_dead_letter(stage, lite, caplog):
    """Was: ingest stopped at each start, without saying which row it was."""
    url, connection = lite
    for text in ("'ä'", "CAST(x'636166e9' AS TEXT)", "'c'"):
        connection.execute(f"INSERT INTO rows (id) VALUES ({text})")
    done = await stage.ingest(table(url))
    assert (done.records, done.dead_letters) == (2, 1)
    assert sorted(value["id"] for value in stage.values()) == ["c", "ä"]
    (letter,) = stage.letters()
    assert (letter["dedup-source"], letter["dedup-reason"]) == (f"{stage.name}/rows/2", "not_utf8")
    assert f"{stage.name}/rows/2 becomes a dead letter" in caplog.text
    assert "the text in column id is not UTF-8" in caplog.text


def created(path):
    """Return a connection to a new file of SQLite with one row."""
    lite = sqlite3.connect(path, isolation_level=None)
    lite.execute("CREATE TABLE rows (n INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT)")
    lite.execute("INSERT INTO rows (id) VALUES ('e1')")
    return contextlib.closing(lite)


CHANGED = {
    "table": (
        {"table": "others"},
        "end at row 3, column n of table rows, but the ingest file names column n of table oth",
    ),
    "column": (
        {"table": "rows", "column": "k"},
        "end at row 3, column n of table rows, but .* names column k of table r",
    ),
    "unique": (
        {"table": "rows", "unique": "k"},
        "end at row 3, column n of table rows, but .* columns n and k of table",
    ),
    "query": (
        {"query": "SELECT * FROM rows"},
        "end at row 3, column n of table rows, but .* names column n of a query",
    ),
}


@pytest.mark.parametrize(("changes", "said"), CHANGED.values(), ids=CHANGED)
def test_another_table_or_column_under_one_name_stops_ingest(tmp_path, changes, said):
    """Was: its rows with numbers up to the last one of the earlier table were skipped without a word."""
    with created(tmp_path / "source.db") as lite:
        lite.execute("ALTER TABLE rows ADD k INTEGER NOT NULL DEFAULT 0")
        lite.execute("CREATE UNIQUE INDEX by_k ON rows (k)")
        lite.execute("CREATE TABLE others (n INTEGER PRIMARY KEY AUTOINCREMENT)")
        lite.execute("INSERT INTO rows (n, id, k) VALUES (3, 'e3', 1)")
    url = f"sqlite:///{tmp_path}/source.db"
    with contextlib.closing(rows_of(url)) as source:
        found = source.poll()
    spec = TableSource(**{"url": url, "column": "n"} | changes)
    with contextlib.closing(NumberedRows("in", spec, url, lambda: False)) as source:
        for position in (found.position, found.after(1)):
            with pytest.raises(StateIncompatible, match=f"in: the source offsets {said}.* Nothing was sent.*> N`"):
                source.restore({found.part: position})
        if "unique" in changes:
            with pytest.raises(StateIncompatible, match="have 1 numbers per row: `unique` was added or removed"):
                source.restore({found.part: b"[3]"})


def test_a_query_may_be_edited_and_the_positions_of_earlier_versions_are_read(tmp_path):
    with created(tmp_path / "source.db") as lite:
        lite.execute("INSERT INTO rows (id) VALUES ('e2'), ('e3')")
    url = f"sqlite:///{tmp_path}/source.db"
    with contextlib.closing(rows_of(url, "query: SELECT * FROM rows WHERE n < 3")) as source:
        found = source.poll()
    with contextlib.closing(rows_of(url, "query: SELECT n FROM rows")) as source:
        for position in (found.position, b"[2]"):
            source.restore({found.part: position})
            assert source.poll().values == [b'{"n":3}']


@pytest.mark.parametrize("written", [b"42", b"line 42", b'{"path":"a.log","inode":7}'], ids=["number", "text", "file"])
@pytest.mark.parametrize("part", ["table", "7.0"])
def test_positions_that_another_kind_of_source_or_a_writer_kept_stop_ingest(tmp_path, part, written):
    """Was: an uncaught ValidationError; or the table was sent, although the name belonged to another source."""
    files = Files("in", FilesSource(directory=str(tmp_path)), 1_000)
    with created(tmp_path / "source.db"), contextlib.closing(rows_of(f"sqlite:///{tmp_path}/source.db")) as source:
        with pytest.raises(StateIncompatible, match=f"in: the source offsets hold a position of '{part}'.* another na"):
            source.restore({part: written})
        row = source.poll()
    for position in (row.position, b"[1]", b"42", b"line 42"):
        with pytest.raises(
            StateIncompatible, match=f"in: the source offsets hold a position of '{part}', which is not"
        ):
            files.restore({part: position})


def test_a_file_of_sqlite_that_is_replaced_is_read_on(tmp_path):
    """Was: the file that is gone was read for ever, so no row came until the next start."""
    path, copy = tmp_path / "source.db", tmp_path / "copy.db"
    with created(path), contextlib.closing(rows_of(f"sqlite:///{path}")) as source:
        assert len(source.poll().values) == 1
        with created(copy) as lite:
            lite.execute("INSERT INTO rows (id) VALUES ('e2')")
        copy.replace(path)
        assert source.poll().values == [b'{"n":2,"id":"e2"}']


def test_what_a_killed_writer_of_sqlite_left_is_waited_for(tmp_path, monkeypatch):
    """Was: the source stopped, since it may not write, although the writer rolls back when it is started again."""
    path = tmp_path / "source.db"
    with created(tmp_path / "alive.db") as lite:
        lite.execute("PRAGMA cache_size = 2")
        lite.execute("BEGIN")
        lite.executemany("INSERT INTO rows (id) VALUES (?)", [("x" * 500,)] * 3_000)
        for name in ("", "-journal"):  # as at the moment of a kill
            shutil.copy(f"{tmp_path}/alive.db{name}", f"{path}{name}")

    def start_writer(_pause_s):
        with contextlib.closing(sqlite3.connect(path)) as writer:
            writer.execute("SELECT * FROM rows").fetchall()

    monkeypatch.setattr(open_database, "time", SimpleNamespace(sleep=start_writer, monotonic=time.monotonic))
    with contextlib.closing(rows_of(f"sqlite:///{path}")) as source:
        assert len(source.poll().values) == 1


def test_after_a_lost_connection_the_writers_are_waited_for_again(pg, monkeypatch):
    """Was: rows were read up to a bound that another server had given, although rows below it were not committed."""
    url, connection = pg
    monkeypatch.setattr(table_source, "MOST_ROWS", 1)
    connection.execute("INSERT INTO rows (id) VALUES ('e1'), ('e2')")
    with contextlib.closing(rows_of(url)) as source:
        assert source.poll().places == ["1"]
        assert source._bound == 2
        connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'dedup'")
        asked = []
        monkeypatch.setattr(table_source, "_writers", lambda *_: asked.append(1) or set())
        assert source.poll().places == ["2"]
        assert asked


async def test_a_database_that_is_away_is_waited_for(stage, pg):
    url, connection = pg
    connection.execute("INSERT INTO rows (id) VALUES ('e1')")
    process = stage.start("ingest", str(stage.ingest_file(table(SOURCE))))
    until(lambda: len(stage.read()) == 1, f"the first row; log:\n{process.log}")
    name = url.rpartition("/")[2]
    with psycopg.connect(url.rpartition("/")[0] + "/postgres", autocommit=True) as other:
        other.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false".encode())
        gone = (
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s AND application_name = 'dedup'"
        )
        other.execute(gone, (name,))
        connection.execute("INSERT INTO rows (id) VALUES ('e2')")
        until(lambda: "the database does not answer, waiting; nothing is lost" in process.log, process.log)
        assert process.running
        other.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true".encode())
    until(lambda: len(stage.read()) == 2, f"it goes on; log:\n{process.log}")
    assert process.stop() == 0
    assert numbers(stage) == [1, 2]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            "CREATE SEQUENCE loose CACHE 20; ALTER TABLE rows ALTER n DROP IDENTITY, ALTER n SET DEFAULT nextval('loose')",
            "the sequence loose of 'n' has CACHE 20",
        ),
        ("ALTER TABLE rows ALTER n SET CYCLE", "the sequence rows_n_seq of 'n' begins again after its last number"),
        ("ALTER TABLE rows ALTER n SET INCREMENT -1 SET MINVALUE -100 SET START -1 RESTART", "'n' has INCREMENT -1"),
        (
            "CREATE TABLE child () INHERITS (rows)",
            "child inherits from it, and no unique index covers the rows of both",
        ),
    ],
)
@pytest.mark.parametrize("more", ["", ", settle: 10ms"])
async def test_a_table_whose_numbers_need_not_grow_is_refused(stage, pg, changes, said, more):
    """Was: rows with lower numbers than those that were read, and rows of children, were never read."""
    _, connection = pg
    connection.execute("INSERT INTO rows (id) VALUES ('e1')")
    connection.execute(changes)
    if more and "CACHE" in said:
        assert (await stage.ingest(table(SOURCE, more))).records == 1
        return
    with pytest.raises(StateIncompatible, match=said):
        await stage.ingest(table(SOURCE, more))


async def test_a_query_that_renames_the_column_of_a_caching_sequence_is_refused(stage, pg):
    _, connection = pg
    connection.execute("CREATE TABLE fast (k BIGINT GENERATED ALWAYS AS IDENTITY (CACHE 50) PRIMARY KEY, id TEXT)")
    connection.execute("CREATE VIEW seen AS SELECT k AS n, id FROM fast")
    for query in (
        "SELECT k AS n, id FROM fast",
        "SELECT n, id FROM seen",
        "SELECT f.k AS n, r.id FROM fast f JOIN rows r USING (id)",
        "SELECT k + 0 AS n, id FROM fast",
    ):
        with pytest.raises(StateIncompatible, match="the sequence fast_k_seq of 'k' has CACHE 50"):
            await stage.ingest(querying(SOURCE, query))
    # The numbers of another table do not matter, whatever their column is called.
    connection.execute("ALTER TABLE fast RENAME k TO n")
    connection.execute("INSERT INTO rows (id) VALUES ('e1')")
    query = "SELECT r.n, r.id FROM rows r LEFT JOIN fast USING (id)"
    assert (await stage.ingest(querying(SOURCE, query))).records == 1


async def test_a_child_of_a_table_of_a_query_is_waited_for(stage, pg):
    url, connection = pg
    connection.execute("CREATE TABLE child () INHERITS (rows)")
    with psycopg.connect(url) as late:
        late.execute("INSERT INTO child (n, id) VALUES (1, 'late')")
        connection.execute("INSERT INTO rows (n, id) OVERRIDING SYSTEM VALUE VALUES (2, 'early')")
        process = stage.start("ingest", str(stage.ingest_file(querying(SOURCE, "SELECT n, id FROM rows"))))
        until(lambda: waits(stage, connection), f"it waits for the writer; log:\n{process.log}")
        late.commit()
    until(lambda: len(stage.read()) == 2, f"both rows; log:\n{process.log}")
    assert process.stop() == 0


async def test_after_a_lost_connection_the_table_is_checked_again(stage, pg):
    """It may be another server: a standby, or one whose table was changed."""
    _, connection = pg
    connection.execute("INSERT INTO rows (id) VALUES ('e1')")
    process = stage.start("ingest", str(stage.ingest_file(table(SOURCE))))
    until(lambda: len(stage.read()) == 1, f"the first row; log:\n{process.log}")
    connection.execute("ALTER TABLE rows DROP CONSTRAINT rows_pkey")
    connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'dedup'")
    until(lambda: not process.running, f"its end; log:\n{process.log}")
    assert "no unique index on n, so two rows may be equal there" in process.log
    assert "No later rows were sent" in process.log


async def test_the_padding_of_a_char_column_is_part_of_its_value(stage, pg):
    _, connection = pg
    connection.execute("ALTER TABLE rows ALTER COLUMN id TYPE CHAR(4)")
    connection.execute("INSERT INTO rows (id) VALUES ('ab')")
    await stage.ingest(table(SOURCE))
    assert [value["id"] for value in stage.values()] == ["ab  "]
