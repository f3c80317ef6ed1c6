"""The input of an audit: a cut through a topology's topics, and the history of a seed before the log.

The driver takes the cut, and reads the group's offsets before the ends of the topics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as fn

from dedup.core.fold import OnFuture
from dedup.errors import Problem, SettingsError, StateIncompatible
from dedup.spark.audit_expected import by_task
from dedup.spark.changelog_frames import seed_marks
from dedup.spark.columns import IDENTIFIED, identified
from dedup.spark.kafka_source import history_of_range, offsets_at
from dedup.spark.rows import RECORDS
from dedup.spark.seed_history import placed
from dedup.topology.model import LateTo
from dedup.verify.kafka_reader import Bounds, KafkaReader

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from dedup.kafka.wire import TopicPartition
    from dedup.settings import Settings
    from dedup.spark.files import History
    from dedup.store.changelog import SeedMark
    from dedup.topology.model import Topology


@dataclass(frozen=True, slots=True)
class AuditCut:
    """The offsets up to which an audit reads each topic, and what the driver knows about the topics."""

    spark: SparkSession
    topology: Topology
    settings: Settings
    partitions: Mapping[str, int]
    """Maps each topic to its partition count, which is 0 if the topic does not exist."""
    committed: Mapping[str, Mapping[int, int]]
    bounds: Mapping[str, Mapping[int, Bounds]]
    begins: Mapping[str, Mapping[int, int]]
    """Maps each source topic to the offsets at which the fleet began."""
    marks: Mapping[int, SeedMark]
    """Seed marks by changelog partition; empty for a fleet that was not seeded."""
    broker_times: frozenset[str]
    """Topics in which the broker replaces timestamps (LogAppendTime)."""

    def complete(self, topic: str) -> bool:
        """Whether a topic still has its beginning."""
        return all(each.low == 0 for each in self.bounds[topic].values())

    def read(self, topic: str, begins: Mapping[int, int] | None = None) -> DataFrame:
        """Return the committed records of a topic within the cut, from ``begins`` on; empty if it does not exist."""
        bounds = self.bounds[topic]
        if not bounds:
            return self.spark.createDataFrame([], RECORDS)
        lows = {at: max(each.low, (begins or {}).get(at, 0)) for at, each in bounds.items()}
        highs = {at: max(each.high, lows[at]) for at, each in bounds.items()}
        return history_of_range(self.spark, self.settings, {topic: lows}, {topic: highs}).records


def _written_topics(topology: Topology) -> list[str]:
    """Return the topics to which records are written by verdict, the output first."""
    late = topology.late.topic if isinstance(topology.late, LateTo) else None
    output = topology.output.topic if topology.output is not None else None
    named = (output, late, topology.dead_letter, topology.duplicates, topology.conflicts)
    return [topic for topic in named if topic is not None]


def take_cut(
    spark: SparkSession, topology: Topology, settings: Settings, begins: Mapping[TopicPartition, int] | None
) -> AuditCut:
    """Return the cut.

    Raises StateIncompatible if there is nothing to audit, SettingsError if the fleet's start is not known.
    """
    reading = list(dict.fromkeys([*topology.source.topics, *topology.feeding_topics]))
    with KafkaReader(settings) as reader:
        counts = reader.partitions([*reading, *_written_topics(topology), topology.changelog_topic])
        absent = [topic for topic in reading if not counts[topic]]
        if absent:
            raise StateIncompatible(
                f"topology {topology.name}: {', '.join(absent)} does not exist in this cluster. Nothing can be "
                f"audited. Check `brokers`, or run the topology first."
            )
        committed = {topic: reader.committed(topology.name, topic, range(counts[topic])) for topic in reading}
        bounds = {topic: reader.bounds(topic, range(number)) for topic, number in counts.items()}
        marks = seed_marks(spark, topology, settings) if counts[topology.changelog_topic] else {}
        starts = _starts(topology, reader, bounds, marks, begins)
        stamps = frozenset(topic for topic in _written_topics(topology) if _broker_time(reader, topic, bounds[topic]))
    return AuditCut(spark, topology, settings, counts, committed, bounds, starts, marks, stamps)


def _broker_time(reader: KafkaReader, topic: str, bounds: Mapping[int, Bounds]) -> bool:
    """Return whether a topic uses LogAppendTime, according to its first record."""
    for partition, each in bounds.items():
        for columns in reader.read(topic, partition, each.low, min(each.high, each.low + 1)):
            return columns.broker_time
    return False


def _starts(
    topology: Topology,
    reader: KafkaReader,
    bounds: Mapping[str, Mapping[int, Bounds]],
    marks: Mapping[int, SeedMark],
    begins: Mapping[TopicPartition, int] | None,
) -> dict[str, dict[int, int]]:
    """Return where the fleet began to read each source partition."""
    if begins is not None:
        found: dict[str, dict[int, int]] = {topic: {} for topic in topology.source.topics}
        for (topic, partition), offset in begins.items():
            found.setdefault(topic, {})[partition] = offset
        wrong = [topic for topic in topology.source.topics if found[topic].keys() != bounds[topic].keys()]
        if wrong:
            raise SettingsError([Problem("--from", f"give an offset for every partition of {', '.join(wrong)}")])
        return found
    if marks:
        marked = next(iter(marks.values())).begins
        return {topic: dict(enumerate(offsets)) for topic, offsets in marked.items()}
    match topology.source.start:
        case "earliest":
            return {topic: {at: each.low for at, each in bounds[topic].items()} for topic in topology.source.topics}
        case int() as time_ms:
            return {topic: offsets_at(reader, topic, bounds[topic], time_ms) for topic in topology.source.topics}
        case _:
            text = "the topology says start: latest, and no log says where that was: give the offsets it began at"
            raise SettingsError([Problem("--from", text)])


def before_the_log(history: History, cut: AuditCut) -> DataFrame:
    """Return a history with coordinates before the log, which are its own or, if it has none, follow the event time.

    Records that the log still holds are left out, because they are judged there.
    """
    topology, topic = cut.topology, cut.topology.source.topics[0]
    if history.placed:
        return history.records.where(fn.col("offset") < by_task(cut.begins[topic], "partition", 0))
    rows = placed(identified(history.records, topology), topology, tasks=cut.partitions[topic], order="event_time")
    by = [fn.col(name) for name in ("dedup_time_ms", "key", "value", "headers", "timestamp_ms")]
    ordered = Window.partitionBy("dedup_partition").orderBy(*by)
    whole = Window.partitionBy("dedup_partition")
    numbered = rows.withColumns(
        {
            "topic": fn.lit(topic),
            "partition": fn.col("dedup_partition"),
            "offset": fn.row_number().over(ordered).cast("long") - fn.count(fn.lit(1)).over(whole) - 1,
        }
    )
    return numbered.drop("dedup_partition", *(field.name for field in IDENTIFIED)).select(*RECORDS.fieldNames())


def accepted_by_seed(history: DataFrame, cut: AuditCut) -> DataFrame:
    """Return a seed's history without the records that the seed refused because of a future time.

    An audit judges without a clock, so one such record would make every later record late.
    """
    topology = cut.topology
    if not cut.marks or topology.future is not OnFuture.DEAD_LETTER:
        return history
    judged_at_ms = next(iter(cut.marks.values())).judged_at_ms
    time_ms = fn.col("dedup_time_ms")
    accepted = time_ms.isNull() | (time_ms <= judged_at_ms + topology.max_clock_skew_ms)
    return identified(history, topology).where(accepted).select(*history.columns)
