"""The notebook of docs/spark.md: in this session, and through a Spark Connect server in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from dedup.embedded.child_process import ChildProcess
from dedup.embedded.java import use_java_of_spark
from tests.spark import notebook
from tests.spark.streaming import FAST_JAVA
from tests.spark.test_cluster import free_port
from tests.waiting import until

for needed in ("grpc", "grpc_status", "google.rpc", "zstandard"):
    pytest.importorskip(needed, reason="no client of Spark Connect: pip install 'dedup-streams[connect]'")

HOME = Path(pyspark.__file__).parent
START_S = 240


@pytest.fixture
def server(tmp_path):
    """The address of a Connect server that knows of dedup only that it can be imported."""
    use_java_of_spark(os.environ)
    notebook.write_files(tmp_path)
    port = free_port()
    conf = {
        "spark.connect.grpc.binding.port": port,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraJavaOptions": FAST_JAVA,
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": 2,
        "spark.log.structuredLogging.enabled": "false",
    }
    environ = {"JAVA_HOME": os.environ["JAVA_HOME"], "PYSPARK_PYTHON": sys.executable, "SPARK_HOME": str(HOME)}
    options = [part for key, value in conf.items() for part in ("--conf", f"{key}={value}")]
    command = ["env", *(f"{key}={value}" for key, value in environ.items()), str(HOME / "bin" / "spark-submit")]
    main = ("--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal")
    process = ChildProcess(
        [*command, "--master", "local[2]", *options, *main], tmp_path / "server.log", directory=tmp_path
    )
    try:
        until(
            lambda: "Spark Connect server started" in process.log or not process.running,
            "a Connect server",
            within_s=START_S,
        )
        assert process.running, process.log
        yield f"sc://127.0.0.1:{port}"
    finally:
        process.stop()


def test_the_notebook_runs_in_a_session_of_its_process(spark, tmp_path, monkeypatch):
    notebook.write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    # The session's Java was started in another directory.
    monkeypatch.setattr(
        notebook,
        "blocks",
        lambda kind, found=notebook.blocks: [
            each.replace('parquet("orders")', f'parquet("{tmp_path / "orders"}")') for each in found(kind)
        ],
    )
    assert notebook.run(spark) == notebook.EXPECTED


def test_the_notebook_runs_through_spark_connect(server, tmp_path):
    command = [sys.executable, notebook.__file__, server]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=START_S)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == notebook.EXPECTED
