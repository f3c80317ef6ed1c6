"""Seeded events for whole workers, and what must come out, counted without any of the code under test."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice

from confluent_kafka import Message

BASE_MS = 1_700_000_000_000


@dataclass(frozen=True, slots=True)
class Event:
    """A source record."""

    partition: int
    value: bytes | None
    timestamp_ms: int
    key: bytes | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    topic: int = 0
    """Position among the topology's source topics."""


SECONDS = 1_000
STEP_MS = 10
BAD = (b"no json", b'{"id":', b'{"n":1}', b'{"id":null}', b'{"id":{}}', b"\xff\xfe{}", b"")


def workload(
    seed: int, events: int, *, partitions: int = 2, topics: int = 1, scattered: bool = False, jitter_ms: int = 20_000
) -> list[Event]:
    """Return events with IDs 0, 1, ...: a quarter repeats a near one, a twentieth a far one; out of order; some bad.

    An event takes 10 ms. ``scattered``: equal IDs are in any partition.
    """
    found = endless(seed, partitions=partitions, topics=topics, scattered=scattered, jitter_ms=jitter_ms)
    return list(islice(found, events))


def endless(
    seed: int, *, partitions: int = 2, topics: int = 1, scattered: bool = False, jitter_ms: int = 20_000
) -> Iterator[Event]:
    """Yield the events of `workload` without an end, for a test that takes as long as its machine needs."""
    dice = random.Random(seed)
    next_id = 0
    for number in count():
        kind = dice.random()
        time_ms = BASE_MS + number * STEP_MS + dice.randint(-jitter_ms, 0)
        if kind < 0.005:
            yield Event(dice.randrange(partitions), dice.choice(BAD), time_ms, topic=dice.randrange(topics))
            continue
        if kind < 0.25 and next_id:
            chosen = max(0, next_id - 1 - dice.randrange(60))
        elif kind < 0.3 and next_id:
            chosen = dice.randrange(next_id)
        else:
            chosen, next_id = next_id, next_id + 1
        value = b'{"id":"order-%d","n":%d,"pad":"%s"}' % (chosen, number, b"x" * 40)
        key = b"k%d" % (chosen % 17)
        partition = dice.randrange(partitions) if scattered else chosen % partitions
        yield Event(partition, value, time_ms, key, topic=dice.randrange(topics))


@dataclass(frozen=True, slots=True)
class Expected:
    """What must come out, counted without any of the code under test: right where the guard covers the whole stream."""

    ids: frozenset[str]
    bad: int
    total: int

    @classmethod
    def of(cls, events: Iterable[Event]) -> Expected:
        """Count the distinct IDs, and the records that have none."""
        ids: set[str] = set()
        bad = total = 0
        for event in events:
            total += 1
            found = id_of(event.value)
            bad += found is None
            ids |= {found} if found is not None else set()
        return cls(frozenset(ids), bad, total)


def id_of(value: bytes | None) -> str | None:
    """Return the ID of a record of `workload`, None for a bad one."""
    try:
        found = json.loads(value or b"")
    except ValueError:
        return None
    return found.get("id") if isinstance(found.get("id"), str) else None


def assert_order_kept(output: Iterable[Message]) -> None:
    """Records of one source partition come out in the order they went in, whatever was left out between them."""
    last: dict[tuple[int | None, str], int] = defaultdict(lambda: -1)
    for message in output:
        value = json.loads(message.value() or b"{}")
        # Within one ID's partition numbers grow; behind a repartition topic only the order per ID is promised.
        place = (message.partition(), str(value["id"]))
        assert value["n"] > last[place], f"{place}: {value['n']} came after {last[place]}"
        last[place] = value["n"]
