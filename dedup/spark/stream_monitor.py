"""Logs each micro-batch of a running stream, serves the same pages and metrics as a worker, and deletes old records.

A driver thread adds up the counts that Spark tasks report after each commit. The thread also asks the brokers for the
lag, because Spark does not know the lag while a micro-batch is running. Like a worker, the thread deletes unneeded
records from the changelog and the repartition topic.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from dedup.errors import BrokerUnavailable, CommitUnknown, DedupError, Problem, SettingsError, StateIncompatible
from dedup.kafka.client import KafkaWire
from dedup.kafka.outage_lines import ASIDE
from dedup.kafka.wire import NoAnswer, TopicPartition
from dedup.metrics import DeadShare, TaskNumbers, TaskSeen, WorkerSeen
from dedup.settings import Settings
from dedup.spark.session import connected
from dedup.spark.task_attempt import BatchReport
from dedup.topology.model import SubTopology, Topology
from dedup.web.server import WebServer
from dedup.worker.introspection import exposition
from dedup.worker.offsets import bounds_of, committed_offset
from dedup.worker.task import SteadyClock
from dedup.worker.task_factory import topic_check
from dedup.worker.task_manager import ended
from dedup.worker.topics import Cluster
from dedup.worker.upkeep import MAINTENANCE_EVERY_S, OldRecords, old_below
from dedup.worker_view import LookedUp, Noted, Peer, ShownRecord, TaskPulse

log: Final = logging.getLogger(__name__)
_LOOK_S: Final = 2.0
"""Seconds between two readings of the lag if no micro-batch ends in the meantime."""
_LOOK_BYTES: Final = 1 << 20
"""Maximum size of the fetch that checks whether a record follows a position."""
_ANSWER_WITHIN_S: Final = 5.0
_FIRST_COMMIT_S: Final = 600.0
"""The time, in seconds, for which a stream's first commit does not count as late. Before this commit, executors restore
the state, which the driver cannot observe. The alert DedupRestoreTooLong gives a worker the same time.
"""
_LOGGED_EVERY_S: Final = 3_600.0
"""The interval, in seconds, at which repeated warnings of attempts are logged again."""


@dataclass(slots=True)
class _Seen:
    position: int
    """The offset where the stream begins to read if the group has no offset yet."""
    numbers: TaskNumbers = field(default_factory=lambda: TaskNumbers(last_commit_s=time.monotonic() + _FIRST_COMMIT_S))
    looked_at: int | None = None
    """The group's offset, or `position` if the group had none, when the monitor last asked."""
    lag_records: int | None = None
    unstable_records: int | None = None
    state_ids: int = 0
    state_bytes: int = 0
    truncate_below: int = 0
    """See `PartitionReport.truncate_below`."""


@dataclass(slots=True)
class StreamUpkeep:
    """Deletes a stream's old records, as a worker's `Maintenance` does."""

    topology: Topology
    settings: Settings
    cluster: Cluster
    continues_at: Callable[[], Mapping[TopicPartition, int]]
    """Returns the offsets at which Spark would continue the query `dedup` after a crash. Records from these offsets on
    must stay, because Spark repeats a micro-batch that it has not committed, even if the tasks have committed it.
    """
    old: OldRecords = field(init=False, default_factory=OldRecords)
    _clock: SteadyClock = field(init=False, default_factory=SteadyClock)

    async def delete(self, seen: Mapping[TopicPartition, _Seen]) -> None:
        """Delete the records that no partition in ``seen`` needs. If brokers do not respond, only log a warning.

        Raises StateIncompatible if a topic was recreated.
        """
        changelog = self.topology.changelog_topic
        wanted = {TopicPartition(changelog, place.partition): each.truncate_below for place, each in seen.items()}
        try:
            async with connected(self.settings, f"dedup-{self.topology.name}-upkeep") as wire:
                if not self.topology.direct:
                    wanted |= await self._old_repartitioned(wire, seen)
                await self.old.delete(wire, topic_check(self.topology, self.cluster, wire), wanted)
        except (BrokerUnavailable, CommitUnknown, NoAnswer) as error:
            self.old.warn(error)

    async def _old_repartitioned(
        self, wire: KafkaWire, seen: Mapping[TopicPartition, _Seen]
    ) -> dict[TopicPartition, int]:
        """Map partitions of the repartition topic to the offset below which no record is needed; see `old_below`."""
        continues_at = await asyncio.to_thread(self.continues_at)
        found: dict[TopicPartition, int] = {}
        for place, each in seen.items():
            done = min(each.numbers.committed_offset or 0, continues_at.get(place, 0))
            try:
                found[place] = await old_below(wire, place, done, self._clock.now_ms())
            except NoAnswer as error:  # another partition may have a leader
                self.old.warn(error)
        return found


