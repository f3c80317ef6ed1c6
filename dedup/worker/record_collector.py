"""Turns verdicts into record batches, and chooses the topic and the headers of each record that is sent."""

from __future__ import annotations

import logging
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import groupby
from operator import itemgetter
from typing import Final, NamedTuple

from dedup.core.extract import Fault, FaultKind
from dedup.core.extract_one import ODD_HEADER_NAME
from dedup.core.flow import FLOW_FAILED
from dedup.core.fold import Outcome, Rows
from dedup.core.partitioner import partitions
from dedup.core.window import Sighting
from dedup.errors import RecordRefused
from dedup.kafka.record_batch import (
    BATCH_BYTES,
    OWN_ROW,
    FeedBatch,
    Header,
    Limit,
    Line,
    LineColumns,
    RecordBatch,
    TopicPartition,
    fill,
    gather,
    oversize,
)
from dedup.kafka.wire import NoAnswer, Wire

log: Final = logging.getLogger(__name__)
_TIME_RANGE: Final = re.compile(r"timestamp should be within \[(-?\d{1,19}), (-?\d{1,19})\]")
"""Matches the error message with which brokers since Kafka 3.6 refuse a timestamp (KIP-937)."""
_LONG_MAX: Final = (1 << 63) - 1
Misfits = dict[tuple[str, int], str]
"""Maps a topic and a feeding offset to the reason why the topic does not accept the record at that offset."""
FLOW: Final = ""
"""The value that takes the place of the topic in `Misfits` if the topology's flow failed on the record."""
TRUSTED_MS: Final = 60_000
SOURCE: Final = "dedup-source"
TIMESTAMP: Final = "dedup-timestamp"
REASON: Final = "dedup-reason"
DETAIL: Final = "dedup-detail"
VERDICT: Final = "dedup-verdict"
_FIRST_TIME: Final = "dedup-first-time"
_FIRST_SOURCE: Final = "dedup-first-source"
PART: Final = "dedup-part"
"""The header with the number of a record among those that a flow yields for one record: ``1/2`` is the first of two."""
IDLE: Final = "dedup-idle"
DIGEST: Final = "dedup-digest"
ID: Final = "dedup-id"
"""The header that contains the tracking ID if the writer (`dedup ingest` or `IdempotentWriter`) stores it nowhere else.
"""
REPLAYED: Final = "dedup-replayed"
"""The header of a record that `dedup replay` has sent; it contains the position where the record was first judged."""
SLACK_BYTES: Final = 65_536
"""The number of bytes that are allowed for the headers added to a late record or dead letter."""
_NONE: Final[list[list[Header]]] = [[]]
_LATE_ADDED: Final = 2
"""The number of headers that `RecordCollector` adds to a late record (source position and timestamp)."""
_DEAD_ADDED: Final = 4
"""The number of headers that `RecordCollector` adds to a dead letter: those of a late record, a reason, and a detail.
"""


# This table shows what is sent in place of a refused record when the records of the transaction are judged again:
#
#     refused by                                    in its place
#     output, duplicates, conflicts, repartition    a dead letter, whole
#     late topic, for its size                      a digest, in the same topic; then a dead letter
#     dead-letter topic, for its size               a digest, in the same topic; then nothing: the worker stops
#
# If the broker does not say which records of a batch it refuses, the next attempt splits the batch in two. Each attempt
# covers all batches of the transaction, so the number of attempts grows only with the logarithm of a batch's size.


class SideTopics(NamedTuple):
    """The names of the topics for dead letters and for late records."""

    dead: str
    late: str | None


