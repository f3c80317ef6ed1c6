"""Implements `dedup spark run`, `backfill`, `incremental`, `seed`, `audit`, `upsert`, and `sink`.

A command imports PySpark only when it runs, so that `--help` is fast and works without PySpark.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, cast

import typer

from dedup.cli.inputs import (
    ConfigOption,
    JsonOption,
    ReportOption,
    SetOption,
    TopologyArgument,
    pairs_of,
    publish,
    read_settings,
    read_topology,
    refuse_no_page,
    say,
    time_of,
    where_named,
)
from dedup.cli.run import VerdictProgress
from dedup.cli.spark_options import (
    PASSWORD,
    BeginOffsets,
    ChangelogRows,
    Checkpoint,
    CommitRows,
    ConfOption,
    DeltaOption,
    EndOfHistory,
    EndOfTopics,
    EveryOption,
    ExitWhenDone,
    FormatOption,
    GrowingFormat,
    GrowingInputs,
    HistoryFormat,
    HistoryInputs,
    IcebergOption,
    InputFormat,
    JdbcTable,
    JdbcUrl,
    JdbcUser,
    MasterOption,
    MostOffsets,
    NowOption,
    OffsetsPerCommit,
    OntoExistingOutput,
    OutputInputs,
    QuietOption,
    RejectedPath,
    Repartitioned,
    RowsAreEvents,
    RunName,
    SeededHistory,
    SeedHistory,
    StartOfTopics,
    TableOrder,
    TableSchema,
    UpsertDelta,
    VerdictsFormat,
    VerdictsPlace,
    VerdictsTable,
)
from dedup.errors import Problem, SettingsError, VerificationFailed
from dedup.quantities import counted, parse_duration

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dedup.kafka.wire import TopicPartition
    from dedup.settings import Settings
    from dedup.spark.files import History
    from dedup.spark.seed import Seeded, Until
    from dedup.spark.spark_jars import Package
    from dedup.spark.table_log import DeltaLog, IcebergLog
    from dedup.spark.table_sink import Appended
    from dedup.spark.tables import Jdbc
    from dedup.spark.task_attempt import BatchReport
    from dedup.topology.model import Topology

_aside: Final = partial(typer.echo, err=True)
_VERDICTS: Final = ("unique", "duplicate", "late", "dead_letter", "exempt")


def open_session(
    topology: Topology, master: str | None, conf: list[str] | None, packages: Iterable[Package]
) -> SparkSession:
    """Return a Spark session with the settings in ``conf``. Raises SettingsError for a setting without a value."""
    from dedup.spark.session import session_for

    return session_for(topology, master=master, packages=packages, conf=pairs_of("--conf", conf))


def _read(path: Path, config: Path | None, overrides: list[str] | None) -> Topology:
    """Return a topology.

    If the source's values contain schema IDs, the topology gets the schemas from the configured registry.

    Raises SettingsError if the topology needs a registry and the settings name none, or if the topology has a flow.
    """
    topology = read_topology(path)
    if topology.then is not None:
        raise SettingsError([Problem("then", "no Spark job runs a flow; use `dedup run` and `dedup verify`")])
    if topology.source.needs_registry:
        from dedup.kafka.schema_registry import TASK_PATIENCE_S, asking

        topology = asking(topology, read_settings(config, overrides), patience_s=TASK_PATIENCE_S)
    return topology


def _read_both(path: Path, config: Path | None, overrides: list[str] | None) -> tuple[Topology, Settings]:
    return _read(path, config, overrides), read_settings(config, overrides)


def _fit_for(topology: Topology, fmt: InputFormat | None, *, rows_are_events: bool = False) -> Topology:
    """Return ``topology``. Raises SettingsError if files in this format cannot contain the topology's values."""
    option = "--rows-are-events" if rows_are_events else f"--format {fmt}"
    if topology.by_arrival and (rows_are_events or fmt in {"json", "json-records"}):
        text = "has no column `timestampType`, which `event_time: arrival` needs; read Parquet files or a table with it"
        raise SettingsError([Problem(option, text)])
    keys = topology.source.key_format
    if keys != "bytes" and (rows_are_events or fmt == "json"):
        text = f"has no keys, and the tracking ID is a member of the key (`source.key_format: {keys}`); read records"
        raise SettingsError([Problem(option, text)])
    if keys not in {"bytes", "json"} and fmt == "json-records":
        text = (
            f"has keys that are text, not `source.key_format: {keys}`; read Parquet files or a table with their bytes"
        )
        raise SettingsError([Problem(option, text)])
    match topology.source.format:
        case "json_schema" if rows_are_events or fmt == "json":
            text = "has values without the framing of `source.format: json_schema`; read records, or use `format: json`"
            raise SettingsError([Problem(option, text)])
        case "avro" | "protobuf" | "msgpack" | "cbor" as read if rows_are_events or fmt in {"json", "json-records"}:
            text = (
                f"has values that are text, not `source.format: {read}`; read Parquet files or a table with their bytes"
            )
            raise SettingsError([Problem(option, text)])
        case "csv" if rows_are_events or fmt in {"json", "json-records"}:
            text = "has values that are JSON, not `source.format: csv`; read Parquet files or a table with their bytes"
            raise SettingsError([Problem(option, text)])
        case _:
            return topology


