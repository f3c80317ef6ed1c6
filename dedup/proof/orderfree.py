"""Checks that need no order: no ID twice within a guard period, and for every record judged its ID is somewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

from dedup.core.window import Source
from dedup.proof.cut import Cut, Seen, Written

WHY_NO_TIMES: Final = "the output keeps no event times, so the distance of two records of one ID is not known"
WHY_OUTPUT_GONE: Final = "the output has lost its beginning"


class OrderFree:
    """The output of one bucket by tracking ID."""

    def __init__(self, cut: Cut, written: Sequence[Written], seen: Iterable[Sequence[Seen]]) -> None:
        self._cut: Final = cut
        self._forwards: Final = bool(written)
        self._times_ms: Final[dict[bytes, list[int]]] = {}
        self._complete: Final = not any(
            each.bounds.beheaded or each.truncated or each.topic in cut.compacted for each in written
        )
        late = cut.plan.late
        self._sides_complete: Final = late is not None and late.complete and cut.plan.dead_letters.complete
        self._timeless: Final = any(each.broker_time for each in written) or cut.plan.rules.future == "clamp"
        """The output's times may be a clock's."""
        self._exempt: Final[set[bytes]] = set()
        for records in seen:
            self._collect(records)
        if any(each.broker_time for each in written):
            cut.report.unprovable(WHY_NO_TIMES, sum(len(times) for times in self._times_ms.values()))
        else:
            self._report_too_near()

    def must_be_somewhere(self, place: str, tracking_id: bytes, time_ms: int, source: Source) -> None:
        """Report a judged record as lost unless it was forwarded, is late, or repeats one that was forwarded."""
        late = self._cut.plan.late
        if late is not None and late.take([source]):
            return
        if not self._forwards:
            return  # observe only: a unique record leaves no trace
        times_ms = self._times_ms.get(tracking_id)
        if times_ms is None:
            if not self._complete:
                self._cut.report.unprovable(WHY_OUTPUT_GONE)
            elif self._sides_complete:
                self._cut.report.violation(
                    "lost", place, "its tracking ID is neither in the output nor in a side topic"
                )
            return
        rules = self._cut.plan.rules
        near = rules.extend or self._timeless or any(abs(time_ms - each) < rules.guard_ms for each in times_ms)
        if not near and self._complete and self._sides_complete:
            text = "no record of its tracking ID within a guard period is in the output"
            self._cut.report.violation("lost", place, text)

    def _collect(self, records: Sequence[Seen]) -> None:
        for seen in records:
            if seen.id is None:
                continue
            self._times_ms.setdefault(seen.id, []).append(seen.time_ms)
            if seen.exempt:
                # Forwarded by a policy that is outside the promise: the distance rule does not bind its ID.
                self._exempt.add(seen.id)

    def _report_too_near(self) -> None:
        guard_ms = self._cut.plan.rules.guard_ms
        for tracking_id, times_ms in self._times_ms.items():
            if len(times_ms) == 1 or tracking_id in self._exempt:
                continue
            times_ms.sort()
            for earlier_ms, later_ms in pairwise(times_ms):
                if later_ms - earlier_ms < guard_ms:
                    text = f"forwarded at event times {earlier_ms} and {later_ms} ms, less than a guard period apart"
                    self._cut.report.violation("duplicated", f"tracking ID {tracking_id.hex()}", text)
