"""Looks at the cluster after every step as a reader does, and at the end at everything."""

from __future__ import annotations

from dedup.core.window import Source
from dedup.kafka.wire import TopicPartition
from dedup.worker.dedup_task import DedupTask, unwrap
from dedup.worker.task import Task, TaskState
from tests.simulation.cluster import Cluster
from tests.simulation.oracle import Kind, Reader, Violation, compare, compare_state, too_large
from tests.simulation.process import Process, batch_of
from tests.simulation.scenario import GROUP, REPARTITION, Scenario


class Watcher:
    """What must hold in one run: of each judged log, with the partitions of the other topics that have its number."""

    def __init__(self, scenario: Scenario, cluster: Cluster) -> None:
        self._scenario = scenario
        self._cluster = cluster
        self._judged = {
            log: scenario.new_judged(log) if scenario.two_hops else scenario.expected[log][0]
            for log in scenario.judged_logs
        }
        self._judged_to = 0
        self._readers = {
            log: {topic: Reader(cluster, TopicPartition(topic, log.partition)) for topic in judged.topics}
            for log, judged in self._judged.items()
        }
        self._seen_version = 0
        self._refused_on_the_way: list[bytes | None] = []

    def expect_probes(self) -> None:
        """The probes were added to the input."""
        if not self._scenario.two_hops:
            self._judged = {log: expected[1] for log, expected in self._scenario.expected.items()}

    @property
    def behind(self) -> bool:
        """Whether something may have become visible since it looked."""
        return self._cluster.version != self._seen_version

    @property
    def judged_an_id(self) -> bool:
        """Whether a record with an ID is known to be judged: a dead letter alone says nothing of stream time."""
        return all(
            any(reader.lines for topic, reader in readers.items() if topic != "dead")
            for readers in self._readers.values()
        )

    def look(self) -> list[Violation]:
        """Compare what `read_committed` readers see now with the beginning of what they must see."""
        self._seen_version = self._cluster.version
        if self._scenario.two_hops:
            self._judge_hop()
        changed = [
            (log, topic) for log, readers in self._readers.items() for topic, reader in readers.items() if reader.read()
        ]
        if self._scenario.two_hops:
            self._take_refused_on_the_way()
        return self._compared(changed, whole=False)

    def _take_refused_on_the_way(self) -> None:
        """Dead letters of the repartition tasks are no verdicts of the model's: they are compared with the input."""
        lines = self._readers[REPARTITION]["dead"].lines
        self._refused_on_the_way += [line[1] for line in lines if b"VAST" in (line[1] or b"")]
        lines[:] = [line for line in lines if b"VAST" not in (line[1] or b"")]

    def _compared(self, places: list[tuple[TopicPartition, str]], *, whole: bool) -> list[Violation]:
        found = [compare(topic, self._judged[log].topics, self._readers[log], whole=whole) for log, topic in places]
        return [violation for violation in found if violation is not None]

    def _judge_hop(self) -> None:
        """Let the model judge what the repartition topic has got."""
        log = self._cluster.partition(REPARTITION)
        for row in log.committed(self._judged_to, log.stable_end):
            plain = unwrap(batch_of(REPARTITION, [row], row.offset), ("in",))
            feed = plain.feeds[0]
            record = row._replace(timestamp=plain.batch.timestamps_ms[0], headers=())
            self._judged[REPARTITION].feed(record, Source(feed.topic, feed.partition, plain.sources[0]))
        self._judged_to = log.stable_end

    def compare_all(self, process: Process | None) -> list[Violation]:
        """Compare every topic as a whole, and the tasks of the process that is left."""
        places = [(log, topic) for log, readers in self._readers.items() for topic in readers]
        found = self._compared(places, whole=True)
        if self._scenario.two_hops:
            found += self._compare_hop()
        if process is None:
            return [*found, Violation("stuck", "nobody has the partitions")]
        for feeding, task in process.tasks.running.items():
            found += self._compare_task(feeding, task, process.started_at.get(feeding, 0))
        return found

    def _compare_task(self, feeding: TopicPartition, task: Task, started_at: int) -> list[Violation]:
        """The task has come to the end of its log, counts what it has read, and its store is what it must be."""
        found: list[Violation] = []
        log = self._cluster.partition(feeding)
        end = log.committed(0, log.end)[-1].offset + 1
        position = self._cluster.offsets.get((GROUP, feeding))
        committed = None if position is None else position.offset
        if task.state is not TaskState.RUNNING or task.dirty or task.next_offset != end:
            found.append(Violation("stuck", f"{task.task_id} is {task.state} at {task.next_offset} of {end}"))
        elif committed != end and not (committed is None and self._scenario.offsets == "forgotten"):
            found.append(Violation("wrong", f"{feeding}: committed {committed}, the log ends at {end}"))
        counted = sum(task.numbers.verdicts.values()) + task.numbers.replayed
        read = len(log.committed(started_at, log.end))
        if counted != read:
            text = f"{task.task_id} has read {read} records and counts {counted}: {task.numbers.verdicts}"
            found.append(Violation("books", text))
        if isinstance(task.work, DedupTask) and task.work.store is not None:
            rules, model = self._scenario.rules, self._judged[feeding].model
            found += compare_state(self._cluster, task.work.plan.changelog, rules, task.work.store, model)
        return found

    def _compare_hop(self) -> list[Violation]:
        """The repartition topic holds every source record once, in the source's order.

        Its tasks keep no state: where the group's offsets are lost, records come again, and are judged again.
        """
        violations: list[Violation] = []
        rows = self._scenario.records((*self._scenario.input, *self._scenario.probes), 0).values()
        refused = [row.value for part in rows for row in part if too_large(REPARTITION.topic, row)]
        if sorted(self._refused_on_the_way) != sorted(refused):  # type: ignore[type-var]  # each has a value
            text = f"dead letters of the first hop {self._refused_on_the_way}, refused were {refused}"
            violations.append(Violation("wrong", text))
        values = [line[1] for line in self._readers[REPARTITION]["out"].lines]
        if len(set(values)) < len(values):
            violations.append(Violation("duplicated", f"out holds {values}"))
        log = self._cluster.partition(REPARTITION)
        found: dict[int, list[bytes | None]] = {source.partition: [] for source in self._scenario.sources}
        for row in log.committed(0, log.end):
            plain = unwrap(batch_of(REPARTITION, [row], row.offset), ("in",))
            found[plain.feeds[0].partition].append(row.value)
        for source, records in self._scenario.records((*self._scenario.input, *self._scenario.probes), 0).items():
            expected = [record.value for record in records if not too_large(REPARTITION.topic, record)]
            own = found[source.partition]
            if self._scenario.offsets != "kept":
                own = list(dict.fromkeys(own))
            if own != expected:
                kind: Kind = "duplicated" if len(own) > len(expected) else "lost"
                violations.append(Violation(kind, f"{source}: {expected}, repartitioned {own}"))
        return violations
