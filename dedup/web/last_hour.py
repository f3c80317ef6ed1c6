"""Collects and merges data about the last hour of a fleet: its metrics, and the owners of each partition over time.

Each worker keeps its data about the last hour in memory only. A worker adds up its own metrics in ten-second slots,
and records the owner of each partition. For its own partitions, a worker also records the state of the task. A worker
knows the owners of other partitions from the last assignment. The worker whose page is open merges the data of all
workers. Slots begin at the same times on all workers and contain counts, so the merged metrics are the same as if a
single worker ran all tasks.

If a worker ends, its slots and the states of its tasks are lost, but the other workers still know the partitions that
it owned.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Annotated, Any, Final, Literal, NamedTuple

from msgspec import Meta

from dedup.metrics import END_TO_END_BUCKETS_S
from dedup.web.dashboard import PLOTTED, Growth, quantile
from dedup.worker_view import Peer, TaskPulse

SLOT_MS: Final = 10_000
SLOTS: Final = 360
"""The number of slots that a worker keeps. Together, they cover one hour."""
HOUR_MS: Final = SLOT_MS * SLOTS
RANGES_S: Final = (300, 900, 3600)
"""The time ranges, in seconds, that the dashboard offers."""
COUNTED: Final = (*PLOTTED, "conflict")
MOST_SPANS: Final = 2_048
MOST_ROWS: Final = 16
"""Maximum number of rows of the timeline. If there are more partitions, partitions with the same owners share a row."""
SHORT_ROWS: Final = 8
"""If there are more partitions than this, partitions with the same owners share a row of the short timeline (for
phones).
"""
MOST_MOVES: Final = 8
_JOINED_MS: Final = 20_000
"""Two successive owner changes that are at most this far apart belong to the same rebalance."""
_DETAILED: Final = {"restoring": 2, "assigned": 1, "running": 0}
"""Maps each state of a span to its rank. If partitions share a row, the row shows the state with the greatest rank."""
State = Literal["restoring", "running", "assigned"]
"""The state of a task as its own worker reports it, or `assigned` if only the assignment is known."""
Count = Annotated[int, Meta(ge=0, le=1 << 48)]
"""A number in another worker's response. Sums of such numbers fit into 64 bits."""


class Slot(NamedTuple):
    """The counts of the records that one worker judged in ten seconds, with the worker's lag and state size."""

    number: Count
    """The start of the slot, in units of `SLOT_MS` since 1970-01-01 UTC."""
    covered_ms: Count
    """The time in ms that the counts cover. It is shorter than the slot if the worker started within the slot."""
    counts: tuple[Count, ...]
    """The number of records of each kind in `COUNTED`."""
    latencies: tuple[Count, ...]
    lag_records: Count | None
    state_bytes: Count | None


class Span(NamedTuple):
    """A period during which a worker owned a partition and the partition's state did not change."""

    topic: str
    partition: int
    worker: str
    state: State
    from_ms: int
    to_ms: int | None
    """The end of the span in ms, or None if the span has not ended."""


@dataclass(frozen=True, slots=True)
class WorkerHour:
    """The data that one worker has collected about the last hour."""

    format: int
    topology: str
    worker: str
    since_ms: int
    """The time in ms at which this worker began to collect data."""
    slots: tuple[Slot, ...]
    spans: tuple[Span, ...]

    @property
    def is_sound(self) -> bool:
        """Return whether this release accepts the numbers of slots and spans, and the number of counts in each slot."""
        if len(self.slots) > SLOTS or len(self.spans) > MOST_SPANS:
            return False
        counts, latencies = len(COUNTED), len(END_TO_END_BUCKETS_S) + 1
        return all(len(slot.counts) == counts and len(slot.latencies) == latencies for slot in self.slots)


