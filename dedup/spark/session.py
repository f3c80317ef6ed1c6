"""Creates Spark sessions, and contains the helpers that all Spark jobs share."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self
from uuid import uuid4

import pyspark
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from dedup.embedded.java import use_java_of_spark
from dedup.errors import (
    BrokerUnavailable,
    DedupError,
    InvariantBroken,
    Problem,
    RecordFailed,
    RegistryUnavailable,
    SettingsError,
    StateIncompatible,
)
from dedup.kafka.client import KafkaWire
from dedup.kafka.connection import Connection
from dedup.settings import Secret, Settings, Web
from dedup.spark import worker_daemon
from dedup.spark.columns import NO_ARRIVAL
from dedup.spark.map_side import MOST_REDUCERS
from dedup.spark.spark_jars import Package, jars_for, release_of
from dedup.topology.model import Topology

ERRORS_BY_NAME: Final[Mapping[str, type[DedupError]]] = {
    kind.__name__: kind
    for kind in (StateIncompatible, RecordFailed, InvariantBroken, BrokerUnavailable, RegistryUnavailable)
} | {"CommitUnknown": BrokerUnavailable}
"""Maps the name of each error class to the class, so that the driver can raise an executor's error again."""
_RAISED: Final = re.compile(rf"^dedup\.[\w.]+\.({'|'.join(ERRORS_BY_NAME)}): (.*)$", re.MULTILINE)
_UNREADABLE: Final = re.compile(
    r"(?:FAILED_READ_FILE|CANNOT_READ_FILE|Error while reading file|is not a Parquet file|Could not read footer)"
)
_REFUSED: Final = re.compile(
    r"USER_RAISED_EXCEPTION\] (each line of json-records .*?)(?: SQLSTATE: \w+)?$", re.MULTILINE
)
_NO_ARRIVAL: Final = re.compile(
    rf"USER_RAISED_EXCEPTION\] ({re.escape(NO_ARRIVAL)} .*?)(?: SQLSTATE: \w+)?$", re.MULTILINE
)
_NO_FILE_SYSTEM: Final = re.compile(
    # Hadoop names the class for a scheme that it knows, such as abfss; otherwise, it names the scheme itself.
    r'No FileSystem for scheme "(?P<scheme>[\w.+-]+)"|Class (?P<name>org\.apache\.hadoop\.fs\.[\w.$]+) not found'
)
_MALFORMED: Final = re.compile(r"MALFORMED_RECORD_IN_PARSING[^\]]*\] (.*)")
_MISNAMED: Final = re.compile(
    r"(?:Illegal file pattern|Relative path in absolute URI): [^\n]*|"
    r"Empty partition column (?:name|value) in '[^\n]*'|"
    r"empty partition column (?:name|value) in the path segment '[^\n]*?'(?=\.)"  # Spark 4.2
)
_NO_ACCESS: Final = re.compile(
    # S3A names most of its reasons, such as missing credentials, in the message of an AccessDeniedException.
    r"\b(?:AccessDeniedException|AccessControlException|UnknownStoreException|AWSBadRequestException): ([^\n]+)|"
    r"\bFileNotFoundException: ([^\n]+ \(Permission denied\))"
)
_FILE: Final = re.compile(r"(?:file|hdfs|s3a?|abfss?|gs):/[^\s,;'\"]+")
_RANGE: Final = re.compile(r"offsets? (?:range )?\[(\d+), ?(\d+)\) for topic partition (\S+)-(\d+)\b")
_QUERIES: Final = (
    "org.apache.spark.sql.execution.streaming.MicroBatchExecution",  # Spark 4.0
    "org.apache.spark.sql.execution.streaming.runtime.MicroBatchExecution",
)
_NO_ANSWER: Final = (
    r"org\.apache\.kafka\.common\.errors\.TimeoutException: [^\n]*|"
    r"java\.util\.concurrent\.TimeoutException: Cannot fetch record[^\n]*"
)
_SILENCED: Final = {
    "org.apache.spark.scheduler.TaskSetManager": (
        rf"(?s).*(?:\bdedup\.errors\.(?:BrokerUnavailable|CommitUnknown): |{_NO_ANSWER}|TaskKilled \(Stage cancelled).*"
    ),
    "org.apache.spark.executor.Executor": "Exception in task .*",
    "org.apache.spark.scheduler.DAGScheduler": "Failed to cancel job group .*",
    # Spark tries three times. The error of the last attempt ends the query.
    "org.apache.spark.sql.kafka010.KafkaOffsetReaderAdmin": r"(?s)Error in attempt \d+ getting Kafka offsets.*",
}
"""Maps loggers of Spark to Java patterns of the messages that are suppressed. These messages report tasks that failed
because no broker responded or because their query was stopped, or repeat more detailed reports.
"""
_GONE: Final = re.compile(r"OffsetOutOfRange|KAFKA_DATA_LOSS|data loss|Some data may have been lost", re.IGNORECASE)

