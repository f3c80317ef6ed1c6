"""What `dedup status` shows: the brokers' view of the tasks, and what workers that answer add to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from rich.console import Group
from rich.table import Table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from dedup.worker.survey import Survey

WATCH_S: Final = 2.0
FROM_WORKER: Final = ("state", "restore_remaining", "state_ids", "state_bytes", "verdicts", "seconds_since_commit")


def looked(survey: Survey, pages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return both views together, as plain data."""
    said = {(task["task"], task["topic"], task["partition"]): task for page in pages for task in page["tasks"]}
    tasks = []
    for task in survey.tasks:
        known = said.get((task.task, task.topic, task.partition), {})
        tasks.append({**asdict(task), **{key: known.get(key) for key in FROM_WORKER}})
    return {
        "topology": survey.topology,
        "members": [
            {"worker": each.worker_id, "host": each.host, "partitions": [f"{t}/{p}" for t, p in each.partitions]}
            for each in survey.members
        ],
        "lag": sum(task.lag for task in survey.tasks),
        "missing_topics": list(survey.missing_topics),
        "workers_that_answered": [page["worker"] for page in pages],
        "tasks": tasks,
    }


def table(seen: dict[str, Any]) -> RenderableType:
    """Return the status for a terminal."""
    found = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("task", "partition", "owner"):
        found.add_column(name)
    for name in ("committed", "end", "lag", "changelog", "state", "IDs", "bytes", "restoring", "duplicates"):
        found.add_column(name, justify="right")
    for task in seen["tasks"]:
        begin, end = task["changelog_begin"], task["changelog_end"]
        found.add_row(
            task["task"],
            f"{task['topic']}/{task['partition']}",
            task["owner"] or "nobody",
            _number(task["committed"]),
            _number(task["end"]),
            _number(task["lag"]),
            _number(None if end is None else end - begin),
            task["state"] or "-",
            _number(task["state_ids"]),
            _number(task["state_bytes"]),
            _number(task["restore_remaining"]),
            _share(task["verdicts"]),
        )
    members = ", ".join(f"{each['worker']} at {each['host']}" for each in seen["members"]) or "none"
    lines: list[RenderableType] = [f"{seen['topology']}: lag {seen['lag']:,}; workers: {members}", found]
    if seen["missing_topics"]:
        lines.append(f"missing topics: {', '.join(seen['missing_topics'])}; `dedup apply` makes them")
    return Group(*lines)


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _share(verdicts: dict[str, int] | None) -> str:
    counts = Counter(verdicts or {})
    judged = counts.total() - counts["repartitioned"]
    return f"{counts['duplicate'] / judged:.1%}" if judged else "-"
