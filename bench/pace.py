"""A producer that sends events at a steady rate, each stamped with the moment at which it is due to be handed over.

In a process of its own, so that it takes no time from the reader:
`python -m bench.pace BROKER TOPIC RATE SECONDS PARTITIONS SEED`.
Prints `prepared` when it is about to send, and in the end a line of JSON: how many events it sent, how long that took,
how late it ever was.

It hands the broker whole record batches, one per partition and tick, all made before the first is sent: a call per
event takes a third of a core at 50,000 events/s, on a machine whose two cores the broker and the candidate need, and
making the batches at their moment a fifth. A batch that goes out late keeps its stamp, so the producer's own delay is
in the latency, not left out of it (Gil Tene's "coordinated omission").
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Final

from aiokafka import AIOKafkaProducer
from aiokafka.producer.message_accumulator import BatchBuilder

from bench.workload import Workload
from dedup.core.partitioner import partitions as murmur2_partitions

_TICK_S: Final = 0.01
"""At least; a batch for each of many partitions takes longer."""
_TICK_PER_PARTITION_S: Final = 0.001
_BATCH_BYTES: Final = 900_000
_TRIAL_EVENTS: Final = 20_000
"""So many are made to see how long all will take: the stamps must be known before."""
_MARGIN: Final = 1.3
_MARGIN_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Paced:
    """What was sent. `late_s` is the greatest lag of a batch behind its stamp."""

    events: int
    seconds: float
    late_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """When what is sent: tick by tick, `tick_s` apart, the first `tick_s` after `begin_s` (wall clock)."""

    rate: int
    tick_s: float
    begin_s: float

    def tick(self, index: int) -> int:
        """Return the tick that an event goes with: the first one after it is there."""
        return int(index / (self.rate * self.tick_s))

    def stamp_ms(self, tick: int) -> int:
        """Return when a tick is due."""
        return int(1000 * (self.begin_s + (tick + 1) * self.tick_s))


def paced_workload(rate: int, seconds: int, partitions: int, seed: int) -> Workload:
    """Return what is sent; its times are set at sending."""
    return Workload(rate * seconds, partitions, seed)


async def send_paced(bootstrap: str, topic: str, workload: Workload, rate: int) -> Paced:
    """Send the workload at `rate` events a second; returns when the broker has taken all of it."""
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
        plan = _planned(workload, rate, sender.create_batch)
        ticks = _prepared(workload, plan, sender.create_batch)
        print("prepared", flush=True)
        gc.freeze()  # a collection would look at every batch
        late_s = 0.0
        for tick, batches in enumerate(ticks):
            due_s = plan.stamp_ms(tick) / 1000
            await asyncio.sleep(max(0.0, due_s - time.time()))
            late_s = max(late_s, time.time() - due_s)
            for partition, batch in batches:
                lanes[partition].send(batch)
            batches.clear()
        await asyncio.gather(*[lane.done for lane in lanes if lane.done is not None])
        return Paced(workload.events, time.time() - plan.begin_s, late_s)
    finally:
        await sender.stop()


class _Lane:
    """The batches of one partition, sent one after the other."""

    def __init__(self, sender: AIOKafkaProducer, topic: str, partition: int) -> None:
        self._sender, self._topic, self._partition = sender, topic, partition
        self.done: asyncio.Task[None] | None = None

    def send(self, batch: BatchBuilder) -> None:
        """The batch follows what was sent before."""
        self.done = asyncio.create_task(self._send(batch, self.done))

    async def _send(self, batch: BatchBuilder, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await before
        await (await self._sender.send_batch(batch, self._topic, partition=self._partition))


def _planned(workload: Workload, rate: int, make: Callable[[], BatchBuilder]) -> Plan:
    """Return a plan that begins when the batches of the whole workload are likely to be made."""
    plan = Plan(rate, max(_TICK_S, _TICK_PER_PARTITION_S * workload.partitions), 0.0)
    trial = replace(workload, events=min(_TRIAL_EVENTS, workload.events))
    began = time.monotonic()
    _prepared(trial, plan, make)
    for_all_s = (time.monotonic() - began) * workload.events / trial.events
    return replace(plan, begin_s=time.time() + _MARGIN * for_all_s + _MARGIN_S)


def _prepared(workload: Workload, plan: Plan, make: Callable[[], BatchBuilder]) -> list[list[tuple[int, BatchBuilder]]]:
    """Return what goes with each tick, partitions and batches, every event stamped with its tick."""
    ticks: list[list[tuple[int, BatchBuilder]]] = [[] for _ in range(plan.tick(workload.events - 1) + 1)]
    filling: dict[int, BatchBuilder] = {}
    tick = -1
    events = enumerate(workload.generate())
    while chunk := list(islice(events, _TRIAL_EVENTS)):
        chosen = murmur2_partitions([one.event_id for _, one in chunk], workload.partitions)
        for (index, one), partition in zip(chunk, map(int, chosen), strict=True):
            if plan.tick(index) > tick:
                tick, filling = plan.tick(index), {}
            time_ms = plan.stamp_ms(tick)
            before, mark, after = one.value.partition(b'"ts":%d' % one.time_ms)
            value = before + mark[: len(b'"ts":')] + b"%d" % time_ms + after
            batch = filling.get(partition)
            if batch is None or batch.append(key=one.event_id, value=value, timestamp=time_ms) is None:
                batch = filling[partition] = make()
                batch.append(key=one.event_id, value=value, timestamp=time_ms)
                ticks[tick].append((partition, batch))
    return ticks


def main() -> None:
    """Send, and print what was sent."""
    bootstrap, topic, rate, seconds, partitions, seed = sys.argv[1:]
    workload = paced_workload(int(rate), int(seconds), int(partitions), int(seed))
    print(json.dumps(asdict(asyncio.run(send_paced(bootstrap, topic, workload, int(rate))))))


if __name__ == "__main__":
    main()
