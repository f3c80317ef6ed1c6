"""The jars Spark itself does not bring: its Kafka connector, Delta, JDBC drivers.

Resolved by jgo from Maven Central into this user's cache, and given to Spark as local paths. Spark's own resolver, Ivy,
trips over a Maven cache that has descriptions without jars, and asks for a jar that some mirrors lack; jgo does not.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

import pyspark
from jgo.maven import MavenContext, PythonResolver
from jgo.parse import Coordinate

from dedup.errors import BrokerUnavailable

Package = Literal["kafka", "delta", "jdbc"]

SCALA: Final = "2.13"
DELTA_OF: Final = {"4.0": "4.0.0"}
"""Delta's version for a minor version of Spark: they must match."""
JDBC: Final = ("org.postgresql:postgresql:42.7.4", "org.xerial:sqlite-jdbc:3.46.1.3")
_ANSWER_WITHIN_S: Final = 60
_VERSIONED: Final = re.compile(r"-\d[\w.\-]*\.jar$")


def coordinates(package: Package, spark_version: str) -> tuple[str, ...]:
    """Return the Maven coordinates of a package for a version of Spark. Raises BrokerUnavailable for no Delta."""
    match package:
        case "kafka":
            return (f"org.apache.spark:spark-sql-kafka-0-10_{SCALA}:{spark_version}",)
        case "delta":
            minor = ".".join(spark_version.split(".")[:2])
            if minor not in DELTA_OF:
                raise BrokerUnavailable(
                    f"no Delta release is known here for Spark {spark_version}. Give Spark its jars yourself "
                    f"(`--conf spark.jars=...`), or use Spark {', '.join(DELTA_OF)}."
                )
            return (f"io.delta:delta-spark_{SCALA}:{DELTA_OF[minor]}",)
        case "jdbc":
            return JDBC


def cache_dir(environ: Mapping[str, str]) -> Path:
    """Return this user's directory for Spark's jars; it need not exist."""
    base = environ.get("XDG_CACHE_HOME")
    root = Path(base) if base else Path.home() / ".cache"
    return root / "dedup" / f"spark-{pyspark.__version__}"


def jars_for(packages: Iterable[Package], environ: Mapping[str, str] | None = None) -> list[Path]:
    """Return the jars of these packages, fetched where the cache lacks them, without those that Spark brings.

    Raises BrokerUnavailable, naming the coordinates, when Maven Central can not be reached or lacks one.
    """
    found: dict[str, Path] = {}
    for package in packages:
        directory = cache_dir(os.environ if environ is None else environ) / package
        if not directory.is_dir():
            _fetch(coordinates(package, pyspark.__version__), directory)
        found |= {jar.name: jar for jar in sorted(directory.glob("*.jar"))}
    return list(found.values())


def _fetch(wanted: tuple[str, ...], directory: Path) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    brought = {_VERSIONED.sub("", jar.name) for jar in (Path(pyspark.__file__).parent / "jars").glob("*.jar")}
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f"{directory.name}.part-") as temporary:
        ready = Path(temporary) / "ready"
        ready.mkdir()
        try:
            for jar in _resolve(wanted, Path(temporary) / "repository"):
                if _VERSIONED.sub("", jar.name) not in brought:
                    shutil.copy(jar, ready)
        except (OSError, RuntimeError) as error:
            raise BrokerUnavailable(
                f"{', '.join(wanted)} could not be fetched from Maven Central: {error}. Check the network and try "
                f"again, or give Spark its jars yourself (`--conf spark.jars=...`)."
            ) from error
        if not directory.is_dir():  # another process may have been quicker
            ready.rename(directory)


def _resolve(wanted: tuple[str, ...], repository: Path) -> list[Path]:
    context = MavenContext(resolver=PythonResolver(), repo_cache=repository, timeout=_ANSWER_WITHIN_S)
    roots = [context.create_dependency(replace(Coordinate.parse(root), scope="compile")) for root in wanted]
    inputs, transitive = context.resolver.resolve(roots)
    needed = [*inputs, *(each for each in transitive if each.scope in {"compile", "runtime"})]
    return [each.artifact.resolve() for each in needed]
