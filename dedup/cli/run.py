"""Implements `dedup run`, which runs a worker or a supervisor of several workers."""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Final, Self

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.text import Text

import dedup
from dedup.cli.inputs import ConfigOption, SetOption, TopologyArgument, packed, read_both
from dedup.kafka.outage_lines import logging_paused
from dedup.quantities import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dedup.metrics import TaskNumbers
    from dedup.worker.faust_app import DedupApp

log: Final = logging.getLogger(__name__)
EVERY_S: Final = 0.5
"""The interval, in seconds, at which the progress line is updated."""
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_KEPT_BYTES: Final = 256 << 20
"""The amount of freed memory, in bytes, that a worker keeps at the end of its heap instead of returning it."""
_OWN_MAPPING_BYTES: Final = 64 << 20
"""The smallest allocation, in bytes, that gets its own memory mapping. Freeing it returns the memory to the kernel."""
_MALLOC_VARIABLES: Final = ("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


def run(
    topology: TopologyArgument,
    config: ConfigOption = None,
    overrides: SetOption = None,
    workers: Annotated[
        int, typer.Option(min=1, max=256, metavar="N", help="Number of worker processes, from 1 to 256.")
    ] = 1,
    exit_when_done: Annotated[
        bool, typer.Option("--exit-when-done", help="Stop at the end offsets that the topics have at startup.")
    ] = False,
    onto_existing_output: Annotated[
        bool, typer.Option("--onto-existing-output", help="Let a new group write to an output topic that has records.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show only the log, without a progress line.")] = False,
) -> None:
    """Deduplicate a topology's source topics with one or more worker processes until a signal arrives.

    Workers refuse to start in a new consumer group if the output already contains records, because a renamed topology
    or a second topology with the same output would forward the same records again. With --onto-existing-output, workers
    start anyway. Kafka stores this permission with the group's offsets, by default for seven days, so later starts do
    not need the option.

    Examples: dedup run topologies/orders.yaml

    dedup run topologies/orders.yaml --config config/production.yaml --workers 4

    dedup run topologies/simplest.yaml --exit-when-done --set commit_interval=100ms

    dedup run topologies/simplest.yaml --onto-existing-output
    """
    from dedup.worker.logs import set_up_logging
    from dedup.worker.supervisor import FleetPlan, supervise
    from dedup.worker.worker import kept_worker_id

    # `read_both` reports a missing schema registry before anything is created.
    parsed, settings = read_both(topology, config, overrides)
    set_up_logging(settings)
    if workers > 1:
        settings = settings.model_copy(update={"worker_id": kept_worker_id(settings)})
        said = tuple(overrides or ())
        plan = FleetPlan(topology, config, said, settings, workers, exit_when_done, onto_existing_output)
        raise typer.Exit(supervise(plan))
    keep_freed_memory()
    with RunProgress(enabled=not quiet) as progress:
        dedup.run(
            parsed,
            settings,
            exit_when_done=exit_when_done,
            onto_existing_output=onto_existing_output,
            on_tick=progress.tick,
        )
    progress.closing_line(logged=quiet)


def keep_freed_memory() -> bool:
    """Make this process reuse the buffers of one batch for the next. Return whether this succeeded.

    By default, glibc returns large buffers to the kernel, which must clear the same memory again for every batch. In
    measurements, keeping the memory made a worker 4 to 5% faster, with the same peak memory use. The function changes
    nothing with another C library, or if the user has set malloc's thresholds with glibc's environment variables.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in _MALLOC_VARIABLES):
        return False
    # If only the second call succeeded, glibc would map even smaller buffers than by default.
    return bool(mallopt(_M_MMAP_THRESHOLD, _OWN_MAPPING_BYTES) and mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))


class VerdictProgress:
    """Shows on a terminal how many records have received each verdict so far.

    Use `VerdictProgress` in a ``with`` statement.
    """

    def __init__(self, *, enabled: bool) -> None:
        # Log lines appear unchanged above the progress line, so they stay searchable, and the terminal wraps them.
        self._console: Final = Console(stderr=True, soft_wrap=True)
        self._live: Final = Live(console=self._console, transient=True, auto_refresh=False)
        self._enabled: Final = enabled and self._console.is_terminal
        self.verdicts: Counter[str] = Counter()

    def __enter__(self) -> Self:
        if self._enabled:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._enabled:
            with logging_paused():
                self._live.stop()

    def show(self, doing: str, per_s: float, *above: RenderableType) -> None:
        """Show the current activity, the records per second, and the number of records with each verdict."""
        if self._enabled:
            doing = f"{doing}  {self.verdicts.total():,} judged  {per_s:,.0f}/s "
            line = packed(doing, self._split(), self._console.width)
            with logging_paused():
                self._live.update(Group(*above, Text(line)), refresh=True)

    def _split(self) -> list[str]:
        return [f"{name} {count:,}" for name, count in sorted(self.verdicts.items()) if count]

    def closing_line(self, *, logged: bool = False) -> None:
        """Print how many records this process judged, by verdict. If ``logged``, write this to the log instead."""
        head, split = f"judged {self.verdicts.total():,}:", self._split() or ["nothing"]
        if logged:
            log.info("%s %s", head, "  ".join(split))
        else:
            self._console.print(packed(head, split, self._console.width), highlight=False)


class RunProgress(VerdictProgress):
    """Shows a worker's progress since its start, including the records of tasks that have moved to other workers."""

    def __init__(self, *, enabled: bool) -> None:
        super().__init__(enabled=enabled)
        self._next_s = 0.0
        self._last = (time.monotonic(), 0)
        self._app: DedupApp | None = None
        self._shown: dict[int, TaskNumbers] = {}
        """Maps id(counters) to the counters of each task that was shown, including tasks that have closed since."""

    def tick(self, app: DedupApp) -> None:
        """Update the progress line, at most once every `EVERY_S` seconds, and only on a terminal."""
        self._app = app
        now_s = time.monotonic()
        if now_s < self._next_s or not self._enabled:
            return
        self._next_s = now_s + EVERY_S
        numbers = [task.numbers for task in app.tasks.running.values()]
        self._shown.update((id(each), each) for each in numbers)
        self._add_up(self._shown.values())
        before_s, before = self._last
        self._last = (now_s, self.verdicts.total())
        per_s = (self.verdicts.total() - before) / max(now_s - before_s, 1e-9)
        self.show(counted(len(numbers), "task"), per_s, *restore_bar(numbers))

    def closing_line(self, *, logged: bool = False) -> None:
        """Print how many records this worker judged, by verdict. If ``logged``, write this to the log instead."""
        if self._app is not None:
            tasks = self._app.tasks
            self._add_up([*tasks.ended.values(), *(task.numbers for task in tasks.running.values())])
        super().closing_line(logged=logged)

    def _add_up(self, counted: Iterable[TaskNumbers]) -> None:
        self.verdicts.clear()
        for numbers in counted:
            self.verdicts.update(numbers.verdicts)


def restore_bar(numbers: Sequence[TaskNumbers]) -> list[RenderableType]:
    """Return text and a progress bar for all running restores, or an empty list if no restore is running."""
    restoring = [each for each in numbers if each.restore_remaining > 0]
    if not restoring:
        return []
    total = sum(each.restore_total for each in restoring)
    remaining = sum(each.restore_remaining for each in restoring)
    tasks = counted(len(restoring), "task")
    text = Text(f"restoring {tasks}, {remaining:,} of {total:,} changelog offsets to go ")
    bar = ProgressBar(total=total, completed=total - remaining)
    return [text, Padding(bar, 0)]  # A bar alone does not end its line.
