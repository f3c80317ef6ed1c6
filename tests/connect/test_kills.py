"""SIGKILL again and again, on ingest, on sink, and on each stage of the whole chain: exact at both ends.

A committed reader never sees a record twice: what it reads is looked at while the kills go on.
"""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Self

import pytest

from tests.connect.stage import FileFeeder, Stage, made, postgres_rows, sqlite_rows
from tests.integration.fleet import KEPT
from tests.waiting import LoggedProcess, until

pytestmark = pytest.mark.broker
KILLS = [
    pytest.param(5, id="5 kills"),
    pytest.param(50, id="50 kills", marks=[pytest.mark.long, pytest.mark.timeout(1200)]),
]
ENDED = {0, 128 + signal.SIGTERM}
"""In good order; or by the signal itself, where the last process had only just been started."""
PER_S = 600
PER_KILL = 1_500


def killed_now_and_then(start, kills: int, alive, seed: int) -> LoggedProcess:
    """Each process that ``start`` gives gets SIGKILL after 0.5 to 3 s; the last one is left running.

    Every second one is killed that long after it has begun its work: on a busy machine others do not come so far.
    """
    dice = random.Random(seed)
    for kill in range(kills):
        process = start()
        if kill % 2:
            until(lambda process=process: " taken; " in process.log or not process.running, "it has begun")
        end = time.monotonic() + dice.uniform(0.5, 3.0)
        until(lambda end=end, process=process: time.monotonic() > end or not process.running, "its time is over")
        assert process.running, f"it ended by itself; log:\n{process.log}"
        process.kill()
        alive()
    return start()


def once(stage: Stage, topic: str) -> None:
    """No committed record is there twice."""
    found = Counter(value["n"] for value in stage.values(topic))
    assert [number for number, times in found.items() if times > 1] == []


@pytest.mark.parametrize("kills", KILLS)
def test_ingest(stage, admin, kills):
    admin.create_topic(stage.topic, 2, KEPT)
    count = kills * PER_KILL
    file = str(stage.ingest_file(stage.files()))
    path = stage.incoming / "a.jsonl"
    path.touch()

    def alive() -> None:
        once(stage, stage.topic)
        feeder.more()

    with FileFeeder(path, count, PER_S, PER_KILL) as feeder:
        last = killed_now_and_then(lambda: stage.start("ingest", file), kills, alive, kills)
        assert feeder.wait() == 0
        until(lambda: len(stage.read()) >= count, f"everything is sent; log:\n{last.log}")
    assert last.stop() in ENDED
    found = stage.values()
    assert sorted(value["n"] for value in found) == list(range(count))
    assert_order(stage)


def assert_order(stage: Stage) -> None:
    """Each partition has the records in the order of the file."""
    last: dict[int, int] = {}
    for message in stage.read():
        number = json.loads(message.value())["n"]
        assert number > last.get(message.partition(), -1)
        last[message.partition()] = number


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
@pytest.mark.parametrize("kills", KILLS)
def test_sink(stage, admin, kills, kind, request):
    admin.create_topic(stage.topic, 2, KEPT)
    count = kills * PER_KILL
    url = f"sqlite:///{stage.directory}/sink.db" if kind == "sqlite" else request.getfixturevalue("postgres")
    rows = rows_of(stage, url)
    bad = 20 * kills
    file = sink_file(stage)
    with feeding_topic(stage, count, bad) as feeder:
        last = killed_now_and_then(
            lambda: stage.start("sink", file, environ={"SINK_URL": url}), kills, lambda: feeder.more(rows), kills
        )
        feeder.wait()
        until(lambda: total(rows) >= count, f"everything is written; log:\n{last.log}")
        until(lambda: len(stage.read(f"{stage.name}.sink.dead-letter")) >= bad, f"all letters; log:\n{last.log}")
    assert last.stop() in ENDED
    assert rows("SELECT n FROM rows ORDER BY n") == [(number,) for number in range(count)]
    places = [letter["dedup-source"] for letter in stage.letters(f"{stage.name}.sink.dead-letter")]
    assert len(places) == len(set(places)) == bad


def sink_file(stage: Stage) -> str:
    path = stage.directory / "sink.yaml"
    columns = "  columns: {id: id, n: {field: n, type: integer}}"
    path.write_text(stage.topology_text("${env:SINK_URL}", columns), encoding="utf-8")
    return str(path)


