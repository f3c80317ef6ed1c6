"""Defines the commands that administer topologies, such as `dedup apply`, `status`, `reset`, and `checkpoint`."""

from __future__ import annotations

import asyncio
import gc
import shlex
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from dedup.cli.inputs import (
    A_TIME,
    ConfigOption,
    JsonOption,
    SetOption,
    TopologyArgument,
    packed,
    read_both,
    read_settings,
    read_stage,
    read_topology,
    say,
    time_of,
    with_schemas,
)
from dedup.errors import Problem, SettingsError, StateIncompatible
from dedup.quantities import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dedup.kafka.client import KafkaWire
    from dedup.kafka.topic_admin import Admin
    from dedup.settings import Settings
    from dedup.store.checkpoint_storage import CheckpointStorage
    from dedup.topology.ingest_file import Ingest
    from dedup.topology.model import Topology
    from dedup.topology.schema import Start
    from dedup.worker.checkpointing import MadeCheckpoint
    from dedup.worker.dead_letter_replay import Replayed
    from dedup.worker.layout import Layout
    from dedup.worker.reset import Doomed
    from dedup.worker.topics import TopicPlan

_CLIENT: Final = "dedup-admin"
_STATE_OF_CHECKPOINTS: Final = ".checkpoint"
"""The subdirectory of `state_dir` in which `dedup checkpoint` keeps a copy of the state."""
_SHOWN: Final = ("position", "ids", "size_bytes")
_PRINCIPAL: Final = "User:dedup"
UrlOption = Annotated[
    list[str] | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="URL of a worker's web pages. Default: the URL from web.host and web.port. Repeatable.",
    ),
]


def apply(
    topology: Annotated[Path, typer.Argument(metavar="FILE", help="Topology file, or ingest file.")],
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be created, but create nothing.")
    ] = False,
    acls: Annotated[
        bool, typer.Option("--acls", help="Print the permissions that a worker needs, but create nothing.")
    ] = False,
    principal: Annotated[
        str | None, typer.Option(metavar="PRINCIPAL", help="Principal in the output of --acls. Default: User:dedup.")
    ] = None,
    table: Annotated[bool, typer.Option("--table", help="Also create the sink's tables in its database.")] = False,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    overrides: SetOption = None,
) -> None:
    """Create the topics that a topology or an ingest file needs, and report differences in existing topics.

    The command never changes existing topics and never creates a topology's source topics. With --table, the command
    also creates the sink's tables, so `dedup sink` needs no permission to create tables.

    Examples: dedup apply topologies/orders.yaml --dry-run

    dedup apply topologies/files-to-topic.yaml
    """
    from dedup.cli.connectors import apply_tables, resolved_sink
    from dedup.kafka.topic_admin import on_cluster
    from dedup.topology.ingest_file import Ingest
    from dedup.worker import topics as applying

    _refuse_unused(acls=acls, table=table, principal=principal)
    stage, settings = read_stage(topology), read_settings(config, overrides)
    if isinstance(stage, Ingest):
        if acls or table:
            text = "needs a topology file; for an ingest file, `dedup apply` only creates topics"
            raise SettingsError([Problem("--acls" if acls else "--table", text)])
        _apply_ingest(stage, settings, dry_run=dry_run, as_json=as_json)
        return
    parsed = with_schemas(stage, settings)
    if acls:
        _print_acls(parsed, settings, principal or _PRINCIPAL, as_json=as_json)
        return

    # Resolve the sink before creating topics, so that a topology without a sink fails before anything is created.
    spec = resolved_sink(parsed, topology) if table else None

    async def work(wire: KafkaWire, admin: Admin) -> TopicPlan:
        plan = await _plan(parsed, settings, admin)
        await applying.refuse_plan(parsed, plan, wire, admin)
        if not as_json:
            _print_plan(plan, dry_run=dry_run)
        if not dry_run:
            await applying.make(parsed, plan, wire, admin)
        return plan

    plan = on_cluster(settings, f"{_CLIENT}-{parsed.name}", work)
    tables = None if spec is None else apply_tables(parsed.name, spec, dry_run=dry_run, quiet=as_json)
    _say_applied(plan, {} if tables is None else {"tables": tables}, dry_run=dry_run, as_json=as_json)


