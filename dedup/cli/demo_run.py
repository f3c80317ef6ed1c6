"""The demo's run: flights are sent, workers judge them, one of the workers is killed half-way."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dedup.cli.demo_workers import Workers
from dedup.errors import BrokerUnavailable, InvariantBroken
from dedup.local.flights import flights
from dedup.local.kafka import EmbeddedKafka
from dedup.local.proxy import FaultProxy
from dedup.proof.atleastonce import AtLeastOnceProducer, Disturbance, Sent
from dedup.proof.watch import Watch
from dedup.topology.model import Topology

VICTIM: Final = 1
_LOOK_EVERY_S: Final = 0.25
_STALLS_AFTER_S: Final = 60.0
_BACK_AFTER_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Size:
    """How much the demo does."""

    flights: int
    events_per_second: int
    cut_every_events: int


FULL: Final = Size(flights=336_776, events_per_second=16_000, cut_every_events=4_200)
FAST: Final = Size(flights=40_000, events_per_second=10_000, cut_every_events=2_000)


@dataclass(frozen=True, slots=True)
class Stage:
    """What is there before the first flight is sent."""

    topology: Topology
    kafka: EmbeddedKafka
    proxy: FaultProxy
    workers: Workers
    watch: Watch

    @property
    def source(self) -> str:
        """Return the topic flights are sent to."""
        return self.topology.source.topics[0]


class Run:
    """One run, to be made once."""

    def __init__(self, stage: Stage, size: Size, console: Console) -> None:
        self._stage: Final = stage
        self._size: Final = size
        self._console: Final = console
        self._abandoned: Final = threading.Event()
        self._ids: Final[set[bytes]] = set()
        self._handed_over = 0
        self._killed_s: float | None = None
        self._before: frozenset[str] = frozenset()
        """The group's members when the worker was killed."""
        self._restarted = False
        self._back = False

    def to_the_end(self) -> int:
        """Everything sent was judged; returns the number of distinct flights.

        Raises InvariantBroken when a worker ended by itself or nothing was judged for a minute, BrokerUnavailable
        when flights could not be sent.
        """
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        # Where nobody looks, the bars would be empty lines.
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
            self._stage.source,
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
        moved_s, told = time.monotonic(), False
        while not (told and self._back and judged == in_topic):
            if sending.done() and not told:
                told = self._tell(sending.result())
            # Coordinators load and move, above all in the first second: the next look will tell.
            self._stage.kafka.check()
            with contextlib.suppress(BrokerUnavailable):
                sight = self._stage.watch.look()
                in_topic, judged_now = sight.in_topic, sight.judged
                self._crash_half_way(judged_now)
            if judged_now != judged:
                judged, moved_s = judged_now, time.monotonic()
            bars.update(sent_bar, completed=self._handed_over)
            bars.update(judged_bar, completed=judged, total=max(in_topic, self._size.flights))
            self._stage.workers.check()
            if time.monotonic() - moved_s > _STALLS_AFTER_S:
                raise InvariantBroken(
                    f"Nothing was judged for {_STALLS_AFTER_S:g} s, at {judged} of {in_topic} records."
                )
            time.sleep(_LOOK_EVERY_S)

    def _crash_half_way(self, judged: int) -> None:
        """Take the next step of the crash if it is time: kill, start again, wait until the worker is in the group."""
        now_s = time.monotonic()
        if self._killed_s is None:
            if judged >= self._size.flights // 2:
                self._before = self._stage.watch.members()
                self._stage.workers.kill(VICTIM)
                self._killed_s = now_s
                self._console.print(f"half-way, at {judged:,} records: SIGKILL to worker {VICTIM}")
        elif not self._restarted:
            if now_s - self._killed_s > _BACK_AFTER_S:
                self._stage.workers.start(VICTIM)
                self._restarted = True
        elif not self._back and self._stage.watch.members() - self._before:
            self._back = True
            self._console.print(f"worker {VICTIM} is back")

    def _tell(self, sent: Sent) -> bool:
        in_topic = self._stage.watch.look().in_topic
        self._console.print(
            f"{sent.events:,} flights sent in {sent.seconds:.0f} s as {in_topic:,} records: the connection was cut "
            f"{sent.disturbances} times, so {in_topic - sent.events:,} were sent twice"
        )
        return True
