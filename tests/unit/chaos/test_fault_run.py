"""`dedup chaos` without a fleet: what is drawn, what is made up, what the page says."""

import json
from collections import Counter
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, Message

from dedup.chaos import fault_run
from dedup.chaos.checks import ChaosReport, Evidence, Oracle, oracles
from dedup.chaos.fault_run import QUIET_S, ChaosEvents, ClusterFaults, FaultType, InjectedFault, Tick, draw, rates
from dedup.chaos.live_checker import LiveChecker, Sightings
from dedup.chaos.load import Age, MadeRecords
from dedup.core.extract import compile_extractor
from dedup.kafka.producer_epochs import Epochs, WrittenBatch, in_order
from dedup.settings import Settings
from dedup.topology.parse import parse
from dedup.verify.report import Books, Report

PER_MINUTE = {kind: kind.per_minute for kind in FaultType}
WORKER_FAULTS, BROKER_FAULTS, CLUSTER_FAULTS = (
    {kind for kind in FaultType if kind.target == target} for target in ("worker", "broker", "cluster")
)
FILES = [
    path
    for path in sorted(Path("topologies").glob("*.yaml"))
    if path.stem != "linked" and "\ningest:" not in f"\n{path.read_text()}"
]
"""The topologies that `dedup chaos` takes: not the one whose IDs a function returns."""


def test_the_same_seed_draws_the_same_faults_as_often_as_their_rates_say():
    faults = draw(seed=3, seconds=605, workers=3, per_minute=PER_MINUTE)
    assert faults == draw(seed=3, seconds=605, workers=3, per_minute=PER_MINUTE) == sorted(faults)
    assert faults != draw(seed=4, seconds=605, workers=3, per_minute=PER_MINUTE)
    assert sum(fault.kind is FaultType.KILL for fault in faults) == 120
    assert {fault.kind for fault in faults} == set(FaultType)
    assert {fault.worker for fault in faults} == {0, 1, 2}
    assert QUIET_S <= faults[0].at_s <= faults[-1].at_s <= 605


@pytest.mark.parametrize(
    ("harder", "embedded", "kinds"),
    [
        (1.0, False, WORKER_FAULTS),
        (3.0, False, WORKER_FAULTS),
        (1.0, True, WORKER_FAULTS | BROKER_FAULTS),
        (3.0, True, WORKER_FAULTS | BROKER_FAULTS | CLUSTER_FAULTS),
    ],
)
def test_only_our_own_broker_is_hit_and_its_cluster_changes_only_where_asked_for(harder, embedded, kinds):
    per_minute = rates(harder=harder, embedded=embedded)
    assert {fault.kind for fault in draw(seed=1, seconds=600, workers=2, per_minute=per_minute)} == kinds
    assert per_minute == {kind: harder * PER_MINUTE[kind] for kind in kinds}


def test_harder_than_usual_changes_nothing_about_the_faults_drawn_before():
    """What a seed drew in an older version, it draws still."""
    usual = {kind: PER_MINUTE[kind] for kind in FaultType if kind not in CLUSTER_FAULTS}
    faults = draw(seed=3, seconds=605, workers=3, per_minute=rates(harder=1.1, embedded=True))
    old = draw(seed=3, seconds=605, workers=3, per_minute={kind: 1.1 * rate for kind, rate in usual.items()})
    assert [fault for fault in faults if fault.kind not in CLUSTER_FAULTS] == old


class Look:
    """A watch over one topic of one partition, whose group has committed so far."""

    topic = "events"

    def __init__(self, committed, begins):
        self.committed, self.begin = committed, begins

    def beyond(self, offsets):
        return self.committed >= offsets[0]

    def begins(self):
        return {0: self.begin}


