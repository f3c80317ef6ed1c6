"""The pages of a worker: read-only, on loopback, or anywhere else behind a token.

    /live           the event loop turns
    /ready          every task of this worker runs; 503 with the reason if not
    /metrics        Prometheus' text format
    /api/status     tasks, lag, state
    /api/ids/{id}   was this ID seen; owners of other partitions are asked, unless with ?here=1
    /api/dashboard  what the dashboard shows
    /api/records/{topic}/{partition}/{offset}   one source record, for who asks to see it
    /               the dashboard

Probes carry no token and learn nothing but yes or no. The dashboard's own files carry none either: there is no data in
them, and the page asks for the token before it gets any. Pages on loopback are refused to another Host header, so that
a web page in somebody's browser can not read them through a name of its own (DNS rebinding).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict, is_dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from aiohttp import web

from dedup.errors import DedupError, SettingsError
from dedup.glance import LookedUp, Noted, Peer, ShownRecord, TaskPulse
from dedup.metrics import TaskSeen, WorkerSeen
from dedup.web.board import board
from dedup.web.files import FILES, SECURED, file_answer
from dedup.web.history import EVERY_S, History
from dedup.web.owners import ask_owners

if TYPE_CHECKING:
    from dedup.settings import Web

OPEN_PAGES: Final = frozenset({"/live", "/ready"})
SHARED_S: Final = 0.5
"""So long a snapshot serves everybody who asks: counting the bytes of 256 stores takes a while."""
MOST_ID_BYTES: Final = 65_536
log: Final = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Answers(Protocol):
    """What the pages are made from."""

    def not_ready(self) -> str | None:
        """Return why the worker is not ready; None if it is."""

    def seen(self) -> WorkerSeen:
        """Return the worker as it is now."""

    def metrics(self) -> bytes:
        """Return the metrics in Prometheus' text format."""

    def look_up(self, text: str) -> LookedUp:
        """Return what this worker's state says of an ID; raises SettingsError for what can be none."""

    def pulse(self) -> Iterable[TaskPulse]:
        """Return what is cheap to read of every task."""

    def latest(self) -> Iterable[Noted]:
        """Return the latest duplicates, conflicts, late records and dead letters."""

    def peers(self) -> tuple[Peer, ...]:
        """Return the members of the group."""

    async def record(self, topic: str, partition: int, offset: int) -> ShownRecord | None:
        """Return a source record; None where it is no more. Raises DedupError where it can not be read."""


