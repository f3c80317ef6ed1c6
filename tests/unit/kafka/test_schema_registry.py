"""What a schema registry may answer, and what is made of it: a schema, none, or nothing to go by."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import pickle
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from dedup.cli.main import create_app
from dedup.connect.sink_connector import Sunk
from dedup.core.framing import MOST_SCHEMA_CHARS, LinkedSchema
from dedup.errors import Problem, RegistryUnavailable, SettingsError
from dedup.kafka import schema_registry
from dedup.kafka.schema_registry import SchemaRegistry, SchemaResolver, asking, registry_findings
from dedup.settings import RegistrySection, Secret, Settings
from dedup.topology.parse import parse

SEVEN, GUID = b"\0\0\0\0\7", b"\1" + bytes(range(16))
TEXT = '{"type":"record","name":"R","fields":[]}'


class Registry(BaseHTTPRequestHandler):
    answers: dict[str, tuple[int, bytes]]
    asked: list[tuple[str, str | None]]
    slow: threading.Event | None = None

    def do_GET(self) -> None:
        slow = self.slow
        type(self).asked.append((self.path, self.headers["Authorization"]))
        code, body = self.answers.get(self.path, (404, b'{"error_code":40403}'))
        self.send_response(code)
        self.send_header("Location", "/schemas/ids/8")
        self.send_header("Content-Length", str(len(body) + (1 if slow else 0)))
        self.end_headers()
        self.wfile.write(body)
        if slow is not None:
            self.wfile.flush()
            slow.wait(60)

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
    return SchemaRegistry.of(RegistrySection(url=handler.url, **options))


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
        ((200, b'["JSON"]'), "it has neither Avro nor Protobuf schemas"),
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


def test_credentials_that_no_header_can_carry_are_not_shown(registry):
    with pytest.raises(RegistryUnavailable, match="characters that HTTP does not allow") as away:
        client(registry, password=Secret("to\nken")).schema(SEVEN)
    assert "ken" not in str(away.value)
    assert away.value.__cause__ is None


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


def sleep_by(sleep, monkeypatch):
    """The module under test sleeps by this function; other threads, such as those that Spark has left, do not."""
    monkeypatch.setattr(schema_registry, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))


def test_a_schema_that_was_found_is_not_asked_for_again(registry):
    asked = client(registry)
    assert asked.schema(SEVEN) is None
    registry.answers["/api/schemas/ids/7"] = answer(schema=TEXT)
    assert [asked.schema(SEVEN), asked.schema(SEVEN)] == [TEXT, TEXT]
    assert len(registry.asked) == 2


def test_with_patience_it_is_asked_until_it_answers(registry, monkeypatch):
    registry.answers["/api/schemas/ids/7"] = 503, b""

    def later(_: float) -> None:
        if len(registry.asked) == 3:
            registry.answers["/api/schemas/ids/7"] = answer(schema=TEXT)

    sleep_by(later, monkeypatch)
    assert client(registry).schema(SEVEN, patience_s=60) == TEXT
    assert len(registry.asked) == 4


def test_a_process_waits_for_unknown_schemas_no_longer_than_it_is_told(registry, monkeypatch):
    slept = []
    sleep_by(slept.append, monkeypatch)
    monkeypatch.setattr(schema_registry, "_PAUSE_S", 1.0)
    monkeypatch.setattr(schema_registry, "_LONGEST_PAUSE_S", 4.0)
    asked = client(registry)
    assert asked.unknown_since_s(SEVEN) == math.inf
    assert asked.schema(SEVEN, unknown_s=10) is None
    assert slept == [1, 2, 4, 4]
    assert asked.unknown_since_s(SEVEN) <= time.monotonic()
    assert asked.schema(GUID, unknown_s=10) is None
    assert len(slept) == 4, "the time is for all schemas together"
    registry.answers["/api/schemas/ids/7"] = answer(schema=TEXT)
    assert asked.schema(SEVEN, unknown_s=10) == TEXT


def test_executors_ask_with_the_credentials_and_share_what_they_found(registry):
    """Spark pickles a topology with its book; each task of a process unpickles it."""
    topology = parse(
        "dedup: 1\nname: t\nsource: {topics: [c], format: avro, partitioned_by: tracking_id}\n"
        "tracking_id: {field: id}\nguard_period: 1h\n",
        name="t",
    )
    section = RegistrySection(url=registry.url, username="u", password=Secret("p"))
    known = asking(topology, Settings(brokers=("localhost:1",), schema_registry=section))
    pickled = pickle.dumps(known)
    books = [pickle.loads(pickled).source.schemas for _ in range(2)]
    assert books[0][SEVEN] is None
    registry.answers["/api/schemas/ids/7"] = answer(schema=TEXT)
    assert [books[1][SEVEN], pickle.loads(pickled).source.schemas[SEVEN]] == [TEXT, TEXT]
    assert [sent for _, sent in registry.asked] == [f"Basic {base64.b64encode(b'u:p').decode()}"] * 2
    assert books[0][SEVEN] is None, "a task judges by what it found first"


def test_a_sink_asks_again_for_a_schema_that_was_unknown(registry, tmp_path, monkeypatch):
    """Was: one early answer "unknown" made dead letters of all later records of the schema, until a restart."""
    found = []

    async def run_sink(topology, _spec, _settings, **_):
        book = pickle.loads(pickle.dumps(topology)).source.schemas
        found.append(book[SEVEN])
        registry.answers["/api/schemas/ids/7"] = answer(schema=TEXT)
        found.append(book[SEVEN])
        return Sunk()

    monkeypatch.setattr("dedup.connect.sink_connector.run_sink", run_sink)
    monkeypatch.setenv("DEDUP_BROKERS", "localhost:1")
    topology = tmp_path / "sink.yaml"
    topology.write_text(
        "dedup: 1\nname: t\nsource: {topics: [c], format: avro, partitioned_by: tracking_id}\n"
        f"tracking_id: {{field: id}}\nguard_period: 1h\noutput: {{topic: o}}\nsink: {{url: 'sqlite:///{tmp_path}/t.db', table: t}}\n"
    )
    settings = ["--set", f"schema_registry.url={registry.url}", "--set", "schema_registry.schema_wait=0s"]
    ended = CliRunner().invoke(create_app(), ["sink", str(topology), *settings])
    assert ended.exit_code == 0, ended.output
    assert found == [None, TEXT]


def test_waiting_for_unknown_schemas_begins_anew_when_a_schema_is_found(registry, monkeypatch):
    slept = []
    sleep_by(slept.append, monkeypatch)
    monkeypatch.setattr(schema_registry, "_PAUSE_S", 1.0)
    asked = client(registry)
    assert asked.schema(SEVEN, unknown_s=1) is None
    assert asked.schema(SEVEN, unknown_s=1) is None
    assert slept == [1]
    registry.answers["/api/schemas/ids/7"] = answer(schema=TEXT)
    assert asked.schema(SEVEN, unknown_s=1) == TEXT
    assert asked.schema(GUID, unknown_s=1) is None
    assert slept == [1, 1]


def test_nobody_is_there():
    with pytest.raises(RegistryUnavailable, match="Connection refused"):
        SchemaRegistry.of(RegistrySection(url="http://127.0.0.1:1")).schema(SEVEN)


def test_settings_that_do_not_fit(tmp_path):
    topology = parse(
        "dedup: 1\nname: t\nsource: {topics: [c], format: avro, partitioned_by: tracking_id}\n"
        "tracking_id: {field: id}\nguard_period: 1h\n",
        name="t",
    )
    with pytest.raises(SettingsError) as missing:
        asking(topology, Settings(brokers=("localhost:1",)))
    assert [problem.place for problem in missing.value.problems] == ["schema_registry.url"]
    with pytest.raises(SettingsError, match=r"schema_registry\.ca_file: /no/file cannot be read"):
        SchemaRegistry.of(RegistrySection(url="https://localhost", ca_file="/no/file"))
    assert isinstance(missing.value.problems[0], Problem)
    (tmp_path / "empty.pem").write_text("# nothing yet\n")
    with pytest.raises(SettingsError, match=r"empty\.pem cannot be read: it contains no certificate"):
        SchemaRegistry.of(RegistrySection(url="https://localhost", ca_file=str(tmp_path / "empty.pem")))


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
        self.since_s = math.inf

    def unknown_since_s(self, ref: bytes) -> float:
        return self.since_s

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
    assert resolver.awaited == [SEVEN]
    assert resolver.book == {}
    told.answers = [TEXT]
    await until(lambda: resolver.book)
    assert not resolver.missing([SEVEN, None])
    await until(lambda: resolver.waiting is None)
    assert resolver.awaited == []
    assert [each.split(".")[0] for each in caplog.messages] == [
        "The registry is away",
        "the schema registry answers again",
    ]
    resolver.close()


@pytest.mark.parametrize(
    "given", [(401, b""), (404, b"no page"), (429, b""), (500, b"{}"), (301, b""), (200, b"<"), None]
)
async def test_ten_minutes_without_a_usable_answer_condemn_nothing(registry, monkeypatch, given):
    """Nor do they count as time in which the registry did not know the schema. None stands for no answer at all."""
    now_s = [0.0]
    monkeypatch.setattr(schema_registry, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    path = "/api/schemas/ids/7"
    if given is None:
        monkeypatch.setattr(schema_registry, "_WITHIN_S", 0.05)
        registry.slow = silent = threading.Event()
    registry.answers[path] = given or (200, b"{")
    resolver = SchemaResolver(client(registry), wait_ms=30_000)

    async def asked_again() -> None:
        count = len(registry.asked) + 2
        await until(lambda: len(registry.asked) >= count)

    for _ in range(10):
        assert resolver.missing([SEVEN])
        now_s[0] += 60
        await asked_again()
    assert (resolver.book, resolver.awaited) == ({}, [SEVEN])
    assert "records wait for schema 7: The schema registry at http" in resolver.waiting
    if given is None:
        registry.slow = None
        silent.set()
    registry.answers[path] = 404, b'{"error_code":40403}'
    now_s[0] += 29
    await asked_again()
    assert resolver.missing([SEVEN])
    assert resolver.book == {}
    registry.answers[path] = answer(schema=TEXT)
    await until(lambda: resolver.book == {SEVEN: TEXT})
    resolver.close()


async def test_a_task_of_spark_waits_for_schemas(monkeypatch):
    monkeypatch.setattr(schema_registry, "_LOOK_S", 0.001)
    told = Told(AWAY, AWAY, TEXT)
    resolver = SchemaResolver(told, wait_ms=0)
    await resolver.found([SEVEN, None], within_s=60)
    assert resolver.book == {SEVEN: TEXT}
    told.answers = [AWAY]
    with pytest.raises(RegistryUnavailable, match="The registry is away"):
        await resolver.found([GUID], within_s=0)
    resolver.close()
    unknown = SchemaResolver(Told(None), wait_ms=0)
    await unknown.found([SEVEN], within_s=60)
    assert unknown.book == {SEVEN: None}, "its records are dead letters"
    unknown.close()


async def test_a_schema_that_this_process_has_waited_for_is_not_awaited_again():
    """Each attempt of a Spark task has a resolver of its own."""
    told = Told(None)
    told.since_s = time.monotonic() - 60
    resolver = SchemaResolver(told, wait_ms=59_000)
    await resolver.found([SEVEN], within_s=60)
    assert (resolver.book, told.asked) == ({SEVEN: None}, 1)
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


def exported(handler, directory) -> int:
    directory.mkdir(exist_ok=True)
    return client(handler).export("shop.orders-value", directory)


def test_exported_schemas_are_used_before_the_registry_and_without_one(registry, tmp_path):
    versions = "/api/subjects/shop.orders-value/versions"
    guid = "00010203-0405-0607-0809-0a0b0c0d0e0f"
    registry.answers[versions] = 200, b"[1, 3]"
    registry.answers[f"{versions}/1"] = answer(id=7, schema=TEXT, version=1)
    registry.answers[f"{versions}/3"] = answer(id=9, schema="message M {}", schemaType="PROTOBUF", guid=guid)
    assert exported(registry, tmp_path) == 2
    assert sorted(each.name for each in tmp_path.iterdir()) == [f"{guid}.json", "7.json", "9.json"]
    registry.asked.clear()
    (tmp_path / "README.md").write_text("not a schema")
    alone = SchemaRegistry.of(RegistrySection(directory=str(tmp_path)))
    for each in (alone, client(registry, directory=str(tmp_path)), pickle.loads(pickle.dumps(alone))):
        assert each.schema(SEVEN) == TEXT
        assert each.schema(GUID) == "message M {}"
    assert registry.asked == []
    assert alone.schema(b"\0\0\0\0\x08") is None
    assert alone.unknown_since_s(b"\0\0\0\0\x08") <= time.monotonic()
    assert alone.kind() == "3 exported schemas"


def test_a_subject_that_is_unknown_or_makes_no_sense_is_not_exported(registry, tmp_path):
    assert exported(registry, tmp_path) == 0
    versions = "/api/subjects/shop.orders-value/versions"
    registry.answers[versions] = 200, b'{"no": "list"}'
    with pytest.raises(RegistryUnavailable, match="no list of versions"):
        exported(registry, tmp_path)
    registry.answers[versions] = 200, b"[1]"
    wrong = [{"id": 7}, {"schema": TEXT, "id": "../7"}, {"schema": TEXT, "id": -1}, {"schema": TEXT, "id": 1 << 32}]
    for members in wrong:
        registry.answers[f"{versions}/1"] = answer(**members)
        with pytest.raises(RegistryUnavailable, match=r"version 1 of shop\.orders-value has no schema or no ID"):
            exported(registry, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_without_schemas_or_with_others(tmp_path):
    with pytest.raises(SettingsError, match=r"missing cannot be read.*dedup schemas export"):
        SchemaRegistry.of(RegistrySection(directory=str(tmp_path / "missing")))
    wrong = {"7": '{"schema": 7}', "8": "[]", "nine": '{"schema": "x"}', "10": "{"}
    for name, text in wrong.items():
        (tmp_path / f"{name}.json").write_text(text)
    with pytest.raises(SettingsError) as refused:
        SchemaRegistry.of(RegistrySection(directory=str(tmp_path)))
    assert len(refused.value.problems) == len(wrong)
    assert all("is no exported schema" in each.text for each in refused.value.problems)


@pytest.mark.parametrize(
    ("fmt", "kind", "found"),
    [
        ("avro", {}, []),
        ("avro", {"schemaType": "AVRO"}, []),
        ("avro", {"schemaType": "JSON"}, [("error", "schema_type_differs")]),
        ("json_schema", {"schemaType": "JSON"}, []),
        ("json_schema", {}, [("error", "schema_type_differs")]),
        ("protobuf", {}, [("error", "schema_type_differs")]),
        ("json", {}, []),
    ],
)
def test_a_subject_whose_schemas_have_another_type_is_found(registry, fmt, kind, found):
    registry.answers["/api/subjects/c-value/versions/latest"] = answer(schema=TEXT, **kind)
    text = f"dedup: 1\nname: t\nsource: {{topics: [c], format: {fmt}}}\ntracking_id: {{key: true}}\nguard_period: 1h\n"
    topology = parse(text, name="t.yaml")
    settings = Settings(brokers=("b:9092",), schema_registry=RegistrySection(url=registry.url))
    findings = registry_findings(topology, settings)
    assert [(each.level, each.code) for each in findings] == found
    assert all("source.format or source.subject" in each.text for each in findings)
    assert len(registry.asked) == (fmt != "json")


def test_values_with_json_schema_need_no_registry():
    text = "dedup: 1\nname: t\nsource: {topics: [c], format: %s}\ntracking_id: {field: id}\nguard_period: 1h\n"
    (found,) = registry_findings(parse(text % "json_schema", name="t.yaml"), Settings(brokers=("b:9092",)))
    assert (found.level, found.code) == ("warning", "schema_not_found")
    with pytest.raises(SettingsError, match=r"schema_registry\.url: is missing"):
        registry_findings(parse(text % "avro", name="t.yaml"), Settings(brokers=("b:9092",)))


def reference(subject: str, version: int = 1, name: str = "") -> dict[str, object]:
    return {"name": name or subject, "subject": subject, "version": version}


def place(subject: str, version: int = 1) -> str:
    return f"/api/subjects/{subject}/versions/{version}?deleted=true"


def referring(registry, *, unless: str = "") -> None:
    """Let schema 7 refer to a and to b, version 3, which refers to a and to a subject whose name needs quoting."""
    registry.answers["/api/schemas/ids/7"] = answer(schema=TEXT, references=[reference("a"), reference("b", 3)])
    answers = {
        place("a"): answer(schema="A", references=[]),
        place("b", 3): answer(schema="B", references=[reference("x/..?y"), reference("a")]),
        place("x%2F..%3Fy"): answer(schema="X", references=None),
    }
    registry.answers.update({path: each for path, each in answers.items() if path != unless})


REFERRED = LinkedSchema(TEXT, (("a", "A"), ("x/..?y", "X"), ("b", "B")))


def test_the_schemas_that_a_schema_refers_to_are_looked_up_once(registry):
    referring(registry)
    asked = client(registry)
    assert asked.schema(SEVEN) == REFERRED
    assert [path for path, _ in registry.asked[1:]] == [place("a"), place("b", 3), place("x%2F..%3Fy")]
    registry.asked.clear()
    registry.answers["/api/schemas/ids/8"] = answer(schema="8", references=[reference("b", 3, name="c")])
    assert asked.schema(b"\0\0\0\0\x08") == LinkedSchema("8", (("x/..?y", "X"), ("a", "A"), ("c", "B")))
    registry.answers["/api/subjects/s/versions/latest"] = registry.answers["/api/schemas/ids/7"]
    assert asked.latest("s") == (REFERRED, "AVRO")
    assert len(registry.asked) == 2


def test_a_schema_whose_reference_is_unknown_is_unknown(registry, caplog):
    referring(registry, unless=place("x%2F..%3Fy"))
    asked = client(registry)
    assert [asked.schema(SEVEN), asked.schema(SEVEN)] == [None, None]
    assert asked.unknown_since_s(SEVEN) <= time.monotonic()
    assert caplog.messages == ["a schema refers to x/..?y version 1, which the schema registry does not know"]
    referring(registry)
    assert asked.schema(SEVEN) == REFERRED


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((401, b""), "it answered 401: it refuses these credentials"),
        ((404, b"404 page not found"), "it answered 404: Confluent's API is not at this address"),
        ((302, b""), "it answered 302: a redirect, which is not followed"),
        ((500, b""), "it answered 500."),
        ((200, b"<html>"), "its answer is not JSON"),
        (answer(schema=7), "its answer has no schema"),
        (answer(schema="A", references=7), "references without a name, subject, or version"),
        (answer(schema="A", references=["a"]), "references without a name, subject, or version"),
        (answer(schema="A", references=[{"name": "a", "subject": "a"}]), "references without a name, subject, or version"),
        (answer(schema="A", references=[reference("a", True)]), "references without a name, subject, or version"),
    ],
)  # fmt: skip
def test_a_registry_that_is_away_when_a_reference_is_looked_up(registry, given, said):
    referring(registry)
    registry.answers[place("b", 3)] = given
    asked = client(registry)
    with pytest.raises(RegistryUnavailable, match=re.escape(said)):
        asked.schema(SEVEN)
    assert asked.unknown_since_s(SEVEN) == math.inf
    referring(registry)
    assert asked.schema(SEVEN) == REFERRED


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({"b": [reference("a")], "a": [reference("b")]}, "refers to b version 1, which refers to itself"),
        ({"b": [reference("c")], "c": [reference("a", 2)]}, "refers to two schemas as a, one of them a version 1"),
        ({f"n{i}": [reference(f"n{i + 1}")] for i in range(60)} | {"b": [reference("n0")]}, "more than 50 levels"),
        ({"b": [reference("a", name=f"n{i}") for i in range(501)]}, "refers to more than 500 other schemas"),
        ({"b": [reference(f"n{i}") for i in range(501)]}, "refers to more than 500 other schemas"),
        ({"b": [reference("long"), reference("longer")]}, "refers to schemas with more than 1,048,576 characters"),
    ],
)
def test_references_that_no_registry_should_have_make_a_schema_unusable(registry, answers, said):
    registry.answers["/api/schemas/ids/7"] = answer(schema=TEXT, references=[reference("b"), reference("a")])
    registry.answers |= {place(f"n{number}"): answer(schema=f"N{number}") for number in range(501)}
    registry.answers |= {place("a", version): answer(schema=f"A{version}") for version in (1, 2)}
    registry.answers |= {place(name): answer(schema="L" * (MOST_SCHEMA_CHARS // 2 + 1)) for name in ("long", "longer")}
    registry.answers |= {place(name): answer(schema=name, references=each) for name, each in answers.items()}
    found = client(registry).schema(SEVEN)
    assert isinstance(found, LinkedSchema)
    assert said in found.fault
    assert len(registry.asked) <= 503


def test_exported_schemas_contain_what_they_refer_to(registry, tmp_path):
    referring(registry)
    versions = "/api/subjects/shop.orders-value/versions"
    registry.answers[versions] = 200, b"[1]"
    given = json.loads(registry.answers["/api/schemas/ids/7"][1])
    registry.answers[f"{versions}/1"] = answer(id=7, **given)
    assert exported(registry, tmp_path) == 1
    file = tmp_path / "7.json"
    assert json.loads(file.read_text())["references"] == given["references"]
    registry.asked.clear()
    alone = SchemaRegistry.of(RegistrySection(directory=str(tmp_path)))
    for each in (alone, client(registry, directory=str(tmp_path)), pickle.loads(pickle.dumps(alone))):
        assert each.schema(SEVEN) == REFERRED
    assert registry.asked == []
    # A file that an older version of dedup wrote does not contain them, but the registry does.
    file.write_text(json.dumps(given))
    old = SchemaRegistry.of(RegistrySection(directory=str(tmp_path))).schema(SEVEN)
    assert "which were not exported" in old.fault
    assert client(registry, directory=str(tmp_path)).schema(SEVEN) == REFERRED
    del registry.answers[place("a")]
    with pytest.raises(RegistryUnavailable, match="it does not know a schema that another one refers to"):
        exported(registry, tmp_path)
    file.write_text(json.dumps(given | {"referenced": [{"name": "a", "schema": 7}]}))
    with pytest.raises(SettingsError, match=r"7\.json is no exported schema: a schema or the name of a reference"):
        SchemaRegistry.of(RegistrySection(directory=str(tmp_path)))
