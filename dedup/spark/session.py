"""A Spark session that can run a topology: the right Java, the right Python, the right jars.

What the user's own spark-submit already says is left as it is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from pyspark.sql import SparkSession

from dedup.local.java import use_java_of_spark
from dedup.spark import class_archive, worker_daemon
from dedup.spark.jars import Package, jars_for

if TYPE_CHECKING:
    from dedup.topology.model import Topology

DELTA_CONF: Final = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}
WORKER_CONF: Final = {
    "spark.executorEnv.MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "spark.executorEnv.MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}
"""Of Python workers: memory that a batch gave back is kept for the next one, which saves a sixth of their time."""
LOCAL_CONF: Final = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
"""Of a session inside this machine: it must not depend on what the machine's name resolves to."""


def session_for(
    topology: Topology | None,
    *,
    master: str | None = None,
    packages: Iterable[Package] = (),
    conf: Mapping[str, str] | None = None,
) -> SparkSession:
    """Return the session of this process, made if there is none; `conf` wins over what is set here.

    `master` is left to spark-submit where None, and is ``local[*]`` without spark-submit. Under spark-submit, jars are
    its business (`--packages`), and none are fetched. Raises BrokerUnavailable where Java or jars can not be had.
    """
    wanted = tuple(packages)
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    settings: dict[str, str] = {
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.streaming.stateStore.providerClass": (
            "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
        ),
        **WORKER_CONF,
        "spark.python.daemon.module": worker_daemon.MODULE,
    }
    if topology is not None:
        settings["spark.app.name"] = f"dedup {topology.name}"
    if "delta" in wanted:
        settings |= DELTA_CONF
    if not submitted:
        settings |= class_archive.options_of(use_java_of_spark(os.environ), os.environ)
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
        settings["spark.master"] = master or "local[*]"
        if settings["spark.master"].startswith("local"):
            settings |= LOCAL_CONF
        if wanted:
            settings["spark.jars"] = ",".join(str(jar) for jar in jars_for(wanted))
    elif master is not None:
        settings["spark.master"] = master
    builder = SparkSession.builder
    for key, value in (settings | dict(conf or {})).items():
        builder = builder.config(key, value)
    session: SparkSession = builder.getOrCreate()
    return session
