"""What a source found as records of Kafka: keys, partitions, timestamps, and dead letters."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final, assert_never

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
        bad |= {
            row: Dead(found.place(row), "refused", self.refused[found.place(row)], None)
            for row in (range(count) if self.refused else ())
            if found.place(row) in self.refused
        }
        keys = self._keys(found.values, bad)
        bad |= self._too_large(found, keys, bad)
        lines: defaultdict[TopicPartition, list[Line]] = defaultdict(list)
        rows = zip(range(count), extracted.times_ms, keys, found.values, self._headers(found), strict=True)
        if keys and self._ingest.tracking_id is not None:
            parts: list[list[Line]] = [[] for _ in range(self._count)]
            for partition, line in zip(partitions([key or b"" for key in keys], self._count), rows, strict=True):
                parts[partition].append(line)
        else:
            # One part of the source, one partition: so the order of a file or table is kept.
            parts = [[] for _ in range(self._count)]
            parts[partitions([found.part.encode()], self._count)[0]] = list(rows)
        for partition, part in enumerate(parts):
            kept = [line for line in part if line[0] not in bad] if bad else part
            if kept:
                lines[TopicPartition(self.topic, partition)] = kept
        dead = [*found.dead, *(bad[row] for row in sorted(bad))]
        if dead:
            lines[self._dead_target(found)] += [self._letter(each, now_ms) for each in dead]
        return lines

    def _too_large(self, found: Found, keys: Sequence[bytes | None], bad: dict[int, Dead]) -> dict[int, Dead]:
        longest = max(map(len, found.values), default=0) + max((len(key or b"") for key in keys), default=0)
        if longest + HEADERS_BYTES <= self._most_bytes:
            return {}
        text = f"bytes are more than a record of topic {self.topic} holds"
        return {
            row: Dead(found.place(row), "too_large", f"{len(value)} {text}", None)
            for row, value in enumerate(found.values)
            if row not in bad and len(value) + len(keys[row] or b"") + HEADERS_BYTES > self._most_bytes
        }

    def _keys(self, values: Sequence[bytes], bad: dict[int, Dead]) -> Sequence[bytes | None]:
        rule = self._ingest.tracking_id
        if rule is None:
            return [None] * len(values)
        if bad:
            values = [b"null" if row in bad else value for row, value in enumerate(values)]
        records = map(orjson.loads, values)
        match rule:
            case FieldRule((str() as name,)) if not bad:
                return [_text(record[name]) for record in records]
            case FieldRule(path):
                return [b"" if record is None else _text(_at(record, path)) for record in records]
            case FieldsRule(paths):
                return [
                    b"" if record is None else orjson.dumps([_at(record, path) for path in paths]) for record in records
                ]
            case never:
                assert_never(never)

    def _headers(self, found: Found) -> Sequence[list[Header]]:
        if not self._ingest.has_header:
            return [[]] * len(found.values)
        return [[(ID, f"{found.prefix}{place}".encode())] for place in found.places]

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
    return Dead(found.place(row), fault.code, fault.detail, found.values[row])


def _at(found: Any, path: Path) -> Any:  # noqa: ANN401 - any JSON value
    for step in path:
        found = found[step]
    return found


def _text(found: Any) -> bytes:  # noqa: ANN401 - any JSON value
    return found.encode() if isinstance(found, str) else orjson.dumps(found)
