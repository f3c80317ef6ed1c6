"""Defines the arguments, options, tables, and functions for files and reports that several commands share."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

import dedup
from dedup.errors import DedupError, Problem, SettingsError, Terminated, TopologyError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from dedup.embedded.kafka_node import EmbeddedKafka
    from dedup.embedded.registry_node import EmbeddedRegistry
    from dedup.settings import Settings
    from dedup.topology.ingest_file import Ingest
    from dedup.topology.model import Topology
    from dedup.verify.cut import OnProgress
    from dedup.verify.report import Report

TopologyArgument = Annotated[Path, typer.Argument(metavar="TOPOLOGY", help="Topology file.")]
OptionalTopology = Annotated[Path | None, typer.Argument(metavar="TOPOLOGY", help="Topology file.")]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="Config file. Default: config/local.yaml.")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a config key. Repeatable.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
ReportOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Path of an HTML report; a JSON report is written next to it.")
]

A_TIME: Final = "2024-01-01T00:00:00Z"
_LAST_MS: Final = 253_402_300_799_999
"""The last millisecond of the year 9999."""
WIDTH: Final = 80
"""The width, in columns, of the narrowest terminal for which dedup's output is designed."""
_GAP: Final = 2
_LONGEST_NAME: Final = 28
_CUT: Final = "…"


def read_topology(path: Path) -> Topology:
    """Parse a topology file. Raises TopologyError, which lists every problem, if the file is invalid."""
    from dedup.topology.ingest_file import is_ingest
    from dedup.yaml_document import text_of

    text = text_of(path)
    if is_ingest(text):
        said = "is an ingest file, but this command needs a topology file; `dedup ingest` runs an ingest file"
        raise TopologyError([Problem(str(path), said)])
    return _topology(text, path)


def read_stage(path: Path) -> Ingest | Topology:
    """Parse a topology or ingest file. Raises TopologyError, which lists every problem, if the file is invalid."""
    from dedup.topology.ingest_file import is_ingest, parse_ingest
    from dedup.yaml_document import text_of

    text = text_of(path)
    return parse_ingest(text, name=str(path)) if is_ingest(text) else _topology(text, path)


def _topology(text: str, path: Path) -> Topology:
    # A pipe, such as `<(...)` in a shell, can be read only once.
    from dedup.topology.parse import parse
    from dedup.yaml_document import beside

    return parse(text, name=str(path), read_file=beside(path))


def read_settings(
    config: Path | None, overrides: list[str] | None = None, environ: Mapping[str, str] | None = None
) -> Settings:
    """Return the settings of a config file, overridden by environment variables and by `--set`.

    If ``environ`` is given, it is used instead of the process environment. Raises SettingsError, which lists every
    problem, if any setting is invalid.
    """
    return dedup.load_settings(config, overrides or [], environ)


def read_both(topology: Path, config: Path | None, overrides: list[str] | None) -> tuple[Topology, Settings]:
    """Return a topology and the settings. Raises TopologyError or SettingsError if a file is invalid."""
    parsed, settings = read_topology(topology), read_settings(config, overrides)
    return with_schemas(parsed, settings), settings


def with_schemas(topology: Topology, settings: Settings) -> Topology:
    """Return the topology. If the topology needs schemas, it requests them from the configured registry.

    Raises SettingsError if the topology needs a registry and the settings name none.
    """
    if not topology.source.needs_registry:
        return topology
    from dedup.kafka.schema_registry import asking

    return asking(topology, settings)


def read_ingest(path: Path) -> Ingest:
    """Parse an ingest file. Raises TopologyError, which lists every problem, if the file is invalid."""
    from dedup.topology.ingest_file import is_topology, parse_ingest
    from dedup.yaml_document import text_of

    text = text_of(path)
    if is_topology(text):
        said = "is a topology file, but this command needs an ingest file; `dedup run` runs a topology file"
        raise TopologyError([Problem(str(path), said)])
    return parse_ingest(text, name=str(path))