async def _plan(topology: Topology, settings: Settings, admin: Admin) -> TopicPlan:
    """Return the topics that `dedup run` and `dedup sink` need."""
    from dedup.worker.topics import known_names, plan_topics

    sink = topology.sink if topology.sink is not None and topology.sink.topic else None
    names = known_names(topology) if sink is None else [*known_names(topology), sink.topic, sink.dead_letter]
    have = await admin.topics(names)
    plan = plan_topics(topology, settings, have)
    if sink is None:
        return plan
    from dedup.connect.sink_connector import plan_dead_letter

    planned = plan_dead_letter(sink, settings, have, plan)
    if planned is None:
        text = f"not created: {sink.dead_letter}, because the topic {sink.topic!r} of `sink.topic` does not exist yet"
        typer.echo(f"{text}; run `dedup apply` again when it does, or correct `sink.topic`", err=True)
        return plan
    return planned


def _apply_ingest(ingest: Ingest, settings: Settings, *, dry_run: bool, as_json: bool) -> None:
    from dedup.connect.source_connector import make_topics, topics_of
    from dedup.kafka.topic_admin import on_cluster
    from dedup.worker.topics import TopicPlan

    async def work(_: KafkaWire, admin: Admin) -> TopicPlan:
        have = await admin.topics([topic.name for topic in topics_of(ingest, settings, {})])
        plan = TopicPlan().with_topics(topics_of(ingest, settings, have), have)
        if not as_json:
            _print_plan(plan, dry_run=dry_run)
        if not dry_run:
            await make_topics(admin, ingest, settings, create=True)
        return plan

    _say_applied(on_cluster(settings, f"{_CLIENT}-{ingest.name}", work), {}, dry_run=dry_run, as_json=as_json)


def _say_applied(plan: TopicPlan, more: Mapping[str, object], *, dry_run: bool, as_json: bool) -> None:
    lines = [f"{counted(len(plan.make), 'topic')} created"] if plan.make and not dry_run else []
    say({"dry_run": dry_run, **asdict(plan), **more}, lines, as_json=as_json)


def _refuse_unused(*, acls: bool, table: bool, principal: str | None) -> None:
    if principal is not None and not acls:
        raise SettingsError([Problem("--principal", "names whose permissions --acls prints; add --acls")])
    if acls and table:
        raise SettingsError([Problem("--table", "creates tables, but --acls creates nothing; leave one of them out")])


def _print_acls(topology: Topology, settings: Settings, principal: str, *, as_json: bool) -> None:
    from dedup.topology.describe import worker_permissions

    rows, lines, commands = [], [], []
    for each in worker_permissions(topology):
        resource, pattern = each.resource.value, "prefixed" if each.prefixed else "literal"
        row = {"resource": resource, "name": each.name, "pattern": pattern, "operations": list(each.operations)}
        rows.append({**row, "why": each.why})
        name = f"{each.name}{'*' if each.prefixed else ''}"
        lines += [f"{resource} {name}: {', '.join(each.operations)}", *([f"    {each.why}"] if each.why else [])]
        # `dedup` only prints this command, for an administrator to run.
        parts = ["kafka-acls", "--bootstrap-server", ",".join(settings.brokers)]
        parts += ["--add", "--allow-principal", principal]
        parts += [part for operation in each.operations for part in ("--operation", operation)]
        parts += [f"--{resource}", each.name, *(["--resource-pattern-type", pattern] if each.prefixed else [])]
        commands.append(shlex.join(parts))
    say({"principal": principal, "permissions": rows}, [*lines, "", *commands], as_json=as_json)


def _print_plan(plan: TopicPlan, *, dry_run: bool) -> None:
    for topic in plan.make:
        count = "the brokers' default number of partitions"
        if topic.partitions > 0:
            count = counted(topic.partitions, "partition")
        factor = "" if topic.replication_factor < 0 else f", {counted(topic.replication_factor, 'replica')}"
        typer.echo(f"{'would create' if dry_run else 'create'} {topic.name}: {count}{factor}")
        if topic.configs:
            typer.echo(packed("   ", (f"{key}={value}" for key, value in sorted(topic.configs.items()))))
    for name in plan.as_wanted:
        typer.echo(f"ok {name}")
    for each in plan.differences:
        typer.echo(f"differs {each.topic}: {each.what} is {each.found}; apply would create it with {each.wanted}")
    if not plan.make:
        typer.echo("nothing to create")


