"""`dedup verify`: proves from Kafka alone that nothing is lost, duplicated, changed or out of order."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

_HELP = """Prove from Kafka alone that nothing was lost or duplicated.

Reads the source, what was written and the group's offsets with a client of its own, replays the exact model, and
compares key, value, headers, timestamps and order. Exit code 4 if anything violates the guarantee.

Example: dedup verify topologies/orders.yaml --report reports/orders.html
"""


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("verify", help=_HELP)(verify_command)


def verify_command(
    topology: Annotated[Path, typer.Argument(help="The topology file.", metavar="TOPOLOGY")],
    config: Annotated[Path | None, typer.Option(help="The config file; config/local.yaml if not given.")] = None,
    override: Annotated[
        list[str] | None, typer.Option("--set", help="Override a key of the config: key=value.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, and nothing else.")] = False,
    report: Annotated[
        Path | None,
        typer.Option(help="Where the HTML report goes, the JSON one beside it; verify-NAME.html if not given."),
    ] = None,
) -> None:
    """See `_HELP`; raises VerificationFailed after everything is printed and written."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    from dedup.cli.inputs import read_topology
    from dedup.errors import VerificationFailed
    from dedup.proof.render import print_report, to_html
    from dedup.proof.verify import Progress, verify
    from dedup.settings import load_settings

    parsed = read_topology(topology)
    settings = load_settings(config, override or [], os.environ)
    console = Console(stderr=json)
    with Bar(console=console, transient=True) as bar:
        reading = bar.add_task("reading", total=None)

        def show(now: Progress) -> None:
            bar.update(reading, description=now.doing, completed=now.done, total=now.total)

        found = verify(parsed, settings, progress=show)
    page = report or Path(f"verify-{parsed.name}.html")
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(to_html(found), encoding="utf-8")
    page.with_suffix(".json").write_text(found.to_json(), encoding="utf-8")
    if json:
        typer.echo(found.to_json(), nl=False)
    else:
        console.print(f"report: {page} and {page.with_suffix('.json').name}", highlight=False)
        print_report(found, console)
    if not found.passed:
        raise VerificationFailed(
            f"{parsed.name}: {found.closing_line()}. The records are named in {page}. Keep the topics as they are: "
            f"they are the evidence; `dedup lookup` says where one ID went."
        )
