"""Defines and loads the settings of a worker, which have the structure of the config file.

Later sources override earlier ones: defaults, the config file, the environment (``DEDUP_WEB__PORT=0`` sets
``web.port``), and `--set`. A config file contains no secrets, only references to them, such as ``${env:NAME}`` or
``${file:PATH}``. The keys' docstrings appear in the JSON Schema, so that editors can display them.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NoReturn, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, WithJsonSchema

from dedup.errors import Problem, SettingsError
from dedup.quantities import DURATION_PATTERN, parse_duration
from dedup.yaml_document import (
    At,
    Document,
    Keys,
    accepting,
    did_you_mean,
    dotted,
    in_order,
    is_utf8,
    matching,
    models_of,
    read,
    schema_of,
    some,
    text_of,
    validated,
    within,
)

_DEFAULT_CONFIG: Final = Path("config/local.yaml")
"""The config file that is read if no other file is given and this file exists."""
_PREFIX: Final = "DEDUP_"

_NOT_SETTINGS: Final = ("DEDUP_CRASH_", "DEDUP_TEST_", "DEDUP_BENCH_", "DEDUP_DEMO_", "DEDUP_JDBC_")
_MOST_SECRET_BYTES: Final = 65_536
_PLAIN: Final = (
    '{name}: a secret must not be written here; write "${{env:NAME}}" or "${{file:PATH}}", or set {variable}'
)
_LAST_PORT: Final = 65_535
_LONGEST_LABEL: Final = 63
"""The maximum length of one label of a host name (RFC 1035). Dots separate the labels."""
_BROKER: Final = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
WORKER_ID: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
_REGISTRY: Final = re.compile(r"https?://[^/\s?#]+(/[^\s?#]*)?")
_TOKEN: Final = re.compile(r"[!-~]+")
_NO_ADDRESS: Final = 'is empty; write an address, such as "0.0.0.0" for all addresses, or leave it out'
_NO_DIRECTORY: Final = "is empty; write a directory, or leave it out"
_WEB_TOKEN: Final = re.compile(r"[!-~]([ -~]*[!-~])?")
_PAGE_ADDRESS: Final = re.compile(r"https?://(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")
_WITH_PASSWORD: Final = re.compile(r"[a-z0-9+.-]+://[^/]*:[^/]*@.*", re.IGNORECASE | re.DOTALL)
_REFERENCE: Final = re.compile(r"\$\{([a-z]*):([^}]*)\}")
_QUOTED: Final = re.compile(r'"[^"]*"')
_FIRST_TO_LAST: Final = re.compile(r'".*"', re.DOTALL)
"""Matches all quotations at once, because the end of one that contains quotation marks cannot be found."""
_PIECE: Final = 4
"""The number of consecutive characters of a value, which may be secret, that no message shows."""
_REFERENCE_PATTERN: Final = r"^\$\{(env|file):[^}]+\}$"


def _listed(value: Any) -> Any:  # noqa: ANN401 - any value in the file
    """Accept a string such as ``a:9092,b:9092`` as a list, as Kafka's own tools do."""
    listed = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    return tuple(listed) if isinstance(listed, list) else listed


def _is_broker(text: str) -> bool:
    match = _BROKER.fullmatch(text)
    if match is None or not 0 < int(match[2]) <= _LAST_PORT:
        return False
    # Python refuses to look up other names, and its error would not name the setting.
    labels = match[1].removesuffix(".").split(".")
    return match[1].startswith("[") or all(0 < len(label) <= _LONGEST_LABEL for label in labels)


def _directory(value: Any) -> Any:  # noqa: ANN401 - any value in the file
    if not isinstance(value, str):
        return value
    if not value:
        raise ValueError(_NO_DIRECTORY)  # Path("") would be the current directory
    return Path(_expanded(value))


def _expanded(path: str) -> str:
    """Return a path with ``~`` replaced by the home directory. Raises ValueError if the user is unknown."""
    try:
        return str(Path(path).expanduser()) if path.startswith("~") else path
    except RuntimeError:
        raise ValueError(f'"{path}" names the home directory of an unknown user; write the whole path') from None


