"""Converts the settings to options for aiokafka's clients, and explains why a connection to a broker has failed.

aiokafka reports most problems with the host name, the network, TLS, or authentication as "unable to bootstrap".
`diagnose` connects to each broker separately to find the real cause. If a running process cannot connect to brokers,
`until_refused` finds out whether they refuse the process, because waiting would then be pointless.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import math
import socket
import ssl
import time
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from aiokafka import errors as kafka_errors
from aiokafka.abc import AbstractTokenProvider
from aiokafka.client import AIOKafkaClient, ConnectionGroup
from aiokafka.cluster import ClusterMetadata
from aiokafka.conn import AIOKafkaConnection, create_conn
from aiokafka.protocol.metadata import MetadataRequest

from dedup.errors import BrokerUnavailable, Problem, SettingsError
from dedup.kafka.outage_lines import AWAY

if TYPE_CHECKING:
    from dedup.settings import Secret, Security, Settings


class _Token(AbstractTokenProvider):  # type: ignore[misc]  # untyped base
    def __init__(self, secret: Secret) -> None:
        self._secret: Final = secret

    async def token(self) -> str:
        return self._secret.get_secret_value()


@dataclass(frozen=True)
class Connection:
    """Describes how to reach a cluster: the brokers, the credentials, and the time limits."""

    brokers: tuple[str, ...]
    security: Security
    client_id: str = "dedup"
    request_timeout_ms: int = 10_000
    patience_ms: int = 30_000
    """The time for which a starting process waits for a broker before the process fails."""

    @classmethod
    def of(cls, settings: Settings, *, client_id: str = "dedup") -> Connection:
        """Return the connection that the settings describe."""
        return cls(settings.brokers, settings.security, client_id)

    def security_options(self) -> dict[str, Any]:
        """Return aiokafka's options for TLS and SASL. TLS connections use TLS 1.2 or later and verify host names.

        Raises SettingsError if a file of certificates or keys cannot be used.
        """
        options: dict[str, Any] = {"security_protocol": self.security.protocol}
        if self.security.protocol in {"SSL", "SASL_SSL"}:
            options["ssl_context"] = self._tls
        if self.security.protocol.startswith("SASL"):
            options["sasl_mechanism"] = self.security.mechanism
        if self.security.mechanism == "OAUTHBEARER" and self.security.password is not None:
            options["sasl_oauth_token_provider"] = _Token(self.security.password)
        elif self.security.protocol.startswith("SASL"):
            password = self.security.password
            options["sasl_plain_username"] = self.security.username
            options["sasl_plain_password"] = password.get_secret_value() if password else None
        return options

    def client_options(self) -> dict[str, Any]:
        """Return the options of an `AIOKafkaClient`."""
        return {
            "bootstrap_servers": list(self.brokers),
            "client_id": self.client_id,
            "request_timeout_ms": self.request_timeout_ms,
            "metadata_max_age_ms": 30_000,
            **self.security_options(),
        }

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        """The TLS context. The files are read once, so that `diagnose` sees what the connection's clients see."""
        security = self.security
        context = _trusting(security.ca_file) if security.ca_file else ssl.create_default_context()
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if security.cert_file and security.key_file:
            _refuse_other_file("cert_file", security.cert_file, "CERTIFICATE")
            _refuse_other_file("key_file", security.key_file, "PRIVATE KEY")
            try:
                context.load_cert_chain(security.cert_file, security.key_file, self._key_password)
            except ssl.SSLError as error:
                why = f"security.key_password is wrong, or this file or {security.cert_file} is damaged"
                if error.reason == "KEY_VALUES_MISMATCH":
                    why = f"the key does not belong to the certificate in {security.cert_file}"
                _refuse_file("key_file", security.key_file, why)
            except ValueError as error:
                _refuse_file("key_file", security.key_file, str(error))
        return context

    def _key_password(self) -> str:
        """Return the password of the key. OpenSSL calls this function only if the key is encrypted.

        Raises ValueError if there is no password. Without this function, OpenSSL would ask for a password on the
        terminal.
        """
        if self.security.key_password is None:
            raise ValueError("the key is encrypted; set security.key_password")
        return self.security.key_password.get_secret_value()


