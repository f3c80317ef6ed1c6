"""What a measurement asks of the broker: topics, end offsets, how far a group has committed."""

from __future__ import annotations

from typing import Final

from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec  # type: ignore[attr-defined]

_ANSWER_WITHIN_S: Final = 30
_LATEST: Final = OffsetSpec.latest()  # type: ignore[no-untyped-call]


class Cluster:
    """One admin connection to the broker. Every method raises KafkaException when the broker does not answer."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap: Final = bootstrap
        self._admin: Final = AdminClient({"bootstrap.servers": bootstrap})

    def create(self, topic: str, partitions: int) -> None:
        """The topic exists; its records are never deleted by age."""
        new = NewTopic(topic, num_partitions=partitions, replication_factor=1, config={"retention.ms": "-1"})
        for made in self._admin.create_topics([new]).values():
            made.result(_ANSWER_WITHIN_S)

    def ends(self, topic: str) -> dict[int, int]:
        """Return each partition's end offset, open transactions included."""
        about = self._admin.list_topics(topic, timeout=_ANSWER_WITHIN_S).topics[topic]
        wanted = {TopicPartition(topic, partition): _LATEST for partition in about.partitions}
        answers = self._admin.list_offsets(wanted)
        return {asked.partition: answer.result(_ANSWER_WITHIN_S).offset for asked, answer in answers.items()}

    def committed(self, group: str, topic: str) -> dict[int, int]:
        """Return the group's committed offset for each partition of the topic that has one."""
        asked = self._admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)])
        found = asked[group].result(_ANSWER_WITHIN_S).topic_partitions
        return {each.partition: each.offset for each in found or () if each.topic == topic and each.offset >= 0}

    def consumed(self, group: str, topic: str, ends: dict[int, int]) -> bool:
        """Return whether the group has committed up to `ends` on every partition."""
        committed = self.committed(group, topic)
        return all(committed.get(partition, 0) >= end for partition, end in ends.items())

    def delete_of(self, group: str) -> None:
        """The topics with the group's name in theirs are gone, so that they take no disk from the runs that follow."""
        every = self._admin.list_topics(timeout=_ANSWER_WITHIN_S).topics
        doomed = [topic for topic in every if group in topic]
        for gone in (self._admin.delete_topics(doomed) if doomed else {}).values():
            gone.result(_ANSWER_WITHIN_S)
