"""The settings of a cluster as options of Spark's Kafka source."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from dedup.errors import Problem, SettingsError
from dedup.settings import Security, Settings

_LOGIN: Final[Mapping[str, str]] = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
}


def kafka_options(settings: Settings) -> dict[str, str]:
    """Return the options that reach and trust the brokers; certificates travel inside them, as PEM text.

    Raises SettingsError for what Spark's connector can not be told.
    """
    security = settings.security
    options = {
        "kafka.bootstrap.servers": ",".join(settings.brokers),
        "kafka.security.protocol": security.protocol,
        # What an aborted transaction left must never be judged.
        "kafka.isolation.level": "read_committed",
        "includeHeaders": "true",
        "failOnDataLoss": "true",
    }
    if security.protocol.endswith("SSL"):
        options |= _tls(security)
    if security.protocol.startswith("SASL"):
        options |= _sasl(security)
    return options


def _tls(security: Security) -> dict[str, str]:
    options: dict[str, str] = {}
    if security.ca_file:
        options |= {"kafka.ssl.truststore.type": "PEM", "kafka.ssl.truststore.certificates": _text(security.ca_file)}
    if security.cert_file and security.key_file:
        options |= {
            "kafka.ssl.keystore.type": "PEM",
            "kafka.ssl.keystore.certificate.chain": _text(security.cert_file),
            "kafka.ssl.keystore.key": _text(security.key_file),
        }
    if security.key_password:
        options["kafka.ssl.key.password"] = security.key_password.reveal()
    return options


def _sasl(security: Security) -> dict[str, str]:
    module = _LOGIN.get(security.mechanism or "")
    if module is None or security.password is None or security.username is None:
        raise SettingsError(
            [
                Problem(
                    "security.mechanism",
                    f"{security.mechanism} can not be used with Spark's Kafka source; use one of {', '.join(_LOGIN)}",
                )
            ]
        )
    user, password = (_quoted(text) for text in (security.username, security.password.reveal()))
    return {
        "kafka.sasl.mechanism": security.mechanism or "",
        "kafka.sasl.jaas.config": f"{module} required username={user} password={password};",
    }


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError([Problem(path, f"can not be read as PEM text: {error}; name a PEM file")]) from error
