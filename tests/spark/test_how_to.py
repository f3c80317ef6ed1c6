"""Every how-to page is followed as it stands: an old program is stopped, the fleet learns the history and goes on.

Of the pages only names of topics and offsets are changed. `kafka-consumer-groups.sh` is Kafka's own: its question, the
offsets of a group, is asked with a client.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from dedup.cli.main import create_app
from dedup.core.murmur2 import partitions
from tests.brokers import producer_of, read_all
from tests.integration.workload import BASE_MS

pytestmark = [pytest.mark.broker, pytest.mark.timeout(600)]
DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("kafka-streams", "faust", "redis")
OLD_GROUP = "old-dedup"
FIRST, THEN, IDS = 300, 400, 200


def blocks(page: str, kind: str) -> list[str]:
    text = (DOCS / f"how-to-from-{page}.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def order(number: int, chosen: int) -> bytes:
    """Return an order that every page's topology finds its ID in."""
    at = datetime.fromtimestamp((BASE_MS + number * 1_000) / 1_000, UTC).isoformat().replace("+00:00", "Z")
    name = f"A-{chosen}"
    return json.dumps({"order": {"id": name}, "id": name, "order_id": name, "created_at": at, "n": number}).encode()


def send(kafka, topic: str, numbers: range) -> None:
    producer = producer_of(kafka.bootstrap)
    for number in numbers:
        # Each ID comes three times and more, before the cut and after it.
        chosen = number * 7 % IDS if number < FIRST else number * 11 % (2 * IDS)
        key = b"A-%d" % chosen
        stamp = BASE_MS + number * 1_000
        producer.produce(topic, order(number, chosen), key, partition=partitions([key], 2)[0], timestamp=stamp)
    assert producer.flush(30) == 0


def id_of(value: bytes | None) -> str:
    return str(json.loads(value or b"{}")["order_id"])


def stopped_old_program(kafka, topic: str, group: str) -> dict[int, int]:
    """The old program has forwarded all that is in the topic; return the offsets its group has then."""
    ends: dict[int, int] = {}
    for message in read_all(kafka.bootstrap, topic):
        ends[message.partition() or 0] = (message.offset() or 0) + 1
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": group, "enable.auto.commit": False})
    try:
        places = [TopicPartition(topic, partition, offset) for partition, offset in ends.items()]
        consumer.commit(offsets=places, asynchronous=False)
        return {place.partition: place.offset for place in consumer.committed(places, timeout=30)}
    finally:
        consumer.close()


class Practice:
    """A page's files in a directory of their own, and its commands."""

    def __init__(self, directory: Path, kafka, page: str, names: str) -> None:
        self.directory = directory
        self.names = names
        (made,) = blocks(page, "yaml")
        self.write("topologies/orders.yaml", self.here(made))
        state = directory / "state"
        self.write("config/production.yaml", f"brokers: ['{kafka.bootstrap}']\nstate_dir: {state}\n")

    def write(self, name: str, text: str) -> None:
        (self.directory / name).parent.mkdir(exist_ok=True)
        (self.directory / name).write_text(text, encoding="utf-8")

    def here(self, text: str) -> str:
        """Return the text with this run's names of topics and topology."""
        return re.sub(r"\borders\b(?!\.yaml)", self.names, text)

    def until(self, line: str, offsets: dict[int, int]) -> str:
        """Return the command with the offsets written down."""
        cut = ",".join(f"{self.names}/{partition}={offset}" for partition, offset in sorted(offsets.items()))
        assert re.search(r"--until orders/0=1200,orders/1=900", line)
        return re.sub(r"--until \S+", f"--until {cut}", line)

    def paste(self, line: str) -> None:
        """The command ends well."""
        program, *arguments = shlex.split(line)
        assert program == "dedup"
        if arguments[0] == "spark":
            # In this process: it has a session already.
            result = CliRunner().invoke(create_app(), [*arguments, "--quiet"])
            assert result.exit_code == 0, (line, result.output, result.exception)
            return
        command = [sys.executable, "-m", "dedup.cli.main", *arguments, "--exit-when-done", "--set", "web.enabled=false"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
        assert done.returncode == 0, (line, done.stdout, done.stderr)


@pytest.fixture
def practice(spark: SparkSession, kafka, admin, topic_names, tmp_path, monkeypatch) -> Iterator[Practice]:
    """Return a function that makes a page's files, its topics, and what came before the cut."""
    monkeypatch.setattr(SparkSession, "stop", lambda _self: None)
    monkeypatch.chdir(tmp_path)

    def make(page: str) -> Practice:
        made = Practice(tmp_path, kafka, page, topic_names("orders"))
        for topic in (made.names, f"{made.names}.unique"):
            admin.create_topic(topic, 2, {"retention.ms": "-1"})
        send(kafka, made.names, range(FIRST))
        return made

    return make


def after_the_cut(kafka, topic: str, known: set[str]) -> list[str]:
    """The fleet's output holds what is new after the cut, each ID once."""
    found = [id_of(message.value()) for message in read_all(kafka.bootstrap, f"{topic}.unique")]
    sent = {id_of(message.value()) for message in read_all(kafka.bootstrap, topic)}
    assert sorted(found) == sorted(sent - known)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_the_cut_loses_and_doubles_nothing(practice, kafka, page):
    made = practice(page)
    assert OLD_GROUP in "".join(blocks(page, "sh"))
    cut = stopped_old_program(kafka, made.names, f"{made.names}-{OLD_GROUP}")
    known = {id_of(message.value()) for message in read_all(kafka.bootstrap, made.names)}
    send(kafka, made.names, range(FIRST, FIRST + THEN))
    seed, run = [line.removeprefix("$ ") for line in "".join(blocks(page, "console")).splitlines()]
    made.paste(made.until(seed, cut))
    made.paste(run)
    assert after_the_cut(kafka, made.names, known)


def test_what_only_redis_knows_comes_in_as_files(practice, kafka):
    made = practice("redis")
    cut = stopped_old_program(kafka, made.names, f"{made.names}-{OLD_GROUP}")
    (example,) = (json.loads(text) for text in blocks("redis", "json"))
    in_topic = {id_of(message.value()) for message in read_all(kafka.bootstrap, made.names)}
    # Of the next IDs the topic holds nothing any more.
    in_redis = in_topic | {f"A-{number}" for number in range(IDS, IDS + 50)}
    lines = [
        json.dumps({**example, "key": name, "value": order(0, int(name[2:])).decode()}) for name in sorted(in_redis)
    ]
    made.write("redis/keys.json", "\n".join(lines))
    send(kafka, made.names, range(FIRST, FIRST + THEN))
    seed, run = [line.removeprefix("$ ") for line in "".join(blocks("redis", "console")).splitlines()]
    made.paste(made.until(seed, cut) + f" --history {made.directory / 'redis'} --format json-records")
    made.paste(run)
    assert after_the_cut(kafka, made.names, in_redis)
