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
from tests.integration.apicurio import FIRST, SECOND, linked, registered, serialized
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
def saying(text: str | None, code: int = 404) -> Iterator[str]:
    """Yield the address of a registry that has this schema for every ID, or none at all, or that answers an error."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(code if text is None else 200)
            self.end_headers()
            self.wfile.write(json.dumps({"error_code": code * 100 + 3} if text is None else {"schema": text}).encode())

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
        assert f"not provable, 1 record: {why}" in dedup(job, "verify", DEDUP_SCHEMA_REGISTRY__URL=url)
    with saying(None) as url:  # the schema of the records that were judged is gone
        said = " ".join(dedup(job, "verify", DEDUP_SCHEMA_REGISTRY__URL=url).split())  # the lines are wrapped
        gone = 4 if fmt == "avro" else 5  # Two were judged; the others are dead letters because of their values.
        assert f"not provable, {gone} records: the schema registry no longer knows their schema" in said
        assert f"was deleted; records with this schema: {gone} (first: {topic}/0 offset " in said
        assert f"{topic}/0 offset 0, {topic}/0 offset 1" in said
        assert f"lost 0 duplicated 0 not provable {gone}" in said
    with saying(None, 401) as url:  # nobody has said that the schema is gone
        assert "refuses these credentials" in dedup(job, "verify", code=5, DEDUP_SCHEMA_REGISTRY__URL=url)
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


@pytest.mark.parametrize(("fmt", "hops"), BOTH)
def test_records_of_a_deleted_schema_are_not_provable_and_the_others_are_verified(
    make_job: MakeJob, registry: EmbeddedRegistry, topic_names: Callable[[str], str], fmt: str, hops: str
) -> None:
    topic = topic_names(f"{fmt}-in")
    job = job_of(make_job, registry, topic, hops, fmt)
    old, new = (serialized(registry, schema[fmt], topic, range(60)) for schema in (FIRST, SECOND))
    later_ms = 5 * 86_400_000
    # Both partitions, the old schema, repeats of it with the new schema, and others, long after their guard periods.
    values = [*old[:10], *new[:20], *new[30:60], *new[40:50]]
    times_ms = [BASE_MS + number + (number >= 30) * later_ms for number in range(len(values))]
    job.send([Event(number % 2, value, at) for number, (value, at) in enumerate(zip(values, times_ms, strict=True))])
    job.finish()
    assert "not provable" not in dedup(job, "verify")
    schemas, page = job.directory / "schemas", job.directory / "report.html"
    dedup(job, "schemas export", str(schemas))
    gone = str(int.from_bytes(old[0][1:5], "big"))
    (schemas / f"{gone}.json").unlink()
    config = json.loads(job.config_file.read_text())
    config["schema_registry"] = {"directory": str(schemas)}
    job.config_file.write_text(json.dumps(config))
    said = " ".join(dedup(job, "verify", "--report", str(page)).split())  # the lines are wrapped
    assert f"schema {gone} was deleted; records with this schema: 10 (first: {topic}/" in said
    report = json.loads(page.with_suffix(".json").read_text())
    assert (report["passed"], sum(books["unjudged"] for books in report["books"])) == (True, 10)
    assert (report["schemas_gone"][gone]["records"], len(report["schemas_gone"][gone]["first"])) == (10, 5)
    # Only what may repeat a record of the old schema is in doubt. Two feeds do not reach the later time together.
    itself, after = report["not_provable"].values()
    assert (itself, after) == (10, 20) if hops == "direct" else (itself == 10 and 20 <= after <= 60)
    assert f"schema {gone} was deleted; records with this schema: 10 (first: " in page.read_text()
    job.producer.produce(job.output, new[59], partition=1, timestamp=times_ms[59])
    assert job.producer.flush(WITHIN_S) == 0
    assert "lost 0  duplicated 1  not provable" in dedup(job, "verify", code=4)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("fmt", FIRST)
def test_equal_members_of_keys_of_two_schema_versions_are_one_id(
    make_job: MakeJob, registry: EmbeddedRegistry, topic_names: Callable[[str], str], fmt: str
) -> None:
    """The producers choose the partition by the key's bytes, which differ; values are plain JSON."""
    topic = topic_names(f"{fmt}-keys")
    job = make_job(
        document={
            "source": {"topics": [topic], "key_format": fmt},
            "tracking_id": {"key": "id"},
            "duplicates": f"{topic}.again",
            "idle_after": "1s",
        },
        config={"schema_registry": {"url": registry.url, "schema_wait": "1s"}},
    )
    first = serialized(registry, FIRST[fmt], topic, range(300), of="key")
    second = serialized(registry, SECOND[fmt], topic, range(400), of="key")
    head = 5 if fmt == "avro" else 6
    in_header = (("__key_schema_id", first[7][:head]),)
    bad = [b"\0\x7f\xff\xff\xff" + first[0][5:], first[0][:-1], b"{}", None]
    worker = job.start()
    job.send([Event(row % 2, b"%d" % row, BASE_MS + row, key) for row, key in enumerate(first)])
    until(lambda: len(job.read(job.output)) == 300, "the keys of the first version are forwarded")
    registry.process.pause()
    try:
        job.send([Event((row + 1) % 2, b"%d" % row, BASE_MS + 300 + row, key) for row, key in enumerate(second)])
        said = "Partitions with records of this schema wait"
        until(lambda: said in worker.log, lambda: f"the worker says that it waits: {worker.log}")
    finally:
        registry.process.resume()
    job.send([Event(0, b"7", BASE_MS + 700, first[7][head:], headers=in_header)])
    job.send([Event(1, b"-1", BASE_MS + 700, key) for key in bad])
    until(lambda: len(job.read(job.topology.dead_letter)) == len(bad), "the bad keys are dead letters")
    worker.kill()
    job.finish()
    forwarded = job.read(job.output)
    assert sorted(int(each.value() or b"") for each in forwarded) == list(range(400))
    assert {each.key() for each in forwarded} == {*first, *second[300:]}
    assert len(job.read(f"{topic}.again")) == 301
    letters = [dict(each.headers() or []) for each in job.read(job.topology.dead_letter)]
    reasons = ["id_null", f"not_{fmt}", "schema_unknown", "wrong_magic_byte"]
    assert sorted(each["dedup-reason"].decode() for each in letters) == reasons
    assert all("key" in each["dedup-detail"].decode() for each in letters)
    dedup(job, "verify")
    found = json.loads(dedup(job, "explain", "o-3", "--json"))
    assert sorted(each["verdict"] for each in found["records"]) == ["duplicate", "unique"]
    said = dedup(job, "check", "--broker")
    assert "ok" in said
    assert "schema_not_found" not in said
    schemas = job.directory / "schemas"
    assert f"{topic}-key: 2 versions" in dedup(job, "schemas export", str(schemas))
    gone = str(int.from_bytes(first[0][1:5], "big"))
    (schemas / f"{gone}.json").unlink()
    config = json.loads(job.config_file.read_text()) | {"schema_registry": {"directory": str(schemas)}}
    job.config_file.write_text(json.dumps(config))
    said = " ".join(dedup(job, "verify").split())
    assert f"schema {gone} was deleted; records with this schema: 302 (first: {topic}/" in said


