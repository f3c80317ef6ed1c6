"""Builds the report of `dedup chaos`. The report covers nine oracles, which are conditions that must hold in every run.

Once all workers have stopped, `gather` collects the evidence for the oracles from Kafka, the stores, and the workers'
logs and exit codes.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from dedup.chaos.fault_run import ChaosEvents, FaultType, Tick
from dedup.chaos.live_checker import Sightings
from dedup.errors import DedupError
from dedup.kafka.client import KafkaWire
from dedup.kafka.producer_epochs import Epochs, epochs_of
from dedup.kafka.topic_admin import Admin, on_cluster
from dedup.kafka.wire import TopicPartition
from dedup.store.base import StoreIdentity
from dedup.store.changelog import collect
from dedup.store.directory import store_directory
from dedup.store.rocks import RocksStore
from dedup.verify.kafka_reader import KafkaReader
from dedup.verify.render import LEFT, html_table, legend, page, plot, scale
from dedup.verify.report import Report
from dedup.verify.verifier import verify

if TYPE_CHECKING:
    from dedup.chaos.fault_run import ChaosStage
    from dedup.settings import Settings
    from dedup.topology.model import Topology

T = TypeVar("T")
FENCED: Final = "Another owner has the partition"
"""The message that a worker logs when the broker fences one of its tasks."""
_NO_DUPLICATE: Final = "nothing is duplicated, and the live checker saw no duplicate"
_RECORD_ORACLES: Final = ("O1", "O2", "O3", "O4")
_HEIGHT: Final = 200


@dataclass(slots=True)
class Oracle:
    """A condition that must hold in every run of `dedup chaos`, and the result of checking it."""

    name: str
    meaning: str
    held: bool
    figure: str

    @property
    def verdict(self) -> str:
        """Return the outcome as reports show it: "held" or "BROKEN"."""
        return "held" if self.held else "BROKEN"


@dataclass(slots=True)
class Evidence:
    """The evidence for the oracles. A value that could not be determined is None, and `unknown` gives the reason."""

    verified: Report | None = None
    seen: Sightings | None = None
    """The result of the live checker."""
    reached: bool = False
    """True if the live checker reached the end of the output, which proves that the output has no open transaction."""
    judged: bool = False
    """True if the group has no lag."""
    stores: int = 0
    wrong_stores: list[str] | None = None
    zombies: int = 0
    """The number of times that a worker was frozen for longer than its session timeout."""
    fenced: int = 0
    """The number of tasks that the broker fenced."""
    epochs: list[Epochs] | None = None
    """The producer epochs of each partition of the changelog."""
    unprovoked: list[str] = field(default_factory=list)
    away: int = 0
    """The number of times that a worker ended by itself, either because the broker was down or as listed in
    `unprovoked`.
    """
    unclean: list[str] = field(default_factory=list)
    starts: int = 0
    unknown: dict[str, str] = field(default_factory=dict)
    """Maps each oracle that could not be checked to the reason."""


def oracles(found: Evidence) -> list[Oracle]:
    """Return the oracles O1 to O9. An oracle that could not be checked counts as not held."""
    report, seen, epochs = found.verified, found.seen, found.epochs or []
    there = report is not None
    counts, books, read = (report.counts, report.books, report.read) if report is not None else ({}, [], 0)
    lost, doubled = counts.get("lost", 0), counts.get("duplicated", 0)
    others = sum(counts.values()) - lost - doubled
    unrepeated = seen is not None and not seen.duplicated
    watched = "no live checker" if seen is None else f"live checker {seen.duplicated} in {seen.records:,} records"
    if seen is not None and seen.samples:
        watched += f", the first at {seen.samples[0]}"
    stores = [*(found.wrong_stores or ()), f"{found.stores} stores"][0]
    left = "everything judged and read" if found.reached else "the live checker did not reach the output's end"
    left = left if found.judged else "some records are not judged"
    # If a batch of an older epoch follows a batch of a newer epoch, a zombie wrote it.
    behind = sum(len(each.behind) for each in epochs)
    batches, count = sum(each.batches for each in epochs), sum(each.count for each in epochs)
    zombies = (
        f"{found.zombies} frozen beyond the session, {found.fenced} tasks fenced; {behind} of {batches:,} batches in "
        f"{count:,} epochs come after a newer epoch's"
    )
    no_zombie = found.epochs is not None and not behind and unrepeated
    ended = [*found.unprovoked, f"{found.away} ended while the broker was down"][0]
    balanced = there and all(each.balanced for each in books)
    rows = (
        ("nothing is lost", there and not lost, f"lost {lost} of {read:,}"),
        (_NO_DUPLICATE, there and not doubled and unrepeated, f"verify {doubled}, {watched}"),
        ("order and content match the source", there and not others, f"{others} violations"),
        ("the books balance", balanced, f"{len(books)} partitions"),
        ("each store matches its changelog", found.wrong_stores == [], stores),
        ("no lag and no open transaction is left", found.judged and found.reached, left),
        ("nothing written by a zombie is visible", no_zombie, zombies),
        ("no worker ended without a fault", not found.unprovoked, ended),
        ("every SIGTERM led to a clean shutdown", not found.unclean, [*found.unclean, f"{found.starts} starts"][0]),
    )
    result = [Oracle(f"O{number}", *row) for number, row in enumerate(rows, 1)]
    for each in result:
        if each.name in found.unknown:
            each.held, each.figure = False, f"not known: {found.unknown[each.name]}"
    return result


def gather(topology: Topology, settings: Settings, stage: ChaosStage, events: ChaosEvents, *, judged: bool) -> Evidence:
    """Gather the evidence for a run's oracles. All workers must have stopped before the call."""
    fleet = stage.fleet
    found = Evidence(judged=judged, unprovoked=fleet.unprovoked, unclean=fleet.unclean, starts=fleet.starts)
    found.away = sum(events.restarts.values())
    found.zombies = sum(fault.hit and fault.kind is FaultType.FREEZE for fault in events.injected)
    found.fenced = sum(fleet.count_logged(number, FENCED) for number in range(fleet.most))
    if events.early is not None:
        found.unknown["O6"] = events.early
    found.verified = _or_why(found, _RECORD_ORACLES, lambda: verify(topology, settings))
    ends = _or_why(found, ("O2", "O6"), lambda: _output_ends(topology, settings))
    if ends is not None:
        found.reached = stage.live_checker.finish(ends)
    found.seen = _or_why(found, ("O2", "O7"), lambda: stage.live_checker.sightings)
    states = [fleet.state_dir(number) for number in range(fleet.most)]
    stores = _or_why(found, ("O5",), lambda: _compare_stores(topology, settings, states))
    if stores is not None:
        found.stores, found.wrong_stores = stores
    found.epochs = _or_why(found, ("O7",), lambda: _epochs(topology, settings))
    return found