def status(
    topology: TopologyArgument,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every two seconds until Ctrl-C.")] = False,
    urls: UrlOption = None,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    overrides: SetOption = None,
) -> None:
    """Show a fleet's lag, rates, and tasks, and suggest a remedy for each problem.

    The first line shows the lag, the age of the oldest record that is not yet judged, and the current rates. On a
    narrow terminal, the table omits some columns; --json always prints every column.

    Example: dedup status topologies/orders.yaml --watch
    """
    from dedup.cli.status import Look, ask_fleet, default_urls, follow, showing, survey
    from dedup.kafka.topic_admin import on_cluster

    parsed, settings = read_both(topology, config, overrides)
    known = urls or default_urls(settings)

    async def work(wire: KafkaWire, admin: Admin) -> None:
        async def look() -> Look:
            fleet = await asyncio.to_thread(ask_fleet, parsed.name, known, settings)
            found = await survey(parsed, wire, admin)
            return Look(found, fleet.pages, time.time_ns() // 1_000_000, fleet.refusals)

        with showing(watch=watch, as_json=as_json) as show:
            await follow(look, show, watch=watch)

    on_cluster(settings, f"{_CLIENT}-{parsed.name}", work)


def reset(
    topology: TopologyArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="earliest|latest|TIME", help="Where workers resume. Default: source.start."),
    ] = None,
    local: Annotated[
        bool,
        typer.Option(
            "--local", help="Delete only this machine's local state. Use this option after a reset on another machine."
        ),
    ] = False,
    config: ConfigOption = None,
    overrides: SetOption = None,
) -> None:
    """Delete a topology's offsets, changelog, repartition topic, and checkpoints, and the local state on this machine.

    The command asks for confirmation, and refuses to reset anything while workers are running. A reset does not delete
    records from the output topic. If workers read the source from the start again after a reset, they forward the same
    records a second time, and `dedup verify` reports the duplicates.

    Example: dedup reset topologies/orders.yaml --to latest
    """
    from dedup.kafka.topic_admin import on_cluster
    from dedup.worker.reset import Reset

    if local and to is not None:
        raise SettingsError([Problem("--to", "has no effect with --local, which changes no offsets; omit one of them")])
    parsed, settings = read_both(topology, config, overrides)
    start: Start | None
    match to:
        case None | "earliest" | "latest":
            start = to
        case _:
            start = time_of("--to", to, f"earliest, latest or {A_TIME}")
    if local:
        _reset_local(parsed, settings, yes=yes)
        return

    async def work(wire: KafkaWire, admin: Admin) -> None:
        order = Reset(parsed, settings, wire, admin)
        found = await order.look()
        if not yes:
            _ask_to_delete(_doomed(found), "Every ID seen is forgotten and may be forwarded again.")
        offsets = await order.run(found, start)
        typer.echo("\n".join(f"deleted: {each}" for each in _doomed(found)))
        for (name, partition), offset in sorted(offsets.items()):
            typer.echo(f"{name}/{partition} is read from offset {offset}")
        if not offsets:
            typer.echo(f"read from {parsed.source.start}, as the topology says")
        typer.echo("done; if workers on other machines have state, run `dedup reset --local` there")

    on_cluster(settings, f"{_CLIENT}-{parsed.name}", work)


def _reset_local(topology: Topology, settings: Settings, *, yes: bool) -> None:
    from dedup.worker.reset import delete_local_state, local_state

    found = local_state(topology, settings.state_dir)
    if not found:
        typer.echo(f"{settings.state_dir} has no state of {topology.name}; nothing was changed")
        return
    if not yes:
        _ask_to_delete(_places(found), "Workers then restore this state from the changelog.")
    delete_local_state(found)
    typer.echo(f"local state of {counted(len(found), 'partition')} deleted; workers restore it from the changelog")


def _ask_to_delete(doomed: Sequence[str], consequence: str) -> None:
    """List everything that would be deleted. Raises Exit unless the user agrees."""
    typer.echo("\n".join(["this would be deleted:", *(f"  {each}" for each in doomed)]))
    if not typer.confirm(f"{consequence} Delete it?"):
        typer.echo("nothing was changed")
        raise typer.Exit(1)


def _places(partitions: Sequence[Path]) -> list[str]:
    return [f"local state {path}" for path in partitions]


def _doomed(found: Doomed) -> list[str]:
    topics = [f"topic {name}, which is created again, empty" for name in found.topics]
    return [
        f"the offsets of group {found.group}",
        *topics,
        *_places(found.partitions),
        *(f"checkpoint {each}" for each in found.checkpoints),
    ]


