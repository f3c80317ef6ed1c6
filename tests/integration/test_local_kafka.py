"""The embedded Kafka: starts, keeps its data over a SIGKILL, leaves no process behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from confluent_kafka import Producer

from dedup.embedded.child_process import DEDUP
from dedup.embedded.fault_proxy import FaultProxy
from dedup.embedded.java import find_java
from dedup.embedded.kafka_jars import cache_dir
from dedup.embedded.kafka_node import ClassArchive, EmbeddedKafka
from dedup.errors import RegistryUnavailable
from dedup.kafka.schema_registry import SchemaRegistry
from tests.brokers import admin_of
from tests.terminal import WIDTHS, OnTerminal, assert_looks_as_before, screen
from tests.waiting import until


@pytest.fixture(scope="module")
def node() -> Iterator[EmbeddedKafka]:
    """Return a node of this module's own, as it gets killed."""
    with EmbeddedKafka(proxied=True, properties={"message.max.bytes": "2000000"}) as started:
        yield started


def produce(bootstrap: str, topic: str, count: int) -> None:
    """`count` records are in the topic; raises AssertionError otherwise."""
    producer = Producer({"bootstrap.servers": bootstrap, "acks": "all"})
    for number in range(count):
        producer.produce(topic, str(number).encode())
    assert producer.flush(30) == 0


def test_data_and_address_survive_a_sigkill(node: EmbeddedKafka) -> None:
    topic = admin_of(node.bootstrap).create_topic("survivor", partitions=2)
    produce(node.bootstrap, topic, 100)
    address, pid = node.bootstrap, node.process.pid
    node.kill()
    assert not node.running
    node.restart()
    assert node.bootstrap == address
    assert node.process.pid != pid
    assert sum(admin_of(address).end_offsets(topic).values()) == 100


def test_it_shuts_down_in_good_order_and_comes_back(node: EmbeddedKafka) -> None:
    node.restart()
    assert admin_of(node.bootstrap).client.list_topics(timeout=10).brokers


def test_a_node_starts_with_the_classes_that_one_before_it_has_left(node: EmbeddedKafka, tmp_path: Path) -> None:
    # What one leaves that is killed is no archive; the first that ends in good order leaves one, if none is there.
    node.restart()
    java, jars = find_java(os.environ), cache_dir(os.environ)
    archive = ClassArchive.of(java, jars)
    if not has_own_archive(java):
        pytest.skip("this Java has no class archive of its own to build on")
    assert archive.made is None
    with EmbeddedKafka(data_dir=tmp_path) as later:
        assert str(archive.file) in Path(f"/proc/{later.process.pid}/maps").read_text(encoding="utf-8")
        later.kill()
    assert not list(archive.file.parent.glob(f"{archive.file.name}.*"))


def has_own_archive(java: Path) -> bool:
    return (java.resolve().parents[1] / "lib" / "server" / "classes.jsa").is_file()


def test_given_properties_hold(node: EmbeddedKafka) -> None:
    producer = Producer({"bootstrap.servers": node.bootstrap, "message.max.bytes": 3_000_000})
    topic = admin_of(node.bootstrap).create_topic("large")
    outcomes: list[bool] = []
    producer.produce(topic, b"x" * 1_900_000, on_delivery=lambda error, _: outcomes.append(error is None))
    producer.produce(topic, b"x" * 2_100_000, on_delivery=lambda error, _: outcomes.append(error is None))
    producer.flush(30)
    assert sorted(outcomes) == [False, True]


def test_a_proxied_listener_sends_clients_to_the_proxys_port(node: EmbeddedKafka) -> None:
    listener = node.proxied
    # The proxy listens, as librdkafka may ask at the address it was told and no longer at the first one.
    with FaultProxy(listener.broker_port, port=listener.proxy_port):
        told = admin_of(f"127.0.0.1:{listener.broker_port}").client.list_topics(timeout=10).brokers
    assert [broker.port for broker in told.values()] == [listener.proxy_port]


