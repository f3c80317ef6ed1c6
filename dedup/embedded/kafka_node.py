"""Runs a real Apache Kafka node on this machine. The node is both broker and controller (KRaft)."""

from __future__ import annotations

import base64
import contextlib
import os
import random
import re
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final, Literal, Self

from dedup.embedded.child_process import ChildProcess
from dedup.embedded.java import find_java
from dedup.embedded.kafka_jars import Progress, cache_dir, install_jars
from dedup.errors import FULL_DISK, BrokerUnavailable, InvariantBroken, Problem, SettingsError

Profile = Literal["test", "bench"]
"""``test`` starts fastest. ``bench`` uses Kafka's default compiler and garbage collector."""

HOST: Final = "127.0.0.1"
_STARTED: Final = "Kafka Server started"
_STARTS_WITHIN_S: Final = 60.0
_STOPS_WITHIN_S: Final = 60.0  # on an idle machine: 0.5 s, or 4 s if Java writes its class archive
_CLEAN_EXITS: Final = frozenset({0, 143})
"""The exit codes of a Java process that has ended normally or after SIGTERM."""
_POLL_EVERY_S: Final = 0.02
_PORT_TRIES: Final = 3
_ESCAPED: Final = re.compile(r"[^ -~]|\\")
"""The characters that must be escaped in a properties file."""

