"""Manages a topology's layout: the number of partitions per transaction, and the initial partition counts of its
topics.

Workers with different layouts use different transactional IDs, which do not fence each other. Therefore, the cluster
stores the layout as a record in the topic ``<name>.layout``. Only the transactional ID ``<name>.layout`` writes to this
topic. A topology without a layout topic has the default layout: one partition per transaction.

A layout change first writes a layout with `changing_to`, then fences every transactional ID of the old and the new
layout, and finally writes the new layout. A task group reads the layout *after* its own InitProducerId. Therefore,
either the group sees the change and stops, or the change fences the group's transactional ID later.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Final

from dedup import crashpoints
from dedup.errors import BrokerUnavailable, CommitUnknown, DedupError, StateIncompatible, TaskMigrated
from dedup.kafka.client import KafkaWire
from dedup.kafka.record_batch import OWN_ROW, Line, fill
from dedup.kafka.requests import UNKNOWN_TOPIC
from dedup.kafka.topic_admin import Admin, Group, Topic
from dedup.kafka.transactional_producer import Session
from dedup.kafka.wire import UNAUTHORIZED, TopicNow, TopicPartition, Wire
from dedup.settings import Settings
from dedup.topology.model import Topology, auto_group_size
from dedup.worker.offsets import PAUSE_MS, answered, at_once, bounds_of, progressed
from dedup.worker.task import SteadyClock
from dedup.worker.topics import Cluster, known_names, missing_topics

_KEY: Final = b"layout"
_VERSION: Final = 1
_FETCH_BYTES: Final = 1 << 16
_MOST_ATTEMPTS: Final = 50
_LOOK_AGAIN_MS: Final = 200
_PATIENCE_S: Final = 10.0
"""The time in seconds that a starting worker waits for another process's change before it writes the layout itself."""
_PATIENCE_PER_PARTITION_S: Final = 0.02
"""The additional time for each partition. It is needed because a change that another change interrupts starts over."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Describes how the partitions of a topology are grouped into transactions."""

    partitions: int = 1
    """The number of partitions per transaction."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Maps each topic with tasks to its partition count when the state was created; empty if no layout was written."""
    changing_to: int | None = None
    """The next value of ``partitions`` while a change is under way."""


def encode_layout(layout: Layout) -> bytes:
    """Encode a layout as a record value."""
    return json.dumps({"version": _VERSION, **asdict(layout)}, sort_keys=True, separators=(",", ":")).encode()


def decode_layout(value: bytes, topic: str) -> Layout:
    """Decode a layout from a record value. Raises StateIncompatible for a value that this release cannot read."""
    try:
        fields = json.loads(value)
        if fields.pop("version") != _VERSION:
            raise ValueError(f"version is not {_VERSION}")
        return Layout(**fields)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StateIncompatible(
            f"topic {topic!r} holds a layout that this release cannot read ({error!r}). Nothing was judged. Run the "
            "release that wrote it."
        ) from error


async def read_layout(wire: Wire, topology: Topology) -> Layout:
    """Return the newest committed layout, or the default layout if none was written.

    Raises StateIncompatible if this release cannot read the layout, or BrokerUnavailable if the broker denies access.
    """
    topic = topology.layout_topic
    while True:
        now = (await answered(wire, lambda: wire.topics((topic,))))[topic]
        if isinstance(now, TopicNow):
            break
        if now == UNKNOWN_TOPIC:
            return Layout()
        if now == UNAUTHORIZED:
            raise BrokerUnavailable(
                f"this principal may not describe topic {topic!r}, which says how many partitions share a transaction. "
                "Grant what `dedup apply --acls` lists."
            )
        await wire.pause(PAUSE_MS)
    place = TopicPartition(topic, 0)
    bounds = await bounds_of(wire, place)
    position, found = bounds.start, Layout()
    while position < bounds.end:
        at = position
        fetched = await answered(wire, lambda: wire.fetch(place, at, max_bytes=_FETCH_BYTES, wait_ms=PAUSE_MS))  # noqa: B023  # the lambda is awaited here
        for value in fetched.values:
            found = decode_layout(value or b"", topic)
        if fetched.next_offset <= position:
            break  # the transaction of a change is open, so the change has not begun
        position = fetched.next_offset
    return found


async def refuse_other_layout(wire: Wire, topology: Topology, cluster: Cluster) -> Layout:
    """Return the layout. Raises StateIncompatible if a change is under way or the layout differs from this process's
    layout.

    Call `refuse_other_layout` after InitProducerId.
    """
    found, wanted = await read_layout(wire, topology), topology.group_size
    if found.changing_to is not None:
        raise StateIncompatible(
            f"the layout of {topology.name!r} is being changed from {found.partitions} to {found.changing_to} "
            "partitions in a transaction, or a change was interrupted. Nothing was judged. Wait for `dedup layout "
            "--apply`, or run it again to finish the change."
        )
    if found.partitions != wanted:
        raise StateIncompatible(
            f"the tasks of {topology.name!r} commit {found.partitions} partitions in a transaction, but "
            f"transactions.partitions is {wanted}. Nothing was judged. Set it to {found.partitions}, or stop all "
            "workers and run `dedup layout --apply`."
        )
    ours = {name: cluster.topics[name].partitions for name in counts_of(topology, cluster)}
    if found.counts and not _fits(found.counts, ours, topology, cluster):
        raise StateIncompatible(
            f"the layout of {topology.name!r} was written for topics with these numbers of partitions: "
            f"{dict(found.counts)}. They are {ours} now. Nothing was judged; `dedup reset` starts over."
        )
    return found


