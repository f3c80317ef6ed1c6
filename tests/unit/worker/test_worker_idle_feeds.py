"""When a feed is idle: by its own clock of silence, once until its next record."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from dedup.kafka.wire import TopicPartition
from dedup.worker.task import TaskId, TaskState
from dedup.worker.worker import IdleFeeds

FEED = TopicPartition("a", 0)


@dataclass
class Task:
    kind: str = "repartition"
    state: TaskState = TaskState.RUNNING
    judged_to: int = 0
    caught_up: bool = True
    busy: bool = False
    said_at: list[int] = field(default_factory=list)
    now: int = 0

    @property
    def task_id(self) -> TaskId:
        return TaskId(self.kind, FEED)

    def say_idle(self) -> bool:
        if not self.busy:
            self.said_at.append(self.now)
        return not self.busy


@pytest.fixture
def feeds() -> IdleFeeds:
    return IdleFeeds(1_000, lambda _, task: task.caught_up)


def look(feeds: IdleFeeds, task: Task, *times: int) -> list[int]:
    for now in times:
        task.now = now
        feeds.look({FEED: task}, now)
    return task.said_at


def test_a_silent_feed_says_so_once(feeds):
    assert look(feeds, Task(), 0, 500, 999) == []
    assert look(feeds, Task(), 5_000, 5_999, 6_000, 7_000, 60_000) == [6_000]


def test_lag_starts_the_silence_anew(feeds):
    task = Task()
    look(feeds, task, 0, 900)
    task.caught_up = False
    look(feeds, task, 950)
    task.caught_up = True
    assert look(feeds, task, 1_000, 1_900) == []
    assert look(feeds, task, 1_950) == [1_950]


def test_a_record_starts_it_anew_also_after_it_was_said(feeds):
    task = Task()
    look(feeds, task, 0, 1_000)
    task.judged_to = 5
    assert look(feeds, task, 1_500, 2_400) == [1_000]
    assert look(feeds, task, 2_500) == [1_000, 2_500]


def test_the_markers_own_commit_is_no_new_silence(feeds):
    task = Task()
    look(feeds, task, 0, 1_000)
    task.caught_up = False
    look(feeds, task, 1_050)
    task.caught_up = True
    assert look(feeds, task, 1_100, 9_000) == [1_000]


def test_an_open_transaction_puts_it_off(feeds):
    task = Task(busy=True)
    assert look(feeds, task, 0, 1_000) == []
    task.busy = False
    assert look(feeds, task, 1_250) == [1_250]


def test_a_new_task_of_the_feed_says_it_again(feeds):
    look(feeds, Task(), 0, 1_000)
    assert look(feeds, Task(), 1_100, 2_000, 2_100) == [2_100]


@pytest.mark.parametrize("task", [Task(kind="dedup"), Task(state=TaskState.RESTORING)])
def test_nobody_else_says_it(feeds, task):
    assert look(feeds, task, 0, 1_000, 2_000) == []


def test_a_feed_that_went_away_is_forgotten(feeds):
    task = Task()
    look(feeds, task, 0)
    feeds.look({}, 500)
    assert look(feeds, task, 1_000, 1_999) == []
