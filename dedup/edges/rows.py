"""Records as rows of a sink's table, and those that can be none."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, assert_never

import orjson

from dedup.core.event_time import rfc3339_ms
from dedup.core.exact_json import Number, Unreadable, canonical_json, decode
from dedup.core.paths import Path
from dedup.edges.database import Row
from dedup.session.fetch import Columns
from dedup.topology.extractor import extractor_of
from dedup.topology.model import SinkColumn, Topology

_INT64: Final = 1 << 63
_MOST_DIGITS: Final = 20


@dataclass(frozen=True, slots=True)
class BadRow:
    """A record that can be no row."""

    number: int
    """Of the record in its batch."""
    code: str
    detail: str


@dataclass(frozen=True, slots=True)
class Rows:
    """A batch of records as rows."""

    rows: list[Row]
    numbers: list[int]
    """Of the record each row was made from."""
    bad: list[BadRow] = field(default_factory=list)


class RowMaker:
    """Makes rows of one topology's records: tracking ID, event time, columns."""

    def __init__(self, topology: Topology, columns: Sequence[SinkColumn]) -> None:
        self._extract: Final = extractor_of(topology)
        self._columns: Final = [(column.name, _taker(column), column.path) for column in columns]
        self._exact: Final = any(column.type == "json" for column in columns)

    def rows(self, columns: Columns) -> Rows:
        """Return the rows of a batch, in its order."""
        found = self._extract(columns.keys, columns.values, columns.headers, columns.timestamps_ms)
        made = Rows([], [])
        faults = found.faults
        records = zip(found.ids, found.times_ms, columns.keys, columns.values, strict=True)
        for number, (tracking_id, time_ms, key, value) in enumerate(records):
            if number in faults:
                fault = faults[number]
                made.bad.append(BadRow(number, fault.code, fault.detail))
                continue
            payload = self._payload(value) if self._columns else (key, value)
            if isinstance(payload, tuple):
                made.rows.append((tracking_id, time_ms, *payload))
                made.numbers.append(number)
            else:
                made.bad.append(BadRow(number, "wrong_type", payload))
        return made

    def _payload(self, value: bytes | None) -> Row | str:
        """Return the columns' values, or a sentence about the one that is of another kind."""
        if value is None:
            return (None,) * len(self._columns)
        try:
            # Exact numbers cost time, and only a column of type json keeps them.
            record = decode(value) if self._exact else orjson.loads(value)
        except (ValueError, Unreadable) as error:
            return f"its value can not be read: {error}"
        taken: list[Any] = []
        for name, take, path in self._columns:
            found = look_up(record, path)
            if found is None:
                taken.append(None)
                continue
            try:
                taken.append(take(found))
            except (TypeError, ValueError, Unreadable) as error:
                return f"column {name}: {error}"
        return tuple(taken)


def look_up(record: Any, path: Path) -> Any:  # noqa: ANN401 - any JSON value
    """Return what stands at a path; None where nothing does."""
    for step in path:
        match record, step:
            case dict(), str():
                record = record.get(step)
            case list(), int() if step < len(record):
                record = record[step]
            case _:
                return None
    return record


def _taker(column: SinkColumn) -> Callable[[Any], Any]:
    match column.type:
        case "text":
            return _text
        case "integer":
            return _integer
        case "number":
            return _number
        case "boolean":
            return _boolean
        case "time":
            return _time
        case "json":
            return _json
        case never:
            assert_never(never)


def _text(found: Any) -> str:  # noqa: ANN401 - any JSON value
    if type(found) is not str:
        raise TypeError(f"it is {_kind(found)}, not text")
    return found


def _integer(found: Any) -> int:  # noqa: ANN401 - any JSON value
    number = _plain(found)
    if type(number) is not int:
        raise TypeError(f"it is {_kind(found)}, not a whole number of at most 64 bits")
    if not -_INT64 <= number < _INT64:
        raise ValueError("it is a whole number of more than 64 bits")
    return number


def _number(found: Any) -> float:  # noqa: ANN401 - any JSON value
    number = _plain(found)
    if type(number) not in {int, float} or not math.isfinite(number):
        raise TypeError(f"it is {_kind(found)}, not a number")
    return float(number)


def _boolean(found: Any) -> bool:  # noqa: ANN401 - any JSON value
    if type(found) is not bool:
        raise TypeError(f"it is {_kind(found)}, not true or false")
    return found


def _time(found: Any) -> str:  # noqa: ANN401 - any JSON value
    if type(found) is not str or rfc3339_ms(found) is None:
        raise TypeError(f"it is {_kind(found)}, not a time such as 2024-01-31T00:00:00Z")
    return found


def _json(found: Any) -> str:  # noqa: ANN401 - any JSON value
    return canonical_json(found, {}).decode()


def _kind(found: Any) -> str:  # noqa: ANN401 - any JSON value
    match found:
        case bool():
            return "true or false"
        case str():
            return "text"
        case list():
            return "a list"
        case dict():
            return "an object"
        case _:
            return "a number"


def _plain(found: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Return a number that was read exactly as Python's; one of very many digits as infinity."""
    if not isinstance(found, Number):
        return found
    return int(found.text) if found.is_integer and len(found.text) <= _MOST_DIGITS else float(found.text)
