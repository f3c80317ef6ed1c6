"""Implements a `repartition` task, which sends each source record to its ID's partition without judging the record."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from dedup.core.extract import Extract, Extracted, Fault
from dedup.core.extract_one import EXTRACTED, passed_on
from dedup.core.fold import DeadLetter, Outcome, Rows
from dedup.core.formats import SCHEMA_UNKNOWN
from dedup.core.partitioner import partitions
from dedup.core.window import Feed
from dedup.kafka.record_batch import OWN_ROW, FeedBatch, Header, Line, RecordBatch, TopicPartition
from dedup.kafka.wire import Wire
from dedup.metrics import TaskNumbers
from dedup.worker.offsets import Start, kept_first_offset
from dedup.worker.record_collector import (
    IDLE,
    SOURCE,
    TIMESTAMP,
    Misfits,
    RecordCollector,
    Refusals,
    faults_of,
    refusal,
)
from dedup.worker.task import SteadyClock, TaskWork


@dataclass(frozen=True, slots=True)
class RepartitionPlan:
    """A topology's rules for repartitioning one source partition."""

    feeding: TopicPartition
    target: str
    partitions: int
    extractor: Extract
    topic: int
    """The index of the feeding topic in ``source.topics``."""
    start: Start
    by_arrival: bool = False
    """True if the task must stop at a record without an append time."""
    begun: dict[TopicPartition, int] = field(default_factory=dict)
    """The first offsets of partitions without a commit; see `kept_first_offset`. All tasks of the worker share them."""
    passes_ids_on: bool = False
    """True if the task adds the header `EXTRACTED`, because a user's function returned the IDs."""


class RepartitionTask(TaskWork):
    """Does the work of a `repartition` task, which keeps no state; see `TaskWork`."""

    def __init__(
        self,
        plan: RepartitionPlan,
        wire: Wire,
        collector: RecordCollector,
        clock: SteadyClock,
        numbers: TaskNumbers,
        refuse_lost: Callable[[], Awaitable[None]],
    ) -> None:
        """``refuse_lost`` raises StateIncompatible if the source partition was read but has no committed offset."""
        super().__init__(wire, collector, clock, numbers, by_arrival=plan.by_arrival)
        self._plan: Final = plan
        self._refuse_lost: Final = refuse_lost

    async def restore(self, committed: int | None, *, own: bool) -> int:  # noqa: ARG002  # it has no state
        """Return the committed offset or, if there is none, the offset that `start` specifies. No state is restored."""
        if committed is not None:
            return committed
        await self._refuse_lost()
        return await kept_first_offset(self._wire, self._plan.feeding, self._plan.start, self._plan.begun)

    def judge(self, batch: FeedBatch, refusals: Refusals) -> list[RecordBatch]:
        """Return the records, batched by their IDs' partitions. Each record gets a header with its source position."""
        plan = self._plan
        extracted = plan.extractor(batch.keys, batch.values, batch.headers, batch.timestamps_ms)
        # A record without an ID also goes to a `dedup` task, because it needs a verdict.
        fallback = batch.feeding.partition % plan.partitions
        with_id = [row for row, key in enumerate(extracted.ids) if key is not None]
        chosen = [fallback] * len(batch)
        # A record with an unknown schema becomes a dead letter here. Otherwise, the `dedup` task might know the schema
        # by then, and find an ID that belongs to another partition.
        unknown = {row: fault for row, fault in extracted.faults.items() if fault.code == SCHEMA_UNKNOWN}
        for row, partition in zip(
            with_id, partitions([extracted.ids[row] or b"" for row in with_id], plan.partitions), strict=True
        ):
            chosen[row] = partition
        lines: dict[int, list[Line]] = {}
        now_ms = self._clock.now_ms()
        place = f"{batch.feeding}/"
        for row, partition in enumerate(chosen):
            offset = batch.offsets[row]
            if offset in batch.odd_names or row in unknown:
                continue
            own = batch.headers[row]
            if plan.passes_ids_on:
                own = [*own, (EXTRACTED, passed_on(extracted.ids[row] or extracted.faults[row]))]
            headers: list[Header] = [
                *own,
                (SOURCE, f"{place}{offset}".encode()),
                (TIMESTAMP, str(batch.timestamps_ms[row]).encode()),
            ]
            lines.setdefault(partition, []).append((offset, now_ms, batch.keys[row], batch.values[row], headers))
        misfits: Misfits = {}
        batches = self._filled(lines, refusals, misfits)
        self._judged.verdicts["repartitioned"] += sum(map(len, lines.values())) - len(misfits)
        if misfits or batch.odd_names or unknown:
            refused = {offset: refusal(topic, why) for (topic, offset), why in misfits.items()}
            batches += self._dead_letters(batch, extracted, refusals, unknown | faults_of(batch, refused))
        return batches

    def _dead_letters(
        self, batch: FeedBatch, extracted: Extracted, refusals: Refusals, faults: Mapping[int, Fault]
    ) -> list[RecordBatch]:
        """Return dead letters for the records that cannot be written to the repartition topic."""
        dead = [(row, DeadLetter(fault.code, fault.detail)) for row, fault in sorted(faults.items())]
        self._judged.verdicts["dead_letter"] += len(dead)
        self._judged.dead_reasons.update(letter.code for _, letter in dead)
        rows = Rows(extracted, batch.offsets, (Feed(self._plan.topic, batch.feeding.partition),))
        outcome = Outcome(dead=dead)
        self.recent.note(rows, outcome, self._clock.now_ms())
        return self.collector.publish(batch, rows, outcome, refusals, {})  # `publish` never omits a dead letter

    def idle(self) -> list[RecordBatch]:
        """Return one idle marker per partition of the repartition topic. The marker says that this feed has no new
        records.
        """
        topic, partition = self._plan.feeding
        now_ms = self._clock.now_ms()
        headers: list[Header] = [(IDLE, f"{topic}/{partition}".encode()), (TIMESTAMP, str(now_ms).encode())]
        lines: dict[int, list[Line]] = {
            target: [(OWN_ROW, now_ms, None, None, headers)] for target in range(self._plan.partitions)
        }
        return self._filled(lines, Refusals(), {})

    def _filled(self, lines: dict[int, list[Line]], refusals: Refusals, misfits: Misfits) -> list[RecordBatch]:
        batches: list[RecordBatch] = []
        for partition, part in sorted(lines.items()):
            target = TopicPartition(self._plan.target, partition)
            batches += self.collector.fitting(target, part, refusals, misfits)
        return batches
