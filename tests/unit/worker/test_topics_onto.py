"""What a new group finds in its output, asked as far as a worker with least privilege may."""

from __future__ import annotations

import asyncio
from unittest.mock import AsyncMock

import pytest

from dedup.errors import StateIncompatible
from dedup.kafka.wire import CommittedOffset, Fetched, LogBounds, NoAnswer, Position, TopicPartition
from dedup.topology.parse import parse
from dedup.worker import topics as onto

TEXT = "dedup: 1\nname: t\nsource: {topics: [in]}\ntracking_id: {field: id}\nguard_period: 1h\noutput: {topic: out}\n"
OUT = TopicPartition("out", 0)
UNAUTHORIZED = 30


class Output:
    """One output partition: committed records at some offsets, all below its end decided."""

    def __init__(self, *records: int, end: int, start: int = 0, may_read: bool = True, mark: int | None = None) -> None:
        self.records, self.end, self.start, self.may_read, self.mark = records, end, start, may_read, mark
        self.silent = 1
        self.pauses = 0

    async def bounds(self, _place: TopicPartition) -> LogBounds:
        return LogBounds(self.start, self.end + 5)

    async def committed_offset(self, group: str, place: TopicPartition, *, stable: bool) -> CommittedOffset:
        assert (group, place, stable) == ("t.reset", OUT, False)
        code = UNAUTHORIZED if self.mark == -1 else 0
        return CommittedOffset(code, None if code or self.mark is None else Position(self.mark))

    async def fetch(self, _place: TopicPartition, offset: int, *, max_bytes: int, wait_ms: int) -> Fetched:
        assert max_bytes > 0
        if not self.may_read:
            raise StateIncompatible("out/0 can not be read: TopicAuthorizationFailedError")
        if self.silent:
            self.silent -= 1
            raise NoAnswer("once")
        # Ten offsets a time, of which most are aborted or compacted away.
        upper = min(offset + 10, self.end + 5)
        found = [at for at in self.records if offset <= at < upper]
        columns = [[0] * len(found), [None] * len(found), [None] * len(found)]
        return Fetched(found, *columns, upper, self.end + 5, self.end)  # type: ignore[arg-type]

    async def pause(self, _delay_ms: int) -> None:
        self.pauses += 1
        assert self.pauses < 10, "it does not go on"


@pytest.mark.parametrize(
    ("output", "holds"),
    [
        (Output(end=0), False),
        (Output(3, end=5), True),
        (Output(37, end=40), True),
        (Output(end=40), False),
        (Output(41, end=40), False),
        (Output(3, end=5, mark=5), False),
        (Output(3, 7, end=9, mark=5), True),
        (Output(3, end=5, mark=-1), True),
        (Output(3, end=5, may_read=False), True),
        (Output(end=5, start=5, may_read=False), False),
        (Output(end=5, mark=5, may_read=False), False),
    ],
    ids=[
        "empty",
        "a record",
        "far behind aborted ones",
        "only aborted ones",
        "of a transaction that is open",
        "all known by a mark",
        "one past the mark",
        "a mark that may not be asked for",
        "not to be read",
        "not to be read and emptied",
        "not to be read and known",
    ],
)
def test_only_decided_records_that_no_mark_accounts_for_count(output: Output, holds: bool):
    found = onto._holds_records(parse(TEXT, name="t.yaml"), output, OUT, output.end)  # type: ignore[arg-type]
    assert asyncio.run(found) == holds


def test_the_end_positions_do_not_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    """`dedup verify` needs them as long as the output holds older records."""
    group = AsyncMock()
    monkeypatch.setattr(onto, "Group", lambda wire, name: group if (wire, name) == (None, "t.reset") else None)
    topology = parse(TEXT, name="t.yaml")
    asyncio.run(onto._leave_mark(topology, None, {OUT: 7}))  # type: ignore[arg-type]
    group.set_offsets.assert_awaited_once_with({OUT: 7}, for_ever=True)
