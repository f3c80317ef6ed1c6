"""The command line: puts the commands together, and turns errors into a sentence and an exit code."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Final

import typer

from dedup.errors import AuthorMistake, DedupError

COMMANDS: Final = (
    "dedup.cli.demo",
    "dedup.cli.run",
    "dedup.cli.inspect",
    "dedup.cli.admin",
    "dedup.cli.verify",
    "dedup.cli.explain",
    "dedup.cli.doctor",
    "dedup.cli.checkpoint",
    "dedup.cli.size",
    "dedup.cli.chaos",
    "dedup.cli.broker",
    "dedup.cli.bench",
    "dedup.cli.spark",
    "dedup.cli.ingest",
    "dedup.cli.sink",
)
"""Each has `register(app)`, and imports what its commands need when they run: `--help` must be quick."""

_EXIT_CODES: Final = """Exit codes: 0 done, 1 unexpected, 2 a mistake in file or command line, 3 state incompatible,
4 verification found a violation, 5 broker unreachable or refused, 130 interrupted."""


_ONLY_WITH_JAVA: Final = frozenset({"jgo", "jgo.maven"})
"""What the Dockerfile leaves out."""


def create_app() -> typer.Typer:
    """Return the application with all its commands."""
    app = typer.Typer(
        name="dedup",
        help="Exactly-once deduplication for Kafka topics.",
        epilog=_EXIT_CODES,
        no_args_is_help=True,
        # Pretty tracebacks print local variables: passwords among them.
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)
    for module in COMMANDS:
        if find_spec(module) is not None:
            import_module(module).register(app)
    return app


def main() -> None:
    """Run the command line; ends the process with the exit code of what happened."""
    try:
        create_app()()
    except DedupError as error:
        typer.echo(str(error), err=True)
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        if error.name not in _ONLY_WITH_JAVA:
            raise
        typer.echo(
            f"The embedded Kafka needs the package {error.name!r}, which this installation was made without, as the "
            f"worker's image is. Run this command where dedup is installed whole, or use a Kafka that is there.",
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