def refuse_no_page(page: Path | None) -> None:
    """Create the parent directory of ``page``, the path of the HTML report, unless the path is None.

    Raises SettingsError if the report cannot be written.
    """
    if page is None:
        return
    if page.suffix == ".json":
        text = f"{page} is where the JSON report goes, next to the HTML report; name the HTML report, such as "
        raise SettingsError([Problem("--report", text + str(page.with_suffix(".html")))])
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError([Problem("--report", f"{page.parent} cannot be created: {error.strerror}")]) from error
    for file in (page, page.with_suffix(".json")):
        if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
            raise SettingsError([Problem("--report", f"{file} cannot be written")])


def where_named(page: Path | None) -> str:
    """Return a sentence about where to find the records that violate the guarantee."""
    return "Run it again with --report to get up to 100 of each kind." if page is None else f"{page} names the records."


@contextlib.contextmanager
def reported(page: Path | None, html: Callable[[], str], data: Callable[[], str]) -> Iterator[Path | None]:
    """Write the HTML and JSON reports if ``page`` is given, and run the ``with`` block, which prints the result.

    The block gets ``page``, or None if no report was written. If a report cannot be written, raises DedupError after
    the block, so that the result, which may have taken hours, is printed nevertheless.
    """
    failed: DedupError | None = None
    if page is not None:
        try:
            _write_report(page, html(), data())
        except DedupError as error:
            failed = error
    yield None if failed else page
    if failed is not None:
        raise failed


def _write_report(page: Path, html: str, data: str) -> None:
    """Write the HTML report to ``page``, and the JSON report next to it. Raises DedupError if that fails."""
    for file, text in ((page, html), (page.with_suffix(".json"), data)):
        try:
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise DedupError(
                f"{file}: the report cannot be written: {error.strerror}. Free space or name another place with "
                f"--report, and run the command again."
            ) from error


def publish(found: Report, page: Path | None, command: str, *, as_json: bool) -> None:
    """Print a verification's result as JSON or as a table, and write reports if ``page`` is given; see `reported`."""
    from dedup.verify.render import print_report, to_html

    with reported(page, lambda: to_html(found, command), found.to_json) as written:
        if as_json:
            typer.echo(found.to_json(), nl=False)
            return
        console = Console()
        if written is not None:
            say_report(written, console)
        print_report(found, console)


def say_report(page: Path, console: Console) -> None:
    """Print the paths of the reports unchanged, even if they contain brackets or are long."""
    text = f"report: {page} and {page.with_suffix('.json').name}"
    console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)


def packed(head: str, parts: Iterable[str], width: int = WIDTH) -> str:
    """Return ``head`` and ``parts`` as lines of at most ``width`` characters. Lines break only between parts.

    Lines after the first are indented. A part that is longer than a line has its own line.
    """
    lines, gap = [head], " "
    for part in parts:
        if len(lines[-1]) + len(gap) + len(part) <= width:
            lines[-1] += gap + part
        else:
            lines.append(f"    {part}")
        gap = "  "
    return "\n".join(lines)


def say(data: object, lines: Iterable[str], *, as_json: bool) -> None:
    """Print ``data`` as JSON if ``as_json`` is set; otherwise, print ``lines``."""
    for line in [json.dumps(data, indent=2)] if as_json else lines:
        typer.echo(line)


def pairs_of(option: str, texts: list[str] | None) -> dict[str, str]:
    """Parse the key=value strings of a repeatable option. Raises SettingsError for a string without "="."""
    wrong = [Problem(f"{option} {text}", "has no value; write key=value") for text in texts or () if "=" not in text]
    if wrong:
        raise SettingsError(wrong)
    return dict(text.split("=", 1) for text in texts or ())


def time_of(option: str, text: str, write: str = f"for example {A_TIME}") -> int:
    """Convert a time in epoch ms or RFC 3339 to epoch ms.

    Raises SettingsError if ``text`` is not a time, or is a time after the year 9999, which RFC 3339 cannot express.
    """
    from dedup.core.event_time import rfc3339_ms

    # Python refuses to convert a number with thousands of digits.
    digits = text.isdecimal() and len(text) <= len(str(_LAST_MS))
    found = int(text) if digits else rfc3339_ms(text)
    if found is None or found > _LAST_MS:
        raise SettingsError([Problem(option, f'"{text}" is not a time; write {write}')])
    return found