_DELTA_CONF: Final = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}
_CONF: Final = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    # Python workers keep freed memory for the next batch, because new memory pages are expensive. Together, the two
    # settings of malloc save a sixth of the workers' time, and an Arrow memory pool that uses malloc saves another
    # fifth.
    "spark.executorEnv.ARROW_DEFAULT_MEMORY_POOL": "system",
    "spark.executorEnv.MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "spark.executorEnv.MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "spark.python.daemon.module": worker_daemon.MODULE,
    # Without this limit, a query that waits for a broker would not stop until its request timed out.
    "spark.sql.streaming.stopTimeout": "5s",
}
_LOCAL_CONF: Final = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
"""With these settings, a local session works even if the machine's host name cannot be resolved."""
_MASTERS: Final = ("local", "spark://", "k8s://", "yarn")
_NO_GATEWAY: Final = "JAVA_GATEWAY_EXITED"
_SHUFFLE_PARTITIONS: Final = "spark.sql.shuffle.partitions"
_DEFAULT_PARTITIONS: Final = 200
_PARTITION_BYTES: Final = 32 << 20
_SMALL_BYTES: Final = 1 << 20
"""A shuffle partition should receive between `_SMALL_BYTES` and `_PARTITION_BYTES` of input."""
_WITH_SECRETS: Final = ("security", "schema_registry")
"""The sections of the settings that contain secrets, except `web`."""
RECORD_BYTES: Final = 256
"""The assumed size of a record in bytes if only the number of records is known."""


@dataclass(frozen=True, slots=True)
class PicklableSettings:
    """Settings for executors, with secrets as plain strings, because a `Secret` cannot be pickled.

    Spark sends the settings over its own connections, which must be encrypted (`spark.network.crypto.enabled`) if the
    network is not trusted.
    """

    plain: Settings
    secrets: Mapping[tuple[str, str], str] = field(repr=False)
    """The secrets, by the names of their section and key."""

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Return the settings in picklable form, without the settings for a worker's web pages."""
        secrets: dict[tuple[str, str], str] = {}
        plain = settings.model_copy(update={"web": Web()})
        for name in _WITH_SECRETS:
            section = getattr(settings, name)
            own = {key: each.get_secret_value() for key, each in section if isinstance(each, Secret)}
            secrets |= {(name, key): text for key, text in own.items()}
            plain = plain.model_copy(update={name: section.model_copy(update=dict.fromkeys(own))})
        return cls(plain, secrets)

    def reveal(self) -> Settings:
        """Return the settings with their secrets as `Secret` objects."""
        settings = self.plain
        for name in _WITH_SECRETS:
            own = {key: Secret(text) for (section, key), text in self.secrets.items() if section == name}
            settings = settings.model_copy(update={name: getattr(settings, name).model_copy(update=own)})
        return settings


def reason_of(error: Py4JJavaError | PySparkException) -> str:
    """Return the first line of the message of an error that Java raised, without Java's stack trace."""
    text = error.java_exception.getMessage() if isinstance(error, Py4JJavaError) else str(error)
    return next(iter((text or str(error)).strip().splitlines()), type(error).__name__).rstrip(".")


def _without_file_system(text: str, scheme: str | None = None) -> SettingsError | None:
    """Return the error for a path whose scheme no file system serves, or None if ``text`` reports another error.

    ``scheme`` is the path's scheme, if known to the caller, because ``text`` may name a class instead.
    """
    found = _NO_FILE_SYSTEM.search(text)
    if found is None:
        return None
    scheme = found["scheme"] or scheme
    remedy = "write s3a:" if scheme in {"s3", "s3n"} else "add its connector to the session, with --conf spark.jars="
    text = f"is a file system that this Spark session does not have; {remedy}"
    return SettingsError([Problem(found["name"] if scheme is None else f"{scheme}://", text)])


def _misnamed(text: str) -> SettingsError | None:
    found = _MISNAMED.search(text)
    if found is None:
        return None
    remedy = "correct the pattern, or rename files with a colon, and directories with `=` but no name or no value"
    return SettingsError([Problem("the input", f"has a name that Spark cannot read: {found[0]}; {remedy}")])


