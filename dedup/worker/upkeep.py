"""Deletes records that a topology no longer needs, and enforces the limit on the size of its state.

This module is independent of Faust, because the driver of a Spark stream also uses it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from dedup.errors import StateIncompatible
from dedup.kafka.client import KafkaWire
from dedup.kafka.consumer import TopicCheck
from dedup.kafka.outage_lines import ASIDE
from dedup.kafka.topic_admin import Admin
from dedup.kafka.wire import TopicPartition
from dedup.quantities import format_size
from dedup.topology.model import Topology

log: Final = logging.getLogger(__name__)
MAINTENANCE_EVERY_S: Final = 30.0
KEEP_MS: Final = 86_400_000
"""The minimum age, in ms, of records that are deleted from the repartition topic, which `dedup verify` replays."""


@dataclass(slots=True)
class OldRecords:
    """Deletes old records of the changelog and of the repartition topic, and remembers what has been deleted.

    Deleting changelog records is safe at any time, even if the owner is about to be fenced. The deleted records belong
    to expired segments (`DedupTask.truncate_below`), which no later owner needs, because stream time never decreases.
    Records of the repartition topic are deleted only if they are committed and older than `KEEP_MS`, because `dedup
    verify` replays that topic.
    """

    deleted: dict[TopicPartition, int] = field(init=False, default_factory=dict)
    """Maps each partition to the offset below which records were last deleted."""
    warned: bool = field(init=False, default=False)

    async def delete(self, wire: KafkaWire, check: TopicCheck, wanted: Mapping[TopicPartition, int]) -> None:
        """Delete the records below the given offset of each partition, unless they were deleted before.

        Raises StateIncompatible if a topic was recreated, and BrokerUnavailable or CommitUnknown if brokers refuse or
        do not respond.
        """
        below = {partition: offset for partition, offset in wanted.items() if offset > self.deleted.get(partition, 0)}
        if not below:
            return
        # Kafka deletes records by topic name, and this process may have been frozen while the topic was recreated.
        await check.confirm()
        async with Admin(wire.connection) as admin:
            await admin.delete_records(below)
        self.deleted.update(below)
        for partition, offset in below.items():
            log.info("%s: records below %d are deleted", partition, offset)

    def warn(self, error: Exception) -> None:
        """Log the first failure. A failure costs only disk space on the broker, and the next round tries again."""
        if not self.warned:
            log.warning("old records were not deleted: %s", error, extra=ASIDE)
            self.warned = True


async def old_below(wire: KafkaWire, repartitioned: TopicPartition, committed: int, now_ms: int) -> int:
    """Return the offset below which all records of a repartition partition are committed and old; see `KEEP_MS`.

    Raises NoAnswer if the partition has no leader.
    """
    kept_from = await wire.offset_at(repartitioned, now_ms - KEEP_MS)
    return committed if kept_from is None else min(committed, kept_from)


def refuse_too_large(topology: Topology, feeding: TopicPartition, size_bytes: int) -> None:
    """Raise StateIncompatible if a partition's committed state exceeds `state.max_bytes_per_partition`."""
    most = topology.state.max_bytes_per_partition
    if most is not None and size_bytes > most:
        raise StateIncompatible(
            f"the state of {feeding} takes {size_bytes:,} bytes, more than state.max_bytes_per_partition "
            f"({format_size(most)}). Judging stops. Nothing is lost, because all judged records are committed. Raise "
            "the limit if the disk has room, or shorten guard_period or grace."
        )
