"""The progress line of a running worker: rates and verdicts on a terminal, nothing where there is none."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Final, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from dedup.metrics import TaskNumbers
    from dedup.worker.app import DedupApp

EVERY_S: Final = 0.5


def restore_bar(numbers: Sequence[TaskNumbers]) -> list[RenderableType]:
    """Return a progress bar over all restores that are under way; nothing when none is."""
    under_way = [each for each in numbers if each.restore_remaining > 0]
    if not under_way:
        return []
    total = sum(each.restore_total for each in under_way)
    remaining = sum(each.restore_remaining for each in under_way)
    text = Text(f"restoring {len(under_way)} tasks, {remaining:,} of {total:,} changelog offsets to go ")
    return [text, ProgressBar(total=total, completed=total - remaining)]


class RunProgress:
    """Shows what the worker's tasks are doing."""

    def __init__(self, *, enabled: bool) -> None:
        self._console: Final = Console(stderr=True)
        self._live: Final = Live(console=self._console, transient=True, auto_refresh=False)
        self._enabled: Final = enabled and self._console.is_terminal
        self._next_s = 0.0
        self._last = (time.monotonic(), 0)
        self.verdicts: Counter[str] = Counter()
        """Of this process, over all assignments."""
        self._of_tasks: dict[int, Counter[str]] = {}

    def __enter__(self) -> Self:
        if self._enabled:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._enabled:
            self._live.stop()

    def tick(self, app: DedupApp) -> None:
        """Look at the tasks; cheap enough to be called often."""
        for task in app.tasks.running.values():
            self._of_tasks[id(task.numbers)] = task.numbers.verdicts
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + EVERY_S
        self.verdicts = sum(self._of_tasks.values(), Counter())
        total = self.verdicts.total()
        before_s, before = self._last
        self._last = (now_s, total)
        rate = (total - before) / max(now_s - before_s, 1e-9)
        if self._enabled:
            line = f"{len(app.tasks.running)} tasks  {total:,} judged  {rate:,.0f}/s  {self._split()}"
            numbers = [task.numbers for task in app.tasks.running.values()]
            self._live.update(Group(*restore_bar(numbers), Text(line)), refresh=True)

    def _split(self) -> str:
        return "  ".join(f"{name} {count:,}" for name, count in sorted(self.verdicts.items()) if count)

    def closing_line(self) -> None:
        """Print what this process judged."""
        self.verdicts = sum(self._of_tasks.values(), Counter())
        self._console.print(f"judged {self.verdicts.total():,}: {self._split() or 'nothing'}", highlight=False)
