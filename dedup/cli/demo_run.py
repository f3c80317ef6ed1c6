"""The run of `dedup demo`, which sends flights to workers and kills one worker midway."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dedup.chaos.live_checker import Watch
from dedup.chaos.load import AtLeastOnceProducer, Disturbance, Sent
from dedup.embedded.child_process import ChildProcess
from dedup.embedded.fault_proxy import FaultProxy
from dedup.embedded.flights import flights
from dedup.embedded.kafka_node import EmbeddedKafka
from dedup.errors import BrokerUnavailable, InvariantBroken
from dedup.topology.model import Topology

_DEDUP: Final = (sys.executable, "-c", "from dedup.cli.main import main; main()")
_KILLED_WORKER: Final = 1
_RESTART_AFTER_S: Final = 1.0
_POLL_EVERY_S: Final = 0.25
_STALLS_AFTER_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Size:
    """The size of the demo."""

    flights: int
    events_per_second: int
    cut_every_events: int


FULL: Final = Size(flights=336_776, events_per_second=16_000, cut_every_events=4_200)
FAST: Final = Size(flights=40_000, events_per_second=10_000, cut_every_events=2_000)


class Workers:
    """Worker processes 1 to `count`, each with its own id and state directory.

    Use it as a context manager, which kills running processes.
    """

    def __init__(self, directory: Path, topology_file: Path, bootstrap: str, count: int) -> None:
        self._directory: Final = directory
        self._topology_file: Final = topology_file
        self._bootstrap: Final = bootstrap
        self._running: Final[dict[int, ChildProcess | None]] = dict.fromkeys(range(1, count + 1))

    def __enter__(self) -> Self:
        for number in self._running:
            self.start(number)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running.values():
            if process is not None:
                process.kill()

    def start(self, number: int) -> None:
        """Start a worker with its previous state."""
        config = config_file(self._directory, self._bootstrap, number)
        command = [*_DEDUP, "run", str(self._topology_file), "--config", str(config), "--quiet"]
        self._running[number] = ChildProcess(command, self._log_file(number))

    def kill(self, number: int) -> None:
        """Kill a worker with SIGKILL."""
        process = self._running[number]
        if process is not None:
            process.kill()
        self._running[number] = None

    def check(self) -> None:
        """Raise InvariantBroken, with the end of the log, if a worker ended unexpectedly."""
        for number, process in self._running.items():
            if process is not None and not process.running:
                raise self._ended(number, f"by itself with exit code {process.exit_code}")

    def stop(self) -> None:
        """Stop all workers with SIGTERM. Raises InvariantBroken if one does not exit with code 0."""
        self.check()
        for number, process in self._running.items():
            code = process.stop() if process is not None else 0
            self._running[number] = None
            if code != 0:
                raise self._ended(number, f"with exit code {code} after SIGTERM")

    def _ended(self, number: int, how: str) -> InvariantBroken:
        log = self._log_file(number)
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
        return InvariantBroken(f"worker {number} ended {how}. The end of {log}:\n{tail}")

    def _log_file(self, number: int) -> Path:
        return self._directory / f"worker-{number}.log"


def config_file(directory: Path, bootstrap: str, number: int) -> Path:
    """Write the config file of a worker, and return its path."""
    path = directory / f"worker-{number}.yaml"
    lines = (
        f"brokers: ['{bootstrap}']",
        f"state_dir: '{directory}/state-{number}'",
        f"worker_id: flights-{number}",
        "topics: {replication_factor: 1, min_insync_replicas: 1}",
        "web: {enabled: false}",
        "log: {format: text, level: info}",
    )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@dataclass(frozen=True, slots=True)
class DemoStage:
    """The processes that run before the first flight is sent."""

    topology: Topology
    kafka: EmbeddedKafka
    proxy: FaultProxy
    workers: Workers
    watch: Watch


class Run:
    """A run of the demo; an instance runs once."""

    def __init__(self, stage: DemoStage, size: Size, console: Console) -> None:
        self._stage: Final = stage
        self._size: Final = size
        self._console: Final = console
        self._abandoned: Final = threading.Event()
        self._ids: Final[set[bytes]] = set()
        self._handed_over = 0
        self._killed_s: float | None = None
        self._before: frozenset[str] = frozenset()
        """The group's members just before the worker was killed."""
        self._restarted = False
        self._back = False

    def to_the_end(self) -> int:
        """Send all flights, wait until they are judged, and return the number of distinct flights.

        Raises InvariantBroken if a worker ends unexpectedly or nothing is judged for a minute, and BrokerUnavailable if
        flights cannot be sent.
        """
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        # Without a terminal the bars would be empty lines.
        live = Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal)
        with live as bars, ThreadPoolExecutor(1) as pool:
            sending = pool.submit(self._send)
            try:
                self._watch(sending, bars)
            finally:
                self._abandoned.set()
        return len(self._ids)

    def _send(self) -> Sent:
        producer = AtLeastOnceProducer(
            self._stage.kafka.proxied[0].bootstrap,
            self._stage.topology.source.topics[0],
            events_per_second=self._size.events_per_second,
            disturbance=Disturbance(self._stage.proxy.swallow_answers, self._size.cut_every_events),
            on_progress=self._note_handed_over,
        )
        return producer.send_all(self._events())

    def _events(self) -> Iterator[tuple[bytes, bytes]]:
        for flight in flights(self._size.flights):
            if self._abandoned.is_set():
                return
            self._ids.add(flight.key)
            yield flight.key, flight.value

    def _note_handed_over(self, count: int) -> None:
        self._handed_over = count

    def _watch(self, sending: Future[Sent], bars: Progress) -> None:
        sent_bar = bars.add_task("flights sent", total=self._size.flights)
        judged_bar = bars.add_task("records judged", total=self._size.flights)
        in_topic = judged = judged_now = 0
        moved_s, reported = time.monotonic(), False
        while not (reported and self._back and judged == in_topic):
            if sending.done() and not reported:
                reported = self._report_sent(sending.result())
            # A coordinator may be loading or moving, above all in the first second; then the next poll succeeds.
            self._stage.kafka.check()
            with contextlib.suppress(BrokerUnavailable):
                progress = self._stage.watch.look()
                in_topic, judged_now = progress.in_topic, progress.judged
                self._crash_midway(judged_now)
            if judged_now != judged:
                judged, moved_s = judged_now, time.monotonic()
            bars.update(sent_bar, completed=self._handed_over)
            bars.update(judged_bar, completed=judged, total=max(in_topic, self._size.flights))
            self._stage.workers.check()
            if time.monotonic() - moved_s > _STALLS_AFTER_S:
                raise InvariantBroken(
                    f"Nothing was judged for {_STALLS_AFTER_S:g} s, at {judged} of {in_topic} records."
                )
            time.sleep(_POLL_EVERY_S)

    def _crash_midway(self, judged: int) -> None:
        """Take the next step of the crash when it is due (kill, restart, or wait until the worker rejoins)."""
        now_s = time.monotonic()
        if self._killed_s is None:
            if judged >= self._size.flights // 2:
                self._before = self._stage.watch.members()
                self._stage.workers.kill(_KILLED_WORKER)
                self._killed_s = now_s
                self._console.print(f"midway, at {judged:,} records: SIGKILL to worker {_KILLED_WORKER}")
        elif not self._restarted:
            if now_s - self._killed_s > _RESTART_AFTER_S:
                self._stage.workers.start(_KILLED_WORKER)
                self._restarted = True
        elif not self._back and self._stage.watch.members() - self._before:
            self._back = True
            self._console.print(f"worker {_KILLED_WORKER} is back")

    def _report_sent(self, sent: Sent) -> bool:
        in_topic = self._stage.watch.look().in_topic
        self._console.print(
            f"{sent.events:,} flights sent in {sent.seconds:.0f} s as {in_topic:,} records: the connection was cut "
            f"{sent.disturbances} times, so {in_topic - sent.events:,} were sent twice"
        )
        return True
