"""Finds the offset at which a task starts to read: the committed offset or, if none exists, the offset that `start`
specifies.

The metadata of each committed offset contains topic IDs (KIP-516). Kafka stores offsets by topic name, so after a topic
is recreated, its old offsets would point to different records.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import Final, Literal, TypeVar, assert_never

from dedup.errors import BrokerUnavailable, StateIncompatible
from dedup.kafka.wire import (
    COORDINATOR_MOVED,
    PATIENCE_S,
    UNSTABLE_OFFSET,
    CommittedOffset,
    FetchedRecord,
    LogBounds,
    NoAnswer,
    Position,
    TopicPartition,
    Wire,
    out_of_patience,
)

PAUSE_MS: Final = 50
_FETCH_BYTES: Final = 1 << 16
Start = Literal["earliest", "latest"] | int
K = TypeVar("K")
T = TypeVar("T")
MOST_AT_ONCE: Final = 32
"""The maximum number of partitions or transactional IDs in concurrent requests."""
_PROGRESSED: Final[ContextVar[Callable[[], None]]] = ContextVar("progressed", default=lambda: None)
_FEEDING: Final = "feeding"
CHANGELOG: Final = "changelog"
RESETTING: Final = "dedup-reset-in-progress"
"""The metadata of a group's committed offsets while `dedup reset` deletes the state of the topology."""


async def bounds_of(wire: Wire, partition: TopicPartition) -> LogBounds:
    """Return a partition's first offset and high watermark. Retries while the partition's leader changes."""
    return await answered(wire, lambda: wire.bounds(partition))


