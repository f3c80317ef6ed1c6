"""What a schema registry may answer, and what is made of it: a schema, none, or nothing to go by."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dedup.errors import Problem, RegistryUnavailable, SettingsError
from dedup.kafka import schema_registry
from dedup.kafka.schema_registry import SchemaRegistry, SchemaResolver, asking
from dedup.settings import RegistrySection, Secret, Settings
from dedup.topology.parse import parse

SEVEN, GUID = b"\0\0\0\0\7", b"\1" + bytes(range(16))
TEXT = '{"type":"record","name":"R","fields":[]}'


class Registry(BaseHTTPRequestHandler):
    answers: dict[str, tuple[int, bytes]]
    asked: list[tuple[str, str | None]]
    slow: threading.Event | None = None

    def do_GET(self) -> None:
        type(self).asked.append((self.path, self.headers["Authorization"]))
        code, body = self.answers.get(self.path, (404, b'{"error_code":40403}'))
        self.send_response(code)
        self.send_header("Location", "/schemas/ids/8")
        self.send_header("Content-Length", str(len(body) + (1 if self.slow else 0)))
        self.end_headers()
        self.wfile.write(body)
        if self.slow is not None:
            self.wfile.flush()
            self.slow.wait(60)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def registry():
    handler = type("Handler", (Registry,), {"answers": {}, "asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        handler.url = f"http://127.0.0.1:{server.server_port}/api"
        yield handler
        if handler.slow is not None:
            handler.slow.set()
        server.shutdown()
        thread.join()


def client(handler, **options) -> SchemaRegistry:
    return SchemaRegistry(RegistrySection(url=handler.url, **options))


def answer(**members: object) -> tuple[int, bytes]:
    return 200, json.dumps(members).encode()


def test_a_schema_is_found_by_its_id_and_by_its_guid(registry):
    registry.answers["/api/schemas/ids/7"] = answer(schema=TEXT)
    registry.answers["/api/schemas/guids/00010203-0405-0607-0809-0a0b0c0d0e0f"] = answer(schema=TEXT, schemaType="AVRO")
    assert client(registry).schema(SEVEN) == TEXT
    assert client(registry).schema(GUID) == TEXT
    assert client(registry).schema(b"\0\xff\xff\xff\xff") is None
    assert registry.asked[-1] == ("/api/schemas/ids/4294967295", None)
    registry.answers["/api/schemas/guids/00010203-0405-0607-0809-0a0b0c0d0e0f"] = 404, b'{"error_code":0}'
    assert client(registry).schema(GUID) is None  # Apicurio 2.5 knows no GUIDs


def test_what_it_is(registry):
    """Stubbed answers; the answers of a real Apicurio are tested in tests/integration/test_schema_registry.py."""
    registry.answers["/api/schemas/types"] = 200, b'["JSON","AVRO"]'
    assert client(registry).kind() == "Confluent's API"
    registry.url += "/apis/ccompat/v7"
    registry.answers["/api/apis/ccompat/v7/schemas/types"] = 200, b'["AVRO"]'
    assert client(registry).kind() == "apicurio-registry"
    registry.answers["/api/apis/registry/v2/system/info"] = 403, b""
    assert client(registry).kind() == "apicurio-registry"
    registry.answers["/api/apis/registry/v2/system/info"] = answer(name="apicurio-registry", version="2")
    assert client(registry).kind() == "apicurio-registry 2"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((401, b""), "it answered 401: it refuses these credentials"),
        ((404, b""), "Confluent's API is not at this address (that of Apicurio ends with /apis/ccompat/v7)"),
        ((200, b"{}"), "Confluent's API is not at this address"),
        ((200, b"null"), "its answer is null"),
        ((200, b"<html>"), "its answer is not JSON"),
        ((200, b'["JSON"]'), "it has no Avro schemas"),
    ],
)
def test_what_is_no_registry_for_avro(registry, given, said):
    registry.answers["/api/schemas/types"] = given
    with pytest.raises(RegistryUnavailable, match=re.escape(said)):
        client(registry).kind()


def test_it_gives_its_credentials(registry):
    client(registry, username="u", password=Secret("p:w")).schema(SEVEN)
    client(registry, password=Secret("token")).schema(SEVEN)
    assert [sent for _, sent in registry.asked] == [f"Basic {base64.b64encode(b'u:p:w').decode()}", "Bearer token"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((401, b""), "it answered 401: it refuses these credentials"),
        ((403, b""), "it answered 403: it refuses these credentials"),
        ((404, b""), "it answered 404: Confluent's API is not at this address"),
        ((404, b"404 page not found"), "it answered 404: Confluent's API is not at this address"),  # a proxy's
        ((404, b'{"error_code":404}'), "it answered 404: Confluent's API is not at this address"),  # Apicurio elsewhere
        ((429, b""), "it answered 429."),
        ((500, b"{}"), "it answered 500."),
        ((301, b""), "it answered 301: a redirect, which is not followed"),
        ((307, b""), "it answered 307: a redirect, which is not followed"),
        ((200, b"<html>"), "its answer is not JSON"),
        ((200, b"\xff"), "its answer is not JSON"),
        ((200, b"[" * 100_000), "its answer is not JSON"),
        ((200, b"[]"), "its answer has no schema"),
        ((200, b'{"schema": {}}'), "its answer has no schema"),
        ((200, b" " * (5 << 20)), "its answer has more than 4,194,304 bytes"),
    ],
)
def test_an_answer_that_says_neither(registry, given, said):
    registry.answers["/api/schemas/ids/7"] = given
    registry.answers["/schemas/ids/8"] = answer(schema=TEXT)
    with pytest.raises(RegistryUnavailable) as away:
        client(registry).schema(SEVEN)
    assert said in str(away.value)
    assert len(registry.asked) == 1


def test_an_answer_that_does_not_end(registry, monkeypatch):
    monkeypatch.setattr(schema_registry, "_WITHIN_S", 0.05)
    registry.slow = threading.Event()
    registry.answers["/api/schemas/ids/7"] = answer(schema=TEXT)
    with pytest.raises(RegistryUnavailable, match=r"timed out|not complete"):
        client(registry).schema(SEVEN)


def test_nobody_is_there():
    with pytest.raises(RegistryUnavailable, match="Connection refused"):
        SchemaRegistry(RegistrySection(url="http://127.0.0.1:1")).schema(SEVEN)


def test_settings_that_do_not_fit():
    topology = parse(
        "dedup: 1\nname: t\nsource: {topics: [c], format: avro, partitioned_by: tracking_id}\n"
        "tracking_id: {field: id}\nguard_period: 1h\n",
        name="t",
    )
    with pytest.raises(SettingsError) as missing:
        asking(topology, Settings(brokers=("localhost:1",)))
    assert [problem.place for problem in missing.value.problems] == ["schema_registry.url"]
    with pytest.raises(SettingsError, match=r"schema_registry\.ca_file: /no/file cannot be read"):
        SchemaRegistry(RegistrySection(url="https://localhost", ca_file="/no/file"))
    assert isinstance(missing.value.problems[0], Problem)


async def until(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


class Told:
    """A registry that says what it was told to, the last answer again and again."""

    def __init__(self, *answers: str | Exception | None) -> None:
        self.answers = list(answers)
        self.asked = 0

    def schema(self, ref: bytes) -> str | None:
        self.asked += 1
        found = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(found, Exception):
            raise found
        return found


AWAY = RegistryUnavailable("The registry is away.")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(schema_registry, "_PAUSE_S", 0.001)
    monkeypatch.setattr(schema_registry, "_LONGEST_PAUSE_S", 0.002)


async def test_records_wait_while_the_registry_is_away(caplog):
    told = Told(AWAY)
    resolver = SchemaResolver(told, wait_ms=0)
    assert resolver.missing([None, SEVEN])
    await until(lambda: told.asked > 5)
    assert resolver.missing([SEVEN])
    assert resolver.waiting == "records wait for schema 7: The registry is away."
    assert resolver.book == {}
    told.answers = [TEXT]
    await until(lambda: resolver.book)
    assert not resolver.missing([SEVEN, None])
    await until(lambda: resolver.waiting is None)
    assert [each.split(".")[0] for each in caplog.messages] == [
        "The registry is away",
        "the schema registry answers again",
    ]
    resolver.close()


async def test_an_unknown_schema_is_asked_for_again_then_believed_then_asked_for_again(caplog):
    resolver = SchemaResolver(Told(None, AWAY, None, None, TEXT), wait_ms=60_000)
    assert resolver.missing([SEVEN])
    await until(lambda: resolver.book == {SEVEN: TEXT})
    told = Told(None)
    resolver = SchemaResolver(told, wait_ms=0)
    assert resolver.missing([GUID])
    await until(lambda: resolver.book == {GUID: None})
    assert (
        "does not know schema 00010203-0405-0607-0809-0a0b0c0d0e0f: its records are dead letters" in caplog.messages[-1]
    )
    # It may know it later: records do not wait for that again.
    assert not resolver.missing([GUID])
    told.answers = [TEXT]
    await until(lambda: resolver.missing([GUID]) or resolver.book[GUID] == TEXT)
    assert resolver.book == {GUID: TEXT}
    resolver.close()


async def test_nothing_is_to_wait_for():
    resolver = SchemaResolver(Told(AWAY), wait_ms=0)
    assert not resolver.missing([None])
    assert resolver.waiting is None
