"""Implements `dedup spark incremental`, which judges new input and appends the verdicts to a Delta table.

Each run reads the new input and the state that the previous run saved: the position in each source partition, stream
time, and the unexpired sightings. A run writes its results in three steps:

* First, the run writes its *intent*: the input that it will read and the clock time that it will use. If the run is
  killed, the next attempt uses the same intent, unless the input no longer exists or the topology has changed.
* Second, the run writes its *state* to files named after the attempt.
* Third, the run appends the verdicts in one commit of the table. The commit names the attempt, which makes the
  attempt's state the table's state.

If two runs continue from the same earlier run, Delta commits only one of them (`txnAppId`, `txnVersion`; see
`table_log`).
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import chain, dropwhile
from math import inf
from typing import Any, Final, NamedTuple
from uuid import uuid4

from pyspark import StorageLevel
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark page uses

from dedup.core.window import BEFORE_ALL_TIME
from dedup.errors import Problem, StateIncompatible, TopologyError
from dedup.spark.batch_verdicts import ORDER_TEXTS, Shuffled, balanced, mode_of, shuffled
from dedup.spark.files import History
from dedup.spark.incremental_input import GrowingInput, id_types
from dedup.spark.input_files import LOSSLESS, literal
from dedup.spark.map_side import LogEnd, LogEnds, Mode, ends_after
from dedup.spark.reduce_side import layer_rows
from dedup.spark.row_events import same_ids
from dedup.spark.session import shuffles_for, translated_errors
from dedup.spark.sightings import LAYER, PACKED_AT_ONCE, Layer
from dedup.spark.table_log import DeltaLog, TableCommit, metadata_object
from dedup.topology.model import Topology

_STATE: Final = "_dedup"
"""The state's directory in the table's directory; Delta and `VACUUM` ignore names that begin with an underscore."""
_RENEWED_AFTER_MS: Final = 24 * 3_600_000
_MOST_LAYERS: Final = 16
_FEW_SIGHTINGS: Final = 100_000
_SIGHTING_BYTES: Final = 16
"""The number of input bytes that a kept sighting counts as, because it costs a reduce task about a quarter as much as a
record.
"""
_HARMLESS: Final = frozenset(
    {"OPTIMIZE", "REORG", "VACUUM START", "VACUUM END", "SET TBLPROPERTIES", "UNSET TBLPROPERTIES", "COMPUTE STATS"}
    | {"ADD CONSTRAINT", "DROP CONSTRAINT", "CHANGE COLUMN", "CLUSTER BY", "UPGRADE PROTOCOL"}
)
"""Delta operations that change no rows."""


class Attempt(NamedTuple):
    """One attempt at an incremental run. The table's history names the committed attempts."""

    run: int = 0
    """The number of the run; 0 before the first run."""
    attempt: str = ""

    @property
    def name(self) -> str:
        """Return the name of the attempt's files in the state directory."""
        return f"{self.run:08}-{self.attempt}"


@dataclass(frozen=True, slots=True)
class RunState:
    """The state that an incremental run saves for the next run."""

    identity: str = ""
    """The parts of the topology that determine its sightings."""
    mode: str = ""
    position: Mapping[str, Any] = field(default_factory=dict)
    """The position that all runs together have reached in their input; see `incremental_input`."""
    id_types: Mapping[str, str] = field(default_factory=dict)
    """The types of the columns that contain the tracking ID, if rows are events."""
    ends: LogEnds = field(default_factory=dict)
    layers: Sequence[Layer] = ()
    """The layers that together contain all sightings of the state, oldest first; see `sightings`."""

    def live_layers(self, retention_ms: int) -> list[Layer]:
        """Return the layers that can contain unexpired sightings."""
        oldest_ms = min((end.greatest_ms for end in self.ends.values()), default=BEFORE_ALL_TIME) - retention_ms
        return [layer for layer in self.layers if layer.rows and layer.newest_ms >= oldest_ms]


@dataclass(frozen=True, slots=True)
class Intent:
    """The input that a run will judge, and the clock time that the run uses."""

    run: int
    identity: str
    now_ms: int
    pinned: Mapping[str, Any]
    """A description of the input; see `incremental_input`."""


