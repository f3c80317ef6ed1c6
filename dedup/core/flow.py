"""Defines `Flow` and `FlowRecord`, which let user code process records after their verdict."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from types import EllipsisType
from typing import Any, Final, NamedTuple, Self

from dedup.core.extract_one import Fault, FaultKind, described
from dedup.core.framing import PREFIX_BYTES
from dedup.errors import Terminated

FLOW_FAILED: Final = "flow_failed"
"""The dead-letter reason of a record for which the flow failed."""
MOST_YIELDED: Final = 1000
"""The maximum number of records that a flow may yield for one record."""
_MOST_DETAIL_CHARS: Final = 500

FlowValue = bytes | str | Mapping[str, Any] | list[Any] | None


class FlowRecord(NamedTuple):
    """A record that a topology forwards, in the form that a flow receives and yields."""

    topic: str
    """The topic to which the record is sent, which is the output unless `to` names another topic."""
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    timestamp_ms: int
    """The timestamp in milliseconds. Every record that the flow yields must have the timestamp of its input record."""
    verdict: str = "unique"
    """The verdict unique, or the reason why the record is forwarded without the uniqueness guarantee: missing_id,
    tombstone, conflict, or late. Unless the record is unique, the header dedup-verdict contains the same word.
    """

    @property
    def json(self) -> Any:  # noqa: ANN401  # any JSON value
        """The record's value, decoded as JSON, without the framing of `source.format: json_schema`."""
        return decoded(self.value)

    def header(self, name: str) -> bytes | None:
        """Return the value of the last header with this name, or None if the record has no such header."""
        return next((value for own, value in reversed(self.headers) if own == name), None)

    def to(
        self,
        topic: str | None = None,
        *,
        key: bytes | str | EllipsisType | None = ...,
        value: FlowValue | EllipsisType = ...,
        headers: Mapping[str, bytes | str | None] | None = None,
    ) -> Self:
        """Return a copy of the record with another topic, key, or value, and with ``headers`` appended.

        A string is encoded as UTF-8, and an object or array as JSON.
        """
        added = [(name, _bytes(content)) for name, content in (headers or {}).items()]
        return self._replace(
            topic=self.topic if topic is None else topic,
            key=self.key if isinstance(key, EllipsisType) else _bytes(key),
            value=self.value if isinstance(value, EllipsisType) else encoded(value),
            headers=(*self.headers, *added),
        )


FlowFunction = Callable[[FlowRecord], Iterable[FlowRecord]]


def decoded(value: bytes | None) -> Any:  # noqa: ANN401  # any JSON value
    """Return a value, decoded as JSON, or None for a null value. No JSON text begins with the framing's first byte."""
    text = value or b"null"
    return json.loads(text[PREFIX_BYTES:] if text.startswith(b"\0") else text)


class Flow:
    """Holds a user's function, which runs in the task's transaction for each record that a topology forwards.

    The key `then` in the topology file names the `Flow`. The records that the function yields must depend only on the
    input record, not on a clock, randomness, or other records.
    """

    def __init__(self) -> None:
        self.function: FlowFunction | None = None

    def on_unique(self, function: FlowFunction) -> FlowFunction:
        """Register the decorated function, which yields the records to send for each forwarded record.

        The function is usually a generator. Raises TypeError for an async function, and ValueError if the flow already
        has a function.
        """
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError("a flow's function cannot be async: nothing may wait between a verdict and its records")
        if self.function is not None:
            raise ValueError("this flow has a function already; a topology has one flow with one function")
        self.function = function
        return function


def yielded(flow: Flow, record: FlowRecord, topics: Collection[str]) -> list[FlowRecord] | Fault:
    """Return the records that a flow yields, or a fault if the flow fails or yields a record that cannot be sent.

    ``topics`` contains the topics to which the flow may send records.
    """
    found: list[FlowRecord] = []
    wrong: str | None = None
    try:
        for each in flow.function(record) if flow.function is not None else ():
            checked = record if each is record else _checked(each, record, topics)
            if isinstance(checked, FlowRecord):
                found.append(checked)
            else:
                wrong = wrong or checked
                found.append(record)
            if len(found) > MOST_YIELDED:
                return _fault(f"the flow yields more than {MOST_YIELDED} records")
    except (KeyboardInterrupt, Terminated):
        raise
    except BaseException as error:  # noqa: BLE001  # any exception in user code, even SystemExit, makes a dead letter
        return _fault(described(error))
    return found if wrong is None else _fault(wrong)


def differ(made: object, again: object) -> bool:
    """Return whether two flow results differ.

    Two faults count as equal, because their texts may contain memory addresses.
    """
    return made != again and not (isinstance(made, Fault) and isinstance(again, Fault))


def encoded(value: FlowValue) -> bytes | None:
    """Encode a value as bytes, using JSON for an object or array. Raises TypeError or ValueError if encoding fails."""
    if isinstance(value, Mapping | list):
        return json.dumps(value, allow_nan=False, default=_as_dict).encode()
    return _bytes(value)


def _as_dict(value: object) -> dict[object, object]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _bytes(content: bytes | str | None) -> bytes | None:
    if isinstance(content, str):
        return content.encode()
    if content is None or type(content) is bytes:
        return content
    raise TypeError(f"{type(content).__name__} is neither bytes, str, nor None")


def _checked(each: object, record: FlowRecord, topics: Collection[str]) -> FlowRecord | str:
    """Return a copy of a yielded record, so that later mutations have no effect, or why the record is invalid."""
    if not isinstance(each, FlowRecord):
        return f"the flow yields a {type(each).__name__}; yield the record, or record.to(...)"
    if type(each.topic) is not str or each.topic not in topics:
        return f"the flow sends to {each.topic!r}, which is neither the output nor in `routes`"
    if (each.timestamp_ms, each.verdict) != (record.timestamp_ms, record.verdict):
        return "the flow changes timestamp_ms or verdict, which stay those of the record"
    try:
        headers = tuple((name, content) for name, content in each.headers)
        for name, _ in headers:
            if type(name) is not str:
                return f"the flow yields a header that cannot be sent: its name is {type(name).__name__}, not str"
            name.encode()
    except (TypeError, ValueError) as error:
        return f"the flow yields headers that cannot be sent: {error}"
    contents = (each.key, each.value, *(content for _, content in headers))
    if not all(type(one) in {bytes, type(None)} for one in contents):
        return "the flow yields a key, a value, or a header that cannot be sent, because it is neither bytes nor None"
    return FlowRecord(each.topic, each.key, each.value, headers, record.timestamp_ms, record.verdict)


def _fault(text: str) -> Fault:
    printable = text.encode("utf-8", "backslashreplace").decode()
    return Fault(FaultKind.UNREADABLE, FLOW_FAILED, printable[:_MOST_DETAIL_CHARS])
