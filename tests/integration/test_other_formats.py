"""A topic whose values are no JSON: its cause is named, loudly, and everywhere where somebody may look."""

from __future__ import annotations

import io
import json
import re
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from uuid import UUID

import cbor2
import fastavro
import msgspec
import pytest

from tests.integration.conftest import MakeJob
from tests.integration.fleet import until
from tests.integration.test_admin import dedup, pages
from tests.integration.workload import BASE_MS, Event

pytestmark = pytest.mark.broker


def framed(number: int) -> Event:
    value = b"\x00\x00\x00\x00\x2a" + b'{"id":"f-%d","n":1}' % number
    return Event(number % 2, value, BASE_MS + number)


def good(number: int) -> Event:
    return Event(number % 2, b'{"id":"g-%d","n":1}' % number, BASE_MS + number)


@pytest.mark.parametrize("hops", ["direct", "repartitioned"])
def test_a_topic_of_framed_values_is_told_of_once_and_counted(make_job: MakeJob, hops: str) -> None:
    source = {} if hops == "direct" else {"source": {"topics": ["framed-in"]}, "idle_after": "1s"}
    job = make_job(document=source, config={"web": {"enabled": True, "port": 0}})
    job.send([framed(number) for number in range(300)])
    worker = job.start()
    # It is said while the worker runs, with the commonest reason; the first look may come before all are judged.
    worker.until_logged("records judged in the last minute are dead letters")
    said = re.search(r"ERROR (\d+) of (\d+) records .* dead letters, (\d+) of them for not_json\.", worker.log)
    assert said is not None, worker.log
    assert len(set(said.groups())) == 1, "all of them are dead letters, all for one reason"
    words = "it begins with byte 0: Schema Registry framing, schema id 42"
    assert worker.log.count(words) == 1, worker.log
    url = pages(worker)

    def counted() -> int:
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        return sum(map(int, re.findall(r'dedup_other_formats_total\{format="schema_registry".* (\d+)\.0', text)))

    until(lambda: counted() == 300, "all are counted")
    seen = json.loads(dedup(job, "status", "--json", "--url", url))
    assert (seen["dead_letters"], seen["other_formats"]) == ({"not_json": 300}, {"schema_registry": 300})
    assert len(seen["alerts"]) == 1
    told = dedup(job, "status", "--url", url)
    assert "of them in another format: 300 schema_registry" in " ".join(told.split())
    notices: list[dict[str, str]] = []

    def noticed() -> bool:
        with urllib.request.urlopen(f"{url}/api/dashboard", timeout=10) as answer:
            notices[:] = json.loads(answer.read())["attention"]
        return "300 of 300 records" in notices[0]["text"]

    until(noticed, lambda: f"the alert in full: {notices}")
    assert notices[0]["level"] == "error"
    assert any(text.endswith("by their first bytes: 300 schema_registry.") for text in (n["text"] for n in notices))

    letters = job.read(job.topology.dead_letter)
    details = {dict(letter.headers() or [])["dedup-detail"] for letter in letters}
    assert len(letters) == 300
    assert all(isinstance(detail, bytes) and detail.decode().endswith(words) for detail in details)
    # Once others are most, it is over; that is said, too, and neither again.
    job.send([good(number) for number in range(300)])
    worker.until_logged("of the records of the last minute are dead letters now")
    until(job.all_committed, "all is judged")
    assert worker.log.count("ERROR") == 1, worker.log
    assert worker.stop() == 0, worker.log
    assert worker.log.count("fewer than 95% of the records") == 1


