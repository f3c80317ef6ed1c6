"""Implements `dedup chaos`, which injects faults into a fleet under load and verifies the result."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from dedup.cli.inputs import (
    JsonOption,
    TopologyArgument,
    embedded_kafka,
    kept_after_errors,
    read_settings,
    read_topology,
    refuse_no_page,
    reported,
    say_report,
)
from dedup.errors import BrokerUnavailable, Problem, SettingsError, StateIncompatible, VerificationFailed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dedup.chaos.checks import ChaosReport
    from dedup.chaos.fault_run import ScheduledFault, Tick
    from dedup.chaos.load import Age
    from dedup.embedded.fault_proxy import FaultProxy
    from dedup.embedded.kafka_node import EmbeddedKafka
    from dedup.settings import Settings
    from dedup.topology.model import Topology

_PARTITIONS: Final = 4
_SESSION_S: Final = 6
_MOST_MINUTES: Final = 10_080
_OVERRIDES: Final = (f"session_timeout={_SESSION_S}s", "commit_interval=50ms", "log.format=text")


_TestConfig = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Config file of a test environment. Default: use an embedded Kafka.")
]
_Minutes = Annotated[
    float,
    typer.Option(
        min=0.2,
        max=_MOST_MINUTES,
        metavar="N",
        help="Duration of the fault injection in minutes, from 0.2 to 10,080 (a week).",
    ),
]
_Seed = Annotated[
    int, typer.Option(metavar="N", help="Seed of the fault schedule; the same seed repeats the same faults.")
]
_Harder = Annotated[
    float,
    typer.Option(
        min=0.1,
        max=20,
        metavar="N",
        help="Fault-rate multiplier, from 0.1 to 20; above 1, adds fault types on embedded Kafka.",
    ),
]
_Partitions = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", help="Number of partitions of each source topic in the embedded Kafka. Default: 4."
    ),
]
_Report = Annotated[
    Path, typer.Option(metavar="FILE", help="Path of the HTML report; a JSON report is written next to it.")
]


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """The options of `dedup chaos`."""

    topology: Topology
    topology_file: Path
    minutes: float
    workers: int
    per_s: int
    seed: int
    harder: float
    partitions: int
    """The number of partitions of each source topic in the embedded Kafka."""
    directory: Path
    """The directory for the run's logs and state."""
    console: Console
    environ: Mapping[str, str]
    """The environment of the workers."""


def chaos(  # noqa: PLR0917  # one parameter per option
    topology: TopologyArgument,
    config: _TestConfig = None,
    minutes: _Minutes = 2.0,
    workers: Annotated[int, typer.Option(min=1, metavar="N", help="Number of workers.")] = 2,
    per_s: Annotated[int, typer.Option(min=1, metavar="N", help="Records sent per second.")] = 2_000,
    seed: _Seed = 1,
    harder: _Harder = 1.0,
    partitions: _Partitions = None,
    report: _Report = Path("chaos.html"),
    as_json: JsonOption = False,
) -> None:
    """Inject faults into a fleet under load, then verify that nothing was lost or duplicated.

    The command kills, freezes, stops, and adds workers while a read_committed consumer watches the output. Without
    --config, the command uses an embedded Kafka, and also kills the broker and cuts connections. If --harder is above
    1, the command without --config also restarts the broker cleanly, changes the output's compression and maximum
    record size, and tries to delete the consumer group. The command then also shortens the source's retention, so that
    judged records are deleted.

    With --config, the command uses your test environment, and injects faults only into the workers that the command
    started. The command writes generated records to the topology's source topics, which must exist and be empty. The
    exit code is 4 if a check fails.

    Examples: dedup chaos topologies/simplest.yaml --minutes 2

    dedup chaos topologies/orders.yaml --partitions 24 --workers 3 --harder 3

    dedup chaos topologies/orders.yaml --config config/test.yaml --minutes 30 --seed 7
    """
    from dedup.settings import without_settings

    # With --json, stdout contains the report and nothing else.
    console = Console(highlight=False, soft_wrap=True, stderr=as_json)
    if math.isnan(minutes):  # No comparison with NaN is true, so NaN passes the limits of the option.
        raise SettingsError([Problem("--minutes", "is not a number")])
    parsed = read_topology(topology)
    _refuse_untestable(topology, parsed)
    if config is not None and partitions is not None:
        text = "the source topics of a test environment exist already; leave this option out"
        raise SettingsError([Problem("--partitions", text)])
    refuse_no_page(report)
    with kept_after_errors("dedup-chaos-", console) as directory:
        count = partitions or _PARTITIONS
        # An exported DEDUP_BROKERS would otherwise send the workers of an embedded Kafka to another cluster.
        environ = without_settings(os.environ) if config is None else os.environ
        options = ChaosOptions(
            parsed, topology, minutes, workers, per_s, seed, harder, count, directory, console, environ
        )
        found = _embedded(options) if config is None else _on_test_cluster(options, config)
        _publish(found, report, console, as_json=as_json)
        if not found.passed:
            raise VerificationFailed(
                f"{parsed.name}: {found.closing_line}. {report} names what broke. `--seed {seed}` injects the same "
                f"faults again."
            )


