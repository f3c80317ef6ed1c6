"""Implements `dedup size`, which predicts the size of a topology's state from the number and length of its IDs.

The constants were measured on RocksDB with IDs that do not compress, such as UUIDs and hashes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from dedup.cli.inputs import JsonOption, OptionalTopology, read_topology, say
from dedup.core.tracking_id import KEPT_BYTES
from dedup.core.window import Window
from dedup.errors import Problem, SettingsError
from dedup.quantities import format_duration, parse_duration

if TYPE_CHECKING:
    from dedup.topology.model import Topology

_PER_KEY_BYTE: Final = 1.05
"""Bytes on disk per byte of a key. Keys share few prefixes, and each key also takes part of the block index."""
_PER_SIGHTING_BYTES: Final = 16.0
"""Bytes on disk per sighting besides its key: value, sequence number, lengths, and 10 bits of Bloom filter."""
_FINGERPRINT_BYTES: Final = 8
_FILTER_BYTES: Final = 2.7
"""Memory per ID in the Bloom filter: 16 bits, plus a share of the empty part of the newest layer."""
_TAG_BYTES: Final = 1
_UUID_KEY_BYTES: Final = 17
_INTEGER_KEY_BYTES: Final = 6
"""Length of the state key of an integer ID up to a trillion."""
_KINDS: Final = "uuid, integer or text:LENGTH"


def size(
    topology: OptionalTopology = None,
    *,
    rate: Annotated[float, typer.Option(min=0, help="Records per second.")] = 1000,
    duplicates: Annotated[float, typer.Option(min=0, max=1, help="Share of records whose ID is not new.")] = 0,
    kind: Annotated[str, typer.Option("--id", metavar="KIND", help=f"Kind of ID: {_KINDS}.")] = "uuid",
    guard: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Guard period. Default: the topology's.")
    ] = None,
    grace: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Grace period. Default: --guard, or else the topology's grace period."),
    ] = None,
    partitions: Annotated[int, typer.Option(min=1, help="Number of partitions that dedup tasks read.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Predict the size of the state on disk and in memory from a record rate, a guard period, and the kind of ID.

    If TOPOLOGY is given, the command uses the topology's guard period and grace period, and compares the prediction
    with the topology's limit for the state. The prediction is accurate to within 20% for IDs that have nothing in
    common, such as UUIDs; sequential IDs may need only half the space. The command does not connect to Kafka.

    Examples: dedup size topologies/orders.yaml --rate 2000

    dedup size --rate 500 --guard 24h --id text:20 --duplicates 0.3 --partitions 12
    """
    parsed = None if topology is None else read_topology(topology)
    window = _window(parsed, guard, grace)
    fingerprints = parsed is not None and parsed.fingerprints_wanted
    data = predict(window, rate * (1 - duplicates), key_bytes(kind), fingerprints=fingerprints)
    data |= {
        "partitions": partitions,
        "disk_most_bytes_per_partition": data["disk_most_bytes"] // partitions,
        "max_bytes_per_partition": None if parsed is None else parsed.state.max_bytes_per_partition,
    }
    say(data, _in_words(data, window), as_json=as_json)


def predict(window: Window, ids_per_s: float, key_length: int, *, fingerprints: bool) -> dict[str, Any]:
    """Return the predicted size of the state in all partitions together for ``ids_per_s`` new IDs per second.

    The state is smallest right after a segment is dropped, and largest right before. Besides the Bloom filters, each
    worker uses 128 MiB of memory for buffers and cache.
    """
    each = bytes_an_id(key_length, fingerprints=fingerprints)
    least = ids_per_s * window.retention_ms / 1000
    # Each segment covers half a retention period and is dropped as a whole.
    most = least + ids_per_s * window.segment_ms / 1000
    return {
        "ids_least": round(least),
        "ids_most": round(most),
        "bytes_an_id": each,
        "disk_least_bytes": round(least * each),
        "disk_most_bytes": round(most * each),
        "filter_most_bytes": round(most * _FILTER_BYTES),
    }


def bytes_an_id(key_length: int, *, fingerprints: bool) -> float:
    """Return the number of bytes that one sighting takes in RocksDB's files."""
    return _PER_KEY_BYTE * key_length + _PER_SIGHTING_BYTES + (_FINGERPRINT_BYTES if fingerprints else 0)


def _in_words(data: dict[str, Any], window: Window) -> list[str]:
    copies = "each standby replica takes the same"
    lines = [
        f"kept: {format_duration(window.retention_ms)} of event time, and up to half more until a segment is dropped",
        f"IDs: {data['ids_least']:,} to {data['ids_most']:,}, {data['bytes_an_id']:.0f} bytes each",
        f"disk: {_gib(data['disk_least_bytes'])} to {_gib(data['disk_most_bytes'])}; {copies}",
        f"disk, each of {data['partitions']} partitions: up to {_gib(data['disk_most_bytes_per_partition'])}",
        f"memory: up to {_gib(data['filter_most_bytes'])} of filters, and 128 MiB of buffers and cache per worker",
    ]
    bound = data["max_bytes_per_partition"]
    if bound is not None:
        share = data["disk_most_bytes_per_partition"] / bound
        verdict = "a worker would stop: raise the limit, or use more partitions" if share > 1 else "fits"
        lines.append(f"state.max_bytes_per_partition: {share:.0%} of {_gib(bound)}; {verdict}")
    return lines


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):,.2f} GiB" if size_bytes >= 1 << 28 else f"{size_bytes / (1 << 20):,.1f} MiB"


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


def key_bytes(kind: str) -> int:
    """Return the length of the state key for a kind of ID. Long IDs are stored as digests."""
    name, _, length = kind.partition(":")
    match name, length:
        case "uuid", "":
            return _UUID_KEY_BYTES
        case "integer", "":
            return _INTEGER_KEY_BYTES
        case "text", digits if digits.isdecimal() and int(digits):
            return min(int(digits) + _TAG_BYTES, KEPT_BYTES + 1)
        case _:
            raise SettingsError([Problem("--id", f'"{kind}" is unknown; write {_KINDS}, for example text:20')])
