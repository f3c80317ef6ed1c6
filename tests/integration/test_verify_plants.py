"""The verifier on a real broker: a correct run passes; each planted fault is caught and named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition

from dedup.core.tracking_id import FieldRule, TrackingId, parse_path
from dedup.core.window import Window
from dedup.settings import Settings, load_settings
from dedup.topology.model import LateTo, SourceSpec, Topology, extractor_of
from dedup.topology.schema import Output
from dedup.verify import kafka_reader, spill
from dedup.verify.kafka_reader import KafkaReader
from dedup.verify.render import to_html
from dedup.verify.report import Report
from dedup.verify.verifier import verify
from tests.brokers import RELEASE, Admin, RunningKafka
from tests.integration.fleet import KEPT
from tests.integration.planting import BASE_MS, Sent, commit, found, send

pytestmark = pytest.mark.broker

YEAR_2099_MS = 4_070_908_800_000


def topology_of(name: str) -> Topology:
    return Topology(
        name=name,
        source=SourceSpec((f"{name}-in",), partitioned_by_tracking_id=True),
        tracking_id=TrackingId(FieldRule(parse_path("id")), ()),
        window=Window(guard_ms=10_000, grace_ms=10_000),
        output=Output(topic=f"{name}-out"),
        duplicates=f"{name}-duplicates",
        late=LateTo(f"{name}-late"),
        dead_letter=f"{name}-dead",
    )


@dataclass(frozen=True)
class Row:
    """A source record and where it belongs: Unique, Duplicate, Late, dead letter (X), or Pending."""

    partition: int
    id: str
    second: int
    belongs: str
    reason: str = ""
    first: tuple[int, int] = (0, 0)
    """Of a duplicate: first time in s, and offset."""
    headers: tuple[tuple[str, bytes], ...] = ()

    @property
    def time_ms(self) -> int:
        return YEAR_2099_MS if self.second < 0 else BASE_MS + self.second * 1000

    @property
    def value(self) -> bytes:
        return b"no json" if self.reason == "unreadable" else json.dumps({"id": self.id, "at": self.second}).encode()


ROWS = [
    Row(0, "a", 100, "U"),
    Row(0, "b", 101, "U", headers=(("trace", b"\x00\xff"), ("trace", b""))),
    Row(0, "a", 105, "D", first=(100, 0)),
    Row(0, "c", 110, "U"),
    Row(0, "", 111, "X", reason="unreadable"),
    Row(0, "d", 95, "L"),
    Row(0, "e", 103, "U"),
    Row(0, "a", 111, "U"),
    Row(0, "y", -1, "X", reason="future_time"),
    Row(0, "b", 99, "D", first=(101, 1)),
    Row(0, "f", 112, "U"),
    Row(1, "m", 50, "U"),
    Row(1, "n", 51, "U"),
    Row(1, "m", 52, "D", first=(50, 0)),
    Row(1, "o", 53, "U"),
    Row(1, "p", 54, "P"),
    Row(1, "m", 55, "P"),
]


@dataclass
class World:
    """A correct run, before anything is planted."""

    name: str
    output: list[Sent] = field(default_factory=list)
    late: list[Sent] = field(default_factory=list)
    dead: list[Sent] = field(default_factory=list)
    duplicates: list[Sent] = field(default_factory=list)
    committed: dict[int, int] = field(default_factory=dict)


def the_run(name: str) -> tuple[list[Sent], World]:
    """Return the input, and the output as it must be."""
    world = World(name)
    source: list[Sent] = []
    next_offset = {0: 0, 1: 0}
    for row in ROWS:
        offset = next_offset[row.partition]
        next_offset[row.partition] += 1
        sent = Sent(f"{name}-in", row.partition, row.id.encode(), row.value, list(row.headers), row.time_ms)
        source.append(sent)
        if row.belongs != "P":
            world.committed[row.partition] = offset + 1
        place = f"{name}-in/{row.partition}/{offset}".encode()
        origin = [("dedup-source", place), ("dedup-timestamp", str(row.time_ms).encode())]
        if row.belongs == "U":
            world.output.append(replace(sent, topic=f"{name}-out"))
        elif row.belongs == "L":
            world.late.append(replace(sent, topic=f"{name}-late", headers=[*sent.headers, *origin]))
        elif row.belongs == "X":
            why = [("dedup-reason", CODES[row.reason]), ("dedup-detail", b"a sentence")]
            world.dead.append(replace(sent, topic=f"{name}-dead", headers=[*sent.headers, *why, *origin]))
        elif row.belongs == "D":
            second, first_offset = row.first
            first = [
                ("dedup-first-time", str(BASE_MS + second * 1000).encode()),
                ("dedup-first-source", f"{name}-in/{row.partition}/{first_offset}".encode()),
            ]
            world.duplicates.append(replace(sent, topic=f"{name}-duplicates", headers=[*sent.headers, *first]))
    return source, world


CODES = {"unreadable": b"not_json", "future_time": b"future_time"}


@dataclass
class Bench:
    """Writes a run to the broker and verifies it."""

    kafka: RunningKafka
    admin: Admin
    name: str
    directory: Path
    topology: Topology = field(init=False)
    settings: Settings = field(init=False)

    def __post_init__(self) -> None:
        self.topology = topology_of(self.name)
        config = self.directory / "config.yaml"
        config.write_text(f"brokers: ['{self.kafka.bootstrap}']\n", encoding="utf-8")
        self.settings = load_settings(config, [], {})
        for suffix in ("in", "out", "duplicates"):
            # The broker's own default refuses times more than an hour ahead.
            config_of = {"retention.ms": "-1"}
            if RELEASE >= (3, 6):
                config_of["message.timestamp.after.max.ms"] = str(1 << 62)
            self.admin.create_topic(f"{self.name}-{suffix}", 2, config_of)
        for suffix in ("late", "dead"):
            config_of = {"message.timestamp.type": "LogAppendTime"}
            self.admin.create_topic(f"{self.name}-{suffix}", 2, config_of)

    def verify(self, plant: Callable[[World], object] = lambda _: None, *, sample: int = 1) -> Report:
        source, world = the_run(self.name)
        plant(world)
        send(self.kafka, source)
        # Transactional, as the worker's are: the markers leave gaps in the offsets.
        written = [*world.output, *world.late, *world.dead, *world.duplicates]
        send(self.kafka, written, transactional_id="planted-by-hand")
        commit(self.kafka, self.name, f"{self.name}-in", world.committed)
        return verify(self.topology, self.settings, sample=sample)


@pytest.fixture(autouse=True, params=[3, spill.BUCKET_ROWS], ids=["many buckets", "one bucket"])
def buckets(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is found must be found however many buckets the records are in."""
    monkeypatch.setattr(spill, "BUCKET_ROWS", request.param)


