"""The command line: assembles the commands, and turns each error into a sentence and an exit code."""

from __future__ import annotations

import signal
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Final

import typer
from typer.models import CommandInfo, TyperInfo

from dedup.errors import AuthorMistake, DedupError

COMMANDS: Final = (
    "dedup.cli.demo",
    "dedup.cli.run",
    "dedup.cli.check",
    "dedup.cli.admin",
    "dedup.cli.verify",
    "dedup.cli.doctor",
    "dedup.cli.checkpoints",
    "dedup.cli.size",
    "dedup.cli.chaos",
    "dedup.cli.broker",
    "dedup.cli.spark",
    "dedup.cli.connectors",
)
"""Each has `register(app)`. They import what a command needs only when it runs, to keep `--help` quick."""

_PANELS: Final = {
    "Start here": ("demo", "check", "describe", "try", "schema", "size", "broker"),
    "Run": ("apply", "run", "status", "doctor"),
    "Prove": ("verify", "explain", "chaos"),
    "Operate": ("lookup", "replay", "reset", "checkpoint"),
    "Connect": ("ingest", "sink"),
    "Spark": ("spark",),
}
"""Panel of `dedup --help` -> its commands; both in the order shown."""

_EXIT_CODES: Final = (
    "Exit codes: 0 success, 1 unexpected error, 2 mistake in a file or on the command line, 3 incompatible state, "
    "4 verification found a violation, 5 broker unreachable or request refused, 130 interrupted."
)

_ONLY_WITH_JAVA: Final = frozenset({"jgo", "jgo.maven"})
"""Packages that the Dockerfile leaves out."""


def create_app() -> typer.Typer:
    """Return the application with all its commands."""
    app = typer.Typer(
        name="dedup",
        help="Exactly-once deduplication for Kafka topics.",
        epilog=_EXIT_CODES,
        no_args_is_help=True,
        # Pretty tracebacks print local variables, passwords among them.
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)
    for module in COMMANDS:
        if find_spec(module) is not None:
            import_module(module).register(app)
    panel_of = {name: panel for panel, names in _PANELS.items() for name in names}
    infos: list[CommandInfo | TyperInfo] = [*app.registered_commands, *app.registered_groups]
    for info in infos:
        info.rich_help_panel = panel_of[str(info.name)]
    order = list(panel_of)
    app.registered_commands.sort(key=lambda info: order.index(str(info.name)))
    return app


def main() -> None:
    """Run the command line; ends the process with the exit code that fits the outcome."""
    # Until a command sets its own. Without a handler the kernel drops SIGTERM to PID 1, which a container's command is.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        create_app()()
    except DedupError as error:
        typer.echo(str(error), err=True)
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        if error.name not in _ONLY_WITH_JAVA:
            raise
        typer.echo(
            f"The embedded Kafka needs the package {error.name!r}, which is missing from this installation, as it is "
            f"from the worker's image. Run this command from a full installation of dedup, or use an existing Kafka.",
            err=True,
        )
        sys.exit(AuthorMistake.exit_code)


def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", is_eager=True, callback=lambda on: _version(on=on))
    ] = False,
) -> None:
    """Exactly-once deduplication for Kafka topics."""


def _version(*, on: bool) -> None:
    if on:
        from importlib import metadata

        typer.echo(f"dedup {metadata.version('dedup-streams')}")
        raise typer.Exit


if __name__ == "__main__":
    main()
