"""Commands that look after a topology on a cluster: `apply`, `status`, `reset`, `replay`, `lookup`."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from dedup.cli.inputs import read_topology
from dedup.errors import Problem, SettingsError, StateIncompatible

if TYPE_CHECKING:
    from dedup.session.admin import Admin
    from dedup.session.client import KafkaWire
    from dedup.settings import Settings
    from dedup.topology.model import Start, Topology
    from dedup.worker.apply import TopicPlan
    from dedup.worker.replay import Replayed

_APPLY: Final = """Make the topics a topology needs; say how those that exist differ from what it would make.

Existing topics are not changed. Source topics are never made. With --table the table of a sink is made, too: then
`dedup sink` needs no right to make tables.

Example: dedup apply topologies/orders.yaml --dry-run
"""
_STATUS: Final = """Show the tasks of a topology: owners, offsets, lag, changelog; state where a worker answers.

Example: dedup status topologies/orders.yaml --watch
"""
_RESET: Final = """Forget everything a topology knows: offsets, changelog, repartition topic, this machine's state.

Asks first, and refuses while workers run. What was forwarded stays in the output, so reading from the start again
forwards it a second time, and `dedup verify` says so.

Example: dedup reset topologies/orders.yaml --to latest
"""
_REPLAY: Final = """Send dead letters through again, exactly once: back to the source partition they came from.

The header dedup-replayed keeps the first source position. With --late --forward late records go to the output instead,
marked dedup-verdict: late; judged again they would be late again.

Example: dedup replay topologies/orders.yaml --limit 100
"""
_LOOKUP: Final = """Ask a worker whether an ID was seen: when, in which record, until when it is guarded.

A composite ID is a JSON list of its parts. A worker asks the owners of the partitions it does not have.