def test_a_paused_node_goes_on(node: EmbeddedKafka) -> None:
    node.process.pause()
    node.process.resume()
    assert admin_of(node.bootstrap).client.list_topics(timeout=10).brokers


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_outlives_the_one_that_started_it(how: signal.Signals, tmp_path: Path) -> None:
    # A test run in the background of a shell inherits SIGINT ignored, and so would the script.
    script = f"""
import signal
import time
signal.signal(signal.SIGINT, signal.default_int_handler)
from pathlib import Path
from dedup.embedded.kafka_node import ClassArchive
from dedup.embedded.kafka_jars import cache_dir
from dedup.embedded.java import find_java
from dedup.embedded.kafka_node import EmbeddedKafka
node = EmbeddedKafka(data_dir=Path({str(tmp_path)!r})).start()
print(node.process.pid, node.process.watchdog_pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        started = [int(word) for word in parent.stdout.readline().split()]
        assert len(started) == 2
        parent.send_signal(how)
        parent.wait()
    assert_gone(started)


def test_no_node_outlives_its_leash(tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("only Linux has parent-death signals")
    node = EmbeddedKafka(data_dir=tmp_path).start()
    os.kill(node.process.watchdog_pid, signal.SIGKILL)
    assert_gone([node.process.pid])
    node.start()  # after an end it did not order itself
    node.stop()


def assert_gone(pids: list[int]) -> None:
    """Every process ends."""
    until(lambda: not any(map(exists, pids)), f"{pids} end")


def exists(pid: int) -> bool:
    """Return whether a process has this id; a zombie counts as gone."""
    try:
        os.kill(pid, 0)
        if not Path("/proc/self/stat").exists():
            return True
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_the_command_runs_a_schema_registry_beside_kafka(tmp_path: Path) -> None:
    log = tmp_path / "broker.log"
    with log.open("wb") as errors:
        command = [*DEDUP, "broker", "--port", "0", "--registry", "--registry-port", "0"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
        assert process.stdout is not None
        with process.stdout as lines:
            bootstrap, url = (lines.readline().decode().strip() for _ in range(2))
            assert admin_of(bootstrap).client.list_topics(timeout=10).brokers
            assert SchemaRegistry(url, {}).kind() == "apicurio-registry 2.5.11.Final"
            process.send_signal(signal.SIGTERM)
            assert process.wait(90) == 0, log.read_text()
    _, *said = log.read_text().splitlines()
    assert said == [
        "Kafka and the schema registry are running; stop them with Ctrl-C.",
        "Kafka and the schema registry have shut down.",
    ]
    with pytest.raises(RegistryUnavailable):
        SchemaRegistry(url, {}).kind()


def test_a_command_whose_terminal_is_closed_deletes_its_data(tmp_path: Path) -> None:
    """Was: it ended at once, and `dedup-kafka-*` stayed among the temporary files."""
    # A test run under `nohup` ignores SIGHUP, and so would the command.
    script = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL); from dedup.cli.main import main; main()"
    command = [sys.executable, "-c", script, "broker", "--port", "0"]
    environ = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environ) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        assert [each.name.startswith("dedup-kafka-") for each in tmp_path.iterdir()] == [True]
        process.send_signal(signal.SIGHUP)
        assert process.wait(90) == 128 + signal.SIGHUP
    assert not list(tmp_path.iterdir())


def test_a_data_directory_may_have_any_letters(tmp_path: Path) -> None:
    """Was: Kafka read its path as Latin-1, and ended."""
    with EmbeddedKafka(data_dir=tmp_path / "josé 数") as node:
        assert admin_of(node.bootstrap).client.list_topics(timeout=10).brokers


def test_the_command_shows_addresses_and_how_to_stop_it() -> None:
    with ExitStack() as stack:
        command = [*DEDUP, "broker", "--port", "0"]
        started = [stack.enter_context(OnTerminal(command, width, NO_COLOR="1")) for width in WIDTHS]
        for each in started:
            each.until_written("Ctrl-C")
            each.process.send_signal(signal.SIGINT)
        for width, each in zip(WIDTHS, started, strict=True):
            shown = screen(each.to_the_end().decode())
            assert each.process.returncode == 130, shown
            shown = re.sub(r"^127.0.0.1:\d+$", "127.0.0.1:PORT", shown, flags=re.MULTILINE)
            shown = re.sub(r"\S+/dedup-kafka-\w+/", "/tmp/dedup-kafka-RANDOM/", shown)
            assert_looks_as_before("broker", width, shown)
            assert max(map(len, shown.splitlines())) <= WIDTHS[0]
