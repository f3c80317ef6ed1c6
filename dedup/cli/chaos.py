"""Implements `dedup chaos`, which injects faults into a fleet under load and proves that the result is exact."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from dedup.cli.broker import embedded_kafka
from dedup.cli.inputs import TopologyArgument, read_settings, read_topology, refuse_no_page, write_report
from dedup.errors import BrokerUnavailable, Problem, SettingsError, StateIncompatible, VerificationFailed

if TYPE_CHECKING:
    from dedup.chaos.chaos_report import ChaosReport
    from dedup.chaos.fault_run import ChaosStage, ScheduledFault, Tick
    from dedup.chaos.load import Age
    from dedup.settings import Settings
    from dedup.topology.model import Topology

_PARTITIONS: Final = 4
"""Partition count of the source topics in the embedded Kafka."""
_SESSION_S: Final = 6
_OVERRIDES: Final = (f"session_timeout={_SESSION_S}s", "commit_interval=50ms", "log.format=text")


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


def chaos(  # noqa: PLR0917  # one parameter per option
    topology: TopologyArgument,
    config: Annotated[
        Path | None, typer.Option(help="Config file of a test environment; an embedded Kafka by default.")
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.2, help="Duration of fault injection.")] = 2.0,
    workers: Annotated[int, typer.Option(min=1, help="Number of workers.")] = 2,
    per_s: Annotated[int, typer.Option(min=1, help="Records sent per second.")] = 2_000,
    seed: Annotated[int, typer.Option(help="Seed of the fault schedule; the same seed gives the same faults.")] = 1,
    harder: Annotated[
        float, typer.Option(min=0.1, max=20, help="Factor for the fault rate; a value above 1 also adds other faults.")
    ] = 1.0,
    report: Annotated[Path, typer.Option(help="HTML report; a JSON report is written next to it.")] = Path(
        "chaos.html"
    ),
) -> None:
    """Inject faults into a fleet under load, then prove that nothing was lost or duplicated.

    The command kills, freezes, stops, and adds workers while a read_committed consumer watches the output. Without
    --config, the command uses an embedded Kafka, and also kills the broker and cuts connections. --harder above 1 also
    restarts the broker cleanly, changes the compression and record size of the output, shortens the retention of the
    source to delete judged records, and tries to delete the group. With --config, the command uses your test
    environment: it writes made-up records to the topology's source topics, which must exist and be empty, and affects
    only the workers that it starts itself. The exit code is 4 if a check fails.

    Examples: dedup chaos topologies/simplest.yaml --minutes 2

    dedup chaos topologies/orders.yaml --config config/test.yaml --minutes 30 --seed 7
    """
    console = Console(highlight=False, soft_wrap=True)
    options = ChaosOptions(read_topology(topology), topology, minutes, workers, per_s, seed, harder)
    _refuse_observing(options)
    refuse_no_page(report)
    directory = Path(tempfile.mkdtemp(prefix="dedup-chaos-"))
    try:
        found = (
            _embedded(options, directory, console)
            if config is None
            else _on_test_cluster(options, config, directory, console)
        )
    except Exception:
        console.print(f"the logs are in {directory}", style="yellow")
        raise
    write_report(report, found.to_html(), found.to_json())
    _print(found, report, console)
    if not found.passed:
        raise VerificationFailed(
            f"{options.topology.name}: {found.closing_line}. {report} names what broke; the logs are in "
            f"{directory}. `--seed {seed}` injects the same faults again."
        )
    shutil.rmtree(directory, ignore_errors=True)


def _refuse_observing(options: ChaosOptions) -> None:
    if options.topology.output is None:
        text = "it forwards nothing, so there is nothing to prove; give it an `output` for the test"
        raise SettingsError([Problem(str(options.topology_file), text)])


def _embedded(options: ChaosOptions, directory: Path, console: Console) -> ChaosReport:
    from dedup.chaos.fault_run import RETENTION_PROPERTIES, ClusterFaults
    from dedup.chaos.load import make_topic
    from dedup.embedded.fault_proxy import FaultProxy

    with embedded_kafka(directory, proxied=True, properties=RETENTION_PROPERTIES) as kafka:
        for topic in options.topology.source.topics:
            make_topic(kafka.bootstrap, topic, _PARTITIONS)
        config = directory / "config.yaml"
        listener = kafka.proxied
        config.write_text(f"brokers: ['{listener.bootstrap}']\n", encoding="utf-8")
        with FaultProxy(listener.broker_port, port=listener.proxy_port) as proxy:
            _apply(options, config)
            # The workers connect through the proxy; the checks connect directly.
            settings = read_settings(config).model_copy(update={"brokers": (kafka.bootstrap,)})
            faults = _faults(options, embedded=True)
            ages = _write_past(options, settings, faults)
            with _staged(options, config, settings, directory) as stage:
                cluster = ClusterFaults(options.topology, settings, stage.watches, ages, kafka, proxy)
                return _run(options, settings, replace(stage, cluster=cluster), faults, console)


def _on_test_cluster(options: ChaosOptions, config: Path, directory: Path, console: Console) -> ChaosReport:
    settings = read_settings(config)
    _refuse_used(options.topology, settings)
    _apply(options, config)
    with _staged(options, config, settings, directory) as stage:
        return _run(options, settings, stage, _faults(options, embedded=False), console)


def _faults(options: ChaosOptions, *, embedded: bool) -> list[ScheduledFault]:
    from dedup.chaos.fault_run import draw, rates

    per_minute = rates(harder=options.harder, embedded=embedded)
    return draw(seed=options.seed, seconds=options.minutes * 60, workers=options.workers, per_minute=per_minute)


def _write_past(options: ChaosOptions, settings: Settings, faults: list[ScheduledFault]) -> list[Age]:
    """Write old records, which a run that shortens retention can delete without affecting the proof."""
    from dedup.chaos.fault_run import FaultType
    from dedup.chaos.load import write_past

    if not any(fault.kind is FaultType.RETENTION for fault in faults):
        return []
    now_ms = time.time_ns() // 1_000_000
    partitions = dict.fromkeys(options.topology.source.topics, _PARTITIONS)
    return write_past(options.topology, settings, partitions, run=_run_name(options), seed=options.seed, now_ms=now_ms)


def _run_name(options: ChaosOptions) -> str:
    return f"chaos-{options.seed}-{int(time.time())}"


def _refuse_used(topology: Topology, settings: Settings) -> None:
    """Raise StateIncompatible unless the source topics exist and are empty; real and made-up records must not mix."""
    from dedup.verify.kafka_reader import KafkaReader

    with KafkaReader(settings) as reader:
        for topic in topology.source.topics:
            bounds = reader.bounds(topic)
            if not bounds or any(each.high for each in bounds.values()):
                state = "has records" if bounds else "does not exist"
                raise StateIncompatible(
                    f"source topic {topic!r} {state}. `dedup chaos` writes made-up records: give it a test environment "
                    f"where the topic exists and was never written to. Nothing was changed."
                )


def _apply(options: ChaosOptions, config: Path) -> None:
    """Create all topics that the fleet writes, so that the live checker can start before the first worker."""
    from dedup.embedded.child_process import DEDUP

    command = [*DEDUP, "apply", str(options.topology_file), "--config", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  # our own command
    if done.returncode:
        raise BrokerUnavailable(f"`dedup apply` ended with exit code {done.returncode}: {done.stderr or done.stdout}")


@contextlib.contextmanager
def _staged(options: ChaosOptions, config: Path, settings: Settings, directory: Path) -> Iterator[ChaosStage]:
    from dedup.chaos.fault_run import ChaosFleet, ChaosStage
    from dedup.chaos.live_checker import LiveChecker, Watch
    from dedup.chaos.load import MadeRecords, Sender
    from dedup.verify.kafka_reader import KafkaReader

    topology = options.topology
    with KafkaReader(settings) as reader:
        partitions = reader.partitions(topology.source.topics)
        output = topology.output.topic if topology.output is not None else topology.dead_letter
        begin = dict.fromkeys(reader.bounds(output), 0)
    records = MadeRecords(topology, partitions, run=_run_name(options), seed=options.seed)
    with contextlib.ExitStack() as stack:
        live_checker = stack.enter_context(LiveChecker(topology, settings, begin))
        watches = tuple(
            stack.enter_context(Watch(settings, topology.name, topic, count)) for topic, count in partitions.items()
        )
        fleet = stack.enter_context(
            ChaosFleet(directory, options.topology_file, config, list(_OVERRIDES), options.workers)
        )
        sender = stack.enter_context(Sender(records, settings, per_s=options.per_s))
        yield ChaosStage(fleet, sender, watches, live_checker, _SESSION_S)


def _run(
    options: ChaosOptions, settings: Settings, stage: ChaosStage, faults: list[ScheduledFault], console: Console
) -> ChaosReport:
    from dedup.chaos.chaos_report import ChaosReport
    from dedup.chaos.checks import gather, oracles
    from dedup.chaos.fault_run import ChaosRun

    seconds = options.minutes * 60
    console.print(f"{options.workers} workers, {options.per_s:,} records/s, {len(faults)} faults, seed {options.seed}")
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bars:
        run = ChaosRun(stage, faults, _ticker(bars, seconds))
        judged = run.run(seconds)
    stage.fleet.stop()
    console.print(f"{stage.sender.sent:,} records sent; the fleet has shut down; everything is read again")
    found = gather(options.topology, settings, stage, run.events, judged=judged)
    name = options.topology.name
    return ChaosReport(name, options.seed, seconds, options.workers, run.events, found.verified, oracles(found))


def _ticker(bars: Progress, seconds: float):  # type: ignore[no-untyped-def]  # noqa: ANN202
    task = bars.add_task("chaos", total=seconds)

    def show(tick: Tick) -> None:
        lag = tick.in_topic - tick.judged
        bars.update(task, completed=min(tick.at_s, seconds), description=f"{tick.judged:,} judged, lag {lag:,}")

    return show


def _print(found: ChaosReport, page: Path, console: Console) -> None:
    table = Table("", "what must hold", "figure", "", title=f"{found.topology}: {found.seconds / 60:.1f} minutes")
    for each in found.oracles:
        table.add_row(each.name, each.meaning, each.figure, each.verdict)
    console.print(table)
    console.print(", ".join(f"{number} x {kind}" for kind, number in found.counts.most_common()))
    console.print(f"report: {page} and {page.with_suffix('.json').name}")
    console.print(found.closing_line, style="bold" if found.passed else "bold red")