@pytest.fixture
def bench(kafka: RunningKafka, admin: Admin, topic_names: Callable[[str], str], tmp_path: Path) -> Bench:
    return Bench(kafka, admin, topic_names("planted"), tmp_path)


def test_a_correct_run_passes(bench: Bench) -> None:
    report = bench.verify()
    assert found(report) == {}, report.samples
    assert report.passed
    assert report.not_provable == {}
    assert report.closing_line() == "lost 0  duplicated 0"
    first, second = report.books
    assert (first.read, first.unique, first.duplicates, first.late, first.dead_letters) == (11, 6, 2, 1, 2)
    assert (second.read, second.unique, second.duplicates, second.pending) == (4, 3, 1, 2)
    assert first.balanced
    assert second.balanced


def sent_twice(world: World) -> None:
    world.output.append(world.output[0])


def duplicate_forwarded(world: World) -> None:
    again = world.duplicates[0]
    world.output.insert(2, replace(again, topic=world.output[0].topic, headers=again.headers[:-2]))


def swapped(world: World) -> None:
    world.output[1], world.output[2] = world.output[2], world.output[1]


def changed(**other: object) -> Callable[[World], None]:
    def plant(world: World) -> None:
        world.output[1] = replace(world.output[1], **other)  # type: ignore[arg-type]

    return plant


def judged_late(world: World) -> None:
    """The record `e` is in the late topic instead of the output."""
    sent = world.output.pop(3)
    place = f"{world.name}-in/0/6".encode()
    headers = [("dedup-source", place), ("dedup-timestamp", str(sent.timestamp_ms).encode())]
    world.late.append(replace(sent, topic=world.late[0].topic, headers=headers))


def invented(world: World) -> None:
    world.output.append(replace(world.output[0], value=b'{"id": "never sent"}'))


def wrong_reason(world: World, reason: bytes = b"missing_id") -> None:
    dead = world.dead[0]
    world.dead[0] = replace(dead, headers=[("dedup-reason", reason), *dead.headers[1:]])


