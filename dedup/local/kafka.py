"""A real Apache Kafka on this machine: one KRaft node, broker and controller in one process."""

from __future__ import annotations

import base64
import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self, assert_never

from dedup.errors import BrokerUnavailable, InvariantBroken
from dedup.local.class_archive import ClassArchive
from dedup.local.jars import Progress, cache_dir, install_jars
from dedup.local.java import find_java
from dedup.local.leashed import Leashed

Profile = Literal["test", "bench"]
"""test: starts soonest. bench: Kafka's own choice of compiler and collector."""

HOST: Final = "127.0.0.1"
_STARTED: Final = "Kafka Server started"
_STARTS_WITHIN_S: Final = 60.0
_STOPS_WITHIN_S: Final = 60.0  # half a second; 4 s where Java writes its classes, on a machine with nothing else to do
_LOOK_EVERY_S: Final = 0.02
_PORT_TRIES: Final = 3

_PROPERTIES: Final[Mapping[str, str]] = {
    "process.roles": "broker,controller",
    "controller.listener.names": "CONTROLLER",
    "inter.broker.listener.name": "CLIENT",
    "auto.create.topics.enable": "false",
    "group.initial.rebalance.delay.ms": "0",
    # One node: its internal topics can have one replica only. Few partitions, as each costs time at every start.
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "4",
    # The default buffer is 128 MB of heap, taken at the start.
    "log.cleaner.dedupe.buffer.size": "16777216",
    "num.network.threads": "2",
    "num.io.threads": "4",
}


@dataclass(frozen=True, slots=True)
class ProxiedListener:
    """A listener whose clients are told to connect to `proxy_port`; a proxy there forwards to `broker_port`."""

    proxy_port: int
    broker_port: int

    @property
    def bootstrap(self) -> str:
        """Return the address for clients that are to go through the proxy."""
        return f"{HOST}:{self.proxy_port}"


@dataclass(frozen=True, slots=True)
class Seat:
    """A node's place in a cluster of several (see cluster.py): all of it is decided before the first one starts."""

    node_id: int
    cluster_id: str
    client_port: int
    controller_port: int
    voters: str
    """Kafka's `controller.quorum.voters`."""


