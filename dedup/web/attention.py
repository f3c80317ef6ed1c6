"""What a person on call must know first: anything lost, late or stuck, one sentence each, the worst first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from dedup.glance import Peer
from dedup.metrics import TaskSeen, WorkerSeen
from dedup.web.history import Sample

STUCK_S: Final = 30.0
BEHIND_S: Final = 60.0
NEARLY_FULL: Final = 0.8


@dataclass(frozen=True, slots=True)
class Notice:
    """One thing that wants attention."""

    level: Literal["error", "warning"]
    text: str


def notices(seen: WorkerSeen, samples: Sequence[Sample], peers: Sequence[Peer]) -> list[Notice]:
    """Return what wants attention now, errors first; an empty list means that all is well here."""
    found = [*_readiness(seen), *_tasks(seen), *_verdicts(samples), *_fleet(peers)]
    return sorted(found, key=lambda notice: notice.level != "error")


def _readiness(seen: WorkerSeen) -> Iterator[Notice]:
    if seen.not_ready is not None:
        restoring = [task for task in seen.tasks if task.state == "restoring"]
        left = sum(task.numbers.restore_remaining for task in restoring)
        more = f"; {left:,} changelog records are left to restore" if restoring else ""
        yield Notice("warning", f"Not ready: {seen.not_ready}{more}.")


def _tasks(seen: WorkerSeen) -> Iterator[Notice]:
    for task in seen.tasks:
        place = f"{task.topic}/{task.partition}"
        if task.lag_records and task.state == "running" and task.seconds_since_commit > STUCK_S:
            text = f"{place} is stuck: {task.lag_records:,} records wait, and nothing was committed for"
            yield Notice("error", f"{text} {task.seconds_since_commit:,.0f} s. Look at this worker's log.")
        elif task.lag_seconds > BEHIND_S:
            yield Notice("warning", f"{place} is {task.lag_seconds:,.0f} s behind ({task.lag_records:,} records).")
        yield from _state(task, place)


def _state(task: TaskSeen, place: str) -> Iterator[Notice]:
    if task.state_max_bytes is None or task.state_bytes <= NEARLY_FULL * task.state_max_bytes:
        return
    share = task.state_bytes / task.state_max_bytes
    yield Notice(
        "error" if share > 1 else "warning",
        f"The state of {place} takes {share:.0%} of state.max_bytes_per_partition; beyond it the worker stops, with "
        f"nothing lost. Raise the bound if the disk has room, or shorten guard_period or grace.",
    )


def _verdicts(samples: Sequence[Sample]) -> Iterator[Notice]:
    if any(sample.rates["dead_letter"] for sample in samples):
        yield Notice("warning", "Dead letters in the last minutes: their reasons are below.")
    if any(sample.rates["late"] for sample in samples):
        yield Notice("warning", "Late records in the last minutes: the grace period is shorter than records are late.")


def _fleet(peers: Sequence[Peer]) -> Iterator[Notice]:
    silent = [peer.worker for peer in peers if peer.url is None and not peer.here]
    if silent:
        names = ", ".join(silent)
        yield Notice("warning", f"Without pages, so not to be asked for an ID: {names}. Set web.enabled and web.port.")
