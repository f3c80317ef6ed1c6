"""The agents: every batch of a stream to its task."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import faust
from mode import CrashingSupervisor

if TYPE_CHECKING:
    from collections.abc import Callable

    from faust.types import AppT, StreamT

    from dedup.worker.app import DedupApp


class BatchSchema(faust.Schema[Any, Any]):
    """Messages are `FeedBatch` values already; there is nothing to decode."""

    def compile(self, app: AppT, **_: Any) -> Callable[..., Any]:
        """Return a decoder that hands the batch on."""
        create_event = app.create_event

        async def decode(message: Any, *, propagate: bool = False) -> Any:  # Faust's signature
            return create_event(message.key, message.value, message.headers, message)

        return decode


def attach_agents(app: DedupApp) -> None:
    """Declare one agent for each sub-topology; a failure in one crashes the app instead of skipping its batch."""
    for sub_topology, topics in app.sub_topologies.items():
        channel = app.topic(*topics, schema=BatchSchema(), acks=False, internal=False)

        @app.agent(channel, name=sub_topology, supervisor_strategy=CrashingSupervisor)
        async def judge(stream: StreamT[Any]) -> None:
            async for batch in stream:
                await app.tasks.process(batch)
                # Judging never waits: without this, answers to a commit under way would wait for the whole queue.
                await asyncio.sleep(0)
