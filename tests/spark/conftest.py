"""One Spark session for each pytest (see second.py). Without a Java that can start it: skipped by name, in CI a failure."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="PySpark is not installed: pip install dedup-streams[spark]")

from pyspark.sql import SparkSession

from dedup.errors import BrokerUnavailable
from dedup.local.java import use_java_of_spark
from dedup.spark.session import session_for
from tests.spark.second import Second, for_the_second, report_elsewhere, tell
from tests.spark.streaming import FAST_JAVA

HERE = Path(__file__).parent
TUNED = {
    "spark.driver.extraJavaOptions": FAST_JAVA,
    # A handful of rows: compiling wide plans, and planning them again half-way, takes most of the time.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
    # Delta puts a table's state together in 50 tasks if not told otherwise.
    "spark.databricks.delta.snapshotPartitions": "2",
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
    session = session_for(None, master="local[2]", packages=("kafka", "delta", "jdbc"), conf=conf)
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()
    # Its last sockets are collected here, and not in the middle of someone else's test.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


THEIRS = pytest.StashKey[list[pytest.Item]]()
SECOND = pytest.StashKey[Second]()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """PySpark leaves sockets to the garbage collector and calls deprecated functions; neither is ours to mend.

    What the second process runs is waited for behind the directory's other tests.
    """
    ours = {at: item for at, item in enumerate(items) if HERE in item.path.parents}
    for item in ours.values():
        item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))
        item.add_marker(pytest.mark.filterwarnings("ignore:::pyspark"))
        if item.get_closest_marker("timeout") is None:
            # Whichever test comes first starts the session: on a busy machine that alone took two minutes.
            item.add_marker(pytest.mark.timeout(600))
    theirs = config.stash[THEIRS] = [] if config.option.usepdb else for_the_second(list(ours.values()))
    for at, item in zip(ours, sorted(ours.values(), key=lambda item: item in theirs), strict=True):
        items[at] = item


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """The second process begins with the directory's first test; its reports are passed on as they come."""
    theirs = item.config.stash.get(THEIRS, [])
    if not theirs or HERE not in item.path.parents:
        return None
    if SECOND not in item.config.stash:
        item.config.stash[SECOND] = Second(item.config, theirs)
    if item not in theirs:
        return None
    tell(item, item.config.stash[SECOND])
    # Nothing was set up for it: what is left of tests before it ends here, as behind any other.
    item.session._setupstate.teardown_exact(nextitem)
    return True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In the second process the report goes to the first one, too."""
    report = yield
    report_elsewhere(item.config, report)
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """The second process ends before the first one, however that ends."""
    second = session.config.stash.get(SECOND, None)
    if second is not None:
        second.stop()
