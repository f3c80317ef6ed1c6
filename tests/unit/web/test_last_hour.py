"""The last hour of a group: slots that add up, gaps that stay gaps, and who had which partition, also after an end."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import msgspec
import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from dedup.metrics import END_TO_END_BUCKETS_S, TaskNumbers
from dedup.settings import Web
from dedup.web.dashboard import FORMAT, PLOTTED, Growth
from dedup.web.last_hour import (
    COUNTED,
    HOUR_MS,
    MOST_ROWS,
    MOST_SPANS,
    SHORT_ROWS,
    SLOT_MS,
    SLOTS,
    Memory,
    WorkerHour,
    merged,
)
from dedup.web.server import WebServer, hours
from dedup.worker_view import Peer, TaskPulse
from tests.unit.web.test_server import Worker, get

BUCKETS = len(END_TO_END_BUCKETS_S) + 1
START = 1_700_000_000_000
"""The start of a slot."""


def growth(covered_ms: int = 1_000, lag: int | None = None, slowest: int = 0, **counts: int) -> Growth:
    latencies = [0] * BUCKETS
    latencies[slowest] = sum(counts.values())
    return Growth(covered_ms, Counter(counts), latencies, lag)


def peers(here: str | None, **owned: range) -> list[Peer]:
    return [
        Peer(name, None, tuple(("orders", number) for number in numbers), here=name == here)
        for name, numbers in owned.items()
    ]


def pulses(partitions: range, state: str = "running") -> list[TaskPulse]:
    return [TaskPulse(TaskNumbers(), 0, "orders", number, state) for number in partitions]


def told(memory: Memory, worker: str, now_ms: int) -> WorkerHour:
    """As another worker receives it."""
    made = memory.told("orders", worker, now_ms, version=FORMAT)
    return msgspec.json.decode(msgspec.json.encode(made), type=WorkerHour)


class TestSlots:
    def test_a_slot_adds_up_what_was_judged_in_ten_seconds(self):
        memory = Memory(START)
        for second in range(10):
            memory.add(growth(unique=30, duplicate=10, lag=second), START + 1_000 * second, 5 if not second else None)
        plots = merged([told(memory, "a", START + 9_999)], START + 9_999)["plots"]
        last = {name: values[-1] for name, values in plots.items()}
        assert (last["unique"], last["duplicate"], last["records"], last["duplicate_share"]) == (30, 10, 40, 25)
        assert (last["lag_records"], last["state_bytes"], last["time_ms"]) == (9, 5, START + 9_999)

    def test_what_nobody_saw_is_a_gap_and_no_zero(self):
        memory = Memory(START)
        for slot in (0, 1, 4):
            memory.add(growth(10_000, unique=10), START + slot * SLOT_MS)
        plots = merged([told(memory, "a", START + 4 * SLOT_MS)], START + 4 * SLOT_MS)["plots"]
        assert plots["unique"][-5:] == [1, 1, None, None, 1]
        assert plots["lag_records"][-5:] == [None] * 5
        assert {len(values) for values in plots.values()} == {SLOTS}

    def test_a_worker_that_began_within_a_slot_is_not_thought_slow(self):
        memory = Memory(START)
        memory.add(growth(2_000, unique=200), START + 9_000)
        assert merged([told(memory, "a", START + SLOT_MS)], START + SLOT_MS)["plots"]["unique"][-2] == 100

    def test_a_slot_that_one_worker_has_not_begun_yet_is_not_a_fall(self):
        ahead, behind = Memory(START), Memory(START)
        for memory, slots in ((ahead, (0, 1)), (behind, (0,))):
            for slot in slots:
                memory.add(growth(10_000, unique=10), START + slot * SLOT_MS)
        now_ms = START + SLOT_MS
        plots = merged([told(ahead, "a", now_ms), told(behind, "b", now_ms)], now_ms)["plots"]
        assert plots["unique"][-2:] == [2, None]
        assert merged([told(ahead, "a", now_ms)], now_ms)["plots"]["unique"][-2:] == [1, 1]

    def test_an_hour_is_kept_and_no_more(self):
        memory = Memory(START)
        for slot in range(SLOTS + 50):
            memory.add(growth(10_000, unique=1), START + slot * SLOT_MS)
        now_ms = START + (SLOTS + 49) * SLOT_MS
        assert len(told(memory, "a", now_ms).slots) == SLOTS
        assert merged([told(memory, "a", now_ms)], now_ms)["ranges"]["3600"]["unique"] == SLOTS

    def test_a_clock_that_is_set_back_does_not_mix_the_slots(self):
        memory = Memory(START)
        for slot in (0, 1, 2, 3, 1):
            memory.add(growth(10_000, unique=slot), START + slot * SLOT_MS)
        assert [slot.number - START // SLOT_MS for slot in told(memory, "a", START + SLOT_MS).slots] == [0, 1]

    def test_each_range_has_figures_of_its_own(self):
        memory = Memory(START)
        memory.add(growth(10_000, unique=7, slowest=9), START)
        memory.add(growth(10_000, unique=3), START + 1_000_000)
        ranges = merged([told(memory, "a", START + 1_000_000)], START + 1_000_000)["ranges"]
        assert [ranges[each]["unique"] for each in ("300", "900", "3600")] == [3, 3, 10]
        assert ranges["900"]["p99_s"] < 0.1
        assert ranges["3600"]["p99_s"] > 10


class TestOwners:
    def test_a_hand_over_is_seen_with_the_time_until_it_runs(self):
        one, other = Memory(START), Memory(START)
        one.look(pulses(range(4)), peers("a", a=range(4)), START)
        one.look(pulses(range(2)), peers("a", a=range(2), b=range(2, 4)), START + 60_000)
        other.look([], peers("b", a=range(2), b=range(2, 4)), START + 60_000)
        other.look(pulses(range(2, 4), "restoring"), peers("b", a=range(2), b=range(2, 4)), START + 61_000)
        other.look(pulses(range(2, 4)), peers("b", a=range(2), b=range(2, 4)), START + 67_000)
        now_ms = START + 100_000
        found = merged([told(one, "a", now_ms), told(other, "b", now_ms)], now_ms)
        assert found["moves"] == [
            {"at_ms": START + 60_000, "from": "a", "to": "b", "partitions": 2, "label": "orders/2-3", "took_ms": 7_000}
        ]
        rows = {row["label"]: [(span["worker"], span["state"]) for span in row["spans"]] for row in found["rows"]}
        assert rows["orders/0"] == [("a", "running")]
        assert rows["orders/2"] == [("a", "running"), ("b", "assigned"), ("b", "restoring"), ("b", "running")]
        assert found["lost"] == []

    def test_of_a_worker_that_is_gone_only_the_assignment_is_known(self):
        left = Memory(START)
        left.look(pulses(range(2)), peers("a", a=range(2), b=range(2, 4)), START)
        left.look(pulses(range(4)), peers("a", a=range(4)), START + 60_000)
        for slot in range(10):
            left.add(growth(10_000, unique=1), START + slot * SLOT_MS)
        now_ms = START + 100_000
        found = merged([told(left, "a", now_ms)], now_ms)
        (gone,) = [row for row in found["rows"] if row["label"] == "orders/3"]
        assert [(span["worker"], span["state"]) for span in gone["spans"]] == [("b", "assigned"), ("a", "running")]
        assert found["lost"] == [{"worker": "b", "until_ms": START + 60_000, "answers": False}]
        # The first slot is one in which it had its partitions only in part.
        assert found["plots"]["partial"][-11:] == [False, *[True] * 5, *[False] * 5]

    def test_a_worker_that_was_restarted_says_since_when_it_remembers(self):
        other, restarted = Memory(START), Memory(START + 50_000)
        other.look([], peers("b", a=range(1)), START)
        restarted.look(pulses(range(1)), peers("a", a=range(1)), START + 55_000)
        now_ms = START + 60_000
        found = merged([told(other, "b", now_ms), told(restarted, "a", now_ms)], now_ms)
        spans = [(span["state"], span["from_ms"], span["to_ms"]) for span in found["rows"][0]["spans"]]
        assert spans == [("assigned", START, START + 50_000), ("running", START + 55_000, now_ms)]
        assert found["lost"] == [{"worker": "a", "until_ms": START + 50_000, "answers": True}]
        assert found["moves"] == []

    def test_256_partitions_share_few_lines(self):
        one, other = Memory(START), Memory(START)
        for moment, border in enumerate((256, 128, 100)):
            owned = {"a": range(border), "b": range(border, 256)}
            one.look(pulses(owned["a"]), peers("a", **owned), START + moment * 60_000)
            other.look(pulses(owned["b"]), peers("b", **owned), START + moment * 60_000)
        found = merged([told(one, "a", START + 200_000), told(other, "b", START + 200_000)], START + 200_000)
        assert [(row["label"], row["partitions"], len(row["spans"])) for row in found["rows"]] == [
            ("orders/0-99", 100, 1),
            ("orders/100-127", 28, 2),
            ("orders/128-255", 128, 2),
        ]
        assert [move["partitions"] for move in found["moves"]] == [28, 128]

    def test_a_short_timeline_groups_fewer_partitions(self):
        one, other = Memory(START), Memory(START)
        owned = {"a": range(0, 12, 2), "b": range(1, 12, 2)}
        one.look(pulses(owned["a"]), peers("a", **owned), START)
        other.look(pulses(owned["b"]), peers("b", **owned), START)
        hours = [told(one, "a", START + 60_000), told(other, "b", START + 60_000)]
        assert len(merged(hours, START + 60_000)["rows"]) == 12
        short = merged(hours, START + 60_000, single=SHORT_ROWS)
        assert [row["label"] for row in short["rows"]] == ["orders/0, 2, 4, 6, 8, 10", "orders/1, 3, 5, 7, 9, 11"]

    def test_if_each_partition_has_a_fate_of_its_own_the_rest_is_one_line(self):
        memory = Memory(START)
        for moment in range(41):
            memory.look(pulses(range(moment, 40)), [], START + moment * 30_000)
        found = merged([told(memory, "a", START + 40 * 30_000)], START + 40 * 30_000)
        assert len(found["rows"]) <= MOST_ROWS
        assert sum(row["partitions"] for row in found["rows"]) == found["partitions"] == 40

    def test_memory_is_bounded_and_what_is_older_than_an_hour_is_forgotten(self):
        memory = Memory(START)
        for moment in range(2 * MOST_SPANS):
            memory.look(pulses(range(1), "running" if moment % 2 else "restoring"), [], START + moment)
        assert len(told(memory, "a", START + 2 * MOST_SPANS).spans) == MOST_SPANS
        assert len(told(memory, "a", START + HOUR_MS + 2 * MOST_SPANS).spans) == 1


class TestPages:
    async def test_a_page_shows_the_hour_of_all_workers(self):
        other, asked = Worker(), Worker()
        other.name = "b"
        async with WebServer(Web(port=0), other) as theirs, WebServer(Web(port=0), asked) as ours:
            there = Peer("b", theirs.url, (("orders", 1),), here=False)
            asked.others = (Peer("a", ours.url, (("orders", 0),), here=True), there)
            now_ms = told(ours._memory, "a", 0).since_ms + SLOT_MS
            for pages, partition in ((ours, 0), (theirs, 1)):
                pages._memory.look(pulses(range(partition, partition + 1)), asked.others, now_ms)
            own = json.loads((await get(ours, "/api/hour?here=1"))[1])
            assert (own["worker"], own["format"], own["topology"]) == ("a", FORMAT, "orders")
            found = json.loads((await get(ours, "/api/hour"))[1])
            assert found["workers"] == ["a", "b"]
            assert set(found["plots"]) == {
                "time_ms", "partial", *COUNTED, "records", "duplicate_share", "lag_records", "state_bytes", "median_s", "p99_s"
            }  # fmt: skip
            assert set(found["ranges"]) == {"300", "900", "3600"}
            one = json.loads((await get(ours, "/api/hour?worker=b"))[1])
            assert one["workers"] == ["a", "b"]

    async def test_a_phone_gets_a_short_timeline(self):
        async with WebServer(Web(port=0), Worker()) as pages:
            pages._memory.look(pulses(range(SHORT_ROWS + 1)), [], told(pages._memory, "a", 0).since_ms - SLOT_MS)
            rows = [len(json.loads((await get(pages, path))[1])["rows"]) for path in ("/api/hour", "/api/hour?short")]
        assert rows == [SHORT_ROWS + 1, 1]

    @pytest.mark.parametrize(
        "change",
        [
            {"topology": "clicks"},
            {"format": FORMAT + 1},
            {"worker": "c"},
            {"slots": [[1, 1, [1] * (len(PLOTTED) - 1), [0] * BUCKETS, None, None]]},
            {"slots": [[1, 1, [1] * len(COUNTED), [0], None, None]]},
            {"slots": [[1, 1, [1] * len(COUNTED), [0] * BUCKETS, None, None]] * (SLOTS + 1)},
            {"slots": [[1, 1, [-1] * len(COUNTED), [0] * BUCKETS, None, None]]},
            {"slots": [[1, 1, [1] * len(COUNTED), [0] * BUCKETS, None, 1 << 62]]},
            {"spans": [["orders", 1, "b", "running", "soon", None]]},
            {"spans": [["orders", 1, "b", "unheard of", 1, None]]},
            {"spans": [["orders", 1, "b", "running", 1, None]] * (MOST_SPANS + 1)},
        ],
        ids=[
            "topology",
            "format",
            "worker",
            "counts",
            "latencies",
            "slots",
            "negative",
            "huge",
            "type",
            "state",
            "spans",
        ],
    )
    async def test_what_is_no_hour_of_this_group_is_left_out(self, change):
        sound = msgspec.to_builtins(told(Memory(START), "b", START))
        assert await self.taken(sound) == ["a", "b"]
        assert await self.taken(sound | change) == ["a"]

    async def taken(self, answer: dict[str, Any]) -> list[str]:
        async def served(_: web.Request) -> web.Response:
            return web.json_response(answer)

        app = web.Application()
        app.router.add_get("/api/hour", served)
        async with TestServer(app) as there, ClientSession() as session:
            peer = Peer("b", str(there.make_url("/")).rstrip("/"), (), here=False)
            found = await hours(told(Memory(START), "a", START), [peer], session)
        return [hour.worker for hour in found]
