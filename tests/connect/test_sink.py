"""A table of a sink: one row per tracking ID, whatever is read again, refused, or away."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sqlite3
import threading
from dataclasses import replace

import psycopg
import pytest
from confluent_kafka import Producer
from typer.testing import CliRunner

from dedup.cli.connectors import apply_tables
from dedup.cli.main import create_app
from dedup.connect.database import DatabaseAway, LockHeld, RowsRefused, Table, make_staging, shown, transaction
from dedup.connect.open_database import RetryingDatabase, connect
from dedup.connect.postgres import PostgresConnection, _denial
from dedup.connect.sink_connector import spec_of
from dedup.connect.upsert import make_tables, plan_tables, table_of, write_rows
from dedup.errors import DatabaseUnavailable, StateIncompatible, TaskMigrated
from dedup.topology.parse import parse
from tests.connect.stage import made, postgres_rows, sqlite_rows
from tests.waiting import until

pytestmark = pytest.mark.broker
COLUMNS = "  columns: {id: id, n: {field: n, type: integer}, price: {field: price, type: number}, more: {field: more, type: json}}"
BASE_MS = 1_700_000_000_000


def event(number, *, n=None, time_ms=None, **more):
    value = {"id": f"e{number}", "n": number if n is None else n, "price": number / 4, "more": [1, {"a": 1}]} | more
    return f"e{number}".encode(), json.dumps(value).encode(), BASE_MS + number if time_ms is None else time_ms


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request, stage):
    """Return an address, and a function that returns a query's rows."""
    if request.param == "sqlite":
        path = stage.directory / "sink.db"
        return f"sqlite:///{path}", lambda sql="SELECT * FROM rows ORDER BY tracking_id": sqlite_rows(path, sql)
    url = request.getfixturevalue("postgres")
    return url, lambda sql="SELECT * FROM rows ORDER BY tracking_id": postgres_rows(url, sql)


def sinking(stage, url, sink=COLUMNS):
    """Return a topology; the password of a test's server may stand in its address."""
    topology = stage.topology("${env:X}", sink)
    object.__setattr__(topology.sink, "url", url)
    return topology


def statement(url, sql):
    """Run a statement in the database."""
    if url.startswith("sqlite"):
        with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)) as connection:
            connection.execute(sql)
        return
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(sql.encode())


async def test_a_topic_read_again_or_twice_changes_nothing(stage, admin, database):
    url, rows = database
    admin.create_topic(stage.topic, 3, {"retention.ms": "-1"})
    events = [event(number) for number in range(500)]
    stage.send([*events, *(event(number, n=-1, time_ms=BASE_MS + 10**9 + number) for number in range(0, 500, 7))])
    topology = sinking(stage, url)
    first = await stage.sink(topology)
    assert first.inserted == 500
    before = rows()
    assert len(before) == 500
    assert sum(row[3] == -1 for row in before) == len(range(0, 500, 7))
    for _ in range(2):
        # From the first offset again, as by a sink that forgot everything, ...
        statement(url, "DELETE FROM dedup_offsets")
        again = await stage.sink(topology)
        assert (again.inserted, again.updated) == (0, 0)
        assert rows() == before
        # ... and every record once more, behind the others.
        stage.send(events)
        again = await stage.sink(topology)
        assert (again.inserted, again.updated, again.unchanged) == (0, 0, 500)
        assert rows() == before


async def test_a_column_that_the_sink_does_not_fill_stops_it(stage, admin, database):
    """Was: each record became a dead letter (`null_refused`)."""
    url, rows = database
    admin.create_topic(stage.topic, 1, {"retention.ms": "-1"})
    topology = sinking(stage, url)
    spec = spec_of(topology, "sink.yaml")
    connection = connect(url)
    try:
        usual = plan_tables(connection, spec)["rows"]
        unfilled = usual.replace(
            ", PRIMARY KEY", ", filled INTEGER NOT NULL DEFAULT 1, region TEXT NOT NULL, PRIMARY KEY"
        )
        statement(url, unfilled)
        stage.send([event(1)])
        says = "the table rows has the column 'region', which may not be null and has no default"
        with pytest.raises(StateIncompatible, match=says):
            await stage.sink(topology)
        # The table may be altered while the sink runs.
        statement(url, "DROP TABLE rows")
        make_tables(connection, spec)
        statement(url, "DROP TABLE rows")
        statement(url, unfilled)
        table = table_of(spec, connection.types)
        with pytest.raises(StateIncompatible, match=says), transaction(connection):
            write_rows(connection, table, [(b"a", 1, "e1", 1, 0.5, "[]")])
    finally:
        connection.close()
    assert rows() == []
    assert stage.letters(f"{stage.name}.sink.dead-letter") == []


