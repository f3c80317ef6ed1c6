"""A broker goes away under a stream on Spark: the stream outlives it, and hardly a line is logged."""

from __future__ import annotations

import pytest

pytest.importorskip("pyspark", reason="PySpark is not installed: pip install dedup-streams[spark]")

from tests.chaos.conftest import Rough
from tests.integration.fleet import Job, until
from tests.integration.watch import Watch
from tests.integration.workload import endless
from tests.spark.streaming import start_driver

pytestmark = [pytest.mark.broker, pytest.mark.timeout(900)]

START_S = 240
TRACE = "\n\tat "
"""How a line of a Java stack trace begins."""


@pytest.mark.parametrize("away_min", [1, pytest.param(5, marks=pytest.mark.long)])
def test_a_stream_outlives_a_broker_that_is_away_and_logs_a_line_a_minute(
    job: Job, rough: Rough, away_min: int
) -> None:
    """Was: 2,300 lines in 100 s, the end of the stream after three minutes, and 1,000 lines when it was stopped."""
    with Watch(job):
        with job.stream(endless(140), per_s=500):
            driver = start_driver(job)
            # By then it has logged what it warns of in these records.
            until(lambda: "micro-batch 1:" in driver.log, lambda: f"a second batch: {driver.log}", within_s=START_S)
            before = driver.log
            rough.kafka.kill()
            long = f"a broker has not answered for {6 * away_min}"
            until(lambda: long in driver.log, lambda: f"the outage lasts: {driver.log}", within_s=60 * away_min + 60)
            away = driver.log[len(before) :]
            rough.kafka.restart()
            job.until_progress(1_000)
        job.until_done()
        assert driver.stop() == 0, driver.log
    lines = [line for line in away.splitlines() if " INFO " not in line]
    assert len(lines) <= away_min + 3, away
    assert "Traceback" not in driver.log, driver.log
    assert TRACE not in driver.log, driver.log
    job.judge()
