"""A comparison put into words: which record is lost, which is a duplicate of which, which was changed on its way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dedup.proof.compare import Comparison, Place
from dedup.proof.cut import Written
from dedup.proof.replay import TaskReplay
from dedup.proof.report import Report

IdsOf = Callable[[Written, set[int]], dict[int, bytes | None]]


def explain(
    comparison: Comparison, tasks: Sequence[TaskReplay], written: Sequence[Written], report: Report, ids_of: IdsOf
) -> None:
    """Report every difference between what tasks had to forward and what is in the output."""
    for place in comparison.displaced:
        report.violation("reordered", written[place.sequence].place(place.row), "passed a record that came before it")
    absent = _absent_by_id(comparison, tasks)
    if comparison.extra:
        known = _forwarded_ids(tasks)
        for place, tracking_id in _with_ids(comparison.extra, written, ids_of):
            where = written[place.sequence].place(place.row)
            twins = absent.get(tracking_id) if tracking_id is not None else None
            if twins:
                original = twins.pop(0)
                source = tasks[original.sequence].forwarded.sources[original.row]
                text = f"stands in {where} with another key, value, header or timestamp"
                report.violation("changed", tasks[original.sequence].place(source), text)
            elif tracking_id in known:
                report.violation("duplicated", where, "its tracking ID was forwarded already; the model drops it")
            else:
                report.violation("phantom", where, "no record that the model forwards is like it")
    for places in absent.values():
        for place in places:
            task = tasks[place.sequence]
            text = f"the model forwards it; it is not in {written[0].topic}" if written else "the model forwards it"
            report.violation("lost", task.place(task.forwarded.sources[place.row]), text)


def _absent_by_id(comparison: Comparison, tasks: Sequence[TaskReplay]) -> dict[bytes | None, list[Place]]:
    absent: dict[bytes | None, list[Place]] = {}
    for place in comparison.missing:
        absent.setdefault(tasks[place.sequence].forwarded.ids[place.row], []).append(place)
    return absent


def _forwarded_ids(tasks: Sequence[TaskReplay]) -> set[bytes]:
    return {each for task in tasks for each in task.forwarded.ids if each is not None}


def _with_ids(places: Sequence[Place], written: Sequence[Written], ids_of: IdsOf) -> list[tuple[Place, bytes | None]]:
    rows_of: dict[int, set[int]] = {}
    for place in places:
        rows_of.setdefault(place.sequence, set()).add(place.row)
    ids = {sequence: ids_of(written[sequence], rows) for sequence, rows in rows_of.items()}
    return [(place, ids[place.sequence].get(place.row)) for place in places]