@pytest.mark.parametrize(
    ("fmt", "pinned", "unique"), [("avro", False, 700), ("avro", True, 400), ("protobuf", True, 400)]
)
def test_content_is_read_with_the_schema_of_each_value_or_with_one_for_all(
    make_job: MakeJob,
    registry: EmbeddedRegistry,
    topic_names: Callable[[str], str],
    fmt: str,
    pinned: bool,
    unique: int,
) -> None:
    """The second version has one more field, which is null in Avro, and which no value has in Protobuf."""
    topic, file = topic_names(f"{fmt}-in"), {"avro": "order.avsc", "protobuf": "order.proto"}[fmt]
    job = make_job(
        document={
            "source": {"topics": [topic], "format": fmt},
            "tracking_id": {"content": {"schema": file} if pinned else {"exclude": []}},
            "conflicts": {"exclude": ["n"], "schema": file},
            "idle_after": "1s",
        },
        config={"schema_registry": {"url": registry.url}},
        files={file: FIRST[fmt]},
    )
    first = serialized(registry, FIRST[fmt], topic, range(300))
    second = serialized(registry, SECOND[fmt], topic, range(400))
    job.send([Event(row % 2, value, BASE_MS + row) for row, value in enumerate([*first, *second, *first])])
    worker = job.start()
    until(lambda: len(job.read(job.output)) >= unique, "the events are forwarded")
    worker.kill()
    job.finish()
    forwarded = [each.value() for each in job.read(job.output)]
    assert len(forwarded) == len(set(forwarded)) == unique
    assert set(forwarded) == {*first, *(second if unique > 400 else second[300:])}
    assert job.read(job.topology.dead_letter) == []
    dedup(job, "verify")
    assert ("content_of_schemas" in dedup(job, "check", "--broker")) is not pinned


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


JSON_SCHEMA = json.dumps(
    {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$ref": "#/definitions/Order",
        "definitions": {
            "Order": {
                "type": "object",
                "properties": {"id": {"type": "string"}, "lines": {"type": "array"}, "n": {"type": "integer"}},
                "additionalProperties": False,
            }
        },
    }
)


@pytest.mark.parametrize("fmt", [*FIRST, "json_schema"])
def test_check_says_where_the_file_names_a_member_that_the_newest_schema_does_not_have(
    make_job: MakeJob, registry: EmbeddedRegistry, topic_names: Callable[[str], str], fmt: str
) -> None:
    topic = topic_names(f"{fmt}-in")
    schema, kind = (JSON_SCHEMA, "JSON") if fmt == "json_schema" else (FIRST[fmt], fmt.upper())
    registered(registry, f"{topic}-value", schema, kind)
    job = job_of(make_job, registry, topic, "direct", fmt)
    assert "ok" in dedup(job, "check", "--broker")
    document = json.loads(job.topology_file.read_text())
    document |= {"tracking_id": {"fields": ["id", "number"]}, "event_time": {"field": "id", "unit": "ms"}}
    job.topology_file.write_text(json.dumps(document, indent=1))
    said = dedup(job, "check", "--broker", code=2)
    lines = job.topology_file.read_text().splitlines()
    number, time = lines.index('   "number"') + 1, lines.index('  "field": "id",') + 1
    assert f"{job.topology_file}:{number}:4: tracking_id: number is not in the schema {topic}-value" in said
    assert f"{job.topology_file}:{time}:12: event_time: id has the type string in the schema {topic}-value" in said


def test_check_says_that_the_values_have_another_format(
    make_job: MakeJob, registry: EmbeddedRegistry, topic_names: Callable[[str], str]
) -> None:
    topic = topic_names("avro-in")
    registered(registry, f"{topic}-value", FIRST["avro"], "AVRO")
    said = dedup(job_of(make_job, registry, topic, "direct", "json_schema"), "check", "--broker", code=2)
    assert (
        f"the newest schema of the subject {topic}-value has the type AVRO, but the topology reads json_schema" in said
    )


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
