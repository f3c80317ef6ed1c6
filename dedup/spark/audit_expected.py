"""Determines which offsets an audit reads, and which records each topic should contain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Final, NamedTuple

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as fn

from dedup.core.fold import OnFuture
from dedup.errors import Problem, SettingsError
from dedup.kafka.wire import TopicPartition
from dedup.settings import Settings
from dedup.spark.batch_verdicts import judged, refuse_unfit
from dedup.spark.columns import COORDINATES, HEADERS, IDENTIFIED, RECORDS, digested, identified
from dedup.spark.files import History
from dedup.spark.kafka_source import feeds_of, history_of_range, offsets_at, refuse_open
from dedup.spark.seed_history import OUTSIDE_KAFKA, placed, seed_marks
from dedup.spark.session import RECORD_BYTES
from dedup.topology.model import LateForward, LateTo, Topology
from dedup.verify import evidence
from dedup.verify.cut import begun_with, offsets_of
from dedup.verify.kafka_reader import Bounds, KafkaReader
from dedup.verify.replay import FUTURE, by_evidence
from dedup.verify.report import Report

_TAILS: Final = {"late": evidence.LATE_TAIL, "dead_letter": evidence.DEAD_TAIL}
"""Maps a verdict to the headers that a worker appends to records in the verdict's side topic."""
_NO_CEILING_MS: Final = 1 << 48
"""A limit that no event time exceeds. The audit itself does not reject event times, because only the dead-letter topic
shows which event times a worker rejected.
"""
_MOST_BROADCAST: Final = 100_000
_PATH: Final = r"^(.*)/(\d+)/(\d+)$"
_DIGEST: Final = "dedup_digest"
_DIGITS: Final = 32
"""Number of hexadecimal digits of SHA-256 that are kept: 128 bits, as in `dedup verify`."""


