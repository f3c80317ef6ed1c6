"""Implements `dedup spark sink`, which appends each committed output record to a table exactly once.

The metadata of each table commit contains the Kafka offsets where the commit ends. The rows and these offsets become
visible together, so no checkpoint is needed. If a driver is killed, the next driver continues after the last table
commit.

If two sinks write to the same table, one of them fails: an append fails if another sink has committed since the
appending sink last read the table (`table_log`). After each table commit, the sink reads the commit back and checks the
ID in the commit's metadata.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from pyspark.sql import SparkSession

from dedup.errors import BrokerUnavailable, Problem, SettingsError, StateIncompatible
from dedup.kafka.outage_lines import AWAY
from dedup.quantities import counted
from dedup.settings import Settings
from dedup.spark.kafka_source import read_range
from dedup.spark.session import translated_errors
from dedup.spark.table_log import DeltaLog, IcebergLog, SnapshotCommit, TableCommit, metadata_object
from dedup.topology.model import Topology
from dedup.verify.kafka_reader import KafkaReader

log: Final = logging.getLogger(__name__)

_VERSION: Final = 1
_COLUMNS: Final = ("key", "value", "headers", "topic", "partition", "offset", "timestamp")
_SETTLED_WITHIN_S: Final = 60.0
_SETTLED_LOOK_S: Final = 0.2
_RENEWED_AFTER_MS: Final = 24 * 3_600_000
"""Without new records, the sink commits its offsets again after this time, because the commit that contains the offsets
expires. In Delta, a commit expires after `delta.logRetentionDuration` (30 days by default); in Iceberg, it expires
through `expire_snapshots`.
"""


@dataclass(frozen=True, slots=True)
class Appended:
    """A table commit of the sink, as read back from the table. The commit's metadata contains the fields up to `id`."""

    topic_id: str
    """Kafka's ID of the output topic; another ID means that the topic was recreated, and that the offsets belong to
    other records.
    """
    number: int
    after: int
    """The version of the sink's previous commit; for the first commit, the table's latest version before it, or -1."""
    ends: Mapping[int, int]
    """Maps each partition to the offset after the last one that this commit covers."""
    id: str
    table_version: int
    committed_ms: int
    rows: int
    more: bool = False
    """Whether the topic already contained more records to append."""


