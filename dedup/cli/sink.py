"""`dedup sink`: a topology's output into a database, one row per tracking ID."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

if TYPE_CHECKING:
    from dedup.edges.sink import Sunk

_HELP: Final = """Keep a table with one row per tracking ID: read again, or twice, the topic changes nothing.

Rows and the topic's offsets are one transaction of the database. A second process on the same partitions takes over,
and the first stops with TaskMigrated.

Examples: dedup sink topologies/topic-to-database.yaml

dedup sink topologies/topic-to-database.yaml --exit-when-done
"""


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("sink", help=_HELP)(sink)


def sink(
    topology: Annotated[Path, typer.Argument(metavar="TOPOLOGY", help="A topology file with `sink`.")],
    config: Annotated[Path | None, typer.Option(help="Where: brokers, security.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key=value, over the config file.")] = None,
    partitions: Annotated[
        str | None, typer.Option(metavar="0,2-5", help="Of the topic; the others are another process's.")
    ] = None,
    exit_when_done: Annotated[
        bool, typer.Option("--exit-when-done", help="Stop when all that was there at the start is in the table.")
    ] = False,
) -> None:
    """Run until a signal comes."""
    import asyncio
    import os

    from dedup.cli.inputs import read_topology
    from dedup.cli.sink_table import resolved_sink
    from dedup.edges.sink import run_sink
    from dedup.errors import TaskMigrated
    from dedup.settings import load_settings
    from dedup.worker.logs import set_up_logging

    settings = load_settings(config, overrides or [], os.environ)
    parsed = read_topology(topology)
    spec = resolved_sink(parsed, topology)
    set_up_logging(settings)
    numbers = None if partitions is None else _numbers(partitions)
    try:
        done = asyncio.run(run_sink(parsed, spec, settings, partitions=numbers, exit_when_done=exit_when_done))
    except TaskMigrated as error:
        typer.echo(f"TaskMigrated: {error}", err=True)
        raise typer.Exit(error.exit_code) from error
    typer.echo(_told(spec.table, done))


def _numbers(text: str) -> set[int]:
    """Return the numbers of a list such as ``0,2-5``; raises SettingsError for what is none."""
    from dedup.errors import Problem, SettingsError

    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or int(last or first) < int(first):
            raise SettingsError([Problem("--partitions", f'"{text}" is no list of partitions, such as 0,2-5')])
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _told(table: str, done: Sunk) -> str:
    return (
        f"{table}: {done.inserted:,} rows inserted, {done.updated:,} updated, {done.unchanged:,} unchanged, "
        f"{done.dead_letters:,} dead letters, {done.transactions:,} transactions"
    )
