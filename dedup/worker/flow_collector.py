"""Sends the records that a topology's flow yields instead of the forwarded records."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final

from dedup.core.extract import Fault
from dedup.core.flow import Flow, FlowRecord, yielded
from dedup.core.fold import Outcome, Rows
from dedup.core.partitioner import partitions
from dedup.errors import Problem, RecordFailed, TopologyError
from dedup.kafka.record_batch import FeedBatch, Header, Line, RecordBatch, TopicPartition
from dedup.worker.record_collector import FLOW, PART, SOURCE, VERDICT, Misfits, RecordCollector, Refusals, Route

FLOW_SHARE: Final = 0.75
"""The share of `session_timeout` that the flow may take for one batch. Meanwhile, the worker sends no heartbeats."""
NO_HEARTBEAT: Final = (
    "the worker sends no heartbeat, so the group would expel the worker, and the batch would be judged again. Nothing "
    "of the batch was committed. Make the function faster, or raise `session_timeout` in the config file."
)
"""The end of the error message about user code that is too slow."""
_Sent = tuple[int, str, bool, Line]
"""A record to send: the source row, the topic, True if the record goes to the output with its source's key, and the
line.
"""


@dataclass(frozen=True, slots=True)
class FlowCollector(RecordCollector):
    """A `RecordCollector` that passes the forwarded records through the topology's flow."""

    flow: Flow
    targets: Mapping[str, Route]
    """Maps the name of each topic to which the flow may send records to the topic's route."""
    stop: bool
    """True if the worker stops when the flow fails."""
    most_s: float = math.inf
    """The time, in seconds, that the flow may take for one batch."""
    known: dict[tuple[int, str, int], list[FlowRecord] | Fault] = field(default_factory=dict)
    """Maps each (offset, verdict, timestamp) of a batch to the flow's result, which is reused if the batch is folded
    again.
    """
    spent_s: list[float] = field(default_factory=list)
    """The time, in seconds, that the flow took in each fold of the current batch or part of a batch."""
    counted_s: list[float] = field(default_factory=list)
    """The parts of `spent_s` that the metrics already include."""
    built_s: list[float] = field(default_factory=list)
    """The time, in seconds, that building the batches took in each fold. It counts toward `most_s`, because a flow that
    yields many records also makes their batches slow.
    """

    def publish(
        self, batch: FeedBatch, rows: Rows, outcome: Outcome, refusals: Refusals, misfits: Misfits
    ) -> list[RecordBatch]:
        """Return batches as `RecordCollector.publish` does, but forward the records that the flow yields."""
        began_s, flow_s = time.perf_counter(), sum(self.spent_s)
        batches = RecordCollector.publish(self, batch, rows, outcome, refusals, misfits)
        rest_s = time.perf_counter() - began_s - (sum(self.spent_s) - flow_s)
        self.built_s.append(min(rest_s, self.most_s / 2))  # as for a call of the flow, the process may have been frozen
        took_s = sum(self.spent_s) + sum(self.built_s)
        if took_s > self.most_s:
            raise self._too_slow(rows.source(0).place(self.routes.source_topics), took_s, len(self.forwarded(outcome)))
        if not misfits:
            outcome.flow_seconds = sum(self.spent_s) - sum(self.counted_s)
            self.counted_s.append(outcome.flow_seconds)
        return batches

    def begin(self) -> None:
        """Forget the results and the times of the previous batch."""
        for each in (self.known, self.spent_s, self.counted_s, self.built_s):
            each.clear()

    def _output(
        self, batch: FeedBatch, rows: Rows, outcome: Outcome, route: Route, misfits: Misfits
    ) -> list[tuple[TopicPartition, Iterable[Line]]]:
        outcome.filtered = 0
        sent: list[_Sent] = []
        made_of = self._made_of(batch, rows, outcome, route.topic)
        for row, (record, made) in made_of.items():
            if isinstance(made, Fault):
                misfits[FLOW, batch.offsets[row]] = made.detail
                continue
            outcome.filtered += not made
            offset, added = batch.offsets[row], self._added(rows, row, record.verdict)
            for part, each in enumerate(made, start=1):
                headers = [*each.headers, *added]
                if len(made) > 1:
                    headers.append((PART, f"{part}/{len(made)}".encode()))
                in_place = each.topic == route.topic and each.key == record.key
                sent.append((row, each.topic, in_place, (offset, each.timestamp_ms, each.key, each.value, headers)))
        for row, (record, made) in made_of.items():
            self.known[batch.offsets[row], record.verdict, record.timestamp_ms] = made
        return self._by_partition(rows, route, sent)

    def _by_partition(
        self, rows: Rows, output: Route, sent: list[_Sent]
    ) -> list[tuple[TopicPartition, Iterable[Line]]]:
        """Return the records to send, grouped by target partition and in log order.

        In a topology without a repartition topic, an output record with the same key as its source record also keeps
        the source record's partition number. Otherwise, the key or, without a key, the tracking ID determines the
        partition.
        """
        own, ids = TopicPartition(output.topic, self.partition), rows.extracted.ids
        keyed: defaultdict[str, list[bytes]] = defaultdict(list)
        keep = self.routes.keep_partition
        if keep and all(map(itemgetter(2), sent)):
            return [(own, [line for *_, line in sent])] if sent else []
        for row, topic, in_place, line in sent:
            if not (in_place and keep):
                keyed[topic].append(line[2] if line[2] is not None else ids[row] or b"")
        chosen = {topic: iter(partitions(keys, self.targets[topic].partitions)) for topic, keys in keyed.items()}
        by_target: defaultdict[TopicPartition, list[Line]] = defaultdict(list)
        for _, topic, in_place, line in sent:
            target = own if in_place and keep else TopicPartition(topic, next(chosen[topic]))
            by_target[target].append(line)
        return sorted(by_target.items(), key=itemgetter(0))

    def _made_of(
        self, batch: FeedBatch, rows: Rows, outcome: Outcome, topic: str
    ) -> dict[int, tuple[FlowRecord, list[FlowRecord] | Fault]]:
        """Map each forwarded row to its record and to the flow's result for that record.

        Raises RecordFailed if the flow fails and the topology specifies `on_error: stop`. Raises TopologyError if the
        flow takes more than `most_s` for the batch; otherwise, the group would expel the worker, and the batch would be
        judged again and again.
        """
        before_s, took_s, calls = sum(self.spent_s), 0.0, 0
        verdicts = dict(outcome.exempt)
        if self.routes.late_forward:
            verdicts |= dict.fromkeys((row for row, _ in outcome.late), "late")
        clamped = outcome.clamped if self.routes.time_is_record else {}
        found: dict[int, tuple[FlowRecord, list[FlowRecord] | Fault]] = {}
        for row in self.forwarded(outcome):
            verdict, time_ms = verdicts.get(row, "unique"), clamped.get(row, batch.timestamps_ms[row])
            headers = tuple(batch.headers[row])
            record = FlowRecord(topic, batch.keys[row], batch.values[row], headers, time_ms, verdict)
            made = self.known.get((batch.offsets[row], verdict, time_ms)) if self.known else None
            if made is None:
                began_s = time.perf_counter()
                made = yielded(self.flow, record, self.targets)
                # A call may seem slow because the process was frozen, so a single call never exceeds the limit.
                took_s += min(time.perf_counter() - began_s, self.most_s / 2)
                calls += 1
                if before_s + took_s > self.most_s:
                    place = rows.source(row).place(self.routes.source_topics)
                    raise self._too_slow(place, before_s + took_s, calls)
            if isinstance(made, Fault) and self.stop:
                place = rows.source(row).place(self.routes.source_topics)
                raise RecordFailed(f"{place}: the flow failed: {made.detail}. The topology says `on_error: stop`.")
            found[row] = record, made
        self.spent_s.append(took_s)
        return found

    def _too_slow(self, place: str, took_s: float, calls: int) -> TopologyError:
        name = getattr(self.flow.function, "__qualname__", "the function")
        text = (
            f"{place}: the flow's function {name} took {took_s:.1f} s for {calls} records of one batch, more than "
            f"{FLOW_SHARE:.0%} of `session_timeout`. While the flow runs, {NO_HEARTBEAT}"
        )
        return TopologyError([Problem("then", text)])

    def _added(self, rows: Rows, row: int, verdict: str) -> list[Header]:
        """Return the headers that dedup adds to the records that the flow yields for a row."""
        feed = rows.feeds[row] if len(rows.feeds) > 1 else rows.feeds[0]
        text = f"{self.routes.source_topics[feed.topic]}/{feed.partition}/{rows.sources[row]}"
        place: Header = (SOURCE, text.encode())
        return [place] if verdict == "unique" else [(VERDICT, verdict.encode()), place]