async def test_an_id_used_again_makes_another_row_where_that_is_asked_for(stage, admin, database):
    url, rows = database
    admin.create_topic(stage.topic, 1, {"retention.ms": "-1"})
    stage.send([event(1), event(1, n=2, time_ms=BASE_MS + 10**8), event(1), event(2)])
    done = await stage.sink(sinking(stage, url, f"{COLUMNS}\n  on_reuse: append"))
    assert done.inserted == 3
    assert [(row[2], row[3]) for row in rows("SELECT * FROM rows ORDER BY tracking_id, event_time_ms")] == [
        ("e1", 1), ("e1", 2), ("e2", 2),
    ]  # fmt: skip


async def test_without_columns_key_and_value_are_kept_as_bytes(stage, admin, database):
    url, rows = database
    admin.create_topic(stage.topic, 1, {"retention.ms": "-1"})
    key, value, time_ms = event(1)
    stage.send([(key, value, time_ms)])
    await stage.sink(sinking(stage, url, ""))
    assert [tuple(map(bytes, (row[0], row[2], row[3]))) for row in rows()] == [(b"\x01e1", key, value)]


async def test_what_is_no_row_is_a_dead_letter_once_and_its_neighbours_are_rows(stage, admin, database, caplog):
    url, rows = database
    admin.create_topic(stage.topic, 1, {"retention.ms": "-1"})
    bad = [
        event(100, n="text"),
        event(101, n=1 << 70),
        event(102, n=True),
        event(103, price="1.5"),
        (b"k", b"no json", BASE_MS),
        (b"k", b'{"n":1}', BASE_MS),
        (b"k", None, BASE_MS),
    ]
    stage.send([event(1), *bad, event(2)])
    topology = sinking(stage, url)
    done = await stage.sink(topology)
    assert (done.inserted, done.dead_letters) == (2, len(bad))
    letters = stage.letters(f"{stage.name}.sink.dead-letter")
    assert [letter["dedup-reason"] for letter in letters] == [
        "wrong_type", "wrong_type", "wrong_type", "wrong_type", "not_json", "id_missing", "tombstone",
    ]  # fmt: skip
    assert letters[0]["dedup-detail"] == "column n: it is text, not an integer of at most 64 bits"
    assert [letter["dedup-source"].split("/")[2] for letter in letters] == list("1234567")
    # Read again, they are known to be there.
    statement(url, "DELETE FROM dedup_offsets")
    # Was: a sink of which each record was a dead letter said nothing.
    told = [record.message for record in caplog.records if "becomes a dead letter in" in record.message]
    assert len(told) == len({letter["dedup-reason"] for letter in letters})
    assert (await stage.sink(topology)).dead_letters == 0
    assert len(stage.read(f"{stage.name}.sink.dead-letter")) == len(bad)
    assert len(rows()) == 2


async def test_dead_letters_fit_their_topic(stage, admin):
    """Was: a batch of 400 kB for a topic that takes 165 kB, at which the sink stopped, at each start again."""
    admin.create_topic(stage.topic, 1, {"max.message.bytes": "100000", "retention.ms": "-1"})
    bad = [random.Random(number).randbytes(1_000) for number in range(400)]
    small = Producer({"bootstrap.servers": stage.kafka.bootstrap, "batch.size": 50_000})
    stage.send([(None, value, 1_700_000_000_000) for value in bad], producer=small)
    done = await stage.sink(sinking(stage, f"sqlite:///{stage.directory}/a.db"))
    assert (done.inserted, done.dead_letters) == (0, 400)
    assert [message.value() for message in stage.read(f"{stage.name}.sink.dead-letter")] == bad


