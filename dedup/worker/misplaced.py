"""The misplaced-ID warning: a topic that is declared to be partitioned by the tracking ID, but looks otherwise."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final
from uuid import UUID

from dedup.core import tracking_id as encoding
from dedup.core.murmur2 import partitions
from dedup.metrics import TaskNumbers
from dedup.session.wire import TopicPartition

SAMPLED_IDS: Final = 8
"""At a time: the column hash of so few takes less than judging a few hundred records."""
SAMPLE_EVERY: Final = 1000
"""Records from sample to sample, so that small batches do not pay for it each."""
log: Final = logging.getLogger(__name__)


class Placement:
    """Compares a few IDs now and then with the partition that Kafka's default partitioner would give them."""

    def __init__(self, feeding: TopicPartition, count: int, numbers: TaskNumbers) -> None:
        self._feeding: Final = feeding
        self._count: Final = count
        self._numbers: Final = numbers
        self._warned = False
        self._passed = SAMPLE_EVERY
        """Records since the last sample."""

    def sample(self, ids: Sequence[bytes | None]) -> None:
        """Count the sampled IDs, and those that belong elsewhere; warn at the first of these."""
        if self._count < 2:  # noqa: PLR2004  # with one partition nothing is misplaced
            return
        self._passed += len(ids)
        if self._passed < SAMPLE_EVERY:
            return
        self._passed = 0
        step = max(1, len(ids) // SAMPLED_IDS)
        texts = [text for key in ids[::step][:SAMPLED_IDS] if key is not None and (text := id_text(key)) is not None]
        if not texts:
            return
        misplaced = sum(found != self._feeding.partition for found in partitions(texts, self._count))
        self._numbers.sampled += len(texts)
        self._numbers.misplaced += misplaced
        if misplaced and not self._warned:
            self._warned = True
            log.warning(
                "%s/%d: %d of %d sampled IDs belong to another partition by Kafka's default partitioner. Is the topic "
                "keyed by something else? Equal IDs in different partitions are not found; then remove "
                "`partitioned_by` from the topology. If its producers place IDs by another rule, all is well.",
                self._feeding.topic,
                self._feeding.partition,
                misplaced,
                len(texts),
            )


def id_text(state_key: bytes) -> bytes | None:
    """Return an ID as a producer writes it into a key; None for one that is digested, composite or no text."""
    tag, rest = state_key[:1], state_key[1:]
    match tag:
        case encoding.TEXT | encoding.BYTES | encoding.BIG_INTEGER:
            return rest
        case encoding.UUID:
            return str(UUID(bytes=rest)).encode()
        case encoding.INTEGER:
            return str(int.from_bytes(rest, "big", signed=True)).encode()
        case _:
            return None
