"""`dedup broker`: a Kafka of one's own in the foreground."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

_HELP = """Run an embedded Kafka until Ctrl-C.

A real Apache Kafka 4.1.1, one node, on 127.0.0.1. The first use fetches its jars from Maven Central, 45 MB, into the
user's cache. Without --data-dir its data are gone at the end.

Example: dedup broker --port 9092 --data-dir state/kafka
"""


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("broker", help=_HELP)(broker_command)


def broker_command(
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port for clients; 0 takes a free one.")] = 9092,
    data_dir: Annotated[Path | None, typer.Option(help="Where its data stay; temporary if not given.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="A broker property: key=value.")] = None,
) -> None:
    """See `_HELP`."""
    from dedup.cli.fetching import fetching_jars
    from dedup.local.kafka import EmbeddedKafka

    with fetching_jars() as progress:
        kafka = EmbeddedKafka(
            data_dir=data_dir, port=port, profile="bench", properties=_properties(overrides or []), progress=progress
        ).start()
    # SIGTERM is an order to end as Ctrl-C is; both let the node shut down in good order.
    asked_to_end = threading.Event()
    for order in (signal.SIGINT, signal.SIGTERM):
        signal.signal(order, lambda *_: asked_to_end.set())
    try:
        # The first line on stdout is for programs: where to connect.
        typer.echo(kafka.bootstrap)
        typer.echo(f"Kafka runs; its log is {kafka.log_file}. End it with Ctrl-C.", err=True)
        while not asked_to_end.wait(0.2):
            kafka.check()
    finally:
        kafka.stop()
    typer.echo("Kafka ended in good order.", err=True)
    raise typer.Exit(130)


def _properties(overrides: list[str]) -> dict[str, str]:
    from dedup.errors import Problem, SettingsError

    problems = [Problem("--set", f"{text!r} has no =; write key=value") for text in overrides if "=" not in text]
    if problems:
        raise SettingsError(problems)
    return dict(text.split("=", 1) for text in overrides)
