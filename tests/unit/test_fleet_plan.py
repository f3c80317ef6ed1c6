"""What a supervised worker is started with."""

from __future__ import annotations

from pathlib import Path

import pytest

from dedup.settings import load_settings
from dedup.worker.fleet import FleetPlan


def sets_of(number: int, *overrides: str) -> dict[str, str]:
    """Return the settings in force of a worker's command line: later ones win."""
    settings = load_settings(None, ["brokers=b:9092", *overrides], {})
    line = FleetPlan(Path("t.yaml"), None, ("brokers=b:9092", *overrides), settings, 3).command(number)
    pairs = [line[at + 1].partition("=") for at, word in enumerate(line) if word == "--set"]
    return {key: value for key, _, value in pairs}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No config file of this checkout is found."""
    monkeypatch.chdir(tmp_path)


def test_each_worker_has_an_id_a_state_directory_and_pages_of_its_own():
    first, third = sets_of(1, "worker_id=w"), sets_of(3, "worker_id=w")
    assert (first["worker_id"], third["worker_id"]) == ("w-1", "w-3")
    assert (first["state_dir"], third["state_dir"]) == ("state/w-1", "state/w-3")
    assert (first["web.port"], third["web.port"]) == ("6066", "6068")


def test_an_advertised_port_counts_on_and_a_name_alone_stays():
    advertised = "web.advertise=http://worker:7000"
    assert sets_of(2, advertised, "web.port=7000")["web.advertise"] == "http://worker:7001"
    assert sets_of(2, "web.advertise=http://[::1]:7000")["web.advertise"] == "http://[::1]:7001"
    assert sets_of(2, "web.advertise=http://worker")["web.advertise"] == "http://worker"


def test_any_free_port_stays_any_free_port():
    assert sets_of(2, "web.port=0")["web.port"] == "0"
