"""Where a worker runs: the config file, `--set` and `DEDUP_*`, checked and complete.

Later wins: defaults, the file, the environment, `--set`. ``DEDUP_WEB__PORT=0`` is ``web.port: 0``. A secret is never
written down: it is ``${env:NAME}`` or ``${file:PATH}``, and no repr, message or log shows it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import ValidationError

from dedup.document import At, Document, did_you_mean, dotted, in_order, read, told
from dedup.errors import Problem, SettingsError
from dedup.quantities import parse_duration
from dedup.settings_file import FIELDS, TEXTS, SettingsFile

DEFAULT_CONFIG: Final = Path("config/local.yaml")
"""Read when no file is named and this one is there."""
PREFIX: Final = "DEDUP_"
BROKER_DEFAULT: Final = -1
"""A replication factor that leaves the choice to the brokers, in Kafka's own protocol (KIP-464)."""

_NOT_SETTINGS: Final = ("DEDUP_CRASH_", "DEDUP_TEST_", "DEDUP_BENCH_", "DEDUP_DEMO_", "DEDUP_JDBC_")
_SECRETS: Final[frozenset[At]] = frozenset({("security", "password"), ("security", "key_password"), ("web", "token")})
_REFERENCE: Final = re.compile(r"\$\{([a-z]*):([^}]*)\}")
_MOST_SECRET_BYTES: Final = 65_536

Protocol = Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]
Mechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"]


class Secret:
    """A text that is not shown; `reveal` is called where it is handed to a library, nowhere else."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text: Final = text

    def reveal(self) -> str:
        """Return the text itself."""
        return self._text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._text == self._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __repr__(self) -> str:
        return "Secret(***)"

    def __reduce__(self) -> Any:  # noqa: ANN401 - the signature of object
        raise TypeError("a secret is not written anywhere")


@dataclass(frozen=True, slots=True)
class Security:
    """How to reach the brokers and trust them."""

    protocol: Protocol = "PLAINTEXT"
    mechanism: Mechanism | None = None
    username: str | None = None
    password: Secret | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    key_password: Secret | None = None


@dataclass(frozen=True, slots=True)
class TopicDefaults:
    """What topics are made with."""

    create: bool = True
    replication_factor: int = BROKER_DEFAULT
    min_insync_replicas: int | None = None
    """None: the brokers' default."""
    retention_ms: int | None = None
    """Of the output and side topics; None: the source topic's."""
    partitions: int | None = None
    """Of the repartition topic; None: the source topic's."""
    compression: str = "snappy"


@dataclass(frozen=True, slots=True)
class Web:
    """The worker's own pages."""

    enabled: bool = True
    host: str = "127.0.0.1"
    port: int = 6066
    token: Secret | None = None
    advertise: str | None = None
    """Where other workers and people find these pages; None: at the address it listens on."""


@dataclass(frozen=True, slots=True)
class Log:
    """What is logged, and how."""

    format: Literal["text", "json"] = "text"
    level: Literal["debug", "info", "warning", "error"] = "info"


@dataclass(frozen=True, slots=True)
class Settings:
    """Where a worker runs."""

    brokers: tuple[str, ...]
    security: Security = field(default_factory=Security)
    state_dir: Path = Path("state")
    checkpoint: str | None = None
    """Where checkpoints lie, to begin with where there is no state; None: nowhere."""
    commit_interval_ms: int = 100
    transaction_timeout_ms: int = 30_000
    session_timeout_ms: int = 10_000
    worker_id: str | None = None
    topics: TopicDefaults = field(default_factory=TopicDefaults)
    web: Web = field(default_factory=Web)
    log: Log = field(default_factory=Log)