@contextlib.contextmanager
def reading_bar(console: Console, *, disable: bool = False) -> Iterator[OnProgress]:
    """Show a progress bar, and yield a callback that updates the number of records read."""
    with Progress(console=console, transient=True, disable=disable) as bar:
        task = bar.add_task("reading", total=None)

        def show(doing: str, done: int, total: int) -> None:
            bar.update(task, description=doing, completed=done, total=total)

        yield show


@contextlib.contextmanager
def kept_after_errors(prefix: str, console: Console) -> Iterator[Path]:
    """Yield a temporary directory, and delete it at the end unless an error or a signal ends the ``with`` block."""
    directory = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield directory
    except (Exception, KeyboardInterrupt, Terminated):
        console.print(f"the logs are in {directory}", style="yellow", markup=False, emoji=False)
        raise
    shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def embedded_kafka(
    data_dir: Path | None, *, port: int = 0, proxied: bool = False, properties: Mapping[str, str] | None = None
) -> Iterator[EmbeddedKafka]:
    """Run an embedded Kafka during the ``with`` block. Shows a progress bar during a download."""
    from dedup.embedded.kafka_node import EmbeddedKafka

    with contextlib.ExitStack() as running:
        with _download_bar("Kafka 4.1.1 from Maven Central") as show:
            kafka = EmbeddedKafka(
                data_dir=data_dir, port=port, profile="bench", proxied=proxied, properties=properties, progress=show
            )
            running.enter_context(kafka)
        yield kafka


@contextlib.contextmanager
def embedded_registry(port: int) -> Iterator[EmbeddedRegistry]:
    """Run an embedded schema registry during the ``with`` block. Shows a progress bar during a download."""
    from dedup.embedded.registry_node import EmbeddedRegistry

    with contextlib.ExitStack() as running:
        with _download_bar("Apicurio Registry from Maven Central") as show:
            registry = running.enter_context(EmbeddedRegistry(port=port, progress=show))
        yield registry


@contextlib.contextmanager
def _download_bar(name: str) -> Iterator[Callable[[int, int], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=None, visible=False)

        def show(done_bytes: int, total_bytes: int) -> None:
            bar.update(task, completed=done_bytes, total=total_bytes, visible=True)

        yield show


@dataclass(frozen=True, slots=True)
class Column:
    """A table column of text or numbers. A table lists its columns in order of importance."""

    name: str
    cells: Sequence[str]
    is_text: bool = False

    @property
    def width(self) -> int:
        """The number of terminal columns that the widest cell needs."""
        return max(map(cell_len, (self.name, *self.cells)))


def fitted(columns: Sequence[Column], width: int) -> Table:
    """Return a table with as many of the first columns as fit in a terminal that is ``width`` characters wide.

    The table omits all other columns, and truncates no cell. The first column, which names the row, is always shown.
    """
    shown, used = [columns[0]], columns[0].width
    for column in columns[1:]:
        used += _GAP + column.width
        if used > width:
            break
        shown.append(column)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for column in shown:
        fold = column is columns[0]  # Even a name wider than the terminal is shown in full.
        table.add_column(column.name, justify="left" if column.is_text else "right", no_wrap=not fold, overflow="fold")
    for row in zip(*(column.cells for column in shown), strict=True):
        table.add_row(*row)
    return table


def shortened(name: str, others: Collection[str]) -> str:
    """Return ``name``. A long name is shortened in the middle, unless another name would then look the same."""
    if _cut(name) == name or any(_cut(other) == _cut(name) for other in others if other != name):
        return name
    return _cut(name)


def _cut(name: str) -> str:
    if len(name) <= _LONGEST_NAME:
        return name
    head = (_LONGEST_NAME - len(_CUT)) // 2
    return name[:head] + _CUT + name[head + len(_CUT) - _LONGEST_NAME :]
