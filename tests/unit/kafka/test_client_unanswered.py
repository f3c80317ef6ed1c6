"""What a client does about a connection on which no response arrives, and about responses that it could not read yet.

The broker here runs in a thread of its own, so that it responds while the client's event loop is blocked.
"""

from __future__ import annotations

import asyncio
import struct
import threading
import time

import pytest
from aiokafka.protocol.admin import ApiVersionResponse_v0
from aiokafka.protocol.metadata import MetadataRequest_v5

from dedup.errors import BrokerUnavailable
from dedup.kafka import client as client_module
from dedup.kafka import connection as connection_module
from dedup.kafka.client import KafkaWire, metadata_request
from dedup.kafka.connection import Connection, Trouble, advertised, diagnose
from dedup.kafka.requests import MetadataRequest_v10
from dedup.kafka.wire import NoAnswer, TopicNow
from dedup.settings import Security

TOPIC, TOPIC_ID = "orders", bytes(range(16))
METADATA, VERSIONS = MetadataRequest_v10.API_KEY, 18


class OneBroker:
    """A broker that knows one topic, and that responds to requests for metadata."""

    def __init__(self) -> None:
        self.port = self.connections = 0
        self.host = "127.0.0.1"
        """The name that the broker advertises."""
        self.nameless = 0
        """So many of the first responses to requests for metadata of version 5 name no broker."""
        self.silent_below = 0
        """The connections with a lower number get no responses."""
        self.reads_bytes = 1 << 20
        """Of a connection with a larger request, nothing more is read."""
        self.responded = threading.Semaphore(0)
        """Counts the responses to requests for metadata of version 10."""
        self.throttle_ms = 0
        """What the responses to requests for metadata of version 10 say; later requests wait for `muted_s`."""
        self.muted_s = 0.0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self):
        self._thread.start()
        starting = asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(starting, self._loop).result()
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_: object) -> None:
        async def end() -> None:
            self._server.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        own, self.connections = self.connections, self.connections + 1
        try:
            while True:
                (size,) = struct.unpack(">i", await reader.readexactly(4))
                if size > self.reads_bytes:
                    await asyncio.Event().wait()
                key, version, correlation = struct.unpack_from(">hhi", await reader.readexactly(size))
                if own < self.silent_below:
                    continue
                answer = struct.pack(">i", correlation) + self._answer(key, version)
                writer.write(struct.pack(">i", len(answer)) + answer)
                await writer.drain()
                if version == MetadataRequest_v10.API_VERSION:
                    self.responded.release()
                    await asyncio.sleep(self.muted_s)
        except (EOFError, ConnectionError):
            pass
        finally:
            writer.close()

    def _answer(self, key: int, version: int) -> bytes:
        if key == VERSIONS:
            return ApiVersionResponse_v0(0, [(METADATA, 0, 10), (VERSIONS, 0, 0)]).encode()
        if version == MetadataRequest_v5.API_VERSION:
            self.nameless -= 1
            brokers = [] if self.nameless >= 0 else [(0, self.host, self.port, None)]
            return MetadataRequest_v5.RESPONSE_TYPE(0, brokers, "c", 0, []).encode()
        partition = (0, 0, 0, 0, [0], [0], [], {})
        topic = (0, TOPIC, TOPIC_ID, False, [partition], 0, {})
        broker = (0, "127.0.0.1", self.port, None, {})
        return b"\0" + MetadataRequest_v10.RESPONSE_TYPE(self.throttle_ms, [broker], "c", 0, [topic], 0, {}).encode()


@pytest.fixture
def broker():
    with OneBroker() as running:
        yield running


@pytest.fixture
async def wire(broker, monkeypatch):
    monkeypatch.setattr(client_module, "_METADATA_WITHIN_S", 1.0)
    made = KafkaWire(Connection((f"127.0.0.1:{broker.port}",), Security(), request_timeout_ms=2_000))
    await made.start()
    yield made
    await made.stop()


