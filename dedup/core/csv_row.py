"""Reads columns of CSV values. A value is one RFC 4180 row, and the topology names its columns.

All cells are text, and an empty cell counts as absent. A line break may follow the row. This module does not use the
standard library's csv module, which accepts quotes inside unquoted cells, and whose limit on cell length is
process-wide.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import itemgetter
from typing import Final, Literal

from dedup.core.avro import Leaf
from dedup.core.content_tree import Without, encode_content, text_key
from dedup.core.event_time import FieldTime
from dedup.core.exact_json import ABSENT, Number, with_foreign_format
from dedup.core.member_reader import MemberReader, not_of_format, time_leaf
from dedup.core.odd_rows import NotInColumns, is_utf8
from dedup.core.tracking_id import Path
from dedup.core.varint import Damaged

Delimiter = Literal["comma", "semicolon", "tab", "pipe"]
_CHARACTERS: Final[dict[Delimiter, str]] = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|"}
_BYTE_ORDER_MARK: Final = "\ufeff"
_ODD_MARKS: Final = (b'"', b"\r", _BYTE_ORDER_MARK.encode())
"""A row that contains one of these bytes cannot simply be split at each delimiter."""
_LINE_ENDS: Final = (b"\r\n", b"\n")
_NUMBER: Final = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_SHORT_DIGITS: Final = 18
"""An integer of at most this many characters fits into 64 bits."""


@dataclass(frozen=True)
class CsvLayout:
    """The column names, in the order of a row's cells, and the delimiter."""

    columns: tuple[str, ...]
    delimiter: Delimiter = "comma"

    @cached_property
    def between(self) -> str:
        """The delimiter character between cells."""
        return _CHARACTERS[self.delimiter]

    @cached_property
    def _cell(self) -> re.Pattern[str]:
        return re.compile(rf'"([^"]*(?:""[^"]*)*)"|([^"{re.escape(self.between)}\r\n]*)')

    def cells(self, text: str) -> list[str]:
        """Return the cells of a row. Raises Damaged if the text is not one row with as many cells as columns."""
        row = text[:-2] if text.endswith("\r\n") else text.removesuffix("\n")
        if '"' in row:
            cells = self._quoted(row)
        elif "\n" in row or "\r" in row:
            raise Damaged("a line break that is not in quotes is inside of it")
        else:
            self._check(row.count(self.between) + 1)  # first, because splitting takes many times the row's memory
            return row.split(self.between)
        self._check(len(cells))
        return cells

    def _check(self, count: int) -> None:
        if count != len(self.columns):
            cells = "1 cell" if count == 1 else f"{count} cells"
            raise Damaged(f"it has {cells}, and `source.columns` has {len(self.columns)}")

    def _quoted(self, row: str) -> list[str]:
        cells: list[str] = []
        at = 0
        while (found := self._cell.match(row, at)) is not None:
            cells.append(found[2] if found[1] is None else found[1].replace('""', '"'))
            at = found.end()
            if at == len(row):
                return cells
            if row[at] != self.between:
                break
            if len(cells) == len(self.columns):
                raise Damaged(f"it has more than {len(cells)} cells, and `source.columns` has {len(cells)}")
            at += 1
        raise Damaged(f"a quote or a line break is in the wrong place (character {at} of {len(row)})")


class CsvReader(MemberReader):
    """Reads the requested columns, and the event time, from CSV values."""

    def __init__(self, layout: CsvLayout, ids: Sequence[Path], time: FieldTime | None) -> None:
        super().__init__(ids, time)
        self._layout: Final = layout
        columns: dict[Path, int] = {(name,): place for place, name in enumerate(layout.columns)}
        self._places: Final = [columns[path] for path in [*ids, *([] if time is None else [time.path])]]
        self._is_numeric: Final = time is not None and time.unit != "rfc3339"

    def read(self, value: bytes) -> list[Leaf]:
        """Return the requested cells, followed by the event time. Raises Unreadable if the value is not one row."""
        cells = cells_of(self._layout, value)
        found: list[Leaf] = [cells[place] or ABSENT for place in self._places]
        if self._is_numeric:
            found[-1] = number_of(found[-1])
        return self.leaves(found)

    def at_once(self, values: Sequence[bytes]) -> list[list[Leaf]]:
        """Return the columns of a batch. Raises NotInColumns if any row cannot simply be split at each delimiter."""
        end = next((end for end in _LINE_ENDS if values[0].endswith(end)), b"")
        bare = [value.removesuffix(end) for value in values] if end else values
        rows = self._split(b"\n".join(bare))
        if len(rows) != len(bare) or {*map(len, rows)} != {len(self._layout.columns)}:
            raise NotInColumns([row for row, value in enumerate(bare) if not self._is_plain(value)])
        columns: list[list[Leaf]] = [list(map(itemgetter(place), rows)) for place in self._places]
        columns = [[cell or ABSENT for cell in column] if "" in column else column for column in columns]
        if self._time is not None and self._is_numeric:
            columns[-1] = list(map(number_of, columns[-1]))
            if not {*map(type, columns[-1])} <= {int, Number}:
                columns[-1] = [time_leaf(found, self._time.unit) for found in columns[-1]]
        return columns

    def _split(self, joined: bytes) -> list[list[str]]:
        """Split rows joined by line feeds into cells. Return an empty list if the rows must be read one by one."""
        if _is_odd(joined):
            return []
        # A row with too many cells is not split further, because its cells would take many times its memory.
        return [row.split(self._layout.between, len(self._layout.columns)) for row in joined.decode().split("\n")]

    def _is_plain(self, row: bytes) -> bool:
        """Return whether a row can simply be split at each delimiter. The row must not include its line break."""
        delimiters = row.count(self._layout.between.encode())
        return not _is_odd(row) and b"\n" not in row and delimiters + 1 == len(self._layout.columns)


def cells_of(layout: CsvLayout, value: bytes) -> list[str]:
    """Return the cells of a value. Raises Unreadable if the value is not one row."""
    try:
        text = value.decode()
    except UnicodeDecodeError as error:
        raise with_foreign_format(value, "not_utf8", f"the value is not UTF-8 (byte {error.start})") from None
    try:
        if text.startswith(_BYTE_ORDER_MARK):
            raise Damaged("a byte order mark would be part of its first cell")
        return layout.cells(text)
    except Damaged as damage:
        raise not_of_format(value, "not_csv", "CSV", damage) from None


def csv_content(layout: CsvLayout, without: Without, value: bytes) -> bytes:
    """Return the canonical content of a row, without empty cells. Raises Unreadable if the value is not one row."""
    cells = zip(layout.columns, cells_of(layout, value), strict=True)
    return encode_content({text_key(name): cell for name, cell in cells if cell}, without)


def _is_odd(text: bytes) -> bool:
    return any(mark in text for mark in _ODD_MARKS) or not is_utf8(text)


@lru_cache(maxsize=256)
def csv_reader(layout: CsvLayout, ids: tuple[Path, ...], time: FieldTime | None) -> CsvReader:
    """Return the reader for the given columns, all of which the layout must contain."""
    return CsvReader(layout, ids, time)


def number_of(cell: Leaf) -> Leaf:
    """Return a cell as a number if it is a number in JSON notation, or unchanged otherwise."""
    if not isinstance(cell, str) or not _NUMBER.fullmatch(cell):
        return cell
    number = Number(cell)
    return int(cell) if number.is_integer and len(cell) <= _SHORT_DIGITS else number
