"""The work of a `repartition` task: each source record to the partition of its tracking ID, unjudged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from dedup.core.extract import Extracted, Extractor
from dedup.core.extract_one import ODD_HEADER_NAME
from dedup.core.fold import DeadLetter, Outcome, Rows
from dedup.core.murmur2 import partitions
from dedup.core.stream_time import Feed
from dedup.metrics import TaskNumbers
from dedup.session.record_batch import OWN_ROW, Header, Line, RecordBatch, TopicPartition, fill
from dedup.session.wire import Wire
from dedup.worker.batch import FeedBatch
from dedup.worker.clock import Clock
from dedup.worker.publish import IDLE, SOURCE, TIMESTAMP, Publisher
from dedup.worker.recent import Recent
from dedup.worker.starting import Start, first_offset
from dedup.worker.task import Frozen, Refusals


@dataclass(frozen=True, slots=True)
class RepartitionPlan:
    """What a topology says about repartitioning one source partition."""

    feeding: TopicPartition
    target: str
    partitions: int
    extractor: Extractor
    topic: int
    """Position of the feeding topic in ``source.topics``."""
    start: Start
    compression: str


class Repartition:
    """A stateless task's work; see `task.Work`."""

    def __init__(
        self, plan: RepartitionPlan, wire: Wire, publisher: Publisher, clock: Clock, numbers: TaskNumbers
    ) -> None:
        self._plan: Final = plan
        self._publisher: Final = publisher
        self._wire: Final = wire
        self._clock: Final = clock
        self._numbers: Final = numbers
        self._judged = TaskNumbers()
        """Counts of the open transaction: one that is aborted is judged again, and counted once."""
        self.recent: Final = Recent()

    async def restore(self, committed: int | None) -> int:
        """See `task.Work`; there is no state, only the committed offset."""
        if committed is not None:
            return committed
        return await first_offset(self._wire, self._plan.feeding, self._plan.start)

    async def overtaken(self) -> bool:
        """See `task.Work`; there is no state."""
        return False

    def judge(self, batch: FeedBatch, refusals: Refusals) -> list[RecordBatch]:
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
            if offset in refusals.rows or offset in batch.odd_names:
                continue
            headers: list[Header] = [
                *batch.headers[row],
                (SOURCE, f"{place}{offset}".encode()),
                (TIMESTAMP, str(batch.timestamps_ms[row]).encode()),
            ]
            lines.setdefault(partition, []).append((offset, now_ms, batch.keys[row], batch.values[row], headers))
        self._judged.verdicts["repartitioned"] += sum(map(len, lines.values()))
        batches = self._filled(lines, refusals)
        if refusals.rows or batch.odd_names:
            batches += self._dead_letters(batch, extracted, refusals)
        return batches

    def _dead_letters(self, batch: FeedBatch, extracted: Extracted, refusals: Refusals) -> list[RecordBatch]:
        """Return dead letters for records that no repartition topic takes: no dedup task will ever see them."""
        dead = []
        for row, offset in enumerate(batch.offsets):
            if offset in refusals.rows:
                dead.append((row, DeadLetter("refused_by_broker", refusals.rows[offset])))
            elif offset in batch.odd_names:
                dead.append((row, DeadLetter(ODD_HEADER_NAME.code, ODD_HEADER_NAME.detail)))
        self._judged.verdicts["dead_letter"] += len(dead)
        for _, letter in dead:
            self._judged.dead_reasons[letter.code] += 1
        rows = Rows(extracted, batch.offsets, (Feed(self._plan.topic, batch.feeding.partition),))
        outcome = Outcome(dead=dead)
        self.recent.note(rows, outcome, self._clock.now_ms())
        return self._publisher.publish(batch, rows, outcome, refusals.most_rows)

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
        """See `task.Work`; there is no state to apply."""
        judged, self._judged = self._judged, TaskNumbers()
        noted = self.recent.freeze()

        def apply(_ends: Mapping[TopicPartition, int]) -> None:
            self._numbers.add_verdicts(judged)
            self.recent.commit(noted)

        return Frozen([], apply)

    def discard(self) -> None:
        """See `task.Work`."""
        self._judged = TaskNumbers()
        self.recent.discard()

    def close(self) -> None:
        """See `task.Work`."""
