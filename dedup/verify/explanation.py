"""Finds the records of one tracking ID in all topics, with the verdict on each record and the reason for it.

The exact model computes the verdicts, so the result shows where the topics contradict the model. The search reads all
topics from the beginning, but keeps only records with the ID in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Final

from dedup.core.extract import Extracted
from dedup.core.reference_model import ModelRecord, ReferenceModel
from dedup.core.window import Source
from dedup.settings import Settings
from dedup.store.changelog import TASK_RECORD_KEY, decode_sightings, decode_task_record, parse_key, sighting_rows
from dedup.topology.model import Topology
from dedup.verify.compare import digest, digest_with
from dedup.verify.cut import Cut, OnProgress, WrittenPartition, take_cut
from dedup.verify.direct import WHY_COMPACTED, output_of, source_log, start_of
from dedup.verify.evidence import FIRST_SOURCE_HEADER, extracted_of, forwarded_by_replay, header
from dedup.verify.findings import copy_topics
from dedup.verify.kafka_reader import KafkaReader, RecordColumns, StartDeleted, read_left, without_garbage_collection
from dedup.verify.log_scan import Log, Row, forwarded_digest
from dedup.verify.repartitioned import log_rows
from dedup.verify.replay import Doubt, why_doubted
from dedup.verify.report import Report
from dedup.verify.spill import scratch_directory

_MOST_LISTED: Final = 1_000
"""The maximum number of records that are listed for one ID. Further records are only counted."""
WHY_GONE: Final = "the repartition topic no longer holds it, so its verdict is not known"
WHY_OTHER: Final = (
    "the repartition topic does not hold it with this ID: it was deleted there, or the ID function has returned "
    "another ID, so its verdict is not known"
)


@dataclass(slots=True)
class ExplainedRecord:
    """A source record with the ID being searched for, its verdict, and its copies in other topics."""

    place: str
    """The place of the record in the source, as ``topic/partition offset n``."""
    timestamp_ms: int
    event_time_ms: int
    stream_time_ms: int
    """Stream time after this record, in the log in which the record was judged."""
    verdict: str
    """The model's verdict (unique, duplicate, late, dead_letter, exempt, or fail), or else `pending` or `purged`."""
    of: str | None = None
    """The earlier record that a duplicate repeats or from which a forwarded conflict differs."""
    of_ms: int | None = None
    conflict: bool = False
    reason: str = ""
    """The reason code of a dead letter, an exempt record, or a failure."""
    log_place: str | None = None
    """The position of the record in the repartition topic."""
    went: list[str] = field(default_factory=list)
    """The positions of the record in the topics that workers write to."""
    doubt: str = ""
    """The reason why the worker's verdict may have differed; empty if the verdict is certain."""
    wrong: str = ""
    """A description of how the topics contradict the verdict; empty if they do not."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A sighting of the ID being searched for, in the changelog."""

    place: str
    first_ms: int
    last_ms: int
    source: str
    guarded_until_ms: int
    live: bool
    """True until stream time passes the end of the sighting's retention."""


@dataclass(slots=True)
class Explanation:
    """The result of a search for one tracking ID."""

    topology: str
    id: str
    records: list[ExplainedRecord] = field(default_factory=list)
    more: int = 0
    """The number of records that are not listed."""
    strays: list[str] = field(default_factory=list)
    """Positions of written records with this ID for which no listed record accounts."""
    sightings: list[Kept] = field(default_factory=list)
    whole: bool = True
    """True if the logs still contain every record that workers have judged."""

    @property
    def contradictions(self) -> int:
        """The number of contradictions between the verdicts and the topics.

        A written record without a source record counts as a contradiction only if all judged records are listed.
        Otherwise, an unlisted source record could account for the written record.
        """
        complete = self.whole and not self.more
        return sum(bool(explained.wrong) for explained in self.records) + (len(self.strays) if complete else 0)


