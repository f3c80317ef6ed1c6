"""Workers as real processes on a real broker, what they are fed with, and who judges the outcome.

Everything waits for conditions at the broker or in a process; the only pauses are those between two looks. Judged twice:
by the verifier, which replays the exact model, and by a count that knows nothing of it (`Expected`).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import IO, Any, cast

from confluent_kafka import Consumer, KafkaException, Message, Producer, TopicPartition

from dedup.settings import Settings, load_settings
from dedup.topology.model import Topology
from dedup.topology.parse import parse
from dedup.verify.report import Report
from dedup.verify.verifier import verify
from dedup.yaml_document import beside
from tests.brokers import Admin, RunningKafka, producer_of, read_all
from tests.integration.preloaded import Preloaded, clean_environ
from tests.integration.transactions import until_ended
from tests.integration.workload import Event, Expected, assert_order_kept, id_of
from tests.waiting import WITHIN_S, LoggedProcess, until

__all__ = ["CHILD", "DELIVERED_WITHIN_S", "KEPT", "SESSION_S", "WITHIN_S", "Job", "Worker", "until"]

CHILD = Path(__file__).with_name("child.py")
DELIVERED_WITHIN_S = 2 * WITHIN_S
"""How long a producer of a test has: its broker may be frozen for as long as a condition may take."""
SESSION_S = 6.0
"""The least a broker takes by default."""
KEPT = {"retention.ms": "-1"}
"""The workload's event times are in 2023: a broker would delete such records whenever it looks."""


