"""200,000 orders of each format with a schema registry, written by Confluent's own serializers: `-m long`.

Not in the lock: the serializers need `pip install 'confluent-kafka[avro,json,protobuf,schemaregistry]'`.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka.serialization import MessageField, SerializationContext

from dedup.core.extract_one import Format, One, Recipe, extract_one
from dedup.core.framing import LinkedSchema, SchemaBook
from dedup.core.tracking_id import FieldRule, TrackingId
from dedup.embedded.registry_node import EmbeddedRegistry
from dedup.kafka.schema_registry import SchemaRegistry
from dedup.settings import RegistrySection
from tests.integration.apicurio import FILES, FIRST, LINKED, SECOND
from tests.integration.conftest import MakeJob
from tests.integration.fleet import Job, until
from tests.integration.test_admin import dedup
from tests.integration.workload import BASE_MS, Event
from tests.protoc import compiled

pytest.importorskip("authlib", reason="see the module's text")
sr = pytest.importorskip("confluent_kafka.schema_registry")
avro, json_schema, protobuf = (
    pytest.importorskip(f"confluent_kafka.schema_registry.{each}") for each in ("avro", "json_schema", "protobuf")
)
pytestmark = [pytest.mark.broker, pytest.mark.long, pytest.mark.timeout(1200)]

ORDERS = 200_000
PER_S = 2_500
PARTITIONS = 8
KILLS = 5
FROZEN_S = 60.0
JSON_SCHEMA = [
    json.dumps({"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "properties": properties})
    for properties in (
        {"id": {"type": "string"}, "n": {"type": "integer"}},
        {"id": {"type": "string"}, "n": {"type": "integer"}, "note": {"type": "string"}},
    )
]


@pytest.fixture(scope="module")
def registry() -> Iterator[EmbeddedRegistry]:
    with EmbeddedRegistry() as started:
        yield started


def writers(client: Any, fmt: str, topic: str) -> list[Callable[[int], bytes]]:
    """Return what writes an order by its number: one writer for each version of the schema."""
    context = SerializationContext(topic, MessageField.VALUE)

    def of_mapping(serialize: Any) -> Callable[[int], bytes]:
        return lambda number: bytes(serialize({"id": f"o-{number}", "n": number}, context))

    def of_message(schema: str) -> Callable[[int], bytes]:
        order = compiled(schema, "Order")
        serialize = protobuf.ProtobufSerializer(order, client, {"use.deprecated.format": False})
        return lambda number: bytes(serialize(order(id=f"o-{number}", n=number), context))

    match fmt:
        case "avro":
            return [of_mapping(avro.AvroSerializer(client, each[fmt])) for each in (FIRST, SECOND)]
        case "protobuf":
            return [of_message(each[fmt]) for each in (FIRST, SECOND)]
        case _:
            return [of_mapping(json_schema.JSONSerializer(each, client)) for each in JSON_SCHEMA]


def orders(write: list[Callable[[int], bytes]]) -> tuple[list[Event], list[bytes]]:
    """Return the events in their order, 30 % of them duplicates, and the values of the first of each order."""
    chance = random.Random(22)
    events, firsts = list[Event](), list[bytes]()
    for at in range(ORDERS):
        again = at > 0 and chance.random() < 0.3
        number = chance.randrange(len(firsts)) if again else len(firsts)
        # The second version comes in the middle, and some producers keep the first one.
        value = write[at > ORDERS // 2 and chance.random() < 0.7](number)
        if not again:
            firsts.append(value)
        events.append(Event(number % PARTITIONS, value, BASE_MS + at))
    return events, firsts


@pytest.mark.parametrize("hops", ["direct", "repartitioned"])
@pytest.mark.parametrize("fmt", ["avro", "protobuf", "json_schema"])
def test_two_versions_two_workers_five_kills_and_a_registry_away_for_a_minute(
    make_job: MakeJob, registry: EmbeddedRegistry, topic_names: Callable[[str], str], fmt: str, hops: str
) -> None:
    topic = topic_names(f"{fmt}-in")
    source = {"topics": [topic], "format": fmt} | ({"partitioned_by": "tracking_id"} if hops == "direct" else {})
    document = {"source": source, "idle_after": "1s"}
    job = make_job(document=document, config={"schema_registry": {"url": registry.url}}, partitions=PARTITIONS)
    with sr.SchemaRegistryClient({"url": registry.url}) as client:
        events, firsts = orders(writers(client, fmt, topic))
    workers = {name: job.start(name) for name in "ab"}
    with job.stream(events, per_s=PER_S) as feeder:
        for kill in range(KILLS):
            reached(job, topic, (kill + 1) * ORDERS // (KILLS + 2))
            if kill == 1:
                registry.process.pause()
                frozen_s = time.monotonic()
            name = "ab"[kill % 2]
            workers[name].kill()
            workers[name] = job.start(name)
        until(lambda: time.monotonic() > frozen_s + FROZEN_S, "the registry's minute is over", within_s=2 * FROZEN_S)
        registry.process.resume()
        feeder.join()
    job.until_done()
    for worker in workers.values():
        assert worker.stop() == 0, worker.log
    forwarded = [each.value() for each in job.read(job.output)]
    assert len(forwarded) == len(firsts)
    assert sorted(forwarded) == sorted(firsts), "byte for byte, each once"
    assert job.read(job.topology.dead_letter) == []
    assert "lost 0  duplicated 0" in dedup(job, "verify")


def test_references_as_the_serializers_register_them(
    registry: EmbeddedRegistry, topic_names: Callable[[str], str]
) -> None:
    """Avro's serializer is given the references; Protobuf's serializer registers each imported file by itself."""
    topic, url = topic_names("linked"), registry.url
    order = {"kind": "B", "head": {"kind": "A", "id": "o-7"}, "n": 7}
    made: dict[Format, bytes] = {}
    with sr.SchemaRegistryClient({"url": url}) as client:
        references: list[Any] = []
        for name, text in FILES["avro"].items():
            client.register_schema(f"{topic}-{name}", sr.Schema(text, "AVRO", list(references)))
            references.append(sr.SchemaReference(name, f"{topic}-{name}", 1))
        schema = sr.Schema(LINKED["avro"], "AVRO", references)
        context = SerializationContext(topic, MessageField.VALUE)
        made["avro"] = avro.AvroSerializer(client, schema)(order, context)
        message = compiled(LINKED["protobuf"], "Order", FILES["protobuf"])
        context = SerializationContext(f"{topic}-protobuf", MessageField.VALUE)
        serialize = protobuf.ProtobufSerializer(message, client, {"use.deprecated.format": False})
        made["protobuf"] = serialize(message(**order), context)
    ask = SchemaRegistry.of(RegistrySection(url=url)).schema
    for fmt, value in made.items():
        book = SchemaBook(ask)
        for path, expected in ((("head", "id"), b"\x01o-7"), (("n",), b"\x04\x07")):
            found = extract_one(Recipe(TrackingId(FieldRule(path)), fmt=fmt, schema=book), None, value, [], 5)
            assert isinstance(found, One), found
            assert found.id == expected
        assert [len(each.references) for each in book.values() if isinstance(each, LinkedSchema)] == [2]


def reached(job: Job, topic: str, count: int) -> None:
    until(lambda: sum(job.admin.end_offsets(topic).values()) >= count, f"{count} orders are sent")
