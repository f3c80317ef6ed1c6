"""How far a group has come with a topic, for those who look on while it works."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from dedup.errors import BrokerUnavailable

_ANSWER_WITHIN_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Sight:
    """Records of one topic at one moment."""

    in_topic: int
    judged: int
    """Of them, those below the group's committed offsets."""


class Watch:
    """Looks at one group and one topic whose first offset is 0; never joins the group. Use with `with`.

    The group's offsets are asked for by a consumer, not by the admin client: that one ends the process with SIGSEGV
    when the coordinator answers that it is loading or has moved (librdkafka issue 5040; seen with 2.16.0).
    """

    def __init__(
        self, bootstrap: str, group: str, topic: str, partitions: int, *, client: Mapping[str, Any] | None = None
    ) -> None:
        """``client``: librdkafka's options for the cluster, security among them, where an address is not enough."""
        how = dict(client or {"bootstrap.servers": bootstrap}) | {"log_level": 0}
        self._group: Final = group
        self._topic: Final = topic
        self._admin: Final = AdminClient(dict(how))
        self._places: Final = [TopicPartition(topic, number) for number in range(partitions)]
        self._bootstrap: Final = bootstrap
        self._consumer: Final = Consumer(
            {
                **how,
                "group.id": group,
                "enable.auto.commit": False,
                "isolation.level": "read_committed",  # also: no offsets of transactions still open
            }
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with contextlib.suppress(KafkaException):
            self._consumer.close()

    def look(self) -> Sight:
        """Return how far it is. Raises BrokerUnavailable when there is no answer now; another try may have one."""
        try:
            ends = [self._consumer.get_watermark_offsets(place, _ANSWER_WITHIN_S)[1] for place in self._places]
            committed = self._consumer.committed(self._places, _ANSWER_WITHIN_S)
        except KafkaException as error:
            raise self._no_answer(f"how far {self._group} is with {self._topic}", error) from error
        # Negative: nothing committed yet.
        return Sight(sum(ends), sum(max(place.offset, 0) for place in committed))

    def members(self) -> frozenset[str]:
        """Return the ids of the group's members; a process that comes back gets another one. Raises as look() does."""
        try:
            group = self._admin.describe_consumer_groups([self._group], request_timeout=_ANSWER_WITHIN_S)[self._group]
            return frozenset(member.member_id for member in group.result().members)
        except KafkaException as error:
            raise self._no_answer(f"who is in {self._group}", error) from error

    def _no_answer(self, what: str, error: KafkaException) -> BrokerUnavailable:
        return BrokerUnavailable(f"The broker at {self._bootstrap} does not tell {what}: {error}. Try again.")
