"""`--exit-when-done`: when everything that was there at the start is done, by whichever workers of the group.

A worker sees its own tasks at any moment; of partitions that others have it asks for the group's committed offsets. So
no worker ends, or says that all is done, while another one still has work: its partitions may yet come here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from dedup.session.wire import NoAnswer, TopicPartition, Wire
from dedup.worker.starting import bounds_of, committed_offset
from dedup.worker.task import TaskState

if TYPE_CHECKING:
    from dedup.worker.app import DedupApp

LOOK_S: Final = 0.25
"""Between two questions about the partitions of others."""
ASK_WITHIN_S: Final = 5.0
FETCH_BYTES: Final = 1 << 16
log: Final = logging.getLogger(__name__)


class Finish:
    """Watches one run; `reached` is asked again and again."""

    def __init__(self, app: DedupApp, ends: Mapping[TopicPartition, int]) -> None:
        """Take the ends of all source partitions at the start."""
        self._app: Final = app
        self._ends = dict(ends)
        self._hops_left = len(app.sub_topologies) - 1
        self._others_at_s = 0.0
        self._told = False

    async def reached(self) -> bool:
        """Tell whether everything below the ends is committed; behind a repartition topic, of both hops."""
        try:
            async with asyncio.timeout(ASK_WITHIN_S):
                return await self._reached()
        except TimeoutError:
            return False  # a leader or coordinator is away: the caller looks for signals, and asks again

    async def _reached(self) -> bool:
        while await self._done():
            if not self._hops_left:
                return True
            # The second hop ends where the first has brought it by now. A rebalance may yet bring source partitions
            # here: they must be done, too.
            (topic,) = self._app.sub_topologies["dedup"]
            hop = [TopicPartition(topic, number) for number in range(self._app.member.topic_partitions(topic) or 0)]
            ends = {place: (await bounds_of(self._app.wire, place)).end for place in hop}
            self._ends |= ends
            self._hops_left -= 1
        return False

    async def _done(self) -> bool:
        if not own_done(self._app, self._ends):
            return False
        others = [place for place in self._ends if place not in self._app.tasks.running]
        now_s = asyncio.get_running_loop().time()
        if others and now_s < self._others_at_s + LOOK_S:
            return False
        self._others_at_s = now_s
        wire, group = self._app.wire, self._app.conf.id
        for place in others:
            if not await committed_to(wire, group, place, self._ends[place]):
                self._tell(len(others))
                return False
        # Partitions that came or went meanwhile were not looked at.
        return own_done(self._app, self._ends) and not any(place in self._app.tasks.running for place in others)

    def _tell(self, others: int) -> None:
        if not self._told:
            log.info("what is here is done; waiting for other workers, which have %d partitions", others)
            self._told = True


def own_done(app: DedupApp, ends: Mapping[TopicPartition, int]) -> bool:
    """Tell whether this worker's tasks have committed everything below the ends."""
    if not app.tasks.opened.is_set():
        return False
    for feeding, task in app.tasks.running.items():
        if feeding not in ends:
            continue
        if task.state is not TaskState.RUNNING or task.dirty.is_set() or task.committing:
            return False
        # A position past the last record counts markers and aborted records, which no task ever sees.
        if task.next_offset < ends[feeding] and not app.member.passed(feeding, ends[feeding], task.next_offset):
            return False
    return True


async def committed_to(wire: Wire, group: str, place: TopicPartition, end: int) -> bool:
    """Tell whether a group has committed every record below an offset; markers and aborted records are none."""
    bounds = await bounds_of(wire, place)
    committed = await committed_offset(wire, group, place, stable=False)
    position = max(committed or 0, bounds.start)
    while position < end:
        try:
            fetched = await wire.fetch(place, position, max_bytes=FETCH_BYTES, wait_ms=0)
        except NoAnswer:
            return False
        if any(offset < end for offset in fetched.offsets) or fetched.next_offset <= position:
            return False
        position = fetched.next_offset
    return True