class AuditCut:
    """The range of offsets that an audit reads in each partition, and the records that the fleet judged.

    Raises StateIncompatible if the topics contain nothing to audit, SettingsError if the fleet's start offsets are
    unknown, and BrokerUnavailable if a transaction stays open in a topic that the fleet writes to.
    """

    def __init__(
        self,
        spark: SparkSession,
        topology: Topology,
        settings: Settings,
        report: Report,
        begins: Mapping[TopicPartition, int] | None,
        history: History | None,
    ) -> None:
        self.spark: Final = spark
        self.topology: Final = topology
        self._settings: Final = settings
        with KafkaReader(settings) as reader:
            # As in `verify.cut.Cut`, the bounds of all topics except the source topics begin at the last `dedup reset`.
            self.partitions, self.committed, bounds, resets = offsets_of(topology, reader, report)
            self.bounds: Final = _settled(reader, bounds, topology.source.topics)
            self.begun_with: Final = begun_with(topology, reader)
            """Maps each topic that tasks read to its partition count when the state was created, if known."""
            has_state = reader.partitions([topology.changelog_topic])[topology.changelog_topic] > 0
            marks = seed_marks(spark, topology, settings) if has_state else {}
            self._mark: Final = next(iter(marks.values()), None)
            """One of the fleet's seed marks, or None. The values that an audit uses are the same in all seed marks."""
            starts = self._starts(reader, resets, begins)
            topic = "" if topology.output is None else topology.output.topic
            firsts = ((at, each.low, min(each.high, each.low + 1)) for at, each in self.bounds.get(topic, {}).items())
            by_broker = next((read.broker_time for first in firsts for read in reader.read(topic, *first)), False)
        self.log_topic: Final = topology.feeding_topics[0]
        self.begins: Final = {self.log_topic: self.lows(self.log_topic)} | starts
        """Maps the log topic and each source topic to the offsets where the fleet began."""
        # If a topology clamps future times, the output's timestamps come from the worker's clock.
        self.stamped: Final = topology.future is not OnFuture.CLAMP and not by_broker
        """Whether the output keeps the source's timestamps."""
        self.size_bytes: Final = RECORD_BYTES * sum(
            each.high - each.low for part in self.bounds.values() for each in part.values()
        )
        self.contiguous: Final = history is None or not topology.direct or history.contiguous_without_pieces
        """See `batch_verdicts.judged`."""
        self.log, self.known = self._judged_by_the_fleet(history)
        """`log` contains the records that the fleet judged (`columns.RECORDS`), including a seed's history. `known`
        maps each log partition to True if nothing is missing before its first record.
        """

    def _starts(
        self, reader: KafkaReader, resets: Mapping[str, Mapping[int, int]], given: Mapping[TopicPartition, int] | None
    ) -> dict[str, dict[int, int]]:
        topology, counts = self.topology, self.partitions | self.begun_with
        every = {topic: self.lows(topic) for topic in topology.source.topics}
        # A partition that was added later is read from its beginning.
        added = {topic: {at: low for at, low in lows.items() if at >= counts[topic]} for topic, lows in every.items()}
        lows = {topic: {at: low for at, low in every[topic].items() if at < counts[topic]} for topic in every}
        begun = self._begun_at(lows, reader, resets, given)
        return {topic: begun[topic] | added[topic] for topic in every}

    def _begun_at(
        self,
        lows: Mapping[str, dict[int, int]],
        reader: KafkaReader,
        resets: Mapping[str, Mapping[int, int]],
        given: Mapping[TopicPartition, int] | None,
    ) -> dict[str, dict[int, int]]:
        topology = self.topology
        if given is not None:
            starts = {
                topic: {at.partition: begin for at, begin in given.items() if at.topic == topic} for topic in lows
            }
            wrong = [at for at in lows if not lows[at].keys() <= starts[at].keys() <= self.lows(at).keys()]
            if wrong:
                raise SettingsError([Problem("--from", f"give an offset for every partition of {', '.join(wrong)}")])
            return {
                topic: {at: max(resets[topic].get(at, 0), starts[topic][at]) for at in lows[topic]} for topic in lows
            }
        if self._mark is not None:
            return {topic: dict(enumerate(offsets)) for topic, offsets in self._mark.begins.items()}
        if all(resets[topic].keys() == lows[topic].keys() for topic in lows):
            return {topic: {at: max(resets[topic][at], low) for at, low in lows[topic].items()} for topic in lows}
        match topology.source.start:
            case "earliest":
                return dict(lows)
            case int() as time_ms:
                return {topic: offsets_at(reader, topic, self.bounds[topic], time_ms) for topic in lows}
            case _:
                text = "with `start: latest`, no topic shows where the fleet began; give the offsets where it began"
                raise SettingsError([Problem("--from", text)])

    @property
    def copies(self) -> dict[str, list[str]]:
        """Map each existing topic for duplicates or conflicts to the verdicts of the records that it contains."""
        topology = self.topology
        both = ["duplicate"] if topology.conflicts is not None else ["duplicate", "conflict"]
        wanted = {topology.duplicates: both, topology.conflicts: ["conflict"]}
        return {topic: verdicts for topic, verdicts in wanted.items() if topic is not None and self.partitions[topic]}

    def complete(self, topic: str) -> bool:
        """Return whether all partitions of a topic still contain their first records."""
        return not any(each.start_deleted for each in self.bounds[topic].values())

    def lows(self, topic: str) -> dict[int, int]:
        """Map each partition of a topic to the lowest offset that the audit reads."""
        return {at: each.low for at, each in self.bounds[topic].items()}

    def ends(self, topic: str) -> dict[int, int]:
        """Map each partition of a topic to the first offset that the fleet might not have judged."""
        return self.begins[topic] | self.committed[topic]

    def read(self, topic: str, begins: Mapping[int, int] | None = None) -> DataFrame:
        """Return the committed records that the audit reads from a topic; ``begins`` can set a higher first offset for
        a partition.
        """
        if not self.bounds[topic]:
            return self.spark.createDataFrame([], RECORDS)
        lows = {at: max(low, (begins or {}).get(at, 0)) for at, low in self.lows(topic).items()}
        ranges = {at: (low, max(self.bounds[topic][at].high, low)) for at, low in lows.items()}
        by_arrival = self.topology.by_arrival and topic in self.topology.source.topics
        return history_of_range(self.spark, self._settings, {topic: ranges}, by_arrival=by_arrival).records

    def _judged_by_the_fleet(self, history: History | None) -> tuple[DataFrame, dict[int, bool]]:
        topic, mark = self.log_topic, self._mark
        lows, begins = self.lows(topic), self.begins[topic]
        if not self.topology.direct:
            # The history of a seed is not in this log.
            bounds = self.bounds[topic]
            return self.read(topic), {at: not each.start_deleted and mark is None for at, each in bounds.items()}
        if history is not None:
            refuse_unfit(self.topology, history)
            before = self._accepted_by_seed(self._before_the_log(history))
            return before.unionByName(self.read(topic, begins)), dict.fromkeys(lows, True)
        if mark is not None and mark.history == "topics":
            whole, seeded = self.read(topic), fn.col("offset") < by_key(begins, fn.col("partition"))
            before = self._accepted_by_seed(whole.where(seeded))
            return before.unionByName(whole.where(~seeded)), {at: low == 0 for at, low in lows.items()}
        return self.read(topic, begins), {
            at: mark is None and (begins[at] > low or low == 0) for at, low in lows.items()
        }

    def _before_the_log(self, history: History) -> DataFrame:
        """Return the historical records before the fleet's first offset. Records without offsets get negative offsets,
        in the order in which a seed judges them: by event time, and then by content digest.
        """
        topology, topic = self.topology, self.log_topic
        if history.placed:
            mine = fn.col("offset") < by_key(self.begins[topic], fn.col("partition"))
            return history.records.where(mine).select(*RECORDS.fieldNames())
        rows = placed(identified(history.records, topology), topology, tasks=self.partitions[topic], order="event_time")
        whole = Window.partitionBy("dedup_partition")
        ordered = whole.orderBy("dedup_time_ms", _DIGEST)
        rows = digested(rows, _DIGEST)
        offset = fn.row_number().over(ordered).cast("long") - fn.count(fn.lit(1)).over(whole) - 1
        coordinates = {"topic": fn.lit(topic), "partition": fn.col("dedup_partition"), "offset": offset}
        numbered = rows.withColumns(coordinates).drop("dedup_partition", _DIGEST, *(field.name for field in IDENTIFIED))
        return numbered.select(*RECORDS.fieldNames())

    def _accepted_by_seed(self, history: DataFrame) -> DataFrame:
        """Return a seed's history without the records that `dedup spark seed` rejected because of future event times.

        An audit accepts any future event time. A record that the seed rejected would therefore advance stream time and
        make later records late.
        """
        if self._mark is None or self.topology.future is not OnFuture.DEAD_LETTER:
            return history
        latest_ms = self._mark.judged_at_ms + self.topology.max_clock_skew_ms
        accepted = fn.expr(f"dedup_time_ms IS NULL OR dedup_time_ms <= {latest_ms}")
        return identified(history, self.topology).where(accepted).select(*history.columns)


