"""The shape of a config file: its keys, what each takes, what is published as the JSON Schema."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from dedup.quantities import DURATION_PATTERN, parse_duration

_BROKER: Final = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_WORKER_ID: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
_LAST_PORT: Final = 65_535
_PAGE_ADDRESS: Final = re.compile(r"https?://(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")
_WITH_PASSWORD: Final = re.compile(r"[a-z0-9+.-]+://[^/]*:[^/]*@.*", re.IGNORECASE | re.DOTALL)
_REFERENCE_PATTERN: Final = r"^\$\{(env|file):[^}]+\}$"


def _listed(value: Any) -> Any:  # noqa: ANN401 - whatever stands in the file
    """Take ``a:9092,b:9092`` for a list, as Kafka's own tools do."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


def _broker(text: str) -> str:
    match = _BROKER.fullmatch(text)
    if match is None or not 0 < int(match[2]) <= _LAST_PORT:
        raise ValueError(f'"{text}" is no broker; write host:port, such as kafka-1:9092')
    return text


def _some(brokers: list[str]) -> list[str]:
    if not brokers:
        raise ValueError("is an empty list; name at least one broker")
    return brokers


def _worker_id(text: str) -> str:
    if _WORKER_ID.fullmatch(text) is None:
        raise ValueError(f'"{text}" is no worker id; use a-z A-Z 0-9 "." "_" "-", at most 100 characters, no "." first')
    return text


def _page_address(text: str) -> str:
    if not _PAGE_ADDRESS.fullmatch(text):
        raise ValueError(f'"{text}" is no address of pages; write for example http://worker-1:6066')
    return text


def _place(text: str) -> str:
    if not text or "::" in text:
        raise ValueError(f'"{text}" is no place; write a directory, or a URL such as s3://bucket/path')
    if _WITH_PASSWORD.fullmatch(text):
        raise ValueError("holds a password; leave it out, and give it to the store's library by its own variables")
    return text


def _between(low: str, high: str) -> AfterValidator:
    def check(text: str) -> str:
        if not parse_duration(low) <= parse_duration(text) <= parse_duration(high):
            raise ValueError(f'"{text}" must be {low} to {high}')
        return text

    return AfterValidator(check)


def _number(low: int, high: int) -> AfterValidator:
    def check(number: int) -> int:
        if not low <= number <= high:
            raise ValueError(f'"{number}" must be {low} to {high}')
        return number

    return AfterValidator(check)


_DURATION: Final = WithJsonSchema({"type": "string", "pattern": DURATION_PATTERN})
SecretText = Annotated[str, WithJsonSchema({"type": "string", "pattern": _REFERENCE_PATTERN})]
Broker = Annotated[str, AfterValidator(_broker), WithJsonSchema({"type": "string", "pattern": f"^{_BROKER.pattern}$"})]


