"""Workload W1 of the design's page 7: the events, the IDs an exact job forwards, and the topic that holds them.

Everything follows from the seed and the start time. A duplicate is a new event with an ID seen before: half of them
repeat one of the 1,000 events before them, half repeat any earlier ID. All events lie within half a guard period, so
each ID is to be forwarded exactly once, and it is its first event that goes on. In the form `backlog`, the events are
spread over 30 days, and each duplicate repeats one of the last 30 new IDs. The same holds there from 50,000 events on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from confluent_kafka import KafkaException, Producer

from bench.forms import Headers, encoder, headers_of

Progress = Callable[[int], None]
"""Called now and then with the number of events made so far."""

GUARD_MS: Final = 3_600_000
NEAR_EVENTS: Final = 1_000
_BACKLOG: Final = "backlog"
_BACKLOG_MS: Final = 30 * 24 * GUARD_MS
_BACKLOG_NEAR_IDS: Final = 30
PADDING_BYTES: Final = 106
_POOL_BYTES: Final = 1 << 16
_USERS: Final = 100_000
_CHUNK: Final = 10_000
_FLUSH_WITHIN_S: Final = 120
_QUEUE_FULL_WAIT_S: Final = 0.1


class Event(NamedTuple):
    """One event as it goes to the source topic: the key is the ID, the record time is the event's time."""

    event_id: bytes
    value: bytes
    time_ms: int


@dataclass(frozen=True, slots=True)
class Workload:
    """What is sent. `start_ms` is the first event's time; `step_ms` apart the others follow."""

    events: int = 1_000_000
    partitions: int = 4
    seed: int = 7
    start_ms: int = 0
    duplicate_share: float = 0.3
    form: str = "json"
    """In what form the values go to the topic; see `bench.forms`."""

    @property
    def step_ms(self) -> float:
        """Return the milliseconds from one event to the next: 1, less where that would leave the guard period."""
        if self.form == _BACKLOG:
            return _BACKLOG_MS / self.events
        return min(1.0, GUARD_MS / 2 / self.events)

    def time_ms(self, index: int) -> int:
        """Return the time of the event at `index`."""
        before_ms = _BACKLOG_MS if self.form == _BACKLOG else 0
        return self.start_ms - before_ms + int(index * self.step_ms)

    def owners(self) -> np.ndarray:
        """Return for each event the index of the first event with its ID: its own index if it is the first."""
        random = np.random.default_rng(self.seed)
        repeats = random.random(self.events) < self.duplicate_share
        near = random.random(self.events) < 1 / 2
        pick = random.random(self.events)
        owners = np.empty(self.events, np.int64)
        firsts = np.empty(self.events, np.int64)
        count = 0
        for index in range(self.events):
            if index == 0 or not repeats[index]:
                owner = index
                firsts[count] = index
                count += 1
            elif self.form == _BACKLOG:
                owner = firsts[count - 1 - int(pick[index] * min(count, _BACKLOG_NEAR_IDS))]
            elif near[index]:
                reach = min(index, NEAR_EVENTS)
                owner = owners[index - 1 - int(pick[index] * reach)]
            else:
                owner = firsts[int(pick[index] * count)]
            owners[index] = owner
        return owners

    def generate(self) -> Iterator[Event]:
        """Yield the events in order."""
        owners = self.owners()
        random = np.random.default_rng((self.seed, 1))
        ids = random.bytes(16 * self.events).hex()
        # Padding repeats now and then, as the words of real events do, so that compression finds something.
        pool = random.bytes(_POOL_BYTES // 2).hex()
        cuts = random.integers(0, _POOL_BYTES - PADDING_BYTES, self.events)
        users = random.integers(0, _USERS, self.events)
        for index in range(self.events):
            event_id = _uuid(ids, int(owners[index]))
            at = int(cuts[index])
            yield event(event_id, int(users[index]), self.time_ms(index), pool[at : at + PADDING_BYTES])

    def expected(self) -> dict[bytes, int]:
        """Return each ID that must come out exactly once, with the time of its first event."""
        ids = np.random.default_rng((self.seed, 1)).bytes(16 * self.events).hex()
        owners = self.owners()
        firsts = np.flatnonzero(owners == np.arange(self.events))
        return {_uuid(ids, int(first)).encode(): self.time_ms(int(first)) for first in firsts}


def event(event_id: str, user: int, time_ms: int, padding: str) -> Event:
    """Return the event with these contents, about 200 bytes of JSON."""
    text = f'{{"event_id":"{event_id}","user":"u{user:06d}","ts":{time_ms},"padding":"{padding}"}}'
    return Event(event_id.encode(), text.encode(), time_ms)


def _uuid(ids: str, owner: int) -> str:
    h = ids[32 * owner : 32 * owner + 32]
    return f"{h[:8]}-{h[8:12]}-{h[12:16]}-{h[16:20]}-{h[20:]}"


def producer(bootstrap: str, *, linger_ms: int = 50) -> Producer:
    """Return a producer that keeps the order and sends equal IDs to the same partition (murmur2)."""
    return Producer(
        {
            "bootstrap.servers": bootstrap,
            "enable.idempotence": True,
            "partitioner": "murmur2_random",
            "compression.type": "lz4",
            "linger.ms": linger_ms,
            "log_level": 3,
            "batch.size": 256 * 1024,
            "queue.buffering.max.messages": 500_000,
            "queue.buffering.max.kbytes": 512 * 1024,
        }
    )


def load(bootstrap: str, topic: str, workload: Workload, progress: Progress) -> float:
    """The topic holds the whole workload; returns the seconds it took. Raises KafkaException."""
    began = time.monotonic()
    sender, encode = producer(bootstrap), encoder(workload.form)
    for index, one in enumerate(workload.generate(), start=1):
        send(sender, topic, one._replace(value=encode(one.value)), headers_of(workload.form, one.event_id))
        if index % _CHUNK == 0:
            sender.poll(0)
            progress(index)
    finish(sender)
    progress(workload.events)
    return time.monotonic() - began


def finish(sender: Producer) -> None:
    """The broker has taken all that was sent, and the producer is closed."""
    left = sender.flush(_FLUSH_WITHIN_S)
    sender.close()
    if left:
        raise RuntimeError(f"{left} events were not taken by the broker within {_FLUSH_WITHIN_S} s.")


def send(sender: Producer, topic: str, one: Event, headers: Headers | None = None) -> None:
    """The event is queued, after waiting for room where the queue is full. Raises KafkaException if refused."""
    while True:
        try:
            sender.produce(
                topic, one.value, one.event_id, timestamp=one.time_ms, headers=headers, on_delivery=_refuse_failure
            )
        except BufferError:
            sender.poll(_QUEUE_FULL_WAIT_S)
        else:
            return


def _refuse_failure(error: object, _message: object) -> None:
    if error is not None:
        raise KafkaException(error)