@dataclass(slots=True)
class Refusals:
    """The records that brokers have refused since the last commit, and their replacements."""

    rows: Misfits = field(default_factory=dict)
    """The records that a topic does not accept. With their current verdicts, they may no longer be sent to that topic.
    """
    digests: set[tuple[str, int]] = field(default_factory=set)
    """The topics and feeding offsets of the late records and dead letters that are replaced by a digest."""
    apart: set[tuple[str, int]] = field(default_factory=set)
    """The topics and feeding offsets of the records whose outputs were too large together."""
    cuts: dict[TopicPartition, set[int]] = field(default_factory=dict)
    """Maps each target partition to the feeding offsets where one record batch ends and the next one begins."""
    times_ms: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Maps each topic to the smallest and greatest timestamps that its broker accepts, as named in an error message."""

    def learn(
        self, refusal: RecordRefused, side_topics: SideTopics, before: Collection[tuple[str, int]] | None = None
    ) -> int | None:
        """Note a batch's refusal, and return the offset of a record that no topic accepts, or None.

        ``before`` contains the records that were in `rows` before this transaction's refusals; None means all records
        in `rows`. Raises ``refusal`` if the batch contains only dedup's own records, which nothing can replace.
        """
        topic = refusal.topic
        # A flow may have made several records of a batch from one record, and no cut can separate such records.
        rows = list(dict.fromkeys(row for row in refusal.rows if row != OWN_ROW))
        if not rows:
            # One more attempt is made, because the topic's limit is read again, and smaller batches may be accepted.
            if not refusal.too_large or (topic, OWN_ROW) in self.digests:
                raise refusal
            self.digests.add((topic, OWN_ROW))
            return None
        if refusal.too_large and len(refusal.rows) > len(rows) == 1 and (topic, rows[0]) not in self.apart:
            # The records that a flow made from one record may fit separately once the topic's limit is read again.
            self.apart.add((topic, rows[0]))
            return None
        if len(rows) > 1 and not refusal.reasons:
            cuts = self.cuts.setdefault(TopicPartition(topic, refusal.partition), set())
            cuts.update((rows[0], rows[len(rows) // 2], rows[-1] + 1))
            return None
        for row in rows:
            why = refusal.reasons.get(row, str(refusal))
            if refusal.too_large and topic in side_topics and (topic, row) not in self.digests:
                self.digests.add((topic, row))
            elif topic == side_topics.dead or (topic, row) in (self.rows if before is None else before):
                return row
            else:
                self.rows[topic, row] = why
            stated = _TIME_RANGE.search(why)
            if stated is not None:
                least, greatest = int(stated[1]), int(stated[2])
                # Without a limit for the future, a broker adds 2^63 - 1 to its time, and the sum overflows.
                self.times_ms[topic] = least, _LONG_MAX if greatest < least else greatest
        return None

    def untimely(self, topic: str, timestamp_ms: int) -> str | None:
        """Return why the broker will refuse a timestamp, or None if the broker accepts it or has not stated a range."""
        allowed = self.times_ms.get(topic)
        if allowed is None or allowed[0] <= timestamp_ms <= allowed[1]:
            return None
        least, greatest = allowed
        return f"{topic} accepts timestamps from {least} to {greatest} (according to its broker), not {timestamp_ms}"


def refusal(topic: str, why: str) -> Fault:
    """Return the fault for a record that the topic refuses or, if ``topic`` is `FLOW`, that the flow failed on."""
    return Fault(FaultKind.UNREADABLE, FLOW_FAILED if topic == FLOW else "refused_by_broker", why)


def faults_of(batch: FeedBatch, refused: Mapping[int, Fault]) -> dict[int, Fault]:
    """Return a fault for each row that has an offset in ``refused`` or a header name that is not UTF-8."""
    faults = {}
    for row, offset in enumerate(batch.offsets):
        if offset in refused:
            faults[row] = refused[offset]
        elif offset in batch.odd_names:
            faults[row] = ODD_HEADER_NAME
    return faults


class Limits:
    """The size limits of the topics that a worker writes to. All tasks of a worker share one `Limits` object.

    A topic's limit is trusted for a minute, so a worker notices an increased `max.message.bytes` without a restart.
    When a limit is older than a minute, a record that seems too large is sent anyway, and the limit is fetched again
    only if the broker refuses the record.
    """

    def __init__(self, known: Mapping[str, Limit], now_ms: Callable[[], int], wire: Wire) -> None:
        self._known: Final = dict(known)
        self._now_ms: Final = now_ms
        self._wire: Final = wire
        self._read_ms: Final = dict.fromkeys(known, now_ms())

    def most_bytes(self, topic: str) -> int:
        """Return the maximum uncompressed size, in bytes, at which the broker certainly accepts a batch."""
        known = self._known.get(topic)
        return BATCH_BYTES if known is None else known.surely_fits_bytes

    def refuses(self, batch: RecordBatch, compression: str) -> str | None:
        """Return the reason why the broker will refuse a batch of one record, or None if no reason is known."""
        topic = batch.target.topic
        limit = self._known.get(topic)
        if limit is None or len(batch.rows) > 1 or batch.builder.size() <= limit.surely_fits_bytes:
            return None
        if self._now_ms() - self._read_ms[topic] >= TRUSTED_MS:
            return None
        found = oversize(batch, limit, compression)
        if found is None:
            return None
        return (
            f"{topic} takes batches of at most {limit.batch_bytes} bytes (max.message.bytes); this record needs {found}"
        )

    async def look_again(self, target: TopicPartition) -> None:
        """Fetch the topic's current `max.message.bytes`. If the broker does not respond, keep the known limit."""
        try:
            limit = await self._wire.limit(target)
        except NoAnswer as error:
            log.warning("%s: its limits cannot be read (%s), so the broker's refusals decide", target, error)
            return
        if limit is not None:
            if limit != self._known.get(target.topic):
                log.warning("%s takes batches of at most %d bytes now", target.topic, limit.batch_bytes)
            self._known[target.topic] = limit
            self._read_ms[target.topic] = self._now_ms()


