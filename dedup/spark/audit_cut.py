"""The input of an audit: the offsets up to which it reads each topic (the cut), and the log up to these offsets.

The driver determines the cut: it first reads the group's offsets, and then the ends of the topics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as fn

from dedup.core.fold import OnFuture
from dedup.errors import Problem, SettingsError
from dedup.spark.changelog_frames import seed_marks
from dedup.spark.columns import IDENTIFIED, identified
from dedup.spark.kafka_source import feeds_of, history_of_range, offsets_at
from dedup.spark.rows import RECORDS
from dedup.spark.seed_history import placed
from dedup.spark.session import RECORD_BYTES
from dedup.verify.cut import TopicOffsets, offsets_of
from dedup.verify.kafka_reader import Bounds, KafkaReader

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from dedup.core.window import Feed
    from dedup.kafka.wire import TopicPartition
    from dedup.settings import Settings
    from dedup.spark.files import History
    from dedup.store.changelog import SeedMark
    from dedup.topology.model import Topology
    from dedup.verify.report import Report


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
    """Since the last `dedup reset`, except for the source topics."""
    begins: Mapping[str, Mapping[int, int]]
    """Maps each source topic to the offsets at which the fleet began."""
    marks: Mapping[int, SeedMark]
    """Seed marks by changelog partition; empty for a fleet that was not seeded."""
    stamped: bool
    """Whether the output keeps the source's timestamps."""

    @property
    def copies(self) -> dict[str, list[str]]:
        """The topics for duplicates and conflicts that exist, each with the verdicts of its records."""
        topology = self.topology
        both = ["duplicate"] if topology.conflicts is not None else ["duplicate", "conflict"]
        wanted = {topology.duplicates: both, topology.conflicts: ["conflict"]}
        return {topic: verdicts for topic, verdicts in wanted.items() if topic is not None and self.partitions[topic]}

    @property
    def size_bytes(self) -> int:
        """The approximate size of the topics."""
        return RECORD_BYTES * sum(each.high - each.low for part in self.bounds.values() for each in part.values())

    def complete(self, topic: str) -> bool:
        """Return whether no partition of a topic has lost its beginning."""
        return not any(each.start_deleted for each in self.bounds[topic].values())

    def lows(self, topic: str) -> dict[int, int]:
        """Return the first offset that is left in each partition of a topic."""
        return {at: each.low for at, each in self.bounds[topic].items()}

    def read(self, topic: str, begins: Mapping[int, int] | None = None) -> DataFrame:
        """Return the committed records of a topic within the cut, from ``begins`` on; none if it does not exist."""
        bounds = self.bounds[topic]
        if not bounds:
            return self.spark.createDataFrame([], RECORDS)
        lows = {at: max(low, (begins or {}).get(at, 0)) for at, low in self.lows(topic).items()}
        ranges = {at: (lows[at], max(each.high, lows[at])) for at, each in bounds.items()}
        return history_of_range(self.spark, self.settings, {topic: ranges}).records


@dataclass(frozen=True, slots=True)
class AuditedLog:
    """The records that the fleet judged, and whether earlier records may be missing."""

    records: DataFrame
    """`rows.RECORDS`, including the history before the log."""
    contiguous: bool
    """As in `batch_verdicts.judged`."""
    feeds: tuple[Feed, ...]
    """The feeds of the repartition topic; otherwise empty."""
    committed: Mapping[int, int]
    """Maps each log partition to the group's offset; records from there on may or may not be judged."""
    begins: Mapping[int, int]
    """Maps each log partition to where the fleet began; a seed judged earlier records and forwarded nothing."""
    known: Mapping[int, bool]
    """Maps each log partition to whether nothing is missing before its first record."""


def take_cut(
    spark: SparkSession,
    topology: Topology,
    settings: Settings,
    report: Report,
    begins: Mapping[TopicPartition, int] | None,
) -> AuditCut:
    """Determine and return the offsets up to which an audit reads each topic.

    Raises StateIncompatible if there is nothing to audit, and SettingsError if it is not known where the fleet began.
    """
    with KafkaReader(settings) as reader:
        found = offsets_of(topology, reader, report)
        has_state = reader.partitions([topology.changelog_topic])[topology.changelog_topic] > 0
        marks = seed_marks(spark, topology, settings) if has_state else {}
        starts = _starts(topology, reader, found, marks, begins)
        topic = "" if topology.output is None else topology.output.topic
        firsts = ((at, each.low, min(each.high, each.low + 1)) for at, each in found.bounds.get(topic, {}).items())
        by_broker = next((read.broker_time for first in firsts for read in reader.read(topic, *first)), False)
    # If future times are clamped, the output's timestamps come from the worker's clock.
    stamped = topology.future is not OnFuture.CLAMP and not by_broker
    return AuditCut(spark, topology, settings, *found._replace(begins=starts), marks, stamped)


