"""The first half of a backfill: what each record carries, which can not be judged, and what stream time it brings.

Runs before the rows of an ID are brought together, in the order of the input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Final, Literal
from zlib import crc32

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.types import BinaryType, IntegerType, LongType, StringType, StructField

from dedup.core.fold import Outcome, Rows, screen
from dedup.core.stream_time import Feed, StreamTime
from dedup.core.window import BEFORE_ALL_TIME
from dedup.errors import StateIncompatible
from dedup.spark.columns import extract_batch
from dedup.spark.feed_columns import binary_column
from dedup.spark.fold_sorted import Integers
from dedup.spark.parcels import Packer, Places
from dedup.spark.stretches import Stretch, Stretches
from dedup.spark.unwrapped import unwrapped
from dedup.topology.extractor import extractor_of
from dedup.topology.model import Topology

Mode = Literal["direct", "merged", "log", "event_time"]
"""``direct``: each source partition is a log of its own. ``merged``: several, judged in step. ``log``: the repartition
topic, with its feeds. ``event_time``: rows without coordinates."""

ID: Final = StructField("dedup_id", BinaryType())
TIME: Final = StructField("dedup_time_ms", LongType())
FINGERPRINT: Final = StructField("dedup_fingerprint", BinaryType())
STREAM: Final = StructField("_dedup_stream_ms", LongType())
"""Stream time, or within a stretch the running maximum."""
LETTER: Final = StructField("_dedup_letter", StringType())
"""Verdict, reason and detail of a row that is not to be judged, apart by line feeds; null for nearly all."""
TASK: Final = StructField("_dedup_task", IntegerType())
PLACE: Final = StructField("_dedup_place", LongType())
"""Partition and offset in the repartition topic, where that is read."""
STRETCH: Final = StructField("_dedup_stretch", LongType())

Batches = Iterator[pa.RecordBatch]


LETTER_PARTS: Final = "\n"
_BATCH_ROWS: Final = 8_192
"""What is screened at once stays in the processor's caches."""


@dataclass(frozen=True, slots=True)
class Screening:
    """What the first half must know."""

    topology: Topology
    mode: Mode
    ceiling_ms: int
    targets: tuple[int, ...] = (0,)
    """A value of `parcels.TARGET` for every reader of the shuffle that follows."""
    batch_rows: int = 10_000
    """As many rows as Spark hands to Python at once."""
    feeds: tuple[Feed, ...] = ()
    """Behind a repartition topic: every source partition there is."""


def screened_fields(plan: Screening) -> list[StructField]:
    """Return the columns that the first half adds; as few as the mode needs, since each costs time in every row."""
    fields = [ID, TIME, *([FINGERPRINT] if plan.topology.fingerprints_wanted else []), STREAM, LETTER]
    if plan.mode == "log":
        fields += [TASK, PLACE]
    if plan.mode in {"direct", "merged"}:
        fields.append(STRETCH)
    return fields


def screening(plan: Screening) -> Callable[[Iterable[pa.RecordBatch]], Batches]:
    """Return the function for `mapInArrow`: records in, `parcels.PARCELS` out."""

    def run(batches: Iterable[pa.RecordBatch]) -> Batches:
        context = TaskContext.get()
        screener = _Screener(plan, 0 if context is None else context.partitionId())
        packer = Packer(plan.targets, plan.batch_rows)
        for batch in batches:
            for begin in range(0, batch.num_rows, _BATCH_ROWS):
                screened = screener.screened(batch.slice(begin, _BATCH_ROWS))
                yield from packer.add(screened, _places(screened, len(plan.targets)))
        yield from packer.rest()
        if screener.stretches.all:
            yield packer.notices(write_notice(screener.stretches.all))

    return run


def _places(screened: pa.RecordBatch, readers: int) -> Places:
    """Return the reader of each row: by its ID, or any for a row without one."""
    ids = binary_column(screened.column(ID.name))
    if None in ids:
        ids = [b"%d" % row if each is None else each for row, each in enumerate(ids)]
    hashed = np.fromiter(map(crc32, ids), np.uint32, len(ids))  # type: ignore[arg-type]  # no None is left
    return (hashed % readers).astype(np.uint16)


def write_notice(stretches: Sequence[Stretch]) -> bytes:
    """Return what `read_notice` reads."""
    return orjson.dumps([asdict(each) for each in stretches])


def read_notice(values: Iterable[bytes]) -> list[Stretch]:
    """Return the stretches that tasks of the first half have sent."""
    return [Stretch(**each) for value in values for each in orjson.loads(value)]


