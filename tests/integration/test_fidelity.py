"""The simulator tells of a real broker: the same schedule, by choices there and by crash points here, ends the same.

Compared are the verdicts on every record, and what a `read_committed` reader sees at the moment of each death.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from dedup.crashpoints import OF_ANNOUNCING, OF_LAYOUT, POINTS
from dedup.kafka.wire import TopicPartition
from tests.brokers import read_all
from tests.integration.conftest import MakeJob
from tests.integration.fleet import Job, until
from tests.integration.transactions import until_ended
from tests.integration.workload import Event
from tests.simulation.choice import Script
from tests.simulation.oracle import VERDICT_TOPICS
from tests.simulation.run import Run
from tests.simulation.scenario import Bounds, Input, Scenario
from tests.simulation.variants import CORRECT

pytestmark = pytest.mark.broker

# Not from 0 on: to librdkafka that timestamp means now.
INPUT: Input = (("a", 100), ("b", 101), ("a", 102), (None, 103), ("c", 140), ("b", 104), ("c", 145))
PROBES: Input = (("a", 141), ("b", 142), ("c", 146), ("d", 147))
TOPICS = tuple(sorted(set(VERDICT_TOPICS.values())))

SCHEDULES = {
    ("after_init:1",): ("InitProducerId crash after",),
    ("after_committed_offset:1",): ("ListOffsets crash before",),
    ("after_restore:1",): ("Poll crash before",),
    ("after_begin:1",): ("AddPartitions crash after",),
    ("after_output:1",): ("Produce crash after",),
    ("after_changelog:1",): ("Produce crash after",),
    ("after_group:1",): ("AddOffsets crash after",),
    ("after_offsets:1",): ("TxnOffsetCommit crash after",),
    ("before_end:1",): ("EndTxn crash before",),
    ("after_end:1",): ("EndTxn crash after",),
    ("after_apply:1",): ("EndTxn go", "Poll crash before"),
    ("after_end:2", "in_restore:1"): ("EndTxn go", "EndTxn crash after", "Fetch crash before"),
}
"""Where the worker dies, one life after the other, and the same as choices of the simulator."""
Lines = dict[str, list[tuple[bytes | None, bytes | None]]]


@dataclass
class Told:
    """What readers see: at each death, and in the end."""

    at_deaths: list[Lines] = field(default_factory=list)
    end: Lines = field(default_factory=dict)


class Watched(Run):
    """A simulated run that notes what is visible when a process dies by a choice."""

    told: Told

    def visible(self) -> Lines:
        logs = {topic: self.cluster.partition(TopicPartition(topic, 0)) for topic in TOPICS}
        return {
            topic: [(row.key, row.value) for row in log.committed(0, log.stable_end)] for topic, log in logs.items()
        }

    def _crashed(self, worker) -> None:
        self.told.at_deaths.append(self.visible())
        super()._crashed(worker)


def simulated(scenario: Scenario, choices: tuple[str, ...]) -> Told:
    script = Script(*choices)
    run = Watched(scenario, CORRECT, script)
    run.told = Told()
    assert run.go() == []
    assert not script.left, f"the simulator never came to {script.left}"
    run.told.end = run.visible()
    return run.told


def events(scenario: Scenario, rows: Input, number: int) -> list[Event]:
    (records,) = scenario.records(rows, number).values()
    return [Event(0, record.value, record.timestamp, record.key) for record in records]


def visible(job: Job, topics: dict[str, str]) -> Lines:
    return {
        name: [(message.key(), message.value()) for message in read_all(job.kafka.bootstrap, topic)]
        for name, topic in topics.items()
    }


def on_the_broker(job: Job, scenario: Scenario, points: tuple[str, ...]) -> Told:
    topics = {
        "out": f"{job.name}-out",
        "duplicates": f"{job.name}-twice",
        "late": f"{job.name}-out.late",
        "dead": f"{job.name}-out.dead-letter",
    }
    for topic in topics.values():
        if topic not in job.admin.client.list_topics(timeout=30).topics:
            job.admin.create_topic(topic, 1, {"retention.ms": "-1"})
    told = Told()
    left = events(scenario, scenario.input, 0)
    for point in points:
        dying = job.start("a", *(() if scenario.implicit else ("announced=1",)), crash_at=point)
        # One by one, so that each is a transaction of its own, as it is in the simulator.
        while left and dying.running:
            job.send([left.pop(0)])
            until(lambda dying=dying: not dying.running or job.all_committed(), "it has died or judged a record")
        assert dying.wait() == 137, dying.log
        until_ended(job)
        told.at_deaths.append(visible(job, topics))
    job.send([*left, *events(scenario, scenario.probes, len(scenario.input))])
    job.finish()
    told.end = visible(job, topics)
    return told


@pytest.mark.parametrize("points", SCHEDULES, ids=" then ".join)
def test_a_schedule_ends_the_same_in_the_simulator_and_on_a_broker(
    make_job: MakeJob, topic_names: Callable[[str], str], points: tuple[str, ...]
) -> None:
    choices = SCHEDULES[points]
    bounds = Bounds(len(points), ("crash",))
    implicit = OF_ANNOUNCING.isdisjoint(point.partition(":")[0] for point in points)
    scenario = Scenario(
        "as on a broker", INPUT, bounds, probes=PROBES, most_records=1, lazy_feed=True, implicit=implicit
    )
    name = topic_names("fidelity")
    job = make_job(
        name=name,
        partitions=1,
        config={"commit_interval": "20ms"},
        document={
            "source": {"topics": [f"{name}-in"], "partitioned_by": "tracking_id", "format": "bytes"},
            "tracking_id": {"key": True},
            "guard_period": "10ms",
            "grace": "10ms",
            "duplicates": f"{name}-twice",
        },
    )
    wanted, found = simulated(scenario, choices), on_the_broker(job, scenario, points)
    assert found.end == wanted.end
    assert found.at_deaths == wanted.at_deaths


def test_every_crash_point_is_in_a_schedule() -> None:
    named = {point.partition(":")[0] for points in SCHEDULES for point in points}
    assert named == set(POINTS) - OF_LAYOUT
