"""A standalone cluster from the PySpark wheel: a master and two workers on the loopback run what users submit."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pyspark
import pytest

from dedup.embedded.child_process import ChildProcess
from dedup.embedded.java import use_java_of_spark
from tests.integration.fleet import Job, until
from tests.integration.watch import Watch
from tests.integration.workload import workload
from tests.spark import notebook
from tests.spark.streaming import FAST_JAVA, NEEDS_ICEBERG, SinkTable, checkpoint_of, start_spark

SPARK_CLASS = Path(pyspark.__file__).parent / "bin" / "spark-class"
START_S = 240
EVENTS = 1_000_000
LOOPBACK = ("--conf", "spark.driver.host=127.0.0.1", "--conf", "spark.driver.bindAddress=127.0.0.1")
SMALL = (
    "--conf",
    f"spark.executor.extraJavaOptions={FAST_JAVA}",
    "--conf",
    "spark.executor.memory=600m",
    "--conf",
    "spark.executor.cores=1",
    "--conf",
    "spark.cores.max=2",
)


@dataclass(frozen=True)
class Cluster:
    address: str
    directory: Path

    def executors(self):
        """Return the process ids of its executors, which run in directories of its workers."""
        found = []
        for process in Path("/proc").iterdir():
            with suppress(OSError):
                here = (process / "cwd").readlink().is_relative_to(self.directory)
                if process.name.isdecimal() and here and b"ExecutorBackend" in (process / "cmdline").read_bytes():
                    found.append(int(process.name))
        return found


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment():
    environ = {"JAVA_HOME": os.environ["JAVA_HOME"], "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    environ |= {"SPARK_HOME": str(SPARK_CLASS.parents[1]), "PATH": os.environ["PATH"]}
    environ["SPARK_DAEMON_JAVA_OPTS"] = FAST_JAVA
    return ["env", *(f"{key}={value}" for key, value in environ.items())]


def started(directory, name, *arguments):
    command = [*environment(), str(SPARK_CLASS), *arguments]
    return ChildProcess(command, directory / f"{name}.log")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A master with two workers of one core each."""
    use_java_of_spark(os.environ)
    directory = tmp_path_factory.mktemp("cluster")
    port = free_port()
    address = f"spark://127.0.0.1:{port}"
    common = ("--host", "127.0.0.1", "--webui-port", "0")
    master = ("org.apache.spark.deploy.master.Master", "--port", str(port), *common)
    processes = [started(directory, "master", *master)]
    try:
        for name in ("worker-1", "worker-2"):
            worker = ("org.apache.spark.deploy.worker.Worker", "--cores", "1", "--memory", "1g", *common)
            work = directory / name
            processes.append(started(directory, name, *worker, "--work-dir", str(work), address))
        for name in ("worker-1", "worker-2"):
            log = directory / f"{name}.log"
            until(lambda log=log: "Successfully registered" in log.read_text(), f"{name} registers", within_s=START_S)
        yield Cluster(address, directory)
    finally:
        for process in processes:
            process.stop()


@pytest.fixture
def job(kafka, admin, tmp_path, topic_names):
    made = Job(kafka, admin, tmp_path / "job", topic_names("job"))
    yield made
    made.end()


@pytest.mark.timeout(600)
def test_a_stream_and_a_backfill_on_a_cluster(cluster, job):
    job.send(workload(13, 12_000))
    at = ("--master", cluster.address, *LOOPBACK, *SMALL)
    run = ("run", *checkpoint_of(job), *at, "--most-offsets", "2500", "--exit-when-done")
    # One application: of a second one, only JVMs would be new.
    both = start_spark(job, run, ("backfill", *at, "--out", str(job.directory / "verdicts")))
    assert both.wait(START_S) == 0, both.log
    # The stream says it, and after it the backfill.
    assert both.log.count("judged 12,000") == 2, both.log
    job.judge()
    unique = len(job.read(job.output))
    assert f"unique {unique:,}" in both.log.rpartition("judged 12,000")[2], both.log


@pytest.mark.long
@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("iceberg", [False, pytest.param(True, marks=NEEDS_ICEBERG)], ids=["delta", "iceberg"])
def test_an_executor_is_killed_while_a_stream_fills_a_table(cluster, job, spark, iceberg):
    job.send(workload(21, EVENTS))
    table = SinkTable(spark, job, iceberg=iceberg)
    at = ("--master", cluster.address, *LOOPBACK, *SMALL)
    steps = ("--most-offsets", "100000", "--commit-rows", "5000", "--every", "1s", "--exit-when-done")
    with Watch(job) as watch:
        driver = start_spark(job, ("run", *checkpoint_of(job), *at, *steps, *table.options))
        until(lambda: sum(job.committed().values()) > EVENTS // 4 or not driver.running, "work", within_s=START_S)
        killed, *others = cluster.executors()
        assert others
        os.kill(killed, signal.SIGKILL)
        assert driver.wait(900) == 0, driver.log
    assert watch.duplicated == []
    assert job.judge().read == EVENTS
    assert table.rows() == sorted((m.partition(), m.offset(), m.value()) for m in job.read(job.output))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_notebook_of_the_docs_by_spark_submit(cluster, tmp_path):
    notebook.write_files(tmp_path)
    submit = [
        str(SPARK_CLASS.with_name("spark-submit")),
        "--master",
        cluster.address,
        *LOOPBACK,
        *SMALL,
        notebook.__file__,
    ]
    done = subprocess.run(
        [*environment(), *submit], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=START_S
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == notebook.EXPECTED