async def ends_of(wire: Wire, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
    """Return the high watermark of each partition."""
    return {place: bounds.end for place, bounds in (await at_once(partial(bounds_of, wire), partitions)).items()}


async def at_once(ask: Callable[[K], Awaitable[T]], keys: Iterable[K], *, most: int = MOST_AT_ONCE) -> dict[K, T]:
    """Call ``ask`` for each key, with at most ``most`` concurrent calls, and return the results by key.

    Raises the first error that a call raises; no call is running afterward.
    """
    slots = asyncio.Semaphore(most)

    async def asked(key: K) -> T:
        async with slots:
            found = await ask(key)
        progressed()
        return found

    calls = {key: asyncio.ensure_future(asked(key)) for key in keys}
    try:
        return dict(zip(calls, await asyncio.gather(*calls.values()), strict=True))
    finally:
        for call in calls.values():
            call.cancel()
        await asyncio.gather(*calls.values(), return_exceptions=True)


@asynccontextmanager
async def progress_within(seconds: float) -> AsyncIterator[None]:
    """Raise TimeoutError if ``seconds`` pass in the ``with`` block without a call of `progressed`.

    `at_once` calls `progressed` for each key, so the time limit suits any number of partitions but still detects a
    partition whose requests get no response.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(seconds) as limit:

        def begin_anew() -> None:
            with suppress(RuntimeError):  # the time is up
                limit.reschedule(loop.time() + seconds)

        token = _PROGRESSED.set(begin_anew)
        try:
            yield
        finally:
            _PROGRESSED.reset(token)


def progressed() -> None:
    """Restart the time limit of the surrounding `progress_within`, if any."""
    _PROGRESSED.get()()


async def answered(wire: Wire, ask: Callable[[], Awaitable[T]]) -> T:
    """Repeat an idempotent request until there is a response, and return the response.

    Raises BrokerUnavailable if there is no response within `PATIENCE_S`; see `dedup.kafka.wire.patience`.
    """
    begun_s = time.monotonic()
    while True:
        try:
            return await ask()
        except NoAnswer as error:
            if time.monotonic() - begun_s > PATIENCE_S.get():
                raise out_of_patience(error) from error
            await wire.pause(PAUSE_MS)


async def first_offset(wire: Wire, feeding: TopicPartition, start: Start) -> int:
    """Return the offset that ``start`` specifies. A start time in ms selects the first record at or after that time."""
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


async def kept_first_offset(wire: Wire, feeding: TopicPartition, start: Start, begun: dict[TopicPartition, int]) -> int:
    """Return the partition's offset in ``begun`` or, if there is none, `first_offset`.

    Unless ``start`` is ``earliest``, ``begun`` contains the offset afterward: a task that is built again because its
    first commit got no response must not skip the records that have arrived in the meantime.
    """
    if feeding in begun:
        return begun[feeding]
    offset = await first_offset(wire, feeding, start)
    if start != "earliest":
        begun[feeding] = offset
    return offset


async def first_record(wire: Wire, partition: TopicPartition, begin: int, end: int) -> FetchedRecord | None:
    """Return the first record in a range of offsets, or None if the range contains only markers and aborted records."""
    while begin < end:
        ask = partial(wire.fetch, partition, begin, max_bytes=_FETCH_BYTES, wait_ms=PAUSE_MS)
        fetched = await answered(wire, ask)
        if fetched.records:
            return fetched.records[0] if fetched.records[0].offset < end else None
        begin = fetched.next_offset
    return None


async def first_readable(wire: Wire, partition: TopicPartition, begin: int) -> int:
    """Skip markers and aborted records, and return the first offset at or after ``begin`` that may have a record.

    The function neither waits for open transactions nor skips offsets that retention has deleted.
    """
    bounds = await bounds_of(wire, partition)
    while bounds.start <= begin < bounds.end:
        fetched = await answered(wire, partial(wire.fetch, partition, begin, max_bytes=_FETCH_BYTES, wait_ms=0))
        if fetched.offsets or fetched.next_offset <= begin:
            return fetched.offsets[0] if fetched.offsets else begin
        begin = fetched.next_offset
    return begin


async def committed_offset(wire: Wire, group: str, source: TopicPartition, *, stable: bool = True) -> int | None:
    """Return only the offset from `committed_position`."""
    position = await committed_position(wire, group, source, stable=stable)
    return None if position is None else position.offset


async def committed_position(wire: Wire, group: str, source: TopicPartition, *, stable: bool = True) -> Position | None:
    """Return the group's committed offset with its leader epoch and its metadata.

    The function retries while the coordinator is unavailable and, if ``stable`` is True, while an open transaction may
    change the offset (KIP-447). If the caller does not own the partition, the call can block until a dead worker's
    transaction times out. Raises BrokerUnavailable if the coordinator is unavailable for longer than `PATIENCE_S`, or
    refuses.
    """

    async def ask() -> CommittedOffset:
        found = await wire.committed_offset(group, source, stable=stable)
        if found.error_code in COORDINATOR_MOVED:
            raise NoAnswer(f"the coordinator of the group {group!r} is loading or has moved (code {found.error_code})")
        return found

    while True:
        answer = await answered(wire, ask)
        if answer.error_code == 0:
            return answer.position
        if answer.error_code != UNSTABLE_OFFSET:
            raise BrokerUnavailable(
                f"the group {group!r} does not return its offset of {source} "
                f"(code {answer.error_code}). Grant the principal Read on the group."
            )
        await wire.pause(PAUSE_MS)


def offset_metadata(feeding_id: str, changelog_id: str | None = None) -> str:
    """Return the metadata of a committed offset: the feeding topic's ID and, for a task with state, the changelog's."""
    return f"{_FEEDING}={feeding_id}" + (f" {CHANGELOG}={changelog_id}" if changelog_id is not None else "")


def refuse_other_topics(found: str, ours: str, feeding: TopicPartition) -> None:
    """Raise StateIncompatible if the metadata of a committed offset names another topic or an unfinished reset.

    An offset without metadata is accepted, because it was set by hand or by an older release.
    """
    refuse_half_reset(found, feeding)
    theirs, here = _parts(found), _parts(ours)
    for kind in theirs.keys() & here.keys():
        if theirs[kind] != here[kind]:
            what = f"its source topic {feeding.topic!r}" if kind == _FEEDING else "its changelog"
            raise StateIncompatible(
                f"the group's offset of {feeding} was committed when {what} had id {theirs[kind]}, and the topic of "
                f"that name has id {here[kind]} now: it was deleted and recreated. Nothing was changed; start over "
                f"with `dedup reset`."
            )


def refuse_half_reset(metadata: str, feeding: TopicPartition) -> None:
    """Raise StateIncompatible if a reset of the group was interrupted."""
    if metadata == RESETTING:
        raise StateIncompatible(
            f"a `dedup reset` was interrupted: it has marked the group's offset of {feeding}, and the state is "
            f"partly deleted. Nothing was judged. Run the same `dedup reset` again to finish it."
        )


def _parts(metadata: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in metadata.split() if "=" in part)
