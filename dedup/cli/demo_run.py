"""Runs `dedup demo`, which sends flights to two workers and kills one of them midway.

With `--chain`, it sends flights from a file into a table instead, and kills each process of the chain once.
"""

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
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dedup.chaos.live_checker import Watch
from dedup.chaos.load import ANY_PARTITION, AT_LEAST_ONCE, Made, Sender, make_topic
from dedup.cli.broker import embedded_kafka
from dedup.cli.inputs import read_ingest, read_settings, read_topology, reading_bar, write_report
from dedup.embedded.child_process import DEDUP, Processes
from dedup.embedded.fault_proxy import FaultProxy
from dedup.embedded.flights import flights
from dedup.embedded.kafka_node import EmbeddedKafka
from dedup.errors import BrokerUnavailable, InvariantBroken, VerificationFailed
from dedup.settings import Settings
from dedup.topology.chain import Named, describe_chain
from dedup.topology.model import Topology
from dedup.verify.render import print_report, to_html
from dedup.verify.report import Report
from dedup.verify.verifier import verify

_WORKERS: Final = ("worker 1", "worker 2")
_KILLED_WORKER: Final = _WORKERS[0]
_WORKER_RESTART_AFTER_S: Final = 1.0
PARTITIONS: Final = 4
_POLL_EVERY_S: Final = 0.25
_WORKERS_STALL_AFTER_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Size:
    """The size of the demo."""

    flights: int
    events_per_second: int
    cut_every_events: int


FULL: Final = Size(flights=336_776, events_per_second=16_000, cut_every_events=4_200)
FAST: Final = Size(flights=40_000, events_per_second=10_000, cut_every_events=2_000)


@dataclass(frozen=True, slots=True)
class DemoStage:
    """The processes of the demo, which run before the first flight is sent, and their settings."""

    topology: Topology
    settings: Settings
    kafka: EmbeddedKafka
    proxy: FaultProxy
    workers: Processes
    watch: Watch


