"""The worker's event loop, where a connection is gone."""

import asyncio
import socket
import struct

import pytest

from dedup.worker.worker import Loop


async def reset_by_peer():
    """Return the writer of a connection whose other side has reset it, and a reader that has not looked yet."""
    accepted = asyncio.Queue()
    server = await asyncio.start_server(lambda reader, writer: accepted.put_nowait(writer), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    other = await accepted.get()
    other.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    other.transport.abort()
    with pytest.raises(ConnectionResetError):
        await reader.read(1)
    server.close()
    return writer


def test_a_write_on_a_connection_that_was_reset_is_an_os_error():
    async def write():
        writer = await reset_by_peer()
        with pytest.raises(ConnectionResetError):
            writer.write(b"x")

    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(write())


def test_a_connection_works_as_any_other():
    async def talk():
        async def echo(reader, writer):
            writer.write(await reader.read(5))
            writer.close()

        async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(b"hello")
            assert await reader.read() == b"hello"
            assert writer.get_extra_info("peername") == server.sockets[0].getsockname()
            writer.close()
            await writer.wait_closed()

    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(talk())