def _packages(conf: list[str] | None, fmt: InputFormat | None, *places: str | None, **wanted: bool) -> list[Package]:
    """Return the packages that ``wanted``, the input format, and the paths in ``places`` require."""
    wanted["delta"] = wanted.get("delta", False) or fmt in {"delta", "table"}
    # Only the Spark session's settings show whether a catalog is an Iceberg catalog.
    wanted["iceberg"] = wanted.get("iceberg", False) or (
        fmt == "table" and any("=org.apache.iceberg." in each for each in conf or ())
    )
    wanted["s3"] = any(place.startswith("s3a:") for place in places if place)
    return [name for name in ("kafka", "delta", "iceberg", "s3", "jdbc") if wanted.get(name)]


@contextmanager
def _job(
    command: str,
    topology: Topology,
    master: str | None,
    conf: list[str] | None,
    packages: Iterable[Package],
    *,
    quiet: bool,
) -> Iterator[SparkSession]:
    """Yield a Spark session that shows its stages on a terminal unless ``quiet`` is set, and stop it at the end."""
    from dedup.spark.session import described, translated_errors

    bars = f"spark.ui.showConsoleProgress={str(not quiet and sys.stderr.isatty()).lower()}"
    spark = open_session(topology, master, [bars, *(conf or ())], packages)
    text, group = f"{topology.name}: {command}", f"dedup {command} {topology.name}"
    try:
        with translated_errors(), described(spark, text, group=group):
            yield spark
    finally:
        spark.stop()


def _word_or_time(option: str, text: str, *words: str, example: str | None = None) -> str | int:
    example = example or f"{', '.join(words)}, or a time such as 2024-01-01T00:00:00Z"
    return text if text in words else time_of(option, text, example)


def _parse_offsets(text: str, option: str) -> dict[TopicPartition, int]:
    from dedup.kafka.wire import TopicPartition

    found = {}
    for each in text.split(","):
        place, _, offset = each.strip().partition("=")
        topic, _, partition = place.rpartition("/")
        if not (topic and partition.isdecimal() and offset.isdecimal()):
            raise SettingsError([Problem(option, f'"{each}" is not an offset; write topic/partition=offset')])
        found[TopicPartition(topic, int(partition))] = int(offset)
    return found