@dataclass(slots=True)
class _Search:
    """The state of a search for one ID."""

    cut: Cut
    keys: frozenset[bytes]
    found: Explanation
    rows: list[tuple[Row, ExplainedRecord]] = field(default_factory=list)

    def add(self, explained: ExplainedRecord, row: Row | None = None) -> None:
        if len(self.found.records) >= _MOST_LISTED:
            self.found.more += 1
            return
        self.found.records.append(explained)
        if row is not None:
            self.rows.append((row, explained))


def explain_id(
    topology: Topology, settings: Settings, text: str, keys: Collection[bytes], *, progress: OnProgress
) -> Explanation:
    """Search the topics for a tracking ID. ``keys`` are the state keys that the text of the ID may represent.

    Raises StateIncompatible if the topology and the cluster do not match, BrokerUnavailable if the cluster cannot be
    read, and DedupError if the disk of the temporary directory is full.
    """
    found = Explanation(topology.name, text)
    report = Report(topology.name, "", "", 0)
    with (
        without_garbage_collection(),
        KafkaReader(settings) as reader,
        scratch_directory("dedup-explain-", None) as directory,
        closing(take_cut(topology, reader, report, progress, directory, 1)) as cut,
    ):
        search = _Search(cut, frozenset(keys), found)
        _judge_logs(search)
        if not topology.direct:
            _find_uncarried(search)
        _find_written(search)
        _find_sightings(search)
        # The reads above show which logs have lost their beginning since the cut.
        logs = (*topology.source.topics, *topology.feeding_topics)
        found.whole = not cut.compacted.intersection(logs) and all(map(cut.whole, logs)) and not cut.starts
    # Records with the same event time stay in the order in which they were judged.
    found.records.sort(key=lambda explained: explained.event_time_ms)
    return found


def _judge_logs(search: _Search) -> None:
    """Judge the records with the ID in each log that workers judge.

    Workers continuously delete old records of the repartition topic, so a log may have to be read again.
    """
    cut, keys = search.cut, search.keys
    if not cut.topology.direct:
        for partition in range(cut.partitions[cut.topology.repartition_topic]):
            name = f"{cut.topology.repartition_topic}/{partition}"
            logs = partial(log_rows, cut, partition, keys)
            cut.again(partial(_judge, search, name, logs), cut.plan.give_back)
        return
    for partition in cut.bounds[cut.topology.source.topics[0]]:
        # With `start: latest` or a start time, the output shows which record was judged first.
        output = output_of(cut, partition, 1) if cut.topology.source.start != "earliest" else None
        logs = partial(_source_rows, search, partition, output)
        cut.again(partial(_judge, search, "", logs), partial(cut.plan.give_back, (0, partition)))


def _source_rows(search: _Search, partition: int, output: WrittenPartition | None) -> Iterator[Log]:
    cut, source = search.cut, search.cut.topology.source.topics[0]
    committed = cut.committed[source].get(partition)
    begin, known = start_of(cut, partition, output)
    judged = begin if committed is None else committed
    spans = ((min(begin, judged), judged, False), (judged, cut.bounds[source][partition].high, True))
    return source_log(cut, cut.plan, partition, spans, known=known, only=search.keys)


def _judge(search: _Search, name: str, read: Callable[[], Iterator[Log]]) -> None:
    """Add the records of a log to the result. If StartDeleted is raised, the result is unchanged."""
    cut = search.cut
    model, doubt = ReferenceModel(cut.plan.rules, cut.feeds), Doubt(cut.plan.rules)
    listed, rows, more = len(search.found.records), len(search.rows), search.found.more
    try:
        for row in chain.from_iterable(log.rows() for log in read()):
            place = cut.plan.place(row.source)
            explained = ExplainedRecord(place, row.timestamp_ms, row.time_ms, row.after_ms, "pending")
            explained.log_place = f"{name} offset {row.position}" if name else None
            if not row.odd.pending:
                _explain_verdict(cut, model, doubt, row, explained)
            search.add(explained, row)
    except StartDeleted:
        del search.found.records[listed:], search.rows[rows:]
        search.found.more = more
        raise