def _place(text: str) -> str:
    if not text or "::" in text:
        raise ValueError(f'"{text}" is not a location; write a directory, or a URL such as s3://bucket/path')
    if _WITH_PASSWORD.fullmatch(text):
        raise ValueError("contains a password; leave it out, and pass it in the variables of the storage's own library")
    return _expanded(text)


def _can_be_split(url: str) -> bool:
    try:
        return urlsplit(url).port != 0
    except ValueError:
        return False


def _registry(text: str) -> str:
    if "@" in text:
        raise ValueError("contains a user; leave it out, and set schema_registry.username and .password")
    if not _REGISTRY.fullmatch(text) or not _can_be_split(text):
        raise ValueError("is not the address of a schema registry; write for example https://registry:8081")
    return text


def _between(low: str, high: str) -> Any:  # noqa: ANN401 - a validator
    low_ms, high_ms = parse_duration(low), parse_duration(high)
    short = high_ms <= parse_duration("1h")
    return accepting(
        lambda text: low_ms <= parse_duration(text, short=short) <= high_ms, f'"{{}}" must be {low} to {high}'
    )


_WORKER_ID_RULE: Final = matching(
    WORKER_ID, 'is not a valid worker ID; use at most 100 of a-z A-Z 0-9 "." "_" "-", and do not start with "."'
)
_PAGE_RULE: Final = accepting(
    lambda text: _PAGE_ADDRESS.fullmatch(text) and _can_be_split(text),
    '"{}" is not the address of a page; write for example http://worker-1:6066',
)
_DURATION: Final = WithJsonSchema({"type": "string", "pattern": DURATION_PATTERN})
_BROKER_RULE: Final = accepting(_is_broker, '"{}" is not a broker; write host:port, such as kafka-1:9092')
_Broker = Annotated[str, _BROKER_RULE, WithJsonSchema({"type": "string", "pattern": f"^{_BROKER.pattern}$"})]


# Empty text, for example from an empty variable, must not mean "not set": other CAs would be trusted.
_User = Annotated[str, accepting(str.strip, "is empty; write a user, or leave it out")]
_File = Annotated[str, accepting(str.strip, "is empty; write a file, or leave it out"), AfterValidator(_expanded)]


class Secret(SecretStr):
    """A string that is hidden in reprs and log lines, and that cannot be pickled."""

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret must not be pickled")


_SecretText = Annotated[Secret, WithJsonSchema({"type": "string", "pattern": _REFERENCE_PATTERN})]


class Security(Keys):
    """Protocol, credentials, and certificates for connections to the brokers."""

    protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    """Security protocol. With SSL, host names are always verified."""
    mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"] | None = None
    """SASL mechanism, which is required with SASL_PLAINTEXT and SASL_SSL."""
    username: _User | None = None
    """SASL user."""
    password: _SecretText | None = None
    """SASL password or OAUTHBEARER token, written as ${env:NAME} or ${file:PATH}."""
    ca_file: _File | None = None
    """File of CA certificates to trust (PEM). Default: the system's certificates."""
    cert_file: _File | None = None
    """File of the client certificate (PEM) for mutual TLS."""
    key_file: _File | None = None
    """File of the client certificate's private key (PEM)."""
    key_password: _SecretText | None = None
    """Password of the private key, written as ${env:NAME} or ${file:PATH}."""


class RegistrySection(Keys):
    """A schema registry with Confluent's API, which stores the schemas that framed values and keys refer to."""

    url: Annotated[str, AfterValidator(_registry)] | None = None
    """Address, such as https://registry:8081 or http://apicurio:8080/apis/ccompat/v7."""
    username: str | None = None
    """User for basic authentication."""
    password: _SecretText | None = None
    """Password or, without a username, bearer token, written as ${env:NAME} or ${file:PATH}."""
    ca_file: _File | None = None
    """File of CA certificates to trust (PEM). Default: the system's certificates."""
    directory: Annotated[str, accepting(str.strip, _NO_DIRECTORY), AfterValidator(_expanded)] | None = None
    """Directory with schemas from `dedup schemas export`, which dedup reads before it asks the registry. Without `url`,
    dedup knows only these schemas."""
    schema_wait: Annotated[str, _between("0s", "10m"), _DURATION] = "30s"
    """How long to wait for an unknown schema. After this time, records with the schema become dead letters."""

    @property
    def schema_wait_ms(self) -> int:
        """`schema_wait` in milliseconds."""
        return parse_duration(self.schema_wait)


