"""An archive of Spark's classes, parsed and verified: a driver that takes it starts with two fifths less CPU.

`python -m dedup.spark.class_archive` makes it, once for a Java and a PySpark (JEP 310 and 350: a shared archive of what
one run has loaded). Sessions that start their own JVM take it where it is; without it, or with another Java or other
jars, they start as ever. Measured on 2 cores, session and one small job: 14.4 CPU-s without, 8.3 and 8.5 with it.
Making it takes 46 CPU-s and 150 MB.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyspark

from dedup.errors import BrokerUnavailable
from dedup.local.java import use_java_of_spark
from dedup.spark.jars import cache_dir

if TYPE_CHECKING:
    import pyarrow as pa

OPTIONS: Final = "spark.driver.defaultJavaOptions"
"""Spark's setting for those who provide it; `extraJavaOptions` stays the user's."""
_SILENT: Final = "-Xlog:cds=off,cds+dynamic=off"


def archive_file(java_home: Path, environ: Mapping[str, str]) -> Path:
    """Return where the archive for this Java and these jars is; it need not exist."""
    digest = blake2b(digest_size=8)
    release = java_home / "release"
    digest.update(release.read_bytes() if release.is_file() else str(java_home.resolve()).encode())
    for jar in sorted((Path(pyspark.__file__).parent / "jars").glob("*.jar")):
        # The JVM refuses an archive whose jars were touched since.
        seen = jar.stat()
        digest.update(f"{jar} {seen.st_size} {seen.st_mtime_ns}\n".encode())
    return cache_dir(environ) / f"classes-{digest.hexdigest()}.jsa"


def options_of(java_home: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of a session that starts with the archive; none where there is none."""
    file = archive_file(java_home, environ)
    return {OPTIONS: f'"-XX:SharedArchiveFile={file}" {_SILENT}'} if file.is_file() else {}


def make_archive(environ: Mapping[str, str]) -> Path:
    """The archive is there; returns its path. Starts a session, and ends it. Raises BrokerUnavailable."""
    from dedup.spark.session import session_for  # noqa: PLC0415 - it imports this module

    file = archive_file(use_java_of_spark(os.environ), environ)
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix="classes.part-") as directory:
        made = Path(directory) / file.name
        conf = {OPTIONS: f'"-XX:ArchiveClassesAtExit={made}" {_SILENT}', "spark.ui.enabled": "false"}
        spark = session_for(None, master="local[2]", packages=("kafka", "delta"), conf=conf)
        rows = spark.range(0, 100, 1, 2).selectExpr("id", "cast(id % 7 AS string) AS name")
        rows.mapInArrow(_as_they_are, "id long, name string").groupBy("name").count().join(rows, "name").collect()
        gateway: Any = spark.sparkContext._gateway  # noqa: SLF001 - nobody else knows the JVM's process
        spark.stop()
        gateway.proc.stdin.close()
        gateway.proc.wait()
        if not made.is_file():
            raise BrokerUnavailable(
                f"Java {os.environ['JAVA_HOME']} made no class archive at its end. Spark runs without."
            )
        for left in file.parent.glob("classes-*.jsa"):
            left.unlink()
        shutil.move(made, file)
    return file


def _as_they_are(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


if __name__ == "__main__":
    os.write(1, f"{make_archive(os.environ)}\n".encode())
