"""What the commands that end say at their end, to people and as JSON."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from dedup.cli.main import create_app
from tests.spark.test_batch_files import LOG, write

TOPOLOGY = """
dedup: 1
name: shop
source: {topics: [orders], partitioned_by: tracking_id}
tracking_id: {field: id}
guard_period: 10s
grace: 5s
output: {topic: orders.unique}
"""


@pytest.fixture
def spark_command(spark, tmp_path, monkeypatch):
    """Runs a command of `dedup spark` on a topology in the run's session, which must not end with it."""
    monkeypatch.setattr(type(spark), "stop", lambda _self: None)
    (tmp_path / "shop.yaml").write_text(TOPOLOGY, encoding="utf-8")
    write(tmp_path / "in" / "log.parquet", LOG)

    def run(command: str, *arguments: str) -> str:
        given = ["spark", command, str(tmp_path / "shop.yaml"), *arguments, "--quiet"]
        ran = CliRunner().invoke(create_app(), given)
        assert ran.exit_code == 0, (ran.output, ran.exception)
        return ran.stdout

    return run


def text_of(option) -> str | None:
    return option.get() if option.isDefined() else None


def jobs_of(spark) -> set[tuple[str, str]]:
    """The groups and descriptions of jobs in Spark's UI."""
    jobs = spark.sparkContext._jsc.sc().statusStore().jobsList(None)
    found = map(jobs.apply, range(jobs.size()))
    return {(text_of(job.jobGroup()), text_of(job.description())) for job in found}


def test_a_backfill_and_an_upsert_say_what_they_did(spark, spark_command, tmp_path):
    arguments = ("--input", str(tmp_path / "in"), "--now", "2027-01-15T08:00:00Z", "--out", str(tmp_path / "out"))
    lines = spark_command("backfill", *arguments).splitlines()
    path = tmp_path / "out" / "run=backfill"
    files = list(path.rglob("*.parquet"))
    assert lines[:3] == [
        "judged 7: dead_letter 1  duplicate 1  late 1  unique 4",
        "dead_letter: 1 not_json",
        "late: 1 orders/0",
    ]
    assert lines[4].startswith(f"{len(files)} files in ")
    text = f"shop: judge {tmp_path / 'in'}, publish run backfill"
    assert {("dedup backfill shop", "shop: backfill"), ("dedup backfill shop", text)} <= jobs_of(spark)
    found = json.loads(spark_command("backfill", *arguments, "--json"))
    assert found["verdicts"] == {"dead_letter": 1, "duplicate": 1, "late": 1, "unique": 4}
    assert found["causes"] == {"dead_letter": {"not_json": 1}, "late": {"orders/0": 1}}
    assert (found["files"], found["fresh"]) == (len(files), False)
    assert 0 < found["seconds"] < 600

    inputs = [word for name in ("unique", "dead_letter") for word in ("--input", str(path / f"verdict={name}"))]
    table = (*inputs, "--delta", str(tmp_path / "table"), "--schema", "id LONG")
    first = json.loads(spark_command("upsert", *table, "--rejected", str(tmp_path / "rejected"), "--json"))
    # Records with the IDs 1, 7, and 8; the torn one has none.
    assert (first["changed"], first["rejected"]) == (3, {"not_json": 1})
    # Delta puts its own words around it.
    text = f"{tmp_path / 'table'}: merge the newest row of each tracking ID"
    assert any(group == "dedup upsert shop" and text in (about or "") for group, about in jobs_of(spark))
    again = spark_command("upsert", *table, "--rejected", str(tmp_path / "rejected")).splitlines()
    assert "up to date, 0 rows inserted or replaced in" in again[0]
    assert again[1].startswith("1 records cannot become rows (1 not_json): ")