def _fits(counts: Mapping[str, int], ours: Mapping[str, int], topology: Topology, cluster: Cluster) -> bool:
    """Return whether a layout with ``counts`` fits topics whose partition counts are ``ours``."""
    if cluster.begun_with and cluster.begun_with != counts:
        return False  # the layout was rewritten after this process started
    grown = () if topology.direct else topology.source.topics
    same = all(count == ours.get(name) or (name in grown and count < ours[name]) for name, count in counts.items())
    return same and counts.keys() == ours.keys()


async def begun(topology: Topology, cluster: Cluster, wire: Wire) -> Cluster:
    """Return a copy of ``cluster`` with the partition counts that the layout recorded when the state was created."""
    return replace(cluster, begun_with=(await read_layout(wire, topology)).counts)


async def with_layout(topology: Topology, cluster: Cluster, wire: Wire, *, fresh: bool) -> Topology:
    """Return the topology with `auto` replaced by the number of partitions per transaction.

    The number comes from the layout in the cluster. If the topology is new (``fresh`` is True) and has no layout yet,
    the number is derived from the partition counts.
    """
    if topology.transactions.partitions != "auto":
        return topology
    found = await read_layout(wire, topology)
    if found.counts or not fresh:
        # If another worker of a new fleet is writing the layout, `establish` waits for that worker.
        return topology.grouped_by(found.changing_to or found.partitions)
    return topology.grouped_by(auto_group_size(max(counts_of(topology, cluster).values())))


async def alone(topology: Topology, cluster: Cluster, wire: Wire, command: str) -> Topology:
    """Return the topology for a command that commits each partition in a separate transaction.

    Raises StateIncompatible if several partitions share a transaction, or if partitions were added to a source topic,
    because only workers read added partitions.
    """
    found = await with_layout(topology, cluster, wire, fresh=False)
    if found.group_size > 1:
        raise StateIncompatible(
            f"`{command}` commits each partition in a transaction of its own, but {found.group_size} partitions of "
            f"{topology.name!r} share one. Nothing was changed. Set transactions.partitions to 1, and run `dedup "
            "layout --apply` if workers have run with another value."
        )
    layout = await refuse_other_layout(wire, found, cluster)
    cluster = replace(cluster, begun_with=layout.counts)
    added = [place for place in cluster.places(topology.source.topics) if cluster.is_new(place)]
    if added:
        raise StateIncompatible(
            f"{', '.join(map(str, added))} did not exist when the state of {topology.name!r} began. Nothing was "
            f"changed. `{command}` does not read partitions that were added later; `dedup run` does."
        )
    return found


def counts_of(topology: Topology, cluster: Cluster) -> dict[str, int]:
    """Return the partition count of each topic that has tasks."""
    return cluster.source_partitions(topology)


def transactional_ids(topology: Topology, cluster: Cluster, size: int) -> list[str]:
    """Return all transactional IDs of a topology's tasks if ``size`` partitions share a transaction.

    Topics that do not exist are ignored.
    """
    feeding = [name for name in topology.feeding_topics if name in cluster.topics]
    ids = [topology.transactional_id("dedup", place.partition, size=size) for place in cluster.places(feeding)]
    if not topology.direct:
        ids += [
            topology.transactional_id("repartition", place.partition, place.topic, size=size)
            for place in cluster.places(topology.source.topics)
        ]
    return list(dict.fromkeys(ids))


