"""Implements `dedup spark seed`, which turns a history into the initial state of a fleet.

The command judges the history as a backfill does, and keeps the sightings that have not expired. The first transaction
writes a seed mark in the phase `seeding` to every changelog partition. If the topology repartitions records, the
command commits the source offsets before it writes any sightings. Spark tasks then write the sightings of each
partition under the fleet's transactional IDs. A partition's last transaction contains the task record, the seed mark in
the phase `seeded`, and the group's offset. A worker's task that starts on a partition that is not fully seeded stops
with StateIncompatible.

The seed marks contain the seed's name, offsets, and clock time. Therefore, after the command is killed, a second run
writes the same records and finishes the seed. The command rejects a second run with a different history or different
offsets, because otherwise records of the first run would stay in the changelog.

Writing a changelog record twice is harmless, so Spark can repeat task attempts or run several at the same time. To the
writing task, the failure of an upstream Spark task looks like a normal end of input. The writing task therefore commits
a partition's last transaction only if the count and digest of the records match the seed mark.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import groupby
from operator import itemgetter
from typing import Final, Literal

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as fn
from pyspark.sql.pandas.types import from_arrow_schema

from dedup.errors import CommitUnknown, DedupError, Problem, SettingsError, StateIncompatible
from dedup.kafka.client import KafkaWire
from dedup.kafka.record_batch import Line, fill
from dedup.kafka.topic_admin import Admin, Group, on_cluster
from dedup.kafka.transactional_producer import Session
from dedup.kafka.wire import FetchedRecord, Position, TopicPartition
from dedup.settings import Settings
from dedup.spark.batch_verdicts import Counts, history_of, refuse_unfit
from dedup.spark.files import History
from dedup.spark.kafka_source import history_of_range, refuse_open
from dedup.spark.seed_history import Folded, changelog_rows, fold_history
from dedup.spark.session import PicklableSettings, connected, described, shuffles_for, translated_errors
from dedup.store.changelog import (
    SEED_MARK_KEY,
    TASK_RECORD_KEY,
    SeedMark,
    TaskRecord,
    decode_seed_mark,
    encode_seed_mark,
    encode_task_record,
)
from dedup.topology.model import SubTopology, Topology
from dedup.verify.kafka_reader import KafkaReader
from dedup.worker.layout import alone
from dedup.worker.offsets import bounds_of, committed_offset, first_offset, first_record
from dedup.worker.topics import Cluster, group_is_new, prepare

Until = Mapping[TopicPartition, int] | int | Literal["earliest", "latest"]
"""The point where the history ends and the fleet takes over: an offset for each source partition, a record time in ms,
or the first or last offsets of all source partitions.
"""

Row = tuple[int, bytes, bytes, int]
"""The changelog partition, the key, the value, and a hash of key and value."""

_COMMIT_ROWS: Final = 50_000
_MOST_ATTEMPTS: Final = 50
_RETRY_S: Final = 0.1
_DIGEST_MASK: Final = (1 << 64) - 1
_WRITTEN: Final = pa.schema([("partition", pa.int32()), ("was_there", pa.bool_())])


class PartitionTruncated(DedupError):
    """Raised if rows of a partition are missing because an upstream Spark task failed; Spark then retries the task."""


@dataclass(frozen=True, slots=True)
class SeededPartition:
    """The result of `dedup spark seed` for one changelog partition."""

    partition: int
    sightings: int
    """Number of changelog records, one for each ID and segment."""
    stream_time_ms: int
    next_offset: int
    was_there: bool
    """Whether an earlier run had already finished this partition."""


@dataclass(frozen=True, slots=True)
class Seeded:
    """The result of `dedup spark seed`."""

    name: str
    partitions: tuple[SeededPartition, ...]
    begins: Mapping[TopicPartition, int]
    counts: Counts
    """The verdict counts of the part of the history that was judged."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _ClusterState:
    """The state of the cluster before `dedup spark seed` begins a seed or finishes an interrupted one."""

    cluster: Cluster
    begins: Mapping[TopicPartition, int]
    """The offset where the fleet will begin in each source partition."""
    next_offsets: Mapping[int, int]
    """Maps each task to the offset where it will begin to read its feeding partition."""
    judged_at_ms: int
    """The wall-clock time of this seed's first run, which determines which event times are in the future."""
    marks: Mapping[int, SeedMark]
    """The seed marks of an earlier run, by partition; empty in the first run."""


