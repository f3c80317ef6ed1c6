"""Implements `dedup broker` and `dedup demo`, which start an embedded Kafka broker."""

from __future__ import annotations

import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from dedup.cli.inputs import JsonOption, embedded_kafka, embedded_registry, kept_after_errors, pairs_of, refuse_no_page
from dedup.errors import Terminated

_REGISTRY_PORT: Final = 8081
_RegistryPort = Annotated[
    int | None,
    typer.Option(
        min=0, max=65535, metavar="PORT", help="Port of the schema registry; 0 means any free port. Default: 8081."
    ),
]


def broker(
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="PORT", help="Port for clients; 0 means any free port.")
    ] = 9092,
    data_dir: Annotated[
        Path | None, typer.Option(metavar="DIRECTORY", help="Data directory. Default: a temporary directory.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set a broker property. Repeatable.")
    ] = None,
    registry: Annotated[bool, typer.Option("--registry", help="Also run a schema registry.")] = False,
    registry_port: _RegistryPort = None,
) -> None:
    """Run an embedded Kafka broker until you press Ctrl-C.

    The command runs a single node of Apache Kafka 4.1.1 on 127.0.0.1. The first run downloads Kafka's jars (45 MB) from
    Maven Central into the user's cache. Without --data-dir, Kafka's data is deleted when the command ends. The exit
    code is 130 after Ctrl-C, and 0 after SIGTERM.

    With --registry, the command also runs Apicurio Registry 2.5.11 on 127.0.0.1 (a download of 140 MB). Set
    `schema_registry.url` to the registry's address, which the command prints. The registry keeps its schemas in memory,
    so they are lost when the command ends.

    Examples: dedup broker --port 9092 --data-dir state/kafka

    dedup broker --registry
    """
    if registry_port is not None and not registry:
        raise typer.BadParameter("--registry-port is the port of the schema registry; add --registry")
    properties = pairs_of("--set", overrides)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # `nohup` makes a process ignore the signal
        signal.signal(signal.SIGHUP, _hang_up)
    with ExitStack() as running:
        kafka = running.enter_context(embedded_kafka(data_dir, port=port, properties=properties))
        at = _REGISTRY_PORT if registry_port is None else registry_port
        schemas = running.enter_context(embedded_registry(at)) if registry else None
        # Like Ctrl-C, SIGTERM lets the node shut down cleanly.
        stop_requested = threading.Event()
        received: list[int] = []

        def stop(number: int, _frame: object) -> None:
            received.append(number)
            stop_requested.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
        # Programs read the bootstrap address from the first line of stdout, and the registry's URL from the second.
        typer.echo(kafka.bootstrap)
        if schemas is not None:
            typer.echo(schemas.url)
        what, are, them = ("Kafka", "is", "it") if schemas is None else ("Kafka and the schema registry", "are", "them")
        typer.echo(f"Kafka's log: {kafka.log_file}", err=True)
        typer.echo(f"{what} {are} running; stop {them} with Ctrl-C.", err=True)
        while not stop_requested.wait(0.2):
            kafka.check()
            if schemas is not None:
                schemas.check()
    typer.echo(f"{what} {'has' if schemas is None else 'have'} shut down.", err=True)
    raise typer.Exit(130 if received[0] == signal.SIGINT else 0)


def _hang_up(number: int, _frame: object) -> None:
    # When a terminal closes, both its shell and the kernel may send the signal, but the second must not stop the
    # cleanup.
    signal.signal(number, signal.SIG_IGN)
    raise Terminated(128 + number)


def demo(
    fast: Annotated[bool, typer.Option("--fast", help="Use only the first 40,000 flights.")] = False,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Path of the HTML report; a JSON report is written next to it.")
    ] = None,
    chain: Annotated[
        bool,
        typer.Option(
            "--chain", help="Run a chain from a file to a table (ingest, worker, sink), and kill each process once."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Deduplicate 336,776 real flights on an embedded Kafka, kill a worker midway, and verify the result.

    The demo repeatedly cuts the producer's connection, so that the producer sends some records twice. Two workers
    deduplicate the records; the demo kills one of the workers with SIGKILL and restarts it. Finally, the demo checks
    every record as `dedup verify` does. You do not need to install Kafka or Java. The demo takes about a minute, or
    about 20 seconds with --fast.

    Example: dedup demo --fast

    With --chain, `dedup ingest` sends the flights from a CSV file to a topic, `dedup run` deduplicates them, and `dedup
    sink` writes them to a database table.
    """
    from dedup.cli.demo_run import FAST, FULL, demo_chain, print_books, run_demo
    from dedup.embedded.flights import data_file

    data_file()
    if chain and (as_json or report is not None):
        raise typer.BadParameter(f"{'--json' if as_json else '--report'} and --chain exclude each other")
    if report is not None:
        refuse_no_page(report)
    # With --json, stdout contains the report and nothing else.
    console = Console(highlight=False, soft_wrap=True, stderr=as_json)
    size = FAST if fast else FULL
    with kept_after_errors("dedup-demo-", console) as directory:
        if chain:
            demo_chain(size.flights, directory, console)
            return
        found, distinct = run_demo(size, directory, console)
    if as_json:
        typer.echo(found.to_json(), nl=False)
    print_books(found, distinct, report, console)
