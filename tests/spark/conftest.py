"""One Spark session for each process of pytest. Without a Java that can start it: skipped by name, in CI a failure."""

from __future__ import annotations

import gc
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="PySpark is not installed: pip install dedup-streams[spark]")

import pyspark
from pyspark.sql import SparkSession

from dedup.embedded.java import use_java_of_spark
from dedup.errors import BrokerUnavailable
from dedup.spark import kafka_source
from dedup.spark.session import session_for
from dedup.spark.spark_jars import Package, release_of
from tests.integration.conftest import make_job  # noqa: F401  # a fixture of these tests, too
from tests.spark.streaming import CATALOG, FAST_JAVA

HERE = Path(__file__).parent
# It logs the end of its connections while the interpreter exits, when the log is closed.
logging.getLogger("py4j").setLevel(logging.WARNING)
TUNED = {
    "spark.driver.extraJavaOptions": FAST_JAVA,
    # A handful of rows: compiling wide plans, and planning them again half-way, takes most of the time.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
    # Delta puts a table's state together in 50 tasks if not told otherwise, and VACUUM lists files in 10,000.
    "spark.databricks.delta.snapshotPartitions": "2",
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "2",
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.memory": "1g",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
}


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Return the run's session: `local[2]`, with the jars of Kafka, Delta and JDBC.

    Its plans are interpreted; tests/spark/streaming.py starts drivers of their own, whose plans are compiled.
    """
    try:
        use_java_of_spark(os.environ)
    except BrokerUnavailable as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(str(error))
    conf = {**TUNED, "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse"))}
    conf["spark.local.dir"] = str(tmp_path_factory.mktemp("spark-local"))
    packages: tuple[Package, ...] = ("kafka", "delta", "jdbc")
    if release_of(pyspark.__version__).iceberg is not None:
        packages += ("iceberg",)
        lake = str(tmp_path_factory.mktemp("lake"))
        conf |= {
            CATALOG: "org.apache.iceberg.spark.SparkCatalog",
            f"{CATALOG}.type": "hadoop",
            f"{CATALOG}.warehouse": lake,
        }
    session = session_for(None, master="local[2]", packages=packages, conf=conf)
    session.sparkContext.setLogLevel("ERROR")
    with pytest.MonkeyPatch.context() as patch:
        # A log that ends with a transaction marker holds a reader back by Kafka's default of 500 ms, in each partition.
        patch.setitem(kafka_source._CONSUMER, "kafka.fetch.max.wait.ms", "20")
        yield session
    session.stop()
    # Its last sockets are collected here, and not in the middle of someone else's test.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


ONE_LONG_TEST = {
    f"test_{name}.py" for name in ("tutorial", "stream_kills", "cluster", "parity_at_length", "parity_stream", "how_to")
}
"""These files come first, so that no process ends with a long test while the other one has nothing left to do."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """PySpark leaves sockets to the garbage collector and calls deprecated functions; neither is ours to fix."""
    items.sort(key=lambda item: item.path.name not in ONE_LONG_TEST)
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))
        item.add_marker(pytest.mark.filterwarnings("ignore:::pyspark"))
        if item.get_closest_marker("timeout") is None:
            # Whichever test comes first starts the session: on a busy machine that alone took two minutes.
            item.add_marker(pytest.mark.timeout(600))
