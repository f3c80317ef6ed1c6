"""`dedup doctor` as far as it goes without a broker: layers, sentences, remedies, exit codes."""

from __future__ import annotations

import asyncio
import json
import socket
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from dedup.cli import status
from dedup.cli.doctor import LAYERS, Symptom, _of_topics, _symptom, in_words, layer_of
from dedup.cli.main import create_app
from dedup.kafka import connection as diagnosing
from dedup.kafka.connection import Connection, Diagnosis, Trouble
from dedup.kafka.topic_admin import Topic
from dedup.kafka.wire import CommittedOffset
from dedup.settings import Security, Settings, TopicDefaults
from dedup.topology.parse import parse


def doctor(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(create_app(), ["doctor", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_nothing_listens(closed_port):
    code, text = doctor("--set", f"brokers=127.0.0.1:{closed_port}")
    assert code == 5
    assert text.splitlines() == [
        "DNS: ok",
        "TCP: wrong",
        f"    127.0.0.1:{closed_port}: nothing can be reached there (connection refused)",
        "    -> Start the broker, correct `brokers`, or open the firewall",
        *(f"{layer}: not checked" for layer in LAYERS[2:]),
    ]


def test_an_unknown_name_is_told_apart_from_a_silent_host(closed_port):
    code, text = doctor("--json", "--set", f"brokers=[no-such-host.invalid:9092, 127.0.0.1:{closed_port}]")
    assert code == 5
    found = json.loads(text)
    assert [each["layer"] for each in found["symptoms"]] == ["DNS", "TCP"]
    assert all(each["problem"] and each["remedy"] for each in found["symptoms"])
    assert [each["layer"] for each in found["layers"] if each["looked_at"]] == ["DNS", "TCP"]


@pytest.mark.parametrize("trouble", Trouble)
def test_every_trouble_has_a_layer_and_one_remedy(trouble):
    connection = Connection(("b:1",), Security(protocol="SASL_SSL", mechanism="PLAIN", username="me"))
    text = diagnosing._sentence(trouble, connection)
    symptom = _symptom(Diagnosis("b:1", trouble, f"b:1: {text} (what was said)"), "")
    assert symptom.layer == layer_of(trouble)
    assert symptom.problem.endswith(" (what was said)")
    assert symptom.remedy[0].isupper()
    assert "what was said" not in symptom.remedy
    assert ". " not in symptom.remedy


def test_a_warning_is_no_error():
    lines = list(in_words([Symptom("topics", "warning", "a", "b")], frozenset(LAYERS), 2))
    more = {"version": " (transactions of version 2)"}
    assert lines == [
        *(f"{layer}: ok{more.get(layer, '')}" for layer in LAYERS[:-2]),
        "topics: warning",
        "    a",
        "    -> b",
        "schema registry: ok",
    ]


def test_a_registry_that_does_not_answer_is_reported_even_if_no_broker_answers(closed_port):
    at = f"127.0.0.1:{closed_port}"
    code, text = doctor("--set", f"brokers={at}", "--set", f"schema_registry.url=http://{at}")
    assert code == 5
    assert text.splitlines()[-3:] == [
        "schema registry: wrong",
        f"    The schema registry at http://{at} does not say what a schema is: [Errno 111] Connection refused",
        "    -> Start the registry, or correct `schema_registry` in the config file; records wait until it answers",
    ]


def test_a_registry_that_is_needed_and_not_configured_ends_with_2(closed_port, tmp_path):
    topology = tmp_path / "orders.yaml"
    source = "source: {topics: [orders], format: avro, partitioned_by: tracking_id}"
    topology.write_text(
        f"dedup: 1\nname: orders\n{source}\ntracking_id: {{field: id}}\nguard_period: 1h\noutput: {{topic: unique}}\n"
    )
    result = CliRunner().invoke(create_app(), ["doctor", str(topology), "--set", f"brokers=127.0.0.1:{closed_port}"])
    assert getattr(result.exception, "exit_code", None) == 2
    assert "schema_registry.url" in str(result.exception)


def test_a_mistake_in_the_config_ends_with_2():
    result = CliRunner().invoke(create_app(), ["doctor", "--set", "brokers=localhost:1", "--set", "brocker=x"])
    assert getattr(result.exception, "exit_code", None) == 2


TOPOLOGY = parse(
    "dedup: 1\nname: t\nsource: {topics: [c]}\ntracking_id: {field: id}\nguard_period: 1h\noutput: {topic: out}\n",
    name="t.yaml",
    read_file=lambda _: "",
)


def of_topics(settings, *topics):
    """Return what doctor finds in a cluster in which the group has judged nothing yet."""
    have = {each.name: each for each in topics}

    async def found(names):
        return {name: have[name] for name in names if name in have}

    async def nothing_committed(_group, _place, *, stable):
        return CommittedOffset(0, None)

    wire = SimpleNamespace(committed_offset=nothing_committed)
    return asyncio.run(_of_topics(TOPOLOGY, settings, wire, SimpleNamespace(topics=found)))


def test_partitions_without_a_leader_are_named():
    """Was: doctor found nothing, although no transaction could complete."""
    topics = (Topic("c", "1", 4, {}, (0, 2)), Topic("t.changelog", "2", 4, {}, (3,)), Topic("out", "3", 4))
    ((symptom,), layers) = of_topics(Settings(brokers=("localhost:1",)), *topics)
    assert layers == {"leaders"}, "without leaders, the state cannot be read"
    assert (symptom.layer, symptom.level) == ("leaders", "error")
    assert symptom.problem.startswith("partitions without a leader: c 0, 2; t.changelog 3; no transaction")
    assert symptom.remedy.startswith("Start the brokers that hold these partitions; if they run, look in their logs")


@pytest.mark.parametrize(("create", "level"), [(True, "warning"), (False, "error")])
def test_a_missing_topic_is_an_error_if_no_worker_may_create_it(monkeypatch, tmp_path, create, level):
    async def none_idle(*_):
        return []

    monkeypatch.setattr(status, "idle_now", none_idle)
    settings = Settings(brokers=("localhost:1",), state_dir=tmp_path, topics=TopicDefaults(create=create))
    found, layers = of_topics(settings, Topic("c", "1", 4))
    assert layers == {"leaders", "topics"}
    assert ("Topic 't.changelog' does not exist; `run` or `apply` creates it", level) in {
        (each.problem, each.level) for each in found
    }
