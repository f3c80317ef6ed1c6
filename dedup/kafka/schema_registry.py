"""Asks a schema registry (Confluent's API) for schemas by their IDs. Answers are bounded, and redirects are refused."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import re
import ssl
import time
from collections.abc import Iterable
from contextlib import suppress
from http.client import HTTPException, HTTPResponse
from typing import Final
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import HTTPRedirectHandler, HTTPSHandler, ProxyHandler, Request, build_opener

from dedup.core.framing import SchemaBook, SchemaRef, named
from dedup.errors import Problem, RegistryUnavailable, SettingsError
from dedup.settings import RegistrySection, Settings
from dedup.topology.lint import Finding, schema_findings, warning
from dedup.topology.model import Topology

log: Final = logging.getLogger(__name__)
_WITHIN_S: Final = 5.0
"""How long a registry may take to send a whole answer."""
_MOST_BYTES: Final = 4 << 20
_CHUNK: Final = 1 << 16
_NOT_FOUND: Final = 404
_UNKNOWN: Final = re.compile(rb'"error_code"\s*:\s*404\d\d')
"""What is in a registry's answer that it does not know a subject (40401), version (40402), or schema (40403)."""
_ERROR_CODE: Final = re.compile(rb'"error_code"')
"""What is in a registry's answer that it knows no GUIDs at all."""
_BY_ID: Final = b"\0"
_APICURIO: Final = "/apis/ccompat"
"""The path of Confluent's API in Apicurio."""
_ELSEWHERE: Final = f"Confluent's API is not at this address (that of Apicurio ends with {_APICURIO}/v7)"
_AT_ONCE: Final = 4
_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 5.0