@dataclass(frozen=True, slots=True)
class LayoutChange:
    """Writes layouts. To finish an interrupted change of the layout, call `run` again."""

    topology: Topology
    cluster: Cluster
    wire: KafkaWire
    timeout_ms: int

    async def establish(self) -> None:
        """Write a layout if the topology has none and no other worker of the fleet is writing one.

        An existing layout with another number of partitions per transaction is left unchanged.
        """
        wanted, waited_s = self.topology.group_size, 0.0
        patience_s = _PATIENCE_S + _PATIENCE_PER_PARTITION_S * sum(counts_of(self.topology, self.cluster).values())
        while self.topology.has_layout(wanted):
            found = await read_layout(self.wire, self.topology)
            if found.counts and found.changing_to != wanted:
                return  # if this worker needs another layout, `refuse_other_layout` reports it
            if not found.counts or waited_s >= patience_s:
                with contextlib.suppress(TaskMigrated, CommitUnknown):
                    await self.run(wanted, unless_there=True)
                    return
            await self.wire.pause(_LOOK_AGAIN_MS)
            waited_s += _LOOK_AGAIN_MS / 1000
            progressed()

    async def run(self, partitions: int, *, anew: bool = False, unless_there: bool = False) -> None:
        """Put ``partitions`` partitions into each transaction; afterward, no worker with the old layout can commit.

        If ``anew`` is True, the state is new, so the layout records the current partition counts. If ``unless_there``
        is True and another process has written a layout, the function changes nothing. Raises TaskMigrated if another
        process is also changing the layout, or CommitUnknown if the outcome of a transaction is unknown.
        """
        session = self._session(self.topology.layout_id)
        await session.open()
        # Other writers are fenced now, so ``before`` is the newest layout until the next writer opens its session.
        before = await read_layout(self.wire, self.topology)
        if unless_there and before.counts and before.changing_to is None:
            return
        counts = counts_of(self.topology, self.cluster) if anew or not before.counts else before.counts
        await self._write(session, Layout(before.partitions, counts, partitions))
        crashpoints.reached("after_changing")
        # A worker may ask any broker for the layout topic. If that broker does not know the topic yet, the worker
        # assumes that no layout was written.
        while not await self.wire.known_everywhere(self.topology.layout_topic):
            await self.wire.pause(PAUSE_MS)
        await self.fence(before, partitions)
        await self._write(session, Layout(partitions, counts))

    async def fence(self, layout: Layout, *sizes: int) -> None:
        """Fence all owners that use ``layout`` or a group size in ``sizes``, and end their transactions."""

        async def fence(transactional_id: str) -> None:
            await self._session(transactional_id).open()
            crashpoints.reached("after_fence")

        for size in sorted({layout.partitions, layout.changing_to or layout.partitions, *sizes}):
            await at_once(fence, transactional_ids(self.topology, self.cluster, size))

    def _session(self, transactional_id: str) -> Session:
        return Session(self.wire, transactional_id, None, timeout_ms=self.timeout_ms)

    async def _write(self, session: Session, layout: Layout) -> None:
        """Write a layout, and wait until readers can no longer get an older layout.

        A broker responds to EndTxn before it writes the transaction markers, and readers get the previous layout until
        the markers are written. Without the wait, a worker that begins a new epoch in the meantime would read the
        previous layout and continue with it.
        """
        line: Line = (OWN_ROW, SteadyClock().now_ms(), _KEY, encode_layout(layout), [])
        session.add(fill(TopicPartition(self.topology.layout_topic, 0), [line], compression="none"))
        await session.commit({})
        for _ in range(_MOST_ATTEMPTS):
            if await read_layout(self.wire, self.topology) == layout:
                return
            await self.wire.pause(PAUSE_MS)
        raise CommitUnknown(f"topic {self.topology.layout_topic!r} does not show the layout that was written to it.")


def _refuse_absent(topology: Topology, have: Mapping[str, Topic]) -> None:
    absent = [name for name in (*topology.source.topics, *topology.feeding_topics) if name not in have]
    if absent:
        raise StateIncompatible(
            f"topic {', '.join(map(repr, dict.fromkeys(absent)))} does not exist, so its tasks cannot be fenced. "
            "Nothing was changed; correct `source.topics`, or create the topic."
        )


async def change_layout(topology: Topology, settings: Settings, wire: KafkaWire, admin: Admin) -> None:
    """Change the number of partitions per transaction to the topology's number, without changing the state or the
    offsets.

    The function also completes an interrupted layout change. Raises DedupError if workers are running or another
    process is changing the layout, or StateIncompatible if topics are missing.
    """
    await Group(wire, topology.name).refuse_members()
    have = await admin.topics(known_names(topology))
    if topology.changelog_topic not in have:
        raise StateIncompatible(f"topic {topology.changelog_topic!r} does not exist, so there is no layout to change.")
    _refuse_absent(topology, have)
    if topology.transactions.partitions == "auto":
        count = max(counts_of(topology, Cluster(have)).values())
        topology = topology.grouped_by(auto_group_size(count))
    if topology.layout_topic not in have:
        if not topology.has_layout(topology.group_size):
            return
        wanted = [topic for topic in missing_topics(topology, settings, have) if topic.name == topology.layout_topic]
        await admin.create(wanted)
        await admin.settled([topology.layout_topic])
    change = LayoutChange(topology, Cluster(have), wire, settings.transaction_timeout_ms)
    for attempt in range(_MOST_ATTEMPTS):
        try:
            await change.run(topology.group_size)
        except CommitUnknown:
            # The leader of a topic that was just created may not know the topic yet.
            if attempt + 1 == _MOST_ATTEMPTS:
                raise
            await wire.refresh()
            await wire.pause(_LOOK_AGAIN_MS)
        except TaskMigrated as error:
            raise DedupError(
                f"another process changes the layout of {topology.name!r} at the same time. Run `dedup layout` to see "
                "the result."
            ) from error
        else:
            return
