"""One piece of work against the cluster, for commands that are not a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from dedup.session.admin import Admin
from dedup.session.client import KafkaWire
from dedup.session.connection import Connection

if TYPE_CHECKING:
    from dedup.settings import Settings

T = TypeVar("T")


def on_cluster(settings: Settings, client_id: str, work: Callable[[KafkaWire, Admin], Awaitable[T]]) -> T:
    """Return what the work does, connected meanwhile; raises BrokerUnavailable when no broker answers."""

    async def run() -> T:
        wire = KafkaWire(Connection.of(settings, client_id=client_id))
        await wire.start()
        try:
            async with Admin(wire.connection) as admin:
                return await work(wire, admin)
        finally:
            await wire.stop()

    return asyncio.run(run())
