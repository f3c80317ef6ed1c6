"""Implements `dedup broker`, which runs an embedded Kafka in the foreground."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from dedup.cli.inputs import pairs_of

if TYPE_CHECKING:
    from dedup.embedded.kafka_jars import Progress as OnBytes
    from dedup.embedded.kafka_node import EmbeddedKafka


def broker(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port for clients; 0 picks a free one.")] = 9092,
    data_dir: Annotated[Path | None, typer.Option(help="Data directory; a temporary one by default.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Set a broker property: key=value. Repeatable.")
    ] = None,
) -> None:
    """Run an embedded Kafka until Ctrl-C.

    The command runs a real Apache Kafka 4.1.1 with one node on 127.0.0.1. The first run downloads the jars (45 MB) from
    Maven Central into the user's cache. Without --data-dir, the data is deleted at the end.

    Example: dedup broker --port 9092 --data-dir state/kafka
    """
    from dedup.embedded.kafka_node import EmbeddedKafka

    with fetching_jars() as progress:
        kafka = EmbeddedKafka(
            data_dir=data_dir, port=port, profile="bench", properties=pairs_of("--set", overrides), progress=progress
        ).start()
    # SIGTERM, like Ctrl-C, lets the node shut down cleanly.
    stop_requested = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop_requested.set())
    try:
        # The first line of stdout is for programs: the bootstrap address.
        typer.echo(kafka.bootstrap)
        typer.echo(f"Kafka is running; its log is {kafka.log_file}. Stop it with Ctrl-C.", err=True)
        while not stop_requested.wait(0.2):
            kafka.check()
    finally:
        kafka.stop()
    typer.echo("Kafka has shut down.", err=True)
    raise typer.Exit(130)


@contextlib.contextmanager
def embedded_kafka(
    directory: Path, *, proxied: bool = False, properties: Mapping[str, str] | None = None
) -> Iterator[EmbeddedKafka]:
    """Yield a running Kafka with its data in ``directory``, and stop it at the end."""
    from dedup.embedded.kafka_node import EmbeddedKafka

    with fetching_jars() as progress:
        kafka = EmbeddedKafka(
            data_dir=directory / "kafka", profile="bench", proxied=proxied, properties=properties, progress=progress
        ).start()
    try:
        yield kafka
    finally:
        kafka.stop()


@contextlib.contextmanager
def fetching_jars() -> Iterator[OnBytes]:
    """Yield a callback for (bytes done, total bytes) that shows a progress bar from its first call."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("Kafka 4.1.1 from Maven Central", total=None, visible=False)

        def show(done_bytes: int, total_bytes: int) -> None:
            bar.update(task, completed=done_bytes, total=total_bytes, visible=True)

        yield show
