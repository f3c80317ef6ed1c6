"""Runs `dedup chaos`: injects faults into a fleet and its cluster, and measures progress every second."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import heapq
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Self

from dedup.chaos.load import Age, alter
from dedup.embedded.child_process import DEDUP, Processes
from dedup.errors import BrokerUnavailable, DedupError
from dedup.kafka.client import KafkaWire
from dedup.kafka.connection import Connection
from dedup.kafka.topic_admin import Group

if TYPE_CHECKING:
    from dedup.chaos.live_checker import LiveChecker, Watch
    from dedup.chaos.load import Sender
    from dedup.embedded.fault_proxy import FaultProxy
    from dedup.embedded.kafka_node import EmbeddedKafka
    from dedup.settings import Settings
    from dedup.topology.model import Topology

# The faults of `dedup chaos` are drawn in advance from a random seed, so that a run can be repeated.


class FaultType(enum.StrEnum):
    """A kind of fault; each member's value is the fault's name in reports."""

    target: Literal["worker", "broker", "cluster"]
    """The fault's target. A `cluster` fault is a change that an administrator could make while workers run."""
    per_minute: float
    """How often the fault is injected per minute."""
    colour: str
    """The color of the fault in reports."""

    def __new__(cls, name: str, target: Literal["worker", "broker", "cluster"], per_minute: float, colour: str) -> Self:
        """Create a kind of fault that reports call ``name``."""
        kind = str.__new__(cls, name)
        kind._value_ = name
        kind.target, kind.per_minute, kind.colour = target, per_minute, colour
        return kind

    KILL = "SIGKILL", "worker", 12.0, "#e34948"
    FREEZE = "frozen beyond the session", "worker", 0.5, "#8a5bd6"
    SHORT_FREEZE = "frozen for a second", "worker", 1.0, "#b99be8"
    STOP = "SIGTERM", "worker", 1.0, "#eda100"
    JOIN = "another worker joins and leaves", "worker", 0.5, "#1baf7a"
    CUT = "connections cut", "broker", 1.0, "#2a78d6"
    BROKER_KILL = "broker SIGKILL", "broker", 0.2, "#6b6a66"
    BROKER_ROLL = "broker SIGTERM", "cluster", 0.5, "#a8a69e"
    OUTPUT_CONFIG = "output topic config changed", "cluster", 1.0, "#0f8f8a"
    RETENTION = "source retention shortened", "cluster", 0.5, "#9a6a1f"
    GROUP_DELETION = "group deletion attempted", "cluster", 0.5, "#c2458f"


QUIET_S: Final = 5.0
"""The time without faults at the start of a run, so that a fleet that does not work at all fails before the first
fault.
"""


@dataclass(frozen=True, slots=True, order=True)
class ScheduledFault:
    """A fault's time and kind and, if the fault targets a worker, that worker's number."""

    at_s: float
    kind: FaultType
    worker: int


def rates(*, harder: float, embedded: bool) -> dict[FaultType, float]:
    """Return the number of faults of each kind per minute. ``embedded`` is true if the run has its own broker."""
    targets = ["worker", *(["broker"] if embedded else []), *(["cluster"] if embedded and harder > 1 else [])]
    return {kind: kind.per_minute * harder for kind in FaultType if kind.target in targets}


def draw(*, seed: int, seconds: float, workers: int, per_minute: Mapping[FaultType, float]) -> list[ScheduledFault]:
    """Return the faults of a run, sorted by time. Each kind of fault occurs at random times, at its own rate."""
    dice = random.Random(seed)  # noqa: S311  # no secret; a run must be repeatable
    span_s = max(0.0, seconds - QUIET_S)
    return sorted(
        ScheduledFault(QUIET_S + dice.random() * span_s, kind, dice.randrange(workers))
        for kind, rate in per_minute.items()
        for _ in range(round(rate * span_s / 60))
    )