def _settled(
    reader: KafkaReader, bounds: Mapping[str, Mapping[int, Bounds]], sources: Sequence[str]
) -> dict[str, dict[int, Bounds]]:
    """Return the bounds that can be read: a source partition ends where its first open transaction began.

    A fleet cannot have judged records after that offset. In the other topics, open transactions may hide records that
    the fleet has committed. Raises BrokerUnavailable if these records stay hidden.
    """
    ends = {topic: {at: each.high for at, each in part.items()} for topic, part in bounds.items()}
    refuse_open(reader, {topic: part for topic, part in ends.items() if topic not in sources})
    found = {topic: dict(part) for topic, part in bounds.items()}
    for topic in sources:
        for at, stable in reader.stable_ends(topic, ends[topic]).items():
            each = bounds[topic][at]
            found[topic][at] = replace(each, high=max(each.low, min(each.high, stable)))
    return found


def by_key(values: Mapping[int, int] | Mapping[str, int], key: Column) -> Column:
    """Return a column with the value of ``key`` in ``values``, or 0 if ``values`` lacks the key."""
    if not values:
        return fn.lit(0)
    mapped = fn.create_map(*(fn.lit(each) for pair in values.items() for each in pair))
    return fn.coalesce(mapped[key], fn.lit(0))


def path() -> Column:
    """Return a column with each record's position in the form ``topic/partition/offset``, which workers also use in
    headers.
    """
    return fn.concat_ws("/", *(fn.col(name).cast("string") for name in COORDINATES))


