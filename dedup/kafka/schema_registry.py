"""Looks up schemas by ID in a schema registry that offers Confluent's API.

The client limits the size and the duration of a response, and does not follow redirects.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import math
import re
import ssl
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from http.client import HTTPException, HTTPResponse
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Self
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import HTTPRedirectHandler, HTTPSHandler, ProxyHandler, Request, build_opener

from dedup.core.formats import TYPED
from dedup.core.framing import (
    MOST_SCHEMA_CHARS,
    LinkedSchema,
    SchemaBook,
    SchemaRef,
    SchemaRefused,
    SchemaText,
    named,
    ref_named,
    schema_of,
)
from dedup.errors import Problem, RegistryUnavailable, SettingsError
from dedup.kafka.outage_lines import WAITING
from dedup.settings import RegistrySection, Settings
from dedup.topology.lint import FORMAT, KEY_FORMAT, Finding, key_schema_findings, schema_findings, warning
from dedup.topology.model import Topology

log: Final = logging.getLogger(__name__)
_WITHIN_S: Final = 5.0
"""Maximum time that a registry may take to send a complete response."""
_MOST_BYTES: Final = 4 << 20
_CHUNK: Final = 1 << 16
_NOT_FOUND: Final = 404
_UNKNOWN: Final = re.compile(rb'"error_code"\s*:\s*404\d\d')
"""Matches a registry's response about a missing subject (40401), version (40402), or schema (40403)."""
_ERROR_CODE: Final = re.compile(rb'"error_code"')
"""Matches a registry's error response, for example from a registry that does not support GUIDs."""
_BY_ID: Final = b"\0"
_APICURIO: Final = "/apis/ccompat"
"""The path of Confluent's API in Apicurio."""
_ELSEWHERE: Final = f"Confluent's API is not at this address (that of Apicurio ends with {_APICURIO}/v7)"
_KINDS: Final[Mapping[str, str]] = {"avro": "AVRO", "protobuf": "PROTOBUF", "json_schema": "JSON"}
"""Maps each format with framing to the registry's name for the format's schema type."""
_AT_ONCE: Final = 4
_PAUSE_S: Final = 0.2
_LOOK_S: Final = 0.02
TASK_PATIENCE_S: Final = 60.0
"""The time for which a Spark task waits for a usable answer from the registry before the task fails."""
_MOST_UNKNOWN: Final = 10_000
_MOST_REFERENCES: Final = 500
"""The maximum number of schemas to which one schema may refer, directly or indirectly."""
_DEEPEST_REFERENCE: Final = 50
_SUFFIX: Final = ".json"
_REFERENCED: Final = "referenced"
"""The key of the schemas to which an exported schema refers, directly or indirectly."""
_CERTIFICATE: Final = "CERTIFICATE-----"
_LONGEST_PAUSE_S: Final = 5.0


