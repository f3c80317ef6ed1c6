"""What is looked at after a run of `dedup chaos`; what can not be looked at breaks its oracle, and not the report."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

from dedup.cli.chaos_state import compare_stores
from dedup.errors import DedupError
from dedup.proof.blows import BlowKind
from dedup.proof.kafka_reader import KafkaReader
from dedup.proof.oracles import Evidence
from dedup.proof.verify import verify
from dedup.session.client import KafkaWire
from dedup.session.connection import Connection
from dedup.session.epochs import Epochs, epochs_of
from dedup.session.wire import TopicPartition

if TYPE_CHECKING:
    from dedup.cli.chaos_run import Course, Stage
    from dedup.settings import Settings
    from dedup.topology.model import Topology

T = TypeVar("T")
FENCED: Final = "Another owner has the partition"
RECORDS: Final = ("O1", "O2", "O3", "O4")


def gather(topology: Topology, settings: Settings, stage: Stage, course: Course, *, judged: bool) -> Evidence:
    """Return what a run left; no worker may be running."""
    fleet = stage.fleet
    found = Evidence(judged=judged, unprovoked=fleet.unprovoked, unclean=fleet.unclean, starts=fleet.starts)
    found.away = sum(course.restarts.values())
    found.zombies = sum(blow.hit and blow.kind == BlowKind.FREEZE.value for blow in course.struck)
    found.fenced = sum(fleet.count_logged(number, FENCED) for number in range(fleet.most))
    if course.early is not None:
        found.unknown["O6"] = course.early
    found.verified = _or_why(found, RECORDS, lambda: verify(topology, settings))
    ends = _or_why(found, ("O2", "O6"), lambda: _output_ends(topology, settings))
    if ends is not None:
        found.reached = stage.witness.finish(ends)
    found.seen = _or_why(found, ("O2", "O7"), lambda: stage.witness.sightings)
    states = [fleet.state_dir(number) for number in range(fleet.most)]
    stores = _or_why(found, ("O5",), lambda: compare_stores(topology, settings, states))
    if stores is not None:
        found.stores, found.wrong_stores = stores
    epochs = _or_why(found, ("O7",), lambda: asyncio.run(_epochs(topology, settings)))
    if epochs is not None:
        found.batches, found.owners = sum(each.batches for each in epochs), sum(each.owners for each in epochs)
        found.behind = sum(len(each.behind) for each in epochs)
    return found


def _or_why(found: Evidence, names: tuple[str, ...], look: Callable[[], T]) -> T | None:
    """Return what a look finds; where it fails, its oracles get the reason."""
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
        partitions = reader.partitions([topology.output.topic])[topology.output.topic]
        bounds = reader.bounds(topology.output.topic, range(partitions))
        return {partition: each.high for partition, each in bounds.items()}


async def _epochs(topology: Topology, settings: Settings) -> list[Epochs]:
    wire = KafkaWire(Connection.of(settings, client_id="dedup-chaos"))
    await wire.start()
    try:
        with KafkaReader(settings) as reader:
            partitions = reader.partitions([topology.changelog_topic])[topology.changelog_topic]
        places = [TopicPartition(topology.changelog_topic, partition) for partition in range(partitions)]
        return [await epochs_of(wire, place) for place in places]
    finally:
        await wire.stop()
