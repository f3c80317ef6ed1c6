"""`dedup spark upsert`: a table with one row per tracking ID, the newest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from dedup.cli.spark_backfill import InputFormat
from dedup.cli.spark_inputs import open_session

if TYPE_CHECKING:
    from dedup.spark.jars import Package
    from dedup.spark.jdbc import Jdbc

PASSWORD: Final = "DEDUP_JDBC_PASSWORD"  # noqa: S105  # the name of a variable
EXAMPLES = """
Examples:

  dedup spark upsert topologies/orders.yaml --delta /tables/orders --schema 'id STRING, amount DOUBLE'

  dedup spark upsert topologies/orders.yaml --jdbc jdbc:postgresql://db/shop --table orders --user dedup

  dedup spark upsert t.yaml --input verdicts/run=backfill/verdict=unique --jdbc jdbc:sqlite:shop.db --table orders
"""


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("upsert", epilog=EXAMPLES)(upsert_command)


def upsert_command(  # noqa: PLR0917  # one parameter per option
    topology: Annotated[Path, typer.Argument(help="The topology file.", metavar="TOPOLOGY")],
    delta: Annotated[str | None, typer.Option(metavar="PATH", help="A Delta table.")] = None,
    jdbc: Annotated[
        str | None, typer.Option(metavar="URL", help="A database: jdbc:postgresql://HOST/DB or jdbc:sqlite:FILE.")
    ] = None,
    table: Annotated[str | None, typer.Option(help="Its table.")] = None,
    user: Annotated[str | None, typer.Option(help=f"Its user; the password is read from {PASSWORD}.")] = None,
    inputs: Annotated[
        list[str] | None, typer.Option("--input", help="Files or directories. Without it the output topic is read.")
    ] = None,
    fmt: Annotated[InputFormat, typer.Option("--format", help="Of --input.")] = InputFormat.PARQUET,
    schema: Annotated[
        str | None, typer.Option(metavar="DDL", help="Members of the JSON value as columns; else key and value, bytes.")
    ] = None,
    order: Annotated[
        str, typer.Option(metavar="event_time|offset|COLUMN", help="By what the newest is told.")
    ] = "event_time",
    rejected: Annotated[str | None, typer.Option(metavar="PATH", help="Where records go that can be no rows.")] = None,
    config: Annotated[Path | None, typer.Option(help="Where: brokers, security.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key=value, over the config file.")] = None,
    master: Annotated[str | None, typer.Option(help="Spark's master; left to spark-submit there.")] = None,
    conf: Annotated[list[str] | None, typer.Option("--conf", help="key=value for Spark.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Put records into a table with one row per tracking ID; the newest wins, and a run may be repeated."""
    import os

    from dedup.cli.inputs import read_topology
    from dedup.settings import load_settings
    from dedup.spark.failures import told
    from dedup.spark.files import read_files
    from dedup.spark.progress import JobProgress
    from dedup.spark.tables import keep_rejected, output_records, table_rows, upsert_delta, upsert_jdbc

    parsed = read_topology(topology)
    to = _target(delta, jdbc, table, user, os.environ.get(PASSWORD))
    packages: list[Package] = [] if inputs else ["kafka"]
    packages += ["delta"] if delta is not None or (inputs and fmt is InputFormat.DELTA) else []
    packages += ["jdbc"] if jdbc is not None else []
    spark = open_session(parsed, master, conf, packages)
    try:
        with told(), JobProgress(spark, enabled=not quiet):
            if inputs:
                records = read_files(spark, inputs, fmt.value).records
            else:
                records = output_records(spark, parsed, load_settings(config, overrides or [], os.environ))
            found = table_rows(records, parsed, schema=schema, order=order)
            left = keep_rejected(found, rejected)
            if isinstance(to, str):
                upsert_delta(found.rows, to)
            else:
                upsert_jdbc(found.rows, to)
    finally:
        spark.stop()
    typer.echo(f"{delta or table}: up to date" + (f"; {left:,} records can not be rows: {rejected}" if left else ""))


def _target(
    delta: str | None, jdbc: str | None, table: str | None, user: str | None, password: str | None
) -> Jdbc | str:
    """Return the table; raises SettingsError where the options do not name one."""
    from dedup.errors import Problem, SettingsError
    from dedup.spark.jdbc import Jdbc

    if delta is not None and jdbc is None and table is None and user is None:
        return delta
    if delta is None and jdbc is not None and table is not None:
        return Jdbc(jdbc, table, user, password)
    raise SettingsError(
        [Problem("dedup spark upsert", "name one table: --delta PATH, or --jdbc URL with --table NAME")]
    )
