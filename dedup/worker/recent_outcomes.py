"""Keeps samples of a task's latest duplicates, conflicts, late records, and dead letters for display.

At most 5 samples of each kind (10 of duplicates) are kept per batch. Samples become visible when their transaction is
committed. A sample contains the record's position and ID and the reason for the verdict, but never the payload.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from dedup.core.fold import Outcome, Rows
from dedup.core.tracking_id import id_text
from dedup.core.window import Source
from dedup.quantities import format_duration
from dedup.worker_view import Kind, Noted

MOST_OF_A_BATCH: Final = 5
MOST_KEPT: Final = 20
"""The maximum number of samples of each kind that are kept."""
_SECONDS_FROM_MS: Final = 10_000
_MINUTES_FROM_MS: Final = 600_000


@dataclass(frozen=True, slots=True)
class _Case:
    kind: Kind
    source: Source
    key: bytes | None
    event_time_ms: int | None
    judged_ms: int
    of: Source | None = None
    away_ms: int = 0
    detail: str = ""


@dataclass(slots=True)
class Recent:
    """The latest samples of one task, from the open transaction and from committed transactions."""

    _open: list[_Case] = field(init=False, default_factory=list)
    _committed: Final[dict[Kind, deque[_Case]]] = field(init=False, default_factory=dict)

    def note(self, rows: Rows, outcome: Outcome, now_ms: int) -> None:
        """Keep samples from a batch that was just judged; `commit` makes them visible."""
        if outcome.duplicates or outcome.repeats or outcome.conflicts or outcome.late or outcome.dead:
            self._open.extend(_cases(rows, outcome, now_ms))

    def freeze(self) -> list[_Case]:
        """Return the samples of the transaction to be committed; later samples belong to the next transaction."""
        frozen, self._open = self._open, []
        return frozen

    def commit(self, frozen: Iterable[_Case]) -> None:
        """Make the samples of a committed transaction visible."""
        for case in frozen:
            self._committed.setdefault(case.kind, deque(maxlen=MOST_KEPT)).append(case)

    def discard(self) -> None:
        """Discard the samples of the open transaction."""
        self._open.clear()

    def shown(self, source_topics: Sequence[str], *, ids: bool) -> Iterator[Noted]:
        """Yield the committed samples for display, oldest first within each kind; IDs are included only if ``ids`` is
        True.
        """
        for cases in self._committed.values():
            for case in cases:
                text = id_text(case.key) if ids and case.key is not None else None
                place = case.source.place(source_topics)
                yield Noted(case.kind, place, text, case.event_time_ms, case.judged_ms, _why(case, source_topics))


def _cases(rows: Rows, outcome: Outcome, now_ms: int) -> list[_Case]:
    times_ms, ids = outcome.judged_times_ms, rows.extracted.ids
    found: list[tuple[Kind, int, Source | None, int, str]] = []
    for row, seen in outcome.duplicates[-MOST_OF_A_BATCH:]:
        found.append(("duplicate", row, seen.source, times_ms[row] - seen.first_ms, ""))
    for row, first in outcome.repeats[-MOST_OF_A_BATCH:]:
        found.append(("duplicate", row, rows.source(first), times_ms[row] - times_ms[first], ""))
    for row, seen in outcome.conflicts[-MOST_OF_A_BATCH:]:
        found.append(("conflict", row, seen.source, times_ms[row] - seen.first_ms, ""))
    for row, late in outcome.late[-MOST_OF_A_BATCH:]:
        found.append(("late", row, None, late.behind_ms, ""))
    for row, dead in outcome.dead[-MOST_OF_A_BATCH:]:
        found.append(("dead_letter", row, None, 0, f"{dead.code}: {dead.detail}"))
    cases: list[_Case] = []
    for kind, row, of, away_ms, detail in found:
        time_ms = None if kind == "dead_letter" else times_ms[row]
        cases.append(_Case(kind, rows.source(row), ids[row], time_ms, now_ms, of, away_ms, detail))
    return cases


def _about(duration_ms: int) -> str:
    """Format a duration, rounded to seconds if it is 10 s or longer, and to minutes if it is 10 min or longer."""
    unit_ms = 1 if duration_ms < _SECONDS_FROM_MS else 1_000 if duration_ms < _MINUTES_FROM_MS else 60_000
    return format_duration(round(duration_ms / unit_ms) * unit_ms)


def _why(case: _Case, source_topics: Sequence[str]) -> str:
    away = _about(abs(case.away_ms))
    match case.kind:
        case "duplicate" | "conflict":
            first = case.of.place(source_topics) if case.of is not None else "an earlier record"
            when = (
                f"{away} {'after' if case.away_ms > 0 else 'before'} it" if case.away_ms else "at the same event time"
            )
            return f"repeats {first}{' with another payload' if case.kind == 'conflict' else ''}, {when}"
        case "late":
            return f"{away} behind stream time, and its ID is not known"
        case "dead_letter":
            return case.detail
