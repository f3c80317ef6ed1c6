"""Where a task without a committed offset starts to read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, Literal, TypeVar, assert_never

from dedup.errors import BrokerUnavailable
from dedup.session.wire import COORDINATOR_MOVED, UNSTABLE_OFFSET, LogBounds, NoAnswer, TopicPartition, Wire

PAUSE_MS: Final = 50
Start = Literal["earliest", "latest"] | int
T = TypeVar("T")


async def bounds_of(wire: Wire, partition: TopicPartition) -> LogBounds:
    """Return a partition's start and high watermark, asking again while its leader moves."""
    return await answered(wire, lambda: wire.bounds(partition))


async def answered(wire: Wire, ask: Callable[[], Awaitable[T]]) -> T:
    """Return what a question that may be repeated is answered, asking again while nobody does."""
    while True:
        try:
            return await ask()
        except NoAnswer:
            await wire.pause(PAUSE_MS)


async def first_offset(wire: Wire, feeding: TopicPartition, start: Start) -> int:
    """Return the offset that ``start`` means; a time in ms means the first record at or after it."""
    bounds = await bounds_of(wire, feeding)
    match start:
        case "earliest":
            return bounds.start
        case "latest":
            return bounds.end
        case int() as time_ms:
            offset = await answered(wire, lambda: wire.offset_at(feeding, time_ms))
            return bounds.end if offset is None else offset
        case never:
            assert_never(never)


async def committed_offset(wire: Wire, group: str, source: TopicPartition, *, stable: bool = True) -> int | None:
    """Return the group's committed offset as of now, asking again while its coordinator is away.

    ``stable``: and while a transaction that would change it is open. For an owner, who has ended those of its own id;
    whoever only looks on would wait for a dead worker's transaction to time out.
    """
    while True:
        answer = await answered(wire, lambda: wire.committed_offset(group, source, stable=stable))
        if answer.error_code == 0:
            return answer.offset
        if answer.error_code not in COORDINATOR_MOVED | {UNSTABLE_OFFSET}:
            raise BrokerUnavailable(
                f"the group {group!r} does not tell its offset of {source.topic}/{source.partition} "
                f"(code {answer.error_code}). Grant the principal Read on the group."
            )
        await wire.pause(PAUSE_MS)
