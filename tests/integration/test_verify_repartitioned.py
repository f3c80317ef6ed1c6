"""The verifier behind a repartition topic: two source topics, feeds with skew, and what a purge leaves provable."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest

from dedup.core.tracking_id import FieldRule, TrackingId, parse_path
from dedup.core.window import Window
from dedup.settings import Settings, load_settings
from dedup.topology.model import LateTo, SourceSpec, Topology
from dedup.topology.schema import Output
from dedup.verify.cut import WHY_MEANWHILE, OnProgress
from dedup.verify.explanation import explain_id
from dedup.verify.report import Report
from dedup.verify.verifier import verify
from dedup.worker.introspection import state_keys
from tests.brokers import Admin, RunningKafka
from tests.integration.fleet import KEPT
from tests.integration.planting import BASE_MS, Sent, commit, found, send

pytestmark = pytest.mark.broker

# (source topic, ID, second, partition of the repartition topic, where it belongs)
ROWS = [
    ("left", "a", 100, 0, "U"),
    ("left", "b", 101, 1, "U"),
    ("right", "a", 104, 0, "D"),
    ("left", "c", 300, 0, "U"),
    # Late by the left topic alone; stream time is the minimum of both, so it is judged and unique.
    ("right", "d", 110, 0, "U"),
    ("right", "b", 102, 1, "D"),
    ("right", "", 0, 0, "X"),
    ("right", "e", 290, 0, "U"),
    ("right", "f", 275, 0, "L"),
]


@dataclass
class Run:
    """A correct run, before anything is planted."""

    source: list[Sent] = field(default_factory=list)
    log: list[Sent] = field(default_factory=list)
    output: list[Sent] = field(default_factory=list)
    beside: list[Sent] = field(default_factory=list)


def the_run(name: str) -> Run:
    run = Run()
    next_offset = {"left": 0, "right": 0}
    for side, id_, second, partition, belongs in ROWS:
        offset = next_offset[side]
        next_offset[side] += 1
        time_ms = BASE_MS + second * 1000
        value = json.dumps({"id": id_} if id_ else {}).encode()
        sent = Sent(f"{name}-{side}", 0, id_.encode(), value, [("trace", b"1")], time_ms)
        origin = [("dedup-source", f"{name}-{side}/0/{offset}".encode()), ("dedup-timestamp", str(time_ms).encode())]
        run.source.append(sent)
        run.log.append(
            replace(sent, topic=f"{name}.repartition", partition=partition, headers=[*sent.headers, *origin])
        )
        if belongs == "U":
            run.output.append(replace(sent, topic=f"{name}-out", partition=second % 2))
        elif belongs == "L":
            run.beside.append(replace(sent, topic=f"{name}-late", headers=[*sent.headers, *origin]))
        elif belongs == "X":
            why = [("dedup-reason", b"id_missing"), ("dedup-detail", b"a sentence")]
            run.beside.append(replace(sent, topic=f"{name}-dead", headers=[*sent.headers, *why, *origin]))
    idle = [("dedup-idle", f"{name}-right/0".encode()), ("dedup-timestamp", b"0")]
    run.log.append(Sent(f"{name}.repartition", 1, None, None, idle, BASE_MS))
    return run


@dataclass
class Bench:
    """Writes a run to the broker and verifies it."""

    kafka: RunningKafka
    admin: Admin
    name: str
    directory: Path

    def topology(self) -> Topology:
        return Topology(
            name=self.name,
            source=SourceSpec((f"{self.name}-left", f"{self.name}-right")),
            tracking_id=TrackingId(FieldRule(parse_path("id")), ()),
            window=Window(guard_ms=10_000, grace_ms=10_000),
            output=Output(topic=f"{self.name}-out"),
            late=LateTo(f"{self.name}-late"),
            dead_letter=f"{self.name}-dead",
        )

    def write(self, plant: Callable[[Run], object] = lambda _: None) -> None:
        for topic, partitions in (("left", 1), ("right", 1), ("out", 2)):
            self.admin.create_topic(f"{self.name}-{topic}", partitions, KEPT)
        stamped = {"message.timestamp.type": "LogAppendTime", **KEPT}
        for topic, partitions in ((f"{self.name}.repartition", 2), (f"{self.name}-late", 2), (f"{self.name}-dead", 2)):
            self.admin.create_topic(topic, partitions, stamped)
        run = the_run(self.name)
        plant(run)
        send(self.kafka, run.source)
        send(self.kafka, run.log)
        send(self.kafka, [*run.output, *run.beside])
        ends: dict[str, dict[int, int]] = {f"{self.name}.repartition": {0: 0, 1: 0}}
        for sent in [*run.source, *run.log]:
            of_topic = ends.setdefault(sent.topic, {})
            of_topic[sent.partition] = of_topic.get(sent.partition, 0) + 1
        for topic, offsets in ends.items():
            commit(self.kafka, self.name, topic, offsets)

    def settings(self) -> Settings:
        config = self.directory / "config.yaml"
        config.write_text(f"brokers: ['{self.kafka.bootstrap}']\n", encoding="utf-8")
        return load_settings(config, [], {})

    def verify(self, *, sample: int = 1, progress: OnProgress = lambda *_: None) -> Report:
        return verify(self.topology(), self.settings(), sample=sample, progress=progress)

    def purge(self) -> None:
        self.admin.delete_below(f"{self.name}.repartition", {0: 3})


@pytest.fixture
def bench(kafka: RunningKafka, admin: Admin, topic_names: Callable[[str], str], tmp_path: Path) -> Bench:
    return Bench(kafka, admin, topic_names("joined"), tmp_path)


def test_a_correct_run_passes(bench: Bench) -> None:
    bench.write()
    report = bench.verify()
    assert found(report) == {}, report.samples
    assert report.not_provable == {}
    assert report.read == len(ROWS)
    assert [books.balanced for books in report.books] == [True, True]


def test_a_sample_of_a_correct_run_passes(bench: Bench) -> None:
    bench.write()
    for sample in (2, 3):
        report = bench.verify(sample=sample)
        assert found(report) == {}, report.samples
        assert report.read < len(ROWS)
        assert report.read + report.unsampled == len(ROWS)


def of_the_step(run: Run, reason: str = "refused_by_broker", **changed: bytes) -> None:
    """The record `d` does not come to the repartition topic; the step has made it a dead letter."""
    run.output.pop(3)
    dead = run.log.pop(4)
    why = [("dedup-reason", reason.encode()), ("dedup-detail", b"a sentence")]
    headers = [*dead.headers[:-2], *why, *dead.headers[-2:]]
    run.beside.append(replace(dead, topic=run.beside[0].topic, partition=0, headers=headers, **changed))


def test_a_dead_letter_of_the_step_is_taken_by_evidence(bench: Bench) -> None:
    bench.write(of_the_step)
    report = bench.verify()
    assert found(report) == {}, report.samples
    assert report.not_provable == {"dead letters of the repartition step": 1}


PLANTS = [
    pytest.param(partial(of_the_step, reason="id_missing"), {"wrong_dead_letter": 1}, id="no reason of the step"),
    pytest.param(partial(of_the_step, reason="schema_unknown"), {"wrong_dead_letter": 1}, id="without a registry"),
    pytest.param(partial(of_the_step, value=b"{}"), {"changed": 1}, id="the step changed it"),
    pytest.param(lambda run: run.output.pop(1), {"lost": 1}, id="lost on the way to the output"),
    pytest.param(lambda run: run.log.pop(4), {"lost": 1, "phantom": 1}, id="lost on the way to the log"),
    pytest.param(lambda run: run.log.append(run.log[2]), {"duplicated": 1}, id="twice in the log"),
    pytest.param(lambda run: run.output.append(run.output[0]), {"duplicated": 1}, id="twice in the output"),
    pytest.param(
        lambda run: run.output.append(replace(run.source[2], topic=run.output[0].topic)),
        {"duplicated": 1},
        id="a duplicate from the other topic forwarded",
    ),
    pytest.param(
        lambda run: run.log.__setitem__(3, replace(run.log[3], value=b'{"id": "c", "x": 1}')),
        {"changed": 2},
        id="changed in the log",
    ),
]


@pytest.mark.parametrize(("plant", "expected"), PLANTS)
def test_a_planted_fault_is_caught(bench: Bench, plant: Callable[[Run], object], expected: dict[str, int]) -> None:
    bench.write(plant)
    report = bench.verify()
    assert not report.passed
    for kind, number in expected.items():
        assert report.counts[kind] == number, report.samples  # type: ignore[index]  # a kind by its name


def test_what_is_purged_is_checked_without_order_and_counted_apart(bench: Bench) -> None:
    bench.write()
    bench.purge()
    report = bench.verify()
    assert found(report) == {}, report.samples
    assert sum(report.not_provable.values()) > 0
    # Two by the replay of the partition that is whole, and a dead letter, which needs no order.
    assert report.read == 3


def test_what_is_deleted_while_others_are_read_is_told_apart(bench: Bench) -> None:
    """Was: exit code 5, at each attempt."""
    bench.write()

    def delete(place: str, _done: int, _total: int) -> None:
        if place == f"{bench.name}-out/0":  # The sources are read last.
            bench.admin.delete_below(f"{bench.name}-left", {0: 2})

    report = bench.verify(progress=delete)
    assert found(report) == {}, report.samples
    assert report.not_provable == {f"{WHY_MEANWHILE} {bench.name}-left": 2}


def test_an_id_is_explained_while_workers_delete_from_the_repartition_topic(bench: Bench) -> None:
    """Was: exit code 5, at each attempt."""
    bench.write()
    log, keys = f"{bench.name}.repartition", frozenset(state_keys(bench.topology(), "b"))

    def delete(place: str, _done: int, _total: int) -> None:
        if place == f"{log}/0":
            bench.admin.delete_below(log, {1: 1})

    result = explain_id(bench.topology(), bench.settings(), "b", keys, progress=delete)
    first, second = result.records
    assert (first.verdict, second.log_place) == ("purged", f"{log}/1 offset 1")
    assert (result.contradictions, result.whole) == (0, False)


@pytest.mark.parametrize(
    ("plant", "kind"),
    [
        pytest.param(lambda run: run.output.pop(2), "lost", id="lost"),
        pytest.param(lambda run: run.output.append(run.output[0]), "duplicated", id="twice"),
        pytest.param(lambda run: run.beside.pop(), "lost", id="late record lost"),
    ],
)
def test_loss_and_repetition_are_caught_after_a_purge_too(
    bench: Bench, plant: Callable[[Run], object], kind: str
) -> None:
    bench.write(plant)
    bench.purge()
    assert found(bench.verify()) == {kind: 1}
