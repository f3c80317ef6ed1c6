"""Rows on their way to the task that judges them: packed as Arrow, thousands to a row of Spark's.

Theory of operation. A shuffle moves rows, and each costs microseconds on its way out of Python, through the JVM and
back. So a task of the first half packs the rows for one reader into a *parcel*, an Arrow stream of its own, and Spark
shuffles parcels: its cost is by the byte, no longer by the row. A parcel goes where Spark's own hash sends its
`TARGET`.

Spark hands Python a batch of `maxRecordsPerBatch` rows, whatever their size, and a batch must stay below 2 GiB. So a
parcel travels with rows that hold nothing, as many as keep a full batch at `BATCH_BYTES`.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import BinaryType, IntegerType, StructField, StructType

Places = npt.NDArray[np.uint16]

PARCELS: Final = StructType(
    [
        StructField("_dedup_target", IntegerType()),
        StructField("parcel", BinaryType()),
        StructField("notice", BinaryType()),
    ]
)
_ARROW: Final = pa.schema([("_dedup_target", pa.int32()), ("parcel", pa.binary()), ("notice", pa.binary())])
TARGET: Final = "_dedup_target"
BATCH_BYTES: Final = 64 << 20
"""Of parcels that Spark hands over at once."""
MOST_READERS: Final = 1 << 16
_PACKED: Final = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
"""Half the bytes: each is copied eight times on its way."""
_UNPACKED: Final = pa.ipc.IpcReadOptions(use_threads=False)
_PARCEL_ROWS: Final = 4_096
_MOST_ROWS: Final = 131_072
_MOST_BYTES: Final = 64 << 20
"""A task of the first half holds so many rows, or bytes, before it sends its parcels."""
_IN_MEMORY_BYTES: Final = 256 << 20
"""What a reader keeps of its parcels; beyond, they are in a file."""


class Packer:
    """Packs the rows of one Spark task, by reader."""

    def __init__(self, targets: Sequence[int], batch_rows: int) -> None:
        """`batch_rows`: as many rows as Spark hands to Python at once."""
        self._targets: Final = targets
        self._batch_rows: Final = batch_rows
        self._full: Final = min(_MOST_ROWS, _PARCEL_ROWS * len(targets))
        self._held: Final[list[tuple[pa.RecordBatch, Places]]] = []
        self._rows = 0
        self._bytes = 0

    def add(self, batch: pa.RecordBatch, places: Places) -> Iterator[pa.RecordBatch]:
        """Yield parcels, if there is enough to send; `places` are positions in the targets."""
        self._held.append((batch, places))
        self._rows += batch.num_rows
        self._bytes += batch.nbytes
        if self._rows >= self._full or self._bytes >= _MOST_BYTES:
            yield from self.rest()

    def rest(self) -> Iterator[pa.RecordBatch]:
        """Yield the parcels of all that is held."""
        if not self._held:
            return
        places = np.concatenate([places for _, places in self._held])
        # A stable sort of 16-bit numbers is a radix sort: in no time, and rows stay in the log's order.
        order = np.argsort(places, kind="stable")
        rows = pa.concat_batches([batch for batch, _ in self._held]).take(pa.array(order))
        self._held.clear()
        self._rows = self._bytes = 0
        met, firsts = np.unique(places[order], return_index=True)
        for place, begin, end in zip(met.tolist(), firsts.tolist(), [*firsts[1:].tolist(), len(order)], strict=True):
            yield self._parcel(self._targets[place], rows.slice(begin, end - begin))

    def notices(self, text: bytes) -> pa.RecordBatch:
        """Return a row for every reader that says the same."""
        count = len(self._targets)
        columns = [pa.array(self._targets, pa.int32()), pa.nulls(count, pa.binary()), pa.array([text] * count)]
        return pa.RecordBatch.from_arrays(columns, schema=_ARROW)

    def _parcel(self, target: int, rows: pa.RecordBatch) -> pa.RecordBatch:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, rows.schema, options=_PACKED) as writer:
            writer.write_batch(rows)
        packed = sink.getvalue()
        count = 1 + self._batch_rows * packed.size // BATCH_BYTES
        offsets = np.full(count + 1, packed.size, np.int32)
        offsets[0] = 0
        # After the first row all are empty: no parcel is.
        parcel = pa.BinaryArray.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), packed])
        columns = [pa.array(np.full(count, target, np.int32)), parcel, pa.nulls(count, pa.binary())]
        return pa.RecordBatch.from_arrays(columns, schema=_ARROW)


class Delivery:
    """All parcels of one reader; in memory while they are few, else in a file of Spark's own local directory."""

    def __init__(self) -> None:
        self._parcels: list[pa.Buffer] = []
        self._held_bytes = 0
        self._file: IO[bytes] | None = None
        self._sizes: Final[list[int]] = []
        self._open: Final = ExitStack()
        self.notices: Final[list[bytes]] = []
        """What the tasks of the first half told all readers."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._parcels.clear()
        self._open.close()

    def take(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Every parcel of these rows is held."""
        for batch in batches:
            notices = batch.column("notice")
            if notices.null_count < len(notices):
                self.notices.extend(notices.drop_null().to_pylist())
            parcels = batch.column("parcel")
            sizes = pc.binary_length(parcels).fill_null(0).to_numpy(zero_copy_only=False)
            for row in np.flatnonzero(sizes).tolist():
                self._hold(parcels[row].as_buffer())

    def rows(self) -> Iterator[pa.RecordBatch]:
        """Yield what was packed, a parcel at a time; in the same order each time."""
        for parcel in self._all():
            yield pa.ipc.open_stream(parcel, options=_UNPACKED).read_next_batch()

    def _hold(self, parcel: pa.Buffer) -> None:
        if self._file is None:
            self._parcels.append(parcel)
            self._held_bytes += parcel.size
            if self._held_bytes < _IN_MEMORY_BYTES:
                return
            spilled = tempfile.TemporaryFile(prefix="dedup-", dir=_local_directory())  # noqa: SIM115 - closed on exit
            self._file = self._open.enter_context(spilled)
            held, self._parcels = self._parcels, []
        else:
            held = [parcel]
        for each in held:
            self._sizes.append(each.size)
            self._file.write(each)

    def _all(self) -> list[pa.Buffer]:
        if self._file is not None and not self._parcels:
            self._file.flush()
            whole = pa.py_buffer(mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ))
            ends = np.cumsum(self._sizes).tolist()
            self._parcels = [whole.slice(end - size, size) for end, size in zip(ends, self._sizes, strict=True)]
        return self._parcels


def _local_directory() -> Path | None:
    """Return where Spark keeps what it spills; None, the system's own, outside an executor."""
    first = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0]
    return Path(first) if first and Path(first).is_dir() else None
