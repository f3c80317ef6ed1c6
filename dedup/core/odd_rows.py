"""Reads most rows of a batch column by column, and the other rows one by one.

Reading in columns is fast, but a column reader refuses a batch if the reader might misread any row. Such rows are
called odd. If the reader can name the odd rows, only these rows are read one by one, so an odd record among thousands
adds little more than its own cost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

_ATTEMPTS: Final = 8
"""The maximum number of attempts to read columns. An attempt can reveal odd rows that the previous attempt could not.
This many attempts take about as long as reading all rows one by one."""
_FEW: Final = 16
"""If at most this many rows are left, another attempt takes longer than reading the rows one by one."""

T = TypeVar("T")
Pieces = list[tuple[Sequence[int], T]]
"""Results of parts of a batch, each with the rows of its part. If a row is in two parts, the later result counts."""


class NotInColumns(Exception):
    """Raised if a batch cannot be read in columns, because some of its rows must be read one by one."""

    def __init__(self, rows: Iterable[int] = ()) -> None:
        self.rows: Final = list(rows)
        """The batch positions of the rows that must be read one by one, or an empty list if they are unknown."""
        super().__init__(f"{len(self.rows)} rows" if self.rows else "unknown rows")


def in_pieces(
    count: int,
    named: Collection[int],
    in_columns: Callable[[Sequence[int]], T],
    one_by_one: Callable[[Sequence[int]], T],
    otherwise: Callable[[Sequence[int]], T],
) -> Pieces[T]:
    """Return the results of a batch of ``count`` rows that cannot be read in columns as a whole.

    The caller made the first attempt, and ``named`` contains the odd rows that this attempt found. The odd rows are
    read one by one. The next attempt passes the other rows to ``in_columns``, which may raise NotInColumns with
    positions within those rows. If an attempt names no rows, ``otherwise`` reads all remaining rows. After the last
    attempt, the remaining rows are read one by one.

    Call this function outside the `except` block of the first attempt, so that the exception does not keep the whole
    batch in memory.
    """
    left: Sequence[int] = range(count)
    pieces: Pieces[T] = []
    for _ in range(_ATTEMPTS - 1):
        odd = set(named)
        if not odd:
            return [*pieces, (left, otherwise(left))]
        taken = [row for at, row in enumerate(left) if at in odd]
        pieces.append((taken, one_by_one(taken)))
        left = [row for at, row in enumerate(left) if at not in odd]
        if len(left) <= _FEW:
            break
        try:
            return [*pieces, (left, in_columns(left))]
        except NotInColumns as refused:
            named = refused.rows
    if not left:
        return pieces
    return [*pieces, (left, one_by_one(left))]


def refuse(odd: npt.NDArray[np.bool_]) -> None:
    """If any rows are marked as odd, raise NotInColumns with these rows."""
    if odd.any():
        raise NotInColumns(np.flatnonzero(odd).tolist())


def among(rows: slice | npt.NDArray[np.int64]) -> AbstractContextManager[None]:
    """Convert positions in ``rows`` to batch positions if the ``with`` block raises NotInColumns. A slice means all
    rows.
    """
    return nullcontext() if isinstance(rows, slice) else _Among(rows)


class _Among:
    """The context manager that `among` returns for some of the rows.

    Since Python 3.12, a generator of `contextlib.contextmanager` that replaces an exception keeps the exception, and
    therefore the whole batch, in a reference cycle.
    """

    def __init__(self, rows: npt.NDArray[np.int64]) -> None:
        self._rows: Final = rows

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, refused: object, _traceback: object) -> None:
        if isinstance(refused, NotInColumns):
            raise NotInColumns(self._rows[refused.rows].tolist()) from None


def in_order(count: int, pieces: Pieces[Any]) -> list[int]:
    """Return each batch row's position in the concatenated pieces, or -1 if no piece contains the row."""
    order = np.full(count, -1)
    begin = 0
    for rows, _ in pieces:
        order[np.fromiter(rows, np.int64, len(rows))] = np.arange(begin, begin + len(rows))
        begin += len(rows)
    places: list[int] = order.tolist()
    return places


def ordered(places: Sequence[int], parts: Iterable[Iterable[T]], lacking: T) -> list[T]:
    """Merge the parts of a column, one per piece, with ``lacking`` for rows that are in no piece.

    ``places`` is the result of `in_order`.
    """
    column = [*chain.from_iterable(parts), lacking]
    return list(map(column.__getitem__, places))


def at_rows(rows: Sequence[int], column: Sequence[T]) -> Sequence[T]:
    """Return a column's values in the given rows, which must be in ascending order."""
    return column if len(rows) == len(column) else list(map(column.__getitem__, rows))


def of_other_types(column: Sequence[object], usual: Collection[type]) -> set[int]:
    """Return the rows whose value in a column has a type that is not in ``usual``."""
    if set(map(type, column)) <= set(usual):
        return set()
    return {row for row, value in enumerate(column) if type(value) not in usual}


def texts_of(parts: Sequence[bytes]) -> list[str]:
    """Decode a column of UTF-8 texts. Raises NotInColumns if any text is not UTF-8."""
    try:
        return list(map(bytes.decode, parts))
    except UnicodeDecodeError:
        raise NotInColumns([row for row, part in enumerate(parts) if not is_utf8(part)]) from None


def is_utf8(text: bytes) -> bool:
    """Return whether bytes are valid UTF-8."""
    if text.isascii():
        return True
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