@pytest.mark.parametrize("hops", ["direct", "repartitioned"])
def test_framed_values_are_forwarded_unchanged_and_verified(
    make_job: MakeJob, topic_names: Callable[[str], str], hops: str
) -> None:
    source = {"topics": [topic_names("schema-in")], "format": "json_schema"}
    if hops == "direct":
        source["partitioned_by"] = "tracking_id"
    conflicts = topic_names("conflicts")
    job = make_job(document={"source": source, "idle_after": "1s", "conflicts": conflicts})
    in_header = (("__value_schema_id", b"\x01" + b"g" * 16),)
    events = [framed(number // 2 * 2) for number in range(200)]
    events += [replace(event, value=(event.value or b"")[5:], headers=in_header) for event in events[:100:2]]
    bad = [Event(0, b'{"id":"f-2"}', BASE_MS), Event(0, b"\0\0\0\1", BASE_MS)]
    bad.append(replace(framed(8), headers=(("__value_schema_id", b"8"),)))
    job.send([*events, *bad])
    job.finish()
    forwarded = [each.value() for each in job.read(job.output)]
    assert sorted(forwarded) == sorted(framed(number).value or b"" for number in range(0, 200, 2))
    reasons = [dict(letter.headers() or [])["dedup-reason"] for letter in job.read(job.topology.dead_letter)]
    assert sorted(reasons) == [b"bad_schema_id", b"truncated_framing", b"wrong_magic_byte"]
    assert job.read(conflicts) == [], "another form of the framing is no other payload"
    dedup(job, "verify")
    found = json.loads(dedup(job, "explain", "f-8", "--json"))
    assert sorted(each["verdict"] for each in found["records"]) == ["duplicate", "duplicate", "unique"]
    assert found["contradictions"] == 0


SCHEMA = (Path(__file__).parents[1] / "data" / "orders.avsc").read_text(encoding="utf-8")


def order(number: int, coupon: str | None = None) -> bytes:
    stream = io.BytesIO()
    record = {
        "order": {"id": UUID(int=number), "total": Decimal(number) / 4},
        "coupon": coupon,
        "placed_at": datetime.fromtimestamp(BASE_MS / 1000 + number, UTC),
    }
    fastavro.schemaless_writer(stream, fastavro.parse_schema(json.loads(SCHEMA)), record)
    return stream.getvalue()


@pytest.mark.parametrize("hops", ["direct", "repartitioned"])
def test_avro_is_forwarded_unchanged_and_verified(
    make_job: MakeJob, topic_names: Callable[[str], str], hops: str
) -> None:
    source = {"topics": [topic_names("avro-in")], "format": "avro", "schema_id": "none", "schema": "orders.avsc"}
    if hops == "direct":
        source["partitioned_by"] = "tracking_id"
    conflicts = topic_names("conflicts")
    time, rule = {"field": "placed_at", "unit": "timestamp"}, {"field": "order.id"}
    document = {"source": source, "idle_after": "1s", "conflicts": conflicts, "tracking_id": rule, "event_time": time}
    job = make_job(document=document, files={"orders.avsc": SCHEMA})
    good = [Event(number % 2, order(number), 0) for number in range(0, 200, 2)]
    other = [Event(0, order(number, "half"), 0) for number in range(0, 20, 2)]
    bad = [good[0].value[:-1], good[0].value + b"\0", b"\0\0\0\0\7" + good[0].value, b'{"order":{"id":"a"}}', b""]
    job.send([*good, *good[::3], *other, *(Event(0, value, 0) for value in bad)])
    # Workers that are killed judge what they had not committed once more.
    for _ in range(2):
        worker = job.start()
        until(lambda: job.read(job.output), "something is judged")
        worker.kill()
    job.finish()
    assert sorted(each.value() for each in job.read(job.output)) == sorted(event.value for event in good)
    assert sorted(each.value() for each in job.read(conflicts)) == sorted(event.value for event in other)
    letters = [dict(letter.headers() or []) for letter in job.read(job.topology.dead_letter)]
    assert [letter["dedup-reason"] for letter in letters] == [b"not_avro"] * len(bad)
    assert any(b"Schema Registry framing, schema id 7" in letter["dedup-detail"] for letter in letters)
    dedup(job, "verify")
    found = json.loads(dedup(job, "explain", str(UUID(int=6)), "--json"))
    assert sorted(each["verdict"] for each in found["records"]) == ["duplicate", "duplicate", "unique"]
    assert found["contradictions"] == 0


def placed(number: int, **more: object) -> dict[str, object]:
    at = datetime.fromtimestamp(BASE_MS / 1000 + number, UTC)
    return {"order": {"id": f"p-{number}", "total": number / 4}, "placed_at": at, **more}


PACK: dict[str, Callable[[object], bytes]] = {"msgpack": msgspec.msgpack.encode, "cbor": cbor2.dumps}
COLUMNS = ["id", "placed_at", "coupon"]


def in_csv(number: int, coupon: str = "") -> bytes:
    at = datetime.fromtimestamp(BASE_MS / 1000 + number, UTC).isoformat()
    return f'"p-{number}";{at};"{coupon}"\r\n'.encode()


@pytest.mark.parametrize("hops", ["direct", "repartitioned"])
def test_csv_is_forwarded_unchanged_and_verified(
    make_job: MakeJob, topic_names: Callable[[str], str], hops: str
) -> None:
    source = {"topics": [topic_names("csv-in")], "format": "csv", "columns": COLUMNS, "delimiter": "semicolon"}
    if hops == "direct":
        source["partitioned_by"] = "tracking_id"
    conflicts = topic_names("conflicts")
    time, rule = {"field": "placed_at", "unit": "rfc3339"}, {"field": "id"}
    document = {"source": source, "idle_after": "1s", "conflicts": conflicts, "tracking_id": rule, "event_time": time}
    job = make_job(document=document)
    good = [Event(number % 2, in_csv(number), 0) for number in range(0, 200, 2)]
    other = [Event(0, in_csv(number, "half;\n"), 0) for number in range(0, 20, 2)]
    bad = [
        b"p-2;2024-01-01T00:00:00Z",
        b"a;b;c;d",
        good[0].value[1:],
        b"a;b;c\nd;e;f",
        b"\xef\xbb\xbf" + good[0].value,
        b"",
    ]
    ill = [b";2024-01-01T00:00:00Z;", b"a;now;", b"a;;", b"\xff;;"]
    job.send([*good, *good[::3], *other, *(Event(0, value, 0) for value in [*bad, *ill])])
    job.finish()
    assert sorted(each.value() for each in job.read(job.output)) == sorted(event.value for event in good)
    assert sorted(each.value() for each in job.read(conflicts)) == sorted(event.value for event in other)
    reasons = [dict(letter.headers() or [])["dedup-reason"].decode() for letter in job.read(job.topology.dead_letter)]
    assert sorted(reasons) == ["id_missing", *["not_csv"] * len(bad), "not_utf8", "time_missing", "time_unparsable"]
    dedup(job, "verify")
    found = json.loads(dedup(job, "explain", "p-6", "--json"))
    assert sorted(each["verdict"] for each in found["records"]) == ["duplicate", "duplicate", "unique"]
    assert found["contradictions"] == 0


BROKEN = {"msgpack": b"\xc1", "cbor": b"\xff"}


@pytest.mark.parametrize("hops", ["direct", "repartitioned"])
@pytest.mark.parametrize("fmt", PACK)
def test_values_that_say_their_types_are_forwarded_unchanged_and_verified(
    make_job: MakeJob, topic_names: Callable[[str], str], hops: str, fmt: str
) -> None:
    source = {"topics": [topic_names("packed-in")], "format": fmt}
    if hops == "direct":
        source["partitioned_by"] = "tracking_id"
    conflicts = topic_names("conflicts")
    time, rule = {"field": "placed_at", "unit": "timestamp"}, {"field": "order.id"}
    document = {"source": source, "idle_after": "1s", "conflicts": conflicts, "tracking_id": rule, "event_time": time}
    job = make_job(document=document)
    pack = PACK[fmt]
    good = [Event(number % 2, pack(placed(number)), 0) for number in range(0, 200, 2)]
    other = [Event(0, pack(placed(number, coupon="half")), 0) for number in range(0, 20, 2)]
    whole = good[0].value
    bad = [whole[:-1], whole + b"\0", BROKEN[fmt], b"\0\0\0\0\7" + whole, b'{"order":{"id":"a"}}', b""]
    ill = [pack({"order": {"id": 1.5}, "placed_at": None}), pack({"order": {"id": "a"}, "placed_at": 7})]
    job.send([*good, *good[::3], *other, *(Event(0, value, 0) for value in [*bad, *ill])])
    # Workers that are killed judge what they had not committed once more.
    for _ in range(2):
        worker = job.start()
        until(lambda: job.read(job.output), "something is judged")
        worker.kill()
    job.finish()
    assert sorted(each.value() for each in job.read(job.output)) == sorted(event.value for event in good)
    assert sorted(each.value() for each in job.read(conflicts)) == sorted(event.value for event in other)
    letters = [dict(letter.headers() or []) for letter in job.read(job.topology.dead_letter)]
    reasons = sorted(letter["dedup-reason"].decode() for letter in letters)
    assert reasons == ["id_ill_typed", *[f"not_{fmt}"] * len(bad), "time_ill_typed"]
    assert any(b"Schema Registry framing, schema id 7" in letter["dedup-detail"] for letter in letters)
    dedup(job, "verify")
    found = json.loads(dedup(job, "explain", "p-6", "--json"))
    assert sorted(each["verdict"] for each in found["records"]) == ["duplicate", "duplicate", "unique"]
    assert found["contradictions"] == 0
