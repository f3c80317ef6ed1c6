"""The programs of docs/library.md on a real broker: `dedup.run`, whose bytes are the driver's, and a Faust app."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

import dedup
from dedup.store.changelog import TASK_RECORD_KEY
from tests.brokers import Admin, RunningKafka
from tests.integration.conftest import MakeJob
from tests.integration.fleet import Job
from tests.integration.workload import BASE_MS, Event
from tests.waiting import LoggedProcess

pytestmark = pytest.mark.broker
ROOT = Path(__file__).parents[2]
APPEND_TIME = ("late", "dead")
Written = tuple[int, int, bytes | None, bytes | None, tuple[tuple[str, bytes | None], ...]]
"""Partition, timestamp, key, value, and headers of a record."""


def ugly(partitions: int, count: int = 600) -> list[Event]:
    """Return records of every kind: repeats near and far, other payloads, late ones, odd values, keys, and headers."""
    dice, made = random.Random(11), []
    odd = [None, b"", b"no json", b'{"id":', b"\xff\xfe", b'{"n":1}', b'{"id":null}', b'{"id":{}}', b'{"id":1,"id":2}']
    for number in range(count):
        chosen = dice.randrange(max(1, number // 3), number // 2 + 2)
        ids = (f"order-{chosen}", chosen, f" Order-{chosen}", "x" * (chosen % 90))
        value = json.dumps({"id": ids[chosen % 4], "n": dice.randrange(2)}).encode()
        if dice.random() < 0.05:
            value = dice.choice(odd)
        elif dice.random() < 0.01:  # several of them are more than a record batch
            value = json.dumps({"id": chosen, "pad": dice.randbytes(150_000).hex()}).encode()
        time_ms = BASE_MS + number * 50 - dice.choice([0, 0, 0, 1_000, 12_000])
        headers = dice.choice([(), (), (("h", b"1"), ("h", None), ("", b"")), (("dedup-source", b"mine"),)])
        key = dice.choice([None, b"", b"k", b"\x00\xff"])
        made.append(Event(chosen % partitions, value, time_ms, key, headers))
    return made


def by_worker(job: Job, topic: str) -> list[Written]:
    return [
        (each.partition(), each.timestamp()[1], each.key(), each.value(), tuple(each.headers() or ()))  # type: ignore[misc,arg-type]
        for each in job.read(topic)
    ]


def by_driver(driver: dedup.TopologyTestDriver, topic: str) -> list[Written]:
    return [(each.partition, each.timestamp_ms, each.key, each.value, each.headers) for each in driver.read(topic)]


def by_partition(rows: list[Written], *, timed: bool) -> dict[int, list[Written]]:
    found: defaultdict[int, list[Written]] = defaultdict(list)
    for partition, time_ms, *rest in rows:
        found[partition].append((partition, time_ms if timed else 0, *rest))  # type: ignore[arg-type]
    return found


def sightings(rows: list[Written]) -> dict[bytes | None, bytes | None]:
    return {key: value for *_, key, value, _ in rows if key != TASK_RECORD_KEY}


@pytest.mark.parametrize(
    ("hops", "conflicts"),
    [("direct", {"conflicts": "library-other"}), ("repartitioned", {"on_conflict": "forward", "extend": True})],
)
def test_a_worker_and_the_driver_write_the_same_bytes(
    make_job: MakeJob, topic_names: Any, hops: str, conflicts: dict[str, Any]
) -> None:
    name = topic_names("library")
    source: dict[str, Any] = {"topics": [f"{name}-in"]}
    job = make_job(
        name=name,
        partitions=2 if hops == "direct" else 1,  # several feeds reach a repartition topic in any order
        document={
            "source": source | ({"partitioned_by": "tracking_id"} if hops == "direct" else {}),
            "guard_period": "5s",
            "output": {"topic": f"{name}-out", "headers": True},
            "duplicates": f"{name}-twice",
            "late": f"{name}-late",
            "dead_letter": f"{name}-dead",
            **conflicts,
        },
    )
    job.send(ugly(job.partitions))
    shutil.copy(job.topology_file, job.directory / "orders.yaml")
    done = subprocess.run(
        [sys.executable, "-c", example()],
        cwd=job.directory,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "everything that existed at the start is done" in done.stderr) == (0, True), done.stderr
    with dedup.TopologyTestDriver(job.topology, partitions=job.partitions) as driver:
        for event in job.sent:
            driver.feed(
                event.value,
                key=event.key,
                headers=event.headers,
                timestamp=event.timestamp_ms,
                partition=event.partition,
            )
        for topic, _ in job.topology.outlets:
            timed = not topic.endswith(APPEND_TIME)
            expected = by_partition(by_driver(driver, topic), timed=timed)
            assert sum(map(len, expected.values())) > 5, topic
            assert by_partition(by_worker(job, topic), timed=timed) == expected, topic
        changelog = job.topology.changelog_topic
        assert sightings(by_worker(job, changelog)) == sightings(by_driver(driver, changelog))


def test_run_raises_what_stops_the_command(make_job: MakeJob) -> None:
    job = make_job()
    job.admin.delete_topic(job.topology.source.topics[0])
    shutil.copy(job.topology_file, job.directory / "orders.yaml")
    done = subprocess.run(
        [sys.executable, "-c", example()],
        cwd=job.directory,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == dedup.errors.StateIncompatible.exit_code, done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"source topic {job.topology.source.topics[0]!r} does not exist.")


@pytest.mark.parametrize("level", ["read_committed", "read_uncommitted"])
def test_the_faust_app_reads_no_record_of_an_aborted_transaction(
    kafka: RunningKafka, admin: Admin, topic_names: Any, tmp_path: Path, level: str
) -> None:
    topic, guarantee = admin.create_topic(topic_names("shipping")), 'processing_guarantee="exactly_once"'
    program = example("faust.App(").replace("localhost:9092", kafka.bootstrap).replace("orders.unique", topic)
    program = program.replace('"shipping"', f'"{topic}-app"')
    assert guarantee in program
    if level == "read_uncommitted":  # as it is without the setting
        program = program.replace(guarantee, 'processing_guarantee="at_least_once"')
    (tmp_path / "shipping.py").write_text(program, encoding="utf-8")
    writer = Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": topic})
    writer.init_transactions(30)
    for orders, end in (
        (("A-1", "A-2"), writer.commit_transaction),
        (("B-1", "B-2"), writer.abort_transaction),
        (("A-3",), writer.commit_transaction),
    ):
        writer.begin_transaction()
        for order in orders:
            writer.produce(topic, json.dumps({"order_id": order}))
        assert writer.flush(30) == 0  # the broker has the records even if the transaction is aborted
        end(30)
    app = LoggedProcess(
        ["env", f"--chdir={tmp_path}", sys.executable, "shipping.py", "worker", "--without-web"], tmp_path / "app.log"
    )
    try:
        app.until_logged("ship A-3")
        assert app.stop() == 0, app.log
    finally:
        app.kill()
    aborted = [] if level == "read_committed" else ["B-1", "B-2"]
    assert re.findall(r"ship (\S+)", app.log) == ["A-1", "A-2", *aborted, "A-3"]


def example(names: str = "dedup.run(") -> str:
    """Return the program of docs/library.md that contains a text."""
    page = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
    (found,) = [text for text in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL) if names in text]
    return str(found)
