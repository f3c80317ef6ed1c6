"""Idle markers of a stream: a source partition that is silent says so in the repartition topic, as a worker's does.

Behind a repartition topic stream time is the least over the feeds: without a word from a silent one it would stand
still, nothing would be late and nothing forgotten. The driver watches; the marker goes through the partition's own
`repartition` task, while no micro-batch runs: a task that is judging must not be fenced.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dedup.errors import BrokerUnavailable, TaskMigrated
from dedup.session.client import KafkaWire
from dedup.session.connection import Connection
from dedup.session.wire import NoAnswer, TopicPartition
from dedup.store.rocks import RocksMemory
from dedup.worker.clock import SteadyClock
from dedup.worker.starting import bounds_of, committed_offset
from dedup.worker.workshop import Workshop

if TYPE_CHECKING:
    from dedup.spark.prepared import Prepared

log: Final = logging.getLogger(__name__)
LOOK_S: Final = 0.5


@dataclass(slots=True)
class _Quiet:
    position: int
    since_s: float
    said: bool = False


class IdleMarks:
    """Watches the source partitions of a stream from a thread of the driver."""

    def __init__(self, ready: Prepared) -> None:
        self._ready: Final = ready
        self.busy: Final = threading.Lock()
        """Held by whoever writes to the repartition topic."""
        self._over: Final = threading.Event()
        self._quiet: dict[TopicPartition, _Quiet] = {}
        self._thread: Final = threading.Thread(target=self._run, name="idle-marks", daemon=True)

    def start(self) -> None:
        """The partitions are watched."""
        self._thread.start()

    def stop(self) -> None:
        """No marker is written any more."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                asyncio.run(self._watch())
            except (BrokerUnavailable, NoAnswer, TaskMigrated) as error:
                # The markers only bring stream time on: whoever must stop for this is a task.
                log.warning("idle markers: %s; trying again", error)
                self._over.wait(LOOK_S)

    async def _watch(self) -> None:
        ready = self._ready
        wire = KafkaWire(Connection.of(ready.settings, client_id=f"dedup-{ready.topology.name}-idle"))
        await wire.start()
        try:
            while not self._over.is_set():
                for topic in ready.topology.source.topics:
                    for partition in range(ready.cluster.topics[topic].partitions):
                        await self._look(wire, TopicPartition(topic, partition))
                await asyncio.sleep(LOOK_S)
        finally:
            await wire.stop()

    async def _look(self, wire: KafkaWire, feeding: TopicPartition) -> None:
        position = await self._caught_up_at(wire, feeding)
        now_s = time.monotonic()
        quiet = self._quiet.get(feeding)
        if position is None:
            self._quiet.pop(feeding, None)
        elif quiet is None or quiet.position != position:
            self._quiet[feeding] = _Quiet(position, now_s)
        elif not quiet.said and now_s - quiet.since_s >= self._ready.topology.idle_after_ms / 1000:
            quiet.said = await self._said(wire, feeding, position)

    async def _caught_up_at(self, wire: KafkaWire, feeding: TopicPartition) -> int | None:
        """Return the position of a partition without lag: nothing but markers may follow. None where there is lag."""
        committed = await committed_offset(wire, self._ready.topology.name, feeding)
        bounds = await bounds_of(wire, feeding)
        position = max(bounds.start, self._ready.positions[feeding] if committed is None else committed)
        if position >= bounds.end:
            return position
        fetched = await wire.fetch(feeding, position, max_bytes=1, wait_ms=0)
        return position if not fetched.records and fetched.next_offset >= bounds.end else None

    async def _said(self, wire: KafkaWire, feeding: TopicPartition, position: int) -> bool:
        """Write the marker, unless a micro-batch runs or has moved the position meanwhile; tell whether it was."""
        if not self.busy.acquire(blocking=False):
            return False
        try:
            if await self._caught_up_at(wire, feeding) != position:
                return False
            with tempfile.TemporaryDirectory(prefix="dedup-spark-") as empty:
                here = replace(self._ready.settings, state_dir=Path(empty))
                workshop = Workshop(self._ready.topology, here, self._ready.cluster, wire, SteadyClock(), RocksMemory())
                task = workshop.build(feeding)
                try:
                    await task.start()
                    said = task.say_idle()
                    await task.commit()
                finally:
                    await task.close(drain=False)
            log.info("%s/%d: no record for %d ms; marked idle", *feeding, self._ready.topology.idle_after_ms)
            return said
        finally:
            self.busy.release()