def test_retention_is_shortened_to_what_was_judged_age_by_age(monkeypatch):
    topology = parse(FILES[0].read_text(), name="t")
    watch = Look(committed=99, begins=0)
    cluster = ClusterFaults(
        topology, None, [watch], [Age(1_000, {"events": {0: 100}}), Age(2_000, {"events": {0: 200}})], None, None
    )
    altered = []

    def alter(_settings, topics, configs):
        altered.append((topics, list(configs)))
        watch.begin += 100

    monkeypatch.setattr(fault_run, "alter", alter)
    assert not cluster.shorten_retention(), "its records are not judged yet"
    assert altered == []
    watch.committed = 100
    assert cluster.shorten_retention()
    assert not cluster.shorten_retention(), "the next ones are not"
    watch.committed = 5_000
    assert cluster.shorten_retention()
    assert not cluster.shorten_retention(), "nothing is left that could go"
    assert altered == 2 * [(["events"], ["retention.ms"])]
    assert watch.begin == 200


def test_what_retention_does_not_delete_in_time_was_no_fault(monkeypatch):
    monkeypatch.setattr(fault_run, "_DELETED_WITHIN_S", 0.0)
    monkeypatch.setattr(fault_run, "alter", lambda *_: None)
    cluster = ClusterFaults(
        parse(FILES[0].read_text(), name="t"), None, [Look(500, 0)], [Age(1_000, {"events": {0: 100}})], None, None
    )
    assert not cluster.shorten_retention()


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_made_up_records_fit_every_topology(file):
    topology = parse(file.read_text(), name=str(file))
    partitions = dict.fromkeys(topology.source.topics, 4)
    records = MadeRecords(topology, partitions, run="r", seed=5)
    made = [records.at(1_700_000_000_000 + 1_000 * at) for at in range(3_000)]
    extract = compile_extractor(
        topology.tracking_id, topology.event_time, fmt=topology.source.format, fingerprint=False
    )
    found = extract(
        [each.key for each in made],
        [each.value for each in made],
        [each.headers for each in made],
        [each.time_ms for each in made],
    )
    ids = [own for own in found.ids if own is not None]
    assert len(found.faults) < 30
    assert (len(found.faults) > 0) == (topology.source.format == "json")
    assert 0.6 < len(set(ids)) / len(ids) < 0.8
    homes = {}
    for own, each in zip(found.ids, made, strict=True):
        if own is not None:
            assert homes.setdefault(own, (each.topic, each.partition)) == (each.topic, each.partition)


def report_of(*, held: bool) -> ChaosReport:
    return ChaosReport(
        "orders",
        7,
        60.0,
        2,
        ChaosEvents(
            [
                InjectedFault(6.0, FaultType.KILL, 0, hit=True),
                InjectedFault(7.0, FaultType.KILL, 1, hit=False),
                *(InjectedFault(8.0, kind, 0, hit=True) for kind in sorted(CLUSTER_FAULTS)),
            ],
            [Tick(at_s, 100 * at_s, 100 * at_s, 90 * at_s, 60 * at_s) for at_s in range(1, 60)],
            Counter({5: 1}),
        ),
        Report("orders", "b:9092", "replay", 0),
        [Oracle("O1", "nothing is lost", held, "lost 0 <of> 10")],
    )


def test_the_page_shows_what_fell_and_what_held():
    page = report_of(held=True).to_html()
    assert "1 x SIGKILL" in page
    for kind in CLUSTER_FAULTS:
        assert f"1 x {kind.value}" in page
    assert "lost 0 &lt;of&gt; 10" in page
    assert page.count("<polyline") == 2
    assert "BROKEN" not in page
    assert "http" not in page


def test_one_broken_oracle_fails_the_run():
    broken = report_of(held=False)
    assert not broken.passed
    assert "BROKEN" in broken.to_html()
    assert json.loads(broken.to_json())["blows"] == {"SIGKILL": 1} | {kind.value: 1 for kind in CLUSTER_FAULTS}


def sound() -> Evidence:
    """Return what a run leaves in which everything held."""
    report = Report("orders", "b:9092", "replay", 0)
    report.books.append(Books("orders", 0, read=3, unique=2, duplicates=1, ended=3))
    return Evidence(
        verified=report,
        seen=Sightings(2, 0, ()),
        reached=True,
        judged=True,
        stores=1,
        wrong_stores=[],
        zombies=1,
        fenced=2,
        epochs=[Epochs(9, 3, ())],
        starts=4,
    )