async def test_what_another_database_refuses_is_a_dead_letter_though_later_ones_were_sent_before(stage, admin):
    admin.create_topic(stage.topic, 1, {"retention.ms": "-1"})
    stage.send([event(1), event(2, n=1), (b"k", b"no json", BASE_MS), event(4)])
    one, other = (f"sqlite:///{stage.directory}/{name}.db" for name in ("one", "other"))
    assert (await stage.sink(sinking(stage, one))).dead_letters == 1
    # Made by somebody who wants no two rows of one n.
    made = "id TEXT, n INTEGER UNIQUE, price REAL, more TEXT"
    statement(other, f"CREATE TABLE rows (tracking_id BLOB PRIMARY KEY, event_time_ms INTEGER, {made})")
    done = await stage.sink(sinking(stage, other))
    assert (done.inserted, done.dead_letters) == (2, 1)
    letters = stage.letters(f"{stage.name}.sink.dead-letter")
    assert [(letter["dedup-source"].split("/")[2], letter["dedup-reason"]) for letter in letters] == [
        ("2", "not_json"), ("1", "unique_violation"),
    ]  # fmt: skip
    # From the start once more: each has its letter.
    statement(other, "DELETE FROM dedup_offsets")
    assert (await stage.sink(sinking(stage, other))).dead_letters == 0
    assert len(stage.read(f"{stage.name}.sink.dead-letter")) == 2


async def test_a_table_that_is_gone_is_not_made_anew_behind_what_was_read(stage, admin, database):
    url, rows = database
    admin.create_topic(stage.topic, 1, {"retention.ms": "-1"})
    stage.send([event(number) for number in range(10)])
    topology = sinking(stage, url)
    await stage.sink(topology)
    statement(url, "DROP TABLE rows")
    with pytest.raises(StateIncompatible, match=r"there is no table rows, but dedup_offsets says .* up to offset 10"):
        await stage.sink(topology)
    statement(url, "DELETE FROM dedup_offsets")
    assert (await stage.sink(topology)).inserted == len(rows()) == 10


async def test_another_table_does_not_go_on_behind_what_was_read(stage, admin, database):
    """Was: a table that somebody had created beforehand went on at the old offsets, without the earlier rows."""
    url, rows = database
    admin.create_topic(stage.topic, 1, {"retention.ms": "-1"})
    stage.send([event(number) for number in range(10)])
    topology = sinking(stage, url)
    await stage.sink(topology)
    statement(url, "CREATE TABLE empty AS SELECT * FROM rows WHERE 1 = 0")
    statement(url, "CREATE UNIQUE INDEX empty_key ON empty (tracking_id)")
    object.__setattr__(topology.sink, "table", "empty")
    stage.send([event(number) for number in range(10, 15)])
    with pytest.raises(StateIncompatible, match=r"up to offset 10 into the table 'rows', not into 'empty'") as refused:
        await stage.sink(topology)
    assert rows("SELECT * FROM empty") == []
    statement(url, "DROP TABLE empty")
    statement(url, "ALTER TABLE rows RENAME TO empty")
    statement(url, str(refused.value).rpartition("run: ")[2])  # as a user who renamed the table does
    assert (await stage.sink(topology)).inserted == 5
    assert len(rows("SELECT * FROM empty")) == 15
    object.__setattr__(topology.sink, "table", "fresh")
    statement(url, "DELETE FROM dedup_offsets")
    assert (await stage.sink(topology)).inserted == len(rows("SELECT * FROM fresh")) == 15


@pytest.mark.parametrize("dry_run", [False, True])
def test_apply_makes_no_other_table_behind_what_was_read(tmp_path, dry_run):
    """Was: it made an empty table, and the sink went on there without the rows of all earlier records."""
    text = (
        "dedup: 1\nname: x\nsource: {topics: [in], partitioned_by: tracking_id}\ntracking_id: {field: id}\n"
        'guard_period: 1h\nsink: {url: "sqlite:///unused", table: rows, topic: out, columns: {id: id}}\n'
    )
    url = f"sqlite:///{tmp_path}/sink.db"
    spec = replace(spec_of(parse(text, name="x"), "x"), url=url)
    assert set(apply_tables("x", spec, dry_run=False, quiet=True)) == {"dedup_offsets", "rows"}
    apply_tables("x", replace(spec, table="more"), dry_run=False, quiet=True)  # nothing was read so far
    statement(url, "INSERT INTO dedup_offsets VALUES ('x', 'out', 0, 'id', 1, 10, 'rows')")
    apply_tables("x", spec, dry_run=dry_run, quiet=True)
    other = replace(spec, table="other")
    with pytest.raises(
        StateIncompatible, match=r"dedup_offsets says .* up to offset 10 into the table 'rows', not into"
    ):
        apply_tables("x", other, dry_run=dry_run, quiet=True)
    assert "other" in apply_tables("y", other, dry_run=dry_run, quiet=True)
    statement(url, "DROP TABLE rows")
    with pytest.raises(StateIncompatible, match=r"there is no table rows, but dedup_offsets says .* up to offset 10"):
        apply_tables("x", spec, dry_run=dry_run, quiet=True)


