"""`dedup spark seed`: a history becomes the state that a fleet starts from, so that both meet without gap or double.

Theory of operation. The history is judged as a backfill judges it and folded into the sightings that still count. Then,
in this order: one transaction writes `seeding` into every changelog partition; the source offsets are committed, where
the topology repartitions; each partition is written under the fleet's own transactional id; its last transaction holds
the task record, `seeded` and the group's offset. Until that one a task that is started refuses with StateIncompatible.

A seed that was killed is healed by running it again: the marks say which seed it was, with the offsets and the clock it
was judged by, and a second run writes the same records again. Another history or another place is refused: what the
first run wrote would be left in between.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, Literal, TypeVar

from pyspark.errors import PySparkException
from pyspark.sql import functions as fn

from dedup.errors import DedupError, StateIncompatible
from dedup.proof.kafka_reader import KafkaReader
from dedup.session.admin import Admin
from dedup.session.client import KafkaWire
from dedup.session.on_cluster import on_cluster
from dedup.spark.changelog import changelog_rows
from dedup.spark.failures import told
from dedup.spark.files import History
from dedup.spark.kafka_range import history_of_range
from dedup.spark.seed_history import NOTHING_YET, Folded, as_history, fold_history
from dedup.spark.seed_state import Found, Until, begin, look
from dedup.spark.seed_writer import COMMIT_ROWS, WRITTEN_DDL, WritePlan, write_partition, write_partitions
from dedup.spark.shipped import ShippedSettings
from dedup.store.base import TaskRecord
from dedup.store.seed_mark import SeedMark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from dedup.session.wire import TopicPartition
    from dedup.settings import Settings
    from dedup.topology.model import Topology

Tell = Callable[[str], None]
T = TypeVar("T")
_NO_ROWS: Final = (0, f"{0:016x}")


@dataclass(frozen=True, slots=True)
class SeedOptions:
    """How to seed."""

    until: Until
    now_ms: int | None = None
    """The wall clock that decides which times are in the future; now, if None. A second run keeps the first one's."""
    commit_rows: int = COMMIT_ROWS


@dataclass(frozen=True, slots=True)
class SeededPartition:
    """What a seed left in one changelog partition."""

    partition: int
    sightings: int
    """Records of sightings: one for each ID and segment."""
    stream_time_ms: int
    next_offset: int
    was_there: bool
    """Finished by an earlier run."""


@dataclass(frozen=True, slots=True)
class Seeded:
    """A finished seed."""

    name: str
    partitions: tuple[SeededPartition, ...]
    begins: Mapping[TopicPartition, int]
    verdicts: Mapping[str, int]
    """Of the history, as far as it was judged."""


def seed(
    spark: SparkSession,
    topology: Topology,
    settings: Settings,
    options: SeedOptions,
    *,
    history: History | DataFrame | None = None,
    tell: Tell = lambda _: None,
) -> Seeded:
    """The fleet's changelog and offsets are those of a fleet that has judged the history and goes on at `until`.

    ``history`` (files, or a DataFrame of `rows.RECORDS`) is the source topics from their start, if None. Rows that the
    fleet will read itself, by their offset or else by their timestamp, are left out. Raises StateIncompatible where the
    group has offsets, the changelog is not new, or an unfinished seed was another one; nothing is written then.
    """
    found = _on_cluster(topology, settings, partial(_look, topology, settings, options))
    if history is None:
        whole = _of_topics(spark, settings, found)
    else:
        whole = _before(history if isinstance(history, History) else as_history(history), found, options.until)
    with told():
        folded = fold_history(
            whole,
            topology,
            tasks=found.tasks,
            source_partitions={name: found.cluster.topics[name].partitions for name in topology.source.topics},
            now_ms=found.judged_at_ms,
        )
    rows = changelog_rows(folded.sightings, topology.window).withColumn("hash", fn.xxhash64("key", "value")).persist()
    try:
        plan = _plan(topology, settings, found, folded, rows, "topics" if history is None else "files")
        plan = replace(plan, commit_rows=options.commit_rows)
        _refuse_other_seed(topology, found, plan)
        _on_cluster(topology, settings, lambda wire, _: begin(plan, settings, wire, found))
        total = sum(mark.sightings for mark in plan.marks.values())
        tell(f"{'finishing' if found.marks else 'writing'} seed {plan.marks[0].seed}: {total:,} records of sightings")
        written = _write(rows, plan, found.tasks)
        written |= _on_cluster(topology, settings, lambda wire, _: _write_empty(plan, settings, wire))
    finally:
        rows.unpersist()
        folded.sightings.unpersist()
    partitions = (
        SeededPartition(at, mark.sightings, mark.stream_time_ms, mark.next_offset, written[at])
        for at, mark in sorted(plan.marks.items())
    )
    return Seeded(plan.marks[0].seed, tuple(partitions), found.begins, folded.verdicts)


def _on_cluster(topology: Topology, settings: Settings, work: Callable[[KafkaWire, Admin], Awaitable[T]]) -> T:
    return on_cluster(settings, f"dedup-{topology.name}-seed", work)


async def _look(topology: Topology, settings: Settings, options: SeedOptions, wire: KafkaWire, admin: Admin) -> Found:
    return await look(topology, settings, wire, admin, until=options.until, now_ms=options.now_ms)