@dataclass(frozen=True, slots=True)
class WritePlan:
    """The parameters of the Spark tasks that write sightings to the changelog."""

    topology: Topology
    settings: PicklableSettings
    marks: Mapping[int, SeedMark]
    """The seed marks in the phase `seeding`, by changelog partition."""
    records: Mapping[int, TaskRecord]
    commit_rows: int


def seed(
    spark: SparkSession,
    topology: Topology,
    settings: Settings,
    until: Until,
    *,
    commit_rows: int = _COMMIT_ROWS,
    history: History | DataFrame | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Seeded:
    """Write a fleet's changelog and offsets as if the fleet had judged the history up to ``until``.

    ``history`` is a `History` of files or a DataFrame with the schema `columns.RECORDS`; if ``history`` is None, the
    source topics are read from the beginning. The function ignores rows whose offset or timestamp shows that the fleet
    will read them. ``commit_rows`` is the number of changelog records per transaction. Raises StateIncompatible,
    without writing a seed, if the group or the changelog contains state that `dedup spark seed` did not write. Also
    raises StateIncompatible if an earlier run began a different seed, or if all records in the history are dead
    letters. Raises BrokerUnavailable if a transaction that began before ``until`` stays open.
    """
    began_s = time.monotonic()
    work = partial(on_cluster, settings, f"dedup-{topology.name}-seed")
    found = work(partial(_cluster_state, topology, settings, until))
    _refuse_open(settings, found.begins)
    topology = topology.grouped_by(1)
    if history is None:
        whole = _of_topics(spark, settings, found, by_arrival=topology.by_arrival)
    else:
        given = history if isinstance(history, History) else history_of(history, identified=False)
        refuse_unfit(topology, given)
        whole = _before(given, found, until)
    with shuffles_for(spark, whole.size_bytes), described(spark, f"{topology.name}: seed from {whole.place}"):
        with translated_errors():
            folded = fold_history(
                whole,
                topology,
                tasks=len(found.next_offsets),
                source_partitions={name: found.cluster.topics[name].partitions for name in topology.source.topics},
                now_ms=found.judged_at_ms,
            )
        rows = changelog_rows(folded.sightings, topology.window)
        rows = rows.withColumn("hash", fn.xxhash64("key", "value")).persist()
        try:
            _refuse_unread(folded.counts, whole.place)
            marks, records = _marks(topology, found, folded, rows, "topics" if history is None else "files")
            plan = WritePlan(topology, PicklableSettings.of(settings), marks, records, commit_rows)
            work(lambda wire, _: _SeedWriter(plan, wire).begin(found))
            total = sum(mark.sightings for mark in marks.values())
            tell(f"{'finishing' if found.marks else 'writing'} seed {marks[0].seed}: {total:,} records of sightings")
            written = _write_sightings(rows, plan)
            # Spark tasks receive no rows of partitions without sightings, so the driver finishes these partitions.
            written |= work(lambda wire, _: _SeedWriter(plan, wire).write_empty())
        finally:
            rows.unpersist()
            folded.sightings.unpersist()
    partitions = (
        SeededPartition(at, mark.sightings, mark.stream_time_ms, mark.next_offset, written[at])
        for at, mark in sorted(marks.items())
    )
    seconds = round(time.monotonic() - began_s, 3)
    return Seeded(marks[0].seed, tuple(partitions), found.begins, folded.counts, seconds)


def _refuse_unread(counts: Counts, place: str) -> None:
    """Raise StateIncompatible if all records are dead letters, because a fleet without state would forward
    duplicates.
    """
    dead = counts.verdicts.get("dead_letter", 0)
    if dead and dead == sum(counts.verdicts.values()):
        why = ", ".join(f"{count:,} {cause}" for cause, count in counts.causes["dead_letter"].items())
        raise StateIncompatible(
            f"nothing was seeded: all {dead:,} records of {place} are dead letters ({why}). Compare `source.format`, "
            f"`tracking_id`, and `event_time` with the records."
        )


def _refuse_open(settings: Settings, begins: Mapping[TopicPartition, int]) -> None:
    """Raise BrokerUnavailable if a transaction that began before the fleet's first offsets stays open, because its
    records would be neither in the history nor read by the fleet.
    """
    ends: dict[str, dict[int, int]] = {}
    for (topic, partition), offset in begins.items():
        ends.setdefault(topic, {})[partition] = offset
    with KafkaReader(settings) as reader:
        refuse_open(reader, ends)


def _of_topics(spark: SparkSession, settings: Settings, found: _ClusterState, *, by_arrival: bool) -> History:
    """Return the records of the source topics up to the offsets where the fleet takes over."""
    ranges: dict[str, dict[int, tuple[int, int]]] = {}
    with KafkaReader(settings) as reader:
        bounds = {topic: reader.bounds(topic) for topic in dict.fromkeys(place.topic for place in found.begins)}
    for (topic, partition), end in found.begins.items():
        ranges.setdefault(topic, {})[partition] = bounds[topic][partition].low, end
    return history_of_range(spark, settings, ranges, by_arrival=by_arrival)


def _before(history: History, found: _ClusterState, until: Until) -> History:
    """Return the history without the rows whose offset or timestamp shows that the fleet will read them."""
    pairs = ((f"{place.topic}/{place.partition}", offset) for place, offset in found.begins.items())
    begins = fn.create_map(*(fn.lit(each) for pair in pairs for each in pair))
    begin = begins[fn.concat_ws("/", "topic", fn.col("partition").cast("string"))]
    # Rows that do not belong to source partitions are kept, because `fold_history` must reject them.
    mine = fn.col("offset").isNull() | begin.isNull() | (fn.col("offset") < begin)
    if isinstance(until, int):
        mine &= fn.col("offset").isNotNull() | fn.col("timestamp_ms").isNull() | (fn.col("timestamp_ms") < until)
    return history.where(mine)


def _marks(
    topology: Topology, found: _ClusterState, folded: Folded, rows: DataFrame, origin: Literal["topics", "files"]
) -> tuple[dict[int, SeedMark], dict[int, TaskRecord]]:
    """Return each task's seed mark (in the phase `seeding`) and task record.

    Raises StateIncompatible if an earlier run started writing a different seed.
    """
    counted = rows.groupBy("dedup_partition").agg(fn.count("key"), fn.bit_xor("hash"))
    contents = dict.fromkeys(folded.progress, (0, f"{0:016x}"))
    contents |= {task: (count, f"{digest & _DIGEST_MASK:016x}") for task, count, digest in counted.collect()}
    begins: dict[str, list[int]] = {}
    for place, offset in sorted(found.begins.items()):
        begins.setdefault(place.topic, []).append(offset)
    partitions, window = found.cluster.source_partitions(topology), topology.window
    facts = {
        "identity": topology.state_identity(partitions),
        "window": [window.guard_ms, window.grace_ms, window.segment_ms],
        "begins": begins,
        "judged_at_ms": found.judged_at_ms,
        "tasks": [[*contents[task], each.stream_time_ms] for task, each in folded.progress.items()],
    }
    name = blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8).hexdigest()
    others = {mark.seed for mark in found.marks.values()} - {name}
    if others:
        raise StateIncompatible(
            f"{topology.changelog_topic} holds seed {', '.join(sorted(others))}, but this history makes seed {name}: "
            f"the history, the topology or --until differs from that of the first run. Nothing was written. Run the "
            f"first command again with its input, or run `dedup reset` and seed again."
        )
    fingerprint = topology.state_fingerprint(partitions)
    topic_id = found.cluster.topics[topology.feeding_topics[0]].topic_id
    marks, records = {}, {}
    for task, each in folded.progress.items():
        offset, time_ms = found.next_offsets[task], each.stream_time_ms
        marks[task] = SeedMark(
            "seeding", name, offset, time_ms, *contents[task], found.judged_at_ms, begins, history=origin
        )
        records[task] = TaskRecord(
            fingerprint, time_ms, each.feeds, offset, window.segment_ms, feeding_topic_id=topic_id
        )
    return marks, records


