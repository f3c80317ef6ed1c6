"""Records of the repartition topic as they were in the source topics, as Arrow columns."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from dedup.errors import InvariantBroken
from dedup.worker.publish import IDLE, SOURCE, TIMESTAMP


@dataclass(frozen=True, slots=True)
class Unwrapped:
    """A batch with the columns of the source topics; `idle_rows` are markers, no records."""

    batch: pa.RecordBatch
    idle_rows: frozenset[int]


def unwrapped(batch: pa.RecordBatch) -> Unwrapped:
    """Return the originals: coordinates and timestamp from the two headers a repartition task puts last.

    Raises InvariantBroken for a record that no repartition task wrote.
    """
    places: list[tuple[str, int, int]] = []
    timestamps_ms: list[int] = []
    headers: list[list[dict[str, object]]] = []
    idle_rows: set[int] = set()
    for row, own in enumerate(batch.column("headers").to_pylist()):
        ours = {each["key"]: each["value"] for each in (own or [])[-2:]}
        timestamp, place = ours.get(TIMESTAMP), ours.get(IDLE)
        if timestamp is not None and place is not None:
            idle_rows.add(row)
            place += b"/-1"
        else:
            place = ours.get(SOURCE)
        if timestamp is None or place is None:
            raise InvariantBroken(
                f"{batch.column('topic')[row]}/{batch.column('partition')[row]} offset {batch.column('offset')[row]} "
                f"was not written by a repartition task: it lacks the headers {SOURCE} and {TIMESTAMP}. Read the "
                f"source topics instead."
            )
        topic, partition, offset = place.decode().rsplit("/", 2)
        places.append((topic, int(partition), int(offset)))
        timestamps_ms.append(int(timestamp))
        headers.append(own[:-2])
    columns = {
        "headers": pa.array(headers, batch.schema.field("headers").type),
        "timestamp_ms": pa.array(timestamps_ms, pa.int64()),
        "topic": pa.array([topic for topic, _, _ in places], pa.string()),
        "partition": pa.array([partition for _, partition, _ in places], pa.int32()),
        "offset": pa.array([offset for _, _, offset in places], pa.int64()),
    }
    arrays = [columns.get(name, batch.column(name)) for name in batch.schema.names]
    return Unwrapped(pa.RecordBatch.from_arrays(arrays, batch.schema.names), frozenset(idle_rows))
