"""What a replay remembers of the records that it has left: the metadata of its position."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dedup.errors import CommitUnknown, DedupError, TaskMigrated
from dedup.kafka.consumer import Answer
from dedup.kafka.memory_wire import MemoryWire
from dedup.kafka.record_batch import Columns, Header
from dedup.kafka.topic_admin import Topic
from dedup.kafka.wire import CommittedOffset, LogBounds, TopicPartition
from dedup.settings import Settings
from dedup.topology.parse import parse
from dedup.worker.dead_letter_replay import (
    MOST_METADATA_BYTES,
    Remaining,
    Replay,
    left_in,
    metadata_of,
    replay_plan,
    with_left,
)
from dedup.worker.topics import Cluster

TEXT = """
dedup: 1
name: t
source: {topics: [in]}
tracking_id: {field: id}
guard_period: 1h
output: {topic: out}
"""
TOPOLOGY = parse(TEXT, name="t.yaml")
SIDE = TopicPartition("out.dead-letter", 0)


def replay(limit: int | None = None) -> Replay:
    plan = replay_plan(TOPOLOGY, late=False, limit=limit)
    assert not isinstance(plan, str)
    settings = Settings(brokers=("127.0.0.1:1",))
    return Replay(TOPOLOGY, settings, Cluster({"in": Topic("in", "1", 2)}), cast("Any", None), plan)


def answer(letters: dict[int, int], next_offset: int) -> Answer:
    """Return a fetch of dead letters: from which source partition the one at each offset came."""
    columns = Columns()
    for offset, partition in letters.items():
        columns.offsets.append(offset)
        columns.timestamps_ms.append(0)
        columns.keys.append(None)
        columns.values.append(b"v")
        own = ("dedup-reason", b"r"), ("dedup-detail", b"d")
        columns.headers.append([*own, ("dedup-source", b"in/%d/7" % partition), ("dedup-timestamp", b"1")])
    begun = min(letters, default=next_offset)
    return Answer(SIDE, columns, begun, next_offset, cast("Any", SimpleNamespace()), -1, 0)


@given(st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(1, 1 << 20))))
def test_a_note_names_the_spans_it_was_made_of(steps: list[tuple[int, int]]) -> None:
    spans, reached = [], 0
    for distance, length in steps:
        spans.append((reached + distance, reached + distance + length))
        reached = spans[-1][1]
    assert left_in(metadata_of(spans)) == spans


@pytest.mark.parametrize("metadata", ["", "dedup-reset-in-progress", "left=", "left=1", "left=1+2,", "feeding=abc"])
def test_metadata_of_another_kind_names_nothing(metadata: str) -> None:
    assert left_in(metadata) == []


def test_spans_that_adjoin_are_one() -> None:
    assert with_left(with_left(with_left([], 3, 5), 5, 6), 8, 9) == [(3, 6), (8, 9)]


def test_what_was_left_stays_left_until_it_is_sent() -> None:
    remaining = Remaining([], [(10, 100)])
    found = replay()._chosen(SIDE, answer({10: 0, 11: 5, 13: 5, 14: 1}, 16), remaining)
    assert sum(map(len, found.lines.values())) == 2
    assert sorted(found.told) == [11, 13]
    position = found.remaining.position
    assert (position.offset, left_in(position.metadata)) == (16, [(11, 14)])
    # The next replay reads the left ones first; one of them can be sent now.
    remaining = Remaining([], [*left_in(position.metadata), (16, 100)])
    found = replay()._chosen(SIDE, answer({11: 0, 13: 5, 14: 1}, 16), remaining)
    assert [len(lines) for lines in found.lines.values()] == [1]
    assert found.remaining == Remaining([(13, 14)], [(16, 100)])
    assert found.remaining.position.offset == 16


@pytest.mark.parametrize(
    ("source", "timestamp"),
    [
        (b"in/0/7", None),
        (b"in/0/7", b""),
        (b"in/0/7", b"2024-01-01"),
        (b"in/0/7", b"\xff"),
        (b"in/0/7", "²".encode()),
        (b"in/0/7", b"9223372036854775808"),
        (b"in/0/7", b"9" * 5_000),
        (None, b"1"),
        (b"in", b"1"),
        (b"in/x/1", b"1"),
        (b"in/-1/5", b"1"),
        (b"\xff/0/5", b"1"),
        (b"in/%s/5" % (b"9" * 5_000), b"1"),
    ],
)
def test_a_record_with_damaged_headers_is_left_and_the_next_one_is_sent(
    source: bytes | None, timestamp: bytes | None
) -> None:
    """Was: a traceback at each replay, so that no letter behind the record could be sent."""
    letters = answer({10: 0, 11: 0}, 12)
    letters.columns.headers[0][-2:] = [("dedup-source", source), ("dedup-timestamp", timestamp)]
    found = replay()._chosen(SIDE, letters, Remaining([], [(10, 100)]))
    assert sum(map(len, found.lines.values())) == 1
    assert list(found.told) == [10]
    assert "its headers dedup-source and dedup-timestamp are damaged" in found.told[10]


def test_a_limit_leaves_the_rest_of_a_span_unread() -> None:
    found = replay(limit=1)._chosen(SIDE, answer({11: 0, 12: 0, 13: 0}, 20), Remaining([], [(11, 14), (16, 100)]))
    assert found.remaining == Remaining([], [(12, 14), (16, 100)])
    assert left_in(found.remaining.position.metadata) == [(12, 14)]


def test_a_replay_stops_before_the_left_records_that_its_position_cannot_name() -> None:
    # Every second letter came from a partition that is gone, so no two of them adjoin.
    letters = {offset: 5 if offset % 2 else 0 for offset in range(4_000)}
    found = replay()._chosen(SIDE, answer(letters, 4_000), Remaining([], [(0, 4_000)]))
    assert found.full
    position = found.remaining.position
    assert MOST_METADATA_BYTES - 20 < len(position.metadata) <= MOST_METADATA_BYTES
    assert len(left_in(position.metadata)) > 900
    told = found.told[position.offset]
    assert "were not read" in told
    assert "'t.replay'" in told
    # Each letter below the position is either sent or named.
    assert sum(map(len, found.lines.values())) + len(left_in(position.metadata)) == position.offset


def test_a_full_position_can_be_read_again() -> None:
    left = [(2 * number + 1, 2 * number + 2) for number in range(MOST_METADATA_BYTES // 4 - 2)]
    remaining = Remaining([], [*left, (10_000, 20_000)])
    for first, _ in left:
        found = replay()._chosen(SIDE, answer({first: 5}, first + 1), remaining)
        assert not found.full
        remaining = found.remaining
    assert remaining == Remaining(left, [(10_000, 20_000)])
    # One fetch is enough for all of them; what lies between was sent before.
    letters = dict.fromkeys(range(left[-1][1]), 5)
    assert (
        replay()._chosen(SIDE, answer(letters, left[-1][1]), Remaining([], [*left, (10_000, 20_000)])).remaining
        == remaining
    )


class Broker:
    """Knows a topic with records and no offset of any group."""

    async def bounds(self, _place: TopicPartition) -> LogBounds:
        return LogBounds(0, 5)

    async def committed_offset(self, _group: str, _place: TopicPartition, *, stable: bool) -> CommittedOffset:
        del stable
        return CommittedOffset(0, None)


@pytest.mark.parametrize("error", [TaskMigrated("fenced"), CommitUnknown("no answer")])
async def test_only_a_replay_that_is_fenced_is_told_of_another_one(
    monkeypatch: pytest.MonkeyPatch, error: TaskMigrated
) -> None:
    async def insist(*_: object) -> None:
        raise error

    monkeypatch.setattr(Replay, "_insist", insist)
    made = replay()
    made.cluster, made.wire = Cluster({SIDE.topic: Topic(SIDE.topic, "2", 1)}), cast("Any", Broker())
    with pytest.raises(DedupError) as raised:
        await made.run()
    if isinstance(error, CommitUnknown):
        assert raised.value is error
    else:
        assert str(raised.value).startswith("another `dedup replay` of 't' has taken over out.dead-letter/0. This one")
        assert "worker" not in str(raised.value)


class CountingWire(MemoryWire):
    """Counts the epochs, and takes replay marks."""

    opened = 0

    async def init_producer_id(self, transactional_id: str, timeout_ms: int) -> tuple[int, Any]:
        self.opened += 1
        return await super().init_producer_id(transactional_id, timeout_ms)

    async def ask_group(self, _group: str, _request: object, _codes: object) -> tuple[int, Any]:
        return 0, None


class Fetcher:
    """Reads up to 600 letters at once from the memory wire."""

    def __init__(self, wire: MemoryWire, _check: object, *, wait_ms: int) -> None:
        del wait_ms
        self.wire, self.at = wire, 0

    def begin(self, _side: TopicPartition, offset: int) -> None:
        self.at = offset

    async def poll(self, sides: list[TopicPartition]) -> list[Answer]:
        found, begun = self.wire.read(sides[0], 0), self.at
        self.at = min(begun + 600, len(found.offsets))
        part = Columns()
        for name in ("offsets", "timestamps_ms", "keys", "values", "headers"):
            getattr(part, name).extend(getattr(found, name)[begun : self.at])
        return [Answer(sides[0], part, begun, self.at, cast("Any", None), -1, 0)]

    def forget(self) -> None:
        pass


async def test_a_thousand_refused_letters_cost_no_epoch_each(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = CountingWire(lambda: 0)
    source = Topic("in", "1", 1, {"max.message.bytes": "1000"})
    letters = Topic(SIDE.topic, "2", 1)
    for topic in (source, letters):
        wire.create(topic)
    headers: list[Header] = [("dedup-reason", b"r"), ("dedup-detail", b"d"), ("dedup-source", b"in/0/7")]
    headers.append(("dedup-timestamp", b"1"))
    values = [b"small" if row in {500, 1_100} else bytes(2_000) for row in range(1_200)]
    for row, value in enumerate(values):
        wire.append(SIDE, [(row, 0, None, value, headers)])
    monkeypatch.setattr("dedup.worker.dead_letter_replay.FeedFetcher", Fetcher)
    made = replay()
    made.cluster = Cluster({"in": source, SIDE.topic: letters})
    made.wire = cast("Any", wire)
    made.settings = made.settings.model_copy(
        update={"topics": made.settings.topics.model_copy(update={"compression": "none"})}
    )
    done = await made.run()
    assert (done.sent, len(done.left)) == (2, 1_198)
    assert all("larger than its max.message.bytes" in sentence for sentence in done.left)
    # One epoch for a batch whose letters are not named, one for each fetch with refused letters, and one for the rest.
    assert wire.opened <= 4
    assert wire.read(TopicPartition("in", 0), 0).values == [b"small", b"small"]
