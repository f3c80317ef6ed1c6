"""`dedup chaos` without a fleet: what is drawn, what is made up, what the page says."""

import json
from pathlib import Path

import pytest

from dedup.core.extract import compile_extractor
from dedup.proof.blows import OF_WORKERS, PER_MINUTE, QUIET_S, BlowKind, draw
from dedup.proof.chaos_report import ChaosReport, Oracle, Struck, Tick
from dedup.proof.made import MadeRecords
from dedup.proof.report import Report
from dedup.topology.parse import parse

FILES = sorted(Path("topologies").glob("*.yaml"))


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
