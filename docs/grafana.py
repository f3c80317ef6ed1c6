"""The Grafana dashboard, config/grafana/dashboard.json: run `python docs/grafana.py` after a change.

The top row answers in ten seconds whether anything is lost, late or stuck; below it is why.
"""
# ruff: noqa: INP001  # a script beside its pages, not a package

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

PAGE: Final = Path(__file__).parent.parent / "config" / "grafana" / "dashboard.json"
SOURCE: Final = {"type": "prometheus", "uid": "${source}"}
WIDTH: Final = 24
IN: Final = '{job=~"$job"}'
READABLE_LAG: Final = f"dedup_lag_records{IN} > dedup_last_stable_offset_lag{IN}"
ABORTED: Final = '{job=~"$job",result="aborted"}'
GREEN: Final = {"color": "green", "value": None}


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel: what it shows, and the expressions with their legends."""

    title: str
    queries: Sequence[tuple[str, str]]
    unit: str = "short"
    kind: Literal["stat", "timeseries"] = "timeseries"
    width: int = 8
    bad_from: float | None = None
    """From this value on a stat is red."""
    about: str = ""
    stack: bool = field(default=False, kw_only=True)

    @property
    def height(self) -> int:
        """In rows of the grid."""
        return 4 if self.kind == "stat" else 8


def quantiles(metric: str) -> list[tuple[str, str]]:
    """Return the expressions of a histogram's median and 99th percentile."""
    rate = f"sum by (le) (rate({metric}_bucket{IN}[$__rate_interval]))"
    return [(f"histogram_quantile({share}, {rate})", name) for share, name in ((0.5, "p50"), (0.99, "p99"))]


def per_partition(metric: str, legend: str = "{{topic}}/{{partition}}") -> list[tuple[str, str]]:
    """Return the expression that shows a gauge of every task."""
    return [(f"{metric}{IN}", legend)]


def grown(metric: str, more: str = "") -> str:
    """Return by how much a counter grew in the range shown, also before Prometheus read it for the first time.

    What it read first was counted in the range if the process began in the range, or if Prometheus read the process
    without this counter at the range's begin. Otherwise, it may be older, and does not count.
    """
    at = IN.replace("}", more + "}")
    started = f"dedup_start_time_seconds{IN}"
    in_range = f"(max_over_time({started}[$__range]) > time() - $__range_s or {started} offset $__range)"
    first = f"min_over_time({metric}{at}[$__range]) unless {metric}{at} offset $__range"
    return (
        f"(sum(increase({metric}{at}[$__range])) or vector(0)) "
        f"+ (sum({first} and on (job, instance) {in_range}) or vector(0))"
    )