class StateSection(Keys):
    """Sources of state other than the changelog."""

    checkpoint: Annotated[str, AfterValidator(_place)] | None = Field(
        default=None,
        description="Directory or URL with checkpoints (`dedup checkpoint`). A worker without local state starts from "
        "a checkpoint and reads only the rest of the state from the changelog.",
    )


class TopicDefaults(Keys):
    """How dedup creates topics."""

    create: bool = True
    """Whether `dedup run`, `ingest`, and `sink` create missing topics. `dedup apply` always creates them."""
    replication_factor: Annotated[int, within(1, 32_767)] | None = None
    """Replication factor of created topics. Default: the brokers' default."""
    min_insync_replicas: Annotated[int, within(1, 32_767)] | None = None
    """Value of min.insync.replicas for created topics. Default: the brokers' default."""
    retention: Annotated[str, _between("1s", "36500d"), _DURATION] | None = Field(
        default=None,
        description="Retention of the output, duplicates, and conflicts topics. Default: the longest retention of the "
        "source topics, or unlimited if one of them is compacted.",
    )
    partitions: Annotated[int, within(1, 100_000)] | None = None
    """Number of partitions of the repartition topic. Default: the largest partition count of a source topic."""
    compression: Literal["none", "gzip", "snappy", "lz4", "zstd"] = "snappy"
    """Compression of the records that a worker writes. The codec lz4 uses a lot of the worker's CPU time."""

    @property
    def retention_ms(self) -> int | None:
        """`retention` in milliseconds."""
        return None if self.retention is None else parse_duration(self.retention)


class Web(Keys):
    """The worker's web pages, which show metrics, health, and a dashboard."""

    enabled: bool = True
    """Whether the worker serves web pages."""
    host: Annotated[str, accepting(str.strip, _NO_ADDRESS)] = "127.0.0.1"
    """Address to listen on. Any address other than a loopback address requires web.token."""
    port: Annotated[int, within(0, _LAST_PORT)] = 6066
    """Port to listen on. With 0, the system picks a free port."""
    token: _SecretText | None = None
    """Token that clients must send, written as ${env:NAME} or ${file:PATH}."""
    advertise: Annotated[str, _PAGE_RULE] | None = None
    """URL at which other workers and users reach these pages. Default: a URL with web.host and web.port."""


class LogSettings(Keys):
    """Format and level of the log."""

    format: Literal["text", "json"] = "text"
    """Log format: text for people, or json for machines."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum level of the log lines to write."""


class Settings(Keys):
    """All settings of a worker: brokers, credentials, directories, and intervals."""

    brokers: Annotated[tuple[_Broker, ...], BeforeValidator(_listed), some("broker")] = Field(
        description="Bootstrap servers of the cluster.", json_schema_extra={"minItems": 1}
    )
    security: Security = Security()
    """Protocol, credentials, and certificates for connections to the brokers."""
    schema_registry: RegistrySection = RegistrySection()
    """The schema registry, for topologies whose Avro or Protobuf values or keys have a framing."""
    state_dir: Annotated[Path, BeforeValidator(_directory), WithJsonSchema({"type": "string"})] = Path("state")
    """Directory of local state. Each worker needs its own directory."""
    state: StateSection = StateSection()
    """Sources of state other than the changelog."""
    commit_interval: Annotated[str, _between("1ms", "60s"), _DURATION] = "100ms"
    """How long a transaction stays open before the worker commits it."""
    transaction_timeout: Annotated[str, _between("1s", "15m"), _DURATION] = "30s"
    """Time after which the brokers abort the transaction of a worker that has stopped responding."""
    session_timeout: Annotated[str, _between("1s", "30m"), _DURATION] = "10s"
    """Time after which the partitions of a worker that has stopped responding move to other workers."""
    worker_id: Annotated[str, _WORKER_ID_RULE] | None = None
    """ID of the worker as a static member of its group. Default: an ID that is stored in state_dir."""
    topics: TopicDefaults = TopicDefaults()
    """How dedup creates topics."""
    web: Web = Web()
    """The worker's web pages."""
    log: LogSettings = LogSettings()
    """Format and level of the log."""

    @property
    def commit_interval_ms(self) -> int:
        """`commit_interval` in milliseconds."""
        return parse_duration(self.commit_interval)

    @property
    def transaction_timeout_ms(self) -> int:
        """`transaction_timeout` in milliseconds."""
        return parse_duration(self.transaction_timeout)

    @property
    def session_timeout_ms(self) -> int:
        """`session_timeout` in milliseconds."""
        return parse_duration(self.session_timeout)


