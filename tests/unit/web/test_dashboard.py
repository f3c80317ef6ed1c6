"""What the dashboard is made from: the snapshot's shape, rates from counters, cases in words, who is asked for an ID."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from dataclasses import asdict, replace
from typing import Any

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from dedup.cli.status import in_words
from dedup.core.event_time import RecordTime
from dedup.core.extract import compile_extractor
from dedup.core.fold import DeadLetter, Outcome, Rows
from dedup.core.tracking_id import (
    FieldRule,
    TrackingId,
    encode_composite,
    encode_integer,
    encode_text,
    id_text,
    state_key,
)
from dedup.core.window import Feed, Late, Sighting, Source
from dedup.errors import SettingsError
from dedup.metrics import DeadLetterAlert, TaskNumbers, TaskSeen, WorkerSeen
from dedup.settings import Web, load_settings
from dedup.topology.parse import parse
from dedup.web import server
from dedup.web.dashboard import FORMAT, KEPT, PLOTTED, MetricHistory, board, notices, quantile, summary
from dedup.web.server import MOST_ANSWER_BYTES, WebServer, ask_owners, status_of, summaries
from dedup.worker.faust_app import identity
from dedup.worker.introspection import state_keys
from dedup.worker.recent_outcomes import MOST_KEPT, MOST_OF_A_BATCH, Recent
from dedup.worker_view import LookedUp, Noted, Peer, SeenId, TaskPulse
from tests.unit.web.test_server import Worker, get

TOPICS = ("orders",)


def task(**changes) -> TaskSeen:
    return replace(TaskSeen("dedup", "orders", 0, "running", TaskNumbers(), 4, 0, 10, 100), **changes)


def pulse(numbers: TaskNumbers, lag: int | None, partition: int = 0, state: str = "running") -> TaskPulse:
    return TaskPulse(numbers, lag, "orders", partition, state)


def seen(*tasks: TaskSeen, not_ready: str | None = None) -> WorkerSeen:
    return WorkerSeen("orders", "a", tasks, {2: 7}, 1, 0, not_ready)


class TestSnapshot:
    def test_its_shape_is_a_contract(self):
        history = MetricHistory()
        history.sample([pulse(TaskNumbers(), 4)], 1_000, 1_000)
        history.sample([pulse(TaskNumbers(), 4)], 2_000, 2_000)
        case = Noted("late", "orders/0/1", "x", 5, 6, "why")
        peers = (Peer("a", None, (("orders", 0),), here=True), Peer("b", "http://b", (("orders", 1),), here=False))
        made = json.loads(json.dumps(board(seen(task(lag_records=0)), history, [case], peers, now_ms=2_000)))
        assert shape(made) == {
            "format": "int", "topology": "str", "worker": "str", "now_ms": "int", "ready": "bool",
            "not_ready": "NoneType", "attention": [],
            "totals": dict.fromkeys((*PLOTTED, "conflict", "fenced", "corrupted"), "int"),
            "fleet": [
                {
                    "format": "int", "topology": "str", "worker": "str", "ready": "bool", "tasks": "int",
                    "records_per_s": "float", "lag_records": "int", "p99_s": "NoneType", "state_bytes": "int",
                    "totals": dict.fromkeys((*PLOTTED, "conflict", "fenced", "corrupted"), "int"), "attention": [], "user_code": {}, "url": "NoneType",
                },
            ],
            "tasks": [
                {
                    "task": "str", "topic": "str", "partition": "int", "worker": "str", "state": "str", "url": "NoneType",
                    "restore_remaining": "NoneType", "restore_total": "NoneType", "lag_records": "int", "lag_seconds": "float",
                    "state_ids": "int", "state_bytes": "int", "state_max_bytes": "NoneType",
                },
            ],
            "latest": [
                {"kind": "str", "source": "str", "id": "str", "event_time_ms": "int", "judged_ms": "int", "why": "str"}
            ],
        }  # fmt: skip
        assert [(row["state"], row["partition"], row["worker"]) for row in made["tasks"]] == [
            ("running", 0, "a"),
            ("standby", 2, "a"),
            ("elsewhere", 1, "b"),
        ]

    def test_an_age_of_the_lag_that_is_not_known_is_no_zero(self):
        worker = seen(task(lag_records=1))
        told = board(worker, MetricHistory(), [], (), now_ms=0)["tasks"][0]
        assert (told["lag_records"], told["lag_seconds"]) == (1, None)
        assert status_of(worker, ())["tasks"][0]["lag_seconds"] is None

    def test_what_is_counted_is_what_the_metrics_count(self):
        here = task(numbers=TaskNumbers(verdicts=Counter(unique=2, late=1), conflicts=1, filtered=1))
        ended = {
            ("dedup", "orders", 0): TaskNumbers(verdicts=Counter(unique=5, duplicate=3), conflicts=2, filtered=4),
            ("dedup", "orders", 1): TaskNumbers(verdicts=Counter(unique=7)),
        }
        worker = replace(seen(here), ended=ended)
        totals = board(worker, MetricHistory(), [], (), now_ms=0)["totals"]
        assert (totals["unique"], totals["duplicate"], totals["late"], totals["conflict"]) == (14, 3, 1, 3)
        (told,) = status_of(worker, ())["tasks"]
        assert (told["verdicts"], told["filtered"]) == ({"unique": 7, "duplicate": 3, "late": 1}, 5)


def shape(value):
    match value:
        case dict():
            return {key: shape(each) for key, each in value.items()}
        case list():
            return [shape(value[0])] if value else []
        case _:
            return type(value).__name__


class TestHistory:
    def test_rates_are_what_counters_grew_by_a_second(self):
        history, numbers = MetricHistory(), TaskNumbers()
        history.sample([pulse(numbers, 5)], 0, 0)
        assert not history.samples
        numbers.verdicts.update(unique=100, duplicate=50)
        history.sample([pulse(numbers, 7), pulse(TaskNumbers(), None)], 2_000, 2_000)
        (sample,) = history.samples
        assert (sample["unique"], sample["duplicate"], sample["lag_records"]) == (50, 25, 7)

    def test_a_task_built_anew_counts_from_zero(self):
        history, old = MetricHistory(), TaskNumbers(verdicts=Counter(unique=1_000))
        history.sample([pulse(old, 0)], 0, 0)
        history.sample([pulse(TaskNumbers(verdicts=Counter(unique=10)), 0)], 1_000, 1_000)
        assert history.samples[0]["unique"] == 10

    def test_latency_is_that_of_the_last_stretch(self):
        history, numbers = MetricHistory(), TaskNumbers()
        numbers.end_to_end.add(2_000, 1_000)
        history.sample([pulse(numbers, 0)], 0, 0)
        numbers.end_to_end.add(0.08, 100)
        history.sample([pulse(numbers, 0)], 1_000, 1_000)
        history.sample([pulse(numbers, 0)], 2_000, 2_000)
        busy, quiet = history.samples
        assert busy["median_s"] == pytest.approx(0.075)
        assert 0.05 < busy["p99_s"] <= 0.1
        assert (quiet["median_s"], quiet["p99_s"]) == (None, None)

    def test_rates_do_not_change_when_the_clock_is_set(self):
        """Was: a thousand times too high for a second, and for an hour in the plots, when the clock was set back."""
        history, numbers = MetricHistory(), TaskNumbers()
        for second, now_ms in enumerate((10_000_000, 9_000_000, 20_000_000)):
            numbers.verdicts["unique"] += 50
            grown = history.sample([pulse(numbers, 0)], now_ms, 1_000 * second)
            assert grown is None or grown.covered_ms == 1_000
        assert [sample["unique"] for sample in history.samples] == [50, 50]
        assert [sample["time_ms"] for sample in history.samples] == [9_000_000, 20_000_000]

    def test_the_oldest_are_forgotten(self):
        history = MetricHistory()
        for moment in range(KEPT + 10):
            history.sample([], moment * 1_000, moment * 1_000)
        assert len(history.samples) == KEPT

    def test_beyond_the_last_bucket_its_bound_is_told(self):
        counts = [0] * 13
        counts[-1] = 5
        assert quantile(counts, 0.5) == 3_600


class TestAttention:
    def texts(self, *tasks, not_ready=None, peers=()):
        return [(each.level, each.text) for each in summary(seen(*tasks, not_ready=not_ready), [], peers).attention]

    def test_nothing_wants_attention(self):
        assert self.texts(task()) == []

    def test_stuck_is_worse_than_late_and_stands_first(self):
        behind = TaskNumbers(committed_time_ms=1)
        stuck = TaskNumbers(last_commit_s=-1e9)
        found = self.texts(task(numbers=behind), task(partition=1, numbers=stuck))
        assert [level for level, _ in found] == ["error", "warning"]
        assert "orders/1 is stuck: 4 records wait" in found[0][1]
        assert "behind (4 records)" in found[1][1]

    @pytest.mark.parametrize("state", ["created", "restoring", "running", "closed"])
    def test_a_task_is_stuck_in_every_state_that_it_passes_through_while_commits_fail(self, state):
        ((level, text),) = self.texts(task(state=state, numbers=TaskNumbers(last_commit_s=-1e9)))
        assert (level, text.startswith("orders/0 is stuck: 4 records wait")) == ("error", True)

    def test_a_record_after_a_quiet_time_is_neither_stuck_nor_late(self):
        """Was: 1 records wait, and nothing was committed for 3,600 s; or 3,600 s behind."""
        an_hour_ago = time.monotonic() - 3_600
        numbers = TaskNumbers(last_commit_s=an_hour_ago, committed_time_ms=int(1_000 * (time.time() - 3_600)))
        fresh = task(numbers=numbers, lag_records=1)
        numbers.look(1, 0)
        assert self.texts(fresh)[0][0] == "error"
        numbers.look(0, 0)
        assert self.texts(fresh) == []
        numbers.caught_up_s = numbers.nothing_readable_s = time.monotonic() - 40
        assert "nothing was committed for 40 s" in self.texts(fresh)[0][1]
        numbers.last_commit_s, numbers.caught_up_s = time.monotonic(), time.monotonic() - 70
        assert self.texts(fresh) == [("warning", "orders/0 is 70 s behind (1 records).")]

    def test_records_that_an_open_transaction_hides_are_not_stuck_but_late(self):
        """Was: is stuck, while a producer's transaction was open for longer than 30 s."""
        ages_ago = TaskNumbers(last_commit_s=-1e9, caught_up_s=time.monotonic() - 300)
        hidden = task(numbers=ages_ago, unstable_records=4)
        assert self.texts(hidden) == [("warning", "orders/0 is 300 s behind (4 records).")]
        ages_ago.look(4, 4)
        # The transaction has ended, and nothing is committed yet.
        assert self.texts(replace(hidden, unstable_records=0)) == [("warning", "orders/0 is 300 s behind (4 records).")]
        ages_ago.nothing_readable_s = time.monotonic() - 40
        assert "nothing was committed for 40 s" in self.texts(replace(hidden, unstable_records=3))[0][1]

    def test_records_that_wait_for_a_long_commit_interval_are_not_stuck(self):
        """Was: is stuck, for the second half of each minute."""
        waits = seen(task(numbers=TaskNumbers(last_commit_s=time.monotonic() - 59)))
        assert len(notices(waits, [], ())) == 1
        assert notices(replace(waits, commit_interval_s=60.0), [], ()) == []
        waits.tasks[0].numbers.last_commit_s -= 40
        assert len(notices(replace(waits, commit_interval_s=60.0), [], ())) == 1

    def test_a_restore_says_what_is_left(self):
        restoring = task(state="restoring", lag_records=None, numbers=TaskNumbers(restore_remaining=1_500))
        ((level, text),) = self.texts(restoring, not_ready="1 of 1 tasks are not running yet")
        assert (level, "1,500 changelog records are left" in text) == ("warning", True)

    def test_a_bound_is_warned_of_before_it_is_reached(self):
        assert self.texts(task(state_bytes=80, state_max_bytes=100)) == []
        assert self.texts(task(state_bytes=81, state_max_bytes=100))[0][0] == "warning"
        assert self.texts(task(state_bytes=101, state_max_bytes=100))[0][0] == "error"

    def test_nearly_all_dead_letters_is_an_error_and_stands_first(self):
        stuck = task(numbers=TaskNumbers(last_commit_s=-1e9))
        alerted = replace(seen(stuck), alert=DeadLetterAlert(200, 199, "future_time", 198))
        found = summary(alerted, []).attention
        assert [each.level for each in found] == ["error", "error"]
        assert found[0].text.startswith(
            "199 of 200 records judged in the last minute are dead letters, 198 of them for"
        )
        assert "Compare the clocks" in found[0].text

    def test_dead_letters_in_another_format_are_counted_over_all_tasks(self):
        one, other = (TaskNumbers(formats=Counter(gzip=n, schema_registry=1_000 * n)) for n in (1, 2))
        ((level, text),) = self.texts(task(numbers=one), task(partition=1, numbers=other))
        assert level == "warning"
        assert text.endswith("by their first bytes: 3,000 schema_registry, 3 gzip.")

    def test_issues_of_all_workers_stand_together_errors_first(self):
        stuck = task(partition=1, numbers=TaskNumbers(last_commit_s=-1e9))
        theirs = asdict(summary(replace(seen(stuck), worker_id="b"), [])) | {"url": "http://b"}
        gone = {"worker": "c", "url": "http://c", "why": "unreachable"}
        mute = {"worker": "d", "url": None, "why": "it serves no pages"}
        worker = seen(task(state_bytes=81, state_max_bytes=100))
        found = board(worker, MetricHistory(), [], (), [theirs, gone, mute], now_ms=0)["attention"]
        assert [(each["level"], each["worker"], each["url"], each["about"]) for each in found] == [
            ("error", "b", "http://b", "task:orders/1"),
            ("warning", "", None, "task:orders/0"),
            ("warning", "", None, "worker:c"),
        ]
        assert found[0]["text"].startswith("orders/1 is stuck")
        assert found[2]["text"] == "No figures from worker c: unreachable."

    def test_workers_with_different_copies_of_user_code_are_told_apart(self):
        def worker(name: str, **digests: str) -> dict[str, Any]:
            one = replace(seen(task()), worker_id=name, user_code=digests)
            return asdict(summary(one, [])) | {"url": None}

        mute = {"worker": "d", "url": None, "why": "it serves no pages"}
        own = replace(seen(task()), user_code={"ids": "1a", "flow": "2b"})
        same = board(own, MetricHistory(), [], (), [worker("b", ids="1a", flow="2b"), worker("c"), mute], now_ms=0)
        assert same["attention"] == []
        others = [worker("b", ids="3c", flow="2b"), worker("c", ids="1a")]
        (told,) = board(own, MetricHistory(), [], (), others, now_ms=0)["attention"]
        assert "different copies of ids (digest of the module: a 1a, b 3c, c 1a)" in told["text"]
        assert told["about"] == "worker:b"

    def test_what_is_left_out_is_counted(self):
        stuck = [task(partition=at, numbers=TaskNumbers(last_commit_s=-1e9)) for at in range(95)]
        theirs = asdict(summary(replace(seen(*stuck), worker_id="b"), [])) | {"url": "http://b"}
        assert [each["issues"] for each in theirs["attention"]] == [1] * 8 + [87]
        found = board(seen(*stuck), MetricHistory(), [], (), [theirs], now_ms=0)["attention"]
        assert len(found) == 101
        assert found[-1]["text"].startswith("90 more; the list of tasks")
        assert found[-1]["about"] == "tasks"
        assert sum(each["issues"] for each in found) == 190

    def test_every_issue_says_where_its_cause_is_shown(self):
        peers = (Peer("c", None, (), here=False), Peer("d", None, (), here=False))
        lone = replace(seen(not_ready="there is no assignment yet"), alert=DeadLetterAlert(200, 199, "not_json", 199))
        assert [each.about for each in notices(lone, [], peers)] == ["kind:dead_letter", "not-ready", "worker:c"]
        restores = [
            task(partition=at, state="restoring", numbers=TaskNumbers(restore_remaining=left))
            for at, left in enumerate((5, 9, 7))
        ]
        (told,) = notices(seen(*restores, not_ready="3 of 3 tasks are not running yet"), [], ())
        assert told.about == "task:orders/1"


