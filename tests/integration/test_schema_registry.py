"""Avro and Protobuf behind a schema registry's framing: Apicurio's registry, two versions, two workers, kills."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dedup.embedded.registry_node import EmbeddedRegistry
from tests.integration.apicurio import FIRST, SECOND, linked, serialized
from tests.integration.conftest import MakeJob
from tests.integration.fleet import WITHIN_S, Job, Worker, until
from tests.integration.test_admin import DEDUP, dedup, pages
from tests.integration.workload import BASE_MS, Event

pytestmark = pytest.mark.broker

BOTH = [(fmt, hops) for fmt in FIRST for hops in ("direct", "repartitioned")]


@pytest.fixture(scope="module")
def registry() -> Iterator[EmbeddedRegistry]:
    with EmbeddedRegistry() as started:
        yield started


def job_of(
    make_job: MakeJob, registry: EmbeddedRegistry, topic: str, hops: str, fmt: str = "avro", **settings: object
) -> Job:
    source = {"topics": [topic], "format": fmt}
    if hops == "direct":
        source["partitioned_by"] = "tracking_id"
    config = {"schema_registry": {"url": registry.url, **settings}, "web": {"enabled": True, "port": 0}}
    return make_job(document={"source": source, "idle_after": "1s"}, config=config)


@contextmanager
def saying(text: str | None) -> Iterator[str]:
    """Yield the address of a registry that has this schema for every ID, or none at all."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404 if text is None else 200)
            self.end_headers()
            self.wfile.write(json.dumps({"error_code": 40403} if text is None else {"schema": text}).encode())

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def awaited(worker: Worker) -> bool:
    """Return whether the worker's metrics say that records wait for a schema."""
    with urllib.request.urlopen(f"{pages(worker)}/metrics", timeout=10) as answer:
        return "\ndedup_schemas_awaited 1.0\n" in answer.read().decode()


def ready(worker: Worker) -> str:
    try:
        with urllib.request.urlopen(f"{pages(worker)}/ready", timeout=10) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            return str(error.read().decode())


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("fmt", "hops"), BOTH)
def test_two_versions_two_workers_kills_and_a_registry_that_does_not_answer(
    make_job: MakeJob, registry: EmbeddedRegistry, topic_names: Callable[[str], str], fmt: str, hops: str
) -> None:
    topic = topic_names(f"{fmt}-in")
    job = job_of(make_job, registry, topic, hops, fmt)
    first = serialized(registry, FIRST[fmt], topic, range(400))
    second = serialized(registry, SECOND[fmt], topic, range(800))
    old = [Event(number % 2, value, BASE_MS + number) for number, value in enumerate(first)]
    changed = [Event(number % 2, value, BASE_MS + number) for number, value in enumerate(second)]
    new, again = changed[400:], changed[::3]
    workers = [job.start("a"), job.start("b")]
    job.send(old)
    until(lambda: len(job.read(job.output)) == len(old), "the records of the first version are forwarded")
    registry.process.pause()
    try:
        job.send([*new, *again])
        until(lambda: any("records wait for schema" in ready(each) for each in workers), "a worker is not ready")
        until(lambda: any(map(awaited, workers)), "a worker's metrics say so")
        workers[0].kill()
        workers.append(job.start("a"))
        said = "Partitions with records of this schema wait"
        until(
            lambda: any(said in each.log for each in workers[1:]),
            lambda: f"a worker says that it waits: {[each.log for each in workers[1:]]}",
        )
        waiting = next(each for each in workers[1:] if said in each.log)
        assert waiting.stop() == 0, waiting.log
        workers.append(job.start(waiting.id))
        assert len(job.read(job.output)) == len(old)
        assert job.read(job.topology.dead_letter) == []
    finally:
        registry.process.resume()
    until(lambda: len(job.read(job.output)) > len(old), "the partitions go on")
    for each in workers:
        each.kill()
    job.finish("a")
    forwarded = sorted(each.value() for each in job.read(job.output))
    assert forwarded == sorted(event.value for event in [*old, *new] if event.value is not None)
    assert job.read(job.topology.dead_letter) == []
    dedup(job, "verify")
    found = json.loads(dedup(job, "explain", "o-3", "--json"))
    assert sorted(each["verdict"] for each in found["records"]) == ["duplicate", "unique"]
    assert found["contradictions"] == 0