class Worker(LoggedProcess):
    """One `dedup run`."""

    def __init__(
        self,
        job: Job,
        worker_id: str,
        command: list[str],
        log_file: Path,
        *,
        preloaded: Mapping[str, str] | None = None,
    ) -> None:
        """With ``preloaded``, the command is what `child.py` gets, and this is its environment; see `Preloaded`."""
        self.id = worker_id
        self.state_dir = job.state_dir(worker_id)
        self._preloaded = preloaded
        super().__init__(command, log_file)

    def _start_watchdog(
        self, command: Sequence[str], directory: Path | None, log: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        if self._preloaded is None:
            return super()._start_watchdog(command, directory, log)
        started = Preloaded.of_this_process().start(command, self._preloaded, directory, log)
        return cast("subprocess.Popen[bytes]", started)

    @property
    def frozen(self) -> bool:
        """Whether it was stopped by SIGSTOP."""
        return Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "T"

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


@dataclass
class Job:
    """One topology on the broker, with its files and its workers."""

    kafka: RunningKafka
    admin: Admin
    directory: Path
    name: str
    partitions: int = 2
    document: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    source_config: dict[str, str] = field(default_factory=dict)
    output_config: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    """Files beside the topology file, by their names."""
    workers: list[Worker] = field(default_factory=list)
    sent: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.directory.mkdir(exist_ok=True)
        base: dict[str, Any] = {
            "dedup": 1,
            "name": self.name,
            "source": {"topics": [f"{self.name}-in"], "partitioned_by": "tracking_id"},
            "tracking_id": {"field": "id"},
            "guard_period": "1d",
            "output": {"topic": f"{self.name}-out"},
        }
        text = json.dumps({key: value for key, value in (base | self.document).items() if value is not None})
        self.topology_file.write_text(text, encoding="utf-8")
        for name, content in self.files.items():
            (self.directory / name).write_text(content, encoding="utf-8")
        self.topology: Topology = parse(text, name=str(self.topology_file), read_file=beside(self.topology_file))
        settings: dict[str, Any] = {
            "brokers": [self.kafka.bootstrap],
            "state_dir": str(self.directory / "state"),
            "commit_interval": "50ms",
            "session_timeout": f"{SESSION_S:.0f}s",
            "web": {"enabled": False},
        }
        self.config_file.write_text(json.dumps(settings | self.config), encoding="utf-8")
        self.producer = producer_of(self.kafka.bootstrap)
        self.settings: Settings = load_settings(self.config_file, [], {})
        # Not the admin client: it ends the process with SIGSEGV when a coordinator is loading (librdkafka issue 5040).
        # Read uncommitted, or it would wait while a transaction holds new offsets.
        isolation = {"isolation.level": "read_uncommitted", "log_level": 0}
        # A coordinator that is frozen is given up soon: another one takes its place.
        patience = {"socket.timeout.ms": 5_000}
        self._group = Consumer(
            {"bootstrap.servers": self.kafka.bootstrap, "group.id": self.name, **isolation, **patience}
        )
        for topic in self.topology.source.topics:
            self.admin.create_topic(topic, self.partitions, KEPT | self.source_config)
        if self.topology.output is not None:
            self.admin.create_topic(self.topology.output.topic, self.partitions, KEPT | self.output_config)

    @property
    def topology_file(self) -> Path:
        """The topology file."""
        return self.directory / f"{self.name}.yaml"

    @property
    def config_file(self) -> Path:
        """The config file."""
        return self.directory / "config.yaml"

    @property
    def output(self) -> str:
        """The output topic's name."""
        assert self.topology.output is not None
        return self.topology.output.topic

    def state_dir(self, worker_id: str) -> Path:
        """Where a worker keeps its state."""
        return self.directory / f"state-{worker_id}"

    # Feeding.

    def send(
        self, events: Sequence[Event], *, transactional_id: str | None = None, commit: bool | None = True
    ) -> Producer:
        """The events are in the source topics, in order; in a transaction if one is named, ended as ``commit`` says.

        With ``commit=None`` the transaction stays open.
        """
        if transactional_id is None:
            producer = self.producer
        else:
            producer = Producer({"bootstrap.servers": self.kafka.bootstrap, "transactional.id": transactional_id})
            producer.init_transactions(30)
            producer.begin_transaction()
        self._produce(producer, events)
        if transactional_id is None or commit:
            self.sent.extend(events)
        if transactional_id is not None and commit is not None:
            (producer.commit_transaction if commit else producer.abort_transaction)(30)
        return producer

    def send_until_stamped(self, kind: int, events: Iterable[Event]) -> int:
        """Send one event at a time until the broker gives one this kind of time; return how many had another before.

        A broker changes a topic's kind of time some time after it has told everybody of the change.
        """
        for before, event in enumerate(events):
            self.send([event])
            if self.read(self.topology.source.topics[event.topic])[-1].timestamp()[0] == kind:
                return before
        raise AssertionError("no event got that kind of time")

    def _produce(self, producer: Producer, events: Sequence[Event], within_s: float = DELIVERED_WITHIN_S) -> None:
        refused: list[object] = []
        topics = self.topology.source.topics
        for number, event in enumerate(events):
            producer.produce(
                topics[event.topic],
                event.value,
                event.key,
                partition=event.partition,
                timestamp=event.timestamp_ms,
                headers=list(event.headers),
                on_delivery=lambda error, _: refused.append(error) if error else None,
            )
            if number % 5_000 == 4_999:
                producer.flush(within_s)
        assert producer.flush(within_s) == 0
        assert refused == []

    @contextlib.contextmanager
    def stream(
        self, events: Iterable[Event], *, per_s: int, delivered_within_s: float = DELIVERED_WITHIN_S
    ) -> Iterator[threading.Thread]:
        """A thread sends the events at about this rate until the block ends; then raises what it has met."""
        left, size = iter(events), max(1, per_s // 20)
        ended = threading.Event()
        met: list[BaseException] = []

        def feed() -> None:
            began = time.monotonic()
            try:
                for number in count():
                    piece = list(islice(left, size))
                    if not piece or ended.wait(max(0.0, began + number / 20 - time.monotonic())):
                        return
                    self._produce(self.producer, piece, delivered_within_s)
                    self.sent.extend(piece)
            except BaseException as error:  # noqa: BLE001  # raised where the block ends
                met.append(error)

        thread = threading.Thread(target=feed, name="feeder", daemon=True)
        thread.start()
        try:
            yield thread
        finally:
            ended.set()
            thread.join()
        if met:
            raise met[0]

    def grow(self, partitions: int) -> None:
        """The source topic has so many partitions from now on, and all of them have a leader."""
        (topic,) = self.topology.source.topics
        self.admin.add_partitions(topic, partitions)
        self.partitions = partitions
        # The producer, which all tests share, learns of them at once.
        until(
            lambda: len(self.producer.list_topics(topic, 30).topics[topic].partitions) == partitions, "they are known"
        )

    # Workers.

    def start(
        self,
        worker_id: str = "a",
        *accidents: str,
        crash_at: str | None = None,
        exit_when_done: bool = False,
        environ: Mapping[str, str] | None = None,
        settings: Sequence[str] = (),
        state_of: str | None = None,
        supervised: int = 1,
        command: tuple[str, ...] = ("run",),
        options: Sequence[str] = (),
    ) -> Worker:
        """Start a worker, or another command; ``state_of`` names a worker whose state directory it shall use.

        ``supervised`` > 1 starts a supervisor of so many: end it by SIGTERM, or its workers outlive it.
        """
        variables = clean_environ() | dict(environ or {}) | ({"DEDUP_CRASH_AT": crash_at} if crash_at else {})
        verb, *arguments = command
        line = [*accidents, "--", verb, str(self.topology_file), *arguments, *options]
        line += ["--quiet"] if verb == "run" else []
        line += ["--config", str(self.config_file), "--set", f"state_dir={self.state_dir(state_of or worker_id)}"]
        for setting in (f"worker_id={worker_id}", *settings):
            line += ["--set", setting]
        if supervised > 1:
            line += ["--workers", str(supervised)]
        if exit_when_done:
            line.append("--exit-when-done")
        log_file = self.directory / f"{worker_id}.log"
        if supervised == 1 and CHILD.name == "child.py":
            worker = Worker(self, worker_id, line, log_file, preloaded=variables)
        else:  # a supervisor starts its workers as new programs
            program = ["env", "-i", *(f"{name}={value}" for name, value in variables.items()), sys.executable]
            worker = Worker(self, worker_id, [*program, str(CHILD), *line], log_file)
        self.workers.append(worker)
        return worker

    def finish(self, worker_id: str = "a", *accidents: str, **options: Any) -> Worker:
        """A worker does all that is there, and exits with 0."""
        worker = self.start(worker_id, *accidents, exit_when_done=True, **options)
        assert worker.wait() == 0, worker.log
        return worker

    def refused(self, worker_id: str = "a", *, code: int, says: str) -> Worker:
        """A worker is started and ends by itself with this code, saying this; nothing is written meanwhile."""
        before = self.written()
        worker = self.start(worker_id)
        assert worker.wait() == code, worker.log
        assert says in worker.log, worker.log
        assert self.written() == before
        return worker

    def written(self) -> dict[str, dict[int, int]]:
        """Return the ends of all topics that tasks write, but for those that do not exist."""
        until_ended(self)
        known = self.admin.client.list_topics(timeout=30).topics
        wanted = [topic for topic in self.topology.written_topics if topic in known]
        return {topic: self.admin.end_offsets(topic) for topic in wanted}

    def end(self) -> None:
        """No worker runs any more."""
        for worker in self.workers:
            worker.kill()
        self._group.close()

    # Looking.

    def committed(self, topic: str | None = None) -> dict[int, int]:
        """Return the group's offsets of a feeding topic, 0 where there is none."""
        topic = topic or self.topology.feeding_topics[0]
        places = [TopicPartition(topic, partition) for partition in range(self.partitions)]
        found: list[TopicPartition] = []

        def told() -> bool:
            # The coordinator moves, or is loading: another look tells.
            with contextlib.suppress(KafkaException):
                found[:] = self._group.committed(places, timeout=30)
            return bool(found)

        until(told, f"the offsets of group {self.name} are told")
        return {place.partition: max(0, place.offset) for place in found}

    def until_done(self, *, within_s: float = WITHIN_S) -> None:
        """The group has committed everything sent to the source topics."""
        until(self.all_committed, lambda: f"{self.name}: all committed; logs:\n{self.logs()}", within_s=within_s)
        if not self.topology.direct:
            until(
                self._second_hop_done, lambda: f"{self.name}: the second hop; logs:\n{self.logs()}", within_s=within_s
            )

    def all_committed(self) -> bool:
        """Tell whether the group's offsets are at the end of what was sent."""
        ends = Counter((event.topic, event.partition) for event in self.sent)
        for number, topic in enumerate(self.topology.source.topics):
            committed = self.committed(topic)
            if any(committed[p] < ends[number, p] for p in committed):
                return False
        return True

    def _second_hop_done(self) -> bool:
        topic = self.topology.repartition_topic
        # Ends count the marker of the last transaction; a committed offset can not.
        last = self.last_offsets(topic)
        committed = self.committed(topic)
        return all(committed[p] > last.get(p, -1) for p in committed)

    def last_offsets(self, topic: str) -> dict[int, int]:
        """Return the offset of each partition's last committed record."""
        return {message.partition() or 0: message.offset() or 0 for message in self.read(topic)}

    def until_sent(self, records: int, *, within_s: float = WITHIN_S) -> None:
        """A stream has sent this many records, counted from the beginning."""
        until(lambda: len(self.sent) >= records, f"{records} records are sent", within_s=within_s)

    def until_progress(self, records: int) -> None:
        """At least this many more records were committed than before."""
        begin = sum(self.committed().values())
        until(lambda: self._committed_or_ended() >= begin + records, lambda: f"progress; logs:\n{self.logs()}")

    def _committed_or_ended(self) -> int:
        """Count what the group has committed; raises AssertionError when no worker is left that could commit more."""
        some = any(worker.running for worker in self.workers)
        found = sum(self.committed().values())
        assert some or not self.workers, self.logs()
        return found

    def read(self, topic: str) -> list[Message]:
        """Return what a committed reader finds in a topic, up to its end."""
        return read_all(self.kafka.bootstrap, topic)

    def logs(self) -> str:
        """Return the last lines of every worker's log."""
        return "\n".join(f"--- {w.id} (running: {w.running})\n{w.log[-3000:]}" for w in self.workers[-4:])

    # Judging.

    def judge(self, *, refused_ids: frozenset[str] = frozenset()) -> Report:
        """Everything sent ended exactly once, by the model and by counting; ``refused_ids`` as dead letters."""
        report = verify(self.topology, self.settings)
        assert report.passed, (report.closing_line(), report.samples[:10])
        # That the broker refused a record is what the dead letter says; the log can not prove it.
        assert sum(report.not_provable.values()) == len(refused_ids), report.not_provable
        assert all(books.balanced for books in report.books)
        expected = Expected.of(self.sent)
        assert report.read >= expected.total
        output = self.read(self.output)
        found = Counter(id_of(message.value()) for message in output)
        assert [each for each, times in found.items() if times > 1] == []
        assert set(found) == expected.ids - refused_ids
        bad = expected.bad
        if report.read > expected.total:  # a producer that met a dead broker has sent some records again
            bad = sum(
                id_of(message.value()) is None for topic in self.topology.source.topics for message in self.read(topic)
            )
        assert bad >= expected.bad
        assert len(self.read(self.topology.dead_letter)) == bad + len(refused_ids)
        assert_order_kept(output)
        return report
