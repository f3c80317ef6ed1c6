"""Reports violations in the output (`explain`), among records whose order is unknown (`OrderFree`), and in the
duplicates and conflicts topics (`Copies`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, groupby, pairwise
from operator import itemgetter
from typing import Final

import numpy as np

from dedup.core.window import Source
from dedup.verify.compare import DIGEST_BYTES, Comparison, Seen, SeenColumns, Wanted, matched_at_once
from dedup.verify.cut import WHY_OPEN, Cut, WrittenPartition
from dedup.verify.replay import WHY_AFTER_SCHEMA_GONE, WHY_CLAMPED, WHY_FRONT, CopyKind, TaskReplay
from dedup.verify.report import Report

NOT_EXPECTED: Final = "not the record that the model expects here"
WHY_NO_TIMES: Final = "the output keeps no event times, so the distance between two records of one ID is not known"
WHY_SOURCE_GONE: Final = "the source has lost its beginning, which held the originals of records in"
WHY_OUTPUT_GONE: Final = "the output has lost its beginning"
WHY_PURGED_COPIES: Final = "copies, in the duplicates or conflicts topic, of records purged from the repartition topic"


def explain(
    comparison: Comparison,
    tasks: Sequence[TaskReplay],
    written: Sequence[WrittenPartition],
    report: Report,
    *,
    partial: bool,
) -> list[tuple[int, Wanted]]:
    """Report every difference in one bucket between the output and the records that tasks had to forward.

    If ``partial`` is true, the output is incomplete. The function then returns absent records, each with the index of
    its task, instead of reporting them as lost.
    """
    absent: defaultdict[bytes | None, list[tuple[int, Wanted]]] = defaultdict(list)
    for task, wanted in comparison.missing:
        absent[wanted.id].append((task, wanted))
    known = {own for task in tasks for own in task.forwarded.ids()} if comparison.extra else set()
    for partition, record in comparison.extra:
        where = written[partition].place(record.offset)
        if record.id is not None and absent.get(record.id):
            task, original = absent[record.id].pop(0)
            text = f"is in {where} with another key, value, header, or timestamp"
            report.violation("changed", tasks[task].place(original.source), text)
        elif record.id is not None and record.id in known:
            report.violation("duplicated", where, "its tracking ID was forwarded before; the model drops it")
        else:
            report.violation("phantom", where, "it matches no record that the model forwards")
    left = [each for places in absent.values() for each in places]
    if partial:
        return left
    for task, wanted in left:
        report_lost(written, tasks[task].place(wanted.source), report)
    return []


def report_lost(written: Sequence[WrittenPartition], place: str, report: Report) -> None:
    """Report a record as lost if it had to be forwarded but is not in the output."""
    text = f"the model forwards it; it is not in {written[0].topic}" if written else "the model forwards it"
    report.violation("lost", place, text)


def report_displaced(written: Sequence[WrittenPartition], report: Report) -> None:
    """Report records that are in the wrong order. Call this function after the records of all buckets are matched."""
    for each in written:
        for offset in each.order.displaced():
            report.violation("reordered", each.place(offset), "not in the order of the log")


class OrderFree:
    """Checks the output records of one bucket without regard to order.

    The constructor reports IDs that were forwarded twice within a guard period, and `must_be_somewhere` reports lost
    records.
    """

    def __init__(self, cut: Cut, written: Sequence[WrittenPartition], seen: Iterable[SeenColumns]) -> None:
        self._cut: Final = cut
        self._forwards: Final = bool(written)
        self._times_ms: Final[dict[bytes, list[int]]] = {}
        self._complete: Final = not any(
            each.bounds.start_deleted or each.truncated or each.topic in cut.compacted for each in written
        )
        # An ID that seems absent from the output may belong to an output record whose schema was deleted.
        self._ids_known: Final = not any(each.schemas_gone for each in written)
        late = cut.plan.late
        self._sides_complete: Final = late is not None and late.complete and cut.plan.dead_letters.complete
        self._timeless: Final = any(each.broker_time for each in written) or cut.plan.rules.future == "clamp"
        """True if the times in the output may come from the clock of a broker or a worker."""
        self._exempt: Final[set[bytes]] = set()
        for records in seen:
            for each in records.rows():
                if each.id is not None:
                    self._times_ms.setdefault(each.id, []).append(each.time_ms)
                    if each.exempt:
                        # Outside the guarantee, an ID may be in the output twice within a guard period.
                        self._exempt.add(each.id)
        if any(each.broker_time for each in written):
            cut.report.unprovable(WHY_NO_TIMES, sum(len(times) for times in self._times_ms.values()))
        else:
            self._report_too_near()

    def must_be_somewhere(self, tracking_id: bytes, time_ms: int, source: Source) -> None:
        """Report a judged record as lost unless it was forwarded, is late, or may duplicate a forwarded record."""
        late, place = self._cut.plan.late, self._cut.plan.place(source)
        if late is not None and late.take([source]):
            return
        if not (self._forwards and self._ids_known):
            return  # Without an output, unique records are not written.
        times_ms, rules = self._times_ms.get(tracking_id), self._cut.plan.rules
        if times_ms is None and not self._complete:
            self._cut.report.unprovable(WHY_OUTPUT_GONE)
            return
        text = "its tracking ID is neither in the output nor in a side topic"
        if times_ms is not None:
            if rules.extend or self._timeless or any(abs(time_ms - each) < rules.guard_ms for each in times_ms):
                return
            text = "no record of its tracking ID within a guard period is in the output"
        if self._complete and self._sides_complete:
            self._cut.report.violation("lost", place, text)

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


class Copies:
    """Checks the records in the given partitions of the duplicates and conflicts topics.

    A task writes its copies in log order, to the partition whose number is the task's number modulo the topic's
    partition count. If the topology repartitions, partitions may have been added to the topic, so a copy may also be in
    the partition that results from a smaller count. ``known`` is true if certainly no record was judged before the
    first record of the log. ``purged`` contains the repartition topic's partitions that are not replayed.
    """

    def __init__(
        self, cut: Cut, buckets: int, partitions: Mapping[str, Iterable[int]], *, known: bool, purged: Collection[int]
    ) -> None:
        self._cut: Final = cut
        self._known: Final = known
        self._purged: Final = purged
        self._written: Final = {
            kind: [cut.written(topic, number, buckets, stamped=False) for number in partitions.get(topic, ())]
            for kind, topic in copy_topics(cut).items()
        }
        self._absent: Final = {kind: topic for kind, topic in _named_copies(cut).items() if not cut.partitions[topic]}

    def judge(self, number: int, tasks: Sequence[TaskReplay], report: Report) -> None:
        """Compare the copies in one bucket with the copies that the tasks had to write."""
        for kind, written in self._written.items():
            direct = self._cut.topology.direct
            for group in filter(None, [[each] for each in written] if direct else [written]):
                own = [task for task in tasks if not direct or self._holders(group, task.books.partition)]
                found = matched_at_once([task.copies[kind] for task in own], [each.bucket(number) for each in group])
                self._compare(group, own, found, report)
        for absent, topic in self._absent.items():
            report.unprovable(f"{topic} does not exist", sum(task.copies[absent].certain for task in tasks))

    def _holders(self, group: Sequence[WrittenPartition], task: int) -> list[WrittenPartition]:
        """Return the partitions to which a task may have written its copies."""
        count = self._cut.partitions[group[0].topic]
        counts = (count,) if self._cut.topology.direct else range(1, count + 1)
        numbers = {task % each for each in counts}
        return [each for each in group if each.partition in numbers]

    def _compare(
        self, group: Sequence[WrittenPartition], tasks: Sequence[TaskReplay], found: Comparison, report: Report
    ) -> None:
        schema_gone = any(task.schema_gone for task in tasks)
        numbers = np.array([task.books.partition for task in tasks], np.int64)
        for at, written in enumerate(group):
            offsets, rows, positions = found.places(at, optional=not schema_gone)
            written.order.match(offsets, numbers[rows], positions)
        for task, missing in groupby(found.missing, key=itemgetter(0)):
            self._report_missing(self._holders(group, tasks[task].books.partition), tasks[task], missing, report)
        for at, written in enumerate(group):
            extra = [copy for number, copy in found.extra if number == at]
            if extra and not written.bounds.start_deleted:
                self._report_extra(written, tasks, extra, report)

    @staticmethod
    def _report_missing(
        holders: Sequence[WrittenPartition], task: TaskReplay, missing: Iterable[tuple[int, Wanted]], report: Report
    ) -> None:
        topic, books = holders[0].topic, task.books
        whys = (
            (any(each.bounds.start_deleted for each in holders), f"{topic} has lost its beginning"),
            (any(each.truncated for each in holders), WHY_OPEN),
            (any(each.compacted for each in holders), f"{topic} is compacted"),
        )
        why = next((why for applies, why in whys if applies), None)
        for _, wanted in missing:
            if why is not None:
                report.unprovable(why)
                continue
            place = f"{books.topic}/{books.partition} offset {wanted.position}"
            report.violation("wrong_duplicate", place, f"a duplicate that is not in {topic} or differs there")

    def _report_extra(
        self, written: WrittenPartition, tasks: Sequence[TaskReplay], extra: Iterable[Seen], report: Report
    ) -> None:
        schema_gone = any(task.schema_gone for task in tasks)
        from_purged = any(self._holders([written], number) for number in self._purged)
        excused = 0 if self._known else written.order.first_matched()
        for copy in extra:
            if _is_unjudged(copy, tasks):
                continue
            if from_purged:
                report.unprovable(WHY_PURGED_COPIES)
            elif any(task.doubtful(copy.id, copy.time_ms, timed=not written.broker_time) for task in tasks):
                known = WHY_AFTER_SCHEMA_GONE if schema_gone else WHY_CLAMPED
                report.unprovable(known if self._known else WHY_FRONT)
            elif copy.offset < excused:
                report.unprovable(f"{WHY_SOURCE_GONE} {written.topic}")
            else:
                report.violation("wrong_duplicate", written.place(copy.offset), NOT_EXPECTED)

    def conclude(self) -> None:
        """Report copies in the wrong order, unless the topic has lost its beginning."""
        for written in chain.from_iterable(self._written.values()):
            for offset in () if written.bounds.start_deleted else written.order.displaced():
                text = "not in the order of the log"
                self._cut.report.violation("wrong_duplicate", written.place(offset), text)


def _is_unjudged(copy: Seen, tasks: Sequence[TaskReplay]) -> bool:
    """Return whether a copy belongs to a record that cannot be judged again. If so, expect no further copy of the
    record.
    """
    if copy.id is not None:
        return False
    content = copy.digest[:DIGEST_BYTES]
    task = next((task for task in tasks if task.unknown_copies[content]), None)
    if task is not None:
        task.unknown_copies[content] -= 1
    return task is not None


def copy_topics(cut: Cut) -> dict[CopyKind, str]:
    """Return the names of the duplicates and conflicts topics that exist, by kind."""
    return {kind: topic for kind, topic in _named_copies(cut).items() if cut.partitions[topic]}


def _named_copies(cut: Cut) -> dict[CopyKind, str]:
    named: dict[CopyKind, str | None] = {"duplicates": cut.topology.duplicates, "conflicts": cut.topology.conflicts}
    return {kind: topic for kind, topic in named.items() if topic is not None}
