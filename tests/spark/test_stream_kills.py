"""Drivers are killed and attempts fail while a committed reader looks on: nothing lost, nothing twice, in the topic and in a table."""

from __future__ import annotations

import random

import pytest

from tests.integration.fleet import Job, until
from tests.integration.watch import Watch
from tests.integration.workload import workload
from tests.spark.streaming import NEEDS_ICEBERG, SMALL_BATCHES, SinkTable, accidents_of, start_driver

START_S = 240
END_S = 900
"""A driver begins with a JVM, a session and Python workers."""
SMALL_STEPS = (*SMALL_BATCHES, "--most-offsets", "10000", "--commit-rows", "1000")


@pytest.fixture
def job(kafka, admin, tmp_path, topic_names):
    made = Job(kafka, admin, tmp_path / "job", topic_names("job"))
    yield made
    made.end()


def committed(job):
    return sum(job.committed().values())


def until_committed(job, goal, driver):
    until(lambda: committed(job) >= goal or not driver.running, "progress", within_s=START_S)
    assert driver.running, job.logs()


def survives(job, spark, *, events, kills, failures, steps=SMALL_STEPS, end_s=END_S, iceberg=False):
    job.send(workload(4, events))
    dice = random.Random(8)
    table = SinkTable(spark, job, iceberg=iceberg)
    run = ("--master", "local[2,4]", "--every", "1s", *table.options, *steps)
    with Watch(job) as watch:
        for number in range(kills):
            driver = start_driver(job, f"failures={failures}", arguments=run, name=f"driver-{number}")
            goal = committed(job) + dice.randrange(1_000, events // (kills + 2))
            until_committed(job, goal, driver)
            driver.kill()
        last = start_driver(job, f"failures={failures}", arguments=(*run, "--exit-when-done"), name="last")
        assert last.wait(end_s) == 0, job.logs()
    assert accidents_of(job) == failures
    assert watch.duplicated == []
    report = job.judge()
    assert report.read == events
    assert table.rows() == sorted((m.partition(), m.offset(), m.value()) for m in job.read(job.output))


@pytest.mark.timeout(600)
def test_a_killed_driver_and_failing_attempts(job, spark):
    survives(job, spark, events=40_000, kills=1, failures=6)


@pytest.mark.long
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("iceberg", [False, pytest.param(True, marks=NEEDS_ICEBERG)], ids=["delta", "iceberg"])
def test_ten_killed_drivers_and_twenty_failing_attempts(job, spark, iceberg):
    # Arrow batches so small that each attempt sees enough of them for an accident.
    arrow = ("--conf", "spark.sql.execution.arrow.maxRecordsPerBatch=2000")
    steps = (*arrow, "--most-offsets", "50000", "--commit-rows", "5000")
    survives(job, spark, events=1_000_000, kills=10, failures=20, steps=steps, end_s=1_800, iceberg=iceberg)
