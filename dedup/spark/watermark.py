"""`--semantics watermark`: Spark's own `dropDuplicatesWithinWatermark`, for comparison and for those who want it.

It is not the fleet's rule; `DIFFERENCES` says where. Dead letters go around the operator: an event time from the year
2099 would move the watermark past everything. Both ways are one query, so one micro-batch, and its time, decides for
each record which way it goes; two queries would each ask another clock, and lose or double what lies in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, assert_never

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  the name every Spark page uses

from dedup.core.extract import FaultKind
from dedup.core.fold import OnConflict, OnFuture, OnMissing, OnTombstone
from dedup.errors import DedupError, InvariantBroken, Problem, TopologyError
from dedup.session.admin import Admin, Topic
from dedup.session.connection import Connection
from dedup.spark.checkpoint import CheckpointIdentity, claim
from dedup.spark.columns import identified
from dedup.spark.kafka_options import kafka_options
from dedup.spark.kafka_sink import KafkaSink
from dedup.spark.rows import HEADERS, records_of_kafka
from dedup.spark.running import Running
from dedup.spark.stream import StreamOptions, triggered
from dedup.topology.model import LateTo
from dedup.worker.plan import missing_topics
from dedup.worker.publish import DETAIL, EVENT_TIME, REASON, SOURCE, TIMESTAMP, VERDICT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from dedup.settings import Settings
    from dedup.topology.model import Topology

DIFFERENCES: Final = """--semantics watermark: Spark's dropDuplicatesWithinWatermark decides, not the fleet's rule.
  * A record later than the watermark is dropped silently: it is in no topic. Spark counts it in its progress
    (numRowsDroppedByWatermark); which ones they are depends on how the input was cut into micro-batches.
  * One number, the guard period ({guard}), is both the window and the lateness; `grace` ({grace}) is not used.
  * An ID is forgotten when the watermark has passed its time by the guard period: it blocks for at least twice that.
    A new event with that ID in between, which the fleet would forward, is dropped.
  * Which of several equal IDs in one micro-batch is forwarded is not defined.
  * State is in the checkpoint: `dedup status`, `lookup`, `verify` and a fleet can not go on from it.
"""


def differences(topology: Topology) -> str:
    """Return what differs from the fleet's rule, for the operator to read."""
    window = topology.window
    return DIFFERENCES.format(guard=f"{window.guard_ms / 1000:,.0f} s", grace=f"{window.grace_ms / 1000:,.0f} s")


def refuse_unsupported(topology: Topology) -> None:
    """Raise TopologyError naming everything of the topology that the operator can not do."""
    unable = {
        "duplicates": topology.duplicates is not None,
        "conflicts": topology.conflicts_counted,
        "on_conflict": topology.on_conflict is not OnConflict.DUPLICATE,
        "extend": topology.window.extend,
        "missing: fail": topology.missing is OnMissing.FAIL,
        "future: clamp": topology.future is OnFuture.CLAMP,
        "late": not isinstance(topology.late, LateTo),
        "output: none": topology.output is None,
        "output.headers": topology.output is not None and topology.output.headers,
    }
    problems = [
        Problem(topology.name, f"{name}: --semantics watermark can not do it; leave it out, or use --semantics exact")
        for name, wanted in unable.items()
        if wanted
    ]
    if problems:
        raise TopologyError(problems)


def start_watermark(spark: SparkSession, topology: Topology, settings: Settings, options: StreamOptions) -> Running:
    """Start the stream with Spark's own operator; raises as `start_stream` does, and TopologyError."""
    refuse_unsupported(topology)
    topics = asyncio.run(_topics(topology, settings))
    partitions = int(spark.conf.get("spark.sql.shuffle.partitions") or 1)
    counts = {name: topics[name].partitions for name in topology.source.topics}
    ids = {name: topics[name].topic_id for name in topology.source.topics}
    state = (
        f"{topology.state_identity(counts)} in {partitions} shuffle partitions, guard {topology.window.guard_ms} ms, "
        f"one query"
    )
    checkpoint = claim(spark, options.checkpoint, CheckpointIdentity(topology.name, "watermark", state, ids))

    rows = _screened(spark, topology, settings, options)
    forwarded = _forwarded(rows, topology, topics[_output(topology)].partitions)
    # The operator's partitions are those of its state, and a union has those of both.
    both = forwarded.unionByName(_beside(rows, topology).repartition(partitions, "key", "value"))
    name = f"{topology.name}-watermark"

    def start() -> StreamingQuery:
        written = [topology.dead_letter, _output(topology)]
        sink = KafkaSink.open(settings, name, topics=written, partitions=2 * partitions, checkpoint=checkpoint)
        writer = both.writeStream.queryName(name).option("checkpointLocation", f"{options.checkpoint}/watermark")
        return triggered(writer.foreachBatch(lambda batch, epoch: _kept(sink, running, batch, epoch)), options).start()

    running = Running([start], in_turn=False)
    running.start()
    return running


