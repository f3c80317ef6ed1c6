"""Runs over an input that grows: together they are one run over everything, and each is there whole or not at all."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrameWriter
from pyspark.sql.types import ArrayType, DoubleType, StructField, StructType, UserDefinedType

from dedup.core.reference_model import ReferenceModel
from dedup.core.window import BEFORE_ALL_TIME, Source
from dedup.errors import SettingsError, StateIncompatible, TopologyError
from dedup.spark.incremental import OutputTable, incremental, store_warning
from dedup.spark.incremental_input import NewFiles, NewRows, NewVersions, id_types
from dedup.spark.table_log import DeltaLog
from dedup.topology.parse import parse
from tests.spark.parity import NOW_MS, POLICIES, Row, by_model, document, model_record, recipe_of, rules_of, stream
from tests.spark.streaming import INTERPRETED, QUIET
from tests.spark.test_batch_files import BASE_MS, topology, write
from tests.spark.test_batch_files import NOW_MS as FILES_NOW_MS
from tests.spark.test_batch_halves import batches
from tests.spark.test_sightings import by_job, without_places

ROOT = Path(__file__).parents[2]
COUNT = 5_000
TOPIC = "parity-in"
POINTS = ("begin", "keep_state", "commit")


class KilledOnPurpose(Exception):
    """What a run meets at a named point."""


def quiet(*_: object) -> None:
    """Say nothing."""


def append(spark, path, out, topology_, now_ms=NOW_MS):
    return incremental(NewFiles(spark, [str(path)], "parquet"), topology_, str(out), now_ms=now_ms, say=quiet)


def killed(spark, path, out, topology_, point, monkeypatch, *, after):
    """Run until the point, before or after what happens there, and no further."""
    real = getattr(OutputTable, point)

    def broken(self, *arguments):
        if after:
            real(self, *arguments)
        raise KilledOnPurpose(point)

    with monkeypatch.context() as patched:
        patched.setattr(OutputTable, point, broken)
        with pytest.raises(KilledOnPurpose):
            append(spark, path, out, topology_)


def verdicts_of(spark, out) -> dict[tuple[int, int], tuple[Row, int]]:
    found = {}
    for row in spark.read.format("delta").load(str(out)).collect():
        first = None if row.first_partition is None else (row.first_partition, row.first_offset)
        assert (row.partition, row.offset) not in found
        stream_time_ms = BEFORE_ALL_TIME if row.stream_time_ms is None else row.stream_time_ms
        found[row.partition, row.offset] = Row(row.verdict, row.reason, row.first_time_ms, first), stream_time_ms
    return found


def test_any_cuts_with_killed_runs_give_what_the_model_gives(spark, tmp_path, monkeypatch):
    name = "identity"
    made = parse(json.dumps(document(name, POLICIES[name], TOPIC)), name=name)
    events = stream(5, COUNT)
    table = batches(events)
    dice = random.Random(11)
    borders = [0, *sorted(dice.sample(range(COUNT), 5)), COUNT]
    bronze, out = tmp_path / "bronze", tmp_path / "silver"
    bronze.mkdir()
    points = itertools.cycle(itertools.product(POINTS, (False, True)))
    for number, (begin, end) in enumerate(itertools.pairwise(borders)):
        pq.write_table(table.slice(begin, end - begin), bronze / f"{number}.parquet")
        point, after = next(points)
        killed(spark, bronze, out, made, point, monkeypatch, after=after)
        committed = (point, after) == ("commit", True)
        report = append(spark, bronze, out, made)
        assert (report.run, report.fresh) == (number + 1, not committed)
        if not committed:
            assert report.new_rows == sum(report.verdicts.values()) == end - begin
    expected = by_model(events, made)
    found = verdicts_of(spark, out)
    assert found == expected
    assert {"unique", "duplicate", "late", "dead_letter"} <= {row.verdict for row, _ in found.values()}
    # A run deletes what neither it nor the one before needs; the last one was killed before it could.
    assert {each.name[:8] for each in (out / "_dedup" / "runs").glob("0*.json")} == {f"0000000{n}" for n in (4, 5, 6)}


def test_rows_without_coordinates_are_judged_as_the_model_fed_run_by_run(spark, tmp_path):
    made = parse(json.dumps(document("plain", {"guard_period": "4s", "grace": "2s"}, TOPIC)), name="plain")
    events = [each for each in stream(6, 1_500) if each.timestamp_ms < NOW_MS]
    table = without_places(events)
    # What comes last is the oldest: most of it is behind stream time by more than the grace period.
    parts = [(500, 1_000), (1_000, 1_500), (0, 500)]
    model = ReferenceModel(rules_of(made), [(0, -1)])
    recipe, expected = recipe_of(made), []
    (tmp_path / "bronze").mkdir()
    for number, (begin, end) in enumerate(parts):
        part = events[begin:end]
        pq.write_table(table.slice(begin, len(part)), tmp_path / "bronze" / f"{number}.parquet")
        append(spark, tmp_path / "bronze", tmp_path / "silver", made)
        faulty = [event for event in part if model_record(recipe, event, Source(0, -1, -1), NOW_MS)[0].fault]
        whole = [event for event in part if event not in faulty]
        expected += [(number + 1, *each) for each in by_job(model, made, whole)]
        expected += [(number + 1, *each) for each in by_job(model, made, faulty)]
    rows = spark.read.format("delta").load(str(tmp_path / "silver")).collect()
    found = []
    for row in rows:
        value = None if row.value is None else bytes(row.value)
        verdict = Row(row.verdict, row.reason, row.first_time_ms, None)
        found.append((row.run, value, row.timestamp_ms, verdict))
    assert sorted(map(repr, found)) == sorted(map(repr, expected))
    late = [number for number, *_, row in expected if row.verdict == "late"]
    assert late.count(3) > 200
    assert 1 not in late


LEFT = {"state": "runs/*", "sightings": "state/*/*.parquet"}
LINES = [(b'{"id":%d}' % (number // 2), number, 0, number) for number in range(6)]


@pytest.fixture(scope="module")
def two_runs(spark, tmp_path_factory):
    """Return a directory with the input of two runs and their table."""
    made = tmp_path_factory.mktemp("two-runs")
    for number in range(2):
        write(made / "bronze" / f"{number}.parquet", LINES[2 * number : 2 * number + 2])
        append(spark, made / "bronze", made / "silver", topology(), FILES_NOW_MS)
    return made


@pytest.fixture
def grown(two_runs, tmp_path):
    """Return a copy of the input of two runs and of their table; a third file is there to be read."""
    shutil.copytree(two_runs, tmp_path, dirs_exist_ok=True)
    for state in (tmp_path / "silver" / "_dedup" / "runs").glob("*.json"):
        # A run names the files that it has read.
        state.write_text(state.read_text(encoding="utf-8").replace(str(two_runs), str(tmp_path)), encoding="utf-8")
        (state.parent / f".{state.name}.crc").unlink(missing_ok=True)
    write(tmp_path / "bronze" / "2.parquet", LINES[4:])
    return tmp_path / "bronze", tmp_path / "silver"


def again(spark, grown, **options):
    return append(spark, *grown, topology(**options), FILES_NOW_MS)


def test_nothing_new_commits_nothing_and_files_that_were_read_may_go(spark, grown):
    bronze, silver = grown
    (bronze / "0.parquet").unlink()
    assert again(spark, grown).verdicts == {"duplicate": 1, "unique": 1}
    commits = sorted((silver / "_delta_log").glob("*.json"))
    report = again(spark, grown)
    assert (report.fresh, report.run, report.verdicts) == (False, 3, {})
    assert sorted((silver / "_delta_log").glob("*.json")) == commits


@pytest.mark.parametrize("path", ["bronze/[0-9].parquet", "bronze"])
def test_an_input_of_which_every_file_was_read_and_deleted_contains_nothing_new(spark, grown, monkeypatch, path):
    """Was: refused. An object store has no empty directories, as the local disk here after `rmdir`."""
    bronze, silver = grown
    assert again(spark, grown).run == 3
    shutil.rmtree(bronze)

    def judge(*paths):
        source = NewFiles(spark, [str(bronze.parent / each) for each in paths], "parquet")
        return incremental(source, topology(), str(silver), now_ms=FILES_NOW_MS, say=quiet)

    assert (judge(path).run, judge(path).fresh) == (3, False)
    monkeypatch.setattr("dedup.spark.incremental._RENEWED_AFTER_MS", 0)
    assert judge(path).run == 4
    monkeypatch.undo()
    # No run has read a file there.
    with pytest.raises(SettingsError, match=r"gold: cannot be listed: .*PATH_NOT_FOUND"):
        judge(path, "gold")
    write(bronze.parent / "gold" / "3.parquet", [(b'{"id":9}', 9, 0, 6)])
    assert judge(path, "gold").new_rows == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("overwrite", r"somebody else has changed .* after run 2: WRITE \(version 2"),
        ("delete", r"somebody else has changed .* after run 2: DELETE \(version 2"),
        ("topology", r"belong to another topology"),
        ("replaced", r"1\.parquet: replaced after an earlier run read it"),
        ("pattern", r"2\[1\]\.parquet: Spark treats a name with one of \* \? \[ .* Rename it"),
        ("below", r"orders/0: the input begins at offset 3, and earlier runs judged this partition up to offset 3"),
        ("unplaced", r"has rows without topic, partition and offset, but earlier runs .* judged rows with"),
        ("state", r"the state of the table's last run, is missing"),
        ("sightings", r"files with the sightings of earlier runs are missing"),
    ],
)
def test_what_does_not_fit_the_runs_before_is_refused_by_name(spark, grown, change, message):
    bronze, silver = grown
    table = f"delta.`{silver}`"
    options = {}
    match change:
        case "overwrite":
            rows = spark.read.format("delta").load(str(silver)).where("verdict = 'unique'")
            rows.write.format("delta").mode("overwrite").save(str(silver))
        case "delete":
            spark.sql(f"DELETE FROM {table} WHERE verdict = 'duplicate'")
        case "topology":
            options = {"tracking_id": {"field": "number"}}
        case "replaced":
            write(bronze / "1.parquet", LINES[:3])
        case "pattern":
            (bronze / "2.parquet").rename(bronze / "2[1].parquet")
        case "below":
            write(bronze / "2.parquet", LINES[3:])
        case "unplaced":
            write(bronze / "2.parquet", LINES[4:], placed=False)
        case "state" | "sightings":
            for each in (silver / "_dedup").glob(LEFT[change]):
                each.unlink()
    version = len(list((silver / "_delta_log").glob("*.json")))
    with pytest.raises(StateIncompatible, match=message):
        again(spark, grown, **options)
    assert len(list((silver / "_delta_log").glob("*.json"))) == version


@pytest.mark.parametrize("first", [True, False])
def test_files_without_rows_decide_nothing(spark, tmp_path, first):
    bronze, silver = tmp_path / "bronze", tmp_path / "silver"
    write(tmp_path / "rows.parquet", LINES[:2])
    rows = pq.read_table(tmp_path / "rows.parquet")
    bronze.mkdir()
    tables = [rows.slice(0, 0), rows] if first else [rows, rows.slice(0, 0)]
    for number, table in enumerate(tables):
        pq.write_table(table, bronze / f"{number}.parquet")
        assert append(spark, bronze, silver, topology(), FILES_NOW_MS).new_rows == table.num_rows
    write(bronze / "2.parquet", LINES[2:])
    assert append(spark, bronze, silver, topology(), FILES_NOW_MS).verdicts == {"duplicate": 2, "unique": 2}


def test_a_first_run_that_is_killed_while_delta_writes_is_finished(spark, tmp_path, monkeypatch):
    bronze, silver = tmp_path / "bronze", tmp_path / "silver"
    write(bronze / "0.parquet", LINES)
    killed(spark, bronze, silver, topology(), "commit", monkeypatch, after=False)
    # What Delta makes before its first commit.
    (silver / "_delta_log").mkdir()
    (silver / "verdict=unique").mkdir()
    assert append(spark, bronze, silver, topology(), FILES_NOW_MS).verdicts == {"duplicate": 3, "unique": 3}


def test_a_table_that_was_compacted_or_restored_is_gone_on_with(spark, grown):
    _, silver = grown
    table = f"delta.`{silver}`"
    spark.sql(f"DELETE FROM {table} WHERE verdict = 'duplicate'")
    spark.sql(f"RESTORE TABLE {table} TO VERSION AS OF 1")
    spark.sql(f"OPTIMIZE {table}")
    spark.sql(f"ALTER TABLE {table} ADD CONSTRAINT counted CHECK (run > 0)")
    spark.sql(f"ALTER TABLE {table} ALTER COLUMN verdict COMMENT 'what dedup says'")
    assert again(spark, grown).run == 3
    assert spark.read.format("delta").load(str(silver)).groupBy("verdict").count().collect() != []
    assert sorted(verdicts_of(spark, silver)) == [(0, offset) for offset in range(6)]


def test_delta_may_forget_old_commits_while_nothing_new_arrives(spark, tmp_path, monkeypatch):
    """Maintenance goes on, and with each of its checkpoints Delta deletes commits that are 30 days old."""
    tables = bronze, silver = str(tmp_path / "bronze"), str(tmp_path / "silver")

    def judge():
        source = NewVersions(spark, bronze, rows_are_events=True)
        return incremental(source, of_columns(), silver, now_ms=NOW_MS, say=quiet)

    def maintain():
        for table in tables:
            spark.sql(f"ALTER TABLE delta.`{table}` SET TBLPROPERTIES ('delta.checkpointInterval' = '1')")

    bronze_rows(spark, [1], [1]).write.format("delta").mode("append").save(bronze)
    assert judge().run == 1
    maintain()
    for each in (file for table in tables for file in Path(table, "_delta_log").iterdir()):
        os.utime(each, (each.stat().st_mtime - 40 * 86_400,) * 2)
    assert (judge().run, judge().fresh) == (1, False)
    monkeypatch.setattr("dedup.spark.incremental._RENEWED_AFTER_MS", 0)
    renewed = judge()
    assert (renewed.run, renewed.fresh, renewed.verdicts) == (2, False, {})
    monkeypatch.undo()
    maintain()
    assert not any(Path(table, "_delta_log", f"{0:020}.json").exists() for table in tables)
    assert (judge().run, judge().fresh) == (2, False)
    bronze_rows(spark, [1, 2], [2, 2]).write.format("delta").mode("append").save(bronze)
    assert judge().verdicts == {"duplicate": 1, "unique": 1}


def test_a_table_restored_to_an_earlier_run_is_refused(spark, grown):
    spark.sql(f"RESTORE TABLE delta.`{grown[1]}` TO VERSION AS OF 0")
    with pytest.raises(StateIncompatible, match=r"was restored to run 1 after run 2 had been committed"):
        again(spark, grown)


@pytest.mark.parametrize("late", [False, True])
def test_a_change_of_the_table_while_a_run_is_under_way_is_told(spark, grown, monkeypatch, late):
    """Delta commits an append after a DELETE of other rows without a conflict."""
    table = f"delta.`{grown[1]}`"
    place, name = (DeltaLog, "append") if late else (OutputTable, "keep_state")
    real = getattr(place, name)

    def changed(self, *arguments, **options):
        spark.sql(f"DELETE FROM {table} WHERE run = 1")
        return real(self, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(place, name, changed)
        with pytest.raises(StateIncompatible, match=r"somebody else has changed .*: DELETE \(version 2"):
            again(spark, grown)
    if late:
        with pytest.raises(StateIncompatible, match=r"between the start and the commit of run 3: DELETE \(version 2"):
            again(spark, grown)
        return
    # Nothing was published, so the table can be repaired.
    spark.sql(f"RESTORE TABLE {table} TO VERSION AS OF 1")
    assert again(spark, grown).run == 3
    assert sorted(verdicts_of(spark, grown[1])) == [(0, offset) for offset in range(6)]


def test_a_run_whose_state_another_run_has_deleted_is_told_why(spark, grown, monkeypatch):
    write_files, others = DataFrameWriter.parquet, []

    def overtaken(self, path, *arguments, **options):
        write_files(self, path, *arguments, **options)
        if "/_dedup/state/" in path and not others:
            others.append(None)
            others.append(again(spark, grown))

    monkeypatch.setattr(DataFrameWriter, "parquet", overtaken)
    with pytest.raises(StateIncompatible, match=r"another job has committed run 3 of .* This job published nothing"):
        again(spark, grown)
    assert others[1].run == 3
    assert sorted(verdicts_of(spark, grown[1])) == [(0, offset) for offset in range(6)]


def test_a_run_that_commits_after_another_of_the_same_parent_is_told(spark, grown, monkeypatch):
    """Delta drops its commit without a word."""
    commit, others = OutputTable.commit, []

    def late(self, *arguments):
        monkeypatch.setattr(OutputTable, "commit", commit)
        others.append(again(spark, grown))
        commit(self, *arguments)

    monkeypatch.setattr(OutputTable, "commit", late)
    with pytest.raises(StateIncompatible, match=r"another job has committed run 3 of .* This job published nothing"):
        again(spark, grown)
    assert others[0].verdicts == {"duplicate": 1, "unique": 1}
    assert sorted(verdicts_of(spark, grown[1])) == [(0, offset) for offset in range(6)]


def test_of_two_runs_that_commit_at_once_one_wins(spark, grown, monkeypatch):
    check, both, one_waits = OutputTable._refuse_other_columns, threading.Barrier(2), threading.Event()

    def checked(self, rows):
        check(self, rows)
        one_waits.set()
        both.wait(timeout=120)

    monkeypatch.setattr(OutputTable, "_refuse_other_columns", checked)
    with ThreadPoolExecutor(2) as pool:
        ended = [pool.submit(again, spark, grown)]
        # Two runs that begin at once may also meet at the file that says what a run judges, and one is told there.
        assert one_waits.wait(timeout=120)
        ended.append(pool.submit(again, spark, grown))
    failed = [each.exception() for each in ended if each.exception()]
    assert [type(each) for each in failed] == [StateIncompatible], failed
    assert "another job has committed run 3" in str(failed[0])
    assert sorted(verdicts_of(spark, grown[1])) == [(0, offset) for offset in range(6)]


def test_a_killed_run_judges_what_it_began_with_and_by_its_clock(spark, grown, monkeypatch):
    bronze, silver = grown
    killed(spark, bronze, silver, topology(), "commit", monkeypatch, after=False)
    write(bronze / "3.parquet", [(b'{"id":9}', 9, 0, 6)])
    said = []
    source = NewFiles(spark, [str(bronze)], "parquet")
    finished = incremental(source, topology(), str(silver), now_ms=5, say=said.append)
    assert (finished.run, finished.new_rows, finished.now_ms) == (3, 2, NOW_MS)
    assert "(--now) is ignored: run 3 began with 20" in "".join(said)
    assert again(spark, grown).new_rows == 1


def test_an_intent_whose_input_is_gone_is_replaced(spark, grown, monkeypatch):
    bronze, silver = grown
    killed(spark, bronze, silver, topology(), "keep_state", monkeypatch, after=False)
    write(bronze / "2.parquet", LINES[4:5])
    assert again(spark, grown).new_rows == 1
    write(bronze / "3.parquet", [(b'{"id":9}', 9, 0, 6)])
    killed(spark, bronze, silver, topology(), "keep_state", monkeypatch, after=False)
    shutil.rmtree(bronze)
    assert not again(spark, grown).fresh


def test_directories_of_files_may_be_nested_and_their_columns_are_text(spark, tmp_path):
    """Spark would skip nested directories, and infer another type from the directories of each run."""
    bronze, silver = tmp_path / "bronze", tmp_path / "silver"

    def add(directory, lines):
        (bronze / directory).mkdir(parents=True)
        write(bronze / directory / "a.parquet", lines)
        return append(spark, bronze, silver, topology(), FILES_NOW_MS)

    assert add("2024/01/x=__HIVE_DEFAULT_PARTITION__", LINES[:2]).new_rows == 2
    (bronze / "2024/02/x=3000000000").mkdir(parents=True)
    write(bronze / "2024/02/x=3000000000" / "b.parquet", LINES[2:4])
    assert add("2024/02/x=007", LINES[4:]).new_rows == 4
    found = spark.read.format("delta").load(str(silver))
    assert sorted((row.offset, row.x) for row in found.collect()) == [
        *((offset, None) for offset in (0, 1)),
        *((offset, "3000000000") for offset in (2, 3)),
        *((offset, "007") for offset in (4, 5)),
    ]
    (bronze / "x=7").mkdir()
    write(bronze / "x=7" / "c.parquet", LINES[:1])
    with pytest.raises(StateIncompatible, match=r"contain different columns.*d/a\.parquet, .*x=7/c\.parquet\."):
        add("d", LINES[:1])
    # What earlier releases have read without the option has types that Spark infers.
    older = NewFiles(spark, [str(bronze)], "parquet")
    shutil.rmtree(bronze / "d")
    shutil.rmtree(bronze / "2024")
    pinned = older.pin({"files": {}})
    assert pinned is not None
    assert dict(older.open(pinned).records.dtypes)["x"] == "int"
    (tmp_path / "lines" / "x=7").mkdir(parents=True)
    (tmp_path / "lines" / "x=7" / "a.json").write_bytes(b'{"id":1}')
    lines = NewFiles(spark, [str(tmp_path / "lines")], "json")
    pinned = lines.pin({})
    assert pinned is not None
    assert dict(lines.open(pinned).records.dtypes)["x"] == "string"


def test_directories_named_like_the_column_of_the_run_are_refused(spark, tmp_path):
    (tmp_path / "bronze").mkdir()
    write(tmp_path / "bronze" / "run=7" / "a.parquet", LINES)
    with pytest.raises(TopologyError, match="column run: is a column that dedup adds"):
        append(spark, tmp_path / "bronze", tmp_path / "silver", topology(), FILES_NOW_MS)


def test_a_file_that_changes_while_it_is_judged_is_refused(spark, grown, monkeypatch):
    bronze, _ = grown
    check = NewFiles.refuse_changed

    def changed(self, pinned):
        write(bronze / "2.parquet", LINES[4:5])
        check(self, pinned)

    monkeypatch.setattr(NewFiles, "refuse_changed", changed)
    with pytest.raises(StateIncompatible, match=r"2\.parquet: deleted or changed while a run was reading it"):
        again(spark, grown)


def test_coordinates_of_a_topology_that_repartitions_are_refused(spark, tmp_path):
    write(tmp_path / "bronze" / "0.parquet", LINES)
    with pytest.raises(StateIncompatible, match=r"judges several source partitions in one log.*spark backfill"):
        append(spark, tmp_path / "bronze", tmp_path / "silver", topology(source={"topics": ["orders"]}))


def test_a_store_in_which_two_drivers_could_commit_one_version_is_named():
    assert "one driver at a time" in (store_warning("s3a://lake/silver", None) or "")
    assert store_warning("s3a://lake/silver", "io.delta.storage.S3DynamoDBLogStore") is None
    assert store_warning("file:/lake/silver", None) is None


def test_a_directory_of_others_is_refused(spark, tmp_path):
    write(tmp_path / "bronze" / "0.parquet", LINES)
    with pytest.raises(StateIncompatible, match=r"is not empty and not a Delta table: it holds 0\.parquet"):
        append(spark, tmp_path / "bronze", tmp_path / "bronze", topology())


def bronze_rows(spark, ids, seconds, *, id_type="bigint", more=""):
    """Return events as a data engineer has them: columns."""
    rows = [(number, BASE_MS + second * 1000) for number, second in zip(ids, seconds, strict=True)]
    frame = spark.createDataFrame(rows, "id bigint, placed_ms bigint")
    extra = [f"'{more}' AS {more}"] if more else []
    return frame.selectExpr(
        f"CAST(id AS {id_type}) AS id", "placed_ms", "concat('1', placed_ms % 2, ':00') AS at", *extra
    )


def of_columns():
    return topology(event_time={"field": "placed_ms", "unit": "ms"})


def test_a_delta_table_is_read_by_what_was_appended(spark, tmp_path):
    bronze, silver = str(tmp_path / "bronze [1] table"), str(tmp_path / "silver")

    def grow(ids, seconds, **more):
        writer = bronze_rows(spark, ids, seconds, **more).write.format("delta").mode("append").partitionBy("at")
        writer.option("mergeSchema", "true").save(bronze)

    def judge(path=bronze):
        source = NewVersions(spark, path, rows_are_events=True)
        return incremental(source, of_columns(), silver, now_ms=NOW_MS, say=quiet)

    grow([1, 2], [0, 1])
    grow([3], [2])
    assert judge().verdicts == {"unique": 3}
    grow([1, 4], [3, 4])
    spark.sql(f"OPTIMIZE delta.`{bronze}`")
    grow([5, 2], [5, 5], more="customer")
    assert judge().verdicts == {"duplicate": 2, "unique": 2}
    assert not judge().fresh
    spark.sql(f"OPTIMIZE delta.`{bronze}`")
    assert not judge().fresh
    (tmp_path / "link").symlink_to(bronze)
    with pytest.raises(
        StateIncompatible, match=r"/link is the table that earlier runs read by the path .*/bronze \[1\]"
    ):
        judge(str(tmp_path / "link"))  # Was: judged again, and each row was a duplicate.
    spark.sql(f"DELETE FROM delta.`{bronze}` WHERE id = 5")
    with pytest.raises(StateIncompatible, match=r"version \d \(DELETE\) changed or deleted rows"):
        judge()
    read = [json.loads(row.value) for row in spark.read.format("delta").load(silver).collect()]
    assert sorted(each["id"] for each in read) == [1, 1, 2, 2, 3, 4, 5]
    assert sorted(each["id"] for each in read if each.get("customer")) == [2, 5]
    assert {each["at"] for each in read} == {"10:00"}


def test_a_first_run_on_a_delta_table_that_lacks_a_file_is_refused_in_a_sentence(spark, tmp_path):
    bronze = tmp_path / "bronze"
    bronze_rows(spark, [1, 2], [0, 1]).write.format("delta").save(str(bronze))
    (file, *_) = bronze.glob("*.parquet")
    file.unlink()
    source = NewVersions(spark, str(bronze), rows_are_events=True)
    with pytest.raises(
        SettingsError, match=rf"{file.name}: was deleted, but is listed in the input. Nothing was judged"
    ):
        incremental(source, of_columns(), str(tmp_path / "silver"), now_ms=NOW_MS, say=quiet)


def test_times_that_partition_a_delta_table_are_those_of_its_log(spark, tmp_path):
    """Paths contain times in the time zone of the session that wrote them."""
    bronze, silver = str(tmp_path / "bronze [1]"), str(tmp_path / "silver")
    zones = spark._jvm.java.util.TimeZone
    utc = zones.getDefault()
    columns = "id BIGINT, placed_ms BIGINT, hour TIMESTAMP, shop STRING, day DATE"
    spark.sql(f"CREATE TABLE delta.`{bronze}` ({columns}) USING delta PARTITIONED BY (hour, shop, day)")
    made = topology(
        event_time={"field": "placed_ms", "unit": "ms"},
        tracking_id={"parts": [{"field": "shop"}, {"field": "hour"}]},
        guard_period="1h",
    )
    for number, verdict in enumerate(("unique", "duplicate")):
        rows = f"SELECT {number}L, {BASE_MS + number}L, timestamp'2024-01-01T05:00:00Z', 'a/b c', date'2024-01-01'"
        spark.conf.set("spark.sql.session.timeZone", "America/New_York")
        zones.setDefault(zones.getTimeZone("America/New_York"))
        try:
            spark.sql(f"INSERT INTO delta.`{bronze}` {rows}")
        finally:
            spark.conf.set("spark.sql.session.timeZone", "UTC")
            zones.setDefault(utc)
        source = NewVersions(spark, bronze, rows_are_events=True)
        assert incremental(source, made, silver, now_ms=NOW_MS, say=quiet).verdicts == {verdict: 1}
    found = [json.loads(row.value) for row in spark.read.format("delta").load(silver).collect()]
    assert sorted((each["id"], each["hour"], each["shop"], each["day"]) for each in found) == [
        (number, "2024-01-01T05:00:00.000Z", "a/b c", "2024-01-01") for number in range(2)
    ]


def test_a_first_run_whose_version_of_a_delta_table_was_vacuumed_begins_anew(spark, tmp_path, monkeypatch):
    bronze, silver = str(tmp_path / "bronze"), str(tmp_path / "silver")
    source = NewVersions(spark, bronze, rows_are_events=True)
    spark.sql(f"CREATE TABLE delta.`{bronze}` (id BIGINT, placed_ms BIGINT, at STRING) USING delta")
    for number in range(2):
        bronze_rows(spark, [number], [number]).write.format("delta").mode("append").save(bronze)
    with monkeypatch.context() as patched:
        patched.setattr(OutputTable, "keep_state", lambda *_: (_ for _ in ()).throw(KilledOnPurpose()))
        with pytest.raises(KilledOnPurpose):
            incremental(source, of_columns(), silver, now_ms=NOW_MS, say=quiet)
    pinned = source.pin({})
    assert pinned is not None
    assert source.has(pinned)
    spark.sql(f"OPTIMIZE delta.`{bronze}`")
    spark.conf.set("spark.databricks.delta.retentionDurationCheck.enabled", "false")
    spark.sql(f"VACUUM delta.`{bronze}` RETAIN 0 HOURS")
    spark.conf.unset("spark.databricks.delta.retentionDurationCheck.enabled")
    assert incremental(source, of_columns(), silver, now_ms=NOW_MS, say=quiet).verdicts == {"unique": 2}
    spark.sql(f"ALTER TABLE delta.`{bronze}` SET TBLPROPERTIES ('delta.columnMapping.mode' = 'name')")
    with pytest.raises(StateIncompatible, match="maps column names"):
        source.pin({})


def test_a_dataframe_is_one_run_which_may_be_repeated_and_an_id_keeps_its_type(spark, tmp_path):
    silver = str(tmp_path / "silver")

    def judge(rows):
        return incremental(NewRows(rows, rows_are_events=True), of_columns(), silver, now_ms=NOW_MS, say=quiet)

    first, second = bronze_rows(spark, [1, 2], [0, 1]), bronze_rows(spark, [2, 3], [2, 3], more="customer")
    assert judge(first).verdicts == {"unique": 2}
    assert not judge(first).fresh
    # An integer of another size is the same ID.
    assert judge(second.withColumn("id", second["id"].cast("int"))).verdicts == {"duplicate": 1, "unique": 1}
    with pytest.raises(StateIncompatible, match=r"column `id` of the DataFrame is string, but was int"):
        judge(bronze_rows(spark, [2], [2], id_type="string"))
    assert not judge(second.limit(0)).fresh


class Place(UserDefinedType):
    """What Spark stores as an array of numbers."""

    @classmethod
    def sqlType(cls):  # noqa: N802  # the name that PySpark calls
        return ArrayType(DoubleType())


def test_an_id_in_a_map_or_in_a_type_of_the_user_keeps_its_type(spark, tmp_path):
    """Was: 1 and "1" were different IDs, so what earlier runs had judged became unique."""
    silver = str(tmp_path / "silver")
    made = topology(tracking_id={"field": "attrs.id"}, event_time={"field": "placed_ms", "unit": "ms"})

    def judge(kind):
        rows = bronze_rows(spark, [1], [0]).selectExpr(f"map('id', CAST(id AS {kind})) AS attrs", "placed_ms")
        return incremental(NewRows(rows, rows_are_events=True), made, silver, now_ms=NOW_MS, say=quiet)

    assert judge("string").verdicts == {"unique": 1}
    with pytest.raises(
        StateIncompatible, match=r"column `attrs\.id` of the DataFrame is bigint, but was string in ear"
    ):
        judge("bigint")
    places = StructType([StructField("at", Place())])
    assert id_types(places, topology(tracking_id={"field": "at[0]"})) == {"at.0": "double"}


DRIVER = """
import os, signal, sys
from tests.spark.driver import _session_stays
from dedup.cli.main import main
from dedup.spark.incremental import OutputTable

