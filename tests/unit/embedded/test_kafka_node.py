"""The embedded Kafka before its Java runs: where it keeps its data, and what it says if it cannot."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from dedup.cli.main import create_app
from dedup.embedded import kafka_node
from dedup.errors import BrokerUnavailable, SettingsError

# As Kafka's storage tool does, it writes the feature levels into the directory that its last argument names. As a node
# does that cannot bind its port, it ends.
JAVA = """#!/bin/sh
for last; do :; done
data=$(sed -n 's/^log.dirs=//p' "$last")
case "$*" in
  *StorageTool*) mkdir -p "$data" && echo levels > "$data/bootstrap.checkpoint" ;;
  *) echo "the node ends"; exit 3 ;;
esac
"""


@pytest.fixture
def jars(tmp_path, monkeypatch):
    """Return the directory of the jars; a Java that starts no node is installed."""
    java, jars = tmp_path / "jdk" / "bin" / "java", tmp_path / "cache" / "kafka"
    for directory in (java.parent, jars):
        directory.mkdir(parents=True)
    java.write_text(JAVA, encoding="ascii")
    java.chmod(java.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(kafka_node, "find_java", lambda _: java)
    monkeypatch.setattr(kafka_node, "install_jars", lambda *_: jars)
    return jars


@pytest.mark.usefixtures("jars")
@pytest.mark.parametrize(
    ("exists", "why"),
    [("kafka", "Not a directory"), ("kafka/data", "File exists"), ("kafka/kafka.log/", "Is a directory")],
)
def test_a_data_directory_that_cannot_be_written_is_named_in_a_sentence(tmp_path, exists, why):
    """Was: a traceback."""
    place = tmp_path / exists
    place.parent.mkdir(exist_ok=True)
    place.mkdir() if exists.endswith("/") else place.touch()
    result = CliRunner().invoke(create_app(), ["broker", "--data-dir", str(tmp_path / "kafka")])
    assert isinstance(result.exception, SettingsError), result.exception
    said = f"{tmp_path}/kafka: Kafka cannot keep its data here: {why}: {tmp_path}/kafka"
    assert str(result.exception).startswith(said)
    assert str(result.exception).endswith("; name a directory that you can write to")


def test_jars_in_a_directory_that_is_read_only_serve_a_new_data_directory(jars, tmp_path, monkeypatch):
    """Was: a traceback, although an error text advises to copy that directory from another machine."""
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    checkpoint = kafka_node._bootstrap_checkpoint(kafka_node.find_java({}), jars)
    assert checkpoint == b"levels\n"
    assert not list(jars.iterdir())


def test_the_feature_levels_of_a_new_cluster_are_kept_with_the_jars(jars):
    java = kafka_node.find_java({})
    assert kafka_node._bootstrap_checkpoint(java, jars) == b"levels\n"
    (jars / "bootstrap.checkpoint").write_text("kept", encoding="ascii")
    assert kafka_node._bootstrap_checkpoint(java, jars) == b"kept"
    assert [each.name for each in jars.iterdir()] == ["bootstrap.checkpoint"]


def test_a_path_that_is_not_latin_is_what_java_reads():
    """Was: `/home/josé` became `/home/josÃ©`, and Kafka found no data directory there."""
    written = kafka_node._written({"log.dirs": "/home/josé/数/😀/a\\b"})
    assert written == "log.dirs=/home/jos\\u00e9/\\u6570/\\ud83d\\ude00/a\\u005cb\n"


@pytest.mark.usefixtures("jars")
def test_a_data_directory_with_a_comma_is_refused_in_a_sentence(tmp_path):
    """Was: Kafka looked in two directories, and ended."""
    result = CliRunner().invoke(create_app(), ["broker", "--data-dir", str(tmp_path / "a,b")])
    assert isinstance(result.exception, SettingsError), result.exception
    assert str(result.exception).startswith(f"{tmp_path}/a,b: Kafka would take the comma for the end of this path")
    assert not (tmp_path / "a,b").exists()


@pytest.mark.usefixtures("jars")
def test_a_node_that_ends_at_once_is_not_said_to_be_slow(tmp_path):
    """Was: it "did not start within 60 s", after one."""
    result = CliRunner().invoke(create_app(), ["broker", "--data-dir", str(tmp_path / "kafka"), "--port", "0"])
    assert isinstance(result.exception, BrokerUnavailable), result.exception
    assert str(result.exception).startswith("The embedded Kafka ended with exit code 3. The end of")
    assert "the node ends" in str(result.exception)


STARTS_FOR_LONG = """
import signal, sys, time
from pathlib import Path
from dedup.cli.main import main
from dedup.embedded import kafka_node
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
java, jars = map(Path, sys.argv[1:])
kafka_node.find_java = lambda _: java
kafka_node.install_jars = lambda *_: jars
kafka_node.EmbeddedKafka._ready = lambda *_: print("it starts", flush=True) or time.sleep(600)
sys.argv = ["dedup", "broker", "--port", "0"]
main()
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_broker_that_is_told_to_end_while_it_starts_leaves_no_data_behind(jars, tmp_path, how):
    """Was: a directory `dedup-kafka-*` among the temporary files."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-c", STARTS_FOR_LONG, str(kafka_node.find_java({})), str(jars)]
    environ = os.environ | {"TMPDIR": str(temporary)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environ) as broker:
        assert broker.stdout is not None
        assert broker.stdout.readline() == b"it starts\n"
        assert [each.name.startswith("dedup-kafka-") for each in temporary.iterdir()] == [True]
        broker.send_signal(how)
        assert broker.wait(60) == 128 + how
    assert not list(temporary.iterdir())
