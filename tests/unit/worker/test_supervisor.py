"""What a supervised worker is started with, and when it is started again."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from typer.testing import CliRunner

from dedup.cli.main import create_app
from dedup.errors import DedupError
from dedup.settings import load_settings
from dedup.worker import supervisor as fleet
from dedup.worker.supervisor import FIRST_BACK_OFF_S, Child, FleetPlan, _look_after, supervise


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


def test_a_worker_imports_nothing_from_the_working_directory(tmp_path):
    """Was: a rich.py there ran in each worker of `--workers 2`, and the fleet started it again without end."""
    settings = load_settings(None, ["brokers=b:9092", "worker_id=w"], {})
    line = FleetPlan(tmp_path / "none.yaml", None, (), settings, 2).command(1)
    (tmp_path / "rich.py").write_text("raise SystemExit(77)\n", encoding="utf-8")
    done = subprocess.run([*line[: line.index("run")], "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("dedup ")


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., FleetPlan]:
    """Return a function that gives the plan of `dedup run --workers 2` in a state directory."""
    plans: list[FleetPlan] = []

    def supervised(plan: FleetPlan) -> int:
        plans.append(plan)
        return 0

    monkeypatch.setattr(fleet, "supervise", supervised)
    topology = Path(__file__).parents[3] / "topologies" / "simplest.yaml"

    def plan(state_dir: str) -> FleetPlan:
        line = ["run", str(topology), "--workers", "2", "--set", f"state_dir={tmp_path / state_dir}"]
        found = CliRunner().invoke(create_app(), [*line, "--set", "brokers=b:9092"])
        assert found.exit_code == 0, found.output
        return plans[-1]

    return plan


def test_workers_of_two_machines_never_have_the_same_id_and_keep_theirs(planned):
    ids = [planned(machine).settings.worker_id for machine in ("one", "other", "one")]
    assert ids[0] == ids[2] != ids[1]
    assert f"worker_id={ids[1]}-1" in planned("other").command(1)


class Dead:
    """A process that has ended."""

    def __init__(self, code: int) -> None:
        self.code = code

    def poll(self) -> int:
        return self.code


@pytest.mark.parametrize(
    ("code", "lived_s", "ends_the_fleet"),
    [(2, 3_600, 2), (3, 3_600, 3), (5, 1, 5), (5, 3_600, 0), (1, 1, 0), (137, 3_600, 0)],
)
def test_a_fleet_that_was_up_outlives_its_brokers_absence(code, lived_s, ends_the_fleet):
    child = Child(0, Dead(code), started_s=0)
    assert _look_after(child, ["dedup"], lived_s) == ends_the_fleet
    assert (child.start_at_s is None) == bool(ends_the_fleet)


def test_and_goes_on_trying():
    child = Child(0, Dead(5), started_s=0)
    _look_after(child, ["dedup"], 3_600)
    child.started_s, child.start_at_s = 3_601, None
    assert _look_after(child, ["dedup"], 3_632) == 0
    assert child.back_off_s > FIRST_BACK_OFF_S


@pytest.mark.parametrize("given", [True, False])
def test_every_worker_is_told_that_an_existing_output_is_meant(given: bool):
    settings = load_settings(None, ["brokers=b:9092"], {})
    plan = FleetPlan(Path("t.yaml"), None, ("brokers=b:9092",), settings, 2, onto_existing_output=given)
    assert [("--onto-existing-output" in plan.command(number)) for number in (1, 2)] == [given, given]


@pytest.mark.parametrize(
    ("end", "code"),
    [("sys.exit(3)", 3), ("os.kill(os.getpid(), signal.SIGKILL)", 137), ("sys.exit(128 + signal.SIGTERM)", 0)],
)
def test_a_worker_that_fails_or_is_killed_while_it_stops_decides_the_exit_code(end: str, code: int):
    """Was 0: what the worker had judged and could not commit went unnoticed."""
    worker = "import os, signal, sys; signal.signal(signal.SIGTERM, lambda *_: {}); {}; signal.pause()"
    ready = "os.kill(os.getppid(), signal.SIGTERM)"
    ways = {1: ("sys.exit(0)", "pass"), 2: (end, ready)}
    lines = {number: [sys.executable, "-c", worker.format(*way)] for number, way in ways.items()}
    plan = SimpleNamespace(workers=2, command=lines.__getitem__)
    assert supervise(cast("FleetPlan", plan)) == code


def test_the_code_that_ends_a_fleet_is_not_hidden_by_how_the_others_end():
    """systemd restarts a fleet unless the code is 2 or 3."""
    others = (
        "import os, signal; signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), 9)); "
        "print(flush=True); signal.pause()"
    )
    lines = {1: [sys.executable, "-c", others], 2: [sys.executable, "-c", "import time; time.sleep(1); exit(3)"]}
    plan = SimpleNamespace(workers=2, command=lines.__getitem__)
    assert supervise(cast("FleetPlan", plan)) == 3


def test_a_restart_is_logged_with_the_number_in_the_workers_id(tmp_path: Path, caplog):
    """Was one less: the log named another worker than the one that had died."""
    once = f"import pathlib, sys; p = pathlib.Path({str(tmp_path / 'died')!r}); "
    once += "sys.exit(0) if p.exists() else (p.touch(), sys.exit(7))"
    lines = {1: [sys.executable, "-c", "pass"], 2: [sys.executable, "-c", once]}
    plan = SimpleNamespace(workers=2, command=lines.__getitem__)
    assert supervise(cast("FleetPlan", plan)) == 0
    assert [message.split(";")[0] for message in caplog.messages] == ["worker 2 exited with code 7"]


class Starts:
    """Starts processes; of the given starts, the machine cannot do the one of each number."""

    def __init__(self, *impossible: int) -> None:
        self.impossible = impossible
        self.count = 0
        self.made: list[subprocess.Popen[bytes]] = []
        self.start = subprocess.Popen

    def __call__(self, line: list[str]) -> subprocess.Popen[bytes]:
        self.count += 1
        if self.count in self.impossible:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        self.made.append(self.start(line))
        return self.made[-1]


def test_if_one_worker_cannot_be_started_none_is_left_behind(monkeypatch):
    """Was: the workers that had been started went on without the fleet, whose end was a traceback."""
    starts = Starts(2)
    monkeypatch.setattr(subprocess, "Popen", starts)
    plan = SimpleNamespace(workers=3, command=lambda _: [sys.executable, "-c", "import signal; signal.pause()"])
    try:
        with pytest.raises(
            DedupError, match=r"^worker 2 of 3 cannot be started: .*\. The others were stopped; nothing"
        ):
            supervise(cast("FleetPlan", plan))
        assert [process.poll() is not None for process in starts.made] == [True]
    finally:
        for process in starts.made:
            process.kill()
            process.wait()


def test_a_restart_that_the_machine_cannot_do_is_tried_again(monkeypatch, caplog):
    """Was: the fleet ended with a traceback."""
    starts = Starts(1)
    monkeypatch.setattr(subprocess, "Popen", starts)
    child = Child(2, Dead(1), started_s=0, start_at_s=10)
    line = [sys.executable, "-c", "pass"]
    assert _look_after(child, line, 10) == 0
    assert caplog.messages == [f"worker 2 cannot be started: {os.strerror(errno.EAGAIN)}. The next attempt is in 0.5 s"]
    assert (child.start_at_s, child.back_off_s) == (10 + FIRST_BACK_OFF_S, 2 * FIRST_BACK_OFF_S)
    assert _look_after(child, line, 11) == 0
    assert (child.process, child.start_at_s, child.started_s) == (starts.made[0], None, 11)
    assert starts.made[0].wait() == 0
