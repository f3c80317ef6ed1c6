"""Runs a worker, which prepares topics, starts the app, and stops on a signal, after a failure, or when it is done."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol

import uvloop
from mode import CrashingSupervisor
from yarl import URL

from dedup.errors import BrokerUnavailable, CommitUnknown, DedupError, StateIncompatible
from dedup.kafka.client import KafkaWire
from dedup.kafka.connection import Connection
from dedup.kafka.record_batch import GC_THRESHOLD
from dedup.kafka.schema_registry import SchemaRegistry, SchemaResolver
from dedup.kafka.topic_admin import Admin
from dedup.kafka.wire import NoAnswer, TopicPartition, Wire
from dedup.metrics import DeadShare
from dedup.settings import WORKER_ID, Settings
from dedup.store.directory import StorePool, open_more_files, own_state
from dedup.store.rocks import RocksMemory
from dedup.topology.model import Topology
from dedup.worker.dedup_task import DedupTask
from dedup.worker.faust_app import BatchSchema, DedupApp, GroupAssignor, TableManager, identity
from dedup.worker.introspection import Introspection
from dedup.worker.layout import LayoutChange, refuse_other_layout, with_layout
from dedup.worker.offsets import bounds_of, committed_offset, ends_of, progress_within
from dedup.worker.restore import LostOffsets, Standbys, refuse_other_rule
from dedup.worker.task import SteadyClock, Task, TaskState
from dedup.worker.task_factory import TaskFactory
from dedup.worker.task_manager import TaskManager, ended
from dedup.worker.topics import Cluster, begins_anew, prepare
from dedup.worker.upkeep import MAINTENANCE_EVERY_S, OldRecords, old_below, refuse_too_large

log: Final = logging.getLogger(__name__)
LOOK_S: Final = 0.25
"""The pause, in seconds, between checks of other workers' partitions."""
_ASK_WITHIN_S: Final = 5.0
FETCH_BYTES: Final = 1 << 16
_LONGEST_LOOK_S: Final = 1.0
_END_LOOK_S: Final = 0.05
_METADATA_MAX_AGE_MS: Final = 10_000
"""The maximum time, in ms, until a worker notices a partition that was added to a source topic."""


class _Checked:
    """A transport whose `write` raises ConnectionResetError once the transport is closed."""

    __slots__ = ("_inner",)

    def __init__(self, inner: Any) -> None:  # noqa: ANN401  # uvloop has no types for transports
        self._inner: Final = inner

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # the result is any attribute
        return getattr(self._inner, name)

    def write(self, data: bytes) -> None:
        if self._inner.is_closing():
            raise ConnectionResetError("the connection is closed")
        self._inner.write(data)


class Loop(uvloop.Loop):
    """A uvloop event loop whose closed connections raise OSError on a write.

    Unlike asyncio's own loop, uvloop raises RuntimeError for a write on a connection that the peer has reset. The
    client library aiokafka handles only OSError when a write fails, so uvloop's RuntimeError would crash the worker.
    """

    async def create_connection(self, *args: Any, **options: Any) -> tuple[Any, Any]:  # noqa: ANN401  # uvloop defines this signature
        """Connect as uvloop does, and return a transport that refuses to write once the connection is closed."""
        transport, protocol = await super().create_connection(*args, **options)
        return _Checked(transport), protocol


def kept_worker_id(settings: Settings) -> str:
    """Return the worker's configured ID. Without a configured ID, generate one, and keep it in the state directory.

    The ID makes the worker a static member of the group (KIP-345), so a killed worker gets its partitions back
    immediately after a restart. A damaged ID is replaced, because two workers that share an ID would replace each
    other.
    """
    if settings.worker_id is not None:
        return settings.worker_id
    path = settings.state_dir / "worker-id"
    try:
        settings.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        kept = path.read_text(encoding="ascii", errors="replace").strip() if path.exists() else None
        if kept is not None and WORKER_ID.fullmatch(kept):
            return kept
        made = f"worker-{secrets.token_hex(4)}"
        if kept is not None:
            log.warning("%s contains no worker ID, as after a power failure; this worker is %s from now on", path, made)
        _write_whole(path, f"{made}\n")
    except OSError as error:
        raise StateIncompatible(
            f"{settings.state_dir}: cannot be used: {error.strerror}. Make state_dir writable by this user, or set "
            f"another one."
        ) from error
    return made


