"""The verifier's client: what it asks again, and what it takes for an answer."""

from types import SimpleNamespace
from typing import ClassVar

import pytest
from confluent_kafka import KafkaError, KafkaException

from dedup.errors import BrokerUnavailable, SettingsError
from dedup.settings import Security, Settings
from dedup.verify import kafka_reader
from dedup.verify.kafka_reader import KafkaReader


class FakeConsumer:
    """Gives the answers it was made with, one after the other; an error is raised."""

    answers: ClassVar[list] = []
    groups: ClassVar[list] = []
    closed = 0

    def __init__(self, config):
        self.group = config["group.id"]

    def committed(self, places, timeout):
        self.groups.append(self.group)
        answer = self.answers.pop(0)
        if isinstance(answer, KafkaError):
            raise KafkaException(answer)
        return [
            SimpleNamespace(partition=p.partition, offset=o, error=e) for p, (o, e) in zip(places, answer, strict=True)
        ]

    def close(self):
        type(self).closed += 1


@pytest.fixture
def consumer(monkeypatch):
    """Return the class in place of the client's; no pause is made between two questions."""
    fake = type("Fake", (FakeConsumer,), {"answers": [], "groups": [], "closed": 0})
    monkeypatch.setattr(kafka_reader, "Consumer", fake)
    monkeypatch.setattr(kafka_reader, "AdminClient", lambda _config: None)
    monkeypatch.setattr(kafka_reader, "_POLL_S", 0)
    return fake


def committed(count=2):
    with KafkaReader(Settings(brokers=("127.0.0.1:1",))) as reader:
        return reader.committed("orders", "in", range(count))


@pytest.mark.parametrize(
    "code",
    [
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.NOT_COORDINATOR,
        KafkaError.UNSTABLE_OFFSET_COMMIT,
        KafkaError._TIMED_OUT,
    ],
)
def test_a_coordinator_that_is_loading_is_asked_again(consumer, code):
    consumer.answers += [KafkaError(code), [(-1, KafkaError(code))], [(5, None)], [(-1001, None)]]
    assert committed() == {0: 5}
    assert consumer.groups == ["orders"] * 4
    assert consumer.closed == 2


def test_partitions_whose_offsets_are_about_to_change_are_asked_one_by_one(consumer):
    """Was: all were asked again at once, and the offsets of many busy partitions could not be read at all."""
    consumer.answers += [KafkaError(KafkaError._TIMED_OUT), KafkaError(KafkaError._TIMED_OUT)]
    consumer.answers += [[(6, None)], [(-1001, None)], [(9, None)]]
    assert committed(3) == {2: 6, 1: 9}


def test_an_answer_for_some_partitions_is_kept(consumer):
    unstable = (-1001, KafkaError(KafkaError.UNSTABLE_OFFSET_COMMIT))
    consumer.answers += [[unstable, (6, None), (-1001, None), unstable], [unstable], [(8, None)], [(9, None)]]
    assert committed(4) == {1: 6, 3: 8, 0: 9}


def test_a_refusal_for_one_partition_is_told_at_once(consumer):
    refused = [(-1001, KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED))]
    consumer.answers += [[(5, None), *refused], refused]
    with pytest.raises(BrokerUnavailable, match="reading the offsets of group orders"):
        committed()


def test_a_refusal_is_told_at_once(consumer):
    consumer.answers += [KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED)]
    with pytest.raises(BrokerUnavailable, match="reading the offsets of group orders"):
        committed()


def test_so_it_is_when_the_patience_is_over(consumer, monkeypatch):
    monkeypatch.setattr(kafka_reader, "_NO_PROGRESS_S", -1)
    consumer.answers += [KafkaError(KafkaError.COORDINATOR_LOAD_IN_PROGRESS)]
    with pytest.raises(BrokerUnavailable):
        committed()


def test_no_partition_is_no_question(consumer):
    assert committed(0) == {}
    assert consumer.groups == []


