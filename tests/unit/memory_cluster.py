"""A cluster in memory for the verifier: topics as lists, offsets as they are set, retention as a number."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Self

from dedup.core.tracking_id import FieldRule, TrackingId, parse_path
from dedup.core.window import Window
from dedup.topology.model import LateTo, SourceSpec, Topology
from dedup.topology.schema import Output
from dedup.verify.cut import take_cut
from dedup.verify.direct import verify_direct
from dedup.verify.kafka_reader import Bounds, OpenTransaction, RecordColumns, StartDeleted
from dedup.verify.repartitioned import verify_repartitioned
from dedup.verify.report import Report

BASE_MS = 1_700_000_000_000
Place = tuple[str, int]
Headers = list[tuple[str, bytes]]


@dataclass
class MemoryCluster:
    """Stands for `KafkaReader`, with one topology's topics."""

    topics: dict[str, int]
    """Topic -> partition count."""
    logs: dict[Place, list[tuple[int, bytes | None, bytes | None, Headers, int]]] = field(default_factory=dict)
    low: dict[Place, int] = field(default_factory=dict)
    """Where retention has deleted the beginning."""
    offsets: dict[Place, int] = field(default_factory=dict)
    """Of the group."""
    markers: dict[Place, int] = field(default_factory=dict)
    """Offsets behind the last record that hold none."""
    compact: set[str] = field(default_factory=set)
    broker_time: set[str] = field(default_factory=set)
    broker_time_from: dict[Place, int] = field(default_factory=dict)
    """Where the topic's timestamp type was changed to LogAppendTime."""
    open_from: dict[Place, int] = field(default_factory=dict)
    """Where an open transaction begins."""
    deletes: dict[Place, tuple[int, int]] = field(default_factory=dict)
    """The offset at which a reader is overtaken by retention, and the first offset that is left then."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def put(
        self, topic: str, value: bytes | None, time_ms: int, headers: Headers | None = None, partition: int = 0
    ) -> int:
        log = self.logs.setdefault((topic, partition), [])
        offset = log[-1][0] + 1 if log else 0
        log.append((offset, None, value, headers or [], time_ms))
        return offset

    def end(self, place: Place) -> int:
        log = self.logs.get(place)
        return (log[-1][0] + 1 if log else self.low.get(place, 0)) + self.markers.get(place, 0)

    def commit(self, *topics: str) -> None:
        """The group's offsets are at the ends."""
        for topic in topics:
            for partition in range(self.topics[topic]):
                self.offsets[topic, partition] = self.end((topic, partition))

    def partitions(self, topics: Iterable[str]) -> dict[str, int]:
        return {topic: self.topics.get(topic, 0) for topic in topics}

    def bounds(
        self, topic: str, partitions: Iterable[int] | None = None, since: Mapping[int, int] | None = None
    ) -> dict[int, Bounds]:
        found = {}
        for partition in range(self.partitions([topic])[topic]) if partitions is None else partitions:
            start, begin = self.low.get((topic, partition), 0), (since or {}).get(partition, 0)
            end = self.end((topic, partition))
            found[partition] = Bounds(max(start, begin), end, start > begin, max(0, begin - start))
        return found

    def compacted(self, topics: Iterable[str]) -> frozenset[str]:
        return frozenset(topics) & self.compact

    def offset_for_time(self, topic: str, partition: int, time_ms: int) -> int | None:
        low = self.low.get((topic, partition), 0)
        return next(
            (row[0] for row in self.logs.get((topic, partition), []) if row[0] >= low and row[4] >= time_ms), None
        )

    def committed(self, group: str, topic: str, partitions: Iterable[int]) -> dict[int, int]:
        known = {} if group.endswith(".reset") else self.offsets
        return {partition: known[topic, partition] for partition in partitions if (topic, partition) in known}

    def holds_records(self, topic: str, partition: int, start: int, end: int) -> bool:
        place = (topic, partition)
        records = any(start <= row[0] < end for row in self.logs.get(place, []))
        return records or self.open_from.get(place, end) < end

    def read(self, topic: str, partition: int, start: int, end: int) -> Iterator[RecordColumns]:
        place = (topic, partition)
        # A broker refuses to read what is deleted.
        assert start >= end or start >= self.low.get(place, 0), f"{topic}/{partition} offset {start} is deleted"
        stop = self.open_from.get(place, end)
        # One batch a record: whatever is found must not depend on what a fetch returns.
        for offset, key, value, headers, time_ms in list(self.logs.get(place, [])):
            if start <= offset < min(end, stop):
                if self.deletes.get(place, (offset + 1, 0))[0] <= offset:
                    _, self.low[place] = self.deletes.pop(place)
                if offset < self.low.get(place, 0):
                    raise StartDeleted(topic, partition, self.low[place])
                columns = ([offset], [key], [value], [list(headers)], [time_ms])
                stamped = topic in self.broker_time or offset >= self.broker_time_from.get(place, offset + 1)
                yield RecordColumns(*columns, broker_time=stamped, created=None if stamped else offset)
        if stop < end:
            raise OpenTransaction(f"{topic}/{partition}")