@pytest.mark.parametrize(("fmt", "hops"), BOTH)
def test_bad_framing_and_unknown_schemas_are_dead_letters_which_verify_understands(
    make_job: MakeJob, registry: EmbeddedRegistry, topic_names: Callable[[str], str], fmt: str, hops: str
) -> None:
    topic = topic_names(f"{fmt}-in")
    job = job_of(make_job, registry, topic, hops, fmt, schema_wait="1s")
    (good,) = serialized(registry, FIRST[fmt], topic, [1])
    wrong = b"\0\x7f\xff\xff\xff" + good[5:]
    bad = [wrong, good[:4], good[:-1], good + b"\0", b"\1" + good, b"{}", b""]
    head = 5 if fmt == "avro" else 6
    if fmt == "protobuf":
        bad += [good[:5] + b"\2\x14" + good[6:], good[:5] + b"\1" + good[6:], good[:5] + b"\2"]
    in_header = (("__value_schema_id", good[:head]),)
    job.send([Event(0, good, BASE_MS), Event(0, good[head:], BASE_MS, headers=in_header)])
    job.send([Event(0, value, BASE_MS) for value in bad])
    job.finish()
    assert [each.value() for each in job.read(job.output)] == [good]
    reasons = [dict(letter.headers() or [])["dedup-reason"].decode() for letter in job.read(job.topology.dead_letter)]
    expected = [f"not_{fmt}"] * 2 + ["schema_unknown"] + ["truncated_framing"] * 2 + ["wrong_magic_byte"] * 2
    if fmt == "protobuf":
        expected += ["schema_refused", "bad_message_indexes", "truncated_framing"]
    assert sorted(reasons) == sorted(expected)
    dedup(job, "verify")
    with saying(FIRST[fmt]) as url:  # the schema has come since
        why = "the schema registry did not know" if hops == "direct" else "dead letters of the repartition step"
        assert f"not provable, 1 records: {why}" in dedup(job, "verify", DEDUP_SCHEMA_REGISTRY__URL=url)
    with saying(None) as url:  # the schema of a record that was forwarded is gone
        said = dedup(job, "verify", code=3, DEDUP_SCHEMA_REGISTRY__URL=url)
        assert "Nothing can be verified until the schema is registered again" in said
    assert "ok" in dedup(job, "check", "--broker")
    lines = "".join(json.dumps({"value_base64": base64.b64encode(each).decode()}) + "\n" for each in (good, wrong))
    command = [*DEDUP, "try", str(job.topology_file), "--envelope", "--config", str(job.config_file)]
    tried = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=WITHIN_S, check=True).stdout
    assert re.search(r"line 1 +unique", tried)
    assert "schema_unknown: the schema registry does not know the value's schema, 2147483647" in tried


@pytest.mark.parametrize("fmt", FIRST)
def test_exported_schemas_serve_where_there_is_no_registry(
    make_job: MakeJob, registry: EmbeddedRegistry, topic_names: Callable[[str], str], fmt: str
) -> None:
    topic = topic_names(f"{fmt}-in")
    job = job_of(make_job, registry, topic, "direct", fmt)
    values = serialized(registry, FIRST[fmt], topic, range(50)) + serialized(registry, SECOND[fmt], topic, range(100))
    job.send([Event(number % 2, value, BASE_MS + number) for number, value in enumerate(values[:120])])
    schemas = job.directory / "schemas"
    config = json.loads(job.config_file.read_text())
    config["schema_registry"]["directory"] = str(schemas)
    job.config_file.write_text(json.dumps(config))
    assert f"{topic}-value: 2 versions" in dedup(job, "schemas export", str(schemas))
    assert len(list(schemas.iterdir())) == 2
    del config["schema_registry"]["url"]
    job.config_file.write_text(json.dumps(config))
    assert "schema registry: ok (2 exported schemas)" in dedup(job, "doctor")
    assert "no schema registry was asked" in dedup(job, "check", "--broker")
    assert "schema_registry.url: is missing" in dedup(job, "schemas export", str(schemas), code=2)
    job.finish()
    assert len(job.read(job.output)) == 100 - 30
    assert job.read(job.topology.dead_letter) == []
    dedup(job, "verify")
    assert len(json.loads(dedup(job, "explain", "o-3", "--json"))["records"]) == 2
    next(iter(schemas.iterdir())).unlink()
    assert "or is in `schema_registry.directory`" in dedup(job, "verify", code=3)


