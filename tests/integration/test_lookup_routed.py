"""Any worker answers for any ID: by its own state, or by asking the owner that the group's metadata names."""

from __future__ import annotations

import json
import re
import urllib.request
from typing import Any

import pytest
from typer.testing import CliRunner

from dedup.cli.main import create_app
from dedup.cli.status import ask_fleet
from tests.integration.conftest import MakeJob
from tests.integration.fleet import Job, Worker, until
from tests.integration.workload import BASE_MS, Event

pytestmark = pytest.mark.broker
IDS = 40
CONFIG = {"web": {"enabled": True, "port": 0}, "session_timeout": "60s"}
"""A killed worker keeps its partitions for a minute: nobody takes them over while we look."""


def asked(worker: Worker, page: str) -> dict[str, Any]:
    """Return a page's answer; nothing while the worker has no pages yet."""
    found = re.search(r"web: (http://\S+)", worker.log)
    if found is None:
        return {"tasks": []}
    with urllib.request.urlopen(f"{found[1]}{page}", timeout=30) as answer:
        return json.load(answer)  # type: ignore[no-any-return]


def owned(worker: Worker) -> set[int]:
    tasks = asked(worker, "/api/status")["tasks"]
    return {row["partition"] for row in tasks if row["task"] == "dedup" and row["state"] == "running"}


def two_of(job: Job) -> tuple[Worker, Worker]:
    both = (job.start("a"), job.start("b"))
    every = set(range(job.partitions))
    until(lambda: all(map(owned, both)) and owned(both[0]) | owned(both[1]) == every, job.logs)
    return both


@pytest.mark.parametrize("hops", ["direct", "repartitioned"])
def test_both_workers_say_the_same_of_every_id(make_job: MakeJob, hops: str) -> None:
    document: dict[str, Any] = {"state": {"standby_replicas": 0}}
    name = f"routed-{hops}"
    if hops == "repartitioned":
        document["source"] = {"topics": [f"{name}-in"]}
    job = make_job(name=name, document=document, config=CONFIG, partitions=4)
    both = two_of(job)
    job.send([Event(n % 4, b'{"id":"i-%d"}' % n, BASE_MS + n) for n in range(IDS)])
    job.until_done()
    owners = set()
    for number in range(IDS):
        one, other = (asked(worker, f"/api/ids/i-{number}") for worker in both)
        (sighting,) = one["sightings"]
        assert other["sightings"] == [sighting]
        assert one["unreached"] == other["unreached"] == []
        assert sighting["source"] == f"{job.topology.source.topics[0]}/{number % 4}/{number // 4}"
        assert (one["belongs_to"] is None) is (hops == "direct")
        assert sighting["partition"] == (number % 4 if hops == "direct" else one["belongs_to"])
        assert sighting["partition"] in owned(both[sighting["worker"] == "b"])
        owners.add(sighting["worker"])
    assert owners == {"a", "b"}
    explain_says_the_same(job, asked(both[0], "/api/ids/i-7"))
    unknown = asked(both[0], "/api/ids/nobody")
    assert (unknown["sightings"], unknown["unreached"]) == ([], [])
    assert len(unknown["asked"]) >= len(unknown["candidates"])

    # `dedup status` finds the second worker by the first.
    (url,) = re.findall(r"web: (http://\S+)", both[0].log)
    assert {page["worker"] for page in ask_fleet(job.name, [url], job.settings).pages} == {"a", "b"}

    both[1].kill()
    lost = next(n for n in range(IDS) if asked_of(both[0], n))
    (silent,) = asked(both[0], f"/api/ids/i-{lost}")["unreached"]
    assert silent["worker"] == "b"


def explain_says_the_same(job: Job, found: dict[str, Any]) -> None:
    """`dedup explain`, which asks no worker, has the same sighting."""
    arguments = ["explain", str(job.topology_file), found["id"], "--json", "--config", str(job.config_file)]
    told = CliRunner().invoke(create_app(), arguments)
    assert told.exit_code == 0, told.output
    (kept,), (sighting,) = json.loads(told.stdout)["sightings"], found["sightings"]
    for name in ("first_ms", "last_ms", "guarded_until_ms", "live"):
        assert kept[name] == sighting[name]
    assert kept["source"].replace(" offset ", "/") == sighting["source"]


def asked_of(worker: Worker, number: int) -> bool:
    return bool(asked(worker, f"/api/ids/i-{number}")["unreached"])


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_worker_comes_back_at_once_with_another_address(make_job: MakeJob, killed: int) -> None:
    """A container that restarts has another port or host name, but the broker gives it its old assignment (KIP-345)."""
    job = make_job(config=CONFIG, document={"state": {"standby_replicas": 0}}, partitions=4)
    both = two_of(job)
    job.send([Event(n % 4, b'{"id":"i-%d","n":%d}' % (n, n), BASE_MS + n) for n in range(IDS)])
    job.until_done()
    worker_id, held = both[killed].id, owned(both[killed])
    both[killed].kill()
    job.send([Event(n % 4, b'{"id":"i-%d","n":%d}' % (n, IDS + n), BASE_MS + n) for n in range(2 * IDS)])
    again = job.start(worker_id)
    until(lambda: owned(again) == held, job.logs)
    other = both[1 - killed]
    until(lambda: not any(asked_of(other, number) for number in range(IDS)), job.logs)
    assert owned(again) == held
    job.until_done()
    for number in range(2 * IDS):
        found = asked(again, f"/api/ids/i-{number}")
        assert (len(found["sightings"]), found["unreached"]) == (1, [])
    job.judge()
