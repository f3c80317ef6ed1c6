"""A flow on a real broker: filters, enriches, fans out, routes, fails; workers are killed; `verify` proves each output."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import pytest

from dedup.topology.parse import parse
from dedup.verify.explanation import explain_id
from dedup.verify.verifier import verify
from dedup.worker.introspection import state_keys
from tests.brokers import RunningKafka, producer_of
from tests.integration.conftest import MakeJob
from tests.integration.fleet import Job
from tests.integration.test_library import ugly
from tests.integration.workload import BASE_MS, Event

pytestmark = pytest.mark.broker

CODE = """
import random
from dedup import Flow
flow = Flow()

@flow.on_unique
def route(record):
    order = record.json
    if order["bad"]:
        raise ValueError("no country")
    match order["id"] % 5:
        case 0:
            return
        case 1:
            yield record.to("EU", headers={"enriched": b"1"})
        case 2:
            yield record.to("EU", value={"copy": order["id"]}, key=f"c{order['id'] % 7}")
            yield record
        case 3:
            yield record.to(key=f"other-{order['id']}")
        case _:
            yield record
"""
CHANGED = CODE.replace('"enriched": b"1"', '"enriched": b"2"')
CHANCE = CODE.replace('b"1"', "str(__import__('random').random())")


def flow_job(
    make_job: MakeJob, module: str, topic: str, *, hops: bool = False, code: str = CODE, **more: object
) -> Job:
    """Return a job whose flow is in the module, and whose route is the topic."""
    files = {f"{module}.py": code.replace("EU", topic)}
    document = {"then": f"{module}:flow", "routes": [topic], **more}
    if hops:
        document["source"] = {"topics": [f"{topic}-in"]}
    return make_job(files=files, document=document, config={"commit_interval": "20ms"})


@dataclass
class Orders:
    """Orders with repeats, some of which fail; and what each output must hold, counted without dedup's code."""

    events: list[Event] = field(default_factory=list)
    unique: dict[int, int] = field(default_factory=dict)
    failed: int = 0

    @classmethod
    def of(cls, count: int, seed: int = 5) -> Orders:
        dice, made = random.Random(seed), cls()
        for number in range(count):
            own = dice.randrange(max(1, number * 7 // 10 + 1))
            bad = dice.random() < 0.03
            value = json.dumps({"id": own, "n": number, "bad": bad}).encode()
            made.events.append(Event(own % 2, value, BASE_MS + number, b"k%d" % (own % 13)))
            if own not in made.unique:
                made.failed += bad
                if not bad:
                    made.unique[own] = number
        return made

    def check(self, job: Job, topic: str) -> None:
        """Each output is there exactly once, and nothing else is."""
        out, eu = Counter(), Counter()
        for own, number in self.unique.items():
            whole = (json.dumps({"id": own, "n": number, "bad": False}).encode(),)
            key = b"k%d" % (own % 13)
            match own % 5:
                case 1:
                    eu[key, *whole] += 1
                case 2:
                    eu[b"c%d" % (own % 7), json.dumps({"copy": own}).encode()] += 1
                    out[key, *whole] += 1
                case 3:
                    out[b"other-%d" % own, *whole] += 1
                case 4:
                    out[key, *whole] += 1
        assert Counter((each.key(), each.value()) for each in job.read(job.output)) == out
        assert Counter((each.key(), each.value()) for each in job.read(topic)) == eu
        dead = [dict(each.headers() or ()) for each in job.read(job.topology.dead_letter)]
        assert [each["dedup-reason"] for each in dead] == [b"flow_failed"] * self.failed
        report = verify(job.topology, job.settings)
        assert (report.passed, report.not_provable) == (True, {}), report.to_json()
        assert sum(books.unique for books in report.books) == len(self.unique)
        assert sum(books.dead_letters for books in report.books) == self.failed
        filtered = sum(own % 5 == 0 for own in self.unique)
        assert filtered > 0
        assert sum(books.filtered for books in report.books) == filtered
        assert sum(books.sent_on for books in report.books) == len(self.unique) - filtered


@pytest.mark.parametrize("kills", [1, 20])
def test_each_output_is_there_once_however_often_the_worker_is_killed(make_job: MakeJob, kills: int) -> None:
    job = flow_job(make_job, f"flows_kill{kills}", f"flow-eu-{kills}")
    orders = Orders.of(400 + 300 * kills)
    for number in range(kills):
        begin, end = (len(orders.events) * each // (kills + 1) for each in (number, number + 1))
        worker = job.start()
        with job.stream(orders.events[begin:end], per_s=4_000) as thread:
            job.until_progress(40)
            worker.kill()
            thread.join()
    job.send(orders.events[len(job.sent) :])
    job.finish()
    orders.check(job, f"flow-eu-{kills}")


def test_a_flow_behind_a_repartition_topic(make_job: MakeJob) -> None:
    job = flow_job(make_job, "flows_hops", "flow-eu-hops", hops=True)
    orders = Orders.of(1_000)
    job.send(orders.events)
    job.finish()
    orders.check(job, "flow-eu-hops")


@pytest.mark.parametrize(("code", "says"), [(CHANGED, "the flow was changed since"), (CHANCE, "not deterministic")])
def test_verify_finds_a_flow_that_yields_something_else(make_job: MakeJob, code: str, says: str) -> None:
    name = f"flow-other-{'chance' if code == CHANCE else 'changed'}"
    job = flow_job(make_job, name.replace("-", "_"), name)
    job.send(Orders.of(300).events)
    job.finish()
    later = job.directory / f"later_{name.replace('-', '_')}.py"
    later.write_text(code.replace("EU", name), encoding="utf-8")
    document = json.loads(job.topology_file.read_text(encoding="utf-8")) | {"then": f"{later.stem}:flow"}
    report = verify(parsed(job, document), job.settings)
    assert report.counts["changed"] > 0
    assert any(says in sample.text for sample in report.samples), report.samples[:3]


def parsed(job: Job, document: dict[str, object]):
    return parse(json.dumps(document), name=str(job.topology_file))


def test_verify_names_what_is_lost_added_and_sent_twice(make_job: MakeJob, kafka: RunningKafka) -> None:
    job = flow_job(make_job, "flows_plants", "flow-eu-plants")
    job.send(Orders.of(300).events)
    job.finish()
    producer = producer_of(kafka.bootstrap)
    by_value = defaultdict(list)
    for each in job.read(job.output):
        by_value[each.value()].append(each)
    first = next(iter(by_value.values()))[0]
    producer.produce(job.output, first.value(), first.key(), partition=first.partition(), headers=first.headers())
    producer.produce(job.output, b"{}", b"?", partition=0)
    producer.produce(
        "flow-eu-plants", b"{}", b"?", partition=0, headers=[("dedup-source", f"{job.name}-in/0/99999".encode())]
    )
    assert producer.flush(30) == 0
    report = verify(job.topology, job.settings)
    found = {kind: number for kind, number in report.counts.items() if number}
    assert found == {"duplicated": 1, "phantom": 1}, report.to_json()


def test_a_record_too_large_for_a_route_is_a_dead_letter_with_all_its_outputs(make_job: MakeJob) -> None:
    code = CODE.replace(
        'yield record.to("EU", headers={"enriched": b"1"})',
        'yield record\n            yield record.to("EU", value=random.Random(1).randbytes(2_000_000))',
    )
    job = flow_job(make_job, "flows_large", "flow-eu-large", code=code)
    job.send([Event(0, b'{"id": %d, "n": 1, "bad": false}' % own, BASE_MS + own, b"k") for own in (4, 1, 9)])
    job.finish()
    assert sorted(json.loads(each.value() or b"")["id"] for each in job.read(job.output)) == [4, 9]
    dead = job.read(job.topology.dead_letter)
    assert [dict(each.headers() or ())["dedup-reason"] for each in dead] == [b"refused_by_broker"]
    report = verify(job.topology, job.settings)
    assert report.passed, report.to_json()


def test_on_error_stop_stops_the_worker_and_commits_nothing_past_the_record(make_job: MakeJob) -> None:
    job = flow_job(make_job, "flows_stop", "flow-eu-stop", then={"flow": "flows_stop:flow", "on_error": "stop"})
    job.send([Event(0, b'{"id": 4, "n": 1, "bad": true}', BASE_MS, b"k")])
    worker = job.start()
    assert worker.wait() == 1, worker.log
    assert "the flow failed: ValueError: no country" in worker.log
    assert job.committed()[0] == 0


SLOW = """
import os, time
from dedup import Flow
flow = Flow()

@flow.on_unique
def slow(record):
    if os.environ.get("SLOW_FLOW"):
        time.sleep(0.5)
    yield record
"""


def test_a_flow_too_slow_for_the_session_stops_the_worker_and_the_next_one_goes_on(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = flow_job(make_job, "flows_slow", "flow-eu-slow", code=SLOW)
    events = [Event(0, b'{"id": %d}' % own, BASE_MS + own, b"k") for own in range(200)]
    job.send(events)
    monkeypatch.setenv("SLOW_FLOW", "1")
    worker = job.start()
    assert worker.wait() == 2, worker.log
    assert "the flow's function slow took" in worker.log
    assert "raise `session_timeout` in the config file" in worker.log
    assert len(job.read(job.output)) == job.committed()[0]
    monkeypatch.delenv("SLOW_FLOW")
    job.finish()
    assert [each.value() for each in job.read(job.output)] == [event.value for event in events]
    report = verify(job.topology, job.settings)
    assert (report.passed, report.not_provable) == (True, {}), report.to_json()


EVERY_VERDICT = """
import json
from dedup import Flow
flow = Flow()

@flow.on_unique
def route(record):
    size = len(record.value or b"")
    if size % 11 == 3:
        raise ValueError(record.verdict)
    if size % 5 == 1:
        return
    yield record.to("EU", key=record.verdict, headers={"saw": record.verdict})
    if size % 2:
        yield record
"""


@pytest.mark.parametrize("hops", [False, True])
def test_records_outside_the_guarantee_pass_and_verify_proves_them(make_job: MakeJob, *, hops: bool) -> None:
    name = f"flow-ugly-{hops}".lower()
    rules = {"late": "forward", "on_conflict": "forward", "tracking_id": {"field": "id", "missing": "forward"}}
    window = {"guard_period": "10s", "grace": "5s"}
    job = flow_job(make_job, name.replace("-", "_"), name, hops=hops, code=EVERY_VERDICT, **rules, **window)
    job.send([event for event in ugly(2) if len(event.value or b"") < 100_000])
    job.finish()
    saw = Counter(dict(each.headers() or ())["saw"] for each in job.read(name))
    assert saw.keys() >= {b"unique", b"conflict", b"missing_id", b"tombstone"}
    dead = Counter(dict(each.headers() or ())["dedup-reason"] for each in job.read(job.topology.dead_letter))
    assert dead[b"flow_failed"] > 10
    report = verify(job.topology, job.settings)
    assert (report.passed, report.not_provable) == (True, {}), report.to_json()
    assert sum(books.dead_letters for books in report.books) == dead.total()


def test_explain_says_where_the_flow_sent_a_record(make_job: MakeJob) -> None:
    job = flow_job(make_job, "flows_explain", "flow-eu-explain")
    job.send([Event(0, b'{"id": %d, "n": 1, "bad": false}' % own, BASE_MS + own, b"k") for own in (2, 5, 2)])
    job.finish()
    (first, second), (filtered,) = (
        explain_id(
            job.topology,
            job.settings,
            str(own),
            frozenset(state_keys(job.topology, str(own))),
            progress=lambda *_: None,
        ).records
        for own in (2, 5)
    )
    assert first.verdict == "unique"
    assert sorted(place.split("/")[0] for place in first.went) == ["flow-eu-explain", job.output]
    assert (second.verdict, second.went) == ("duplicate", [])
    assert (filtered.verdict, filtered.went, filtered.wrong) == ("unique", [], "")
