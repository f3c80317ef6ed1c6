"""Performs a worker's periodic work: deletes records that no restore needs, limits the state's size, and raises alerts.

Changelog records can be deleted safely at any moment, even by an owner that is about to be fenced. A record below the
first offsets of all live segments belongs to segments that are already dropped. Stream time never decreases, so no
later owner of the partition needs these segments. If the position of a store was deleted, its restore begins at the
log's start. In the repartition topic, only records that are below a known commit and older than `KEEP_MS` are deleted,
because `dedup verify` replays that topic.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dedup.errors import BrokerUnavailable, StateIncompatible
from dedup.kafka.topic_admin import Admin
from dedup.kafka.wire import NoAnswer, TopicPartition
from dedup.metrics import DeadLetterAlert, TaskNumbers
from dedup.quantities import format_size
from dedup.worker.clock import Clock
from dedup.worker.dedup_task import DedupTask
from dedup.worker.task import Task, TaskState

if TYPE_CHECKING:
    from dedup.topology.model import Topology
    from dedup.worker.app import DedupApp

log: Final = logging.getLogger(__name__)
SPAN_MS: Final = 60_000
_LEAST_RECORDS: Final = 100
_LEAST_SHARE: Final = 0.95
_NOT_JUDGED: Final = frozenset({"repartitioned"})
"""Verdicts of repartition tasks, which are not counted because dedup tasks judge the records."""
EVERY_S: Final = 30.0
KEEP_MS: Final = 86_400_000


@dataclass(frozen=True, slots=True)
class Counted:
    """The counters of all tasks, added up, at one moment."""

    time_ms: int
    judged: int
    reasons: Mapping[str, int]
    """Dead letters by reason."""

    @classmethod
    def of(cls, numbers: Iterable[TaskNumbers], time_ms: int) -> Counted:
        """Return the sum of the tasks' counters."""
        judged, reasons = 0, Counter[str]()
        for each in numbers:
            judged += sum(count for verdict, count in each.verdicts.items() if verdict not in _NOT_JUDGED)
            reasons.update(each.dead_reasons)
        return cls(time_ms, judged, dict(reasons))


def alert_between(begin: Counted, end: Counted, *, goes_on: bool) -> DeadLetterAlert | None:
    """Return the alert for the records judged between two moments, if any; ``goes_on`` says that an alert is active."""
    judged = end.judged - begin.judged
    grown = Counter(dict(end.reasons))
    grown.subtract(begin.reasons)
    dead = grown.total()
    if judged < (1 if goes_on else _LEAST_RECORDS) or dead < _LEAST_SHARE * judged:
        return None
    reason, count = min(grown.items(), key=lambda each: (-each[1], each[0]))
    return DeadLetterAlert(judged, dead, reason, count)


class DeadShare:
    """Raises an alert if nearly all records of the last minute are dead letters, which suggests a common cause.

    An alert begins only after enough records. An alert ends after the first minute that has a lower share of dead
    letters or no records, so that a slow topic does not start and end alerts repeatedly.
    """

    def __init__(self) -> None:
        self.alert: DeadLetterAlert | None = None
        self._looks: Final[deque[Counted]] = deque()

    def look(self, now: Counted) -> bool:
        """Record the current counters; return whether an alert has begun or ended."""
        last = self._looks[-1] if self._looks else None
        if last is not None and now.judged < last.judged:
            return False  # in a rebalance: the counters of closed tasks are about to be added
        if last is not None and now.time_ms < last.time_ms:
            self._looks.clear()
        self._looks.append(now)
        while len(self._looks) > 1 and self._looks[1].time_ms <= now.time_ms - SPAN_MS:
            self._looks.popleft()
        before, self.alert = self.alert, alert_between(self._looks[0], now, goes_on=self.alert is not None)
        return (before is None) != (self.alert is None)


class Maintenance:
    """The periodic work of one worker; `run` works until it is canceled."""

    def __init__(self, app: DedupApp, topology: Topology, clock: Clock) -> None:
        self._app: Final = app
        self._topology: Final = topology
        self._clock: Final = clock
        self._deleted: dict[TopicPartition, int] = {}
        """Maps each partition to the offset below which records were last deleted."""
        self._warned = False
        self._truncated: Final[set[TopicPartition]] = set()
        """Changelogs that were truncated by somebody else; each is logged once."""

    async def run(self) -> None:
        """Do the periodic work until canceled; make the worker fail if state is too large."""
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                self.refuse_too_large()
                await self.delete()
            except StateIncompatible as error:
                self._app.tasks.fail(error)
                return
            except (BrokerUnavailable, NoAnswer) as error:
                # A failure costs only disk space on the broker, and the next round tries again.
                if not self._warned:
                    log.warning("old records were not deleted: %s", error)
                    self._warned = True

    def refuse_too_large(self) -> None:
        """Raise StateIncompatible if a partition's committed state exceeds its limit."""
        most = self._topology.state.max_bytes_per_partition
        for feeding, task in self._app.tasks.running.items():
            dedup_task = task.work
            if (
                most is None
                or task.state is not TaskState.RUNNING
                or not isinstance(dedup_task, DedupTask)
                or dedup_task.store is None
            ):
                continue
            size = dedup_task.store.approximate_bytes()
            if size > most:
                raise StateIncompatible(
                    f"the state of {feeding.topic}/{feeding.partition} takes {size:,} bytes, more than "
                    f"state.max_bytes_per_partition ({format_size(most)}). The worker stops. Nothing is lost, because "
                    "all judged records are committed. Raise the limit if the disk has room, or shorten guard_period "
                    "or grace."
                )

    async def delete(self) -> None:
        """Delete changelog records that no live segment needs, and old committed records of the repartition topic."""
        wanted: dict[TopicPartition, int] = {}
        for feeding, task in list(self._app.tasks.running.items()):
            dedup_task = task.work
            if task.state is TaskState.RUNNING and isinstance(dedup_task, DedupTask):
                wanted[dedup_task.changelog] = dedup_task.truncate_below or 0
                self._log_if_truncated(dedup_task, (await self._app.wire.bounds(dedup_task.changelog)).start)
                if not self._topology.direct:
                    wanted[feeding] = await self._passed_and_old(feeding, task)
        below = {partition: offset for partition, offset in wanted.items() if offset > self._deleted.get(partition, 0)}
        if not below:
            return
        async with Admin(self._app.wire.connection) as admin:
            await admin.delete_records(below)
        self._deleted.update(below)
        for partition, offset in below.items():
            log.info("%s: records below %d are deleted", partition, offset)

    def _log_if_truncated(self, dedup_task: DedupTask, begin: int) -> None:
        """Log an error once if the changelog lacks records that live segments need; dedup never deletes those."""
        record = dedup_task.store.task_record if dedup_task.store is not None else None
        if record is None or not record.counts_on_more(begin) or dedup_task.changelog in self._truncated:
            return
        self._truncated.add(dedup_task.changelog)
        log.error(
            "%s begins at offset %d, but state in force was written from offset %d on: somebody has truncated it. Only "
            "this worker's disk, and warm standbys, hold the deleted records. Keep the disk until retention has "
            "passed; an owner without it will refuse to start.",
            dedup_task.changelog,
            begin,
            record.kept_from,
        )

    async def _passed_and_old(self, feeding: TopicPartition, task: Task) -> int:
        committed = task.numbers.committed_offset or 0
        kept_from = await self._app.wire.offset_at(feeding, self._clock.now_ms() - KEEP_MS)
        return committed if kept_from is None else min(committed, kept_from)
