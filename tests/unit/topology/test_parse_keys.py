"""Members of the key in topology files: what is accepted, refused with its position, and warned of."""

import pytest

from dedup.core.framing import SchemaBook
from dedup.core.tracking_id import FieldRule, FirstOfRule, HeaderRule, KeyFieldRule, KeyRule, Part, PartsRule
from dedup.errors import SettingsError, TopologyError
from dedup.topology.chain import Named, lint_chain
from dedup.topology.describe import describe
from dedup.topology.ingest_file import parse_ingest
from dedup.topology.lint import key_schema_findings, lint
from dedup.topology.model import Topology, extractor_of
from dedup.topology.parse import parse

REGISTRY = "schemas of a schema registry, which is not known here"
NESTED = '{"type":"record","name":"K","fields":[{"name":"id","type":["string","float"]},{"name":"f","type":"float"}]}'


def topology(rule: str = "key: id", source: str = "key_format: avro", more: str = "") -> Topology:
    text = f"dedup: 1\nname: t\nsource: {{topics: [c], {source}}}\ntracking_id: {{{rule}}}\nguard_period: 1h\n{more}\n"
    return parse(text, name="t.yaml")


def problems(*args: str) -> list[str]:
    with pytest.raises(TopologyError) as refused:
        topology(*args)
    return [str(each).removeprefix("t.yaml:") for each in refused.value.problems]


@pytest.mark.parametrize(
    ("written", "rule"),
    [
        ("key: id", KeyFieldRule(("id",))),
        ('key: "a[0].b"', KeyFieldRule(("a", 0, "b"))),
        ('key: "true"', KeyFieldRule(("true",))),
        (
            "parts: [{key: id, absent: as_value}, {key: true}, {key: n}, {header: h}]",
            PartsRule(
                (Part(KeyFieldRule(("id",)), True), Part(KeyRule()), Part(KeyFieldRule(("n",))), Part(HeaderRule("h")))
            ),
        ),
        (
            "first_of: [{key: id}, {key: n}, {key: true}]",
            FirstOfRule((KeyFieldRule(("id",)), KeyFieldRule(("n",)), KeyRule())),
        ),
    ],
)
def test_the_rules(written, rule):
    assert topology(written).tracking_id.rule == rule


@pytest.mark.parametrize("fmt", ["json", "json_schema", "avro", "protobuf", "msgpack", "cbor"])
def test_the_formats(fmt):
    made = topology(source=f"key_format: {fmt}")
    needs = fmt in {"avro", "protobuf"}
    assert (made.source.key_format, made.source.names_schemas, made.source.needs_registry) == (fmt, False, needs)
    framed = fmt in {"json_schema", "avro", "protobuf"}
    said = f"read, json, keys {fmt}" + (" with the schema id in the header or prefix" if framed else "")
    assert f"{said}, from earliest" in describe(made)
    if needs:
        with pytest.raises(SettingsError, match=f"source.key_format: {fmt} needs {REGISTRY}"):
            extractor_of(made)
        made = made.knowing(SchemaBook())
    assert not extractor_of(made)([], [], [], []).faults


@pytest.mark.parametrize(
    ("rule", "source", "said"),
    [
        (
            "key: id",
            "start: latest",
            '4:20: tracking_id.key: "id" is a member of the key and needs `source.key_format`, such as json or avro; for the whole key, write true',
        ),
        (
            "parts: [{field: id}, {key: id}]",
            "key_format: bytes",
            '4:42: tracking_id.parts[1].key: "id" is a member of the key and needs `source.key_format`, such as json or avro; for the whole key, write true',
        ),
        (
            "key: true",
            "key_format: json",
            "3:23: source.key_format: json has no effect, because tracking_id has no `key: PATH` (a member of the key); leave it out",
        ),
        (
            "key: id",
            "key_format: json, key_subject: k",
            "3:41: source.key_subject: needs `source.key_format: avro` or `protobuf`",
        ),
        ("key: true", "key_subject: k", "3:23: source.key_subject: needs `source.key_format: avro` or `protobuf`"),
        (
            "key: a..b",
            "key_format: json",
            '4:20: tracking_id.key: path a..b: a member name is missing at position 3; quote odd names: a["b.c"]',
        ),
        (
            "key: [id]",
            "key_format: json",
            "4:20: tracking_id.key: takes true, or the path of a member of the key; leave it out to use another rule",
        ),
        (
            "first_of: [{key: a.b}, {key: 'a[\"b\"]'}]",
            "key_format: json",
            "4:38: tracking_id.first_of[1]: this alternative occurs twice; remove one",
        ),
        (
            "key: id",
            "key_format: csv",
            '3:35: source.key_format: "csv" is not one of json | json_schema | avro | protobuf | msgpack | cbor | bytes',
        ),
        (
            "key: id, zero: value",
            "key_format: avro",
            "4:24: tracking_id.zero: needs `source.format: protobuf`; in other formats, 0 and empty are values",
        ),
    ],
)
def test_a_mistake_has_its_position(rule, source, said):
    assert problems(rule, source) == [said]