def _or_why(found: Evidence, names: tuple[str, ...], look: Callable[[], T]) -> T | None:
    """Call ``look``, and return its result.

    If ``look`` fails, return None, and record the error for each oracle in ``names``.
    """
    try:
        return look()
    except DedupError as error:
        for name in names:
            found.unknown.setdefault(name, str(error))
        return None


def _output_ends(topology: Topology, settings: Settings) -> dict[int, int]:
    if topology.output is None:
        return {}
    with KafkaReader(settings) as reader:
        return {partition: each.high for partition, each in reader.bounds(topology.output.topic).items()}


def _epochs(topology: Topology, settings: Settings) -> list[Epochs]:
    changelog = topology.changelog_topic

    async def work(wire: KafkaWire, admin: Admin) -> list[Epochs]:
        partitions = (await admin.topics([changelog]))[changelog].partitions
        return [await epochs_of(wire, TopicPartition(changelog, partition)) for partition in range(partitions)]

    return on_cluster(settings, "dedup-chaos", work)


def _compare_stores(topology: Topology, settings: Settings, state_dirs: list[Path]) -> tuple[int, list[str]]:
    """Compare the stores with the changelog. Return the number of stores, and a message about each store that differs.

    If a partition has moved to another worker, compare the previous worker's store only up to the changelog position in
    that store.
    """
    changelog = topology.changelog_topic
    compared, wrong = 0, []
    topic_id = on_cluster(settings, "dedup-chaos", lambda _, admin: admin.topics([changelog]))[changelog].topic_id
    with KafkaReader(settings) as reader:
        for partition, bounds in reader.bounds(changelog).items():
            identity = StoreIdentity(topology.name, partition, topic_id)
            for state_dir in state_dirs:
                directory = store_directory(state_dir, identity)
                if not directory.exists():
                    continue
                compared += 1
                store = RocksStore.open(directory, identity=identity)
                try:
                    log: defaultdict[int, dict[bytes, bytes]] = defaultdict(dict)
                    for columns in reader.read(changelog, partition, bounds.low, store.position):
                        for segment, values in collect(columns.keys, columns.values).writes.items():
                            log[segment].update(values)
                    why = _difference(topology, store, log)
                finally:
                    store.close()
                if why is not None:
                    wrong.append(f"{directory}: {why}")
    return compared, wrong


