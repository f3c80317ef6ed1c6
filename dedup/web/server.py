"""Implements a worker's web server. The pages are read-only. Unless a token is set, they are served only on loopback.

To look up an ID, a worker asks the owners of the other partitions only for their own state (``?here=1``), so no worker
forwards the request again. The answer is "not known" only if every partition that may contain the ID was searched.

Probes and the dashboard's own files need no token, because they contain no data. If no token is set, the server rejects
requests whose Host header does not name loopback. Otherwise, a website in a user's browser could read the pages through
the website's own host name (DNS rebinding). The dashboard's plotting library is uPlot 1.6.32 from npm.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, Self
from urllib.parse import quote, unquote_to_bytes

import msgspec
from aiohttp import ClientError, ClientSession, ClientTimeout, web
from aiohttp.http_exceptions import HttpProcessingError
from yarl import URL

from dedup.errors import BrokerUnavailable, DedupError, SettingsError
from dedup.metrics import TaskNumbers, TaskSeen, WorkerSeen
from dedup.settings import Web, is_loopback
from dedup.web.dashboard import EVERY_S, FORMAT, MetricHistory, Summary, board, summary
from dedup.web.last_hour import MOST_ROWS, SHORT_ROWS, Memory, WorkerHour, merged
from dedup.worker_view import LookedUp, Noted, Peer, ShownRecord, TaskPulse
from dedup.yaml_document import is_utf8

if TYPE_CHECKING:
    from dedup.settings import Secret


TIMEOUT_S: Final = 3.0
_SUMMARY_TIMEOUT_S: Final = 1.0
"""The time for which a dashboard waits for another worker's figures."""
MOST_ANSWER_BYTES: Final = 1 << 20
OK: Final = 200


async def ask_owners(own: LookedUp, peers: Sequence[Peer], token: Secret | None) -> dict[str, Any]:
    """Return everything that this worker and the owners of the other partitions know about an ID, as plain data.

    ``unreached`` in the result lists the partitions that could not be searched, with the reasons. The function raises
    no error if an owner does not respond.
    """
    asked, unreached = set(own.asked), list[dict[str, Any]]()
    sightings = [{**asdict(seen), "worker": own.worker} for seen in own.sightings]

    def not_asked(why: str, partitions: set[int], worker: str | None = None, url: str | None = None) -> None:
        unreached.append({"worker": worker, "url": url, "partitions": sorted(partitions), "why": why})

    missing = set(own.candidates) - asked
    # Repartition tasks have no state.
    held = [(peer, {number for topic, number in peer.partitions if topic in own.feeding_topics}) for peer in peers]
    others = [(peer, numbers & missing) for peer, numbers in held if not peer.here and numbers & missing]
    async with _session(token, TIMEOUT_S) as session:
        answers = await asyncio.gather(*(_ask(session, peer, own) for peer, _ in others))
    for (peer, numbers), answer in zip(others, answers, strict=True):
        if isinstance(answer, str):
            missing -= numbers
            not_asked(answer, numbers, peer.worker, peer.url)
        else:
            sightings += [{**seen, "worker": peer.worker} for seen in answer["sightings"]]
            asked.update(answer["asked"])
    if missing - asked:
        not_asked("nobody has them: a rebalance is in progress, or they are being restored", missing - asked)
    if not own.partitions:
        not_asked("no assignment is in force: the worker is starting, or a rebalance is in progress", set())
    return asdict(own) | {"sightings": sightings, "asked": sorted(asked), "unreached": unreached}


async def summaries(topology: str, peers: Sequence[Peer], session: ClientSession) -> list[dict[str, Any]]:
    """Return the `summary` and the URL of each other worker.

    For a worker that did not respond, the result contains its name, its URL, and the reason instead.
    """
    others = [peer for peer in peers if not peer.here]
    answers = await asyncio.gather(*(_get(session, peer, "/api/summary") for peer in others))
    return [_summary_of(topology, peer, answer) for peer, answer in zip(others, answers, strict=True)]


def _summary_of(topology: str, peer: Peer, answer: dict[str, Any] | str) -> dict[str, Any]:
    known = {"worker": peer.worker, "url": peer.url}
    if isinstance(answer, str):
        return known | {"why": answer}
    try:
        summary = msgspec.convert(answer, Summary)
    except msgspec.ValidationError:
        return known | {"why": _ANOTHER}
    if summary.topology != topology or summary.format != FORMAT:
        return known | {"why": _ANOTHER}
    if summary.worker != peer.worker:
        # Workers on two machines may both announce a loopback address.
        return known | {"why": f"worker {summary.worker} answers at this address; set web.advertise"}
    return asdict(summary) | known


