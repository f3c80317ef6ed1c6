"""Assembles the `dedup` command line, and turns each error into a message and an exit code."""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from traceback import walk_tb
from typing import Annotated, Any, Final

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

from dedup.errors import FULL_DISK, AuthorMistake, DedupError, PackageMissing, Terminated
from dedup.kafka.outage_lines import quiet_logging

_GC_THRESHOLD: Final = 100_000
COMMANDS: Final[Mapping[str, Mapping[str, tuple[str, str]]]] = {
    "Start here": {
        "demo": ("broker.demo", "Deduplicate real flights, kill a worker, and verify the result."),
        "check": ("check.check", "Check topology files and ingest files for mistakes."),
        "describe": ("check.describe", "Show what a topology does with each record, and its topics."),
        "try": ("check.try_records", "Judge records from a file without a broker."),
        "schema": ("check.schema", "Print the JSON Schema of a kind of file, for use in editors."),
        "size": ("check.size", "Predict the size of the state on disk and in memory."),
        "broker": ("broker.broker", "Run an embedded Kafka until Ctrl-C."),
    },
    "Run": {
        "apply": ("admin.apply", "Create the topics that a topology or ingest file needs."),
        "run": ("run.run", "Deduplicate a topology's topics until a signal arrives."),
        "status": ("admin.status", "Show a fleet's lag and tasks, what is wrong, and what to do."),
        "doctor": ("doctor.doctor", "Find what prevents a topology from running."),
    },
    "Prove": {
        "verify": ("verify.verify_topology", "Prove from Kafka alone that nothing was lost or duplicated."),
        "explain": ("verify.explain", "Show what happened to the records with one tracking ID, and why."),
        "chaos": ("chaos.chaos", "Inject faults into a fleet under load, then verify the result."),
    },
    "Operate": {
        "lookup": ("admin.lookup", "Ask the workers when an ID was seen, and how long it is guarded."),
        "replay": ("admin.replay", "Send dead letters back to their source, exactly once."),
        "reset": ("admin.reset", "Delete a topology's offsets and state, to start over."),
        "layout": ("admin.layout", "Show or change how many partitions share a transaction."),
        "checkpoint": ("admin.checkpoint", "Write each partition's state to a directory or object store."),
        "schemas export": ("admin.export_schemas", "Copy a topology's schemas from the registry to a directory."),
    },
    "Connect": {
        "ingest": ("connectors.ingest", "Send files or a table to a topic, each row exactly once."),
        "sink": ("connectors.sink", "Write a topic to a database table, one row per tracking ID."),
    },
    "Spark": {
        "spark run": ("spark.run", "Deduplicate topics on Spark, with the workers' state."),
        "spark backfill": ("spark.backfill_command", "Judge historical records in files, tables, or topics."),
        "spark incremental": ("spark.incremental_command", "Judge the records added to an input since the last run."),
        "spark seed": ("spark.seed_command", "Create a new fleet's state from historical records."),
        "spark audit": ("spark.audit_command", "Prove from all topics that nothing was lost or duplicated."),
        "spark upsert": ("spark.upsert_command", "Write the newest record of each tracking ID to a table."),
        "spark sink": ("spark.sink_command", "Append the output topic to a Delta or Iceberg table."),
    },
}
"""Maps each panel of `dedup --help` to its commands, and each command to a function in `dedup.cli` and to the command's
purpose (at most 64 characters, to fit on a terminal line). The docstring of a command's function is the command's help
text. Each function imports most modules only when it runs, which keeps `--help` fast.
"""

_EXIT_CODES: Final = (
    "Exit codes: 0 success, 1 unexpected error, 2 error in a file or on the command line, 3 incompatible state, "
    "4 verification found a violation, 5 broker unreachable or request refused, 130 interrupted."
)

_ONLY_WITH_JAVA: Final = frozenset({"jgo", "jgo.maven"})
"""The packages that the Dockerfile does not install."""

_ID: Final = "ID"
"""The metavar of tracking IDs."""

_WRITERS: Final = frozenset({"click", "rich", "typer"})
"""The packages that write all output of the commands."""

_OF_SPARK: Final = frozenset({"pandas", "py4j", "pyarrow", "pyspark"})


