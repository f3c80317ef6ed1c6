"""`status` and `lookup`: what brokers and workers say, put together, and other servers than workers."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from rich.console import Console

from dedup.cli import status
from dedup.cli.inputs import shortened
from dedup.cli.status import (
    Look,
    NotReached,
    OtherAnswer,
    ask,
    ask_fleet,
    ask_id,
    follow,
    idle_workers,
    looked,
    showing,
    survey,
    table,
)
from dedup.errors import BrokerUnavailable, DedupError, StateIncompatible
from dedup.kafka.topic_admin import Group, Topic
from dedup.kafka.wire import CommittedOffset, LogBounds, Position, TopicPartition
from dedup.settings import Secret, Settings, Web
from dedup.worker.offsets import RESETTING
from tests.unit.cli.test_admin import SIMPLEST, dedup, topology


@pytest.mark.parametrize(
    ("held", "size", "says"),
    [
        ({"a": 4, "b": 4}, 4, []),
        ({"a": 0, "b": 0}, 4, []),
        ({"a": 8, "b": 0, "c": 0}, 8, ["set it to 2 or less, stop all workers, and run `dedup layout --apply`"]),
        ({**dict.fromkeys("abcdefgh", 1), "i": 0}, 1, ["1 of 9 workers have no partition (i): there are 8 partitions"]),
        ({**dict.fromkeys("abcd", 2), "e": 0}, 2, ["because transactions.partitions is 2: set it to 1 or less"]),
    ],
)
def test_workers_without_partitions_are_told_what_to_set(held, size, says):
    found = idle_workers(held, size, 8)
    assert len(found) == len(says)
    assert all(text in sentence for text, sentence in zip(says, found, strict=True))


NOW_MS = 1_700_000_000_000


def survey_of(*, owner: str | None = "a", topic: str = "c", committed: int = 1_000) -> dict[str, Any]:
    names = ("task", "topic", "partition", "owner", "committed", "end", "lag", "oldest_ms", "changelog_begin",
             "changelog_end")  # fmt: skip
    rows = (
        ("dedup", topic, 0, owner, committed, 1_200, 200, NOW_MS - 90_000, 50, 400),
        ("dedup", topic, 1, None, None, 5, 5, NOW_MS - 150_000, None, None),
    )
    return {
        "topology": "t",
        "members": [{"worker": owner, "host": "10.0.0.1", "partitions": ["c/0"]}] if owner else [],
        "missing_topics": ["out.late"],
        "tasks": [dict(zip(names, row, strict=True)) for row in rows],
    }


PAGE = {
    "topology": "t",
    "worker": "a",
    "tasks": [{"task": "dedup", "topic": "c", "partition": 0, "state": "running", "verdicts": {"unique": 3, "duplicate": 1},
               "state_ids": 3, "state_bytes": 99, "restore_remaining": 0, "seconds_since_commit": 1}],
}  # fmt: skip


def seen_now(surveyed: dict[str, Any], pages: list[dict[str, Any]], before: Look | None = None) -> dict[str, Any]:
    return looked(Look(surveyed, pages, NOW_MS), before)


def printed(seen: dict[str, Any], width: int = 200) -> str:
    console = Console(width=width, record=True, file=io.StringIO(), highlight=False)
    console.print(table(seen, width))
    return console.export_text()


def test_what_is_printed_is_not_taken_for_rich_markup(capsys):
    seen = seen_now(survey_of(), [PAGE])
    said = "http://[fe80::100:1]:6066 refused the token, and [fd00:100:1::2]:9092 [/] does not answer"
    with showing(watch=False, as_json=False) as show:
        show({**seen, "alerts": [said]})
    assert f"attention: {said}\n" in capsys.readouterr().out


def test_status_puts_brokers_and_workers_together():
    seen = seen_now(survey_of(), [PAGE])
    assert seen["lag"] == 205
    assert seen["tasks"][0]["state_ids"] == 3
    assert seen["tasks"][1]["state"] is None
    json.dumps(seen)
    text = printed(seen)
    assert "t: lag 205, oldest record waiting: 2 min; workers: a at 10.0.0.1" in text
    assert "25.0%" in text
    assert "missing topics: out.late; `dedup apply` creates them" in text


def test_status_says_how_many_records_the_flow_filtered():
    flowing = PAGE | {"tasks": [task | {"filtered": 1_200} for task in PAGE["tasks"]]}
    said = "filtered by the flow: 1,200 records, since the responding workers started"
    assert said in printed(seen_now(survey_of(), [flowing]))
    assert "filtered" not in printed(seen_now(survey_of(), [PAGE]))


def test_status_names_a_stream_which_is_no_member_of_the_group():
    nobody = survey_of(owner=None)
    seen = seen_now(nobody | {"tasks": nobody["tasks"][:1]}, [PAGE | {"worker": "spark-host"}])
    assert [(task["owner"], task["state"]) for task in seen["tasks"]] == [("spark-host", "running")]
    assert "workers: spark-host" in printed(seen)


def test_status_adds_up_dead_letters_of_all_workers_and_says_alerts():
    one = {"worker": "a", "tasks": [], "dead_letters": {"not_json": 5, "id_null": 1}, "other_formats": {"gzip": 2},
           "alert": "all is dead"}  # fmt: skip
    other = {"worker": "b", "tasks": [], "dead_letters": {"id_null": 9}, "other_formats": {"gzip": 1}, "alert": None}
    older = {"worker": "c", "tasks": []}
    seen = seen_now(survey_of(), [one, other, older])
    assert (seen["dead_letters"], seen["other_formats"]) == ({"id_null": 10, "not_json": 5}, {"gzip": 3})
    assert "a: all is dead" in seen["alerts"]
    text = printed(seen)
    assert "dead letters: 10 id_null, 5 not_json, since the responding workers started" in text
    assert "of them in another format: 3 gzip, since" in text
    assert "attention: a: all is dead" in text
    assert "dead letters" not in printed(seen_now(survey_of(), [older]))


def test_status_says_how_far_a_restore_and_a_bound_are():
    task = {"task": "dedup", "topic": "c", "partition": 1, "state": "restoring", "restore_remaining": 25,
            "restore_total": 100, "state_bytes": 80, "state_max_bytes": 100}  # fmt: skip
    text = printed(seen_now(survey_of(), [{"worker": "b", "tasks": [task]}]))
    assert "restoring 75%, 25 left" in text
    assert "80 (80% of its limit)" in text


def test_status_says_how_fast_the_fleet_is():
    before = Look(survey_of(committed=400), [], NOW_MS - 2_000)
    seen = seen_now(survey_of(), [PAGE], before)
    assert (seen["arriving_per_s"], seen["committed_per_s"]) == (0.0, 300.0)
    assert "0 records/s arrive, 300/s are committed" in printed(seen)
    assert seen_now(survey_of(), [PAGE])["committed_per_s"] is None


@pytest.mark.parametrize(
    ("surveyed", "pages", "says", "state"),
    [
        (survey_of(owner=None), [], "no worker is running; start one with `dedup run`", "not running"),
        (survey_of(), [PAGE], "1 of 2 partitions have no worker: the group is assigning them", "not running"),
        (survey_of(), [], "1 of 1 workers do not answer (a), so their tasks' states are unknown", "no answer"),
        (survey_of(), [PAGE | {"tasks": []}], "missing topics: out.late", "starting"),
    ],
)
def test_status_says_what_is_wrong_and_what_to_do(surveyed, pages, says, state):
    seen = seen_now(surveyed, pages)
    assert any(alert.startswith(says) for alert in seen["alerts"]), seen["alerts"]
    assert state in printed(seen)


def test_status_says_that_nothing_is_committed_only_if_records_wait_for_long_and_all_partitions_have_workers():
    whole = survey_of() | {"tasks": survey_of()["tasks"][:1]}
    late = PAGE | {"tasks": [task | {"seconds_since_commit": 40} for task in PAGE["tasks"]]}
    fresh = whole | {"tasks": [task | {"oldest_ms": NOW_MS - 2_000} for task in whole["tasks"]]}

    def stuck(surveyed, page):
        alerts = seen_now(surveyed, [page], Look(surveyed, [page], NOW_MS - 1_000))["alerts"]
        return [alert for alert in alerts if alert.startswith("nothing was committed for 40 s although records wait")]

    assert stuck(whole, late)
    assert not stuck(whole, PAGE), "an old record"
    assert not stuck(fresh, late), "a record after a quiet time"
    assert not stuck(survey_of(), late), "a partition without a worker"
    assert stuck(whole, late | {"commit_interval_s": 9.9})
    assert not stuck(whole, late | {"commit_interval_s": 60.0}), "a long commit interval"


@pytest.mark.parametrize("width", [80, 120])
def test_status_keeps_the_partition_number_on_a_narrow_terminal(width):
    """Was: at 80 columns, the topic's name was cut, and the partition's number with it."""
    long = "payments.card-authorizations.production.eu-central-1.v2"
    text = printed(seen_now(survey_of(topic=long), [PAGE]), width)
    assert "payments.card…u-central-1.v2/0" in text
    assert "payments.card…u-central-1.v2/1" in text
    (head,) = (line for line in text.splitlines() if line.startswith("partition"))
    assert ("changelog" in head) is (width == 120)
    assert all(len(line) <= width for line in text.splitlines())
    assert shortened(long, {long, long.replace("production", "staging")}) == long


def test_status_says_what_is_missing_and_which_command_helps():
    """Was: it named `dedup apply`, which refuses in these cases, and `dedup run`, which does, too."""
    nobody = survey_of(owner=None)

    def alerts(**more):
        return seen_now(nobody | more, [])["alerts"]

    start = "no worker is running; remove the cause above, and then start one with `dedup run`"
    source, other, last = alerts(missing_topics=["c", "out.late"], missing_sources=["c"])
    assert source == "missing source topics: c; create them, or correct `source.topics`"
    assert other == "missing topics: out.late; then `dedup apply` creates them"
    assert last == start
    deleted, last = alerts(missing_topics=["t.changelog"], deleted_topics=["t.changelog"])
    assert deleted.startswith("deleted topics: t.changelog. The group has committed offsets")
    assert deleted.endswith("bring them back, or start over with `dedup reset`")
    assert last == start
    half, last = alerts(missing_topics=["t.changelog"], deleted_topics=["t.changelog"], reset_interrupted=True)
    assert half.endswith("run the same `dedup reset` again to finish it")
    assert last == start


class Brokers:
    """Answers for a topic of two partitions, of which one has no leader, and for no changelog."""

    def __init__(self, metadata: str = "") -> None:
        self.position = Position(7, metadata=metadata)

    async def topics(self, names: Any) -> Any:
        if isinstance(names, tuple):
            return dict.fromkeys(names, 3)  # of the wire: the layout topic does not exist
        return {"c": Topic("c", "1", 2, {}, (1,))}

    async def bounds(self, place: TopicPartition) -> LogBounds:
        assert place == ("c", 0), "nobody answers for a partition without a leader"
        return LogBounds(0, 7)

    async def committed_offset(self, _group: str, _place: TopicPartition, *, stable: bool) -> CommittedOffset:
        assert not stable
        return CommittedOffset(0, self.position)


@pytest.mark.parametrize("metadata", ["", RESETTING])
def test_status_shows_partitions_without_a_leader(monkeypatch, metadata):
    """Was: status waited for the leader forever."""

    async def nobody(_group):
        return []

    monkeypatch.setattr(Group, "members", nobody)
    brokers: Any = Brokers(metadata)
    direct = topology(source="topics: [c], partitioned_by: tracking_id")
    found = asyncio.run(survey(direct, brokers, brokers))
    assert found["leaderless"] == {"c": [1]}
    assert found["deleted_topics"] == ["t.changelog"]
    assert found["missing_sources"] == []
    assert found["reset_interrupted"] is (metadata == RESETTING)
    assert [(task["committed"], task["end"], task["lag"]) for task in found["tasks"]] == [(7, 7, 0), (7, None, None)]
    text = printed(seen_now(found, []))
    assert re.search(r"c/1 +nobody +no leader +- ", text)
    assert "partitions without a leader: c 1: start the brokers that hold these partitions" in text


def test_a_watched_status_goes_on_after_an_error(monkeypatch):
    """Was: it ended with exit code 5 when the brokers were away for 20 s."""
    monkeypatch.setattr(status, "WATCH_S", 0)
    shown: list[tuple[int, str | None]] = []
    look = Look(survey_of(), [PAGE], NOW_MS)
    found = iter([look, BrokerUnavailable("no answer."), StateIncompatible("gone."), look, KeyboardInterrupt()])

    async def next_look() -> Look:
        each = next(found)
        if isinstance(each, Look):
            return each
        raise each

    def show(seen, failure=None):
        shown.append((seen["lag"], failure))

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(follow(next_look, show, watch=True))
    assert shown == [(205, None), (205, "no answer."), (205, "gone."), (205, None)]


@pytest.mark.parametrize(("watch", "looks"), [(True, 0), (False, 0), (False, 1)])
def test_a_status_that_cannot_be_determined_is_an_error(monkeypatch, watch, looks):
    monkeypatch.setattr(status, "RATE_S", 0)
    found = iter([Look(survey_of(), [PAGE], NOW_MS)] * looks)

    async def next_look() -> Look:
        for each in found:
            return each
        raise BrokerUnavailable("no answer.")

    with pytest.raises(BrokerUnavailable):
        asyncio.run(follow(next_look, lambda *_: None, watch=watch))


def test_an_error_while_watching_goes_to_stderr(capsys):
    with showing(watch=True, as_json=True) as show:
        show({"lag": 1}, "no answer.")
    assert capsys.readouterr() == ("", "no answer.\n")


def test_watched_in_a_pipe_a_status_is_a_line(capsys):
    with showing(watch=True, as_json=True) as show:
        show({"lag": 1})
        show({"lag": 0})
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [{"lag": 1}, {"lag": 0}]


ANSWERS: dict[str, Any] = {
    "a": {"topology": "clicks", "id": "a", "asked": [0], "partitions": 2, "belongs_to": None,
          "sightings": [{"partition": 0, "first_ms": 0, "last_ms": 0, "guarded_until_ms": 86_400_000, "source": "c/0/5"}]},
    "b": {"topology": "clicks", "id": "b", "asked": [0, 1], "partitions": 2, "belongs_to": None, "sightings": []},
    "c": {"topology": "clicks", "id": "c", "asked": [0], "partitions": 2, "belongs_to": 1, "sightings": []},
    "d": {"topology": "other", "id": "d", "asked": [0], "partitions": 2, "belongs_to": 1, "sightings": []},
}  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        found: Mapping[str, Any] | None = ANSWERS.get(self.path.rsplit("/", 1)[1])
        self.send_response(200 if found else 400)
        self.end_headers()
        self.wfile.write(json.dumps(found or {"error": "it is none"}).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with served(Handler) as address:
        yield address


@contextmanager
def served(handler: type[Handler]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_no_redirect_and_no_proxy_gets_the_token(monkeypatch):
    asked = []

    class Elsewhere(Handler):
        def do_GET(self):
            asked.append(self.headers["Authorization"])
            super().do_GET()

    class Moved(Handler):
        def do_GET(self):
            self.send_response(302)
            self.send_header("Location", elsewhere)
            self.end_headers()

    with served(Elsewhere) as elsewhere, served(Moved) as moved:
        monkeypatch.setenv("http_proxy", elsewhere)
        monkeypatch.delenv("no_proxy", raising=False)
        settings = Settings(brokers=("b:1",), web=Web(token=Secret("canary")))
        with pytest.raises(NotReached, match="302"):
            ask(moved, "/api/status", settings)
    assert asked == []


@pytest.mark.parametrize(
    ("code", "body"),
    [
        (400, b"Client sent an HTTP request to an HTTPS server.\n"),
        (400, b"[1]"),
        (400, b'{"error": 7}'),
        (404, b"{}"),
        (200, b"[1, 2]"),
        (200, b"{}"),
        (200, b'"x"'),
        (200, b"<html>"),
        (200, b"\xff"),
        (None, b"not HTTP\r\n\r\n"),
    ],
)
def test_another_server_than_a_worker_is_told_in_a_sentence(code, body):
    """Was: a traceback."""

    class Other(Handler):
        def do_GET(self):
            if code is not None:
                self.send_response(code)
                self.end_headers()
            self.wfile.write(body)

    settings = Settings(brokers=("b:1",))
    with served(Other) as at:
        with pytest.raises(NotReached, match=at) as caught:
            ask_id(topology(), "x", [at], settings)
        fleet = ask_fleet("t", [at], settings)
    assert isinstance(caught.value, DedupError)
    assert fleet.pages == []
    assert all(said.startswith(f"{at} answered") for said in fleet.refusals)
    assert bool(fleet.refusals) is isinstance(caught.value, OtherAnswer)


def test_a_refused_token_is_told():
    """Was: status said only to name the workers' pages with --url."""

    class Locked(Handler):
        def do_GET(self):
            self.send_response(401)
            self.end_headers()

    with served(Locked) as at:
        fleet = ask_fleet("t", [at], Settings(brokers=("b:1",), web=Web(token=Secret("canary"))))
    said = f"{at} refused the token (401 Unauthorized); set web.token to the worker's"
    assert fleet == ([], [said])
    alerts = looked(Look(survey_of(), [], NOW_MS, fleet.refusals))["alerts"]
    assert said in alerts
    assert "1 of 1 workers do not answer (a), so their tasks' states are unknown: see above" in alerts
    assert said in looked(Look(survey_of(), [PAGE], NOW_MS, fleet.refusals))["alerts"]