def _write_sightings(rows: DataFrame, plan: WritePlan) -> dict[int, bool]:
    """Seed the partitions that have sightings. Map each partition to whether an earlier run had already finished it."""
    # Earlier segments must come first, as in `sighting_batches`. A key begins with its segment.
    placed = rows.repartition(len(plan.marks), "dedup_partition").sortWithinPartitions("dedup_partition", "key")
    try:
        with translated_errors():
            reports = placed.mapInArrow(partial(_write_partitions, plan), from_arrow_schema(_WRITTEN)).collect()
    except PySparkException as error:
        said = next((line for line in reversed(str(error).strip().splitlines()) if "Error" in line or ": " in line), "")
        raise DedupError(
            f"the seed {plan.marks[0].seed} was not finished: {said.strip()}. The fleet refuses to start until it is. "
            f"Run the same command again."
        ) from error
    return {row["partition"]: row["was_there"] for row in reports}


async def _cluster_state(
    topology: Topology, settings: Settings, until: Until, wire: KafkaWire, admin: Admin
) -> _ClusterState:
    """Create missing topics, and return the cluster's state.

    Raises StateIncompatible if the group has offsets or the changelog has records that `dedup spark seed` did not
    write, and DedupError if the group has members.
    """
    await Group(wire, topology.name).refuse_members()
    fresh = await group_is_new(topology, wire, admin)
    cluster = await prepare(topology, settings, admin, may_create_changelog=fresh)
    await alone(topology, cluster, wire, "dedup spark seed")
    tasks = cluster.topics[topology.feeding_topics[0]].partitions
    marks = {task: mark for task in range(tasks) if (mark := await _mark(topology, wire, task)) is not None}
    if marks:
        mark = next(iter(marks.values()))
        by_topic = ((topic, enumerate(offsets)) for topic, offsets in mark.begins.items())
        begins = {TopicPartition(topic, at): offset for topic, offsets in by_topic for at, offset in offsets}
        _refuse_other_begins(topology, until, begins)
        if len(marks) < tasks:
            raise _not_new(topology, f"{tasks - len(marks)} of {tasks} partitions have no seed mark")
        next_offsets = {task: mark.next_offset for task, mark in marks.items()}
        return _ClusterState(cluster, begins, next_offsets, mark.judged_at_ms, marks)
    if not fresh:
        raise _not_new(topology, "its group has committed offsets")
    places = {name: range(cluster.topics[name].partitions) for name in topology.source.topics}
    sources = [TopicPartition(name, partition) for name, partitions in places.items() for partition in partitions]
    logs = [TopicPartition(topology.feeding_topics[0], task) for task in range(tasks)]
    if not topology.direct:
        await _refuse_used(topology, wire, sources, logs)
    begins = await _begins(topology, wire, sources, until)
    next_offsets = {
        log.partition: begins[log] if topology.direct else (await bounds_of(wire, log)).start for log in logs
    }
    return _ClusterState(cluster, begins, next_offsets, int(time.time() * 1000), {})


