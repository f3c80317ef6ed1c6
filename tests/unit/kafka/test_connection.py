"""What stands between us and a listener, by listeners that are not Kafka; the rest is in tests/chaos/test_security.py."""

import asyncio

import pytest

from dedup.kafka import connection as diagnosing
from dedup.kafka.connection import PASSING, Connection, Diagnosis, Trouble, diagnose, most_telling
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