@pytest.mark.parametrize(
    ("tracking_id", "code", "text"),
    [
        ("a", 0, "seen 1970-01-01T00:00:00Z in c/0/5; guarded until 1970-01-02T00:00:00Z of event time"),
        ("b", 0, "not known: never seen, or its sighting has expired"),
        ("c", 0, "not known to this worker, which has [0]; the ID is in partition 1"),
        ("d", 1, "is a worker of 'other', not of"),
        ("e", 2, "it is none"),
    ],
)
def test_lookup_says_what_a_worker_knows(url, tmp_path, tracking_id, code, text):
    path = tmp_path / "clicks.yaml"
    path.write_text(
        "dedup: 1\nname: clicks\nsource: {topics: [c]}\ntracking_id: {field: id}\nguard_period: 10s\noutput: {topic: o}\n"
    )
    found, output = dedup("lookup", str(path), tracking_id, "--url", url, "--set", "brokers=localhost:1")
    assert found == code
    assert text in output


def test_explain_and_lookup_refuse_an_id_that_is_not_utf8():
    said = "ID: '\\udcff' is not UTF-8; only an ID that is UTF-8 can be looked up"
    for command in ("explain", "lookup"):
        assert dedup(command, SIMPLEST, "\udcff", "--set", "brokers=localhost:1") == (2, said)


def test_lookup_without_a_worker_says_so():
    code, output = dedup("lookup", SIMPLEST, "a", "--set", "brokers=localhost:1", "--set", "web.port=1")
    assert code == 1
    assert "no worker answers at http://127.0.0.1:1" in output
