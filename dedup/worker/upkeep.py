"""What a worker does now and then beside its tasks: deletes what no restore needs any more, and bounds the state.

Deleting is safe at any moment, also by an owner that is about to be fenced. A changelog record below the births of all
segments that were live at some applied stream time belongs to segments dropped at or before it; stream time never goes
back, and whoever owns the partition next has applied at least as much. Restore starts at the log's start where that is
above its own position. Of the repartition topic only what a known commit has passed is deleted, and only when it is
older than `KEEP_MS`: `dedup verify` replays from it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from dedup.errors import BrokerUnavailable, StateIncompatible
from dedup.quantities import format_size
from dedup.session.admin import Admin
from dedup.session.wire import NoAnswer, TopicPartition
from dedup.worker.clock import Clock
from dedup.worker.judge import Judge
from dedup.worker.task import Task, TaskState

if TYPE_CHECKING:
    from dedup.topology.model import Topology
    from dedup.worker.app import DedupApp

EVERY_S: Final = 30.0
KEEP_MS: Final = 86_400_000
log: Final = logging.getLogger(__name__)


class Upkeep:
    """One worker's deletions; `run` until cancelled."""

    def __init__(self, app: DedupApp, topology: Topology, clock: Clock) -> None:
        self._app: Final = app
        self._topology: Final = topology
        self._clock: Final = clock
        self._told: dict[TopicPartition, int] = {}
        """Partition -> the offset below which it was last told to delete."""
        self._warned = False
        self._truncated: Final[set[TopicPartition]] = set()
        """Changelogs that somebody else has truncated, and that were told of."""

    async def run(self) -> None:
        """Look every now and then; a state that is too large fails the worker."""
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                self.refuse_too_large()
                await self.delete()
            except StateIncompatible as error:
                self._app.tasks.fail(error)
                return
            except (BrokerUnavailable, NoAnswer) as error:
                # Only disk space at the broker is at stake; the next look tries again.
                if not self._warned:
                    log.warning("old records were not deleted: %s", error)
                    self._warned = True

    def refuse_too_large(self) -> None:
        """Raise StateIncompatible where a partition's state has outgrown its bound; all of it is committed."""
        most = self._topology.state.max_bytes_per_partition
        for feeding, task in self._app.tasks.running.items():
            judge = task.work
            if (
                most is None
                or task.state is not TaskState.RUNNING
                or not isinstance(judge, Judge)
                or judge.store is None
            ):
                continue
            size = judge.store.approximate_bytes()
            if size > most:
                raise StateIncompatible(
                    f"the state of {feeding.topic}/{feeding.partition} takes {size:,} bytes, more than "
                    f"state.max_bytes_per_partition ({format_size(most)}). The worker stops; nothing is lost, what was "
                    f"judged is committed. Raise the bound if the disk has room, or shorten guard_period or grace."
                )

    async def delete(self) -> None:
        """Delete the changelog below what live segments need, the repartition topic below what is committed and old."""
        wanted: dict[TopicPartition, int] = {}
        for feeding, task in list(self._app.tasks.running.items()):
            judge = task.work
            if task.state is TaskState.RUNNING and isinstance(judge, Judge):
                wanted[judge.changelog] = judge.truncate_below or 0
                self._tell_if_truncated(judge, (await self._app.wire.bounds(judge.changelog)).start)
                if not self._topology.direct:
                    wanted[feeding] = await self._passed_and_old(feeding, task)
        news = {partition: offset for partition, offset in wanted.items() if offset > self._told.get(partition, 0)}
        if not news:
            return
        async with Admin(self._app.wire.connection) as admin:
            await admin.delete_records(news)
        self._told.update(news)
        for partition, offset in news.items():
            log.info("%s: records below %d are deleted", partition, offset)

    def _tell_if_truncated(self, judge: Judge, begin: int) -> None:
        """Say it once, loudly, where the changelog begins after what live segments need: we never delete that."""
        record = judge.store.task_record if judge.store is not None else None
        if record is None or not record.counts_on_more(begin) or judge.changelog in self._truncated:
            return
        self._truncated.add(judge.changelog)
        log.error(
            "%s begins at offset %d, but state in force was written from offset %d on: somebody has truncated it. Only "
            "this worker's disk, and warm standbys, hold what is gone: keep the disk until retention has passed, or an "
            "owner without it will refuse to start.",
            judge.changelog,
            begin,
            record.kept_from,
        )

    async def _passed_and_old(self, feeding: TopicPartition, task: Task) -> int:
        committed = task.numbers.committed_offset or 0
        kept_from = await self._app.wire.offset_at(feeding, self._clock.now_ms() - KEEP_MS)
        return committed if kept_from is None else min(committed, kept_from)