def _write_whole(path: Path, text: str) -> None:
    """Write a file so that it has either its old or its new content, even after a power failure."""
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with new.open("x", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(file)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


@dataclass(slots=True)
class _Quiet:
    task: Task
    since_ms: int
    judged_to: int
    said: bool = False


@dataclass(slots=True)
class IdleFeeds:
    """Tracks how long each repartition task has had no lag, and marks idle feeds.

    With a repartition topic, stream time is the minimum over the feeds, so a source partition without new records would
    hold stream time back forever. Therefore, the task of an idle source partition commits idle markers to the
    repartition topic. The markers are part of the log, so a replay of the topic produces the same verdicts.
    """

    idle_after_ms: int
    caught_up: Callable[[TopicPartition, Task], bool]
    """Returns True if a task has judged and committed everything up to the end of its partition."""
    quiet: dict[TopicPartition, _Quiet] = field(init=False, default_factory=dict)

    def look(self, tasks: Mapping[TopicPartition, Task], now_ms: int) -> None:
        """Mark each feed as idle after `idle_after_ms` without lag. A feed is marked again only after it has received
        another record.
        """
        for feeding in self.quiet.keys() - tasks.keys():
            del self.quiet[feeding]
        for feeding, task in tasks.items():
            if task.task_id.sub_topology != "repartition":
                continue
            quiet = self.quiet.get(feeding)
            if quiet is None or quiet.task is not task or quiet.judged_to != task.judged_to:
                quiet = self.quiet[feeding] = _Quiet(task, now_ms, task.judged_to)
            if quiet.said:
                continue  # the feed is already marked as idle
            if task.state is not TaskState.RUNNING or not self.caught_up(feeding, task):
                quiet.since_ms = now_ms
            elif now_ms - quiet.since_ms >= self.idle_after_ms and task.say_idle():
                quiet.said = True
                log.info("%s: no record for %d ms; marked idle", task.task_id, now_ms - quiet.since_ms)


@dataclass(slots=True)
class Finish:
    """Checks, for `--exit-when-done`, whether the group has judged and committed all records that existed at the start.

    A worker must not exit while another worker still has work, because partitions may still move between workers.
    Therefore, the check includes the partitions of other workers, according to the group's committed offsets.
    """

    app: DedupApp
    ends: dict[TopicPartition, int]
    """Maps each source partition to its end at the start. Later, the partitions of the repartition topic and their ends
    are added.
    """
    repartitioned: bool = False
    """True if the ends of the repartition topic's partitions are known."""
    others_at_s: float = 0.0
    waits: bool = False

    async def reached(self) -> bool:
        """Return whether the group has committed all records that existed at the start."""
        try:
            async with asyncio.timeout(_ASK_WITHIN_S):
                return await self._reached()
        except TimeoutError:
            return False  # a leader or coordinator is unavailable; the caller checks for signals and tries again

    async def _reached(self) -> bool:
        while await self._done():
            if self.repartitioned or "repartition" not in self.app.sub_topologies:
                return True
            # The ends of the repartition topic are now final. The ends of source partitions are still checked, because
            # a rebalance may assign source partitions to this worker.
            (topic,) = self.app.sub_topologies["dedup"]
            hop = [TopicPartition(topic, number) for number in range(self.app.member.topic_partitions(topic) or 0)]
            self.ends |= await ends_of(self.app.wire, hop)
            self.repartitioned = True
        return False

    async def _done(self) -> bool:
        if not self._own_done():
            return False
        others = [place for place in self.ends if place not in self.app.tasks.running]
        now_s = asyncio.get_running_loop().time()
        if others and now_s < self.others_at_s + LOOK_S:
            return False
        self.others_at_s = now_s
        wire, group = self.app.wire, self.app.conf.id
        for place in others:
            if not await _committed_to(wire, group, place, self.ends[place]):
                if not self.waits:
                    log.info("this worker is done and waits for other workers, which have %d partitions", len(others))
                    self.waits = True
                return False
        # Partitions that were assigned or revoked in the meantime were not checked.
        return self._own_done() and not any(place in self.app.tasks.running for place in others)

    def _own_done(self) -> bool:
        """Return whether this worker's tasks have committed all records that existed at the start."""
        app = self.app
        # The last offsets may be markers and aborted records, which no task receives.
        return app.tasks.opened.is_set() and all(
            task.all_committed and (task.next_offset >= end or app.member.passed(feeding, end, task.next_offset))
            for feeding, task in app.tasks.running.items()
            if (end := self.ends.get(feeding)) is not None
        )


def create_app(topology: Topology, settings: Settings, cluster: Cluster, wire: KafkaWire) -> DedupApp:
    """Build the Faust app of a topology. Call `create_app` in the event loop that will run the app."""
    # Faust needs a directory for its own data. A topology's name contains no dot, so ".faust" is never a state
    # directory. The path is absolute, because Faust would look for a relative table directory below the data directory.
    directory = settings.state_dir.absolute() / ".faust"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    app = DedupApp(
        topology.name,
        broker=[f"dedup://{broker}" for broker in wire.connection.brokers],
        store="dedup://",
        cache="memory://",
        TableManager=TableManager,
        PartitionAssignor=GroupAssignor,
        # `exactly_once` makes Faust read only committed records and use dedup's TransactionManager instead of its own.
        processing_guarantee="exactly_once",
        version=1,
        datadir=str(directory),
        tabledir=str(directory),
        canonical_url=identity(settings.worker_id, None),
        web_enabled=False,
        topic_disable_leader=True,
        topic_allow_declare=False,
        topic_partitions=cluster.topics[topology.changelog_topic].partitions,
        table_standby_replicas=topology.state.standby_replicas,
        stream_wait_empty=True,
        stream_buffer_maxsize=1,
        stream_publish_on_commit=False,
        broker_session_timeout=settings.session_timeout_ms / 1000,
        broker_commit_interval=1.0,
        consumer_metadata_max_age_ms=_METADATA_MAX_AGE_MS,
    )
    if topology.source.needs_registry:
        registry = SchemaRegistry.of(settings.schema_registry)
        app.schemas = SchemaResolver(registry, wait_ms=settings.schema_registry.schema_wait_ms)
        topology = topology.knowing(app.schemas.book)
    app.pool = StorePool()
    factory = TaskFactory(topology, settings, cluster, wire, SteadyClock(), RocksMemory(), app.pool)
    app.settings, app.wire, app.factory = settings, wire, factory
    wire.pin(factory.check.topic_ids)
    interval_ms = settings.commit_interval_ms
    app.tasks = TaskManager(factory, lambda: app.member, commit_interval_ms=interval_ms)
    app.standbys = Standbys(wire, topology.changelog_topic, topology.window, factory.fingerprint(), factory.keeping)
    app.sub_topologies = {"dedup": topology.feeding_topics}
    if not topology.direct:
        app.sub_topologies = {"repartition": topology.source.topics, **app.sub_topologies}
    app.Table(
        "sightings", key_type=bytes, value_type=bytes, changelog_topic=app.topic(topology.changelog_topic, acks=False)
    )
    for name, topics in app.sub_topologies.items():
        channel = app.topic(*topics, schema=BatchSchema(), acks=False, internal=False)
        # With `CrashingSupervisor`, a failed agent crashes the app instead of skipping the batch.
        app.agent(channel, name=name, supervisor_strategy=CrashingSupervisor)(app.tasks.process_all)
    return app


async def _committed_to(wire: Wire, group: str, place: TopicPartition, end: int) -> bool:
    """Return whether a group has committed all records below an offset. Markers and aborted records do not count."""
    bounds = await bounds_of(wire, place)
    committed = await committed_offset(wire, group, place, stable=False)
    position = max(committed or 0, bounds.start)
    while position < end:
        try:
            fetched = await wire.fetch(place, position, max_bytes=FETCH_BYTES, wait_ms=0)
        except NoAnswer:
            return False
        if any(offset < end for offset in fetched.offsets) or fetched.next_offset <= position:
            return False
        position = fetched.next_offset
    return True


class Pages(Protocol):
    """The web pages of a running worker."""

    @property
    def advertised(self) -> str | None:
        """The address at which other workers reach the pages, or None if the pages are not served."""


MakePages = Callable[[Introspection], AbstractAsyncContextManager[Pages]]


@dataclass(slots=True)
class Maintenance:
    """Deletes records that are no longer needed for a restore, and enforces the limit on the state's size.

    `OldRecords` explains why the deletion is safe.
    """

    app: DedupApp
    topology: Topology
    clock: SteadyClock
    old: OldRecords = field(init=False, default_factory=OldRecords)
    truncated: set[TopicPartition] = field(init=False, default_factory=set)
    """The changelog partitions that somebody else has truncated. Each partition is logged only once."""

    async def run(self) -> None:
        """Repeat `delete` and `refuse_too_large` until canceled. If a partition's state is too large, stop the worker
        with an error.
        """
        while True:
            await asyncio.sleep(MAINTENANCE_EVERY_S)
            try:
                self.refuse_too_large()
                await self.delete()
            except StateIncompatible as error:
                self.app.tasks.fail(error)
                return
            except (BrokerUnavailable, CommitUnknown) as error:
                self.old.warn(error)

    def refuse_too_large(self) -> None:
        """Raise StateIncompatible if a partition's committed state exceeds `state.max_bytes_per_partition`."""
        if self.topology.state.max_bytes_per_partition is None:
            return
        for feeding, task in self.app.tasks.running.items():
            store = task.work.store if task.state is TaskState.RUNNING else None
            if store is not None:
                refuse_too_large(self.topology, feeding, store.approximate_bytes())

    async def delete(self) -> None:
        """Delete changelog records that no live segment needs, and old committed records of the repartition topic.

        A partition without a leader is left out until the next call.
        """
        wanted: dict[TopicPartition, int] = {}
        for feeding, task in list(self.app.tasks.running.items()):
            dedup_task = task.work
            if task.state is TaskState.RUNNING and isinstance(dedup_task, DedupTask):
                try:
                    wanted |= await self._unneeded(feeding, task, dedup_task)
                except NoAnswer as error:
                    self.old.warn(error)
        await self.old.delete(self.app.wire, self.app.factory.check, wanted)

    async def _unneeded(self, feeding: TopicPartition, task: Task, dedup_task: DedupTask) -> dict[TopicPartition, int]:
        """Map each partition that only this task reads to the offset below which its records are not needed."""
        changelog = dedup_task.plan.changelog
        wanted = {changelog: dedup_task.truncate_below or 0}
        self._log_if_truncated(dedup_task, (await self.app.wire.bounds(changelog)).start)
        if not self.topology.direct:
            committed = task.numbers.committed_offset or 0
            wanted[feeding] = await old_below(self.app.wire, feeding, committed, self.clock.now_ms())
        return wanted

    def _log_if_truncated(self, dedup_task: DedupTask, begin: int) -> None:
        """Log an error once if the changelog lacks records that live segments need, which dedup never deletes."""
        record = dedup_task.store.task_record if dedup_task.store is not None else None
        if record is None or not record.counts_on_more(begin) or dedup_task.plan.changelog in self.truncated:
            return
        self.truncated.add(dedup_task.plan.changelog)
        log.error(
            "%s begins at offset %d, but live state was written from offset %d on: somebody has truncated it. Only "
            "this worker's disk and warm standbys still hold the deleted records. Keep the disk until retention has "
            "passed; an owner without it will refuse to start.",
            dedup_task.plan.changelog,
            begin,
            record.kept_from,
        )


@asynccontextmanager
async def background_loops(app: DedupApp, topology: Topology, introspection: Introspection) -> AsyncIterator[None]:
    """Run a worker's periodic loops during a ``with`` block. An error in one of the loops stops the worker."""
    clock = SteadyClock()
    loops = [Maintenance(app, topology, clock).run(), _look_for_dead_letters(app, clock), app.wire.until_refused()]
    if not topology.direct:
        idle_feeds = IdleFeeds(topology.idle_after_ms, introspection.caught_up)
        loops.append(_look_for_idle_feeds(app, idle_feeds, clock))

    def stop_on_error(loop: asyncio.Task[None]) -> None:
        if not loop.cancelled() and (error := loop.exception()) is not None:
            app.tasks.fail(error)

    tasks = [asyncio.create_task(loop) for loop in loops]
    for task in tasks:
        task.add_done_callback(stop_on_error)
    try:
        yield
    finally:
        await ended(tasks)


async def _look_for_dead_letters(app: DedupApp, clock: SteadyClock) -> None:
    """Log an error when dead letters reach 95% of the last minute's records, and a warning when their share falls
    again.
    """
    share = DeadShare()
    share.look((), clock.now_ms())
    while True:
        await asyncio.sleep(_LONGEST_LOOK_S)
        numbers = [*app.tasks.ended.values(), *(task.numbers for task in app.tasks.running.values())]
        turned = share.look(numbers, clock.now_ms())
        app.alert = share.alert
        if turned and share.alert is not None:
            log.error("%s", share.alert.text)
        elif turned:
            log.warning("fewer than 95% of the records of the last minute are dead letters now, or no records arrived")


async def _look_for_idle_feeds(app: DedupApp, feeds: IdleFeeds, clock: SteadyClock) -> None:
    while True:
        feeds.look(app.tasks.running, clock.now_ms())
        await asyncio.sleep(min(_LONGEST_LOOK_S, feeds.idle_after_ms / 4000))


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options for running a worker. By default, a worker runs until it is stopped, and serves no web pages."""

    exit_when_done: bool = False
    on_tick: Callable[[DedupApp], None] | None = None
    """A function that the worker calls periodically, for a progress display."""
    make_pages: MakePages | None = None
    """A function that creates the web pages from the worker's introspection, or None if there are no pages."""
    onto_existing_output: bool = False
    """True if a new group may write to an output that already holds records; see `refuse_used_output`."""


async def run_worker(topology: Topology, settings: Settings, options: RunOptions) -> DedupApp:
    """Run a worker until it stops, and return its app.

    The worker stops on a signal, on a failure, or, with `exit_when_done`, when all records that existed at the start
    are judged and committed. Raises the error that made the worker fail.
    """
    settings = settings.model_copy(update={"worker_id": kept_worker_id(settings)})
    open_more_files()
    before = gc.get_threshold()
    gc.set_threshold(GC_THRESHOLD)
    try:
        with own_state(settings.state_dir, topology.name):
            return await _run_alone(topology, settings, options)
    finally:
        gc.set_threshold(*before)  # the process may continue with other work


async def _run_alone(topology: Topology, settings: Settings, options: RunOptions) -> DedupApp:
    wire = KafkaWire(Connection.of(settings, client_id=f"dedup-{topology.name}"))
    await wire.start()
    patience_s = wire.connection.patience_ms / 1000
    try:
        try:
            async with progress_within(patience_s):
                topology, cluster = await _cluster(topology, settings, wire, options)
                await LostOffsets(topology, cluster, wire).refuse_any()
                ends = await ends_of(wire, cluster.places(topology.source.topics)) if options.exit_when_done else {}
        except TimeoutError as error:
            raise BrokerUnavailable(
                f"the cluster at {', '.join(settings.brokers)} did not say within {patience_s:g} s which offsets and "
                f"topics it has: a partition has no leader, or the group has no coordinator. Look at the brokers' logs."
            ) from error
        app = create_app(topology, settings, cluster, wire)
        app.in_worker = True
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def stop_by_signal() -> None:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, stop.set)

        # Before the group member is connected, a signal ends the worker immediately, because nothing needs to be
        # committed.
        app.on_connected = stop_by_signal
        introspection = Introspection(app, topology)
        # The worker announces its pages to the group when it joins, so the pages are created first.
        async with options.make_pages(introspection) if options.make_pages else nullcontext() as pages:
            if pages is not None:
                app.conf.canonical_url = URL(identity(app.settings.worker_id, pages.advertised))
            await app.start()
            try:
                async with background_loops(app, topology, introspection):
                    await _until_over(app, stop, options, ends)
            finally:
                await app.stop()
                app.pool.keep_only(())
                for number in (signal.SIGTERM, signal.SIGINT):
                    loop.remove_signal_handler(number)
        if app.tasks.failure.done():
            raise app.tasks.failure.result()
        return app
    finally:
        await wire.stop()


