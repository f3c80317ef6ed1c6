"""The demo's producer loses no event and makes real duplicates when answers get lost."""

from __future__ import annotations

import pytest

from dedup.chaos.load import AtLeastOnceProducer, Disturbance
from dedup.embedded.flights import flights
from dedup.embedded.kafka_node import EmbeddedKafka
from dedup.errors import BrokerUnavailable
from tests.brokers import admin_of, read_all
from tests.fault_proxy import RoughProxy


@pytest.fixture(scope="module")
def node():
    with EmbeddedKafka(proxied=1) as started:
        yield started


def test_swallowed_answers_become_duplicates_and_nothing_is_lost(node):
    topic = admin_of(node.bootstrap).create_topic("flights", partitions=4)
    events = [(flight.key, flight.value) for flight in flights(20_000)]
    listener = node.proxied[0]
    with RoughProxy(listener.broker_port, port=listener.proxy_port) as proxy:
        producer = AtLeastOnceProducer(
            listener.bootstrap, topic, events_per_second=10_000, disturbance=Disturbance(proxy.swallow_answers, 2000)
        )
        sent = producer.send_all(events)
        assert proxy.counts().cut >= 5
    assert (sent.events, sent.disturbances) == (20_000, 10)
    records = read_all(node.bootstrap, topic)
    assert {(record.key(), record.value()) for record in records} == set(events)
    assert len(records) > len(events)
    partitions: dict[bytes, set[int]] = {}
    for record in records:
        partitions.setdefault(record.key(), set()).add(record.partition())
    assert all(len(of_one_id) == 1 for of_one_id in partitions.values())


def test_a_missing_topic_is_an_error_that_names_it(node):
    with pytest.raises(BrokerUnavailable, match="no-such-topic"):
        AtLeastOnceProducer(node.bootstrap, "no-such-topic").send_all([(b"k", b"v")])
