"""`dedup ingest`: files or a table into a topic, exactly once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

if TYPE_CHECKING:
    from dedup.edges.ingest import Ingested, OpenSource
    from dedup.topology.ingest import Ingest

_HELP: Final = """Send the lines of files or the rows of a table to a topic, each exactly once, whatever crashes.

Records and how far the source was read are one Kafka transaction. A second process on the same file takes over, and
the first stops with TaskMigrated.

Examples: dedup ingest topologies/files-to-topic.yaml

dedup ingest topologies/table-to-topic.yaml --exit-when-done
"""


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("ingest", help=_HELP)(ingest)


def ingest(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="The ingest file.")],
    config: Annotated[Path | None, typer.Option(help="Where: brokers, security.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key=value, over the config file.")] = None,
    exit_when_done: Annotated[
        bool, typer.Option("--exit-when-done", help="Stop when all that is there was sent.")
    ] = False,
) -> None:
    """Run until a signal comes."""
    import asyncio
    import os

    from dedup.cli.inputs import read_ingest
    from dedup.edges.ingest import run_ingest
    from dedup.errors import TaskMigrated
    from dedup.settings import load_settings
    from dedup.worker.logs import set_up_logging

    settings = load_settings(config, overrides or [], os.environ)
    parsed = read_ingest(source)
    set_up_logging(settings)
    try:
        done = asyncio.run(run_ingest(parsed, settings, _opener(parsed, str(source)), exit_when_done=exit_when_done))
    except TaskMigrated as error:
        typer.echo(f"TaskMigrated: {error}", err=True)
        raise typer.Exit(error.exit_code) from error
    _tell(parsed, done)


def _opener(parsed: Ingest, name: str) -> OpenSource:
    """Return what makes the source, its database's address resolved."""
    import os
    from functools import partial

    from dedup.edges.ingest import open_source
    from dedup.settings import with_references
    from dedup.topology.ingest import TableSource

    if isinstance(parsed.source, TableSource):
        return partial(open_source, url=with_references(parsed.source.url, f"{name}: source.table.url", os.environ))
    return open_source


def _tell(parsed: Ingest, done: Ingested) -> None:
    for text in done.waiting:
        typer.echo(text, err=True)
    typer.echo(
        f"{parsed.name}: {done.records:,} records to {parsed.topic}, {done.dead_letters:,} dead letters, "
        f"{done.transactions:,} transactions"
    )
