"""The pages of a worker: what they say, and to whom."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
from importlib.resources import files
from types import SimpleNamespace
from urllib.parse import quote

import aiohttp
import pytest

from dedup.errors import Problem, SettingsError, StateIncompatible
from dedup.kafka.wire import Fetched, NoAnswer, TopicNow
from dedup.metrics import TaskNumbers, TaskSeen, WorkerSeen
from dedup.settings import Secret, Web
from dedup.web import server
from dedup.web.server import WebServer
from dedup.worker.introspection import Introspection
from dedup.worker_view import LookedUp, Noted, Peer, SeenId, ShownRecord, TaskPulse

CANARY = "canary-token-5f1c"
NUMBERS = TaskNumbers()


@pytest.fixture(autouse=True)
def _audible() -> None:
    """Another test's logging set-up may have turned off what it did not know."""
    for name in ("dedup.web.server", "dedup.web.server.requests"):
        logging.getLogger(name).disabled = False


class Worker:
    why: str | None = None
    others: tuple[Peer, ...] = ()
    candidates: tuple[int, ...] = (0,)
    name = "a"

    def not_ready(self) -> str | None:
        return self.why

    def seen(self) -> WorkerSeen:
        task = TaskSeen("dedup", "orders", 0, "running", NUMBERS, 4, 0)
        return WorkerSeen("orders", self.name, (task,), {1: 0}, 0, 0, self.why)

    def metrics(self) -> bytes:
        return b"dedup_lag_records 4\n"

    def look_up(self, text: str) -> object:
        if text == "odd":
            raise SettingsError([Problem("ID", "is none")])
        seen = SeenId(0, 1, 1, 2, "orders/0/1", live=True, went="orders.unique/0")
        found = (seen,) if text == "known" else ()
        return LookedUp("orders", self.name, text, found, (0,), 2, None, self.candidates, ("orders",))

    def pulse(self):
        return [TaskPulse(NUMBERS, 4, "orders", 0, "running")]

    def latest(self):
        return [Noted("late", "orders/0/7", "x", 5, 6, "1h behind stream time")]

    def peers(self):
        return self.others

    async def record(self, topic, partition, offset):
        if topic != "orders":
            raise StateIncompatible("is not a source topic")
        return ShownRecord.of(f"{topic}/{partition}/{offset}", 1, None, b"\xff") if offset < 5 else None


async def get(pages: WebServer, page: str, *, method: str = "GET", **headers: str) -> tuple[int, str]:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, f"{pages.url}{page}", headers=names) as answer,
    ):
        return answer.status, await answer.text()


def web(**changes) -> Web:
    return Web(**({"port": 0} | changes))


async def test_pages():
    worker = Worker()
    async with WebServer(web(), worker) as pages:
        assert await get(pages, "/live") == (200, "live\n")
        assert await get(pages, "/ready") == (200, "ready\n")
        assert await get(pages, "/metrics") == (200, "dedup_lag_records 4\n")
        status = json.loads((await get(pages, "/api/status"))[1])
        assert (status["topology"], status["ready"], status["standbys"]) == ("orders", True, {"1": 0})
        assert status["tasks"][0]["lag_records"] == 4
        assert json.loads((await get(pages, "/api/ids/a%2Fb%20c"))[1])["id"] == "a/b c"
        assert (await get(pages, "/api/ids/odd"))[0] == 400
        assert (await get(pages, "/nothing"))[0] == 404
        worker.why = "1 of 2 tasks are not running yet"
        assert await get(pages, "/ready") == (503, "1 of 2 tasks are not running yet\n")


async def test_what_waits_is_looked_at_even_if_nobody_asks(monkeypatch):
    numbers = TaskNumbers()
    monkeypatch.setattr(Worker, "pulse", lambda _: [TaskPulse(numbers, 0, "orders", 0, "running")])
    async with WebServer(web(), Worker()):
        await asyncio.sleep(0)
        assert numbers.caught_up_s is not None


class Electing:
    """A cluster whose topic has two partitions, one of which has no leader at the moment."""

    async def topics(self, names):
        return dict.fromkeys(names, TopicNow("id", 2))

    async def fetch(self, source, offset, *, max_bytes, wait_ms):
        if source.partition:
            raise NoAnswer(f"no leader is known for {source.topic}/{source.partition}")
        return Fetched([offset], [1], [None], [b"{}"], offset + 1, offset + 1, offset + 1)


