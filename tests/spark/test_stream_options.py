"""What a stream tells Spark's Kafka source, and how settings travel to executors."""

from __future__ import annotations

import pickle

import pytest

from dedup.errors import BrokerUnavailable, RegistryUnavailable, SettingsError
from dedup.settings import RegistrySection, Secret, Security, Settings
from dedup.spark.kafka_source import kafka_options
from dedup.spark.session import PicklableSettings, raised_by_dedup, session_for


def settings(**security):
    return Settings(brokers=("a:1", "b:2"), security=Security(**security))


def test_committed_records_only_and_no_silent_loss():
    options = kafka_options(settings())
    assert options["kafka.bootstrap.servers"] == "a:1,b:2"
    assert options["kafka.isolation.level"] == "read_committed"
    assert (options["failOnDataLoss"], options["includeHeaders"]) == ("true", "true")


def test_a_password_with_quotes_stays_one_password():
    options = kafka_options(
        settings(protocol="SASL_SSL", mechanism="SCRAM-SHA-256", username="u", password=Secret('p"; x\\'))
    )
    assert options["kafka.sasl.jaas.config"] == (
        'org.apache.kafka.common.security.scram.ScramLoginModule required username="u" password="p\\"; x\\\\";'
    )


def test_certificates_travel_as_text(tmp_path):
    for name in ("ca", "cert", "key"):
        (tmp_path / name).write_text(f"PEM of {name}")
    files = {f"{name}_file": str(tmp_path / name) for name in ("ca", "cert", "key")}
    options = kafka_options(settings(protocol="SSL", **files, key_password=Secret("k")))
    assert options["kafka.ssl.truststore.certificates"] == "PEM of ca"
    assert options["kafka.ssl.keystore.certificate.chain"] == "PEM of cert"
    assert (options["kafka.ssl.keystore.key"], options["kafka.ssl.key.password"]) == ("PEM of key", "k")


@pytest.mark.parametrize(
    ("security", "says"),
    [
        ({"protocol": "SASL_SSL", "mechanism": "OAUTHBEARER", "password": Secret("t")}, "OAUTHBEARER cannot be used"),
        ({"protocol": "SSL", "ca_file": "/nowhere/ca.pem"}, "cannot be read as PEM text"),
    ],
)
def test_what_the_connector_can_not_be_told_is_refused(security, says):
    with pytest.raises(SettingsError, match=says):
        kafka_options(settings(**security))


def test_secrets_reach_the_executors_and_no_log():
    given = settings(protocol="SASL_SSL", mechanism="PLAIN", username="u", password=Secret("hush"))
    registry = RegistrySection(url="https://r", password=Secret("quiet"))
    given = given.model_copy(update={"schema_registry": registry})
    pickled = pickle.loads(pickle.dumps(PicklableSettings.of(given)))
    assert (pickled.reveal().security, pickled.reveal().schema_registry) == (given.security, registry)
    assert "hush" not in repr(pickled)
    assert "quiet" not in repr(pickled)


@pytest.mark.parametrize(
    ("why", "kept"),
    [
        (
            "org.apache.spark.api.python.PythonException: Traceback\n  f\ndedup.errors.CommitUnknown: no answer\n\n",
            False,
        ),
        ("org.apache.spark.api.python.PythonException: Traceback\n  f\ndedup.errors.BrokerUnavailable: none\n", False),
        ("org.apache.kafka.common.errors.TimeoutException: Timeout of 60000ms expired", False),
        ("java.util.concurrent.TimeoutException: Cannot fetch record for offset 7 in 300000 milliseconds\n\tat", False),
        ("org.apache.spark.api.python.PythonException: Traceback\n  f\ndedup.errors.TaskMigrated: fenced\n", True),
        ("ExecutorLostFailure (executor 1 exited): Container killed", True),
    ],
)
def test_spark_logs_no_task_that_failed_in_an_outage_and_any_other(spark, why, kept):
    """Was: forty lines for each attempt while a broker was away."""
    session_for(None, packages=["kafka"])
    log4j = spark.sparkContext._jvm.org.apache.logging.log4j
    tasks = "org.apache.spark.scheduler.TaskSetManager"
    config = log4j.LogManager.getContext(False).getConfiguration().getLoggerConfig(tasks)
    text = log4j.message.SimpleMessage(f"Lost task 3.0 in stage 16.0 (TID 67) (host executor driver): {why}")
    event = log4j.core.impl.Log4jLogEvent.newBuilder().setLevel(log4j.Level.WARN).setMessage(text).build()
    assert config.isFiltered(event) is not kept


@pytest.mark.parametrize(
    ("logger", "line", "kept"),
    [
        ("executor.Executor", "Exception in task 3.0 in stage 16.0 (TID 67)", False),
        ("executor.Executor", "Exit as unable to send heartbeats to driver", True),
        ("sql.kafka010.KafkaOffsetReaderAdmin", "Error in attempt 1 getting Kafka offsets: ", False),
        ("sql.kafka010.KafkaOffsetReaderAdmin", "Found incorrect offsets in some partitions", True),
    ],
)
def test_spark_logs_no_failure_that_is_reported_elsewhere(spark, logger, line, kept):
    """Was: 40 lines when an outage had lasted for as long as Spark's source waits."""
    session_for(None, packages=["kafka"])
    log4j = spark.sparkContext._jvm.org.apache.logging.log4j
    config = log4j.LogManager.getContext(False).getConfiguration().getLoggerConfig(f"org.apache.spark.{logger}")
    text = log4j.message.SimpleMessage(line)
    event = log4j.core.impl.Log4jLogEvent.newBuilder().setLevel(log4j.Level.ERROR).setMessage(text).build()
    assert config.isFiltered(event) is not kept


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        ("…\ndedup.errors.CommitUnknown: orders.dedup.3: no answer.\n\n at …", BrokerUnavailable, "no answer"),
        ("…\ndedup.errors.BrokerUnavailable: Grant Read.\n", BrokerUnavailable, "Grant Read"),
        ("…\ndedup.errors.RegistryUnavailable: 503.\n", RegistryUnavailable, "503"),
        ("org.apache.kafka.common.errors.TimeoutException: Timed out. Call: x\n at", BrokerUnavailable, "Call: x"),
        ("java.util.concurrent.TimeoutException: Cannot fetch record for offset 7\n at", BrokerUnavailable, "offset 7"),
    ],
)
def test_what_ended_a_query_is_an_error_with_the_exit_code_of_its_kind(text, kind, says):
    """Was: exit code 1, with frames of py4j in place of the sentence."""
    found = raised_by_dedup(f"[STREAM_FAILED] Query terminated with exception: {text}")
    assert type(found) is kind
    assert says in str(found)


def test_an_error_of_another_kind_is_not_taken_for_one_of_ours():
    assert raised_by_dedup("[STREAM_FAILED] java.lang.OutOfMemoryError: Java heap space") is None


def test_the_drivers_kafka_clients_do_not_log_each_connection_they_lose(spark):
    """Was: four lines a second while a broker was away."""
    log4j = spark.sparkContext._jvm.org.apache.logging.log4j
    client = "org.apache.kafka.clients.NetworkClient"
    log4j.core.config.Configurator.setLevel(client, log4j.Level.WARN)
    session_for(None, packages=["kafka"])
    logger = log4j.LogManager.getLogger(client)
    assert (logger.isErrorEnabled(), logger.isWarnEnabled()) == (True, False)
