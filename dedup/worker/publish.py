"""Outcome to record batches: which record goes where, with which headers, in the broker's own format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import repeat
from operator import itemgetter
from typing import Final

from dedup.core.fold import DeadLetter, Outcome, Rows
from dedup.core.murmur2 import partitions
from dedup.core.window import Sighting
from dedup.session.record_batch import Header, Line, RecordBatch, TopicPartition, fill
from dedup.worker.batch import FeedBatch, gather

SOURCE: Final = "dedup-source"
TIMESTAMP: Final = "dedup-timestamp"
REASON: Final = "dedup-reason"
DETAIL: Final = "dedup-detail"
VERDICT: Final = "dedup-verdict"
FIRST_TIME: Final = "dedup-first-time"
FIRST_SOURCE: Final = "dedup-first-source"
IDLE: Final = "dedup-idle"
DIGEST: Final = "dedup-digest"
ID: Final = "dedup-id"
"""On what `dedup ingest` and `IdempotentWriter` send: the tracking ID of a record that holds none."""
REPLAYED: Final = "dedup-replayed"
"""On what `dedup replay` sent: where the record stood in the source when it was first judged."""
EVENT_TIME: Final = "dedup-event-time"
"""On what `dedup spark run --semantics watermark` forwards: event time in ms."""
SLACK_BYTES: Final = 65_536
"""A late or dead-letter topic takes records this much larger than the source's: room for our headers."""


@dataclass(frozen=True, slots=True)
class Route:
    """A topic to write to, its partition count and what it takes."""

    topic: str
    partitions: int
    max_record_bytes: int = 1_000_000


@dataclass(frozen=True, slots=True)
class Routes:
    """Where each verdict goes; None: nowhere."""

    source_topics: tuple[str, ...]
    output: Route | None
    dead_letter: Route
    late: Route | None
    late_forward: bool = False
    duplicates: Route | None = None
    conflicts: Route | None = None
    output_headers: bool = False
    keep_partition: bool = True
    """Output keeps the source's partition number; else it is chosen by the record's key, or its ID."""
    time_is_record: bool = True
    """Event time is the record's timestamp, so a clamped one is emitted as such."""
    compression: str = "snappy"


