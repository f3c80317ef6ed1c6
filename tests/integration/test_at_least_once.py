"""The demo's producer loses no event and makes real duplicates when answers get lost."""

from __future__ import annotations

import pytest

from dedup.chaos.load import ANY_PARTITION, AT_LEAST_ONCE, Made, Sender
from dedup.embedded.flights import flights
from dedup.embedded.kafka_node import EmbeddedKafka
from dedup.settings import Settings
from tests.brokers import admin_of, read_all
from tests.fault_proxy import RoughProxy
from tests.integration.fleet import until


@pytest.fixture(scope="module")
def node():
    with EmbeddedKafka(proxied=True) as started:
        yield started


def test_swallowed_answers_become_duplicates_and_nothing_is_lost(node):
    topic = admin_of(node.bootstrap).create_topic("flights", partitions=4)
    events = [(flight.key, flight.value) for flight in flights(20_000)]
    listener = node.proxied
    settings = Settings(brokers=(listener.bootstrap,))
    with RoughProxy(listener.broker_port, port=listener.proxy_port) as proxy:

        def records():
            for number, (key, value) in enumerate(events, 1):
                yield Made(topic, ANY_PARTITION, key, value, (), number)
                if number % 2000 == 0:
                    proxy.swallow_answers()

        with Sender(records(), settings, per_s=10_000, options=AT_LEAST_ONCE) as sender:
            until(lambda: not sender.running, "all are sent")
            assert sender.stop() == 20_000
        assert proxy.counts().cut >= 5
    records = read_all(node.bootstrap, topic)
    assert {(record.key(), record.value()) for record in records} == set(events)
    assert len(records) > len(events)
    partitions: dict[bytes, set[int]] = {}
    for record in records:
        partitions.setdefault(record.key(), set()).add(record.partition())
    assert all(len(of_one_id) == 1 for of_one_id in partitions.values())