class TestRecent:
    def rows(self, *ids: str) -> Rows:
        values = [json.dumps({"id": each}).encode() for each in ids]
        extract = compile_extractor(TrackingId(FieldRule(("id",))), RecordTime(), fmt="json", fingerprint=False)
        extracted = extract([None] * len(ids), values, [()] * len(ids), [1_000] * len(ids))
        return Rows(extracted, range(len(ids)), (Feed(0, 3),))

    def outcome(self, rows: Rows, **found) -> Outcome:
        return Outcome(judged_times_ms=list(rows.extracted.times_ms), **found)

    def test_each_kind_in_words(self):
        rows = self.rows("a", "b", "c", "d", "e")
        first = Sighting(400, 400, Source(0, 3, 77))
        found = self.outcome(rows, duplicates=[(0, first)], repeats=[(1, 0)], conflicts=[(2, first)],
                             late=[(3, Late(7_199_997))], dead=[(4, DeadLetter("bad", "no id"))])  # fmt: skip
        recent = Recent()
        recent.note(rows, found, 9)
        assert list(recent.shown(TOPICS, ids=True)) == []
        recent.commit(recent.freeze())
        told = {(each.kind, each.source): each for each in recent.shown(TOPICS, ids=True)}
        assert told["duplicate", "orders/3/0"].why == "repeats orders/3/77, 600ms after it"
        assert told["duplicate", "orders/3/1"].why == "repeats orders/3/0, at the same event time"
        assert told["conflict", "orders/3/2"].why == "repeats orders/3/77 with another payload, 600ms after it"
        assert told["late", "orders/3/3"].why == "2h behind stream time, and its ID is not known"
        assert told["dead_letter", "orders/3/4"].why == "bad: no id"
        assert told["dead_letter", "orders/3/4"].event_time_ms is None
        assert told["late", "orders/3/3"].id == "d"
        assert {each.id for each in recent.shown(TOPICS, ids=False)} == {None}

    def test_what_was_not_committed_is_never_shown(self):
        rows, recent = self.rows("a"), Recent()
        recent.note(rows, self.outcome(rows, late=[(0, Late(1))]), 0)
        recent.discard()
        recent.commit(recent.freeze())
        assert list(recent.shown(TOPICS, ids=True)) == []

    def test_a_batch_costs_a_few_cases_whatever_its_size(self):
        rows = self.rows(*map(str, range(100)))
        found = self.outcome(rows, late=[(row, Late(1)) for row in range(100)])
        recent = Recent()
        recent.note(rows, found, 0)
        cases = recent.freeze()
        assert len(cases) == MOST_OF_A_BATCH
        for _ in range(10):
            recent.commit(cases)
        assert len(list(recent.shown(TOPICS, ids=True))) == MOST_KEPT


