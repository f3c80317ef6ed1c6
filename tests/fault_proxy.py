"""The fault proxy with faults that only tests inject: silent and slow directions, refused connections, and counts."""

from __future__ import annotations

import asyncio
import enum
from collections import Counter
from dataclasses import dataclass
from typing import Final

from dedup.embedded.fault_proxy import FaultProxy, Link, reset


class Direction(enum.Enum):
    """Which way bytes flow."""

    TO_BROKER = "to broker"
    TO_CLIENT = "to client"


@dataclass(frozen=True, slots=True)
class Counts:
    """What the proxy did since it started."""

    connections: int
    open: int
    cut: int
    refused: int
    bytes_to_broker: int
    bytes_to_client: int
    bytes_swallowed: int


class RoughProxy(FaultProxy):
    """The proxy; each fault stays in force until `heal`."""

    def __init__(self, upstream_port: int, *, port: int = 0) -> None:
        super().__init__(upstream_port, port=port)
        self._delay_ms = 0
        self._refusing = False
        self._flowing: Final = {direction: asyncio.Event() for direction in Direction}
        for flowing in self._flowing.values():
            flowing.set()
        self._tally: Final[Counter[str]] = Counter()

    def heal(self) -> None:
        """New bytes and connections pass as if no fault had been ordered; connections that were reset stay closed."""

        def order() -> None:
            self._delay_ms = 0
            self._refusing = False
            for flowing in self._flowing.values():
                flowing.set()
            for link in self._links:
                link.swallow = False

        self._call(order)

    def delay(self, delay_ms: int) -> None:
        """Delay every chunk of data by this much, in both directions."""
        self._delay_ms = delay_ms

    def silence(self, direction: Direction) -> None:
        """Connections stay open, but nothing passes in this direction; it is held back, not lost."""
        self._call(self._flowing[direction].clear)

    def refuse(self) -> None:
        """Reset new connections at once; open ones stay."""
        self._refusing = True

    def counts(self) -> Counts:
        """Return what happened so far."""
        tally = self._tally
        return Counts(
            connections=tally["connections"],
            open=len(self._links),
            cut=tally["cut"],
            refused=tally["refused"],
            bytes_to_broker=tally[Direction.TO_BROKER.value],
            bytes_to_client=tally[Direction.TO_CLIENT.value],
            bytes_swallowed=tally["swallowed"],
        )

    def _cut(self) -> int:
        cut = super()._cut()
        self._tally["cut"] += cut
        return cut

    async def _accept(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        if self._refusing:
            self._tally["refused"] += 1
            reset(client)
        else:
            await super()._accept(reader, client)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            made = await super()._connect()
        except OSError:
            self._tally["refused"] += 1
            raise
        self._tally["connections"] += 1
        return made

    async def _pass_on(self, sink: asyncio.StreamWriter, chunk: bytes) -> None:
        if self._delay_ms:
            await asyncio.sleep(self._delay_ms / 1000)
        to_client = any(sink is link.client for link in self._links)
        direction = Direction.TO_CLIENT if to_client else Direction.TO_BROKER
        await self._flowing[direction].wait()
        self._tally[direction.value] += len(chunk)
        await super()._pass_on(sink, chunk)

    async def _swallow(self, link: Link, chunk: bytes, answers: asyncio.StreamReader) -> int:
        self._tally["cut"] += 1
        swallowed = await super()._swallow(link, chunk, answers)
        self._tally["swallowed"] += swallowed
        return swallowed