def test_zero_is_allowed_for_keys_and_then_used():
    made = topology("key: id, zero: value", "key_format: protobuf")
    assert "zero_unused" not in [each.code for each in lint(made)]
    assert '"zero":"value"' in made.state_identity({"c": 1})


def test_the_subjects():
    assert (topology().source.subjects, topology().source.key_subjects) == ((), ("c-key",))
    assert topology(source="key_format: avro, key_subject: k").source.key_subjects == ("k",)
    both = topology(source="format: avro, key_format: protobuf").source
    assert (both.subjects, both.key_subjects) == (("c-value",), ("c-key",))
    assert topology("key: id", "key_format: json").source.key_subjects == ()


def test_the_state_is_that_of_the_rule():
    """The format of keys is no part of it, as the format of values is none: the IDs are the same."""
    rule, partitions = '"tracking_id":"key: id"', {"c": 1}
    assert rule in topology().state_identity(partitions)
    assert topology().state_identity(partitions) == topology(source="key_format: json").state_identity(partitions)
    whole, quoted = topology("key: true", "start: earliest"), topology('key: "true"')
    assert whole.tracking_id != quoted.tracking_id
    texts = [each.state_identity(partitions).replace('"direct":true', '"direct":false') for each in (whole, quoted)]
    assert texts[0] != texts[1]
    assert "key" not in topology("field: id", "start: earliest").state_identity(partitions)


@pytest.mark.parametrize("rule", ["key: id", "parts: [{key: id}, {field: n}]", "first_of: [{key: id}, {key: true}]"])
def test_equal_members_may_be_in_several_partitions(rule):
    assert not topology(rule).direct
    assert "partitioned_by_key_bytes" not in [each.code for each in lint(topology(rule))]
    declared = topology(rule, "key_format: avro, partitioned_by: tracking_id")
    assert declared.direct
    (found,) = [each for each in lint(declared) if each.code == "partitioned_by_key_bytes"]
    assert "keys contain the schema ID, so their bytes differ between versions of the schema" in found.text
    assert found.weak
    (found,) = [each for each in lint(topology(rule, "key_format: json, partitioned_by: tracking_id")) if each.weak]
    assert "keys with an equal member may have different bytes" in found.text


def test_the_whole_key_beside_a_member_is_in_one_partition():
    made = topology("parts: [{key: true}, {key: id}]")
    assert made.direct
    assert "partitioned_by_key_bytes" not in [each.code for each in lint(made)]


def test_the_schema_of_keys_is_checked():
    made = topology("parts: [{key: id}, {key: f}, {field: elsewhere}]")
    found = [(each.level, each.code, each.text) for each in key_schema_findings(made, NESTED, "c-key")]
    assert found == [
        (
            "warning",
            "type_sometimes_refused",
            "tracking_id.key: id may also have the type float, which makes a record a dead letter.",
        ),
        ("error", "member_refused", "tracking_id.key: f has the type float in the schema c-key."),
    ]
    (missing,) = key_schema_findings(topology("key: x"), NESTED, "c-key")
    assert (missing.level, missing.text) == ("error", "tracking_id.key: x is not in the schema c-key.")


@pytest.mark.parametrize(
    ("rule", "said"), [("tracking_id: {field: id}\n", "the tracking ID itself as the key"), ("", "null keys")]
)
def test_an_ingest_file_writes_keys_without_members(rule, said):
    text = f"ingest: 1\nname: i\nsource: {{files: {{directory: d}}}}\noutput: {{topic: c}}\n{rule}"
    files = [Named("i.yaml", parse_ingest(text, name="i.yaml")), Named("t.yaml", topology(source="key_format: json"))]
    (found,) = [each for _, each in lint_chain(files) if each.code == "key_without_members"]
    assert (found.level, said in found.text) == ("error", True)


def test_it_reads_the_value_only_for_the_time():
    made = topology("key: id", "key_format: json, format: bytes")
    assert not made.needs_value
    assert extractor_of(made)([b'{"id":7}'], [None], [[]], [0]).ids == [b"\x04\7"]
    mixed = topology("parts: [{key: id}, {field: id}]", "key_format: json")
    assert mixed.tracking_id.rule == PartsRule((Part(KeyFieldRule(("id",))), Part(FieldRule(("id",)))))
    assert mixed.needs_value
