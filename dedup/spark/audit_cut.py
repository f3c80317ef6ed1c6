"""One cut through a topology's topics, taken by the driver: offsets first, then the ends of what was written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import Window
from pyspark.sql import functions as fn

from dedup.core.fold import OnFuture
from dedup.core.stream_time import Feed
from dedup.errors import Problem, SettingsError, StateIncompatible
from dedup.proof.kafka_reader import Bounds, KafkaReader
from dedup.spark.changelog import seed_marks
from dedup.spark.columns import IDENTIFIED, identified
from dedup.spark.kafka_range import history_of_range
from dedup.spark.rows import RECORDS
from dedup.spark.seed_history import placed
from dedup.topology.model import LateTo

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from dedup.session.wire import TopicPartition
    from dedup.settings import Settings
    from dedup.spark.files import History
    from dedup.store.seed_mark import SeedMark
    from dedup.topology.model import Topology


@dataclass(frozen=True, slots=True)
class Cut:
    """What one audit looks at."""

    partitions: Mapping[str, int]
    """Topic -> partition count; 0 for a topic that does not exist."""
    committed: Mapping[str, Mapping[int, int]]
    bounds: Mapping[str, Mapping[int, Bounds]]
    begins: Mapping[str, Mapping[int, int]]
    """Source topic -> where the fleet began."""
    marks: Mapping[int, SeedMark]
    """Of a seeded fleet, by changelog partition."""
    broker_times: frozenset[str]
    """Topics that replace timestamps by the broker's clock."""

    def complete(self, topic: str) -> bool:
        """Tell whether a topic still has its beginning."""
        return all(each.low == 0 for each in self.bounds[topic].values())

    def feeds(self, topology: Topology) -> tuple[Feed, ...]:
        """Return every source partition."""
        return tuple(
            Feed(position, partition)
            for position, topic in enumerate(topology.source.topics)
            for partition in range(self.partitions[topic])
        )


def written_topics(topology: Topology) -> list[str]:
    """Return the topics that verdicts go to, the output first."""
    late = topology.late.topic if isinstance(topology.late, LateTo) else None
    output = topology.output.topic if topology.output is not None else None
    named = (output, late, topology.dead_letter, topology.duplicates, topology.conflicts)
    return [topic for topic in named if topic is not None]


def take_cut(
    spark: SparkSession, topology: Topology, settings: Settings, begins: Mapping[TopicPartition, int] | None
) -> Cut:
    """Return the cut. Raises StateIncompatible where there is nothing to audit, SettingsError for a start unknown."""
    reading = list(dict.fromkeys([*topology.source.topics, *topology.feeding_topics]))
    with KafkaReader(settings) as reader:
        counts = reader.partitions([*reading, *written_topics(topology), topology.changelog_topic])
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
        stamps = frozenset(topic for topic in written_topics(topology) if _broker_time(reader, topic, bounds[topic]))
    return Cut(counts, committed, bounds, starts, marks, stamps)


def _broker_time(reader: KafkaReader, topic: str, bounds: Mapping[int, Bounds]) -> bool:
    """Tell by its first record whether a topic has LogAppendTime."""
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
        said = next(iter(marks.values())).begins
        return {topic: dict(enumerate(offsets)) for topic, offsets in said.items()}
    match topology.source.start:
        case "earliest":
            return {topic: {at: each.low for at, each in bounds[topic].items()} for topic in topology.source.topics}
        case int() as time_ms:
            return {
                topic: {at: _at(reader, topic, at, time_ms, each) for at, each in bounds[topic].items()}
                for topic in topology.source.topics
            }
        case _:
            text = "the topology says start: latest, and where that was no log says: give the offsets it began at"
            raise SettingsError([Problem("--from", text)])


def _at(reader: KafkaReader, topic: str, partition: int, time_ms: int, bounds: Bounds) -> int:
    found = reader.offset_for_time(topic, partition, time_ms)
    return bounds.high if found is None else found


def read_topic(spark: SparkSession, settings: Settings, cut: Cut, topic: str, begins: Mapping[int, int] | None) -> Any:  # noqa: ANN401
    """Return the committed records of a topic within the cut, from ``begins`` on; no record where it does not exist."""
    bounds = cut.bounds[topic]
    if not bounds:
        return spark.createDataFrame([], RECORDS)
    lows = {at: max(each.low, (begins or {}).get(at, 0)) for at, each in bounds.items()}
    highs = {at: max(each.high, lows[at]) for at, each in bounds.items()}
    return history_of_range(spark, settings, {topic: lows}, {topic: highs}).records


def before_the_log(history: History, topology: Topology, tasks: int, lows: Mapping[int, int]) -> DataFrame:
    """Return a history with places before the log's first: in its own order if it has one, else by event time.

    Records that the log still has are left out: they are judged there.
    """
    topic = topology.source.topics[0]
    if history.placed:
        kept = fn.create_map(*(fn.lit(each) for pair in sorted(lows.items()) for each in pair))
        return history.records.where(fn.col("offset") < fn.coalesce(kept[fn.col("partition")], fn.lit(0)))
    rows = placed(identified(history.records, topology), topology, tasks=tasks, order="event_time")
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


def accepted_by_seed(history: DataFrame, topology: Topology, cut: Cut) -> DataFrame:
    """Return a seed's history without the records whose time was too far ahead for it: they are in no topic.

    Judged without a clock, as an audit judges, one of them would make every later record late.
    """
    if not cut.marks or topology.future is not OnFuture.DEAD_LETTER:
        return history
    judged_at_ms = next(iter(cut.marks.values())).judged_at_ms
    time_ms = fn.col("dedup_time_ms")
    accepted = time_ms.isNull() | (time_ms <= judged_at_ms + topology.max_clock_skew_ms)
    return identified(history, topology).where(accepted).select(*history.columns)