def _takes(annotation: Any, *types: type) -> bool:  # noqa: ANN401 - any type there is
    if annotation in types:
        return True
    return get_origin(annotation) is not tuple and any(_takes(part, *types) for part in get_args(annotation))


_MODELS: Final = models_of(Settings)
_KEYS: Final = {
    (*holder, name): key.annotation
    for holder, model in _MODELS.items()
    for name, key in model.model_fields.items()
    if (*holder, name) not in _MODELS
}
"""Maps the path of each key with a scalar value to the type of the value."""
_SECRETS: Final = frozenset(at for at, annotation in _KEYS.items() if _takes(annotation, Secret))
_TEXTS: Final = frozenset(at for at, annotation in _KEYS.items() if _takes(annotation, str, Path, Secret))
"""The paths of keys whose value is a string. Values such as ``0042`` are kept as written, because they may be names."""


def load_settings(
    path: Path | str | None = None, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> Settings:
    """Return the settings in a config file, overridden by environment variables and then by ``overrides``.

    If ``path`` is None, the config file is `config/local.yaml`, which need not exist. An override is a string such as
    ``commit_interval=50ms``. If ``environ`` is given, it is used instead of the process environment.

    Raises SettingsError, listing every problem, if any setting is invalid. Also raises SettingsError if dedup cannot
    determine whether `config/local.yaml` exists, because that file may contain settings that must not be ignored.
    """
    path = _default_config() if path is None else Path(path)
    environ = os.environ if environ is None else environ
    if path is None:
        document = Document("the settings", {})
    else:
        text = text_of(path, SettingsError, "name a config file with --config")
        document = read(text, name=str(path), texts=_TEXTS)
    problems = document.problems
    if document.value is None and problems:
        raise SettingsError(problems)
    if not isinstance(document.value, dict):
        if document.value is not None:
            problems.append(Problem(document.place(()), "must be a mapping of keys to values; begin with `brokers:`"))
        document.value = {}
    problems += [*_plain_secrets(document), *_from_environment(document, environ)]
    problems += _from_command_line(document, overrides)
    resolved = _resolve(document, environ)
    settings, found = validated(document, Settings)
    if settings is not None:
        found.extend(_contradictions(settings, document))
    problems.extend(_worded(problem, resolved) for problem in found)
    if problems or settings is None:
        raise SettingsError(in_order(problems))
    return settings


def _default_config() -> Path | None:
    try:
        mode = _DEFAULT_CONFIG.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        text = f"cannot be read: {error.strerror}; correct its permissions, or name a config file with --config"
        raise SettingsError([Problem(str(_DEFAULT_CONFIG), text)]) from error
    return _DEFAULT_CONFIG if stat.S_ISREG(mode) else None


def without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an environment that override no setting.

    A command that gets only these variables has the settings of its config file, regardless of the user's environment.
    """
    return {name: value for name, value in environ.items() if not _overrides(name)}


def settings_schema() -> dict[str, Any]:
    """Return the JSON Schema of config files, for use in editors."""
    return schema_of(Settings, "dedup config")


def _plain_secrets(document: Document) -> Iterator[Problem]:
    """Report and mask each secret that the file contains as plain text, so that no other message shows it."""
    for at in sorted(_SECRETS):
        written = document.written(at)
        if written is not None and not _REFERENCE.fullmatch(written):
            yield Problem(document.place(at), _PLAIN.format(name=dotted(at), variable=_variable(at)))
            document.put(at, "***", document.place(at))


def _variable(at: At) -> str:
    return _PREFIX + "__".join(str(step).upper() for step in at)


def _overrides(variable: str) -> bool:
    return variable.startswith(_PREFIX) and not variable.startswith(_NOT_SETTINGS)


def _from_environment(document: Document, environ: Mapping[str, str]) -> Iterator[Problem]:
    known = {_variable(at): at for at in _KEYS}
    for variable in sorted(environ):
        if not _overrides(variable):
            continue
        at = known.get(variable)
        if at is None:
            yield Problem(variable, f"no setting has this variable{did_you_mean(variable, known)}")
        elif at in _SECRETS:
            # The value of a password may look like a reference, so store a reference to the variable instead.
            document.put(at, "${env:" + variable + "}", variable)
        else:
            _put(document, at, environ[variable], variable)


def _from_command_line(document: Document, overrides: Sequence[str]) -> Iterator[Problem]:
    known = {dotted(at): at for at in _KEYS}
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
    if not is_utf8(text):
        document.problems.append(Problem(place, f"{dotted(at)}: the value is not UTF-8; write it in UTF-8"))
        text = "?"
    parsed = read(text, name=place)
    # A value such as "host: a" would be a mapping in YAML, but it is meant as a string.
    plain = at not in _TEXTS and not parsed.problems and isinstance(parsed.value, bool | int | list)
    document.put(at, parsed.value if plain else text, place)


def _resolve(document: Document, environ: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Replace references with their values.

    Returns, for the place of each setting that contains references, a mapping from these values to the references.
    """
    references: dict[str, dict[str, str]] = {}

    def value_of(match: re.Match[str], at: At) -> str:
        try:
            found = _referred(match[1], match[2], environ)
            if not found and at in _SECRETS:
                raise ValueError(f"{match[0]} is empty")
        except ValueError as error:
            document.problems.append(Problem(document.place(at), f"{dotted(at)}: {error}"))
            return ""
        references.setdefault(document.place(at), {})[found] = match[0]
        return found

    def resolved(value: Any, at: At) -> Any:  # noqa: ANN401 - any plain value
        match value:
            case str():
                return _REFERENCE.sub(lambda match: value_of(match, at), value)
            case dict():
                return {key: resolved(inner, (*at, key)) for key, inner in value.items()}
            case list():
                return [resolved(inner, (*at, number)) for number, inner in enumerate(value)]
            case _:
                return value

    document.value = resolved(document.value, ())
    return references


def with_references(text: str, place: str, environ: Mapping[str, str]) -> str:
    """Return a string with every reference replaced by its value. Raises SettingsError if a reference has no value."""
    try:
        return _REFERENCE.sub(lambda match: _referred(match[1], match[2], environ), text)
    except ValueError as error:
        raise SettingsError([Problem(place, str(error))]) from None


def _referred(kind: str, name: str, environ: Mapping[str, str]) -> str:
    match kind:
        case "env":
            if name not in environ:
                raise ValueError(f"the environment variable {name} is not set")
            if not is_utf8(environ[name]):
                raise ValueError(f"the environment variable {name} is not UTF-8 text")
            return environ[name]
        case "file":
            try:
                with Path(name).open("rb") as file:
                    content = file.read(_MOST_SECRET_BYTES + 1)
                if len(content) > _MOST_SECRET_BYTES:
                    raise ValueError(f"the file {name} is larger than {_MOST_SECRET_BYTES >> 10} KiB, the limit")
                return content.decode().rstrip("\r\n")
            except OSError as error:
                raise ValueError(f"the file {name} cannot be read: {error.strerror}") from error
            except UnicodeDecodeError:
                raise ValueError(f"the file {name} is not UTF-8 text") from None
        case other:
            raise ValueError(f'"${{{other}:...}}" is unknown; write "${{env:NAME}}" or "${{file:PATH}}"')


def _worded(problem: Problem, resolved: Mapping[str, Mapping[str, str]]) -> Problem:
    """Return a problem with the references that are written at its place instead of their values, which may be secret.

    Values are shown only in quotes and at their own place. Replacing them elsewhere would garble the message's own
    words, and so would show which letters a value consists of.
    """
    text = problem.text
    values = resolved.get(problem.place, {})
    for value in sorted(filter(None, values), key=len, reverse=True):
        quotation = _FIRST_TO_LAST if '"' in value else _QUOTED
        text = quotation.sub(partial(_without, value, values[value]), text)
    if text == 'the key "brokers" is missing':
        text += "; write `brokers: [host:9092]` into a config file, or --set brokers=host:9092, or DEDUP_BROKERS"
    return Problem(problem.place, text)


def _without(value: str, reference: str, quoted: re.Match[str]) -> str:
    """Return a quotation with a reference instead of its value, or instead of everything if it has a part of it."""
    text = quoted[0].replace(value, reference)
    pieces = (value[at : at + _PIECE] for at in range(len(value) - _PIECE + 1))
    return f'"{reference}"' if any(piece in text.replace(reference, "") for piece in pieces) else text


def _contradictions(settings: Settings, document: Document) -> Iterator[Problem]:
    security = settings.security
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
    if settings.web.enabled and settings.web.token is None and not is_loopback(settings.web.host):
        text = f'web.host: "{settings.web.host}" can be reached from outside; set web.token, or listen on 127.0.0.1'
        yield Problem(document.place(("web", "host")), text)
    if settings.web.token is not None and not _WEB_TOKEN.fullmatch(settings.web.token.get_secret_value()):
        text = "web.token: callers send it in an HTTP header, so it must be printable ASCII, on one line, and must not"
        yield Problem(document.place(("web", "token")), f"{text} begin or end with a space")
    yield from _registry_contradictions(settings.schema_registry, document)
    if settings.transaction_timeout_ms < 2 * settings.commit_interval_ms:
        text = f"transaction_timeout: must be at least twice commit_interval ({settings.commit_interval})"
        yield Problem(document.place(("transaction_timeout",)), text)
    topics = settings.topics
    if (topics.min_insync_replicas or 0) > (topics.replication_factor or 32_767):
        text = f"topics.min_insync_replicas: more than topics.replication_factor ({topics.replication_factor})"
        yield Problem(document.place(("topics", "min_insync_replicas")), text)


def _registry_contradictions(registry: RegistrySection, document: Document) -> Iterator[Problem]:
    for key in ("username", "password", "ca_file"):
        if registry.url is None and getattr(registry, key) is not None:
            yield Problem(document.place(("schema_registry", key)), f"schema_registry.{key}: needs schema_registry.url")
    token = None if registry.password is None else registry.password.get_secret_value()
    if registry.username is None and token is not None and not _TOKEN.fullmatch(token):
        text = "schema_registry.password: without a username, this is a bearer token, which must be printable ASCII"
        yield Problem(document.place(("schema_registry", "password")), f"{text} without spaces or line breaks")
    if registry.ca_file is not None and (registry.url or "").startswith("http:"):
        text = "schema_registry.ca_file: has no effect with http; write an address that begins with https"
        yield Problem(document.place(("schema_registry", "ca_file")), text)


def _unused(document: Document, keys: Sequence[str], protocol: str, needed: str) -> Iterator[Problem]:
    for key in keys:
        at: At = ("security", key)
        if document.written(at) is not None:
            text = f"security.{key}: has no effect with protocol {protocol}; write `protocol: {needed}`"
            yield Problem(document.place(at), text)


def is_loopback(host: str) -> bool:
    """Return whether an address is reachable only from this machine. An IPv6 address may be in brackets."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
