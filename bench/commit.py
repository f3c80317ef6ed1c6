"""What a commit costs: CPU of client and broker for one round of commits, by partitions a transaction.

    python -m bench.commit                           256 partitions, transactions of 1, 8, 32, 64 and 256 of them

In a round, each partition's output and changelog get a batch, and its source offset is committed; all transactions run
at the same time, as a worker's do. Transaction versions 1 and 2 (KIP-890) take turns, round by round, on one broker.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from bench.cluster import Cluster
from bench.stage import BROKER
from dedup.embedded.kafka_node import EmbeddedKafka
from dedup.kafka.client import KafkaWire
from dedup.kafka.connection import Connection
from dedup.kafka.record_batch import Line, RecordBatch, fill
from dedup.kafka.transactional_producer import Session
from dedup.kafka.wire import Position, TopicPartition
from dedup.settings import Security

_TOPICS: Final = ("output", "changelog", "source")
_RECORDS: Final = 40
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_FIELDS_BEFORE_CPU: Final = 11


class OldWire(KafkaWire):
    """A wire to a cluster that says its transactions are of version 1."""

    async def transaction_version(self) -> int:
        """Return 1."""
        return 1


class Committer:
    """Sessions over all partitions, with one transaction for each ``size`` of them."""

    def __init__(self, wire: KafkaWire, name: str, partitions: int, size: int) -> None:
        self.sessions: Final = [
            Session(wire, f"{name}.g{first}", f"{name}-group", timeout_ms=60_000, deadline_ms=60_000)
            for first in range(0, partitions, size)
        ]
        self.size: Final = size

    async def open(self) -> None:
        """Start an epoch of each session."""
        for session in self.sessions:
            await session.open()

    async def round(self, number: int) -> None:
        """Commit once on every partition."""
        await asyncio.gather(*(self._commit(session, at, number) for at, session in enumerate(self.sessions)))

    async def _commit(self, session: Session, group: int, number: int) -> None:
        places = range(group * self.size, (group + 1) * self.size)
        session.add([_batch(topic, partition) for topic in _TOPICS[:2] for partition in places])
        await session.commit({TopicPartition("source", partition): Position(number + 1) for partition in places})


def _batch(topic: str, partition: int) -> RecordBatch:
    lines: list[Line] = [(at, 1_000, b"key-%d" % at, b"v" * 200, []) for at in range(_RECORDS)]
    (batch,) = fill(TopicPartition(topic, partition), lines, compression="none")
    return batch


def broker_cpu_s(pid: int) -> float:
    """Return the CPU that the broker has used since it started."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[_FIELDS_BEFORE_CPU]) + int(fields[_FIELDS_BEFORE_CPU + 1])) / _TICKS_PER_S


async def measure(bootstrap: str, pid: int, partitions: int, sizes: list[int], rounds: int) -> Table:
    """Return median milliseconds a round, for each size and each version."""
    found: dict[tuple[int, int], list[tuple[float, float, float]]] = {}
    wires = {1: OldWire(Connection((bootstrap,), Security())), 2: KafkaWire(Connection((bootstrap,), Security()))}
    for wire in wires.values():
        await wire.start()
    for size in sizes:
        committers = {
            version: Committer(wire, f"v{version}-{size}", partitions, size) for version, wire in wires.items()
        }
        for each in committers.values():
            await each.open()
            await each.round(0)
        for number in range(1, rounds + 1):
            for version, each in committers.items():
                client, broker, began = time.process_time(), broker_cpu_s(pid), time.monotonic()
                for _ in range(5):
                    await each.round(number)
                taken = (time.process_time() - client, broker_cpu_s(pid) - broker, time.monotonic() - began)
                found.setdefault((size, version), []).append(taken)
        print(f"{size} partitions a transaction: done", file=sys.stderr)
    for wire in wires.values():
        await wire.stop()
    table = Table("partitions a transaction", "transaction.version", "client CPU ms", "broker CPU ms", "wall ms")
    for (size, version), runs in found.items():
        table.add_row(
            str(size), str(version), *(f"{statistics.median(column) * 200:.0f}" for column in zip(*runs, strict=True))
        )
    return table


def main(
    partitions: Annotated[int, typer.Option(help="Partitions that each commit once a round.")] = 256,
    rounds: Annotated[int, typer.Option(help="Measurements of five rounds for each size and version.")] = 6,
    sizes: Annotated[str, typer.Option(help="Partitions a transaction, separated by commas.")] = "1,8,32,64,256",
) -> None:
    """Measure."""
    with EmbeddedKafka(profile="bench", properties=BROKER) as kafka:
        assert kafka.process is not None
        cluster = Cluster(kafka.bootstrap)
        for topic in _TOPICS:
            cluster.create(topic, partitions)
        wanted = [int(size) for size in sizes.split(",")]
        Console().print(asyncio.run(measure(kafka.bootstrap, kafka.process.pid, partitions, wanted, rounds)))


if __name__ == "__main__":
    typer.run(main)