class Publisher:
    """Turns what `fold` found into record batches for one task."""

    def __init__(self, routes: Routes, partition: int) -> None:
        self._routes: Final = routes
        self._partition: Final = partition

    def publish(
        self, batch: FeedBatch, rows: Rows, outcome: Outcome, most_rows: Mapping[TopicPartition, int]
    ) -> list[RecordBatch]:
        """Return the batches for output, duplicates, conflicts, late and dead letters, each in the log's order."""
        routes = self._routes
        sheets: list[tuple[TopicPartition, Iterable[Line]]] = []
        if routes.output is not None:
            sheets += self._output(batch, rows, outcome, routes.output)
        if routes.duplicates is not None or routes.conflicts is not None:
            sheets += self._duplicates(batch, rows, outcome)
        if outcome.late and routes.late is not None:
            sheets.append((self._beside(routes.late), self._late(batch, rows, outcome, routes.late)))
        if outcome.dead:
            sheets.append((self._beside(routes.dead_letter), self._dead(batch, rows, outcome)))
        return [
            filled
            for target, lines in sheets
            for filled in fill(target, lines, compression=routes.compression, most_rows=most_rows.get(target))
        ]

    def _beside(self, route: Route) -> TopicPartition:
        return TopicPartition(route.topic, self._partition % route.partitions)

    def _output(
        self, batch: FeedBatch, rows: Rows, outcome: Outcome, route: Route
    ) -> list[tuple[TopicPartition, Iterable[Line]]]:
        forwarded = self._forwarded(outcome)
        if not forwarded:
            return []
        lines = self._lines(batch, rows, outcome, forwarded)
        if self._routes.keep_partition:
            return [(TopicPartition(route.topic, self._partition), lines)]
        taken = gather(forwarded)
        keys, ids = taken(batch.keys), taken(rows.extracted.ids)
        chosen = partitions(
            [key if key is not None else own or b"" for key, own in zip(keys, ids, strict=True)], route.partitions
        )
        by_partition: dict[int, list[Line]] = {}
        for partition, line in zip(chosen, lines, strict=True):
            by_partition.setdefault(partition, []).append(line)
        return [(TopicPartition(route.topic, partition), part) for partition, part in sorted(by_partition.items())]

    def _forwarded(self, outcome: Outcome) -> list[int]:
        extra = set(outcome.exempt)
        if self._routes.late_forward:
            extra.update(row for row, _ in outcome.late)
        return sorted(extra.union(outcome.unique)) if extra else outcome.unique

    def _lines(self, batch: FeedBatch, rows: Rows, outcome: Outcome, forwarded: list[int]) -> Iterator[Line]:
        """Key, value, headers and timestamp unchanged, but for what a policy asked to add."""
        marks: dict[int, list[Header]] = {}
        for row, exempt in outcome.exempt.items():
            marks.setdefault(row, []).append((VERDICT, exempt.why.encode()))
        if self._routes.late_forward:
            for row, _ in outcome.late:
                marks.setdefault(row, []).append((VERDICT, b"late"))
        if self._routes.output_headers:
            for row in forwarded:
                marks.setdefault(row, []).append((SOURCE, self._place(rows, row)))
        taken = gather(forwarded)
        timestamps = taken(batch.timestamps_ms)
        if outcome.clamped and self._routes.time_is_record:
            timestamps = [outcome.clamped.get(row, own) for row, own in zip(forwarded, timestamps, strict=True)]
        headers: Iterable[list[Header]] = repeat([])
        if marks or any(batch.headers):
            headers = [[*batch.headers[row], *marks.get(row, ())] for row in forwarded]
        return zip(
            taken(batch.offsets),
            timestamps,
            taken(batch.keys),
            taken(batch.values),
            headers,
            strict=False,
        )

    def _duplicates(
        self, batch: FeedBatch, rows: Rows, outcome: Outcome
    ) -> Iterator[tuple[TopicPartition, Iterable[Line]]]:
        routes = self._routes
        plain, conflicting = outcome.all_duplicates(rows), outcome.conflicts
        if routes.conflicts is None:
            plain, conflicting = sorted(plain + conflicting), []
        for route, found in ((routes.duplicates, plain), (routes.conflicts, conflicting)):
            if route is not None and found:
                yield self._beside(route), [self._line(batch, row, self._first_seen(of)) for row, of in found]

    def _first_seen(self, of: Sighting) -> list[Header]:
        topic, partition, offset = of.source
        place = f"{self._routes.source_topics[topic]}/{partition}/{offset}"
        return [(FIRST_TIME, str(of.first_ms).encode()), (FIRST_SOURCE, place.encode())]

    def _late(self, batch: FeedBatch, rows: Rows, outcome: Outcome, route: Route) -> Iterator[Line]:
        for row, _ in outcome.late:
            yield self._fitting(self._line(batch, row, self._provenance(batch, rows, row)), route)

    def _dead(self, batch: FeedBatch, rows: Rows, outcome: Outcome) -> Iterator[Line]:
        for row, dead in sorted(outcome.dead, key=itemgetter(0)):
            yield self._fitting(
                self._line(batch, row, self._reasoned(batch, rows, row, dead)), self._routes.dead_letter
            )

    def _reasoned(self, batch: FeedBatch, rows: Rows, row: int, dead: DeadLetter) -> list[Header]:
        return [(REASON, dead.code.encode()), (DETAIL, dead.detail.encode()), *self._provenance(batch, rows, row)]

    def _provenance(self, batch: FeedBatch, rows: Rows, row: int) -> list[Header]:
        return [(SOURCE, self._place(rows, row)), (TIMESTAMP, str(batch.timestamps_ms[row]).encode())]

    def _place(self, rows: Rows, row: int) -> bytes:
        source = rows.source(row)
        return f"{self._routes.source_topics[source.topic]}/{source.partition}/{source.offset}".encode()

    @staticmethod
    def _line(batch: FeedBatch, row: int, added: list[Header]) -> Line:
        # The side topics are LogAppendTime; what is sent as timestamp only has to be valid.
        headers = [*batch.headers[row], *added]
        return batch.offsets[row], max(batch.timestamps_ms[row], 0), batch.keys[row], batch.values[row], headers

    @staticmethod
    def _fitting(line: Line, route: Route) -> Line:
        """Replace a value (then key and headers) that can not fit by its digest; the source position leads to it."""
        offset, timestamp_ms, key, value, headers = line
        size = len(key or b"") + len(value or b"") + sum(len(name) + len(text or b"") + 10 for name, text in headers)
        if size + 100 <= route.max_record_bytes:
            return line
        digest = blake2b(value or b"", digest_size=32).hexdigest()
        ours = [(name, text) for name, text in headers if name.startswith("dedup-")]
        return (
            offset,
            timestamp_ms,
            None,
            None,
            [*ours, (DIGEST, f"blake2b-256:{digest} of {len(value or b'')} bytes".encode())],
        )