def _kept(sink: KafkaSink, running: Running, batch: DataFrame, epoch: int) -> None:
    try:
        sink.write(batch, epoch)
    except DedupError as error:
        # Spark hands on only its text.
        running.failure = error
        raise


def _output(topology: Topology) -> str:
    if topology.output is None:
        raise InvariantBroken("a topology without output was not refused.")
    return topology.output.topic


def _screened(spark: SparkSession, topology: Topology, settings: Settings, options: StreamOptions) -> DataFrame:
    """Return the records with `columns.IDENTIFIED`, the reason why one can not be judged, and its exemption."""
    reader = spark.readStream.format("kafka").options(**kafka_options(settings))
    reader = reader.option("subscribe", ",".join(topology.source.topics))
    reader = reader.option("maxOffsetsPerTrigger", options.most_offsets)
    match topology.source.start:
        case "earliest" | "latest" as start:
            reader = reader.option("startingOffsets", start)
        case int() as time_ms:
            reader = reader.option("startingTimestamp", time_ms)
        case never:
            assert_never(never)
    # The micro-batch's own time, which Spark keeps in its offset log: a batch run again decides alike.
    ceiling = F.unix_millis(F.current_timestamp()) + topology.max_clock_skew_ms
    judged_ms = F.col("dedup_time_ms")
    reason = (
        F.when(F.col("dedup_fault").isNotNull(), F.col("dedup_fault"))
        .when(judged_ms < 0, F.lit("negative_time"))
        .when(judged_ms > ceiling, F.lit("future_time"))
    )
    forwarded = [FaultKind.MISSING_ID.value] if topology.missing is OnMissing.FORWARD else []
    forwarded += [FaultKind.TOMBSTONE.value] if topology.tombstones is OnTombstone.FORWARD else []
    exempt = F.when(F.col("dedup_kind").isin(forwarded), F.col("dedup_kind")) if forwarded else F.lit(None)
    found = identified(records_of_kafka(reader.load()), topology)
    return found.withColumn("reason", reason).withColumn("exempt", exempt.cast("string"))


def _forwarded(rows: DataFrame, topology: Topology, partitions: int) -> DataFrame:
    guard = f"{topology.window.guard_ms} milliseconds"
    judged = (
        rows.where(F.col("reason").isNull())
        .withColumn("dedup_time", F.timestamp_millis("dedup_time_ms"))
        .withWatermark("dedup_time", guard)
        .dropDuplicatesWithinWatermark(["dedup_id"])
    )
    by_id = F.pmod(F.hash("dedup_id"), F.lit(partitions))
    place = F.col("partition") if topology.direct else F.when(F.col("key").isNull(), by_id)
    return judged.select(
        F.lit(_output(topology)).alias("topic"),
        place.cast("int").alias("partition"),
        "key",
        "value",
        "timestamp_ms",
        _with_headers((EVENT_TIME, F.col("dedup_time_ms").cast("string"))).alias("headers"),
    )


def _beside(rows: DataFrame, topology: Topology) -> DataFrame:
    """Return dead letters and exempt records, with the worker's own headers."""
    place = F.concat_ws("/", "topic", F.col("partition").cast("string"), F.col("offset").cast("string"))
    dead = _with_headers(
        (REASON, F.col("reason")),
        (DETAIL, F.coalesce("dedup_detail", F.col("reason"))),
        (SOURCE, place),
        (TIMESTAMP, F.col("timestamp_ms").cast("string")),
    )
    is_exempt = F.col("exempt").isNotNull()
    return rows.where(F.col("reason").isNotNull()).select(
        F.when(is_exempt, F.lit(_output(topology))).otherwise(F.lit(topology.dead_letter)).alias("topic"),
        F.lit(None).cast("int").alias("partition"),
        "key",
        "value",
        F.greatest(F.col("timestamp_ms"), F.lit(0)).alias("timestamp_ms"),
        F.when(is_exempt, _with_headers((VERDICT, F.col("exempt")))).otherwise(dead).alias("headers"),
    )


def _with_headers(*added: tuple[str, Column]) -> Column:
    """Return the record's own headers and those added."""
    ours = F.array(*[F.struct(F.lit(name).alias("key"), text.cast("binary").alias("value")) for name, text in added])
    return F.concat(F.coalesce("headers", F.array().cast(HEADERS)), ours.cast(HEADERS))


async def _topics(topology: Topology, settings: Settings) -> Mapping[str, Topic]:
    """Return the topics read and written; those to be written are made."""
    used = {*topology.source.topics, topology.dead_letter}
    if topology.output is not None:
        used.add(topology.output.topic)
    async with Admin(Connection.of(settings, client_id=f"dedup-{topology.name}-spark")) as admin:
        have = await admin.topics(used)
        wanted = [topic for topic in missing_topics(topology, settings, have) if topic.name in used]
        if wanted:
            await admin.create(wanted)
        return await admin.settled(used)
