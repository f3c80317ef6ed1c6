"""`dedup spark ...`: the same topology on Spark. Each command's module is imported when it runs."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Final

import typer

COMMANDS: Final = (
    "dedup.cli.spark_run",
    "dedup.cli.spark_backfill",
    "dedup.cli.spark_seed",
    "dedup.cli.spark_audit",
    "dedup.cli.spark_upsert",
)
"""Each has `register(app)`, and imports PySpark only in its command: `--help` must be quick, and work without it."""


def register(app: typer.Typer) -> None:
    """Add the sub-application to the app."""
    spark = typer.Typer(help="The same topology on Spark: stream, backfill, seed, audit, tables.", no_args_is_help=True)
    for module in COMMANDS:
        if find_spec(module) is not None:
            import_module(module).register(spark)
    app.add_typer(spark, name="spark")