class _NoRedirect(HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """Return None, so that a redirect is an HTTPError: credentials must not go to another address."""


class SchemaRegistry:
    """A client that keeps nothing and may be used by several threads."""

    def __init__(self, section: RegistrySection) -> None:
        """Raises SettingsError if there is no URL, or the file of CA certificates cannot be read."""
        if section.url is None:
            text = "is missing, and the topology reads values whose framing names their schema; write its address"
            raise SettingsError([Problem("schema_registry.url", text)])
        self._url: Final = section.url.rstrip("/")
        self._headers: Final = {"Accept": "application/vnd.schemaregistry.v1+json, application/json"}
        password = "" if section.password is None else section.password.get_secret_value()
        if section.username is not None:
            pair = base64.b64encode(f"{section.username}:{password}".encode()).decode()
            self._headers["Authorization"] = f"Basic {pair}"
        elif section.password is not None:
            self._headers["Authorization"] = f"Bearer {password}"
        try:
            context = ssl.create_default_context(cafile=section.ca_file)
        except OSError as error:
            text = f"{section.ca_file} cannot be read: {error.strerror}"
            raise SettingsError([Problem("schema_registry.ca_file", text)]) from error
        self._opener: Final = build_opener(ProxyHandler({}), _NoRedirect(), HTTPSHandler(context=context))

    def schema(self, ref: SchemaRef) -> str | None:
        """Return the text of a schema, or None if the registry does not know the ID.

        The text of a schema that is not Avro is returned, too, and fails to parse. Raises RegistryUnavailable if the
        registry gives no answer, or one that says neither.
        """
        return self._schema(f"/schemas/{'ids' if ref[:1] == _BY_ID else 'guids'}/{named(ref)}")

    def latest(self, subject: str) -> str | None:
        """Return the newest schema of a subject, or None if there is none; otherwise like `schema`."""
        return self._schema(f"/subjects/{quote(subject, safe='')}/versions/latest")

    def kind(self) -> str:
        """Return what the registry is, such as "apicurio-registry 2.5.11.Final", as far as it says so.

        Raises RegistryUnavailable if it gives no answer, or has no Avro, or the address is not that of Confluent's API.
        """
        types = self._answer(f"{self._url}/schemas/types")
        if not isinstance(types, list):
            raise self._away(_ELSEWHERE)
        if "AVRO" not in types:
            raise self._away("it has no Avro schemas")
        root, apicurio, _ = self._url.partition(_APICURIO)
        if not apicurio:
            return "Confluent's API"
        try:
            info = self._answer(f"{root}/apis/registry/v2/system/info")
        except RegistryUnavailable:
            info = None
        said = [str(info.get(key, "")) for key in ("name", "version")] if isinstance(info, dict) else []
        return " ".join(word for word in said if word.isprintable()).strip() or "apicurio-registry"

    def _schema(self, path: str) -> str | None:
        answer = self._answer(self._url + path)
        if answer is None:
            return None
        text = answer.get("schema") if isinstance(answer, dict) else None
        if not isinstance(text, str):
            raise self._away("its answer has no schema")
        return text

    def _answer(self, url: str) -> object:
        """Return an answer that is JSON, or None for a registry's 404. Raises RegistryUnavailable for all others."""
        try:
            answer: object = json.loads(self._get(url))
        except HTTPError as error:
            with error, suppress(OSError, HTTPException):
                # A proxy, or a wrong address, also answers 404, but that says nothing about the schema.
                known = _ERROR_CODE if "/schemas/guids/" in url else _UNKNOWN
                if error.code == _NOT_FOUND and known.search(error.read(_CHUNK)):
                    return None
            raise self._away(f"it answered {error.code}{_meaning(error.code)}") from None
        except (URLError, HTTPException, OSError) as error:
            raise self._away(str(getattr(error, "reason", error)) or type(error).__name__) from None
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
        return RegistryUnavailable(f"The schema registry at {self._url} does not say what a schema is: {why}.")


class SchemaResolver:
    """Asks a registry for schemas before the records that need them are judged."""

    def __init__(self, registry: SchemaRegistry, *, wait_ms: int) -> None:
        """``wait_ms`` is how long the registry must say that it does not know a schema before this is believed."""
        self.book: Final = SchemaBook()
        """The schemas found so far. A schema that the registry does not know is asked for again when it occurs."""
        self.away: str | None = None
        """Why the registry gives no answer, or None if it gave its last answer in time."""
        self._registry: Final = registry
        self._wait_s: Final = wait_ms / 1000
        self._asking: Final[dict[SchemaRef, asyncio.Task[None]]] = {}
        self._at_once: Final = asyncio.Semaphore(_AT_ONCE)

    @property
    def waiting(self) -> str | None:
        """What records wait for, as a sentence, or None if they wait for nothing."""
        missing = sorted(ref for ref in self._asking if ref not in self.book)
        if not missing:
            return None
        return f"records wait for schema {named(missing[0])}: {self.away or 'the registry does not know it yet'}"

    def missing(self, refs: Iterable[SchemaRef | None]) -> bool:
        """Return whether one of these schemas must be awaited, and ask for those that are not known."""
        unknown = {ref for ref in refs if ref is not None and self.book.get(ref) is None}
        for ref in unknown - self._asking.keys():
            self._asking[ref] = asyncio.create_task(self._ask(ref), name=f"ask for schema {named(ref)}")
        return not unknown <= self.book.keys()

    def close(self) -> None:
        """Ask no more."""
        for asking in self._asking.values():
            asking.cancel()

    async def _ask(self, ref: SchemaRef) -> None:
        pause_s, unknown_since_s = _PAUSE_S, float("inf")
        while True:
            try:
                async with self._at_once:
                    found = await asyncio.to_thread(self._registry.schema, ref)
            except Exception as error:  # noqa: BLE001 - whatever it is, records wait, and the log says why
                self._note(str(error) if isinstance(error, RegistryUnavailable) else repr(error))
            else:
                self._note(None)
                unknown_since_s = min(unknown_since_s, time.monotonic())
                if found is not None or ref in self.book or time.monotonic() - unknown_since_s >= self._wait_s:
                    break
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        if found is None and ref not in self.book:
            log.warning("the schema registry does not know schema %s: its records are dead letters", named(ref))
        self.book[ref] = found
        if found is None:
            await asyncio.sleep(_LONGEST_PAUSE_S)  # before it is asked for again
        del self._asking[ref]

    def _note(self, away: str | None) -> None:
        """Log when the registry goes away and when it is back."""
        if away is not None and self.away is None:
            log.warning("%s Partitions with records of this schema wait until it does.", away)
        if away is None and self.away is not None:
            log.warning("the schema registry answers again")
        self.away = away


def _meaning(code: int) -> str:
    if code in {401, 403}:
        return ": it refuses these credentials (`schema_registry.username` and `.password`)"
    if code == _NOT_FOUND:
        return f": {_ELSEWHERE}"
    if 300 <= code < 400:  # noqa: PLR2004 - the redirections of HTTP
        return ": a redirect, which is not followed; write the address that it leads to (`schema_registry.url`)"
    return ""


def asking(topology: Topology, settings: Settings) -> Topology:
    """Return the topology, which asks the registry of the settings for each schema when it first needs the schema.

    Raises SettingsError if the topology needs a registry and the settings name none.
    """
    if not topology.source.names_schemas:
        return topology
    return topology.knowing(SchemaBook(SchemaRegistry(settings.schema_registry).schema))


def registry_findings(topology: Topology, settings: Settings) -> list[Finding]:
    """Return findings about a topology and the newest schemas of its topics, if their values name their schemas.

    Raises SettingsError or RegistryUnavailable.
    """
    findings: list[Finding] = []
    if topology.source.names_schemas:
        registry = SchemaRegistry(settings.schema_registry)
        for subject in (f"{topic}-value" for topic in topology.source.topics):
            text = registry.latest(subject)
            if text is None:
                said = f"the schema registry has no subject {subject}, so the types of members were not checked."
                findings.append(warning("schema_not_found", said))
            else:
                findings += schema_findings(topology, text, subject)
    return findings
