"""Implements `dedup size`, which predicts the size of a topology's state from the number and length of its IDs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from dedup.cli.inputs import JsonOption, OptionalTopology, read_topology, say
from dedup.core.window import Window
from dedup.errors import Problem, SettingsError
from dedup.quantities import format_duration, parse_duration
from dedup.topology.state_size import KINDS, format_bytes, key_bytes, predict

if TYPE_CHECKING:
    from dedup.topology.model import Topology


def size(
    topology: OptionalTopology = None,
    *,
    rate: Annotated[float, typer.Option(min=0, help="Records per second.")] = 1000,
    duplicates: Annotated[float, typer.Option(min=0, max=1, help="Share of records whose ID was seen before.")] = 0,
    kind: Annotated[str, typer.Option("--id", metavar="KIND", help=f"Kind of ID: {KINDS}.")] = "uuid",
    guard: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Guard period. Default: the topology's.")
    ] = None,
    grace: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Grace period. Default: the value of --guard, or else the topology's."),
    ] = None,
    partitions: Annotated[int, typer.Option(min=1, help="Number of partitions that dedup tasks read.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Predict the size of the state on disk and in memory from a record rate, a guard period, and the kind of ID.

    If TOPOLOGY is given, the command uses the topology's guard period and grace period, and compares the prediction
    with the topology's limit for the state. For unrelated IDs, such as UUIDs, the prediction is accurate to within 20%;
    sequential IDs may need only half the space. The command does not connect to Kafka.

    Examples: dedup size topologies/orders.yaml --rate 2000

    dedup size --rate 500 --guard 24h --id text:20 --duplicates 0.3 --partitions 12
    """
    parsed = None if topology is None else read_topology(topology)
    window = _window(parsed, guard, grace)
    fingerprints = parsed is not None and parsed.fingerprints_wanted
    data: dict[str, Any] = {
        **predict(window, rate * (1 - duplicates), key_bytes(kind), fingerprints=fingerprints),
        "partitions": partitions,
        "max_bytes_per_partition": None if parsed is None else parsed.state.max_bytes_per_partition,
    }
    data["disk_most_bytes_per_partition"] = data["disk_most_bytes"] // partitions
    say(data, _in_words(data, window), as_json=as_json)


def _in_words(data: dict[str, Any], window: Window) -> list[str]:
    copies, filters = "each standby replica takes the same", format_bytes(data["filter_most_bytes"])
    lines = [
        f"kept: {format_duration(window.retention_ms)} of event time, and up to half more until a segment is dropped",
        f"IDs: {data['ids_least']:,} to {data['ids_most']:,}, {data['bytes_an_id']:.0f} bytes each",
        f"disk: {format_bytes(data['disk_least_bytes'])} to {format_bytes(data['disk_most_bytes'])}; {copies}",
        f"disk, each of {data['partitions']} partitions: up to {format_bytes(data['disk_most_bytes_per_partition'])}",
        f"memory: up to {filters} of filters, and 128 MiB of buffers and cache per worker",
    ]
    bound = data["max_bytes_per_partition"]
    if bound is not None:
        share = data["disk_most_bytes_per_partition"] / bound
        verdict = "a worker would stop: raise the limit, or use more partitions" if share > 1 else "fits"
        lines.append(f"state.max_bytes_per_partition: {share:.0%} of {format_bytes(bound)}; {verdict}")
    return lines


def _window(topology: Topology | None, guard: str | None, grace: str | None) -> Window:
    if guard is not None:
        # As in a topology file, grace is the guard period by default.
        guard_ms = grace_ms = _duration("--guard", guard)
    elif topology is not None:
        guard_ms, grace_ms = topology.window.guard_ms, topology.window.grace_ms
    else:
        raise SettingsError([Problem("--guard", "is missing; write --guard 24h, or name a topology file")])
    return Window(guard_ms, grace_ms if grace is None else _duration("--grace", grace))


def _duration(option: str, text: str) -> int:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise SettingsError([Problem(option, str(error))]) from error
