"""What a source found as records of Kafka: keys, partitions, timestamps, and dead letters."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

import orjson

from dedup.core.extract import Fault, compile_extractor
from dedup.core.murmur2 import partitions
from dedup.core.paths import Path
from dedup.core.tracking_id import FieldRule, FieldsRule, RawContentRule, TrackingId
from dedup.edges.source import Dead, Found
from dedup.session.record_batch import Header, Line
from dedup.session.wire import TopicPartition
from dedup.topology.ingest import Ingest
from dedup.worker.publish import DETAIL, ID, REASON, SOURCE

Lines = dict[TopicPartition, list[Line]]
HEADERS_BYTES: Final = 512
"""Room for key, header and the record's own fields, beside its value."""


class Recorder:
    """Turns what a source found into lines per partition."""

    def __init__(self, ingest: Ingest, partitions_out: int, partitions_dead: int, most_bytes: int) -> None:
        self.topic: Final = ingest.topic
        self._ingest: Final = ingest
        self._count: Final = partitions_out
        self._dead_count: Final = partitions_dead
        self._most_bytes: Final = most_bytes
        rule = ingest.tracking_id or RawContentRule()
        self._extract: Final = compile_extractor(TrackingId(rule), ingest.event_time, fmt="json", fingerprint=False)
        self.refused: Final[dict[str, str]] = {}
        """Places of records that the broker refused, and what it said."""

    def lines(self, found: Found) -> Lines:
        """Return the records and dead letters of one piece of a source, in its order."""
        count = len(found.values)
        now_ms = time.time_ns() // 1_000_000
        nothing: list[Any] = [None] * count
        extracted = self._extract(nothing, found.values, [[]] * count, [now_ms] * count)
        bad = {row: _dead(found, row, fault) for row, fault in extracted.faults.items()}
        if self.refused:
            bad |= {
                row: Dead(place, "refused", self.refused[place], None)
                for row, place in enumerate(found.places)
                if place in self.refused
            }
        keys = self._keys(found.values, bad)
        for row, value in enumerate(found.values):
            size = len(value) + len(keys[row] or b"") + HEADERS_BYTES
            if size > self._most_bytes and row not in bad:
                detail = f"{len(value)} bytes are more than a record of topic {self._ingest.topic} holds"
                bad[row] = Dead(found.places[row], "too_large", detail, None)
        lines: defaultdict[TopicPartition, list[Line]] = defaultdict(list)
        topic = self._ingest.topic
        targets = [TopicPartition(topic, number) for number in range(self._count)]
        chosen = self._chosen(keys, found)
        headers = self._headers(found)
        rows = zip(chosen, extracted.times_ms, keys, found.values, headers, strict=True)
        for row, (partition, time_ms, key, value, own) in enumerate(rows):
            if row not in bad:
                lines[targets[partition]].append((row, time_ms, key, value, own))
        dead = [*found.dead, *(bad[row] for row in sorted(bad))]
        if dead:
            lines[self._dead_target(found)] += [self._letter(each, now_ms) for each in dead]
        return lines

    def _keys(self, values: Sequence[bytes], bad: dict[int, Dead]) -> Sequence[bytes | None]:
        match self._ingest.tracking_id:
            case None:
                return [None] * len(values)
            case FieldRule(path):
                return [b"" if row in bad else _text(_member(value, path)) for row, value in enumerate(values)]
            case FieldsRule(paths):
                return [b"" if row in bad else _composite(value, paths) for row, value in enumerate(values)]

    def _chosen(self, keys: Sequence[bytes | None], found: Found) -> list[int]:
        if self._ingest.tracking_id is None:
            # One part, one partition: so the order of a file or table is kept.
            return partitions([found.part.encode()], self._count) * len(found.values)
        return partitions([key or b"" for key in keys], self._count) if keys else []

    def _headers(self, found: Found) -> Sequence[list[Header]]:
        if not self._ingest.has_header:
            return [[]] * len(found.values)
        return [[(ID, place.encode())] for place in found.places]

    def _dead_target(self, found: Found) -> TopicPartition:
        return TopicPartition(self._ingest.dead_letter, partitions([found.part.encode()], self._dead_count)[0])

    def _letter(self, dead: Dead, now_ms: int) -> Line:
        headers: list[Header] = [
            (REASON, dead.code.encode()),
            (DETAIL, dead.detail.encode()),
            (SOURCE, dead.place.encode()),
        ]
        return -1, now_ms, None, dead.value, headers


def _dead(found: Found, row: int, fault: Fault) -> Dead:
    return Dead(found.places[row], fault.code, fault.detail, found.values[row])


def _member(value: bytes, path: Path) -> Any:  # noqa: ANN401 - any JSON value
    return _at(orjson.loads(value), path)


def _at(found: Any, path: Path) -> Any:  # noqa: ANN401 - any JSON value
    for step in path:
        found = found[step]
    return found


def _text(found: Any) -> bytes:  # noqa: ANN401 - any JSON value
    return found.encode() if isinstance(found, str) else orjson.dumps(found)


def _composite(value: bytes, paths: Sequence[Path]) -> bytes:
    record = orjson.loads(value)
    return orjson.dumps([_at(record, path) for path in paths])