STATS: Final = (
    Panel("Workers down", [(f"count(up{IN} == 0) or vector(0)", "")], kind="stat", width=3, bad_from=1),
    Panel(
        "Tasks running", [('sum(dedup_task_state{job=~"$job",state="running"}) or vector(0)', "")], kind="stat", width=3
    ),
    Panel(
        "Tasks restoring",
        [('sum(dedup_task_state{job=~"$job",state="restoring"}) or vector(0)', "")],
        kind="stat",
        width=3,
    ),
    Panel("Greatest lag", [(f"max(dedup_lag_seconds{IN})", "")], "s", kind="stat", width=3, bad_from=60),
    Panel(
        "Longest without a commit, with lag",
        [(f"max(dedup_seconds_since_commit{IN} and {READABLE_LAG}) or vector(0)", "")],
        "s",
        kind="stat",
        width=3,
        bad_from=60,
    ),
    Panel("Dead letters", [(grown("dedup_dead_letters_total"), "")], kind="stat", width=3, bad_from=1),
    Panel("Late", [(grown("dedup_records_total", ',verdict="late"'), "")], kind="stat", width=3, bad_from=1),
    Panel("Conflicts", [(grown("dedup_conflicts_total"), "")], kind="stat", width=3, bad_from=1),
)
ROWS: Final[tuple[tuple[str, Sequence[Panel]], ...]] = (
    ("Is anything lost, late or stuck", STATS),
    (
        "Flow",
        (
            Panel(
                "Records by verdict",
                [(f"sum by (verdict) (rate(dedup_records_total{IN}[$__rate_interval]))", "{{verdict}}")],
                "ops",
                stack=True,
            ),
            Panel(
                "Lag",
                per_partition("dedup_lag_records"),
                about="Feeding offsets from the committed one to the end; 0 where no record is among them.",
            ),
            Panel("Lag in time", per_partition("dedup_lag_seconds"), "s"),
            Panel("End to end: record time to commit", quantiles("dedup_end_to_end_seconds"), "s"),
            Panel("Commit", quantiles("dedup_commit_seconds"), "s"),
            Panel(
                "Transactions",
                [(f"sum by (result) (rate(dedup_group_transactions_total{IN}[$__rate_interval]))", "{{result}}")],
                "ops",
            ),
            Panel(
                "Aborted transactions, by partition",
                [(f"rate(dedup_transactions_total{ABORTED}[$__rate_interval])", "{{topic}}/{{partition}}")],
                "ops",
            ),
            Panel("Since the last commit", per_partition("dedup_seconds_since_commit"), "s"),
            Panel(
                "Hidden by open transactions of producers",
                per_partition("dedup_last_stable_offset_lag"),
                about="Records after the last stable offset: nobody who reads committed sees them.",
            ),
            Panel(
                "Event time behind the clock",
                [(f"time() - dedup_stream_time_seconds{IN}", "{{topic}}/{{partition}}")],
                "s",
            ),
            Panel(
                "Time in the topology's flow",
                [(f"sum by (instance) (rate(dedup_flow_seconds_total{IN}[$__rate_interval]))", "{{instance}}")],
                "percentunit",
                about="The share of a second that each worker spends in the code that `then` names.",
            ),
            Panel(
                "Filtered by the topology's flow",
                [(f"sum(rate(dedup_flow_filtered_total{IN}[$__rate_interval]))", "filtered")],
                "ops",
            ),
        ),
    ),
    (
        "State",
        (
            Panel("IDs kept", per_partition("dedup_state_ids"), stack=True),
            Panel(
                "Size, and its bound",
                [*per_partition("dedup_state_bytes"), (f"max(dedup_state_max_bytes{IN})", "max_bytes_per_partition")],
                "bytes",
            ),
            Panel("Restore: still to be read", per_partition("dedup_restore_remaining_records")),
            Panel(
                "Tasks by state", [(f"sum by (state) (dedup_task_state{IN})", "{{state}}")], about="One worker a task."
            ),
            Panel("Standbys behind", per_partition("dedup_standby_lag_records", "{{instance}} {{partition}}")),
            Panel(
                "Read again and skipped",
                [(f"sum(rate(dedup_replayed_total{IN}[$__rate_interval]))", "replayed")],
                "ops",
                about="After a take-over: what was judged before is not judged again.",
            ),
        ),
    ),
    (
        "What needs a person",
        (
            Panel(
                "Dead letters by reason",
                [
                    (f"sum by (reason) (rate(dedup_dead_letters_total{IN}[$__rate_interval]))", "{{reason}}"),
                    (f"sum by (format) (rate(dedup_other_formats_total{IN}[$__rate_interval]))", "of them {{format}}"),
                ],
                "ops",
            ),
            Panel(
                "Conflicts and misplaced IDs",
                [
                    (f"sum(rate(dedup_conflicts_total{IN}[$__rate_interval]))", "conflicts"),
                    (f"sum(rate(dedup_misplaced_ids_total{IN}[$__rate_interval]))", "misplaced (of a sample)"),
                ],
                "ops",
            ),
            Panel(
                "Schemas that records wait for",
                [(f"dedup_schemas_awaited{IN}", "{{instance}}")],
                about="Above 0: the schema registry does not answer, or does not know a schema.",
            ),
            Panel(
                "Tasks fenced, stores damaged, checkpoints unusable",
                [
                    (f"sum(increase(dedup_fenced_total{IN}[$__rate_interval]))", "fenced"),
                    (f"sum(increase(dedup_corrupted_total{IN}[$__rate_interval]))", "damaged"),
                    (f"sum(increase(dedup_checkpoints_unusable_total{IN}[$__rate_interval]))", "unusable"),
                ],
            ),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it."""
    return {
        "title": "dedup",
        "uid": "dedup",
        "tags": ["dedup", "kafka"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"},
                {
                    "name": "job",
                    "label": "Fleet",
                    "type": "query",
                    "datasource": SOURCE,
                    "query": {"query": "label_values(dedup_task_state, job)", "refId": "job"},
                    "refresh": 2,
                    "includeAll": True,
                    "multi": True,
                    "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
        "panels": list(_placed()),
    }


def _placed() -> Iterator[dict[str, Any]]:
    """Yield rows and panels, from left to right and from top to bottom."""
    number, top = 0, 0
    for title, panels in ROWS:
        number += 1
        yield {"id": number, "type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": _at(0, top)}
        top += 1
        left = 0
        for panel in panels:
            number += 1
            if left + panel.width > WIDTH:
                left, top = 0, top + panel.height
            yield _panel(panel, number, _at(left, top, panel.width, panel.height))
            left += panel.width
        top += panels[-1].height


def _at(left: int, top: int, width: int = WIDTH, height: int = 1) -> dict[str, int]:
    return {"x": left, "y": top, "w": width, "h": height}


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    red = [] if panel.bad_from is None else [{"color": "red", "value": panel.bad_from}]
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "min": 0,
        "thresholds": {"mode": "absolute", "steps": [GREEN, *red]},
    }
    options: dict[str, Any] = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "background"}
    if panel.kind == "timeseries":
        defaults["custom"] = {"fillOpacity": 10, "stacking": {"mode": "normal" if panel.stack else "none"}}
        options = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": SOURCE,
                "expr": expression,
                "legendFormat": legend,
                "instant": panel.kind == "stat",
            }
            for index, (expression, legend) in enumerate(panel.queries)
        ],
    }


def text() -> str:
    """Return the file's content."""
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
    sys.stdout.write(f"{PAGE.name}\n")
