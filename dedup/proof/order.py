"""Whether records kept their order, from positions alone: of each record written, where in its log it comes from."""

from __future__ import annotations

import tempfile
from array import array
from typing import Final

import numpy as np
import numpy.typing as npt

from dedup.proof.compare import astray

Positions = npt.NDArray[np.int64]

UNMATCHED: Final = -1
_STEP: Final = 1 << 16
_INT_BYTES: Final = 8


class Column:
    """A column of 64-bit integers in a file; pages come and go as they are used."""

    def __init__(self, directory: str) -> None:
        self._file: Final = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115  # closed by `close`
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    def extend(self, values: list[int]) -> None:
        """Append integers."""
        self._file.seek(self._rows * _INT_BYTES)
        self._file.write(np.array(values, dtype=np.int64).tobytes())
        self._rows += len(values)

    def put(self, rows: Positions, values: Positions) -> None:
        """Set some rows, given in ascending order."""
        at = 0
        while at < len(rows):
            first = int(rows[at])
            end = int(np.searchsorted(rows, first + _STEP))
            held = self.read(first, min(first + _STEP, self._rows))
            held[rows[at:end] - first] = values[at:end]
            self._file.seek(first * _INT_BYTES)
            self._file.write(held.tobytes())
            at = end

    def read(self, start: int, end: int) -> Positions:
        """Return the rows [start, end)."""
        self._file.seek(start * _INT_BYTES)
        return np.frombuffer(self._file.read((end - start) * _INT_BYTES), dtype=np.int64).copy()

    def __getitem__(self, row: int) -> int:
        return int(self.read(row, row + 1)[0])

    def close(self) -> None:
        """Give the disk space back."""
        self._file.close()


class Order:
    """One partition written: by row, which task's log it comes from and at what position."""

    def __init__(self, directory: str) -> None:
        self._tasks: Final = Column(directory)
        self._positions: Final = Column(directory)

    def expect(self, rows: int) -> None:
        """So many records are there; none is matched yet."""
        for start in range(0, rows, _STEP):
            blank = [UNMATCHED] * min(_STEP, rows - start)
            self._tasks.extend(blank)
            self._positions.extend(blank)

    def match(self, found: list[tuple[int, int, int]]) -> None:
        """Note (row, task, position) of records that were expected."""
        if not found:
            return
        matched = np.array(sorted(found), dtype=np.int64)
        self._tasks.put(matched[:, 0], matched[:, 1])
        self._positions.put(matched[:, 0], matched[:, 2])

    def first_matched(self) -> int:
        """Return the first row that was expected; the number of rows where none was."""
        for start in range(0, len(self._positions), _STEP):
            there = np.flatnonzero(self._read(self._positions, start) != UNMATCHED)
            if len(there):
                return start + int(there[0])
        return len(self._positions)

    def first_position(self, task: int) -> int | None:
        """Return the position of the first record that was expected of a task; None where none was."""
        for start in range(0, len(self._positions), _STEP):
            own = self._read(self._tasks, start) == task
            if own.any():
                return int(self._read(self._positions, start)[own][0])
        return None

    def displaced(self) -> list[int]:
        """Return the fewest rows whose removal leaves each task's records in order."""
        last: dict[int, int] = {}
        unsorted: set[int] = set()
        for start in range(0, len(self._positions), _STEP):
            tasks, positions = self._read(self._tasks, start), self._read(self._positions, start)
            for task in np.unique(tasks[positions != UNMATCHED]).tolist():
                own = positions[tasks == task]
                if last.get(task, UNMATCHED) > own[0] or bool(np.any(np.diff(own) < 0)):
                    unsorted.add(task)
                last[task] = max(last.get(task, UNMATCHED), int(own.max()))
        return sorted(row for task in unsorted for row in self._displaced_of(task))

    def _displaced_of(self, task: int) -> list[int]:
        rows, positions = [], []
        for start in range(0, len(self._positions), _STEP):
            tasks, found = self._read(self._tasks, start), self._read(self._positions, start)
            own = np.flatnonzero((tasks == task) & (found != UNMATCHED))
            rows.append(own + start)
            positions.append(found[own])
        return disorder(np.concatenate(rows), np.concatenate(positions))

    @staticmethod
    def _read(column: Column, start: int) -> Positions:
        return column.read(start, min(start + _STEP, len(column)))

    def close(self) -> None:
        """Give the disk space back."""
        self._tasks.close()
        self._positions.close()


def disorder(rows: Positions, positions: Positions) -> list[int]:
    """Return the fewest rows out of order: only stretches that something passed are sorted out one by one."""
    greatest = np.maximum.accumulate(positions)
    least = np.minimum.accumulate(positions[::-1])[::-1]
    # Everything before a border is less than everything after it.
    borders = np.flatnonzero(greatest[:-1] < least[1:]) + 1
    starts, ends = np.append([0], borders), np.append(borders, len(rows))
    found: list[int] = []
    for stretch in np.flatnonzero(ends - starts > 1).tolist():
        first = int(starts[stretch])
        inside = array("q", positions[first : int(ends[stretch])].tobytes())
        found += (int(rows[first + at]) for at in astray(inside))
    return found