class Run:
    """One run of the demo. Each instance of this class runs only once."""

    def __init__(self, stage: DemoStage, size: Size, console: Console) -> None:
        self._stage: Final = stage
        self._size: Final = size
        self._console: Final = console
        self._ids: Final[set[bytes]] = set()
        self._cuts = 0
        self._before: frozenset[str] | None = None
        """The group's members just before the worker was killed; None until then."""
        self._back = False

    def to_the_end(self) -> int:
        """Send all flights, wait until they are judged, and return the number of distinct flights.

        Raises InvariantBroken if a worker ends unexpectedly or nothing is judged for a minute, and BrokerUnavailable if
        flights cannot be sent.
        """
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        # Without a terminal, the bars would be empty lines.
        live = Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal)
        through_proxy = self._stage.settings.model_copy(update={"brokers": (self._stage.kafka.proxied.bootstrap,)})
        per_s = self._size.events_per_second
        with live as bars, Sender(self._flights(), through_proxy, per_s=per_s, options=AT_LEAST_ONCE) as sender:
            self._watch(sender, bars)
        return len(self._ids)

    def _flights(self) -> Iterator[Made]:
        """Yield the flights, and drop the broker's responses at regular intervals."""
        (topic,) = self._stage.topology.source.topics
        for number, flight in enumerate(flights(self._size.flights), 1):
            self._ids.add(flight.key)
            yield Made(topic, ANY_PARTITION, flight.key, flight.value, (), time.time_ns() // 1_000_000)
            if number % self._size.cut_every_events == 0:
                self._stage.proxy.swallow_answers()
                self._cuts += 1

    def _watch(self, sender: Sender, bars: Progress) -> None:
        began_s = time.monotonic()
        sent_bar = bars.add_task("flights sent", total=self._size.flights)
        judged_bar = bars.add_task("records judged", total=self._size.flights)
        in_topic = judged = judged_now = 0
        moved_s, reported = time.monotonic(), False
        while not (reported and self._back and judged == in_topic):
            if not sender.running and not reported:
                reported = self._report_sent(sender.stop(), time.monotonic() - began_s)
            # A coordinator may be loading or moving, above all in the first second; then the next poll succeeds.
            self._stage.kafka.check()
            with contextlib.suppress(BrokerUnavailable):
                progress = self._stage.watch.look()
                in_topic, judged_now = progress.in_topic, progress.judged
                self._crash_midway(judged_now)
            if judged_now != judged:
                judged, moved_s = judged_now, time.monotonic()
            bars.update(sent_bar, completed=sender.sent)
            bars.update(judged_bar, completed=judged, total=max(in_topic, self._size.flights))
            self._stage.workers.check()
            if time.monotonic() - moved_s > _WORKERS_STALL_AFTER_S:
                raise InvariantBroken(
                    f"Nothing was judged for {_WORKERS_STALL_AFTER_S:g} s, at {judged} of {in_topic} records."
                )
            time.sleep(_POLL_EVERY_S)

    def _crash_midway(self, judged: int) -> None:
        """Kill a worker midway, start it again after a pause, and note when it has rejoined the group."""
        watch, workers = self._stage.watch, self._stage.workers
        if self._before is None:
            if judged >= self._size.flights // 2:
                self._before = watch.members()
                workers.kill(_KILLED_WORKER)
                self._console.print(f"midway, at {judged:,} records: SIGKILL to {_KILLED_WORKER}")
                time.sleep(_WORKER_RESTART_AFTER_S)
                workers.start(_KILLED_WORKER)
        elif not self._back and watch.members() - self._before:
            self._back = True
            self._console.print(f"{_KILLED_WORKER} is back")

    def _report_sent(self, sent: int, seconds: float) -> bool:
        in_topic = self._stage.watch.look().in_topic
        self._console.print(
            f"{sent:,} flights sent in {seconds:.0f} s as {in_topic:,} records: the connection was cut "
            f"{self._cuts} times, so {in_topic - sent:,} were sent twice"
        )
        return True


def run_demo(size: Size, directory: Path, console: Console) -> tuple[Report, int]:
    """Return the verification report and the number of distinct flights sent. Raises the errors of `Run.to_the_end`."""
    topology_file = directory / "flights.yaml"
    text = resources.files("dedup.embedded").joinpath("flights.yaml").read_text(encoding="utf-8")
    topology_file.write_text(text, encoding="utf-8")
    topology = read_topology(topology_file)
    with contextlib.ExitStack() as stack:
        began_s = time.monotonic()
        kafka = stack.enter_context(embedded_kafka(directory, proxied=True))
        console.print(f"Kafka 4.1.1 runs at {kafka.bootstrap} after {time.monotonic() - began_s:.1f} s")
        make_topic(kafka.bootstrap, "flights", PARTITIONS)
        listener = kafka.proxied
        proxy = stack.enter_context(FaultProxy(listener.broker_port, port=listener.proxy_port))
        settings = read_settings(_config_file(directory, kafka.bootstrap, 0))
        workers = stack.enter_context(_workers(directory, topology_file, kafka.bootstrap))
        workers.start(*_WORKERS)
        watch = stack.enter_context(Watch(settings, topology.name, "flights", PARTITIONS))
        console.print(f"{len(_WORKERS)} workers: dedup run topologies/flights.yaml")
        distinct = Run(DemoStage(topology, settings, kafka, proxy, workers, watch), size, console).to_the_end()
        workers.stop()
        console.print(
            f"{len(_WORKERS)} workers shut down cleanly; every record is read again and compared with the model"
        )
        with reading_bar(console, disable=not console.is_terminal) as show:
            return verify(topology, settings, progress=show), distinct


def _workers(directory: Path, topology_file: Path, bootstrap: str) -> Processes:
    """Return the demo's workers, each with its own ID and state directory."""
    commands = {}
    for number, name in enumerate(_WORKERS, 1):
        config = _config_file(directory, bootstrap, number)
        commands[name] = [*DEDUP, "run", str(topology_file), "--config", str(config), "--quiet"]
    return Processes(directory, commands)


def _config_file(directory: Path, bootstrap: str, number: int) -> Path:
    """Write the config file of a worker, and return its path."""
    path = directory / f"worker-{number}.yaml"
    lines = (
        f"brokers: ['{bootstrap}']",
        f"state_dir: '{directory}/state-{number}'",
        f"worker_id: flights-{number}",
        "topics: {replication_factor: 1, min_insync_replicas: 1}",
        "web: {enabled: false}",
        "log: {format: text, level: info}",
    )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def print_books(found: Report, distinct: int, page: Path | None, console: Console) -> None:
    """Print the report. Raises VerificationFailed unless the report proves that each distinct flight was forwarded
    exactly once.
    """
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


FILES: Final = ("chain-ingest.yaml", "chain.yaml")
COMMANDS: Final = {
    "dedup ingest": ("ingest", "chain-ingest.yaml"),
    "dedup run": ("run", "chain.yaml", "--quiet"),
    "dedup sink": ("sink", "chain.yaml"),
}
COUNT: Final = "SELECT count(*) FROM flights"
_LINES_PER_S: Final = 6_000
_BLOCK_LINES: Final = 500
_WRITTEN_TWICE: Final = 0.2
"""Share of blocks that the writer writes twice because it does not know that they arrived."""
_CHAIN_RESTART_AFTER_S: Final = 0.5
_CHAIN_STALLS_AFTER_S: Final = 120.0
_CHAIN_POLL_EVERY_S: Final = 0.1


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
        time.sleep(_CHAIN_RESTART_AFTER_S)
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
            if time.monotonic() - moved_s > _CHAIN_STALLS_AFTER_S:
                raise InvariantBroken(
                    f"No row was written for {_CHAIN_STALLS_AFTER_S:g} s, at {rows} rows. See the logs."
                )
            time.sleep(_CHAIN_POLL_EVERY_S)

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