class _NoRedirect(HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """Return None, so that a redirect causes an HTTPError and the credentials never go to another address."""


class _Reference(NamedTuple):
    name: str
    """The name that the referring schema uses for this schema: an Avro type, or the path of a Protobuf file."""
    subject: str
    version: int


def _reference(said: Any) -> _Reference:  # noqa: ANN401 - JSON
    name, subject, version = (said[key] for key in _Reference._fields)
    if not isinstance(name, str) or not isinstance(subject, str) or type(version) is not int:
        raise TypeError
    return _Reference(name, subject, version)


class _ReferenceUnknown(LookupError):
    """Raised if the registry lacks a schema to which another schema refers."""


class SchemaRegistry:
    """A thread-safe schema registry client that caches the schemas that it has looked up.

    The client can be pickled, including its credentials, because Spark's executors also query the registry. Each
    process keeps only one copy of an unpickled client.
    """

    def __init__(
        self,
        url: str | None,
        headers: Mapping[str, str],
        ca_certificates: str | None = None,
        exported: Mapping[SchemaRef, SchemaText] = MappingProxyType({}),
    ) -> None:
        """``ca_certificates`` is the text of a PEM file, or None to trust the system's certificates.

        The client never requests schemas in ``exported`` from the registry. If ``url`` is None, it has no other
        schemas.
        """
        self.url: Final = url
        self._exported: Final = dict(exported)
        self._headers: Final = dict(headers)
        self._ca_certificates: Final = ca_certificates
        context = ssl.create_default_context(cadata=ca_certificates)
        self._opener: Final = build_opener(ProxyHandler({}), _NoRedirect(), HTTPSHandler(context=context))
        self._found: Final[dict[SchemaRef, SchemaText]] = {}
        for ref, schema in exported.items():
            # The registry still has the referenced schemas that an older version of dedup did not export.
            if url is None or isinstance(schema, str) or not schema.fault:
                self._found[ref] = schema
        self._versions: Final[dict[tuple[str, int], tuple[str, tuple[_Reference, ...]]]] = {}
        """The schemas to which other schemas refer, by subject and version. A version never changes."""
        self._missed: Final[set[tuple[str, int]]] = set()
        """The versions that the registry did not have. Each is logged only once."""
        self._unknown_since_s: Final[dict[SchemaRef, float]] = {}
        self._waited_s = 0.0
        """The time for which this process has waited for unknown schemas since it last found a schema."""

    def __reduce__(self) -> tuple[Callable[..., SchemaRegistry], tuple[object, ...]]:
        exported = tuple(self._exported.items())
        return _restored, (self.url, tuple(self._headers.items()), self._ca_certificates, exported)

    @classmethod
    def of(cls, section: RegistrySection) -> Self:
        """Return a client for the schema registry that the settings describe.

        Raises SettingsError if the settings name neither a URL nor a directory of schemas, or if a file cannot be read.
        """
        if section.url is None and section.directory is None:
            text = (
                "is missing, and the topology reads values or keys whose framing names their schema; write its address"
            )
            raise SettingsError([Problem("schema_registry.url", text)])
        headers = {"Accept": "application/vnd.schemaregistry.v1+json, application/json"}
        password = "" if section.password is None else section.password.get_secret_value()
        if section.username is not None:
            pair = base64.b64encode(f"{section.username}:{password}".encode()).decode()
            headers["Authorization"] = f"Basic {pair}"
        elif section.password is not None:
            headers["Authorization"] = f"Bearer {password}"
        exported = {} if section.directory is None else _exported_in(Path(section.directory))
        try:
            pem = None if section.ca_file is None else Path(section.ca_file).read_text("ascii", errors="ignore")
            if pem is not None and _CERTIFICATE not in pem:
                raise ValueError("it contains no certificate")  # ssl would then trust the system's certificates
            return cls(section.url and section.url.rstrip("/"), headers, pem, exported)
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            text = f"{section.ca_file} cannot be read: {getattr(error, 'strerror', None) or error}"
            raise SettingsError([Problem("schema_registry.ca_file", text)]) from error

    def schema(self, ref: SchemaRef, *, patience_s: float = 0.0, unknown_s: float = 0.0) -> SchemaText | None:
        """Return a schema, or None if neither the exported schemas nor the registry contains the ID.

        The result is also None if the registry lacks a schema to which the schema refers.

        Text in an unexpected schema language fails to parse later. If the registry does not know the ID, the client
        asks again, but waits at most ``unknown_s`` seconds in total for all unknown IDs since it last found a schema.
        Raises RegistryUnavailable if
        the registry gives no usable answer for ``patience_s`` seconds.
        """
        if ref in self._found:
            return self._found[ref]
        if self.url is None:
            self._note_unknown(ref)
            return None
        path, begun_s = f"/schemas/{'ids' if ref[:1] == _BY_ID else 'guids'}/{named(ref)}", time.monotonic()
        pause_s = _PAUSE_S
        while True:
            try:
                found = self._schema(path)
            except RegistryUnavailable:
                if time.monotonic() - begun_s >= patience_s:
                    raise
            else:
                if found is not None or self._waited_s >= unknown_s:
                    break
                self._waited_s += pause_s
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        if found is None:
            self._note_unknown(ref)
        else:
            self._found[ref] = found
            self._waited_s = 0.0
        return found

    def unknown_since_s(self, ref: SchemaRef) -> float:
        """Return the monotonic time when this process first found that a schema is unknown, or infinity."""
        return self._unknown_since_s.get(ref, math.inf)

    def _note_unknown(self, ref: SchemaRef) -> None:
        if len(self._unknown_since_s) >= _MOST_UNKNOWN:
            self._unknown_since_s.clear()
        self._unknown_since_s.setdefault(ref, time.monotonic())

    def latest(self, subject: str) -> tuple[SchemaText, str] | None:
        """Return a subject's newest schema and its type (AVRO, PROTOBUF, JSON), or None if the subject has no schema.

        Raises the same errors as `schema`.
        """
        answer = self._answer(f"{self.url}/subjects/{quote(subject, safe='')}/versions/latest")
        if answer is None:
            return None
        kind = answer.get("schemaType") if isinstance(answer, dict) else None
        with suppress(_ReferenceUnknown):
            return self._linked(answer), kind if isinstance(kind, str) else "AVRO"  # Confluent's API omits this type
        return None

    def export(self, subject: str, directory: Path) -> int:
        """Write all versions of a subject to files for `SchemaRegistry.of` to read. Return the number of versions.

        Returns 0 if the registry does not know the subject. Raises RegistryUnavailable if the registry gives no usable
        answer, or OSError if a file cannot be written.
        """
        place = f"{self.url}/subjects/{quote(subject, safe='')}/versions"
        versions = self._answer(place)
        if versions is None:
            return 0
        if not isinstance(versions, list):
            raise self._away("its answer is no list of versions")
        for version in versions:
            said: Any = self._answer(f"{place}/{quote(str(version), safe='')}")
            try:
                kept = {"schema": said["schema"]}
                kept |= {key: said[key] for key in ("schemaType", "references") if key in said}
                names = {named(ref_named(str(said[key]))) for key in ("id", "guid") if said.get(key) is not None}
            except (AttributeError, TypeError, LookupError, ValueError, OverflowError):
                raise self._away(f"its answer for version {version} of {subject} has no schema or no ID") from None
            kept |= self._referenced_by(said)
            for name in names:
                (directory / f"{name}{_SUFFIX}").write_text(json.dumps(kept, indent=2), "utf-8")
        return len(versions)

    def kind(self) -> str:
        """Return the known parts of the registry's name and version, such as "apicurio-registry 2.5.11.Final".

        Raises RegistryUnavailable if the registry does not respond, supports neither Avro nor Protobuf, or does not
        offer Confluent's API at the configured address.
        """
        if self.url is None:
            return f"{len(self._exported)} exported schemas"
        types = self._answer(f"{self.url}/schemas/types")
        if not isinstance(types, list):
            raise self._away(_ELSEWHERE)
        if not {"AVRO", "PROTOBUF"} & set(map(str, types)):
            raise self._away("it has neither Avro nor Protobuf schemas")
        root, apicurio, _ = self.url.partition(_APICURIO)
        if not apicurio:
            return "Confluent's API"
        try:
            info = self._answer(f"{root}/apis/registry/v2/system/info")
        except RegistryUnavailable:
            info = None
        said = [str(info.get(key, "")) for key in ("name", "version")] if isinstance(info, dict) else []
        return " ".join(word for word in said if word.isprintable()).strip() or "apicurio-registry"

    def _schema(self, path: str) -> SchemaText | None:
        answer = self._answer(f"{self.url}{path}")
        with suppress(_ReferenceUnknown):
            return None if answer is None else self._linked(answer)
        return None

    def _linked(self, answer: object) -> SchemaText:
        """Return the schema in an answer, with the schemas to which it refers.

        Raises _ReferenceUnknown if the registry lacks one of these schemas.
        """
        text, references = self._said(answer)
        if not references:
            return text
        gathered = _Gathered(self._version)
        try:
            gathered.add(references, ())
        except SchemaRefused as refused:
            return LinkedSchema(text, fault=str(refused))
        return LinkedSchema(text, tuple(gathered.texts.items()))

    def _said(self, answer: object) -> tuple[str, tuple[_Reference, ...]]:
        said: Mapping[str, Any] = answer if isinstance(answer, dict) else {}
        text = said.get("schema")
        if not isinstance(text, str):
            raise self._away("its answer has no schema")
        try:
            references = tuple(map(_reference, said.get("references") or ()))
        except (TypeError, LookupError):
            raise self._away("its answer has references without a name, subject, or version") from None
        return text, references

    def _version(self, subject: str, version: int) -> tuple[str, tuple[_Reference, ...]]:
        """Return a version of a subject, even if the version was deleted after other schemas had referred to it."""
        key = subject, version
        if key not in self._versions:
            answer = self._answer(f"{self.url}/subjects/{quote(subject, safe='')}/versions/{version}?deleted=true")
            if answer is None:
                if key not in self._missed:
                    log.warning("a schema refers to %s version %d, which the schema registry does not know", *key)
                    self._missed.add(key)
                raise _ReferenceUnknown
            self._versions[key] = self._said(answer)
        return self._versions[key]

    def _referenced_by(self, answer: object) -> dict[str, object]:
        """Return the additional content of an exported file whose schema refers to other schemas."""
        try:
            schema = self._linked(answer)
        except _ReferenceUnknown:
            raise self._away("it does not know a schema that another one refers to (see the warning above)") from None
        if isinstance(schema, str):
            return {}
        return {_REFERENCED: [{"name": name, "schema": text} for name, text in schema.references]}

    def _answer(self, url: str) -> object:
        """Return the JSON response, or None if the registry itself responds with 404.

        Raises RegistryUnavailable for other errors.
        """
        try:
            content = self._get(url)
        except HTTPError as error:
            with error, suppress(OSError, HTTPException):
                # A proxy or a server at a wrong address also responds with 404, but then the schema may still exist.
                known = _ERROR_CODE if "/schemas/guids/" in url else _UNKNOWN
                if error.code == _NOT_FOUND and known.search(error.read(_CHUNK)):
                    return None
            raise self._away(f"it answered {error.code}{_meaning(error.code)}") from None
        except (URLError, HTTPException, OSError) as error:
            raise self._away(str(getattr(error, "reason", error)) or type(error).__name__) from None
        except ValueError:
            # The error's text may contain the credentials.
            raise self._away("the request contains characters that HTTP does not allow") from None
        try:
            answer: object = json.loads(content)
        except (ValueError, RecursionError):
            raise self._away("its answer is not JSON") from None
        if answer is None:
            raise self._away("its answer is null")
        return answer

    def _get(self, url: str) -> bytes:
        begun_s, parts, size = time.monotonic(), list[bytes](), 0
        with self._opener.open(Request(url, headers=self._headers), timeout=_WITHIN_S) as answer:  # noqa: S310 - http(s)
            found: HTTPResponse = answer
            while part := found.read1(_CHUNK):
                parts.append(part)
                size += len(part)
                if size > _MOST_BYTES:
                    raise self._away(f"its answer has more than {_MOST_BYTES:,} bytes")
                if time.monotonic() - begun_s > _WITHIN_S:
                    raise self._away(f"its answer is not complete after {_WITHIN_S:.0f} s")
        return b"".join(parts)

    def _away(self, why: str) -> RegistryUnavailable:
        return RegistryUnavailable(f"The schema registry at {self.url} does not say what a schema is: {why}.")


class _Gathered:
    """The schemas to which one schema refers, directly or indirectly, as far as they have been looked up."""

    def __init__(self, version: Callable[[str, int], tuple[str, tuple[_Reference, ...]]]) -> None:
        self.texts: Final[dict[str, str]] = {}
        """The schemas by name. A schema comes after the schemas to which it refers."""
        self._version: Final = version
        self._begun: Final[set[tuple[str, int]]] = set()
        self._chars = 0

    def add(self, references: Iterable[_Reference], holders: tuple[tuple[str, int], ...]) -> None:
        """Look up the referenced schemas and their own references. ``holders`` are the schemas that led to
        ``references``.

        Raises SchemaRefused if the schemas are too many or too long, have circular references, or share a name.
        """
        for name, subject, version in references:
            key, shown = (subject, version), f"{ascii(subject[:64])[1:-1]} version {version}"
            if key in holders:
                raise SchemaRefused(f"refers to {shown}, which refers to itself")
            text, further = self._version(subject, version)
            if key not in self._begun:
                self._begun.add(key)
                self._chars += len(text)
                self._check(len(holders))
                self.add(further, (*holders, key))
            if self.texts.setdefault(name, text) != text:
                raise SchemaRefused(f"refers to two schemas as {ascii(name[:64])[1:-1]}, one of them {shown}")
            self._check(len(holders))

    def _check(self, depth: int) -> None:
        if max(len(self.texts), len(self._begun)) > _MOST_REFERENCES or depth >= _DEEPEST_REFERENCE:
            said = f"{_MOST_REFERENCES} other schemas, or through more than {_DEEPEST_REFERENCE} levels"
            raise SchemaRefused(f"refers to more than {said}")
        if self._chars > MOST_SCHEMA_CHARS:
            raise SchemaRefused(f"refers to schemas with more than {MOST_SCHEMA_CHARS:,} characters")


@cache
def _restored(
    url: str | None,
    headers: tuple[tuple[str, str], ...],
    ca_certificates: str | None,
    exported: tuple[tuple[SchemaRef, SchemaText], ...],
) -> SchemaRegistry:
    return SchemaRegistry(url, dict(headers), ca_certificates, dict(exported))


def _exported_in(directory: Path) -> dict[SchemaRef, SchemaText]:
    """Map the ID of each schema in a directory to the schema. Raises SettingsError for any invalid file."""
    found: dict[SchemaRef, SchemaText] = {}
    problems: list[Problem] = []
    try:
        files = sorted(each for each in directory.iterdir() if each.suffix == _SUFFIX)
    except OSError as error:
        text = f"{directory} cannot be read: {error.strerror}; `dedup schemas export` writes such a directory"
        raise SettingsError([Problem("schema_registry.directory", text)]) from error
    for file in files:
        try:
            found[ref_named(file.stem)] = _exported(json.loads(file.read_text("utf-8")))
        except (OSError, ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
            text = f"{file} is no exported schema: {error}; remove it, or run `dedup schemas export` again"
            problems.append(Problem("schema_registry.directory", text))
    if problems:
        raise SettingsError(problems)
    return found


def _exported(document: Any) -> SchemaText:  # noqa: ANN401 - JSON
    text = document["schema"]
    references = tuple((each["name"], each["schema"]) for each in document.get(_REFERENCED, ()))
    if not all(isinstance(each, str) for each in (text, *chain.from_iterable(references))):
        raise TypeError("a schema or the name of a reference is not text")
    if references:
        return LinkedSchema(text, references)
    if document.get("references"):  # written by dedup until 2026-11
        return LinkedSchema(
            text, fault="refers to other schemas, which were not exported; run `dedup schemas export` again"
        )
    return str(text)


class SchemaResolver:
    """Looks up schemas in a registry before the records that need these schemas are judged."""

    def __init__(self, registry: SchemaRegistry, *, wait_ms: int) -> None:
        """A schema counts as unknown if the registry still lacks it after ``wait_ms``."""
        self.book: Final = SchemaBook()
        """The schemas found so far. An unknown schema is None, and is looked up again when a record needs it."""
        self.away: str | None = None
        """The reason why the last request to the registry failed, or None if it succeeded."""
        self._registry: Final = registry
        self._wait_s: Final = wait_ms / 1000
        self._asking: Final[dict[SchemaRef, asyncio.Task[None]]] = {}
        self._at_once: Final = asyncio.Semaphore(_AT_ONCE)

    @property
    def awaited(self) -> list[SchemaRef]:
        """The schemas that records are waiting for."""
        return sorted(ref for ref in self._asking if ref not in self.book)

    @property
    def waiting(self) -> str | None:
        """A sentence that says which schema the records are waiting for and why, or None if no records are waiting."""
        if not self.awaited:
            return None
        return f"records wait for schema {named(self.awaited[0])}: {self.away or 'the registry does not know it yet'}"

    def missing(self, refs: Iterable[SchemaRef | None]) -> bool:
        """Start to look up the schemas that are not known yet, and return whether records must wait for any of them."""
        wanted = {schema_of(ref) for ref in set(refs) if ref is not None}
        unknown = {ref for ref in wanted if self.book.get(ref) is None}
        for ref in unknown - self._asking.keys():
            self._asking[ref] = asyncio.create_task(self._ask(ref), name=f"ask for schema {named(ref)}")
        return not unknown <= self.book.keys()

    async def found(self, refs: Sequence[SchemaRef | None], *, within_s: float) -> None:
        """Wait until each of these schemas has been found or counts as unknown.

        Raises RegistryUnavailable if the registry does not respond for ``within_s`` seconds.
        """
        answered_s = time.monotonic()
        while self.missing(refs):
            now_s = time.monotonic()
            if self.away is None:
                answered_s = now_s
            elif now_s - answered_s >= within_s:
                raise RegistryUnavailable(self.away)
            await asyncio.sleep(_LOOK_S)

    def close(self) -> None:
        """Cancel all lookups."""
        for asking in self._asking.values():
            asking.cancel()

    async def _ask(self, ref: SchemaRef) -> None:
        pause_s, unknown_since_s = _PAUSE_S, float("inf")
        while True:
            try:
                async with self._at_once:
                    found = await asyncio.to_thread(self._registry.schema, ref)
            except Exception as error:  # noqa: BLE001 - after any error, records wait, and the log shows the reason
                self._note(str(error) if isinstance(error, RegistryUnavailable) else repr(error))
            else:
                self._note(None)
                unknown_since_s = min(unknown_since_s, self._registry.unknown_since_s(ref), time.monotonic())
                if found is not None or ref in self.book or time.monotonic() - unknown_since_s >= self._wait_s:
                    break
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        if found is None and ref not in self.book:
            log.warning("the schema registry does not know schema %s: its records are dead letters", named(ref))
        self.book[ref] = found
        if found is None:
            await asyncio.sleep(_LONGEST_PAUSE_S)  # before the schema is looked up again
        del self._asking[ref]

    def _note(self, away: str | None) -> None:
        """Log when the registry becomes unavailable and when it responds again."""
        if away is not None and self.away is None:
            log.warning("%s Partitions with records of this schema wait until it does.", away, extra=WAITING)
        if away is None and self.away is not None:
            log.warning("the schema registry answers again", extra=WAITING)
        self.away = away


def _meaning(code: int) -> str:
    if code in {401, 403}:
        return ": it refuses these credentials (`schema_registry.username` and `.password`)"
    if code == _NOT_FOUND:
        return f": {_ELSEWHERE}"
    if 300 <= code < 400:  # noqa: PLR2004 - the redirections of HTTP
        return ": a redirect, which is not followed; write the address that it leads to (`schema_registry.url`)"
    return ""


def asking(topology: Topology, settings: Settings, *, patience_s: float = 0.0, keeps_unknown: bool = True) -> Topology:
    """Return the topology with a `SchemaBook` that asks the configured schema registry for each schema on first use.

    If the registry gives no usable answer, the `SchemaBook` repeats the request for ``patience_s`` seconds. If
    ``patience_s`` is not 0, the `SchemaBook` also repeats requests for unknown schemas, for as long as the setting
    `schema_wait` allows. With ``keeps_unknown=False``, which suits processes that run for long, an unknown schema is
    requested again whenever a batch needs the schema. A topology that needs no registry is returned unchanged. Raises
    SettingsError if a registry is needed but the settings name neither a registry nor a directory of exported schemas.
    """
    if not topology.source.needs_registry:
        return topology
    registry = SchemaRegistry.of(settings.schema_registry)
    unknown_s = settings.schema_registry.schema_wait_ms / 1000 if patience_s else 0.0
    ask = partial(registry.schema, patience_s=patience_s, unknown_s=unknown_s)
    return topology.knowing(SchemaBook(ask, keeps_unknown=keeps_unknown))


def registry_findings(topology: Topology, settings: Settings) -> list[Finding]:
    """Check a topology against the newest schemas of its source topics, and return the findings.

    If neither values nor keys name their schemas, the result is empty. Raises SettingsError if the settings name
    neither a registry nor a directory of exported schemas, or RegistryUnavailable if the registry does not respond.
    """
    source, findings = topology.source, list[Finding]()
    if not source.subjects and not source.key_subjects:
        return findings
    if settings.schema_registry.url is None:
        if source.needs_registry:
            SchemaRegistry.of(settings.schema_registry)  # raises an error if the settings name no schemas
        said = "`schema_registry.url` is not set, so no schema registry was asked and no types were checked."
        return [warning("schema_not_found", said, at=FORMAT)]
    registry = SchemaRegistry.of(settings.schema_registry)
    named = [(subject, source.format, FORMAT, schema_findings) for subject in source.subjects]
    named += [(subject, source.key_format, KEY_FORMAT, key_schema_findings) for subject in source.key_subjects]
    for subject, fmt, at, findings_of in named:
        try:
            found = registry.latest(subject)
        except RegistryUnavailable as error:
            if fmt in TYPED:
                raise
            # Values are read without the schema, so only the check of the members is skipped.
            findings.append(warning("schema_not_found", f"{error} The types of members were not checked.", at=at))
            continue
        if found is None:
            said = f"the schema registry has no subject {subject}, so the types of members were not checked."
            findings.append(warning("schema_not_found", said, at=at))
        elif found[1] != _KINDS[fmt]:
            said = f"the newest schema of the subject {subject} has the type {found[1]}, but the topology reads "
            key = ".".join(map(str, at))
            remedy = f"correct {key} or {key.replace('format', 'subject')}."
            findings.append(Finding("error", "schema_type_differs", f"{said}{fmt}: {remedy}", at=at))
        else:
            findings += findings_of(topology, found[0], subject)
    return findings
