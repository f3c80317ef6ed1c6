"""Implements `dedup replay`, which sends dead letters to their source, or late records to the output, exactly once.

A dead letter is sent to its source partition, where it is judged like any other record. A late record would be late
again in its source, so it is sent to the output instead. The header `dedup-verdict` marks such a record, because
dedup's guarantee does not cover it. A record that cannot be sent is reported and stays in its topic.

One transaction commits the sent records and the new position, which is an offset of the group `NAME.replay`. The
position's metadata names the left records: records before the position that were not sent but could be sent later, such
as a record that is too large for the source topic. Each replay tries these records again.

The broker forgets the replay position `offsets.retention.minutes` after the last replay, and a transactional commit
cannot prevent this. Therefore, each replay also commits a replay mark, which does not expire, to the group
`NAME.replay-mark`. The replay mark's commit is not transactional. If there is a replay mark but no position, nothing is
sent until the user specifies where to begin. The replay mark also names the left records.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, NamedTuple

from dedup.core.event_time import RecordTime
from dedup.core.partitioner import partitions
from dedup.errors import (
    CommitUnknown,
    DedupError,
    Problem,
    RecordRefused,
    SettingsError,
    StateIncompatible,
    TaskMigrated,
)
from dedup.kafka.client import KafkaWire
from dedup.kafka.consumer import Answer, FeedFetcher, TopicCheck
from dedup.kafka.record_batch import Columns, Header, Line, fill
from dedup.kafka.topic_admin import Group
from dedup.kafka.transactional_producer import Session
from dedup.kafka.wire import Position, TopicPartition
from dedup.quantities import counted
from dedup.settings import Settings
from dedup.topology.model import Topology, extractor_of
from dedup.worker.offsets import bounds_of, committed_position
from dedup.worker.record_collector import DETAIL, REASON, REPLAYED, SOURCE, TIMESTAMP, VERDICT
from dedup.worker.topics import Cluster

WAIT_MS: Final = 200
_MOST_UNKNOWN: Final = 10
Begin = Literal["last", "start"]
"""Where a replay without a position begins: after the last finished replay (`last`) or at the first record (`start`).
"""
_DEAD_HEADERS: Final = (REASON, DETAIL, SOURCE, TIMESTAMP)
_LATE_HEADERS: Final = (SOURCE, TIMESTAMP)
_AGAIN: Final = "the next replay tries it again"
_PLACE: Final = re.compile(rb"([A-Za-z0-9._-]+)/([0-9]{1,10})/[0-9]{1,19}")
_TIME: Final = re.compile(rb"-?[0-9]{1,19}")
_MOST_MS: Final = (1 << 63) - 1
"""The greatest timestamp of a record."""
_METADATA: Final = re.compile(r"left=(\d+\+\d+(?:,\d+\+\d+)*)")
MOST_METADATA_BYTES: Final = 3_900
"""The length at which no further records are added to an offset's metadata. By default, brokers accept 4,096 bytes
(`offset.metadata.max.bytes`).
"""
_SPLIT_BYTES: Final = 100
"""The number of bytes by which the metadata may exceed `MOST_METADATA_BYTES` while left records are read again. If a
span is only partly read again, the metadata may have to name it in two parts.
"""
Span = tuple[int, int]
"""The first offset of some records, and the offset after their last offset."""


def metadata_of(left: Iterable[Span]) -> str:
    """Return the metadata that names the left records by each span's distance from the previous one, and its length."""
    parts, reached = [], 0
    for first, after in left:
        parts.append(f"{first - reached}+{after - first}")
        reached = after
    return f"left={','.join(parts)}" if parts else ""


def left_in(metadata: str) -> list[Span]:
    """Return the spans that an offset's metadata names. An offset set by hand or by an older release has none."""
    found = _METADATA.fullmatch(metadata)
    left: list[Span] = []
    reached = 0
    for part in found[1].split(",") if found else ():
        distance, length = map(int, part.split("+"))
        left.append((reached + distance, reached + distance + length))
        reached += distance + length
    return left


