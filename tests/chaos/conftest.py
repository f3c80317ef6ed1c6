"""A rough broker for each module of this directory: it may be killed and frozen, and a proxy stands before it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from dedup.embedded.kafka_node import EmbeddedKafka
from tests import brokers
from tests.brokers import Admin, RunningKafka
from tests.fault_proxy import RoughProxy
from tests.integration.conftest import job, make_job

__all__ = ["job", "make_job"]


@dataclass(frozen=True)
class Rough:
    """A broker and the network before it."""

    kafka: EmbeddedKafka
    proxy: RoughProxy

    @property
    def through_proxy(self) -> str:
        """Where workers connect to that shall meet the proxy's faults."""
        return self.kafka.proxied.bootstrap


@pytest.fixture(scope="module")
def rough() -> Iterator[Rough]:
    """Return a broker of this module's own, healthy at the end of each test that uses it."""
    with EmbeddedKafka(proxied=True, properties={"log.retention.check.interval.ms": "500"}) as kafka:
        listener = kafka.proxied
        with RoughProxy(listener.broker_port, port=listener.proxy_port) as proxy:
            yield Rough(kafka, proxy)


@pytest.fixture(scope="module")
def kafka(rough: Rough) -> RunningKafka:
    """Return the rough broker, for fixtures that know no other name."""
    return RunningKafka(rough.kafka.bootstrap, rough.kafka)


@pytest.fixture(scope="module")
def admin(kafka: RunningKafka) -> Admin:
    """Return what creates topics on the rough broker."""
    return brokers.admin_of(kafka.bootstrap)
