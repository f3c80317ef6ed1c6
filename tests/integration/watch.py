"""A committed reader that looks on during a whole test."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Self

from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

from tests.integration.fleet import WITHIN_S, Job
from tests.integration.workload import id_of


class Watch:
    """A committed reader of the output, all the while; it is the one that must never see an ID twice."""

    def __init__(self, job: Job, *, guard_ms: int = 1 << 60) -> None:
        self._job = job
        self._guard_ms = guard_ms
        self._seen: defaultdict[str, list[int]] = defaultdict(list)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read, name="watch", daemon=True)
        self.failure: BaseException | None = None
        self.duplicated: list[str] = []
        self.records = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """It has read up to the end; raises AssertionError if it ever saw a duplicate."""
        self._ended.set()
        self._thread.join(WITHIN_S)
        assert not self._thread.is_alive(), "the output has no end: a transaction stays open"
        assert self.failure is None, self.failure
        assert self.duplicated == []

    def _read(self) -> None:
        try:
            self._read_to_end()
        except BaseException as error:  # noqa: BLE001  # handed over to the test's thread
            self.failure = error

    def _read_to_end(self) -> None:
        consumer = Consumer(
            {
                "bootstrap.servers": self._job.kafka.bootstrap,
                "group.id": f"{self._job.name}-watch",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                "fetch.wait.max.ms": 50,
                # As in `read_all`: a new leader may refuse offset 0 for a moment.
                "auto.offset.reset": "earliest",
            }
        )
        try:
            next_offset = dict.fromkeys(range(self._job.partitions), 0)
            ending = False
            at_end: set[int] = set()
            consumer.assign([TopicPartition(self._job.output, *each) for each in next_offset.items()])
            while not (ending and len(at_end) == len(next_offset)):
                if self._ended.is_set() and not ending:
                    # The end that counts is the one after the test's last write: it is only told after an assignment.
                    ending, at_end = True, set()
                    consumer.assign([TopicPartition(self._job.output, *each) for each in next_offset.items()])
                for message in consumer.consume(5_000, 0.1):
                    error = message.error()
                    if error is None:
                        next_offset[message.partition() or 0] = (message.offset() or 0) + 1
                        self._note(message)
                    elif error.code() == KafkaError._PARTITION_EOF:
                        at_end.add(message.partition() or 0)
        finally:
            consumer.close()

    def _note(self, message: Message) -> None:
        self.records += 1
        found = id_of(message.value()) or ""
        time_ms = message.timestamp()[1]
        if any(abs(time_ms - other) < self._guard_ms for other in self._seen[found]):
            self.duplicated.append(f"{found} at {message.partition()}/{message.offset()}")
        self._seen[found].append(time_ms)