class EmbeddedKafka:
    """One Kafka node in a process of its own, which ends when this process does, however this process ends.

    Blocking; not for use from two threads at once. `port` 0 takes a free one. Without `data_dir` the data live in a
    temporary directory and `stop()` removes them. `proxied` adds that many listeners for fault proxies. Without a
    `seat` it is a cluster of its own.
    Every method raises BrokerUnavailable when Java, the jars or the node are not to be had.
    """

    def __init__(
        self,
        *,
        data_dir: Path | None = None,
        port: int = 0,
        profile: Profile = "test",
        proxied: int = 0,
        properties: Mapping[str, str] | None = None,
        progress: Progress | None = None,
        seat: Seat | None = None,
    ) -> None:
        self._given_port = port
        self._seat = seat
        self._given_dir = data_dir
        self._profile: Profile = profile
        self._overrides = dict(properties or {})
        self._progress = progress
        self._proxied_wanted = proxied
        self._dir: Path | None = None
        self._ports: tuple[int, ...] = ()
        self._process: Leashed | None = None
        self._classes: ClassArchive | None = None

    @property
    def bootstrap(self) -> str:
        """Return ``host:port`` for clients; known once started, the same after a restart."""
        return f"{HOST}:{self._port(0)}"

    @property
    def proxied(self) -> tuple[ProxiedListener, ...]:
        """Return the listeners for fault proxies; the proxies' ports are free for the caller to bind."""
        pairs = self._ports[2:]
        return tuple(ProxiedListener(pairs[at], pairs[at + 1]) for at in range(0, len(pairs), 2))

    @property
    def log_file(self) -> Path:
        """Return the file that holds what the node logs, over all its starts."""
        return self._directory() / "kafka.log"

    @property
    def running(self) -> bool:
        """Return whether the process runs (also while paused)."""
        return self._process is not None and self._process.running

    @property
    def process(self) -> Leashed | None:
        """Return the Java process of the last start, for those who measure it; None before and after it was ended."""
        return self._process

    def start(self) -> Self:
        """The node answers clients; takes some 2 s, and once a user some seconds more for the jars."""
        if self.running:
            raise InvariantBroken("this embedded Kafka runs already; call stop() or kill() first")
        self.kill()  # tidies up after one that died by itself
        java = find_java(os.environ)
        jars = install_jars(cache_dir(os.environ), self._progress)
        self._dir = self._dir or self._given_dir or Path(tempfile.mkdtemp(prefix="dedup-kafka-"))
        first_start = not self._ports
        for attempt in range(1, _PORT_TRIES + 1):
            if first_start:
                self._ports = self._free_ports()
            self._format(java.path, jars)
            log_from = self.log_file.stat().st_size if self.log_file.exists() else 0
            self._launch(java.path, jars)
            if self._ready(log_from):
                return self
            # Between choosing a port and binding it another process can take it.
            if not (first_start and attempt < _PORT_TRIES and "Address already in use" in self._log_since(log_from)):
                raise self._did_not_start(log_from)
        raise InvariantBroken("unreachable: the last attempt returns or raises")

    def check(self) -> None:
        """The node runs. Raises BrokerUnavailable with the end of its log when it died."""
        if not self.running:
            raise BrokerUnavailable(
                f"The embedded Kafka ended by itself. The end of {self.log_file}:\n{self._log_tail(0)}\n"
                f"Correct what it names and start again."
            )

    def stop(self) -> None:
        """The node has shut down in good order and released its ports; temporary data are gone. Idempotent."""
        self._shut_down()
        if self._given_dir is None and self._dir is not None:
            shutil.rmtree(self._dir, ignore_errors=True)
            self._dir, self._ports = None, ()

    def kill(self) -> None:
        """The node was killed by SIGKILL; its data stay for restart()."""
        if self._process is not None:
            self._ended(self._process.kill())

    def restart(self) -> None:
        """The node answers again at the same addresses with the same data; shut down before if it ran."""
        self._shut_down()
        self.start()

    def pause(self) -> None:
        """The process is frozen (SIGSTOP): connections stay open and nothing answers."""
        self._running_process().pause()

    def resume(self) -> None:
        """The process goes on (SIGCONT)."""
        self._running_process().resume()

    def __enter__(self) -> Self:
        """Start the node."""
        return self.start()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop the node."""
        self.stop()

    def _shut_down(self) -> None:
        if self._process is not None:
            self._ended(self._process.stop(_STOPS_WITHIN_S))

    def _ended(self, exit_code: int) -> None:
        self._process = None
        if self._classes is not None:
            self._classes.keep(exit_code)

    def _directory(self) -> Path:
        if self._dir is None:
            raise InvariantBroken("this embedded Kafka was never started, or stop() removed its data")
        return self._dir

    def _port(self, at: int) -> int:
        if not self._ports:
            raise InvariantBroken("the ports of an embedded Kafka are known once it was started")
        return self._ports[at]

    def _free_ports(self) -> tuple[int, ...]:
        wanted = 2 + 2 * self._proxied_wanted
        ports = free_ports(wanted)
        if self._seat is not None:
            return (self._seat.client_port, self._seat.controller_port, *ports[2:])
        return (self._given_port, *ports[1:]) if self._given_port else ports

    def _format(self, java: Path, jars: Path) -> None:
        """The data directory is one Kafka accepts: new ones get an identity and the features of this version."""
        data = self._directory() / "data"
        self._config_file().parent.mkdir(parents=True, exist_ok=True)
        self._config_file().write_text(self._config(data), encoding="utf-8")
        if (data / "meta.properties").exists():
            return
        data.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(_bootstrap_checkpoint(java, jars), data / "bootstrap.checkpoint")
        cluster, node = (new_id(), 1) if self._seat is None else (self._seat.cluster_id, self._seat.node_id)
        identity = f"version=1\ncluster.id={cluster}\nnode.id={node}\ndirectory.id={new_id()}\n"
        # Last, as its presence says that the directory is whole.
        (data / "meta.properties").write_text(identity, encoding="utf-8")

    def _config_file(self) -> Path:
        return self._directory() / "server.properties"

    def _config(self, data: Path) -> str:
        client, controller = self._port(0), self._port(1)
        names = [f"PROXIED{at}" for at in range(len(self.proxied))]
        all_names = ("CLIENT", "CONTROLLER", *names)
        bound = [f"{name}://{HOST}:{pair.broker_port}" for name, pair in zip(names, self.proxied, strict=True)]
        told = [f"{name}://{pair.bootstrap}" for name, pair in zip(names, self.proxied, strict=True)]
        properties = {
            **_PROPERTIES,
            **_profile_properties(self._profile),
            **self._quorum(controller),
            "listeners": ",".join([f"CLIENT://{HOST}:{client}", f"CONTROLLER://{HOST}:{controller}", *bound]),
            "advertised.listeners": ",".join([f"CLIENT://{HOST}:{client}", *told]),
            "listener.security.protocol.map": ",".join(f"{name}:PLAINTEXT" for name in all_names),
            "log.dirs": str(data),
            **self._overrides,
        }
        return "".join(f"{key}={value}\n" for key, value in properties.items())

    def _quorum(self, controller_port: int) -> Mapping[str, str]:
        if self._seat is None:
            return {"node.id": "1", "controller.quorum.voters": f"1@{HOST}:{controller_port}"}
        return {"node.id": str(self._seat.node_id), "controller.quorum.voters": self._seat.voters}

    def _launch(self, java: Path, jars: Path) -> None:
        self._classes = ClassArchive.of(java, jars)
        own = (*_jvm_options(self._profile), *self._classes.options)
        options = [*own, *_logging_options(), f"-XX:ErrorFile={self._directory()}/crash.log"]
        command = [str(java), *options, "-cp", f"{jars}/*", "kafka.Kafka", str(self._config_file())]
        self._process = Leashed(command, self.log_file)

    def _ready(self, log_from: int) -> bool:
        deadline = time.monotonic() + _STARTS_WITHIN_S
        while self.running and time.monotonic() < deadline:
            if _STARTED in self._log_since(log_from):
                return True
            time.sleep(_LOOK_EVERY_S)
        return False

    def _log_since(self, position: int) -> str:
        with self.log_file.open("rb") as log:
            log.seek(position)
            return log.read().decode(errors="replace")

    def _log_tail(self, position: int) -> str:
        return "\n".join(self._log_since(position).splitlines()[-15:])

    def _did_not_start(self, log_from: int) -> BrokerUnavailable:
        self.kill()
        return BrokerUnavailable(
            f"The embedded Kafka did not start within {_STARTS_WITHIN_S:g} s. "
            f"The end of {self.log_file}:\n{self._log_tail(log_from)}\n"
            f"Correct what it names (a taken port, a full disk, foreign files in the data directory) and try again."
        )

    def _running_process(self) -> Leashed:
        if self._process is None:
            raise InvariantBroken("this embedded Kafka does not run; call start() first")
        return self._process


def free_ports(count: int) -> tuple[int, ...]:
    """Return ports that nothing listens on now, all below those the system hands to outgoing connections.

    A client that keeps trying to reach a dead broker on a port of that upper range can be given the very port as its
    own, connect to itself, and so keep the broker from ever coming back.
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


