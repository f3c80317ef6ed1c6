"""Downloads Kafka's jars from Maven Central once per user, and caches them.

`kafka-jars.lock` lists every jar with its SHA-256. This module checks the SHA-256 itself, because jgo's resolver only
warns about a difference. `python -m dedup.embedded.kafka_jars` prints a new lock file.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Final

from jgo.maven import Artifact, MavenContext, PythonResolver
from jgo.parse import Coordinate

from dedup.errors import BrokerUnavailable, Problem, SettingsError

Progress = Callable[[int, int], None]
"""A function that any thread may call with the bytes downloaded so far and the total bytes."""

_KAFKA_VERSION: Final = "4.1.1"
_ROOTS: Final = (f"org.apache.kafka:kafka_2.13:{_KAFKA_VERSION}", "org.slf4j:slf4j-simple:1.7.36")
_LOCK_FILE: Final = "kafka-jars.lock"
_CONNECTIONS: Final = 4
_ANSWER_WITHIN_S: Final = 60


@dataclass(frozen=True, slots=True)
class Jar:
    """A jar that the lock file lists."""

    sha256: str
    size_bytes: int
    coordinate: str

    @property
    def file_name(self) -> str:
        """The jar's file name in a Maven repository."""
        _group, artifact, version = self.coordinate.split(":")
        return f"{artifact}-{version}.jar"

    @property
    def line(self) -> str:
        """The jar's line in a lock file, as `read_lock` reads it."""
        return f"{self.sha256} {self.size_bytes} {self.coordinate}"


def cache_dir(environ: Mapping[str, str]) -> Path:
    """Return the current user's directory for Kafka's jars. The directory may not exist yet."""
    return cache_root(environ) / f"kafka-{_KAFKA_VERSION}"


def cache_root(environ: Mapping[str, str]) -> Path:
    """Return the current user's directory for everything that dedup downloads. The directory may not exist yet.

    Raises SettingsError if the user has no home directory and XDG_CACHE_HOME is not set.
    """
    base = environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "dedup"
    except RuntimeError as error:
        text = "is not set, and this user has no home directory for downloads; set XDG_CACHE_HOME or HOME"
        raise SettingsError([Problem("XDG_CACHE_HOME", text)]) from error


def locked_jars() -> tuple[Jar, ...]:
    """Return the jars that Kafka's lock file lists."""
    return read_lock(resources.files(__package__).joinpath(_LOCK_FILE).read_text(encoding="utf-8"))


def read_lock(text: str) -> tuple[Jar, ...]:
    """Parse the content of a lock file. Each line has a jar's SHA-256, size in bytes, and Maven coordinate."""
    rows = (line.split() for line in text.splitlines() if line and not line.startswith("#"))
    return tuple(Jar(sha256, int(size_bytes), coordinate) for sha256, size_bytes, coordinate in rows)


def install_jars(directory: Path, progress: Progress | None = None) -> Path:
    """Download the jars of the lock file into `directory`, unless it already has all of them, and return `directory`.

    If several processes call this function at the same time, one process downloads and the others wait. Raises
    BrokerUnavailable if a jar cannot be downloaded or has the wrong SHA-256.
    """
    jars = locked_jars()
    try:
        install_once(
            directory,
            lambda: _complete(directory, jars),
            lambda repository, ready: _fetch_all(repository, ready, jars, progress),
        )
    except OSError as error:
        # The exceptions of the package `requests` are also OSErrors.
        raise BrokerUnavailable(
            f"Kafka {_KAFKA_VERSION} could not be fetched from Maven Central into {directory}: {error}. "
            f"Check the network and the free disk space and try again, "
            f"copy that directory from another machine, or use a running broker (`brokers` in the config file)."
        ) from error
    return directory


def _complete(directory: Path, jars: tuple[Jar, ...]) -> bool:
    # A rename creates the directory in one step, so it should be complete. The file sizes are checked because people
    # copy and clean caches by hand.
    try:
        return all((directory / jar.file_name).stat().st_size == jar.size_bytes for jar in jars)
    except FileNotFoundError:
        return False


