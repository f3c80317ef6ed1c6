"""Sources, sinks and what is found at both ends, for the tests of the edges."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import psycopg
from confluent_kafka import Message, Producer

from dedup.connect.sink_connector import Sunk, run_sink, spec_of
from dedup.connect.source_connector import Ingested, open_source, run_ingest
from dedup.settings import Settings, load_settings, with_references
from dedup.topology.ingest_file import Ingest, parse_ingest
from dedup.topology.model import Topology
from dedup.topology.parse import parse
from dedup.topology.schema import TableSource
from tests.brokers import Admin, RunningKafka, read_all
from tests.waiting import LoggedProcess

DEDUP = (sys.executable, "-c", "from dedup.cli.main import main; main()")


@dataclass
class Stage:
    """Names, files and processes of one test."""

    kafka: RunningKafka
    admin: Admin
    directory: Path
    name: str
    processes: list[LoggedProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.incoming = self.directory / "incoming"
        self.incoming.mkdir(parents=True)
        self.config = self.directory / "config.yaml"
        self.write_config(self.kafka.bootstrap)
        self.settings: Settings = load_settings(self.config, [], {})

    def write_config(self, bootstrap: str) -> None:
        text = {"brokers": [bootstrap], "commit_interval": "50ms", "state_dir": str(self.directory / "state")}
        self.config.write_text(json.dumps(text | {"web": {"enabled": False}}), encoding="utf-8")

    # Topics.

    @property
    def topic(self) -> str:
        return f"{self.name}.in"

    def read(self, topic: str | None = None) -> list[Message]:
        return read_all(self.kafka.bootstrap, topic or self.topic)

    def values(self, topic: str | None = None) -> list[Any]:
        return [json.loads(message.value()) for message in self.read(topic)]

    def letters(self, topic: str | None = None) -> list[dict[str, str]]:
        """Return the headers of the dead letters."""
        found = self.read(topic or f"{self.name}.dead-letter")
        return [{name: value.decode() for name, value in message.headers() or ()} for message in found]

    def producer(self) -> Producer:
        """Return a producer for `send`; who sends often makes one only, as each asks the broker for an id first."""
        return Producer({"bootstrap.servers": self.kafka.bootstrap, "enable.idempotence": True})

    def send(
        self,
        records: Sequence[tuple[bytes | None, bytes | None, int]],
        partition: int | None = None,
        producer: Producer | None = None,
    ) -> None:
        """Records (key, value, timestamp) are in the topic."""
        producer = producer or self.producer()
        for key, value, timestamp_ms in records:
            place = {} if partition is None else {"partition": partition}
            producer.produce(self.topic, value, key, timestamp=timestamp_ms, **place)
        assert producer.flush(30) == 0

    # Ingest.

    def ingest_text(self, source: str, more: str = "tracking_id: {field: id}", partitions: int = 2) -> str:
        return (
            f"ingest: 1\nname: {self.name}\nsource:\n  {source}\n"
            f"output: {{topic: {self.topic}, partitions: {partitions}}}\n{more}\n"
        )

    def files(self, *options: str) -> str:
        return f"files: {{{', '.join([f'directory: {self.incoming}', *options])}}}"

    def ingest_file(self, *args: Any, **options: Any) -> Path:
        path = self.directory / "ingest.yaml"
        path.write_text(self.ingest_text(*args, **options), encoding="utf-8")
        return path

    async def ingest(self, source: str | None = None, more: str = "tracking_id: {field: id}") -> Ingested:
        """All that is there was sent, by this process."""
        parsed = parse_ingest(self.ingest_text(source or self.files(), more), name="ingest.yaml")
        done = await run_ingest(parsed, self.settings, maker(parsed), exit_when_done=True)
        self.admin.until_visible(self.name)
        return done

    # Sink.

    def topology_text(self, url: str, sink: str, more: str = "") -> str:
        return (
            f"dedup: 1\nname: {self.name}\nsource: {{topics: [{self.name}.source], partitioned_by: tracking_id}}\n"
            f"tracking_id: {{field: id, tombstones: dead_letter}}\nguard_period: 1h\n{more}\n"
            f'sink:\n  url: "{url}"\n  table: rows\n  topic: {self.topic}\n{sink}\n'
        )

    def topology(self, *args: Any) -> Topology:
        return parse(self.topology_text(*args), name="sink.yaml")

    async def sink(self, topology: Topology, **options: Any) -> Sunk:
        """All that is in the topic is in the table, by this process."""
        spec = spec_of(topology, "sink.yaml")
        done = await run_sink(topology, spec, self.settings, exit_when_done=True, **options)
        self.admin.until_visible(self.name)
        return done

    # Processes.

    def start(self, *arguments: str, log: str = "run", environ: dict[str, str] | None = None) -> LoggedProcess:
        """A `dedup` of its own, that can not outlive the test run."""
        unset = [part for name in os.environ if name.startswith("DEDUP_") for part in ("-u", name)]
        given = [f"{name}={value}" for name, value in (environ or {}).items()]
        command = ["env", *unset, *given, *DEDUP, *arguments, "--config", str(self.config)]
        process = LoggedProcess(command, self.directory / f"{log}.log")
        self.processes.append(process)
        return process

    def end(self) -> None:
        for process in self.processes:
            process.kill()


def maker(parsed: Ingest) -> Any:
    """Return what makes the source of a parsed file."""
    url = parsed.source.url if isinstance(parsed.source, TableSource) else ""
    return partial(open_source, url=with_references(url, "ingest.yaml", os.environ))


def lines(first: int, count: int) -> bytes:
    """Return JSON lines with ids ``first`` and on."""
    return b"".join(b'{"id":"e%d","n":%d}\n' % (number, number) for number in range(first, first + count))


def sqlite_rows(path: Path, sql: str = "SELECT * FROM rows ORDER BY tracking_id") -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return connection.execute(sql).fetchall()


def postgres_rows(url: str, sql: str = "SELECT * FROM rows ORDER BY tracking_id") -> list[tuple[Any, ...]]:
    with psycopg.connect(url) as connection:
        return connection.execute(sql.encode()).fetchall()


def made(rows: Callable[[str], object]) -> bool:
    """Tell whether the table is there yet: a process may be killed before it has made it."""
    try:
        rows("SELECT 1 FROM rows LIMIT 1")
    except (sqlite3.OperationalError, psycopg.errors.UndefinedTable):
        return False
    return True


class FileFeeder:
    """A process appends lines with ids 0, 1, ... to a file at about this rate, not always whole lines at once.

    Every ``a_life`` lines it waits for `more`: so that no kill finds its victim idle.
    """

    def __init__(self, path: Path, lines_in_all: int, per_s: int, a_life: int) -> None:
        arguments = [str(path), str(lines_in_all), str(per_s), str(a_life)]
        self._process = subprocess.Popen([sys.executable, "-c", self.CODE, *arguments], stdin=subprocess.PIPE)

    CODE = (
        "import sys, time\n"
        "path, count, per_s, a_life = sys.argv[1], *map(int, sys.argv[2:])\n"
        "with open(path, 'ab', buffering=0) as file:\n"
        "    text = b''\n"
        "    for number in range(count):\n"
        "        if number % a_life == 0:\n"
        "            sys.stdin.readline() or sys.exit(1); began = time.monotonic() - number / per_s\n"
        '        text += b\'{"id":"e%d","n":%d}\\n\' % (number, number)\n'
        "        if number % 50 == 49:\n"
        "            file.write(text[:-7]); text = text[-7:]\n"
        "            time.sleep(max(0, began + number / per_s - time.monotonic()))\n"
        "    file.write(text)\n"
    )

    def more(self) -> None:
        """The lines of another life come."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has written all
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()

    def wait(self) -> int:
        """Return the exit code, when all is written."""
        return self._process.wait()

    def __enter__(self) -> Self:
        self.more()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