class Log:
    """A consumer with a queue; it fails where it is told to wait for more although it has something to give."""

    queue: ClassVar[list] = []

    def __init__(self, _config):
        self.assigned = []

    def assign(self, places):
        self.assigned = places

    def unassign(self):
        self.assigned = []

    def consume(self, most, timeout):
        assert self.assigned
        given, self.queue[:] = self.queue[:most], self.queue[most:]
        assert not (given and len(given) < most and timeout), "waits although there is something to judge"
        return given

    def close(self):
        pass


def message(offset, code=None):
    error = None if code is None else KafkaError(code)
    told = {"error": error, "offset": offset, "key": None, "value": b"v", "headers": None, "timestamp": (1, 0)}
    told |= {"topic": "in", "partition": 0}
    return SimpleNamespace(**{name: lambda value=value: value for name, value in told.items()})


def test_what_has_come_is_taken_without_waiting_for_more(monkeypatch):
    """At the end of a partition stand markers: a whole batch would be waited for in vain."""
    fake = type("Fake", (Log,), {"queue": [message(0), message(1), message(4, KafkaError._PARTITION_EOF)]})
    monkeypatch.setattr(kafka_reader, "Consumer", fake)
    monkeypatch.setattr(kafka_reader, "AdminClient", lambda _config: None)
    with KafkaReader(Settings(brokers=("127.0.0.1:1",))) as reader:
        read = list(reader.read("in", 0, 0, 4))
    assert [columns.offsets for columns in read] == [[0, 1]]
    assert fake.queue == []


@pytest.mark.parametrize(("stable", "expected"), [(2, kafka_reader.OpenTransaction), (4, BrokerUnavailable)])
def test_what_is_not_given_is_behind_an_open_transaction_or_an_error(monkeypatch, stable, expected):
    fake = type("Fake", (Log,), {"queue": [message(0), message(1)]})
    monkeypatch.setattr(kafka_reader, "Consumer", fake)
    monkeypatch.setattr(kafka_reader, "AdminClient", lambda _config: None)
    monkeypatch.setattr(kafka_reader, "_NO_PROGRESS_S", -1)
    asked = []
    answer = lambda _self, _topic, _partitions, _which, *isolation: asked.append(isolation) or {0: stable}  # noqa: E731
    monkeypatch.setattr(KafkaReader, "_list_offsets", answer)
    with KafkaReader(Settings(brokers=("127.0.0.1:1",))) as reader, pytest.raises(expected):
        list(reader.read("in", 0, 0, 4))
    assert asked == [(kafka_reader.IsolationLevel.READ_COMMITTED,)]


@pytest.mark.parametrize(
    ("low", "kind", "says"),
    [(5, kafka_reader.StartDeleted, "the records below offset 5"), (1, BrokerUnavailable, "in/0 has lost offset 2")],
)
def test_what_is_out_of_range_was_deleted_or_the_topic_is_not_what_it_was(monkeypatch, low, kind, says):
    queue = [message(0), message(1), message(2, KafkaError._AUTO_OFFSET_RESET)]
    monkeypatch.setattr(kafka_reader, "Consumer", type("Fake", (Log,), {"queue": queue}))
    monkeypatch.setattr(kafka_reader, "AdminClient", lambda _config: None)
    monkeypatch.setattr(kafka_reader, "_BATCH", 1)
    monkeypatch.setattr(KafkaReader, "_list_offsets", lambda *_: {0: low})
    with (
        KafkaReader(Settings(brokers=("127.0.0.1:1",))) as reader,
        pytest.raises(BrokerUnavailable, match=says) as told,
    ):
        list(reader.read("in", 0, 0, 9))
    assert told.type is kind


def test_a_ca_file_that_does_not_exist_is_named():
    """Was: librdkafka's error, which names no file, with a traceback."""
    security = Security(protocol="SSL", ca_file="/no/file")
    with pytest.raises(SettingsError, match=r"security\.ca_file: /no/file cannot be used: No such file"):
        KafkaReader(Settings(brokers=("127.0.0.1:1",), security=security))