RETENTION_PROPERTIES: Final[Mapping[str, str]] = {
    "log.retention.check.interval.ms": "500",
    # This delay applies after each restart of the broker. The default is 30 s.
    "log.initial.task.delay.ms": "500",
}
"""Broker properties that make the broker delete expired records within a second."""
_SHORT_FREEZE_S: Final = 1.0
_JOINED_S: Final = 8.0
_BROKER_DOWN_S: Final = 2.0
_TICK_S: Final = 1.0
_POLL_S: Final = 0.1
_DONE_WITHIN_S: Final = 180.0
_DRAINS_WITHIN_S: Final = 60.0
"""The time that a worker has to shut down. A commit may first have to wait for a broker that is down."""
_DELETED_WITHIN_S: Final = 10.0
_PATIENCE_MS: Final = 5_000
_KILLED: Final = 137
_NOT_UP_YET: Final = 143
"""Exit code of a worker that gets SIGTERM before it has installed signal handlers or done anything else."""
_CLEAN_EXITS: Final = frozenset({0, BrokerUnavailable.exit_code, _NOT_UP_YET})
_CONFIG_CHANGES: Final[tuple[Mapping[str, str], ...]] = (
    {"compression.type": "gzip"},
    {"max.message.bytes": "2097164"},
    {"compression.type": "lz4"},
    {"max.message.bytes": "4194316"},
    {"compression.type": "zstd", "max.message.bytes": "8388620"},
    {"compression.type": "producer"},
)
"""Topic configs that do not change any record. LogAppendTime would change timestamps, so it is not among them."""


class ChaosFleet(Processes):
    """A fleet of ``count`` workers and, at times, one extra worker, each with its own ID and state directory."""

    def __init__(
        self,
        directory: Path,
        topology_file: Path,
        config: Path,
        overrides: list[str],
        count: int,
        environ: Mapping[str, str],
    ) -> None:
        self.most: Final = count + 1
        """The maximum number of workers, including the extra worker. Workers are numbered from 0."""
        self._state: Final = directory
        run = (*DEDUP, "run", str(topology_file.resolve()), "--config", str(config.resolve()), "--quiet")
        commands = {}
        for number in range(self.most):
            own = (f"state_dir={self.state_dir(number)}", f"worker_id=chaos-{number}", "web.enabled=false")
            commands[_name(number)] = [*run, *(part for each in (*overrides, *own) for part in ("--set", each))]
        super().__init__(directory, commands, environ=environ)
        self.starts = 0
        self.unprovoked: Final[list[str]] = []
        """One sentence for each time that a worker ended by itself with an error other than BrokerUnavailable."""
        self.unclean: Final[list[str]] = []
        """One sentence for each time that a worker did not shut down cleanly after SIGTERM."""

    def __enter__(self) -> Self:
        self.start(*map(_name, range(self.most - 1)))
        return self

    def start(self, *names: str) -> None:
        """Start workers with the local state that their previous processes left behind."""
        super().start(*names)
        self.starts += len(names)

    def restart(self, number: int, *, killed: bool) -> bool:
        """Stop a worker with SIGKILL or SIGTERM and restart it immediately, or return False if the worker is frozen."""
        name = _name(number)
        if self.running[name].paused:
            return False
        if killed:
            self.kill(name)
        else:
            self._end(name)
        self.start(name)
        return True

    def pause(self, number: int) -> bool:
        """Freeze a worker. Return False if the worker is already frozen or has ended."""
        process = self.running[_name(number)]
        if process.paused or not process.running:
            return False
        process.pause()
        return True

    def resume(self, number: int) -> None:
        """Resume a frozen worker."""
        self.running[_name(number)].resume()

    def add_worker(self) -> bool:
        """Start the extra worker. Return False if it is already running."""
        extra = _name(self.most - 1)
        if extra in self.running:
            return False
        self.start(extra)
        return True

    def remove_worker(self) -> None:
        """Stop the extra worker with SIGTERM."""
        self._end(_name(self.most - 1))

    def bring_back(self) -> Counter[int]:
        """Restart workers that exited without an injected fault, and return the number of workers per exit code.

        A worker is allowed to exit by itself only while the broker is down. `unprovoked` lists the workers that exited
        for any other reason.
        """
        codes: Counter[int] = Counter()
        for name, process in list(self.running.items()):
            code = process.exit_code
            if code is None:
                continue
            if code != BrokerUnavailable.exit_code:
                self.unprovoked.append(self.ended(name, f"by itself with exit code {code}"))
            codes[code] += 1
            self.start(name)
        return codes

    def stop(self) -> None:
        """Stop all workers with SIGTERM, and record in `unclean` each worker that did not shut down cleanly."""
        for name in list(self.running):
            self._end(name, clean=frozenset({0, _NOT_UP_YET}))

    def count_logged(self, number: int, text: str) -> int:
        """Return the number of times that a worker has logged ``text`` since its first start."""
        path = self.log_file(_name(number))
        return path.read_text(encoding="utf-8", errors="replace").count(text) if path.exists() else 0

    def state_dir(self, number: int) -> Path:
        """Return a worker's state directory."""
        return self._state / f"state-{number}"

    def _end(self, name: str, *, clean: frozenset[int] = _CLEAN_EXITS) -> None:
        process = self.running[name]
        if process.paused:
            process.resume()
        code = process.stop(_DRAINS_WITHIN_S)
        if code not in clean:
            how = "by SIGKILL: it did not drain in time" if code == _KILLED else f"with exit code {code}"
            self.unclean.append(self.ended(name, f"{how} after SIGTERM"))
        del self.running[name]


