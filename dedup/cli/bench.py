"""`dedup bench`: the measurements of bench/, which is no part of the package."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from dedup.errors import AuthorMistake, Problem

_HELP: Final = """Measure throughput, latency and restore, and the same job on peers.

Needs a checkout, as the peers are built there; Kafka Streams also needs a JDK (javac). Without --latency and --restore
it measures throughput: 1,000,000 events, three rounds, all candidates in turn, each output checked exact. Results go to
bench/results/. Exit code 1 if a run was not exact. What is measured, and how: bench/README.md. A rate from less than
100,000 events means nothing: all of them come out within a commit or two.

Examples: dedup bench --events 300000 --rounds 1 --only dedup --only quix

dedup bench --latency --rate 40000 --rate 80000

dedup bench --restore
"""
CHECKOUT: Final = Path(__file__).parents[2]
_END_WITHIN_S: Final = 15.0
_INTERRUPTED: Final = 130


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("bench", help=_HELP)(bench_command)


def bench_command(
    events: Annotated[int | None, typer.Option(min=1_000, help="Events; with --restore IDs. Default: 1000000.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, max=100, help="Runs of every candidate. Default: 3.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="A candidate of bench/README.md; repeatable.")] = None,
    latency: Annotated[bool, typer.Option("--latency", help="Latency at steady rates instead.")] = False,
    rate: Annotated[list[int] | None, typer.Option(help="Events a second of --latency; repeatable.")] = None,
    restore: Annotated[bool, typer.Option("--restore", help="Restore onto an empty disk instead.")] = False,
    bootstrap: Annotated[str | None, typer.Option(help="A running broker; without it one is started.")] = None,
) -> None:
    """See `_HELP`; raises AuthorMistake where there is no checkout."""
    if latency and restore:
        raise typer.BadParameter("--latency and --restore exclude each other; run one after the other")
    if rate and not latency:
        raise typer.BadParameter("--rate belongs to --latency")
    if latency and (events or rounds):
        raise typer.BadParameter("--latency takes --rate and --only, not --events or --rounds")
    if restore and only:
        raise typer.BadParameter("--restore measures dedup alone; leave --only out")
    options = [*_given("--bootstrap", [bootstrap] if bootstrap else [])]
    if latency:
        script = "latency"
        options += [*_given("--rate", rate or [40_000, 80_000, 120_000]), *_given("--only", only or [])]
    elif restore:
        script = "restore"
        options += [*_given("--ids", [events] if events else []), *_given("--rounds", [rounds] if rounds else [])]
    else:
        script = "run"
        options += [*_given("--events", [events] if events else []), *_given("--rounds", [rounds] if rounds else [])]
        options += _given("--only", only or [])
    raise typer.Exit(_run(script, options))


def _given(option: str, values: Sequence[str | int]) -> list[str]:
    return [part for value in values for part in (option, str(value))]


def _run(script: str, options: Sequence[str]) -> int:
    """Run a script of bench/ in the checkout; return its exit code."""
    place = CHECKOUT / "bench" / f"{script}.py"
    if not place.is_file():
        text = (
            f"{place} does not exist: this dedup was installed without its checkout. Clone the repository, install it "
            f"with `pip install -e .`, and run `dedup bench` from that environment"
        )
        raise AuthorMistake([Problem("dedup bench", text)])
    command = [sys.executable, "-m", f"bench.{script}", *options]
    with subprocess.Popen(command, cwd=CHECKOUT) as process:  # noqa: S603  # our own script, no shell
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        try:
            code = process.wait()
        except KeyboardInterrupt:
            # A terminal's Ctrl-C went to the script too, which ends its broker and candidates first.
            _end(process)
            raise
    return code if code >= 0 else _INTERRUPTED


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_END_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.terminate()