async def test_a_broker_that_reads_nothing_does_not_hold_up_the_stop(broker):
    """Was: a worker whose broker was frozen committed, left the group, and never ended."""
    made = KafkaWire(Connection((f"127.0.0.1:{broker.port}",), Security()))
    await made.start()
    connection = await made._client._get_conn(0)
    request = broker.reads_bytes * 16
    connection._writer.write(struct.pack(">i", request) + bytes(request))
    async with asyncio.timeout(30):
        await made.stop()


async def test_a_connection_that_a_firewall_has_dropped_is_replaced(broker, wire):
    """Was: every check of the topics got no response until TCP gave up, after about 15 minutes."""
    assert await wire.topics((TOPIC,)) == {TOPIC: TopicNow(TOPIC_ID.hex(), 1)}
    broker.silent_below = broker.connections
    with pytest.raises(NoAnswer, match="did not answer"):
        await wire.topics((TOPIC,))
    assert await wire.topics((TOPIC,)) == {TOPIC: TopicNow(TOPIC_ID.hex(), 1)}


async def _checks_topics(wire: KafkaWire) -> object:
    return await wire.topics((TOPIC,))


async def _asks_leader(wire: KafkaWire) -> object:
    return await wire.send(0, metadata_request((TOPIC,)), "another lane")


@pytest.mark.parametrize("ask", [_checks_topics, _asks_leader])
async def test_a_response_that_arrives_while_a_flow_blocks_the_loop_is_read(broker, wire, ask):
    """Was: the request timed out, although its response had arrived, and the transaction was given up."""
    await ask(wire)
    asked = asyncio.ensure_future(ask(wire))
    broker.responded.acquire()
    while not broker.responded.acquire(timeout=0.1):  # noqa: ASYNC110  # the broker is in another thread
        await asyncio.sleep(0)
    time.sleep(2.4)  # noqa: ASYNC251  # longer than the request may take
    await asked


async def test_a_request_that_waits_because_of_a_quota_is_not_unanswered(broker, wire, caplog, monkeypatch):
    """Was: the connection was closed, every transaction was sent again, and no line of the log named the quota."""
    monkeypatch.setattr(connection_module, "_said_s", {})
    await _asks_leader(wire)
    broker.throttle_ms, broker.muted_s = 60_000, 2.4
    connections = broker.connections
    for _ in range(3):
        await _asks_leader(wire)
    assert broker.connections == connections
    (line,) = [line for line in caplog.messages if "throttles" in line]
    assert "by 60000 ms, because it exceeds its quota request_percentage" in line


def wire_to(broker: OneBroker, *, patience_ms: int = 30_000) -> KafkaWire:
    return KafkaWire(Connection((f"127.0.0.1:{broker.port}",), Security(), patience_ms=patience_ms))


async def test_a_broker_that_names_no_brokers_yet_is_asked_again(broker):
    """Was: an AssertionError of aiokafka, `Did we not perform bootstrap?`, at the first look for a coordinator."""
    broker.nameless = 2
    wire = wire_to(broker)
    await wire.start()
    assert wire.one_broker
    assert [each.port for each in wire._client.cluster.brokers()] == [broker.port]
    await wire.stop()


async def test_a_broker_that_names_no_brokers_in_time_is_told(broker):
    broker.nameless = 1_000
    with pytest.raises(BrokerUnavailable, match=r"a broker answers at .*, but it does not name any broker"):
        await wire_to(broker, patience_ms=0).start()


@pytest.mark.parametrize("host", [".svc", "kafka..example", "k" * 64])
async def test_a_broker_whose_advertised_name_cannot_be_looked_up_is_an_unreachable_one(broker, host, caplog):
    """Was: aiokafka's task that updates the metadata ended, and the worker waited for an update for ever."""
    broker.host = host
    wire = wire_to(broker)
    await wire.start()
    await asyncio.wait_for(wire.refresh(), 30)
    await asyncio.wait_for(wire.refresh(), 30)
    with pytest.raises(NoAnswer):
        await wire.topics((TOPIC,))
    assert f"broker 0 advertises {host!r}, which is not a host name. Correct its `advertised.listeners`" in caplog.text
    (finding,) = await diagnose(wire.connection, advertised(wire._client.cluster))
    assert finding.trouble is Trouble.NAME
    assert "advertised.listeners" in finding.sentence
    await wire.stop()