def _name(number: int) -> str:
    return f"worker {number}"


class ClusterFaults:
    """Injects faults into an embedded broker, and changes the cluster the way administrators might while workers run.

    Every method returns whether its fault or change had an effect.
    """

    def __init__(
        self,
        topology: Topology,
        settings: Settings,
        watches: Sequence[Watch],
        ages: Sequence[Age],
        kafka: EmbeddedKafka,
        proxy: FaultProxy,
    ) -> None:
        self.kafka: Final = kafka
        self._topology: Final = topology
        self._settings: Final = settings
        self._watches: Final = watches
        self._ages: Final = list(ages)
        self._proxy: Final = proxy
        self._changes: Final = itertools.cycle(_CONFIG_CHANGES)

    def inject(self, kind: FaultType) -> bool:
        """Inject a fault. Return False if the fault has no effect, for example because the broker is down."""
        if kind is FaultType.CUT:
            return self._proxy.cut() > 0
        if not self.kafka.running:
            return False
        if kind is FaultType.BROKER_KILL:
            self.kafka.kill()
        elif kind is FaultType.BROKER_ROLL:
            self.kafka.restart()  # This is a clean restart, as in an upgrade.
        else:
            changes: dict[FaultType, Callable[[], bool]] = {
                FaultType.OUTPUT_CONFIG: self._change_output,
                FaultType.RETENTION: self.shorten_retention,
                FaultType.GROUP_DELETION: lambda: asyncio.run(self._attempt_group_deletion()),
            }
            try:
                return changes[kind]()
            except DedupError:
                return False
        return True

    def _change_output(self) -> bool:
        """Change the output topic's compression or maximum record size. Return False if there is no output topic."""
        if self._topology.output is None:
            return False
        alter(self._settings, [self._topology.output.topic], next(self._changes))
        return True

    def shorten_retention(self) -> bool:
        """Make the broker delete the oldest records from `write_past` if workers have judged all these records.

        Return whether the records were deleted.
        """
        if not self._ages:
            return False
        age = self._ages[0]
        kept_ms = str(int(time.time() * 1000) - age.until_ms)
        if not all(watch.beyond(age.ends[watch.topic]) for watch in self._watches):
            return False
        alter(self._settings, list(age.ends), {"retention.ms": kept_ms})
        deadline_s = time.monotonic() + _DELETED_WITHIN_S
        while time.monotonic() < deadline_s:
            if all(watch.begins() == age.ends[watch.topic] for watch in self._watches):
                self._ages.pop(0)
                return True
            time.sleep(_POLL_S)
        return False

    async def _attempt_group_deletion(self) -> bool:
        """Try to delete the consumer group if it has members.

        Return True if the broker refuses the deletion, as it must.
        """
        connection = replace(Connection.of(self._settings, client_id="dedup-chaos"), patience_ms=_PATIENCE_MS)
        wire = KafkaWire(connection)
        group = Group(wire, self._topology.name)
        try:
            await wire.start()
            # The broker would delete a group without members, and workers correctly refuse to continue after that.
            return bool(await group.members()) and not await group.delete_unless_joined()
        finally:
            await wire.stop()


@dataclass(frozen=True, slots=True)
class ChaosStage:
    """The processes and observers of a run. `cluster` is None if the run has no embedded broker."""

    fleet: ChaosFleet
    sender: Sender
    watches: tuple[Watch, ...]
    live_checker: LiveChecker
    session_s: float
    cluster: ClusterFaults | None = None


@dataclass(frozen=True, slots=True)
class Tick:
    """A run's record counts at one moment, ``at_s`` seconds after fault injection started."""

    at_s: float
    sent: int
    in_topic: int
    judged: int
    forwarded: int
    """Number of records that the live checker has seen."""


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """A scheduled fault. ``hit`` is False if the fault had no effect, for example because the worker was down."""

    at_s: float
    kind: FaultType
    worker: int
    hit: bool