async def test_a_violation_of_another_key_is_a_dead_letter(stage, admin, database):
    url, rows = database
    admin.create_topic(stage.topic, 1, {"retention.ms": "-1"})
    stage.send([event(1)])
    topology = sinking(stage, url)
    await stage.sink(topology)
    statement(url, "CREATE UNIQUE INDEX one_n ON rows (n)")
    stage.send([event(2, n=5), event(3, n=1), event(4, n=5), event(5, n=6)])
    done = await stage.sink(topology)
    assert (done.inserted, done.dead_letters) == (2, 2)
    letters = stage.letters(f"{stage.name}.sink.dead-letter")
    assert {letter["dedup-reason"] for letter in letters} == {"unique_violation"}
    assert all("e3" not in letter["dedup-detail"] for letter in letters)
    assert {row[2] for row in rows()} == {"e1", "e2", "e5"}


async def test_a_deferred_key_a_trigger_and_the_encoding_reject_rows_one_by_one(stage, admin, postgres):
    """Was: the sink stopped, and stopped again after each restart."""
    server, _, name = postgres.rpartition("/")
    with psycopg.connect(f"{server}/postgres", autocommit=True) as connection:
        connection.execute(
            f"CREATE DATABASE {name}_l1 ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"
        )
    url = f"{postgres}_l1"
    admin.create_topic(stage.topic, 1, {"retention.ms": "-1"})
    topology = sinking(stage, url, "  columns: {id: id, n: {field: n, type: integer}, t: text}")
    stage.send([event(1, text="a")])
    await stage.sink(topology)
    statement(url, "ALTER TABLE rows ADD CONSTRAINT one_n UNIQUE (n) DEFERRABLE INITIALLY DEFERRED")
    statement(
        url,
        "CREATE FUNCTION no() RETURNS trigger AS $$ BEGIN IF NEW.n = 7 THEN RAISE EXCEPTION 'secret %', NEW.id; END IF; "
        "RETURN NEW; END $$ LANGUAGE plpgsql; CREATE TRIGGER no BEFORE INSERT ON rows FOR EACH ROW EXECUTE FUNCTION no()",
    )
    stage.send([event(2, n=1), event(3, n=7), event(4, text="\u20ac"), event(5, text="\ud800")])
    stage.send([event(6, text="\u00e9", other="\ud800")])
    done = await stage.sink(topology)
    assert (done.inserted, done.dead_letters) == (1, 4)
    letters = stage.letters(f"{stage.name}.sink.dead-letter")
    reasons = [letter["dedup-reason"] for letter in letters]
    assert sorted(reasons) == ["constraint", "unique_violation", "wrong_type", "wrong_type"]
    assert not any("secret" in letter["dedup-detail"] for letter in letters)
    assert postgres_rows(url, "SELECT id, t FROM rows ORDER BY id") == [("e1", "a"), ("e6", "\u00e9")]


