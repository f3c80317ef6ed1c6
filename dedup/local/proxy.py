"""A TCP proxy that makes networks fail on command, in the spirit of toxiproxy.

It stands between Kafka's clients and a listener whose advertised port is the proxy's (`EmbeddedKafka(proxied=1)`).
`FaultProxy` runs it in a thread; `Relay` is the same inside an event loop of one's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self, TypeVar

from dedup.errors import InvariantBroken

T = TypeVar("T")

HOST: Final = "127.0.0.1"
_CHUNK_BYTES: Final = 256 * 1024
_DRAIN_WITHIN_S: Final = 5.0
# l_onoff = 1, l_linger = 0: closing sends RST, as a machine does that lost its connections.
_RESET: Final = struct.pack("ii", 1, 0)


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


class Relay:
    """The proxy inside the running event loop; methods that are not async act before they return."""

    def __init__(self, upstream_port: int, *, port: int = 0, upstream_host: str = HOST) -> None:
        self._upstream: Final = (upstream_host, upstream_port)
        self.port = port
        """Where it listens; for 0 the port it got is known once it was started."""
        self._links: set[_Link] = set()
        self._delay_ms = 0
        self._refusing = False
        self._flowing: Final = {direction: asyncio.Event() for direction in Direction}
        self._tally: Final = {
            "connections": 0,
            "cut": 0,
            "refused": 0,
            "swallowed": 0,
            **{d.value: 0 for d in Direction},
        }
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """The proxy accepts connections."""
        self.heal()
        self._server = await asyncio.start_server(self._accept, HOST, self.port, limit=_CHUNK_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Nothing listens and every connection is cut."""
        if self._server is not None:
            self._server.close()
            self.cut()
            await self._server.wait_closed()
        await asyncio.gather(*(link.over.wait() for link in set(self._links)))

    def heal(self) -> None:
        """New bytes and connections pass as if no fault had been ordered; what was cut stays cut."""
        self._delay_ms = 0
        self._refusing = False
        for flowing in self._flowing.values():
            flowing.set()
        for link in self._links:
            link.swallow = False

    def cut(self) -> int:
        """Every connection was reset on both sides; returns how many. Bytes on their way may be lost."""
        for link in tuple(self._links):
            link.reset()
            self._tally["cut"] += 1
        return len(self._links)

    def swallow_answers(self) -> int:
        """Each open connection is reset when the broker answers next, and the client never sees that answer.

        What the client had sent until then still reaches the broker, so a client that tries again does so in vain:
        its records are there twice. Returns the number of connections waiting for an answer.
        """
        for link in self._links:
            link.swallow = True
        return len(self._links)

    def delay(self, delay_ms: int) -> None:
        """Every piece of data passes later by this, in both directions."""
        self._delay_ms = delay_ms

    def silence(self, direction: Direction) -> None:
        """Connections stay open and nothing passes in this direction until heal(); it is kept, not lost."""
        self._flowing[direction].clear()

    def refuse(self) -> None:
        """New connections are reset at once until heal(); open ones stay."""
        self._refusing = True

    def counts(self) -> Counts:
        """Return what happened so far."""
        return Counts(
            connections=self._tally["connections"],
            open=len(self._links),
            cut=self._tally["cut"],
            refused=self._tally["refused"],
            bytes_to_broker=self._tally[Direction.TO_BROKER.value],
            bytes_to_client=self._tally[Direction.TO_CLIENT.value],
            bytes_swallowed=self._tally["swallowed"],
        )

    async def _accept(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        if self._refusing:
            self._tally["refused"] += 1
            _reset(client)
            return
        try:
            answers, broker = await asyncio.open_connection(*self._upstream, limit=_CHUNK_BYTES)
        except OSError:
            # The broker is down: the client is told as it would be without us.
            self._tally["refused"] += 1
            _reset(client)
            return
        self._tally["connections"] += 1
        link = _Link(client, broker)
        self._links.add(link)
        try:
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump(link, reader, broker, Direction.TO_BROKER))
                pumps.create_task(self._pump(link, answers, client, Direction.TO_CLIENT))
        finally:
            link.reset()
            self._links.discard(link)
            link.over.set()

    async def _pump(
        self, link: _Link, source: asyncio.StreamReader, sink: asyncio.StreamWriter, direction: Direction
    ) -> None:
        try:
            while piece := await source.read(_CHUNK_BYTES):
                if self._delay_ms:
                    await asyncio.sleep(self._delay_ms / 1000)
                await self._flowing[direction].wait()
                if direction is Direction.TO_CLIENT and link.swallow:
                    self._tally["cut"] += 1
                    self._tally["swallowed"] += len(piece) + await _end_unheard(link, source)
                    return
                self._tally[direction.value] += len(piece)
                sink.write(piece)
                await sink.drain()
            sink.write_eof()
        except OSError:
            # One side was reset, so the other one is, too.
            link.reset()