PARTS = "[{key: true}, {header: h, absent: as_value}, {field: a}]"


@pytest.mark.parametrize(
    ("rule", "key", "text"),
    [
        ("field: id", encode_text("order/7 é"), "order/7 é"),
        ("field: id", encode_text("8d5e957f-2978-4348-bd98-fa830fa6413c"), "8d5e957f-2978-4348-bd98-fa830fa6413c"),
        ("field: id", encode_integer(-70_000), "-70000"),
        ("key: true", b"\x02abc", "abc"),
        (f"parts: {PARTS}", encode_composite([b"\x02k", b"\x0c", encode_integer(7)]), '["k", {}, 7]'),
        (f"parts: {PARTS}", encode_composite([b"\x02k", b"\x0b", encode_text("x")]), '["k", null, "x"]'),
        (f"parts: {PARTS}", encode_composite([b"\x02k", b"\x02h", b"\x0a[2]"]), '["k", "h", [2]]'),
        ("first_of: [{key: true}, {field: id}]", b"\x0d\x00\x02abc", "abc"),
        ("first_of: [{key: true}, {field: id}]", b"\x0d\x01" + encode_integer(7), "7"),
        ("python: ids:order_id", encode_text("order/7 é"), "order/7 é"),
        ("python: ids:order_id", b"\x02abc", "abc"),
        ("python: ids:order_id", encode_integer(-70_000), "-70000"),
        ("first_of: [{key: true}, {python: ids:order_id}]", b"\x0d\x01" + encode_integer(1 << 62), str(1 << 62)),
        ("fields: [a, b]", encode_composite([encode_text('x"'), encode_integer(7)]), '["x\\"", 7]'),
    ],
)
def test_an_id_is_written_as_a_look_up_takes_it(rule, key, text):
    topology = parse(
        f"dedup: 1\nname: t\nsource: {{topics: [c]}}\ntracking_id: {{{rule}}}\nguard_period: 1h\noutput: {{topic: o}}\n",
        name="t.yaml",
    )
    assert id_text(key) == text
    assert key in state_keys(topology, text)


