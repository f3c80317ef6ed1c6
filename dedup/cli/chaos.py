"""`dedup chaos`: kills, freezes and cuts a fleet under load, and proves that nothing was lost or duplicated."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from dedup.cli.report_page import refuse_no_page, write_report

if TYPE_CHECKING:  # imported when the command runs, as --help must be quick
    from rich.console import Console
    from rich.progress import Progress

    from dedup.cli.chaos_fleet import ChaosFleet
    from dedup.cli.chaos_run import Stage
    from dedup.proof.chaos_report import ChaosReport, Tick
    from dedup.settings import Settings
    from dedup.topology.model import Topology

_HELP = """Kill, freeze and cut a fleet under load for some minutes, then prove that nothing was lost or duplicated.

Without --config it runs on a Kafka of its own, whose broker is killed, too, and whose connections are cut. With
--config it runs in your test environment: made-up records go into the topology's source topics, which must exist and
be empty, and only workers are hit, those that this command starts. A committed reader looks on all the while. Exit code
4 if anything was violated.

Examples: dedup chaos topologies/simplest.yaml --minutes 2

dedup chaos topologies/orders.yaml --config config/test.yaml --minutes 30 --seed 7
"""
PARTITIONS: Final = 4
"""Of the source topics of the embedded Kafka."""
SESSION_S: Final = 6
_OVERRIDES: Final = (f"session_timeout={SESSION_S}s", "commit_interval=50ms", "log.format=text")


@dataclass(frozen=True, slots=True)
class Order:
    """What was asked for."""

    topology: Topology
    topology_file: Path
    minutes: float
    workers: int
    per_s: int
    seed: int
    harder: float


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("chaos", help=_HELP)(chaos_command)


def chaos_command(  # noqa: PLR0917  # one parameter per option
    topology: Annotated[Path, typer.Argument(help="The topology file.", metavar="TOPOLOGY")],
    config: Annotated[Path | None, typer.Option(help="A test environment; without it an embedded Kafka.")] = None,
    minutes: Annotated[float, typer.Option(min=0.2, help="How long blows fall.")] = 2.0,
    workers: Annotated[int, typer.Option(min=1, help="How many workers.")] = 2,
    per_s: Annotated[int, typer.Option(min=1, help="Records sent a second.")] = 2_000,
    seed: Annotated[int, typer.Option(help="The same seed draws the same blows.")] = 1,
    harder: Annotated[float, typer.Option(min=0.1, max=20, help="So many times as many blows a minute.")] = 1.0,
    report: Annotated[Path, typer.Option(help="The HTML report; a JSON one goes beside it.")] = Path("chaos.html"),
) -> None:
    """See `_HELP`; raises VerificationFailed after everything is printed and written."""
    from rich.console import Console

    from dedup.cli.inputs import read_topology
    from dedup.errors import VerificationFailed

    console = Console(highlight=False, soft_wrap=True)
    order = Order(read_topology(topology), topology, minutes, workers, per_s, seed, harder)
    _refuse_observing(order)
    refuse_no_page(report)
    directory = Path(tempfile.mkdtemp(prefix="dedup-chaos-"))
    try:
        found = _embedded(order, directory, console) if config is None else _yours(order, config, directory, console)
    except Exception:
        console.print(f"the logs are in {directory}", style="yellow")
        raise
    write_report(report, found.to_html(), found.to_json())
    _print(found, report, console)
    if not found.passed:
        raise VerificationFailed(
            f"{order.topology.name}: {found.closing_line}. {report} names what broke; the logs are in "
            f"{directory}. `--seed {seed}` draws the same blows again."
        )
    shutil.rmtree(directory, ignore_errors=True)


def _refuse_observing(order: Order) -> None:
    from dedup.errors import Problem, SettingsError

    if order.topology.output is None:
        told = "it forwards nothing, and what is proved is what is forwarded; give it an `output` for the test"
        raise SettingsError([Problem(str(order.topology_file), told)])


def _embedded(order: Order, directory: Path, console: Console) -> ChaosReport:
    from dedup.cli.fetching import fetching_jars
    from dedup.local.kafka import EmbeddedKafka
    from dedup.local.proxy import FaultProxy
    from dedup.proof.atleastonce import make_topic
    from dedup.settings import load_settings

    with fetching_jars() as progress:
        kafka = EmbeddedKafka(data_dir=directory / "kafka", profile="bench", proxied=1, progress=progress).start()
    try:
        for topic in order.topology.source.topics:
            make_topic(kafka.bootstrap, topic, PARTITIONS)
        config = directory / "config.yaml"
        listener = kafka.proxied[0]
        config.write_text(f"brokers: ['{listener.bootstrap}']\n", encoding="utf-8")
        with FaultProxy(listener.broker_port, port=listener.proxy_port) as proxy:
            _apply(order, config)
            # Workers go through the proxy; those that judge them do not.
            settings = replace(load_settings(config, [], {}), brokers=(kafka.bootstrap,))
            with _staged(order, config, settings, directory) as (stage, fleet):
                return _run(order, settings, replace(stage, kafka=kafka, proxy=proxy), fleet, console)
    finally:
        kafka.stop()


def _yours(order: Order, config: Path, directory: Path, console: Console) -> ChaosReport:
    import os

    from dedup.settings import load_settings

    settings = load_settings(config, [], os.environ)
    _refuse_used(order.topology, settings)
    _apply(order, config)
    with _staged(order, config, settings, directory) as (stage, fleet):
        return _run(order, settings, stage, fleet, console)


def _refuse_used(topology: Topology, settings: Settings) -> None:
    """Raise StateIncompatible unless the source topics are there and empty: made-up records must hurt nobody."""
    from dedup.errors import StateIncompatible
    from dedup.proof.kafka_reader import KafkaReader

    with KafkaReader(settings) as reader:
        for topic, partitions in reader.partitions(topology.source.topics).items():
            bounds = reader.bounds(topic, range(partitions))
            if not partitions or any(each.high for each in bounds.values()):
                state = "has records" if partitions else "does not exist"
                raise StateIncompatible(
                    f"source topic {topic!r} {state}. `dedup chaos` writes made-up records: give it a test environment "
                    f"where the topic exists and was never written to. Nothing was touched."
                )


def _apply(order: Order, config: Path) -> None:
    """Every topic the fleet writes exists, so that the committed reader can begin before the first worker."""
    from dedup.errors import BrokerUnavailable

    command = [sys.executable, "-c", "from dedup.cli.main import main; main()", "apply", str(order.topology_file)]
    done = subprocess.run([*command, "--config", str(config)], capture_output=True, text=True, check=False)  # noqa: S603  # our own command
    if done.returncode:
        raise BrokerUnavailable(f"`dedup apply` ended with exit code {done.returncode}: {done.stderr or done.stdout}")


@contextlib.contextmanager
def _staged(order: Order, config: Path, settings: Settings, directory: Path) -> Iterator[tuple[Stage, ChaosFleet]]:
    from dedup.cli.chaos_fleet import ChaosFleet
    from dedup.cli.chaos_run import Stage
    from dedup.proof.kafka_reader import KafkaReader, client_config
    from dedup.proof.made import MadeRecords
    from dedup.proof.sender import Sender
    from dedup.proof.watch import Watch
    from dedup.proof.witness import Witness

    topology, brokers = order.topology, ",".join(settings.brokers)
    with KafkaReader(settings) as reader:
        partitions = reader.partitions(topology.source.topics)
        output = topology.output.topic if topology.output is not None else topology.dead_letter
        begin = dict.fromkeys(range(reader.partitions([output])[output]), 0)
    records = MadeRecords(topology, partitions, run=f"chaos-{order.seed}-{int(time.time())}", seed=order.seed)
    with contextlib.ExitStack() as stack:
        witness = stack.enter_context(Witness(topology, settings, begin))
        watches = tuple(
            stack.enter_context(Watch(brokers, topology.name, topic, count, client=client_config(settings)))
            for topic, count in partitions.items()
        )
        fleet = stack.enter_context(ChaosFleet(directory, order.topology_file, config, list(_OVERRIDES), order.workers))
        sender = stack.enter_context(Sender(records, settings, per_s=order.per_s))
        yield Stage(fleet, sender, watches, witness, SESSION_S), fleet


def _run(order: Order, settings: Settings, stage: Stage, fleet: ChaosFleet, console: Console) -> ChaosReport:
    from rich.progress import Progress

    from dedup.cli.chaos_evidence import gather
    from dedup.cli.chaos_run import ChaosRun
    from dedup.proof.blows import OF_WORKERS, PER_MINUTE, draw
    from dedup.proof.chaos_report import ChaosReport
    from dedup.proof.oracles import oracles

    seconds = order.minutes * 60
    kinds = {kind for kind in PER_MINUTE if stage.kafka is not None or kind in OF_WORKERS}
    rates = {kind: rate * order.harder for kind, rate in PER_MINUTE.items() if kind in kinds}
    blows = draw(seed=order.seed, seconds=seconds, workers=order.workers, per_minute=rates)
    console.print(f"{order.workers} workers, {order.per_s:,} records a second, {len(blows)} blows, seed {order.seed}")
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bars:
        run = ChaosRun(stage, blows, _ticker(bars, seconds))
        judged = run.play(seconds)
    fleet.stop_all()
    console.print(f"{stage.sender.sent:,} records sent; the fleet has ended; everything is read again")
    course = run.course
    found = gather(order.topology, settings, stage, course, judged=judged)
    return ChaosReport(
        order.topology.name,
        order.seed,
        seconds,
        order.workers,
        course.struck,
        course.ticks,
        dict(course.restarts),
        found.verified,
        oracles(found),
    )


def _ticker(bars: Progress, seconds: float):  # type: ignore[no-untyped-def]  # noqa: ANN202
    task = bars.add_task("chaos", total=seconds)

    def show(tick: Tick) -> None:
        lag = tick.in_topic - tick.judged
        bars.update(task, completed=min(tick.at_s, seconds), description=f"{tick.judged:,} judged, lag {lag:,}")

    return show


def _print(found: ChaosReport, page: Path, console: Console) -> None:
    from rich.table import Table

    table = Table("", "what must hold", "figure", "", title=f"{found.topology}: {found.seconds / 60:.1f} minutes")
    for each in found.oracles:
        table.add_row(each.name, each.meaning, each.figure, "held" if each.held else "BROKEN")
    console.print(table)
    console.print(", ".join(f"{number} x {kind}" for kind, number in found.counts.most_common()))
    console.print(f"report: {page} and {page.with_suffix('.json').name}")
    console.print(found.closing_line, style="bold" if found.passed else "bold red")
