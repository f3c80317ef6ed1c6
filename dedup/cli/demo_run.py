"""Runs `dedup demo`, which sends flights through Kafka to two workers and kills one of the workers midway.

With `--chain`, the demo sends flights from a file to a database table, and kills each process of the chain once.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import os
import random
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dedup.chaos.fault_run import ChaosFleet
from dedup.chaos.live_checker import Watch
from dedup.chaos.load import ANY_PARTITION, AT_LEAST_ONCE, Made, Sender, make_topic
from dedup.cli.inputs import embedded_kafka, read_ingest, read_settings, read_topology, reading_bar, reported
from dedup.embedded.child_process import DEDUP, Processes
from dedup.embedded.fault_proxy import FaultProxy
from dedup.embedded.flights import flights
from dedup.embedded.kafka_node import EmbeddedKafka
from dedup.errors import BrokerUnavailable, InvariantBroken, VerificationFailed
from dedup.settings import Settings, without_settings
from dedup.topology.chain import Named, describe_chain
from dedup.topology.model import Topology
from dedup.verify.render import print_report, to_html
from dedup.verify.report import Report
from dedup.verify.verifier import verify

_WORKERS: Final = 2
_KILLED_WORKER: Final = "worker 1"
_WORKER_RESTART_AFTER_S: Final = 1.0
PARTITIONS: Final = 4
_PRODUCER: Final = {**AT_LEAST_ONCE, "batch.num.messages": 500}
"""Batches are small, because a cut connection duplicates every batch in flight. With large batches on a slow machine,
the producer sent more duplicates than flights, and the demo took twice as long.
"""
_POLL_EVERY_S: Final = 0.25
_WORKERS_STALL_AFTER_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Size:
    """How many flights the demo sends, how fast it sends them, and how often it cuts the producer's connection."""

    flights: int
    events_per_second: int
    cut_every_events: int


FULL: Final = Size(flights=336_776, events_per_second=16_000, cut_every_events=4_200)
FAST: Final = Size(flights=40_000, events_per_second=10_000, cut_every_events=2_000)


