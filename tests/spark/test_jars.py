"""Jars are those of the lock file, byte for byte, or refused."""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import get_args
from unittest.mock import patch

import pyspark
import pytest
from packaging.requirements import Requirement
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import SparkSession

from dedup.embedded.kafka_jars import read_lock
from dedup.errors import BrokerUnavailable, SettingsError
from dedup.spark import session
from dedup.spark import spark_jars as jars
from dedup.spark.spark_jars import RELEASES, Package, coordinates, jars_for

ROOT = Path(__file__).parents[2]


def lock():
    return read_lock(resources.files("dedup.spark").joinpath("spark-jars.lock").read_text(encoding="utf-8"))


def test_the_jars_of_this_run_are_those_of_the_lock_file(spark):
    found = {jar.name: hashlib.sha256(jar.read_bytes()).hexdigest() for jar in jars_for(("kafka", "delta", "jdbc"))}
    locked = {jar.file_name: jar.sha256 for jar in lock()}
    assert found == {name: locked[name] for name in found}
    assert len(found) > 4


class Fetched:
    """What jgo says of one jar."""

    def __init__(self, directory, coordinate):
        self.groupId, self.artifactId, self.version = coordinate.split(":")
        self._path = directory / f"{self.artifactId}-{self.version}.jar"
        self._path.write_bytes(b"not what it was")

    def resolve(self):
        return self._path


@pytest.mark.parametrize("version", ["3.5.8", "4.3.0", "4.30.0", "5.0.0.dev1"])
def test_another_version_of_spark_is_one_sentence_that_names_the_supported_ones(version):
    with patch.object(pyspark, "__version__", version), pytest.raises(BrokerUnavailable) as refused:
        session.session_for(None)
    assert f"PySpark {version} is not supported" in str(refused.value)
    assert "install PySpark 4.0, 4.1 or 4.2 (" in str(refused.value)


@pytest.mark.parametrize("master", ["foo", "spark:/host:7077"])
def test_a_master_that_spark_does_not_know_is_one_sentence(master):
    with pytest.raises(SettingsError, match=r"^--master: .* is no Spark master; write local\[\*\], spark://HOST:PORT,"):
        session.session_for(None, master=master)


def test_what_spark_refuses_at_its_start_is_one_sentence():
    refused = PySparkRuntimeError("[JAVA_GATEWAY_EXITED] Java gateway process exited before sending its port number.")
    with patch.object(SparkSession.Builder, "getOrCreate", side_effect=refused), pytest.raises(SettingsError) as told:
        session.session_for(None, conf={"spark.driver.memory": "much"})
    assert str(told.value) == (
        "--master, --conf: Spark did not start: Java ended, and wrote its reason above; correct the Spark master, or "
        "the Spark setting that it names"
    )


def test_a_cache_that_cannot_be_written_is_one_sentence_that_names_it(tmp_path):
    home = tmp_path / "home"
    home.write_text("not a directory", encoding="utf-8")
    with pytest.raises(SettingsError, match=rf"^{home}/dedup/spark-.*: cannot be written, .*; set XDG_CACHE_HOME to"):
        jars_for(["kafka"], {"XDG_CACHE_HOME": str(home)})


def test_a_spark_without_iceberg_names_those_with():
    with pytest.raises(BrokerUnavailable, match=r"no Iceberg for PySpark 4\.2\.0: install PySpark 4\.0 or 4\.1, or"):
        coordinates("iceberg", "4.2.0")


@pytest.mark.parametrize("line", RELEASES)
def test_every_supported_version_is_in_the_lock_file(line):
    locked = {jar.coordinate for jar in lock()}
    for package in get_args(Package):
        if package != "iceberg" or RELEASES[line].iceberg:
            assert set(coordinates(package, f"{line}.99")) <= locked


def test_hadoop_for_s3_is_the_one_that_is_part_of_spark():
    (bundled,) = (Path(pyspark.__file__).parent / "jars").glob("hadoop-client-api-*.jar")
    assert coordinates("s3", pyspark.__version__)[0].rpartition(":")[2] == bundled.stem.rpartition("-")[2]


OFFLINE = patch.object(session, "jars_for", side_effect=BrokerUnavailable("no network"))


def test_the_session_of_a_notebook_keeps_its_settings_and_gets_no_jars(spark):
    """Was: its times were those of UTC from then on, and without a network there was no session."""
    zone = "spark.sql.session.timeZone"
    spark.conf.set(zone, "America/New_York")
    try:
        with OFFLINE:
            found = session.session_for(None, packages=("kafka", "delta"), conf={"spark.sql.shuffle.partitions": "2"})
        assert found.sparkContext is spark.sparkContext
        assert spark.conf.get(zone) == "America/New_York"
    finally:
        spark.conf.set(zone, "UTC")


def test_jars_that_the_user_names_are_taken_instead_of_a_download(spark):
    own = {"spark.jars": spark.sparkContext.getConf().get("spark.jars")}
    with OFFLINE, patch.object(session, "_is_running", return_value=False):
        with pytest.raises(BrokerUnavailable, match="no network"):
            session.session_for(None, packages=("kafka",))
        assert session.session_for(None, packages=("kafka",), conf=own).sparkContext is spark.sparkContext


def test_the_extra_takes_what_is_supported_and_nothing_newer():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (wanted,) = (each for each in map(Requirement, project["optional-dependencies"]["spark"]) if each.name == "pyspark")
    versions = [f"{major}.{minor}.{patch}" for major in (3, 4, 5) for minor in range(6) for patch in (0, 9)]
    for version in versions:
        assert wanted.specifier.contains(version) == (version.rpartition(".")[0] in RELEASES)


def test_a_jar_that_differs_is_refused_and_nothing_is_kept(tmp_path):
    (tmp_path / "maven").mkdir()
    (root,) = coordinates("kafka", pyspark.__version__)
    with (
        patch.object(jars, "resolved", lambda _wanted, _repository: [Fetched(tmp_path / "maven", root)]),
        pytest.raises(BrokerUnavailable, match=r"spark-jars.lock expects [0-9a-f]{64}\. Nothing was kept"),
    ):
        jars_for(("kafka",), {"XDG_CACHE_HOME": str(tmp_path / "cache")})
    assert list((tmp_path / "cache").rglob("*.jar")) == []


def test_a_jar_that_the_list_lacks_is_refused():
    locks = {jar.coordinate: jar for jar in lock()}
    stranger = replace(lock()[0], coordinate="io.example:stranger:1.0")
    with pytest.raises(BrokerUnavailable, match="does not name it"):
        jars._refuse_other(stranger, locks)
