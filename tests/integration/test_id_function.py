"""IDs that a user's function returns, on a real broker: through kills, behind a repartition topic, changed in between."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest

from dedup.topology.parse import parse
from dedup.verify.explanation import explain_id
from dedup.verify.verifier import verify
from dedup.worker.introspection import state_keys
from dedup.yaml_document import beside
from tests.integration.conftest import MakeJob
from tests.integration.fleet import Job, until
from tests.integration.test_admin import pages
from tests.integration.workload import BASE_MS, Event, workload

pytestmark = pytest.mark.broker

CODE = """
import json

def order_id(key, value, headers):
    return json.loads(value)["id"]
"""
FIRST_HOP = """
import json
import sys

def order_id(key, value, headers):
    frame = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.endswith("repartition_task.py"):
        frame = frame.f_back
    if frame is None and "pytest" not in sys.modules:  # `verify` runs in the test's process
        raise RuntimeError("a dedup task asks again")
    return json.loads(value)["id"]
"""
PREFIXED = CODE.replace('json.loads(value)["id"]', '"order " + str(json.loads(value)["n"])')


def coded(make_job: MakeJob, module: str, code: str = CODE, *, hops: bool, **config: object) -> Job:
    """Return a job whose IDs come from the function in the module."""
    document = {"tracking_id": {"python": f"{module}:order_id"}}
    if hops:
        document["source"] = {"topics": [f"{module}-0".replace("_", "-"), f"{module}-1".replace("_", "-")]}
    return make_job(files={f"{module}.py": code}, document=document, config={"commit_interval": "20ms", **config})


@pytest.mark.parametrize("hops", [False, True], ids=["direct", "repartitioned"])
def test_each_id_is_there_once_however_often_a_worker_is_killed(make_job: MakeJob, hops: bool) -> None:
    job = coded(make_job, f"ids_killed_{hops}".lower(), hops=hops)
    events = workload(41, 4_000, topics=1 + hops, scattered=hops)
    for number in range(5):
        worker = job.start()
        with job.stream(events[700 * number : 700 * (number + 1)], per_s=4_000) as thread:
            job.until_progress(100)
            worker.kill()
            thread.join()
    job.send(events[len(job.sent) :])
    job.finish()
    job.judge()
    text = str(json.loads(job.read(job.output)[0].value() or b"")["id"])
    found = explain_id(job.topology, job.settings, text, state_keys(job.topology, text), progress=lambda *_: None)
    sent = [event for event in job.sent if event.value is not None and b'"%s"' % text.encode() in event.value]
    assert (len(found.records), found.contradictions) == (len(sent), 0)


def test_the_function_is_not_asked_again_behind_the_repartition_topic(make_job: MakeJob) -> None:
    job = coded(make_job, "ids_first_hop", FIRST_HOP, hops=True)
    job.send(workload(42, 2_000, topics=2, scattered=True))
    job.finish()
    job.judge()
    assert not any("dedup-extracted" in dict(each.headers() or ()) for each in job.read(job.output))


def test_verify_finds_a_function_that_returns_something_else_now(make_job: MakeJob) -> None:
    job = coded(make_job, "ids_before", hops=True)
    events = [Event(n % 2, b'{"id": %d, "n": %d}' % (n % 40, n), BASE_MS + n, topic=n // 2 % 2) for n in range(100)]
    job.send(events)
    job.finish()
    (job.directory / "ids_after.py").write_text(PREFIXED, encoding="utf-8")
    document = json.loads(job.topology_file.read_text(encoding="utf-8"))
    document["tracking_id"]["python"] = "ids_after:order_id"
    changed = parse(json.dumps(document), name=str(job.topology_file), read_file=beside(job.topology_file))
    report = verify(changed, job.settings)
    assert report.passed, report.to_json()
    ((why, count),) = report.not_provable.items()
    assert ("no longer returns what it returned when the record was repartitioned" in why, count) == (True, 100)
    assert sum(books.unique for books in report.books) == 40
    assert verify(job.topology, job.settings).not_provable == {}
    found = explain_id(changed, job.settings, "7", state_keys(changed, "7"), progress=lambda *_: None)
    assert (len(found.records), found.contradictions, sum(bool(each.went) for each in found.records)) == (3, 0, 1)


def test_state_of_another_version_is_refused(make_job: MakeJob) -> None:
    job = coded(make_job, "ids_version", hops=False)
    job.send(workload(43, 200))
    job.finish()
    document = json.loads(job.topology_file.read_text(encoding="utf-8"))
    document["tracking_id"]["python"] = {"function": "ids_version:order_id", "version": 2}
    job.topology_file.write_text(json.dumps(document), encoding="utf-8")
    job.refused("b", code=3, says="a topology with another ID rule")


def test_a_function_that_is_not_there_stops_the_worker_before_it_reads(make_job: MakeJob) -> None:
    job = coded(make_job, "ids_gone", hops=False)
    (job.directory / "ids_gone.py").unlink()
    worker = job.start()
    assert worker.wait() == 2, worker.log
    assert "tracking_id.python: ids_gone cannot be imported" in worker.log
    assert "Traceback" not in worker.log


def test_workers_with_different_copies_say_so(make_job: MakeJob) -> None:
    """The file changes while one worker runs, and then another worker starts."""
    job = coded(make_job, "ids_copies", hops=False, web={"enabled": True, "port": 0})
    urls = [pages(job.start("a"))]

    def issues(url: str) -> str:
        with urllib.request.urlopen(f"{url}/api/dashboard", timeout=10) as answer:
            return " ".join(each["text"] for each in json.loads(answer.read())["attention"])

    until(lambda: issues(urls[0]) == "", lambda: f"no issues: {issues(urls[0])}")
    Path(job.directory, "ids_copies.py").write_text(f"{CODE}\n# A comment of the second worker's copy.\n")
    urls.append(pages(job.start("b")))
    for url in urls:
        until(lambda url=url: "different copies of ids_copies:order_id" in issues(url), "the copies are compared")