def _trusting(ca_file: str) -> ssl.SSLContext:
    """Return a TLS context that trusts the CAs in a file. Raises SettingsError if the file cannot be used."""
    _refuse_other_file("ca_file", ca_file, "CERTIFICATE")
    try:
        return ssl.create_default_context(cafile=ca_file)
    except ssl.SSLError:
        _refuse_file("ca_file", ca_file, "a certificate in it is damaged")


def _refuse_other_file(key: str, path: str, kind: str) -> None:
    """Raise SettingsError unless a file can be read and contains a PEM block of the given kind."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        _refuse_file(key, path, error.strerror)
    if f"{kind}-----".encode() not in content:
        _refuse_file(key, path, f"it contains no {kind.lower()} in PEM format")


def _refuse_file(key: str, path: str, why: str | None) -> NoReturn:
    raise SettingsError([Problem(f"security.{key}", f"{path} cannot be used: {why}")])


_QUOTAS: Final = {0: "producer_byte_rate", 1: "consumer_byte_rate"}
"""Maps the API keys of Produce and Fetch to the quotas of these requests."""
_OTHER_QUOTA: Final = "request_percentage"
_SAY_EVERY_S: Final = 60.0
log: Final = logging.getLogger(__name__)


_said_s: Final[dict[str, float]] = {}
"""Maps each quota to the monotonic time, in seconds, at which the log last named it."""


def say_throttled(broker: str, api_key: int, throttled_ms: int) -> None:
    """Log that a broker throttles this client's requests of one kind, at most once a minute for each quota."""
    quota = _QUOTAS.get(api_key, _OTHER_QUOTA)
    now_s = time.monotonic()
    if now_s - _said_s.get(quota, -math.inf) < _SAY_EVERY_S:
        return
    _said_s[quota] = now_s
    log.warning(
        "broker %s throttles this client by %d ms, because it exceeds its quota %s. For that time, the broker reads "
        "nothing from this connection. Raise the quota with kafka-configs, or expect lag.",
        broker,
        throttled_ms,
        quota,
    )


def say_no_name(node_id: object, host: str) -> None:
    """Log that a broker advertises a host name that Python refuses to look up."""
    text = "broker %s advertises %r, which is not a host name. Correct its `advertised.listeners`, and restart it."
    log.warning(text, node_id, host, extra=AWAY)


_update: Final = AIOKafkaClient._metadata_update  # noqa: SLF001  # aiokafka has no option for this
_ASKING_ONLY: Final = partial(MetadataRequest, allow_auto_topic_creation=False)
_UPDATE_WITHOUT_CREATING: Final = types.FunctionType(
    _update.__code__, {**_update.__globals__, "MetadataRequest": _ASKING_ONLY}
)
"""aiokafka's own method, except that its requests do not make brokers create topics."""


def never_create_topics(client: AIOKafkaClient) -> None:
    """Make a client look up topics without creating them.

    By default, aiokafka lets brokers create each topic that it looks up. Unless `auto.create.topics.enable` is off,
    brokers then create the topic with their default partition count and retention. A topic that somebody deletes while
    a process runs would be recreated immediately.
    """
    client._metadata_update = types.MethodType(_UPDATE_WITHOUT_CREATING, client)  # noqa: SLF001


REFUSAL_LOOK_S: Final = 5.0
"""The interval, in seconds, at which `until_refused` checks whether brokers refuse new connections."""
PROBE_WITHIN_S: Final = 5.0
# ApiVersions v0 with correlation ID 0 and no client ID. Every listener answers this request without authentication.
_API_VERSIONS: Final = bytes.fromhex("0000000a0012000000000000ffff")
_HOST_CODES: Final = frozenset({62, 64})
_EXPIRED_CODES: Final = frozenset({9, 10})


