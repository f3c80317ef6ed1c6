"""One worker process: topics prepared, app started, ended by a signal, a failure, or by being done."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from dedup.errors import BrokerUnavailable, DedupError, StateIncompatible
from dedup.session.admin import Admin
from dedup.session.client import KafkaWire
from dedup.session.connection import Connection
from dedup.session.loop import Loop
from dedup.session.wire import TopicPartition
from dedup.store.directory import own_state
from dedup.worker.answers import WorkerAnswers
from dedup.worker.app import DedupApp, create_app
from dedup.worker.beside import Beside, MakePages, served
from dedup.worker.finish import Finish
from dedup.worker.lost_offsets import refuse_lost_offsets
from dedup.worker.plan import Cluster, group_is_new, prepare
from dedup.worker.starting import bounds_of
from dedup.worker.worker_id import kept_worker_id

if TYPE_CHECKING:
    from dedup.settings import Settings
    from dedup.topology.model import Topology

log: Final = logging.getLogger(__name__)
GC_THRESHOLD: Final = 100_000
"""Allocations between young collections: a batch makes tens of thousands of records, none of them in a cycle."""
LOOK_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How one run differs from a worker that runs for ever."""

    exit_when_done: bool = False
    on_tick: Callable[[DedupApp], None] | None = None
    """Called every now and then, for progress."""
    make_pages: MakePages | None = None
    """Makes the web pages out of what the worker answers; None: none."""


async def run_worker(topology: Topology, settings: Settings, options: RunOptions) -> DedupApp:
    """Run until a signal comes, the worker fails, or everything present at start is done; return the stopped app.

    Raises what made the worker fail.
    """
    gc.set_threshold(GC_THRESHOLD)
    settings = replace(settings, worker_id=kept_worker_id(settings))
    with own_state(settings.state_dir, topology.name):
        return await _run_alone(topology, settings, options)


async def _run_alone(topology: Topology, settings: Settings, options: RunOptions) -> DedupApp:
    wire = KafkaWire(Connection.of(settings, client_id=f"dedup-{topology.name}"))
    await wire.start()
    patience_s = wire.connection.patience_ms / 1000
    try:
        try:
            async with asyncio.timeout(patience_s):
                cluster = await _cluster(topology, settings, wire)
                await refuse_lost_offsets(topology, cluster, wire)
                ends = await _ends(topology, cluster, wire) if options.exit_when_done else {}
        except TimeoutError as error:
            raise BrokerUnavailable(
                f"the cluster at {', '.join(settings.brokers)} did not say within {patience_s:g} s which offsets and "
                f"topics it has: a partition has no leader, or the group no coordinator. Look at the brokers' logs."
            ) from error
        app = create_app(topology, settings, cluster, wire)
        app.in_worker = True
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        app.tasks.connect(app.member.begin, app.member.rejoin)
        answers = WorkerAnswers(app, topology)
        async with served(app, answers, options.make_pages):
            await app.start()
            try:
                async with Beside(app, topology, answers):
                    await _until_over(app, stop, options, cluster, ends)
            finally:
                await app.stop()
                app.shelf.keep_only(())
                for number in (signal.SIGTERM, signal.SIGINT):
                    loop.remove_signal_handler(number)
        if app.tasks.failure.done():
            raise app.tasks.failure.result()
        return app
    finally:
        await wire.stop()


async def _cluster(topology: Topology, settings: Settings, wire: KafkaWire) -> Cluster:
    async with Admin(wire.connection) as admin:
        fresh = await group_is_new(topology, wire, admin) and not (settings.state_dir / topology.name).exists()
        return await prepare(topology, settings, admin, may_create_changelog=fresh)


async def _ends(topology: Topology, cluster: Cluster, wire: KafkaWire) -> dict[TopicPartition, int]:
    """Return where the source partitions end now."""
    partitions = [
        TopicPartition(name, partition)
        for name in topology.source.topics
        for partition in range(cluster.topics[name].partitions)
    ]
    return {tp: (await bounds_of(wire, tp)).end for tp in partitions}


async def _until_over(
    app: DedupApp, stop: asyncio.Event, options: RunOptions, cluster: Cluster, ends: dict[TopicPartition, int]
) -> None:
    finish = Finish(app, ends) if options.exit_when_done else None
    while not stop.is_set() and not app.tasks.failure.done() and not app.crashed:
        _refuse_growth(app, cluster)
        _refuse_lost_membership(app)
        if options.on_tick is not None:
            options.on_tick(app)
        if finish is not None and await finish.reached():
            log.info("everything that was there at the start is done")
            return
        await asyncio.sleep(LOOK_S)
    if app.crashed and not app.tasks.failure.done():
        app.tasks.fail(app.crash_reason or DedupError("the Faust app stopped without saying why."))


def _refuse_lost_membership(app: DedupApp) -> None:
    """Stop the worker where aiokafka's group membership has died: nothing else would ever tell."""
    why = app.member.lost_membership()
    if why is not None and not app.tasks.failure.done():
        app.tasks.fail(why)


def _refuse_growth(app: DedupApp, cluster: Cluster) -> None:
    """Stop the worker where a topic it reads has more partitions than at the start: IDs may have moved to them."""
    for name in app.feeding_topics:
        had, has = cluster.topics[name].partitions, app.member.topic_partitions(name)
        if has is not None and has > had:
            app.tasks.fail(
                StateIncompatible(
                    f"topic {name!r} has {has} partitions now, and had {had} when the worker started: from now on "
                    f"equal IDs may be in other partitions than those that saw them. Nothing of the new partitions was "
                    f"judged. `dedup reset` starts anew with {has}."
                )
            )


def main_loop(topology: Topology, settings: Settings, options: RunOptions) -> DedupApp:
    """Run a worker in an event loop of its own."""
    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(run_worker(topology, settings, options))
