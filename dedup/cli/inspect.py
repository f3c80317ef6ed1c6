"""Commands that need no broker: `check`, `describe`, `schema`, `try`."""

from __future__ import annotations

import contextlib
import enum
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from dedup.cli.inputs import read_topology
from dedup.errors import AuthorMistake, Problem, SettingsError, TopologyError

if TYPE_CHECKING:
    from dedup.settings import Settings
    from dedup.topology.lint import Finding
    from dedup.topology.model import Topology

_CHECK: Final = """Check topology files: every mistake with its place, and what their authors may not have meant.

Exit code 2 if a file has an error; warnings alone leave it at 0. With --broker the topics of the cluster are compared
with what each topology needs.

Examples: dedup check topologies/*.yaml

dedup check topologies/orders.yaml --broker --config config/production.yaml
"""
_DESCRIBE: Final = """Show a topology: agents, topics, the table, what becomes of each record.

Examples: dedup describe topologies/orders.yaml

dedup describe topologies/orders.yaml --svg > orders.svg
"""
_SCHEMA: Final = """Print the JSON Schema of topology or config files, for editors.

Example: dedup schema topology > topologies/topology.schema.json
"""
_TRY: Final = """Judge records without a broker, each verdict with its reason.

FILE has a JSON value per line ("-" or none: standard input), judged as one partition of one topic in the order of the
lines. With --envelope a line is a record: {"key": ..., "value": ..., "headers": {...}, "timestamp": ms}.

Example: dedup try topologies/simplest.yaml tests/data/sample.jsonl
"""
_START: Final = "2024-01-01T00:00:00Z"


class SchemaOf(enum.Enum):
    """The two kinds of file."""

    TOPOLOGY = "topology"
    CONFIG = "config"


TopologyArgument = Annotated[Path, typer.Argument(metavar="TOPOLOGY", help="The topology file.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command("check", help=_CHECK)(check)
    app.command("describe", help=_DESCRIBE)(describe)
    app.command("schema", help=_SCHEMA)(schema)
    app.command("try", help=_TRY)(try_records)


def check(
    topologies: Annotated[list[Path], typer.Argument(metavar="TOPOLOGY...", help="The topology files.")],
    broker: Annotated[bool, typer.Option("--broker", help="Compare with the cluster, too.")] = False,
    config: Annotated[Path | None, typer.Option(help="Where the cluster is; config/local.yaml if not given.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key=value, over the config file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the findings of every file; raises TopologyError if one has an error."""
    settings = None
    if broker:
        from dedup.settings import load_settings

        settings = load_settings(config, overrides or [], os.environ)
    problems: list[Problem] = []
    reports: list[dict[str, Any]] = []
    for path in topologies:
        try:
            found = _findings(read_topology(path), settings)
        except TopologyError as error:
            problems.extend(error.problems)
            errors = [{"place": problem.place, "text": problem.text} for problem in error.problems]
            reports.append({"file": str(path), "ok": False, "problems": errors, "findings": []})
            continue
        bad = [finding for finding in found if finding.level == "error"]
        problems.extend(Problem(str(path), f"{finding.text} [{finding.code}]") for finding in bad)
        findings = [{"level": each.level, "code": each.code, "text": each.text} for each in found]
        reports.append({"file": str(path), "ok": not bad, "problems": [], "findings": findings})
    if as_json:
        typer.echo(json.dumps(reports, indent=2))
    else:
        _print_reports(reports)
    if problems and as_json:
        raise typer.Exit(TopologyError.exit_code)
    if problems:
        raise TopologyError(problems)


def _findings(topology: Topology, settings: Settings | None) -> list[Finding]:
    from dedup.topology.lint import lint

    if settings is None:
        return lint(topology)
    import asyncio

    from dedup.worker.compare import broker_findings

    return lint(topology) + asyncio.run(broker_findings(topology, settings))


def _print_reports(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        warnings = [finding for finding in report["findings"] if finding["level"] == "warning"]
        for finding in warnings:
            typer.echo(f"{report['file']}: warning: {finding['text']} [{finding['code']}]")
        if report["ok"]:
            count = f", {len(warnings)} warning{'s' if len(warnings) > 1 else ''}" if warnings else ""
            typer.echo(f"{report['file']}: ok{count}")


def describe(
    topology: TopologyArgument,
    dot: Annotated[bool, typer.Option("--dot", help="Print a drawing for Graphviz.")] = False,
    svg: Annotated[bool, typer.Option("--svg", help="Print a drawing as SVG.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the topology in one of four forms."""
    from dedup.topology import describe as drawing

    if dot + svg + as_json > 1:
        raise typer.BadParameter("--dot, --svg and --json exclude each other")
    parsed = read_topology(topology)
    if dot:
        text = drawing.to_dot(parsed)
    elif svg:
        text = drawing.to_svg(parsed)
    elif as_json:
        text = json.dumps(drawing.as_data(parsed), indent=2) + "\n"
    else:
        text = drawing.describe(parsed)
    typer.echo(text, nl=False)


def schema(
    of: Annotated[
        SchemaOf, typer.Argument(metavar="topology|config", help="Of which kind of file.")
    ] = SchemaOf.TOPOLOGY,
) -> None:
    """Print a JSON Schema."""
    match of:
        case SchemaOf.TOPOLOGY:
            from dedup.topology.parse import json_schema

            found = json_schema()
        case SchemaOf.CONFIG:
            from dedup.settings import settings_schema

            found = settings_schema()
    typer.echo(json.dumps(found, indent=2))


def try_records(
    topology: TopologyArgument,
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="JSON lines; - or none: standard input.")] = None,
    envelope: Annotated[bool, typer.Option("--envelope", help="A line is a whole record, not a value.")] = False,
    start: Annotated[
        str, typer.Option("--time", help="Timestamp of the first line (RFC 3339); each next line is 1 s later.")
    ] = _START,
    now: Annotated[str | None, typer.Option("--now", help="The clock (RFC 3339). Default: this machine's.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Print a verdict per record, and how many there were of each."""
    from dedup.cli.trial import Trial, entries

    parsed = read_topology(topology)
    now_ms = time.time_ns() // 1_000_000 if now is None else _instant_ms(now, "--now")
    trial = Trial(parsed, now_ms=now_ms)
    start_ms = _instant_ms(start, "--time")
    counts: Counter[str] = Counter()
    with _lines(file) as (lines, name):
        for entry in entries(lines, name=name, envelope=envelope, start_ms=start_ms):
            told = trial.judge(entry)
            counts[told.verdict] += 1
            typer.echo(told.as_json() if as_json else told.as_text())
    if not as_json:
        books = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
        typer.echo(f"{counts.total()} records: {books}" if counts else "no records")


def _instant_ms(text: str, option: str) -> int:
    from dedup.core.event_time import rfc3339_ms

    found = rfc3339_ms(text)
    if found is None:
        raise SettingsError([Problem(option, f'"{text}" is no time; write for example {_START}')])
    return found


@contextlib.contextmanager
def _lines(file: Path | None) -> Iterator[tuple[Iterator[bytes], str]]:
    """Open the file, or standard input."""
    if file is None or str(file) == "-":
        yield sys.stdin.buffer, "standard input"
        return
    try:
        opened = file.open("rb")
    except OSError as error:
        raise AuthorMistake([Problem(str(file), f"can not be read: {error.strerror}; name a file")]) from error
    with opened:
        yield opened, str(file)
