"""What a worker answers when it is asked: is it ready, what do its tasks do, was this ID seen."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from dedup.core.extract_one import Fault, Recipe, extract_one
from dedup.core.murmur2 import partitions
from dedup.core.paths import Path
from dedup.core.tracking_id import ContentRule, FieldRule, FieldsRule, HeaderRule, KeyRule, RawContentRule
from dedup.core.window import Sighting
from dedup.errors import Problem, SettingsError, StateIncompatible
from dedup.glance import LookedUp, Noted, Peer, SeenId, ShownRecord, TaskPulse
from dedup.metrics import TaskSeen, WorkerSeen
from dedup.session.wire import TopicPartition
from dedup.worker.exposition import exposition
from dedup.worker.judge import Judge
from dedup.worker.peers import peers_of
from dedup.worker.repartition import Repartition
from dedup.worker.task import Task, TaskState

if TYPE_CHECKING:
    from dedup.topology.model import Topology
    from dedup.worker.app import DedupApp


FRESH_S: Final = 2.0
"""The leader of a quiet partition answers five times a second."""


class WorkerAnswers:
    """Reads the app's tasks; changes nothing."""

    def __init__(self, app: DedupApp, topology: Topology) -> None:
        self._app: Final = app
        self._topology: Final = topology

    def not_ready(self) -> str | None:
        """Return why this worker does not process what it should; None if it does."""
        tasks = self._app.tasks
        if tasks.failure.done():
            return "the worker is stopping after a failure"
        if not tasks.opened.is_set():
            return "no assignment yet, or a rebalance is going on"
        waiting = [task for task in tasks.running.values() if task.state is not TaskState.RUNNING]
        return f"{len(waiting)} of {len(tasks.running)} tasks are not running yet" if waiting else None

    def seen(self) -> WorkerSeen:
        """Return the worker as it is now."""
        app = self._app
        return WorkerSeen(
            topology=self._topology.name,
            worker_id=app.settings.worker_id or "",
            tasks=tuple(self._task(feeding, task) for feeding, task in sorted(app.tasks.running.items())),
            standby_lag=dict(app.standbys.lag),
            fenced=app.tasks.fenced,
            corrupted=app.tasks.corrupted,
            not_ready=self.not_ready(),
            checkpoints_unusable=app.bootstrap.unusable,
            ended=app.tasks.ended,
        )

    def metrics(self) -> bytes:
        """Return the worker's metrics in Prometheus' text format."""
        return exposition(self.seen)

    def caught_up(self, feeding: TopicPartition, task: Task) -> bool:
        """Tell whether a task has judged and committed all there is of its partition."""
        end = self._app.member.fetcher.end(feeding)
        # A leader that does not answer may hold records that nobody has seen: then nothing is known.
        if end is None or asyncio.get_running_loop().time() - end.seen_s > FRESH_S:
            return False
        if task.dirty.is_set() or task.committing:
            return False
        return self._app.member.passed(feeding, end.high_watermark, task.next_offset)

    def _lag(self, feeding: TopicPartition, task: Task) -> int | None:
        end = self._app.member.fetcher.end(feeding)
        if end is None or task.numbers.committed_offset is None:
            return None
        return 0 if self.caught_up(feeding, task) else max(0, end.high_watermark - task.numbers.committed_offset)

    def _task(self, feeding: TopicPartition, task: Task) -> TaskSeen:
        end = self._app.member.fetcher.end(feeding)
        running = task.state is TaskState.RUNNING
        store = task.work.store if running and isinstance(task.work, Judge) else None
        return TaskSeen(
            sub_topology=task.task_id.sub_topology,
            topic=feeding.topic,
            partition=feeding.partition,
            state=task.state.value,
            numbers=task.numbers,
            lag_records=self._lag(feeding, task),
            unstable_records=None if end is None else end.high_watermark - end.last_stable_offset,
            state_ids=0 if store is None else store.count_ids(),
            state_bytes=0 if store is None else store.approximate_bytes(),
            state_max_bytes=None if store is None else self._topology.state.max_bytes_per_partition,
        )

    def look_up(self, text: str) -> LookedUp:
        """Return what the state of this worker's partitions says of an ID.

        Raises SettingsError for a text that can be no ID of this topology.
        """
        keys = state_keys(self._topology, text)
        judges = {
            feeding.partition: task.work
            for feeding, task in sorted(self._app.tasks.running.items())
            if task.state is TaskState.RUNNING and isinstance(task.work, Judge)
        }
        found = tuple(
            self._seen_id(partition, sighting, live=sighting.last_ms >= judge.oldest_live_ms)
            for partition, judge in judges.items()
            for key in keys
            for sighting in sorted(judge.sightings_of(key))
        )
        # Before the first assignment the member knows no topics.
        assigned = self._app.tasks.opened.is_set()
        count = (self._app.member.topic_partitions(self._topology.feeding_topics[0]) or 0) if assigned else 0
        placed = set(range(count)) if self._topology.direct or not count else set(partitions(keys, count))
        belongs_to = next(iter(placed)) if len(placed) == 1 and not self._topology.direct else None
        name, worker = self._topology.name, self._app.settings.worker_id or ""
        home, feeding = tuple(sorted(placed)), self._topology.feeding_topics
        return LookedUp(name, worker, text, found, tuple(judges), count, belongs_to, home, feeding)

    def _seen_id(self, partition: int, sighting: Sighting, *, live: bool) -> SeenId:
        topology = self._topology
        topic, source_partition, offset = sighting.source
        place = f"{topology.source.topics[topic]}/{source_partition}/{offset}"
        guarded_ms = sighting.last_ms + topology.window.guard_ms
        went = None
        if topology.output is not None:
            # Behind a repartition topic the record's key chooses the partition, which a sighting does not keep.
            went = f"{topology.output.topic}/{source_partition}" if topology.direct else topology.output.topic
        return SeenId(partition, sighting.first_ms, sighting.last_ms, guarded_ms, place, live, went)

    def pulse(self) -> Iterator[TaskPulse]:
        """Yield what is cheap to read of every task."""
        for feeding, task in self._app.tasks.running.items():
            yield TaskPulse(task.numbers, self._lag(feeding, task))

    def latest(self) -> Iterator[Noted]:
        """Yield the latest committed duplicates, conflicts, late records and dead letters of every task."""
        # Where the content is the ID, to show it would be to show the payload.
        ids = not isinstance(self._topology.tracking_id.rule, ContentRule | RawContentRule)
        for task in self._app.tasks.running.values():
            if isinstance(task.work, Judge | Repartition):
                yield from task.work.recent.told(self._topology.source.topics, ids=ids)

    def peers(self) -> tuple[Peer, ...]:
        """Return the members of the group as the last assignment told of them; none before it."""
        return peers_of(self._app)

    async def record(self, topic: str, partition: int, offset: int) -> ShownRecord | None:
        """Return a source record, cut where it is long; None where the log does not have it (any more).

        Raises NoAnswer or StateIncompatible, also for a topic or partition that is no source of this topology.
        """
        if topic not in self._topology.source.topics:
            raise StateIncompatible(f"{topic!r} is no source topic of {self._topology.name!r}.")
        found = await self._app.wire.fetch(TopicPartition(topic, partition), offset, max_bytes=1, wait_ms=0)
        if offset not in found.offsets:
            return None
        row = found.offsets.index(offset)
        place = f"{topic}/{partition}/{offset}"
        return ShownRecord.of(place, found.timestamps_ms[row], found.keys[row], found.values[row])


