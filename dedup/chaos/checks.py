"""Computes the nine oracles of `dedup chaos`, which are conditions that must hold in every run.

The evidence is gathered from Kafka, the stores, and the workers' logs and exit codes, once all workers have stopped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from dedup.chaos.chaos_report import Oracle
from dedup.chaos.fault_run import FaultType
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
from dedup.verify.report import Report
from dedup.verify.verifier import verify

if TYPE_CHECKING:
    from dedup.chaos.fault_run import ChaosEvents, ChaosStage
    from dedup.settings import Settings
    from dedup.topology.model import Topology

T = TypeVar("T")
FENCED: Final = "Another owner has the partition"
"""The message that a worker logs when the broker fences one of its tasks."""
_NO_DUPLICATE: Final = "nothing is duplicated, and the live checker saw no duplicate"
_RECORD_ORACLES: Final = ("O1", "O2", "O3", "O4")


@dataclass(slots=True)
class Evidence:
    """The evidence for the oracles; None means that a value could not be determined, for the reason in `unknown`."""

    verified: Report | None = None
    seen: Sightings | None = None
    """The result of the live checker."""
    reached: bool = False
    """True if the live checker reached the end of the output, so that no transaction is open in it."""
    judged: bool = False
    """True if the group has no lag."""
    stores: int = 0
    wrong_stores: list[str] | None = None
    zombies: int = 0
    """How often a worker was frozen beyond its session timeout."""
    fenced: int = 0
    """Number of tasks that the broker fenced."""
    epochs: list[Epochs] | None = None
    """The producer epochs of each partition of the changelog."""
    unprovoked: list[str] = field(default_factory=list)
    away: int = 0
    """How often a worker ended by itself: because the broker was down, unless `unprovoked` names another reason."""
    unclean: list[str] = field(default_factory=list)
    starts: int = 0
    unknown: dict[str, str] = field(default_factory=dict)
    """Maps each oracle that could not be computed to the reason."""


def oracles(found: Evidence) -> list[Oracle]:
    """Return the oracles O1 to O9; an oracle that could not be computed does not hold."""
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
    # Batches of an older epoch that follow batches of a newer epoch were written by a zombie.
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
    """Gather the evidence for the oracles of a run; all workers must have stopped before the call."""
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
    """Return the result of ``look``. If it fails, return None, and note the error under each oracle in ``names``."""
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
    """Compare stores with the changelog; return the number of stores, and a sentence for each store that differs.

    A store whose partition has moved to another worker is compared only up to the store's own position in the
    changelog.
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
