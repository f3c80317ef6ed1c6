"""A progress bar over the tasks of Spark's jobs, from the driver's own status tracker."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final, Self

from rich.console import Console
from rich.progress import Progress as Bars

if TYPE_CHECKING:
    from types import TracebackType

    from pyspark.sql import SparkSession

_LOOK_S: Final = 0.5


class JobProgress:
    """Shows the stages that run, while the block runs; nothing where there is no terminal."""

    def __init__(self, spark: SparkSession, *, enabled: bool) -> None:
        console = Console(stderr=True)
        self._tracker: Final = spark.sparkContext.statusTracker()
        self._bars: Final = Bars(console=console, transient=True)
        self._enabled: Final = enabled and console.is_terminal
        self._over: Final = threading.Event()
        self._thread: Final = threading.Thread(target=self._watch, name="spark-progress", daemon=True)

    def __enter__(self) -> Self:
        if self._enabled:
            self._bars.start()
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._enabled:
            self._over.set()
            self._thread.join()
            self._bars.stop()

    def _watch(self) -> None:
        shown = {}
        while not self._over.wait(_LOOK_S):
            for stage in self._tracker.getActiveStageIds():
                info = self._tracker.getStageInfo(stage)
                if info is None:
                    continue
                if stage not in shown:
                    shown[stage] = self._bars.add_task(f"stage {stage}: {info.name.split(' at ')[0]}")
                self._bars.update(shown[stage], total=info.numTasks, completed=info.numCompletedTasks)
            for stage in shown.keys() - set(self._tracker.getActiveStageIds()):
                self._bars.remove_task(shown.pop(stage))
