"""The fault proxy against a toy server that answers each line with `ok <line>`."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import pytest

from tests.fault_proxy import Direction, RoughProxy


class Answering:
    """Remembers every line it got, over all connections."""

    def __init__(self) -> None:
        self.got: list[str] = []
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self):
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop
        ).result()
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_):
        async def end():
            self._server.close()
            await self._server.wait_closed()
            await asyncio.sleep(0.05)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _serve(self, reader, writer):
        try:
            while line := await reader.readline():
                self.got.append(line.decode().strip())
                writer.write(b"ok " + line)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


@pytest.fixture
def server():
    with Answering() as answering:
        yield answering


@pytest.fixture
def proxy(server):
    with RoughProxy(server.port) as running:
        yield running


@pytest.fixture
def client(proxy):
    with connect(proxy) as connected:
        yield connected


def connect(proxy):
    connection = socket.create_connection(("127.0.0.1", proxy.port), timeout=5)
    connection.settimeout(5)
    return connection


def ask(client, line):
    client.sendall(line.encode() + b"\n")
    return client.recv(1000).decode().strip()


def read_on(client):
    while client.recv(10_000):
        pass


def connect_and_read(proxy):
    with connect(proxy) as client:
        client.recv(10)


def eventually(condition):
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def test_without_a_fault_bytes_pass_both_ways(proxy, client):
    assert ask(client, "a") == "ok a"
    assert ask(client, "b") == "ok b"
    counts = proxy.counts()
    assert (counts.connections, counts.open, counts.cut) == (1, 1, 0)
    assert (counts.bytes_to_broker, counts.bytes_to_client) == (4, 10)


def test_a_cut_resets_every_connection(proxy, client):
    ask(client, "a")
    with connect(proxy) as second:
        ask(second, "b")
        assert proxy.cut() == 2
        for cut in (client, second):
            with pytest.raises(ConnectionResetError):
                cut.recv(10)
    with connect(proxy) as later:
        assert ask(later, "c") == "ok c"


def test_a_swallowed_answer_means_the_request_arrived_and_the_client_does_not_know(proxy, client, server):
    ask(client, "before")
    assert proxy.swallow_answers() == 1
    client.sendall(b"paid\n")
    with pytest.raises(ConnectionResetError):
        client.recv(10)
    assert server.got == ["before", "paid"]
    eventually(lambda: proxy.counts().bytes_swallowed == len("ok paid\n"))
    with connect(proxy) as again:
        assert ask(again, "paid") == "ok paid"
    assert server.got == ["before", "paid", "paid"]


def test_requests_sent_behind_the_swallowed_answer_arrive_too(proxy, client, server):
    ask(client, "before")
    proxy.swallow_answers()
    many = [f"line-{number}" for number in range(1000)]
    client.sendall("".join(f"{line}\n" for line in many).encode())
    with pytest.raises(ConnectionResetError):
        read_on(client)
    eventually(lambda: proxy.counts().open == 0)
    assert server.got[1:] == many[: len(server.got) - 1]
    assert len(server.got) > 1


def test_a_delay_counts_once_in_each_direction(proxy, client):
    ask(client, "warm")
    proxy.delay(80)
    began = time.monotonic()
    assert ask(client, "a") == "ok a"
    assert 0.15 < time.monotonic() - began < 1.5
    proxy.heal()
    began = time.monotonic()
    ask(client, "b")
    assert time.monotonic() - began < 0.1


@pytest.mark.parametrize(("direction", "arrived"), [(Direction.TO_BROKER, []), (Direction.TO_CLIENT, ["a"])])
def test_a_silent_direction_keeps_the_connection_and_delivers_when_healed(proxy, client, server, direction, arrived):
    eventually(lambda: proxy.counts().open == 1)
    proxy.silence(direction)
    client.sendall(b"a\n")
    client.settimeout(0.2)
    with pytest.raises(TimeoutError):
        client.recv(10)
    assert server.got == arrived
    proxy.heal()
    client.settimeout(5)
    assert client.recv(100) == b"ok a\n"


def test_refusing_resets_new_connections_and_leaves_open_ones(proxy, client):
    ask(client, "a")
    proxy.refuse()
    with pytest.raises(ConnectionResetError):
        connect_and_read(proxy)
    assert ask(client, "b") == "ok b"
    assert proxy.counts().refused == 1


def test_a_dead_broker_resets_the_client():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with RoughProxy(unused.getsockname()[1]) as proxy:
            with pytest.raises(ConnectionResetError):
                connect_and_read(proxy)
            assert proxy.counts().refused == 1


def test_the_brokers_orderly_end_reaches_the_client(proxy, client):
    ask(client, "a")
    client.shutdown(socket.SHUT_WR)
    assert client.recv(10) == b""
    eventually(lambda: proxy.counts().open == 0)
