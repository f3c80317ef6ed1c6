"""What a stream tells Spark's Kafka source, and how settings travel to executors."""

from __future__ import annotations

import pickle

import pytest
from pyspark.errors import PySparkException

from dedup.errors import BrokerUnavailable, RegistryUnavailable, SettingsError
from dedup.settings import RegistrySection, Secret, Security, Settings
from dedup.spark.kafka_source import kafka_options
from dedup.spark.session import PicklableSettings, raised_by_dedup, session_for, translated_errors


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


def pem(label, text="QUJD"):
    return f"-----BEGIN {label}-----\n{text}\n-----END {label}-----"


def files_of(directory, **texts):
    for name, text in texts.items():
        (directory / name).write_text(text, encoding="utf-8")
    return {f"{name}_file": str(directory / name) for name in ("ca", "cert", "key")}


def test_certificates_travel_as_text(tmp_path):
    one, other = pem("CERTIFICATE", "b25l"), pem("CERTIFICATE", "b3RoZXI=")
    texts = {"ca": f"# Főtanúsítvány\n{one}\n\n# AC Raíz\n{other}\n", "cert": f"Bag Attributes\n{one}\n"}
    files = files_of(tmp_path, **texts, key=f"{one}\n{pem('ENCRYPTED PRIVATE KEY')}\n")
    options = kafka_options(settings(protocol="SSL", **files, key_password=Secret("k")))
    assert options["kafka.ssl.truststore.certificates"] == f"{one}\n{other}"
    assert options["kafka.ssl.keystore.certificate.chain"] == one
    assert options["kafka.ssl.keystore.key"] == pem("ENCRYPTED PRIVATE KEY")
    assert options["kafka.ssl.key.password"] == "k"


@pytest.mark.parametrize("label", ["RSA PRIVATE KEY", "EC PRIVATE KEY"])
@pytest.mark.parametrize(("secret", "option"), [(None, "-nocrypt "), (Secret("k"), "")])
def test_a_key_that_java_cannot_read_is_refused_with_the_command_that_converts_it(tmp_path, label, secret, option):
    texts = dict.fromkeys(("ca", "cert"), pem("CERTIFICATE"))
    files = files_of(tmp_path, **texts, key=f"{pem('EC PARAMETERS')}\n{pem(label)}\n")
    key = files["key_file"]
    with pytest.raises(SettingsError) as refused:
        kafka_options(settings(protocol="SSL", **files, key_password=secret))
    assert f'{key}: has a key of the kind "{label}", which Java' in str(refused.value)
    assert f"`openssl pkcs8 -topk8 {option}-in {key} -out {key}.pkcs8`" in str(refused.value)


def test_a_file_that_is_no_pem_is_refused(tmp_path):
    (tmp_path / "ca.der").write_bytes(b"\x30\x82\xff")
    with pytest.raises(SettingsError, match=r"ca\.der: .* it has no line `-----BEGIN CERTIFICATE-----`"):
        kafka_options(settings(protocol="SSL", ca_file=str(tmp_path / "ca.der")))


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


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("java.nio.file.AccessDeniedException", "file:/in: Permission denied"),
        (
            "java.nio.file.AccessDeniedException",
            "s3a://in: org.apache.hadoop.fs.s3a.auth.NoAuthWithAWSException: No AWS",
        ),
        ("java.nio.file.AccessDeniedException", "s3a://in: getFileStatus on s3a://in: (Service: S3, Status Code: 403)"),
        ("org.apache.hadoop.security.AccessControlException", "Permission denied: user=me, access=READ_EXECUTE"),
        ("org.apache.hadoop.fs.s3a.UnknownStoreException", "`s3a://in': Bucket does not exist"),
        ("[FAILED_READ_FILE.NO_HINT] \nCaused by: java.io.FileNotFoundException", "/in/a.json (Permission denied)"),
    ],
)
def test_a_file_system_that_denies_access_is_told_in_a_sentence(error, reason):
    """Was: a traceback of Java's, or that the file was damaged."""
    with pytest.raises(SettingsError) as told, translated_errors():
        raise PySparkException(f"An error occurred while calling o44.load.\n: {error}: {reason}\n\tat org.apache")
    assert str(told.value) == (
        f"a file system: refused a request: {reason}; correct the path, or give this user access: permissions, or the "
        f"credentials of the object store"
    )


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