class _Command(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401  # the type is Typer's own context class
        written, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        if not written.get("help"):
            _refuse_empty(ctx, self.get_params(ctx), written)
        return super().parse_args(ctx, args)

    def get_params(self, ctx: Any) -> list[Any]:  # noqa: ANN401  # the type is Typer's own context class
        return _for_readers(super().get_params(ctx))


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:  # noqa: ANN401  # the type is Typer's own context class
        return _for_readers(super().get_params(ctx))


def _refuse_empty(ctx: Any, parameters: list[Any], written: Mapping[str, Any]) -> None:  # noqa: ANN401  # as above
    """Raise BadParameter if an option or an argument is empty, for example because a shell variable is not set.

    Otherwise, an empty path would mean the working directory, and many empty options would mean their defaults.
    """
    for parameter in parameters:
        if parameter.metavar == _ID:
            continue  # an ID may consist of spaces, and the commands refuse an empty one
        value = written.get(parameter.name)
        values = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(each, str) and not each.strip() for each in values):
            raise typer.BadParameter("is empty", ctx=ctx, param=parameter)


def _for_readers(parameters: list[Any]) -> list[Any]:
    """Make `--help` show no types, such as ``<bool>`` or ``<int range> [x>=1]``.

    Users do not need the types: a flag takes no value, every other option has a metavar, an argument has a name, and
    help texts state the limits of numbers. Values are still converted and checked.
    """
    for parameter in parameters:
        if isinstance(parameter, TyperArgument):
            parameter.display_type_rich = _no_type  # type: ignore[method-assign]
        elif parameter.is_flag:
            parameter.metavar = ""
        parameter.min = parameter.max = None
    return parameters


def _no_type(ctx: object) -> None:  # noqa: ARG001 - Typer calls it with the context
    return None


def create_app() -> typer.Typer:
    """Return the Typer application with all commands."""
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
        help="Run a topology on Spark: stream, history, audit, and tables.", no_args_is_help=True, cls=_Group
    )
    schemas = typer.Typer(help="Copy schemas from a schema registry.", no_args_is_help=True, cls=_Group)
    groups = {"": app, "spark": spark, "schemas": schemas}
    for panel, commands in COMMANDS.items():
        for path, (place, purpose) in commands.items():
            group, _, name = path.rpartition(" ")
            module, _, function = place.partition(".")
            command = getattr(import_module(f"dedup.cli.{module}"), function)
            shown = panel if group == "" else None
            text = _paragraphs(command.__doc__)
            add = groups[group].command(name, help=text, short_help=purpose, rich_help_panel=shown, cls=_Command)
            add(command)
    app.add_typer(spark, name="spark", rich_help_panel="Spark")
    app.add_typer(schemas, name="schemas", rich_help_panel="Operate")
    return app


def _paragraphs(docstring: str) -> str:
    """Join the lines of each docstring paragraph, because Typer wraps each paragraph to the terminal's width."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in docstring.split("\n\n"))


def main() -> None:
    """Run the command line, and exit with the exit code that `dedup --help` lists for the outcome."""
    # This SIGTERM handler applies until a command sets its own handler. In a container, this process has PID 1, and the
    # kernel drops a SIGTERM to PID 1 if the process has no handler.
    signal.signal(signal.SIGTERM, _terminate)
    _open_closed_streams()
    _escape_unknown_characters()
    quiet_logging()
    # NumPy's linear algebra library, which dedup does not use, would start a spinning thread on each core.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Imported objects stay in memory, so repeated garbage collections would waste a sixth of a worker's startup time.
    gc.set_threshold(_GC_THRESHOLD)
    try:
        create_app()()
    except DedupError as error:
        typer.echo(str(error), err=True)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        where = error.filename or ("standard output" if _of_output(error) else "a file of this command")
        typer.echo(f"{where}: cannot be written: {error.strerror}. Free space, and run the command again.", err=True)
        sys.exit(DedupError.exit_code)
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


def _of_output(error: OSError) -> bool:
    """Return whether the error comes from a library that writes only to standard output. Such errors name no file."""
    last = [frame for frame, _ in walk_tb(error.__traceback__)][-1]
    return str(last.f_globals.get("__name__")).partition(".")[0] in _WRITERS


def _open_closed_streams() -> None:
    """Make a stream that the caller has closed, as with ``<&-`` in a shell, behave like /dev/null instead of None."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115  # open until the process ends


def _escape_unknown_characters() -> None:
    """Make stdout and stderr escape characters that their encoding does not have, such as the arrow in Latin-1."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _terminate(number: int, _frame: object) -> None:
    raise Terminated(128 + number)


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