def with_left(left: Sequence[Span], first: int, after: int) -> list[Span]:
    """Return the spans with another span at their end, which is merged with the last span if the two adjoin."""
    if left and left[-1][1] == first:
        return [*left[:-1], (left[-1][0], after)]
    return [*left, (first, after)]


@dataclass(slots=True)
class Replayed:
    """The result of a replay."""

    sent: int = 0
    left: list[str] = field(default_factory=list)
    """One sentence for each record that cannot be sent, with the record's position and the reason."""


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """Defines what to replay: dead letters to their source topics, or late records to the output."""

    topic: str
    output: str | None
    """The topic to which late records are sent, or None for a replay of dead letters."""
    limit: int | None
    begin: Begin | None = None
    """Where to begin if the broker has forgotten a position; None makes a forgotten position an error."""


def rows_in(spans: Sequence[Span], answer: Answer) -> Iterator[tuple[int, int, int]]:
    """Yield each row of a fetch that is in one of the spans, with the row's offset and the offset to read next.

    Only markers and aborted records are between two rows.
    """
    offsets, at = answer.columns.offsets, 0
    for row, offset in enumerate(offsets):
        while at < len(spans) and spans[at][1] <= offset:
            at += 1
        if at == len(spans):
            return
        if spans[at][0] <= offset:
            following = offsets[row + 1] if row + 1 < len(offsets) else answer.next_offset
            yield row, offset, min(following, spans[at][1])


class Unsent(NamedTuple):
    """The reason why a record is not sent."""

    why: str
    again: bool = False
    """True if the record could be sent later, so that the next replay tries it again."""


@dataclass(frozen=True, slots=True)
class Remaining:
    """The remaining work of a replay in a partition."""

    left: list[Span]
    """The records that this replay has read and left, and that the next replay tries again."""
    unread: list[Span]
    """The spans that are still to be read: first the records that earlier replays left, then everything from the
    position on.
    """

    @property
    def position(self) -> Position:
        """The position to commit, whose metadata names all left records."""
        return Position(self.unread[-1][0], metadata=metadata_of([*self.left, *self.unread[:-1]]))

    @property
    def fits(self) -> bool:
        """True if the broker accepts the position's metadata."""
        most = MOST_METADATA_BYTES + (_SPLIT_BYTES if len(self.unread) > 1 else 0)
        return len(self.position.metadata) <= most

    def after_reading(self, left: list[Span], next_offset: int) -> Remaining:
        """Return the remaining work after everything below ``next_offset`` has been read."""
        *earlier, (first, end) = self.unread
        spans = [(max(begun, next_offset), after) for begun, after in earlier if next_offset < after]
        return Remaining(left, [*spans, (max(first, min(next_offset, end)), end)])


class Chosen(NamedTuple):
    """The records of one fetch that are sent, with their targets, those that are left, and the remaining work."""

    lines: dict[TopicPartition, list[Line]]
    told: dict[int, str]
    """Maps the offset of each unsent record to the reason why it is not sent."""
    remaining: Remaining
    full: bool
    """True if the replay of the partition ends here, because the metadata cannot name more left records."""