def _difference(topology: Topology, store: RocksStore, log: Mapping[int, dict[bytes, bytes]]) -> str | None:
    held: defaultdict[int, dict[bytes, bytes]] = defaultdict(dict)
    for segment, state_key, value in store.sightings():
        held[segment][state_key] = value
    for segment, values in held.items():
        if log.get(segment) != values:
            return (
                f"segment {segment} differs: it has {len(values)} IDs, and {len(log.get(segment, {}))} in the changelog"
            )
    record = store.task_record
    oldest_ms = topology.window.oldest_live_ms(record.stream_time_ms) if record is not None else 0
    for segment in log.keys() - held.keys():
        if segment + topology.window.segment_ms > oldest_ms:
            return f"segment {segment} with {len(log[segment])} IDs is in the changelog, but not in the store"
    return None


@dataclass(slots=True)
class ChaosReport:
    """The results of one complete run of `dedup chaos`."""

    topology: str
    seed: int
    seconds: float
    workers: int
    events: ChaosEvents
    verified: Report | None
    """The result of the verification, or None if the verification was not possible (the oracles contain the reason)."""
    oracles: list[Oracle] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Return whether the verification was possible and every oracle held."""
        return self.verified is not None and bool(self.oracles) and not self.broken

    @property
    def broken(self) -> list[Oracle]:
        """Return the oracles that did not hold."""
        return [oracle for oracle in self.oracles if not oracle.held]

    @property
    def closing_line(self) -> str:
        """Return a one-line summary: how many records were lost or duplicated, and which oracles did not hold."""
        line = "nothing was verified" if self.verified is None else self.verified.closing_line()
        return line + (f"  BROKEN: {', '.join(oracle.name for oracle in self.broken)}" if self.broken else "")

    @property
    def counts(self) -> Counter[FaultType]:
        """Return the number of faults of each kind that hit their targets."""
        return Counter(fault.kind for fault in self.events.injected if fault.hit)

    def to_json(self) -> str:
        """Return the report as JSON.

        The JSON member "blows" counts the faults by kind, and "struck" lists all faults.
        """
        document = {
            "dedup_chaos": 1,
            "passed": self.passed,
            "topology": self.topology,
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "workers": self.workers,
            "blows": dict(self.counts),
            "restarts": self.events.restarts,
            "oracles": [asdict(oracle) for oracle in self.oracles],
            "struck": [asdict(fault) for fault in self.events.injected],
            "ticks": [asdict(tick) for tick in self.events.ticks],
            "verified": None if self.verified is None else json.loads(self.verified.to_json()),
        }
        return json.dumps(document, indent=2) + "\n"

    def to_html(self) -> str:
        """Return the report as a self-contained HTML page."""
        faults = ", ".join(f"{number} x {kind}" for kind, number in self.counts.most_common())
        parts = (
            f"<h1>{escape(self.topology)}: {self.seconds / 60:.1f} minutes of chaos</h1>",
            f"<p class='line{'' if self.passed else ' bad'}'>{escape(self.closing_line)}</p>",
            f"<p class=soft>{self.workers} workers · {escape(faults)} · seed {self.seed}</p>",
            html_table((each.name, each.meaning, each.figure, each.verdict) for each in self.oracles),
            "<h2>Records per second</h2>",
            self._plot("records per second", lambda now, before: (now.judged - before.judged, now.at_s - before.at_s)),
            "<h2>Lag: records sent and not judged yet</h2>",
            self._plot("lag", lambda now, _: (now.in_topic - now.judged, 1.0)),
            legend({kind: kind.colour for kind in sorted(self.counts)}),
        )
        return page(f"dedup chaos {self.topology}", parts)

    def _plot(self, label: str, figure: Callable[[Tick, Tick], tuple[float, float]]) -> str:
        """Return an SVG plot of a measured value over time, with a mark for each fault that hit its target."""
        steps = [
            (now.at_s, max(0.0, number / per))
            for before, now in pairwise(self.events.ticks)
            for number, per in [figure(now, before)]
            if per > 0
        ]
        if not steps:
            return "<p class=soft>No figures were recorded.</p>"
        last_s = max(steps[-1][0], *(fault.at_s for fault in self.events.injected), 1.0)
        most = max(value for _, value in steps) or 1.0
        across, up, floor = scale(last_s, most, _HEIGHT)
        line = " ".join(f"{LEFT + at_s * across:.1f},{floor - value * up:.1f}" for at_s, value in steps)
        marks = "".join(
            f"<line x1='{LEFT + fault.at_s * across:.1f}' x2='{LEFT + fault.at_s * across:.1f}' y1='12' y2='{floor}' "
            f"stroke='{fault.kind.colour}' opacity='.55'><title>{fault.at_s:.1f} s: {escape(fault.kind)}</title></line>"
            for fault in self.events.injected
            if fault.hit
        )
        marks += f"<polyline points='{line}' fill='none' stroke='currentColor' stroke-width='1.5'/>"
        return plot(f"{label} over time", marks, _HEIGHT, most, ("0 s", f"{last_s:,.0f} s"))