def made_a_dead_letter(world: World, reason: bytes = b"missing_id") -> None:
    """The record `f` is a dead letter without an ID, which it has, instead of in the output."""
    sent = world.output.pop(5)
    place = f"{world.name}-in/0/10".encode()
    headers = [
        ("dedup-reason", reason),
        ("dedup-detail", b"a sentence"),
        ("dedup-source", place),
        ("dedup-timestamp", str(sent.timestamp_ms).encode()),
    ]
    world.dead.append(replace(sent, topic=world.dead[0].topic, headers=headers))


UNKNOWN = b"schema_unknown"
PLANTS = [
    pytest.param(lambda w: w.output.pop(1), {"lost": 1, "unbalanced": 1}, id="one loss"),
    pytest.param(lambda w: w.output.pop(), {"lost": 1, "unbalanced": 1}, id="the last one lost"),
    pytest.param(sent_twice, {"duplicated": 1, "unbalanced": 1}, id="one record twice"),
    pytest.param(duplicate_forwarded, {"duplicated": 1, "unbalanced": 1}, id="one duplicate forwarded"),
    pytest.param(swapped, {"reordered": 1}, id="one swap"),
    pytest.param(changed(value=b'{"id": "b", "at": 102}'), {"changed": 1}, id="another value"),
    pytest.param(changed(value=b'{"id":"b","at":101}'), {"changed": 1}, id="equal JSON, other bytes"),
    pytest.param(changed(headers=[("trace", b"\x00\xff")]), {"changed": 1}, id="a header lost"),
    pytest.param(changed(key=b"B"), {"changed": 1}, id="another key"),
    pytest.param(changed(timestamp_ms=BASE_MS), {"changed": 1}, id="another timestamp"),
    pytest.param(
        changed(partition=1), {"changed": 0, "lost": 1, "phantom": 1, "unbalanced": 2}, id="another partition"
    ),
    pytest.param(judged_late, {"wrong_late": 1}, id="one wrong late"),
    pytest.param(lambda w: w.late.pop(), {"lost": 1, "unbalanced": 1}, id="a late record lost"),
    pytest.param(lambda w: w.late.append(w.late[0]), {"duplicated": 1, "unbalanced": 1}, id="a late record twice"),
    pytest.param(lambda w: w.dead.pop(0), {"lost": 1, "unbalanced": 1}, id="a dead letter lost"),
    pytest.param(wrong_reason, {"wrong_dead_letter": 1}, id="another reason"),
    pytest.param(made_a_dead_letter, {"wrong_dead_letter": 1}, id="a dead letter without a reason"),
    pytest.param(partial(wrong_reason, reason=UNKNOWN), {"wrong_dead_letter": 1}, id="a schema, but no registry"),
    pytest.param(
        partial(made_a_dead_letter, reason=UNKNOWN), {"wrong_dead_letter": 1}, id="a schema, but no registry 2"
    ),
    pytest.param(invented, {"phantom": 1, "unbalanced": 1}, id="a record nobody sent"),
    pytest.param(lambda w: w.duplicates.pop(0), {"wrong_duplicate": 1}, id="a duplicate not kept"),
]


@pytest.mark.parametrize(("plant", "expected"), PLANTS)
def test_a_planted_fault_is_caught(bench: Bench, plant: Callable[[World], object], expected: dict[str, int]) -> None:
    report = bench.verify(plant)
    assert found(report) == {kind: number for kind, number in expected.items() if number}, report.samples
    assert not report.passed


def in_sample(topology: Topology, name: str, sample: int) -> bool:
    found = extractor_of(topology)([None], [json.dumps({"id": name}).encode()], [()], [BASE_MS])
    return (spill.place_of(found.ids[0], b"") >> 32) % sample == 0


SAMPLED = [
    pytest.param(lambda w: w.output.pop(1), "b", {"lost": 1, "unbalanced": 1}, id="one loss"),
    pytest.param(sent_twice, "a", {"duplicated": 1, "unbalanced": 1}, id="one record twice"),
    pytest.param(duplicate_forwarded, "a", {"duplicated": 1, "unbalanced": 1}, id="one duplicate forwarded"),
    pytest.param(changed(value=b'{"id": "b", "at": 102}'), "b", {"changed": 1}, id="another value"),
    pytest.param(judged_late, "e", {"wrong_late": 1}, id="one wrong late"),
]