def layout(
    topology: TopologyArgument,
    *,
    change: Annotated[
        bool, typer.Option("--apply", help="Change the layout to match transactions.partitions.")
    ] = False,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    overrides: SetOption = None,
) -> None:
    """Show how many partitions share a transaction, or change this number with --apply.

    Stop all workers of the topology before you change the layout. The change preserves the state and the offsets. A
    worker that was frozen during the change cannot commit afterward. If the change is interrupted, workers refuse to
    start until you run the command again.

    Example: dedup layout topologies/orders.yaml --apply
    """
    from dedup.kafka.topic_admin import on_cluster
    from dedup.worker.layout import change_layout, read_layout

    parsed, settings = read_both(topology, config, overrides)
    wanted = parsed.transactions.partitions

    async def work(wire: KafkaWire, admin: Admin) -> Layout:
        if change:
            await change_layout(parsed, settings, wire, admin)
        return await read_layout(wire, parsed)

    found = on_cluster(settings, f"{_CLIENT}-{parsed.name}", work)
    say({**asdict(found), "topology": wanted}, layout_in_words(parsed.name, found, wanted), as_json=as_json)


def layout_in_words(name: str, found: Layout, wanted: int | str) -> Iterator[str]:
    """Yield the layout as lines of text; ``wanted`` is the topology's ``transactions.partitions``."""
    shared = "each partition has" if found.partitions == 1 else f"{found.partitions} partitions share"
    yield f"{name}: {shared} a transaction; transactions.partitions is {wanted}"
    for topic, count in found.counts.items():
        yield f"{topic} had {count} partitions when the state was created"
    if found.changing_to is not None:
        yield f"a change to {found.changing_to} was interrupted; run `dedup layout --apply` to finish it"


def replay(
    topology: TopologyArgument,
    late: Annotated[
        bool, typer.Option("--late", help="Replay late records instead of dead letters. Requires --forward.")
    ] = False,
    forward: Annotated[
        bool, typer.Option("--forward", help="Send late records to the output, which may then contain duplicates.")
    ] = False,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Maximum number of records to send.")] = None,
    *,
    begin: Annotated[
        Literal["last", "start"] | None,
        typer.Option("--from", metavar="last|start", help="Where to begin if the position of the last replay is lost."),
    ] = None,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    overrides: SetOption = None,
) -> None:
    """Send each dead letter back to the source partition that it came from, exactly once.

    Each replayed record has the header dedup-replayed, which contains the record's original position in the source.
    Late records would be late again if they were sent back to the source. Therefore, with --late --forward, the command
    sends them to the output, with the header dedup-verdict: late. If the position of the last replay is lost, the
    command sends nothing unless --from says where to begin.

    Example: dedup replay topologies/orders.yaml --limit 100
    """
    from dedup.kafka.topic_admin import on_cluster
    from dedup.worker.dead_letter_replay import Replay, replay_plan
    from dedup.worker.topics import Cluster, topic_names

    if late != forward:
        why = "they would be late again: add --forward" if late else "dead letters are judged again; omit this option"
        raise SettingsError([Problem("--late" if late else "--forward", why)])
    parsed, settings = read_both(topology, config, overrides)
    plan = replay_plan(parsed, late=late, limit=limit, begin=begin)
    if isinstance(plan, str):
        raise SettingsError([Problem("--late", plan)])

    async def work(wire: KafkaWire, admin: Admin) -> Replayed:
        have = await admin.topics(topic_names(parsed))
        needed = [plan.topic, *parsed.source.topics, *([plan.output] if plan.output else [])]
        missing = [name for name in needed if name not in have]
        if missing:
            raise StateIncompatible(f"topic {missing[0]!r} does not exist; run `dedup apply` first.")
        return await Replay(parsed, settings, Cluster(have), wire, plan).run()

    done = on_cluster(settings, f"{_CLIENT}-{parsed.name}", work)
    target = plan.output or "their source partitions"
    lines = [
        f"{counted(done.sent, 'record')} of {plan.topic} sent to {target}",
        *(f"left {text}" for text in done.left),
    ]
    say({"topic": plan.topic, "sent": done.sent, "left": done.left}, lines, as_json=as_json)


