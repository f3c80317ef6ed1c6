"""The reader of an output topic: what a `read_committed` consumer sees, and when; and whether that is exact."""

from __future__ import annotations

import gc
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

_EVENT: Final = re.compile(rb'"event_id":\s*"([^"]+)".*?"ts":\s*(\d+)')
_LOOK_EVERY_S: Final = 0.05
_AT_ONCE: Final = 10_000


@dataclass(frozen=True, slots=True)
class Exactness:
    """The books of one output topic. `not_first`: forwarded once, but not the first event with that ID."""

    forwarded: int
    lost: int
    duplicated: int
    unknown: int
    not_first: int

    @property
    def exact(self) -> bool:
        """Return whether every expected ID came out once, as its first event, and nothing else did."""
        return not (self.lost or self.duplicated or self.unknown or self.not_first)


class OutputReader:
    """Reads a topic from `starts` (an offset for each partition) in a thread of its own.

    Made before the measured job is started.
    While the job runs it only keeps the messages and the times at which they came: looking into them would take the
    processor from the job. So does keeping them (a sixth of a core at 110,000 a second, in page faults): a job that
    is measured for its rate is read with ``keep=False``, which keeps the times, and its topic again afterwards.
    """

    def __init__(self, bootstrap: str, topic: str, starts: Mapping[int, int], *, keep: bool = True) -> None:
        self._consumer: Final = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": f"reader-{topic}",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                # The default, 1 s, stalls a fast reader.
                "fetch.queue.backoff.ms": 5,
                "queued.max.messages.kbytes": 262_144,
                "check.crcs": False,
            }
        )
        self._consumer.assign([TopicPartition(topic, partition, offset) for partition, offset in starts.items()])
        self._keep: Final = keep
        self._reached: Final[dict[int, int]] = {}
        self._targets: Mapping[int, int] | None = None
        self._stopped: Final = threading.Event()
        self._failure: KafkaException | None = None
        self.batches: Final[list[tuple[int, list[Message]]]] = []
        """(wall clock in ms when they were there, messages), in the order they came."""
        self.count: int = 0
        """The messages so far; read it from any thread."""
        # A collection over the messages kept takes up to half a second, and would be seen as the job's latency.
        gc.disable()
        self._thread: Final = threading.Thread(target=self._read, name=f"reader-{topic}", daemon=True)
        self._thread.start()

    def finish(self, ends: Mapping[int, int], within_s: float) -> None:
        """The reader has reached `ends` (end offsets) and has stopped.

        Raises TimeoutError when it did not: then an open transaction holds back what is behind it.
        """
        self._targets = ends
        self._thread.join(within_s)
        late = self._thread.is_alive()
        self.close()
        if self._failure is not None:
            raise self._failure
        if late:
            raise TimeoutError(f"A read_committed reader came to {self._reached} of {dict(ends)} within {within_s} s.")

    def close(self) -> None:
        """The reader has stopped, wherever it was. Idempotent."""
        self._stopped.set()
        self._thread.join()

    @property
    def seen_ms(self) -> tuple[int, int]:
        """Return when the first and the last messages were seen (wall clock). Raises ValueError if none was."""
        if not self.batches:
            raise ValueError("Nothing came out.")
        return self.batches[0][0], self.batches[-1][0]

    def events(self, *, in_json: bool = True) -> Iterator[tuple[bytes, int, int]]:
        """Yield (event ID, its `ts`, wall clock in ms when seen) of every message.

        The ID and `ts` come from the value; where values are not JSON, they come from the key and the record time.
        """
        for seen_ms, messages in self.batches:
            for message in messages:
                if in_json:
                    found = _EVENT.search(message.value() or b"")
                    yield (found[1], int(found[2]), seen_ms) if found else (b"", 0, seen_ms)
                else:
                    yield message.key() or b"", message.timestamp()[1], seen_ms

    def _read(self) -> None:
        try:
            while not self._stopped.is_set() and not self._there():
                first = self._consumer.poll(_LOOK_EVERY_S)
                if first is not None:
                    self._take([first, *self._consumer.consume(_AT_ONCE, 0)])
        except KafkaException as failure:
            self._failure = failure
        finally:
            self._consumer.close()

    def _there(self) -> bool:
        targets = self._targets
        return targets is not None and all(self._reached.get(at, 0) >= end for at, end in targets.items())

    def _take(self, messages: list[Message]) -> None:
        seen_ms = time.time_ns() // 1_000_000
        records = [message for message in messages if message.error() is None]
        if len(records) < len(messages):
            self._note_ends(messages)
        if records:
            self.batches.append((seen_ms, records if self._keep else []))
            self.count += len(records)

    def _note_ends(self, messages: list[Message]) -> None:
        for message in messages:
            error = message.error()
            if error is None:
                continue
            if error.code() != KafkaError._PARTITION_EOF:  # noqa: SLF001  the library's public name for it
                raise KafkaException(error)
            partition, offset = message.partition(), message.offset()
            if partition is not None and offset is not None:
                self._reached[partition] = offset


def check(events: Iterator[tuple[bytes, int, int]], expected: Mapping[bytes, int | None]) -> Exactness:
    """Return the books: what came out against what had to: ID to the time of its first event, None if any will do."""
    times: Counter[bytes] = Counter()
    not_first = 0
    for event_id, time_ms, _seen_ms in events:
        times[event_id] += 1
        first_ms = expected.get(event_id)
        not_first += first_ms is not None and times[event_id] == 1 and first_ms != time_ms
    known = times.keys() & expected.keys()
    return Exactness(
        forwarded=times.total(),
        lost=len(expected) - len(known),
        duplicated=sum(times[event_id] - 1 for event_id in known),
        unknown=sum(count for event_id, count in times.items() if event_id not in expected),
        not_first=not_first,
    )