async def test_a_record_that_cannot_be_read_now_is_no_defect_of_ours(caplog, monkeypatch):
    """Was: status 500, and a traceback in the worker's log."""
    source = SimpleNamespace(topics=("orders",))
    monkeypatch.setattr(Worker, "record", Introspection.record)
    monkeypatch.setattr(Worker, "topology", SimpleNamespace(name="orders", source=source), raising=False)
    monkeypatch.setattr(Worker, "app", SimpleNamespace(wire=Electing()), raising=False)
    async with WebServer(web(), Worker()) as pages:
        told = [await get(pages, f"/api/records/{place}") for place in ("orders/0/1", "orders/1/1", "orders/2/1")]
    assert [code for code, _ in told] == [200, 503, 404]
    assert "no leader is known for orders/1" in json.loads(told[1][1])["error"]
    assert "has 2 partitions" in json.loads(told[2][1])["error"]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_an_id_may_have_line_feeds():
    async with WebServer(web(), Worker()) as pages:
        assert json.loads((await get(pages, "/api/ids/a%0Ab%0D%0A"))[1])["id"] == "a\nb\r\n"


async def code_of(pages: WebServer, request: bytes) -> int:
    """Return the status of the answer to a request that no client library would send."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(pages.url.rpartition(":")[2]))
    writer.write(request)
    await writer.drain()
    line = await asyncio.wait_for(reader.readline(), 10)
    writer.close()
    await writer.wait_closed()
    return int(line.split()[1])


@pytest.mark.parametrize("page", ["/api/ids/%ff", "/api/ids?id=%ff", "/api/ids?here&id=a%c3"])
async def test_an_id_that_is_not_utf8_is_refused(page):
    """Was: another ID, such as the text `%ff`, was looked up."""
    async with WebServer(web(), Worker()) as pages:
        answer = await code_of(pages, f"GET {page} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        assert answer == 400
        assert (await get(pages, "/api/ids/%C3%A9"))[0] == 200
        assert (await get(pages, "/api/ids?id=%EF%BF%BD"))[0] == 200


async def test_a_long_id_is_looked_up_and_a_longer_one_is_refused():
    """Users write a content ID as the content itself, which may be long, and is longer still in a URL."""
    async with WebServer(web(), Worker()) as pages:
        for text in ("x" * 65_536, "\u20ac" * 21_845):
            assert json.loads((await get(pages, f"/api/ids/{quote(text)}"))[1])["id"] == text
        code, told = await get(pages, f"/api/ids/{'x' * 65_537}")
        assert (code, json.loads(told)) == (
            414,
            {"error": "ID: has 65,537 bytes, and one of at most 65,536 can be looked up"},
        )


async def test_an_id_may_be_a_step_that_browsers_remove_from_a_path():
    async with WebServer(web(), Worker()) as pages:
        for text in (".", "..", "../x", "a b&c=d", "a\n", "\u20ac"):
            assert json.loads((await get(pages, f"/api/ids?id={quote(text, safe='')}"))[1])["id"] == text
        for page in ("/api/ids", "/api/ids?id="):
            code, told = await get(pages, page)
            assert (code, json.loads(told)) == (400, {"error": "ID: is empty; name the ID to look up"})


async def test_a_reader_that_no_longer_reads_does_not_keep_a_worker_from_stopping(monkeypatch):
    """Was: 120 s, which is longer than the grace of most supervisors."""
    assert server._CLOSE_S <= 1.0
    monkeypatch.setattr(server, "_CLOSE_S", 0.1)
    worker = Worker()
    worker.metrics = lambda: b"x" * (64 << 20)  # more than the kernel keeps for a reader
    async with asyncio.timeout(30):
        async with WebServer(web(), worker) as pages:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(pages.url.rpartition(":")[2]))
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await reader.readexactly(1)
    writer.transport.abort()


@pytest.mark.parametrize(
    "request_line",
    [
        b"GET /api/ids/\xff HTTP/1.1",
        b"GET /api/ids?id=\xff HTTP/1.1",
        b"GET /" + b"a" * 300_000 + b" HTTP/1.1",
        b"\x16\x03\x01\x02\x00\x01",
        b"GET / FTP",
    ],
)
async def test_a_request_that_is_not_http_leaves_no_traceback_in_the_log(request_line, caplog):
    async with WebServer(web(), Worker()) as pages:
        assert await code_of(pages, request_line + b"\r\nHost: localhost\r\n\r\n") == 400
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_defect_of_ours_does(caplog, monkeypatch):
    monkeypatch.setattr(Worker, "metrics", lambda _: 1 / 0)
    async with WebServer(web(), Worker()) as pages:
        assert (await get(pages, "/metrics"))[0] == 500
    assert "ZeroDivisionError" in caplog.text


async def test_a_token_that_is_no_text_is_a_wrong_one(caplog):
    async with WebServer(web(token=Secret(CANARY)), Worker()) as pages:
        request = b"GET /metrics HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer \xff\xfe\r\n\r\n"
        assert await code_of(pages, request) == 401
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_request_without_a_host_is_refused_and_no_name_is_looked_up(monkeypatch):
    def looked_up(*_):
        raise AssertionError("the name service was asked")

    monkeypatch.setattr(socket, "getfqdn", looked_up)
    async with WebServer(web(), Worker()) as pages:
        assert await code_of(pages, b"GET /metrics HTTP/1.0\r\n\r\n") == 403
        assert await code_of(pages, b"GET /metrics HTTP/1.0\r\nHost:\r\n\r\n") == 403
        assert await code_of(pages, b"GET /live HTTP/1.0\r\n\r\n") == 200
    async with WebServer(web(token=Secret(CANARY)), Worker()) as pages:
        request = f"GET /metrics HTTP/1.0\r\nAuthorization: Bearer {CANARY}\r\n\r\n"
        assert await code_of(pages, request.encode()) == 200


async def test_the_scheme_of_a_token_may_have_any_case_and_must_be_there():
    """Was: `bearer` was refused, and a token without a scheme was taken."""
    async with WebServer(web(token=Secret(CANARY)), Worker()) as pages:
        for given, code in (
            (f"bearer {CANARY}", 200),
            (f"BEARER {CANARY}", 200),
            (CANARY, 401),
            (f"Basic {CANARY}", 401),
        ):
            assert (await get(pages, "/metrics", Authorization=given))[0] == code


async def test_each_answer_has_the_headers_that_browsers_obey():
    """Was: not an answer that refuses something."""
    async with WebServer(web(token=Secret(CANARY)), Worker()) as pages, aiohttp.ClientSession() as session:
        told = {"Authorization": f"Bearer {CANARY}"}
        for page, headers, code in (("/live", {}, 200), ("/metrics", {}, 401), ("/nothing", told, 404)):
            async with session.get(f"{pages.url}{page}", headers=headers) as answer:
                assert (answer.status, answer.headers["X-Content-Type-Options"]) == (code, "nosniff")
    async with (
        WebServer(web(), Worker()) as pages,
        aiohttp.ClientSession(headers={"Host": "a"}) as session,
        session.get(f"{pages.url}/metrics") as answer,
    ):
        assert (answer.status, answer.headers["X-Content-Type-Options"]) == (403, "nosniff")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
async def test_nothing_can_be_changed(method):
    async with WebServer(web(), Worker()) as pages:
        for page in ("/", "/live", "/metrics", "/api/status", "/api/ids/a", "/api/dashboard", "/api/hour"):
            assert (await get(pages, page, method=method))[0] == 405


async def test_with_a_token_all_but_the_probes_ask_for_it(caplog):
    async with WebServer(web(token=Secret(CANARY)), Worker()) as pages:
        for page in (
            "/metrics",
            "/api/status",
            "/api/ids/a",
            "/api/dashboard",
            "/api/hour",
            "/api/records/orders/0/1",
            "/nothing",
        ):
            for given in (
                {},
                {"Authorization": "Bearer wrong"},
                {"Authorization": CANARY[:-1]},
                {"Authorization": "Bearer é"},
            ):
                code, text = await get(pages, page, **given)
                assert code == 401
                assert CANARY not in text
        assert (await get(pages, "/metrics", Authorization=f"Bearer {CANARY}"))[0] == 200
        assert (await get(pages, "/live"))[0] == (await get(pages, "/ready"))[0] == 200
        assert CANARY not in (await get(pages, "/api/status", Authorization=f"Bearer {CANARY}"))[1]
    assert CANARY not in caplog.text


async def test_the_files_of_the_page_need_no_token_and_no_other_file_is_served():
    static = files("dedup.web").joinpath("static")
    kinds = {"css": "text/css", "js": "javascript", "svg": "image/svg+xml", "txt": "text/plain"}
    async with WebServer(web(token=Secret(CANARY)), Worker()) as pages, aiohttp.ClientSession() as session:
        async with session.get(f"{pages.url}/") as home:
            page = await home.text()
            assert (home.content_type, page) == ("text/html", static.joinpath("index.html").read_text("utf-8"))
            assert "default-src 'none'" in home.headers["Content-Security-Policy"]
        named = set(re.findall(r'"(/static/[^"]+)"', page))
        assert len(named) > 3
        for path in named | {f"/static/{each.name}" for each in static.iterdir() if each.name != "index.html"}:
            async with session.get(f"{pages.url}{path}") as answer:
                assert (answer.status, answer.headers["Cache-Control"]) == (200, "no-store")
                assert kinds[path.rpartition(".")[2]] in answer.content_type
        for path in ("/static/", "/static/..%2fserver.py", "/static/%2e%2e/server.py", "/static//etc/passwd"):
            assert await code_of(pages, f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()) in {401, 403, 404}
        request = b"GET /static/../metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
        assert await code_of(pages, request) in {401, 404}


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("localhost:1", 200),
        ("127.0.0.1", 200),
        ("[::1]:80", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example:80", 403),
    ],
)
async def test_without_a_token_another_host_name_is_refused(host, code):
    async with WebServer(web(), Worker()) as pages:
        assert (await get(pages, "/api/status", Host=host))[0] == code


async def test_a_taken_port_is_a_warning_and_no_end(caplog):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        async with WebServer(web(port=port), Worker()) as pages:
            assert pages.url is None
    assert f"cannot listen on 127.0.0.1:{port}" in caplog.text