class Trouble(enum.Enum):
    """A reason why a broker cannot be used.

    Each member's value is the message for the user, with placeholders for settings.
    """

    NAME = "the host name is not known here. Correct `brokers`, or the name server"
    UNREACHABLE = "nothing can be reached there. Start the broker, correct `brokers`, or open the firewall"
    SILENT = "something listens there, but does not respond like Kafka. Correct the port in `brokers`"
    PLAINTEXT_TO_TLS = "the listener speaks TLS, but security.protocol is {protocol}. Use SSL or SASL_SSL"
    TLS_TO_PLAINTEXT = (
        "the listener does not speak TLS, but security.protocol is {protocol}. Use the TLS listener's port in "
        "`brokers`, or set security.protocol to PLAINTEXT or SASL_PLAINTEXT"
    )
    UNTRUSTED = (
        "the broker's certificate is not signed by a CA in security.ca_file ({ca_file}). Set security.ca_file to "
        "the CA that signed the certificate"
    )
    WRONG_HOST = (
        "the broker's certificate is for another host name. In `brokers`, use a name that the certificate contains, or "
        "give the broker a certificate for this name"
    )
    EXPIRED = "the broker's certificate has expired or is not valid yet. Renew it, or correct this machine's clock"
    CLIENT_CERTIFICATE = "the broker {certificate}"
    TLS = "the TLS handshake failed. Compare the TLS versions (1.2 or later here) and ciphers of both sides"
    CREDENTIALS = (
        "the broker refuses the {mechanism} credentials of {username}. Correct security.username and security.password"
    )
    MECHANISM = "the broker does not offer {mechanism}. Set security.mechanism to one that the broker has enabled"
    SASL_WANTED = (
        "the listener requires SASL, but security.protocol is {protocol}. Set security.protocol to SASL_{transport}, "
        "and set mechanism, username, and password"
    )
    NO_SASL = (
        "the listener does not use SASL, but security.protocol is {protocol}. Set security.protocol to {transport}, or "
        "use the SASL listener's port"
    )


PASSING: Final = frozenset({Trouble.NAME, Trouble.UNREACHABLE, Trouble.SILENT})
"""Problems that may be temporary, for example while a broker or a name server starts. Other problems are permanent."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A broker that cannot be used, and the reason why."""

    broker: str
    trouble: Trouble
    sentence: str

    @property
    def passing(self) -> bool:
        """True if the problem may be temporary."""
        return self.trouble in PASSING


async def diagnose(connection: Connection, brokers: Sequence[str] = ()) -> list[Diagnosis]:
    """Return a diagnosis for each broker that cannot be used, or an empty list if all brokers can be used.

    ``brokers`` are the addresses to examine. The default is the connection's addresses.
    """
    found = await asyncio.gather(*(_examined(connection, broker) for broker in brokers or connection.brokers))
    return [finding for finding in found if finding is not None]


def advertised(cluster: ClusterMetadata) -> tuple[str, ...]:
    """Return the addresses that the brokers of a cluster advertise, as host:port."""
    named = {
        f"[{each.host}]:{each.port}" if ":" in each.host else f"{each.host}:{each.port}" for each in cluster.brokers()
    }
    return tuple(sorted(named))


def most_telling(findings: Sequence[Diagnosis]) -> Diagnosis | None:
    """Return the most important diagnosis, or None if there are no diagnoses.

    A permanent problem is more important than a temporary one.
    """
    return min(findings, key=lambda finding: finding.passing, default=None)


async def connect(connection: Connection, client: AIOKafkaClient, attempt: Callable[[], Awaitable[None]]) -> None:
    """Repeat ``attempt``, which connects a client of aiokafka, until a broker responds and names the cluster's brokers.

    A broker that is starting may not know any broker yet, and a client that knows no broker cannot look up a
    coordinator. Raises BrokerUnavailable if the brokers are not known within `patience_ms`, or immediately after a
    permanent error, such as a wrong password or an untrusted certificate.
    """
    deadline = asyncio.get_running_loop().time() + connection.patience_ms / 1000
    while True:
        try:
            await attempt()
            if client.cluster.brokers():
                return
            attempt = client.bootstrap  # a consumer refuses to be started twice
            await _refuse_nameless(connection, client, last=asyncio.get_running_loop().time() >= deadline)
        except kafka_errors.KafkaConnectionError as error:
            found = most_telling(await diagnose(connection))
            if found is not None and not found.passing:
                raise BrokerUnavailable(f"{found.sentence}.") from error
            if asyncio.get_running_loop().time() >= deadline:
                at = f"no broker answers at {', '.join(connection.brokers)}"
                why = f" ({error}). Correct `brokers` in the config" if found is None else f". {found.sentence}"
                raise BrokerUnavailable(f"{at}{why}. `dedup broker` starts one on this machine.") from error
        await asyncio.sleep(0.2)


async def _refuse_nameless(connection: Connection, client: AIOKafkaClient, *, last: bool) -> None:
    """Close the connection that a client keeps to a broker that names no brokers. Raises BrokerUnavailable if this was
    the last attempt.
    """
    kept = client._conns.pop(("bootstrap", ConnectionGroup.DEFAULT), None)  # noqa: SLF001  # aiokafka has no public API for this
    if kept is not None:
        await kept.close()
    if last:
        raise BrokerUnavailable(
            f"a broker answers at {', '.join(connection.brokers)}, but it does not name any broker of its cluster, "
            "for example because it is still starting. Look at its log; then run the command again."
        )