def _of_topics(spark: SparkSession, settings: Settings, found: Found) -> History:
    """Return the records of the source topics before the place where the fleet begins."""
    ends: dict[str, dict[int, int]] = {}
    for place, offset in found.begins.items():
        ends.setdefault(place.topic, {})[place.partition] = offset
    with KafkaReader(settings) as reader:
        bounds = {topic: reader.bounds(topic, part) for topic, part in ends.items()}
    lows = {topic: {partition: each.low for partition, each in part.items()} for topic, part in bounds.items()}
    return history_of_range(spark, settings, lows, ends)


def _before(history: History, found: Found, until: Until) -> History:
    """Return the rows that the fleet will not read itself, as far as a row says when or where it was."""
    pairs = [
        fn.lit(each) for place, offset in found.begins.items() for each in (f"{place.topic}/{place.partition}", offset)
    ]
    begins = fn.create_map(*pairs)[fn.concat_ws("/", "topic", fn.col("partition").cast("string"))]
    # A place that is no source partition is for the fold to refuse, not to be dropped here.
    mine = fn.col("offset").isNull() | begins.isNull() | (fn.col("offset") < begins)
    if isinstance(until, int):
        mine &= fn.col("offset").isNotNull() | fn.col("timestamp_ms").isNull() | (fn.col("timestamp_ms") < until)
    return replace(history, records=history.records.where(mine), pieces=None)


def _plan(
    topology: Topology,
    settings: Settings,
    found: Found,
    folded: Folded,
    rows: DataFrame,
    origin: Literal["topics", "files"],
) -> WritePlan:
    counted = rows.groupBy("dedup_partition").agg(fn.count("key").alias("rows"), fn.bit_xor("hash").alias("digest"))
    sums = {row["dedup_partition"]: (row["rows"], f"{row['digest'] & (1 << 64) - 1:016x}") for row in counted.collect()}
    fingerprint = topology.state_fingerprint(found.cluster.source_partitions(topology))
    begins: dict[str, list[int]] = {}
    for place, offset in sorted(found.begins.items()):
        begins.setdefault(place.topic, []).append(offset)
    progress = {task: folded.progress.get(task, NOTHING_YET) for task in range(found.tasks)}
    facts = {
        "identity": topology.state_identity(found.cluster.source_partitions(topology)),
        "window": [topology.window.guard_ms, topology.window.grace_ms, topology.window.segment_ms],
        "begins": begins,
        "judged_at_ms": found.judged_at_ms,
        "tasks": [[*sums.get(task, _NO_ROWS), each.stream_time_ms] for task, each in progress.items()],
    }
    name = blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8).hexdigest()
    marks = {
        task: SeedMark(
            "seeding",
            name,
            found.next_offsets[task],
            each.stream_time_ms,
            *sums.get(task, _NO_ROWS),
            judged_at_ms=found.judged_at_ms,
            begins=begins,
            history=origin,
        )
        for task, each in progress.items()
    }
    feeding_topic_id = found.cluster.topics[topology.feeding_topics[0]].topic_id
    records = {
        task: TaskRecord(
            fingerprint,
            each.stream_time_ms,
            each.feeds,
            found.next_offsets[task],
            topology.window.segment_ms,
            feeding_topic_id=feeding_topic_id,
        )
        for task, each in progress.items()
    }
    return WritePlan(topology, ShippedSettings.of(settings), marks, records)


def _refuse_other_seed(topology: Topology, found: Found, plan: WritePlan) -> None:
    """Raise StateIncompatible where an earlier run began another seed."""
    others = {mark.seed for mark in found.marks.values()} - {plan.marks[0].seed}
    if others:
        raise StateIncompatible(
            f"{topology.changelog_topic} holds seed {', '.join(sorted(others))}, and this history makes seed "
            f"{plan.marks[0].seed}: the history, the topology or --until is another than at the first run. Nothing was "
            f"written. Run the first command again with its own input, or `dedup reset` and seed anew."
        )


def _write(rows: DataFrame, plan: WritePlan, tasks: int) -> dict[int, bool]:
    """Write every partition that has sightings; return which of them an earlier run had finished."""
    placed = rows.repartition(tasks, "dedup_partition").sortWithinPartitions("dedup_partition")
    try:
        with told():
            reports = placed.mapInArrow(partial(write_partitions, plan), WRITTEN_DDL).collect()
    except PySparkException as error:
        said = next((line for line in reversed(str(error).strip().splitlines()) if "Error" in line or ": " in line), "")
        raise DedupError(
            f"the seed {plan.marks[0].seed} was not finished: {said.strip()}. The fleet refuses to start until it is; "
            f"run the same command again."
        ) from error
    return {row["partition"]: row["was_there"] for row in reports}


async def _write_empty(plan: WritePlan, settings: Settings, wire: KafkaWire) -> dict[int, bool]:
    """Finish the partitions without sightings, which no Spark task sees."""
    written = {}
    for task, mark in plan.marks.items():
        if not mark.sightings:
            report = await write_partition(plan, settings, wire, task, ())
            written[task] = bool(report["was_there"])
    return written