command = ["spark", "incremental", "shop.yaml", "--input", "bronze", "--out", "silver", "--json"]
command += ["--now", "2027-01-15T00:00:00Z", "--master", "local[1]", "--quiet"]
sys.argv[1:] = [*command, *sys.argv[1:]]
with _session_stays():
    try:
        main()
    except SystemExit as ended:
        assert not ended.code
os.rename("next/1.parquet", "bronze/1.parquet")
OutputTable.commit = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
main()
"""


def test_a_driver_that_is_killed_before_its_commit_leaves_a_run_to_be_finished(spark, tmp_path):
    """The command as users give it, in a process of its own, with relative paths."""
    write(tmp_path / "bronze" / "0.parquet", LINES[:3])
    write(tmp_path / "next" / "1.parquet", LINES[3:])
    made = {"dedup": 1, "name": "shop", "source": {"topics": ["orders"], "partitioned_by": "tracking_id"}}
    made |= {"tracking_id": {"field": "id"}, "guard_period": "10s", "grace": "5s", "output": {"topic": "orders.unique"}}
    (tmp_path / "shop.yaml").write_text(json.dumps(made))
    ended = subprocess.run(
        [sys.executable, "-c", DRIVER, *QUIET, *INTERPRETED],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    report = json.loads(ended.stdout)
    assert (report["run"], report["new_rows"], report["verdicts"]) == (1, 3, {"duplicate": 1, "unique": 2})
    assert sorted(verdicts_of(spark, tmp_path / "silver")) == [(0, offset) for offset in range(3)]
    finished = append(spark, tmp_path / "bronze", tmp_path / "silver", topology(), FILES_NOW_MS)
    assert (finished.run, finished.now_ms, finished.verdicts) == (2, 1_799_971_200_000, {"duplicate": 2, "unique": 1})
    assert sorted(verdicts_of(spark, tmp_path / "silver")) == [(0, offset) for offset in range(6)]
