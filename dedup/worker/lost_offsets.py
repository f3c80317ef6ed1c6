"""Offsets of a repartitioned source that were deleted while the state that was made with them is still there.

A `dedup` task goes on from its task record. A `repartition` task has no state: it would begin at `start` again, and
every record would get a second verdict. Task records of the changelog tell which source partitions have been read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dedup.core.stream_time import Feed
from dedup.core.window import BEFORE_ALL_TIME
from dedup.errors import StateIncompatible
from dedup.session.wire import TopicPartition, Wire
from dedup.worker.restore import last_task_record
from dedup.worker.starting import committed_offset

if TYPE_CHECKING:
    from dedup.topology.model import Topology
    from dedup.worker.plan import Cluster


async def refuse_lost_offsets(topology: Topology, cluster: Cluster, wire: Wire) -> None:
    """Raise StateIncompatible where a source partition has been read and the group has no offset of it any more."""
    if topology.direct:
        return
    missing = [feed for feed in cluster.feeds(topology) if await _offset(topology, wire, feed) is None]
    if not missing:
        return
    read: set[Feed] = set()
    for partition in range(cluster.topics[topology.changelog_topic].partitions):
        record = await last_task_record(wire, TopicPartition(topology.changelog_topic, partition))
        if record is not None:
            read |= {
                Feed(feed.topic, feed.partition) for feed in record.feeds if feed.idle or feed.max_ms > BEFORE_ALL_TIME
            }
    # A partition without an offset may just never have held a record; its first one may have been read meanwhile.
    lost = [feed for feed in missing if feed in read and await _offset(topology, wire, feed) is None]
    if lost:
        names = ", ".join(f"{topology.source.topics[feed.topic]}/{feed.partition}" for feed in lost)
        raise StateIncompatible(
            f"the group {topology.name!r} has no offset of {names}, but task records in {topology.changelog_topic} say "
            f"that records from there were judged: offsets were deleted. Nothing was touched; to begin at `start` once "
            f"more would judge all of them twice. Set the group's offsets to where it had come "
            f"(kafka-consumer-groups.sh --reset-offsets), or start anew with `dedup reset`."
        )


async def _offset(topology: Topology, wire: Wire, feed: Feed) -> int | None:
    place = TopicPartition(topology.source.topics[feed.topic], feed.partition)
    return await committed_offset(wire, topology.name, place, stable=False)
