"""A worker whose brokers limit how much it may write."""

from __future__ import annotations

import asyncio
import random
import string

import pytest
from aiokafka.client import ConnectionGroup
from aiokafka.protocol.api import RequestStruct
from aiokafka.protocol.types import Array, Boolean, Float64, Int16, Int32, Schema, String

from dedup.kafka.client import KafkaWire
from dedup.kafka.connection import Connection
from dedup.kafka.requests import OneVersion
from dedup.settings import Security
from tests.integration.conftest import MakeJob
from tests.integration.workload import BASE_MS, Event

pytestmark = pytest.mark.broker
TEXT = String("utf-8")
ENTITY = Array(("kind", TEXT), ("name", TEXT))


class AlterClientQuotas_v0(OneVersion, RequestStruct):  # type: ignore[misc]  # noqa: N801  # untyped base; aiokafka's naming
    """Sets quotas (KIP-546)."""

    API_KEY, API_VERSION = 49, 0
    SCHEMA = Schema(
        ("entries", Array(("entity", ENTITY), ("ops", Array(("key", TEXT), ("value", Float64), ("remove", Boolean))))),
        ("validate_only", Boolean),
    )
    ANSWER = Schema(
        ("throttle_time_ms", Int32), ("entries", Array(("code", Int16), ("message", TEXT), ("entity", ENTITY)))
    )


async def limit(bootstrap: str, client_id: str, bytes_per_s: float) -> None:
    """A client with this ID may write so much from now on."""
    wire = KafkaWire(Connection((bootstrap,), Security()))
    await wire.start()
    quota = ("producer_byte_rate", bytes_per_s, False)
    request = AlterClientQuotas_v0([([("client-id", client_id)], [quota])], False)  # positional fields
    answer = await wire.send(wire._client.get_random_node(), request, ConnectionGroup.DEFAULT)
    assert [code for code, *_ in answer.entries] == [0]
    await wire.stop()


def test_a_producer_quota_delays_commits_and_is_named(make_job: MakeJob) -> None:
    """Was: each transaction that exceeded the quota was given up after 10 s and sent again, without end."""
    job = make_job(config={"transaction_timeout": "120s"})
    dice = random.Random(3)
    values = ["".join(dice.choices(string.ascii_letters, k=10_000)) for _ in range(30)]
    job.send([Event(own % 2, b'{"id": %d, "v": "%s"}' % (own, v.encode()), BASE_MS) for own, v in enumerate(values)])
    asyncio.run(limit(job.kafka.bootstrap, f"dedup-{job.name}", 10_000))
    worker = job.finish()
    assert "because it exceeds its quota producer_byte_rate" in worker.log
    assert "retried until a commit succeeds" not in worker.log
    assert len(job.read(job.output)) == len(values)