@pytest.mark.parametrize(
    ("made", "text", "code"),
    [
        ("CREATE INDEX ON rows (t)", "".join(random.Random(1).choices("abcdefghijklmnop", k=20_000)), "too_large"),
        (
            "ALTER TABLE rows ADD v tsvector GENERATED ALWAYS AS (to_tsvector('simple', t)) STORED",
            " ".join(f"word{number}" for number in range(200_000)),
            "too_large",
        ),
        ("RAISE EXCEPTION 'secret' USING ERRCODE = 'MY001'", "bad", "constraint"),
        ("RAISE no_data_found", "bad", "constraint"),
        ("ASSERT false, 'secret'", "bad", "constraint"),
    ],
    ids=["an index", "a text search vector", "a code of their own", "no data", "an assertion"],
)
def test_what_an_index_or_a_trigger_can_not_take_is_refused(postgres, made, text, code):
    """Was: taken for a database that is away, so the sink tried again for ever; or the sink stopped at each start."""
    table = Table("rows", (("id", "BYTEA"), ("event_time_ms", "BIGINT"), ("t", "TEXT")), ("id",), append=False)
    with contextlib.closing(PostgresConnection(postgres)) as connection:
        connection.execute("CREATE TABLE rows (id BYTEA PRIMARY KEY, event_time_ms BIGINT, t TEXT)")
        if not made.startswith(("CREATE", "ALTER")):
            body = f"BEGIN IF NEW.t = 'bad' THEN {made}; END IF; RETURN NEW; END"
            connection.execute(f"CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $${body}$$")
            made = "CREATE TRIGGER no BEFORE INSERT ON rows FOR EACH ROW EXECUTE FUNCTION no()"
        connection.execute(made)
        make_staging(connection, table)
        with transaction(connection):
            written = write_rows(connection, table, [(b"a", 1, "a"), (b"b", 1, text), (b"c", 1, "c")])
        assert {row: why.code for row, why in written.refused.items()} == {1: code}
        assert "secret" not in written.refused[1].detail
        assert connection.query("SELECT t FROM rows ORDER BY t") == [("a",), ("c",)]


def test_a_column_that_was_made_longer_takes_longer_values(postgres):
    """Was: they were dead letters until the next start, because the staging table had the earlier type."""
    table = Table("rows", (("id", "BYTEA"), ("event_time_ms", "BIGINT"), ("t", "TEXT")), ("id",), append=False)
    with contextlib.closing(PostgresConnection(postgres)) as connection:
        connection.execute("CREATE TABLE rows (id BYTEA PRIMARY KEY, event_time_ms BIGINT, t VARCHAR(3))")
        make_staging(connection, table)
        with transaction(connection):
            assert list(write_rows(connection, table, [(b"a", 1, "a"), (b"b", 1, "long")]).refused) == [1]
        statement(postgres, "ALTER TABLE rows ALTER t TYPE VARCHAR(9)")
        with transaction(connection):
            written = write_rows(connection, table, [(b"c", 1, "c"), (b"d", 1, "long"), (b"e", 1, "much longer")])
        assert (written.inserted, list(written.refused)) == (2, [2])


def test_a_transaction_that_an_error_has_aborted_is_not_taken_for_committed(postgres):
    """PostgreSQL answers COMMIT with ROLLBACK then, and without an error."""
    connection = PostgresConnection(postgres)
    connection.execute("CREATE TABLE t (n INTEGER PRIMARY KEY)")
    connection.begin()
    connection.execute("INSERT INTO t VALUES (1)")
    with pytest.raises(RowsRefused):
        connection.execute("INSERT INTO t VALUES (1)")
    with pytest.raises(StateIncompatible, match="the error was caught"):
        connection.commit()
    connection.rollback()
    connection.begin()
    connection.execute("INSERT INTO t VALUES (2)")
    connection.commit()
    assert connection.query("SELECT n FROM t") == [(2,)]
    connection.close()


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:SECRET@h/d",
        "postgresql://u:SECRET/x@h/d",
        "postgresql://u:SEC@RET@h/d",
        "postgresql://u:SEC?RET@h/d",
        "postgresql://h/d?user=u&password=SECRET",
    ],
)
def test_an_address_is_shown_without_its_password(url):
    assert shown(url).rstrip("?") == "postgresql://h/d"


def test_an_address_that_libpq_can_not_read_is_not_shown():
    with pytest.raises((DatabaseAway, StateIncompatible), match="percent sign") as error:
        PostgresConnection("postgresql://u:pa%zzss@127.0.0.1:1/d")
    assert "zz" not in str(error.value)


