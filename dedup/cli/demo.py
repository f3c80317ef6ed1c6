"""Implements `dedup demo`, which shows dedup on one machine with real data, real duplicates, and a real crash."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dedup.cli.inputs import refuse_no_page


def demo(
    fast: Annotated[bool, typer.Option("--fast", help="Use only the first 40,000 flights.")] = False,
    report: Annotated[Path | None, typer.Option(help="HTML report; a JSON report is written next to it.")] = None,
    chain: Annotated[
        bool, typer.Option("--chain", help="Run the chain from a file to a table, and kill each process once.")
    ] = False,
) -> None:
    """Deduplicate 336,776 real flights on an embedded Kafka, kill a worker midway, and prove the result.

    A producer whose connection breaks before the acknowledgment arrives sends the record again, which creates real
    duplicates. Two workers deduplicate the records; one of them is killed with SIGKILL and restarted. Finally, the demo
    reads every record and compares the result with the exact model. The demo needs no installed Kafka or Java. The demo
    takes about a minute, or about 20 seconds with --fast.

    Example: dedup demo --fast

    With --chain, the flights start as lines of a file, pass through a topic and the deduplication, and end as rows of a
    table.
    """
    from dedup.cli.demo_run import FAST, FULL, demo_chain, print_books, run_demo

    if chain and report is not None:
        raise typer.BadParameter("--report and --chain exclude each other")
    if report is not None:
        refuse_no_page(report)
    console = Console(highlight=False, soft_wrap=True)
    directory = Path(tempfile.mkdtemp(prefix="dedup-demo-"))
    size = FAST if fast else FULL
    found = None
    try:
        if chain:
            demo_chain(size.flights, directory, console)
        else:
            found, distinct = run_demo(size, directory, console)
    except Exception:
        # The logs of the broker and the workers are the only evidence.
        console.print(f"the logs are in {directory}", style="yellow")
        raise
    except KeyboardInterrupt:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    shutil.rmtree(directory, ignore_errors=True)
    if found is not None:
        print_books(found, distinct, report, console)