@dataclass(frozen=True, slots=True)
class IncrementalReport:
    """The result of an incremental run."""

    run: int
    path: str
    verdicts: Mapping[str, int]
    new_rows: int
    now_ms: int
    """The clock time that determined which event times were in the future."""
    order: str
    sightings: int
    """The number of sightings kept for the next run. Some of these sightings may have expired."""
    seconds: float
    fresh: bool = True
    """False if nothing was written because the input had no new records; ``run`` is then the last run."""


def incremental(
    source: GrowingInput, topology: Topology, out: str, *, now_ms: int | None = None, say: Callable[[str], None] = print
) -> IncrementalReport:
    """Judge the records of ``source`` that earlier runs have not judged, and append the verdicts to the Delta table
    ``out``.

    The table has the columns of `batch_verdicts.judged` and the column `run` (the number of the run), and is
    partitioned by verdict. ``now_ms`` is the clock time in ms that the job uses to detect future event times (default:
    the current time). Rows with offsets are judged in log order, so that all runs together give the same verdicts as a
    single run over all input. Rows without offsets are judged run by run; within each run, they are judged in
    event-time order. From the second run on, a row without an offset is late if it is behind stream time by more than
    the grace and no stored sighting makes it a duplicate.

    Raises StateIncompatible, without publishing a verdict, if someone else has changed the table, if the table belongs
    to another topology, or if another run has committed in the meantime. Also raises StateIncompatible if an input file
    was replaced, if the type of an ID column has changed, or if the input contains offsets that earlier runs have
    judged. Also raises StateIncompatible if the topology repartitions records and the rows have offsets. Raises
    SettingsError if no file can be written to ``out``. `incremental` also raises the other errors that
    `backfill.backfill` lists.
    """
    began_s = time.monotonic()
    with translated_errors():
        table = OutputTable(source.spark, out)
        scheme = table.path.partition(":")[0]
        warning = store_warning(table.path, source.spark.conf.get(f"spark.delta.logStore.{scheme}.impl", None))
        if warning is not None:
            say(f"{topology.name}: {warning}")
        last = table.last_run()
        attempt = Attempt(last.run + 1, uuid4().hex)
        try:
            report = _attempted(source, topology, table, last, attempt, now_ms, say)
        except Exception as error:
            table.refuse_overtaken(attempt, error)
            raise
    return replace(report, seconds=time.monotonic() - began_s)


def _attempted(
    source: GrowingInput,
    topology: Topology,
    table: OutputTable,
    last: Attempt,
    attempt: Attempt,
    now_ms: int | None,
    say: Callable[[str], None],
) -> IncrementalReport:
    # Unlike the verdicts, sightings do not depend on the policies.
    identity = f"{topology.state_identity({})} {topology.window}"
    state = table.state_of(last, identity)
    intent = table.intent_after(last, identity)
    if intent is None or not source.has(intent.pinned):
        pinned = source.pin(state.position)
        if pinned is None:
            done = "nothing was written"
            if last.run and table.is_due():
                done, last = f"run {attempt.run} has no rows, and renews the position before Delta forgets it", attempt
                table.renew(attempt, replace(state, position=source.idle_position(state.position)))
            say(f"{topology.name}: {source.place} contains nothing new; {done}")
            return IncrementalReport(last.run, table.path, {}, 0, 0, "", 0, 0.0, fresh=False)
        if intent is not None:
            say(f"{topology.name}: {source.place} no longer has the input of the interrupted run, which begins anew")
        clock_ms = int(time.time() * 1000) if now_ms is None else now_ms
        intent = table.begin(Intent(attempt.run, identity, clock_ms, pinned))
    else:
        say(f"{topology.name}: finishing the interrupted run {intent.run} with the input that it began with")
        if now_ms not in {None, intent.now_ms}:
            clock = datetime.fromtimestamp(intent.now_ms / 1000, UTC).isoformat(timespec="milliseconds")
            say(f"{topology.name}: the given clock time (--now) is ignored: run {intent.run} began with {clock}")
    return _Run(source, topology, table, intent, state, attempt, say).publish()


def store_warning(path: str, log_store: str | None) -> str | None:
    """Return a warning if two drivers could commit the same version of a table at ``path``, or None if they cannot."""
    scheme = path.partition(":")[0]
    if log_store is not None or scheme not in {"s3", "s3a", "s3n"}:
        return None
    return (
        f"{path}: Delta on S3 is safe only with one driver at a time, unless spark.delta.logStore.{scheme}.impl names "
        f"a log store that prevents two commits of one version"
    )


