"""What stands between us and a listener, by listeners that are not Kafka; the rest is in tests/chaos/test_security.py."""

import asyncio

import pytest
from aiokafka.client import AIOKafkaClient
from aiokafka.structs import BrokerMetadata

from dedup.kafka import connection as diagnosing
from dedup.kafka.connection import PASSING, Connection, Diagnosis, Trouble, back_off, diagnose, most_telling
from dedup.settings import Security


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(diagnosing, "PROBE_WITHIN_S", 0.3)


async def found_at(*brokers: str, protocol="PLAINTEXT"):
    return await diagnose(Connection(brokers, Security(protocol=protocol)))


async def test_nothing_listens():
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    (finding,) = await found_at(f"127.0.0.1:{port}")
    assert finding.trouble is Trouble.UNREACHABLE
    assert finding.passing
    assert f"127.0.0.1:{port}: nothing can be reached there" in finding.sentence


async def test_the_name_is_unknown():
    (finding,) = await found_at("no-such-host.invalid:9092")
    assert finding.trouble is Trouble.NAME


@pytest.mark.parametrize("protocol", ["PLAINTEXT", "SSL"])
async def test_something_else_listens(protocol):
    async def silent(reader, writer):
        await reader.read()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        (finding,) = await found_at(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", protocol=protocol)
    assert finding.trouble in {Trouble.SILENT, Trouble.TLS}
    assert "Traceback" not in finding.sentence


async def test_each_broker_has_a_finding_of_its_own():
    found = await found_at("no-such-host.invalid:1", "127.0.0.1:1")
    assert [each.trouble for each in found] == [Trouble.NAME, Trouble.UNREACHABLE]


def test_what_waiting_does_not_cure_is_told_first():
    passing, lasting = Diagnosis("a", Trouble.UNREACHABLE, ""), Diagnosis("b", Trouble.CREDENTIALS, "")
    assert most_telling([passing, lasting]) is lasting
    assert most_telling([passing]) is passing
    assert most_telling([]) is None
    assert lasting.trouble not in PASSING


@pytest.mark.parametrize("trouble", Trouble)
@pytest.mark.parametrize("protocol", ["PLAINTEXT", "SSL", "SASL_SSL"])
def test_every_trouble_has_a_sentence_that_says_what_to_do(trouble, protocol):
    mechanism = "PLAIN" if protocol == "SASL_SSL" else None
    connection = Connection(("b:1",), Security(protocol=protocol, mechanism=mechanism, username="me"))
    text = diagnosing._sentence(trouble, connection)
    assert ". " in text
    assert "None" not in text or protocol != "SASL_SSL"


class Listener:
    """Stands for aiokafka's `create_conn`: notes when it was asked, and refuses while it is closed."""

    def __init__(self):
        self.asked_s, self.open, self.up = [], False, True

    async def __call__(self, *_, **__):
        self.asked_s.append(asyncio.get_running_loop().time())
        await asyncio.sleep(0)
        if not self.open:
            raise ConnectionRefusedError
        return self

    def connected(self):
        return self.up


@pytest.fixture
async def listener(monkeypatch):
    made = Listener()
    monkeypatch.setattr("aiokafka.client.create_conn", made)
    return made


NODE = 7


def client():
    made = AIOKafkaClient()
    made.cluster._brokers[NODE] = BrokerMetadata(NODE, "127.0.0.1", 1, None)
    back_off(made)
    return made


async def until_ready(client):
    while not await client.ready(NODE):  # noqa: ASYNC110  # nothing but an attempt tells
        await asyncio.sleep(0.001)


async def test_an_unreachable_node_is_tried_after_pauses_that_double(listener):
    one = client()
    while len(listener.asked_s) < 5:
        # Several requests at once, as a worker's.
        assert not any(await asyncio.gather(*(one.ready(NODE) for _ in range(3))))
        await asyncio.sleep(0.001)
    # The first three were under way before the first one had failed.
    first_s, _, _, second_s, third_s = listener.asked_s
    assert second_s - first_s >= 0.05
    assert third_s - second_s >= 0.1


async def test_a_node_that_is_reachable_again_is_used_at_once(listener):
    one = client()
    while len(listener.asked_s) < 3:
        assert not await one.ready(NODE)
        await asyncio.sleep(0.001)
    listener.open = True
    await until_ready(one)
    asked = len(listener.asked_s)
    assert await one.ready(NODE)
    assert len(listener.asked_s) == asked
    listener.up = False
    # The connection was lost, and the next attempt needs no pause.
    assert await one.ready(NODE)
    assert len(listener.asked_s) == asked + 1


async def test_a_connection_that_is_open_is_used_while_another_one_to_its_node_fails(listener):
    one = client()
    listener.open = True
    assert await one.ready(NODE)
    listener.open = False
    assert not await one.ready(NODE, group="restore")
    assert not await one.ready(NODE, group="restore")
    assert await one.ready(NODE)
