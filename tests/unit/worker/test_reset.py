"""What a user reads if a reset fails after it has begun to delete."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from typing import Any, cast

import pytest

from dedup.errors import (
    BrokerUnavailable,
    CheckpointUnusable,
    CommitUnknown,
    DedupError,
    RecordRefused,
    StateIncompatible,
    TaskMigrated,
)
from dedup.kafka.topic_admin import Group, Topic
from dedup.settings import Settings
from dedup.topology.parse import parse
from dedup.worker.reset import Doomed, Reset

TOPOLOGY = parse(
    """
dedup: 1
name: t
source: {topics: [in]}
tracking_id: {field: id}
guard_period: 1h
output: {topic: out}
""",
    name="t.yaml",
)


class Topics:
    """An admin that knows the source."""

    async def topics(self, _names: Iterable[str]) -> dict[str, Topic]:
        return {"in": Topic("in", "1", 1)}


FAILURES = [
    (CheckpointUnusable("s3://kept/t/0: nothing was moved for 60 s."), CheckpointUnusable),
    (BrokerUnavailable("creating topic 't.changelog' was refused."), BrokerUnavailable),
    (CommitUnknown("no answer."), BrokerUnavailable),
    (TaskMigrated("fenced."), TaskMigrated),
    (StateIncompatible("in use."), StateIncompatible),
    (RecordRefused("1 record refused.", topic="t.changelog", partition=0, rows=(-1,)), RecordRefused),
    (TimeoutError(), BrokerUnavailable),
    (OSError(errno.EACCES, "Permission denied", "/var/dedup/t/0/LOCK"), DedupError),
]


@pytest.mark.parametrize(("error", "told_as"), FAILURES, ids=[type(error).__name__ for error, _ in FAILURES])
async def test_whatever_interrupts_a_reset_its_message_says_that_it_has_begun(
    monkeypatch: pytest.MonkeyPatch, error: Exception, told_as: type[DedupError]
) -> None:
    """Was: a checkpoint that could not be deleted was told without it, when the topics were deleted already."""

    async def nothing(*_: object, **__: object) -> None:
        pass

    async def fail(*_: object) -> None:
        raise error

    for name in ("look", "_fence"):
        monkeypatch.setattr(Reset, name, nothing)
    for name in ("delete", "set_offsets"):
        monkeypatch.setattr(Group, name, nothing)
    monkeypatch.setattr(Reset, "_start_over", fail)
    reset = Reset(TOPOLOGY, Settings(brokers=("127.0.0.1:1",)), cast("Any", None), cast("Any", Topics()))
    with pytest.raises(told_as) as raised:
        await reset.run(Doomed("t", (), ()), None)
    assert type(raised.value) is told_as
    text = str(raised.value)
    assert text.endswith(". The reset has begun: run the same `dedup reset` again to complete it.")
    first = getattr(error, "text", error.args[0] if error.args else "TimeoutError")
    assert str(first) in text
