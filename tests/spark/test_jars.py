"""Jars are those of the lock file, byte for byte, or refused."""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import replace
from importlib import resources
from pathlib import Path
from unittest.mock import patch

import pyspark
import pytest
from packaging.requirements import Requirement

from dedup.embedded.kafka_jars import read_lock
from dedup.errors import BrokerUnavailable
from dedup.spark import session
from dedup.spark import spark_jars as jars
from dedup.spark.spark_jars import coordinates, jars_for

ROOT = Path(__file__).parents[2]


def lock():
    return read_lock(resources.files("dedup.spark").joinpath("spark-jars.lock").read_text(encoding="utf-8"))


def test_the_jars_of_this_run_are_those_of_the_lock_file(spark):
    found = {jar.name: hashlib.sha256(jar.read_bytes()).hexdigest() for jar in jars_for(("kafka", "delta", "jdbc"))}
    assert found == {jar.file_name: jar.sha256 for jar in lock()}


class Fetched:
    """What jgo says of one jar."""

    def __init__(self, directory, coordinate):
        self.groupId, self.artifactId, self.version = coordinate.split(":")
        self._path = directory / f"{self.artifactId}-{self.version}.jar"
        self._path.write_bytes(b"not what it was")

    def resolve(self):
        return self._path


@pytest.mark.parametrize(
    ("package", "version", "usable"),
    [("kafka", "4.3.0", "4.0.0, 4.0.1, 4.1.1 or 4.2.0"), ("delta", "4.2.0", "4.0.0, 4.0.1 or 4.1.1")],
)
def test_a_version_of_spark_without_known_jars_is_one_sentence_that_names_those_with(package, version, usable):
    with patch.object(pyspark, "__version__", version), pytest.raises(BrokerUnavailable) as refused:
        jars_for((package,), {"XDG_CACHE_HOME": "/nowhere"})
    assert f"for PySpark {version}: install PySpark {usable}, or" in str(refused.value)


def test_jars_that_the_user_names_are_taken_instead_of_a_download(spark):
    own = {"spark.jars": spark.sparkContext.getConf().get("spark.jars")}
    with patch.object(session, "jars_for", side_effect=BrokerUnavailable("no network")):
        with pytest.raises(BrokerUnavailable, match="no network"):
            session.session_for(None, packages=("kafka",))
        assert session.session_for(None, packages=("kafka",), conf=own).sparkContext is spark.sparkContext


def test_the_extra_takes_no_newer_spark_than_one_whose_jars_are_known():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (wanted,) = (each for each in map(Requirement, project["optional-dependencies"]["spark"]) if each.name == "pyspark")
    (newest,) = (each.version for each in wanted.specifier if each.operator == "<=")
    assert coordinates("kafka", newest)
    assert coordinates("delta", newest)
    assert not wanted.specifier.contains("4.3.0")


@pytest.mark.parametrize("known", [True, False])
def test_a_jar_that_differs_is_refused_and_nothing_is_kept(tmp_path, known):
    (tmp_path / "maven").mkdir()
    version = pyspark.__version__ if known else "4.0.1"
    (root,) = coordinates("kafka", version)
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    with (
        patch.object(jars, "_resolve", lambda _wanted, _repository: [Fetched(tmp_path / "maven", root)]),
        patch.object(jars, "coordinates", lambda _package, _version: (root,)),
    ):
        if known:
            with pytest.raises(BrokerUnavailable, match=r"spark-jars.lock expects [0-9a-f]{64}\. Nothing was kept"):
                jars_for(("kafka",), environ)
            assert list((tmp_path / "cache").rglob("*.jar")) == []
        else:
            # No list knows that version: what Maven Central has is taken.
            assert [jar.name for jar in jars_for(("kafka",), environ)] == [f"spark-sql-kafka-0-10_2.13-{version}.jar"]


def test_a_jar_that_the_list_lacks_is_refused():
    locks = {jar.coordinate: jar for jar in lock()}
    stranger = replace(lock()[0], coordinate="io.example:stranger:1.0")
    with pytest.raises(BrokerUnavailable, match="does not name it"):
        jars._refuse_other(stranger, locks)