class _Keys(BaseModel):
    """A mapping that refuses keys it does not know and values that are nearly right."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)


class SecurityFile(_Keys):
    """How to reach the brokers and trust them."""

    protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = Field(
        default="PLAINTEXT", description="With SSL host names are verified; there is no switch for it."
    )
    mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"] | None = Field(
        default=None, description="SASL mechanism; needed with SASL_PLAINTEXT and SASL_SSL."
    )
    username: str | None = Field(default=None, description="SASL user.")
    password: SecretText | None = Field(
        default=None, description="SASL password, or the OAUTHBEARER token: ${env:NAME} or ${file:PATH}."
    )
    ca_file: str | None = Field(default=None, description="Certificates to trust (PEM). Default: the system's.")
    cert_file: str | None = Field(default=None, description="Own certificate (PEM), for mutual TLS.")
    key_file: str | None = Field(default=None, description="Its private key (PEM).")
    key_password: SecretText | None = Field(
        default=None, description="The key's password: ${env:NAME} or ${file:PATH}."
    )


class StateFile(_Keys):
    """Where state comes from beside the changelog."""

    checkpoint: Annotated[str, AfterValidator(_place)] | None = Field(
        default=None,
        description="A directory or URL with checkpoints (`dedup checkpoint`); a worker without local state begins "
        "with them, and reads from the changelog only what came after.",
    )


class TopicsFile(_Keys):
    """What topics are made with."""

    create: bool = Field(default=True, description="Whether `run` makes missing topics; `apply` always does.")
    replication_factor: Annotated[int, _number(1, 32_767)] | None = Field(
        default=None, description="Default: the brokers' default."
    )
    min_insync_replicas: Annotated[int, _number(1, 32_767)] | None = Field(
        default=None, description="Default: the brokers' default."
    )
    retention: Annotated[str, _between("1s", "36500d"), _DURATION] | None = Field(
        default=None,
        description="Of output, duplicates, conflicts. Default: the source topic's. Late, dead letters: the brokers'.",
    )
    partitions: Annotated[int, _number(1, 100_000)] | None = Field(
        default=None, description="Of the repartition topic. Default: the source topic's."
    )
    compression: Literal["none", "gzip", "snappy", "lz4", "zstd"] = Field(
        default="snappy", description="Of what is written. lz4 costs much CPU here."
    )


class WebFile(_Keys):
    """The worker's own pages: metrics, health, dashboard."""

    enabled: bool = Field(default=True, description="Whether there are any.")
    host: str = Field(default="127.0.0.1", description="Address to listen on; another than loopback needs a token.")
    port: Annotated[int, _number(0, _LAST_PORT)] = Field(default=6066, description="0: any free port.")
    token: SecretText | None = Field(default=None, description="Asked of every caller: ${env:NAME} or ${file:PATH}.")
    advertise: Annotated[str, AfterValidator(_page_address)] | None = Field(
        default=None, description="Where other workers and people find these pages. Default: the host and port above."
    )


class LogFile(_Keys):
    """What is logged, and how."""

    format: Literal["text", "json"] = Field(default="text", description="text for people, json for machines.")
    level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="The least that is logged.")


class SettingsFile(_Keys):
    """Where a worker runs: brokers, credentials, directories, intervals."""

    brokers: Annotated[list[Broker], BeforeValidator(_listed), AfterValidator(_some)] = Field(
        description="Where to find the cluster.", json_schema_extra={"minItems": 1}
    )
    security: SecurityFile = Field(default=SecurityFile(), description="How to reach the brokers and trust them.")
    state_dir: str = Field(default="state", description="Where state is kept; one directory per worker.")
    state: StateFile = Field(default=StateFile(), description="Where state comes from beside the changelog.")
    commit_interval: Annotated[str, _between("1ms", "60s"), _DURATION] = Field(
        default="100ms", description="How long a transaction stays open."
    )
    transaction_timeout: Annotated[str, _between("1s", "15m"), _DURATION] = Field(
        default="30s", description="After which the brokers end the transaction of a worker that fell silent."
    )
    session_timeout: Annotated[str, _between("1s", "30m"), _DURATION] = Field(
        default="10s", description="After which a silent worker's partitions go to others."
    )
    worker_id: Annotated[str, AfterValidator(_worker_id)] | None = Field(
        default=None, description="Static membership. Default: an id kept in the state directory."
    )
    topics: TopicsFile = Field(default=TopicsFile(), description="What topics are made with.")
    web: WebFile = Field(default=WebFile(), description="The worker's own pages.")
    log: LogFile = Field(default=LogFile(), description="What is logged, and how.")


def _takes_text(annotation: Any) -> bool:  # noqa: ANN401 - any type there is
    """Tell whether a key takes one text, bounded as it may be."""
    return annotation is str or (get_origin(annotation) is not list and any(map(_takes_text, get_args(annotation))))


_MODELS: Final[Mapping[str, type[BaseModel]]] = {
    "": SettingsFile,
    "security": SecurityFile,
    "state": StateFile,
    "topics": TopicsFile,
    "web": WebFile,
    "log": LogFile,
}
FIELDS: Final[Mapping[str, tuple[str, ...]]] = {holder: tuple(model.model_fields) for holder, model in _MODELS.items()}
"""The keys of each mapping, for did-you-mean."""
TEXTS: Final[frozenset[tuple[str | int, ...]]] = frozenset(
    (*([holder] if holder else []), name)
    for holder, model in _MODELS.items()
    for name, field in model.model_fields.items()
    if _takes_text(field.annotation)
)
"""The keys that take text, whose characters are kept: ``0042`` is a name."""
