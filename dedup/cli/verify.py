"""`dedup verify`: proves from Kafka alone that nothing is lost, duplicated, changed or out of order."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from dedup.cli.report_page import refuse_no_page, write_report
from dedup.errors import Problem, SettingsError

_HELP = """Prove from Kafka alone that nothing was lost or duplicated.

Reads the source, what was written and the group's offsets with a client of its own, replays the exact model, and
compares key, value, headers, timestamps and order. Exit code 4 if anything violates the guarantee. Memory stays
bounded however much there is: about 200 bytes and the key of each record go to files in --scratch meanwhile.

Examples: dedup verify topologies/orders.yaml --report reports/orders.html

dedup verify topologies/orders.yaml --sample 1/100
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
    sample: Annotated[
        str,
        typer.Option(
            metavar="1/N",
            help="Judge one tracking ID in N, by its hash, with all its records. Proves less: it says what.",
        ),
    ] = "1/1",
    scratch: Annotated[
        Path | None, typer.Option(help="A directory for temporary files; the system's if not given.")
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

    one_in = _one_in(sample)
    _refuse_no_directory(scratch)
    parsed = read_topology(topology)
    settings = load_settings(config, override or [], os.environ)
    page = report or Path(f"verify-{parsed.name}.html")
    refuse_no_page(page)
    console = Console(stderr=json)
    with Bar(console=console, transient=True) as bar:
        reading = bar.add_task("reading", total=None)

        def show(now: Progress) -> None:
            bar.update(reading, description=now.doing, completed=now.done, total=now.total)

        found = verify(parsed, settings, progress=show, sample=one_in, scratch=scratch)
    write_report(page, to_html(found), found.to_json())
    if json:
        typer.echo(found.to_json(), nl=False)
    else:
        console.print(f"report: {page} and {page.with_suffix('.json').name}", highlight=False)
        print_report(found, console)
    if not found.passed:
        raise VerificationFailed(
            f"{parsed.name}: {found.closing_line()}. The records are named in {page}. Keep the topics as they are: "
            f"they are the evidence; `dedup explain` says where one ID went."
        )


def _one_in(text: str) -> int:
    """Return N of ``1/N``. Raises SettingsError for anything else."""
    one, _, number = text.partition("/")
    if one != "1" or not number.isdecimal() or not int(number):
        raise SettingsError([Problem("--sample", f'"{text}" is no share; write for example 1/100')])
    return int(number)


def _refuse_no_directory(scratch: Path | None) -> None:
    if scratch is not None and not (scratch.is_dir() and os.access(scratch, os.W_OK)):
        raise SettingsError([Problem("--scratch", f"{scratch} is no directory that can be written; make it first")])