def digest(headers: Column, timestamp_ms: Column) -> Column:
    """Return a 128-bit digest of a record's key, value, headers, and timestamp. Null and empty values have different
    digests.

    The digest is a truncated SHA-256 hash. With a faster checksum, an attacker could hide a change by constructing a
    collision.
    """
    sizes = (fn.coalesce(fn.length(name), fn.lit(-1)).cast("string") for name in ("key", "value"))
    head = fn.concat_ws(" ", timestamp_ms.cast("string"), *sizes, fn.to_json(headers)).cast("binary")
    content = (fn.coalesce(fn.col(name), fn.lit(b"")) for name in ("key", "value"))
    return fn.unhex(fn.substring(fn.sha2(fn.concat(head, *content), 256), 1, _DIGITS))


def _with_header(headers: Column, name: str, value: Column) -> Column:
    added = fn.array(fn.struct(fn.lit(name).alias("key"), value.cast("binary").alias("value"))).cast(HEADERS)
    return fn.concat(headers, added)


def _last_header(name: str) -> Column:
    named = fn.filter("headers", lambda each: each["key"] == name)
    return fn.try_element_at(named, fn.lit(-1))["value"].cast("string")


def _filed(records: DataFrame, topics: Sequence[str], side: str) -> DataFrame:
    """Return the records of a side topic with their reasons, and with the position and a digest of each source record.

    If a record's headers do not name a source record, `topic` is null, and `source` is the record's own position. If a
    record contains a digest instead of the original value, `stand_in` is that digest.
    """
    replaced, named = _last_header(evidence.DIGEST_HEADER), _last_header(evidence.SOURCE_HEADER)
    own = fn.size("headers") - len(_TAILS[side]) - replaced.isNotNull().cast("int")
    original = fn.slice("headers", 1, fn.greatest(own, fn.lit(0)))
    timestamp = fn.coalesce(_last_header(evidence.TIMESTAMP_HEADER).cast("long"), fn.lit(-(1 << 62)))
    topic, partition, offset = (fn.regexp_extract(named, _PATH, group) for group in (1, 2, 3))
    found = records.select(
        fn.lit(side).alias("side"),
        fn.when(topic.isin(*topics), topic).alias("topic"),
        partition.try_cast("int").alias("partition"),
        offset.try_cast("long").alias("offset"),
        fn.coalesce(_last_header(evidence.REASON_HEADER), fn.lit("")).alias("reason"),
        digest(original, timestamp).alias("digest"),
        replaced.alias("stand_in"),
        path().alias("place"),
    )
    return found.withColumn("source", fn.when(fn.col("topic").isNull(), fn.col("place")).otherwise(path()))


class Sides(NamedTuple):
    """The records in the late and dead-letter topics, grouped by the source record that their headers name."""

    topics: Mapping[str, str]
    """Maps a verdict to its topic."""
    records: DataFrame
    """One row for each `source`. For each topic, a column such as `times_late` counts the topic's records that name
    this source record, and a struct such as `late` contains the first of these records. `refused` is true if only the
    broker, a worker's clock, or the schema registry can explain the dead letter.
    """
    with_stand_ins: tuple[str, ...]
    """Verdicts whose topics contain a record with a digest in place of the value."""
    refused_number: int


def sides_of(cut: AuditCut) -> Sides:
    """Return the records of the late and dead-letter topics. The caller must unpersist `Sides.records`."""
    topology = cut.topology
    topics = {"late": topology.late.topic} if isinstance(topology.late, LateTo) else {}
    topics |= {"dead_letter": topology.dead_letter}
    every = (_filed(cut.read(name), topology.source.topics, verdict) for verdict, name in topics.items())
    first, is_it = fn.struct("place", "reason", "digest", "stand_in"), {each: fn.col("side") == each for each in _TAILS}
    times = (fn.count_if(where).alias(f"times_{verdict}") for verdict, where in is_it.items())
    firsts = (fn.min(fn.when(where, first)).alias(verdict) for verdict, where in is_it.items())
    reasons = [*by_evidence(topology), *([FUTURE] if topology.future is OnFuture.DEAD_LETTER else [])]
    refused = fn.col("topic").isNotNull() & fn.col("dead_letter.reason").isin(*reasons)
    records = reduce(DataFrame.unionByName, every).groupBy("source", *COORDINATES).agg(*times, *firsts)
    records = records.withColumn("refused", refused).persist()
    stand_ins = (fn.count(f"{verdict}.stand_in").alias(verdict) for verdict in topics)
    (facts,) = records.agg(fn.count_if("refused").alias("refused"), *stand_ins).collect()
    standing = tuple(verdict for verdict in topics if facts[verdict])
    return Sides(topics, records, standing, facts["refused"] if topology.direct else 0)


