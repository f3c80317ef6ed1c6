"""`dedup spark audit`: the findings of `dedup verify` at cluster scale."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dedup.cli.report_page import refuse_no_page, write_report
from dedup.cli.spark_backfill import InputFormat
from dedup.cli.spark_inputs import open_session, parse_offsets

if TYPE_CHECKING:
    from dedup.proof.report import Report

EXAMPLES = """
Examples:

  dedup spark audit topologies/orders.yaml --report reports/orders.html

  dedup spark audit topologies/orders.yaml --history /data/orders --config config/production.yaml
"""


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("audit", epilog=EXAMPLES)(audit_command)


def audit_command(  # noqa: PLR0917  # one parameter per option
    topology: Annotated[Path, typer.Argument(help="The topology file.", metavar="TOPOLOGY")],
    history: Annotated[
        list[str] | None, typer.Option(help="The files that the fleet was seeded from, if it was.")
    ] = None,
    fmt: Annotated[InputFormat, typer.Option("--format", help="Of --history.")] = InputFormat.PARQUET,
    rows_are_events: Annotated[
        bool, typer.Option("--rows-are-events", help="The table has no column `value`: each row, as JSON, is an event.")
    ] = False,
    begins: Annotated[
        str | None, typer.Option("--from", metavar="OFFSETS", help="Where the fleet began, where no topic says so.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Where: brokers, security.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key=value, over the config file.")] = None,
    report: Annotated[
        Path | None,
        typer.Option(help="Where the HTML report goes, the JSON one beside it; audit-NAME.html if not given."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, and nothing else.")] = False,
    master: Annotated[str | None, typer.Option(help="Spark's master; left to spark-submit there.")] = None,
    conf: Annotated[list[str] | None, typer.Option("--conf", help="key=value for Spark.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Prove over everything in the topics that nothing was lost or doubled. Exit code 4 on any finding."""
    import os

    from dedup.cli.inputs import read_topology
    from dedup.errors import VerificationFailed
    from dedup.settings import load_settings

    parsed, settings = read_topology(topology), load_settings(config, overrides or [], os.environ)
    offsets = None if begins is None else parse_offsets(begins, "--from")
    page = report or Path(f"audit-{parsed.name}.html")
    refuse_no_page(page)
    # Spark is imported when nothing is left to refuse: that takes seconds.
    from dedup.spark.audit import audit
    from dedup.spark.failures import told
    from dedup.spark.files import read_files
    from dedup.spark.progress import JobProgress

    spark = open_session(parsed, master, conf, ["kafka", "delta"] if fmt is InputFormat.DELTA else ["kafka"])
    try:
        with told(), JobProgress(spark, enabled=not quiet):
            files = read_files(spark, history, fmt.value, rows_are_events=rows_are_events) if history else None
            found = audit(spark, parsed, settings, history=files, begins=offsets)
    finally:
        spark.stop()
    _write(found, page, as_json=as_json)
    if not found.passed:
        raise VerificationFailed(
            f"{parsed.name}: {found.closing_line()}. The records are named in {page}. Keep the topics as they are: "
            f"they are the evidence."
        )


def _write(found: Report, page: Path, *, as_json: bool) -> None:
    from rich.console import Console

    from dedup.proof.render import print_report, to_html

    write_report(page, to_html(found, "dedup spark audit"), found.to_json())
    if as_json:
        typer.echo(found.to_json(), nl=False)
        return
    console = Console()
    console.print(f"report: {page} and {page.with_suffix('.json').name}", highlight=False)
    print_report(found, console)