class _Screener:
    """Screens the batches of one Spark task, in order."""

    def __init__(self, plan: Screening, task: int) -> None:
        self._plan: Final = plan
        self._rules: Final = plan.topology.rules
        self._extractor: Final = extractor_of(plan.topology)
        self.stretches: Final = Stretches(task)
        self._partition = -1
        self._stream_time = StreamTime.before(plan.feeds)

    def screened(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the records with `screened_fields` after them."""
        plan = self._plan
        partitions, offsets = _integers(batch, "partition"), _integers(batch, "offset")
        idle: frozenset[int] = frozenset()
        if plan.mode == "log":
            origin = unwrapped(batch)
            batch, idle = origin.batch, origin.idle_rows
        topics = _topics(batch, plan.topology.source.topics, needed=plan.mode != "event_time")
        feeds = [Feed(0, -1)] if plan.mode == "event_time" else _feeds(topics, _integers(batch, "partition"))
        rows = Rows(extract_batch(self._extractor, batch), _integers(batch, "offset").tolist(), feeds, idle)
        outcome, skipped = screen(rows, self._rules, ceiling_ms=plan.ceiling_ms)
        times_ms = np.array(outcome.judged_times_ms, np.int64)
        moving = times_ms.copy()
        if skipped:
            moving[list(skipped)] = BEFORE_ALL_TIME
        stretch = None
        match plan.mode:
            case "event_time":
                stream_ms = moving
            case "log":
                stream_ms = self._along_log(partitions, rows, moving, skipped)
            case "direct" | "merged":
                stretch, stream_ms = self.stretches.take(topics, partitions, offsets, moving)
        known = stream_ms > BEFORE_ALL_TIME
        fingerprints = rows.extracted.fingerprints
        added = {
            ID.name: pa.array(rows.extracted.ids, pa.binary()),
            TIME.name: pa.array(times_ms),
            FINGERPRINT.name: None if fingerprints is None else pa.array(fingerprints, pa.binary()),
            STREAM.name: pa.array(stream_ms, mask=None if known.all() else ~known),
            LETTER.name: _letters(outcome, batch.num_rows),
            TASK.name: pa.array(partitions.astype(np.int32)),
            PLACE.name: pa.array(offsets),
            STRETCH.name: None if stretch is None else pa.array(stretch),
        }
        names = [field.name for field in screened_fields(plan)]
        columns = [*batch.columns, *(added[name] for name in names)]
        result = pa.RecordBatch.from_arrays(columns, [*batch.schema.names, *names])
        return result.filter(_without(idle, batch.num_rows)) if idle else result

    def _along_log(self, partitions: Integers, rows: Rows, times_ms: Integers, skipped: set[int]) -> Integers:
        """Return stream time at every row of the repartition topic; the rows of a partition come one after another."""
        result = np.empty(len(partitions), np.int64)
        borders = [0, *(np.flatnonzero(partitions[1:] != partitions[:-1]) + 1).tolist(), len(partitions)]
        for begin, end in pairwise(borders):
            if begin == end:
                continue
            if int(partitions[begin]) != self._partition:
                self._partition = int(partitions[begin])
                self._stream_time = StreamTime.before(self._plan.feeds)
            column, self._stream_time = self._stream_time.after(
                (
                    rows.feeds[row] if len(rows.feeds) > 1 else rows.feeds[0],
                    None if row in skipped else int(times_ms[row]),
                    row in rows.idle_rows,
                )
                for row in range(begin, end)
            )
            result[begin:end] = column
        return result


def _letters(outcome: Outcome, count: int) -> pa.Array:
    if not (outcome.exempt or outcome.dead):
        return pa.nulls(count, pa.string())
    letters: list[str | None] = [None] * count
    for row, exempt in outcome.exempt.items():
        letters[row] = LETTER_PARTS.join(("exempt", exempt.why, ""))
    for row, dead in outcome.dead:
        letters[row] = LETTER_PARTS.join(("dead_letter", dead.code, dead.detail))
    return pa.array(letters, pa.string())


def _integers(batch: pa.RecordBatch, name: str) -> Integers:
    column = batch.column(name)
    if column.null_count:
        column = column.fill_null(-1)
    result: Integers = column.to_numpy(zero_copy_only=False).astype(np.int64)
    return result


def _topics(batch: pa.RecordBatch, topics: tuple[str, ...], *, needed: bool) -> Integers:
    """Return the positions in ``source.topics``; 0 for all where there are no coordinates."""
    if not needed:
        return np.zeros(batch.num_rows, np.int64)
    column = batch.column("topic")
    found = pc.index_in(column, value_set=pa.array(topics, pa.string()))
    if found.null_count or batch.column("partition").null_count or batch.column("offset").null_count:
        others = sorted({str(each) for each in column.filter(pc.is_null(found)).to_pylist()})
        what = f"topic {', '.join(others)}" if others else "no partition or offset"
        raise StateIncompatible(
            f"the input holds records of {what}; the topology reads {', '.join(topics)}, and its records are judged in "
            f"the order of their offsets. Filter the input, or drop its columns topic, partition and offset to judge "
            f"in the order of event times."
        )
    result: Integers = found.to_numpy(zero_copy_only=False).astype(np.int64)
    return result


def _feeds(topics: Integers, partitions: Integers) -> list[Feed]:
    if len(topics) and (topics == topics[0]).all() and (partitions == partitions[0]).all():
        return [Feed(int(topics[0]), int(partitions[0]))]
    return list(map(Feed, topics.tolist(), partitions.tolist()))


def _without(rows: frozenset[int], count: int) -> pa.Array:
    kept = np.ones(count, np.bool_)
    kept[list(rows)] = False
    return pa.array(kept)