class Memory:
    """Collects this worker's data about the last hour."""

    def __init__(self, now_ms: int) -> None:
        self._since_ms: Final = now_ms
        self._slots: Final[deque[Slot]] = deque(maxlen=SLOTS)
        self._ended: Final[deque[tuple[tuple[str, int], str | None, State, int, int]]] = deque(maxlen=MOST_SPANS)
        self._now: dict[tuple[str, int], tuple[str | None, State, int]] = {}
        """Maps each partition to its owner (None for this worker), its state, and the time in ms when this state
        began.
        """

    def begins(self, now_ms: int) -> bool:
        """Return whether counts that are added at ``now_ms`` would be the first in their slot."""
        return not self._slots or self._slots[-1].number != now_ms // SLOT_MS

    def add(self, grown: Growth, now_ms: int, state_bytes: int | None = None) -> None:
        """Add the growth of the counts since the previous call to the slot that contains ``now_ms``.

        Only the first call for a slot needs ``state_bytes``, because determining the state size takes time.
        """
        number, counts = now_ms // SLOT_MS, tuple(grown.counts[name] for name in COUNTED)
        before = self._slots[-1] if self._slots else None
        if before is not None and before.number == number:
            self._slots[-1] = Slot(
                number,
                before.covered_ms + grown.covered_ms,
                tuple(map(sum, zip(before.counts, counts, strict=True))),
                tuple(map(sum, zip(before.latencies, grown.latencies, strict=True))),
                grown.lag_records,
                before.state_bytes,
            )
            return
        while self._slots and self._slots[-1].number >= number:
            self._slots.pop()  # The clock was set back.
        self._slots.append(
            Slot(number, grown.covered_ms, counts, tuple(grown.latencies), grown.lag_records, state_bytes)
        )

    def look(self, pulses: Iterable[TaskPulse], peers: Iterable[Peer], now_ms: int) -> None:
        """Record the current owner and the current state of each partition."""
        found: dict[tuple[str, int], tuple[str | None, State]] = {
            place: (None if peer.here else peer.worker, "assigned") for peer in peers for place in peer.partitions
        }
        for pulse in pulses:
            if pulse.state != "closed":
                state: State = "running" if pulse.state == "running" else "restoring"
                found[pulse.topic, pulse.partition] = None, state
        before, self._now = self._now, {}
        for place, (worker, state) in found.items():
            known = before.pop(place, None)
            if known is not None and known[:2] != (worker, state):
                self._ended.append((place, *known, now_ms))
                known = None
            self._now[place] = known or (worker, state, now_ms)
        self._ended.extend((place, *known, now_ms) for place, known in before.items())

    def told(self, topology: str, worker: str, now_ms: int, *, version: int) -> WorkerHour:
        """Return this worker's data about the last hour, with at most the newest `MOST_SPANS` spans."""
        oldest_ms = now_ms - HOUR_MS
        spans = [
            Span(*place, owner or worker, state, from_ms, to_ms)
            for place, owner, state, from_ms, to_ms in self._ended
            if to_ms > oldest_ms
        ]
        spans += [Span(*place, owner or worker, state, at, None) for place, (owner, state, at) in self._now.items()]
        slots = tuple(slot for slot in self._slots if slot.number > oldest_ms // SLOT_MS)
        return WorkerHour(version, topology, worker, self._since_ms, slots, tuple(spans[-MOST_SPANS:]))


def merged(
    hours: Sequence[WorkerHour], now_ms: int, *, of: str | None = None, single: int = MOST_ROWS
) -> dict[str, Any]:
    """Merge the data of several workers about the last hour, and return the result as plain data.

    If ``of`` is the name of a worker, the metrics cover only this worker. The timeline always covers all
    workers. If there are more than ``single`` partitions, partitions with the same owners share a row.
    """
    owned = _owners(hours, now_ms)
    plotted = [hour for hour in hours if of in {None, hour.worker}]
    steps = {place: _steps(spans) for place, spans in owned.items()}
    return {
        **_metrics(plotted, owned if of is None else {}, now_ms),
        "workers": sorted(hour.worker for hour in hours),
        "rows": _rows(owned, steps, single),
        "partitions": len(owned),
        "moves": _moves(steps)[:MOST_MOVES],
        "lost": list(_lost(hours, owned, now_ms)),
    }


def _metrics(hours: Sequence[WorkerHour], owned: Mapping[Any, Sequence[Span]], now_ms: int) -> dict[str, Any]:
    """Return the columns for the plots, and the counts and latencies for each time range."""
    last = now_ms // SLOT_MS
    numbers = range(last - SLOTS + 1, last + 1)
    by_number: defaultdict[int, list[tuple[str, Slot]]] = defaultdict(list)
    for hour in hours:
        for slot in hour.slots:
            by_number[slot.number].append((hour.worker, slot))
    owners = _owners_by_slot(owned, numbers)
    # The newest slot is shown after all workers have begun it. Until then, a sum would lack counts of other workers.
    newest = [hour.slots[-1].number for hour in hours if hour.slots and hour.slots[-1].number >= last - 1]
    end = min(newest, default=last)
    rows = [
        {
            "time_ms": min((number + 1) * SLOT_MS, now_ms),
            **_point([slot for _, slot in by_number[number] if number <= end]),
            # True if a worker that owned partitions at that time has no slot for it.
            "partial": bool(owners[number] - {worker for worker, _ in by_number[number]}) and number != last,
        }
        for number in numbers
    ]
    ranges: dict[str, dict[str, Any]] = {}
    for range_s in RANGES_S:
        latest = numbers[-range_s * 1000 // SLOT_MS :]
        ranges[str(range_s)] = _figures([slot for number in latest for _, slot in by_number[number]])
    return {"plots": {name: [row[name] for row in rows] for name in rows[0]}, "ranges": ranges}


def _point(slots: Sequence[Slot]) -> dict[str, float | None]:
    """Return the metrics of one slot. All of them are None if no worker has data for this slot."""
    rates: dict[str, float | None] = dict.fromkeys(COUNTED)
    if slots:
        for at, name in enumerate(COUNTED):
            rates[name] = round(sum(1000 * slot.counts[at] / max(1, slot.covered_ms) for slot in slots), 2)
    judged, duplicates = sum(rates[name] or 0.0 for name in PLOTTED), rates["duplicate"] or 0.0
    latencies = _sums([slot.latencies for slot in slots], len(END_TO_END_BUCKETS_S) + 1)
    return {
        **rates,
        "records": round(judged, 2) if slots else None,
        "duplicate_share": round(100 * duplicates / judged, 2) if judged else None,
        "lag_records": _sum_known(slot.lag_records for slot in slots),
        "state_bytes": _sum_known(slot.state_bytes for slot in slots),
        "median_s": quantile(latencies, 0.5),
        "p99_s": quantile(latencies, 0.99),
    }


def _figures(slots: Sequence[Slot]) -> dict[str, Any]:
    """Return the number of records of each kind in a time range, and quantiles of their end-to-end latency."""
    counts = _sums([slot.counts for slot in slots], len(COUNTED))
    latencies = _sums([slot.latencies for slot in slots], len(END_TO_END_BUCKETS_S) + 1)
    quantiles = {"median_s": quantile(latencies, 0.5), "p99_s": quantile(latencies, 0.99)}
    return {**dict(zip(COUNTED, counts, strict=True)), **quantiles}


def _sums(rows: Sequence[Sequence[int]], width: int) -> list[int]:
    return [sum(column) for column in zip(*rows, strict=True)] if rows else [0] * width


def _sum_known(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _owners_by_slot(owned: Mapping[Any, Sequence[Span]], numbers: range) -> defaultdict[int, set[str]]:
    """Map each slot to the workers that owned at least one partition during the whole slot."""
    found: defaultdict[int, set[str]] = defaultdict(set)
    spans = (span for of_place in owned.values() for span in of_place)
    periods = {(span.worker, span.from_ms // SLOT_MS, _end(span) // SLOT_MS) for span in spans}
    for worker, first, end in periods:
        for number in range(max(first + 1, numbers.start), min(end, numbers.stop)):
            found[number].add(worker)
    return found


def _end(span: Span) -> int:
    assert span.to_ms is not None  # noqa: S101  # for mypy: merged spans have an end
    return span.to_ms


def _owners(hours: Sequence[WorkerHour], now_ms: int) -> dict[tuple[str, int], list[Span]]:
    """Map each partition to the spans of its owners, oldest first.

    A worker's own report takes precedence over other workers' reports about that worker.
    """
    since_ms = {hour.worker: hour.since_ms for hour in hours}
    pieces: defaultdict[tuple[str, int], dict[Span, bool]] = defaultdict(dict)
    for hour in hours:
        for span in hour.spans:
            own = span.worker == hour.worker
            end_ms = now_ms if span.to_ms is None else min(span.to_ms, now_ms)
            if not own:
                # Other workers know only the assignment. Their data are used only for the time before the owner began
                # to collect data.
                end_ms = min(end_ms, since_ms.get(span.worker, now_ms))
            start_ms = max(span.from_ms, now_ms - HOUR_MS)
            if start_ms < end_ms:
                pieces[span.topic, span.partition][span._replace(from_ms=start_ms, to_ms=end_ms)] = own
    ranks = {span: (own, span.from_ms) for found in pieces.values() for span, own in found.items()}
    return {place: _painted(list(found), ranks.__getitem__) for place, found in sorted(pieces.items())}


def _painted(spans: Sequence[Span], rank: Callable[[Span], Any]) -> list[Span]:
    """Return spans that do not overlap. At each moment, only the span with the greatest rank remains."""
    cuts = sorted({cut for span in spans for cut in (span.from_ms, _end(span))})
    begun = sorted(spans, key=lambda span: span.from_ms, reverse=True)
    active: list[Span] = []
    made: list[Span] = []
    for start_ms, end_ms in pairwise(cuts):
        while begun and begun[-1].from_ms <= start_ms:
            active.append(begun.pop())
        active = [span for span in active if _end(span) > start_ms]
        if not active:
            continue
        chosen = max(active, key=rank)._replace(from_ms=start_ms, to_ms=end_ms)
        if made and made[-1].to_ms == start_ms and made[-1][:4] == chosen[:4]:
            made[-1] = made[-1]._replace(to_ms=end_ms)
        else:
            made.append(chosen)
    return made


class _Step(NamedTuple):
    """A period during which a worker owned a partition, regardless of the partition's state."""

    worker: str
    from_ms: int
    ready_ms: int | None
    """The time in ms at which the task began to run, or None if the task has not run or no worker knows the time."""


def _steps(spans: Iterable[Span]) -> list[_Step]:
    steps = []
    for worker, part in groupby(spans, key=lambda span: span.worker):
        held = list(part)
        ready_ms = next((span.from_ms for span in held if span.state == "running"), None)
        steps.append(_Step(worker, held[0].from_ms, ready_ms))
    return steps


def _moves(steps: Mapping[tuple[str, int], Sequence[_Step]]) -> list[dict[str, Any]]:
    """Return the changes of owner, newest first.

    Each entry covers all partitions that moved from one worker to another in the same rebalance.
    """
    changes = sorted(
        (new.from_ms, old.worker, new.worker, place, new.ready_ms)
        for place, of_place in steps.items()
        for old, new in pairwise(of_place)
    )
    rebalance = _rebalances(at_ms for at_ms, *_ in changes)
    groups: defaultdict[tuple[int, str, str], list[tuple[int, tuple[str, int], int | None]]] = defaultdict(list)
    for at_ms, old, new, place, ready_ms in changes:
        groups[rebalance[at_ms], old, new].append((at_ms, place, ready_ms))
    made = []
    for (_, old, new), moved in groups.items():
        start_ms, ready = min(at_ms for at_ms, *_ in moved), [ready_ms for *_, ready_ms in moved]
        known = [ready_ms for ready_ms in ready if ready_ms is not None]
        places = sorted({place for _, place, _ in moved})
        made.append(
            {
                "at_ms": start_ms,
                "from": old,
                "to": new,
                "partitions": len(places),
                "label": _label(places),
                "took_ms": max(known) - start_ms if len(known) == len(ready) else None,
            }
        )
    return sorted(made, key=itemgetter("at_ms"), reverse=True)


def _rebalances(times_ms: Iterable[int]) -> dict[int, int]:
    """Map the time of each owner change to the number of the change's rebalance."""
    found: dict[int, int] = {}
    number, before_ms = 0, None
    for at_ms in sorted(times_ms):
        number += before_ms is not None and at_ms - before_ms > _JOINED_MS
        found[at_ms], before_ms = number, at_ms
    return found


def _rows(
    owned: Mapping[tuple[str, int], Sequence[Span]], steps: Mapping[tuple[str, int], Sequence[_Step]], single: int
) -> list[dict[str, Any]]:
    """Return the rows of the timeline, sorted by last owner.

    If there are too many rows, the rows with the fewest changes of owner are combined into one row.
    """
    rebalance = _rebalances(step.from_ms for of_place in steps.values() for step in of_place)
    groups: defaultdict[Any, list[tuple[str, int]]] = defaultdict(list)
    for place, of_place in steps.items():
        same = tuple((step.worker, rebalance[step.from_ms]) for step in of_place)
        groups[same if len(owned) > single else place].append(place)
    if len(groups) > MOST_ROWS:
        first = sorted(groups.values(), key=lambda places: (-len(steps[places[0]]), -len(places)))
        shown, rest = first[: MOST_ROWS - 1], [place for places in first[MOST_ROWS - 1 :] for place in places]
    else:
        shown, rest = list(groups.values()), []
    rows = [
        {
            "label": _label(places),
            "partitions": len(places),
            "spans": [span._asdict() for span in _together([span for place in places for span in owned[place]])],
        }
        for places in sorted(shown, key=lambda places: (steps[places[0]][-1].worker, places))
    ]
    # Partitions with different owners at the same time cannot be drawn in one row.
    return [*rows, {"label": "others", "partitions": len(rest), "spans": []}] if rest else rows


def _together(spans: Sequence[Span]) -> list[Span]:
    """Return the spans of one row of the timeline. The row is `running` only while all of its partitions run."""
    # Tasks of one rebalance start within milliseconds, so times are rounded to seconds. Equal spans then need to be
    # compared only once.
    rounded = {
        Span("", 0, span.worker, span.state, span.from_ms // 1000 * 1000, _end(span) // 1000 * 1000) for span in spans
    }
    return _painted(sorted(rounded), lambda span: (_DETAILED.get(span.state, 0), span.from_ms))


def _label(places: Sequence[tuple[str, int]]) -> str:
    """Return the names of the partitions in short form, such as `orders/0-3, 7`."""
    parts = []
    for topic, of_topic in groupby(sorted(places), key=itemgetter(0)):
        numbers = [number for _, number in of_topic]
        firsts = [number for number in numbers if number - 1 not in set(numbers)]
        lasts = [number for number in numbers if number + 1 not in set(numbers)]
        ranges = [str(first) if first == last else f"{first}-{last}" for first, last in zip(firsts, lasts, strict=True)]
        parts.append(f"{topic}/{', '.join(ranges)}")
    return "; ".join(parts)


def _lost(hours: Sequence[WorkerHour], owned: Mapping[Any, Sequence[Span]], now_ms: int) -> Iterator[dict[str, Any]]:
    """Yield each worker that owned partitions in the last hour but whose metrics for that time are lost."""
    since_ms = {hour.worker: hour.since_ms for hour in hours}
    until: Counter[str] = Counter()
    for spans in owned.values():
        for span in spans:
            if span.from_ms < since_ms.get(span.worker, now_ms):
                until[span.worker] = max(until[span.worker], min(_end(span), since_ms.get(span.worker, now_ms)))
    for worker, until_ms in sorted(until.items()):
        yield {"worker": worker, "until_ms": until_ms, "answers": worker in since_ms}