def state_keys(topology: Topology, text: str) -> list[bytes]:
    """Return the state keys that an ID written by a person may mean: ``7`` is the text "7" or the number 7.

    A composite ID is written as a JSON list of its parts, a content ID as the content itself.
    """
    recipe = Recipe(topology.tracking_id, fmt=topology.source.format)
    keys: list[bytes] = []
    why = "it is none"
    for key, value, headers in _records(topology, text):
        one = extract_one(recipe, key, value, headers, 0)
        if isinstance(one, Fault):
            why = one.detail
        elif one.id not in keys:
            keys.append(one.id)
    if not keys:
        raise SettingsError([Problem("ID", f"{text!r} can be no ID of {topology.name!r}: {why}")])
    return keys


_Record = tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]]]


def _records(topology: Topology, text: str) -> list[_Record]:
    """Return records that would have this ID."""
    match topology.tracking_id.rule:
        case KeyRule():
            return [(text.encode(), None, [])]
        case HeaderRule(name):
            return [(None, None, [(name, text.encode())])]
        case FieldRule(path):
            literals = [json.dumps(text), *([text] if _is_json(text) else [])]
            return [(None, _nested([(path, literal)]).encode(), []) for literal in literals]
        case FieldsRule(paths):
            parts = json.loads(text) if _is_json(text) else None
            if not isinstance(parts, list) or len(parts) != len(paths):
                why = f"write it as a JSON list of its {len(paths)} parts"
                raise SettingsError([Problem("ID", f"the ID of {topology.name!r} is composite; {why}")])
            pairs = [(path, json.dumps(part)) for path, part in zip(paths, parts, strict=True)]
            return [(None, _nested(pairs).encode(), [])]
        case _:
            return [(None, text.encode(), [])]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        # Nested too deep to be read: no ID is, so what was written can only be a text.
        return False
    return True


def _nested(members: list[tuple[Path, str]]) -> str:
    """Return a JSON value that has these literals at these paths."""
    at_once: dict[str | int, list[tuple[Path, str]]] = {}
    for path, literal in members:
        if not path:
            return literal
        at_once.setdefault(path[0], []).append((path[1:], literal))
    inside = {step: _nested(rest) for step, rest in at_once.items()}
    indices = [step for step in inside if isinstance(step, int)]
    if indices:
        return "[" + ", ".join(inside.get(index, "null") for index in range(max(indices) + 1)) + "]"
    return "{" + ", ".join(f"{json.dumps(step)}: {value}" for step, value in inside.items()) + "}"