def rows_of(stage: Stage, url: str):
    if url.startswith("sqlite"):
        return lambda sql: sqlite_rows(stage.directory / "sink.db", sql)
    return lambda sql: postgres_rows(url, sql)


def total(rows) -> int:
    return rows("SELECT count(*) FROM rows")[0][0] if made(rows) else 0


def distinct(rows) -> None:
    assert not made(rows) or rows("SELECT count(*) - count(DISTINCT n) FROM rows") == [(0,)]


class feeding_topic:  # noqa: N801  # used as a function is
    """A thread sends events, some of them no rows: as many for every kill, so that none finds the sink idle."""

    def __init__(self, stage: Stage, count: int, bad: int) -> None:
        self._stop = threading.Event()
        self._lives = threading.Semaphore(1)
        self._thread = threading.Thread(target=self._send, args=(stage, count, bad), daemon=True)

    def _send(self, stage: Stage, count: int, bad: int) -> None:
        every, producer = count // bad, stage.producer()
        for first in range(0, count, 100):
            if first % PER_KILL == 0:
                self._lives.acquire()
            numbers = range(first, min(first + 100, count))
            records = [(b"e%d" % n, b'{"id":"e%d","n":%d}' % (n, n), 1_700_000_000_000 + n) for n in numbers]
            records += [(b"x", b'{"id":"x%d","n":"bad"}' % n, 1_700_000_000_000) for n in numbers if n % every == 0]
            stage.send(records, producer=producer)
            if self._stop.wait(100 / PER_S):
                return

    def more(self, rows) -> None:
        """After a kill: no row is there twice, and the next life's events come."""
        distinct(rows)
        self._lives.release()

    def wait(self) -> None:
        """All events are in the topic."""
        self._thread.join()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._lives.release()
        self._thread.join()


@pytest.mark.parametrize("kills", KILLS)
def test_the_whole_chain(stage, admin, kills, tmp_path: Path):
    """File → topic → deduplication → table, each stage killed in its turn."""
    source, count = f"{stage.name}.source", kills * PER_KILL
    admin.create_topic(source, 2, KEPT)
    admin.create_topic(stage.topic, 2, KEPT)
    ingest = tmp_path / "ingest.yaml"
    text = stage.ingest_text(stage.files()).replace(f"topic: {stage.topic}", f"topic: {source}")
    ingest.write_text(text.replace(f"name: {stage.name}", f"name: {stage.name}-files"), encoding="utf-8")
    topology = Path(sink_file(stage))
    more = f"output: {{topic: {stage.topic}}}\nsink:"
    topology.write_text(topology.read_text(encoding="utf-8").replace("sink:", more, 1), encoding="utf-8")
    environ = {"SINK_URL": f"sqlite:///{stage.directory}/sink.db"}
    rows = rows_of(stage, environ["SINK_URL"])
    starts = {
        "ingest": lambda: stage.start("ingest", str(ingest), log="ingest"),
        "run": lambda: stage.start("run", str(topology), "--quiet", log="worker"),
        "sink": lambda: stage.start("sink", str(topology), log="sink", environ=environ),
    }
    (stage.incoming / "a.jsonl").touch()
    begun = {"ingest": " taken; ", "run": ": running from offset ", "sink": " taken; "}
    with FileFeeder(stage.incoming / "a.jsonl", count, PER_S, PER_KILL) as feeder:
        running = {name: start() for name, start in starts.items()}
        dice = random.Random(kills)
        for kill in range(kills):
            name = list(starts)[kill % 3]
            if kill % 2:
                until(lambda name=name: begun[name] in running[name].log, f"{name} has begun")
            end = time.monotonic() + dice.uniform(0.5, 3.0)
            until(lambda end=end: time.monotonic() > end, "its time is over")
            assert all(process.running for process in running.values()), [each.log for each in running.values()]
            running[name].kill()
            running[name] = starts[name]()
            feeder.more()
        assert feeder.wait() == 0
        until(lambda: total(rows) >= count, str([each.log[-1500:] for each in running.values()]))
    assert {process.stop() for process in running.values()} <= ENDED
    assert rows("SELECT n FROM rows ORDER BY n") == [(number,) for number in range(count)]
    for topic in (source, stage.topic):
        assert sorted(value["n"] for value in stage.values(topic)) == list(range(count))
