"""When a feed is idle: decided once, from the log's end, and told to the repartition topic by a marker.

Behind a repartition topic stream time is the least over the feeds, so a source partition that is silent would hold it
back for ever. Its own task says so in the log, through its own transaction: a replay then decides alike.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from dedup.session.wire import TopicPartition
from dedup.worker.task import Task, TaskState

log: Final = logging.getLogger(__name__)
CaughtUp = Callable[[TopicPartition, Task], bool]
"""Whether a task has judged everything up to the end of its partition, a partition without any record included."""


@dataclass(slots=True)
class _Quiet:
    task: Task
    since_ms: int
    next_offset: int
    said: bool = False


class IdleFeeds:
    """The repartition tasks that have had no lag, and since when."""

    def __init__(self, idle_after_ms: int, caught_up: CaughtUp) -> None:
        self._idle_after_ms: Final = idle_after_ms
        self._caught_up: Final = caught_up
        self._quiet: dict[TopicPartition, _Quiet] = {}

    def look(self, tasks: Mapping[TopicPartition, Task], now_ms: int) -> None:
        """Let each feed that has had no lag for long enough say so, once until its next record."""
        for feeding in self._quiet.keys() - tasks.keys():
            del self._quiet[feeding]
        for feeding, task in tasks.items():
            if task.task_id.sub_topology == "repartition":
                self._look_at(feeding, task, now_ms)

    def _look_at(self, feeding: TopicPartition, task: Task, now_ms: int) -> None:
        quiet = self._quiet.get(feeding)
        if quiet is None or quiet.task is not task or quiet.next_offset != task.next_offset:
            quiet = self._quiet[feeding] = _Quiet(task, now_ms, task.next_offset)
        if quiet.said:
            return  # until its next record
        if task.state is not TaskState.RUNNING or not self._caught_up(feeding, task):
            quiet.since_ms = now_ms
        elif now_ms - quiet.since_ms >= self._idle_after_ms and task.say_idle():
            quiet.said = True
            log.info("%s: no record for %d ms; marked idle", task.task_id, now_ms - quiet.since_ms)
