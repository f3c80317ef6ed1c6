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
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from dedup.cli.main import create_app
from dedup.core.partitioner import partitions
from tests.brokers import producer_of, read_all
from tests.integration.workload import BASE_MS

pytestmark = [pytest.mark.broker, pytest.mark.timeout(600)]
DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("kafka-streams", "faust", "redis", "redis, its keys as files")
OLD_GROUP = "old-dedup"
FIRST, THEN, IDS = 300, 400, 200
ONLY_IN_REDIS = range(IDS, IDS + 50)
"""Of these IDs, which come after the cut, the topic holds nothing any more."""
WITHIN_S = 200


def blocks(page: str, kind: str) -> list[str]:
    text = (DOCS / f"how-to-from-{page.partition(',')[0]}.md").read_text(encoding="utf-8")
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
    """A page followed in a directory of its own, up to the old program's last record."""

    def __init__(self, directory: Path, kafka, page: str, names: str) -> None:
        self._kafka = kafka
        self._directory = directory
        self._names = names
        (made,) = blocks(page, "yaml")
        # This run's names of topics and topology.
        self._write("topologies/orders.yaml", re.sub(r"\borders\b", names, made))
        state = directory / "state"
        self._write("config/production.yaml", f"brokers: ['{kafka.bootstrap}']\nstate_dir: {state}\n")
        send(kafka, names, range(FIRST))
        self._cut = stopped_old_program(kafka, names, f"{names}-{OLD_GROUP}")
        self._known = self._ids()
        self._history = self._from_redis() if page.endswith("files") else ""
        assert OLD_GROUP in "".join(blocks(page, "sh"))
        self._seed, self._run = [line.removeprefix("$ ") for line in "".join(blocks(page, "console")).splitlines()]
        send(kafka, names, range(FIRST, FIRST + THEN))

    def _write(self, name: str, text: str) -> None:
        (self._directory / name).parent.mkdir(parents=True, exist_ok=True)
        (self._directory / name).write_text(text, encoding="utf-8")

    def _ids(self) -> set[str]:
        return {id_of(message.value()) for message in read_all(self._kafka.bootstrap, self._names)}

    def _from_redis(self) -> str:
        """The keys are files, as the page shows one; return the seed's option."""
        (example,) = (json.loads(text) for text in blocks("redis", "json"))
        self._known |= {f"A-{number}" for number in ONLY_IN_REDIS}
        lines = [
            json.dumps({**example, "key": name, "value": order(0, int(name[2:])).decode()})
            for name in sorted(self._known)
        ]
        self._write("keys/keys.json", "\n".join(lines))
        return f" --history {self._directory / 'keys'} --format json-records"

    def seed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The page's seed, with the offsets that were written down, ends well; in this process, which has a session."""
        monkeypatch.chdir(self._directory)
        cut = ",".join(f"{self._names}/{partition}={offset}" for partition, offset in sorted(self._cut.items()))
        line, times = re.subn(r"orders/0=1200,orders/1=900", cut, self._seed)
        program, *arguments = shlex.split(line + self._history)
        assert (program, times) == ("dedup", 1)
        result = CliRunner().invoke(create_app(), [*arguments, "--quiet"])
        assert result.exit_code == 0, (line, result.output, result.exception)

    def run(self) -> subprocess.Popen[str]:
        """Start the page's worker, which shall end when it has judged everything."""
        program, *arguments = shlex.split(self._run)
        assert program == "dedup"
        arguments += ["--exit-when-done", "--quiet", "--set", "web.enabled=false"]
        return subprocess.Popen(
            [sys.executable, "-m", "dedup.cli.main", *arguments],
            cwd=self._directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def lost_and_doubled(self) -> tuple[set[str], list[str]]:
        """Return of what is new after the cut what is not in the output, and what is there more than once."""
        found = Counter(id_of(message.value()) for message in read_all(self._kafka.bootstrap, f"{self._names}.unique"))
        wanted = self._ids() - self._known
        assert wanted
        return wanted - set(found), [name for name, times in found.items() if times > 1 or name not in wanted]


@pytest.fixture
def followed(spark: SparkSession, kafka, admin, topic_names, tmp_path, monkeypatch) -> dict[str, Practice]:
    """Return every page with its topics, files, and the records before and after the cut."""
    monkeypatch.setattr(SparkSession, "stop", lambda _self: None)
    made = {}
    for number, page in enumerate(PAGES):
        names = topic_names("orders")
        for topic in (names, f"{names}.unique"):
            admin.create_topic(topic, 2, {"retention.ms": "-1"})
        made[page] = Practice(tmp_path / str(number), kafka, page, names)
    return made


def test_the_cut_of_every_page_loses_and_doubles_nothing(followed, monkeypatch):
    for page in followed.values():
        page.seed(monkeypatch)
    workers = {name: page.run() for name, page in followed.items()}
    try:
        said = {name: worker.communicate(timeout=WITHIN_S)[0] for name, worker in workers.items()}
    finally:
        for worker in workers.values():
            worker.kill()
            worker.wait()
    assert {name: worker.returncode for name, worker in workers.items()} == dict.fromkeys(PAGES, 0), said
    assert {name: page.lost_and_doubled() for name, page in followed.items()} == dict.fromkeys(PAGES, (set(), []))
