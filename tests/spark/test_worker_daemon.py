"""Python workers come from a process that has everything loaded, and not from Spark's archives."""

from __future__ import annotations

import gc
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyspark
import pytest
from pyspark import cloudpickle

from dedup.spark.worker_daemon import without_spark_zips

# Executors can not import a test.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

INSTALLED = str(Path(pyspark.__file__).parents[1])


@pytest.fixture
def archive(tmp_path: Path) -> Callable[[str], list[str]]:
    """Return a function that makes what Spark puts on the path, with a PySpark of this `version.py`."""

    def made(version: str) -> list[str]:
        with zipfile.ZipFile(tmp_path / "pyspark.zip", "w") as packed:
            packed.writestr("pyspark/__init__.py", "")
            packed.writestr("pyspark/version.py", version)
        names = ("pyspark.zip", "py4j-0.10.9.9-src.zip", "spark-core_2.13-4.0.0.jar")
        return [str(tmp_path / name) for name in names]

    return made


def test_archives_of_the_installed_version_are_not_needed(archive):
    version = (Path(pyspark.__file__).parent / "version.py").read_text(encoding="utf-8")
    mine = ["/mine", "/mine/more.zip", INSTALLED]
    assert without_spark_zips([mine[0], *archive(version), *mine[1:]]) == mine


def test_archives_of_another_version_stay(archive):
    path = [*archive('__version__: str = "4.0.99"\n'), INSTALLED]
    assert without_spark_zips(path) == path


def test_archives_stay_where_nothing_else_is_installed(archive, tmp_path):
    path = [*archive('__version__: str = "4.0.0"\n'), str(tmp_path / "nothing")]
    assert without_spark_zips(path) == path
    assert without_spark_zips([INSTALLED]) == [INSTALLED]


def looked_around(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    import pyspark as here  # noqa: PLC0415  the worker's

    loaded = "dedup.spark.reduce_side" in sys.modules and "dedup.spark.task_attempt" in sys.modules
    list(batches)
    found = {"place": [here.__file__], "frozen": [gc.get_freeze_count()], "loaded": [loaded]}
    yield pa.RecordBatch.from_pydict(found)


def test_a_worker_has_everything_loaded_before_its_first_task(spark):
    rows = spark.range(0, 2, 1, 2).mapInArrow(looked_around, "place string, frozen long, loaded boolean").collect()
    assert len(rows) == 2
    for row in rows:
        assert row["place"] == pyspark.__file__
        assert row["frozen"] > 0
        assert row["loaded"]
