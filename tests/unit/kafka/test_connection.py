"""What stands between us and a listener, by listeners that are not Kafka; the rest is in tests/chaos/test_security.py."""

import asyncio
import ssl
import subprocess
from types import SimpleNamespace

import pytest
from aiokafka.cluster import ClusterMetadata
from aiokafka.structs import BrokerMetadata

from dedup.errors import BrokerUnavailable, SettingsError
from dedup.kafka import connection as diagnosing
from dedup.kafka.connection import PASSING, Connection, Diagnosis, Trouble, diagnose, most_telling, until_refused
from dedup.settings import Secret, Security


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


@pytest.fixture(scope="module")
def pem(tmp_path_factory):
    """Return a directory with two certificates with their keys, of which b.key is encrypted, and unusable files."""
    directory = tmp_path_factory.mktemp("pem")
    (directory / "text.pem").write_text("nothing yet")
    (directory / "bad.pem").write_text("-----BEGIN CERTIFICATE-----\nABCD\n-----END CERTIFICATE-----\n")
    new = ("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", "/CN=me")
    new += ("-addext", "subjectAltName=IP:127.0.0.1")
    for name, protect in {"a": ("-nodes",), "b": ("-passout", "pass:right")}.items():
        files = ("-keyout", directory / f"{name}.key", "-out", directory / f"{name}.pem")
        subprocess.run([*new, *protect, *files], check=True, capture_output=True)
    return directory


@pytest.mark.parametrize(
    ("ca", "cert", "key", "password", "says"),
    [
        ("typo.pem", "", "", None, "security.ca_file: {}/typo.pem cannot be used: No such file or directory"),
        ("text.pem", "", "", None, "security.ca_file: {}/text.pem cannot be used: it contains no certificate in PEM"),
        ("bad.pem", "", "", None, "security.ca_file: {}/bad.pem cannot be used: a certificate in it is damaged"),
        ("a.pem", "typo.pem", "a.key", None, "security.cert_file: {}/typo.pem cannot be used: No such file"),
        ("a.pem", "a.key", "a.key", None, "security.cert_file: {}/a.key cannot be used: it contains no certificate"),
        ("a.pem", "a.pem", ".", None, "security.key_file: {}/. cannot be used: Is a directory"),
        ("a.pem", "a.pem", "a.pem", None, "security.key_file: {}/a.pem cannot be used: it contains no private key"),
        ("a.pem", "b.pem", "a.key", None, "security.key_file: {}/a.key cannot be used: the key does not belong to the"),
        ("a.pem", "b.pem", "b.key", None, "security.key_file: {}/b.key cannot be used: the key is encrypted; set sec"),
        (
            "a.pem",
            "b.pem",
            "b.key",
            "wr0ng",
            "security.key_file: {}/b.key cannot be used: security.key_password is wrong",
        ),
        (
            "a.pem",
            "b.pem",
            "b.key",
            "n" * 2000,
            "security.key_file: {}/b.key cannot be used: password cannot be longer",
        ),
        (
            "a.pem",
            "bad.pem",
            "a.key",
            None,
            "security.key_file: {}/a.key cannot be used: security.key_password is wrong",
        ),
        ("a.pem", "b.pem", "b.key", "right", None),
    ],
)
async def test_a_tls_file_that_cannot_be_used_is_named(pem, ca, cert, key, password, says):
    """Was: a traceback without the file's name, and with an encrypted key, OpenSSL asked for its password."""
    files = {"ca_file": ca, "cert_file": cert, "key_file": key}
    files = {name: f"{pem}/{file}" if file else None for name, file in files.items()}
    security = Security(protocol="SSL", key_password=password and Secret(password), **files)
    connection = Connection(("127.0.0.1:1",), security)
    if says is None:
        assert connection.security_options()["ssl_context"].get_ca_certs()
        return
    with pytest.raises(SettingsError) as wrong:
        await diagnose(connection)
    assert str(wrong.value).startswith(says.format(pem))
    assert password is None or password not in str(wrong.value)


async def test_a_broker_that_is_too_slow_to_answer_refuses_nothing(pem):
    """Was: taken for one that rejects the client certificate."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pem / "a.pem", pem / "a.key")

    async def silent(reader, writer):
        await reader.read()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0, ssl=context) as server:
        security = Security(protocol="SSL", ca_file=str(pem / "a.pem"))
        connection = Connection((f"127.0.0.1:{server.sockets[0].getsockname()[1]}",), security)
        (finding,) = await diagnose(connection)
    assert finding.trouble is Trouble.SILENT


class Refusals:
    """Two brokers, and what each look finds at them, one look every 10 s."""

    def __init__(self, monkeypatch, *looks):
        self._looks = iter(looks)
        self.looked = 0
        cluster = ClusterMetadata()
        cluster._brokers.update((number, BrokerMetadata(number, "b", number, None)) for number in (1, 2))
        self.client = SimpleNamespace(cluster=cluster)
        monkeypatch.setattr(diagnosing, "REFUSAL_LOOK_S", 0)
        monkeypatch.setattr(diagnosing, "diagnose", self._diagnose)
        monkeypatch.setattr(diagnosing, "time", SimpleNamespace(monotonic=lambda: 10.0 * self.looked))

    async def _diagnose(self, _connection, brokers):
        assert brokers == ("b:1", "b:2")
        self.looked += 1
        return [Diagnosis(broker, each, each.name) for broker, each in zip(brokers, next(self._looks), strict=False)]


class Always(set):
    """A connection attempt fails again before the next look."""

    def clear(self):
        pass


DOWN, REFUSED, ROLLED = [[Trouble.UNREACHABLE] * 2], [[Trouble.CREDENTIALS] * 2], [[Trouble.CREDENTIALS]]
ROLLING = [[Trouble.UNREACHABLE, Trouble.CREDENTIALS]]
PROXY = [[Trouble.TLS] * 2, [Trouble.CLIENT_CERTIFICATE] * 2]


@pytest.mark.parametrize(
    ("looks", "ends_after"),
    [
        ([*REFUSED * 9], 4),
        ([*ROLLING * 9], 4),
        ([*DOWN * 99, *ROLLING * 9], 103),
        ([*REFUSED * 3, *DOWN, *REFUSED * 3, *ROLLED, *REFUSED * 9], 12),
        ([*PROXY * 9, *REFUSED * 9], 22),
    ],
    ids=["refused", "one refuses, one is down", "down", "refused for a moment", "behind a proxy"],
)
async def test_a_process_that_all_brokers_refuse_for_30_s_ends(monkeypatch, caplog, looks, ends_after):
    """Was: it waited for ever, although a new start would have read the changed password from its file."""
    refusals = Refusals(monkeypatch, *looks)
    connection = Connection(("unused:1",), Security(protocol="SSL"))
    with pytest.raises(BrokerUnavailable, match=r"CREDENTIALS\. No broker has accepted .* 30 s\. .* start it again"):
        await until_refused(connection, refusals.client, {1} if looks == REFUSED * 9 else Always({1}))
    assert refusals.looked == ends_after
    assert {each.outage for each in caplog.records} == {"away"}, "logged once a minute"


async def test_brokers_are_not_examined_while_connections_can_be_made(monkeypatch):
    refusals, brokers = Refusals(monkeypatch), iter([{}] * 3)
    refusals.client.cluster.brokers = lambda: next(brokers)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await until_refused(Connection(("unused:1",), Security()), refusals.client, set())
    assert refusals.looked == 0