async def test_where_the_newest_of_an_id_is_refused_the_one_before_it_counts(stage, admin, postgres):
    admin.create_topic(stage.topic, 1, {"retention.ms": "-1"})
    statement(
        postgres, "CREATE TABLE rows (tracking_id BYTEA PRIMARY KEY, event_time_ms BIGINT, id VARCHAR(4), n TEXT)"
    )
    topology = sinking(stage, postgres, "  columns: {id: id, n: text}")
    stage.send([event(1, text="a"), event(1, text="nul \x00", time_ms=BASE_MS + 99), event(12345, text="id too long")])
    done = await stage.sink(topology)
    assert (done.inserted, done.dead_letters) == (1, 2)
    assert postgres_rows(postgres, "SELECT id, n FROM rows") == [("e1", "a")]


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (
            "CREATE TABLE rows (tracking_id BLOB PRIMARY KEY, event_time_ms INTEGER, id TEXT)",
            "no such column|has no column",
        ),
        (
            "CREATE TABLE rows (tracking_id BLOB, event_time_ms INTEGER, id TEXT, n INTEGER, price REAL, more TEXT)",
            "ON CONFLICT",
        ),
    ],
)
async def test_a_table_that_does_not_fit_is_refused_before_the_first_record(stage, admin, made, said):
    admin.create_topic(stage.topic, 1, {"retention.ms": "-1"})
    stage.send([event(1)])
    url = f"sqlite:///{stage.directory}/sink.db"
    statement(url, made)
    with pytest.raises(StateIncompatible, match=said):
        await stage.sink(sinking(stage, url))


def applied(stage, url, *options):
    path = stage.directory / "apply.yaml"
    more = f"{COLUMNS}\n"
    path.write_text(stage.topology_text("${env:SINK_URL}", more), encoding="utf-8")
    arguments = ["apply", str(path), "--config", str(stage.config), *options]
    return CliRunner().invoke(create_app(), arguments, env={"SINK_URL": url})


def test_apply_makes_the_table_on_request_and_the_sink_needs_no_right_to_make_it(stage, admin, postgres):
    admin.create_topic(f"{stage.name}.source", 2)
    admin.create_topic(stage.topic, 2, {"retention.ms": "-1"})
    assert "table" not in applied(stage, postgres).output
    told = applied(stage, postgres, "--table", "--dry-run").output
    assert 'would create table rows: CREATE TABLE IF NOT EXISTS rows ("tracking_id" BYTEA NOT NULL' in told
    with pytest.raises(psycopg.errors.UndefinedTable):
        postgres_rows(postgres)
    told = applied(stage, postgres, "--table").output
    assert "created table dedup_offsets" in told
    assert "created table rows" in told
    told = json.loads(applied(stage, postgres, "--table", "--json").output)
    assert told["tables"] == {}
    name = stage.name.replace("-", "_")
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'x'".encode())
        connection.execute(f"GRANT SELECT, INSERT, UPDATE ON rows, dedup_offsets TO {name}".encode())
        connection.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    stage.send([event(number) for number in range(50)])
    few_rights = f"postgresql://{name}:x@{postgres.rpartition('@')[2]}"
    with psycopg.connect(few_rights) as connection, pytest.raises(psycopg.errors.InsufficientPrivilege):
        connection.execute("CREATE TABLE more (k INT)")
    assert asyncio.run(stage.sink(sinking(stage, few_rights))).inserted == 50
    assert len(postgres_rows(postgres)) == 50


def test_apply_says_where_a_table_does_not_fit(stage, admin, tmp_path):
    admin.create_topic(f"{stage.name}.source", 2)
    url = f"sqlite:///{tmp_path}/other.db"
    statement(url, "CREATE TABLE rows (tracking_id BLOB PRIMARY KEY, other TEXT)")
    found = applied(stage, url, "--table")
    assert isinstance(found.exception, StateIncompatible)
    assert "event_time_ms" in str(found.exception)


async def test_a_topic_made_anew_is_refused(stage, admin):
    admin.create_topic(stage.topic, 1, {"retention.ms": "-1"})
    stage.send([event(1)])
    topology = sinking(stage, f"sqlite:///{stage.directory}/sink.db")
    await stage.sink(topology)
    admin.delete_topic(stage.topic)
    until(lambda: stage.topic not in admin.client.list_topics(timeout=10).topics, "it is gone")
    admin.create_topic(stage.topic, 1, {"retention.ms": "-1"})
    with pytest.raises(StateIncompatible, match="which was deleted and created again"):
        await stage.sink(topology)


