"""Streams as real drivers on a real broker: how tests start them, and what they are held against."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyspark
import pytest
from pyspark.sql import SparkSession

from dedup.spark.spark_jars import release_of
from tests.integration.fleet import Job, Worker
from tests.integration.workload import Event

CATALOG = "spark.sql.catalog.lake"
"""The catalog of the session's Iceberg tables."""
NEEDS_ICEBERG = pytest.mark.skipif(
    release_of(pyspark.__version__).iceberg is None, reason="there is no Iceberg for this Spark"
)
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
DRIVER = Path(__file__).with_name("driver.py")
SMALL_BATCHES = ("--conf", "spark.sql.execution.arrow.maxRecordsPerBatch=200")
FAST_JAVA = (
    "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m -XX:+UseSerialGC "
    "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote -XX:MetaspaceSize=256m"
)
"""For a process that lives for a test: what the optimizing compiler costs it never earns back here, and verifying the
bytes of Spark's released classes takes two of the fourteen CPU-s of a start. With one compiler, Java keeps only 48 MB
of compiled code; Spark has more, and throwing it away and compiling it again takes a tenth of a session."""
QUIET = (
    "--conf",
    "spark.ui.enabled=false",
    "--conf",
    "spark.ui.showConsoleProgress=false",
    "--conf",
    f"spark.driver.extraJavaOptions={FAST_JAVA}",
    "--conf",
    "spark.sql.shuffle.partitions=2",
    # As in the run's session.
    "--conf",
    "spark.databricks.delta.snapshotPartitions=2",
    "--conf",
    "spark.sql.sources.parallelPartitionDiscovery.parallelism=2",
)


INTERPRETED = (
    "--conf",
    "spark.sql.codegen.wholeStage=false",
    "--conf",
    "spark.sql.codegen.factoryMode=NO_CODEGEN",
    "--conf",
    "spark.sql.adaptive.enabled=false",
)
"""For a driver with wide plans and a handful of rows; the others' plans are compiled."""


def start_driver(job: Job, *accidents: str, arguments: Sequence[str] = (), name: str = "driver") -> Worker:
    """Start `dedup spark run` for a job in a process of its own; its checkpoint is the job's."""
    return start_spark(job, ("run", *checkpoint_of(job), *arguments), accidents=accidents, name=name)


def checkpoint_of(job: Job) -> tuple[str, str]:
    """Return the option that names the job's checkpoint."""
    return "--checkpoint", str(job.directory / "checkpoint")


def start_spark(job: Job, *commands: Sequence[str], accidents: Sequence[str] = (), name: str = "driver") -> Worker:
    """Start commands of `dedup spark` for a job's topology, one after the other, in one process and session.

    Each command is its name and what follows the topology.
    """
    tokens = job.directory / "accidents"
    tokens.mkdir(exist_ok=True)
    unset = [part for variable in os.environ if variable.startswith("DEDUP_") for part in ("-u", variable)]
    line = ["env", *unset, f"DRIVER_TOKENS={tokens}", sys.executable, str(DRIVER), *accidents]
    for command, *arguments in commands:
        line += ["--", command, str(job.topology_file), "--config", str(job.config_file), "--quiet", *QUIET, *arguments]
    driver = Worker(job, name, line, job.directory / f"{name}.log")
    job.workers.append(driver)
    return driver


class SinkTable:
    """The table that a stream fills beside its topic, in a place that the tests' session and a driver share."""

    def __init__(self, spark: SparkSession, job: Job, *, iceberg: bool) -> None:
        self._spark = spark
        if iceberg:
            self._name = f"lake.shop.`{job.name}`"
            lake = ((name, spark.conf.get(name)) for name in (CATALOG, f"{CATALOG}.type", f"{CATALOG}.warehouse"))
            self.options = ["--iceberg", self._name]
            self.options += [part for name, value in lake for part in ("--conf", f"{name}={value}")]
            spark.sql("CREATE NAMESPACE IF NOT EXISTS lake.shop")
        else:
            path = str(job.directory / "table")
            self._name = f"delta.`{path}`"
            self.options = ["--delta", path]

    def rows(self) -> list[tuple[int, int, bytes]]:
        """Return what the table holds, as (partition, offset, value), in order."""
        found = self._spark.table(self._name).select("partition", "offset", "value").collect()
        return sorted((partition, offset, bytes(value)) for partition, offset, value in found)


def accidents_of(job: Job) -> int:
    """Return how many planned accidents have happened."""
    return len(list((job.directory / "accidents").iterdir()))


def arrow_of(job: Job, rows: int) -> list[pa.RecordBatch]:
    """Return what was sent to the only source partition as Spark hands it over, in batches of so many rows."""
    (topic,) = job.topology.source.topics
    return [_arrow(topic, at, job.sent[at : at + rows]) for at in range(0, len(job.sent), rows)]


def _arrow(topic: str, begin: int, events: Sequence[Event]) -> pa.RecordBatch:
    count = len(events)
    columns = {
        "topic": pa.array([topic] * count),
        "partition": pa.array([0] * count, pa.int32()),
        "offset": pa.array(range(begin, begin + count), pa.int64()),
        "timestamp": pa.array([event.timestamp_ms * 1000 for event in events], pa.timestamp("us", tz="UTC")),
        "timestampType": pa.array([0] * count, pa.int32()),
        "key": pa.array([event.key for event in events], pa.binary()),
        "value": pa.array([event.value for event in events], pa.binary()),
        "headers": pa.array([list(event.headers) or None for event in events], HEADERS),
    }
    return pa.RecordBatch.from_arrays(list(columns.values()), list(columns))
