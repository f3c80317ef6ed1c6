"""`dedup spark seed`: a history becomes the state that a fleet starts from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dedup.cli.spark_backfill import InputFormat
from dedup.cli.spark_inputs import open_session, parse_until

if TYPE_CHECKING:
    from dedup.spark.seed import Seeded

EXAMPLES = """
Examples:

  dedup spark seed topologies/orders.yaml --until latest

  dedup spark seed topologies/orders.yaml --history /data/orders --until 2026-01-01T00:00:00Z

  dedup spark seed topologies/orders.yaml --history /data/orders --format delta --until orders/0=1200,orders/1=900
"""


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("seed", epilog=EXAMPLES)(seed_command)


def seed_command(  # noqa: PLR0917  # one parameter per option
    topology: Annotated[Path, typer.Argument(help="The topology file.", metavar="TOPOLOGY")],
    until: Annotated[
        str,
        typer.Option(
            metavar="earliest|latest|TIME|OFFSETS", help="Where the fleet begins: everything before is history."
        ),
    ],
    history: Annotated[
        list[str] | None, typer.Option(help="Files or directories. Without it the source topics are read.")
    ] = None,
    fmt: Annotated[InputFormat, typer.Option("--format", help="Of --history.")] = InputFormat.PARQUET,
    rows_are_events: Annotated[
        bool, typer.Option("--rows-are-events", help="The table has no column `value`: each row, as JSON, is an event.")
    ] = False,
    config: Annotated[Path | None, typer.Option(help="Where: brokers, security, directories.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key=value, over the config file.")] = None,
    commit_rows: Annotated[int, typer.Option(min=1, help="Changelog records in a transaction.")] = 50_000,
    master: Annotated[str | None, typer.Option(help="Spark's master; left to spark-submit there.")] = None,
    conf: Annotated[list[str] | None, typer.Option("--conf", help="key=value for Spark.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Write what a history says into the fleet's changelog, so that history and live meet without gap or double.

    The fleet must be stopped and new: no offsets, no changelog. A seed that was killed is finished by running it again.
    """
    import os
    from functools import partial

    from dedup.cli.inputs import read_topology
    from dedup.settings import load_settings
    from dedup.spark.failures import told
    from dedup.spark.files import read_files
    from dedup.spark.progress import JobProgress
    from dedup.spark.seed import SeedOptions, seed

    parsed, settings = read_topology(topology), load_settings(config, overrides or [], os.environ)
    options = SeedOptions(parse_until(until), commit_rows=commit_rows)
    spark = open_session(parsed, master, conf, ["kafka", "delta"] if fmt is InputFormat.DELTA else ["kafka"])
    try:
        with told(), JobProgress(spark, enabled=not quiet):
            files = read_files(spark, history, fmt.value, rows_are_events=rows_are_events) if history else None
            done = seed(spark, parsed, settings, options, history=files, tell=partial(typer.echo, err=True))
    finally:
        spark.stop()
    _print(done)


def _print(done: Seeded) -> None:
    judged = ", ".join(f"{name} {count:,}" for name, count in sorted(done.verdicts.items()))
    typer.echo(f"history: {judged or 'no record'}")
    for each in done.partitions:
        there = "; an earlier run had finished it" if each.was_there else ""
        typer.echo(f"changelog partition {each.partition}: {each.sightings:,} records of sightings{there}")
    for (topic, partition), offset in sorted(done.begins.items()):
        typer.echo(f"{topic}/{partition}: the fleet begins at offset {offset}")
    typer.echo(f"seeded: {done.name}")
