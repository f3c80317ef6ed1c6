"""`TopologyTestDriver` gives the verdicts of the exact model, wherever batches are cut."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dedup.core.extract import FaultKind
from dedup.core.partitioner import partitions
from dedup.core.reference_model import ModelRecord, ModelRules, ModelVerdict, ReferenceModel
from dedup.core.window import Source
from dedup.topology.model import Topology, extractor_of
from dedup.topology.parse import parse
from dedup.worker.topology_test_driver import TopologyTestDriver

NOW_MS = 1_000
MODEL_FAULTS = {
    FaultKind.MISSING_ID: "missing_id",
    FaultKind.UNREADABLE: "unreadable",
    FaultKind.TOMBSTONE: "tombstone",
    FaultKind.BAD_TIME: "bad_time",
}
Place = tuple[int, int]
"""Position of a source topic, and a partition."""
Line = tuple[str, bytes | None, bytes | None]
"""Topic, value, and the header that says why the record is there."""
WHY = {"out": "dedup-verdict", "twice": "dedup-first-source", "other": "dedup-first-source"}


@dataclass(frozen=True)
class Step:
    """A record of a source partition or, without a value, an idle marker."""

    place: Place
    value: bytes | None
    idle: bool = False


@st.composite
def topologies(draw: st.DrawFn, topics: int) -> Topology:
    direct = {"partitioned_by": "tracking_id"} if topics == 1 else {}
    document = {
        "dedup": 1,
        "name": "t",
        "source": {"topics": ["a", "b"][:topics], **direct},
        "tracking_id": {
            "field": "id",
            "missing": draw(st.sampled_from(["dead_letter", "forward"])),
            "tombstones": draw(st.sampled_from(["dead_letter", "forward"])),
        },
        "event_time": {"field": "t", "unit": "ms"},
        "guard_period": "10ms",
        "grace": draw(st.sampled_from(["0s", "5ms", "10ms"])),
        "extend": draw(st.booleans()),
        "max_clock_skew": "0s",
        "future": draw(st.sampled_from(["dead_letter", "clamp"])),
        "on_conflict": draw(st.sampled_from(["duplicate", "forward"])),
        "output": {"topic": "out"},
        "late": draw(st.sampled_from(["late", "forward", "drop"])),
        "duplicates": "twice",
        "conflicts": "other",
        "dead_letter": "dead",
    }
    return parse(json.dumps(document), name="t.yaml")


@st.composite
def steps(draw: st.DrawFn, topics: int, partitions_each: int) -> list[Step]:
    found: list[Step] = []
    base_ms = 500
    for _ in range(draw(st.integers(1, 18))):
        place = draw(st.integers(0, topics - 1)), draw(st.integers(0, partitions_each - 1))
        base_ms += draw(st.integers(0, 12))
        shape = draw(st.integers(0, 19))
        time_ms = NOW_MS + 1 if shape == 0 else base_ms + draw(st.integers(-25, 5))
        name = draw(st.sampled_from("abcd"))
        value = json.dumps({"id": name, "t": time_ms, "n": draw(st.integers(0, 1))}).encode()
        odd = {1: b"no json", 2: b'{"t": 1}', 3: None, 4: b'{"id": "a"}'}
        found.append(Step(place, odd.get(shape, value), idle=topics > 1 and shape == 5))
    return found


class Expected:
    """What the model says must be in each topic, and how often it gave each verdict."""

    def __init__(self, topology: Topology, partitions_each: int) -> None:
        window = topology.window
        self.rules = ModelRules(
            window.guard_ms,
            window.grace_ms,
            window.extend,
            window.extend_at_most_ms,
            topology.missing.value,  # type: ignore[arg-type]
            topology.tombstones.value,
            topology.on_conflict.value,  # type: ignore[arg-type]
            topology.future.value,
        )
        self.topology = topology
        self.count = partitions_each
        feeds = [(topic, number) for topic in range(len(topology.source.topics)) for number in range(partitions_each)]
        self.models = [
            ReferenceModel(self.rules, [(0, number)] if topology.direct else feeds) for number in range(partitions_each)
        ]
        self.offsets: Counter[Place] = Counter()
        self.extract = extractor_of(topology)
        self.lines: list[Line] = []
        self.verdicts: Counter[str] = Counter()

    def feed(self, step: Step) -> None:
        if step.idle:
            for model in self.models:
                model.judge(ModelRecord(None, 0, Source(*step.place, -1), idle=True))
            return
        found = self.extract([None], [step.value], [[]], [NOW_MS])
        fault = found.faults.get(0)
        source = Source(*step.place, self.offsets[step.place])
        self.offsets[step.place] += 1
        own_id = None if fault else found.ids[0]
        at = step.place[1]
        if not self.topology.direct and found.ids[0] is not None:
            at = partitions([found.ids[0]], self.count)[0]
        fingerprint = b"" if found.fingerprints is None else found.fingerprints[0]
        kind = None if fault is None else MODEL_FAULTS[fault.kind]
        record = ModelRecord(own_id, found.times_ms[0], source, fingerprint, kind, NOW_MS)  # type: ignore[arg-type]
        verdict = self.models[at].judge(record)
        self.verdicts[verdict.kind] += 1
        self.lines += self._line(step, verdict)

    def _line(self, step: Step, verdict: ModelVerdict) -> list[Line]:
        match verdict.kind:
            case "unique":
                return [("out", step.value, b"conflict" if verdict.conflict else None)]
            case "exempt":
                return [("out", step.value, verdict.reason.encode())]
            case "duplicate":
                assert verdict.of is not None
                first = verdict.of.source.place(self.topology.source.topics).encode()
                return [("other" if verdict.conflict else "twice", step.value, first)]
            case "late":
                late = {"LateTo": "late", "LateForward": "out", "LateDrop": None}[type(self.topology.late).__name__]
                return [] if late is None else [(late, step.value, b"late" if late == "out" else None)]
            case _:
                return [("dead", step.value, None)]


def driven(topology: Topology, count: int, calls: list[list[Step]]) -> tuple[list[Line], Counter[str]]:
    """Return what the topics hold if each call feeds these records, which are of one partition, at once."""
    names = topology.source.topics
    with TopologyTestDriver(topology, partitions=count, now=NOW_MS) as driver:
        for call in calls:
            topic, partition = call[0].place
            if call[0].idle:
                driver.idle(partition, topic=names[topic])
            else:
                driver.feed(*(step.value for step in call), topic=names[topic], partition=partition)
        lines = [
            (topic, record.value, record.header(WHY.get(topic, "")))
            for topic, _ in topology.outlets
            for record in driver.read(topic)
        ]
        return lines, +driver.verdicts


def by_topic(lines: list[Line]) -> dict[str, list[Line]]:
    found = defaultdict(list)
    for line in lines:
        found[line[0]].append(line)
    return found


@pytest.mark.parametrize(("topics", "count"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_the_driver_says_what_the_model_says(topics: int, count: int, data: st.DataObject) -> None:
    topology, stream = data.draw(topologies(topics)), data.draw(steps(topics, count))
    expected = Expected(topology, count)
    for step in stream:
        expected.feed(step)
    calls: list[list[Step]] = []
    for step in stream:
        joins = calls and calls[-1][0].place == step.place and not calls[-1][0].idle and not step.idle
        if joins and data.draw(st.booleans()):
            calls[-1].append(step)
        else:
            calls.append([step])
    lines, verdicts = driven(topology, count, calls)
    assert Counter(lines) == Counter(expected.lines)
    assert verdicts == expected.verdicts
    if count == 1:
        assert by_topic(lines) == by_topic(expected.lines)
