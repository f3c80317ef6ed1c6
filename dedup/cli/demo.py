"""Implements `dedup demo`, the whole product on one machine, with real data, real duplicates, and a real crash."""

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

from dedup.cli.inputs import reading_bar, refuse_no_page, write_report
from dedup.errors import VerificationFailed

if TYPE_CHECKING:
    from dedup.cli.demo_run import Size
    from dedup.embedded.fault_proxy import FaultProxy
    from dedup.embedded.kafka_node import EmbeddedKafka
    from dedup.verify.report import Report

_HELP: Final = """Deduplicate 336,776 real flights on an embedded Kafka, kill a worker midway, and prove the result.

When its connection breaks before the acknowledgment, the producer sends a record again, which creates real duplicates.
Two workers deduplicate; one is killed with SIGKILL and restarted. Then every record is read and compared with the exact
model. Needs no broker and no Java. It takes about a minute, or about 20 seconds with --fast.

Example: dedup demo --fast

With --chain, the flights go from the lines of a file through topics and deduplication to the rows of a table.
"""

PARTITIONS: Final = 4
WORKERS: Final = 2


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("demo", help=_HELP)(demo_command)


def demo_command(
    fast: Annotated[bool, typer.Option("--fast", help="Only the first 40,000 flights.")] = False,
    report: Annotated[Path | None, typer.Option(help="Write an HTML report here, and a JSON one next to it.")] = None,
    chain: Annotated[
        bool, typer.Option("--chain", help="Run the chain from a file to a table, and kill each process once.")
    ] = False,
) -> None:
    """See `_HELP`. Raises VerificationFailed after the report is printed."""
    from dedup.cli.demo_chain import demo_chain
    from dedup.cli.demo_run import FAST, FULL

    if chain and report is not None:
        raise typer.BadParameter("--report and --chain exclude each other")
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
        # The logs of broker and workers are the only evidence.
        console.print(f"the logs are in {directory}", style="yellow")
        raise
    except KeyboardInterrupt:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    shutil.rmtree(directory, ignore_errors=True)
    if found is not None:
        _print_books(found, distinct, report, console)


def _demo(size: Size, directory: Path, console: Console) -> tuple[Report, int]:
    """Return the verification report and the number of distinct flights sent."""
    from dedup.chaos.live_checker import Watch
    from dedup.cli.demo_run import DemoStage, Run, Workers, config_file
    from dedup.settings import load_settings
    from dedup.topology.parse import parse
    from dedup.verify.verifier import verify

    topology_file = directory / "flights.yaml"
    topology_file.write_text(topology_text(), encoding="utf-8")
    topology = parse(topology_text(), name=str(topology_file))
    with contextlib.ExitStack() as stack:
        kafka, proxy = stack.enter_context(_kafka_behind_proxy(directory, console))
        settings = load_settings(config_file(directory, kafka.bootstrap, 0), [], {})
        workers = stack.enter_context(Workers(directory, topology_file, kafka.bootstrap, WORKERS))
        watch = stack.enter_context(Watch(kafka.bootstrap, topology.name, "flights", PARTITIONS))
        console.print(f"{WORKERS} workers: dedup run topologies/flights.yaml")
        distinct = Run(DemoStage(topology, kafka, proxy, workers, watch), size, console).to_the_end()
        workers.stop()
        console.print(f"{WORKERS} workers shut down cleanly; every record is read again and compared with the model")
        with reading_bar(console, disable=not console.is_terminal) as show:
            return verify(topology, settings, progress=show), distinct


def topology_text() -> str:
    """Return the demo's topology, which equals topologies/flights.yaml in the repository."""
    return resources.files("dedup.embedded").joinpath("flights.yaml").read_text(encoding="utf-8")


@contextlib.contextmanager
def _kafka_behind_proxy(directory: Path, console: Console) -> Iterator[tuple[EmbeddedKafka, FaultProxy]]:
    from dedup.chaos.load import make_topic
    from dedup.cli.broker import fetching_jars
    from dedup.embedded.fault_proxy import FaultProxy
    from dedup.embedded.kafka_node import EmbeddedKafka

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


def _print_books(found: Report, distinct: int, page: Path | None, console: Console) -> None:
    """Print the report, which must end with `lost 0  duplicated 0`. Raises VerificationFailed otherwise."""
    from dedup.verify.render import print_report, to_html

    if page is not None:
        write_report(page, to_html(found), found.to_json())
    forwarded = sum(books.unique for books in found.books)
    relation = "=" if forwarded == distinct else "IS NOT"
    console.print(f"forwarded {forwarded:,} {relation} distinct flights {distinct:,}")
    print_report(found, console)
    if not found.passed or found.not_provable or forwarded != distinct:
        raise VerificationFailed(
            f"The demo forwarded {forwarded} of {distinct} distinct flights; {found.closing_line()}. "
            f"This is a bug in dedup: run the demo again with --report demo.html, and report what that page says."
        )
