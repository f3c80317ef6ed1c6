"""Workers with a last hour of their own, in the states in which people look at the dashboard."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from dedup.metrics import DeadLetterAlert, TaskNumbers, TaskSeen
from dedup.web.dashboard import PLOTTED, Growth
from dedup.web.last_hour import HOUR_MS, SLOT_MS, Memory
from dedup.worker_view import Noted, Peer, TaskPulse
from tests.web.staged import Staged, restoring, running, serving

SHARES = {"unique": 0.78, "duplicate": 0.2, "late": 0.002, "dead_letter": 0.001}
LATENCIES = (0.02, 0.31, 0.38, 0.2, 0.07, 0.015, 0.005)
"""The share of records in each of the first buckets of end-to-end latency."""
MUTE = Peer("orders-4", None, (("orders", 12),), here=False)
Owner = Callable[[int, int], tuple[str, str]]
"""Tells who has a partition a number of milliseconds ago, and in which state, if it is the worker itself."""


@dataclass
class Busy(Staged):
    """A worker that judges records while it is looked at."""

    per_s: float = 0.0
    looks: int = 0

    def pulse(self) -> list[TaskPulse]:
        if self.per_s:
            # One task after the other, so that rare verdicts are not rounded to zero.
            numbers = self.tasks[self.looks % len(self.tasks)].numbers
            self.looks += 1
            each = growth(self.per_s, 1_000, 0)
            numbers.verdicts.update({name: each.counts[name] for name in PLOTTED})
            numbers.conflicts += each.counts["conflict"]
            for at, count in enumerate(each.latencies):
                numbers.end_to_end.counts[at] += count
        return super().pulse()


def growth(per_s: float, covered_ms: int, lag: int) -> Growth:
    judged = per_s * covered_ms / 1_000
    counts = Counter({name: round(judged * share) for name, share in SHARES.items()})
    counts["conflict"] = counts["late"]
    latencies = [round(judged * share) for share in (*LATENCIES, *[0.0] * (13 - len(LATENCIES)))]
    return Growth(covered_ms, counts, latencies, lag)


def hour(name: str, owner: Owner, partitions: range, *, per_s: float, lag: int, state: int, since_ms: int) -> Memory:
    """Return what a worker remembers that began ``since_ms`` ago: a wave of records, and who had which partition."""
    now_ms = time.time_ns() // 1_000_000
    memory = Memory(now_ms - since_ms)
    for ago_ms in range(since_ms, 0, -SLOT_MS):
        at_ms, place = now_ms - ago_ms, ago_ms / HOUR_MS
        held = {number: owner(number, ago_ms) for number in partitions}
        pulses = [
            TaskPulse(TaskNumbers(), 0, "orders", number, what) for number, (who, what) in held.items() if who == name
        ]
        others = {who for who, _ in held.values()} - {name}
        peers = [
            Peer(
                other, None, tuple(("orders", number) for number, (who, _) in held.items() if who == other), here=False
            )
            for other in sorted(others)
        ]
        memory.look(pulses, peers, at_ms)
        wave = 1 + 0.25 * math.sin(9 * place) + 0.08 * math.sin(61 * place + len(name))
        share = sum(pulse.state == "running" for pulse in pulses) / max(1, len(partitions))
        grown = growth(per_s * wave * share, SLOT_MS, round(lag * wave * share))
        memory.add(grown, at_ms, round(state * share * (1 - place / 3)) if share else None)
    return memory


def cases() -> tuple[Noted, ...]:
    now_ms = time.time_ns() // 1_000_000
    told = {
        "dead_letter": "id_missing: the value has no member order_id",
        "conflict": "repeats orders/{0}/{1} with another payload, 1s 204ms after it",
        "late": "2h behind stream time, and its ID is not known",
        "duplicate": "repeats orders/{0}/{1}, 850ms after it",
    }
    found = []
    for number in range(90):
        kind = ("duplicate", "duplicate", "conflict", "late", "duplicate", "dead_letter")[number % 6]
        partition, offset, at_ms = number % 4, 482_113 + 37 * number, now_ms - 700 * (90 - number)
        known = None if kind == "dead_letter" else f"order-{offset * 4 + partition:07}"
        event_ms = at_ms - (7_200_000 if kind == "late" else 90)
        why = told[kind].format(partition, offset - 28)
        found.append(Noted(kind, f"orders/{partition}/{offset}", known, event_ms, at_ms, why))
    return tuple(found)


def task(number: int, **changes) -> TaskSeen:
    seen = running(number, unique=2_410_553 + 977 * number, duplicate=611_310 + 31 * number, late=60, dead_letter=31)
    mib = 1 << 20
    known = {
        "lag_records": 12 + number % 5,
        "state_ids": 1_204_331 + 5_003 * number,
        "state_bytes": (86 + number) * mib,
    }
    numbers = replace(seen.numbers, conflicts=41)
    return replace(seen, **({"numbers": numbers, "state_max_bytes": 256 * mib} | known | changes))


def _third(number: int, ago_ms: int) -> tuple[str, str]:
    """Two of three workers had all partitions until 20 minutes ago, when the third one came."""
    if number % 3 == 2 and ago_ms < 20 * 60_000:
        return "orders-3", "restoring" if ago_ms > 19.5 * 60_000 else "running"
    return f"orders-{number % 2 + 1 if number % 3 == 2 else number % 3 + 1}", "running"


def _fleet(owner: Owner, partitions: range, own: dict[str, Busy], urls: dict[str, str]) -> None:
    """Each worker knows the others and their addresses, and remembers its last hour."""
    for name, worker in own.items():
        held = {other: tuple(("orders", n) for n in partitions if owner(n, 0)[0] == other) for other in urls}
        worker.others = (
            *(Peer(other, url, held[other], here=other == name) for other, url in urls.items()), *worker.others
        )  # fmt: skip


def load() -> list[Busy]:
    partitions = range(12)
    made = []
    for name in ("orders-1", "orders-2", "orders-3"):
        tasks = tuple(task(number) for number in partitions if _third(number, 0)[0] == name)
        since_ms = 20 * 60_000 if name == "orders-3" else HOUR_MS
        memory = hour(name, _third, partitions, per_s=9_000, lag=170, state=12 * 90 << 20, since_ms=since_ms)
        noted = cases() if name == "orders-1" else ()
        made.append(
            Busy(tasks, noted, standby_lag={}, topology="orders", name=name, memory=memory, per_s=3_000, partitions=12)
        )
    return made


def _returned(number: int, ago_ms: int) -> tuple[str, str]:
    """Worker orders-1 was away for two minutes, and has been restoring its partitions for one."""
    if number % 2 == 0 and 60_000 < ago_ms < 180_000:
        return "orders-2", "running"
    return f"orders-{number % 2 + 1}", "restoring" if number % 2 == 0 and ago_ms <= 60_000 else "running"


def restore() -> list[Busy]:
    partitions = range(8)
    first = tuple(restoring(number, total=1_400_000, remaining=130_000 * number + 91_000) for number in (0, 2, 4, 6))
    second = tuple(task(number) for number in (1, 3, 5, 7))
    past = {
        name: hour(name, _returned, partitions, per_s=6_000, lag=110, state=8 * 90 << 20, since_ms=since_ms)
        for name, since_ms in (("orders-1", 60_000), ("orders-2", HOUR_MS))
    }
    why = "4 of 4 tasks are not running yet"
    return [
        Busy(first, why=why, name="orders-1", memory=past["orders-1"], standby_lag={}, partitions=8),
        Busy(second, name="orders-2", memory=past["orders-2"], per_s=3_000, standby_lag={}, partitions=8),
    ]


def _halves(number: int, _: int) -> tuple[str, str]:
    return f"orders-{number % 2 + 1}", "running"


def error() -> list[Busy]:
    """Nearly every kind of issue at once."""
    partitions, now_ms = range(12), time.time_ns() // 1_000_000
    stuck = task(0, lag_records=48_210, numbers=replace(task(0).numbers, last_commit_s=time.monotonic() - 95))
    behind = task(2, lag_records=7_800, numbers=replace(task(2).numbers, committed_time_ms=now_ms - 140_000))
    full = task(4, state_bytes=241 << 20, numbers=replace(task(4).numbers, formats=Counter(schema_registry=1_203)))
    rest = tuple(task(number) for number in (6, 8, 10))
    others = tuple(task(number) for number in partitions if number % 2)
    past = {
        name: hour(name, _halves, partitions, per_s=4_000, lag=60_000, state=12 * 104 << 20, since_ms=HOUR_MS)
        for name in ("orders-1", "orders-2")
    }
    why = "records wait for schema 17: the registry does not answer"
    return [
        Busy((stuck, behind, full, *rest), cases(), (MUTE,), standby_lag={}, name="orders-1", why=why, per_s=2_000,
             memory=past["orders-1"], user_code={"ids:order_id": "9c41f0a2"}, partitions=13,
             alert=DeadLetterAlert(5_400, 5_310, "id_missing", 5_300)),
        Busy(others, name="orders-2", memory=past["orders-2"], per_s=2_000, user_code={"ids:order_id": "07d2be5c"},
             standby_lag={}, partitions=13),
    ]  # fmt: skip


def empty() -> list[Busy]:
    """A worker that has just started, and nothing was sent yet."""
    tasks = tuple(task(n, numbers=TaskNumbers(), lag_records=0, state_ids=0, state_bytes=0) for n in range(4))
    return [Busy(tasks, name="orders-1", standby_lag={}, partitions=4)]


OWNERS: dict[str, Owner] = {
    "load": _third,
    "restore": _returned,
    "error": _halves,
    "empty": lambda *_: ("orders-1", "running"),
}
STATES: dict[str, Callable[[], list[Busy]]] = {"load": load, "restore": restore, "error": error, "empty": empty}


@contextmanager
def state(name: str) -> Iterator[str]:
    """The workers of a state serve their pages; yields the URL of the first one."""
    workers = STATES[name]()
    with ExitStack() as stack:
        urls = {worker.name: stack.enter_context(serving(worker)) for worker in workers}
        if len(workers) > 1:
            partitions = range(12 if name != "restore" else 8)
            _fleet(OWNERS[name], partitions, {worker.name: worker for worker in workers}, urls)
        yield urls[workers[0].name]
