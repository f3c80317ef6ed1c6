"""Values whose framing names their schema, on Spark: stream, backfill, seed's rules, audit and the function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from dedup.core.framing import SchemaBook
from dedup.embedded.registry_node import EmbeddedRegistry
from dedup.errors import SettingsError, StateIncompatible
from dedup.kafka.schema_registry import SchemaRegistry
from dedup.settings import RegistrySection, Secret, Settings
from dedup.spark.audit import audit
from dedup.spark.dataframe import dedup as deduplicated
from dedup.topology.parse import parse
from dedup.verify.replay import WHY_SCHEMA
from tests.integration.apicurio import FIRST, SECOND, linked, serialized
from tests.integration.fleet import Job, until
from tests.integration.test_admin import dedup
from tests.integration.workload import BASE_MS, Event
from tests.spark.streaming import INTERPRETED, checkpoint_of, start_spark

pytestmark = [pytest.mark.broker, pytest.mark.timeout(400)]
MakeJob = Callable[..., Job]


@pytest.fixture(scope="module")
def registry() -> Iterator[EmbeddedRegistry]:
    with EmbeddedRegistry() as started:
        yield started


def unknown_to(good: bytes) -> bytes:
    """Return a value whose framing names a schema that no registry has."""
    return b"\0\x7f\xff\xff\xff" + good[5:]


@pytest.mark.parametrize(("fmt", "hops"), [("avro", "direct"), ("protobuf", "repartitioned")])
def test_a_stream_waits_for_the_registry_and_backfill_and_audit_agree(
    spark, make_job, registry, topic_names, fmt, hops
):
    """The registry does not answer when the stream starts; two schemas, 100 resent records, one schema unknown."""
    direct = {"partitioned_by": "tracking_id"} if hops == "direct" else {}
    topic = topic_names(f"{fmt}-in")
    job = make_job(
        document={"source": {"topics": [topic], "format": fmt, **direct}, "idle_after": "1s"},
        config={"schema_registry": {"url": registry.url, "schema_wait": "1s"}},
    )
    values = serialized(registry, FIRST[fmt], topic, range(300))
    values += serialized(registry, SECOND[fmt], topic, range(200, 500))  # 100 were sent before
    bad = unknown_to(values[0])
    job.send([Event(row % 2, value, BASE_MS + row) for row, value in enumerate([*values, bad])])
    registry.process.pause()
    try:
        out = str(job.directory / "verdicts")
        run = ("run", *checkpoint_of(job), "--exit-when-done", *INTERPRETED)
        driver = start_spark(job, run, ("backfill", "--out", out, "--start", "earliest"), ("audit",))
        until(lambda: "records of this schema wait" in driver.log, lambda: f"a task says it waits: {driver.log}")
        assert job.read(job.output) == []
    finally:
        registry.process.resume()
    assert driver.wait() == 0, driver.log
    forwarded = sorted(each.value() for each in job.read(job.output))
    firsts = {**dict(enumerate(values[:300])), **dict(enumerate(values[400:], 300))}
    assert forwarded == sorted(firsts.values())
    (letter,) = job.read(job.topology.dead_letter)
    assert (letter.value(), dict(letter.headers())["dedup-reason"]) == (bad, b"schema_unknown")
    dedup(job, "verify")
    verdicts = Counter(row.verdict for row in spark.read.parquet(out).select("verdict").collect())
    assert verdicts == {"unique": 500, "duplicate": 100, "dead_letter": 1}
    client, settings = SchemaRegistry.of(RegistrySection(url=registry.url)), Settings(brokers=(job.kafka.bootstrap,))

    def known_since(ref: bytes) -> str:
        return client.schema(ref) or FIRST[fmt]

    report = audit(spark, job.topology.knowing(SchemaBook(known_since)), settings)
    assert report.passed, report.closing_line()
    assert (WHY_SCHEMA in report.not_provable) == (hops == "direct")
    assert sum(report.not_provable.values()) == 1

    def deleted_since(_: bytes) -> None:
        return None

    with pytest.raises(StateIncompatible, match="until the schema is registered again with the same ID"):
        audit(spark, job.topology.knowing(SchemaBook(deleted_since)), settings)


def test_a_stream_and_audit_read_keys_of_two_schema_versions(spark, make_job, registry, topic_names):
    topic = topic_names("keys-in")
    job = make_job(
        document={
            "source": {"topics": [topic], "key_format": "avro"},
            "tracking_id": {"key": "id"},
            "idle_after": "1s",
        },
        config={"schema_registry": {"url": registry.url, "schema_wait": "1s"}},
    )
    keys = serialized(registry, FIRST["avro"], topic, range(100), of="key")
    keys += serialized(registry, SECOND["avro"], topic, range(150), of="key")
    bad = unknown_to(keys[0])
    job.send([Event(row % 2, b"%d" % row, BASE_MS + row, key) for row, key in enumerate([*keys, bad])])
    driver = start_spark(job, ("run", *checkpoint_of(job), "--exit-when-done", *INTERPRETED), ("audit",))
    assert driver.wait(240) == 0, driver.log
    assert sorted(each.key() for each in job.read(job.output)) == sorted([*keys[:100], *keys[200:]])
    (letter,) = job.read(job.topology.dead_letter)
    assert (letter.key(), dict(letter.headers())["dedup-reason"]) == (bad, b"schema_unknown")
    dedup(job, "verify")


@pytest.mark.parametrize(("fmt", "path"), [("avro", "id"), ("avro", "head.id"), ("protobuf", "head.id")])
def test_the_function_asks_the_registry_of_its_settings_or_takes_exported_schemas(
    spark, registry, topic_names, tmp_path, fmt, path
):
    """The schemas with `head.id` refer to other subjects."""
    topic = topic_names(f"{fmt}-in")
    topology = parse(
        f"dedup: 1\nname: t\nsource: {{topics: [{topic}], format: {fmt}, partitioned_by: tracking_id}}\n"
        f"tracking_id: {{field: {path}}}\nguard_period: 1h\n",
        name="t",
    )
    plain = path == "id"
    one, two = serialized(registry, FIRST[fmt], topic, [1, 2]) if plain else linked(registry, fmt, topic, [1, 2])
    rows = [(value, b"k", BASE_MS) for value in (one, two, one, unknown_to(one))]
    df = spark.createDataFrame(rows, "value BINARY, key BINARY, timestamp_ms LONG")
    section = RegistrySection(url=registry.url, username="u", password=Secret("p"), schema_wait="1s")
    assert SchemaRegistry.of(section).export(f"{topic}-value", tmp_path) == 1
    for each in (section, RegistrySection(directory=str(tmp_path), schema_wait="1s")):
        settings = Settings(brokers=("localhost:1",), schema_registry=each)
        found = deduplicated(df, topology, shape="kafka", settings=settings).collect()
        assert Counter((row.dedup_verdict, row.dedup_reason) for row in found) == {
            ("unique", None): 2,
            ("duplicate", None): 1,
            ("dead_letter", "schema_unknown"): 1,
        }
    with pytest.raises(SettingsError, match=r"pass settings with schema_registry\.url"):
        deduplicated(df, topology, shape="kafka")
