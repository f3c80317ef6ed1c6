"""Converts the settings for reaching and authenticating a cluster to options of aiokafka's clients."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from aiokafka.abc import AbstractTokenProvider

if TYPE_CHECKING:
    from dedup.settings import Secret, Security, Settings

_REQUEST_TIMEOUT_MS: Final = 10_000
_PATIENCE_MS: Final = 30_000


class _Token(AbstractTokenProvider):  # type: ignore[misc]  # untyped base
    """Provides the token from the settings to every connection."""

    def __init__(self, secret: Secret) -> None:
        self._secret: Final = secret

    async def token(self) -> str:
        """Return the token."""
        return self._secret.get_secret_value()


@dataclass(frozen=True, slots=True)
class Connection:
    """How to reach a cluster: its brokers, credentials, and time limits."""

    brokers: tuple[str, ...]
    security: Security
    client_id: str = "dedup"
    request_timeout_ms: int = _REQUEST_TIMEOUT_MS
    patience_ms: int = _PATIENCE_MS
    """How long a process waits for a broker when it starts, before it fails."""

    @classmethod
    def of(cls, settings: Settings, *, client_id: str = "dedup") -> Connection:
        """Return the connection described by the settings."""
        return cls(settings.brokers, settings.security, client_id)

    def security_options(self) -> dict[str, Any]:
        """Return aiokafka's options for TLS and SASL. Host names are verified, and TLS is 1.2 or later."""
        options: dict[str, Any] = {"security_protocol": self.security.protocol}
        if self.security.protocol in {"SSL", "SASL_SSL"}:
            options["ssl_context"] = self._tls()
        if self.security.protocol.startswith("SASL"):
            options["sasl_mechanism"] = self.security.mechanism
        if self.security.mechanism == "OAUTHBEARER" and self.security.password is not None:
            options["sasl_oauth_token_provider"] = _Token(self.security.password)
        elif self.security.protocol.startswith("SASL"):
            options["sasl_plain_username"] = self.security.username
            options["sasl_plain_password"] = (
                self.security.password.get_secret_value() if self.security.password else None
            )
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

    def _tls(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.security.ca_file)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.security.cert_file:
            key_password = self.security.key_password.get_secret_value() if self.security.key_password else None
            context.load_cert_chain(self.security.cert_file, self.security.key_file, key_password)
        return context
