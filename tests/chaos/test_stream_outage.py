"""A broker goes away under a stream on Spark: the stream outlives it, and hardly a line is logged."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("pyspark", reason="PySpark is not installed: pip install dedup-streams[spark]")

from tests.chaos.conftest import Rough
from tests.integration.conftest import MakeJob
from tests.integration.fleet import Job, Worker, until
from tests.integration.watch import Watch
from tests.integration.workload import endless
from tests.spark.streaming import start_driver

pytestmark = [pytest.mark.broker, pytest.mark.timeout(900)]

START_S = 240


def judging(job: Job) -> Worker:
    """Return a driver that has ended its first micro-batch, and has logged what it warns of in these records."""
    driver = start_driver(job)
    until(lambda: "micro-batch 1:" in driver.log, lambda: f"a second batch: {driver.log}", within_s=START_S)
    return driver


def quiet(driver: Worker) -> bool:
    """Tell whether the log is free of stack traces, Python's and Java's."""
    return "Traceback" not in driver.log and "\n\tat " not in driver.log


def away_s(driver: Worker) -> int:
    """Return for how long the broker has been away by the last line that says it."""
    return max(map(int, re.findall(r"a broker has not answered for (\d+) s", driver.log)), default=0)


@pytest.mark.parametrize("away_min", [1, pytest.param(5, marks=pytest.mark.long)])
def test_a_stream_outlives_a_broker_that_is_away_and_logs_a_line_a_minute(
    job: Job, rough: Rough, away_min: int
) -> None:
    """Was: 2,300 lines in 100 s, the end of the stream after three minutes, and 1,000 lines when it was stopped."""
    with Watch(job):
        with job.stream(endless(140), per_s=500, delivered_within_s=90 * away_min + 60):
            driver = judging(job)
            before = driver.log
            rough.kafka.kill()
            until(lambda: away_s(driver) >= 60 * away_min, lambda: f"an outage: {driver.log}", within_s=80 * away_min)
            away = driver.log[len(before) :]
            rough.kafka.restart()
            job.until_progress(1_000)
        job.until_done()
        assert driver.stop() == 0, driver.log
    lines = [line for line in away.splitlines() if " INFO " not in line]
    assert len(lines) <= away_min + 3, away
    assert quiet(driver), driver.log
    job.judge()


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "repartitioned"])
def test_a_stream_stops_while_the_broker_is_away(make_job: MakeJob, rough: Rough, direct: bool) -> None:
    """Was: what marks idle partitions waited for the broker, and the stream with it."""
    job = make_job(document={} if direct else {"source": {"topics": ["away"]}, "idle_after": "1s"})
    with Watch(job):
        with job.stream(endless(141), per_s=500):
            driver = judging(job)
            rough.kafka.kill()
            driver.until_logged("a broker does not answer")
            assert driver.stop() == 0, driver.log
            assert quiet(driver), driver.log
            rough.kafka.restart()
        start_driver(job, arguments=["--exit-when-done"], name="next")
        job.until_done()
    job.judge()