def load_settings(path: Path | None, overrides: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Return the settings of a config file under the environment's and the command line's overrides.

    Without a path `config/local.yaml` is read if it is there. Raises SettingsError with every problem.
    """
    if path is None and DEFAULT_CONFIG.is_file():
        path = DEFAULT_CONFIG
    document = Document("the settings", {}) if path is None else _read_file(path)
    problems = document.problems
    if document.value is None and problems:
        raise SettingsError(problems)
    if not isinstance(document.value, dict):
        if document.value is not None:
            problems.append(Problem(document.place(()), "must be a mapping of keys to values; begin with `brokers:`"))
        document.value = {}
    problems.extend(_plain_secrets(document))
    problems.extend(_from_environment(document, environ))
    problems.extend(_from_command_line(document, overrides))
    resolved: dict[str, str] = {}
    problems.extend(_resolve(document, environ, resolved))
    checked: SettingsFile | None = None
    try:
        checked = SettingsFile.model_validate(document.value)
    except ValidationError as error:
        found = list(told(error.errors(include_url=False, include_input=False), document, FIELDS))
    else:
        found = list(_contradictions(checked, document))
    problems.extend(_worded(problem, resolved) for problem in found)
    if problems or checked is None:
        # Not chained: pydantic's error holds what was put in.
        raise SettingsError(in_order(problems))
    return _settings(checked)


def settings_schema() -> dict[str, Any]:
    """Return the JSON Schema of config files, for editors."""
    schema = SettingsFile.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "dedup config"}


def _read_file(path: Path) -> Document:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise SettingsError(
            [Problem(str(path), f"can not be read: {reason}; name a config file with --config")]
        ) from error
    return read(text, name=str(path), texts=TEXTS)


def _plain_secrets(document: Document) -> Iterator[Problem]:
    """Refuse secrets written into the file, and forget them, so that no other message can show them."""
    for at in sorted(_SECRETS):
        written = document.written(at)
        if written is not None and not _REFERENCE.fullmatch(written):
            yield Problem(document.place(at), _PLAIN.format(name=dotted(at), variable=_variable(at)))
            document.put(at, "***", document.place(at))


_PLAIN: Final = (
    '{name}: a secret must not be written here; write "${{env:NAME}}" or "${{file:PATH}}", or set {variable}'
)


def _variable(at: At) -> str:
    return PREFIX + "__".join(str(step).upper() for step in at)


def _known() -> dict[At, str]:
    """Return every key that takes a plain value, and the variable that sets it."""
    keys = [(*(holder.split(".") if holder else ()), name) for holder, names in FIELDS.items() for name in names]
    return {at: _variable(at) for at in keys if dotted(at) not in FIELDS}


def _from_environment(document: Document, environ: Mapping[str, str]) -> Iterator[Problem]:
    known = {variable: at for at, variable in _known().items()}
    for variable in sorted(environ):
        if not variable.startswith(PREFIX) or variable.startswith(_NOT_SETTINGS):
            continue
        at = known.get(variable)
        if at is None:
            yield Problem(variable, f"no setting has this variable{did_you_mean(variable, known)}")
        elif at in _SECRETS:
            # A password may look like a reference; it is taken as it is.
            document.put(at, "${env:" + variable + "}", variable)
        else:
            _put(document, at, environ[variable], variable)


def _from_command_line(document: Document, overrides: Sequence[str]) -> Iterator[Problem]:
    known = {dotted(at): at for at in _known()}
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        place = f"--set {key}"
        at = known.get(key)
        if not equals:
            yield Problem(place, "has no value; write --set key=value")
        elif at is None:
            yield Problem(place, f"unknown key{did_you_mean(key, known)}")
        elif at in _SECRETS and not _REFERENCE.fullmatch(text):
            yield Problem(place, _PLAIN.format(name=key, variable=_variable(at)))
        else:
            _put(document, at, text, place)


def _put(document: Document, at: At, text: str, place: str) -> None:
    """Set a value written as in YAML: a number, true, a list in brackets, or text; where text is wanted, just text."""
    parsed = read(text, name=place)
    # Text such as "${env:X}" or "host: a" is YAML of another kind than meant; then it is just text.
    plain = at not in TEXTS and not parsed.problems and isinstance(parsed.value, bool | int | list)
    document.put(at, parsed.value if plain else text, place)


def _resolve(document: Document, environ: Mapping[str, str], resolved: dict[str, str]) -> Iterator[Problem]:
    """Replace every reference by what it refers to; ``resolved`` gets what was found, with its reference."""
    for at, holder, step in list(_texts(document.value, ())):
        pieces: list[str] = []
        end = 0
        for match in _REFERENCE.finditer(holder[step]):
            pieces.append(holder[step][end : match.start()])
            end = match.end()
            try:
                found = _referred(match[1], match[2], environ)
            except ValueError as error:
                yield Problem(document.place(at), f"{dotted(at)}: {error}")
                found = ""
            else:
                if not found and at in _SECRETS:
                    yield Problem(document.place(at), f"{dotted(at)}: {match[0]} is empty")
            resolved[found] = match[0]
            pieces.append(found)
        holder[step] = "".join(pieces) + holder[step][end:]


def with_references(text: str, place: str, environ: Mapping[str, str]) -> str:
    """Return a text with every reference replaced. Raises SettingsError where one leads nowhere."""
    try:
        return _REFERENCE.sub(lambda match: _referred(match[1], match[2], environ), text)
    except ValueError as error:
        raise SettingsError([Problem(place, str(error))]) from None


def _referred(kind: str, name: str, environ: Mapping[str, str]) -> str:
    match kind:
        case "env":
            if name not in environ:
                raise ValueError(f"the environment variable {name} is not set")
            return environ[name]
        case "file":
            try:
                with Path(name).open("rb") as file:
                    return file.read(_MOST_SECRET_BYTES).decode().rstrip("\r\n")
            except OSError as error:
                raise ValueError(f"the file {name} can not be read: {error.strerror}") from error
            except UnicodeDecodeError:
                raise ValueError(f"the file {name} is not UTF-8 text") from None
        case other:
            raise ValueError(f'"${{{other}:...}}" is unknown; write "${{env:NAME}}" or "${{file:PATH}}"')


def _texts(value: Any, at: At) -> Iterator[tuple[At, Any, Any]]:  # noqa: ANN401 - any plain value
    """Yield place, holder and step of every text inside."""
    match value:
        case dict():
            steps: list[Any] = list(value)
        case list():
            steps = list(range(len(value)))
        case _:
            return
    for step in steps:
        if isinstance(value[step], str):
            yield (*at, step), value, step
        else:
            yield from _texts(value[step], (*at, step))


def _worded(problem: Problem, resolved: Mapping[str, str]) -> Problem:
    """Return the problem with a remedy where there is one, and with references instead of what they refer to."""
    text = problem.text
    for value, reference in resolved.items():
        if value:
            text = text.replace(value, reference)
    if text == 'the key "brokers" is missing':
        text += "; write `brokers: [host:9092]` into a config file, or --set brokers=host:9092, or DEDUP_BROKERS"
    return Problem(problem.place, text)


def _contradictions(file: SettingsFile, document: Document) -> Iterator[Problem]:
    """Yield what does not go together."""
    security = file.security
    protocol_at: At = ("security", "protocol")
    if security.protocol.startswith("SASL"):
        for key in ("mechanism", "username", "password"):
            needless = key == "username" and security.mechanism == "OAUTHBEARER"
            if getattr(security, key) is None and not needless:
                place = document.place(protocol_at)
                yield Problem(place, f"security.{key}: is missing; {security.protocol} needs it")
    else:
        yield from _unused(document, ("mechanism", "username", "password"), security.protocol, "SASL_SSL")
    if not security.protocol.endswith("SSL"):
        yield from _unused(document, ("ca_file", "cert_file", "key_file", "key_password"), security.protocol, "SSL")
    if (security.cert_file is None) != (security.key_file is None):
        at: At = ("security", "cert_file" if security.key_file is None else "key_file")
        yield Problem(document.place(at), "security: cert_file and key_file belong together; name both")
    if file.web.enabled and file.web.token is None and not _loopback(file.web.host):
        text = f'web.host: "{file.web.host}" can be reached from outside; set web.token, or listen on 127.0.0.1'
        yield Problem(document.place(("web", "host")), text)
    if parse_duration(file.transaction_timeout) < 2 * parse_duration(file.commit_interval):
        text = f"transaction_timeout: must be at least twice commit_interval ({file.commit_interval})"
        yield Problem(document.place(("transaction_timeout",)), text)
    topics = file.topics
    if (topics.min_insync_replicas or 0) > (topics.replication_factor or 32_767):
        text = f"topics.min_insync_replicas: more than topics.replication_factor ({topics.replication_factor})"
        yield Problem(document.place(("topics", "min_insync_replicas")), text)


def _unused(document: Document, keys: Sequence[str], protocol: str, needed: str) -> Iterator[Problem]:
    for key in keys:
        at: At = ("security", key)
        if document.written(at) is not None:
            text = f"security.{key}: has no effect with protocol {protocol}; write `protocol: {needed}`"
            yield Problem(document.place(at), text)


def _loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _settings(file: SettingsFile) -> Settings:
    security, topics = file.security, file.topics
    return Settings(
        brokers=tuple(file.brokers),
        security=Security(
            security.protocol,
            security.mechanism,
            security.username,
            _secret(security.password),
            security.ca_file,
            security.cert_file,
            security.key_file,
            _secret(security.key_password),
        ),
        state_dir=Path(file.state_dir).expanduser(),
        checkpoint=file.state.checkpoint,
        commit_interval_ms=parse_duration(file.commit_interval),
        transaction_timeout_ms=parse_duration(file.transaction_timeout),
        session_timeout_ms=parse_duration(file.session_timeout),
        worker_id=file.worker_id,
        topics=TopicDefaults(
            topics.create,
            topics.replication_factor or BROKER_DEFAULT,
            topics.min_insync_replicas,
            None if topics.retention is None else parse_duration(topics.retention),
            topics.partitions,
            topics.compression,
        ),
        web=Web(file.web.enabled, file.web.host, file.web.port, _secret(file.web.token), file.web.advertise),
        log=Log(file.log.format, file.log.level),
    )


def _secret(text: str | None) -> Secret | None:
    return None if text is None else Secret(text)