def install_once(directory: Path, is_complete: Callable[[], bool], fetch: Callable[[Path, Path], None]) -> None:
    """Fill ``directory`` with downloads, unless it is complete. Creates the parent directory if necessary.

    If several processes call this function at the same time, one process downloads and the others wait. ``fetch`` gets
    two directories: one for downloads, and a new one to fill, which then replaces ``directory``. If ``fetch`` raises an
    error, the function deletes the downloads and raises the same error. Raises OSError if a directory cannot be
    written.
    """
    if is_complete():
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    with (directory.parent / f"{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_complete():
            return
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f"{directory.name}.part-") as temporary:
            ready = Path(temporary) / "ready"
            ready.mkdir()
            fetch(Path(temporary) / "repository", ready)
            if directory.exists():
                shutil.rmtree(directory)
            ready.rename(directory)


def summed(progress: Progress | None, total_bytes: int) -> Callable[[int], None]:
    """Return a function that adds each byte count to a running total, and passes the total to ``progress``."""
    done_bytes = 0

    def add(more_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes = min(done_bytes + more_bytes, total_bytes)
        if progress is not None:
            progress(done_bytes, total_bytes)

    return add


def _fetch_all(repository: Path, ready: Path, jars: tuple[Jar, ...], progress: Progress | None) -> None:
    context = maven(repository, summed(progress, sum(jar.size_bytes for jar in jars)))
    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        for path in pool.map(lambda jar: _fetch(context, jar), jars):
            path.rename(ready / path.name)


def _fetch(context: MavenContext, jar: Jar) -> Path:
    group, artifact, version = jar.coordinate.split(":")
    try:
        path: Path = context.project(group, artifact).at_version(version).artifact().resolve()
    except RuntimeError as error:
        raise BrokerUnavailable(f"Maven Central has no {jar.coordinate}: {error}. Try again later.") from error
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != jar.sha256:
        raise BrokerUnavailable(
            f"{jar.coordinate} from Maven Central has SHA-256 {found}, but {_LOCK_FILE} expects {jar.sha256}. "
            f"Nothing was kept. Try again; if it happens again, something between here and Maven Central alters files."
        )
    return path


def maven(repository: Path, progress: Callable[[int], None]) -> MavenContext:
    """Return a Maven Central client that stores files in ``repository`` and reports byte counts to ``progress``."""

    @contextlib.contextmanager
    def file(_name: str, _size_bytes: int) -> Iterator[Callable[[int], None]]:
        yield progress

    return MavenContext(
        resolver=PythonResolver(progress_callback=file), repo_cache=repository, timeout=_ANSWER_WITHIN_S
    )


def locked(artifact: Artifact) -> Jar:
    """Download an artifact, and return its entry for a lock file."""
    content = artifact.resolve().read_bytes()
    coordinate = f"{artifact.groupId}:{artifact.artifactId}:{artifact.version}"
    return Jar(hashlib.sha256(content).hexdigest(), len(content), coordinate)


def resolved(wanted: Iterable[str], repository: Path) -> list[Artifact]:
    """Return the artifacts at these Maven coordinates and all their transitive runtime dependencies.

    ``repository`` is the directory for downloads. Raises OSError or RuntimeError if Maven Central cannot be reached or
    lacks an artifact.
    """
    context = maven(repository, lambda _: None)
    roots = [context.create_dependency(replace(Coordinate.parse(root), scope="compile")) for root in wanted]
    inputs, transitive = context.resolver.resolve(roots)
    needed = [*inputs, *(each for each in transitive if each.scope in {"compile", "runtime"})]
    return [each.artifact for each in needed]


def _print_lock_file() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        jars = [locked(artifact) for artifact in resolved(_ROOTS, Path(temporary))]
    os.write(
        1, b"# The jars of Kafka's broker: sha256, bytes, coordinate. Written by: python -m dedup.embedded.kafka_jars\n"
    )
    for jar in sorted(jars, key=lambda jar: jar.coordinate):
        os.write(1, f"{jar.line}\n".encode())


if __name__ == "__main__":
    _print_lock_file()
