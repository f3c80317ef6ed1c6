"""A real Prometheus scrapes two workers with the shipped config; rules and dashboard are evaluated on what it has."""

from __future__ import annotations

import json
import re
import shutil
import socket
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dedup.embedded.child_process import ChildProcess
from dedup.metrics import METRICS
from tests.deploy.conftest import tool
from tests.deploy.test_alerts import ALERTS, expressions, rules
from tests.integration.conftest import MakeJob
from tests.integration.fleet import Job, Worker, until
from tests.integration.workload import workload

pytestmark = [pytest.mark.broker, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]
TOKEN = "scrape-5f1c"


class Prometheus:
    """A server of its own; it can not outlive the test run."""

    def __init__(self, directory: Path, targets: list[str]) -> None:
        text = (ROOT / "config" / "prometheus.yaml").read_text(encoding="utf-8")
        (directory / "token").write_text(TOKEN, encoding="utf-8")
        for shipped, here in (
            ("15s", "1s"),
            ("/etc/prometheus/alerts.yaml", str(ALERTS)),
            ("/run/secrets/web_token", str(directory / "token")),
            ('["worker-1:6066", "worker-2:6066"]', json.dumps(targets)),
        ):
            assert shipped in text
            text = text.replace(shipped, here)
        config = directory / "prometheus.yaml"
        config.write_text(text, encoding="utf-8")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        program = tool("prometheus", "Debian's package prometheus")
        command = [program, f"--config.file={config}", f"--storage.tsdb.path={directory / 'data'}"]
        self._log = directory / "prometheus.log"
        self._process = ChildProcess([*command, f"--web.listen-address={self.address}"], self._log)

    def get(self, path: str, **query: str) -> Any:
        """Return the data of an answer of its API."""
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            found = json.load(answer)
        assert found["status"] == "success", found
        return found["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the samples of an expression, now."""
        found: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return found

    def up(self) -> bool:
        """Tell whether both workers were scraped."""
        assert self._process.running, self._log.read_text(encoding="utf-8")
        try:
            return len(self.query('up{job="dedup-orders"} == 1')) == 2
        except OSError:
            return False

    def end(self) -> None:
        """It is gone."""
        self._process.kill()


@pytest.fixture
def scrape(tmp_path: Path) -> Iterator[Callable[[list[str]], Prometheus]]:
    """Return what starts a Prometheus for these addresses."""
    started: list[Prometheus] = []

    def start(targets: list[str]) -> Prometheus:
        directory = tmp_path / "prometheus"
        directory.mkdir()
        started.append(Prometheus(directory, targets))
        return started[-1]

    yield start
    for each in started:
        each.end()


def address_of(worker: Worker) -> str:
    worker.until_logged("web: http://")
    found = re.search(r"web: http://([\d.:]+)", worker.log)
    assert found is not None
    return found[1]


def two_workers(make_job: MakeJob, directory: Path) -> tuple[Job, list[Worker]]:
    token = directory / "web-token"
    token.write_text(TOKEN, encoding="utf-8")
    bounds = {"state": {"max_bytes_per_partition": "1GiB", "standby_replicas": 1}}
    web = {"port": 0, "token": f"${{file:{token}}}"}
    job = make_job(partitions=4, document=bounds, config={"web": web})
    return job, [job.start(name) for name in ("a", "b")]


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus (Debian's package) is not installed here")
def test_two_workers_are_scraped_and_every_metric_rule_and_panel_has_an_answer(make_job, scrape, tmp_path):
    job, workers = two_workers(make_job, tmp_path)
    for worker in workers:
        # A worker's counters of a task go with the task: both have theirs before anything is counted.
        worker.until_logged("running from offset")
    job.send(workload(7, 4_000, partitions=4))
    server = scrape([address_of(worker) for worker in workers])
    until(server.up, "Prometheus has scraped both workers")
    job.until_done()
    unique = 'sum(dedup_records_total{verdict="unique"})'
    expected = len(job.read(job.output))
    until(
        lambda: [found["value"][1] for found in server.query(unique)] == [str(expected)],
        lambda: str(server.query(unique)),
    )
    names = {f"{metric.name}_bucket" if metric.kind == "histogram" else metric.name for metric in METRICS}
    until(lambda: names <= set(server.get("label/__name__/values")), lambda: str(server.get("label/__name__/values")))
    owners = server.query('count by (instance) (dedup_task_state{state="running"} == 1)')
    assert sum(int(found["value"][1]) for found in owners) == 4
    for title, expression in expressions().items():
        if "rate(" in expression:
            server.query(expression)  # nothing may have happened twice
            continue
        # An increase needs a second scrape.
        until(partial(server.query, expression), title)
    loaded = {rule["name"]: rule for group in server.get("rules")["groups"] for rule in group["rules"]}
    assert set(loaded) == set(rules())
    assert {rule["health"] for rule in loaded.values()} <= {"ok", "unknown"}
    assert not {rule["lastError"] for rule in loaded.values() if rule.get("lastError")}
    assert [worker.stop() for worker in workers] == [0, 0], job.logs()
