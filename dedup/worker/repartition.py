"""The work of a `repartition` task: each source record to the partition of its tracking ID, unjudged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dedup.core.extract import Extractor
from dedup.core.murmur2 import partitions
from dedup.metrics import TaskNumbers
from dedup.session.record_batch import Header, Line, RecordBatch, TopicPartition, fill
from dedup.session.wire import Wire
from dedup.worker.batch import FeedBatch
from dedup.worker.clock import Clock
from dedup.worker.publish import IDLE, SOURCE, TIMESTAMP
from dedup.worker.starting import Start, first_offset
from dedup.worker.task import Frozen, Judged, Refusals

OWN_ROW: Final = -1


@dataclass(frozen=True, slots=True)
class RepartitionPlan:
    """What a topology says about repartitioning one source partition."""

    feeding: TopicPartition
    target: str
    partitions: int
    extractor: Extractor
    start: Start
    compression: str


class Repartition:
    """A stateless task's work; see `task.Work`."""

    def __init__(self, plan: RepartitionPlan, wire: Wire, clock: Clock, numbers: TaskNumbers) -> None:
        self._plan: Final = plan
        self._wire: Final = wire
        self._clock: Final = clock
        self._numbers: Final = numbers

    async def restore(self, committed: int | None) -> int:
        """See `task.Work`; there is no state, only the committed offset."""
        if committed is not None:
            return committed
        return await first_offset(self._wire, self._plan.feeding, self._plan.start)

    def judge(self, batch: FeedBatch, refusals: Refusals) -> Judged:
        """See `task.Work`; records keep their order per ID, originals travel in headers."""
        plan = self._plan
        extracted = plan.extractor(batch.keys, batch.values, batch.headers, batch.timestamps_ms)
        # A record without an ID is judged too, somewhere: it becomes a dead letter or whatever the policy says.
        fallback = batch.feeding.partition % plan.partitions
        with_id = [row for row, key in enumerate(extracted.ids) if key is not None]
        chosen = [fallback] * len(batch)
        for row, partition in zip(
            with_id, partitions([extracted.ids[row] or b"" for row in with_id], plan.partitions), strict=True
        ):
            chosen[row] = partition
        lines: dict[int, list[Line]] = {}
        now_ms = self._clock.now_ms()
        place = f"{batch.feeding.topic}/{batch.feeding.partition}/"
        for row, partition in enumerate(chosen):
            offset = batch.offsets[row]
            headers: list[Header] = [
                *batch.headers[row],
                (SOURCE, f"{place}{offset}".encode()),
                (TIMESTAMP, str(batch.timestamps_ms[row]).encode()),
            ]
            lines.setdefault(partition, []).append((offset, now_ms, batch.keys[row], batch.values[row], headers))
        self._numbers.verdicts["repartitioned"] += len(batch)
        return Judged(self._filled(lines, refusals), batch.next_offset)

    def idle(self) -> list[RecordBatch]:
        """Return a marker for every repartition partition: this feed has nothing more for now."""
        topic, partition = self._plan.feeding
        now_ms = self._clock.now_ms()
        headers: list[Header] = [(IDLE, f"{topic}/{partition}".encode()), (TIMESTAMP, str(now_ms).encode())]
        lines: dict[int, list[Line]] = {
            target: [(OWN_ROW, now_ms, None, None, headers)] for target in range(self._plan.partitions)
        }
        return self._filled(lines, Refusals())

    def _filled(self, lines: dict[int, list[Line]], refusals: Refusals) -> list[RecordBatch]:
        batches: list[RecordBatch] = []
        for partition, part in sorted(lines.items()):
            target = TopicPartition(self._plan.target, partition)
            most = refusals.most_rows.get(target)
            batches += fill(target, part, compression=self._plan.compression, most_rows=most)
        return batches

    def freeze(self, next_offset: int) -> Frozen:  # noqa: ARG002  # `Work`'s signature
        """See `task.Work`; there is nothing to apply."""
        return Frozen([], lambda _ends: None)

    def discard(self) -> None:
        """See `task.Work`."""

    def close(self) -> None:
        """See `task.Work`."""
