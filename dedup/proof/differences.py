"""A comparison put into words: which record is lost, which is a duplicate of which, which was changed on its way."""

from __future__ import annotations

from collections.abc import Sequence

from dedup.proof.compare import Comparison, Place
from dedup.proof.cut import Seen, Written
from dedup.proof.replay import TaskReplay
from dedup.proof.report import Report


def explain(
    comparison: Comparison,
    tasks: Sequence[TaskReplay],
    written: Sequence[Written],
    seen: Sequence[Sequence[Seen]],
    report: Report,
    *,
    absent_are: list[Place] | None = None,
) -> None:
    """Report every difference between what tasks had to forward and what is in the output, of one bucket.

    ``absent_are``: takes what is not in the output, where that need not mean that it is lost.
    """
    absent = _absent_by_id(comparison, tasks)
    known = {each for task in tasks for each in task.forwarded.ids if each is not None} if comparison.extra else set()
    for place in comparison.extra:
        record = seen[place.sequence][place.row]
        where = written[place.sequence].place(record.row)
        twins = absent.get(record.id) if record.id is not None else None
        if twins:
            original = twins.pop(0)
            source = tasks[original.sequence].forwarded.sources[original.row]
            text = f"stands in {where} with another key, value, header or timestamp"
            report.violation("changed", tasks[original.sequence].place(source), text)
        elif record.id in known:
            report.violation("duplicated", where, "its tracking ID was forwarded already; the model drops it")
        else:
            report.violation("phantom", where, "no record that the model forwards is like it")
    left = [place for places in absent.values() for place in places]
    if absent_are is not None:
        absent_are += left
        return
    for place in left:
        task = tasks[place.sequence]
        report_lost(written, task.place(task.forwarded.sources[place.row]), report)


def report_lost(written: Sequence[Written], place: str, report: Report) -> None:
    """Report a record that had to be forwarded."""
    text = f"the model forwards it; it is not in {written[0].topic}" if written else "the model forwards it"
    report.violation("lost", place, text)


def report_displaced(written: Sequence[Written], report: Report) -> None:
    """Report the records that passed others of their task, once all buckets are matched."""
    for each in written:
        for row in each.order.displaced():
            report.violation("reordered", each.place(row), "passed a record that came before it")


def _absent_by_id(comparison: Comparison, tasks: Sequence[TaskReplay]) -> dict[bytes | None, list[Place]]:
    absent: dict[bytes | None, list[Place]] = {}
    for place in comparison.missing:
        absent.setdefault(tasks[place.sequence].forwarded.ids[place.row], []).append(place)
    return absent