def _starts(
    topology: Topology,
    reader: KafkaReader,
    found: TopicOffsets,
    marks: Mapping[int, SeedMark],
    begins: Mapping[TopicPartition, int] | None,
) -> dict[str, dict[int, int]]:
    """Return where the fleet began to read each source partition."""
    topics, bounds = topology.source.topics, found.bounds
    if begins is not None:
        given = {
            topic: {place.partition: at for place, at in begins.items() if place.topic == topic} for topic in topics
        }
        wrong = [topic for topic in topics if given[topic].keys() != bounds[topic].keys()]
        if wrong:
            raise SettingsError([Problem("--from", f"give an offset for every partition of {', '.join(wrong)}")])
        resets = found.begins
        return {
            topic: {at: max(first, resets[topic].get(at, 0)) for at, first in given[topic].items()} for topic in topics
        }
    if marks:
        marked = next(iter(marks.values())).begins
        return {topic: dict(enumerate(offsets)) for topic, offsets in marked.items()}
    if all(found.begins[topic].keys() == bounds[topic].keys() for topic in topics):
        resets = found.begins
        return {topic: {at: max(resets[topic][at], each.low) for at, each in bounds[topic].items()} for topic in topics}
    match topology.source.start:
        case "earliest":
            return {topic: {at: each.low for at, each in bounds[topic].items()} for topic in topics}
        case int() as time_ms:
            return {topic: offsets_at(reader, topic, bounds[topic], time_ms) for topic in topics}
        case _:
            text = "the topology says start: latest, and no log says where that was: give the offsets it began at"
            raise SettingsError([Problem("--from", text)])


def audited_log(cut: AuditCut, history: History | None) -> AuditedLog:
    """Return the log that the fleet judged; ``history`` contains the files from which the fleet was seeded, if any."""
    name = cut.topology.feeding_topics[0]
    lows, begins, contiguous = cut.lows(name), cut.begins.get(name, cut.lows(name)), True
    feeds: tuple[Feed, ...] = ()
    if not cut.topology.direct:
        records, feeds = cut.read(name), feeds_of(cut.topology, cut.partitions)
        # The history of a seed is not in this log.
        known = {at: not each.start_deleted and not cut.marks for at, each in cut.bounds[name].items()}
    elif history is not None:
        records = _accepted_by_seed(_before_the_log(history, cut), cut).unionByName(cut.read(name, begins))
        known, contiguous = dict.fromkeys(lows, True), history.contiguous
    elif cut.marks and next(iter(cut.marks.values())).history == "topics":
        whole, seeded = cut.read(name), fn.col("offset") < by_key(begins, fn.col("partition"))
        records = _accepted_by_seed(whole.where(seeded), cut).unionByName(whole.where(~seeded))
        known = {at: low == 0 for at, low in lows.items()}
    else:
        records = cut.read(name, begins)
        known = {at: not cut.marks and (begins[at] > low or low == 0) for at, low in lows.items()}
    committed = {at: cut.committed[name].get(at, begins[at]) for at in lows}
    return AuditedLog(records, contiguous, feeds, committed, begins, known)


def by_key(values: Mapping[int, int] | Mapping[str, int], key: Column) -> Column:
    """Return a column with the value of each row's key, or 0 for a key without a value and for null."""
    if not values:
        return fn.lit(0)
    mapped = fn.create_map(*(fn.lit(each) for pair in values.items() for each in pair))
    return fn.coalesce(mapped[key], fn.lit(0))


def _before_the_log(history: History, cut: AuditCut) -> DataFrame:
    """Return a history with coordinates that precede the log: its own if it has any, or ones assigned by event time.

    Records at or after the offset at which the fleet began are left out, because the audit reads them from the log.
    """
    topology, topic = cut.topology, cut.topology.source.topics[0]
    if history.placed:
        mine = fn.col("offset") < by_key(cut.begins[topic], fn.col("partition"))
        return history.records.where(mine).select(*RECORDS.fieldNames())
    rows = placed(identified(history.records, topology), topology, tasks=cut.partitions[topic], order="event_time")
    whole = Window.partitionBy("dedup_partition")
    ordered = whole.orderBy("dedup_time_ms", "key", "value", "headers", "timestamp_ms")
    numbered = rows.withColumns(
        {
            "topic": fn.lit(topic),
            "partition": fn.col("dedup_partition"),
            "offset": fn.row_number().over(ordered).cast("long") - fn.count(fn.lit(1)).over(whole) - 1,
        }
    )
    return numbered.drop("dedup_partition", *(field.name for field in IDENTIFIED)).select(*RECORDS.fieldNames())


def _accepted_by_seed(history: DataFrame, cut: AuditCut) -> DataFrame:
    """Return a seed's history without the records that the seed refused for a future time.

    An audit judges without a clock, so a single record with a future time would make every later record late.
    """
    topology = cut.topology
    if not cut.marks or topology.future is not OnFuture.DEAD_LETTER:
        return history
    judged_at_ms = next(iter(cut.marks.values())).judged_at_ms
    time_ms = fn.col("dedup_time_ms")
    accepted = time_ms.isNull() | (time_ms <= judged_at_ms + topology.max_clock_skew_ms)
    return identified(history, topology).where(accepted).select(*history.columns)