_PROPERTIES: Final[Mapping[str, str]] = {
    "process.roles": "broker,controller",
    "controller.listener.names": "CONTROLLER",
    "inter.broker.listener.name": "CLIENT",
    "auto.create.topics.enable": "false",
    "group.initial.rebalance.delay.ms": "0",
    # With one node, internal topics have one replica. They have few partitions, because each partition slows down every
    # start.
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "4",
    # By default, the log cleaner's buffer takes 128 MB of heap from the start.
    "log.cleaner.dedupe.buffer.size": "16777216",
    "num.network.threads": "2",
    "num.io.threads": "4",
}
_PROFILE_PROPERTIES: Final[Mapping[Profile, Mapping[str, str]]] = {
    # After a SIGKILL, the node can register again only after its old session has ended. This takes 12 s by default and
    # 6 s with these values.
    "test": {"broker.session.timeout.ms": "3000", "broker.heartbeat.interval.ms": "500"},
    "bench": {},
}
_JVM_OPTIONS: Final[Mapping[Profile, tuple[str, ...]]] = {
    # With the options of `test`, the node starts 0.7 s faster than with the defaults.
    "test": ("-Xms256m", "-Xmx512m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"),
    # The options of `bench` are Kafka's default options, with a heap for 2 cores.
    "bench": ("-Xms1g", "-Xmx1g", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20"),
}
_LOGGER: Final = "-Dorg.slf4j.simpleLogger"
_LOGGING_OPTIONS: Final = (
    f"{_LOGGER}.defaultLogLevel=warn",
    f"{_LOGGER}.showDateTime=true",
    f"{_LOGGER}.dateTimeFormat=HH:mm:ss.SSS",
    # The logger `KafkaRaftServer` reports that the node is ready.
    f"{_LOGGER}.log.kafka.server.KafkaRaftServer=info",
    # The logger `ReplicationControlManager` reports that the node was fenced because it got no CPU time for too long.
    f"{_LOGGER}.log.org.apache.kafka.controller.ReplicationControlManager=info",
)


@dataclass(frozen=True, slots=True)
class ProxiedListener:
    """A listener on `broker_port` that advertises `proxy_port`, the port of a proxy in front of it."""

    proxy_port: int
    broker_port: int

    @property
    def bootstrap(self) -> str:
        """The address for clients that connect through the proxy."""
        return f"{HOST}:{self.proxy_port}"


class EmbeddedKafka:
    """A Kafka node in its own process, which ends when this process ends for any reason.

    The methods block and are not thread-safe. If `port` is 0, the node uses a free port. Without `data_dir`, the node
    keeps its data in a temporary directory, which `stop()` removes. `proxied` adds a listener for a fault proxy.
    `properties` override the default properties. Every method that starts the node raises BrokerUnavailable if the
    start fails, and SettingsError if the node cannot keep its data in the directory.
    """

    def __init__(
        self,
        *,
        data_dir: Path | None = None,
        port: int = 0,
        profile: Profile = "test",
        proxied: bool = False,
        properties: Mapping[str, str] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._given_port = port
        self._given_dir = data_dir
        self._profile: Profile = profile
        self._overrides = dict(properties or {})
        self._progress = progress
        self._has_proxy = proxied
        self._dir: Path | None = None
        self._ports: tuple[int, ...] = ()
        self.process: ChildProcess | None = None
        """The Java process, which callers may measure or freeze, or None before start() and after stop() or kill()."""
        self._classes: ClassArchive | None = None

    @property
    def bootstrap(self) -> str:
        """The ``host:port`` for clients.

        The address is known once the node has started, and stays the same after a restart.
        """
        return f"{HOST}:{self._port(0)}"

    @property
    def proxied(self) -> ProxiedListener:
        """The listener for a fault proxy. The proxy's port is free, so that the caller can bind it."""
        return ProxiedListener(self._port(2), self._port(3))

    @property
    def log_file(self) -> Path:
        """The node's log file, to which each start appends."""
        return self._directory() / "kafka.log"

    @property
    def running(self) -> bool:
        """True while the node runs or is paused."""
        return self.process is not None and self.process.running

    def start(self) -> Self:
        """Start the node, and wait until it responds to clients (2 s, or longer if jars must be downloaded)."""
        if self.running:
            raise InvariantBroken("this embedded Kafka is already running; call stop() or kill() first")
        self.kill()  # `kill` cleans up after a node that ended by itself
        java = find_java(os.environ)
        jars = install_jars(cache_dir(os.environ), self._progress)
        first_start = not self._ports
        try:
            self._dir = self._dir or self._given_dir or Path(tempfile.mkdtemp(prefix="dedup-kafka-"))
            self._start(java, jars, first_start=first_start)
        except BaseException as error:
            self.kill()
            # BrokerUnavailable names the log, so the temporary data are kept. After other exceptions, such as Ctrl-C,
            # they are deleted.
            if first_start and not isinstance(error, BrokerUnavailable):
                self._forget()
            raise
        return self

    def _start(self, java: Path, jars: Path, *, first_start: bool) -> None:
        tries = _PORT_TRIES if first_start else 1
        while True:
            if first_start:
                self._ports = self._free_ports()
            self._format(java, jars)
            process = self.process = self._launch(java, jars)
            if self._ready(process):
                return
            tries -= 1
            # Another process may have taken the free port before Kafka could bind it.
            if not tries or "Address already in use" not in process.log:
                code = process.exit_code
                how = f"did not start within {_STARTS_WITHIN_S:g} s" if code is None else f"ended with exit code {code}"
                raise BrokerUnavailable(
                    f"The embedded Kafka {how}. The end of {self.log_file}:\n{process.log_tail}\n"
                    f"Fix what it names (a taken port, a full disk, foreign files in the data directory) and try again."
                )

    def check(self) -> None:
        """Raise BrokerUnavailable, with the last lines of the node's log, if the node has exited."""
        if not self.running:
            tail = "" if self.process is None else self.process.log_tail
            raise BrokerUnavailable(
                f"The embedded Kafka ended unexpectedly. The end of {self.log_file}:\n{tail}\n"
                f"Fix what it names and start again."
            )

    def stop(self) -> None:
        """If the node is not stopped yet, shut it down cleanly, delete temporary data, and free the ports."""
        self._end(lambda process: process.stop(_STOPS_WITHIN_S))
        self._forget()

    def _forget(self) -> None:
        """Delete temporary data, and free the ports."""
        if self._given_dir is None and self._dir is not None:
            shutil.rmtree(self._dir, ignore_errors=True)
            self._dir, self._ports = None, ()

    def kill(self) -> None:
        """Kill the node with SIGKILL, but keep its data for restart()."""
        self._end(ChildProcess.kill)

    def restart(self) -> None:
        """Shut the node down if it is running, and start it again with the same addresses and data."""
        self._end(lambda process: process.stop(_STOPS_WITHIN_S))
        self.start()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _end(self, end: Callable[[ChildProcess], int]) -> None:
        if self.process is not None:
            exit_code, self.process = end(self.process), None
            if self._classes is not None:
                self._classes.keep(exit_code)

    def _directory(self) -> Path:
        if self._dir is None:
            raise InvariantBroken("this embedded Kafka was never started, or stop() removed its data")
        return self._dir

    def _port(self, at: int) -> int:
        if not self._ports:
            raise InvariantBroken("the ports of an embedded Kafka are unknown before its first start")
        return self._ports[at]

    def _free_ports(self) -> tuple[int, ...]:
        ports = free_ports(4 if self._has_proxy else 2)
        return (self._given_port, *ports[1:]) if self._given_port else ports

    def _format(self, java: Path, jars: Path) -> None:
        data = self._directory() / "data"
        if "," in str(data):
            text = "Kafka would take the comma for the end of this path; name a directory without a comma"
            raise SettingsError([Problem(str(data.parent), f"{text} (--data-dir or the variable TMPDIR)")])
        with _kept_in(data.parent):
            data.mkdir(parents=True, exist_ok=True)
            (data.parent / "server.properties").write_text(self._config(data), encoding="ascii")
            self.log_file.open("ab").close()
            if (data / "meta.properties").exists():
                return
        checkpoint = _bootstrap_checkpoint(java, jars)
        cluster, node = self._identity()
        identity = f"version=1\ncluster.id={cluster}\nnode.id={node}\ndirectory.id={new_id()}\n"
        with _kept_in(data.parent):
            (data / "bootstrap.checkpoint").write_bytes(checkpoint)
            # `meta.properties` is written last, because its existence means that the data directory is complete.
            (data / "meta.properties").write_text(identity, encoding="utf-8")

    def _identity(self) -> tuple[str, int]:
        return new_id(), 1

    def _config(self, data: Path) -> str:
        listeners = {"CLIENT": self._port(0), "CONTROLLER": self._port(1)}
        advertised = f"CLIENT://{self.bootstrap}"
        if self._has_proxy:
            listeners["PROXIED"] = self.proxied.broker_port
            advertised += f",PROXIED://{self.proxied.bootstrap}"
        properties = {
            **_PROPERTIES,
            **_PROFILE_PROPERTIES[self._profile],
            "node.id": "1",
            "controller.quorum.voters": f"1@{HOST}:{self._port(1)}",
            "listeners": ",".join(f"{name}://{HOST}:{port}" for name, port in listeners.items()),
            "advertised.listeners": advertised,
            "listener.security.protocol.map": ",".join(f"{name}:PLAINTEXT" for name in listeners),
            "log.dirs": str(data),
            **self._overrides,
        }
        return _written(properties)

    def _launch(self, java: Path, jars: Path) -> ChildProcess:
        self._classes = ClassArchive.of(java, jars)
        crash_log = f"-XX:ErrorFile={self._directory()}/crash.log"
        options = (*_JVM_OPTIONS[self._profile], *self._classes.options, *_LOGGING_OPTIONS, crash_log)
        command = [str(java), *options, "-cp", f"{jars}/*", "kafka.Kafka", f"{self._directory()}/server.properties"]
        return ChildProcess(command, self.log_file)

    def _ready(self, process: ChildProcess) -> bool:
        deadline = time.monotonic() + _STARTS_WITHIN_S
        while process.running and time.monotonic() < deadline:
            if _STARTED in process.log:
                return True
            time.sleep(_POLL_EVERY_S)
        return False


@dataclass(frozen=True, slots=True)
class ClassArchive:
    """An archive of Kafka's parsed and verified classes (JEP 350) that makes a node start twice as fast.

    Java writes the archive when a user's first node shuts down cleanly, which delays the shutdown by about 4 s. An
    archive is valid only for one Java version and one set of jars.
    """

    file: Path
    made: Path | None
    """The path to which this node's Java writes an archive at exit, or None if an archive already exists."""

    @classmethod
    def of(cls, java: Path, jars: Path) -> Self:
        """Return the class archive for a Java executable and a directory of jars. The archive may not exist yet."""
        # Java rejects an archive if the Java version or a jar has changed.
        digest, release = blake2b(digest_size=8), java.resolve().parents[1] / "release"
        digest.update(release.read_bytes() if release.is_file() else str(java.resolve()).encode())
        for jar in sorted(jars.glob("*.jar")):
            stat = jar.stat()
            digest.update(f"{jar} {stat.st_size} {stat.st_mtime_ns}\n".encode())
        file = jars.parent / f"{jars.name}-classes-{digest.hexdigest()}.jsa"
        return cls(file, None if file.is_file() else file.with_name(f"{file.name}.{os.getpid()}-{os.urandom(4).hex()}"))

    @property
    def options(self) -> tuple[str, ...]:
        """The command-line options that make Java use or create the class archive."""
        silent = "-Xlog:cds=off,cds+dynamic=off"
        if self.made is None:
            return (f"-XX:SharedArchiveFile={self.file}", silent)
        return (f"-XX:ArchiveClassesAtExit={self.made}", silent)

    def keep(self, exit_code: int) -> None:
        """Publish the class archive that the node has written, or delete it if the node was killed."""
        # Java writes no archive into a read-only cache, in which even deleting a missing file is an error.
        if self.made is None or not self.made.is_file():
            return
        if exit_code in _CLEAN_EXITS:
            # Two nodes may publish an archive at the same time. The rename ensures that the archive is always complete.
            self.made.replace(self.file)
        else:
            self.made.unlink(missing_ok=True)


def free_ports(count: int) -> tuple[int, ...]:
    """Return ports on which no process listens, below the range that the system assigns to outgoing connections.

    If the broker's port were in the range for outgoing connections, a client could connect to itself while the broker
    is stopped, which would prevent a restart of the broker.
    """
    ports: set[int] = set()
    while len(ports) < count:
        port = random.randrange(20_000, 32_000)  # noqa: S311  no secret
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
        ports.add(port)
    return tuple(ports)


def _written(properties: Mapping[str, str]) -> str:
    """Return the text of a properties file. Java reads the file as Latin-1, with escapes for other characters."""
    return "".join(f"{_ESCAPED.sub(_escape, f'{key}={value}')}\n" for key, value in properties.items())


def _escape(character: re.Match[str]) -> str:
    units = character[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


@contextlib.contextmanager
def _kept_in(directory: Path) -> Iterator[None]:
    """Raise SettingsError if a file of the node's directory cannot be written, unless a disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL_DISK:
            raise
        text = f"Kafka cannot keep its data here: {error.strerror}: {error.filename}; name a directory that you can"
        raise SettingsError([Problem(str(directory), f"{text} write to")]) from error


def _bootstrap_checkpoint(java: Path, jars: Path) -> bytes:
    """Return the content of the file in which Kafka stores the feature levels of a new cluster.

    Kafka's tool writes the file for a user's first node. If ``jars`` is read-only, like a cache that several users
    share, the tool writes the file for every new data directory.
    """
    kept = jars / "bootstrap.checkpoint"
    if kept.exists():
        return kept.read_bytes()
    is_writable = os.access(jars, os.W_OK)
    with tempfile.TemporaryDirectory(dir=jars if is_writable else None) as temporary:
        config = Path(temporary) / "server.properties"
        properties = {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.listener.names": "CONTROLLER",
            "controller.quorum.voters": f"1@{HOST}:9093",
            "listeners": f"PLAINTEXT://{HOST}:9092,CONTROLLER://{HOST}:9093",
            "log.dirs": f"{temporary}/data",
        }
        config.write_text(_written(properties), encoding="ascii")
        tool = [str(java), "-cp", f"{jars}/*", "kafka.tools.StorageTool"]
        command = [*tool, "format", "-t", new_id(), "-c", str(config)]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode != 0:
            raise BrokerUnavailable(
                f"Kafka's storage tool failed with exit code {made.returncode}: {made.stderr.strip()[-500:]}. "
                f"Delete {jars} and try again."
            )
        file = Path(temporary) / "data" / "bootstrap.checkpoint"
        checkpoint = file.read_bytes()
        if is_writable:
            # Two processes may create the file at the same time. The rename ensures that the file is always complete.
            file.replace(kept)
    return checkpoint


def new_id() -> str:
    """Return a new cluster ID or directory ID in Kafka's format (16 bytes in URL-safe base64)."""
    # Kafka's tools would parse an ID that starts with a dash as an option.
    while True:
        text = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        if not text.startswith("-"):
            return text