def _not_new(topology: Topology, why: str) -> StateIncompatible:
    return StateIncompatible(
        f"{topology.name} cannot be seeded: {why}. A seed needs a group without offsets and a new changelog. Nothing "
        f"was changed. To discard the existing state, run `dedup reset` without `--to`, and then seed."
    )


async def _mark(topology: Topology, wire: KafkaWire, task: int) -> SeedMark | None:
    """Return the seed mark at the beginning of a changelog partition, or None if the partition is empty."""
    first = await _first_record(wire, TopicPartition(topology.changelog_topic, task))
    if first is None:
        return None
    if first.key == SEED_MARK_KEY and first.value is not None:
        return decode_seed_mark(first.value)
    raise _not_new(topology, f"{topology.changelog_topic}/{task} holds the state of a fleet")


async def _first_record(wire: KafkaWire, partition: TopicPartition) -> FetchedRecord | None:
    bounds = await bounds_of(wire, partition)
    return await first_record(wire, partition, bounds.start, bounds.end)


def _refuse_other_begins(topology: Topology, until: Until, begins: Mapping[TopicPartition, int]) -> None:
    """Raise StateIncompatible if the offsets in ``until`` differ from the earlier run's offsets.

    The function accepts `latest`, `earliest`, and times, because the earlier run has already converted them to offsets.
    """
    if not isinstance(until, Mapping) or dict(until) == dict(begins):
        return
    first, now = (
        ",".join(f"{topic}/{partition}={offset}" for (topic, partition), offset in sorted(places.items()))
        for places in (begins, until)
    )
    raise StateIncompatible(
        f"{topology.changelog_topic} holds a seed after which the fleet begins at {first}, and --until says {now}. "
        f"Nothing was changed. Finish that seed with --until {first}, or run `dedup reset` and seed again."
    )