@dataclass(slots=True)
class ChaosEvents:
    """The events of a run of `dedup chaos`, on which the report is based."""

    injected: list[InjectedFault] = field(default_factory=list)
    ticks: list[Tick] = field(default_factory=list)
    restarts: Counter[int] = field(default_factory=Counter)
    """Maps each exit code to the number of times that a worker exited with this code without being stopped."""
    early: str | None = None
    """The reason why the run ended early, or None if the run was complete."""


class ChaosRun:
    """Executes a single run of `dedup chaos`."""

    def __init__(self, stage: ChaosStage, faults: list[ScheduledFault], on_tick: Callable[[Tick], None]) -> None:
        self._stage: Final = stage
        self._on_tick: Final = on_tick
        self._began_s = time.monotonic()
        self._due: Final[list[tuple[float, int, Callable[[], None]]]] = []
        self._order = 0
        self.events: Final = ChaosEvents()
        for fault in faults:
            self._at(fault.at_s, partial(self._inject, fault))

    def run(self, seconds: float) -> bool:
        """Inject all faults, and undo them.

        Return whether the workers judge all sent records within the time limit afterward.

        If an error ends the run early, the result is False, and `events` contains the error.
        """
        try:
            self._inject_all(seconds)
            self._stage.sender.stop()
            return self._all_judged()
        except DedupError as error:
            self.events.early = str(error)
            return False

    def _inject_all(self, seconds: float) -> None:
        self._began_s = time.monotonic()
        next_tick_s = 0.0
        while self._due or self._now() < seconds:
            if self._due and self._due[0][0] <= self._now():
                heapq.heappop(self._due)[2]()
            elif self._now() >= next_tick_s:
                next_tick_s = self._now() + _TICK_S
                self._tick()
            else:
                time.sleep(_POLL_S)

    def _all_judged(self) -> bool:
        deadline_s = self._now() + _DONE_WITHIN_S
        while self._now() < deadline_s:
            tick = self._tick()
            if tick is not None and tick.in_topic == tick.judged:
                return True
            time.sleep(_TICK_S)
        return False

    def _now(self) -> float:
        return time.monotonic() - self._began_s

    def _at(self, at_s: float, act: Callable[[], None]) -> None:
        self._order += 1  # The number preserves the order of events with equal times.
        heapq.heappush(self._due, (at_s, self._order, act))

    def _tick(self) -> Tick | None:
        self.events.restarts.update(self._stage.fleet.bring_back())
        # If a coordinator is moving or a broker is down, a later tick succeeds.
        with contextlib.suppress(BrokerUnavailable):
            looks = [watch.look() for watch in self._stage.watches]
            tick = Tick(
                self._now(),
                self._stage.sender.sent,
                sum(look.in_topic for look in looks),
                sum(look.judged for look in looks),
                self._stage.live_checker.sightings.records,
            )
            self.events.ticks.append(tick)
            self._on_tick(tick)
            return tick
        return None

    def _inject(self, fault: ScheduledFault) -> None:
        """Inject a fault, record whether it hit its target, and schedule its end if necessary."""
        fleet, cluster, worker = self._stage.fleet, self._stage.cluster, fault.worker
        lasts_s = 0.0
        end: Callable[[], None] | None = None
        match fault.kind:
            case FaultType.KILL | FaultType.STOP:
                hit = fleet.restart(worker, killed=fault.kind is FaultType.KILL)
            case FaultType.FREEZE | FaultType.SHORT_FREEZE:
                hit, end = fleet.pause(worker), partial(fleet.resume, worker)
                lasts_s = self._stage.session_s * 1.3 if fault.kind is FaultType.FREEZE else _SHORT_FREEZE_S
            case FaultType.JOIN:
                hit, lasts_s, end = fleet.add_worker(), _JOINED_S, fleet.remove_worker
            case _:
                hit = cluster is not None and cluster.inject(fault.kind)
                if cluster is not None and fault.kind is FaultType.BROKER_KILL:
                    lasts_s, end = _BROKER_DOWN_S, cluster.kafka.restart
        if hit and end is not None:
            self._at(self._now() + lasts_s, end)
        self.events.injected.append(InjectedFault(self._now(), fault.kind, worker, hit=hit))
