"""Implements a TCP proxy that injects network faults on command, modeled on toxiproxy.

Kafka clients connect through the proxy to a broker that advertises the proxy's port (`EmbeddedKafka(proxied=True)`).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, Self, TypeVar

T = TypeVar("T")
_HOST: Final = "127.0.0.1"
_CHUNK_BYTES: Final = 256 * 1024
_DRAIN_WITHIN_S: Final = 5.0
# With l_onoff = 1 and l_linger = 0, closing a socket sends RST, like a machine that does not know the connection.
_RESET: Final = struct.pack("ii", 1, 0)


class Link:
    """A client's connection to the proxy, and the proxy's connection to the broker for this client."""

    def __init__(self, client: asyncio.StreamWriter, broker: asyncio.StreamWriter) -> None:
        self.client: Final = client
        self.broker: Final = broker
        self.swallow = False
        """If True, the proxy drops the broker's next response, and resets the client's connection instead."""
        self.over: Final = asyncio.Event()

    def reset(self) -> None:
        """Reset the client's connection and the broker's connection."""
        reset(self.client)
        reset(self.broker)


class FaultProxy:
    """A TCP proxy, used as a context manager. Each method that injects a fault returns once the fault is in effect."""

    def __init__(self, upstream_port: int, *, port: int = 0) -> None:
        self.port = port
        """The port on which the proxy listens. If the port is 0, the system chooses a free port when the proxy starts.
        """
        self._upstream_port: Final = upstream_port
        self._links: Final[set[Link]] = set()
        self._loop: Final = asyncio.new_event_loop()
        self._thread: Final = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._server: asyncio.Server

    def __enter__(self) -> Self:
        """Start the proxy. Raises OSError if its port is in use."""
        self._thread.start()
        self._server = self._run(asyncio.start_server(self._accept, _HOST, self.port, limit=_CHUNK_BYTES))
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def cut(self) -> int:
        """Reset all open connections, and return their number. Bytes in transit may be lost."""
        return self._call(self._cut)

    def swallow_answers(self) -> int:
        """Replace the broker's next response on each open connection with a TCP reset.

        The broker still receives everything that the client sent before the reset. Therefore, if a non-idempotent
        client retries, its records are written twice. Returns the number of connections that will be reset.
        """

        def order() -> int:
            for link in self._links:
                link.swallow = True
            return len(self._links)

        return self._call(order)

    def _call(self, action: Callable[[], T]) -> T:
        async def act() -> T:
            return action()

        return self._run(act())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _stop(self) -> None:
        self._server.close()
        self._cut()
        await self._server.wait_closed()
        await asyncio.gather(*(link.over.wait() for link in set(self._links)))

    def _cut(self) -> int:
        for link in self._links:
            link.reset()
        return len(self._links)

    async def _accept(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        try:
            answers, broker = await self._connect()
        except OSError:
            # The broker is down, so the client gets the same error as without the proxy.
            reset(client)
            return
        link = Link(client, broker)
        self._links.add(link)
        try:
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump(link, reader, broker))
                pumps.create_task(self._pump(link, answers, client))
        finally:
            link.reset()
            self._links.discard(link)
            link.over.set()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(_HOST, self._upstream_port, limit=_CHUNK_BYTES)

    async def _pump(self, link: Link, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while chunk := await source.read(_CHUNK_BYTES):
                if link.swallow and sink is link.client:
                    await self._swallow(link, chunk, source)
                    return
                await self._pass_on(sink, chunk)
            sink.write_eof()
        except OSError:
            # One side of the link was reset, so the other side is also reset.
            link.reset()

    async def _pass_on(self, sink: asyncio.StreamWriter, chunk: bytes) -> None:
        sink.write(chunk)
        await sink.drain()

    async def _swallow(self, link: Link, chunk: bytes, answers: asyncio.StreamReader) -> int:
        # The other pump closes the broker's side cleanly after passing on everything that the client sent. A reset
        # would discard requests that the broker has not read yet.
        reset(link.client)
        swallowed_bytes = len(chunk)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_WITHIN_S):
                while more := await answers.read(_CHUNK_BYTES):
                    swallowed_bytes += len(more)
        return swallowed_bytes


def reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection with a TCP reset."""
    if not writer.transport.is_closing():
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        writer.transport.abort()
