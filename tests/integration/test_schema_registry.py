"""Avro behind a schema registry's framing: Apicurio's registry, two versions, two workers, kills."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import tarfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fastavro
import pytest

from dedup.embedded.java import find_java
from tests.integration.conftest import MakeJob
from tests.integration.fleet import WITHIN_S, Job, Worker, until
from tests.integration.test_admin import DEDUP, dedup, pages
from tests.integration.workload import BASE_MS, Event
from tests.waiting import LoggedProcess

pytestmark = pytest.mark.broker

NAME = "apicurio-registry-app-2.5.11.Final"
URL = f"https://repo1.maven.org/maven2/io/apicurio/apicurio-registry-app/2.5.11.Final/{NAME}-all.tar.gz"
SHA256 = "f894a17f650ec427de72cfb68edfc30f8020743269293e58372e22f67fd4fd15"
FIELDS = [{"name": "id", "type": "string"}, {"name": "n", "type": "int"}]
FIRST = json.dumps({"type": "record", "name": "Order", "fields": FIELDS})
SECOND = json.dumps(
    {
        "type": "record",
        "name": "Order",
        "fields": [{"name": "note", "type": ["null", "string"], "default": None}, *FIELDS],
    }
)


def unpacked() -> Path:
    """Return the directory with Apicurio's registry, which is fetched once."""
    directory = Path.home() / ".cache" / "dedup" / NAME
    if not directory.exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        archive = directory.with_suffix(".part")
        with urllib.request.urlopen(URL, timeout=60) as answer:
            archive.write_bytes(answer.read())
        assert hashlib.sha256(archive.read_bytes()).hexdigest() == SHA256
        ready = directory.with_suffix(".ready")
        with tarfile.open(archive) as files:
            files.extractall(ready, filter="data")
        archive.unlink()
        ready.rename(directory)
    return directory


class Registry(LoggedProcess):
    """Apicurio's registry, which keeps schemas in memory."""

    def __init__(self, directory: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/apis/ccompat/v7"
        java = [str(find_java(os.environ)), "-Xmx256m", f"-Dquarkus.http.port={port}", "-Dquarkus.http.host=127.0.0.1"]
        command = [*java, "-jar", str(unpacked() / f"{NAME}-runner.jar")]
        super().__init__(command, directory / "registry.log")
        until(self.answers, lambda: f"the registry answers: {self.log}")

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/subjects", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    started = Registry(tmp_path_factory.mktemp("registry"))
    yield started
    os.kill(started.pid, signal.SIGCONT)
    started.kill()


def serialized(registry: Registry, schema: str, topic: str, numbers: Iterable[int]) -> list[bytes]:
    """Return orders as confluent-kafka's serializer writes them, after the schema was registered as it does it."""
    body = json.dumps({"schema": schema}).encode()
    headers = {"Content-Type": "application/vnd.schemaregistry.v1+json"}
    request = urllib.request.Request(f"{registry.url}/subjects/{topic}-value/versions", body, headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        schema_id = json.load(answer)["id"]
    parsed, made = fastavro.parse_schema(json.loads(schema)), []
    for number in numbers:
        stream = io.BytesIO()
        stream.write(b"\0" + schema_id.to_bytes(4, "big"))
        fastavro.schemaless_writer(stream, parsed, {"id": f"o-{number}", "n": number})
        made.append(stream.getvalue())
    return made


def job_of(make_job: MakeJob, registry: Registry, topic: str, hops: str, **settings: object) -> Job:
    source = {"topics": [topic], "format": "avro"}
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


def ready(worker: Worker) -> str:
    try:
        with urllib.request.urlopen(f"{pages(worker)}/ready", timeout=10) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            return str(error.read().decode())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("hops", ["direct", "repartitioned"])
def test_two_versions_two_workers_kills_and_a_registry_that_does_not_answer(
    make_job: MakeJob, registry: Registry, topic_names: Callable[[str], str], hops: str
) -> None:
    topic = topic_names("avro-in")
    job = job_of(make_job, registry, topic, hops)
    first = serialized(registry, FIRST, topic, range(400))
    second = serialized(registry, SECOND, topic, range(800))
    old = [Event(number % 2, value, BASE_MS + number) for number, value in enumerate(first)]
    changed = [Event(number % 2, value, BASE_MS + number) for number, value in enumerate(second)]
    new, again = changed[400:], changed[::3]
    workers = [job.start("a"), job.start("b")]
    job.send(old)
    until(lambda: len(job.read(job.output)) == len(old), "the records of the first version are forwarded")
    os.kill(registry.pid, signal.SIGSTOP)
    try:
        job.send([*new, *again])
        until(lambda: any("records wait for schema" in ready(each) for each in workers), "a worker is not ready")
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
        os.kill(registry.pid, signal.SIGCONT)
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


@pytest.mark.parametrize("hops", ["direct", "repartitioned"])
def test_bad_framing_and_unknown_schemas_are_dead_letters_which_verify_understands(
    make_job: MakeJob, registry: Registry, topic_names: Callable[[str], str], hops: str
) -> None:
    topic = topic_names("avro-in")
    job = job_of(make_job, registry, topic, hops, schema_wait="1s")
    (good,) = serialized(registry, FIRST, topic, [1])
    wrong = b"\0\x7f\xff\xff\xff" + good[5:]
    bad = [wrong, good[:4], good[:-1], good + b"\0", b"\1" + good, b"{}", b""]
    in_header = (("__value_schema_id", good[:5]),)
    job.send([Event(0, good, BASE_MS), Event(0, good[5:], BASE_MS, headers=in_header)])
    job.send([Event(0, value, BASE_MS) for value in bad])
    job.finish()
    assert [each.value() for each in job.read(job.output)] == [good]
    reasons = [dict(letter.headers() or [])["dedup-reason"].decode() for letter in job.read(job.topology.dead_letter)]
    assert sorted(reasons) == [
        "not_avro",
        "not_avro",
        "schema_unknown",
        "truncated_framing",
        "truncated_framing",
        "wrong_magic_byte",
        "wrong_magic_byte",
    ]
    dedup(job, "verify")
    with saying(FIRST) as url:  # the schema has come since
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


def test_doctor_says_what_the_registry_is_and_what_is_wrong_with_its_address(
    registry: Registry, make_job: MakeJob, topic_names: Callable[[str], str]
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