async def until_refused(connection: Connection, client: AIOKafkaClient, failed: set[object]) -> NoReturn:
    """Raise BrokerUnavailable if brokers refuse new connections for `patience_ms` and no broker accepts one.

    ``failed`` contains the nodes to which the client could not connect since the last check, which empties the set. The
    client itself does not distinguish a broker that refuses it from a broker that does not respond. Brokers that merely
    do not respond never end this function. A refusal counts only if it lasts, because a starting broker may not know
    its users yet.
    """
    since_s = math.inf
    while True:
        await asyncio.sleep(REFUSAL_LOOK_S)
        brokers = advertised(client.cluster)
        # An idle process tries to connect only twice a minute, so after a refusal, each check contacts the brokers
        # again.
        findings = await diagnose(connection, brokers) if failed or since_s < math.inf else []
        failed.clear()
        refusals = [each.sentence for each in findings if _refuses(each, connection)]
        if refusals:
            log.warning("%s", refusals[0], extra=AWAY)
        now_s = time.monotonic()
        since_s = min(since_s, now_s) if refusals and len(findings) == len(brokers) else math.inf
        if now_s - since_s >= connection.patience_ms / 1000:
            raise BrokerUnavailable(
                f"{refusals[0]}. No broker has accepted a new connection for {now_s - since_s:.0f} s. A process reads "
                "its credentials and certificates when it starts, so after a change, start it again. Nothing is lost."
            )


def _refuses(found: Diagnosis, connection: Connection) -> bool:
    """Return whether a broker that accepted this process earlier now refuses it.

    A proxy whose broker is down closes each connection. Therefore, a problem that is only inferred from a closed
    connection carries less weight here than during startup.
    """
    if found.trouble is Trouble.CLIENT_CERTIFICATE:
        return connection.security.cert_file is not None
    return not found.passing and found.trouble is not Trouble.TLS


@contextlib.asynccontextmanager
async def probing(connection: Connection, host: str, port: int) -> AsyncIterator[AIOKafkaConnection]:
    """Connect to one broker and read its API versions. Exceptions from aiokafka and the socket are not caught."""
    made = await create_conn(
        host,
        port,
        client_id=connection.client_id,
        request_timeout_ms=int(PROBE_WITHIN_S * 1000),
        **connection.security_options(),
    )
    try:
        yield made
    finally:
        made.close()


async def _examined(connection: Connection, broker: str) -> Diagnosis | None:
    host, _, port_text = broker.rpartition(":")
    host, port = host.strip("[]"), int(port_text)
    try:
        async with probing(connection, host, port) as made:
            await made.send(MetadataRequest([]))
    except (kafka_errors.KafkaError, OSError, TimeoutError, EOFError, UnicodeError) as error:
        trouble, detail = await _named(connection, host, port, error)
        return Diagnosis(broker, trouble, f"{broker}: {_sentence(trouble, connection)}{detail}")
    return None


async def _named(connection: Connection, host: str, port: int, error: BaseException) -> tuple[Trouble, str]:
    """Return the problem that an error indicates, and a detail for the report if the error contains one."""
    match error:
        case socket.gaierror():
            return Trouble.NAME, f" ({error.strerror})"
        case UnicodeError():  # an advertised name; `Settings` refuses such a name in `brokers`
            return Trouble.NAME, " (it is not a host name). Correct the broker's `advertised.listeners`"
        case ssl.SSLCertVerificationError():
            return _of_certificate(error), f" ({error.verify_message})"
        case kafka_errors.SaslAuthenticationFailed() | kafka_errors.AuthenticationFailedError():
            return Trouble.CREDENTIALS, ""
        case kafka_errors.UnsupportedSaslMechanismError():
            return Trouble.MECHANISM, ""
        case kafka_errors.IllegalSaslStateError():
            return Trouble.NO_SASL, ""
        case ConnectionRefusedError() | ConnectionAbortedError():
            return Trouble.UNREACHABLE, " (connection refused)"
        case TimeoutError():
            # A broker that refuses a client closes the connection, so a timeout is not a refusal.
            return await _of_network(host, port)
        case _:
            return await _probed(connection, host, port)