def _jvm_options(profile: Profile) -> tuple[str, ...]:
    match profile:
        case "test":
            # Starts 0.7 s sooner than the defaults.
            return ("-Xms256m", "-Xmx512m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
        case "bench":
            # Kafka's own choice, with heap for 2 cores.
            return ("-Xms1g", "-Xmx1g", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20")
        case never:
            assert_never(never)


def _profile_properties(profile: Profile) -> Mapping[str, str]:
    match profile:
        case "test":
            # After a SIGKILL the node may register again only once its old session is over: 12 s by default, 6 s so.
            return {"broker.session.timeout.ms": "3000", "broker.heartbeat.interval.ms": "500"}
        case "bench":
            return {}
        case never:
            assert_never(never)


def _logging_options() -> tuple[str, ...]:
    prefix = "-Dorg.slf4j.simpleLogger"
    return (
        f"{prefix}.defaultLogLevel=warn",
        f"{prefix}.showDateTime=true",
        f"{prefix}.dateTimeFormat=HH:mm:ss.SSS",
        # KafkaRaftServer's parent: it says when the node is ready.
        f"{prefix}.log.kafka.server.KafkaRaftServer=info",
        # It says when the node was fenced because it had no processor time for too long.
        f"{prefix}.log.org.apache.kafka.controller.ReplicationControlManager=info",
    )


def _bootstrap_checkpoint(java: Path, jars: Path) -> Path:
    """Return the file with the feature levels of a new cluster, made once by Kafka's own storage tool.

    The tool takes a second at each new data directory, and this file is the same in all of them.
    """
    kept = jars / "bootstrap.checkpoint"
    if kept.exists():
        return kept
    with tempfile.TemporaryDirectory(dir=jars) as temporary:
        config = Path(temporary) / "server.properties"
        lines = (
            "process.roles=broker,controller",
            "node.id=1",
            "controller.listener.names=CONTROLLER",
            f"controller.quorum.voters=1@{HOST}:9093",
            f"listeners=PLAINTEXT://{HOST}:9092,CONTROLLER://{HOST}:9093",
            f"log.dirs={temporary}/data",
        )
        config.write_text("\n".join(lines), encoding="utf-8")
        tool = [str(java), "-cp", f"{jars}/*", "kafka.tools.StorageTool"]
        command = [*tool, "format", "-t", new_id(), "-c", str(config)]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode != 0:
            raise BrokerUnavailable(
                f"Kafka's storage tool failed with exit code {made.returncode}: {made.stderr.strip()[-500:]}. "
                f"Delete {jars} and try again."
            )
        # Two processes may do this at once; the rename makes either result appear whole.
        (Path(temporary) / "data" / "bootstrap.checkpoint").replace(kept)
    return kept


def new_id() -> str:
    """Return a new id of a cluster or a directory."""
    # Kafka's Uuid text: 16 bytes in URL-safe base 64; one that starts with a dash would look like an option.
    while True:
        text = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        if not text.startswith("-"):
            return text
