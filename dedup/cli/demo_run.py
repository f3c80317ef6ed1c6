"""Runs `dedup demo`: sends flights to two workers, and kills one of them midway."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dedup.chaos.live_checker import Watch
from dedup.chaos.load import ANY_PARTITION, AT_LEAST_ONCE, Made, Sender, make_topic
from dedup.cli.broker import embedded_kafka
from dedup.cli.inputs import read_settings, read_topology, reading_bar, write_report
from dedup.embedded.child_process import DEDUP, Processes
from dedup.embedded.fault_proxy import FaultProxy
from dedup.embedded.flights import flights
from dedup.embedded.kafka_node import EmbeddedKafka
from dedup.errors import BrokerUnavailable, InvariantBroken, VerificationFailed
from dedup.settings import Settings
from dedup.topology.model import Topology
from dedup.verify.render import print_report, to_html
from dedup.verify.report import Report
from dedup.verify.verifier import verify

_WORKERS: Final = ("worker 1", "worker 2")
_KILLED_WORKER: Final = _WORKERS[0]
_RESTART_AFTER_S: Final = 1.0
_PARTITIONS: Final = 4
_POLL_EVERY_S: Final = 0.25
_STALLS_AFTER_S: Final = 60.0


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
            if time.monotonic() - moved_s > _STALLS_AFTER_S:
                raise InvariantBroken(
                    f"Nothing was judged for {_STALLS_AFTER_S:g} s, at {judged} of {in_topic} records."
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
                time.sleep(_RESTART_AFTER_S)
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
        make_topic(kafka.bootstrap, "flights", _PARTITIONS)
        listener = kafka.proxied
        proxy = stack.enter_context(FaultProxy(listener.broker_port, port=listener.proxy_port))
        settings = read_settings(_config_file(directory, kafka.bootstrap, 0))
        workers = stack.enter_context(_workers(directory, topology_file, kafka.bootstrap))
        workers.start(*_WORKERS)
        watch = stack.enter_context(Watch(settings, topology.name, "flights", _PARTITIONS))
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
