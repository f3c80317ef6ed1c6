"""`dedup run`: a worker, or a supervisor of several."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dedup.settings import Settings
    from dedup.topology.model import Topology

EXAMPLES = """
Examples:

  dedup run topologies/orders.yaml

  dedup run topologies/orders.yaml --config config/production.yaml --workers 4

  dedup run topologies/simplest.yaml --exit-when-done --set commit_interval=100ms
"""


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("run", epilog=EXAMPLES)(run)


def run(
    topology: Annotated[Path, typer.Argument(help="The topology file.", metavar="TOPOLOGY")],
    config: Annotated[Path | None, typer.Option(help="Where: brokers, security, directories.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key=value, over the config file.")] = None,
    workers: Annotated[int, typer.Option(min=1, max=256, help="Supervise this many worker processes.")] = 1,
    exit_when_done: Annotated[
        bool, typer.Option("--exit-when-done", help="Stop at the end offsets seen at start.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress line; the log only.")] = False,
) -> None:
    """Deduplicate a topology's topics: one worker, or N supervised ones, until a signal comes."""
    import os
    from dataclasses import replace

    from dedup.cli.inputs import read_topology
    from dedup.settings import load_settings
    from dedup.worker.fleet import FleetPlan, supervise
    from dedup.worker.logs import set_up_logging
    from dedup.worker.worker_id import kept_worker_id

    settings = load_settings(config, overrides or [], os.environ)
    parsed = read_topology(topology)
    set_up_logging(settings)
    if workers > 1:
        settings = replace(settings, worker_id=kept_worker_id(settings))
        plan = FleetPlan(topology, config, tuple(overrides or ()), settings, workers, exit_when_done=exit_when_done)
        raise typer.Exit(supervise(plan))
    _run_one(parsed, settings, exit_when_done=exit_when_done, quiet=quiet)


def _run_one(parsed: Topology, settings: Settings, *, exit_when_done: bool, quiet: bool) -> None:
    from functools import partial

    from dedup.cli.progress import RunProgress
    from dedup.web.server import Pages
    from dedup.worker.runner import RunOptions, main_loop

    make_pages = partial(Pages, settings.web) if settings.web.enabled else None
    with RunProgress(enabled=not quiet) as progress:
        main_loop(parsed, settings, RunOptions(exit_when_done, progress.tick, make_pages))
    progress.closing_line()
