"""The bar that shows Kafka's jars being fetched, at the first use only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from dedup.local.jars import Progress as OnBytes


@contextlib.contextmanager
def fetching_jars() -> Iterator[OnBytes]:
    """Yield what is to be called with bytes done and bytes in all; the bar is there while they come."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("Kafka 4.1.1 from Maven Central", total=None, visible=False)

        def show(done_bytes: int, total_bytes: int) -> None:
            bar.update(task, completed=done_bytes, total=total_bytes, visible=True)

        yield show
