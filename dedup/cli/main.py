"""Assembles the `dedup` command line, and turns each error into a message and an exit code."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from dedup.errors import AuthorMistake, DedupError, PackageMissing
from dedup.kafka.outage_lines import quiet_logging

COMMANDS: Final[Mapping[str, Mapping[str, str]]] = {
    "Start here": {
        "demo": "broker.demo",
        "check": "check.check",
        "describe": "check.describe",
        "try": "check.try_records",
        "schema": "check.schema",
        "size": "size.size",
        "broker": "broker.broker",
    },
    "Run": {"apply": "admin.apply", "run": "run.run", "status": "admin.status", "doctor": "doctor.doctor"},
    "Prove": {"verify": "verify.verify_topology", "explain": "verify.explain", "chaos": "chaos.chaos"},
    "Operate": {
        "lookup": "admin.lookup",
        "replay": "admin.replay",
        "reset": "admin.reset",
        "layout": "admin.layout",
        "checkpoint": "checkpoints.checkpoint",
    },
    "Connect": {"ingest": "connectors.ingest", "sink": "connectors.sink"},
    "Spark": {
        "spark run": "spark.run",
        "spark backfill": "spark.backfill_command",
        "spark incremental": "spark.incremental_command",
        "spark seed": "spark.seed_command",
        "spark audit": "spark.audit_command",
        "spark upsert": "spark.upsert_command",
        "spark sink": "spark.sink_command",
    },
}
"""Maps each panel of `dedup --help` to its commands, and each command to its function in `dedup.cli`, whose docstring
is the command's help. A function imports most modules only when it runs, which keeps `--help` fast.
"""

_EXIT_CODES: Final = (
    "Exit codes: 0 success, 1 unexpected error, 2 error in a file or on the command line, 3 incompatible state, "
    "4 verification found a violation, 5 broker unreachable or request refused, 130 interrupted."
)

_ONLY_WITH_JAVA: Final = frozenset({"jgo", "jgo.maven"})
"""Packages that the Dockerfile leaves out."""

_OF_SPARK: Final = frozenset({"pandas", "py4j", "pyarrow", "pyspark"})


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:  # noqa: ANN401  # typer's own class of context
        return _flags_without_type(super().get_params(ctx))


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:  # noqa: ANN401  # typer's own class of context
        return _flags_without_type(super().get_params(ctx))


def _flags_without_type(parameters: list[Any]) -> list[Any]:
    """Make `--help` show a flag without the type ``<bool>``, because a flag takes no value."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


def create_app() -> typer.Typer:
    """Return the application with all its commands."""
    app = typer.Typer(
        name="dedup",
        help="Exactly-once deduplication for Kafka topics.",
        epilog=_EXIT_CODES,
        no_args_is_help=True,
        # Pretty tracebacks print local variables, including passwords.
        pretty_exceptions_enable=False,
        cls=_Group,
    )
    app.callback()(_options)
    spark = typer.Typer(
        help="Run a topology on Spark: stream, backfill, incremental, seed, audit, and tables.",
        no_args_is_help=True,
        cls=_Group,
    )
    groups = {"": app, "spark": spark}
    for panel, commands in COMMANDS.items():
        for path, place in commands.items():
            group, _, name = path.rpartition(" ")
            module, _, function = place.partition(".")
            command = getattr(import_module(f"dedup.cli.{module}"), function)
            shown = panel if group == "" else None
            add = groups[group].command(name, help=_paragraphs(command.__doc__), rich_help_panel=shown, cls=_Command)
            add(command)
    app.add_typer(spark, name="spark", rich_help_panel="Spark")
    return app


def _paragraphs(docstring: str) -> str:
    """Join the lines of each paragraph of a docstring, because the terminal wraps help at its own width."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in docstring.split("\n\n"))


def main() -> None:
    """Run the command line, and exit with the exit code that `dedup --help` lists for the outcome."""
    # This handler applies until a command sets its own. In a container, this process has PID 1, and the kernel drops a
    # SIGTERM to PID 1 if there is no handler.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    quiet_logging()
    try:
        create_app()()
    except DedupError as error:
        typer.echo(str(error), err=True)
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        if error.name and error.name.partition(".")[0] in _OF_SPARK:
            missing = PackageMissing("`dedup spark`", "spark")
            typer.echo(str(missing), err=True)
            sys.exit(missing.exit_code)
        if error.name not in _ONLY_WITH_JAVA:
            raise
        typer.echo(
            f"The embedded Kafka needs the package {error.name!r}, which is missing from this installation, as it is "
            f"from the worker's image. Run this command from a full installation of dedup, or use an existing Kafka.",
            err=True,
        )
        sys.exit(AuthorMistake.exit_code)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        typer.echo(f"dedup {metadata.version('dedup-streams')}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Exactly-once deduplication for Kafka topics."""


if __name__ == "__main__":
    main()