def run(
    topology: TopologyArgument,
    *,
    checkpoint: Checkpoint,
    config: ConfigOption = None,
    overrides: SetOption = None,
    master: MasterOption = None,
    conf: ConfOption = None,
    exit_when_done: ExitWhenDone = False,
    most_offsets: MostOffsets = 1_000_000,
    commit_rows: CommitRows = 100_000,
    onto_existing_output: OntoExistingOutput = False,
    delta: DeltaOption = None,
    iceberg: IcebergOption = None,
    every: EveryOption = "10s",
    quiet: QuietOption = False,
) -> None:
    """Deduplicate a topology's source topics on Spark, exactly once, with the same verdicts and state as workers.

    Examples: dedup spark run topologies/orders.yaml --checkpoint /var/lib/dedup/orders

    dedup spark run topologies/orders.yaml --checkpoint /var/lib/dedup/orders --delta tables/orders

    dedup spark run topologies/orders.yaml --checkpoint s3a://bucket/orders --master spark://host:7077
    """
    from dedup.spark.session import translated_errors
    from dedup.spark.stream import StreamOptions, start_stream
    from dedup.spark.table_sink import TableSink, following
    from dedup.worker.logs import set_up_logging

    parsed, settings = _read_both(topology, config, overrides)
    every_s = _seconds("--every", every)
    set_up_logging(settings)
    # py4j logs every call from Spark to Python, and the errors of these calls, which `Running.wait` raises.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    # In local mode, Spark retries a failed task only if the master URL says so; otherwise, a failed task ends the
    # stream.
    local = master is None and "PYSPARK_GATEWAY_PORT" not in os.environ
    packages = _packages(conf, None, checkpoint, delta, kafka=True, delta=bool(delta), iceberg=bool(iceberg))
    table = _table_of(delta, iceberg)
    bars = "spark.ui.showConsoleProgress=false"  # the stream has a progress line of its own
    spark = open_session(parsed, "local[*,4]" if local else master, [bars, *(conf or ())], packages)
    try:
        with _StreamProgress(enabled=not quiet) as progress:
            sink = table and TableSink(spark, parsed, settings, table(spark), most_offsets=most_offsets)
            options = StreamOptions(checkpoint, exit_when_done, most_offsets, commit_rows, onto_existing_output)
            with translated_errors():
                stream = start_stream(spark, parsed, settings, replace(options, on_batch=progress.add))
            stopped = threading.Event()
            at_once = partial(stream.stop, at_once=True)
            with _stopped_by_signals(stopped.set, stream.stop, second=at_once), ExitStack() as beside:
                if sink is not None:
                    beside.enter_context(following(sink, every_s, stopped=stopped, failed=stream.stop))
                stream.wait()
        progress.closing_line()
    finally:
        spark.stop()


@contextmanager
def _stopped_by_signals(*stops: Callable[[], None], second: Callable[[], None] | None = None) -> Iterator[None]:
    """Inside the ``with`` block, call ``stops`` at each SIGTERM or SIGINT, and ``second`` from the second signal on.

    Each call runs in its own thread, because the interrupted code may hold the lock of an event that the call sets.
    """
    signals = 0

    def stop(*_: object) -> None:
        nonlocal signals
        signals += 1
        calls = stops if second is None or signals == 1 else (*stops, second)
        for each in calls:
            threading.Thread(target=each, daemon=True).start()

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _StreamProgress(VerdictProgress):
    def __init__(self, *, enabled: bool) -> None:
        super().__init__(enabled=enabled)
        self._began_s: Final = time.monotonic()
        self._batches = 0

    def add(self, report: BatchReport) -> None:
        """Count the records of a micro-batch, and update the progress line."""
        self._batches += 1
        verdicts = report.verdicts
        self.verdicts.update({name: verdicts[name] for name in _VERDICTS})
        per_s = self.verdicts.total() / (time.monotonic() - self._began_s)
        self.show(counted(self._batches, "micro-batch", "es"), per_s)


