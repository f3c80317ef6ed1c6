"""The metric list, what is exported, and what tasks count."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dedup.core.partitioner import partitions
from dedup.core.window import BEFORE_ALL_TIME
from dedup.kafka.wire import TopicPartition
from dedup.metrics import COMMIT_BUCKETS_S, METRICS, Durations, TaskNumbers, TaskSeen, WorkerSeen
from dedup.worker.dedup_task import Placement, record_key_of
from dedup.worker.introspection import COUNTER_READERS, TASK_READERS, WORKER_READERS, exposition
from dedup.worker.task import TaskState


@pytest.fixture(autouse=True)
def _audible() -> None:
    """Another test's logging set-up may have turned off what it did not know."""
    logging.getLogger("dedup.worker.dedup_task").disabled = False


def seen(numbers: TaskNumbers | None = None, *, lag: int | None = 3) -> WorkerSeen:
    sizes = {"state_ids": 7, "state_bytes": 700, "state_max_bytes": 1_000}
    task = TaskSeen("dedup", 'or"ders', 2, "running", numbers or TaskNumbers(), lag, 1, **sizes)
    return WorkerSeen("orders", "a", (task,), {1: 5}, fenced=1, corrupted=2, not_ready=None)


def exported(worker: WorkerSeen) -> dict[str, list]:
    """Return samples by the name of the metric that the list has."""
    families = text_string_to_metric_families(exposition(worker).decode())
    return {f.name + ("_total" if f.type == "counter" else ""): f.samples for f in families}


def test_every_metric_of_the_list_is_exported_and_no_other():
    assert sorted([*COUNTER_READERS, *TASK_READERS, *WORKER_READERS]) == sorted(metric.name for metric in METRICS)
    numbers = TaskNumbers()
    numbers.verdicts["unique"] = 1
    numbers.dead_reasons["not_json"] = 1
    numbers.reached(1)
    numbers.formats["gzip"] = 1
    numbers.look(0, 0)
    found = exported(seen(numbers))
    assert set(found) == {metric.name for metric in METRICS}
    for metric in METRICS:
        labels = {frozenset(sample.labels) - {"le"} for sample in found[metric.name]}
        assert labels == {frozenset(metric.labels)}, metric.name


def test_the_help_and_the_kind_are_those_of_the_list():
    text = exposition(seen()).decode()
    for metric in METRICS:
        assert f"# HELP {metric.name} {metric.help}" in text
        assert f"# TYPE {metric.name} {metric.kind}" in text


def test_names_and_labels_are_what_prometheus_asks_for():
    for metric in METRICS:
        assert metric.name.startswith("dedup_")
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert metric.help.endswith(".")


def test_values_are_those_of_the_tasks():
    numbers = TaskNumbers()
    numbers.verdicts.update(unique=5, duplicate=2)
    numbers.dead_reasons["missing_id"] = 4
    numbers.stream_time_ms = 1_700_000_000_500
    numbers.committed(10)
    numbers.aborted = 1
    found = exported(replace(seen(numbers), transactions={"committed": 4}, schemas_awaited=2, started_s=8.5))
    task = {"sub_topology": "dedup", "topic": 'or"ders', "partition": "2"}
    assert {s.labels["verdict"]: s.value for s in found["dedup_records_total"]} == {"unique": 5, "duplicate": 2}
    assert [(s.labels, s.value) for s in found["dedup_dead_letters_total"]] == [(task | {"reason": "missing_id"}, 4)]
    assert {s.labels["result"]: s.value for s in found["dedup_transactions_total"]} == {"committed": 1, "aborted": 1}
    shared = {s.labels["result"]: s.value for s in found["dedup_group_transactions_total"]}
    assert shared == {"committed": 4, "aborted": 0}
    assert {s.labels["state"]: s.value for s in found["dedup_task_state"]} == {
        "created": 0, "restoring": 0, "running": 1, "closed": 0,
    }  # fmt: skip
    single = {name: samples[0].value for name, samples in found.items() if len(samples) == 1}
    assert single["dedup_stream_time_seconds"] == 1_700_000_000.5
    assert single["dedup_lag_records"] == 3
    assert single["dedup_last_stable_offset_lag"] == 1
    assert (single["dedup_state_ids"], single["dedup_state_bytes"]) == (7, 700)
    assert single["dedup_state_max_bytes"] == 1_000
    assert single["dedup_standby_lag_records"] == 5
    assert (single["dedup_fenced_total"], single["dedup_corrupted_total"]) == (1, 2)
    assert single["dedup_schemas_awaited"] == 2
    assert single["dedup_start_time_seconds"] == 8.5


def test_counters_do_not_fall_when_a_task_leaves_or_comes_again():
    before, now = TaskNumbers(), TaskNumbers()
    for numbers, count in ((before, 5), (now, 2)):
        numbers.verdicts["unique"] = numbers.conflicts = numbers.replayed = numbers.misplaced = count
        numbers.transactions = numbers.aborted = count
        numbers.commits.add(0.01 * count)
        numbers.reached(1)
    elsewhere = ("dedup", 'or"ders', 3)
    worker = replace(seen(now), ended={("dedup", 'or"ders', 2): before, elsewhere: before})
    found = exported(worker)
    for name in ("records", "conflicts", "replayed", "misplaced_ids", "transactions"):
        counted: Counter[str] = Counter()
        for sample in found[f"dedup_{name}_total"]:
            if sample.labels.get("result", "committed") == "committed":
                counted[sample.labels["partition"]] += sample.value
        assert counted == {"2": 7, "3": 5}, name
    sums = {s.labels["partition"]: s.value for s in found["dedup_commit_seconds"] if s.name.endswith("_sum")}
    assert sums == {"2": pytest.approx(0.07), "3": pytest.approx(0.05)}
    # What is true of a moment is told of tasks that are here, and of no other.
    assert {s.labels["partition"] for s in found["dedup_stream_time_seconds"]} == {"2"}


