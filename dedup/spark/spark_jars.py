"""The jars that are not part of Spark (its Kafka connector, Delta, JDBC drivers).

jgo downloads them from Maven Central into the user's cache, and Spark gets them as local paths. Spark's own resolver,
Ivy, fails if a Maven cache has descriptions without jars, and requests a jar that some mirrors lack; jgo does neither.

`spark-jars.lock` lists the jars for the tested version of Spark with their SHA-256; jars for other versions are not
checked. `python -m dedup.spark.spark_jars` prints a new lock file.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Final, Literal, get_args

import pyspark
from jgo.maven import Artifact, MavenContext, PythonResolver
from jgo.parse import Coordinate

from dedup.embedded.kafka_jars import Jar, locked, read_lock
from dedup.errors import BrokerUnavailable

Package = Literal["kafka", "delta", "jdbc"]

_SCALA: Final = "2.13"
VERSIONS: Final[Mapping[str, str | None]] = {
    "4.0.0": f"io.delta:delta-spark_{_SCALA}:4.0.0",
    "4.0.1": f"io.delta:delta-spark_{_SCALA}:4.0.0",
    "4.1.1": f"io.delta:delta-spark_4.1_{_SCALA}:4.1.0",
    "4.2.0": None,
}
"""Version of Spark whose Kafka connector is on Maven Central -> Delta for it; None if none is known."""
_JDBC: Final = ("org.postgresql:postgresql:42.7.4", "org.xerial:sqlite-jdbc:3.46.1.3")
_LOCK_FILE: Final = "spark-jars.lock"
_ANSWER_WITHIN_S: Final = 60
_VERSIONED: Final = re.compile(r"-\d[\w.\-]*\.jar$")


def coordinates(package: Package, spark_version: str) -> tuple[str, ...]:
    """Return the Maven coordinates of a package for a version of Spark.

    Raises BrokerUnavailable if none is known for that version.
    """
    delta = VERSIONS.get(spark_version)
    match package:
        case "jdbc":
            return _JDBC
        case "kafka" if spark_version in VERSIONS:
            return (f"org.apache.spark:spark-sql-kafka-0-10_{_SCALA}:{spark_version}",)
        case "delta" if delta is not None:
            return (delta,)
        case "kafka" | "delta":
            what, usable = "Kafka connector", list(VERSIONS)
            if package == "delta":
                what, usable = "Delta release", [version for version, found in VERSIONS.items() if found]
            raise BrokerUnavailable(
                f"no {what} is known for PySpark {spark_version}: install PySpark {', '.join(usable[:-1])} or "
                f"{usable[-1]}, or give Spark its jars yourself (`--conf spark.jars=...`)."
            )


def _cache_dir(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_CACHE_HOME")
    root = Path(base) if base else Path.home() / ".cache"
    return root / "dedup" / f"spark-{pyspark.__version__}"


def jars_for(packages: Iterable[Package], environ: Mapping[str, str] | None = None) -> list[Path]:
    """Return the jars of these packages that are not part of Spark, and download those that the cache lacks.

    Raises BrokerUnavailable with the coordinates if Maven Central cannot be reached or lacks a jar.
    """
    found: dict[str, Path] = {}
    for package in packages:
        directory = _cache_dir(os.environ if environ is None else environ) / package
        if not directory.is_dir():
            _fetch(coordinates(package, pyspark.__version__), directory)
        found |= {jar.name: jar for jar in sorted(directory.glob("*.jar"))}
    return list(found.values())


def _fetch(wanted: tuple[str, ...], directory: Path) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    bundled = _bundled()
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f"{directory.name}.part-") as temporary:
        ready = Path(temporary) / "ready"
        ready.mkdir()
        try:
            locks = _locks(wanted)
            for artifact in _resolve(wanted, Path(temporary) / "repository"):
                jar: Path = artifact.resolve()
                if _VERSIONED.sub("", jar.name) not in bundled:
                    _refuse_other(locked(artifact), locks)
                    shutil.copy(jar, ready)
        except (OSError, RuntimeError) as error:
            raise BrokerUnavailable(
                f"{', '.join(wanted)} could not be fetched from Maven Central: {error}. Check the network and try "
                f"again, or give Spark its jars yourself (`--conf spark.jars=...`)."
            ) from error
        if not directory.is_dir():  # another process may have been faster
            ready.rename(directory)


def _locks(wanted: Iterable[str]) -> Mapping[str, Jar] | None:
    """Return the locked jars by coordinate; None for a version of Spark that is not in the lock file."""
    text = resources.files(__package__).joinpath(_LOCK_FILE).read_text(encoding="utf-8")
    locks = {jar.coordinate: jar for jar in read_lock(text)}
    return locks if all(root in locks for root in wanted) else None


def _refuse_other(found: Jar, locks: Mapping[str, Jar] | None) -> None:
    if locks is None:
        return
    wanted = locks.get(found.coordinate)
    if found != wanted:
        expected = "does not name it" if wanted is None else f"expects {wanted.sha256}"
        raise BrokerUnavailable(
            f"{found.coordinate} from Maven Central has SHA-256 {found.sha256}, but {_LOCK_FILE} {expected}. Nothing "
            f"was kept. Try again; if it happens again, something between here and Maven Central alters files."
        )


def _resolve(wanted: Iterable[str], repository: Path) -> list[Artifact]:
    context = MavenContext(resolver=PythonResolver(), repo_cache=repository, timeout=_ANSWER_WITHIN_S)
    roots = [context.create_dependency(replace(Coordinate.parse(root), scope="compile")) for root in wanted]
    inputs, transitive = context.resolver.resolve(roots)
    needed = [*inputs, *(each for each in transitive if each.scope in {"compile", "runtime"})]
    return [each.artifact for each in needed]


def _print_lock_file() -> None:
    lines: dict[str, Jar] = {}
    for package in get_args(Package):
        with tempfile.TemporaryDirectory() as temporary:
            for artifact in _resolve(coordinates(package, pyspark.__version__), Path(temporary)):
                if _VERSIONED.sub("", artifact.resolve().name) not in _bundled():
                    jar = locked(artifact)
                    lines[jar.coordinate] = jar
    what = f"# The jars beside PySpark {pyspark.__version__}: sha256, bytes, coordinate."
    head = f"{what} Written by: python -m dedup.spark.spark_jars"
    body = [f"{jar.sha256} {jar.size_bytes} {jar.coordinate}" for _, jar in sorted(lines.items())]
    os.write(1, "\n".join([head, *body, ""]).encode())


def _bundled() -> set[str]:
    """Return the names, without versions, of the jars that are part of Spark."""
    return {_VERSIONED.sub("", jar.name) for jar in (Path(pyspark.__file__).parent / "jars").glob("*.jar")}


if __name__ == "__main__":
    _print_lock_file()
