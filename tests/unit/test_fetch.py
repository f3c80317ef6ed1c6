"""The feeds' fetcher between two assignments."""

import asyncio

from dedup.session.fetch import FeedFetcher
from dedup.session.wire import NoAnswer, TopicPartition

OLD, NEW = TopicPartition("in", 0), TopicPartition("in", 1)


class Wire:
    """A cluster of one node, whose metadata takes a while; it never answers a fetch."""

    leader_moved = frozenset()

    def __init__(self):
        self.asked = []
        self.metadata = asyncio.Event()
        self.looking = asyncio.Event()
        self.sent = asyncio.Event()

    async def leader(self, _source):
        self.looking.set()
        await self.metadata.wait()
        return 1

    async def send(self, _node, request, _lane):
        self.asked += [(topic, partition, offset) for topic, parts in request.topics for partition, offset, _ in parts]
        self.sent.set()
        await asyncio.Event().wait()


async def test_an_assignment_that_ends_while_leaders_are_looked_up_is_not_fetched_for():
    wire = Wire()
    fetcher = FeedFetcher(wire, wait_ms=1)
    fetcher.begin(OLD, 5)
    fetcher.begin(NEW, 6)
    poll = asyncio.create_task(fetcher.poll([OLD, NEW]))
    await wire.looking.wait()
    fetcher.forget()
    fetcher.begin(NEW, 7)
    wire.metadata.set()
    assert await poll == []
    # The next poll is the new assignment's, and asks for nothing else.
    poll = asyncio.create_task(fetcher.poll([NEW]))
    await wire.sent.wait()
    assert wire.asked == [("in", 1, 7)]
    fetcher.forget()
    poll.cancel()


class TwoNodes(Wire):
    """A cluster of two nodes that give no answer; its metadata is looked up again for a while."""

    def __init__(self):
        super().__init__()
        self.refreshing = asyncio.Event()

    async def leader(self, source):
        return source.partition

    async def send(self, node, request, lane):
        raise NoAnswer("the broker is gone")

    async def refresh(self):
        self.refreshing.set()
        await self.metadata.wait()


async def test_an_assignment_that_ends_while_leaders_are_looked_up_again_ends_in_peace():
    wire = TwoNodes()
    fetcher = FeedFetcher(wire, wait_ms=1)
    fetcher.begin(OLD, 5)
    fetcher.begin(NEW, 6)
    poll = asyncio.create_task(fetcher.poll([OLD, NEW]))
    await wire.refreshing.wait()
    fetcher.forget()
    wire.metadata.set()
    assert await poll == []