def without_access(text: str) -> SettingsError | None:
    """Return the error for a file system that denies access, or None if ``text`` reports another error."""
    found = _NO_ACCESS.search(text)
    if found is None:
        return None
    reason = (found[1] or found[2]).strip().rstrip(".")
    remedy = "correct the path, or give this user access: permissions, or the credentials of the object store"
    return SettingsError([Problem("a file system", f"refused a request: {reason}; {remedy}")])


class HadoopDirectory:
    """A directory of text files on any file system that Hadoop supports; methods accept and return Hadoop paths."""

    def __init__(self, spark: SparkSession, path: str) -> None:
        jvm: Any = spark._jvm  # noqa: SLF001  # PySpark's only way to Hadoop's file systems
        self._jvm: Final = jvm
        self.path: Final[Any] = jvm.org.apache.hadoop.fs.Path(path)
        conf = spark._jsparkSession.sessionState().newHadoopConf()  # noqa: SLF001
        try:
            self.files: Final[Any] = self.path.getFileSystem(conf)
        except Py4JJavaError as error:
            missing = _without_file_system(str(error), self.path.toUri().getScheme())
            if missing is None:
                raise
            raise missing from error

    @property
    def absolute(self) -> str:
        """Return the absolute path, including the scheme of the file system."""
        return str(self.files.makeQualified(self.path))

    def at(self, name: str, parent: Any = None) -> Any:  # noqa: ANN401
        """Return the path of a file in ``parent``, or in `path` if ``parent`` is None."""
        return self._jvm.org.apache.hadoop.fs.Path(self.path if parent is None else parent, name)

    def refuse_unwritable(self, option: str, probe: str | None = None) -> None:
        """Raise SettingsError, for the option that names the directory, if no file can be written to the directory.

        To check this, the method writes and deletes a file named ``probe``, and creates and deletes a missing
        directory. Without ``probe``, the file has a new name that Spark and Delta ignore.
        """
        file = self.at(probe or f"_{uuid4().hex}.part")
        try:
            existed = self.files.exists(self.path)
            self.files.create(file, True).close()  # noqa: FBT003  # Java has no keywords: overwrite
            self.files.delete(file, False)  # noqa: FBT003  # not recursive
        except Py4JJavaError as error:
            remedy = "name a directory that this user can write to, or can create"
            text = f"no file can be written to {self.path}: {reason_of(error)}; {remedy}"
            raise SettingsError([Problem(option, text)]) from error
        if not existed:
            with suppress(Py4JJavaError):  # another job has written to the directory in the meantime
                self.files.delete(self.path, False)  # noqa: FBT003

    def read(self, path: Any) -> str:  # noqa: ANN401
        """Return the text of a file."""
        with closing(self.files.open(path)) as stream:
            return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream)).decode()

    def write(self, path: Any, text: str, part_name: str) -> None:  # noqa: ANN401
        """Write ``text`` to the file ``part_name``, and then rename the file to ``path``, so that no reader sees an
        incomplete file.
        """
        part = self.at(part_name, path.getParent())
        with closing(self.files.create(part, True)) as stream:  # noqa: FBT003  # Java has no keywords: overwrite
            stream.write(bytearray(text.encode()))
        self.files.delete(path, False)  # noqa: FBT003  # not recursive
        if not self.files.rename(part, path):
            raise StateIncompatible(
                f"{path} could not be written: its file system refused to rename {part}. Another job may be writing it "
                f"at the same time; run the command again."
            )


def log_query_errors(session: SparkSession, *, on: bool) -> None:
    """Set whether Spark logs the stack trace of a streaming query that fails; dedup reports the error itself."""
    log4j = _log4j(session)
    for name in _QUERIES:
        log4j.core.config.Configurator.setLevel(name, log4j.Level.WARN if on else log4j.Level.OFF)


def _log4j(session: SparkSession) -> Any:  # noqa: ANN401  # py4j finds Java packages at run time
    jvm: Any = session.sparkContext._jvm  # noqa: SLF001  # PySpark has no public access to the JVM
    return jvm.org.apache.logging.log4j


def shuffle_partitions(spark: SparkSession) -> int:
    """Return Spark's number of shuffle partitions, or Spark's default if the setting is not a number (``auto``)."""
    found = spark.conf.get(_SHUFFLE_PARTITIONS)
    return int(found) if found is not None and found.isdecimal() else _DEFAULT_PARTITIONS