def forwarded_by_replay(topics: Sequence[str]) -> Column:
    """Return a column that is true if the last two headers show that `dedup replay --late --forward` wrote the
    record.
    """
    last, before = (fn.try_element_at(fn.col("headers"), fn.lit(at)) for at in (-1, -2))
    place = fn.regexp_extract(last["value"].cast("string"), _PATH, 1).isin(*topics)
    marked = (before["key"] == evidence.VERDICT_HEADER) & (before["value"].cast("string") == "late")
    return fn.coalesce(marked & (last["key"] == evidence.REPLAYED_HEADER) & place, fn.lit(False))  # noqa: FBT003


def expected(cut: AuditCut, sides: Sides) -> DataFrame:
    """Return every record in the log with its verdict, its expected digests, and its copies in side topics.

    For some dead letters, the reason depends on the broker, a worker's clock, or the schema registry, and not on the
    record. Such dead letters left no sighting and did not advance stream time, so the audit excludes them when it
    judges the log. The columns include `source`, `verdict`, `reason`, `time_ms`, `stream_ms`, `before_ms` (the stream
    time before the record), `task`, `at` (the offset in the log), and the columns of `Sides.records`. `pending` is true
    if the fleet might not have judged the record yet. `history` is true if the record precedes the fleet's first
    offset. `doubtful` is true if another verdict is possible. `fault` is the dead-letter reason that follows from the
    record's content, and `forwards` is true if the fleet forwards records with this verdict. `raw`, `out`, and `copy`
    are the record's digests in the source topic, in the output topic, and in the topic for duplicates or conflicts. If
    a side-topic record does not name a record of the log, the side-topic record gets a separate row with a null
    `verdict`.
    """
    topology, records, contiguous = cut.topology, cut.log, cut.contiguous
    if sides.refused_number:
        few = sides.refused_number <= _MOST_BROADCAST
        refused = sides.records.where("refused").selectExpr("source AS refused_source", "dead_letter.reason")
        refused, is_refused = fn.broadcast(refused) if few else refused, path() == fn.col("refused_source")
        contiguous = contiguous and few
        others, records = records.join(refused, is_refused), records.join(refused, is_refused, "left_anti")
    feeds = () if topology.direct else feeds_of(topology, cut.partitions | cut.begun_with)
    rows = judged(records, topology, now_ms=_NO_CEILING_MS, order="offsets", contiguous=contiguous, feeds=feeds)
    names = {"time_ms": "dedup_time_ms", "stream_ms": "stream_time_ms", "id": "dedup_id"}
    names |= {"task": "dedup_partition", "at": "dedup_offset"}
    ours = (fn.col(theirs).alias(name) for name, theirs in names.items())
    fault = fn.when(fn.col("verdict") == "dead_letter", fn.col("reason")).alias("fault")
    rows = rows.select(path().alias("source"), "verdict", "reason", fault, *ours, *_digests(cut))
    if sides.refused_number:
        dead = {"verdict": fn.lit("dead_letter"), "task": fn.col("partition"), "at": fn.col("offset")}
        dead |= {"time_ms": fn.col("dedup_time_ms"), "forwards": fn.expr("false"), "source": path()}
        dead |= {"raw": digest(fn.col("headers"), fn.col("timestamp_ms")), "fault": fn.col("dedup_fault")}
        refused = identified(others, topology).select("reason", *(value.alias(name) for name, value in dead.items()))
        rows = rows.unionByName(refused, allowMissingColumns=True)
    pending, history = (by_key(of(cut.log_topic), fn.col("task")) for of in (cut.ends, cut.begins.__getitem__))
    flags = {"pending": fn.col("at") >= pending, "history": fn.col("at") < history}
    rows = rows.join(sides.records.drop("refused"), "source", "full_outer").withColumns(flags)
    return _with_doubt(cut, rows, unexplained=sides.refused_number > 0).drop("id")


