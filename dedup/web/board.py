"""What the dashboard shows, as plain data: one snapshot a request, whoever asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from dedup.glance import Noted, Peer
from dedup.metrics import TaskSeen, WorkerSeen
from dedup.web.attention import notices
from dedup.web.history import History

FORMAT = 1
"""Of the snapshot: a page kept open over an upgrade notices that it is another's."""


def board(
    seen: WorkerSeen, history: History, latest: Iterable[Noted], peers: Sequence[Peer], *, now_ms: int
) -> dict[str, Any]:
    """Return the snapshot: what wants attention, tasks of all workers, totals, latest cases, plots."""
    verdicts: Counter[str] = Counter()
    for task in seen.tasks:
        verdicts.update(task.numbers.verdicts)
    return {
        "format": FORMAT,
        "topology": seen.topology,
        "worker": seen.worker_id,
        "now_ms": now_ms,
        "ready": seen.not_ready is None,
        "attention": [asdict(notice) for notice in notices(seen, history.samples, peers)],
        "totals": {
            **{name: verdicts[name] for name in ("unique", "duplicate", "late", "dead_letter", "exempt")},
            "conflict": sum(task.numbers.conflicts for task in seen.tasks),
            "fenced": seen.fenced,
            "corrupted": seen.corrupted,
        },
        "tasks": [*(_own(task, seen) for task in seen.tasks), *_standbys(seen), *_elsewhere(peers)],
        "latest": [asdict(noted) for noted in sorted(latest, key=lambda noted: -noted.judged_ms)],
        "plots": history.as_data(),
    }


def _own(task: TaskSeen, seen: WorkerSeen) -> dict[str, Any]:
    numbers = task.numbers
    restoring = task.state == "restoring" and numbers.restore_total
    return _row(
        task.sub_topology,
        task.topic,
        task.partition,
        seen.worker_id,
        state=task.state,
        restore_remaining=numbers.restore_remaining if restoring else None,
        restore_total=numbers.restore_total if restoring else None,
        lag_records=task.lag_records,
        lag_seconds=round(task.lag_seconds, 1),
        # Before it runs, a task's store is not open to be looked at.
        state_ids=task.state_ids if task.state == "running" else None,
        state_bytes=task.state_bytes if task.state == "running" else None,
        state_max_bytes=task.state_max_bytes,
    )


def _standbys(seen: WorkerSeen) -> list[dict[str, Any]]:
    return [
        _row("dedup", "changelog", partition, seen.worker_id, state="standby", lag_records=lag)
        for partition, lag in sorted(seen.standby_lag.items())
    ]


def _elsewhere(peers: Sequence[Peer]) -> list[dict[str, Any]]:
    """Return the tasks of other workers: who has them, and where to look."""
    return [
        _row("", topic, partition, peer.worker, state="elsewhere", url=peer.url)
        for peer in peers
        if not peer.here
        for topic, partition in peer.partitions
    ]


def _row(task: str, topic: str, partition: int, worker: str, *, state: str, **known: Any) -> dict[str, Any]:  # noqa: ANN401  # numbers and texts
    empty = dict.fromkeys(
        (
            "url",
            "restore_remaining",
            "restore_total",
            "lag_records",
            "lag_seconds",
            "state_ids",
            "state_bytes",
            "state_max_bytes",
        )
    )
    return {"task": task, "topic": topic, "partition": partition, "worker": worker, "state": state, **empty, **known}
