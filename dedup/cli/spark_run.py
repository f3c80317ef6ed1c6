"""`dedup spark run`: a topology as a Structured Streaming job."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, Self

import typer
from rich.console import Console

if TYPE_CHECKING:
    from dedup.spark.running import Running
    from dedup.spark.stream import BatchReport

EXAMPLES = """
Examples:

  dedup spark run topologies/orders.yaml --checkpoint /var/lib/dedup/orders

  dedup spark run topologies/orders.yaml --checkpoint s3a://bucket/orders --master spark://host:7077

  dedup spark run topologies/orders.yaml --checkpoint /tmp/orders --exit-when-done
"""

VERDICTS: Final = ("unique", "duplicate", "late", "dead_letter", "exempt")


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("run", epilog=EXAMPLES)(run)


def run(
    topology: Annotated[Path, typer.Argument(help="The topology file.", metavar="TOPOLOGY")],
    *,
    checkpoint: Annotated[str, typer.Option(help="Spark's checkpoint: a directory of this topology alone.")],
    config: Annotated[Path | None, typer.Option(help="Where: brokers, security, directories.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key=value, over the config file.")] = None,
    semantics: Annotated[
        Literal["exact", "watermark"],
        typer.Option(help="exact: the fleet's verdicts. watermark: Spark's own operator; its differences are printed."),
    ] = "exact",
    master: Annotated[str | None, typer.Option(help="Spark's master; left to spark-submit there.")] = None,
    conf: Annotated[list[str] | None, typer.Option("--conf", help="key=value for Spark.")] = None,
    exit_when_done: Annotated[
        bool, typer.Option("--exit-when-done", help="Stop at the end offsets seen at start.")
    ] = False,
    most_offsets: Annotated[int, typer.Option(min=1, help="Offsets in a micro-batch, at most.")] = 1_000_000,
    commit_rows: Annotated[int, typer.Option(min=1, help="Records in a transaction, about.")] = 100_000,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress line.")] = False,
) -> None:
    """Deduplicate a topology's topics on Spark, exactly once, with the fleet's own verdicts and state."""
    import os
    from dataclasses import replace

    from dedup.cli.inputs import read_topology
    from dedup.cli.spark_inputs import open_session
    from dedup.settings import load_settings
    from dedup.spark.stream import StreamOptions, start_stream

    settings = load_settings(config, overrides or [], os.environ)
    parsed = read_topology(topology)
    options = StreamOptions(checkpoint, exit_when_done, most_offsets, commit_rows)
    # Alone, a task that fails would end the stream: inside one machine Spark tries again only if the master says so.
    alone = master is None and "PYSPARK_GATEWAY_PORT" not in os.environ
    spark = open_session(parsed, "local[*,4]" if alone else master, conf, ("kafka",))
    try:
        if semantics == "watermark":
            from dedup.spark.watermark import differences, start_watermark

            stream = start_watermark(spark, parsed, settings, options)
            typer.echo(differences(parsed), err=True)
            _wait(stream)
        else:
            with StreamProgress(enabled=not quiet) as progress:
                _wait(start_stream(spark, parsed, settings, replace(options, on_batch=progress.add)))
            progress.closing_line()
    finally:
        spark.stop()


def _wait(stream: Running) -> None:
    with _stopped_by_signals(stream.stop):
        stream.wait()


@contextmanager
def _stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Inside ``with``, SIGTERM and SIGINT call ``stop``."""

    def stopped(_number: int, _frame: object) -> None:
        stop()

    before = {number: signal.signal(number, stopped) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StreamProgress:
    """A line on a terminal while the stream runs, and one at its end."""

    def __init__(self, *, enabled: bool) -> None:
        self._console: Final = Console(stderr=True)
        self._status: Final = self._console.status("waiting for records")
        self._enabled: Final = enabled and self._console.is_terminal
        self._began_s: Final = time.monotonic()
        self._verdicts: Final[Counter[str]] = Counter()
        self._batches = 0

    def __enter__(self) -> Self:
        if self._enabled:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._enabled:
            self._status.stop()

    def add(self, report: BatchReport) -> None:
        """Count a micro-batch."""
        self._batches += 1
        for name in VERDICTS:
            self._verdicts[name] += report.total(name)
        judged = sum(self._verdicts[name] for name in VERDICTS)
        rate = judged / (time.monotonic() - self._began_s)
        if self._enabled:
            self._status.update(f"{self._batches} micro-batches  {judged:,} judged  {rate:,.0f}/s  {self._split()}")

    def _split(self) -> str:
        return "  ".join(f"{name} {count:,}" for name, count in sorted(self._verdicts.items()) if count)

    def closing_line(self) -> None:
        """Print what this run judged."""
        judged = sum(self._verdicts[name] for name in VERDICTS)
        self._console.print(f"judged {judged:,}: {self._split() or 'nothing'}", highlight=False)
