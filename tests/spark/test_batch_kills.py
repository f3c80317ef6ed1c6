"""A backfill whose driver is killed half-way: nothing is published, and the same command again gives the same files."""

from __future__ import annotations

import pytest
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark page uses

from dedup.spark.backfill import backfill
from dedup.spark.kafka_source import read_kafka
from tests.integration.fleet import Job, until
from tests.integration.workload import workload
from tests.spark.streaming import start_spark

pytestmark = [pytest.mark.broker, pytest.mark.timeout(600)]
START_S = 240
EVENTS = 6_000


@pytest.fixture
def job(kafka, admin, tmp_path, topic_names):
    made = Job(kafka, admin, tmp_path / "job", topic_names("job"))
    yield made
    made.end()


def rows_of(spark, path):
    found = spark.read.parquet(path)
    columns = [
        "topic",
        "partition",
        "offset",
        *(name for name in found.columns if name.startswith(("first", "stream"))),
    ]
    return sorted(map(tuple, found.select(*columns, F.hex("value"), "verdict", "reason").collect()), key=repr)


def test_a_killed_driver_leaves_nothing_published_and_is_made_good_by_a_second_run(spark, job, tmp_path):
    job.send(workload(21, EVENTS))
    out = tmp_path / "verdicts"
    driver = start_spark(job, ("backfill", "--out", str(out), "--master", "local[1]"), name="killed")
    # It appears before the first record is judged, and goes by a rename after the last.
    until(lambda: list(out.glob("_attempt-*")) or not driver.running, "half a backfill", within_s=START_S)
    assert driver.running, driver.log
    driver.kill()
    assert list(out.glob("_attempt-*")) != []
    assert list(out.glob("run=*")) == []
    history = read_kafka(spark, job.topology, job.settings)
    again = backfill(history, job.topology, str(out))
    undisturbed = backfill(history, job.topology, str(tmp_path / "elsewhere"), now_ms=again.now_ms)
    assert sum(again.verdicts.values()) == EVENTS
    assert again.verdicts == undisturbed.verdicts
    assert rows_of(spark, again.path) == rows_of(spark, undisturbed.path)
    assert [path.name for path in out.iterdir()] == ["run=backfill"]