async def hours(own: WorkerHour, peers: Sequence[Peer], session: ClientSession) -> list[WorkerHour]:
    """Return the last-hour data of this worker, and of each other worker that responds with valid data."""
    others = [peer for peer in peers if not peer.here]
    answers = await asyncio.gather(*(_get(session, peer, "/api/hour?here=1") for peer in others))
    found = [own]
    for peer, answer in zip(others, answers, strict=True):
        with contextlib.suppress(msgspec.ValidationError):
            hour = msgspec.convert(answer, WorkerHour)
            same = (hour.format, hour.topology, hour.worker) == (FORMAT, own.topology, peer.worker)
            if same and hour.is_sound:
                found.append(hour)
    return found


_ANOTHER: Final = "it is a worker of another topology or release"


def _session(token: Secret | None, timeout_s: float) -> ClientSession:
    """Return an HTTP client for fetching other workers' pages. The client sends the token if one is set."""
    headers = {"Accept-Encoding": "identity"}
    if token is not None:
        headers["Authorization"] = f"Bearer {token.get_secret_value()}"
    return ClientSession(timeout=ClientTimeout(total=timeout_s), headers=headers, auto_decompress=False)


async def _ask(session: ClientSession, peer: Peer, own: LookedUp) -> dict[str, Any] | str:
    # Slashes in the ID are also encoded, because they do not separate path segments.
    found = await _get(session, peer, f"/api/ids/{quote(own.id, safe='')}?here=1")
    if isinstance(found, str):
        return found
    named = found.get("topology") == own.topology and found.get("worker") == peer.worker
    return found if named and {"sightings", "asked"} <= found.keys() else _ANOTHER


async def _get(session: ClientSession, peer: Peer, path: str) -> dict[str, Any] | str:
    """Return the JSON object that another worker serves, or the reason why no object was received."""
    if peer.url is None:
        return "it serves no pages"
    try:
        # Redirects and proxies are disabled, so that only the group's members get the token.
        async with session.get(URL(f"{peer.url}{path}", encoded=True), allow_redirects=False) as answer:
            if answer.status != OK:
                return f"it answered {answer.status}"
            body = bytearray()
            async for chunk in answer.content.iter_any():
                body += chunk
                if len(body) > MOST_ANSWER_BYTES:
                    return "its answer is too long"
            found: Any = msgspec.json.decode(body)  # NaN also raises an error.
    except TimeoutError:
        return f"no answer in {session.timeout.total:g} s"
    except (msgspec.DecodeError, RecursionError):
        return "its answer is not JSON"
    except (ClientError, OSError, ValueError) as error:
        return f"unreachable ({type(error).__name__})"
    return found if isinstance(found, dict) else _ANOTHER


_STATIC: Final = Path(__file__).with_name("static")
"""The directory of the dashboard's files; every file in this directory is public."""
OPEN_PAGES: Final = frozenset({"/live", "/ready"})
_OWN_FILES: Final = frozenset({"/", "/static"})
_SECURITY_HEADERS: Final[Mapping[str, str]] = {
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
}
_SHARED_S: Final = 0.5
"""The time for which all requests share one snapshot, because adding up the sizes of 256 stores takes time."""
_HOURS_SHARED_S: Final = 1.0
"""The time for which all requests share the last-hour data of all workers before the server asks the workers again."""
_CLOSE_S: Final = 1.0
"""The time for which a stopping worker waits for the response to a request, and then again for the end of the request.

Without this limit, a client that no longer reads, for example on a sleeping laptop, would delay the worker's stop
indefinitely.
"""
_MOST_ID_BYTES: Final = 65_536
_MOST_LINE_BYTES: Final = 3 * _MOST_ID_BYTES + 1024
"""The maximum length of a request line. In a URL, a byte of an ID takes up to three characters, and an ID may be a
whole value.
"""
log: Final = logging.getLogger(__name__)
_request_log: Final = logging.getLogger(f"{__name__}.requests")
"""The log of failed requests. It omits requests that are not valid HTTP, such as requests from port scanners."""
_request_log.addFilter(lambda record: not isinstance((record.exc_info or (None, None))[1], HttpProcessingError))
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Answers(Protocol):
    """The interface through which the web pages get their data from the worker."""

    def not_ready(self) -> str | None:
        """Return the reason why the worker is not ready, or None if it is ready."""

    def seen(self) -> WorkerSeen:
        """Return the worker's current state."""

    def metrics(self) -> bytes:
        """Return the metrics in the Prometheus text format."""

    def look_up(self, text: str) -> LookedUp:
        """Return an ID's data from this worker's state. Raises SettingsError for text that cannot be an ID."""

    def pulse(self) -> Iterable[TaskPulse]:
        """Return the counters and the lag of every task."""

    def latest(self) -> Iterable[Noted]:
        """Return the latest duplicates, conflicts, late records, and dead letters."""

    def peers(self) -> tuple[Peer, ...]:
        """Return the members of the consumer group."""

    async def record(self, topic: str, partition: int, offset: int) -> ShownRecord | None:
        """Return a source record, or None if the record was deleted. Raises DedupError if the record cannot be read."""