def test_a_number_that_python_does_not_read_is_looked_up_as_text():
    text = "dedup: 1\nname: t\nsource: {topics: [c]}\ntracking_id: {python: ids:own}\nguard_period: 1h\n"
    digits = "1" * 5_000
    assert state_key(encode_text(digits)) in state_keys(parse(text, name="t.yaml"), digits)


def test_a_digest_leads_back_to_no_id():
    assert id_text(state_key(encode_text("x" * 100))) is None


def looked_up(**changes) -> LookedUp:
    return replace(LookedUp("orders", "a", "x", (), (0,), 3, None, (0, 1, 2), ("orders",)), **changes)


SUMMARY = asdict(summary(replace(seen(task()), worker_id="b"), []))


class TestSummaries:
    """What other workers answer may be anything; none of it is taken for figures of the fleet."""

    async def of(self, body: bytes, *, status: int = 200, peer: str = "b", **headers: str) -> dict[str, Any]:
        async def answer(_: web.Request) -> web.Response:
            return web.Response(body=body, status=status, headers=headers)

        app = web.Application()
        app.router.add_get("/api/summary", answer)
        async with TestServer(app) as served, ClientSession() as session:
            (found,) = await summaries(
                "orders", [Peer(peer, str(served.make_url("/")).rstrip("/"), (), here=False)], session
            )
        return found

    async def test_the_figures_of_a_peer_are_taken(self):
        found = await self.of(json.dumps(SUMMARY).encode())
        assert "why" not in found
        assert found == SUMMARY | {"url": found["url"]}

    @pytest.mark.parametrize(
        ("body", "why"),
        [
            (b"[" * 200_000, "not JSON"),
            (b"{" + b" " * MOST_ANSWER_BYTES + b"}", "too long"),
            (b"anything", "not JSON"),
            (b"[]", "another topology or release"),
            (json.dumps(SUMMARY | {"topology": "clicks"}).encode(), "another topology or release"),
            (json.dumps(SUMMARY | {"format": FORMAT + 1}).encode(), "another topology or release"),
            (json.dumps(SUMMARY | {"lag_records": "5"}).encode(), "another topology or release"),
            (json.dumps(SUMMARY | {"p99_s": float("nan")}).encode(), "not JSON"),
            (
                json.dumps({"format": FORMAT, "topology": "orders", "worker": "b"}).encode(),
                "another topology or release",
            ),
        ],
        ids=["deep", "long", "text", "list", "topology", "format", "type", "nan", "fields"],
    )
    async def test_what_is_no_summary_is_named_and_not_added(self, body, why):
        found = await self.of(body)
        assert why in found["why"]
        assert set(found) == {"worker", "url", "why"}

    async def test_figures_of_a_worker_that_answers_for_another_are_not_counted_twice(self):
        """With the default web.host, workers on two machines announce the same loopback address."""
        found = await self.of(json.dumps(SUMMARY).encode(), peer="c")
        assert found["why"] == "worker b answers at this address; set web.advertise"

    async def test_a_refusal_is_told(self):
        assert (await self.of(b"", status=404))["why"] == "it answered 404"

    async def test_many_pages_share_one_board(self, monkeypatch):
        asked = []

        async def slow(*_):
            asked.append(1)
            await asyncio.sleep(0.1)
            return []

        monkeypatch.setattr(server, "summaries", slow)
        async with WebServer(Web(port=0), Worker()) as pages:
            answers = await asyncio.gather(*(get(pages, "/api/dashboard") for _ in range(20)))
        assert {code for code, _ in answers} == {200}
        assert len(asked) == 1


