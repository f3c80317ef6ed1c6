"""Checkpoints of a fleet on a real broker: made beside it, begun with on an empty disk, cut short by SIGKILL."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dedup.cli.main import create_app
from dedup.errors import StateIncompatible
from tests.integration.conftest import MakeJob
from tests.integration.fleet import CHILD, WITHIN_S, Job, Worker
from tests.integration.preloaded import clean_environ
from tests.integration.workload import workload

pytestmark = pytest.mark.broker
RUNNING = re.compile(r"dedup \S+/(\d+): running from offset \d+, epoch \d+, after (\d+) changelog records")


@pytest.fixture
def job(make_job: MakeJob, tmp_path: Path) -> Job:
    """Return a job whose workers begin with checkpoints, if there are any."""
    state = {"checkpoint": str(tmp_path / "kept")}
    return make_job(config={"state": state}, document={"state": {"standby_replicas": 0}})


def dedup(job: Job, *arguments: str, accident: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command of `dedup` on the job's topology to its end."""
    accidents = [accident] if accident else []
    line = [sys.executable, str(CHILD), *accidents, "--", arguments[0], str(job.topology_file), *arguments[1:]]
    return subprocess.run(
        [*line, "--config", str(job.config_file)],
        env=clean_environ(),
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )


def checkpoint(job: Job) -> list[dict[str, Any]]:
    """Make checkpoints; return what was made."""
    arguments = ["checkpoint", "--json", str(job.topology_file), "--config", str(job.config_file)]
    done = CliRunner().invoke(create_app(), arguments, catch_exceptions=False)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def restored(worker: Worker) -> dict[int, int]:
    """Return how many changelog records each task had to read."""
    return {int(partition): int(records) for partition, records in RUNNING.findall(worker.log)}


def test_a_fleet_is_kept_while_it_runs_and_an_empty_disk_begins_there(job: Job) -> None:
    events = workload(1, 12_000)
    job.send(events[:6_000])
    workers = [job.start("a"), job.start("b")]
    job.until_done()
    with job.stream(events[6_000:11_000], per_s=2_000) as thread:
        job.until_progress(2_000)
        first = checkpoint(job)
        thread.join()
    job.send(events[11_000:])
    job.until_done()
    second = checkpoint(job)
    # The second one reads what came after the first.
    assert [each["partition"] for each in second] == [0, 1]
    assert all(
        each["written"] and 0 < each["records_read"] < was["records_read"]
        for was, each in zip(first, second, strict=True)
    )
    job.send(workload(2, 400))
    job.until_done()
    for worker in workers:
        assert worker.stop() == 0
        shutil.rmtree(worker.state_dir)

    ends = sum(job.admin.end_offsets(job.topology.changelog_topic).values())
    kept = sum(each["position"] for each in second)
    heir = job.finish("c")
    # What was kept is not read again: only what was written to the changelog after it.
    assert 0 < sum(restored(heir).values()) <= ends - kept
    assert len(restored(heir)) == 2
    assert heir.log.count("taken over from the checkpoint") == 2, heir.log
    assert sum(each["ids"] for each in second) > 10 * (ends - kept)
    job.judge()


def test_killed_in_the_middle_of_a_transfer(job: Job, tmp_path: Path) -> None:
    place = tmp_path / "kept" / job.name
    events = workload(3, 6_000)
    job.send(events[:4_000])
    worker = job.start("a")
    job.until_done()
    first = checkpoint(job)
    job.send(events[4_000:5_000])
    job.until_done()
    assert worker.stop() == 0

    # In the middle of the upload: what was in force is.
    assert dedup(job, "checkpoint", accident="die_in_transfer=1").returncode == -9
    named = {part: json.loads((place / part / "manifest.json").read_text())["position"] for part in ("0", "1")}
    assert named == {str(each["partition"]): each["position"] for each in first}
    assert len(list((place / "0").iterdir())) > first[0]["files"] + 1

    # In the middle of the download: the disk is as empty as before, and the next start takes the checkpoint.
    worker = job.start("b", "die_in_transfer=1", exit_when_done=True)
    assert worker.wait() == 137
    assert not (worker.state_dir / job.name).exists()
    job.send(events[5_000:])
    again = job.finish("b")
    assert again.log.count("taken over from the checkpoint") == 2, again.log
    assert 0 < sum(restored(again).values()) < sum(each["records_read"] for each in first) / 2
    assert sorted(path.name for path in (again.state_dir / ".bootstrap" / job.name).iterdir()) == []
    job.judge()

    # A damaged file: told, and everything comes from the changelog.
    second = checkpoint(job)
    for each in second:
        assert 0 < each["written_bytes"] < each["size_bytes"]
        largest = max((place / str(each["partition"])).iterdir(), key=lambda path: path.stat().st_size)
        largest.write_bytes(largest.read_bytes()[:-10_000])
    worker = job.finish("c")
    assert worker.log.count("It is restored from the changelog instead") == 2, worker.log
    assert sum(restored(worker).values()) > sum(each["ids"] for each in second)

    # A reset takes the checkpoints with it. Where somebody brings them back, they are another changelog's.
    shutil.copytree(tmp_path / "kept", tmp_path / "copy")
    done = dedup(job, "reset", "--yes", "--set", f"state_dir={job.state_dir('c')}")
    assert done.returncode == 0, done.stderr
    assert [path for path in (tmp_path / "kept").rglob("*") if path.is_file()] == []
    shutil.copytree(tmp_path / "copy", tmp_path / "kept", dirs_exist_ok=True)
    job.refused("c", code=3, says="is a checkpoint of another changelog topic")
    with pytest.raises(StateIncompatible, match="is a checkpoint of another changelog topic"):
        checkpoint(job)
