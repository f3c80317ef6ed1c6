"""Downloads the jars that PySpark lacks (Kafka connector, Delta, Iceberg, S3, JDBC) from Maven Central.

The module does not use Spark's own resolver, Ivy: Ivy fails if a local Maven cache contains POM files without their
jars, and it requests a jar that some mirrors lack.

`spark-jars.lock` lists the jars for every supported version of Spark with their SHA-256 digests. The command `python -m
dedup.spark.spark_jars` prints the lock file, updated with the jars for the installed version of PySpark.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Final, Literal, get_args

import pyspark
from jgo.maven import Artifact

from dedup.embedded.kafka_jars import Jar, locked, read_lock, resolved
from dedup.errors import BrokerUnavailable, Problem, SettingsError

Package = Literal["kafka", "delta", "iceberg", "s3", "jdbc"]

_SCALA: Final = "2.13"


@dataclass(frozen=True, slots=True)
class Release:
    """The library versions that match a minor release of Spark, such as 4.1."""

    kafka: str
    """The version of the Kafka connector, chosen so that Maven Central has all of its dependencies."""
    delta: str
    iceberg: str | None
    """The version of Iceberg, or None if no version supports this release line."""
    hadoop: str
    """The version of Hadoop that PySpark includes; the S3 client must have the same version."""


RELEASES: Final[Mapping[str, Release]] = {
    "4.0": Release("4.0.0", f"delta-spark_{_SCALA}:4.0.0", "1.11.0", "3.4.1"),
    "4.1": Release("4.1.1", f"delta-spark_4.1_{_SCALA}:4.4.0", "1.11.0", "3.4.2"),
    "4.2": Release("4.2.0", f"delta-spark_4.2_{_SCALA}:4.4.0", None, "3.5.0"),
}
_JDBC: Final = ("org.postgresql:postgresql:42.7.4", "org.xerial:sqlite-jdbc:3.46.1.3")
_LOCK_FILE: Final = "spark-jars.lock"
_VERSIONED: Final = re.compile(r"-\d[\w.\-]*\.jar$")


def release_of(spark_version: str) -> Release:
    """Return the library versions for the given version of Spark. Raises BrokerUnavailable if the Spark version is not
    supported.
    """
    release = RELEASES.get(_line(spark_version))
    if release is None:
        raise BrokerUnavailable(
            f"PySpark {spark_version} is not supported: install PySpark {_either(RELEASES)} (`pip install "
            f"'pyspark>=4.0,<4.3'`), or give Spark its jars yourself (`--conf spark.jars=...`)."
        )
    return release


def _line(spark_version: str) -> str:
    return ".".join(spark_version.split(".")[:2])


def _either(lines: Iterable[str]) -> str:
    *others, last = lines
    return f"{', '.join(others)} or {last}"


def coordinates(package: Package, spark_version: str) -> tuple[str, ...]:
    """Return the Maven coordinates of a package for the given version of Spark.

    Raises BrokerUnavailable if no version of the package supports the given version of Spark.
    """
    release, line = release_of(spark_version), _line(spark_version)
    if package == "iceberg" and release.iceberg is None:
        lines = [line for line, each in RELEASES.items() if each.iceberg]
        raise BrokerUnavailable(
            f"there is no Iceberg for PySpark {spark_version}: install PySpark {_either(lines)}, or give Spark its "
            f"jars yourself (`--conf spark.jars=...`)."
        )
    found: Mapping[Package, tuple[str, ...]] = {
        "jdbc": _JDBC,
        "kafka": (f"org.apache.spark:spark-sql-kafka-0-10_{_SCALA}:{release.kafka}",),
        "delta": (f"io.delta:{release.delta}",),
        "s3": (f"org.apache.hadoop:hadoop-aws:{release.hadoop}",),
        "iceberg": (f"org.apache.iceberg:iceberg-spark-runtime-{line}_{_SCALA}:{release.iceberg}",),
    }
    return found[package]


def jars_for(packages: Iterable[Package], environ: Mapping[str, str] | None = None) -> list[Path]:
    """Download missing jars, and return the paths of the jars that the packages need in addition to PySpark's own jars.

    Raises BrokerUnavailable with the Maven coordinates if Maven Central cannot be reached or lacks a jar, and
    SettingsError if the cache for the jars cannot be written.
    """
    base = (os.environ if environ is None else environ).get("XDG_CACHE_HOME")
    root = Path(base) if base else Path.home() / ".cache"
    found: dict[str, Path] = {}
    for package in packages:
        directory = root / "dedup" / f"spark-{pyspark.__version__}" / package
        # Unlike `Path.is_dir`, this does not fail in a home directory that the user may not list.
        if not os.access(directory, os.X_OK):
            _fetch(coordinates(package, pyspark.__version__), directory)
        found |= {jar.name: jar for jar in sorted(directory.glob("*.jar"))}
    return list(found.values())


def _fetch(wanted: tuple[str, ...], directory: Path) -> None:
    with _scratch_in(directory.parent, f"{directory.name}.part-") as temporary:
        ready = Path(temporary) / "ready"
        ready.mkdir()
        try:
            locks = _locks()
            for artifact in _beside_spark(wanted, Path(temporary) / "repository"):
                _refuse_other(locked(artifact), locks)
                shutil.copy(artifact.resolve(), ready)
        except (OSError, RuntimeError) as error:
            raise BrokerUnavailable(
                f"{', '.join(wanted)} could not be fetched from Maven Central: {error}. Check the network and try "
                f"again, or give Spark its jars yourself (`--conf spark.jars=...`)."
            ) from error
        if not directory.is_dir():  # Another process may have been faster.
            ready.rename(directory)


def _scratch_in(cache: Path, prefix: str) -> tempfile.TemporaryDirectory[str]:
    try:
        cache.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(dir=cache, prefix=prefix)
    except OSError as error:
        text = (
            f"cannot be written, so Spark's jars cannot be kept there: {error.strerror}; set XDG_CACHE_HOME to a "
            f"directory that this user can write to, or give Spark its jars yourself (`--conf spark.jars=...`)"
        )
        raise SettingsError([Problem(str(cache), text)]) from error


def _locks() -> Mapping[str, Jar]:
    text = resources.files(__package__).joinpath(_LOCK_FILE).read_text(encoding="utf-8")
    return {jar.coordinate: jar for jar in read_lock(text)}


def _refuse_other(found: Jar, locks: Mapping[str, Jar]) -> None:
    wanted = locks.get(found.coordinate)
    if found != wanted:
        expected = "does not name it" if wanted is None else f"expects {wanted.sha256}"
        raise BrokerUnavailable(
            f"{found.coordinate} from Maven Central has SHA-256 {found.sha256}, but {_LOCK_FILE} {expected}. Nothing "
            f"was kept. Try again; if it happens again, something between here and Maven Central alters files."
        )


def _beside_spark(wanted: Iterable[str], repository: Path) -> Iterator[Artifact]:
    """Yield the resolved artifacts, except any artifact that PySpark includes, regardless of version."""
    own = (Path(pyspark.__file__).parent / "jars").glob("*.jar")
    bundled = {_VERSIONED.sub("", jar.name) for jar in own}
    for artifact in resolved(wanted, repository):
        if _VERSIONED.sub("", artifact.resolve().name) not in bundled:
            yield artifact


def _print_lock_file() -> None:
    lines = dict(_locks())
    for package in get_args(Package):
        if package == "iceberg" and release_of(pyspark.__version__).iceberg is None:
            continue
        with tempfile.TemporaryDirectory() as temporary:
            for artifact in _beside_spark(coordinates(package, pyspark.__version__), Path(temporary)):
                jar = locked(artifact)
                lines[jar.coordinate] = jar
    head = "# The jars beside PySpark: sha256, bytes, coordinate. Written by: python -m dedup.spark.spark_jars"
    body = [jar.line for _, jar in sorted(lines.items())]
    os.write(1, "\n".join([head, *body, ""]).encode())


if __name__ == "__main__":
    _print_lock_file()