async def _probed(connection: Connection, host: str, port: int) -> tuple[Trouble, str]:
    """Return the problem of a connection whose error was not specific, and a detail for the report."""
    if connection.security.protocol.endswith("SSL"):
        return await _of_tls(connection, host, port)
    if await _handshake(host, port, _trusting_all()) is None:
        return Trouble.PLAINTEXT_TO_TLS, ""
    if await _answers(host, port, None):
        return Trouble.SASL_WANTED if connection.security.protocol == "PLAINTEXT" else Trouble.NO_SASL, ""
    return await _of_network(host, port)


async def _of_tls(connection: Connection, host: str, port: int) -> tuple[Trouble, str]:
    context = connection.security_options()["ssl_context"]
    failed = await _handshake(host, port, context)
    match failed:
        case None:
            # With TLS 1.3, the client must read to learn that the broker has rejected its certificate.
            answers = await _answers(host, port, context)
            if answers is None:
                return Trouble.SILENT, ""
            return Trouble.SASL_WANTED if answers else Trouble.CLIENT_CERTIFICATE, ""
        case ssl.SSLCertVerificationError():
            return _of_certificate(failed), f" ({failed.verify_message})"
        case TimeoutError():
            return Trouble.SILENT, ""
        case _:
            pass
    if await _answers(host, port, None):
        return Trouble.TLS_TO_PLAINTEXT, ""
    if isinstance(failed, ssl.SSLError) and "ALERT" in str(failed.reason) and "CERTIFICATE" in str(failed.reason):
        return Trouble.CLIENT_CERTIFICATE, ""
    trouble, detail = await _of_network(host, port)
    return (trouble, detail) if trouble is not Trouble.SILENT else (Trouble.TLS, f" ({failed})")


def _of_certificate(error: ssl.SSLCertVerificationError) -> Trouble:
    if error.verify_code in _HOST_CODES:
        return Trouble.WRONG_HOST
    return Trouble.EXPIRED if error.verify_code in _EXPIRED_CODES else Trouble.UNTRUSTED


@contextlib.asynccontextmanager
async def _opened(
    host: str, port: int, context: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect to a listener for at most `PROBE_WITHIN_S` seconds, over TLS if a context is given."""
    async with asyncio.timeout(PROBE_WITHIN_S):
        reader, writer = await asyncio.open_connection(host, port, ssl=context)
        try:
            yield reader, writer
        finally:
            writer.close()


async def _of_network(host: str, port: int) -> tuple[Trouble, str]:
    try:
        async with _opened(host, port):
            return Trouble.SILENT, ""
    except OSError as error:
        return Trouble.UNREACHABLE, f" ({error.strerror or type(error).__name__})"


def _trusting_all() -> ssl.SSLContext:
    """Return a TLS context that accepts any certificate, for testing whether a listener uses TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def _handshake(host: str, port: int, context: ssl.SSLContext) -> OSError | None:
    """Try a TLS handshake. Return the error that ended the handshake, or None if the handshake succeeded."""
    try:
        async with _opened(host, port, context) as (_, writer):
            pass
    except OSError as error:
        return error
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return None


async def _answers(host: str, port: int, context: ssl.SSLContext | None) -> bool | None:
    """Return whether the listener responds to an ApiVersions request. The request is sent over TLS if a context is
    given.

    If the listener neither responds nor closes the connection in time, the result is None.
    """
    try:
        async with _opened(host, port, context) as (reader, writer):
            writer.write(_API_VERSIONS)
            answer = await reader.readexactly(8)
    except TimeoutError:
        return None
    except (OSError, EOFError):
        return False
    # The response begins with its length and the request's correlation ID.
    return answer[4:] == bytes(4)


def _sentence(trouble: Trouble, connection: Connection) -> str:
    security = connection.security
    return trouble.value.format(
        protocol=security.protocol,
        transport="SSL" if security.protocol.endswith("SSL") else "PLAINTEXT",
        mechanism=security.mechanism,
        username=security.username or "this token",
        ca_file=security.ca_file or "not set, so the system's CAs apply",
        certificate=(
            "requires a client certificate, but none is set. Set security.cert_file and key_file"
            if security.cert_file is None
            else f"rejects the client certificate {security.cert_file}. Use one of a CA that the broker trusts, "
            "and that has not expired"
        ),
    )
