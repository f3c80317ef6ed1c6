"""Spark streams: events judged a second from topic to topic, beside Spark's own operator in the same session.

    python -m bench.spark_stream                      1,000,000 events on 2 cores
    python -m bench.spark_stream --events 20000000 --cores 1

Workload W1 (bench/workload.py) on the embedded broker, which shares the cores. In turn, from the same topic:

* `dedup`: the exact stream, exactly-once (dedup/spark/task_attempt.py).
* `operator, stock sink`: `dropDuplicatesWithinWatermark`, the ID by `get_json_object`, and Spark's own Kafka sink.
* `stock sink alone`: rows copied by Spark's own source and sink, the ceiling of any stream here.
* `dedup, Delta`: the exact stream, and its output topic appended to a Delta table in the same job (`run --delta`).
* `operator, Delta`: the same operator, and Spark's own Delta sink.

Each has a checkpoint, topics and micro-batches of its own; a first round warms up JVM and Python and is left out.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark page uses

from bench.workload import Workload, load
from dedup.embedded.kafka_node import EmbeddedKafka
from dedup.settings import Settings
from dedup.spark.session import session_for
from dedup.spark.stream import StreamOptions, start_stream
from dedup.spark.table_log import DeltaLog
from dedup.spark.table_sink import TableSink, following
from dedup.topology.model import Topology
from dedup.topology.parse import parse

KEPT = {"retention.ms": "-1"}
TOPOLOGY = """
dedup: 1
name: {name}
source: {{topics: [{source}], partitioned_by: tracking_id}}
tracking_id: {{field: event_id}}
guard_period: 1h
output: {{topic: {name}-out}}
"""


@dataclass(frozen=True)
class Bench:
    spark: SparkSession
    kafka: EmbeddedKafka
    source: str
    partitions: int
    most_offsets: int
    directory: Path

    def topology(self, name: str) -> Topology:
        return parse(TOPOLOGY.format(name=name, source=self.source), name=name)

    def settings(self) -> Settings:
        return Settings(brokers=(self.kafka.bootstrap,), state_dir=self.directory / "state")

    def options(self, name: str) -> StreamOptions:
        return StreamOptions(str(self.directory / name), exit_when_done=True, most_offsets=self.most_offsets)

    def rows(self) -> DataFrame:
        return (
            self.spark.readStream.format("kafka")
            .option("kafka.bootstrap.servers", self.kafka.bootstrap)
            .option("subscribe", self.source)
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", self.most_offsets)
            .load()
        )

    def table(self, name: str) -> str:
        return str(self.directory / f"{name}-table")

    def write_delta(self, rows: DataFrame, name: str) -> None:
        writer = rows.writeStream.format("delta").option("checkpointLocation", str(self.directory / name))
        writer.trigger(availableNow=True).start(self.table(name)).awaitTermination()

    def write_stock(self, rows: DataFrame, name: str) -> None:
        writer = rows.writeStream.format("kafka").option("kafka.bootstrap.servers", self.kafka.bootstrap)
        writer = writer.option("topic", f"{name}-out").option("checkpointLocation", str(self.directory / name))
        writer.trigger(availableNow=True).start().awaitTermination()


def exact(bench: Bench, name: str) -> None:
    start_stream(bench.spark, bench.topology(name), bench.settings(), bench.options(name)).wait()


def exact_delta(bench: Bench, name: str) -> None:
    sink = TableSink(bench.spark, bench.topology(name), bench.settings(), DeltaLog(bench.spark, bench.table(name)))
    stream = start_stream(bench.spark, bench.topology(name), bench.settings(), bench.options(name))
    with following(sink, 2.0, stopped=threading.Event(), failed=stream.stop):
        stream.wait()


def _operator(bench: Bench) -> DataFrame:
    found = bench.rows().withColumn("id", F.get_json_object(F.col("value").cast("string"), "$.event_id"))
    return found.withWatermark("timestamp", "1 hour").dropDuplicatesWithinWatermark(["id"])


def operator_stock(bench: Bench, name: str) -> None:
    bench.write_stock(_operator(bench).select("key", "value"), name)


def operator_delta(bench: Bench, name: str) -> None:
    bench.write_delta(_operator(bench).select("key", "value", "topic", "partition", "offset", "timestamp"), name)


def copied(bench: Bench, name: str) -> None:
    bench.write_stock(bench.rows().select("key", "value"), name)


CANDIDATES: dict[str, Callable[[Bench, str], None]] = {
    "dedup": exact,
    "operator, stock sink": operator_stock,
    "stock sink alone": copied,
    "dedup, Delta": exact_delta,
    "operator, Delta": operator_delta,
}
INTO_TABLES = frozenset({"dedup, Delta", "operator, Delta"})


def created(bootstrap: str, topic: str, partitions: int) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(topic, num_partitions=partitions, replication_factor=1, config=KEPT)])[topic].result()


def count(bootstrap: str, topic: str, partitions: int) -> int:
    """Return how many committed records a topic has."""
    settings = {"bootstrap.servers": bootstrap, "group.id": "count", "enable.partition.eof": True}
    consumer = Consumer({**settings, "isolation.level": "read_committed", "fetch.wait.max.ms": 20})
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(partitions)])
    seen, ended = 0, 0
    while ended < partitions:
        for message in consumer.consume(10_000, 0.1):
            if message.error() is None:
                seen += 1
            else:
                ended += 1
    consumer.close()
    return seen


def main(
    events: Annotated[int, typer.Option(help="Events in the source topic.")] = 1_000_000,
    cores: Annotated[int, typer.Option(help="Threads of the local session; the broker has the same cores.")] = 2,
    partitions: Annotated[int, typer.Option(help="Source partitions.")] = 2,
    most_offsets: Annotated[int, typer.Option(help="Offsets in a micro-batch.")] = 250_000,
    warm: Annotated[int, typer.Option(help="Events of the round before, which is left out.")] = 20_000,
    only: Annotated[str, typer.Option(help="Candidates, separated by semicolons; all where empty.")] = "",
    memory: Annotated[str, typer.Option(help="Heap of the driver, which is the executor.")] = "2g",
) -> None:
    """Print events/s of each candidate."""
    directory = Path(tempfile.mkdtemp(prefix="dedup-spark-bench-"))
    conf = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": str(partitions),
        "spark.driver.memory": memory,
        "spark.local.dir": str(directory),
    }
    spark = session_for(None, master=f"local[{cores},4]", packages=("kafka", "delta"), conf=conf)
    spark.sparkContext.setLogLevel("ERROR")
    chosen = {name: run for name, run in CANDIDATES.items() if not only or name in only.split(";")}
    try:
        with EmbeddedKafka(profile="bench") as kafka:
            for label, number in (("warm-up", warm), ("round 1", events)):
                workload = Workload(number, partitions, start_ms=int(time.time() * 1000) - 3_600_000)
                source = f"events-{number}"
                created(kafka.bootstrap, source, partitions)
                load(kafka.bootstrap, source, workload, lambda _: None)
                expected = len(workload.expected())
                bench = Bench(spark, kafka, source, partitions, most_offsets, directory)
                for at, (name, run) in enumerate(chosen.items()):
                    _measure(bench, f"c{at}-{number}", (name, run, label), (number, expected, cores))
    finally:
        spark.stop()
        shutil.rmtree(directory, ignore_errors=True)


def _measure(
    bench: Bench, topic: str, what: tuple[str, Callable[[Bench, str], None], str], numbers: tuple[int, int, int]
) -> None:
    name, run, label = what
    events, expected, cores = numbers
    created(bench.kafka.bootstrap, f"{topic}-out", bench.partitions)
    began = time.monotonic()
    run(bench, topic)
    seconds = time.monotonic() - began
    if name in INTO_TABLES:
        forwarded = bench.spark.read.format("delta").load(bench.table(topic)).count()
    else:
        forwarded = count(bench.kafka.bootstrap, f"{topic}-out", bench.partitions)
    shown = {"what": name, "round": label, "events": events, "cores": cores, "seconds": round(seconds, 2)}
    told = {"events_per_s": round(events / seconds), "forwarded": forwarded, "expected": expected}
    print(json.dumps(shown | told), flush=True)


if __name__ == "__main__":
    typer.run(main)