def _explain_verdict(cut: Cut, model: ReferenceModel, doubt: Doubt, row: Row, explained: ExplainedRecord) -> None:
    if row.odd.letter is not None:
        explained.verdict, explained.reason = "dead_letter", row.odd.letter.reason
        explained.went.append(cut.plan.dead_letters.place(row.odd.letter))
        return
    model.stream_time_ms = row.after_ms
    verdict = model.judge(ModelRecord(row.id, row.time_ms, row.source, row.fingerprint, row.odd.fault))
    explained.verdict, explained.reason, explained.conflict = verdict.kind, verdict.reason, verdict.conflict
    if verdict.of is not None:
        explained.of, explained.of_ms = cut.plan.place(verdict.of.source), verdict.of.last_ms
    unseen_ms, own = row.odd.doubt_ms, row.id
    if unseen_ms is not None and own is not None and doubt.about(own, verdict.time_ms, row.after_ms, unseen_ms):
        explained.doubt = why_doubted(row)
    elif cut.compacted.intersection(cut.topology.source.topics):
        explained.doubt = WHY_COMPACTED
    late = cut.plan.late
    if late is not None and row.odd.late is not None:
        explained.went.append(late.place(row.odd.late))
        if verdict.kind != "late" and not explained.doubt:
            explained.wrong = f"by the rule it is {verdict.kind}, but it is in {late.name}"
    elif late is not None and verdict.kind == "late" and late.complete and not explained.doubt:
        explained.wrong = f"it is late, but not in {late.name}"


def _records(
    search: _Search, topic: str, contents: Collection[bytes] = (), *, copies: bool = False
) -> Iterator[tuple[int, RecordColumns, Extracted, int]]:
    """Yield each record with the ID in a topic, as (partition, columns, extracted values, row).

    An ID function may now return a different ID than it did in a repartition task. Therefore, if repartition tasks pass
    on the IDs, the function also yields records whose digest is in ``contents``.
    """
    cut, keys = search.cut, search.keys
    also = contents if cut.topology.passes_ids_on else ()
    for partition in range(cut.partitions[topic]):
        bounds = cut.bounds[topic][partition]
        for columns in read_left(cut.read, cut.begin_later, topic, partition, bounds.low, bounds.high):
            extracted = extracted_of(cut.plan.extract, columns)
            if keys.isdisjoint(extracted.ids) and not also:
                continue
            for row, own in enumerate(extracted.ids):
                if own in keys or (also and _content(columns, row, copies=copies) in also):
                    yield partition, columns, extracted, row


def _content(columns: RecordColumns, row: int, *, copies: bool) -> bytes:
    """Return the digest of a written record as it was in the source, without a timestamp."""
    headers = columns.headers[row]
    if copies and header(headers, FIRST_SOURCE_HEADER) is not None:
        headers = headers[:-2]
    return digest(columns.keys[row], columns.values[row], headers, 0)


def _find_uncarried(search: _Search) -> None:
    """Add to the result the ID's source records that are not in the repartition topic yet, or no longer."""
    cut, found = search.cut, search.found
    known = {explained.place for explained in found.records}
    for position, topic in enumerate(cut.topology.source.topics):
        for partition, columns, extracted, row in _records(search, topic):
            offset = columns.offsets[row]
            place = cut.plan.place(Source(position, partition, offset))
            if row in extracted.faults or place in known:
                continue
            explained = ExplainedRecord(place, columns.timestamps_ms[row], extracted.times_ms[row], 0, "pending")
            if offset < cut.committed[topic].get(partition, cut.bounds[topic][partition].low):
                explained.verdict = "purged"
                explained.doubt = WHY_OTHER if cut.topology.passes_ids_on else WHY_GONE
            search.add(explained)


