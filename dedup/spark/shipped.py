"""Settings on their way to the executors: a secret refuses to be pickled, and must get there all the same."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

from dedup.settings import Secret, Settings, Web


@dataclass(frozen=True, slots=True)
class ShippedSettings:
    """Settings with their secrets apart; sent inside a Spark task, over Spark's own connections.

    Encrypt those (`spark.network.crypto.enabled`) where the network is not trusted. No repr shows a secret.
    """

    plain: Settings
    password: str | None = field(repr=False)
    key_password: str | None = field(repr=False)

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Return the settings ready to be pickled; what only a worker's web pages need is left out."""
        security = settings.security
        plain = replace(settings, security=replace(security, password=None, key_password=None), web=Web())
        return cls(plain, _revealed(security.password), _revealed(security.key_password))

    def reveal(self) -> Settings:
        """Return the settings as they were."""
        security = replace(
            self.plain.security, password=_secret(self.password), key_password=_secret(self.key_password)
        )
        return replace(self.plain, security=security)


def _revealed(secret: Secret | None) -> str | None:
    return None if secret is None else secret.reveal()


def _secret(text: str | None) -> Secret | None:
    return None if text is None else Secret(text)
