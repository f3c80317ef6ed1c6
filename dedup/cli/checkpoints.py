"""Implements `dedup checkpoint`, which stores the state of tasks for workers that start with an empty disk."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from dedup.cli.inputs import ConfigOption, JsonOption, SetOption, TopologyArgument, read_both, say
from dedup.errors import Problem, SettingsError, StateIncompatible

if TYPE_CHECKING:
    from dedup.kafka.client import KafkaWire
    from dedup.kafka.topic_admin import Admin
    from dedup.settings import Settings
    from dedup.store.checkpoint_storage import CheckpointStorage
    from dedup.topology.model import Topology
    from dedup.worker.checkpointing import MadeCheckpoint

KEPT: Final = ".checkpoint"
_SHOWN: Final = ("position", "ids", "size_bytes")


def checkpoint(
    topology: TopologyArgument,
    *,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="URL", help="Directory or URL (s3://..., gs://...). Default: state.checkpoint."),
    ] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            help="Directory to keep the state in; never use a worker's state_dir. Default: state_dir/.checkpoint."
        ),
    ] = None,
    partitions: Annotated[
        list[int] | None, typer.Option("--partition", min=0, help="Checkpoint only this partition. Repeatable.")
    ] = None,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    overrides: SetOption = None,
) -> None:
    """Write the state of a topology's tasks to a directory or an object store, one checkpoint per partition.

    The command reads the state from the changelog, so it does not need or affect any worker. The command keeps the
    state in --state-dir, so the next run reads only new changelog records. Run the command periodically, but never run
    two instances at the same time.

    A worker without local state starts from a checkpoint under `state.checkpoint`, and reads only the rest of the
    changelog.

    Example: dedup checkpoint topologies/orders.yaml --to s3://backups/dedup
    """
    from dedup.kafka.record_batch import GC_THRESHOLD
    from dedup.kafka.topic_admin import on_cluster
    from dedup.settings import StateSection
    from dedup.store.checkpoint_storage import CheckpointStorage
    from dedup.store.directory import own_state

    parsed, settings = read_both(topology, config, overrides)
    url = to or settings.state.checkpoint
    if url is None:
        raise SettingsError([Problem("--to", "is missing; name a directory or URL, or set state.checkpoint")])
    storage = CheckpointStorage(url)
    # Only the changelog is read: a checkpoint made from an older checkpoint would inherit its errors.
    here = settings.model_copy(update={"state_dir": state_dir or settings.state_dir / KEPT, "state": StateSection()})

    async def work(wire: KafkaWire, admin: Admin) -> list[MadeCheckpoint]:
        return await _all(parsed, here, storage, partitions or [], wire, admin)

    gc.set_threshold(GC_THRESHOLD)
    with own_state(here.state_dir, parsed.name):
        made = on_cluster(here, f"dedup-checkpoint-{parsed.name}", work)
    told = [_told(each) for each in made]
    say([data for data, _ in told], [line for _, line in told], as_json=as_json)


def _told(made: MadeCheckpoint) -> tuple[dict[str, Any], str]:
    found = made.checkpoint
    data = {
        "partition": made.partition,
        "written": made.written,
        "written_bytes": made.written_bytes,
        "records_read": made.records,
    }
    if found is None:
        return data, f"partition {made.partition}: no state yet, nothing to write"
    new = f"{made.written_bytes / (1 << 20):,.1f} MiB written" if made.written else "nothing new"
    return data | {name: getattr(found, name) for name in _SHOWN} | {"files": len(found.files)}, (
        f"partition {made.partition}: {new}; {found.ids:,} IDs up to changelog position {found.position:,}, "
        f"{found.size_bytes / (1 << 20):,.1f} MiB, {made.records:,} changelog records read"
    )


async def _all(
    topology: Topology, settings: Settings, storage: CheckpointStorage, chosen: list[int], wire: KafkaWire, admin: Admin
) -> list[MadeCheckpoint]:
    from dedup.store.rocks import RocksMemory
    from dedup.worker.checkpointing import make_checkpoint
    from dedup.worker.clock import SteadyClock
    from dedup.worker.layout import begun
    from dedup.worker.task_factory import TaskFactory
    from dedup.worker.topics import Cluster, refuse_misfits, topic_names

    have = await admin.topics(topic_names(topology))
    needed = (*topology.source.topics, *topology.feeding_topics, topology.changelog_topic)
    missing = [name for name in needed if name not in have]
    if missing:
        raise StateIncompatible(
            f"topic {missing[0]!r} does not exist, so there is no state to write. Nothing was done."
        )
    if topology.output is None or topology.output.topic in have:
        refuse_misfits(topology, have)
    count = have[topology.changelog_topic].partitions
    unknown = [partition for partition in chosen if partition >= count]
    if unknown:
        text = f"{unknown[0]} does not exist; {topology.changelog_topic} has partitions 0 to {count - 1}"
        raise SettingsError([Problem("--partition", text)])
    cluster = await begun(topology, Cluster(have), wire)
    factory = TaskFactory(topology, settings, cluster, wire, SteadyClock(), RocksMemory())
    wire.pin(factory.check.topic_ids)
    made: list[MadeCheckpoint] = []
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        for partition in sorted(set(chosen)) or range(count):
            line = bars.add_task(f"partition {partition}", total=None)

            def show(verb: str, done: int, total: int, partition: int = partition, line: TaskID = line) -> None:
                bars.update(line, description=f"partition {partition}: {verb}", completed=done, total=total)

            read, write = partial(show, "read"), partial(show, "write")
            made.append(await make_checkpoint(factory, storage, partition, restoring=read, packing=write))
    return made
