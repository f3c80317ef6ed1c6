"""Implements `dedup replay`, which sends dead letters to their source, or late records to the output, exactly once.

A dead letter is sent to its source partition, where it is judged like any other record. If a late record were sent back
to its source, it would only be late again, so it is sent to the output instead. The header `dedup-verdict` marks such a
record, which dedup's guarantee does not cover. A record that cannot be sent, for example because only its digest was
kept, is reported and stays in its topic.

The sent records and the new position, which is an offset of the group `NAME.replay`, are committed in one transaction.
The broker forgets the replay position `offsets.retention.minutes` after the last replay, and a transactional commit
cannot prevent that. Therefore, each replay also commits a replay mark, which does not expire, to the group
`NAME.replay-mark`. The replay mark's commit is not transactional. If there is a replay mark but no position, nothing is
sent until the user says where to begin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from dedup.core.event_time import RecordTime
from dedup.core.partitioner import partitions
from dedup.errors import CommitUnknown, Problem, RecordRefused, SettingsError, StateIncompatible
from dedup.kafka.client import KafkaWire
from dedup.kafka.consumer import Answer, FeedFetcher, TopicCheck
from dedup.kafka.record_batch import Columns, Header, Line, fill
from dedup.kafka.topic_admin import Group
from dedup.kafka.transactional_producer import Session
from dedup.kafka.wire import Position, TopicPartition
from dedup.settings import Settings
from dedup.topology.model import Topology, extractor_of
from dedup.worker.offsets import bounds_of, committed_offset
from dedup.worker.record_collector import DETAIL, REASON, REPLAYED, SOURCE, TIMESTAMP, VERDICT
from dedup.worker.topics import Cluster

WAIT_MS: Final = 200
_MOST_UNKNOWN: Final = 10
Begin = Literal["last", "start"]
"""Where a replay without a position begins: after the last finished replay (`last`) or at the first record (`start`).
"""
_DEAD_HEADERS: Final = (REASON, DETAIL, SOURCE, TIMESTAMP)
_LATE_HEADERS: Final = (SOURCE, TIMESTAMP)


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
    """The topic that late records are sent to, or None for a replay of dead letters."""
    limit: int | None
    begin: Begin | None = None
    """Where to begin if the broker has forgotten a position; None makes a forgotten position an error."""


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

    async def run(self) -> Replayed:
        """Send the records that the plan's topic contains when the replay starts, up to the plan's limit.

        Raises StateIncompatible, before anything is sent, if the broker has forgotten a position and the plan does not
        say where to begin. Raises SettingsError if the plan says where to begin although the broker still has all
        positions.
        """
        topic = self.plan.topic
        sides = self.cluster.topics[topic].places
        known = [await self._known(side, stable=False) for side in sides]
        places = zip(sides, known, strict=True)
        # A replay mark without a position means that the broker has forgotten the position.
        forgotten = {side: mark for side, (position, mark) in places if position is None and mark is not None}
        if forgotten and self.plan.begin is None:
            raise self._refusal(forgotten)
        if self.plan.begin is not None and not forgotten:
            why = f"no position in {topic} is forgotten, so the replay continues where it stopped; omit this option"
            raise SettingsError([Problem("--from", why)])
        for side in sides:
            end = (await bounds_of(self.wire, side)).end
            await self._insist(side, end)
        return self.done

    async def _known(self, side: TopicPartition, *, stable: bool) -> tuple[int | None, int | None]:
        """Return a partition's committed replay position and its replay mark."""
        position = await committed_offset(self.wire, self.topology.replay_group, side, stable=stable)
        return position, await committed_offset(self.wire, self.topology.replay_mark_group, side, stable=False)

    async def _set_mark(self, side: TopicPartition, offset: int) -> None:
        await Group(self.wire, self.topology.replay_mark_group).set_offsets({side: offset}, for_ever=True)

    def _refusal(self, forgotten: Mapping[TopicPartition, int | None]) -> StateIncompatible:
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

    async def _begin(self, session: Session, side: TopicPartition) -> int:
        """Commit the position and the replay mark, and return the offset at which the replay begins."""
        # The position is read in the new epoch, because an earlier replay may have been killed during a commit.
        position, mark = await self._known(side, stable=True)
        start = (await bounds_of(self.wire, side)).start
        if position is None and mark is not None:
            if self.plan.begin is None:
                raise self._refusal({side: mark})
            position = mark if self.plan.begin == "last" else start
        gone = f"{side}/{position} to {start - 1}: deleted by retention"
        if position is not None and position < start and gone not in self.done.left:
            self.done.left.append(gone)
        begun = max(position or 0, start)
        # The position is committed first, because a mark without a position means that the position was forgotten.
        await session.commit({side: Position(begun)})
        await self._set_mark(side, begun)
        return begun

    async def _insist(self, side: TopicPartition, end: int) -> None:
        unknown = 0
        while True:
            try:
                await self._partition(side, end)
            except CommitUnknown:
                # The next attempt reads the committed offset in a new epoch, and thus learns the outcome of the
                # transaction.
                unknown += 1
                if unknown > _MOST_UNKNOWN:
                    raise
            except RecordRefused as refused:
                # From now on, each batch contains one record, so that the response identifies a refused record.
                found = self.refused.setdefault(side, {})
                if len(refused.rows) == 1:
                    found[refused.rows[0]] = "its target topic refuses it"
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
        # The position is always committed, so that `offsets.retention.minutes` is counted from now on.
        position = await self._begin(session, side)
        fetcher = FeedFetcher(self.wire, await TopicCheck.of(self.wire, side.topic), wait_ms=WAIT_MS)
        fetcher.begin(side, position)
        try:
            while position < end and (self.plan.limit is None or self.done.sent < self.plan.limit):
                for answer in await fetcher.poll([side]):
                    position = await self._send(session, side, answer, end)
            # The mark is not set past the committed position, so that the next replay reports unsendable records again.
            reached, _ = await self._known(side, stable=True)
            await self._set_mark(side, reached or 0)
        finally:
            fetcher.forget()
            await session.drop()

    async def _send(self, session: Session, side: TopicPartition, answer: Answer, end: int) -> int:
        """Send the records of one fetch, commit the transaction, and return the next offset."""
        columns = answer.columns
        most = None if self.plan.limit is None else self.plan.limit - self.done.sent
        lines: dict[TopicPartition, list[Line]] = {}
        left: list[str] = []
        count, next_offset = 0, answer.next_offset
        for row, offset in enumerate(columns.offsets):
            if offset >= end or count == most:
                next_offset = offset
                break
            found = self._line(side, columns, row)
            if isinstance(found, str):
                left.append(f"{side}/{offset}: {found}")
            else:
                target, line = found
                lines.setdefault(target, []).append(line)
                count += 1
        if lines:
            single = 1 if side in self.refused else None
            compression = self.settings.topics.compression
            for target, part in sorted(lines.items()):
                session.add(fill(target, part, compression=compression, most_rows=single))
            await session.commit({side: Position(next_offset)})
        self.done.sent += count
        self.done.left += left
        return next_offset

    def _line(self, side: TopicPartition, columns: Columns, row: int) -> tuple[TopicPartition, Line] | str:
        """Return the target partition and the record to send, or the reason why the record cannot be sent."""
        names = _LATE_HEADERS if self.plan.output else _DEAD_HEADERS
        headers = columns.headers[row]
        own, ours = headers[: -len(names)], headers[-len(names) :]
        if tuple(name for name, _ in ours) != names:
            return "its last headers are not those that this topology adds, or its value did not fit"
        refused = self.refused.get(side, {}).get(columns.offsets[row])
        if refused is not None:
            return refused
        kept = {name: value or b"" for name, value in ours}
        topic, partition, _ = kept[SOURCE].decode().rsplit("/", 2)
        if topic not in self.topology.source.topics:
            return f"it came from {topic}, which is no longer a source topic"
        source = TopicPartition(topic, int(partition))
        target = self._output_of(self.plan.output, columns, row, source) if self.plan.output else source
        added: list[Header] = [(REPLAYED, kept[SOURCE])]
        if self.plan.output:
            added.insert(0, (VERDICT, b"late"))  # both headers are last, where `dedup verify` expects them
        elif any(name == REPLAYED for name, _ in own):
            added = []  # the header keeps the record's first position
        timestamp_ms = int(kept[TIMESTAMP])
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


def replay_plan(topology: Topology, *, late: bool, limit: int | None, begin: Begin | None = None) -> ReplayPlan | str:
    """Return the plan of a replay, or a sentence that says why this topology has nothing to replay."""
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
