"""Implements `dedup ingest`, a source connector whose Kafka transactions contain records and the source's position.

If two processes run the same source, the later process fences the earlier process, which stops with TaskMigrated.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, assert_never

import orjson

from dedup.connect.dead_letter_producer import DeadLetterLog
from dedup.connect.file_source import Files
from dedup.connect.source import DIGEST_BYTES, DeadRecord, RecordSource, SourceRecords
from dedup.connect.table_source import NumberedRows
from dedup.connect.transactional_outbox import (
    FOR_EVER,
    TOPIC_CONFIGS,
    TransactionalOutbox,
    provide,
    refuse_expiry,
    wanted_topic,
)
from dedup.connect.upsert import look_up
from dedup.core.event_time import FieldTime
from dedup.core.exact_json import Number, Unreadable, decode_quickly
from dedup.core.extract import compile_extractor
from dedup.core.partitioner import partitions
from dedup.core.tracking_id import FieldsRule, RawContentRule, TrackingId
from dedup.errors import BrokerUnavailable, RecordRefused, StateIncompatible
from dedup.kafka.client import KafkaWire
from dedup.kafka.connection import Connection
from dedup.kafka.record_batch import OWN_ROW, Header, Line
from dedup.kafka.topic_admin import Admin, Topic, WantedTopic
from dedup.kafka.wire import TopicPartition
from dedup.store.directory import open_more_files
from dedup.topology.ingest_file import Ingest
from dedup.topology.schema import FilesSource, Marker, TableSource
from dedup.worker.record_collector import DETAIL, ID, REASON, SLACK_BYTES, SOURCE
from dedup.worker.task_manager import ended

if TYPE_CHECKING:
    from dedup.settings import Settings

Lines = defaultdict[TopicPartition, list[Line]]
HEADERS_BYTES: Final = 512
"""The space, in bytes, for all parts of a record except the value: key, headers, and other fields."""
RECORDS_AT_ONCE: Final = 40_000
"""The maximum number of records in one transaction."""
BYTES_AT_ONCE: Final = 64 << 20
"""The size at which a transaction ends, so that a long `commit_interval` cannot fill the memory."""
MOST_RECORDS: Final = 500_000
MOST_BYTES: Final = 256 << 20
"""The limits for the records between two markers, which are kept in memory."""
LOOK_AGAIN_S: Final = 0.2
log: Final = logging.getLogger(__name__)


@dataclass(slots=True)
class Ingested:
    """The numbers of records, dead letters, and transactions in one run of a source."""

    records: int = 0
    dead_letters: int = 0
    transactions: int = 0
    waiting: list[str] = field(default_factory=list)
    """A sentence for each part of the source that could not be read completely before the run ended."""


@dataclass(slots=True)
class _Transaction:
    lines: Lines = field(default_factory=lambda: defaultdict(list))
    positions: dict[str, bytes] = field(default_factory=dict)
    polls: list[SourceRecords] = field(default_factory=list)
    rows: int = 0
    """The number of records in all polls. Each record's line has its row number, to identify a refused record."""
    records: int = 0
    dead_letters: int = 0
    size_bytes: int = 0

    @property
    def is_full(self) -> bool:
        """Whether no more records should be added to the transaction."""
        return self.rows >= RECORDS_AT_ONCE or self.size_bytes >= BYTES_AT_ONCE

    def places(self, rows: Collection[int]) -> Iterator[tuple[int, SourceRecords, int]]:
        """Yield each row number with the poll that returned that record, and the record's index within the poll."""
        first = 0
        for found in self.polls:
            for row in rows:
                if first <= row < first + len(found.values):
                    yield row, found, row - first
            first += len(found.values)


OpenSource = Callable[[Ingest, int, Callable[[], bool]], RecordSource]
"""Opens the source, given the maximum size of a record's value in bytes and a function that says when to stop."""


def open_source(ingest: Ingest, most_bytes: int, stopped: Callable[[], bool], *, url: str = "") -> RecordSource:
    """Return the source of an ingest file. For a table, ``url`` is the database's URL, and the call blocks."""
    source: RecordSource
    match ingest.source:
        case FilesSource() as files:
            open_more_files()  # Each file that matches the pattern stays open.
            source = Files(ingest.name, files, most_bytes)
        case TableSource() as table:
            source = NumberedRows(ingest.name, table, url, stopped)
        case never:
            assert_never(never)
    return TransactionBoundary(source, ingest.boundary) if isinstance(ingest.boundary, Marker) else source