class Pages:
    """The web server of one worker; use with ``async with``. One that can not listen is a warning: the work goes on."""

    def __init__(self, settings: Web, answers: Answers) -> None:
        self._settings: Final = settings
        self._answers: Final = answers
        self._token: Final = settings.token.reveal().encode() if settings.token else None
        self._runner: Final = web.AppRunner(self._app(), access_log=None, handle_signals=False)
        self._history: Final = History()
        self._sampling: asyncio.Task[None] | None = None
        self._board: tuple[float, dict[str, Any]] = (0.0, {})
        self.url: str | None = None
        """Where it listens; None while it does not."""

    @property
    def advertised(self) -> str | None:
        """Where others find these pages: `web.advertise`, or the address, or this machine's name for all addresses."""
        if self.url is None or self._settings.advertise is not None:
            return None if self.url is None else self._settings.advertise
        if self._settings.host.strip("[]") not in {"0.0.0.0", "::"}:  # noqa: S104  # compared, not listened on
            return self.url
        return f"http://{socket.gethostname()}:{self.url.rpartition(':')[2]}"

    async def __aenter__(self) -> Self:
        """It listens at ``url``, unless the address is taken."""
        host = self._settings.host.strip("[]")
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, self._settings.port).start()
        except OSError as error:
            log.warning(
                "web: %s:%d can not be listened on (%s); this worker has no pages. Set web.port, 0 for any free one.",
                host,
                self._settings.port,
                error.strerror,
            )
            return self
        port = self._runner.addresses[0][1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        log.info("web: %s", self.url)
        self._sampling = asyncio.create_task(self._sample(), name="dashboard samples")
        return self

    async def __aexit__(self, *_: object) -> None:
        """It listens no more."""
        if self._sampling is not None:
            self._sampling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sampling
        await self._runner.cleanup()

    async def _sample(self) -> None:
        """Look at the counters at an even pace; a look costs some ten microseconds a task."""
        while True:
            self._history.sample(self._answers.pulse(), time.time_ns() // 1_000_000)
            await asyncio.sleep(EVERY_S)

    def _app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=1024)
        app.add_routes(
            [
                web.get("/live", self._live),
                web.get("/ready", self._ready),
                web.get("/metrics", self._metrics),
                web.get("/api/status", self._status),
                web.get("/api/ids/{id:(?s:.+)}", self._id),
                web.get("/api/dashboard", self._dashboard),
                web.get("/api/records/{topic}/{partition:[0-9]{1,9}}/{offset:[0-9]{1,18}}", self._record),
                *(web.get(path, file_answer(name)) for path, name in FILES.items()),
            ]
        )
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in OPEN_PAGES:
            if self._token is not None and request.path not in FILES:
                given = request.headers.get("Authorization", "").removeprefix("Bearer ")
                # What is not UTF-8 comes as surrogates.
                given_bytes = given.encode(errors="surrogateescape")
                if not hmac.compare_digest(given_bytes, self._token):
                    raise web.HTTPUnauthorized(
                        text="This page needs the header Authorization: Bearer TOKEN.\n",
                        headers={"WWW-Authenticate": "Bearer"},
                    )
            # Not request.host: where the header is missing, that asks the name service for a name and waits for it.
            if self._token is None and not _is_loopback(request.headers.get("Host", "")):
                raise web.HTTPForbidden(text="Without a token these pages are for localhost only.\n")
        response = await handler(request)
        response.headers.update(SECURED)
        return response

    async def _live(self, _: web.Request) -> web.Response:
        return web.Response(text="live\n")

    async def _ready(self, _: web.Request) -> web.Response:
        why = self._answers.not_ready()
        return web.Response(text="ready\n") if why is None else web.Response(text=f"{why}\n", status=503)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(
            body=self._answers.metrics(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def _status(self, _: web.Request) -> web.Response:
        return _json(status_of(self._answers.seen(), self._answers.peers()))

    async def _id(self, request: web.Request) -> web.Response:
        text = request.match_info["id"]
        if len(text.encode()) > MOST_ID_BYTES:
            raise web.HTTPRequestURITooLong
        await asyncio.sleep(0)  # batches go first: a look-up is nothing urgent
        try:
            found = self._answers.look_up(text)
        except SettingsError as error:
            return _json({"error": str(error)}, status=400)
        if "here" in request.query:
            return _json(found)
        return _json(await ask_owners(found, self._answers.peers(), self._settings.token))

    async def _dashboard(self, _: web.Request) -> web.Response:
        now_s = time.monotonic()
        made_s, shown = self._board
        if not shown or now_s - made_s > SHARED_S:
            answers = self._answers
            now_ms = time.time_ns() // 1_000_000
            shown = board(answers.seen(), self._history, answers.latest(), answers.peers(), now_ms=now_ms)
            self._board = (now_s, shown)
        return _json(shown)

    async def _record(self, request: web.Request) -> web.Response:
        topic, partition, offset = (request.match_info[name] for name in ("topic", "partition", "offset"))
        try:
            found = await self._answers.record(topic, int(partition), int(offset))
        except DedupError as error:
            return _json({"error": str(error)}, status=404)
        if found is None:
            return _json({"error": "the log does not have this record any more"}, status=404)
        return _json(found)


def status_of(seen: WorkerSeen, peers: Iterable[Peer]) -> dict[str, Any]:
    """Return a worker as plain data, for JSON, and where the other members of the group can be asked."""
    return {
        "topology": seen.topology,
        "worker": seen.worker_id,
        "ready": seen.not_ready is None,
        "not_ready": seen.not_ready,
        "fenced": seen.fenced,
        "corrupted": seen.corrupted,
        "standbys": {str(partition): lag for partition, lag in sorted(seen.standby_lag.items())},
        "workers": [{"worker": peer.worker, "url": peer.url, "here": peer.here} for peer in peers],
        "tasks": [_task(task) for task in seen.tasks],
    }


def _task(task: TaskSeen) -> dict[str, Any]:
    numbers = task.numbers
    return {
        "task": task.sub_topology,
        "topic": task.topic,
        "partition": task.partition,
        "state": task.state,
        "verdicts": dict(numbers.verdicts),
        "committed_offset": numbers.committed_offset,
        "lag_records": task.lag_records,
        "lag_seconds": round(task.lag_seconds, 3),
        "restore_remaining": numbers.restore_remaining,
        "restore_total": numbers.restore_total,
        "stream_time_ms": numbers.stream_time_ms,
        "state_ids": task.state_ids,
        "state_bytes": task.state_bytes,
        "state_max_bytes": task.state_max_bytes,
        "misplaced": numbers.misplaced,
        "seconds_since_commit": round(task.seconds_since_commit, 3),
    }


def _json(value: object, *, status: int = 200) -> web.Response:
    plain: object = value
    if is_dataclass(value) and not isinstance(value, type):
        plain = asdict(value)
    if not isinstance(plain, Mapping):
        raise TypeError(f"{type(value).__name__} is no answer")
    return web.json_response(plain, status=status, dumps=lambda data: json.dumps(data, indent=2) + "\n")


def _is_loopback(host: str) -> bool:
    name = host.rsplit(":", 1)[0] if host.count(":") == 1 or (host.startswith("[") and "]:" in host) else host
    name = name.strip("[]")
    if name == "localhost":
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False
