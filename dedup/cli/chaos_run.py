"""The run of `dedup chaos`: records flow, blows fall, figures are noted every second."""

from __future__ import annotations

import contextlib
import heapq
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, assert_never

from dedup.errors import BrokerUnavailable, DedupError
from dedup.proof.blows import Blow, BlowKind
from dedup.proof.chaos_report import Struck, Tick

if TYPE_CHECKING:
    from dedup.cli.chaos_fleet import ChaosFleet
    from dedup.local.kafka import EmbeddedKafka
    from dedup.local.proxy import FaultProxy
    from dedup.proof.sender import Sender
    from dedup.proof.watch import Watch
    from dedup.proof.witness import Witness

NAP_S: Final = 1.0
GUEST_S: Final = 8.0
BROKER_AWAY_S: Final = 2.0
TICK_S: Final = 1.0
LOOK_S: Final = 0.1
DONE_WITHIN_S: Final = 180.0


@dataclass(frozen=True, slots=True)
class Stage:
    """What is there before the first blow. Without an embedded broker there is no `kafka` and no `proxy`."""

    fleet: ChaosFleet
    sender: Sender
    watches: tuple[Watch, ...]
    witness: Witness
    session_s: float
    kafka: EmbeddedKafka | None = None
    proxy: FaultProxy | None = None


@dataclass(slots=True)
class Course:
    """What happened, for the report."""

    struck: list[Struck] = field(default_factory=list)
    ticks: list[Tick] = field(default_factory=list)
    restarts: Counter[int] = field(default_factory=Counter)
    """Exit code -> how often a worker had ended by itself with it and was started again."""
    early: str | None = None
    """Why the run ended before its time; None: it did not."""


class ChaosRun:
    """One run, to be made once."""

    def __init__(self, stage: Stage, blows: list[Blow], on_tick: Callable[[Tick], None]) -> None:
        self._stage: Final = stage
        self._on_tick: Final = on_tick
        self._began_s = time.monotonic()
        self._due: Final[list[tuple[float, int, Callable[[], None]]]] = []
        self._order = 0
        self.course: Final = Course()
        for blow in blows:
            self._at(blow.at_s, partial(self._strike, blow))

    def play(self, seconds: float) -> bool:
        """Every blow has fallen and was undone, and everything sent has arrived; return whether it was judged.

        What keeps the run from going on is noted in its course.
        """
        try:
            self.strike_all(seconds)
            self._stage.sender.stop()
            return self.wait_until_done()
        except DedupError as error:
            self.course.early = str(error)
            return False

    def strike_all(self, seconds: float) -> None:
        """Every blow has fallen and what it asks for was undone."""
        self._began_s = time.monotonic()
        next_tick_s = 0.0
        while self._due or self._now() < seconds:
            if self._due and self._due[0][0] <= self._now():
                heapq.heappop(self._due)[2]()
            elif self._now() >= next_tick_s:
                next_tick_s = self._now() + TICK_S
                self._tick()
            else:
                time.sleep(LOOK_S)

    def wait_until_done(self) -> bool:
        """Return whether everything that was sent was judged in time: nothing hangs."""
        deadline_s = self._now() + DONE_WITHIN_S
        while self._now() < deadline_s:
            tick = self._tick()
            if tick is not None and tick.in_topic == tick.judged:
                return True
            time.sleep(TICK_S)
        return False

    def _now(self) -> float:
        return time.monotonic() - self._began_s

    def _at(self, at_s: float, act: Callable[[], None]) -> None:
        self._order += 1  # of two at one moment the one ordered first
        heapq.heappush(self._due, (at_s, self._order, act))

    def _after(self, delay_s: float, act: Callable[[], None]) -> None:
        self._at(self._now() + delay_s, act)

    def _tick(self) -> Tick | None:
        self.course.restarts.update(self._stage.fleet.bring_back())
        # Coordinators move and brokers are away: the next look will tell.
        with contextlib.suppress(BrokerUnavailable):
            looks = [watch.look() for watch in self._stage.watches]
            tick = Tick(
                self._now(),
                self._stage.sender.sent,
                sum(look.in_topic for look in looks),
                sum(look.judged for look in looks),
                self._stage.witness.sightings.records,
            )
            self.course.ticks.append(tick)
            self._on_tick(tick)
            return tick
        return None

    def _strike(self, blow: Blow) -> None:
        fleet = self._stage.fleet
        worker = blow.worker
        match blow.kind:
            case BlowKind.KILL:
                hit = fleet.kill(worker)
            case BlowKind.FREEZE:
                hit = self._freeze(worker, self._stage.session_s * 1.3)
            case BlowKind.NAP:
                hit = self._freeze(worker, NAP_S)
            case BlowKind.STOP:
                hit = fleet.stop(worker)
            case BlowKind.GUEST:
                hit = fleet.invite()
                if hit:
                    self._after(GUEST_S, fleet.dismiss)
            case BlowKind.CUT:
                hit = self._stage.proxy is not None and self._stage.proxy.cut() > 0
            case BlowKind.BROKER_KILL:
                hit = self._kill_broker()
            case never:
                assert_never(never)
        self.course.struck.append(Struck(self._now(), blow.kind.value, worker, hit=hit))

    def _freeze(self, worker: int, for_s: float) -> bool:
        fleet = self._stage.fleet
        if not fleet.pause(worker):
            return False
        self._after(for_s, partial(fleet.resume, worker))
        return True

    def _kill_broker(self) -> bool:
        kafka = self._stage.kafka
        if kafka is None or not kafka.running:
            return False
        kafka.kill()
        self._after(BROKER_AWAY_S, kafka.restart)
        return True
