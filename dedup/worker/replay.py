"""`dedup replay`: dead letters through again, or late records forwarded, exactly once over any crash.

Read, write and the offset of what was read are one transaction under an id of its own. A dead letter goes back to the
source partition it came from, as it was there, and is judged like any record; the header `dedup-replayed` keeps its
first position. A late record would be late again, so it goes to the output instead, marked as outside the guarantee.
What can not be sent (a digest in place of a value, a timestamp the source refuses) is named, and stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from dedup.core.event_time import RecordTime
from dedup.core.extract import compile_extractor
from dedup.core.murmur2 import partitions
from dedup.errors import CommitUnknown, RecordRefused
from dedup.session.client import KafkaWire
from dedup.session.fetch import Answer, Columns, FeedFetcher
from dedup.session.record_batch import Header, Line, fill
from dedup.session.transaction import Session
from dedup.session.wire import TopicPartition
from dedup.worker.publish import DETAIL, REASON, REPLAYED, SOURCE, TIMESTAMP, VERDICT
from dedup.worker.starting import bounds_of, committed_offset

if TYPE_CHECKING:
    from dedup.settings import Settings
    from dedup.topology.model import Topology
    from dedup.worker.plan import Cluster

DEADLINE_MS: Final = 20_000
WAIT_MS: Final = 200
MOST_UNKNOWN: Final = 10
DEAD_HEADERS: Final = (REASON, DETAIL, SOURCE, TIMESTAMP)
LATE_HEADERS: Final = (SOURCE, TIMESTAMP)


@dataclass(slots=True)
class Replayed:
    """What a replay did."""

    sent: int = 0
    left: list[str] = field(default_factory=list)
    """Records that can not be sent: where they are, and why."""


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """What is replayed: dead letters to where they came from, or late records to the output."""

    topic: str
    group: str
    headers: tuple[str, ...]
    forward: bool
    output: str
    """Where late records are forwarded to; empty for dead letters."""
    limit: int | None


class Replay:
    """Replays one side topic, partition by partition."""

    def __init__(
        self, topology: Topology, settings: Settings, cluster: Cluster, wire: KafkaWire, plan: ReplayPlan
    ) -> None:
        self._topology: Final = topology
        self._settings: Final = settings
        self._cluster: Final = cluster
        self._wire: Final = wire
        self._plan: Final = plan
        self.done: Final = Replayed()
        self._refused: dict[TopicPartition, dict[int, str]] = {}

    async def run(self, tell: Callable[[Replayed], None]) -> Replayed:
        """Send everything there is at the start; ``tell`` is called after each commit."""
        for partition in range(self._cluster.topics[self._plan.topic].partitions):
            side = TopicPartition(self._plan.topic, partition)
            end = (await bounds_of(self._wire, side)).end
            await self._insist(side, end, tell)
        return self.done

    async def _insist(self, side: TopicPartition, end: int, tell: Callable[[Replayed], None]) -> None:
        unknown = 0
        while True:
            try:
                await self._partition(side, end, tell)
            except CommitUnknown:
                # A new epoch and the committed offset tell what happened.
                unknown += 1
                if unknown > MOST_UNKNOWN:
                    raise
            except RecordRefused as refused:
                # From now on one record a batch, so that the broker's answer names the next one.
                found = self._refused.setdefault(side, {})
                if len(refused.rows) == 1:
                    found[refused.rows[0]] = "the topic it goes to refuses it"
            else:
                return

    async def _partition(self, side: TopicPartition, end: int, tell: Callable[[Replayed], None]) -> None:
        kind = "late" if self._plan.forward else "dead-letter"
        session = Session(
            self._wire,
            f"{self._plan.group}.{kind}.{side.partition}",
            self._plan.group,
            timeout_ms=self._settings.transaction_timeout_ms,
            deadline_ms=DEADLINE_MS,
        )
        await session.open()
        # Read after the epoch has begun: a replay that was killed may have had a commit on its way.
        position = await committed_offset(self._wire, self._plan.group, side)
        start = (await bounds_of(self._wire, side)).start
        gone = f"{side.topic}/{side.partition}/{position} to {start - 1}: deleted by retention"
        if position is not None and position < start and gone not in self.done.left:
            self.done.left.append(gone)
        begun = position = max(position or 0, start)
        sent = self.done.sent
        fetcher = FeedFetcher(self._wire, wait_ms=WAIT_MS)
        fetcher.begin(side, position)
        try:
            while position < end and not self._full():
                for answer in await fetcher.poll([side]):
                    position = await self._send(session, side, answer, end)
                    tell(self.done)
            if self.done.sent == sent:
                # Written once more, or the broker forgets it (offsets.retention.minutes after the last commit).
                await session.commit({side: begun})
        finally:
            fetcher.forget()
            await session.drop()

    def _full(self) -> bool:
        return self._plan.limit is not None and self.done.sent >= self._plan.limit

    async def _send(self, session: Session, side: TopicPartition, answer: Answer, end: int) -> int:
        """Send one answer's records and commit; return the offset to go on from."""
        columns = answer.columns
        most = None if self._plan.limit is None else self._plan.limit - self.done.sent
        lines: dict[TopicPartition, list[Line]] = {}
        left: list[str] = []
        count, next_offset = 0, answer.next_offset
        for row, offset in enumerate(columns.offsets):
            if offset >= end or count == most:
                next_offset = offset
                break
            found = self._line(side, columns, row)
            if isinstance(found, str):
                left.append(f"{side.topic}/{side.partition}/{offset}: {found}")
            else:
                target, line = found
                lines.setdefault(target, []).append(line)
                count += 1
        if lines:
            # After a refusal one record a batch: then the broker's answer names it.
            single = 1 if side in self._refused else None
            compression = self._settings.topics.compression
            for target, part in sorted(lines.items()):
                session.add(fill(target, part, compression=compression, most_rows=single))
            await session.commit({side: next_offset})
        self.done.sent += count
        self.done.left += left
        return next_offset

    def _line(self, side: TopicPartition, columns: Columns, row: int) -> tuple[TopicPartition, Line] | str:
        """Return where a record goes and what is sent; a sentence where it can not go anywhere."""
        names = self._plan.headers
        headers = columns.headers[row]
        own, ours = headers[: -len(names)], headers[-len(names) :]
        if tuple(name for name, _ in ours) != names:
            return "its headers are not those of a record this topology put there, or its value did not fit"
        refused = self._refused.get(side, {}).get(columns.offsets[row])
        if refused is not None:
            return refused
        kept = {name: value or b"" for name, value in ours}
        topic, partition, _ = kept[SOURCE].decode().rsplit("/", 2)
        if topic not in self._topology.source.topics:
            return f"it came from {topic}, which is no source topic any more"
        source = TopicPartition(topic, int(partition))
        target = self._output_of(columns, row, source) if self._plan.forward else source
        added: list[Header] = [(REPLAYED, kept[SOURCE])]
        if self._plan.forward:
            added.insert(0, (VERDICT, b"late"))  # both last: so `dedup verify` knows the record
        elif any(name == REPLAYED for name, _ in own):
            added = []  # it keeps the place where it first was
        timestamp_ms = int(kept[TIMESTAMP])
        return target, (columns.offsets[row], timestamp_ms, columns.keys[row], columns.values[row], [*own, *added])

    def _output_of(self, columns: Columns, row: int, source: TopicPartition) -> TopicPartition:
        """Return the output partition, chosen as a worker chooses it."""
        output = self._plan.output
        if self._topology.direct:
            return TopicPartition(output, source.partition)
        key = columns.keys[row]
        if key is None:
            topology = self._topology
            extract = compile_extractor(
                topology.tracking_id, RecordTime(), fmt=topology.source.format, fingerprint=False
            )
            key = extract([key], [columns.values[row]], [columns.headers[row]], [0]).ids[0] or b""
        count = self._cluster.topics[output].partitions
        return TopicPartition(output, partitions([key], count)[0])


def replay_plan(topology: Topology, *, late: bool, limit: int | None) -> ReplayPlan | str:
    """Return what to replay; a sentence where this topology has nothing of the kind."""
    group = f"{topology.name}.replay"
    if not late:
        return ReplayPlan(topology.dead_letter, group, DEAD_HEADERS, forward=False, output="", limit=limit)
    topic = getattr(topology.late, "topic", None)
    if topic is None:
        return "late records of this topology have no topic of their own"
    if topology.output is None:
        return "this topology only observes: it has no output to forward late records to"
    return ReplayPlan(topic, group, LATE_HEADERS, forward=True, output=topology.output.topic, limit=limit)