def backfill_command(
    topology: TopologyArgument,
    *,
    out: VerdictsPlace,
    inputs: HistoryInputs = None,
    fmt: FormatOption = "parquet",
    rows_are_events: RowsAreEvents = False,
    out_format: VerdictsFormat = "parquet",
    run: RunName = "backfill",
    start: StartOfTopics = "whole",
    until: EndOfTopics = "now",
    repartitioned: Repartitioned = False,
    now: NowOption = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    master: MasterOption = None,
    conf: ConfOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Judge historical records in files, tables, or Kafka topics, and write each record's verdict exactly once.

    Examples: dedup spark backfill topologies/orders.yaml --input archive/ --out verdicts/

    dedup spark backfill topologies/orders.yaml --config config/production.yaml --out verdicts/ --run may

    dedup spark backfill topologies/orders.yaml --input events.jsonl.gz --format json --out verdicts/ --out-format delta
    """
    given = {"--start": start != "whole", "--until": until != "now", "--repartitioned": repartitioned}
    if inputs and any(given.values()):
        text = "is for topics, and --input reads files; leave one of them out"
        raise SettingsError([Problem(name, text) for name, is_given in given.items() if is_given])
    now_ms = None if now is None else time_of("--now", now)

    from dedup.spark.backfill import backfill
    from dedup.spark.batch_verdicts import Counts
    from dedup.spark.files import read_files

    format_of = fmt if inputs else None
    parsed = _fit_for(_read(topology, config, overrides), format_of, rows_are_events=rows_are_events)
    packages = _packages(conf, format_of, out, *(inputs or ()), kafka=not inputs, delta=out_format == "delta")
    with _job("backfill", parsed, master, conf, packages, quiet=quiet) as spark:
        if inputs:
            history = read_files(spark, inputs, fmt, rows_are_events=rows_are_events, by_arrival=parsed.by_arrival)
        else:
            history = _kafka_history(spark, parsed, read_settings(config, overrides), start, until, repartitioned)
        report = backfill(history, parsed, out, run=run, now_ms=now_ms, fmt=out_format, say=_aside)
    written = f"{counted(report.files, 'file')} in {report.seconds:.1f} s"
    lines = [*Counts(report.verdicts, report.causes).lines, f"verdicts: {report.path}", written]
    say(asdict(report), lines, as_json=as_json)


def _kafka_history(
    spark: SparkSession, topology: Topology, settings: Settings, start: str, until: str, repartitioned: bool
) -> History:
    from dedup.spark.kafka_source import Start, read_kafka

    begin = cast("Start", _word_or_time("--start", start, "whole", "earliest"))
    end = cast("Literal['now'] | int", _word_or_time("--until", until, "now"))
    return read_kafka(spark, topology, settings, start=begin, until=end, repartitioned=repartitioned)


def incremental_command(  # noqa: PLR0917  # one parameter per option
    topology: TopologyArgument,
    inputs: GrowingInputs,
    out: VerdictsTable,
    fmt: GrowingFormat = "parquet",
    rows_are_events: RowsAreEvents = False,
    now: NowOption = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
    master: MasterOption = None,
    conf: ConfOption = None,
    quiet: QuietOption = False,
) -> None:
    """Judge the records added to an input since the last run, and append their verdicts to a Delta table exactly once.

    Each run reads the new files (or the new versions of a Delta table), and the sightings that the previous run stored
    under --out. If a run is killed, run the command again to complete it.

    Examples: dedup spark incremental topologies/orders.yaml --input bronze/orders/ --out silver/orders

    dedup spark incremental orders.yaml --input bronze/orders --format delta --rows-are-events --out silver/orders

    dedup spark incremental orders.yaml --input s3a://lake/events/ --format json --out s3a://lake/silver/events --json
    """
    if fmt == "table":
        text = "table is for other commands; an incremental run reads a Delta table by its path, with --format delta"
        raise SettingsError([Problem("--format", text)])
    if fmt == "delta" and len(inputs) > 1:
        text = f"{len(inputs)} Delta tables are given, but a run reads one; run once per table, with the same --out"
        raise SettingsError([Problem("--input", text)])

    from dedup.spark.incremental import incremental
    from dedup.spark.incremental_input import NewFiles, NewVersions

    parsed = _fit_for(_read(topology, config, overrides), fmt, rows_are_events=rows_are_events)
    now_ms = None if now is None else time_of("--now", now)
    packages = _packages(conf, fmt, out, *inputs, delta=True)
    with _job("incremental", parsed, master, conf, packages, quiet=quiet) as spark:
        if fmt == "delta":
            source: NewFiles | NewVersions = NewVersions(spark, inputs[0], rows_are_events, parsed.by_arrival)
        else:
            source = NewFiles(spark, inputs, fmt, rows_are_events, parsed.by_arrival)
        report = incremental(source, parsed, out, now_ms=now_ms, say=_aside)
    verdicts = "  ".join(f"{name} {count:,}" for name, count in report.verdicts.items())
    lines = [
        f"run {report.run}: judged {report.new_rows:,} in {report.seconds:.1f} s: {verdicts}",
        f"verdicts: {report.path}",
    ]
    say(asdict(report), lines if report.fresh else [], as_json=as_json)


def seed_command(  # noqa: PLR0917  # one parameter per option
    topology: TopologyArgument,
    until: EndOfHistory,
    history: SeedHistory = None,
    fmt: HistoryFormat = "parquet",
    rows_are_events: RowsAreEvents = False,
    config: ConfigOption = None,
    overrides: SetOption = None,
    commit_rows: ChangelogRows = 50_000,
    master: MasterOption = None,
    conf: ConfOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Judge historical records, and write their sightings to the changelog, so that a new fleet starts with this state.

    The fleet must not be running, its group must have no offsets, and its changelog must be new. If the command is
    killed, run it again to complete the seed.

    Examples: dedup spark seed topologies/orders.yaml --until latest

    dedup spark seed topologies/orders.yaml --history /data/orders --until 2026-01-01T00:00:00Z

    dedup spark seed topologies/orders.yaml --history /data/orders --format delta --until orders/0=1200,orders/1=900
    """
    from dedup.spark.files import read_files
    from dedup.spark.seed import seed

    parsed, settings = _read_both(topology, config, overrides)
    _fit_for(parsed, fmt if history else None, rows_are_events=rows_are_events)
    example = "latest, 2024-01-01T00:00:00Z or orders/0=1200,orders/1=900"
    if "=" in until:
        begins: Until = _parse_offsets(until, "--until")
    else:
        begins = cast("Until", _word_or_time("--until", until, "earliest", "latest", example=example))
    packages = _packages(conf, fmt if history else None, *(history or ()), kafka=True)
    with _job("seed", parsed, master, conf, packages, quiet=quiet) as spark:
        arrival = parsed.by_arrival
        files = (
            read_files(spark, history, fmt, rows_are_events=rows_are_events, by_arrival=arrival) if history else None
        )
        done = seed(spark, parsed, settings, begins, commit_rows=commit_rows, history=files, tell=_aside)
    say(*_seed_report(done), as_json=as_json)


def _seed_report(done: Seeded) -> tuple[dict[str, object], list[str]]:
    begins = {f"{topic}/{partition}": offset for (topic, partition), offset in sorted(done.begins.items())}
    lines = done.counts.lines
    for each in done.partitions:
        there = "; an earlier run had finished it" if each.was_there else ""
        lines.append(f"changelog partition {each.partition}: {counted(each.sightings, 'record')} of sightings{there}")
    lines += [f"{place}: the fleet begins at offset {offset}" for place, offset in begins.items()]
    lines.append(f"seeded: {done.name} in {done.seconds:.1f} s")
    facts = {"seed": done.name, **asdict(done.counts), "begins": begins, "seconds": done.seconds}
    return facts | {"partitions": [asdict(each) for each in done.partitions]}, lines


def audit_command(  # noqa: PLR0917  # one parameter per option
    topology: TopologyArgument,
    history: SeededHistory = None,
    fmt: HistoryFormat = "parquet",
    rows_are_events: RowsAreEvents = False,
    begins: BeginOffsets = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    report: ReportOption = None,
    as_json: JsonOption = False,
    master: MasterOption = None,
    conf: ConfOption = None,
    quiet: QuietOption = False,
) -> None:
    """Prove from all records in the topics that nothing was lost or duplicated.

    The exit code is 4 if anything violates the exactly-once guarantee.

    Examples: dedup spark audit topologies/orders.yaml --report reports/orders.html

    dedup spark audit topologies/orders.yaml --history /data/orders --config config/production.yaml
    """
    parsed, settings = _read_both(topology, config, overrides)
    _fit_for(parsed, fmt if history else None, rows_are_events=rows_are_events)
    offsets = None if begins is None else _parse_offsets(begins, "--from")
    refuse_no_page(report)
    # Importing Spark takes seconds, so errors that can be found without Spark are reported first.
    from dedup.spark.audit import audit
    from dedup.spark.files import read_files
    from dedup.verify.report import BY_THE_TOPOLOGY_NOW

    packages = _packages(conf, fmt if history else None, *(history or ()), kafka=True)
    with _job("audit", parsed, master, conf, packages, quiet=quiet) as spark:
        arrival = parsed.by_arrival
        files = (
            read_files(spark, history, fmt, rows_are_events=rows_are_events, by_arrival=arrival) if history else None
        )
        found = audit(spark, parsed, settings, history=files, begins=offsets)
    publish(found, report, "dedup spark audit", as_json=as_json)
    if not found.passed:
        raise VerificationFailed(
            f"{parsed.name}: {found.closing_line()}. {where_named(report)} Keep the topics as they are: they are the "
            f"evidence. {BY_THE_TOPOLOGY_NOW}"
        )


def upsert_command(  # noqa: PLR0917  # one parameter per option
    topology: TopologyArgument,
    delta: UpsertDelta = None,
    jdbc: JdbcUrl = None,
    table: JdbcTable = None,
    user: JdbcUser = None,
    inputs: OutputInputs = None,
    fmt: FormatOption = "parquet",
    schema: TableSchema = None,
    order: TableOrder = "event_time",
    rejected: RejectedPath = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    master: MasterOption = None,
    conf: ConfOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write the newest record of each tracking ID to a table, with one row per ID. Repeating the command is safe.

    Examples: dedup spark upsert topologies/orders.yaml --delta /tables/orders --schema 'id STRING, amount DOUBLE'

    dedup spark upsert topologies/orders.yaml --jdbc jdbc:postgresql://db/shop --table orders --user dedup

    dedup spark upsert t.yaml --input verdicts/run=backfill/verdict=unique --jdbc jdbc:sqlite:shop.db --table orders
    """
    from dedup.spark.batch_verdicts import refuse_absent
    from dedup.spark.files import read_files
    from dedup.spark.rejected import keep_rejected, refuse_overlap
    from dedup.spark.tables import output_records, table_rows, upsert_delta, upsert_jdbc

    began_s = time.monotonic()
    parsed = _fit_for(_read(topology, config, overrides), fmt if inputs else None)
    to = _target(delta, jdbc, table, user)
    needs = {"kafka": not inputs, "delta": delta is not None, "jdbc": jdbc is not None}
    packages = _packages(conf, fmt if inputs else None, delta, rejected, *(inputs or ()), **needs)
    with _job("upsert", parsed, master, conf, packages, quiet=quiet) as spark:
        if inputs:
            history = read_files(spark, inputs, fmt)
            refuse_absent(parsed, history)
            records = history.records
        else:
            records = output_records(spark, parsed, read_settings(config, overrides))
        found = table_rows(records, parsed, schema=schema, order=order)
        if rejected is not None:
            refuse_overlap(spark, rejected, inputs or [], fmt, delta)
        left = keep_rejected(found.rejected, rejected)
        changed = upsert_delta(found, to) if isinstance(to, str) else upsert_jdbc(found, to)
    seconds = round(time.monotonic() - began_s, 3)
    lines = [f"{delta or table}: up to date, {counted(changed, 'row')} inserted or replaced in {seconds:.1f} s"]
    if left.counts:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in left.counts.items())
        lines.append(f"rejected: {counted(sum(left.counts.values()), 'record')} ({reasons}), written to {left.path}")
    report = {"table": delta or table, "changed": changed, "rejected": left.counts, "seconds": seconds}
    report |= {} if left.path is None else {"rejected_path": left.path}
    say(report, lines, as_json=as_json)


def _target(delta: str | None, jdbc: str | None, table: str | None, user: str | None) -> Jdbc | str:
    from dedup.spark.tables import Jdbc

    if delta is not None and jdbc is None and table is None and user is None:
        return delta
    if delta is None and jdbc is not None and table is not None:
        return Jdbc(jdbc, table, user, os.environ.get(PASSWORD))
    text = "name one table: --delta PATH, or --jdbc URL with --table NAME"
    raise SettingsError([Problem("dedup spark upsert", text)])


def sink_command(
    topology: TopologyArgument,
    *,
    delta: DeltaOption = None,
    iceberg: IcebergOption = None,
    exit_when_done: ExitWhenDone = False,
    every: EveryOption = "10s",
    most_offsets: OffsetsPerCommit = 1_000_000,
    config: ConfigOption = None,
    overrides: SetOption = None,
    master: MasterOption = None,
    conf: ConfOption = None,
    quiet: QuietOption = False,
) -> None:
    """Append each committed record of a topology's output topic to a Delta or Iceberg table exactly once.

    Workers or `dedup spark run` may write to the output topic while the sink reads it. Each commit to the table also
    stores the sink's position in the topic.

    Examples: dedup spark sink topologies/orders.yaml --delta tables/orders

    dedup spark sink topologies/orders.yaml --delta s3a://lake/orders --every 1m --config config/production.yaml

    dedup spark sink topologies/orders.yaml --iceberg lake.shop.orders --conf spark.sql.catalog.lake=...
    """
    from dedup.spark.table_sink import TableSink, catch_up, follow

    parsed, settings = _read_both(topology, config, overrides)
    every_s, over = _seconds("--every", every), threading.Event()
    total = 0

    def tell(appended: Appended) -> None:
        nonlocal total
        total += appended.rows
        typer.echo(f"table version {appended.table_version}: {counted(appended.rows, 'row')} appended", err=True)

    table = _table_of(delta, iceberg)
    if table is None:
        raise SettingsError([Problem("dedup spark sink", "name a table: --delta PATH, or --iceberg CATALOG.DB.TABLE")])
    packages = _packages(conf, None, delta, kafka=True, delta=bool(delta), iceberg=bool(iceberg))
    with _job("sink", parsed, master, conf, packages, quiet=quiet) as spark:
        sink = TableSink(spark, parsed, settings, table(spark), most_offsets=most_offsets)
        with _stopped_by_signals(over.set):
            if exit_when_done:
                catch_up(sink, over=over, tell=tell)
            else:
                follow(sink, every_s=every_s, over=over, tell=tell)
    typer.echo(f"{delta or iceberg}: {counted(total, 'row')} appended")


def _table_of(delta: str | None, iceberg: str | None) -> Callable[[SparkSession], DeltaLog | IcebergLog] | None:
    from dedup.spark.table_log import DeltaLog, IcebergLog

    if delta is not None and iceberg is not None:
        raise SettingsError([Problem("--delta, --iceberg", "name one table, not two")])
    if iceberg is not None:
        return lambda spark: IcebergLog(spark, iceberg)
    return None if delta is None else lambda spark: DeltaLog(spark, delta)


def _seconds(option: str, text: str) -> float:
    try:
        return parse_duration(text) / 1000
    except ValueError as error:
        raise SettingsError([Problem(option, str(error))]) from error
