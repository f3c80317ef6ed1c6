"""A TCP proxy that injects network faults on command, modeled on toxiproxy.

It runs between Kafka's clients and a listener that advertises the proxy's port (`EmbeddedKafka(proxied=1)`).
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from dedup.errors import InvariantBroken

T = TypeVar("T")
_HOST: Final = "127.0.0.1"
_CHUNK_BYTES: Final = 256 * 1024
_DRAIN_WITHIN_S: Final = 5.0
# l_onoff = 1, l_linger = 0: closing sends RST, as a machine does after it lost its connections.
_RESET: Final = struct.pack("ii", 1, 0)


class Direction(enum.Enum):
    """The direction of bytes."""

    TO_BROKER = "to broker"
    TO_CLIENT = "to client"


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of the proxy's actions since it started."""

    connections: int
    open: int
    cut: int
    refused: int
    bytes_to_broker: int
    bytes_to_client: int
    bytes_swallowed: int


class FaultProxy:
    """The proxy, in a separate thread; use it with `with`. Methods return when the fault is in effect."""

    def __init__(self, upstream_port: int, *, port: int = 0) -> None:
        self._relay: Final = _Relay(upstream_port, port)
        self._loop: Final = asyncio.new_event_loop()
        self._thread: Final = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)

    def __enter__(self) -> Self:
        """Start the proxy. Raises OSError if its port is in use."""
        self._thread.start()
        self._run(self._relay.start())
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop listening and reset every connection."""
        self._run(self._relay.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def port(self) -> int:
        """Return the port that it listens on; for port 0, the assigned port."""
        return self._relay.port

    def heal(self) -> None:
        """Let new bytes and connections pass normally again; connections that were reset stay closed."""
        self._call(self._relay.heal)

    def cut(self) -> int:
        """Reset every connection on both sides, and return their number; bytes in transit may be lost."""
        return self._call(self._relay.cut)

    def swallow_answers(self) -> int:
        """Reset each open connection when the broker responds next, so that the client never receives the response.

        Everything that the client sent before still reaches the broker, so a client that retries writes its records
        twice. Returns the number of connections waiting for a response.
        """
        return self._call(self._relay.swallow_answers)

    def delay(self, delay_ms: int) -> None:
        """Delay every chunk of data by this much, in both directions."""
        self._call(lambda: self._relay.delay(delay_ms))

    def silence(self, direction: Direction) -> None:
        """Keep connections open but hold back all bytes in this direction until heal(); nothing is lost."""
        self._call(lambda: self._relay.silence(direction))

    def refuse(self) -> None:
        """Reset new connections at once until heal(); open connections stay open."""
        self._call(self._relay.refuse)

    def counts(self) -> Counts:
        """Return the counts so far."""
        return self._call(self._relay.counts)

    def _call(self, action: Callable[[], T]) -> T:
        async def act() -> T:
            return action()

        return self._run(act())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if not self._thread.is_alive():
            work.close()
            raise InvariantBroken("this proxy is not running; use it in a `with` statement")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


class _Relay:
    """The proxy inside an event loop; methods that are not async act before they return. See FaultProxy."""

    def __init__(self, upstream_port: int, port: int) -> None:
        self._upstream_port: Final = upstream_port
        self.port = port
        self._links: set[_Link] = set()
        self._delay_ms = 0
        self._refusing = False
        self._flowing: Final = {direction: asyncio.Event() for direction in Direction}
        self._tally: Final[Counter[str]] = Counter()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self.heal()
        self._server = await asyncio.start_server(self._accept, _HOST, self.port, limit=_CHUNK_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self.cut()
            await self._server.wait_closed()
        await asyncio.gather(*(link.over.wait() for link in set(self._links)))

    def heal(self) -> None:
        self._delay_ms = 0
        self._refusing = False
        for flowing in self._flowing.values():
            flowing.set()
        for link in self._links:
            link.swallow = False

    def cut(self) -> int:
        for link in tuple(self._links):
            link.reset()
            self._tally["cut"] += 1
        return len(self._links)

    def swallow_answers(self) -> int:
        for link in self._links:
            link.swallow = True
        return len(self._links)

    def delay(self, delay_ms: int) -> None:
        self._delay_ms = delay_ms

    def silence(self, direction: Direction) -> None:
        self._flowing[direction].clear()

    def refuse(self) -> None:
        self._refusing = True

    def counts(self) -> Counts:
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
            answers, broker = await asyncio.open_connection(_HOST, self._upstream_port, limit=_CHUNK_BYTES)
        except OSError:
            # The broker is down: the client sees what it would see without the proxy.
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
            while chunk := await source.read(_CHUNK_BYTES):
                if self._delay_ms:
                    await asyncio.sleep(self._delay_ms / 1000)
                await self._flowing[direction].wait()
                if direction is Direction.TO_CLIENT and link.swallow:
                    self._tally["cut"] += 1
                    self._tally["swallowed"] += len(chunk) + await _discard_answers(link, source)
                    return
                self._tally[direction.value] += len(chunk)
                sink.write(chunk)
                await sink.drain()
            sink.write_eof()
        except OSError:
            # One side was reset, so reset the other one too.
            link.reset()


class _Link:
    """A client's connection to the proxy, and the corresponding connection from the proxy to the broker."""

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


async def _discard_answers(link: _Link, answers: asyncio.StreamReader) -> int:
    """Reset the client, let the broker respond to everything the client sent, and return the size of the responses."""
    # The other pump closes the broker's side in good order once it has passed on what the client sent: a reset would
    # destroy requests that the broker has not read yet.
    _reset(link.client)
    discarded_bytes = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_WITHIN_S):
            while chunk := await answers.read(_CHUNK_BYTES):
                discarded_bytes += len(chunk)
    return discarded_bytes