@dataclass(slots=True)
class Replay:
    """Replays the dead-letter topic or the late topic, one partition after another."""

    topology: Topology
    settings: Settings
    cluster: Cluster
    wire: KafkaWire
    plan: ReplayPlan
    done: Replayed = field(init=False, default_factory=Replayed)
    refused: dict[TopicPartition, dict[int, str]] = field(init=False, default_factory=dict)
    """Maps each partition to a mapping from the offset of each refused record to the reason for the refusal."""
    single: set[TopicPartition] = field(init=False, default_factory=set)
    """The partitions whose records are sent in batches of one record."""
    told: dict[str, str] = field(init=False, default_factory=dict)
    """Maps the position of each unsent record to the reason, so that a repeated attempt reports no record twice."""

    async def run(self) -> Replayed:
        """Send the records that the plan's topic contains when the replay starts, up to the plan's limit.

        Raises StateIncompatible, before anything is sent, if the broker has forgotten a position and the plan does not
        specify where to begin. Raises SettingsError if the plan specifies where to begin but the broker still has all
        positions. Raises DedupError if another replay takes over.
        """
        topic = self.plan.topic
        sides = self.cluster.topics[topic].places
        known = [await self._known(side, stable=False) for side in sides]
        places = zip(sides, known, strict=True)
        # A replay mark without a position means that the broker has forgotten the position.
        forgotten = {side: mark.offset for side, (position, mark) in places if position is None and mark is not None}
        if forgotten and self.plan.begin is None:
            raise self._refusal(forgotten)
        if self.plan.begin is not None and not forgotten:
            why = f"no position in {topic} is forgotten, so the replay continues where it stopped; omit this option"
            raise SettingsError([Problem("--from", why)])
        for side in sides:
            end = (await bounds_of(self.wire, side)).end
            try:
                await self._insist(side, end)
            except CommitUnknown:
                raise
            except TaskMigrated as error:
                raise self._overtaken(side) from error
        self.done.left = [f"{place}: {why}" for place, why in self.told.items()]
        return self.done

    async def _known(self, side: TopicPartition, *, stable: bool) -> tuple[Position | None, Position | None]:
        """Return a partition's committed replay position and its replay mark."""
        position = await committed_position(self.wire, self.topology.replay_group, side, stable=stable)
        return position, await committed_position(self.wire, self.topology.replay_mark_group, side, stable=False)

    async def _set_mark(self, side: TopicPartition, position: Position) -> None:
        group = Group(self.wire, self.topology.replay_mark_group)
        await group.set_offsets({side: position.offset}, metadata=position.metadata, for_ever=True)

    def _overtaken(self, side: TopicPartition) -> DedupError:
        return DedupError(
            f"another `dedup replay` of {self.topology.name!r} has taken over {side}. This one has sent "
            f"{counted(self.done.sent, 'record')} and stopped; no record was sent twice. When the other one has "
            f"ended, run `dedup replay` again to send what remains."
        )

    def _refusal(self, forgotten: Mapping[TopicPartition, int]) -> StateIncompatible:
        places = ", ".join(f"{side} from offset {mark}" for side, mark in forgotten.items())
        where = "the output" if self.plan.output else "the source topics"
        return StateIncompatible(
            f"records of {self.plan.topic} were replayed before, but the replay position is forgotten: the broker "
            f"keeps offsets of the group {self.topology.replay_group!r} for offsets.retention.minutes (7 days by "
            f"default) after the last replay, unless somebody deletes them. Nothing was sent, because records could be "
            f"sent twice. To continue where the last finished replay ended ({places}), add `--from last`; records that "
            f"an interrupted replay sent after that have the header dedup-replayed in {where}. To send everything that "
            f"is still in {self.plan.topic} again, add `--from start`."
        )

    async def _begin(self, session: Session, side: TopicPartition, end: int) -> Remaining:
        """Commit the position and the replay mark, and return the replay's remaining work."""
        # The position is read in the new epoch, because an earlier replay may have been killed during a commit.
        position, mark = await self._known(side, stable=True)
        start = (await bounds_of(self.wire, side)).start
        if position is None and mark is not None:
            if self.plan.begin is None:
                raise self._refusal({side: mark.offset})
            position = mark if self.plan.begin == "last" else Position(start)
        first = start if position is None else position.offset
        earlier = [] if position is None else left_in(position.metadata)
        for begun, after in [*earlier, (first, start)]:
            if begun < min(after, start):
                self.told.setdefault(f"{side}/{begun} to {min(after, start) - 1}", "deleted by retention")
        first = max(first, start)
        # A recreated topic may end before the position.
        spans = [(max(begun, start), min(after, end)) for begun, after in earlier]
        remaining = Remaining([], [*(span for span in spans if span[0] < span[1]), (first, max(first, end))])
        # The position is committed first, because a mark without a position would mean that the position was forgotten.
        await session.commit({side: remaining.position})
        await self._set_mark(side, remaining.position)
        return remaining

    async def _insist(self, side: TopicPartition, end: int) -> None:
        unknown = 0
        while True:
            try:
                await self._partition(side, end)
            except CommitUnknown:
                # The next attempt reads the committed offset in a new epoch, and thus learns the transaction's outcome.
                unknown += 1
                if unknown > _MOST_UNKNOWN:
                    raise
            except RecordRefused as refused:
                named = _why_refused(refused)
                self.refused.setdefault(side, {}).update(named)
                if not named:
                    # If a batch is too large, the broker does not name its records (KIP-467), so from now on, each
                    # batch contains one record.
                    self.single.add(side)
            else:
                return

    async def _partition(self, side: TopicPartition, end: int) -> None:
        kind = "late" if self.plan.output else "dead-letter"
        session = Session(
            self.wire,
            f"{self.topology.replay_group}.{kind}.{side.partition}",
            self.topology.replay_group,
            timeout_ms=self.settings.transaction_timeout_ms,
        )
        await session.open()
        # The position is always committed, so that `offsets.retention.minutes` begins again.
        remaining = await self._begin(session, side, end)
        fetcher = FeedFetcher(self.wire, await TopicCheck.of(self.wire, side.topic), wait_ms=WAIT_MS)
        try:
            await self._read(fetcher, session, side, remaining)
            reached, _ = await self._known(side, stable=True)
            await self._set_mark(side, reached or Position(0))
        finally:
            fetcher.forget()
            await session.drop()

    def _wants_more(self, remaining: Remaining) -> bool:
        first, after = remaining.unread[0]
        return first < after and (self.plan.limit is None or self.done.sent < self.plan.limit)

    async def _read(self, fetcher: FeedFetcher, session: Session, side: TopicPartition, remaining: Remaining) -> None:
        """Read and send the remaining records, up to the plan's limit or until the metadata is full."""
        at = -1
        while self._wants_more(remaining):
            if at != remaining.unread[0][0]:
                at = remaining.unread[0][0]
                fetcher.begin(side, at)
            for answer in await fetcher.poll([side]):
                found = self._chosen(side, answer, remaining)
                await self._send(session, side, found)
                if found.full:
                    return
                remaining, at = found.remaining, answer.next_offset
                if at != remaining.unread[0][0] or not self._wants_more(remaining):
                    break

    async def _send(self, session: Session, side: TopicPartition, found: Chosen) -> None:
        """Send the records of one fetch, and commit the transaction."""
        single = 1 if side in self.single else None
        compression = self.settings.topics.compression
        for target, part in sorted(found.lines.items()):
            session.add(fill(target, part, compression=compression, most_rows=single))
        # The position is committed even if no record was sent, because the metadata then names more left records.
        await session.commit({side: found.remaining.position})
        self.done.sent += sum(map(len, found.lines.values()))
        self.told |= {f"{side}/{offset}": why for offset, why in found.told.items()}

    def _chosen(self, side: TopicPartition, answer: Answer, remaining: Remaining) -> Chosen:
        """Choose the records of a fetch that are sent."""
        most = None if self.plan.limit is None else self.plan.limit - self.done.sent
        lines: dict[TopicPartition, list[Line]] = {}
        told: dict[int, str] = {}
        left, count = remaining.left, 0
        for row, offset, following in rows_in(remaining.unread, answer):
            if count == most:
                return Chosen(lines, told, remaining.after_reading(left, offset), full=False)
            found = self._line(side, answer.columns, row)
            if not isinstance(found, Unsent):
                target, line = found
                lines.setdefault(target, []).append(line)
                count += 1
                continue
            if found.again:
                more = with_left(left, offset, following)
                if not remaining.after_reading(more, following).fits:
                    told[offset] = self._full()
                    return Chosen(lines, told, remaining.after_reading(left, offset), full=True)
                left = more
            told[offset] = found.why
        return Chosen(lines, told, remaining.after_reading(left, answer.next_offset), full=False)

    def _full(self) -> str:
        return (
            "this record and the later ones of this partition were not read, because the replay's position has no "
            "room to name more left records. Remove the cause of the left records, then run `dedup replay` again. To "
            f"give up the left records instead, set the offset of the group {self.topology.replay_group!r} with "
            "`kafka-consumer-groups.sh --reset-offsets`"
        )

    def _line(self, side: TopicPartition, columns: Columns, row: int) -> tuple[TopicPartition, Line] | Unsent:
        """Return the target partition and the record to send, or the reason why the record cannot be sent."""
        names = _LATE_HEADERS if self.plan.output else _DEAD_HEADERS
        headers = columns.headers[row]
        own, ours = headers[: -len(names)], headers[-len(names) :]
        if tuple(name for name, _ in ours) != names:
            return Unsent("its last headers are not those that this topology adds, or its value did not fit")
        refused = self.refused.get(side, {}).get(columns.offsets[row])
        if refused is not None:
            return Unsent(f"{refused}; {_AGAIN}", again=True)
        kept = {name: value or b"" for name, value in ours}
        origin = _origin(kept[SOURCE], kept[TIMESTAMP])
        if origin is None:
            return Unsent(f"its headers {SOURCE} and {TIMESTAMP} are damaged")
        source, timestamp_ms = origin
        if source.topic not in self.topology.source.topics:
            return Unsent(f"it came from {source.topic}, which is no longer a source topic")
        target = self._output_of(self.plan.output, columns, row, source) if self.plan.output else source
        there = self.cluster.topics[target.topic].partitions
        if target.partition >= there:
            why = f"{target} does not exist, because {target.topic} has only {counted(there, 'partition')}; {_AGAIN}"
            return Unsent(why, again=True)
        added: list[Header] = [(REPLAYED, kept[SOURCE])]
        if self.plan.output:
            added.insert(0, (VERDICT, b"late"))  # both headers are last, where `dedup verify` expects them
        elif any(name == REPLAYED for name, _ in own):
            added = []  # the header keeps the record's first position
        return target, (columns.offsets[row], timestamp_ms, columns.keys[row], columns.values[row], [*own, *added])

    def _output_of(self, output: str, columns: Columns, row: int, source: TopicPartition) -> TopicPartition:
        """Return the output partition that a worker would choose for a record."""
        if self.topology.direct:
            return TopicPartition(output, source.partition)
        key = columns.keys[row]
        if key is None:
            extract = extractor_of(replace(self.topology, event_time=RecordTime()), fingerprint=False)
            key = extract([key], [columns.values[row]], [columns.headers[row]], [0]).ids[0] or b""
        count = self.cluster.topics[output].partitions
        return TopicPartition(output, partitions([key], count)[0])


