"""What every measurement needs around it: a broker, a console, progress bars, a loaded topic."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from bench.cluster import Cluster
from bench.process import listener_on
from bench.workload import GUARD_MS, Workload, load
from dedup.embedded.kafka_node import EmbeddedKafka

# Kafka's own defaults; the embedded node is otherwise made to start quickly.
BROKER: Final = {"num.network.threads": "3", "num.io.threads": "8"}
_LOG_WIDTH: Final = 160


@dataclass(frozen=True, slots=True)
class Source:
    """A loaded source topic and what must come out of it: ID to the time of its first event."""

    topic: str
    workload: Workload
    expected: Mapping[bytes, int]


class Follow:
    """Moves one progress bar."""

    def __init__(self, bars: Progress, text: str, total: int) -> None:
        self._bars: Final = bars
        self._bar: Final[TaskID] = bars.add_task(text, total=total)

    def __call__(self, done: int) -> None:
        """The bar shows `done`."""
        self._bars.update(self._bar, completed=done)


@contextlib.contextmanager
def broker(bootstrap: str) -> Iterator[str]:
    """Give the address of the broker at `bootstrap`, or of an embedded one where that is empty."""
    if bootstrap:
        yield bootstrap
        return
    with EmbeddedKafka(profile="bench", properties=BROKER) as kafka:
        yield kafka.bootstrap


def broker_process(bootstrap: str) -> list[psutil.Process]:
    """Return the broker's process if it runs on this machine; otherwise, an empty list."""
    try:
        return [listener_on(bootstrap)]
    except LookupError:
        return []


def console() -> Console:
    """Return a console on stderr, wide enough for the tables also where stderr is a file."""
    made = Console(stderr=True)
    if not made.is_terminal:
        made.width = _LOG_WIDTH
    return made


def bars(on: Console) -> Progress:
    """Return progress bars."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=on
    )


def past_start_ms() -> int:
    """Return a start for a workload such that all of its events lie in the past, for none to be a future event."""
    return time.time_ns() // 1_000_000 - GUARD_MS


def load_source(bootstrap: str, workload: Workload, shown: Progress, topic: str = "") -> Source:
    """The workload's topic, named by the workload where no name is given, was made and holds its events."""
    form = "" if workload.form == "json" else f"-{workload.form}"
    topic = topic or f"w1-{workload.events}-{workload.seed}{form}"
    Cluster(bootstrap).create(topic, workload.partitions)
    load(bootstrap, topic, workload, Follow(shown, f"load {topic}", workload.events))
    return Source(topic, workload, workload.expected())
