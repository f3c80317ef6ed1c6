"""The files of a run: there whole or not at all, and not twice.

A run writes to a directory of its own attempt, which Spark does not read because of its name, and is published by one
rename. A run of the same name that was published already is not written again; one that was killed is written anew,
with the clock of the first attempt. Rename is atomic on local disks and HDFS; on object stores, where it is not, take
Delta: its log is what makes a run visible there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal
from uuid import uuid4

from pyspark.sql import functions as F  # noqa: N812 - the name every Spark page uses

from dedup.errors import StateIncompatible
from dedup.spark.folded import folding
from dedup.spark.parquet_files import codec_of, write_files

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from dedup.spark.batch import Judging

OutputFormat = Literal["parquet", "delta"]
_REPORT: Final = "_run.json"
_MARK_DIGITS: Final = 8


@dataclass(frozen=True, slots=True)
class RunReport:
    """What a run published."""

    run: str
    identity: str
    """Of topology, input and order: a run of the same name must have the same."""
    now_ms: int
    """The clock by which future times were judged."""
    order: str
    verdicts: Mapping[str, int]
    path: str
    fresh: bool = True
    """False where the run was published before, and nothing was written now."""


class RunDirectory:
    """The directory of all runs of one output."""

    def __init__(self, spark: SparkSession, root: str, run: str, fmt: OutputFormat) -> None:
        self._spark: Final = spark
        jvm: Any = spark._jvm  # noqa: SLF001 - the only way to Hadoop's file systems
        self._jvm: Final = jvm
        self._root: Final[Any] = self._jvm.org.apache.hadoop.fs.Path(root)
        conf = spark._jsparkSession.sessionState().newHadoopConf()  # noqa: SLF001
        self._files: Final = self._root.getFileSystem(conf)
        self._run: Final = run
        self._fmt: Final = fmt

    @property
    def path(self) -> str:
        """Where the run's files are once it is published."""
        return str(self._root) if self._fmt == "delta" else str(self._at(f"run={self._run}"))

    def begin(self, identity: str, now_ms: int) -> RunReport | int:
        """Return the report of this run if it was published, else the clock to judge by.

        Raises StateIncompatible where a run of this name was begun with another input, topology or order.
        """
        published = self._published()
        if published is not None:
            self._refuse_other(identity, published.identity, "was published")
            return published
        mark = self._at(f"_started-{self._run}.json")
        if self._files.exists(mark):
            begun = json.loads(self._read(mark))
            self._refuse_other(identity, begun["identity"], "was begun")
            return int(begun["now_ms"])
        self._files.mkdirs(self._root)
        self._write(mark, json.dumps({"identity": identity, "now_ms": now_ms}))
        return now_ms

    def publish(self, verdicts: Judging, report: Callable[[Mapping[str, int]], RunReport]) -> RunReport:
        """Write the verdicts, a directory each, make them visible, and return the report made of their counts."""
        write = self._publish_delta if self._fmt == "delta" else self._publish_files
        made = write(verdicts, report)
        self._files.delete(self._at(f"_started-{self._run}.json"), False)  # noqa: FBT003 - not recursive
        return made

    def _publish_files(self, verdicts: Judging, report: Callable[[Mapping[str, int]], RunReport]) -> RunReport:
        # Of exactly this run: another may have a name that begins with this one's.
        for left in self._files.globStatus(self._at(f"_attempt-{self._run}-{'?' * _MARK_DIGITS}")) or ():
            self._files.delete(left.getPath(), True)  # noqa: FBT003 - of a run that was killed
        attempt = self._at(f"_attempt-{self._run}-{uuid4().hex[:_MARK_DIGITS]}")
        codec = codec_of(self._spark)
        if self._files.getScheme() == "file" and codec is not None:
            files = write_files(verdicts.parcels, folding(verdicts.plan), Path(attempt.toUri().getPath()), codec)
        else:
            verdicts.frame().write.partitionBy("verdict").parquet(str(attempt))
            files = 1
        made = report(_counts(self._spark.read.parquet(str(attempt))) if files else {})
        self._write_report(self._child(attempt, _REPORT), made)
        target = self._at(f"run={self._run}")
        if self._files.exists(target) or not self._moved(attempt, target):
            raise StateIncompatible(
                f"{self.path} appeared while this run was under way: another job has published the same run. Its files "
                f"stay; those of this job are in {attempt} and can be deleted."
            )
        return made

    def _moved(self, attempt: Any, target: Any) -> bool:  # noqa: ANN401 - paths of Hadoop's
        """Rename, and tell whether the attempt is the target now: into one that is there it is moved (HADOOP-11452)."""
        return self._files.rename(attempt, target) and not self._files.exists(self._child(target, attempt.getName()))

    def _publish_delta(self, verdicts: Judging, report: Callable[[Mapping[str, int]], RunReport]) -> RunReport:
        rows = verdicts.frame().withColumn("run", F.lit(self._run))
        # The table's commit is what publishes; a second one of the same run replaces the rows of the first.
        writer = rows.write.format("delta").mode("overwrite").partitionBy("run", "verdict")
        writer.option("replaceWhere", f"run = '{self._run}'").save(self.path)
        table = self._spark.read.format("delta").load(self.path)
        made = report(_counts(table.where(F.col("run") == self._run)))
        self._files.mkdirs(self._at("_runs"))
        self._write_report(self._at(f"_runs/{self._run}.json"), made)
        return made

    def _published(self) -> RunReport | None:
        place = f"_runs/{self._run}.json" if self._fmt == "delta" else f"run={self._run}/{_REPORT}"
        if not self._files.exists(self._at(place)):
            return None
        return RunReport(**{**json.loads(self._read(self._at(place))), "fresh": False})

    def _refuse_other(self, identity: str, before: str, what: str) -> None:
        if identity != before:
            raise StateIncompatible(
                f"run {self._run} {what} at {self.path} with another topology, input or order. Nothing was touched. "
                f"Then: {before}. Now: {identity}. Choose another --run, or delete what is there."
            )

    def _at(self, name: str) -> Any:  # noqa: ANN401 - a path of Hadoop's
        return self._child(self._root, name)

    def _child(self, parent: Any, name: str) -> Any:  # noqa: ANN401
        return self._jvm.org.apache.hadoop.fs.Path(parent, name)

    def _write_report(self, path: Any, report: RunReport) -> None:  # noqa: ANN401
        self._write(path, json.dumps(asdict(report)))

    def _write(self, path: Any, text: str) -> None:  # noqa: ANN401
        # Under another name first: half a mark would be worse than none.
        part = self._child(path.getParent(), f"_{path.getName()}.part")
        stream = self._files.create(part, True)  # noqa: FBT003 - overwrite
        try:
            stream.write(bytearray(text.encode()))
        finally:
            stream.close()
        self._files.delete(path, False)  # noqa: FBT003
        self._files.rename(part, path)

    def _read(self, path: Any) -> str:  # noqa: ANN401
        stream = self._files.open(path)
        try:
            return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream)).decode()
        finally:
            stream.close()


def _counts(published: DataFrame) -> dict[str, int]:
    """Return the rows by verdict: counted in what was written, not in what was meant to be."""
    rows = published.groupBy("verdict").count().collect()
    return {row["verdict"]: row["count"] for row in sorted(rows, key=lambda row: str(row["verdict"]))}