class WebServer:
    """A worker's web server, for use with ``async with``. A server that cannot listen only logs a warning."""

    def __init__(self, settings: Web, answers: Answers) -> None:
        self._settings: Final = settings
        self._answers: Final = answers
        self._token: Final = settings.token.get_secret_value().encode() if settings.token else None
        self._runner: Final = web.AppRunner(
            self._app(),
            access_log=None,
            handle_signals=False,
            logger=_request_log,
            max_line_size=_MOST_LINE_BYTES,
            shutdown_timeout=_CLOSE_S,
        )
        self._history: Final = MetricHistory()
        self._memory: Final = Memory(_now_ms())
        self._sampling: asyncio.Task[None] | None = None
        self._board: asyncio.Task[dict[str, Any]] | None = None
        """The asyncio task that creates the dashboard content, or the last task that created it."""
        self._made_s = 0.0
        """The time at which the dashboard content was created, according to the monotonic clock."""
        self._hours: asyncio.Task[list[WorkerHour]] | None = None
        """The asyncio task that collects the last-hour data of all workers, or the last task that collected it."""
        self._asked_s = 0.0
        """The time at which the last-hour data was collected, according to the monotonic clock."""
        self._peers: ClientSession | None = None
        """The HTTP client for requests to other workers, which stays open while the server runs."""
        self.url: str | None = None
        """The URL at which the server listens, or None while it does not listen."""

    @property
    def advertised(self) -> str | None:
        """Return the URL at which other machines can reach the pages, or None if the server does not listen.

        The URL is `web.advertise`. By default, it contains the listening address or the machine's host name.
        """
        if self.url is None or self._settings.advertise is not None:
            return None if self.url is None else self._settings.advertise
        if self._settings.host.strip("[]") not in {"0.0.0.0", "::"}:  # noqa: S104  # compared, not listened on
            return self.url
        return f"http://{socket.gethostname()}:{self.url.rpartition(':')[2]}"

    async def __aenter__(self) -> Self:
        host = self._settings.host.strip("[]")
        self._peers = _session(self._settings.token, _SUMMARY_TIMEOUT_S)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, self._settings.port).start()
        except OSError as error:
            log.warning(
                "web: cannot listen on %s:%d (%s); this worker serves no pages. Set web.port, 0 for any free port.",
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
        if self._sampling is not None:
            self._sampling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sampling
        await self._runner.cleanup()
        if asked := {task for task in (self._board, self._hours) if task is not None}:
            for task in asked:
                task.cancel()
            await asyncio.wait(asked)
        if self._peers is not None:
            await self._peers.close()

    async def _sample(self) -> None:
        while True:
            self._look(_now_ms(), time.monotonic_ns() // 1_000_000)
            await asyncio.sleep(EVERY_S)

    def _look(self, now_ms: int, monotonic_ms: int) -> None:
        pulses = tuple(self._answers.pulse())
        for pulse in pulses:
            pulse.numbers.look(pulse.lag_records, pulse.unstable_records)
        self._memory.look(pulses, self._answers.peers(), now_ms)
        grown = self._history.sample(pulses, now_ms, monotonic_ms)
        if grown is not None:
            size = self._answers.seen().state_bytes if self._memory.begins(now_ms) else None
            self._memory.add(grown, now_ms, size)

    def _summary_now(self) -> Summary:
        return summary(self._answers.seen(), self._history.samples)

    def _app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=1024)
        app.add_routes(
            [
                web.get("/live", self._live),  # Succeeds if the event loop runs.
                web.get("/ready", self._ready),  # Returns 503 unless every task of this worker runs.
                web.get("/metrics", self._metrics),
                web.get("/api/status", self._status),
                web.get("/api/ids/{id:(?s:.+)}", self._id),
                web.get("/api/ids", self._id),  # With ?id=ID, because clients remove an ID "." or ".." from a path.
                web.get("/api/dashboard", self._dashboard),
                web.get("/api/summary", self._summary),
                web.get("/api/hour", self._hour),
                web.get("/api/records/{topic}/{partition:[0-9]{1,9}}/{offset:[0-9]{1,18}}", self._record),
                web.get("/", self._home),
                web.static("/static", _STATIC),
            ]
        )
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        try:
            response = await self._admitted(request, handler)
        except web.HTTPException as refusal:  # aiohttp raises each answer such as 404
            refusal.headers.update(_SECURITY_HEADERS)
            raise
        response.headers.update(_SECURITY_HEADERS)
        return response

    async def _admitted(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        page = None if resource is None else resource.canonical
        if page not in OPEN_PAGES:
            if self._token is not None and page not in _OWN_FILES:
                scheme, _, given = request.headers.get("Authorization", "").partition(" ")
                # Bytes that are not UTF-8 arrive as surrogates.
                given_bytes = given.encode(errors="surrogateescape")
                if not hmac.compare_digest(given_bytes, self._token) or scheme.lower() != "bearer":
                    raise web.HTTPUnauthorized(
                        text="This page needs the header Authorization: Bearer TOKEN.\n",
                        headers={"WWW-Authenticate": "Bearer"},
                    )
            # request.host is not used, because it waits for a DNS lookup if the header is missing.
            if self._token is None and not _names_loopback(request.headers.get("Host", "")):
                raise web.HTTPForbidden(text="Without a token these pages are for localhost only.\n")
        return await handler(request)

    async def _home(self, _: web.Request) -> web.FileResponse:
        return web.FileResponse(_STATIC / "index.html")

    async def _live(self, _: web.Request) -> web.Response:
        return web.Response(text="live\n")

    async def _ready(self, _: web.Request) -> web.Response:
        why = self._answers.not_ready()
        return web.Response(text="ready\n") if why is None else web.Response(text=f"{why}\n", status=503)

    async def _metrics(self, _: web.Request) -> web.Response:
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=self._answers.metrics(), headers=headers)

    async def _status(self, _: web.Request) -> web.Response:
        return _json(status_of(self._answers.seen(), self._answers.peers()))

    async def _id(self, request: web.Request) -> web.Response:
        text = request.match_info.get("id") or request.query.get("id", "")
        if not text:
            return _json({"error": "ID: is empty; name the ID to look up"}, status=400)
        # aiohttp keeps escaped bytes that are not UTF-8, or replaces them, so that another ID would be looked up.
        written = unquote_to_bytes(request.raw_path.encode(errors="surrogateescape"))
        if not is_utf8(written.decode(errors="surrogateescape")):
            return _json({"error": "ID: is not UTF-8; escape the bytes of its UTF-8 text"}, status=400)
        if len(text.encode()) > _MOST_ID_BYTES:
            why = f"ID: has {len(text.encode()):,} bytes, and one of at most {_MOST_ID_BYTES:,} can be looked up"
            return _json({"error": why}, status=414)
        await asyncio.sleep(0)  # Waiting batches run first, because lookups are not urgent.
        try:
            found = self._answers.look_up(text)
        except SettingsError as error:
            return _json({"error": str(error)}, status=400)
        if "here" in request.query:
            return _json(asdict(found))
        return _json(await ask_owners(found, self._answers.peers(), self._settings.token))

    async def _dashboard(self, _: web.Request) -> web.Response:
        # All open pages share the same dashboard content, even while the server waits for a worker that does not
        # respond.
        old = self._board is None or (self._board.done() and time.monotonic() - self._made_s > _SHARED_S)
        if self._board is None or old:
            self._board = asyncio.create_task(self._made_board(), name="dashboard")
        return _json(await asyncio.shield(self._board))

    async def _made_board(self) -> dict[str, Any]:
        answers, session = self._answers, self._peers
        peers = answers.peers()
        seen = answers.seen()
        others = [] if session is None else await summaries(seen.topology, peers, session)
        made = board(seen, self._history, answers.latest(), peers, others, now_ms=_now_ms())
        self._made_s = time.monotonic()
        return made

    async def _summary(self, _: web.Request) -> web.Response:
        return _json(asdict(self._summary_now()))

    async def _hour(self, request: web.Request) -> web.Response:
        if "here" in request.query:
            return web.Response(body=msgspec.json.encode(self._own_hour()), content_type="application/json")
        old = self._hours is None or (self._hours.done() and time.monotonic() - self._asked_s > _HOURS_SHARED_S)
        if self._hours is None or old:
            self._hours = asyncio.create_task(self._all_hours(), name="last hour")
        remembered = await asyncio.shield(self._hours)
        single = SHORT_ROWS if "short" in request.query else MOST_ROWS
        # Merging the data of many workers takes time, and batches must not wait for the merge.
        made = await asyncio.to_thread(merged, remembered, _now_ms(), of=request.query.get("worker"), single=single)
        return web.Response(body=msgspec.json.encode(made), content_type="application/json")

    def _own_hour(self) -> WorkerHour:
        seen = self._answers.seen()
        return self._memory.told(seen.topology, seen.worker_id, _now_ms(), version=FORMAT)

    async def _all_hours(self) -> list[WorkerHour]:
        own, session = self._own_hour(), self._peers
        found = [own] if session is None else await hours(own, self._answers.peers(), session)
        self._asked_s = time.monotonic()
        return found

    async def _record(self, request: web.Request) -> web.Response:
        topic, partition, offset = (request.match_info[name] for name in ("topic", "partition", "offset"))
        try:
            found = await self._answers.record(topic, int(partition), int(offset))
        except BrokerUnavailable as error:
            return _json({"error": str(error)}, status=503)
        except DedupError as error:
            return _json({"error": str(error)}, status=404)
        if found is None:
            return _json({"error": "the log no longer has this record"}, status=404)
        return _json(asdict(found))


def status_of(seen: WorkerSeen, peers: Iterable[Peer]) -> dict[str, Any]:
    """Return the status of a worker and the URLs of its group's members as JSON-serializable data."""
    counted, total = seen.counters(), seen.total()
    return {
        "topology": seen.topology,
        "worker": seen.worker_id,
        "ready": seen.not_ready is None,
        "not_ready": seen.not_ready,
        "fenced": seen.fenced,
        "corrupted": seen.corrupted,
        "standbys": {str(partition): lag for partition, lag in sorted(seen.standby_lag.items())},
        "alert": None if seen.alert is None else seen.alert.text,
        "commit_interval_s": seen.commit_interval_s,
        "dead_letters": dict(total.dead_reasons),
        "other_formats": dict(total.formats),
        "workers": [{"worker": peer.worker, "url": peer.url, "here": peer.here} for peer in peers],
        "tasks": [_task(task, counted[task.sub_topology, task.topic, task.partition]) for task in seen.tasks],
    }


def _task(task: TaskSeen, counted: TaskNumbers) -> dict[str, Any]:
    numbers = task.numbers
    return {
        "task": task.sub_topology,
        "topic": task.topic,
        "partition": task.partition,
        "state": task.state,
        "verdicts": dict(counted.verdicts),
        "filtered": counted.filtered,
        "committed_offset": numbers.committed_offset,
        "lag_records": task.lag_records,
        "lag_seconds": None if task.lag_seconds is None else round(task.lag_seconds, 3),
        "restore_remaining": numbers.restore_remaining,
        "restore_total": numbers.restore_total,
        "stream_time_ms": numbers.stream_time_ms,
        "state_ids": task.state_ids,
        "state_bytes": task.state_bytes,
        "state_max_bytes": task.state_max_bytes,
        "misplaced": counted.misplaced,
        "seconds_since_commit": round(task.seconds_since_commit, 3),
    }


def _json(answer: Mapping[str, Any], *, status: int = 200) -> web.Response:
    return web.json_response(answer, status=status, dumps=lambda data: json.dumps(data, indent=2) + "\n")


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _names_loopback(host: str) -> bool:
    name = host.rsplit(":", 1)[0] if host.count(":") == 1 or (host.startswith("[") and "]:" in host) else host
    return is_loopback(name)