class TableSink:
    """Appends the records of the output topic to one Delta or Iceberg table. This class is not thread-safe."""

    def __init__(
        self,
        spark: SparkSession,
        topology: Topology,
        settings: Settings,
        log: DeltaLog | IcebergLog,
        *,
        most_offsets: int = 1_000_000,
    ) -> None:
        """Prepare to append to the table of ``log``. Raises SettingsError if the topology has no output topic, or if no
        file can be written to the directory of a Delta table.
        """
        if topology.output is None:
            raise SettingsError([Problem(topology.name, "has no output topic to copy to a table")])
        if isinstance(log, DeltaLog):
            log.directory.refuse_unwritable("--delta")
        self._spark: Final = spark
        self._settings: Final = settings
        self._topic: Final = topology.output.topic
        self._sink: Final = f"{topology.name} {self._topic}"
        self._most_offsets: Final = most_offsets
        self._log: Final = log
        self.path: Final = self._log.path
        self._last: Appended | None = None
        self._looked = False
        self._before = -1
        """The table's latest version when the sink first read it; even an empty table may have versions."""
        self._renewed_ms = 0

    def ends(self) -> dict[int, int]:
        """Return the end offset of the committed records in each partition of the output topic."""
        with KafkaReader(self._settings) as reader:
            return reader.stable_ends(self._topic)

    def append(self, *, now_ms: int, until: Mapping[int, int] | None = None) -> Appended | None:
        """Append the topic's new committed records in one table commit. Return the commit, or None if nothing had to be
        committed.

        If ``until`` is given, only records before these offsets are appended. After the call, the table contains every
        record before the offsets in `Appended.ends` exactly once. Raises StateIncompatible if another sink has written
        to the table in the meantime, if rows of the sink were replaced or removed, or if the table or the topic was
        recreated. Also raises StateIncompatible if the topic is compacted, or if retention deleted records that are not
        in the table.
        """
        if not self._looked:
            self._before = self._log.latest()
            self._last, self._looked = self._found(), True
            self._renewed_ms = now_ms if self._last is None else self._last.committed_ms
        entries = [] if self._last is None else self._unchanged_since(self._last)
        last = self._last
        with KafkaReader(self._settings) as reader:
            if reader.compacted([self._topic]):
                raise StateIncompatible(
                    f"{self._topic} is compacted, so Kafka may remove records before they are in {self.path}. Nothing "
                    f"was written. Set its cleanup.policy to delete; if records may already be gone, judge the source "
                    f"again with `dedup spark backfill`."
                )
            topic_id = reader.topic_id(self._topic)
            ends = reader.stable_ends(self._topic)
            lows = {partition: each.low for partition, each in reader.bounds(self._topic).items()}
        begins = self._begins(last, topic_id, lows, ends)
        wanted = {at: min(end, (until or {}).get(at, end)) for at, end in ends.items()}
        stops = self._stops(begins, wanted)
        # Iceberg may expire the snapshot with the position at any time, unless this snapshot is the latest.
        hidden = last is not None and isinstance(self._log, IcebergLog) and entries[0].version > last.table_version
        due = last is not None and (hidden or now_ms - self._renewed_ms >= _RENEWED_AFTER_MS)
        if stops == begins and not due:
            return None
        self._last = replace(self._write(topic_id, begins, stops), more=stops != wanted)
        # If this time came from the table, a caller whose clock is ahead would renew the position repeatedly.
        self._renewed_ms = now_ms
        rows = counted(self._last.rows, "row")
        log.info("%s: table version %d, %s appended", self.path, self._last.table_version, rows)
        return self._last

    def _begins(
        self, last: Appended | None, topic_id: str, lows: Mapping[int, int], ends: Mapping[int, int]
    ) -> dict[int, int]:
        """Return the offset where the next commit begins in each partition, which is 0 for a partition added since the
        last commit.
        """
        if last is None:
            gone = [f"{self._topic}/{partition} before offset {low}" for partition, low in lows.items() if low]
            if gone:
                log.warning(
                    "%s is new, and Kafka has deleted %s: the table begins after them", self.path, ", ".join(gone)
                )
            return dict(lows)
        position, made = last.ends, f"commit {last.number} of {self.path}"
        if position.keys() - lows.keys():
            raise BrokerUnavailable(
                f"{self._topic} has {len(lows)} partitions according to {', '.join(self._settings.brokers)}, but had "
                f"{len(position)} in {made}: a broker does not know the cluster's current state. Nothing was written. "
                f"Try again, and look at the brokers' logs."
            )
        if topic_id != last.topic_id:
            raise StateIncompatible(
                f"{self._topic} was deleted and created again since {made}: its offsets now belong to other records. "
                f"Nothing was written. Append it to a new table."
            )
        for partition, low in lows.items():
            done = position.get(partition, 0)
            if low > done:
                raise StateIncompatible(
                    f"{self._topic}/{partition}: Kafka deleted offsets {done} to {low - 1} before they were in "
                    f"{self.path}. Nothing was written. Give the topic a longer retention, run the sink more often, "
                    f"and append to a new table; `dedup spark backfill` judges the source again."
                )
            if done > ends.get(partition, done):
                raise StateIncompatible(
                    f"{self._topic}/{partition} ends at offset {ends[partition]}, but {self.path} holds records up to "
                    f"{done}: the topic has lost records, or this is another cluster. Nothing was written."
                )
        return {partition: position.get(partition, 0) for partition in lows}

    def _stops(self, begins: Mapping[int, int], ends: Mapping[int, int]) -> dict[int, int]:
        """Return the end offsets of the next table commit, which covers up to about `most_offsets` offsets in total."""
        open_at = [at for at in begins if ends.get(at, 0) > begins[at]]
        share = max(1, self._most_offsets // max(1, len(open_at)))
        return {at: max(begin, min(ends.get(at, begin), begin + share)) for at, begin in begins.items()}

    def _write(self, topic_id: str, begins: Mapping[int, int], stops: Mapping[int, int]) -> Appended:
        """Append the records from ``begins`` to ``stops``, and return the table commit as read back from the table."""
        last = self._last
        number, after = (1, self._before) if last is None else (last.number + 1, last.table_version)
        commit = {"number": number, "after": after, "ends": stops, "id": uuid.uuid4().hex}
        metadata = json.dumps({"dedup": _VERSION, "sink": self._sink, "topic_id": topic_id, **commit})
        taken = (
            f"another sink has written to {self.path} at the same time, and this one has written nothing. The table "
            f"holds each record once. Stop one of the two, then restart the other: it continues from the last commit."
        )
        ranges = {self._topic: {at: (begin, stops[at]) for at, begin in begins.items()}}
        # A range usually ends with a transaction marker, and only a fetch that returns nothing shows that no record
        # follows. A short wait is enough, because the records are new, and no broker has to read them from slow tiered
        # storage.
        wait = {"kafka.fetch.max.wait.ms": "20"}
        rows = read_range(self._spark, self._settings, ranges, **wait).select(*_COLUMNS)
        with translated_errors():
            since = self._log.append(rows, f"dedup sink {self._sink}", number, metadata, after=after, taken=taken)
        self._refuse_replaced(since)
        found = (self._sink_commit(each) for each in since if each.metadata == metadata)
        return next(each for each in found if each is not None)

    def _unchanged_since(self, last: Appended) -> list[TableCommit | SnapshotCommit]:
        """Return the sink's last commit and all later commits, newest first. Raises StateIncompatible if the table no
        longer contains the sink's last commit, or was replaced after that commit.
        """
        entries: list[TableCommit | SnapshotCommit] = list(self._log.commits(last.table_version - 1))
        if last.id not in [each.id for each in map(self._sink_commit, entries) if each is not None]:
            raise StateIncompatible(
                f"{self.path} no longer contains commit {last.number} of the sink: the table was removed or "
                f"recreated. Nothing was written. Restore it, or append to a new table."
            )
        self._refuse_replaced(entries)
        return entries

    def _found(self) -> Appended | None:
        """Return the sink's last table commit, or None if the sink has no commits and the table is empty or missing."""
        later: list[TableCommit | SnapshotCommit] = []
        last: Appended | None = None
        for entry in self._log.commits():
            # The loop looks back to the previous commit, because the sink may have stopped before it checked its last
            # commit.
            if last is not None and entry.version <= last.after:
                break
            last = last or self._sink_commit(entry)
            later.append(entry)
        if last is not None:
            if last.after >= last.table_version:
                raise StateIncompatible(
                    f"{self.path} was removed, and commit {last.number} of the sink recreated it: the rows before it "
                    f"are gone. Nothing was written. Restore the table, or append to a new one."
                )
            self._refuse_replaced(later)
            return last
        if later and self._spark.table(self._log.table).limit(1).count():
            raise StateIncompatible(
                f"{self.path} holds rows, but its log contains no commit of the sink {self._sink!r}: another job made "
                f"the table, or the sink's commits have expired from its log. Nothing was written. Append to a new "
                f"table."
            )
        return None

    def _sink_commit(self, entry: TableCommit | SnapshotCommit) -> Appended | None:
        """Convert an entry in the table's log to `Appended`, or return None if the entry is not a commit of this
        sink.
        """
        found = metadata_object(entry.metadata)
        if found.get("sink") != self._sink:
            return None
        if found["dedup"] != _VERSION:
            raise StateIncompatible(
                f"{self.path}: commit {entry.version} was made by another release of dedup (version {found['dedup']} "
                f"of its metadata; this one knows {_VERSION}). Nothing was written. Use that release."
            )
        ends = {int(partition): int(end) for partition, end in found["ends"].items()}
        position = (found["topic_id"], found["number"], found["after"], ends, found["id"])
        return Appended(*position, entry.version, entry.committed_ms, entry.rows)

    def _refuse_replaced(self, entries: Sequence[TableCommit | SnapshotCommit]) -> None:
        """Raise StateIncompatible if a table commit might have removed rows of the sink by replacing the table."""
        for entry in entries:
            if entry.replaces:
                raise StateIncompatible(
                    f"{self.path}: version {entry.version} ({entry.operation}) has replaced what the sink had written, "
                    f"so the remaining rows may not match its position. Restore the version before it as a new table, "
                    f"or append to a new one."
                )

    def settle(self, stopped: threading.Event) -> None:
        """Wait until no transaction in the output topic is open, for at most one minute or until ``stopped`` is set.

        Kafka acknowledges a commit before all partitions have the commit marker, and `read_committed` readers do not
        see records without a marker. If a transaction is still open after one minute, the method logs a warning.
        """
        until_s = time.monotonic() + _SETTLED_WITHIN_S
        while time.monotonic() < until_s and not stopped.is_set():
            with KafkaReader(self._settings) as reader:
                stable = reader.stable_ends(self._topic)
                bounds = reader.bounds(self._topic)
            if all(each.high <= stable.get(partition, -1) for partition, each in bounds.items()):
                return
            stopped.wait(_SETTLED_LOOK_S)
        if not stopped.is_set():
            log.warning("%s: a transaction is still open; its records are not in %s yet", self._topic, self.path)


@contextmanager
def following(
    sink: TableSink, every_s: float, *, stopped: threading.Event, failed: Callable[[], None]
) -> Iterator[None]:
    """In a separate thread, append the records that a stream commits inside the ``with`` block. After the block, append
    the remaining records.

    If ``stopped`` is set, the function leaves the remaining records for the sink's next run. If the appending thread
    fails, the thread calls ``failed``, and the ``with`` block raises the thread's error on exit.
    """
    over, errors = threading.Event(), list[Exception]()

    def run() -> None:
        try:
            follow(sink, every_s=every_s, over=over)
        except Exception as error:
            log.exception("the table sink has failed")
            errors.append(error)
            failed()

    thread = threading.Thread(target=run, name="table-sink", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if errors:
        raise errors[0]
    sink.settle(stopped)
    catch_up(sink, over=stopped)


def follow(
    sink: TableSink, *, every_s: float, over: threading.Event, tell: Callable[[Appended], None] = lambda _: None
) -> None:
    """Append new records until ``over`` is set, and pause for ``every_s`` seconds whenever no new records exist.

    Raises BrokerUnavailable if no broker responds to the first attempt. After the first successful attempt, the
    function keeps retrying if no broker responds.
    """
    reached = False
    while not over.is_set():
        appended = None
        try:
            appended = sink.append(now_ms=_now_ms())
        except BrokerUnavailable as error:
            if not reached:
                raise
            log.warning("%s; trying again in %g s", error, every_s, extra=AWAY)
        reached = True
        if appended is not None:
            tell(appended)
        if appended is None or not appended.more:
            over.wait(every_s)


def catch_up(
    sink: TableSink, *, over: threading.Event | None = None, tell: Callable[[Appended], None] = lambda _: None
) -> None:
    """Append all records that were committed before the call. Stop early if ``over`` is set."""
    ends = sink.ends()
    while over is None or not over.is_set():
        appended = sink.append(now_ms=_now_ms(), until=ends)
        if appended is None:
            return
        tell(appended)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