async def run_ingest(
    ingest: Ingest, settings: Settings, make_source: OpenSource, *, exit_when_done: bool = False
) -> Ingested:
    """Run a source until SIGTERM or SIGINT or, with ``exit_when_done``, until the whole source has been sent.

    Raises TaskMigrated if another process takes over the source, AuthorMistake or StateIncompatible if the source
    cannot be read without loss, and BrokerUnavailable if no broker responds at startup, or if a broker refuses the
    time of this machine's clock.
    """
    async with AsyncExitStack() as stack:
        wire = KafkaWire(Connection.of(settings, client_id=f"dedup-ingest-{ingest.name}"))
        await wire.start()
        stack.push_async_callback(wire.stop)
        async with Admin(wire.connection) as admin:
            topics = await make_topics(admin, ingest, settings, create=settings.topics.create)
        stop = stack.enter_context(set_by_signals())
        await stack.enter_async_context(ended_by_refusal(wire, stop))
        name = f"{ingest.name}.ingest.0"
        outbox = TransactionalOutbox(
            wire, name, ingest.offsets_topic, settings, topics, stop.is_set, output=ingest.topic
        )
        await outbox.open()
        stack.push_async_callback(outbox.close)
        log.info("%s: source taken; earlier owners are fenced", ingest.name)
        most_bytes = topics[ingest.topic].max_record_bytes
        source = await asyncio.to_thread(make_source, ingest, most_bytes - HEADERS_BYTES, stop.is_set)
        stack.callback(source.close)
        interval_ms = settings.commit_interval_ms if ingest.boundary == "interval" else None
        run = _Run(outbox, source, _RecordMaker(ingest, topics, outbox.partitions, most_bytes), interval_ms, stop)
        return await run.until_over(exit_when_done=exit_when_done)


