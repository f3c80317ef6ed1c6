"""`dedup spark backfill`: exact verdicts over history, published once."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dedup.spark.files import History
    from dedup.spark.published import RunReport
    from dedup.topology.model import Topology

EXAMPLES = """
Examples:

  dedup spark backfill topologies/orders.yaml --input archive/ --out verdicts/

  dedup spark backfill topologies/orders.yaml --config config/production.yaml --out verdicts/ --run may

  dedup spark backfill topologies/orders.yaml --input events.jsonl.gz --format json --out verdicts/ --out-format delta
"""


class InputFormat(Enum):
    """See `dedup.spark.files.FileFormat`."""

    PARQUET = "parquet"
    JSON = "json"
    JSON_RECORDS = "json-records"
    DELTA = "delta"


class OutputFormat(Enum):
    """See `dedup.spark.published.OutputFormat`."""

    PARQUET = "parquet"
    DELTA = "delta"


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("backfill", epilog=EXAMPLES)(backfill_command)


def backfill_command(
    topology: Annotated[Path, typer.Argument(help="The topology file.", metavar="TOPOLOGY")],
    *,
    out: Annotated[str, typer.Option(help="Where verdicts go: a directory, or a Delta table's path.")],
    inputs: Annotated[
        list[str] | None, typer.Option("--input", help="Files or directories. Without it the topics are read.")
    ] = None,
    fmt: Annotated[
        InputFormat, typer.Option("--format", help="Of --input. json: each line is an event.")
    ] = InputFormat.PARQUET,
    rows_are_events: Annotated[
        bool, typer.Option("--rows-are-events", help="The table has no column `value`: each row, as JSON, is an event.")
    ] = False,
    out_format: Annotated[OutputFormat, typer.Option(help="How verdicts are written.")] = OutputFormat.PARQUET,
    run: Annotated[str, typer.Option(help="Name of this run; one that is there is not made again.")] = "backfill",
    start: Annotated[
        str, typer.Option(help="Of topics: whole (from offset 0), earliest (what is left), or a time.")
    ] = "whole",
    until: Annotated[str, typer.Option(help="Of topics: now, or a time.")] = "now",
    repartitioned: Annotated[
        bool, typer.Option("--repartitioned", help="Read the repartition topic, whose order a fleet judged in.")
    ] = False,
    now: Annotated[str | None, typer.Option(help="The clock that future times are judged by: a time.")] = None,
    config: Annotated[Path | None, typer.Option(help="The config file; config/local.yaml if not given.")] = None,
    override: Annotated[list[str] | None, typer.Option("--set", help="key=value, over the config file.")] = None,
    master: Annotated[str | None, typer.Option(help="Spark's master; local[*] without spark-submit.")] = None,
    conf: Annotated[list[str] | None, typer.Option(help="key=value for Spark.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Judge history exactly: files, Delta tables or ranges of Kafka; publish every record's verdict once."""
    if inputs:
        _refuse_of_topics(start, until, repartitioned=repartitioned)

    from dedup.cli.inputs import read_topology
    from dedup.cli.spark_inputs import open_session, parse_time
    from dedup.spark.backfill import backfill
    from dedup.spark.failures import told
    from dedup.spark.progress import JobProgress

    parsed = read_topology(topology)
    now_ms = None if now is None else parse_time(now, "--now", "2024-01-01T00:00:00Z")
    packages = {"delta"} & {fmt.value if inputs else "", out_format.value} | (set() if inputs else {"kafka"})
    spark = open_session(parsed, master, conf, sorted(packages))  # type: ignore[arg-type]  # names of Package
    try:
        with told(), JobProgress(spark, enabled=not quiet):
            if inputs:
                from dedup.spark.files import read_files

                history = read_files(spark, inputs, fmt.value, rows_are_events=rows_are_events)
            else:
                history = _of_kafka(spark, parsed, (config, override), (start, until), repartitioned)
            report = backfill(history, parsed, out, run=run, now_ms=now_ms, fmt=out_format.value, say=_say)
        _print(report)
    finally:
        spark.stop()


def _refuse_of_topics(start: str, until: str, *, repartitioned: bool) -> None:
    """Raise SettingsError for options that files would leave without effect."""
    from dedup.errors import Problem, SettingsError

    given = {"--start": start != "whole", "--until": until != "now", "--repartitioned": repartitioned}
    text = "is for topics, and --input reads files; leave one of them out"
    problems = [Problem(name, text) for name, is_given in given.items() if is_given]
    if problems:
        raise SettingsError(problems)


def _of_kafka(
    spark: SparkSession,
    topology: Topology,
    where: tuple[Path | None, list[str] | None],
    between: tuple[str, str],
    repartitioned: bool,
) -> History:
    import os

    from dedup.cli.spark_inputs import parse_time
    from dedup.settings import load_settings
    from dedup.spark.kafka_range import Start, Until, read_kafka

    settings = load_settings(where[0], where[1] or [], os.environ)
    start, until = between
    begin: Start
    match start:
        case "whole" | "earliest":
            begin = start
        case _:
            begin = parse_time(start, "--start", "whole, earliest, or a time as 2024-01-01T00:00:00Z")
    end: Until = "now" if until == "now" else parse_time(until, "--until", "now, or a time as 2024-01-01T00:00:00Z")
    return read_kafka(spark, topology, settings, start=begin, until=end, repartitioned=repartitioned)


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _print(report: RunReport) -> None:
    verdicts = "  ".join(f"{name} {count:,}" for name, count in report.verdicts.items())
    typer.echo(f"judged {sum(report.verdicts.values()):,}: {verdicts}")
    typer.echo(f"verdicts: {report.path}")