class TestOwners:
    async def test_partitions_that_nobody_has_are_told(self):
        own = Peer("a", None, (("orders", 0),), here=True)
        found = await ask_owners(looked_up(), (own,), None)
        assert found["unreached"][0]["partitions"] == [1, 2]
        assert "nobody has them" in found["unreached"][0]["why"]

    async def test_only_owners_of_partitions_that_may_hold_it_are_asked(self):
        # Nothing listens there: asked, it would be told as not reached.
        other = Peer("b", "http://127.0.0.1:9", (("orders", 1), ("source", 0)), here=False)
        found = await ask_owners(looked_up(candidates=(0,), belongs_to=0), (other,), None)
        assert (found["unreached"], found["asked"]) == ([], [0])
        found = await ask_owners(looked_up(candidates=(0, 1)), (other,), None)
        assert [row["worker"] for row in found["unreached"]] == ["b"]

    async def test_a_worker_of_another_topology_is_not_believed(self):
        worker = Worker()
        worker.name = "b"
        async with WebServer(Web(port=0), worker) as pages:
            other = Peer("b", pages.url, (("orders", 1),), here=False)
            found = await ask_owners(looked_up(topology="clicks", candidates=(0, 1)), (other,), None)
            assert found["unreached"][0]["why"] == "it is a worker of another topology or release"
            found = await ask_owners(looked_up(id="known", candidates=(0, 1)), (other,), None)
            assert [each["worker"] for each in found["sightings"]] == ["b"]
            another = Peer("c", pages.url, (("orders", 1),), here=False)
            found = await ask_owners(looked_up(id="known", candidates=(0, 1)), (another,), None)
        assert found["sightings"] == []
        assert [row["worker"] for row in found["unreached"]] == ["c"]

    async def test_without_an_assignment_nothing_is_said_to_be_unknown(self):
        found = await ask_owners(looked_up(partitions=0, candidates=(), asked=()), (), None)
        assert "no assignment is in force" in found["unreached"][0]["why"]
        assert list(in_words(found)) == [f"not asked: all partitions ({found['unreached'][0]['why']})"]

    async def test_own_sightings_name_their_worker(self):
        own = SeenId(0, 1, 1, 2, "orders/0/1", live=True, went=None)
        found = await ask_owners(looked_up(sightings=(own,), candidates=(0,)), (), None)
        assert found["sightings"][0]["worker"] == "a"


class TestAddress:
    @pytest.mark.parametrize("text", ["ftp://h", "http://h/path", "h:6066", "http://user@h", "javascript:alert(1)"])
    def test_what_is_no_address_is_refused(self, text):
        with pytest.raises(SettingsError, match="is not the address of a page"):
            load_settings(None, ["brokers=b:1", f"web.advertise={text}"], {})

    def test_no_two_workers_are_called_alike(self):
        assert identity("a", None) != identity("b", None)
        assert identity("a", "http://h:1") != identity("b", "http://h:1")

    @pytest.mark.parametrize(
        ("settings", "told"),
        [
            ({"host": "127.0.0.1"}, "http://127.0.0.1:"),
            ({"host": "0.0.0.0", "advertise": "http://w-1:80"}, "http://w-1:80"),
        ],
    )
    async def test_others_are_told_where_the_pages_are(self, settings, told):
        pages = WebServer(Web(port=0, **settings), Worker())
        assert pages.advertised is None
        async with pages:
            assert pages.advertised.startswith(told)
