"""Where transactions of ingest end: by the interval, by each piece that is read, by the source's own marker."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from types import SimpleNamespace

import pytest

from dedup.connect import file_source as reading
from dedup.connect import sink_connector
from dedup.connect import source_connector as marked
from dedup.connect.file_source import Files
from dedup.connect.source import SourceRecords
from dedup.connect.source_connector import TransactionBoundary
from dedup.errors import StateIncompatible
from dedup.kafka.topic_admin import Topic
from dedup.kafka.wire import TopicPartition
from dedup.topology.ingest_file import parse_ingest
from dedup.topology.schema import FilesSource, Marker
from tests.connect.stage import lines
from tests.waiting import until

MARKER = Marker(field="last", equals=True)


def opened(directory, positions, pattern="*.jsonl", columns=None, marker=MARKER):
    written = {} if columns is None else {"format": "csv", "columns": columns}
    spec = FilesSource(directory=str(directory), pattern=pattern, **written)
    source = TransactionBoundary(Files("x", spec, 100), marker)
    source.restore(positions)
    return source


def polled(source):
    """Yield what comes until nothing does for two polls: a piece of a file may hold no whole line."""
    idle = 0
    while idle < 2:
        found = source.poll()
        idle = 0 if found is not None else idle + 1
        if found is not None:
            yield found


def line(number, *, last=False, **more):
    return json.dumps({"n": number, "last": last} | more).encode()


@pytest.mark.parametrize("chunk_bytes", [40, 150, 1 << 20])
def test_each_transaction_ends_with_its_marker_wherever_it_is_begun_anew(tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr(reading, "CHUNK_BYTES", chunk_bytes)
    long = line(0, more="x" * 200)
    (tmp_path / "a.jsonl").write_bytes(
        b"\n".join([line(1), b"", line(2, last=True), long, b" ", line(3), b"no json", line(4), long, line(5, last=True)])
        + b"\n" + line(6, last=True) + b"\n" + long + b"\n" + line(7) + b"\n"
    )  # fmt: skip
    whole = [([json.loads(value).get("n") for value in found.values if value != b"no json"], len(found.dead))
             for found in polled(opened(tmp_path, {}))]  # fmt: skip
    assert whole == [([1, 2], 0), ([3, 4, 5], 2), ([6], 0)]
    for committed in range(4):
        source, positions = opened(tmp_path, {}), {}
        for _, found in zip(range(committed), polled(source), strict=False):
            positions[found.part] = found.position
        rest = [
            ([json.loads(value).get("n") for value in found.values if value != b"no json"], len(found.dead))
            for found in polled(opened(tmp_path, positions))
        ]
        assert rest == whole[committed:]
    with (tmp_path / "a.jsonl").open("ab") as file:
        file.write(line(8, last=True) + b"\n")
    (found,) = polled(opened(tmp_path, positions))
    assert ([json.loads(value)["n"] for value in found.values], len(found.dead)) == ([7, 8], 1)


@pytest.mark.parametrize("rule", ["field: n", "fields: [n, n2]"])
def test_equal_ids_have_equal_keys(rule):
    """Was: -0.0 and 0.0, which are one ID, could go to two partitions."""
    text = f"ingest: 1\nname: x\nsource: {{files: {{directory: /}}}}\noutput: {{topic: y}}\ntracking_id: {{{rule}}}\n"
    topics = {name: Topic(name, "id", 1) for name in ("y", "x.dead-letter")}
    maker = marked._RecordMaker(parse_ingest(text, name="x"), topics, dict.fromkeys(topics, 1), 2_000_000)
    for equal in (["0.0", "-0.0", "0e5", "-0E-400"], ["1.5", "15e-1"], ["0", "-0"]):
        values = [b'{"n":%s,"n2":1}' % each.encode() for each in equal]
        found = maker.lines(SourceRecords("p", "x/p/", values, range(len(values)), b"", lambda _: b""), 0)
        ((place, made),) = found.items()
        assert (place.topic, len({key for _, _, key, _, _ in made})) == ("y", 1)


def endless(size_bytes):
    """Yield polls of large records, as a source or a topic with a backlog returns them."""
    values = [json.dumps("x" * size_bytes).encode()] * 8
    for number in range(200):
        yield SourceRecords("p", "x/p/", values, range(8 * number, 8 * number + 8), b"", lambda _: b"")
    pytest.fail("nothing ended the transaction")


def test_a_transaction_of_large_records_ends_before_a_long_interval():
    """Was: 40,000 records of any size, which filled the memory."""
    polls = endless(1_000_000)
    ingest = parse_ingest("ingest: 1\nname: x\nsource: {files: {directory: /}}\noutput: {topic: y}\n", name="x")
    topics = {name: Topic(name, "id", 1) for name in ("y", "x.dead-letter")}
    maker = marked._RecordMaker(ingest, topics, dict.fromkeys(topics, 1), 2_000_000)
    run = marked._Run(None, SimpleNamespace(poll=lambda: next(polls)), maker, 60_000, asyncio.Event())
    assert 64 <= run._collect().records <= 80


async def test_a_transaction_of_a_sink_ends_before_a_long_interval_too():
    polls = endless(1_000_000)

    async def poll():
        columns = SimpleNamespace(values=next(polls).values, offsets=range(8))
        return [SimpleNamespace(source=TopicPartition("y", 0), columns=columns, next_offset=8)]

    consumer = SimpleNamespace(poll=poll)
    run = sink_connector._Run(None, None, consumer, None, 60)
    assert 64 <= (await run._gather()).records <= 80


def test_what_waits_for_its_marker_is_said_and_held_when_its_file_is_deleted(tmp_path, caplog):
    (tmp_path / "a.jsonl").write_bytes(line(1, last=True) + b"\n" + line(2) + b"\n" + line(3) + b"\n")
    source = opened(tmp_path, {})
    assert [len(found.values) for found in polled(source)] == [1]
    (tmp_path / "a.jsonl").unlink()
    assert list(polled(source)) == []
    assert "2 records before blank lines or the end have no marker yet" in caplog.text
    (said,) = source.waiting()
    assert said.startswith("2 records after 23 of ")
    assert said.endswith(" wait for their marker")


def test_a_marker_in_csv_and_another_kind_of_value_is_none(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"n,end\n1,0\n2,1\n3,x\n4,\n5,1\n6,0\n")
    columns = {"n": "integer", "end": "integer"}
    for equals, found in ((1, [[1, 2], [4, 5]]), (True, []), ("1", [])):
        source = opened(tmp_path, {}, "*.csv", columns, Marker(field="end", equals=equals))
        assert [[json.loads(value)["n"] for value in piece.values] for piece in polled(source)] == found


@pytest.mark.parametrize("odd", ['"cut":"\\ud83d"', '"m":1e999'])
def test_a_marker_beside_json_that_fast_decoders_refuse_ends_its_transaction(tmp_path, odd):
    """Was: an integer marker was not recognized there, so a last batch was never sent."""
    for equals, others in ((1, ("2", "1.0", "true", '"1"')), (0, ("1", "0.0", "false", '"0"')), ("1", ("1",))):
        ends = ["1", *others, "-0"] if equals == 0 else [*others, json.dumps(equals)]
        text = "".join(f'{{"n":{n},"end":{end},{odd}}}\n' for n, end in enumerate(ends))
        (tmp_path / "a.jsonl").write_text(text, encoding="utf-8")
        source = opened(tmp_path, {}, marker=Marker(field="end", equals=equals))
        assert [len(found.values) for found in polled(source)] == [len(ends)]
        source.close()


@pytest.mark.parametrize(("bound", "most"), [("MOST_RECORDS", 10), ("MOST_BYTES", 200)])
def test_a_source_without_markers_stops(tmp_path, monkeypatch, bound, most):
    monkeypatch.setattr(marked, bound, most)
    (tmp_path / "a.jsonl").write_bytes(b"".join(line(n) + b"\n" for n in range(20)))
    with pytest.raises(
        StateIncompatible, match=r"no marker among the 20 records after this one. None of them was sent"
    ):
        list(polled(opened(tmp_path, {})))


def test_bad_lines_without_a_marker_stop_the_source_too(tmp_path, monkeypatch):
    """Was: they were kept in memory without a limit, and waiting for a marker was not told."""
    (tmp_path / "a.csv").write_bytes(b"n\n" + b"x,y\n" * 20)
    source = opened(tmp_path, {}, "*.csv", {"n": "integer"}, Marker(field="n", equals=1))
    assert list(polled(source)) == []
    assert source.waiting()[0].startswith("20 records after 2 of ")
    monkeypatch.setattr(marked, "MOST_RECORDS", 10)
    with pytest.raises(StateIncompatible, match=r"/2: no marker among the 20 records after this one"):
        list(polled(opened(tmp_path, {}, "*.csv", {"n": "integer"}, Marker(field="n", equals=1))))


@pytest.fixture
def lite(stage):
    with contextlib.closing(sqlite3.connect(stage.directory / "source.db", isolation_level=None)) as connection:
        connection.execute("CREATE TABLE rows (n INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT, last INTEGER)")
        yield connection


def fill(connection, rows):
    connection.execute("BEGIN")
    connection.executemany("INSERT INTO rows (id, last) VALUES (?, ?)", rows)
    connection.execute("COMMIT")


def more(boundary):
    return f"tracking_id: {{field: id}}\nboundary: {boundary}"


@pytest.mark.broker
async def test_by_poll_each_piece_is_a_transaction(stage, lite):
    fill(lite, [(f"e{n}", 0) for n in range(12_000)])
    table = f'table: {{url: "sqlite:///{stage.directory}/source.db", table: rows, column: n}}'
    done = await stage.ingest(table, more("poll"))
    assert (done.records, done.transactions) == (12_000, 3)


@pytest.mark.broker
async def test_by_the_marker_of_a_table(stage, lite):
    fill(lite, [(f"e{n}", int(n % 100 == 99)) for n in range(6_050)])
    table = f'table: {{url: "sqlite:///{stage.directory}/source.db", table: rows, column: n}}'
    boundary = more("{field: last, equals: 1}")
    done = await stage.ingest(table, boundary)
    assert (done.records, done.transactions) == (6_000, 60)
    assert done.waiting == ["50 records after 6001 of table wait for their marker"]
    lite.execute("INSERT INTO rows (id, last) VALUES ('end', 1)")
    done = await stage.ingest(table, boundary)
    assert (done.records, done.transactions, done.waiting) == (51, 1, [])
    assert sorted(value["n"] for value in stage.values()) == list(range(1, 6_052))


@pytest.mark.broker
def test_killed_between_markers_nothing_is_half_there(stage, admin):
    """A committed reader sees whole batches of 10 only, before and after SIGKILL."""
    admin.create_topic(stage.topic, 2, {"retention.ms": "-1"})
    file = str(stage.ingest_file(stage.files(), more("{field: kind, equals: last}")))
    path = stage.incoming / "a.jsonl"
    sent = 0
    for _ in range(3):
        process = stage.start("ingest", file)
        with path.open("ab") as growing:
            growing.write(lines(sent, 9) + b'{"id":"e%d","n":%d,"kind":"last"}\n' % (sent + 9, sent + 9))
            growing.write(lines(sent + 10, 5))
        until(lambda expected=sent + 10: len(stage.read()) >= expected, f"a batch; log:\n{process.log}")
        assert len(stage.read()) == sent + 10
        process.kill()
        with path.open("ab") as growing:
            growing.write(lines(sent + 15, 4) + b'{"id":"e%d","n":%d,"kind":"last"}\n' % (sent + 19, sent + 19))
        sent += 20
    process = stage.start("ingest", file, "--exit-when-done")
    assert process.wait() == 0
    assert sorted(value["n"] for value in stage.values()) == list(range(sent))
