"""`dedup size`: the state to expect, before there is any."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from dedup.errors import Problem, SettingsError

if TYPE_CHECKING:
    from dedup.core.window import Window
    from dedup.topology.model import Topology

_HELP: Final = """Predict state on disk and in memory from a rate, a guard period and the length of an ID.

Guard period and grace are taken from TOPOLOGY, where one is given, and its bound is compared. Within 20 % for IDs that
have nothing in common; IDs numbered in order take down to half. Nothing is connected to.

Examples: dedup size topologies/orders.yaml --rate 2000

dedup size --rate 500 --guard 24h --id text:20 --duplicates 0.3 --partitions 12
"""
_KINDS: Final = "uuid, integer or text:LENGTH"


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("size", help=_HELP)(size)


def size(
    topology: Annotated[Path | None, typer.Argument(metavar="[TOPOLOGY]", help="The topology file.")] = None,
    *,
    rate: Annotated[float, typer.Option(min=0, help="Records a second.")] = 1000,
    duplicates: Annotated[float, typer.Option(min=0, max=1, help="The share of them that are no new IDs.")] = 0,
    kind: Annotated[str, typer.Option("--id", metavar="KIND", help=f"What an ID is: {_KINDS}.")] = "uuid",
    guard: Annotated[str | None, typer.Option(metavar="DURATION", help="Guard period, over the topology's.")] = None,
    grace: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Grace, over the topology's; the guard period.")
    ] = None,
    partitions: Annotated[int, typer.Option(min=1, help="Of the feeding topic.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the prediction."""
    from dedup.cli.inputs import read_topology
    from dedup.store.size import predict

    parsed = None if topology is None else read_topology(topology)
    window = _window(parsed, guard, grace)
    fingerprints = parsed is not None and parsed.fingerprints_wanted
    found = predict(window, rate * (1 - duplicates), _key_bytes(kind), fingerprints=fingerprints)
    bound = None if parsed is None else parsed.state.max_bytes_per_partition
    data = {
        **asdict(found),
        "partitions": partitions,
        "disk_most_bytes_per_partition": found.disk_most_bytes // partitions,
        "max_bytes_per_partition": bound,
    }
    if as_json:
        typer.echo(json.dumps(data, indent=2))
        return
    for line in _in_words(data, window):
        typer.echo(line)


def _in_words(data: dict[str, Any], window: Window) -> list[str]:
    from dedup.quantities import format_duration

    copies = "each standby replica takes as much again"
    lines = [
        f"kept: {format_duration(window.retention_ms)} of event time, up to half as much again until a segment goes",
        f"IDs: {data['ids_least']:,} to {data['ids_most']:,}, {data['bytes_an_id']:.0f} bytes each",
        f"disk: {_gib(data['disk_least_bytes'])} to {_gib(data['disk_most_bytes'])}; {copies}",
        f"disk, each of {data['partitions']} partitions: up to {_gib(data['disk_most_bytes_per_partition'])}",
        f"memory: up to {_gib(data['filter_most_bytes'])} of filters, and 128 MiB of buffers and cache a worker",
    ]
    bound = data["max_bytes_per_partition"]
    if bound is not None:
        share = data["disk_most_bytes_per_partition"] / bound
        verdict = "a worker would stop: raise it, or take more partitions" if share > 1 else "fits"
        lines.append(f"state.max_bytes_per_partition: {share:.0%} of {_gib(bound)}; {verdict}")
    return lines


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):,.2f} GiB" if size_bytes >= 1 << 28 else f"{size_bytes / (1 << 20):,.1f} MiB"


def _window(topology: Topology | None, guard: str | None, grace: str | None) -> Window:
    from dedup.core.window import Window

    if topology is None and guard is None:
        raise SettingsError([Problem("--guard", "is missing; write --guard 24h, or name a topology file")])
    # As in a topology file: grace is the guard period where nothing else is said.
    guard_ms = _duration("--guard", guard) if guard is not None else topology.window.guard_ms if topology else 0
    if grace is not None:
        grace_ms = _duration("--grace", grace)
    else:
        grace_ms = topology.window.grace_ms if topology is not None and guard is None else guard_ms
    return Window(guard_ms, grace_ms)


def _duration(option: str, text: str) -> int:
    from dedup.quantities import parse_duration

    try:
        return parse_duration(text)
    except ValueError as error:
        raise SettingsError([Problem(option, str(error))]) from error


def _key_bytes(kind: str) -> int:
    from dedup.store.size import INTEGER_KEY_BYTES, UUID_KEY_BYTES, key_bytes

    name, _, length = kind.partition(":")
    match name, length:
        case "uuid", "":
            return UUID_KEY_BYTES
        case "integer", "":
            return INTEGER_KEY_BYTES
        case "text", digits if digits.isdecimal() and int(digits):
            return key_bytes(int(digits))
        case _:
            raise SettingsError([Problem("--id", f'"{kind}" is unknown; write {_KINDS}, for example text:20')])
