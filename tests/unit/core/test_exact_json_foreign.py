"""Values that are no JSON: what their first bytes say, in a dead letter, a counter and a warning."""

import gzip
import json
import logging
from types import SimpleNamespace

import pytest

from dedup.core.event_time import RecordTime
from dedup.core.exact_json import Unreadable, decode, decode_quickly, foreign_format
from dedup.core.extract import Fault, FaultKind, compile_extractor
from dedup.core.fold import Rows
from dedup.core.tracking_id import FieldRule, TrackingId
from dedup.core.window import Feed
from dedup.metrics import TaskNumbers
from dedup.worker import dedup_task as formats

JSON = '{"id":"é","n":1}'
FRAMED = b"\x00\x00\x00\x00\x2a"
NAMED = [
    ("schema_registry", FRAMED + b"\x02a\x04b", "byte 0: Schema Registry framing, schema id 42"),
    ("schema_registry", FRAMED + JSON.encode(), "byte 0: Schema Registry framing, schema id 42"),
    ("schema_registry", b"\x00\xff\xff\xff\xff", "byte 0: Schema Registry framing, schema id 4294967295"),
    ("utf_16", JSON.encode("utf-16"), "bytes fffe: the byte order mark of UTF-16"),
    ("utf_16", b"\xfe\xff" + JSON.encode("utf-16-be"), "bytes feff: the byte order mark of UTF-16"),
    ("utf_16", JSON.encode("utf-16-le"), "a character before byte 0: UTF-16 without a byte order mark"),
    ("utf_16", JSON.encode("utf-16-be"), "byte 0 before a character: UTF-16 without a byte order mark"),
    ("utf_32", JSON.encode("utf-32"), "bytes fffe0000: the byte order mark of UTF-32"),
    ("utf_32", b"\x00\x00\xfe\xff" + JSON.encode("utf-32-be"), "bytes 0000feff: the byte order mark of UTF-32"),
    ("utf_8_bom", JSON.encode("utf-8-sig"), "bytes efbbbf: the byte order mark of UTF-8"),
    ("gzip", gzip.compress(JSON.encode(), mtime=0), "bytes 1f8b: gzip"),
    ("zstd", b"\x28\xb5\x2f\xfd\x00", "bytes 28b52ffd: Zstandard"),
    ("avro_file", b"Obj\x01\x04", 'the text "Obj" and byte 1: an Avro object container'),
    ("avro_single_object", b"\xc3\x01abc", "bytes c301: Avro's single-object encoding"),
    ("java_object", b"\xac\xed\x00\x05t\x00", "bytes aced0005: a serialized Java object"),
    ("xml", b'<?xml version="1.0"?><id>1</id>', 'the text "<?xml": XML'),
]


@pytest.mark.parametrize(("name", "value", "words"), NAMED)
def test_a_format_is_named_with_the_code_it_always_had(name, value, words):
    with pytest.raises(Unreadable) as caught:
        decode(value)
    assert caught.value.format_name == name
    assert f"; it begins with {words}" in caught.value.detail
    assert caught.value.code in {"not_json", "not_utf8"}, "codes are compared by `dedup verify`: they stay"


@pytest.mark.parametrize(
    "value",
    [b"", b"\x00", b"\x00\x00\x00\x00", b"hello", b"{", b'{"id":1', b"\xff{}", b"nul", b"Object", b"P", b"\x1f"],
)
def test_what_names_no_format_is_said_as_before(value):
    with pytest.raises(Unreadable) as caught:
        decode(value)
    assert caught.value.format_name == ""
    assert "begins with" not in caught.value.detail


@pytest.mark.parametrize("text", [JSON, "[]", "1", '""', "null", ' \n{"id":1}'])
def test_json_is_never_asked_about(text):
    assert foreign_format(text.encode()) is None


def extract(values):
    made = compile_extractor(TrackingId(FieldRule(("id",))), RecordTime(), fmt="json", fingerprint=False)
    return made([None] * len(values), values, [()] * len(values), [0] * len(values))


def test_one_odd_value_in_a_batch_is_named_and_its_neighbors_have_their_ids():
    good = [json.dumps({"id": number}).encode() for number in range(50)]
    found = extract([*good[:20], FRAMED + b"x", *good[20:]])
    assert found.faults == {
        20: Fault(
            FaultKind.UNREADABLE,
            "not_json",
            "the value is not JSON (character 0 of 6); it begins with byte 0: Schema Registry framing, schema id 42",
            "schema_registry",
        )
    }
    assert sum(key is not None for key in found.ids) == 50


def test_each_is_counted_and_the_first_of_a_topic_and_format_is_told_of(caplog):
    formats.log.disabled = False
    values = [FRAMED + b"x", FRAMED + b"y", b"\x1f\x8b", b"no json", b'{"id":1}']
    rows = Rows(extract(values), range(100, 105), (Feed(1, 7),))
    judged, plan = TaskNumbers(), SimpleNamespace(source_topics=("a", "b"), logged=set())
    with caplog.at_level(logging.WARNING):
        for row in [*range(5), 0]:
            formats.note_format(rows, row, plan, judged)
    assert judged.formats == {"schema_registry": 3, "gzip": 1}
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "b/7/100 is a dead letter",
        "b/7/102 is a dead letter",
    ]
    assert "Schema Registry framing, schema id 42. If all records" in caplog.text


def test_a_truncated_value_with_many_escaped_quotes_takes_linear_time():
    """JSON in a string, cut off by a limit; the test's timeout is a fraction of what a quadratic search would take."""
    value = b'{"id":"a","payload":"{' + b'\\"k\\":\\"v\\",' * 100_000
    with pytest.raises(Unreadable, match="the value is not JSON"):
        decode(value)
    with pytest.raises(Unreadable, match="more than 512 levels"):
        decode(value + b'"' + b"[" * 513)


@pytest.mark.parametrize("value", [b'{"a":NaN}', b'{"a":-Infinity}', b"[" * 100_000, b'{"a":1', "{}".encode("utf-16")])
def test_what_orjson_refuses_and_is_no_json_is_unreadable(value):
    with pytest.raises(Unreadable):
        decode_quickly(value)