async def _refuse_used(
    topology: Topology, wire: KafkaWire, sources: list[TopicPartition], logs: list[TopicPartition]
) -> None:
    """Raise StateIncompatible if the group has committed source offsets or the repartition topic has records."""
    for topic, partition in sources:
        if await committed_offset(wire, topology.name, TopicPartition(topic, partition)) is not None:
            raise _not_new(topology, f"its group has committed an offset of {topic}/{partition}")
    for topic, partition in logs:
        if await _first_record(wire, TopicPartition(topic, partition)) is not None:
            raise _not_new(topology, f"{topic}/{partition} holds records")


async def _begins(
    topology: Topology, wire: KafkaWire, places: list[TopicPartition], until: Until
) -> dict[TopicPartition, int]:
    """Convert ``until`` to an offset for each source partition. Raises SettingsError for invalid offsets."""
    if isinstance(until, int | str):
        return {place: await first_offset(wire, place, until) for place in places}
    problems = []
    for place in dict.fromkeys([*places, *until]):
        bounds = await bounds_of(wire, place) if place in places else None
        name = f"{place.topic}/{place.partition}"
        if bounds is None:
            problems.append(f"{name} is not a source partition of {topology.name}")
        elif place not in until:
            problems.append(f"{name} is missing: give an offset for every source partition")
        elif not bounds.start <= until[place] <= bounds.end:
            problems.append(
                f"{name} holds offsets {bounds.start} to {bounds.end}, and {until[place]} is not among them"
            )
    if problems:
        raise SettingsError([Problem("--until", text) for text in problems])
    return dict(until)


