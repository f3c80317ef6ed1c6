"""Rows of a CSV file as JSON objects: a row is a line, below a line of names."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Sequence
from typing import Any, Final, assert_never

import orjson

from dedup.edges.source import Dead
from dedup.errors import AuthorMistake, Problem
from dedup.topology.edge_file import CsvType

_INTEGER_DIGITS: Final = 400


class CsvRows:
    """The rows of one file."""

    def __init__(self, path: str, descriptor: int, columns: Sequence[tuple[str, CsvType]], most_bytes: int) -> None:
        self._path: Final = path
        self._descriptor: Final = descriptor
        self._columns: Final = dict(columns)
        self._most_bytes: Final = most_bytes
        self._names: list[str] | None = None
        self._first = 0

    def ready(self) -> bool:
        """Tell whether the line of names is there. Raises AuthorMistake where it names other columns."""
        if self._names is not None:
            return True
        head = os.pread(self._descriptor, self._most_bytes, 0)
        end = head.find(b"\n")
        if end < 0:
            return False
        try:
            cells = _cells(head[:end].removeprefix(b"\xef\xbb\xbf"))
        except (UnicodeDecodeError, csv.Error):
            cells = None
        if cells is None or sorted(cells) != sorted(self._columns):
            shown = "no CSV" if cells is None else ", ".join(cells)
            text = (
                f"its line of names is {shown[:500]}, but `columns` has {', '.join(self._columns)}. Nothing of this "
                f"file was sent; correct `columns`, or move the file away"
            )
            raise AuthorMistake([Problem(f"{self._path}:1", text)])
        self._names, self._first = cells, end + 1
        return True

    def read(
        self, lines: Sequence[bytes], offsets: Sequence[int], prefix: str
    ) -> tuple[list[bytes], list[int], list[Dead]]:
        """Return rows as JSON, their offsets, and the lines that are no rows, whose places begin with ``prefix``."""
        names = self._names or []
        converters = [_converter(self._columns[name]) for name in names]
        values: list[bytes] = []
        kept: list[int] = []
        dead: list[Dead] = []
        for line, offset in zip(lines, offsets, strict=True):
            if offset < self._first or not line.strip():
                continue
            found = _row(line, names, converters)
            if isinstance(found, bytes):
                values.append(found)
                kept.append(offset)
            else:
                dead.append(Dead(f"{prefix}{offset}", *found, line))
        return values, kept, dead


def _row(line: bytes, names: Sequence[str], converters: Sequence[Callable[[str], Any]]) -> bytes | tuple[str, str]:
    """Return the row as JSON, or code and sentence of why it is none."""
    try:
        cells = _cells(line)
    except UnicodeDecodeError as error:
        return "not_utf8", f"byte {error.start} of the line is not UTF-8"
    except csv.Error as error:
        return "not_csv", f"it is no CSV row: {error}; a row is one line, so a cell can hold no line feed"
    if len(cells) != len(names):
        return "wrong_columns", f"it has {len(cells)} cells, and the file has {len(names)} columns"
    row: dict[str, Any] = {}
    for name, cell, convert in zip(names, cells, converters, strict=True):
        try:
            row[name] = convert(cell) if cell else None
        except ValueError:
            return "wrong_type", f"the cell of column {name} is not what `columns` says"
    try:
        return orjson.dumps(row)
    except TypeError:
        return "wrong_type", "an integer has more than 64 bits; declare that column as text"


def _cells(line: bytes) -> list[str]:
    text = line.decode().removesuffix("\r")
    return next(csv.reader([text], strict=True), [])


def _converter(kind: CsvType) -> Callable[[str], Any]:
    match kind:
        case "text":
            return str
        case "integer":
            return _integer
        case "number":
            return _number
        case "boolean":
            return _boolean
        case never:
            assert_never(never)


def _integer(cell: str) -> int:
    if len(cell) > _INTEGER_DIGITS or not cell.removeprefix("-").isascii() or not cell.removeprefix("-").isdigit():
        raise ValueError(cell)
    return int(cell)


def _number(cell: str) -> float | int:
    found = float(cell)
    if found - found != 0 or "_" in cell:
        raise ValueError(cell)  # infinite or not a number: JSON has neither
    try:
        return _integer(cell)
    except ValueError:
        return found


def _boolean(cell: str) -> bool:
    match cell.lower():
        case "true" | "1":
            return True
        case "false" | "0":
            return False
        case _:
            raise ValueError(cell)