@dataclass(slots=True)
class Run:
    """One run of the demo. Kafka and the workers must already be running. Use each instance only once."""

    topology: Topology
    settings: Settings
    kafka: EmbeddedKafka
    proxy: FaultProxy
    workers: ChaosFleet
    watch: Watch
    size: Size
    console: Console
    ids: set[bytes] = field(default_factory=set)
    cuts: int = 0
    before: frozenset[str] | None = None
    """The group's members just before the worker was killed, or None if no worker has been killed yet."""
    back: bool = False

    def to_the_end(self) -> int:
        """Send all flights, wait until the workers have judged them, and return the number of distinct flights.

        Raises InvariantBroken if a worker ends unexpectedly, does not start, or judges no record for a minute, and
        BrokerUnavailable if flights cannot be sent.
        """
        self._until_joined()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        # Without a terminal, the progress bars would appear as empty lines.
        live = Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)
        through_proxy = self.settings.model_copy(update={"brokers": (self.kafka.proxied.bootstrap,)})
        per_s = self.size.events_per_second
        with live as bars, Sender(self._flights(), through_proxy, per_s=per_s, options=_PRODUCER) as sender:
            self._watch(sender, bars)
        return len(self.ids)

    def _until_joined(self) -> None:
        """Wait until all workers are in the group.

        Without this wait, a slow start could delay the kill until all flights are judged.
        """
        began_s, joined = time.monotonic(), 0
        while joined < _WORKERS:
            self.kafka.check()
            self.workers.check()
            with contextlib.suppress(BrokerUnavailable):
                joined = len(self.watch.members())
            if time.monotonic() - began_s > _WORKERS_STALL_AFTER_S:
                raise InvariantBroken(f"{joined} of {_WORKERS} workers started within {_WORKERS_STALL_AFTER_S:g} s.")
            time.sleep(_POLL_EVERY_S)

    def _flights(self) -> Iterator[Made]:
        """Yield the flights, and drop some of the broker's responses to make the producer send records again."""
        (topic,) = self.topology.source.topics
        for number, flight in enumerate(flights(self.size.flights), 1):
            self.ids.add(flight.key)
            yield Made(topic, ANY_PARTITION, flight.key, flight.value, (), time.time_ns() // 1_000_000)
            if number % self.size.cut_every_events == 0:
                self.proxy.swallow_answers()
                self.cuts += 1

    def _watch(self, sender: Sender, bars: Progress) -> None:
        began_s = time.monotonic()
        sent_bar = bars.add_task("flights sent", total=self.size.flights)
        judged_bar = bars.add_task("records judged", total=self.size.flights)
        in_topic = judged = judged_now = 0
        moved_s, reported = time.monotonic(), False
        while not (reported and self.back and judged == in_topic):
            if not sender.running and not reported:
                sent, seconds, in_topic = sender.stop(), time.monotonic() - began_s, self.watch.look().in_topic
                self.console.print(
                    f"{sent:,} flights sent in {seconds:.0f} s as {in_topic:,} records:\n"
                    f"    the connection was cut {self.cuts} times, so {in_topic - sent:,} were sent twice"
                )
                reported = True
            # The group coordinator may be loading or moving, most likely in the first second. A later poll succeeds.
            self.kafka.check()
            with contextlib.suppress(BrokerUnavailable):
                progress = self.watch.look()
                in_topic, judged_now = progress.in_topic, progress.judged
                self._crash_midway(judged_now, in_topic)
            if judged_now != judged:
                judged, moved_s = judged_now, time.monotonic()
            bars.update(sent_bar, completed=sender.sent)
            bars.update(judged_bar, completed=judged, total=max(in_topic, self.size.flights))
            self.workers.check()
            if time.monotonic() - moved_s > _WORKERS_STALL_AFTER_S:
                raise InvariantBroken(
                    f"Nothing was judged for {_WORKERS_STALL_AFTER_S:g} s, at {judged} of {in_topic} records."
                )
            time.sleep(_POLL_EVERY_S)

    def _crash_midway(self, judged: int, in_topic: int) -> None:
        if self.before is None:
            if judged >= self.size.flights // 2:
                self.before = self.watch.members()
                self.workers.kill(_KILLED_WORKER)
                self.console.print(f"{judged:,} of {in_topic:,} records are judged: SIGKILL to {_KILLED_WORKER}")
                time.sleep(_WORKER_RESTART_AFTER_S)
                self.workers.start(_KILLED_WORKER)
        elif not self.back and self.watch.members() - self.before:
            self.back = True
            self.console.print(f"{_KILLED_WORKER} is back")


def run_demo(size: Size, directory: Path, console: Console) -> tuple[Report, int]:
    """Run the demo, and return the verification report and the number of distinct flights that were sent."""
    topology_file = directory / "flights.yaml"
    text = resources.files("dedup.embedded").joinpath("flights.yaml").read_text(encoding="utf-8")
    topology_file.write_text(text, encoding="utf-8")
    topology = read_topology(topology_file)
    with contextlib.ExitStack() as stack:
        began_s = time.monotonic()
        kafka = stack.enter_context(embedded_kafka(directory / "kafka", proxied=True))
        console.print(f"Kafka 4.1.1 runs at {kafka.bootstrap} after {time.monotonic() - began_s:.1f} s")
        make_topic(kafka.bootstrap, "flights", PARTITIONS)
        listener = kafka.proxied
        proxy = stack.enter_context(FaultProxy(listener.broker_port, port=listener.proxy_port))
        config = directory / "config.yaml"
        known = {"brokers": [kafka.bootstrap], "topics": {"replication_factor": 1, "min_insync_replicas": 1}}
        config.write_text(json.dumps(known), encoding="utf-8")
        environ = without_settings(os.environ)
        settings = read_settings(config, environ=environ)
        fleet = ChaosFleet(directory, topology_file, config, ["log.format=text"], _WORKERS, environ)
        workers = stack.enter_context(fleet)
        watch = stack.enter_context(Watch(settings, topology.name, "flights", PARTITIONS))
        console.print(f"{_WORKERS} workers: dedup run topologies/flights.yaml")
        distinct = Run(topology, settings, kafka, proxy, workers, watch, size, console).to_the_end()
        workers.stop()
        if workers.unclean:
            raise InvariantBroken("\n".join(workers.unclean))
        console.print(f"{_WORKERS} workers shut down cleanly; each record is read and compared with the model")
        with reading_bar(console, disable=not console.is_terminal) as show:
            return verify(topology, settings, progress=show), distinct


def print_books(found: Report, distinct: int, page: Path | None, console: Console) -> None:
    """Print the report and, unless ``page`` is None, also write it to the path ``page``.

    Raises DedupError if the page cannot be written; see `reported`. Raises VerificationFailed unless each flight was
    forwarded exactly once.
    """
    forwarded = sum(books.unique for books in found.books)
    relation = "=" if forwarded == distinct else "IS NOT"
    with reported(page, lambda: to_html(found), found.to_json):
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
"""The share of blocks of lines that the demo writes twice."""
_CHAIN_RESTART_AFTER_S: Final = 0.5
_CHAIN_STALLS_AFTER_S: Final = 120.0
_CHAIN_POLL_EVERY_S: Final = 0.1


def demo_chain(limit: int, directory: Path, console: Console) -> None:
    """Run the chain until the table contains all flights, and check that it contains each flight only once.

    Raises VerificationFailed if a flight is missing or duplicated, and InvariantBroken if a process ended unexpectedly.
    """
    for name in FILES:
        text = resources.files("dedup.connect").joinpath(name).read_text(encoding="utf-8")
        (directory / name).write_text(text, encoding="utf-8")
    (directory / "incoming").mkdir()
    with contextlib.ExitStack() as stack:
        kafka = stack.enter_context(embedded_kafka(directory / "kafka"))
        for topic in ("chain.flights", "chain.unique"):
            make_topic(kafka.bootstrap, topic, PARTITIONS)
        console.print(f"Kafka is running at {kafka.bootstrap}; dedup check {' '.join(FILES)}")
        chain = stack.enter_context(_Chain(directory, kafka.bootstrap))
        chain.start(*COMMANDS)
        ingest, topology = read_ingest(directory / FILES[0]), read_topology(directory / FILES[1])
        for line in describe_chain([Named(FILES[0], ingest), Named(FILES[1], topology)], frozenset()):
            console.print(line)
        source = _FileWriter(directory / "incoming" / "flights.csv", limit)
        for at, name in enumerate(COMMANDS, 1):
            chain.until(limit * at // (len(COMMANDS) + 2), source)
            chain.kill(name)
            console.print(f"at {chain.count():,} rows: SIGKILL to {name}")
            time.sleep(_CHAIN_RESTART_AFTER_S)
            chain.start(name)
        chain.until(limit, source)
        chain.stop()
    rows, distinct = chain.count(), source.distinct
    console.print(
        f"{source.lines:,} lines in the file, {source.lines - distinct:,} of them second copies\n"
        f"all processes shut down cleanly"
    )
    relation = "=" if rows == distinct else "IS NOT"
    console.print(f"{COUNT}: {rows:,} {relation} distinct flights {distinct:,}")
    if rows != distinct:
        raise VerificationFailed(
            f"The table has {rows} rows and the file {distinct} distinct flights. This is a bug in dedup: please "
            f"report it, with the logs."
        )


class _Chain(Processes):
    def __init__(self, directory: Path, bootstrap: str) -> None:
        config = {"brokers": [bootstrap], "topics": {"replication_factor": 1}, "web": {"enabled": False}}
        (directory / "config.yaml").write_text(json.dumps(config), encoding="utf-8")
        commands = {name: [*DEDUP, *arguments, "--config", "config.yaml"] for name, arguments in COMMANDS.items()}
        super().__init__(directory, commands, work_directory=directory, environ=without_settings(os.environ))
        self._table: Final = directory / "flights.db"

    def until(self, wanted: int, source: _FileWriter) -> None:
        rows, moved_s = -1, time.monotonic()
        while rows < wanted or (wanted == source.limit and not self._connectors_started()):
            source.write_due()
            self.check()
            if (now := self.count()) != rows:
                rows, moved_s = now, time.monotonic()
            if time.monotonic() - moved_s > _CHAIN_STALLS_AFTER_S:
                raise InvariantBroken(
                    f"No row was written for {_CHAIN_STALLS_AFTER_S:g} s, at {rows} rows. See the logs."
                )
            time.sleep(_CHAIN_POLL_EVERY_S)

    def _connectors_started(self) -> bool:
        """Return whether `dedup ingest` and `dedup sink` are ready to handle SIGTERM."""
        return all(" taken; " in self.running[name].log for name in ("dedup ingest", "dedup sink"))

    def count(self) -> int:
        if not self._table.exists():
            return 0
        with contextlib.closing(sqlite3.connect(f"file:{self._table}?mode=ro", uri=True, timeout=30)) as connection:
            made = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'flights'").fetchone()
            return int(connection.execute(COUNT).fetchone()[0]) if made else 0


class _FileWriter:
    """Appends flights to a CSV file, and repeats some of them, like a writer that retries after a lost response."""

    def __init__(self, path: Path, limit: int) -> None:
        self._path: Final = path
        self.limit: Final = limit
        self._rows: Final = (json.loads(flight.value) for flight in flights(limit))
        self._dice: Final = random.Random(6)  # noqa: S311  # these numbers protect no secret
        self._began_s: Final = time.monotonic()
        self.lines = 0
        self.distinct = 0

    def write_due(self) -> None:
        with self._path.open("ab", buffering=0) as file:
            while self.distinct < self.limit and self.lines <= (time.monotonic() - self._began_s) * _LINES_PER_S:
                rows = list(itertools.islice(self._rows, _BLOCK_LINES))
                block = io.StringIO()
                csv.writer(block, lineterminator="\n").writerows(row.values() for row in rows)
                header = "" if self.lines else ",".join(rows[0]) + "\n"
                times = 2 if self._dice.random() < _WRITTEN_TWICE else 1
                file.write((header + block.getvalue() * times).encode())
                self.lines += times * len(rows)
                self.distinct += len(rows)