@pytest.mark.parametrize(("fmt", "hops"), [("avro", "direct"), ("protobuf", "repartitioned")])
def test_schemas_that_refer_to_other_subjects(
    make_job: MakeJob, registry: EmbeddedRegistry, topic_names: Callable[[str], str], fmt: str, hops: str
) -> None:
    topic = topic_names(f"{fmt}-in")
    source = {"topics": [topic], "format": fmt} | ({"partitioned_by": "tracking_id"} if hops == "direct" else {})
    document = {"source": source, "tracking_id": {"field": "head.id"}, "idle_after": "1s"}
    job = make_job(document=document, config={"schema_registry": {"url": registry.url}})
    values = linked(registry, fmt, topic, range(200))
    job.send([Event(number % 2, value, BASE_MS + number) for number, value in enumerate([*values, *values])])
    assert "ok" in dedup(job, "check", "--broker")
    job.finish()
    assert sorted(each.value() for each in job.read(job.output)) == sorted(values)
    assert job.read(job.topology.dead_letter) == []
    dedup(job, "verify")
    schemas = job.directory / "schemas"
    assert f"{topic}-value: 1 version" in dedup(job, "schemas export", str(schemas))
    job.config_file.write_text(
        json.dumps(json.loads(job.config_file.read_text()) | {"schema_registry": {"directory": str(schemas)}})
    )
    dedup(job, "verify")
    assert len(json.loads(dedup(job, "explain", "o-4", "--json"))["records"]) == 2


def test_schemas_of_a_subject_that_the_registry_does_not_have(
    make_job: MakeJob, registry: EmbeddedRegistry, topic_names: Callable[[str], str]
) -> None:
    source = {"topics": [topic_names("avro-in")], "format": "avro", "subject": "nobody-value"}
    job = make_job(document={"source": source}, config={"schema_registry": {"url": registry.url}})
    said = dedup(job, "schemas export", str(job.directory / "schemas"), code=2)
    assert "nobody-value: is not in the schema registry" in said
    assert "the schema registry has no subject nobody-value" in dedup(job, "check", "--broker")


def test_doctor_says_what_the_registry_is_and_what_is_wrong_with_its_address(
    registry: EmbeddedRegistry, make_job: MakeJob, topic_names: Callable[[str], str]
) -> None:
    job = job_of(make_job, registry, topic_names("avro-in"), "direct")
    said = dedup(job, "doctor")
    assert re.search(r"^schema registry: ok \(apicurio-registry 2\.5\.11\.Final\)$", said, re.MULTILINE), said
    wrong = job_of(make_job, registry, topic_names("avro-in"), "direct", url=registry.url.removesuffix("/ccompat/v7"))
    said = dedup(wrong, "doctor", code=5)
    assert "schema registry: wrong" in said
    assert "Confluent's API is not at this address (that of Apicurio ends with /apis/ccompat/v7)" in said


def test_without_a_registry_the_worker_says_what_is_missing(
    make_job: MakeJob, topic_names: Callable[[str], str]
) -> None:
    source = {"topics": [topic_names("avro-in")], "format": "avro", "partitioned_by": "tracking_id"}
    job = make_job(document={"source": source})
    worker = job.start()
    assert worker.wait() == 2, worker.log
    assert "schema_registry.url: is missing" in worker.log
    assert job.topology.changelog_topic not in job.admin.client.list_topics(timeout=30).topics
