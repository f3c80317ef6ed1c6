"""What a starting worker does with a layout that another process is changing."""

import asyncio
from types import SimpleNamespace

import pytest

from dedup.kafka.wire import TopicPartition
from dedup.worker.layout import Layout, LayoutChange, read_layout
from dedup.worker.offsets import MOST_AT_ONCE
from tests.simulation.cluster import Cluster
from tests.simulation.direct import DirectWire


class Wire(DirectWire):
    paused_ms = 0

    async def pause(self, delay_ms):
        self.paused_ms += delay_ms

    async def known_everywhere(self, _topic):
        return True


class Interrupted(LayoutChange):
    """`dedup layout --apply` is killed before it fences the owners."""

    async def fence(self, layout, *sizes):
        raise KeyboardInterrupt


COUNTS = {"in": 2, "t.repartition": 2}


def change(wire, size, kind=LayoutChange):
    topology = SimpleNamespace(
        name="t",
        layout_topic="t.layout",
        layout_id="t.layout",
        group_size=size,
        direct=False,
        has_layout=lambda _size: True,
        source=SimpleNamespace(topics=("in",)),
        feeding_topics=("t.repartition",),
        transactional_id=lambda kind, partition, topic=None, size=size: f"t.{kind}.{topic}.{size}.{partition // size}",
    )
    cluster = SimpleNamespace(
        topics=dict.fromkeys(COUNTS),
        source_partitions=lambda _topology: COUNTS,
        places=lambda names: [TopicPartition(name, number) for name in names for number in (0, 1)],
    )
    return kind(topology, cluster, wire, 1_000)


@pytest.mark.parametrize("wanted", [1, 2])
async def test_only_a_worker_that_wants_the_new_layout_finishes_an_interrupted_change(wanted):
    """Was: a worker with the old layout waited for 10 s and reverted the change, even if it was still under way."""
    wire = Wire(Cluster())
    await change(wire, 1).establish()
    topology = change(wire, 1).topology
    assert await read_layout(wire, topology) == Layout(1, COUNTS)
    with pytest.raises(KeyboardInterrupt):
        await change(wire, 2, Interrupted).run(2)
    interrupted = Layout(1, COUNTS, changing_to=2)
    assert await read_layout(wire, topology) == interrupted
    wire.paused_ms = 0
    await change(wire, wanted).establish()
    assert await read_layout(wire, topology) == (interrupted if wanted == 1 else Layout(2, COUNTS))
    assert (wire.paused_ms > 0) == (wanted == 2)


class Fenced(Wire):
    """Counts the IDs that are fenced at the same time, and knows which layout readers get when each one is fenced."""

    def __init__(self, cluster):
        super().__init__(cluster)
        self.fencing = self.most = 0
        self.layouts = {}

    async def init_producer_id(self, transactional_id, timeout_ms):
        if transactional_id != "t.layout":
            self.fencing += 1
            self.most = max(self.most, self.fencing)
            await asyncio.sleep(0)
            self.layouts[transactional_id] = await read_layout(self, change(self, 1).topology)
            self.fencing -= 1
        return await super().init_producer_id(transactional_id, timeout_ms)


async def test_a_change_fences_many_owners_at_once_before_it_is_over():
    """Was: one after another, so a new topology with 1,024 partitions did not start within 30 s."""
    wire = Fenced(Cluster())
    await change(wire, 1).establish()
    wire.layouts.clear()
    made = change(wire, 2)
    made.cluster.places = lambda names: [TopicPartition(name, number) for name in names for number in range(100)]
    await made.run(2)
    assert len(wire.layouts) == 2 * 100 + 2 * 50
    assert all(layout == Layout(1, COUNTS, changing_to=2) for layout in wire.layouts.values())
    assert 1 < wire.most <= MOST_AT_ONCE
    assert await read_layout(wire, made.topology) == Layout(2, COUNTS)