Example: dedup lookup topologies/orders.yaml 8d5e957f-297893487bd98fa830fa6413
"""

TopologyArgument = Annotated[Path, typer.Argument(metavar="TOPOLOGY", help="The topology file.")]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="The config file; config/local.yaml if not given.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Override a key of the config: key=value.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]

Work = Callable[["KafkaWire", "Admin"], Awaitable[Any]]


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command("apply", help=_APPLY)(apply)
    app.command("status", help=_STATUS)(status)
    app.command("reset", help=_RESET)(reset)
    app.command("replay", help=_REPLAY)(replay)
    app.command("lookup", help=_LOOKUP)(lookup)


def _read(topology: Path, config: Path | None, overrides: list[str] | None) -> tuple[Topology, Settings]:
    from dedup.settings import load_settings

    return read_topology(topology), load_settings(config, overrides or [], os.environ)


def _on_cluster(topology: Topology, settings: Settings, work: Work) -> Any:  # noqa: ANN401  # what the work returns
    from dedup.session.on_cluster import on_cluster

    return on_cluster(settings, f"dedup-admin-{topology.name}", work)


def apply(
    topology: TopologyArgument,
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be made, and make nothing.")] = False,
    acls: Annotated[
        bool, typer.Option("--acls", help="Print what a worker's principal must be allowed, and make nothing.")
    ] = False,
    principal: Annotated[str, typer.Option(help="Whom --acls names.")] = "User:dedup",
    table: Annotated[
        bool, typer.Option("--table", help="The tables of the topology's sink, too, in its database.")
    ] = False,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    overrides: SetOption = None,
) -> None:
    """Print the plan, and do it."""
    from dedup.cli.sink_table import apply_tables, resolved_sink
    from dedup.worker import apply as applying

    if acls and table:
        raise SettingsError([Problem("--table", "makes tables, and --acls makes nothing; leave one of them out")])
    parsed, settings = _read(topology, config, overrides)
    if acls:
        _print_acls(parsed, settings, principal, as_json=as_json)
        return

    # Before topics are made: the topology may have no sink.
    spec = resolved_sink(parsed, topology) if table else None

    async def work(wire: KafkaWire, admin: Admin) -> TopicPlan:
        plan = await applying.look(parsed, settings, admin)
        if not as_json:
            _print_plan(plan, dry_run=dry_run)
        if not dry_run:
            await applying.make(parsed, plan, wire, admin)
        return plan

    plan = _on_cluster(parsed, settings, work)
    tables = None if spec is None else apply_tables(spec, dry_run=dry_run, quiet=as_json)
    if as_json:
        known = {"dry_run": dry_run, **asdict(plan)}
        typer.echo(json.dumps(known if tables is None else {**known, "tables": tables}, indent=2))
    elif not dry_run and plan.make:
        typer.echo(f"{len(plan.make)} topics made")


def _print_acls(topology: Topology, settings: Settings, principal: str, *, as_json: bool) -> None:
    from dedup.cli import acls
    from dedup.topology.permissions import worker_permissions

    permissions = worker_permissions(topology)
    if as_json:
        typer.echo(json.dumps(acls.as_json(permissions, principal), indent=2))
        return
    for line in (*acls.as_table(permissions), "", *acls.as_commands(permissions, settings.brokers, principal)):
        typer.echo(line)


def _print_plan(plan: TopicPlan, *, dry_run: bool) -> None:
    for topic in plan.make:
        configs = ", ".join(f"{key}={value}" for key, value in sorted(topic.configs.items()))
        factor = "" if topic.replication_factor < 0 else f", {topic.replication_factor} replicas"
        word = "would make" if dry_run else "make"
        typer.echo(f"{word} {topic.name}: {topic.partitions} partitions{factor}; {configs}")
    for name in plan.as_wanted:
        typer.echo(f"fine {name}")
    for each in plan.differences:
        typer.echo(f"differs {each.topic}: {each.what} is {each.found}, apply would make it with {each.wanted}")
    if not plan.make:
        typer.echo("nothing to make")


def status(
    topology: TopologyArgument,
    watch: Annotated[bool, typer.Option("--watch", help="Again every two seconds, until Ctrl-C.")] = False,
    urls: Annotated[
        list[str] | None, typer.Option("--url", help="A worker's pages; may be repeated. Default: web.host, web.port.")
    ] = None,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    overrides: SetOption = None,
) -> None:
    """Print the tasks as brokers and reachable workers see them."""
    from dedup.cli.pages import ask_fleet, default_urls
    from dedup.cli.status import WATCH_S, Shown, looked
    from dedup.worker.survey import survey

    parsed, settings = _read(topology, config, overrides)
    known = urls or default_urls(settings)

    async def work(wire: KafkaWire, admin: Admin) -> None:
        with Shown(watch=watch, as_json=as_json) as shown:
            while True:
                pages = await asyncio.to_thread(ask_fleet, parsed.name, known, settings)
                shown.show(looked(await survey(parsed, wire, admin), pages))
                if not watch:
                    return
                await asyncio.sleep(WATCH_S)

    try:
        _on_cluster(parsed, settings, work)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def reset(
    topology: TopologyArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    to: Annotated[
        str | None, typer.Option("--to", metavar="earliest|latest|TIME", help="Where to read on; the topology's start.")
    ] = None,
    local: Annotated[bool, typer.Option("--local", help="This machine's state only, after a reset elsewhere.")] = False,
    config: ConfigOption = None,
    overrides: SetOption = None,
) -> None:
    """Delete what a topology knows; raises DedupError while it has workers."""
    from dedup.worker.reset import Reset, delete_local_state, local_state

    parsed, settings = _read(topology, config, overrides)
    start = None if to is None else _start(to)
    if local:
        found = local_state(parsed, settings.state_dir)
        delete_local_state(found)
        typer.echo(f"{len(found)} partitions' local state deleted; what it held and the changelog has is restored")
        return

    async def work(wire: KafkaWire, admin: Admin) -> None:
        order = Reset(parsed, settings, wire, admin)
        doomed = await order.look()
        typer.echo(f"the offsets of group {doomed.group} are deleted")
        for name in doomed.topics:
            typer.echo(f"topic {name} is deleted and made anew, empty")
        for path in doomed.partitions:
            typer.echo(f"local state {path} is deleted")
        for place in doomed.checkpoints:
            typer.echo(f"checkpoint {place} is deleted")
        if not yes and not typer.confirm("Every ID seen is forgotten, and may be forwarded again. Go on?"):
            typer.echo("nothing was touched")
            raise typer.Exit(1)
        offsets = await order.run(doomed, start)
        for (name, partition), offset in sorted(offsets.items()):
            typer.echo(f"{name}/{partition} is read from offset {offset}")
        if not offsets:
            typer.echo(f"read from: {parsed.source.start}, as the topology says")
        typer.echo("done; where workers of other machines have state, run `dedup reset --local` there")

    _on_cluster(parsed, settings, work)


def _start(text: str) -> Start:
    from dedup.core.event_time import rfc3339_ms

    match text:
        case "earliest" | "latest":
            return text
        case _:
            found = int(text) if text.isdigit() else rfc3339_ms(text)
    if found is None:
        raise SettingsError([Problem("--to", f'"{text}" is no time; write earliest, latest or 2024-01-01T00:00:00Z')])
    return found


def replay(
    topology: TopologyArgument,
    late: Annotated[bool, typer.Option("--late", help="Late records, not dead letters; needs --forward.")] = False,
    forward: Annotated[bool, typer.Option("--forward", help="To the output, outside the guarantee.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Send at most this many.")] = None,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    overrides: SetOption = None,
) -> None:
    """Replay one side topic and print how many records were sent."""
    from dedup.worker.plan import Cluster, topic_names
    from dedup.worker.replay import Replay, replay_plan

    if late != forward:
        why = "they would be late again: add --forward" if late else "dead letters are judged again: leave it out"
        raise SettingsError([Problem("--late" if late else "--forward", why)])
    parsed, settings = _read(topology, config, overrides)
    plan = replay_plan(parsed, late=late, limit=limit)
    if isinstance(plan, str):
        raise SettingsError([Problem("--late", plan)])

    async def work(wire: KafkaWire, admin: Admin) -> Replayed:
        have = await admin.topics(topic_names(parsed))
        needed = [plan.topic, *parsed.source.topics, *([plan.output] if plan.output else [])]
        missing = [name for name in needed if name not in have]
        if missing:
            raise StateIncompatible(f"topic {missing[0]!r} does not exist; run `dedup apply` first.")
        return await Replay(parsed, settings, Cluster(have), wire, plan).run(lambda _: None)

    done = _on_cluster(parsed, settings, work)
    if as_json:
        typer.echo(json.dumps({"topic": plan.topic, "sent": done.sent, "left": done.left}, indent=2))
        return
    typer.echo(f"{done.sent} records of {plan.topic} sent {'to ' + plan.output if plan.output else 'through again'}")
    for text in done.left:
        typer.echo(f"left {text}")


def lookup(
    topology: TopologyArgument,
    tracking_id: Annotated[str, typer.Argument(metavar="ID", help="The tracking ID.")],
    urls: Annotated[
        list[str] | None, typer.Option("--url", help="A worker's pages; may be repeated. Default: web.host, web.port.")
    ] = None,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    overrides: SetOption = None,
) -> None:
    """Print what the asked workers know of an ID."""
    from dedup.cli.pages import ask_id, default_urls, in_words

    parsed, settings = _read(topology, config, overrides)
    found = ask_id(parsed, tracking_id, urls or default_urls(settings), settings)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        for line in in_words(found):
            typer.echo(line)