@contextmanager
def set_by_signals() -> Iterator[asyncio.Event]:
    """Yield an event that is set when SIGTERM or SIGINT arrives inside the ``with`` block."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


@asynccontextmanager
async def ended_by_refusal(wire: KafkaWire, stop: asyncio.Event) -> AsyncIterator[None]:
    """Inside the ``with`` block, set ``stop`` once all brokers permanently refuse this process, for example after a
    password change.

    After the block, raise the BrokerUnavailable that gives the reason. No other code notices a refusal, because a
    refused request looks like a request without a response, which is repeated forever.
    """
    refused: list[BrokerUnavailable] = []

    async def watch() -> None:
        try:
            await wire.until_refused()
        except BrokerUnavailable as error:
            refused.append(error)
            stop.set()

    watching = asyncio.create_task(watch())
    try:
        yield
    except BrokerUnavailable:  # what waited for a broker says only that it was stopped
        if not refused:
            raise
    finally:
        await ended([watching])
    if refused:
        raise refused[0]


def topics_of(ingest: Ingest, settings: Settings, have: Mapping[str, Topic]) -> list[WantedTopic]:
    """Return the topics that an ingest file needs, for records, positions, and dead letters, in this order.

    If ``have``, the existing topics, contains the topic for records, that topic determines the size limit for dead
    letters.
    """
    retention = settings.topics.retention_ms
    configs = {} if retention is None else {"retention.ms": str(retention)}
    if retention is None and isinstance(ingest.event_time, FieldTime):
        # Records may be old. With the default retention of 7 days, Kafka would soon delete them.
        configs = {"retention.ms": FOR_EVER}
    dead_configs = {"message.timestamp.type": "LogAppendTime"}
    if ingest.topic in have:
        dead_configs["max.message.bytes"] = str(have[ingest.topic].max_record_bytes + SLACK_BYTES)
    return [
        wanted_topic(settings, ingest.topic, ingest.partitions, configs),
        wanted_topic(settings, ingest.offsets_topic, 1, TOPIC_CONFIGS),
        wanted_topic(settings, ingest.dead_letter, ingest.partitions, dead_configs),
    ]


async def make_topics(admin: Admin, ingest: Ingest, settings: Settings, *, create: bool) -> dict[str, Topic]:
    """Create the missing topics of an ingest file, and return all of its topics.

    Raises StateIncompatible if a topic is missing and ``create`` is false, or if brokers delete positions by age or
    size.
    """
    remedy = "`dedup apply` with the ingest file creates them."
    *first, _ = topics_of(ingest, settings, {})
    topics = await provide(admin, first, create=create, remedy=remedy)
    refuse_expiry(topics[ingest.offsets_topic])
    *_, dead_letter = topics_of(ingest, settings, topics)  # whose size limit depends on the topic for records
    return topics | await provide(admin, [dead_letter], create=create, remedy=remedy)


@dataclass(slots=True)
class _Run:
    outbox: TransactionalOutbox
    source: RecordSource
    maker: _RecordMaker
    interval_ms: int | None
    """How long records are collected for one transaction, or None if each poll becomes a transaction."""
    stop: asyncio.Event
    done: Ingested = field(default_factory=Ingested)
    single: bool = False
    """True after a broker refused a batch without naming records.

    Each record batch then contains only one record, so that the broker's response identifies the refused record.
    """

    async def until_over(self, *, exit_when_done: bool) -> Ingested:
        self.source.restore(self.outbox.positions)
        current = await asyncio.to_thread(self._collect)
        while not self.stop.is_set():
            if current is not None:
                current = await self._commit(current)
                continue
            if exit_when_done:
                break
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_AGAIN_S):
                    await self.stop.wait()
            current = await asyncio.to_thread(self._collect)
        self.done.waiting = self.source.waiting()
        return self.done

    def _collect(self) -> _Transaction | None:
        made = _Transaction()
        until_s = time.monotonic() + (self.interval_ms or 0) / 1000
        while not made.positions or (not made.is_full and time.monotonic() < until_s):
            found = self.source.poll()
            if found is None:
                break
            made.polls.append(found)
            made.positions[found.part] = found.position
            for target, lines in self.maker.lines(found, made.rows).items():
                made.lines[target] += lines
                if target.topic == self.maker.topic:
                    made.records += len(lines)
                else:
                    made.dead_letters += len(lines)
            made.rows += len(found.values)
            made.size_bytes += sum(map(len, found.values)) + sum(len(each.value or b"") for each in found.dead)
            if self.single or self.interval_ms is None:
                break
        return made if made.positions else None

    async def _commit(self, current: _Transaction) -> _Transaction | None:
        """Commit ``current`` while reading the next transaction, and return the next transaction."""
        most_rows = 1 if self.single else None
        sending = asyncio.create_task(self.outbox.commit(current.lines, current.positions, most_rows=most_rows))
        try:
            following = await asyncio.to_thread(self._collect)
        except BaseException:
            # Commit the records that were read before the source failed, and only then report the error.
            await sending
            raise
        try:
            await sending
        except RecordRefused as refused:
            self._refuse(current, refused)
            self.source.restore(self.outbox.positions)
            return await asyncio.to_thread(self._collect)
        self.single = False
        self.maker.refused.clear()
        self.source.committed(current.positions)
        self.done.records += current.records
        self.done.dead_letters += current.dead_letters
        self.done.transactions += 1
        return following

    def _refuse(self, current: _Transaction, refused: RecordRefused) -> None:
        """Turn the refused records into dead letters.

        If the broker does not say which records it refused, switch to one record per batch. Raises BrokerUnavailable if
        the broker refuses the time of this machine's clock, because the records are then not at fault.
        """
        named: dict[int, str] = {}
        for each in (refused, *refused.also):
            if each.bad_time and each.topic in self.maker.timed_by_clock:
                raise BrokerUnavailable(
                    f"{each}. The broker refuses the time of this machine's clock, "
                    f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}, as a timestamp. Nothing was lost: the "
                    f"transaction was not committed. Correct the clock of this machine or of the broker, or the limits "
                    f"message.timestamp.*.max.ms of topic {each.topic!r}; then start again."
                ) from refused
            named |= each.named(str(each))
        if OWN_ROW in named or (self.single and not named):
            raise refused
        # A broker names no records if a batch is too large (KIP-467).
        self.single = self.single or not named
        if named:
            log.warning("%s: %d records become dead letters", refused, len(named))
        for row, found, at in current.places(named):
            self.maker.refused[found.part, found.places[at]] = named[row]


@dataclass(slots=True)
class _Pending:
    values: list[bytes] = field(default_factory=list)
    places: list[int | str] = field(default_factory=list)
    dead: list[DeadRecord] = field(default_factory=list)
    size_bytes: int = 0

    @property
    def count(self) -> int:
        """The total number of records and dead letters."""
        return len(self.values) + len(self.dead)

    @property
    def begin(self) -> int | str:
        """The place of the first record or, without any records, of the first dead letter."""
        return self.places[0] if self.places else self.dead[0].place


class TransactionBoundary:
    """Wraps a source in which a record marks the end of each transaction, so that each poll returns one transaction.

    This class corresponds to `transaction.boundary=connector` in Kafka Connect (KIP-618), except that the marker is
    a field of a normal record, which is sent like any other record.
    """

    def __init__(self, source: RecordSource, marker: Marker) -> None:
        self._source: Final = source
        self._marker: Final = marker
        self._pending: Final[dict[str, _Pending]] = {}
        self._ready: Final[deque[SourceRecords]] = deque()

    def restore(self, positions: Mapping[str, bytes]) -> None:
        """Discard incomplete transactions, and continue from the committed positions."""
        self._pending.clear()
        self._ready.clear()
        self._source.restore(positions)

    def poll(self) -> SourceRecords | None:
        """Return the next complete transaction, or None if no transaction is complete.

        Raises StateIncompatible if too many records arrive without a marker.
        """
        while not self._ready:
            found = self._source.poll()
            if found is None:
                return None
            self._take(found)
        return self._ready.popleft()

    def committed(self, positions: Mapping[str, bytes]) -> None:
        """Tell the wrapped source which positions are now committed."""
        self._source.committed(positions)

    def waiting(self) -> list[str]:
        """Return a sentence for each part of the source that still waits for data or for a marker."""
        return self._source.waiting() + [
            f"{pending.count} records after {pending.begin} of {part} wait for their marker"
            for part, pending in self._pending.items()
            if pending.count
        ]

    def close(self) -> None:
        """Close the wrapped source."""
        self._source.close()

    def _take(self, found: SourceRecords) -> None:
        pending = self._pending.setdefault(found.part, _Pending())
        if not found.values and not found.dead:
            if not pending.count:
                self._ready.append(found)  # `found` contains only a position.
                return
            text = "%s: %d records before blank lines or the end have no marker yet; they wait for one"
            log.warning(text, found.part, pending.count)
        ends = [row + 1 for row, value in enumerate(found.values) if self._ends(value)]
        for first, end in zip((0, *ends), (*ends, None), strict=True):
            pending.values += found.values[first:end]
            pending.places += found.places[first:end]
            pending.size_bytes += sum(map(len, found.values[first:end]))
            # A dead record between a marker and the next row belongs to the transaction after the marker.
            last = len(found.values) if end is None else end - 1
            dead = [each for each in found.dead if first <= each.row <= last]
            pending.dead += dead
            pending.size_bytes += sum(len(each.value or b"") for each in dead)
            if end is not None:
                at, dead = found.after(end - 1), pending.dead
                whole = replace(found, values=pending.values, places=pending.places, position=at, dead=dead)
                self._ready.append(whole)
                pending = self._pending[found.part] = _Pending()
        if pending.count > MOST_RECORDS or pending.size_bytes > MOST_BYTES:
            raise StateIncompatible(
                f"{found.prefix}{pending.begin}: no marker among the {pending.count:,} records after this "
                f"one. None of them was sent; correct `boundary`, or write markers more often."
            )

    def _ends(self, value: bytes) -> bool:
        try:
            record = decode_quickly(value)
        except Unreadable:
            return False  # The value becomes a dead letter.
        found, equals = look_up(record, self._marker.field), self._marker.equals
        if isinstance(found, Number):  # orjson refused another part of the value.
            return type(equals) is int and found.is_integer and found.integer_text() == str(equals)
        return type(found) is type(equals) and found == equals


class _RecordMaker:
    """Turns the lines or rows of a source into Kafka records or dead letters, and assigns them to partitions."""

    def __init__(self, ingest: Ingest, topics: Mapping[str, Topic], counts: Mapping[str, int], most_bytes: int) -> None:
        """``counts`` maps the topics to their current partition counts."""
        self.topic: Final = ingest.topic
        self.timed_by_clock: Final = {ingest.dead_letter, ingest.topic}
        """The topics whose records get the time of this machine's clock."""
        if isinstance(ingest.event_time, FieldTime):
            self.timed_by_clock.discard(ingest.topic)
        self._ingest: Final = ingest
        self._counts: Final = counts
        self._most_bytes: Final = most_bytes
        self._most_dead_bytes: Final = topics[ingest.dead_letter].max_record_bytes
        rule = ingest.tracking_id or RawContentRule()
        self._extract: Final = compile_extractor(TrackingId(rule), ingest.event_time, fmt="json", fingerprint=False)
        self._log: Final = DeadLetterLog(ingest.name, ingest.dead_letter)
        self.refused: Final[dict[tuple[str, int | str], str]] = {}
        """Maps the part and place of a record to the reason why the broker refused it."""

    def lines(self, found: SourceRecords, first_row: int) -> Lines:
        """Return the lines to send. Records are numbered from ``first_row``; dead letters have the number -1."""
        count = len(found.values)
        now_ms = time.time_ns() // 1_000_000
        no_keys: list[Any] = [None] * count
        extracted = self._extract(no_keys, found.values, [[]] * count, [now_ms] * count)
        bad = {
            row: DeadRecord(found.places[row], fault.code, fault.detail, found.values[row])
            for row, fault in extracted.faults.items()
        }
        for row in range(count) if self.refused else ():
            if (why := self.refused.get((found.part, found.places[row]))) is not None:
                bad[row] = DeadRecord(found.places[row], "refused", why, found.values[row])
        keys = self._keys(found.values, bad)
        bad = self._too_large(found, keys) | bad
        into = self._counts[self.topic]
        if self._ingest.tracking_id is None:
            # Each part of the source is sent to one partition, which keeps the order of a file or table.
            numbers = partitions([found.part.encode()], into) * count
            headers: list[list[Header]] = [[(ID, f"{found.prefix}{place}".encode())] for place in found.places]
        else:
            numbers = partitions([key or b"" for key in keys], into) if keys else []
            headers = [[]] * count
        parts: list[list[Line]] = [[] for _ in range(into)]
        rows = zip(range(first_row, first_row + count), extracted.times_ms, keys, found.values, headers, strict=True)
        for number, line in zip(numbers, rows, strict=True):
            parts[number].append(line)
        lines: Lines = defaultdict(list)
        for number, part in enumerate(parts):
            kept = [line for line in part if line[0] - first_row not in bad] if bad else part
            if kept:
                lines[TopicPartition(self.topic, number)] = kept
        dead = [*found.dead, *(bad[row] for row in sorted(bad))]
        for each in dead:
            place = f"{found.path}, byte {each.place}," if found.path else f"{found.prefix}{each.place}"
            self._log.note(place, each.code, each.detail)
        if dead:
            number = partitions([found.part.encode()], self._counts[self._ingest.dead_letter])[0]
            letters = [self._dead_letter(each, found.prefix, now_ms) for each in dead]
            lines[TopicPartition(self._ingest.dead_letter, number)] = letters
        return lines

    def _dead_letter(self, dead: DeadRecord, prefix: str, now_ms: int) -> Line:
        value, detail = dead.value, dead.detail
        if value is not None and len(value) + len(detail) + HEADERS_BYTES > self._most_dead_bytes:
            digest = blake2b(value, digest_size=DIGEST_BYTES).hexdigest()
            detail += f"; {len(value)} bytes, too large for this topic; blake2b-256:{digest}"
            value = None
        texts = ((REASON, dead.code), (DETAIL, detail), (SOURCE, f"{prefix}{dead.place}"))
        return -1, now_ms, None, value, [(name, text.encode()) for name, text in texts]

    def _too_large(self, found: SourceRecords, keys: Sequence[bytes | None]) -> dict[int, DeadRecord]:
        longest = max(map(len, found.values), default=0) + max((len(key or b"") for key in keys), default=0)
        if longest + HEADERS_BYTES <= self._most_bytes:
            return {}
        text = f"bytes are more than a record of topic {self.topic} can hold"
        return {
            row: DeadRecord(found.places[row], "too_large", f"{len(value)} {text}", None)
            for row, (value, key) in enumerate(zip(found.values, keys, strict=True))
            if len(value) + len(key or b"") + HEADERS_BYTES > self._most_bytes
        }

    def _keys(self, values: Sequence[bytes], bad: dict[int, DeadRecord]) -> Sequence[bytes | None]:
        rule = self._ingest.tracking_id
        if rule is None:
            return [None] * len(values)
        if bad:
            values = [b"null" if row in bad else value for row, value in enumerate(values)]
        records = map(decode_quickly, values)
        if isinstance(rule, FieldsRule):
            return [orjson.dumps([_plain(look_up(record, path)) for path in rule.paths]) for record in records]
        match rule.path:
            case (str() as name,) if not bad:
                return [_text(record[name]) for record in records]
            case path:
                return [_text(look_up(record, path)) for record in records]


def _text(found: Any) -> bytes:  # noqa: ANN401 - any JSON value
    return found.encode() if isinstance(found, str) else orjson.dumps(_plain(found))


def _plain(found: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Convert an exactly decoded number to the value that orjson would return, so that equal IDs have equal keys."""
    if isinstance(found, Number):
        try:
            found = orjson.loads(found.text)
        except orjson.JSONDecodeError:
            found = float(found.text)  # infinite, because the number is too large
    return found + 0.0 if isinstance(found, float) else found  # -0.0 is the same ID as 0.0