def lookup(
    topology: TopologyArgument,
    tracking_id: Annotated[str, typer.Argument(metavar="ID", help="Tracking ID.")],
    urls: UrlOption = None,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    overrides: SetOption = None,
) -> None:
    """Show where workers saw an ID, and the event time until which later records with that ID are duplicates.

    Write a composite ID as a JSON array of its parts. The command queries one or more workers (--url). Each
    queried worker also asks the owners of all other partitions about the ID.

    Example: dedup lookup topologies/orders.yaml 8d5e957f-297893487bd98fa830fa6413
    """
    from dedup.cli.status import ask_id, default_urls, in_words

    parsed, settings = read_both(topology, config, overrides)
    found = ask_id(parsed, tracking_id, urls or default_urls(settings), settings)
    say(found, in_words(found), as_json=as_json)


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
            metavar="DIRECTORY",
            help="Directory for this command's state; do not use a worker's state_dir. Default: state_dir/.checkpoint.",
        ),
    ] = None,
    partitions: Annotated[
        list[int] | None,
        typer.Option("--partition", min=0, metavar="N", help="Checkpoint only this partition. Repeatable."),
    ] = None,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    overrides: SetOption = None,
) -> None:
    """Write the state of a topology's tasks to a directory or an object store, with one checkpoint per partition.

    The command reads the state from the changelog, and neither needs nor affects any worker. The command keeps a copy
    of the state in --state-dir, so that the next run reads only new changelog records. Run the command periodically,
    but never run two instances at once.

    A worker without local state starts from the checkpoint in `state.checkpoint`, and then reads only the rest of the
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
    # Read only the changelog, because a checkpoint made from an older checkpoint would inherit the older one's errors.
    here = settings.model_copy(
        update={"state_dir": state_dir or settings.state_dir / _STATE_OF_CHECKPOINTS, "state": StateSection()}
    )

    async def work(wire: KafkaWire, admin: Admin) -> list[MadeCheckpoint]:
        return await _checkpoints(parsed, here, storage, partitions or [], wire, admin)

    gc.set_threshold(GC_THRESHOLD)
    with own_state(here.state_dir, parsed.name):
        made = on_cluster(here, f"dedup-checkpoint-{parsed.name}", work)
    told = [_checkpoint_told(each) for each in made]
    say([data for data, _ in told], [line for _, line in told], as_json=as_json)


def _checkpoint_told(made: MadeCheckpoint) -> tuple[dict[str, Any], str]:
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


async def _checkpoints(
    topology: Topology, settings: Settings, storage: CheckpointStorage, chosen: list[int], wire: KafkaWire, admin: Admin
) -> list[MadeCheckpoint]:
    from dedup.store.rocks import RocksMemory
    from dedup.worker.checkpointing import make_checkpoint
    from dedup.worker.layout import begun
    from dedup.worker.task import SteadyClock
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


def export_schemas(
    topology: TopologyArgument,
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="Where to write the schemas.")],
    *,
    config: ConfigOption = None,
    overrides: SetOption = None,
) -> None:
    """Write all versions of a topology's schemas to a directory, with one file per schema ID.

    If `schema_registry.directory` names this directory, every command looks for schemas there before asking the
    registry. Commands then work even if the registry is unreachable or no longer has a schema. The command exports the
    schemas of the subject `source.subject` or, if that is not set, of the subject TOPIC-value for each source topic. If
    keys contain schema IDs, it also exports the schemas of `source.key_subject` or TOPIC-key. Files of earlier exports
    are kept.

    Example: dedup schemas export avro.yaml schemas/

    dedup verify avro.yaml --set schema_registry.directory=schemas/
    """
    from dedup.kafka.schema_registry import SchemaRegistry

    parsed, settings = read_topology(topology), read_settings(config, overrides)
    if not parsed.source.needs_registry:
        text = "reads no values or keys that name their schemas, such as `source.format: avro`; there is none to export"
        raise SettingsError([Problem(str(topology), text)])
    if settings.schema_registry.url is None:
        raise SettingsError([Problem("schema_registry.url", "is missing; write the address of the schema registry")])
    # Ignore the configured directory: it may be missing, lack new versions, or be the directory to write to.
    registry = SchemaRegistry.of(settings.schema_registry.model_copy(update={"directory": None}))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        values = parsed.source.subjects if parsed.source.names_schemas else ()
        subjects = (*values, *parsed.source.key_subjects)
        counts = {subject: registry.export(subject, directory) for subject in subjects}
    except OSError as error:
        raise SettingsError([Problem(str(directory), f"cannot be written: {error.strerror}")]) from error
    for subject, count in counts.items():
        typer.echo(f"{subject}: {count} version{'' if count == 1 else 's'}")
    if not all(counts.values()):
        text = "is not in the schema registry; name the right one (`source.subject`; for keys, `source.key_subject`)"
        text += ", or register its schemas"
        raise SettingsError([Problem(subject, text) for subject, count in counts.items() if not count])