def test_states_are_those_a_task_has():
    samples = exported(seen())["dedup_task_state"]
    assert {sample.labels["state"] for sample in samples} == {state.value for state in TaskState}


def test_what_is_not_known_is_left_out():
    assert exported(seen(lag=None))["dedup_lag_records"] == []


def test_there_is_no_stream_time_before_the_first_judged_record():
    numbers = TaskNumbers()
    # A chart of it would begin in 1970, or before all time.
    assert exported(seen(numbers))["dedup_stream_time_seconds"] == []
    numbers.reached(BEFORE_ALL_TIME)
    assert exported(seen(numbers))["dedup_stream_time_seconds"] == []
    numbers.reached(0)
    assert [sample.value for sample in exported(seen(numbers))["dedup_stream_time_seconds"]] == [0.0]


def test_a_histogram_is_cumulated():
    numbers = TaskNumbers()
    for seconds in (0.004, 0.005, 0.03, 99.0):
        numbers.commits.add(seconds)
    samples = exported(seen(numbers))["dedup_commit_seconds"]
    buckets = {s.labels["le"]: s.value for s in samples if s.name.endswith("_bucket")}
    assert (buckets["0.005"], buckets["0.02"], buckets["0.05"], buckets["5.0"], buckets["+Inf"]) == (2, 2, 3, 3, 4)
    assert len(buckets) == len(COMMIT_BUCKETS_S) + 1
    (total,) = [s.value for s in samples if s.name.endswith("_sum")]
    assert total == pytest.approx(99.039)


def test_a_settled_batch_counts_every_record_as_old_as_its_oldest():
    numbers = TaskNumbers()
    numbers.settled(0, 5, 40)
    assert numbers.end_to_end.counts[-1] == 40
    assert numbers.committed_time_ms == 5


def test_durations_do_not_share_their_counts():
    Durations((1.0,)).add(0.5)
    assert Durations((1.0,)).counts == [0, 0]


def test_lag_in_seconds_is_zero_without_lag():
    numbers = TaskNumbers(committed_time_ms=0)
    assert seen(numbers, lag=0).tasks[0].lag_seconds == 0
    assert seen(numbers, lag=1).tasks[0].lag_seconds > 1e9


def test_lag_in_seconds_is_left_out_while_it_is_unknown():
    """Was: 0, as if there were no lag, from a restart until the first commit."""
    assert exported(seen(TaskNumbers(), lag=1))["dedup_lag_seconds"] == []
    assert exported(seen(TaskNumbers(), lag=None))["dedup_lag_seconds"] == []


@pytest.mark.parametrize(
    ("state_key", "text"),
    [
        (b"\x01abc", b"abc"),
        (b"\x02\x00\xff", b"\x00\xff"),
        (b"\x03" + bytes(range(16)), b"00010203-0405-0607-0809-0a0b0c0d0e0f"),
        (b"\x04\x07", b"7"),
        (b"\x04\xff", b"-1"),
        (b"\x05" + b"9" * 30, b"9" * 30),
        (b"\x00" + bytes(32), None),
        (b"\x09\x01\x07", None),
    ],
)
def test_the_text_of_an_id_is_what_a_producer_would_use_as_key(state_key, text):
    assert record_key_of(state_key) == text


class TestPlacement:
    HERE = (b"\x0121", b"\x02foobar")

    def place(self, partition: int, count: int = 4) -> tuple[Placement, TaskNumbers]:
        numbers = TaskNumbers()
        return Placement(TopicPartition("t", partition), count, numbers, self.logged), numbers

    @pytest.fixture(autouse=True)
    def of_one_worker(self):
        self.logged: set[Hashable] = set()

    def home(self, key: bytes) -> int:
        return partitions([record_key_of(key) or b""], 4)[0]

    def test_ids_in_their_place_are_sampled_without_a_word(self, caplog):
        placement, numbers = self.place(self.home(self.HERE[0]))
        placement.sample([self.HERE[0], None])
        assert (numbers.sampled, numbers.misplaced, caplog.text) == (1, 0, "")

    def test_misplaced_ids_are_counted_and_warned_of_once(self, caplog):
        placement, numbers = self.place((self.home(self.HERE[0]) + 1) % 4)
        for _ in range(3):
            placement.sample([self.HERE[0]] * 10_000)
        assert numbers.misplaced == numbers.sampled == 24
        other, counted = self.place((self.home(self.HERE[0]) + 2) % 4)
        other.sample([self.HERE[0]])
        assert counted.misplaced == 1
        assert caplog.text.count("belong to another partition") == 1
        assert "partitioned_by" in caplog.text

    def test_one_partition_has_nothing_misplaced(self):
        placement, numbers = self.place(0, count=1)
        placement.sample([b"\x01a"] * 10)
        assert numbers.sampled == 0