def sink_file(stage, url):
    path = stage.directory / "sink.yaml"
    path.write_text(stage.topology_text("${env:SINK_URL}", COLUMNS), encoding="utf-8")
    return str(path), {"SINK_URL": url}


async def test_the_second_of_two_wins_and_the_first_stops_with_task_migrated(stage, admin, database):
    url, rows = database
    admin.create_topic(stage.topic, 2, {"retention.ms": "-1"})
    stage.send([event(number) for number in range(1_000)])
    file, environ = sink_file(stage, url)
    count = "SELECT count(*) FROM rows"
    first = stage.start("sink", file, log="first", environ=environ)
    until(lambda: made(rows) and rows(count) == [(1_000,)], f"the first writes; log:\n{first.log}")
    second = stage.start("sink", file, log="second", environ=environ)
    until(lambda: {row[0] for row in rows("SELECT epoch FROM dedup_offsets")} == {2}, "the second has taken over")
    stage.send([event(number) for number in range(1_000, 2_000)])
    assert first.wait() == TaskMigrated.exit_code
    assert "TaskMigrated" in first.log
    until(lambda: rows(count) == [(2_000,)], f"the second writes; log:\n{second.log}")
    assert second.stop() == 0


async def test_a_database_that_is_away_is_waited_for(stage, admin, postgres):
    admin.create_topic(stage.topic, 1, {"retention.ms": "-1"})
    stage.send([event(number) for number in range(100)])
    file, environ = sink_file(stage, postgres)
    process = stage.start("sink", file, environ=environ)
    count = "SELECT count(*) FROM rows"
    until(
        lambda: made(lambda sql: postgres_rows(postgres, sql)) and postgres_rows(postgres, count) == [(100,)],
        process.log,
    )
    name = postgres.rpartition("/")[2]
    other = postgres.rpartition("/")[0] + "/postgres"
    statement(other, f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
    statement(other, f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")
    stage.send([event(number) for number in range(100, 200)])
    until(lambda: "the database does not answer, waiting; nothing is lost" in process.log, process.log)
    assert process.running
    statement(other, f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
    until(lambda: postgres_rows(postgres, count) == [(200,)], f"it goes on; log:\n{process.log}")
    assert "the database answers again" in process.log
    assert process.stop() == 0


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("password", "password authentication failed for user"),
        ("no password", "no password supplied"),
        ("user", "authentication failed for user"),
        ("database", 'database "nowhere" does not exist'),
        ("no login", "is not permitted to log in"),
    ],
)
def test_a_server_that_denies_access_is_not_waited_for(postgres, wrong, says):
    """Was: waited for as if it did not answer, for ever if the password was changed while the sink ran."""
    user, _, rest = postgres.removeprefix("postgresql://").partition(":")
    password, _, place = rest.partition("@")
    statement(postgres, "DROP ROLE IF EXISTS outsider")
    statement(postgres, f"CREATE ROLE outsider NOLOGIN PASSWORD '{password}'")
    url = {
        "password": f"postgresql://{user}:wrong@{place}",
        "no password": f"postgresql://{user}@{place}",
        "user": f"postgresql://nobody:{password}@{place}",
        "database": f"postgresql://{user}:{password}@{place.rpartition('/')[0]}/nowhere",
        "no login": f"postgresql://outsider:{password}@{place}",
    }[wrong]
    with pytest.raises(StateIncompatible, match=f"PostgreSQL denies access: .*{says}.* Correct the user") as why:
        connect(url)
    assert password not in str(why.value)


def test_a_host_that_does_not_answer_is_waited_for_though_another_denies_access():
    refused = "- host: '{}', port: 5432, hostaddr: '{}': connection failed: {}"
    no, down = 'FATAL:  no pg_hba.conf entry for host "10.0.0.9"', "Connection refused\n\tIs the server running?"
    text = "{}\nMultiple connection attempts failed. All failures were:\n{}"

    def denial(*attempts):
        return _denial(
            psycopg.OperationalError(
                text.format(attempts[-1][2], "\n".join(refused.format(*each) for each in attempts))
            )
        )

    assert denial(("primary", "10.0.0.1", down), ("standby", "10.0.0.2", no)) is None
    assert "no pg_hba.conf entry" in denial(("localhost", "127.0.0.1", no), ("localhost", "::1", down))


def test_a_session_waits_for_a_lock_and_for_a_lost_client_as_the_server_or_the_address_says(postgres):
    """Was: after a power loss, the server kept the locks for two hours, and the successor waited without a word."""
    statement(postgres, f"ALTER DATABASE {postgres.rpartition('/')[2]} SET tcp_keepalives_count = 7")
    names = ("lock_timeout", "tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count")

    def shown_by(url):
        with contextlib.closing(connect(url)) as connection:
            return [connection.query(f"SHOW {name}")[0][0] for name in names]

    assert shown_by(postgres) == ["30s", "30", "10", "7"]
    options = "?options=-c%20lock_timeout%3D0%20-c%20tcp_keepalives_idle%3D99"
    assert shown_by(postgres + options) == ["0", "99", "10", "7"]


def test_a_stop_is_heard_while_another_session_holds_the_row_of_a_partition(stage, admin, postgres):
    """Was: waited without a word, deaf to SIGTERM; or given up after 30 s, as if the database did not answer."""
    admin.create_topic(stage.topic, 1, {"retention.ms": "-1"})
    stage.send([event(1)])
    asyncio.run(stage.sink(sinking(stage, postgres)))
    file, environ = sink_file(stage, postgres + "?options=-c%20lock_timeout%3D100")
    with psycopg.connect(postgres) as other:
        other.execute("SELECT 1 FROM dedup_offsets FOR UPDATE")
        process = stage.start("sink", file, environ=environ)
        says = "another session of the database holds a lock, waiting; nothing is lost"
        until(lambda: says in process.log, lambda: f"it says why it waits; log:\n{process.log}")
        assert process.running
        assert process.stop() == DatabaseUnavailable.exit_code
        assert "stopped while another session of the database held a lock" in process.log
        waits = stage.start("sink", file, log="waits", environ=environ)
        until(lambda: says in waits.log, lambda: f"it waits, too; log:\n{waits.log}")
    until(lambda: "partitions taken" in waits.log, lambda: f"it goes on; log:\n{waits.log}")
    assert waits.stop() == 0


def test_the_wait_for_a_lock_does_not_count_as_silence_of_the_database(tmp_path):
    found = [LockHeld("lock timeout"), None]

    def work(_connection):
        error = found.pop(0)
        if error is not None:
            raise error
        return "done"

    assert RetryingDatabase(f"sqlite:///{tmp_path}/x.db").insist(work, within_s=-1) == "done"


async def test_a_deadlock_is_tried_again(stage, admin, postgres):
    admin.create_topic(stage.topic, 1, {"retention.ms": "-1"})
    stage.send([event(1), event(2)])
    topology = sinking(stage, postgres)
    await stage.sink(topology)
    statement(postgres, "ALTER DATABASE " + postgres.rpartition("/")[2] + " SET deadlock_timeout = '50ms'")
    stage.send([event(1, n=10, time_ms=BASE_MS + 10**6), event(2, n=20, time_ms=BASE_MS + 10**6)])
    with psycopg.connect(postgres) as other, psycopg.connect(postgres) as third:
        # PostgreSQL looks for a deadlock when a wait is 50 ms old, so the sink must be the last to wait.
        other.execute("SET deadlock_timeout = '1h'")
        other.execute("UPDATE rows SET n = n WHERE id = 'e2'")
        third.execute("UPDATE rows SET n = n WHERE id = 'e1'")
        process = stage.start("sink", *[sink_file(stage, postgres)[0]], environ={"SINK_URL": postgres})
        until(lambda: waiting(postgres) == 1, "the sink, which has its offset, waits for row 1")
        wants_offset = threading.Thread(target=other.execute, args=("SELECT 1 FROM dedup_offsets FOR UPDATE",))
        wants_offset.start()
        until(lambda: waiting(postgres) == 2, "the other, which has row 2, waits for the sink's offset")
        third.commit()
        until(lambda: "deadlock detected" in process.log, "the sink is told")
        wants_offset.join()
        other.commit()
    until(lambda: postgres_rows(postgres, "SELECT n FROM rows ORDER BY n") == [(10,), (20,)], "it tries again")
    assert process.stop() == 0


def waiting(url):
    sql = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    return postgres_rows(url, sql)[0][0]