def topology_of(*, direct: bool = True, start: str | int = "earliest", **other: object) -> Topology:
    """Return a topology `x` from x-in to x-out; guard period and grace are 10 s."""
    fixed: dict[str, object] = {
        "source": SourceSpec(("x-in",), start=start, partitioned_by_tracking_id=direct),  # type: ignore[arg-type]
        "output": Output(topic="x-out"),
        "late": LateTo("x-late"),
        "dead_letter": "x-dead",
        "window": Window(guard_ms=10_000, grace_ms=10_000),
    }
    return Topology(name="x", tracking_id=TrackingId(FieldRule(parse_path("id")), ()), **(fixed | other))  # type: ignore[arg-type]


def cluster_of(topology: Topology) -> MemoryCluster:
    """Return a cluster with the topology's topics, all empty."""
    late = topology.late.topic if isinstance(topology.late, LateTo) else None
    output = topology.output.topic if topology.output is not None else None
    named = (*topology.source.topics, output, late, topology.dead_letter, topology.duplicates, topology.conflicts)
    topics = {topic: 1 for topic in named if topic is not None}
    if not topology.direct:
        topics[topology.repartition_topic] = 2
    return MemoryCluster(topics, broker_time={topic for topic in (late, topology.dead_letter) if topic is not None})


def value_of(name: str) -> bytes:
    return json.dumps({"id": name}).encode()


def at(second: float) -> int:
    return BASE_MS + int(second * 1000)


def origin(offset: int, time_ms: int, topic: str = "x-in") -> Headers:
    """Return the headers that name the source record."""
    return [("dedup-source", f"{topic}/0/{offset}".encode()), ("dedup-timestamp", str(time_ms).encode())]


def dead_letter(cluster: MemoryCluster, value: bytes, offset: int, second: float, reason: str, now_s: float) -> None:
    """The dead-letter topic has a record of the source, appended at a second of the broker's clock."""
    why = [("dedup-reason", reason.encode()), ("dedup-detail", b"a sentence")]
    cluster.put("x-dead", value, at(now_s), [*why, *origin(offset, at(second))])


def run_of(topology: Topology, rows: list[tuple[str, float]], belongs: str) -> MemoryCluster:
    """Return a run; each record is Unique, Duplicate, Late, forwarded though late (F), a null value (T), or nowhere."""
    cluster = cluster_of(topology)
    first: dict[str, tuple[int, int]] = {}
    for (name, second), where in zip(rows, belongs, strict=True):
        value = None if where == "T" else value_of(name)
        offset = cluster.put("x-in", value, at(second))
        if where in "UTF":
            verdict = {"U": [], "T": [("dedup-verdict", b"tombstone")], "F": [("dedup-verdict", b"late")]}[where]
            cluster.put("x-out", value, at(second), verdict)
            first[name] = (at(second), offset)
        elif where == "L":
            cluster.put("x-late", value, at(1000), origin(offset, at(second)))
        elif where == "D" and topology.duplicates is not None:
            first_ms, first_offset = first[name]
            added = [("dedup-first-time", str(first_ms).encode()), ("dedup-first-source", b"x-in/0/%d" % first_offset)]
            cluster.put(topology.duplicates, value, at(second), added)
    cluster.commit("x-in")
    return cluster


def verified(cluster: MemoryCluster, topology: Topology, sample: int = 1) -> Report:
    """Return what a verification finds."""
    report = Report(topology.name, "memory", "replay", 0, sample=sample)
    with (
        TemporaryDirectory() as directory,
        closing(take_cut(topology, cluster, report, lambda *_: None, directory, sample)) as cut,  # type: ignore[arg-type]
    ):
        (verify_direct if topology.direct else verify_repartitioned)(cut)
    return report


def wrong(report: Report) -> dict[str, int]:
    return {kind: number for kind, number in report.counts.items() if number}