def _publish(found: ChaosReport, page: Path, console: Console, *, as_json: bool) -> None:
    """Print the result, and write its reports; see `reported`."""
    with reported(page, found.to_html, found.to_json) as written:
        print_report(found, written, console)
        if as_json:
            typer.echo(found.to_json(), nl=False)


def _refuse_untestable(file: Path, topology: Topology) -> None:
    from dedup.core.tracking_id import code_rules, key_paths

    if not file.is_file():
        text = "it is a pipe, and dedup chaos and its workers read it several times; write it to a file"
        raise SettingsError([Problem(str(file), text)])
    if topology.output is None:
        text = "it forwards nothing, so there is nothing to prove; give it an `output` for the test"
        raise SettingsError([Problem(str(file), text)])
    if topology.then is not None:
        text = "dedup chaos checks what is forwarded unchanged; test a copy without `then` and `routes`"
        raise SettingsError([Problem(str(file), text)])
    if code_rules(topology.tracking_id.rule):
        text = "dedup chaos cannot make records for an ID function; test a copy whose tracking_id names a field"
        raise SettingsError([Problem(str(file), text)])
    if key_paths(topology.tracking_id.rule):
        text = "dedup chaos makes no keys with members; test a copy of the file that names a field instead of key: PATH"
        raise SettingsError([Problem(str(file), text)])
    if topology.source.is_memberwise:
        text = (
            f"it reads {topology.source.format}, and dedup chaos makes JSON; test a copy that has `source.format: json`"
        )
        raise SettingsError([Problem(str(file), text)])


def _embedded(options: ChaosOptions) -> ChaosReport:
    from dedup.chaos.fault_run import RETENTION_PROPERTIES
    from dedup.chaos.load import make_topic
    from dedup.embedded.fault_proxy import FaultProxy

    data_dir, config = options.directory / "kafka", options.directory / "config.yaml"
    with embedded_kafka(data_dir, proxied=True, properties=RETENTION_PROPERTIES) as kafka:
        for topic in options.topology.source.topics:
            make_topic(kafka.bootstrap, topic, options.partitions, by_arrival=options.topology.by_arrival)
        listener = kafka.proxied
        config.write_text(f"brokers: ['{listener.bootstrap}']\n", encoding="utf-8")
        with FaultProxy(listener.broker_port, port=listener.proxy_port) as proxy:
            # The workers connect through the proxy; the checks connect directly.
            settings = read_settings(config, environ=options.environ)
            settings = settings.model_copy(update={"brokers": (kafka.bootstrap,)})
            return _run(options, config, settings, kafka, proxy)


def _on_test_cluster(options: ChaosOptions, config: Path) -> ChaosReport:
    from dedup.verify.kafka_reader import KafkaReader

    settings = read_settings(config)
    with KafkaReader(settings) as reader:
        for topic in options.topology.source.topics:
            bounds = reader.bounds(topic)
            if not bounds or any(each.high for each in bounds.values()):
                state = "has records" if bounds else "does not exist"
                raise StateIncompatible(
                    f"source topic {topic!r} {state}. `dedup chaos` writes synthetic records: use a test environment "
                    f"where the topic exists and has never been written to. Nothing was changed."
                )
    return _run(options, config, settings)


def _faults(options: ChaosOptions, settings: Settings, *, embedded: bool) -> tuple[list[ScheduledFault], list[Age]]:
    """Choose the faults at random.

    If a fault shortens the retention, also write old records for the broker to delete.
    """
    from dedup.chaos.fault_run import FaultType, draw, rates
    from dedup.chaos.load import write_past

    seed, now_ms = options.seed, time.time_ns() // 1_000_000
    per_minute = rates(harder=options.harder, embedded=embedded)
    faults = draw(seed=seed, seconds=options.minutes * 60, workers=options.workers, per_minute=per_minute)
    if options.topology.by_arrival:
        # The broker sets every record's timestamp, so `write_past` cannot write old records.
        faults = [fault for fault in faults if fault.kind is not FaultType.RETENTION]
    if not any(fault.kind is FaultType.RETENTION for fault in faults):
        return faults, []
    partitions = dict.fromkeys(options.topology.source.topics, options.partitions)
    past = write_past(options.topology, settings, partitions, run=f"past-{now_ms}", seed=seed, now_ms=now_ms)
    return faults, past


