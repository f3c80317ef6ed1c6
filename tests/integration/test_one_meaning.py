"""`dedup verify`, `dedup status`, the pages and the metrics of a worker tell one scenario by the same numbers."""

from __future__ import annotations

import json
import urllib.request
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dedup.verify.report import Report
from dedup.verify.verifier import verify
from tests.integration.conftest import MakeJob
from tests.integration.fleet import Job, until
from tests.integration.test_admin import dedup, pages
from tests.integration.workload import BASE_MS, Event

pytestmark = pytest.mark.broker

VERDICTS = ("unique", "exempt", "duplicate", "late", "dead_letter")
EXPECTED = {"unique": 21, "exempt": 2, "duplicate": 10, "late": 3, "dead_letter": 4}
Numbers = tuple[dict[str, int], dict[str, int]]
"""Records by verdict, and the lag of each feeding partition."""


def scenario() -> list[Event]:
    """Return 20 IDs, half of them twice, one far ahead, three that it makes late, two null values, four without JSON."""
    made = [Event(0, b'{"id":"x-%d"}' % (number % 20), BASE_MS + number) for number in range(30)]
    made.append(Event(0, b'{"id":"ahead"}', BASE_MS + 600_000))
    made += [Event(0, b'{"id":"late-%d"}' % number, BASE_MS + number) for number in range(3)]
    made += [Event(0, None, BASE_MS, b"gone-%d" % number) for number in range(2)]
    return made + [Event(0, b"no json", BASE_MS) for _ in range(4)]


def of_verify(job: Job) -> tuple[Numbers, Report]:
    report = verify(job.topology, job.settings)
    assert report.passed, report.samples
    names = zip(VERDICTS, ("unique", "exempt", "duplicates", "late", "dead_letters"), strict=True)
    verdicts = {verdict: sum(getattr(books, name) for books in report.books) for verdict, name in names}
    lags = {f"{books.topic}/{books.partition}": books.pending for books in report.books if books.pending}
    return (verdicts, lags), report


def of_status(job: Job, url: str) -> Numbers:
    seen = json.loads(dedup(job, "status", "--json", "--url", url))
    assert seen["lag"] == sum(task["lag"] for task in seen["tasks"])
    return _numbers((task["verdicts"], task, task["lag"]) for task in seen["tasks"])


def of_api(url: str) -> Numbers:
    return _numbers((task["verdicts"], task, task["lag_records"]) for task in _page(url, "/api/status")["tasks"])


def of_dashboard(url: str) -> Numbers:
    seen = _page(url, "/api/dashboard")
    lags = {
        f"{task['topic']}/{task['partition']}": task["lag_records"] for task in seen["tasks"] if task["lag_records"]
    }
    return {name: seen["totals"][name] for name in VERDICTS}, lags


def of_metrics(url: str) -> Numbers:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        families = {each.name: each.samples for each in text_string_to_metric_families(answer.read().decode())}
    verdicts: Counter[str] = Counter()
    for sample in families["dedup_records"]:
        verdicts[sample.labels["verdict"]] += int(sample.value)
    lags = {
        f"{s.labels['topic']}/{s.labels['partition']}": int(s.value) for s in families["dedup_lag_records"] if s.value
    }
    return {name: verdicts[name] for name in VERDICTS}, lags


def _page(url: str, path: str) -> dict[str, Any]:
    with urllib.request.urlopen(url + path, timeout=10) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def _numbers(tasks: Any) -> Numbers:
    verdicts: Counter[str] = Counter()
    lags: dict[str, int] = {}
    for told, task, lag in tasks:
        verdicts.update(told)
        if lag:
            lags[f"{task['topic']}/{task['partition']}"] = lag
    return {name: verdicts[name] for name in VERDICTS}, lags


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "repartitioned"])
def test_one_scenario_is_told_by_the_same_numbers_everywhere(
    make_job: MakeJob, topic_names: Callable[[str], str], direct: bool
) -> None:
    name = topic_names("meaning")
    spec = {"topics": [f"{name}-in"]} | ({"partitioned_by": "tracking_id"} if direct else {})
    document = {"guard_period": "10s", "source": spec}
    job = make_job(name=name, partitions=1, document=document, config={"web": {"enabled": True, "port": 0}})
    source = job.topology.source.topics[0]
    job.send(scenario())
    worker = job.start()
    job.until_done()
    url = pages(worker)

    def all_say(numbers: Numbers) -> None:
        told: dict[str, Numbers] = {}

        def agreed() -> bool:
            told.update(
                status=of_status(job, url), api=of_api(url), dashboard=of_dashboard(url), metrics=of_metrics(url)
            )
            return all(each == numbers for each in told.values())

        until(agreed, lambda: f"all say {numbers}: {told}")
        assert of_verify(job)[0] == numbers

    # Behind the last record of a log that tasks write stands a marker, which nobody waits for.
    all_say((EXPECTED, {}))
    # What an open transaction holds is not judged, and is there to be waited for.
    more = [Event(0, b'{"id":"held-%d"}' % number, BASE_MS + 600_000) for number in range(5)]
    producer = job.send(more, transactional_id=f"{job.name}-held", commit=None)
    all_say((EXPECTED, {f"{source}/0": 5}))
    producer.commit_transaction(30)
    # Its marker is passed, too: retention may delete it.
    all_say(({**EXPECTED, "unique": EXPECTED["unique"] + 5}, {}))
    assert job.committed(source)[0] == job.admin.end_offsets(source)[0]
    assert worker.stop() == 0


@pytest.mark.parametrize("late", ["drop", "forward"])
def test_a_worker_s_source_that_has_lost_its_beginning_is_never_told_lost(make_job: MakeJob, late: str) -> None:
    job = make_job(partitions=1, document={"guard_period": "10s", "late": late})
    # Late by the first one, which will be gone, are those at second 0, 30 and 80.
    seconds = {"h": 100, "a": 0, "b": 30, "e": 80, "c": 95, "d": 101}
    job.send([Event(0, b'{"id":"%s"}' % name.encode(), BASE_MS + at * 1000) for name, at in seconds.items()])
    job.finish()
    assert len(job.read(job.output)) == (3 if late == "drop" else 6)
    job.admin.delete_below(job.topology.source.topics[0], {0: 1})
    _, report = of_verify(job)
    assert report.closing_line().startswith("lost 0  duplicated 0  not provable")


def test_latency_does_not_count_how_old_an_event_time_is(make_job: MakeJob) -> None:
    """Once a worker has read a log to its end, it knows that what comes later was not there before."""
    job = make_job(partitions=2, config={"web": {"enabled": True, "port": 0}})
    worker = job.start()
    worker.until_logged("running from offset", times=2)
    for number in range(3):
        job.send([Event(row % 2, b'{"id":"old-%d-%d"}' % (number, row), BASE_MS + row) for row in range(100)])
        job.until_done()
    with urllib.request.urlopen(f"{pages(worker)}/metrics", timeout=10) as answer:
        families = {each.name: each.samples for each in text_string_to_metric_families(answer.read().decode())}
    counted: Counter[str] = Counter()
    for sample in families["dedup_end_to_end_seconds"]:
        counted[sample.labels.get("le", "")] += int(sample.value)
    assert counted["+Inf"] == 300
    # The first hundred may have been there before the worker looked.
    assert counted["3600.0"] >= 200
    assert worker.stop() == 0, worker.log
