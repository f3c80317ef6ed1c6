"""Finds a Java that can run Spark 4: 17 or 21, with the vector module that Spark asks for."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Final

from dedup.errors import BrokerUnavailable

NEEDED_MODULE: Final = "jdk.incubator.vector"
_ANSWER_WITHIN_S: Final = 30


def use_java(environ: MutableMapping[str, str]) -> Path:
    """JAVA_HOME names a Java that can start Spark; returns its directory.

    Tried: JAVA_HOME, then `java` on PATH, then the usual places of Linux packages. Raises BrokerUnavailable naming
    every candidate and why it does not do.
    """
    refused: list[str] = []
    for origin, home in _candidates(environ):
        reason = _refusal(home)
        if reason is None:
            environ["JAVA_HOME"] = str(home)
            return home
        refused.append(f"{origin} ({home}): {reason}")
    seen = "; ".join(refused) or "JAVA_HOME is not set, and there is no `java` on PATH"
    raise BrokerUnavailable(
        f"Spark needs a Java 17 or 21 with the module {NEEDED_MODULE} and found none: {seen}. Install a JDK 17 "
        f"(Debian: `apt-get install openjdk-17-jre-headless`) and set JAVA_HOME to it."
    )


def _candidates(environ: MutableMapping[str, str]) -> Iterator[tuple[str, Path]]:
    home = environ.get("JAVA_HOME")
    if home:
        yield "JAVA_HOME", Path(home)
    on_path = shutil.which("java", path=environ.get("PATH", ""))
    if on_path:
        yield "PATH", Path(on_path).resolve().parents[1]
    for found in sorted(Path("/usr/lib/jvm").glob("*")):
        if any(f"-{major}" in found.name for major in (17, 21)):
            yield "/usr/lib/jvm", found


def _refusal(home: Path) -> str | None:
    java = home / "bin" / "java"
    try:
        answer = subprocess.run(
            [java, "--list-modules"], capture_output=True, text=True, timeout=_ANSWER_WITHIN_S, check=False
        )
    except OSError as error:
        return f"can not be started: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"did not list its modules within {_ANSWER_WITHIN_S} s"
    if answer.returncode != 0:
        return "is older than Java 9, or broken"
    names = {line.split("@")[0]: line for line in answer.stdout.splitlines()}
    if NEEDED_MODULE not in names:
        return f"has no module {NEEDED_MODULE}"
    major = names[NEEDED_MODULE].partition("@")[2].split(".")[0]
    return None if major in {"17", "21"} else f"is Java {major}; Spark 4 runs on 17 and 21"
