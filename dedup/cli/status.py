"""What `dedup status` shows: the brokers' view of the tasks, and what workers that answer add to it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from dedup.worker.survey import Survey

WATCH_S: Final = 2.0
FROM_WORKER: Final = (
    "state",
    "restore_remaining",
    "restore_total",
    "state_ids",
    "state_bytes",
    "state_max_bytes",
    "verdicts",
    "seconds_since_commit",
)


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


class Shown:
    """Where the status is shown: printed, or in place while it is watched on a terminal; use with ``with``."""

    def __init__(self, *, watch: bool, as_json: bool) -> None:
        self._watch: Final = watch
        self._as_json: Final = as_json
        self._console: Final = Console(highlight=False)
        in_place = watch and not as_json and self._console.is_terminal
        # The screen is the terminal's own second one: what stood there before comes back at the end.
        self._live: Final = Live(console=self._console, screen=True, auto_refresh=False) if in_place else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, seen: dict[str, Any]) -> None:
        """Show a status; a watched one in a pipe is one JSON line or one table after the other."""
        if self._live is not None:
            self._live.update(table(seen), refresh=True)
        elif self._as_json:
            self._console.file.write(json.dumps(seen, indent=None if self._watch else 2) + "\n")
            self._console.file.flush()
        else:
            self._console.print(table(seen))


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
            _bytes(task),
            _restoring(task),
            _share(task["verdicts"]),
        )
    members = ", ".join(f"{each['worker']} at {each['host']}" for each in seen["members"]) or "none"
    lines: list[RenderableType] = [f"{seen['topology']}: lag {seen['lag']:,}; workers: {members}", found]
    if seen["missing_topics"]:
        lines.append(f"missing topics: {', '.join(seen['missing_topics'])}; `dedup apply` makes them")
    return Group(*lines)


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _restoring(task: dict[str, Any]) -> str:
    """Return how far a restore is; a dash where none is going on."""
    left, total = task["restore_remaining"], task["restore_total"]
    if task["state"] != "restoring" or left is None:
        return "-"
    return f"{1 - left / total:.0%}, {left:,} left" if total else "beginning"


def _bytes(task: dict[str, Any]) -> str:
    size, most = task["state_bytes"], task["state_max_bytes"]
    return _number(size) if size is None or not most else f"{size:,} ({size / most:.0%} of its bound)"


def _share(verdicts: dict[str, int] | None) -> str:
    counts = Counter(verdicts or {})
    judged = counts.total() - counts["repartitioned"]
    return f"{counts['duplicate'] / judged:.1%}" if judged else "-"
