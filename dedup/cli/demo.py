"""`dedup demo`: the whole product on one machine, with real input, real duplicates and a real crash."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.progress import Progress

from dedup.cli.report_page import refuse_no_page, write_report
from dedup.errors import VerificationFailed

if TYPE_CHECKING:  # imported when the demo runs, as --help must be quick
    from dedup.cli.demo_run import Size
    from dedup.local.kafka import EmbeddedKafka
    from dedup.local.proxy import FaultProxy
    from dedup.proof.report import Report
    from dedup.settings import Settings
    from dedup.topology.model import Topology

_HELP = """Deduplicate 336,776 real flights on a Kafka of its own, kill a worker half-way, prove the result.

A producer that hears nothing because its connection broke sends again, and so makes real duplicates. Two workers
deduplicate; one gets SIGKILL and comes back. Then everything is read again and compared with the exact model.
Needs no broker and no Java. About a minute; --fast some 20 seconds.

Example: dedup demo --fast

With --chain the flights are lines of a file, and end as rows of a table: file, topic, deduplication, table.
"""

PARTITIONS: Final = 4
WORKERS: Final = 2


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("demo", help=_HELP)(demo_command)


def demo_command(
    fast: Annotated[bool, typer.Option("--fast", help="The first 40,000 flights only.")] = False,
    report: Annotated[Path | None, typer.Option(help="Where an HTML report goes, the JSON one beside it.")] = None,
    chain: Annotated[
        bool, typer.Option("--chain", help="From a file into a table instead; each process of the chain is killed.")
    ] = False,
) -> None:
    """See `_HELP`; raises VerificationFailed after the books are printed."""
    from dedup.cli.demo_chain import demo_chain
    from dedup.cli.demo_run import FAST, FULL

    if chain and report is not None:
        raise typer.BadParameter("--report is of the demo without --chain")
    if report is not None:
        refuse_no_page(report)
    console = Console(highlight=False, soft_wrap=True)
    directory = Path(tempfile.mkdtemp(prefix="dedup-demo-"))
    size = FAST if fast else FULL
    found = None
    try:
        if chain:
            demo_chain(size.flights, directory, console)
        else:
            found, distinct = _demo(size, directory, console)
    except Exception:
        # The logs of broker and workers are the only witnesses.
        console.print(f"the logs are in {directory}", style="yellow")
        raise
    except KeyboardInterrupt:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    shutil.rmtree(directory, ignore_errors=True)
    if found is not None:
        _print_books(found, distinct, report, console)


def _demo(size: Size, directory: Path, console: Console) -> tuple[Report, int]:
    """Return the verification's report and the number of distinct flights sent."""
    from dedup.cli.demo_run import Run, Stage
    from dedup.cli.demo_workers import Workers, config_file
    from dedup.proof.watch import Watch
    from dedup.settings import load_settings
    from dedup.topology.parse import parse

    topology_file = directory / "flights.yaml"
    topology_file.write_text(topology_text(), encoding="utf-8")
    topology = parse(topology_text(), name=str(topology_file))
    with contextlib.ExitStack() as stack:
        kafka, proxy = stack.enter_context(_kafka_behind_proxy(directory, console))
        settings = load_settings(config_file(directory, kafka.bootstrap, 0), [], {})
        workers = stack.enter_context(Workers(directory, topology_file, kafka.bootstrap, WORKERS))
        watch = stack.enter_context(Watch(kafka.bootstrap, topology.name, "flights", PARTITIONS))
        console.print(f"{WORKERS} workers: dedup run topologies/flights.yaml")
        distinct = Run(Stage(topology, kafka, proxy, workers, watch), size, console).to_the_end()
        workers.stop()
        console.print(f"{WORKERS} workers ended in good order; every record is read again and compared with the model")
        return _verified(topology, settings, console), distinct


def topology_text() -> str:
    """Return the demo's topology, the same as topologies/flights.yaml of the repository."""
    return resources.files("dedup.local").joinpath("flights.yaml").read_text(encoding="utf-8")


@contextlib.contextmanager
def _kafka_behind_proxy(directory: Path, console: Console) -> Iterator[tuple[EmbeddedKafka, FaultProxy]]:
    from dedup.cli.fetching import fetching_jars
    from dedup.local.kafka import EmbeddedKafka
    from dedup.local.proxy import FaultProxy
    from dedup.proof.atleastonce import make_topic

    with fetching_jars() as progress:
        began_s = time.monotonic()
        kafka = EmbeddedKafka(data_dir=directory / "kafka", profile="bench", proxied=1, progress=progress).start()
    try:
        console.print(f"Kafka 4.1.1 runs at {kafka.bootstrap} after {time.monotonic() - began_s:.1f} s")
        make_topic(kafka.bootstrap, "flights", PARTITIONS)
        listener = kafka.proxied[0]
        with FaultProxy(listener.broker_port, port=listener.proxy_port) as proxy:
            yield kafka, proxy
    finally:
        kafka.stop()


def _verified(topology: Topology, settings: Settings, console: Console) -> Report:
    from dedup.proof.verify import Progress as Reading
    from dedup.proof.verify import verify

    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading", total=None)

        def show(now: Reading) -> None:
            bar.update(task, description=now.doing, completed=now.done, total=now.total)

        return verify(topology, settings, progress=show)


def _print_books(found: Report, distinct: int, page: Path | None, console: Console) -> None:
    """The books are printed, `lost 0  duplicated 0` last. Raises VerificationFailed when they say anything else."""
    from dedup.proof.render import print_report, to_html

    if page is not None:
        write_report(page, to_html(found), found.to_json())
    forwarded = sum(books.unique for books in found.books)
    relation = "=" if forwarded == distinct else "IS NOT"
    console.print(f"forwarded {forwarded:,} {relation} distinct flights {distinct:,}")
    print_report(found, console)
    if not found.passed or found.not_provable or forwarded != distinct:
        raise VerificationFailed(
            f"The demo forwarded {forwarded} of {distinct} distinct flights; {found.closing_line()}. "
            f"This is a defect of dedup: run it again with --report demo.html and report what that says."
        )
