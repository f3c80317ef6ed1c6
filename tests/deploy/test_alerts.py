"""Alert rules and dashboard: every metric exists, every rule fires and is quiet when it should, every alert has a page."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from dedup.metrics import METRICS

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "config" / "grafana" / "alerts.yaml"
DASHBOARD = ROOT / "config" / "grafana" / "dashboard.json"
TASK = 'job="dedup-a",instance="w:1",sub_topology="dedup",topic="t",partition="0"'
VARIABLES = {"$__rate_interval": "1m", "$__range_s": "3600", "$__range": "1h"}


@cache
def rules() -> dict[str, dict[str, Any]]:
    document = YAML(typ="safe").load(ALERTS.read_text(encoding="utf-8"))
    return {rule["alert"]: rule for group in document["groups"] for rule in group["rules"]}


def expressions(job: str = ".*") -> dict[str, str]:
    """Return the expressions of the dashboard, its variables filled in, by panel and number."""
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    found = {}
    for panel in panels:
        for target in panel.get("targets", ()):
            text = target["expr"]
            for name, value in (*VARIABLES.items(), ("$job", job)):
                text = text.replace(name, value)
            found[f"{panel['title']} {target['refId']}"] = text
    return found


def series() -> set[str]:
    """Return the names of all time series that workers have."""
    return {
        f"{metric.name}{suffix}"
        for metric in METRICS
        for suffix in (("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",))
    }


def names(expression: str) -> set[str]:
    return set(re.findall(r"\bdedup_\w+", expression))


@pytest.mark.parametrize("name", rules())
def test_an_alert_names_existing_metrics_and_labels(name):
    expression = rules()[name]["expr"]
    assert names(expression) <= series()
    assert names(expression) or "up{" in expression
    labels = {label for metric in METRICS for label in metric.labels} | {"job", "instance", "le"}
    named = re.findall(r"\b(?:by|ignoring|without|on) \(([^)]*)\)|(\w+)=~?\"", expression)
    used = {label for group, single in named for label in (*re.split(r",\s*", group), single) if label}
    annotated = set(re.findall(r"\$labels\.(\w+)", rules()[name]["annotations"]["summary"]))
    assert used | annotated <= labels
    assert rules()[name]["labels"]["severity"] in {"warning", "critical"}


@pytest.mark.parametrize("name", rules())
def test_an_alert_has_a_heading_in_the_runbook(name):
    page, _, anchor = rules()[name]["annotations"]["runbook"].partition("#")
    headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert name in headings
    assert anchor == name.lower()


def test_the_runbook_has_no_alert_that_is_gone():
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^### (Dedup\w+)$", text, re.MULTILINE)) == set(rules())


def test_the_dashboard_shows_every_metric_and_no_other():
    named = {name for expression in expressions().values() for name in names(expression)}
    assert named <= series()
    shown = {metric.name for metric in METRICS if any(name.startswith(metric.name) for name in named)}
    assert shown == {metric.name for metric in METRICS}


def test_the_dashboard_has_not_drifted():
    made = runpy.run_path(str(ROOT / "docs" / "grafana.py"))["text"]()
    assert made == DASHBOARD.read_text(encoding="utf-8"), "run: python docs/grafana.py"


def test_panels_do_not_overlap_and_have_numbers_of_their_own():
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert max(x for x, _ in cells) < 24
        assert not taken & cells, panel["title"]
        taken |= cells


def run(promtool: str, *arguments: str) -> None:
    done = subprocess.run([promtool, *arguments], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_takes_the_rules(promtool):
    run(promtool, "check", "rules", str(ALERTS))


def test_prometheus_takes_every_expression_of_the_dashboard(promtool, tmp_path):
    path = tmp_path / "dashboard.yaml"
    recorded = [{"record": f"a{number}", "expr": text} for number, text in enumerate(expressions().values())]
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": recorded}]}), encoding="utf-8")
    run(promtool, "check", "rules", str(path))


@pytest.mark.parametrize("name", ["prometheus.yaml", "prometheus-kubernetes.yaml"])
def test_prometheus_takes_the_config(promtool, name, tmp_path):
    text = (ROOT / "config" / name).read_text(encoding="utf-8").replace("/etc/prometheus/alerts.yaml", str(ALERTS))
    token = tmp_path / "token"
    token.write_text("t", encoding="utf-8")
    moved, tokens = re.subn(r"(?<=credentials_file: )[^}]+", str(token), text)
    assert tokens == 1
    (tmp_path / name).write_text(moved, encoding="utf-8")
    run(promtool, "check", "config", str(tmp_path / name))


@dataclass(frozen=True)
class Case:
    """Series a minute, as promtool writes them, and whether the alert fires two hours later."""

    alert: str
    given: dict[str, str]
    fires: bool = True


def of_task(metric: str, more: str = "") -> str:
    return f"{metric}{{{TASK}{more}}}"


UP = 'up{job="dedup-a",instance="w:1"}'
RUNNING = of_task("dedup_task_state", ',state="running"')
RESTORING = of_task("dedup_task_state", ',state="restoring"')
DEAD = of_task("dedup_dead_letters_total", ',reason="not_json"')
UNIQUE = of_task("dedup_records_total", ',verdict="unique"')
CONFLICTS = of_task("dedup_conflicts_total")
LATE = of_task("dedup_records_total", ',verdict="late"')
ABORTED = of_task("dedup_transactions_total", ',result="aborted"')
COMMITTED = of_task("dedup_transactions_total", ',result="committed"')
HIDDEN = of_task("dedup_last_stable_offset_lag")
LAG, LAG_S = of_task("dedup_lag_records"), of_task("dedup_lag_seconds")
SINCE = of_task("dedup_seconds_since_commit")
HIDDEN = of_task("dedup_last_stable_offset_lag")
STATE, CAP = of_task("dedup_state_bytes"), of_task("dedup_state_max_bytes")
FENCED = 'dedup_fenced_total{job="dedup-a",instance="w:1"}'
CORRUPTED = 'dedup_corrupted_total{job="dedup-a",instance="w:1"}'
STARTED = 'dedup_start_time_seconds{job="dedup-a",instance="w:1"}'
STANDBY = 'dedup_standby_lag_records{job="dedup-a",instance="w:1",partition="0"}'
STREAM = of_task("dedup_stream_time_seconds")
OTHER = RUNNING.replace("w:1", "w:2")


def commit(bound: str) -> str:
    return of_task("dedup_commit_seconds_bucket", f',le="{bound}"')


CASES = (
    Case("DedupWorkerDown", {UP: "1x110 0x20"}),
    Case("DedupWorkerDown", {UP: "1x130"}, fires=False),
    Case("DedupWorkerDown", {'up{job="other-a",instance="w:1"}': "0x130"}, fires=False),
    Case("DedupWorkerRestarts", {UP: "1x110 0 1 0 1 0 1 0 1 0 1"}),
    Case("DedupWorkerRestarts", {UP: "1x110 0 1 1 1 1 1 1 1 1 1"}, fires=False),
    Case("DedupPartitionWithoutWorker", {RUNNING: "1x110 _x20"}),
    Case("DedupPartitionWithoutWorker", {RUNNING: "1x110 0x20", RESTORING: "0x110 1x20"}, fires=False),
    Case("DedupPartitionWithoutWorker", {RUNNING: "1x110 _x20", OTHER: "_x110 1x20"}, fires=False),
    Case("DedupRestoreTooLong", {RESTORING: "0x100 1x30"}),
    Case("DedupRestoreTooLong", {RESTORING: "0x115 1x30"}, fires=False),
    Case("DedupLagGrows", {LAG: "0+100x130", LAG_S: "120x130"}),
    Case("DedupLagGrows", {LAG: "13000-100x130", LAG_S: "120x130"}, fires=False),
    Case("DedupLagGrows", {LAG: "0+100x130", LAG_S: "1x130"}, fires=False),
    Case(
        "DedupCommitsStuck", {SINCE: "0+60x130", LAG: "5x130", HIDDEN: "4x130", RUNNING: "1x110 0 1 0 0 0 1 0 0 0 0 0"}
    ),
    Case("DedupCommitsStuck", {SINCE: "0+60x130", LAG: "0x130", HIDDEN: "0x130", RUNNING: "1x130"}, fires=False),
    Case("DedupCommitsStuck", {SINCE: "0+60x130", LAG: "5x130", HIDDEN: "5x130", RUNNING: "1x130"}, fires=False),
    Case("DedupCommitsStuck", {SINCE: "0+60x130", HIDDEN: "0x130", RESTORING: "1x130"}, fires=False),
    Case("DedupCommitsSlow", {commit("2.0"): "0+1x130", commit("5.0"): "0+60x130", commit("+Inf"): "0+60x130"}),
    Case("DedupCommitsSlow", {commit("0.1"): "0+60x130", commit("+Inf"): "0+60x130"}, fires=False),
    Case("DedupTransactionsAborted", {ABORTED: "0+10x130", COMMITTED: "0+50x130"}),
    Case("DedupTransactionsAborted", {ABORTED: "0+1x130", COMMITTED: "0+50x130"}, fires=False),
    Case("DedupOpenTransaction", {HIDDEN: "7x130"}),
    Case("DedupOpenTransaction", {HIDDEN: "7x130", UNIQUE: "0+9x105 945x30"}),
    Case("DedupOpenTransaction", {HIDDEN: "7x115 0 7x20"}, fires=False),
    Case("DedupOpenTransaction", {HIDDEN: "7x130", UNIQUE: "0+9x130"}, fires=False),
    Case("DedupOpenTransaction", {HIDDEN: "_x117 7x20", UNIQUE: "_x117 0+9x20"}, fires=False),
    Case("DedupDeadLetters", {DEAD: "3x110 4x20"}),
    Case("DedupDeadLetters", {DEAD: "_x110 1x20", STARTED: "5x130"}),
    Case("DedupDeadLetters", {DEAD: "_x110 1x20", STARTED: "_x110 6590x20"}),
    Case("DedupDeadLetters", {DEAD: "1x109 1x20", STARTED: "5x109 6590x20"}),
    Case("DedupDeadLetters", {DEAD: "3x130"}, fires=False),
    Case("DedupDeadLetters", {DEAD: "3x130", STARTED: "5x130"}, fires=False),
    # For a while, Prometheus did not reach the worker, or Prometheus is new.
    Case("DedupDeadLetters", {DEAD: "3x95 _x12 3x30"}, fires=False),
    Case("DedupDeadLetters", {DEAD: "3x95 _x12 3x30", STARTED: "5x95 _x12 5x30"}, fires=False),
    Case("DedupDeadLetters", {DEAD: "_x110 3x20", STARTED: "_x110 5x20"}, fires=False),
    Case("DedupLate", {UNIQUE: "0+90x130", LATE: "0+10x130"}),
    Case("DedupLate", {UNIQUE: "0+999x130", LATE: "0+1x130"}, fires=False),
    Case("DedupConflicts", {CONFLICTS: "0x110 1x20"}),
    Case("DedupConflicts", {CONFLICTS: "9x130"}, fires=False),
    Case("DedupMisplacedIds", {of_task("dedup_misplaced_ids_total"): "0x110 1x20"}),
    Case("DedupMisplacedIds", {of_task("dedup_misplaced_ids_total"): "9x130"}, fires=False),
    Case("DedupFencedStorm", {FENCED: "0+1x130"}),
    Case("DedupFencedStorm", {FENCED: "0x115 2x20"}, fires=False),
    Case("DedupStoreCorrupted", {CORRUPTED: "0x110 1x20"}),
    Case("DedupStoreCorrupted", {CORRUPTED: "_x110 1x20", STARTED: "_x110 6590x20"}),
    Case("DedupStoreCorrupted", {CORRUPTED: "1x109 1x20", STARTED: "5x109 6590x20"}),
    Case("DedupStoreCorrupted", {CORRUPTED: "1x130"}, fires=False),
    Case("DedupStoreCorrupted", {CORRUPTED: "1x130", STARTED: "5x130"}, fires=False),
    Case("DedupStoreCorrupted", {CORRUPTED: "_x110 1x20", STARTED: "_x110 5x20"}, fires=False),
    Case("DedupStoreCorrupted", {CORRUPTED: "_x110 0x20", STARTED: "_x110 6590x20"}, fires=False),
    Case("DedupStateNearCap", {STATE: "90x130", CAP: "100x130"}),
    Case("DedupStateNearCap", {STATE: "70x130", CAP: "100x130"}, fires=False),
    Case("DedupStateNearCap", {STATE: "90x130"}, fires=False),
    Case("DedupStreamTimeStands", {STREAM: "5x130", UNIQUE: "0+9x130"}),
    Case("DedupStreamTimeStands", {STREAM: "0+60x130", UNIQUE: "0+9x130"}, fires=False),
    Case("DedupStreamTimeStands", {STREAM: "5x130", UNIQUE: "9x130"}, fires=False),
    Case("DedupStandbyBehind", {STANDBY: "200000x130"}),
    Case("DedupStandbyBehind", {STANDBY: "200000x115 0 200000x20"}, fires=False),
)


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_not():
    for fires in (True, False):
        assert {case.alert for case in CASES if case.fires is fires} == set(rules())


def test_alerts_fire_and_are_quiet(promtool, tmp_path):
    # All at once, each in a job of its own: a database per case would take a minute.
    given, asked = [], []
    for number, case in enumerate(CASES):
        given += in_job(number, case.given)
        fired = f'ALERTS{{alertname="{case.alert}",alertstate="firing",job=~".*-{number}"}}'
        expected = [{"labels": "{}", "value": int(case.fires)}]
        asked.append({"expr": f"count({fired}) or vector(0)", "eval_time": "2h", "exp_samples": expected})
    answers(promtool, tmp_path, given, asked)


OF_STATS = {"Dead letters A": DEAD, "Late A": LATE, "Conflicts A": CONFLICTS}
# A counter and the start of its process, a minute each, and by how much the counter grew in the last hour.
GROWN = (
    ("0+1x130", "5x130", 60),
    ("_x70 0+1x50", "5x130", 50),
    ("_x70 7x10 7+1x39", "5x130", 46),
    ("_x70 0+1x50", "_x70 4190x50", 50),
    ("_x70 7x10 7+1x39", "_x70 4190x50", 46),
    ("_x70 7x10 7+1x9", "_x70 4190x20", 16),
    ("9x100 0+1x20", "5x100 6050x20", 19),
    ("9x130", "5x130", 0),
    # For a while, also an hour ago, Prometheus did not reach the worker, or Prometheus is new.
    ("9x50 _x20 9x60", "5x50 _x20 5x60", 0),
    ("_x70 9x60", "_x70 5x60", 0),
)


def test_a_stat_of_the_dashboard_says_by_how_much_a_counter_grew(promtool, tmp_path):
    given, asked = [], []
    for number, (counter, started, grown) in enumerate(GROWN):
        given += in_job(number, {STARTED: started, **dict.fromkeys(OF_STATS.values(), counter)})
        of_job = expressions(f"dedup-{number}")
        expected = [{"labels": "{}", "value": grown}]
        asked += [{"expr": f"round({of_job[title]})", "eval_time": "2h", "exp_samples": expected} for title in OF_STATS]
    answers(promtool, tmp_path, given, asked)


def in_job(number: int, series: dict[str, str]) -> list[dict[str, str]]:
    """Return the series in a job of its own."""
    return [
        {"series": re.sub(r'job="(dedup|other)-a"', rf'job="\1-{number}"', name), "values": values}
        for name, values in series.items()
    ]


def answers(promtool: str, directory: Path, given: list[dict[str, str]], asked: list[dict[str, Any]]) -> None:
    """The expressions have the expected values, and the alerts are evaluated."""
    tests = [{"interval": "1m", "input_series": given, "promql_expr_test": asked}]
    path = directory / "tests.yaml"
    document = {"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": tests}
    path.write_text(json.dumps(document), encoding="utf-8")
    run(promtool, "test", "rules", str(path))