class StreamMonitor:
    """Implements `web.server.Answers` for a stream; its thread runs from `start` to `stop`."""

    def __init__(
        self,
        topology: Topology,
        settings: Settings,
        positions: Mapping[SubTopology, Mapping[TopicPartition, int]],
        upkeep: StreamUpkeep | None = None,
    ) -> None:
        """Without ``upkeep``, no records are deleted."""
        self._topology: Final = topology
        self._settings: Final = settings
        self._upkeep: Final = upkeep
        self.failure: Exception | None = None
        """The error that must end the stream, for example because a topic was recreated, or None."""
        self._seen: Final = {
            (sub_topology, place): _Seen(offset)
            for sub_topology, places in positions.items()
            for place, offset in sorted(places.items())
        }
        self._name: Final = settings.worker_id or f"spark-{socket.gethostname()}"
        self._ended: Final[list[BatchReport]] = []
        """Micro-batches that wait to be logged, because each log line contains the lag after the micro-batch."""
        self._news: Final = asyncio.Event()
        self._over = False
        self._dead: Final = DeadShare()
        self._logged_s: Final[dict[tuple[str, str], float]] = {}
        """Maps the keys of the attempts' warnings to the monotonic time at which they were logged."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._runs: Final = threading.Event()
        self._thread: Final = threading.Thread(target=self._run_in_thread, name="stream-monitor", daemon=True)
        self.url: str | None = None
        """The address of the pages, or None if no pages are served."""

    def start(self) -> None:
        """Start watching the lag, and serve the web pages if the settings enable them."""
        self._thread.start()
        self._runs.wait()

    def stop(self) -> None:
        """Log the micro-batches that have not been logged yet, and stop serving the web pages."""
        self._call(self._stop)
        self._thread.join()

    def add(self, report: BatchReport) -> None:
        """Add the counts of a micro-batch, and schedule its log line. Any thread may call this method."""
        self._call(lambda: self._take(report))

    def _call(self, what: Callable[[], None]) -> None:
        if self._loop is not None and self._thread.is_alive():
            with suppress(RuntimeError):  # the loop has just been closed
                self._loop.call_soon_threadsafe(what)

    def _stop(self) -> None:
        self._over = True
        self._news.set()

    def _run_in_thread(self) -> None:
        try:
            asyncio.run(self._run())
        except Exception as error:  # noqa: BLE001  # the stream ends with it
            self.failure = error
        finally:
            # The stream starts even if the pages cannot be served.
            self._runs.set()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with AsyncExitStack() as stack:
            if self._settings.web.enabled:
                server = await stack.enter_async_context(WebServer(self._settings.web, self))
                self.url = server.url
            self._runs.set()
            client_id = f"dedup-{self._topology.name}-monitor"
            upkeep = asyncio.create_task(self._keep_up(), name="upkeep")
            stack.push_async_callback(self._delete_old, within_s=_ANSWER_WITHIN_S)
            stack.push_async_callback(ended, [upkeep])
            while not self._over:
                try:
                    async with AsyncExitStack() as connection:
                        async with asyncio.timeout(_ANSWER_WITHIN_S):
                            wire = await connection.enter_async_context(connected(self._settings, client_id))
                        await self._watch(wire)
                except (DedupError, NoAnswer, TimeoutError) as error:
                    self._lose_lag(str(error) or "no broker answers")
                    await self._news_within(_ANSWER_WITHIN_S)

    async def _keep_up(self) -> None:
        while self.failure is None:
            await asyncio.sleep(MAINTENANCE_EVERY_S)
            await self._delete_old()

    async def _delete_old(self, within_s: float | None = None) -> None:
        """Delete old records, also at the end of the stream, because every run may end after a few seconds."""
        dedup = {place: seen for (kind, place), seen in self._seen.items() if kind == "dedup"}
        committed = {place: seen for place, seen in dedup.items() if seen.numbers.committed_offset is not None}
        if self._upkeep is None or not committed:
            return
        try:
            async with asyncio.timeout(within_s):
                await self._upkeep.delete(committed)
        except TimeoutError:
            self._upkeep.old.warn(BrokerUnavailable("no broker answered in time"))
        except Exception as error:  # noqa: BLE001  # the stream ends with it, as a worker does
            self.failure = error

    async def _watch(self, wire: KafkaWire) -> None:
        while True:
            async with asyncio.timeout(_ANSWER_WITHIN_S):
                await self._look_at_all(wire)
            self._log_ended()
            if self._dead.look([seen.numbers for seen in self._seen.values()], time.time_ns() // 1_000_000):
                log.warning("%s", "the dead-letter alert ended" if self._dead.alert is None else self._dead.alert.text)
            if self._over:
                return
            await self._news_within(_LOOK_S)

    async def _news_within(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), seconds)
        self._news.clear()

    async def _look_at_all(self, wire: KafkaWire) -> None:
        """Read the lag of every partition, and note which queries have committed since the last call."""
        moved = await asyncio.gather(*(self._look(wire, place, seen) for (_, place), seen in self._seen.items()))
        for kind in {kind for (kind, _), has_moved in zip(self._seen, moved, strict=True) if has_moved}:
            self._note_commit(kind)

    async def _look(self, wire: KafkaWire, place: TopicPartition, seen: _Seen) -> bool:
        """Read the lag of a partition, and return whether its records were committed since the last call."""
        committed = await committed_offset(wire, self._topology.name, place, stable=False)
        at = seen.position if committed is None else committed
        lag = await lag_after(wire, place, at)
        seen.lag_records, seen.unstable_records = lag.records, lag.unstable
        before, seen.looked_at = seen.looked_at, at
        return before is not None and at > before

    def _note_commit(self, kind: SubTopology) -> None:
        # A partition may wait until the tasks of other partitions have ended, so any commit counts as progress of all.
        now_s = time.monotonic()
        for (each, _), seen in self._seen.items():
            if each == kind:
                seen.numbers.last_commit_s = now_s

    def _lose_lag(self, why: str) -> None:
        log.warning("the lag is unknown until a broker answers: %s", why, extra=ASIDE)
        for seen in self._seen.values():
            seen.lag_records = seen.unstable_records = None
        self._log_ended()

    def _take(self, report: BatchReport) -> None:
        for each in report.partitions:
            seen, counted = self._seen[report.sub_topology, each.feeding], each.numbers
            seen.numbers.add_counters(counted)
            seen.numbers.stream_time_ms = counted.stream_time_ms
            seen.numbers.committed_offset = each.next_offset
            seen.numbers.committed_time_ms = counted.committed_time_ms
            seen.state_ids, seen.state_bytes = each.state_ids, each.state_bytes
            seen.truncate_below = each.truncate_below
            for key, text in each.warnings.items():
                if time.monotonic() - self._logged_s.get(key, -math.inf) >= _LOGGED_EVERY_S:
                    self._logged_s[key] = time.monotonic()
                    log.warning("%s", text)
        if report.partitions:
            self._note_commit(report.sub_topology)
        self._ended.append(report)
        self._news.set()

    def _log_ended(self) -> None:
        for report in self._ended:
            log.info("%s-%s", self._topology.name, self._line(report))
        self._ended.clear()

    def _line(self, report: BatchReport) -> str:
        verdicts = report.verdicts
        counts = ", ".join(f"{name} {count:,}" for name, count in sorted(verdicts.items())) or "none new"
        lags = [seen.lag_records for (kind, _), seen in self._seen.items() if kind == report.sub_topology]
        known = [lag for lag in lags if lag is not None]
        lag = f"{sum(known):,}" if len(known) == len(lags) else "unknown"
        return (
            f"{report.sub_topology}: micro-batch {report.batch_id}: {verdicts.total():,} records in "
            f"{report.took_s:.1f} s: {counts}; lag {lag}"
        )

    def not_ready(self) -> str | None:
        """Return None, because a running stream is always ready."""
        return None

    def seen(self) -> WorkerSeen:
        """Return the stream's current state in the format that workers use for their own state."""
        tasks = []
        for (kind, place), seen in self._seen.items():
            most = self._topology.state.max_bytes_per_partition if kind == "dedup" else None
            lag = seen.lag_records, seen.unstable_records
            tasks.append(TaskSeen(kind, *place, "running", seen.numbers, *lag, seen.state_ids, seen.state_bytes, most))
        return WorkerSeen(self._topology.name, self._name, tuple(tasks), {}, 0, 0, None, alert=self._dead.alert)

    def metrics(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return exposition(self.seen())

    def look_up(self, text: str) -> LookedUp:
        """Raise SettingsError, because the state is open only on executors, and only while their tasks are running."""
        why = f"a stream on Spark does not keep its state open; `dedup explain` finds {text!r} in the topics"
        raise SettingsError([Problem("ID", why)])

    def pulse(self) -> Iterator[TaskPulse]:
        """Yield, for each feeding partition, the metrics that the web server samples every second."""
        for (_, (topic, partition)), seen in self._seen.items():
            yield TaskPulse(seen.numbers, seen.lag_records, topic, partition, "running", seen.unstable_records)

    def latest(self) -> Iterable[Noted]:
        """Return no records, because Spark tasks report only counts."""
        return ()

    def peers(self) -> tuple[Peer, ...]:
        """Return no peers, because a stream is not a member of the consumer group."""
        return ()

    async def record(self, topic: str, partition: int, offset: int) -> ShownRecord | None:
        """Raise StateIncompatible, because a stream keeps no duplicates or dead letters for a web page to show."""
        raise StateIncompatible(
            f"{topic}/{partition}/{offset}: a stream on Spark shows no records; use `dedup explain`."
        )


class Lag(NamedTuple):
    """The number of offsets between a position and the end of a partition."""

    position: int
    """The position or the beginning of the log, whichever is greater."""
    records: int
    """Number of offsets from the position to the end, or 0 if these offsets hold only markers and aborted records."""
    unstable: int = 0
    """The number of offsets before the end that an open transaction hides from `read_committed` readers."""


async def lag_after(wire: KafkaWire, place: TopicPartition, position: int) -> Lag:
    """Return the lag between a position and the partition's end. Raises NoAnswer if the leader changes during the
    call.
    """
    bounds = await bounds_of(wire, place)
    # A recreated topic may end before the position.
    begin = at = max(bounds.start, position)
    while at < bounds.end:
        fetched = await wire.fetch(place, at, max_bytes=_LOOK_BYTES, wait_ms=0)
        # If the fetch made no progress, an open transaction hides the remaining records.
        if fetched.offsets or fetched.next_offset <= at:
            return Lag(begin, bounds.end - begin, fetched.high_watermark - fetched.last_stable_offset)
        at = fetched.next_offset
    return Lag(begin, 0)
