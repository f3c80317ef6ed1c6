"""Implements `dedup demo --chain`, which sends flights from a file into a table and kills each process of the chain."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Final, Self

from rich.console import Console

from dedup.chaos.load import make_topic
from dedup.cli.broker import embedded_kafka
from dedup.cli.inputs import read_ingest, read_topology
from dedup.embedded.child_process import DEDUP, Processes
from dedup.embedded.flights import flights
from dedup.errors import InvariantBroken, VerificationFailed
from dedup.topology.chain import Named, describe_chain

FILES: Final = ("chain-ingest.yaml", "chain.yaml")
COMMANDS: Final = {
    "dedup ingest": ("ingest", "chain-ingest.yaml"),
    "dedup run": ("run", "chain.yaml", "--quiet"),
    "dedup sink": ("sink", "chain.yaml"),
}
COUNT: Final = "SELECT count(*) FROM flights"
PARTITIONS: Final = 4
_LINES_PER_S: Final = 6_000
_BLOCK_LINES: Final = 500
_WRITTEN_TWICE: Final = 0.2
"""Share of blocks that the writer writes twice because it does not know that they arrived."""
_RESTART_AFTER_S: Final = 0.5
_STALLS_AFTER_S: Final = 120.0
_POLL_EVERY_S: Final = 0.1


def demo_chain(limit: int, directory: Path, console: Console) -> None:
    """Run the chain until all flights are in the table, and check that the table holds each flight once.

    Raises VerificationFailed if the check fails, and InvariantBroken if a process ended unexpectedly.
    """
    for name in FILES:
        text = resources.files("dedup.connect").joinpath(name).read_text(encoding="utf-8")
        (directory / name).write_text(text, encoding="utf-8")
    (directory / "incoming").mkdir()
    with contextlib.ExitStack() as stack:
        kafka = stack.enter_context(embedded_kafka(directory))
        for topic in ("chain.flights", "chain.unique"):
            make_topic(kafka.bootstrap, topic, PARTITIONS)
        console.print(f"Kafka is running at {kafka.bootstrap}; dedup check {' '.join(FILES)}")
        chain = stack.enter_context(_Chain(directory, kafka.bootstrap))
        chain.start(*COMMANDS)
        _print_check(directory, console)
        source = stack.enter_context(_FileWriter(directory / "incoming" / "flights.csv", limit))
        _kill_each(chain, source, limit, console)
        chain.until(lambda: source.done.is_set() and chain.count() >= limit and chain.connectors_started(), source)
        chain.stop()
    rows, distinct = chain.count(), source.distinct
    console.print(
        f"{source.lines:,} lines in the file, {source.lines - distinct:,} of them written twice; "
        f"all processes shut down cleanly"
    )
    relation = "=" if rows == distinct else "IS NOT"
    console.print(f"{COUNT}: {rows:,} {relation} distinct flights {distinct:,}")
    if rows != distinct:
        raise VerificationFailed(
            f"The table has {rows} rows and the file {distinct} distinct flights. This is a bug in dedup: please "
            f"report it, with the logs."
        )


def _kill_each(chain: _Chain, source: _FileWriter, limit: int, console: Console) -> None:
    for at, name in enumerate(COMMANDS, 1):
        wanted = limit * at // (len(COMMANDS) + 2)
        chain.until(partial(lambda rows: chain.count() >= rows, wanted), source)
        chain.kill(name)
        console.print(f"at {chain.count():,} rows: SIGKILL to {name}")
        time.sleep(_RESTART_AFTER_S)
        chain.start(name)


class _Chain(Processes):
    """The processes of the chain, one for each command, and the table that they fill."""

    def __init__(self, directory: Path, bootstrap: str) -> None:
        config = {"brokers": [bootstrap], "topics": {"replication_factor": 1}, "web": {"enabled": False}}
        (directory / "config.yaml").write_text(json.dumps(config), encoding="utf-8")
        commands = {name: [*DEDUP, *arguments, "--config", "config.yaml"] for name, arguments in COMMANDS.items()}
        super().__init__(directory, commands, work_directory=directory)
        self._table: Final = directory / "flights.db"

    def until(self, condition: Callable[[], bool], source: _FileWriter) -> None:
        """Wait for a condition. Raises InvariantBroken if a process ends, or if no row is written for two minutes."""
        rows, moved_s = -1, time.monotonic()
        while not condition():
            source.check()
            self.check()
            if (now := self.count()) != rows:
                rows, moved_s = now, time.monotonic()
            if time.monotonic() - moved_s > _STALLS_AFTER_S:
                raise InvariantBroken(f"No row was written for {_STALLS_AFTER_S:g} s, at {rows} rows. See the logs.")
            time.sleep(_POLL_EVERY_S)

    def connectors_started(self) -> bool:
        """Tell whether `dedup ingest` and `dedup sink` have taken over their work, so that they can handle SIGTERM."""
        return all(" taken; " in self.running[name].log for name in ("dedup ingest", "dedup sink"))

    def count(self) -> int:
        """Return the number of rows in the table; 0 before it is created."""
        if not self._table.exists():
            return 0
        with contextlib.closing(sqlite3.connect(f"file:{self._table}?mode=ro", uri=True, timeout=30)) as connection:
            made = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'flights'").fetchone()
            return int(connection.execute(COUNT).fetchone()[0]) if made else 0


def _print_check(directory: Path, console: Console) -> None:
    """Print what `dedup check` says about the chain."""
    stages = [
        Named(FILES[0], read_ingest(directory / FILES[0])),
        Named(FILES[1], read_topology(directory / FILES[1])),
    ]
    for line in describe_chain(stages, frozenset()):
        console.print(line)


class _FileWriter:
    """Appends flights to a CSV file in a thread, some blocks twice, like a writer that got no confirmation."""

    def __init__(self, path: Path, limit: int) -> None:
        self._path: Final = path
        self._limit: Final = limit
        self._dice: Final = random.Random(6)  # noqa: S311  # no secret
        self._stop: Final = threading.Event()
        self._thread: Final = threading.Thread(target=self._run, name="file-writer", daemon=True)
        self._failure: BaseException | None = None
        self.done: Final = threading.Event()
        self.lines = 0
        self.distinct = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def check(self) -> None:
        """Raise the error that ended the writer, if any."""
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            self._write()
        except Exception as error:  # noqa: BLE001  # handed to the thread that waits
            self._failure = error

    def _write(self) -> None:
        began_s = time.monotonic()
        with self._path.open("ab", buffering=0) as file:
            for header, block in self._blocks():
                text = header + block * (2 if self._dice.random() < _WRITTEN_TWICE else 1)
                file.write(text)
                self.lines += text.count(b"\n") - bool(header)
                self.distinct += block.count(b"\n")
                if self._stop.wait(max(0.0, began_s + self.lines / _LINES_PER_S - time.monotonic())):
                    return
        self.done.set()

    def _blocks(self) -> Iterator[tuple[bytes, bytes]]:
        header, block = b"", io.StringIO()
        rows = csv.writer(block, lineterminator="\n")
        for number, flight in enumerate(flights(self._limit), 1):
            value = json.loads(flight.value)
            if number == 1:
                header = (",".join(value) + "\n").encode()
            rows.writerow(value.values())
            if number % _BLOCK_LINES == 0 or number == self._limit:
                yield header, block.getvalue().encode()
                header = b""
                block.seek(0)
                block.truncate()
