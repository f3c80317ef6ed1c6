"""A cluster of three nodes in place of the rough broker, for the modules that import these fixtures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.brokers import RunningKafka
from tests.kafka_cluster import KafkaCluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[KafkaCluster]:
    with KafkaCluster() as running:
        yield running


@pytest.fixture(scope="module")
def kafka(cluster: KafkaCluster) -> RunningKafka:
    return RunningKafka(cluster.bootstrap)