async def _cluster(
    topology: Topology, settings: Settings, wire: KafkaWire, options: RunOptions
) -> tuple[Topology, Cluster]:
    """Return the topology with its layout, and the cluster with all topics of the topology."""
    async with Admin(wire.connection) as admin:
        fresh = await begins_anew(topology, settings, wire, admin, meant=options.onto_existing_output)
        cluster = await prepare(topology, settings, admin, may_create_changelog=fresh)
        topology = await with_layout(topology, cluster, wire, fresh=fresh)
        if fresh or not topology.direct:
            await LayoutChange(topology, cluster, wire, settings.transaction_timeout_ms).establish()
        layout = await refuse_other_layout(wire, topology, cluster)
        cluster = replace(cluster, begun_with=layout.counts)
        if not topology.direct:
            # Repartition tasks have no state that records the rule for choosing partitions.
            await refuse_other_rule(topology, cluster, wire)
        return topology, cluster


async def _until_over(app: DedupApp, stop: asyncio.Event, options: RunOptions, ends: dict[TopicPartition, int]) -> None:
    finish = Finish(app, ends) if options.exit_when_done else None
    member, failure = app.member, app.tasks.failure
    while not stop.is_set() and not failure.done() and not app.crashed:
        # aiokafka does not report a lost group membership, so this loop checks the membership.
        lost = member.lost_membership()
        if lost is not None:
            app.tasks.fail(lost)
        if options.on_tick is not None:
            options.on_tick(app)
        if finish is not None and await finish.reached():
            log.info("everything that existed at the start is done")
            return
        await asyncio.sleep(_END_LOOK_S)
    if app.crashed:
        app.tasks.fail(app.crash_reason or DedupError("the Faust app stopped without an error."))


def main_loop(topology: Topology, settings: Settings, options: RunOptions) -> DedupApp:
    """Run a worker in a new event loop, and return the worker's app."""
    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(run_worker(topology, settings, options))