def _apply(options: ChaosOptions, config: Path) -> None:
    """Create all topics that workers write to, because the live checker starts before the workers do.

    If `dedup apply` fails, raises SettingsError or StateIncompatible after exit code 2 or 3, and otherwise
    BrokerUnavailable.
    """
    from dedup.embedded.child_process import DEDUP

    command = [*DEDUP, "apply", str(options.topology_file), "--config", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=options.environ)  # noqa: S603  # our own command
    if done.returncode:
        text = f"ended with exit code {done.returncode}: {done.stderr or done.stdout}"
        if done.returncode == SettingsError.exit_code:
            raise SettingsError([Problem("`dedup apply`", text)])
        kind = StateIncompatible if done.returncode == StateIncompatible.exit_code else BrokerUnavailable
        raise kind(f"`dedup apply` {text}")


def _run(
    options: ChaosOptions,
    config: Path,
    settings: Settings,
    kafka: EmbeddedKafka | None = None,
    proxy: FaultProxy | None = None,
) -> ChaosReport:
    from dedup.chaos.checks import ChaosReport, gather, oracles
    from dedup.chaos.fault_run import ChaosFleet, ChaosRun, ChaosStage, ClusterFaults
    from dedup.chaos.live_checker import LiveChecker, Watch
    from dedup.chaos.load import MadeRecords, Sender
    from dedup.verify.kafka_reader import KafkaReader

    topology, console, seconds = options.topology, options.console, options.minutes * 60
    _apply(options, config)
    faults, ages = _faults(options, settings, embedded=kafka is not None)
    with KafkaReader(settings) as reader:
        partitions = reader.partitions(topology.source.topics)
        output = topology.output.topic if topology.output is not None else topology.dead_letter
        begin = dict.fromkeys(reader.bounds(output), 0)
    records = MadeRecords(topology, partitions, run=f"chaos-{options.seed}-{int(time.time())}", seed=options.seed)
    fleet = ChaosFleet(
        options.directory, options.topology_file, config, list(_OVERRIDES), options.workers, options.environ
    )
    with contextlib.ExitStack() as stack:
        live_checker = stack.enter_context(LiveChecker(topology, settings, begin))
        watches = tuple(
            stack.enter_context(Watch(settings, topology.name, topic, count)) for topic, count in partitions.items()
        )
        stack.enter_context(fleet)
        sender = stack.enter_context(Sender(records, settings, per_s=options.per_s))
        cluster = None
        if kafka is not None and proxy is not None:
            cluster = ClusterFaults(topology, settings, watches, ages, kafka, proxy)
        stage = ChaosStage(fleet, sender, watches, live_checker, _SESSION_S, cluster)
        console.print(
            f"{options.workers} workers, {options.per_s:,} records/s, {len(faults)} faults, seed {options.seed}"
        )
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bars:
            task = bars.add_task("chaos", total=seconds)

            def show(tick: Tick) -> None:
                text = f"{tick.judged:,} judged, lag {tick.in_topic - tick.judged:,}"
                bars.update(task, completed=min(tick.at_s, seconds), description=text)

            run = ChaosRun(stage, faults, show)
            judged = run.run(seconds)
        fleet.stop()
        console.print(f"{sender.sent:,} records sent; the fleet has shut down; now everything is read again")
        found = gather(topology, settings, stage, run.events, judged=judged)
    run_of = (topology.name, options.seed, seconds, options.workers)
    return ChaosReport(*run_of, run.events, found.verified, oracles(found))


def print_report(found: ChaosReport, page: Path | None, console: Console) -> None:
    """Print the result of each check, the number of faults of each kind, and the closing line.

    ``page`` is the path of the HTML report, or None if it was not written.
    """
    table = Table("", "what must hold", "figure", "", title=f"{found.topology}: {found.seconds / 60:.1f} minutes")
    for each in found.oracles:
        table.add_row(each.name, each.meaning, each.figure, each.verdict)
    console.print(table)
    console.print(", ".join(f"{number} x {kind}" for kind, number in found.counts.most_common()))
    if page is not None:
        say_report(page, console)
    console.print(found.closing_line, style="bold" if found.passed else "bold red")
