"""Made-up records for any topology: what `dedup chaos` sends."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, assert_never

from dedup.core.event_time import FieldTime, TimeUnit
from dedup.core.fold import OnConflict
from dedup.core.murmur2 import partitions as partitions_of
from dedup.core.tracking_id import ContentRule, FieldRule, FieldsRule, HeaderRule, KeyRule, RawContentRule

if TYPE_CHECKING:
    from dedup.core.paths import Path
    from dedup.topology.model import Topology

REPEATS: Final = 0.3
"""Share of records that are one sent before, sent again."""
BAD: Final = 0.003
"""Share of records that are no JSON."""
REMEMBERED: Final = 20_000
_PADDING: Final = "x" * 60


@dataclass(frozen=True, slots=True)
class Made:
    """One record to send."""

    topic: str
    partition: int
    key: bytes
    value: bytes
    headers: tuple[tuple[str, bytes], ...]
    time_ms: int


class MadeRecords:
    """Makes records with new IDs, and sends some again as a producer does that got no answer: unchanged, later.

    Equal IDs go to equal partitions by Kafka's default partitioner, with the ID as key.
    """

    def __init__(self, topology: Topology, partitions: Mapping[str, int], *, run: str, seed: int) -> None:
        self._topology: Final = topology
        self._partitions: Final = partitions
        self._run: Final = run
        self._dice: Final = random.Random(seed)  # noqa: S311  # no secret; a run must be repeatable
        self._count = 0
        self._sent: Final[list[Made]] = []

    def at(self, now_ms: int) -> Made:
        """Return the next record; a new one has this event time, to the unit that the topology names."""
        dice = self._dice
        if self._sent and dice.random() < REPEATS:
            made = self._sent[-1 - int(dice.random() ** 3 * len(self._sent))]
            return self._changed(made) if self._topology.fingerprints_wanted and dice.random() < REPEATS else made
        made = self._new(now_ms)
        if self._topology.source.format == "json" and dice.random() < BAD:
            return replace(made, value=b'{"broken":')
        if len(self._sent) < REMEMBERED:
            self._sent.append(made)
        else:
            self._sent[self._count % REMEMBERED] = made
        return made

    def _new(self, now_ms: int) -> Made:
        self._count += 1
        text = f"{self._run}-{self._count}"
        document: dict[str, Any] = {"number": self._count, "padding": _PADDING}
        headers: tuple[tuple[str, bytes], ...] = ()
        match self._topology.tracking_id.rule:
            case KeyRule() | ContentRule() | RawContentRule():
                document["made"] = text
            case HeaderRule(name):
                headers = ((name, text.encode()),)
            case FieldRule(path):
                _put(document, path, text)
            case FieldsRule(paths):
                for at, path in enumerate(paths):
                    _put(document, path, text if at == 0 else f"part-{at}")
            case never:
                assert_never(never)
        event_time = self._topology.event_time
        if isinstance(event_time, FieldTime):
            _put(document, event_time.path, _time_text(now_ms, event_time.unit))
        topic = self._dice.choice(self._topology.source.topics)
        (partition,) = partitions_of([text.encode()], self._partitions[topic])
        return Made(topic, partition, text.encode(), json.dumps(document).encode(), headers, now_ms)

    def _changed(self, made: Made) -> Made:
        """The same event with another payload; unchanged where the topology would stop at it."""
        if self._topology.on_conflict is OnConflict.FAIL or self._topology.source.format != "json":
            return made
        return replace(made, value=made.value.replace(_PADDING.encode(), b"y" * len(_PADDING)))


def _put(document: dict[str, Any], path: Path, value: object) -> None:
    """Set a member of a JSON value, with all that stands around it."""
    here: Any = document
    for step, following in pairwise(path):
        here = _child(here, step, [] if isinstance(following, int) else {})
    _set(here, path[-1], value)


def _child(here: Any, step: str | int, empty: object) -> Any:  # noqa: ANN401  # a JSON value
    held = here[step] if isinstance(here, list) and isinstance(step, int) and step < len(here) else None
    if isinstance(here, dict):
        held = here.get(step)
    if held is None:
        _set(here, step, empty)
        return empty
    return held


def _set(here: Any, step: str | int, value: object) -> None:  # noqa: ANN401  # a JSON value
    if isinstance(here, list) and isinstance(step, int):
        here.extend([None] * (step + 1 - len(here)))
    here[step] = value


def _time_text(time_ms: int, unit: TimeUnit) -> int | str:
    match unit:
        case "ms":
            return time_ms
        case "us":
            return time_ms * 1000
        case "s":
            return time_ms // 1000
        case "rfc3339":
            return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds")
        case never:
            assert_never(never)