@contextmanager
def described(spark: SparkSession, text: str, *, group: str | None = None) -> Iterator[None]:
    """Inside the ``with`` block, set the description and, if given, the job group of the Spark jobs that this thread
    runs.

    For a stream's jobs, leave ``group`` unset, because Spark cancels these jobs through their query's own job group.
    """
    wanted = {"spark.job.description": text} | ({} if group is None else {"spark.jobGroup.id": group})
    context = spark.sparkContext
    before = {name: context.getLocalProperty(name) for name in wanted}
    for name, value in wanted.items():
        context.setLocalProperty(name, value)
    try:
        yield
    finally:
        for name, known in before.items():
            context.setLocalProperty(name, known)  # type: ignore[arg-type]  # None removes it


@contextmanager
def shuffles_for(spark: SparkSession, size_bytes: int | None, *, power_of_two: bool = False) -> Iterator[None]:
    """Inside the ``with`` block, set Spark's number of shuffle partitions to a suitable value for an input of
    ``size_bytes``.

    If the user has set the number of shuffle partitions, or if ``size_bytes`` is None, the setting stays unchanged. If
    ``power_of_two`` is true, the number of partitions is rounded up to a power of two.
    """
    before = spark.conf.getAll.get(_SHUFFLE_PARTITIONS)
    if size_bytes is None or (before or "").isdecimal():
        yield
        return
    busy = min(spark.sparkContext.defaultParallelism, -(-size_bytes // _SMALL_BYTES))
    count = min(MOST_REDUCERS, max(1, busy, -(-size_bytes // _PARTITION_BYTES)))
    spark.conf.set(_SHUFFLE_PARTITIONS, str(1 << (count - 1).bit_length() if power_of_two else count))
    try:
        yield
    finally:
        if before is None:
            spark.conf.unset(_SHUFFLE_PARTITIONS)
        else:
            spark.conf.set(_SHUFFLE_PARTITIONS, before)


@asynccontextmanager
async def connected(settings: Settings, client_id: str, *, patience_ms: int | None = None) -> AsyncIterator[KafkaWire]:
    """Yield an open connection to the Kafka cluster, and close the connection at the end of the ``with`` block.

    Raises BrokerUnavailable if no broker responds within ``patience_ms``, or within the connection's default.
    """
    connection = Connection.of(settings, client_id=client_id)
    wire = KafkaWire(connection if patience_ms is None else replace(connection, patience_ms=patience_ms))
    await wire.start()
    try:
        yield wire
    finally:
        await wire.stop()


def raised_by_dedup(text: str) -> DedupError | None:
    """Return the error that the text of a Spark error reports, or None if the error is not one of dedup's.

    The result is either the error that dedup raised on an executor, or BrokerUnavailable if no broker answered Spark.
    """
    ours = _RAISED.search(text)
    if ours is not None:
        return ERRORS_BY_NAME[ours[1]](ours[2])
    silent = re.search(_NO_ANSWER, text)
    if silent is None:
        return None
    return BrokerUnavailable(f"no broker answered Spark in time ({silent[0].strip()}). Run the command again later.")


@contextmanager
def translated_errors(
    after_deletion: str = (
        "Nothing was published. Give the topic a longer retention, or judge what is left with --start earliest."
    ),
) -> Iterator[None]:
    """Inside the ``with`` block, turn Spark's errors into dedup's errors.

    An error that dedup raised on an executor is re-raised on the driver. Raises SettingsError for unreadable files and
    for places to which a file system denies access, StateIncompatible if Kafka deleted records while a job was reading
    them (its message ends with ``after_deletion``), and BrokerUnavailable if no broker answered Spark. All other errors
    pass through unchanged.
    """
    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        text = str(error)
        for known in (raised_by_dedup, _without_file_system, _misnamed, without_access):
            translated = known(text)
            if translated is not None:
                raise translated from error
        created = _NO_ARRIVAL.search(text)
        if created is not None:
            raise StateIncompatible(created[1]) from error
        line = _REFUSED.search(text) or _MALFORMED.search(text)
        if line is not None:
            raise SettingsError([Problem("the input", f"{line[1].strip()} Nothing was published.")]) from error
        if _UNREADABLE.search(text):
            files = sorted({found.rstrip(".") for found in _FILE.findall(text)})
            place = files[0] if files else "a file of the input"
            raise SettingsError(
                [Problem(place, "is damaged or not in the given format. Nothing was published. Repair or remove it")]
            ) from error
        if _GONE.search(text):
            found = _RANGE.search(text)
            place = f" (not all of {found[3]}/{found[4]} offsets {found[1]} to {found[2]} are left)" if found else ""
            raise StateIncompatible(
                f"Kafka deleted records of the range while they were read{place}. {after_deletion}"
            ) from error
        raise


def session_for(
    topology: Topology | None,
    *,
    master: str | None = None,
    packages: Iterable[Package] = (),
    conf: Mapping[str, str] | None = None,
) -> SparkSession:
    """Return this process's Spark session. If no session exists, create a session with a suitable Java version, the
    current Python, and the jars of ``packages``.

    An existing session, such as a notebook's, keeps all settings except those in ``conf``, and gets no jars. For a new
    session, ``conf`` takes precedence over the settings that this function chooses. If ``master`` is None, the master
    is ``local[*]`` or, under spark-submit, the master that spark-submit sets. Under spark-submit, or if ``conf`` lists
    jars, the function downloads no jars and accepts any version of Spark. Raises BrokerUnavailable if Java or a jar
    cannot be obtained, or if the version of PySpark is not supported. Raises SettingsError if Spark refuses ``master``
    or ``conf``.
    """
    wanted, given = tuple(packages), conf or {}
    _refuse_master(master or given.get("spark.master"))
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    has_jars = submitted or not {"spark.jars", "spark.jars.packages"}.isdisjoint(given)
    if not has_jars:
        release_of(pyspark.__version__)
    own = dict[str, str]()
    if not _is_running():
        own = _settings_of_new(topology, master, wanted, submitted=submitted)
        if wanted and not has_jars:
            own["spark.jars"] = ",".join(str(jar) for jar in jars_for(wanted))
    session = _started({**own, **given})
    if "kafka" in wanted and not submitted:
        _silence_outages(session)
    return session


def _is_running() -> bool:
    """Return whether this process has a Spark session."""
    try:
        # PySpark still returns the last session if only the session's context was stopped.
        return SparkSession.active().sparkContext._jsc is not None  # noqa: SLF001
    except PySparkException:
        return False


def _settings_of_new(
    topology: Topology | None, master: str | None, wanted: Collection[Package], *, submitted: bool
) -> dict[str, str]:
    """Return the settings of a new session, and make the environment name the session's Java and Python."""
    settings = dict(_CONF)
    if topology is not None:
        settings["spark.app.name"] = f"dedup {topology.name}"
    if "delta" in wanted:
        settings |= _DELTA_CONF
    if not submitted:
        use_java_of_spark(os.environ)
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
        settings["spark.master"] = master or "local[*]"
        if settings["spark.master"].startswith("local"):
            settings |= _LOCAL_CONF
    elif master is not None:
        settings["spark.master"] = master
    return settings


def _refuse_master(master: str | None) -> None:
    if master is not None and not master.startswith(_MASTERS):
        text = f'"{master}" is no Spark master; write local[*], spark://HOST:PORT, k8s://https://HOST:PORT, or yarn'
        raise SettingsError([Problem("--master", text)])


def _started(settings: Mapping[str, str]) -> SparkSession:
    try:
        session: SparkSession = SparkSession.builder.config(map=dict(settings)).getOrCreate()
    except (PySparkException, Py4JJavaError) as error:
        reason = "Java ended, and wrote its reason above" if _NO_GATEWAY in str(error) else reason_of(error)
        text = f"Spark did not start: {reason}; correct the Spark master, or the Spark setting that it names"
        raise SettingsError([Problem("--master, --conf", text)]) from error
    return session


def _silence_outages(session: SparkSession) -> None:
    """Suppress Spark's log messages about unresponsive brokers. Instead, dedup logs one line a minute.

    The Kafka clients of the driver would log several lines a second. For each failed task, `Executor` and
    `TaskSetManager` would each log a stack trace. `TaskSetManager` still logs tasks that failed for other reasons.
    Repeated calls change nothing.
    """
    log4j = _log4j(session)
    set_level, level = log4j.core.config.Configurator.setLevel, log4j.Level
    set_level("org.apache.kafka.clients.NetworkClient", level.ERROR)
    # `Shell` would log a stack trace if a query is stopped while it writes to its checkpoint.
    set_level("org.apache.hadoop.util.Shell", level.ERROR)
    result = log4j.core.Filter.Result
    for logger, pattern in _SILENCED.items():
        set_level(logger, level.WARN)
        config = log4j.LogManager.getContext(False).getConfiguration().getLoggerConfig(logger)  # noqa: FBT003
        if config.getFilter() is None:
            denied = log4j.core.filter.RegexFilter.createFilter(pattern, None, False, result.DENY, result.NEUTRAL)  # noqa: FBT003
            config.addFilter(denied)
