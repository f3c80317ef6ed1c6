"""`dedup explain`: what became of one tracking ID and why, from the topics themselves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dedup.quantities import format_duration

if TYPE_CHECKING:
    from dedup.proof.explain import Explanation, Told
    from dedup.topology.model import Topology

_HELP = """Explain one tracking ID from Kafka alone: its records, each verdict and why, where each went.

No worker need be running. All topics of the topology are read, from their beginnings; memory is bounded by the ID's own
records. A composite ID is a JSON list of its parts. Exit code 4 if the topics contradict the rule, else 0, also where
the ID is in no topic.

Examples: dedup explain topologies/orders.yaml 8d5e957f-297893487bd98fa830fa6413

dedup explain topologies/orders.yaml '["shop-7", 4711]' --json
"""


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("explain", help=_HELP)(explain_command)


def explain_command(
    topology: Annotated[Path, typer.Argument(help="The topology file.", metavar="TOPOLOGY")],
    tracking_id: Annotated[str, typer.Argument(metavar="ID", help="The tracking ID.")],
    config: Annotated[Path | None, typer.Option(help="The config file; config/local.yaml if not given.")] = None,
    override: Annotated[
        list[str] | None, typer.Option("--set", help="Override a key of the config: key=value.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """See `_HELP`; raises VerificationFailed after everything is printed."""
    from json import dumps

    from rich.console import Console
    from rich.progress import Progress as Bar

    from dedup.cli.inputs import read_topology
    from dedup.errors import VerificationFailed
    from dedup.proof.explain import explain_id
    from dedup.proof.verify import Progress
    from dedup.settings import load_settings
    from dedup.worker.answers import state_keys

    parsed = read_topology(topology)
    settings = load_settings(config, override or [], os.environ)
    keys = frozenset(state_keys(parsed, tracking_id))
    with Bar(console=Console(stderr=True), transient=True) as bar:
        reading = bar.add_task("reading", total=None)

        def show(now: Progress) -> None:
            bar.update(reading, description=now.doing, completed=now.done, total=now.total)

        found = explain_id(parsed, settings, tracking_id, keys, progress=show)
    if json:
        typer.echo(dumps(asdict(found) | {"contradictions": found.contradictions}, indent=2))
    else:
        for line in in_words(found, parsed):
            typer.echo(line)
    if found.contradictions:
        raise VerificationFailed(
            f"{parsed.name}: the topics contradict the rule in {found.contradictions} places of {tracking_id!r}. Keep "
            f"them as they are: they are the evidence; `dedup verify` looks at every ID."
        )


def in_words(found: Explanation, topology: Topology) -> Iterator[str]:
    """Yield an explanation as sentences."""
    from dedup.cli.trial import instant

    if not found.records:
        yield f"no record with the ID {found.id!r} is in the source topics now"
    for told in found.records:
        yield from _record(told, topology)
    if found.more:
        yield f"and {found.more} more records of this ID"
    for place in found.strays:
        yield f"{place} has this ID, too; no record told here accounts for it"
    for kept in found.sightings:
        until = f"guarded until {instant(kept.guarded_until_ms)} of event time" if kept.live else "expired"
        extended = "" if kept.last_ms == kept.first_ms else f", last at {instant(kept.last_ms)}"
        yield f"sighting in {kept.place}: seen {instant(kept.first_ms)}{extended} in {kept.source}; {until}"
    if not found.sightings:
        yield "no sighting of it is in the changelog: never judged unique, or expired and compacted away"


def _record(told: Told, topology: Topology) -> Iterator[str]:
    from dedup.cli.trial import instant

    other = "" if told.timestamp_ms == told.event_time_ms else f" (record timestamp {instant(told.timestamp_ms)})"
    yield f"{told.place}, event time {instant(told.event_time_ms)}{other}: {told.verdict}"
    yield f"    {_why(told, topology)}"
    if told.log_place is not None:
        yield f"    judged as {told.log_place}"
    for place in told.went:
        yield f"    is now in {place}"
    if told.doubt:
        yield f"    not provable: {told.doubt}"
    if told.wrong:
        yield f"    WRONG: {told.wrong}"


def _why(told: Told, topology: Topology) -> str:
    """Return the reason of a verdict as a sentence."""
    from dedup.cli.trial import instant

    window = topology.window
    match told.verdict:
        case "unique" if told.conflict:
            return f"the ID was seen in {told.of} with another payload; on_conflict: forward"
        case "unique":
            return f"no record of this ID was seen less than {format_duration(window.guard_ms)} of event time away"
        case "duplicate":
            away = format_duration(abs(told.event_time_ms - (told.of_ms or 0)))
            payload = ", with another payload" if told.conflict else ""
            return f"repeats {told.of}{payload}, {away} away; the guard period is {format_duration(window.guard_ms)}"
        case "late":
            behind = format_duration(told.stream_time_ms - told.event_time_ms)
            return (
                f"{behind} behind stream time {instant(told.stream_time_ms)}, more than the grace period of "
                f"{format_duration(window.grace_ms)}: whether it repeats another could no longer be told"
            )
        case "dead_letter":
            return f"a dead letter, because: {told.reason}"
        case "exempt":
            return f"forwarded unjudged, as the topology says ({told.reason})"
        case "fail":
            return f"the worker stops at this record, as the topology says ({told.reason})"
        case "purged":
            return "judged, but the log it was judged in is purged"
        case _:
            return "not judged yet: it is beyond the group's committed offset"