def plant(found: Evidence, name: str) -> None:
    match name:
        case "O1":
            found.verified.counts["lost"] = 1
        case "O2":
            found.seen = Sightings(2, 1, ("orders.unique/0 offset 7",))
        case "O3":
            found.verified.counts["reordered"] = 1
        case "O4":
            found.verified.books[0].unique = 1
        case "O5":
            found.wrong_stores = ["state/0: differs"]
        case "O6":
            found.reached = False
        case "O7":
            found.epochs.append(Epochs(2, 2, (7,)))
        case "O8":
            found.unprovoked = ["worker 0 ended by itself with exit code 1"]
        case _:
            found.unclean = ["worker 0 was killed: it did not drain in time"]


NAMES = [f"O{number}" for number in range(1, 10)]


def test_a_sound_run_holds_all_nine():
    assert [(each.name, each.held) for each in oracles(sound())] == [(name, True) for name in NAMES]


@pytest.mark.parametrize("name", NAMES)
def test_each_planted_fault_breaks_the_oracle_that_names_it(name):
    found = sound()
    plant(found, name)
    broken = [each.name for each in oracles(found) if not each.held]
    # A duplicate that the reader saw may be a zombie's.
    assert broken == (["O2", "O7"] if name == "O2" else [name])


@pytest.mark.parametrize("name", NAMES)
def test_what_could_not_be_found_out_did_not_hold(name):
    found = sound()
    found.unknown[name] = "the broker was gone"
    assert [each.name for each in oracles(found) if not each.held] == [name]
    assert "the broker was gone" in next(each.figure for each in oracles(found) if each.name == name)


def test_a_run_without_a_verification_has_a_report_and_has_failed():
    found = report_of(held=True)
    found.verified, found.oracles = None, oracles(Evidence())
    assert not found.passed
    assert "nothing was verified  BROKEN: O1, O2" in found.to_html()
    assert json.loads(found.to_json())["verified"] is None


def written(*epochs: tuple[int, int]) -> list[WrittenBatch]:
    return [WrittenBatch(10 * at, producer_id, epoch) for at, (producer_id, epoch) in enumerate(epochs)]


def test_a_batch_of_an_older_epoch_behind_a_newer_one_is_a_zombies():
    assert in_order(written((7, 0), (7, 0), (7, 1), (7, 4))).behind == ()
    assert in_order(written((7, 0), (7, 1), (7, 0), (7, 1))).behind == (20,)
    # Epochs used up: another id, that begins at 0 again; the one before it never comes back.
    assert in_order(written((7, 32766), (8, 0), (8, 1))).behind == ()
    assert in_order(written((7, 32766), (8, 0), (7, 32766), (8, 0))).behind == (20, 30)
    assert in_order([]).batches == 0
    assert in_order(written((7, 0), (7, 0), (7, 1))).count == 2


def test_an_end_that_was_told_before_more_records_came_moves_the_reader_on_and_never_back():
    topology = parse(Path("topologies/simplest.yaml").read_text(), name="simplest.yaml")
    live_checker = LiveChecker(topology, Settings(brokers=("127.0.0.1:1",)), {0: 3})
    end = KafkaError(KafkaError._PARTITION_EOF)
    live_checker.take(
        [output(3), Message(topic="events.unique", partition=0, offset=4, error=end), output(4), output(5)]
    )
    assert live_checker.position == {0: 6}
    assert live_checker.sightings == Sightings(3, 0, ())
    live_checker.take([Message(topic="events.unique", partition=0, offset=8, error=end)])
    assert live_checker.position == {0: 8}
    live_checker.take([output(8, number=5)])
    assert live_checker.sightings == Sightings(4, 1, ("events.unique/0 offset 8",))


def output(offset: int, number: int | None = None) -> Message:
    """Return a forwarded record with the ID of this number, else of the offset."""
    value = json.dumps({"event_id": f"id {offset if number is None else number}", "ts": 1_700_000_000_000}).encode()
    return Message(topic="events.unique", partition=0, offset=offset, value=value, timestamp=(1, 1_700_000_000_000))
