"""A producer that sends events at a steady rate, each stamped with the moment at which it is handed to the producer.

In a process of its own, so that it takes no time from the reader:
`python -m bench.pace BROKER TOPIC RATE SECONDS PARTITIONS SEED`.
Prints one line of JSON: how many events it sent, how long that took, how late it ever was.

It hands the broker whole record batches, one per partition and tick: a call per event takes a third of a core at
50,000 events/s, on a machine whose two cores the broker and the candidate need.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

from aiokafka import AIOKafkaProducer

from bench.workload import Workload
from dedup.core.murmur2 import partitions as murmur2_partitions

_TICK_S: Final = 0.01
"""At least; a batch for each of many partitions takes longer."""
_TICK_PER_PARTITION_S: Final = 0.001
_BATCH_BYTES: Final = 900_000
Part = tuple[int, bytes, bytes, bytes]
"""Partition, key, and the value before and after its time."""


@dataclass(frozen=True, slots=True)
class Paced:
    """What was sent. `late_s` is the greatest lag behind the wanted rate."""

    events: int
    seconds: float
    late_s: float


def paced_workload(rate: int, seconds: int, partitions: int, seed: int) -> Workload:
    """Return what is sent; its times are set at sending."""
    return Workload(rate * seconds, partitions, seed)


async def send_paced(bootstrap: str, topic: str, workload: Workload, rate: int) -> Paced:
    """Send the workload at `rate` events a second; returns when the broker has taken all of it."""
    # Prepared whole, but for the time: little is left to do for an event at its moment.
    parts = _prepared(workload)
    sender = AIOKafkaProducer(
        bootstrap_servers=bootstrap,
        enable_idempotence=True,
        compression_type="snappy",
        max_batch_size=_BATCH_BYTES,
        max_request_size=4 * _BATCH_BYTES,
    )
    await sender.start()
    try:
        lanes = [_Lane(sender, topic, partition) for partition in range(workload.partitions)]
        tick_s = max(_TICK_S, _TICK_PER_PARTITION_S * workload.partitions)
        began = time.monotonic()
        sent, late_s = 0, 0.0
        while sent < len(parts):
            now = time.monotonic()
            due = min(int((now - began) * rate), len(parts))
            late_s = max(late_s, (due - sent) / rate - tick_s)
            _hand_over(lanes, parts[sent:due])
            sent = due
            await asyncio.sleep(max(0.0, now + tick_s - time.monotonic()))
        await asyncio.gather(*[lane.done for lane in lanes if lane.done is not None])
        return Paced(sent, time.monotonic() - began, late_s)
    finally:
        await sender.stop()


class _Lane:
    """The batches of one partition, sent one after the other."""

    def __init__(self, sender: AIOKafkaProducer, topic: str, partition: int) -> None:
        self._sender, self._topic, self._partition = sender, topic, partition
        self.done: asyncio.Task[None] | None = None

    def send(self, events: Sequence[tuple[bytes, bytes]], time_ms: int) -> None:
        """The events follow what was sent before."""
        batch = self._sender.create_batch()
        for key, value in events:
            if batch.append(key=key, value=value, timestamp=time_ms) is None:
                # After a pause of this process more is due than fits: it counts as late, and goes in turn.
                self.done = asyncio.create_task(self._send(batch, self.done))
                batch = self._sender.create_batch()
                batch.append(key=key, value=value, timestamp=time_ms)
        self.done = asyncio.create_task(self._send(batch, self.done))

    async def _send(self, batch: object, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await before
        await (await self._sender.send_batch(batch, self._topic, partition=self._partition))


def _hand_over(lanes: Sequence[_Lane], parts: Sequence[Part]) -> None:
    time_ms = time.time_ns() // 1_000_000
    stamp = b"%d" % time_ms
    of: list[list[tuple[bytes, bytes]]] = [[] for _ in lanes]
    for partition, key, before, after in parts:
        of[partition].append((key, before + stamp + after))
    for lane, events in zip(lanes, of, strict=True):
        if events:
            lane.send(events, time_ms)


def _prepared(workload: Workload) -> list[Part]:
    events = list(workload.generate())
    chosen = murmur2_partitions([one.event_id for one in events], workload.partitions)
    return [
        (int(partition), one.event_id, *_cut(one.value, one.time_ms))
        for partition, one in zip(chosen, events, strict=True)
    ]


def _cut(value: bytes, time_ms: int) -> tuple[bytes, bytes]:
    before, mark, after = value.partition(b'"ts":%d' % time_ms)
    return before + mark[: len(b'"ts":')], after


def main() -> None:
    """Send, and print what was sent."""
    bootstrap, topic, rate, seconds, partitions, seed = sys.argv[1:]
    workload = paced_workload(int(rate), int(seconds), int(partitions), int(seed))
    print(json.dumps(asdict(asyncio.run(send_paced(bootstrap, topic, workload, int(rate))))))


if __name__ == "__main__":
    main()