def _find_written(search: _Search) -> None:
    """Find the ID's records in the output, duplicates, and conflicts topics, and assign them to source records."""
    cut, topology = search.cut, search.cut.topology
    # The timestamps in the output may come from another clock, so records are compared without timestamps.
    plan = replace(cut.plan, output_stamped=False)
    wanted: dict[bytes, list[ExplainedRecord]] = {}
    by_source: dict[bytes, list[ExplainedRecord]] = {}
    for row, explained in search.rows:
        why = "conflict" if explained.conflict else "late" if explained.verdict == "late" else explained.reason
        wanted.setdefault(forwarded_digest(plan, row, why), []).append(explained)
        if explained.verdict == "duplicate":
            content = digest_with(row.content, row.headers, 0)
            by_source.setdefault(content, []).append(explained)
    if cut.plan.flowed is not None:
        # The scan has found the records that the flow made from each source record. A flow may also make no record.
        for row, explained in search.rows:
            sent = [] if row.flowed is None else row.flowed.sent
            explained.went += (cut.plan.flowed.place(each.target, each.partition, each.offset) for each in sent)
            if sent and explained.verdict == "pending":
                explained.verdict = "pending, but written already"
    elif topology.output is not None:
        _match(search, topology.output.topic, wanted)
        # If the output is complete, it must contain each record that the rule forwards.
        output = topology.output.topic
        unread = any(topic == output for topic, _ in cut.unread)
        for _, explained in [] if unread or output in cut.compacted or not cut.whole(output) else search.rows:
            if explained.verdict in {"unique", "exempt"} and not explained.went and not explained.doubt:
                explained.wrong = f"by the rule it is forwarded, but it is not in {output}"
    for topic in copy_topics(cut).values():
        _match(search, topic, by_source, copies=True)


def _match(search: _Search, topic: str, wanted: dict[bytes, list[ExplainedRecord]], *, copies: bool = False) -> None:
    """Assign each written record to the source record that accounts for the written record, or list it as a stray."""
    for partition, columns, _, row in _records(search, topic, wanted, copies=copies):
        if not copies and forwarded_by_replay(columns.headers[row], search.cut.topology.source.topics):
            continue
        content = _content(columns, row, copies=copies)
        place = f"{topic}/{partition} offset {columns.offsets[row]}"
        free = [explained for explained in wanted.get(content, []) if not explained.went]
        if not free:
            search.found.strays.append(place)
            continue
        # Equal records cannot be distinguished, so the records that the rule forwards are matched first.
        first = min(free, key=lambda explained: explained.verdict not in {"unique", "exempt"})
        first.went.append(place)
        if first.verdict == "pending":
            first.verdict = "pending, but written already"


def _find_sightings(search: _Search) -> None:
    """Find the ID's sightings in the changelog. Only the last record with each key counts."""
    cut, topic = search.cut, search.cut.topology.changelog_topic
    window = cut.topology.window
    for partition, bounds in cut.reader.bounds(topic).items():
        last: dict[bytes, tuple[int, bytes]] = {}
        stream_ms = 0
        for columns in read_left(cut.read, cut.begin_later, topic, partition, bounds.low, bounds.high):
            for at in sighting_rows(columns.keys, search.keys):
                key, value, offset = columns.keys[at], columns.values[at], columns.offsets[at]
                if key is None or value is None:
                    continue
                if key == TASK_RECORD_KEY:
                    stream_ms = decode_task_record(value).stream_time_ms
                elif (parsed := parse_key(key)) is not None and parsed.state_key in search.keys:
                    last[key] = (offset, value)
        for offset, value in last.values():
            for seen in decode_sightings(value):
                live = seen.last_ms >= window.oldest_live_ms(stream_ms)
                place, source = f"{topic}/{partition} offset {offset}", cut.plan.place(seen.source)
                until_ms = seen.last_ms + window.guard_ms
                search.found.sightings.append(Kept(place, seen.first_ms, seen.last_ms, source, until_ms, live))
    search.found.sightings.sort(key=lambda kept: (kept.first_ms, kept.place))
