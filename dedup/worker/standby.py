"""Maintains standbys, which are stores of other workers' partitions that are kept up to date from the changelog."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from dedup.core.window import Window
from dedup.errors import DedupError, StateIncompatible
from dedup.kafka.wire import Fetched, NoAnswer, TopicPartition, Wire
from dedup.store.base import Store
from dedup.store.changelog import collect
from dedup.worker.restore import apply_changelog, fitted, refuse_other_fingerprint, truncated_to

log: Final = logging.getLogger(__name__)
IDLE_MS: Final = 100
_STEP_BYTES: Final = 256 << 10
"""Changelog bytes per step; the worker's own records wait while a step is applied."""
SHARE: Final = 1.0
"""How long all standbys together pause after a step, as a multiple of the time that the step took."""


class Standbys:
    """Keeps the stores of this worker's standby partitions up to date."""

    def __init__(
        self,
        wire: Wire,
        changelog_topic: str,
        window: Window,
        fingerprint: bytes,
        open_store: Callable[[int], Store],
        *,
        prepare: Callable[[int], Awaitable[None]],
        release_store: Callable[[int, Store], None],
    ) -> None:
        self._wire: Final = wire
        self._topic: Final = changelog_topic
        self._window: Final = window
        self._fingerprint: Final = fingerprint
        self._open_store: Final = open_store
        self._prepare: Final = prepare
        """Awaited before a store is opened; fetches a checkpoint if there is no local state."""
        self._release_store: Final = release_store
        self._turn: Final = asyncio.Lock()
        self._stores: dict[int, Store] = {}
        self._loops: dict[int, asyncio.Task[None]] = {}
        self.lag: dict[int, int] = {}
        """Maps each partition to the number of changelog offsets that are not applied yet."""

    def assign(self, partitions: Iterable[int]) -> None:
        """Stop the previous standbys, and follow the changelogs of these partitions."""
        self.release()
        for partition in sorted(partitions):
            self._loops[partition] = asyncio.create_task(self._follow(partition), name=f"standby {partition}")

    def release(self) -> None:
        """Release every standby store immediately, because a task may be about to open it."""
        for loop in self._loops.values():
            loop.cancel()
        stores, self._loops, self._stores, self.lag = self._stores, {}, {}, {}
        for partition, store in stores.items():
            self._release_store(partition, store)

    async def _follow(self, partition: int) -> None:
        changelog = TopicPartition(self._topic, partition)
        try:
            await self._prepare(partition)
            if not self._is_own(partition):
                return  # a client has lost the cancellation, so a task may already use the store
            store = self._stores[partition] = self._open_store(partition)
            bounds = await fitted(
                self._wire,
                changelog,
                store,
                self._window,
                lambda record: refuse_other_fingerprint(record.fingerprint, self._fingerprint, changelog),
            )
            position = max(store.position, bounds.start)
            while self._is_own(partition):
                position = await self._step(partition, store, position)
        except DedupError as error:
            # Without a standby, a new owner restores more slowly but still correctly.
            log.warning("standby of %s stopped: %s", changelog, error)
            if partition in self._stores and self._is_own(partition):
                self._stores.pop(partition).close()

    def _is_own(self, partition: int) -> bool:
        """Return whether the calling loop is still the one that follows the partition."""
        return self._loops.get(partition) is asyncio.current_task()

    async def _step(self, partition: int, store: Store, position: int) -> int:
        try:
            fetched = await self._wire.fetch(
                TopicPartition(self._topic, partition), position, max_bytes=_STEP_BYTES, wait_ms=0
            )
        except NoAnswer:
            await self._wire.pause(IDLE_MS)
            return position
        except StateIncompatible as refused:
            changelog = TopicPartition(self._topic, partition)
            return await truncated_to(self._wire, changelog, position, store.task_record, refused)
        if fetched.next_offset > position:
            async with self._turn:
                await asyncio.sleep(SHARE * self._apply(store, fetched))
        else:
            await self._wire.pause(IDLE_MS)
        self.lag[partition] = fetched.high_watermark - fetched.next_offset
        return fetched.next_offset

    def _apply(self, store: Store, fetched: Fetched) -> float:
        """Apply the fetched records, and return for how many seconds this blocked the event loop."""
        began_s = time.monotonic()
        apply_changelog(store, self._window, collect(fetched.keys, fetched.values), fetched.next_offset)
        if store.task_record is not None:
            oldest_ms = self._window.oldest_live_ms(store.task_record.stream_time_ms)
            store.drop_below(oldest_ms, self._window.segment_ms)
        return time.monotonic() - began_s