@pytest.mark.parametrize(("plant", "name", "expected"), SAMPLED)
def test_a_sample_sees_what_became_of_its_ids(
    bench: Bench, plant: Callable[[World], object], name: str, expected: dict[str, int]
) -> None:
    sample = next(number for number in range(2, 100) if in_sample(bench.topology, name, number))
    report = bench.verify(plant, sample=sample)
    assert found(report) == expected, report.samples
    assert 0 < report.read < len(ROWS)
    assert f"1/{sample}" in report.closing_line()


def test_a_sample_does_not_see_the_rest_and_says_so(bench: Bench) -> None:
    sample = next(number for number in range(2, 100) if not in_sample(bench.topology, "b", number))
    report = bench.verify(lambda world: world.output.pop(1), sample=sample)
    assert report.passed
    assert "Not checked: losses" in to_html(report)
    assert report.unsampled > 0


def test_output_without_an_offset_is_not_explained(bench: Bench) -> None:
    """Output and offset become visible together: output alone was written by someone else."""

    def ahead(world: World) -> None:
        world.committed[1] = 2

    report = bench.verify(ahead)
    # The two records at the end of the output are not explained by an offset that never came.
    assert found(report) == {"phantom": 1, "wrong_duplicate": 1, "unbalanced": 1}, report.samples


def test_a_source_whose_beginning_is_deleted_proves_only_the_rest(bench: Bench) -> None:
    bench.verify()
    bench.admin.delete_below(f"{bench.name}-in", {0: 4})
    report = verify(bench.topology, bench.settings)
    assert "lost" not in found(report), report.samples
    assert "duplicated" not in found(report), report.samples
    assert sum(report.not_provable.values()) > 0


def test_an_output_whose_beginning_is_deleted_proves_only_the_rest(bench: Bench) -> None:
    bench.verify()
    bench.admin.delete_below(f"{bench.name}-out", {0: 2})
    report = verify(bench.topology, bench.settings)
    assert found(report) == {}, report.samples
    assert sum(report.not_provable.values()) == 2


def test_an_aborted_transaction_is_not_there(bench: Bench) -> None:
    report = bench.verify()
    assert report.passed
    _, world = the_run(bench.name)
    producer = send(bench.kafka, world.output, transactional_id=f"{bench.name}.aborted", commit=False)
    producer.abort_transaction(30)
    assert verify(bench.topology, bench.settings).passed


def test_the_report_is_one_page_and_a_document(bench: Bench) -> None:
    report = bench.verify(lambda world: world.output.pop(1))
    page = to_html(report)
    assert "lost 1" in page
    assert "<svg" in page
    assert "http" not in page
    assert "src=" not in page
    document = json.loads(report.to_json())
    assert document["violations"]["lost"] == 1
    assert document["passed"] is False
    assert document["samples"][0]["place"] == f"{bench.name}-in/0 offset 1"


def test_offsets_are_read_while_a_transaction_is_about_to_change_one_of_them(
    kafka: RunningKafka, admin: Admin, topic_names: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Was: all were asked for at once, and there may be no moment at which no partition has such a transaction."""
    name = topic_names("busy")
    admin.create_topic(name, 3, KEPT)
    commit(kafka, name, name, {0: 1, 1: 2})
    producer = send(kafka, [], transactional_id=name, commit=False)
    member = Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": name})
    producer.send_offsets_to_transaction([TopicPartition(name, 0, 5)], member.consumer_group_metadata(), 30)
    member.close()
    asked, ask = list[list[int]](), KafkaReader._committed

    def committed(reader: KafkaReader, group: str, places: list[TopicPartition], within_s: float) -> object:
        asked.append([place.partition for place in places])
        if asked[-1] == [2]:  # By then, the first partition has not been answered, and the second one has.
            producer.commit_transaction(30)
        return ask(reader, group, places, min(within_s, 2))

    monkeypatch.setattr(KafkaReader, "_committed", committed)
    monkeypatch.setattr(kafka_reader, "_ALL_WITHIN_S", 1)
    with KafkaReader(Settings(brokers=tuple(kafka.bootstrap.split(",")))) as reader:
        assert reader.committed(name, name, range(3)) == {1: 2, 0: 5}
    assert asked[0] == [0, 1, 2]
    assert len(asked) > 3