def _origin(source: bytes, timestamp: bytes) -> tuple[TopicPartition, int] | None:
    """Return the partition and the timestamp in a record's headers, or None if dedup cannot have written the headers.

    Anyone who may write to the topic can write such headers, so any bytes must be expected here.
    """
    place = _PLACE.fullmatch(source)
    if place is None or _TIME.fullmatch(timestamp) is None or abs(int(timestamp)) > _MOST_MS:
        return None
    return TopicPartition(place[1].decode(), int(place[2])), int(timestamp)


def _why_refused(refused: RecordRefused) -> dict[int, str]:
    """Map each record that a transaction's refusals name to the reason why the target topic refuses the record."""
    named: dict[int, str] = {}
    for each in (refused, *refused.also):
        unsaid = "larger than its max.message.bytes" if each.too_large else ""
        for row, why in each.named(unsaid).items():
            named[row] = "its target topic refuses it" + (f" ({why})" if why else "")
    return named


def replay_plan(topology: Topology, *, late: bool, limit: int | None, begin: Begin | None = None) -> ReplayPlan | str:
    """Return the plan of a replay, or a sentence that explains why this topology has nothing to replay."""
    if not late:
        return ReplayPlan(topology.dead_letter, None, limit, begin)
    topic = getattr(topology.late, "topic", None)
    if topic is None:
        return "this topology has no topic for late records"
    if topology.then is not None:
        return "this topology has a flow, which a replay of late records does not run; read its late topic yourself"
    if topology.output is None:
        return "this topology only observes, so it has no output for late records"
    return ReplayPlan(topic, topology.output.topic, limit, begin)