@dataclass(frozen=True, slots=True)
class Route:
    """A topic to which records are sent, and its partition count."""

    topic: str
    partitions: int


@dataclass(frozen=True, slots=True)
class Routes:
    """The target topic of each verdict; None means that records with that verdict are not written."""

    source_topics: tuple[str, ...]
    output: Route | None
    dead_letter: Route
    late: Route | None
    late_forward: bool = False
    duplicates: Route | None = None
    conflicts: Route | None = None
    output_headers: bool = False
    keep_partition: bool = True
    """True if an output record keeps its source partition number; otherwise, its key or ID determines the partition."""
    time_is_record: bool = True
    """True if the event time is the record's timestamp; in that case, the output record gets the clamped event time."""
    compression: str = "snappy"


@dataclass(frozen=True, slots=True)
class RecordCollector:
    """Turns the verdicts on one task's records into record batches."""

    routes: Routes
    partition: int
    limits: Limits

    @property
    def side_topics(self) -> SideTopics:
        """The topics for late records and dead letters."""
        late = self.routes.late
        return SideTopics(self.routes.dead_letter.topic, None if late is None else late.topic)

    def begin(self) -> None:  # only a flow has something to forget
        """Discard what the previous batch left."""

    def publish(
        self, batch: FeedBatch, rows: Rows, outcome: Outcome, refusals: Refusals, misfits: Misfits
    ) -> list[RecordBatch]:
        """Return the batches for output, duplicates, conflicts, late records, and dead letters, all in log order.

        Records that the target topic does not accept are added to ``misfits`` instead. A late record or dead letter
        that is too large is replaced by its digest.
        """
        routes = self.routes
        outgoing: list[tuple[TopicPartition, Iterable[Line]]] = []
        if routes.output is not None:
            outgoing += self._output(batch, rows, outcome, routes.output, misfits)
        if routes.duplicates is not None or routes.conflicts is not None:
            outgoing += self._duplicates(batch, rows, outcome)
        batches = [made for target, lines in outgoing for made in self.fitting(target, lines, refusals, misfits)]
        if outcome.late and routes.late is not None:
            late: Iterable[Line] = (
                self._line(batch, row, self._provenance(batch, rows, row)) for row, _ in outcome.late
            )
            if refusals.rows:
                late = _taken_there(late, routes.late.topic, refusals, misfits)
            batches += self._side_batches(self._side_partition(routes.late), late, refusals, _LATE_ADDED)
        if outcome.dead:
            dead = self._dead(batch, rows, outcome)
            batches += self._side_batches(self._side_partition(routes.dead_letter), dead, refusals, _DEAD_ADDED)
        return batches

    def fitting(
        self, target: TopicPartition, lines: Iterable[Line], refusals: Refusals, misfits: Misfits
    ) -> list[RecordBatch]:
        """Return the lines (records to send) as batches. Lines that the topic refuses go into ``misfits``."""
        if refusals.rows or target.topic in refusals.times_ms:
            lines = list(_taken_there(lines, target.topic, refusals, misfits))
        batches = []
        for made in self._filled(target, lines, refusals):
            why = self.limits.refuses(made, self.routes.compression)
            if why is None or made.rows[0] == OWN_ROW:
                batches.append(made)  # dedup's own record cannot become a dead letter, so it is sent anyway
            else:
                misfits[target.topic, made.rows[0]] = why
        return batches

    def _side_batches(
        self, target: TopicPartition, lines: Iterable[Line], refusals: Refusals, added: int
    ) -> list[RecordBatch]:
        """Return late records or dead letters as batches; a record that does not fit is replaced by its digest."""
        if refusals.digests:
            known = refusals.digests
            lines = [_digest(line, added) if (target.topic, line[0]) in known else line for line in lines]
        batches = []
        for made in self._filled(target, lines, refusals):
            if made.first is None or self.limits.refuses(made, self.routes.compression) is None:
                batches.append(made)
            else:
                batches += fill(target, [_digest(made.first, added)], compression=self.routes.compression)
        return batches

    def _filled(self, target: TopicPartition, lines: Iterable[Line], refusals: Refusals) -> list[RecordBatch]:
        compression, most_bytes = self.routes.compression, self.limits.most_bytes(target.topic)
        cuts = sorted(refusals.cuts.get(target, ()))
        if not cuts:
            return fill(target, lines, compression=compression, most_bytes=most_bytes)
        runs = groupby(lines, key=lambda line: bisect_right(cuts, line[0]))
        return [made for _, run in runs for made in fill(target, run, compression=compression, most_bytes=most_bytes)]

    def _side_partition(self, route: Route) -> TopicPartition:
        return TopicPartition(route.topic, self.partition % route.partitions)

    def _output(
        self,
        batch: FeedBatch,
        rows: Rows,
        outcome: Outcome,
        route: Route,
        misfits: Misfits,  # noqa: ARG002  # only `FlowCollector` uses this parameter
    ) -> list[tuple[TopicPartition, Iterable[Line]]]:
        """Return the records to forward, by partition. Records on which the flow fails go into ``misfits``."""
        forwarded = self.forwarded(outcome)
        if not forwarded:
            return []
        lines = self._lines(batch, rows, outcome, forwarded)
        if self.routes.keep_partition:
            return [(TopicPartition(route.topic, self.partition), lines)]
        taken = gather(forwarded)
        keys, ids = taken(batch.keys), taken(rows.extracted.ids)
        chosen = partitions(
            [key if key is not None else own or b"" for key, own in zip(keys, ids, strict=True)], route.partitions
        )
        by_partition: dict[int, list[Line]] = {}
        for partition, line in zip(chosen, lines, strict=True):
            by_partition.setdefault(partition, []).append(line)
        return [(TopicPartition(route.topic, partition), part) for partition, part in sorted(by_partition.items())]

    def forwarded(self, outcome: Outcome) -> list[int]:
        """Return the rows that are sent to the output, in log order."""
        extra = set(outcome.exempt)
        if self.routes.late_forward:
            extra.update(row for row, _ in outcome.late)
        return sorted(extra.union(outcome.unique)) if extra else outcome.unique

    def _lines(self, batch: FeedBatch, rows: Rows, outcome: Outcome, forwarded: list[int]) -> LineColumns:
        """Return the forwarded records, unchanged except for the headers and timestamps that a policy sets."""
        marks: dict[int, list[Header]] = {}
        for row, exempt in outcome.exempt.items():
            marks.setdefault(row, []).append((VERDICT, exempt.encode()))
        if self.routes.late_forward:
            for row, _ in outcome.late:
                marks.setdefault(row, []).append((VERDICT, b"late"))
        taken = gather(forwarded)
        timestamps = taken(batch.timestamps_ms)
        if outcome.clamped and self.routes.time_is_record:
            timestamps = [outcome.clamped.get(row, own) for row, own in zip(forwarded, timestamps, strict=True)]
        headers: Sequence[list[Header]] = taken(batch.headers) if any(batch.headers) else _NONE * len(forwarded)
        if marks:
            headers = [[*batch.headers[row], *marks.get(row, ())] for row in forwarded]
        if self.routes.output_headers:
            places = self._places(rows.positions(forwarded))
            headers = [[*own, (SOURCE, place)] for own, place in zip(headers, places, strict=True)]
        return LineColumns(taken(batch.offsets), timestamps, taken(batch.keys), taken(batch.values), headers)

    def _duplicates(
        self, batch: FeedBatch, rows: Rows, outcome: Outcome
    ) -> Iterator[tuple[TopicPartition, Iterable[Line]]]:
        routes = self.routes
        plain, conflicting = outcome.all_duplicates(rows), outcome.conflicts
        if routes.conflicts is None:
            plain, conflicting = sorted(plain + conflicting), []
        for route, found in ((routes.duplicates, plain), (routes.conflicts, conflicting)):
            if route is not None and found:
                yield self._side_partition(route), self._copies(batch, found)

    def _copies(self, batch: FeedBatch, found: list[tuple[int, Sighting]]) -> Iterator[Line]:
        """Yield each duplicate with headers that identify the sighting that the duplicate repeats."""
        places = self._places(of.source for _, of in found)
        for (row, of), place in zip(found, places, strict=True):
            yield self._line(batch, row, [(_FIRST_TIME, b"%d" % of.first_ms), (_FIRST_SOURCE, place)])

    def _places(self, sources: Iterable[tuple[int, int, int]]) -> Iterator[bytes]:
        """Yield each position as topic/partition/offset."""
        feeds: dict[tuple[int, int], bytes] = {}
        for topic, partition, offset in sources:
            feed = feeds.get((topic, partition))
            if feed is None:
                feed = feeds[topic, partition] = f"{self.routes.source_topics[topic]}/{partition}/".encode()
            yield feed + b"%d" % offset

    def _dead(self, batch: FeedBatch, rows: Rows, outcome: Outcome) -> Iterator[Line]:
        for row, dead in sorted(outcome.dead, key=itemgetter(0)):
            why: list[Header] = [(REASON, dead.code.encode()), (DETAIL, dead.detail.encode())]
            yield self._line(batch, row, [*why, *self._provenance(batch, rows, row)])

    def _provenance(self, batch: FeedBatch, rows: Rows, row: int) -> list[Header]:
        place = rows.source(row).place(self.routes.source_topics).encode()
        return [(SOURCE, place), (TIMESTAMP, str(batch.timestamps_ms[row]).encode())]

    @staticmethod
    def _line(batch: FeedBatch, row: int, added: list[Header]) -> Line:
        # The side topics use LogAppendTime, so any valid timestamp can be sent to them.
        headers = [*batch.headers[row], *added]
        return batch.offsets[row], max(batch.timestamps_ms[row], 0), batch.keys[row], batch.values[row], headers


def _taken_there(lines: Iterable[Line], topic: str, refusals: Refusals, misfits: Misfits) -> Iterator[Line]:
    """Yield the lines that the topic may accept, and put lines that it is known to refuse into ``misfits``."""
    for line in lines:
        why = refusals.rows.get((topic, line[0])) or refusals.untimely(topic, line[1])
        if why is None:
            yield line
        else:
            misfits[topic, line[0]] = why


def _digest(line: Line, added: int) -> Line:
    """Return a digest to send in place of a record that is too large.

    Only the last ``added`` headers (those that dedup added) are kept, because the source record's own headers may be
    large.
    """
    row, timestamp_ms, _, value, headers = line
    digest = blake2b(value or b"", digest_size=32).hexdigest()
    summary = f"blake2b-256:{digest} of {len(value or b'')} bytes".encode()
    return row, timestamp_ms, None, None, [*headers[-added:], (DIGEST, summary)]