def _write_partitions(plan: WritePlan, arrow: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write changelog records, which are sorted by partition, and yield a row of `_WRITTEN` for each partition."""

    async def write(partition: int, rows: Iterable[Row]) -> bool:
        async with connected(plan.settings.reveal(), f"dedup-{plan.topology.name}-seed") as wire:
            return await _SeedWriter(plan, wire).write(partition, rows)

    columns = (batch.select(["dedup_partition", "key", "value", "hash"]).columns for batch in arrow)
    every = (row for batch in columns for row in zip(*(column.to_pylist() for column in batch), strict=True))
    for partition, rows in groupby(every, key=itemgetter(0)):
        written = {"partition": partition, "was_there": asyncio.run(write(partition, rows))}
        yield pa.RecordBatch.from_pylist([written], schema=_WRITTEN)


@dataclass(frozen=True, slots=True)
class _SeedWriter:
    """Writes the seed marks, sightings, and offsets of `dedup spark seed` under the fleet's transactional IDs."""

    _plan: WritePlan
    _wire: KafkaWire

    @property
    def _topology(self) -> Topology:
        return self._plan.topology

    def _session(self, kind: SubTopology, partition: int, topic: str | None = None) -> Session:
        topology, timeout_ms = self._topology, self._plan.settings.plain.transaction_timeout_ms
        name = topology.transactional_id(kind, partition, topic)
        return Session(self._wire, name, topology.name, timeout_ms=timeout_ms)

    async def _is_begun(self, place: TopicPartition) -> bool:
        """Return whether the group has committed an offset for a partition."""
        return await committed_offset(self._wire, self._topology.name, place) is not None

    def _changelog(self, partition: int) -> TopicPartition:
        return TopicPartition(self._topology.changelog_topic, partition)

    async def begin(self, found: _ClusterState) -> None:
        """Write seed marks in the phase `seeding` to all changelog partitions in one transaction.

        A `seeding` mark prevents the fleet from starting a task on the mark's partition. If the topology repartitions
        records, the method then commits the source offsets; otherwise, a fleet started during the seed would
        repartition the history.
        """
        marks = {} if found.marks else self._plan.marks
        for partition in marks:
            # An open transaction of a stopped worker must not be committed after the marks.
            await self._session("dedup", partition).open()
        if marks:
            session = self._session("dedup", min(marks))
            await session.open()
            lines = {self._changelog(at): [_line(SEED_MARK_KEY, encode_seed_mark(mark))] for at, mark in marks.items()}
            await self._insist(session, lines)
            await session.drop()
        for place, offset in () if self._topology.direct else found.begins.items():
            session = self._session("repartition", place.partition, place.topic)
            await session.open()
            if not await self._is_begun(place):
                await session.commit({place: Position(offset)})
            await session.drop()

    async def write_empty(self) -> dict[int, bool]:
        """Finish the partitions without sightings. Map each partition to whether an earlier run had already finished
        it.
        """
        empty = [task for task, mark in self._plan.marks.items() if not mark.sightings]
        return {task: await self.write(task, ()) for task in empty}

    async def write(self, partition: int, rows: Iterable[Row]) -> bool:
        """Seed one changelog partition, and return False. If an earlier run seeded the partition, write nothing and
        return True.

        After PartitionTruncated, TaskMigrated, or CommitUnknown, the caller must write the whole partition again.
        """
        session, feeding = (
            self._session("dedup", partition),
            TopicPartition(self._topology.feeding_topics[0], partition),
        )
        await session.open()
        try:
            # Read the offset in this attempt's own epoch, after the transactions of older attempts have ended.
            if await self._is_begun(feeding):
                return True
            # The changelog holds the whole state. If it later begins at a higher offset, it was truncated.
            changelog = self._changelog(partition)
            kept_from = (await bounds_of(self._wire, changelog)).start
            await self._write_rows(session, partition, rows)
            # After this last transaction, a task of the fleet may start.
            record = replace(self._plan.records[partition], kept_from=kept_from)
            mark = replace(self._plan.marks[partition], phase="seeded")
            closing = (TASK_RECORD_KEY, encode_task_record(record)), (SEED_MARK_KEY, encode_seed_mark(mark))
            lines = {changelog: [_line(key, value) for key, value in closing]}
            await self._insist(session, lines, {feeding: Position(record.next_offset)})
        finally:
            await session.drop()
        return False

    async def _write_rows(self, session: Session, partition: int, rows: Iterable[Row]) -> None:
        changelog, mark = self._changelog(partition), self._plan.marks[partition]
        lines: list[Line] = []
        count, digest, now_ms = 0, 0, int(time.time() * 1000)
        for _, key, value, hashed in rows:
            lines.append((-1, now_ms, key, value, []))
            count += 1
            digest ^= hashed & _DIGEST_MASK
            if len(lines) >= self._plan.commit_rows:
                await self._insist(session, {changelog: lines})
                lines = []
        if (count, f"{digest:016x}") != (mark.sightings, mark.digest):
            raise PartitionTruncated(
                f"{changelog.topic}/{partition}: {count} of {mark.sightings} records arrived, with digest "
                f"{digest:016x} instead of {mark.digest}: an earlier Spark task failed. The partition is not finished; "
                f"Spark tries again."
            )
        if lines:
            await self._insist(session, {changelog: lines})

    async def _insist(
        self,
        session: Session,
        lines: Mapping[TopicPartition, list[Line]],
        offsets: Mapping[TopicPartition, Position] | None = None,
    ) -> None:
        """Commit changelog records and offsets. If the result of a commit is unknown, repeat the commit in a new epoch.

        A repeated commit can write the records twice. Raises TaskMigrated if another owner has taken over the
        partition, and CommitUnknown after `_MOST_ATTEMPTS` attempts.
        """
        for attempt in range(_MOST_ATTEMPTS):
            try:
                if attempt:
                    await session.open()
                    # A task may have advanced the offset in the meantime, and the offset must not go back.
                    if offsets and await self._is_begun(*offsets):
                        return
                for target, part in lines.items():
                    session.add(fill(target, part, compression=self._plan.settings.plain.topics.compression))
                await session.commit(offsets or {})
            except CommitUnknown:
                # The partition's leader has moved, or does not know the new topic yet.
                if attempt + 1 == _MOST_ATTEMPTS:
                    raise
                await asyncio.sleep(_RETRY_S)
            else:
                return


def _line(key: bytes, value: bytes) -> Line:
    return -1, int(time.time() * 1000), key, value, []