def _digests(cut: AuditCut) -> list[Column]:
    topology, own, verdict = cut.topology, fn.col("headers"), fn.col("verdict")
    forwards, why = ["unique", "exempt"], fn.when(verdict.isin("exempt", "unique"), fn.col("reason"))
    if isinstance(topology.late, LateForward):
        forwards, why = [*forwards, "late"], fn.when(verdict == "late", fn.lit("late")).otherwise(why)
    ahead = fn.when(why.isNotNull(), _with_header(own, evidence.VERDICT_HEADER, why)).otherwise(own)
    if topology.output is not None and topology.output.headers:
        ahead = _with_header(ahead, evidence.SOURCE_HEADER, path())
    # The record of a seeded sighting may come from a file without offsets. The audit assigns a negative offset to this
    # record, but the fleet writes `OUTSIDE_KAFKA` to the header.
    outside = fn.when(fn.col("first_offset") < 0, fn.lit(OUTSIDE_KAFKA)).otherwise(fn.col("first_offset"))
    first = fn.concat_ws("/", "first_topic", fn.col("first_partition").cast("string"), outside.cast("string"))
    copied = _with_header(own, evidence.FIRST_TIME_HEADER, fn.col("first_time_ms").cast("string"))
    copied = _with_header(copied, evidence.FIRST_SOURCE_HEADER, first)
    raw = digest(own, fn.col("timestamp_ms"))
    if topology.direct:
        # In a direct topology, only records in side topics are compared with this digest.
        raw = fn.when(verdict.isin(*_TAILS), raw)
    return [
        verdict.isin(*forwards).alias("forwards"),
        raw.alias("raw"),
        digest(ahead, fn.col("timestamp_ms") if cut.stamped else fn.lit(0)).alias("out"),
        fn.when(verdict.isin("duplicate", "conflict"), digest(copied, fn.lit(0))).alias("copy"),
    ]


def _with_doubt(cut: AuditCut, rows: DataFrame, *, unexplained: bool) -> DataFrame:
    """Add the columns `before_ms` (null if not needed) and `doubtful` to the rows.

    If the beginning of a log was deleted, the deleted part might have contained any ID. The event time of each sighting
    in the deleted part is at most the stream time of the first remaining on-time record plus the grace. If a record's
    ID could have an unexpired sighting in the deleted part, the audit doubts the verdicts on this record and on all
    later records with the same ID.
    """
    topology, window, no = cut.topology, cut.topology.window, fn.expr("false")
    clamped, unknown = topology.future is OnFuture.CLAMP, [task for task, known in cut.known.items() if not known]
    by_log, doubt, before = Window.partitionBy("task").orderBy("at"), no, fn.lit(None).cast("long")
    if clamped or unexplained:
        before = fn.max("stream_ms").over(by_log.rowsBetween(Window.unboundedPreceding, -1))
    rows = rows.withColumn("before_ms", before)
    if clamped:
        beyond = fn.expr(f"time_ms > before_ms + {topology.max_clock_skew_ms}")
        doubt |= fn.coalesce(fn.bool_or(beyond).over(by_log), no)
    if unknown:
        # If late records are dropped or forwarded, the topology has no late topic, so any record may have been late.
        on_time = fn.expr("coalesce(times_late, 0) = 0") if isinstance(topology.late, LateTo) else no
        whole = by_log.rowsBetween(Window.unboundedPreceding, Window.unboundedFollowing)
        first_ms = fn.first(fn.when(on_time, fn.col("stream_ms")), ignorenulls=True).over(whole)
        early = fn.coalesce(fn.col("stream_ms") - window.retention_ms <= first_ms + window.grace_ms, fn.expr("true"))
        rows = rows.withColumn("front", fn.col("task").isin(*unknown) & early)
        of_id = fn.bool_or("front").over(Window.partitionBy("task", "id").orderBy("at"))
        doubt |= fn.col("id").isNotNull() & fn.coalesce(of_id, no)
        if not topology.direct:
            # A feed may have been far ahead of stream time, so purged records may have any event time.
            doubt |= fn.col("task").isin(*unknown)
    return rows.withColumn("doubtful", doubt).drop("front")
