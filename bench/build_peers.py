"""Builds the peers under bench/build/: jars and classes for Kafka Streams; virtual environments for the Python ones."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from jgo.maven import MavenContext, PythonResolver
from jgo.parse import Coordinate

from dedup.embedded.java import find_java

HERE: Final = Path(__file__).parent
BUILD: Final = HERE / "build"
PEERS: Final = HERE / "peers"
KAFKA_STREAMS: Final = ("4.1.1", "4.3.0")
"""The versions of Kafka Streams; the first is the broker's."""
_LOGGER: Final = "org.slf4j:slf4j-simple:1.7.36"
QUIX: Final = "quixstreams==3.28.1"
TABLES: Final = ("duckdb==2.0.0", "polars==2.1.0")
_ANSWER_WITHIN_S: Final = 60
_BUILD_WITHIN_S: Final = 300


class PeerNotBuilt(RuntimeError):
    """A peer can not be measured here; the text says what is missing."""


def kafka_streams_class_path(version: str) -> str:
    """Return the class path on which `KsDedup` runs; its jars and classes are in bench/build/."""
    jars = _jars(BUILD / f"jars-{version}", (f"org.apache.kafka:kafka-streams:{version}", _LOGGER))
    classes = BUILD / f"classes-{version}"
    source = PEERS / "KsDedup.java"
    built = classes / "KsDedup.class"
    if not built.exists() or built.stat().st_mtime < source.stat().st_mtime:
        _run([_javac(), "-Xlint:all", "-d", str(classes), "-cp", f"{jars}/*", str(source)])
    return f"{jars}/*{os.pathsep}{classes}"


def java() -> str:
    """Return the path of the Java that runs Kafka, the broker's and the peer's alike."""
    return str(find_java(os.environ))


def quix_python() -> str:
    """Return the interpreter of a virtual environment that holds Quix Streams in the pinned version."""
    return _python_with("quix", (QUIX,))


def tables_python() -> str:
    """Return the interpreter of a virtual environment that holds DuckDB and Polars in the pinned versions."""
    return _python_with("tables", TABLES)


def _python_with(name: str, packages: Sequence[str]) -> str:
    directory = BUILD / f"venv-{name}"
    python = directory / "bin" / "python"
    done = directory / "installed.txt"
    wanted = " ".join(packages)
    if not done.exists() or done.read_text(encoding="utf-8") != wanted:
        _run([sys.executable, "-m", "venv", "--clear", str(directory)])
        _run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages])
        done.write_text(wanted, encoding="utf-8")
    return str(python)


def _jars(directory: Path, roots: Sequence[str]) -> Path:
    """Return `directory`; it holds the jars of `roots` and of everything they need at run time."""
    wanted = "\n".join(roots)
    done = directory / "roots.txt"
    if done.exists() and done.read_text(encoding="utf-8") == wanted:
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    context = MavenContext(resolver=PythonResolver(), repo_cache=BUILD / "repository", timeout=_ANSWER_WITHIN_S)
    dependencies = [context.create_dependency(replace(Coordinate.parse(root), scope="compile")) for root in roots]
    inputs, transitive = context.resolver.resolve(dependencies)
    for found in (*inputs, *(needed for needed in transitive if needed.scope in {"compile", "runtime"})):
        jar = found.artifact.resolve()
        shutil.copy2(jar, directory / jar.name)
    done.write_text(wanted, encoding="utf-8")
    return directory


def _javac() -> str:
    home = os.environ.get("JAVA_HOME")
    path = shutil.which("javac", path=str(Path(home) / "bin")) if home else shutil.which("javac")
    if path is None:
        raise PeerNotBuilt("Kafka Streams needs a JDK to be built: there is no `javac` in JAVA_HOME or on PATH.")
    return path


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_WITHIN_S, check=False)
    if done.returncode != 0:
        raise PeerNotBuilt(f"`{Path(command[0]).name}` failed with exit code {done.returncode}: {done.stderr[-2000:]}")
