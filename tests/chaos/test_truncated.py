"""A source log that was truncated and filled again, as after an unclean leader election (KIP-320)."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from dedup.embedded.kafka_node import EmbeddedKafka
from tests import brokers
from tests.brokers import Admin, RunningKafka
from tests.integration.conftest import MakeJob
from tests.integration.fleet import Job, until
from tests.integration.test_admin import distinct, output_ids

pytestmark = [pytest.mark.broker, pytest.mark.timeout(400)]
INCOMPATIBLE = 3


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedKafka]:
    """Return a broker of the test's own, whose logs may be cut."""
    with EmbeddedKafka(data_dir=tmp_path / "broker") as running:
        yield running


@pytest.fixture
def own_job(make_job: MakeJob, broker: EmbeddedKafka) -> Job:
    kafka = RunningKafka(broker.bootstrap, broker)
    admin: Admin = brokers.admin_of(broker.bootstrap)
    return make_job(kafka=kafka, admin=admin, partitions=1)


def cut_last_batch(broker: EmbeddedKafka, directory: Path, topic: str) -> None:
    """The broker has lost the last batch of a partition, as with a page cache that never reached the disk."""
    broker.kill()
    (log,) = directory.rglob(f"{topic}-0/*.log")
    raw = log.read_bytes()
    at = last = 0
    while at < len(raw):
        last, at = at, at + 12 + struct.unpack_from(">i", raw, at + 8)[0]
    log.write_bytes(raw[:last])
    for checkpoint in directory.rglob("*recovery-point-offset-checkpoint"):
        checkpoint.unlink()
    broker.start()


@pytest.mark.parametrize("running", [True, False], ids=["running", "stopped"])
def test_f84_a_truncated_and_refilled_source_is_refused(
    own_job: Job, broker: EmbeddedKafka, tmp_path: Path, running: bool
) -> None:
    """Was: the records that took the place of lost ones were skipped, with exit code 0."""
    job = own_job
    topic = job.topology.source.topics[0]
    for first in range(0, 60, 20):
        job.send(distinct(first, first + 20)[::2])
    worker = job.start()
    job.until_done()
    if not running:
        assert worker.stop() == 0, worker.log
    cut_last_batch(broker, tmp_path / "broker", topic)
    until(lambda: job.admin.end_offsets(topic) == {0: 20}, "the log has lost its last batch")
    job.send(distinct(100, 200)[::2])
    worker = worker if running else job.start()
    assert worker.wait() == INCOMPATIBLE, worker.log
    assert "holds other records from offset 20 on" in worker.log
    assert "Traceback" not in worker.log
    assert output_ids(job) == Counter(f"x-{number}" for number in range(0, 60, 2))
