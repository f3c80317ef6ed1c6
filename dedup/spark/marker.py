"""Markers: what a query has written, epoch by epoch, in a compacted topic, inside the transactions that wrote it.

One topic a sink. The driver's record (key ``query``) names the generation: which checkpoint, how many partitions, from
which epoch on. A writer's record (key ``<generation>/<partition>``) names the last epoch that this partition wrote,
with its row count and an order-free digest. Compaction keeps the last of each.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final, Self

from dedup.errors import StateIncompatible
from dedup.session.wire import NoAnswer, TopicPartition, Wire
from dedup.worker.starting import bounds_of

if TYPE_CHECKING:
    from dedup.settings import Settings

FETCH_BYTES: Final = 1 << 20
WAIT_MS: Final = 200
PARTITION: Final = 0
_QUERY_KEY: Final = b"query"


@dataclass(frozen=True, slots=True)
class Generation:
    """The writers that go together: a new checkpoint or another partition count makes new ones."""

    number: int
    checkpoint: str
    partitions: int
    first_epoch: int
    """Epochs below it were written by the generation before."""

    def encode(self) -> bytes:
        """Return the record's value."""
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True, slots=True)
class Marker:
    """The last epoch that a partition has written, as a whole."""

    epoch: int
    rows: int
    digest: int
    """Sum of the rows' digests, modulo 2^64: the order in which an attempt sees them does not matter."""

    def encode(self) -> bytes:
        """Return the record's value."""
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True, slots=True)
class Markers:
    """Everything a marker topic says."""

    generation: Generation | None
    markers: Mapping[tuple[int, int], Marker]
    """(generation, partition) -> the last."""

    @classmethod
    def of(cls, records: Mapping[bytes, bytes], topic: str) -> Self:
        """Return what records say; raises StateIncompatible where one is not ours."""
        try:
            found = {key: json.loads(value) for key, value in records.items()}
            query = found.pop(_QUERY_KEY, None)
            markers = {_place(key): Marker(**value) for key, value in found.items()}
            return cls(None if query is None else Generation(**query), markers)
        except (ValueError, TypeError) as error:
            raise StateIncompatible(
                f"{topic}: holds a record that is no marker ({error}). Something else writes to it. Nothing was "
                f"touched; give the query another name."
            ) from error


def query_key() -> bytes:
    """Return the key of the driver's record."""
    return _QUERY_KEY


def marker_key(generation: int, partition: int) -> bytes:
    """Return the key of a partition's marker."""
    return f"{generation}/{partition}".encode()


def _place(key: bytes) -> tuple[int, int]:
    generation, partition = key.decode().split("/")
    return int(generation), int(partition)


async def read_markers(wire: Wire, topic: str) -> Markers:
    """Return what is committed below the high watermark of this moment.

    Many transactional ids write the topic, and the last stable offset may lie below a marker of ours while another id
    has a transaction open: so it is read on until the position has passed the watermark.
    """
    place = TopicPartition(topic, PARTITION)
    bounds = await bounds_of(wire, place)
    records: dict[bytes, bytes] = {}
    position = bounds.start
    while position < bounds.end:
        try:
            fetched = await wire.fetch(place, position, max_bytes=FETCH_BYTES, wait_ms=WAIT_MS)
        except NoAnswer:
            await wire.pause(WAIT_MS)
            continue
        records |= {record.key or b"": record.value or b"" for record in fetched.records}
        position = fetched.next_offset
    return Markers.of(records, topic)


def marker_configs(settings: Settings) -> dict[str, str]:
    """Return the configs of a marker topic."""
    least = settings.topics.min_insync_replicas
    return {"cleanup.policy": "compact"} | ({} if least is None else {"min.insync.replicas": str(least)})
