"""Runs a real schema registry on this machine: Apicurio Registry with Confluent's API and in-memory schemas."""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Final, Self

from dedup.embedded.child_process import ChildProcess
from dedup.embedded.java import find_java
from dedup.embedded.kafka_jars import Progress, cache_root, install_once, maven, summed
from dedup.embedded.kafka_node import HOST, free_ports
from dedup.errors import InvariantBroken, RegistryUnavailable

_NAME: Final = "apicurio-registry-app"
_VERSION: Final = "2.5.11.Final"
_SHA256: Final = "f894a17f650ec427de72cfb68edfc30f8020743269293e58372e22f67fd4fd15"
_SIZE_BYTES: Final = 139_779_728
_STARTS_WITHIN_S: Final = 120.0
_LOOK_S: Final = 0.1
# The registry runs on this machine, so a proxy that the environment names cannot reach the registry.
_OPENER: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class EmbeddedRegistry:
    """A schema registry in its own process, which ends when this process ends for any reason.

    A ``with`` block starts and stops the registry. The methods block and are not thread-safe. If ``port`` is 0, the
    registry uses a free port.
    """

    def __init__(self, *, port: int = 0, progress: Progress | None = None) -> None:
        self._progress: Final = progress
        self._directory: Path | None = None
        self.url: Final = f"http://{HOST}:{port or free_ports(1)[0]}/apis/ccompat/v7"
        """The address for `schema_registry.url`."""
        self.process: ChildProcess | None = None
        """The Java process, which callers may freeze, or None before start() and after stop()."""

    @property
    def log_file(self) -> Path:
        """The registry's log file."""
        if self._directory is None:
            raise InvariantBroken("this embedded registry was never started")
        return self._directory / "registry.log"

    def start(self) -> Self:
        """Start the registry, and wait until it responds (10 s, or longer if the registry must be downloaded).

        Raises RegistryUnavailable if the registry cannot be downloaded or does not start, and BrokerUnavailable if no
        Java installation is suitable.
        """
        java = find_java(os.environ)
        jar = install_registry(cache_root(os.environ) / f"{_NAME}-{_VERSION}", self._progress)
        port = self.url.split(":")[2].partition("/")[0]
        options = ["-Xmx256m", f"-Dquarkus.http.port={port}", f"-Dquarkus.http.host={HOST}"]
        self._directory = Path(tempfile.mkdtemp(prefix="dedup-registry-"))
        try:
            self.process = ChildProcess([str(java), *options, "-jar", str(jar)], self.log_file)
            self._wait(self.process)
        except BaseException:
            self.stop()
            raise
        return self

    def _wait(self, process: ChildProcess) -> None:
        deadline = time.monotonic() + _STARTS_WITHIN_S
        while not self._answers():
            self.check()
            if time.monotonic() > deadline:
                raise RegistryUnavailable(
                    f"The embedded registry did not start within {_STARTS_WITHIN_S:g} s:\n{process.log_tail}"
                )
            time.sleep(_LOOK_S)

    def check(self) -> None:
        """Raise RegistryUnavailable, with the last lines of the registry's log, if the registry has exited."""
        if self.process is None or not self.process.running:
            tail = "" if self.process is None else self.process.log_tail
            raise RegistryUnavailable(
                f"The embedded registry ended unexpectedly. The end of its log:\n{tail}\n"
                f"Fix what it names (a taken port, too little memory) and start again."
            )

    def stop(self) -> None:
        """Stop the registry, and delete its schemas and its log."""
        if self.process is not None:
            self.process.stop()
            self.process = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _answers(self) -> bool:
        try:
            with _OPENER.open(f"{self.url}/subjects", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False


def install_registry(directory: Path, progress: Progress | None = None) -> Path:
    """Download the registry into ``directory``, unless it is already there, and return its jar.

    If several processes call this function at the same time, one process downloads and the others wait. Raises
    RegistryUnavailable if the download fails or the downloaded archive has the wrong SHA-256.
    """
    jar = directory / f"{_NAME}-{_VERSION}-runner.jar"
    try:
        install_once(directory, jar.exists, lambda repository, ready: _fetch(repository, ready, progress))
    except (OSError, RuntimeError, tarfile.TarError) as error:  # exceptions of `requests` are also OSErrors
        raise RegistryUnavailable(
            f"Apicurio Registry {_VERSION} could not be fetched from Maven Central into {directory}: {error}. "
            f"Check the network and the free disk space and try again, or use a running registry "
            f"(`schema_registry.url` in the config file)."
        ) from error
    return jar


def _fetch(repository: Path, ready: Path, progress: Progress | None) -> None:
    version = maven(repository, summed(progress, _SIZE_BYTES)).project("io.apicurio", _NAME).at_version(_VERSION)
    archive: Path = version.artifact(classifier="all", packaging="tar.gz").resolve()
    with archive.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != _SHA256:
        raise RegistryUnavailable(
            f"{_NAME} {_VERSION} from Maven Central has SHA-256 {found}, but dedup expects {_SHA256}. Nothing was "
            f"kept. Try again; if it happens again, something between here and Maven Central alters files."
        )
    with tarfile.open(archive) as files:
        if hasattr(tarfile, "data_filter"):
            files.extractall(ready, filter="data")
        else:  # Debian 12's Python 3.11.2 has no filters; the digest above makes the archive safe.
            files.extractall(ready)  # noqa: S202