@dataclass(frozen=True, slots=True)
class _Run:
    source: GrowingInput
    topology: Topology
    table: OutputTable
    intent: Intent
    state: RunState
    attempt: Attempt
    say: Callable[[str], None]

    def publish(self) -> IncrementalReport:
        history = self.source.open(self.intent.pinned)
        if "run" in (name.lower() for name in history.records.columns):
            raise TopologyError([Problem("column run", "is a column that dedup adds; rename or drop it")])
        types = self._id_types(history)
        empty = not history.placed and history.records.limit(1).count() == 0
        mode = self._mode(history, empty=empty)
        self.say(f"{self.topology.name}: run {self.intent.run}: {history.place}: {ORDER_TEXTS[mode]}")
        known = self.state.live_layers(self.topology.window.retention_ms)
        known_bytes = _SIGHTING_BYTES * sum(layer.rows for layer in known)
        with shuffles_for(self.source.spark, (history.size_bytes or 0) + known_bytes, power_of_two=True):
            buckets = sorted({layer.buckets for layer in known})
            layers = {count: self._whole([each for each in known if each.buckets == count]) for count in buckets}
            now_ms, ends = self.intent.now_ms, self.state.ends
            verdicts = shuffled(history, self.topology, now_ms=now_ms, ends=ends, layers=layers)
            # Two jobs read these rows, because the state is written before the commit. `persist` avoids a second
            # shuffle.
            verdicts = replace(verdicts, packed=verdicts.packed.persist(StorageLevel.DISK_ONLY))
            try:
                left, counts, ends = self._leave(verdicts, known)
                rows = balanced(history, counts)
                self.source.refuse_changed(self.intent.pinned)
                position = self.source.position(self.intent.pinned, self.state.position)
                kept_mode = self.state.mode if empty else mode
                after = RunState(self.intent.identity, kept_mode, position, types, ends, left)
                self.table.keep_state(self.attempt, after)
                self.table.commit(verdicts.judging.frame(), self.attempt, counts)
            finally:
                verdicts.packed.unpersist()
        self.table.forget_before(self.attempt.run, [*self.state.layers, *left])
        run, sightings = self.intent.run, sum(layer.rows for layer in left)
        return IncrementalReport(run, self.table.path, counts, rows, now_ms, mode, sightings, 0.0)

    def _id_types(self, history: History) -> dict[str, str]:
        types = id_types(history.events, self.topology)
        for name in sorted(types.keys() & self.state.id_types.keys()):
            if not same_ids(self.state.id_types[name], types[name]):
                raise StateIncompatible(
                    f"column `{name}` of {self.source.place} is {types[name]}, but was {self.state.id_types[name]} "
                    f"in earlier runs: it is part of the tracking ID, and 1 and '1' are different IDs. Nothing was "
                    f"changed. Cast it to its earlier type, or judge everything again into another table (--out)."
                )
        return {**self.state.id_types, **types}

    def _mode(self, history: History, *, empty: bool) -> Mode:
        mode = mode_of(self.topology, history)
        if mode not in {"direct", "event_time"}:
            raise StateIncompatible(
                f"{history.place} has coordinates, but {self.topology.name} judges several source partitions in one "
                f"log, whose order depends on input that later runs read. Judge all of the input at once with "
                f"`dedup spark backfill`, or leave out the columns topic, partition and offset."
            )
        # An empty input does not show whether its rows would have coordinates.
        if not empty and self.state.mode not in {"", mode}:
            names = {"direct": "with topic, partition and offset", "event_time": "without topic, partition and offset"}
            raise StateIncompatible(
                f"{history.place} has rows {names[mode]}, but earlier runs at {self.table.path} judged rows "
                f"{names[self.state.mode]}: no order covers both. Nothing was changed. Judge them into another table."
            )
        return mode

    def _whole(self, layers: Sequence[Layer]) -> DataFrame:
        places = [self.table.state_path(layer.path) for layer in layers]
        expected = sum(layer.rows for layer in layers)
        try:
            rows = self.source.spark.read.options(**LOSSLESS).schema(LAYER).parquet(*map(literal, places))
            found = rows.agg(F.sum("rows")).first()
        except AnalysisException as error:
            found, cause = None, str(error).splitlines()[0]
        else:
            cause = f"they hold {found[0] if found else 0} sightings, but {expected} were written"
        if found is None or found[0] != expected:
            raise StateIncompatible(
                f"files with the sightings of earlier runs are missing from {', '.join(places)}: {cause}. Nothing was "
                f"changed. Restore them, or judge everything again into another table (--out)."
            )
        return rows

    def _leave(self, verdicts: Shuffled, known: Sequence[Layer]) -> tuple[list[Layer], dict[str, int], LogEnds]:
        """Write the sightings, and return the new state's layers, the number of rows by verdict, and the end of each
        log.
        """
        older = [layer.rows for layer in known]
        whole = len(older) >= _MOST_LAYERS or sum(older[1:]) > max([_FEW_SIGHTINGS, *older[:1]])
        # Another run in the same session may have changed the session's number of shuffle partitions.
        reducers = verdicts.reducers
        split = -(-sum(older) // (reducers * PACKED_AT_ONCE)) if whole else 1
        buckets = reducers << max(0, split - 1).bit_length()
        write = partial(layer_rows, verdicts.plan, reducers=reducers, buckets=buckets, whole=whole)
        name = f"state/{self.attempt.name}"
        left = verdicts.packed.mapInArrow(write, LAYER)
        # The values are already compressed.
        left.write.option("compression", "none").parquet(self.table.state_path(name))
        written = self.source.spark.read.schema(LAYER).parquet(literal(self.table.state_path(name)))
        found = written.select("rows", "newest_ms", "report").collect()
        counts: Counter[str] = Counter()
        ends = self.state.ends
        for report in (json.loads(row["report"]) for row in found if row["report"] is not None):
            counts.update(report["verdicts"])
            ends = ends_after(ends, (((topic, partition), LogEnd(*end)) for topic, partition, *end in report["ends"]))
        rows = sum(row["rows"] or 0 for row in found)
        newest_ms = max((row["newest_ms"] for row in found if row["rows"]), default=BEFORE_ALL_TIME)
        layers = [*([] if whole else known), Layer(name, buckets, rows, newest_ms)]
        return layers, dict(sorted(counts.items())), ends


class OutputTable:
    """The Delta table of verdicts; its subdirectory `_dedup` contains the state of the incremental runs."""

    def __init__(self, spark: SparkSession, out: str) -> None:
        self._spark: Final = spark
        self._log: Final = DeltaLog(spark, out)
        self._root: Final = self._log.directory
        self._files: Final = self._root.files
        self.path: Final = self._log.path
        self._newest = -1
        """The table's latest version when `last_run` read the log."""
        self._committed_ms = 0
        """When the last run was committed."""

    def state_path(self, name: str) -> str:
        """Return the path of a file or directory in the state directory."""
        return f"{self.path}/{_STATE}/{name}"

    def last_run(self) -> Attempt:
        """Return the last committed attempt, or an `Attempt` with run number 0 if the table does not exist.

        Raises StateIncompatible if someone else has changed rows of the table since the last run or while the last run
        was being committed, or if the table's history names no run.
        """
        commits = self._log.commits()
        newest = next(commits, None)
        if newest is None:
            self._refuse_others_files()
            return Attempt()
        self._newest = newest.version
        last = self._unchanged_run(chain([newest], commits))
        if last is not None:
            return last
        raise StateIncompatible(
            f"the history of {self.path} contains no run of dedup, so it is unknown where to continue: somebody else "
            f"created the table, or Delta has deleted its history (delta.logRetentionDuration). Choose another --out."
        )

    def _unchanged_run(self, commits: Iterator[TableCommit]) -> Attempt | None:
        """Return the last run that ``commits`` (newest first) name, or None if the commits name no run.

        Raises StateIncompatible if someone else has changed rows of the table since the second-to-last run.
        """
        latest: Attempt | None = None
        last: Attempt | None = None
        at = -1
        for commit in commits:
            at = commit.version if at < 0 else at
            found = _named(commit)
            # Delta accepts runs in ascending order only.
            latest = latest or found
            if commit.version != at:
                continue
            if found is not None and last is not None:
                if found.run != last.run - 1:
                    raise StateIncompatible(self._overlap_text(f"RESTORE to run {found.run}", last))
                break
            restored = commit.restored_to
            if found is not None and latest is not None and found != latest:
                raise StateIncompatible(
                    f"{self.path} was restored to run {found.run} after run {latest.run} had been committed: Delta "
                    f"would drop run {found.run + 1}. Nothing was changed. Restore it to run {latest.run}, or judge "
                    f"everything again into another table (--out)."
                )
            if found is None and restored is None and commit.operation not in _HARMLESS:
                text = self._changed_text(commit) if last is None else self._overlap_text(str(commit), last)
                raise StateIncompatible(text)
            if found is not None and last is None:
                last, self._committed_ms = found, commit.committed_ms
            at = commit.version - 1 if restored is None else restored
        return last

    def _refuse_others_files(self) -> None:
        # A killed first run may have left behind its state and a part of the table.
        names = self._names(self._root.path)
        begun = _STATE in names
        ours = {name for name in names if begun and (name in {_STATE, "_delta_log"} or name.startswith("verdict="))}
        others = [name for name in names if name not in ours]
        if others:
            raise StateIncompatible(
                f"{self.path} is not empty and not a Delta table: it holds {', '.join(others[:3])}. Choose another "
                f"--out."
            )

    def _names(self, directory: Any) -> list[str]:  # noqa: ANN401 - a Hadoop path
        statuses = self._files.listStatus(directory) if self._files.exists(directory) else ()
        return sorted(each.getPath().getName() for each in statuses)

    def _changed_text(self, commit: TableCommit) -> str:
        last = next(filter(None, map(_named, self._log.commits())), None)
        if last is None:
            return (
                f"{self.path} was created by somebody else: its last operation is {commit}, and its history contains "
                f"no run of dedup. Choose another --out."
            )
        return (
            f"somebody else has changed {self.path} after run {last.run}: {commit}. Its rows no longer match the state "
            f"of its runs, so nothing was changed. Restore the table to run {last.run} (RESTORE TABLE "
            f"... TO VERSION AS OF ...), or judge everything again into another table (--out)."
        )

    def _overlap_text(self, change: str, last: Attempt) -> str:
        return (
            f"somebody else has changed {self.path} between the start and the commit of run {last.run}: {change}. The "
            f"table contains run {last.run}, but its other rows no longer match the state of its runs. Judge "
            f"everything again into another table (--out)."
        )

    def refuse_overtaken(self, attempt: Attempt, cause: Exception | None = None) -> None:
        """Raise StateIncompatible if the table contains the run of ``attempt``, but another attempt has committed it.

        The committed attempt deletes state that ``attempt`` may still need, so ``attempt`` can fail with any error.
        """
        others = [each for each in map(_named, self._log.commits(self._newest)) if each is not None]
        if any(each.run == attempt.run for each in others) and attempt not in others:
            raise StateIncompatible(self._taken_text(attempt.run)) from cause

    def _taken_text(self, run: int) -> str:
        return (
            f"another job has committed run {run} of {self.path} while this job was running. This job published "
            f"nothing. Run it again: it continues from there."
        )

    def state_of(self, last: Attempt, identity: str) -> RunState:
        """Return the state that the last run saved, or an empty state before the first run.

        Raises StateIncompatible if the state is missing or was saved with a different identity (for a different
        topology).
        """
        if last.run == 0:
            return RunState()
        place = self._at(f"runs/{last.name}.json")
        if not self._files.exists(place):
            raise StateIncompatible(
                f"{place}, the state of the table's last run, is missing: the file was deleted, or the table is a copy "
                f"without `{_STATE}`. Restore it, or judge everything again into another table (--out)."
            )
        saved = json.loads(self._root.read(place))
        ends = {(topic, partition): LogEnd(*end) for topic, partition, *end in saved["ends"]}
        state = RunState(**{**saved, "ends": ends, "layers": [Layer(**each) for each in saved["layers"]]})
        if state.identity != identity:
            raise StateIncompatible(
                f"the runs at {self.path} belong to another topology: sightings depend on its tracking ID, topics, "
                f"event time and window. Nothing was changed. Then: {state.identity}. Now: {identity}. Judge "
                f"everything again into another table (--out), or use the earlier topology."
            )
        return state

    def intent_after(self, last: Attempt, identity: str) -> Intent | None:
        """Return the intent of the killed run that followed ``last``, or None if no run was killed or the topology has
        changed.
        """
        place = self._at(f"runs/{last.run + 1:08}.json")
        if not self._files.exists(place):
            return None
        intent = Intent(**json.loads(self._root.read(place)))
        return intent if intent.identity == identity else None

    def begin(self, intent: Intent) -> Intent:
        """Write a run's intent to the state directory, and return the intent.

        Raises SettingsError if no file can be written to the table's directory.
        """
        # Another job that begins the first run would treat a file outside of this directory as someone else's.
        self._root.refuse_unwritable("--out", f"{_STATE}/_{uuid4().hex}.part")
        self._write(f"runs/{intent.run:08}.json", asdict(intent))
        return intent

    def is_due(self) -> bool:
        """Return whether the last run is so old that Delta may soon delete commits that the next run needs.

        The next run needs the commit that names the last run, and the input's commits after the last run's position
        (`delta.logRetentionDuration`).
        """
        return time.time() * 1000 - self._committed_ms >= _RENEWED_AFTER_MS

    def renew(self, attempt: Attempt, state: RunState) -> None:
        """Make a commit without rows that names the last run again."""
        self.keep_state(attempt, state)
        nothing = self._spark.read.format("delta").load(self.path).drop("run").limit(0)
        self.commit(nothing, attempt, {})
        self.forget_before(attempt.run, state.layers)

    def keep_state(self, attempt: Attempt, state: RunState) -> None:
        """Write the state of an attempt, which becomes the table's state when `commit` names the attempt."""
        ends = [[*place, *end] for place, end in sorted(state.ends.items())]
        self._write(f"runs/{attempt.name}.json", {**asdict(state), "ends": ends})

    def commit(self, verdicts: DataFrame, attempt: Attempt, counts: Mapping[str, int]) -> None:
        """Append the verdicts in one commit of the table, which names the attempt.

        Raises StateIncompatible if another attempt has committed the same run, or if someone else has changed rows of
        the table since `last_run`. If the rows were changed while the commit was being written, the commit remains, and
        every later run raises the same error.
        """
        run = attempt.run
        metadata = json.dumps({"dedup": {**attempt._asdict(), "verdicts": counts}})
        rows = verdicts.withColumn("run", F.lit(run).cast("bigint"))
        self._refuse_other_columns(rows)
        self._unchanged_run(self._log.commits())
        taken = self._taken_text(run)
        self._log.append(rows, "dedup", run, metadata, after=self._newest, by=("verdict",), taken=taken)
        # Delta does not regard a change of other rows as a conflict with an append.
        self._unchanged_run(dropwhile(lambda commit: _named(commit) != attempt, self._log.commits()))

    def _refuse_other_columns(self, rows: DataFrame) -> None:
        if not self._log.versions():
            return
        there = self._spark.read.format("delta").load(self.path).schema
        before, now = ({each.name: each.dataType.simpleString() for each in s.fields} for s in (there, rows.schema))
        for name in sorted(before.keys() | now.keys()):
            if before.get(name) != now.get(name):
                raise StateIncompatible(
                    f"column `{name}` is {before.get(name, 'missing')} in {self.path}, but {now.get(name, 'missing')} "
                    f"in this run's verdicts. Nothing was published. Directories of the input (`name=value`) become "
                    f"columns, which must be the same in each run. Rename the directories, or judge everything again "
                    f"into another table (--out), whose columns of directories are text."
                )

    def forget_before(self, run: int, layers: Sequence[Layer]) -> None:
        """Delete the state files that neither ``run`` nor the previous run needs."""
        kept = {layer.path.rpartition("/")[2] for layer in layers}
        old = [f"state/{name}" for name in self._names(self._at("state")) if name not in kept and _run_in(name) <= run]
        old += [f"runs/{name}" for name in self._names(self._at("runs")) if _run_in(name) < run - 1]
        for name in old:
            self._files.delete(self._at(name), True)  # noqa: FBT003 - recursive

    def _at(self, name: str) -> Any:  # noqa: ANN401 - a Hadoop path
        return self._root.at(f"{_STATE}/{name}")

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        place = self._at(name)
        self._files.mkdirs(place.getParent())
        self._root.write(place, json.dumps(content), f"_{place.getName()}-{uuid4().hex}.part")


def _run_in(name: str) -> float:
    return int(name[:8]) if name[:8].isdecimal() else inf


def _named(commit: TableCommit) -> Attempt | None:
    try:
        named = metadata_object(commit.metadata)["dedup"]
        return Attempt(named["run"], named["attempt"])
    except (KeyError, TypeError):
        return None
