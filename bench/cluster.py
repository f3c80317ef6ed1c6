"""What a measurement asks of the broker: topics, end offsets, how far a group has committed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from typing import Final

from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec  # type: ignore[attr-defined]

_ANSWER_WITHIN_S: Final = 30
_LOOK_EVERY_S: Final = 0.1
_LATEST: Final = OffsetSpec.latest()  # type: ignore[no-untyped-call]


class Cluster:
    """One admin connection to the broker. Every method raises KafkaException when the broker does not answer."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap: Final = bootstrap
        # Without `log_level`, librdkafka logs to stderr that the broker is gone when a benchmark ends.
        self._admin: Final = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
        self._readers: Final[dict[str, Consumer]] = {}

    def create(self, topic: str, partitions: int) -> None:
        """The topic exists, and all its partitions have a leader; its records are never deleted by age."""
        new = NewTopic(topic, num_partitions=partitions, replication_factor=1, config={"retention.ms": "-1"})
        for made in self._admin.create_topics([new]).values():
            made.result(_ANSWER_WITHIN_S)
        deadline = time.monotonic() + _ANSWER_WITHIN_S
        while True:
            with contextlib.suppress(KafkaException):
                if len(self.ends(topic)) == partitions:
                    return
            if time.monotonic() > deadline:
                raise TimeoutError(f"{topic}: not every partition has a leader after {_ANSWER_WITHIN_S} s")
            time.sleep(_LOOK_EVERY_S)

    def ends(self, topic: str) -> dict[int, int]:
        """Return each partition's end offset, open transactions included."""
        about = self._admin.list_topics(topic, timeout=_ANSWER_WITHIN_S).topics[topic]
        wanted = {TopicPartition(topic, partition): _LATEST for partition in about.partitions}
        answers = self._admin.list_offsets(wanted)
        return {asked.partition: answer.result(_ANSWER_WITHIN_S).offset for asked, answer in answers.items()}

    def committed(self, group: str, topic: str, partitions: Iterable[int]) -> dict[int, int]:
        """Return the group's committed offset for each of the partitions that has one; none while no one can tell."""
        # Not the admin client: its request does not come back while the coordinator loads (librdkafka issue 5040).
        reader = self._readers.get(group)
        if reader is None:
            isolation = {"isolation.level": "read_uncommitted", "log_level": 0}
            reader = self._readers[group] = Consumer(
                {"bootstrap.servers": self.bootstrap, "group.id": group, **isolation}
            )
        places = [TopicPartition(topic, partition) for partition in partitions]
        try:
            found = reader.committed(places, timeout=_ANSWER_WITHIN_S)
        except KafkaException:
            return {}
        return {place.partition: place.offset for place in found if place.offset >= 0}

    def consumed(self, group: str, topic: str, ends: dict[int, int]) -> bool:
        """Return whether the group has committed up to `ends` on every partition."""
        committed = self.committed(group, topic, ends)
        return all(committed.get(partition, 0) >= end for partition, end in ends.items())

    def delete_of(self, group: str) -> None:
        """The topics with the group's name in theirs are gone, so that they take no disk from the runs that follow."""
        every = self._admin.list_topics(timeout=_ANSWER_WITHIN_S).topics
        doomed = [topic for topic in every if group in topic]
        for gone in (self._admin.delete_topics(doomed) if doomed else {}).values():
            gone.result(_ANSWER_WITHIN_S)