class FaultProxy:
    """A Relay in a thread of its own; methods return once the fault is in force. Start and stop it with `with`."""

    def __init__(self, upstream_port: int, *, port: int = 0, upstream_host: str = HOST) -> None:
        self._upstream: Final = (upstream_host, upstream_port)
        self._port: Final = port
        self._relay: Relay | None = None
        self._loop: Final = asyncio.new_event_loop()
        self._thread: Final = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)

    def __enter__(self) -> Self:
        """Start it. Raises OSError when its port is taken."""
        self._thread.start()

        async def begin() -> Relay:
            host, port = self._upstream
            relay = Relay(port, port=self._port, upstream_host=host)
            await relay.start()
            return relay

        self._relay = asyncio.run_coroutine_threadsafe(begin(), self._loop).result()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop it; its connections are cut."""
        asyncio.run_coroutine_threadsafe(self._running().stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def port(self) -> int:
        """Return where it listens."""
        return self._running().port

    def heal(self) -> None:
        """See Relay.heal."""
        self._call(self._running().heal)

    def cut(self) -> int:
        """See Relay.cut."""
        return self._call(self._running().cut)

    def swallow_answers(self) -> int:
        """See Relay.swallow_answers."""
        return self._call(self._running().swallow_answers)

    def delay(self, delay_ms: int) -> None:
        """See Relay.delay."""
        self._call(lambda: self._running().delay(delay_ms))

    def silence(self, direction: Direction) -> None:
        """See Relay.silence."""
        self._call(lambda: self._running().silence(direction))

    def refuse(self) -> None:
        """See Relay.refuse."""
        self._call(self._running().refuse)

    def counts(self) -> Counts:
        """See Relay.counts."""
        return self._call(self._running().counts)

    def _running(self) -> Relay:
        if self._relay is None:
            raise InvariantBroken("this proxy was not started; use it in a `with` statement")
        return self._relay

    def _call(self, action: Callable[[], T]) -> T:
        async def act() -> T:
            return action()

        return asyncio.run_coroutine_threadsafe(act(), self._loop).result()


class _Link:
    """One client's connection and ours to the broker for it."""

    def __init__(self, client: asyncio.StreamWriter, broker: asyncio.StreamWriter) -> None:
        self.client: Final = client
        self.broker: Final = broker
        self.swallow = False
        self.over: Final = asyncio.Event()

    def reset(self) -> None:
        _reset(self.client)
        _reset(self.broker)


def _reset(writer: asyncio.StreamWriter) -> None:
    if not writer.transport.is_closing():
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        writer.transport.abort()


async def _end_unheard(link: _Link, answers: asyncio.StreamReader) -> int:
    """The client is cut off; the broker has got and answered all it had sent. Returns the answers' bytes."""
    # Towards the broker the other pump ends in good order once it has passed on what the client had sent: a reset
    # would destroy requests that the broker has not read yet.
    _reset(link.client)
    unheard = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_WITHIN_S):
            while piece := await answers.read(_CHUNK_BYTES):
                unheard += len(piece)
    return unheard
