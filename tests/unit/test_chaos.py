"""`dedup chaos` without a fleet: what is drawn, what is made up, what the page says."""

import json
from pathlib import Path

import pytest

from dedup.core.extract import compile_extractor
from dedup.proof.blows import OF_WORKERS, PER_MINUTE, QUIET_S, BlowKind, draw
from dedup.proof.chaos_report import ChaosReport, Oracle, Struck, Tick
from dedup.proof.made import MadeRecords
from dedup.proof.oracles import Evidence, oracles
from dedup.proof.report import Books, Report
from dedup.proof.witness import Sightings
from dedup.session.epochs import Written, in_order
from dedup.topology.parse import parse

FILES = [path for path in sorted(Path("topologies").glob("*.yaml")) if "\ningest:" not in f"\n{path.read_text()}"]


def test_the_same_seed_draws_the_same_blows_as_often_as_their_rates_say():
    blows = draw(seed=3, seconds=605, workers=3, per_minute=PER_MINUTE)
    assert blows == draw(seed=3, seconds=605, workers=3, per_minute=PER_MINUTE) == sorted(blows)
    assert blows != draw(seed=4, seconds=605, workers=3, per_minute=PER_MINUTE)
    assert sum(blow.kind is BlowKind.KILL for blow in blows) == 120
    assert {blow.kind for blow in blows} == set(BlowKind)
    assert {blow.worker for blow in blows} == {0, 1, 2}
    assert QUIET_S <= blows[0].at_s <= blows[-1].at_s <= 605


def test_no_blow_falls_on_a_broker_that_is_not_ours():
    rates = {kind: rate for kind, rate in PER_MINUTE.items() if kind in OF_WORKERS}
    kinds = {blow.kind for blow in draw(seed=1, seconds=600, workers=2, per_minute=rates)}
    assert kinds == OF_WORKERS


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
        [Struck(6.0, "SIGKILL", 0, hit=True), Struck(7.0, "SIGKILL", 1, hit=False)],
        [Tick(at_s, 100 * at_s, 100 * at_s, 90 * at_s, 60 * at_s) for at_s in range(1, 60)],
        {5: 1},
        Report("orders", "b:9092", "replay", 0),
        [Oracle("O1", "nothing is lost", held, "lost 0 <of> 10")],
    )


def test_the_page_shows_what_fell_and_what_held():
    page = report_of(held=True).to_html()
    assert "1 x SIGKILL" in page
    assert "lost 0 &lt;of&gt; 10" in page
    assert page.count("<polyline") == 2
    assert "BROKEN" not in page
    assert "http" not in page


def test_one_broken_oracle_fails_the_run():
    broken = report_of(held=False)
    assert not broken.passed
    assert "BROKEN" in broken.to_html()
    assert json.loads(broken.to_json())["blows"] == {"SIGKILL": 1}


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
        batches=9,
        owners=3,
        behind=0,
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
            found.behind = 1
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


def written(*epochs: tuple[int, int]) -> list[Written]:
    return [Written(10 * at, producer_id, epoch) for at, (producer_id, epoch) in enumerate(epochs)]


def test_a_batch_of_an_older_epoch_behind_a_newer_one_is_a_zombies():
    assert in_order(written((7, 0), (7, 0), (7, 1), (7, 4))).behind == ()
    assert in_order(written((7, 0), (7, 1), (7, 0), (7, 1))).behind == (20,)
    # Epochs used up: another id, that begins at 0 again; the one before it never comes back.
    assert in_order(written((7, 32766), (8, 0), (8, 1))).behind == ()
    assert in_order(written((7, 32766), (8, 0), (7, 32766), (8, 0))).behind == (20, 30)
    assert in_order([]).batches == 0
    assert in_order(written((7, 0), (7, 0), (7, 1))).owners == 2
