"""Which transactions a broker knows: ListTransactions v0 (KIP-664), which neither client library offers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from aiokafka.client import AIOKafkaClient
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import CompactArray, CompactString, Int16, Int32, Int64, Schema, TaggedFields

from tests.waiting import until

if TYPE_CHECKING:
    from tests.integration.fleet import Job

LIST_TRANSACTIONS: Final = 66
ENDING: Final = frozenset({"PrepareCommit", "PrepareAbort", "PrepareEpochFence"})
"""How it ends is decided; not every partition has its marker yet."""
OPEN: Final = ENDING | {"Ongoing"}


class ListTransactionsResponse_v0(Response):  # type: ignore[misc]  # noqa: N801  # untyped base; aiokafka's naming
    API_KEY = LIST_TRANSACTIONS
    API_VERSION = 0
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("error_code", Int16),
        ("unknown_state_filters", CompactArray(CompactString("utf-8"))),
        (
            "transactions",
            CompactArray(
                ("transactional_id", CompactString("utf-8")),
                ("producer_id", Int64),
                ("state", CompactString("utf-8")),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class ListTransactionsRequest_v0(RequestStruct):  # type: ignore[misc]  # noqa: N801  # untyped base; aiokafka's naming
    FLEXIBLE_VERSION = True
    API_KEY = LIST_TRANSACTIONS
    API_VERSION = 0
    RESPONSE_TYPE = ListTransactionsResponse_v0
    SCHEMA = Schema(
        ("state_filters", CompactArray(CompactString("utf-8"))),
        ("producer_id_filters", CompactArray(Int64)),
        ("tags", TaggedFields),
    )


class ListTransactions(Request[ListTransactionsRequest_v0]):  # type: ignore[misc]  # untyped base
    API_KEY = LIST_TRANSACTIONS

    def build(self, request_struct_class: type[ListTransactionsRequest_v0]) -> Any:
        return request_struct_class([], [], {})


def open_transactions(job: Job, states: frozenset[str] | None = OPEN) -> list[str]:
    """Return the transactional IDs of a job that have a transaction open, each as often as it has one; None: all IDs."""

    async def ask() -> list[str]:
        client = AIOKafkaClient(bootstrap_servers=job.kafka.bootstrap)
        await client.bootstrap()
        try:
            found: list[str] = []
            for broker in client.cluster.brokers():
                answer = await client.send(broker.nodeId, ListTransactions())
                assert answer.error_code == 0, answer
                found += [name for name, _, state, _ in answer.transactions if states is None or state in states]
            return sorted(name for name in found if name.startswith(f"{job.name}."))
        finally:
            await client.close()

    return asyncio.run(ask())


def until_ended(job: Job) -> None:
    """What was decided is visible: EndTxn is answered, and a task's offset told, before each partition has its marker."""
    until(lambda: open_transactions(job, ENDING) == [], f"{job.name}: each transaction that was ended has its markers")


def assert_none_open(job: Job) -> None:
    """Nothing hangs: a broker may take a moment to write the last markers."""
    until(lambda: open_transactions(job) == [], f"{job.name}: no transaction is open")
