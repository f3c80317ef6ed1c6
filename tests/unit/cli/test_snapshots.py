"""What commands show on terminals of 80 and 120 columns, as files; with DEDUP_TEST_SNAPSHOTS=1, tests write them.

A change of a file is a change of what users see, so look at it before you commit it.
"""

from __future__ import annotations

import ast
import io
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from rich.console import Console
from typer.main import get_command

from dedup import load_topology
from dedup.chaos.checks import ChaosReport, Epochs, Evidence, oracles
from dedup.chaos.fault_run import ChaosEvents, FaultType, InjectedFault
from dedup.chaos.live_checker import Sightings
from dedup.cli import chaos, doctor
from dedup.cli.admin import layout_in_words
from dedup.cli.inputs import Column, fitted
from dedup.cli.main import COMMANDS, create_app
from dedup.cli.status import Look, looked, table
from dedup.cli.verify import in_words as explain_in_words
from dedup.verify.explanation import ExplainedRecord, Explanation
from dedup.verify.render import print_report
from dedup.verify.report import Books, Report
from dedup.worker.layout import Layout
from tests.terminal import SNAPSHOTS, WIDTHS, assert_looks_as_before
from tests.unit.cli import made_up
from tests.unit.cli.made_up import NOW_MS, ROOT, TOPIC, printed_by


def on_a_console(show: Callable[[Console], None], width: int, *, soft_wrap: bool = False) -> str:
    console = Console(width=width, file=io.StringIO(), record=True, highlight=False, soft_wrap=soft_wrap)
    show(console)
    return console.export_text()


def task(partition: int, owner: str | None, lag: int) -> dict[str, Any]:
    return {
        "task": "dedup", "topic": TOPIC, "partition": partition, "owner": owner, "committed": 184_000_000 - lag,
        "end": 184_000_000, "lag": lag, "oldest_ms": NOW_MS - 61_000 if lag else None, "changelog_begin": 0,
        "changelog_end": 41_000_000,
    }  # fmt: skip


def page_of(worker: str, *partitions: int) -> dict[str, Any]:
    tasks = [
        {"task": "dedup", "topic": TOPIC, "partition": partition, "state": "running", "state_ids": 12_400_000,
         "state_bytes": 903_000_000, "state_max_bytes": None, "restore_remaining": 0, "restore_total": 0,
         "verdicts": {"unique": 9_000, "duplicate": 1_000}, "seconds_since_commit": 0.1}
        for partition in partitions
    ]  # fmt: skip
    return {"topology": "payments", "worker": worker, "tasks": tasks, "dead_letters": {"not_json": 12}}


def status(console: Console) -> None:
    """A fleet of three: one works, one does not answer, and one is gone."""
    members = [{"worker": name, "host": f"10.0.0.{at}", "partitions": []} for at, name in enumerate(("pay-0", "pay-1"))]
    tasks = [task(0, "pay-0", 0), task(9, "pay-0", 1_250), task(10, "pay-1", 77_000), task(11, None, 5_300_000)]
    surveyed = {"topology": "payments", "members": members, "missing_topics": [], "tasks": tasks}
    past = {
        **surveyed,
        "tasks": [{**each, "end": each["end"] - 900, "committed": each["committed"] - 700} for each in tasks],
    }
    pages = [page_of("pay-0", 0, 9)]
    seen = looked(Look(surveyed, pages, NOW_MS), Look(past, pages, NOW_MS - 1_000))
    console.print(table(seen, console.width))


def verify(console: Console, topic: str = "flights") -> None:
    books = [Books(topic, each, read=120_345_678, unique=100_345_678, duplicates=20_000_000) for each in range(2)]
    print_report(Report("flights", "127.0.0.1:9092", "replay", NOW_MS, 812.5, books=books), console)


def chaos_report(console: Console) -> None:
    books = [
        Books("orders", each, read=1_200_000, unique=900_000, duplicates=300_000, ended=1_200_000) for each in range(4)
    ]
    evidence = Evidence(
        Report("orders", "b:9092", "replay", 0, books=books), Sightings(3_600_000, 0, ()), reached=True, judged=True,
        stores=4, wrong_stores=[], zombies=14, fenced=14, epochs=[Epochs(112, 40, ())], starts=301,
        unprovoked=["worker 1 ended by itself with exit code 1"],
    )  # fmt: skip
    kinds = [FaultType.KILL] * 286 + [FaultType.FREEZE] * 14
    events = ChaosEvents([InjectedFault(1.0, kind, 0, hit=True) for kind in kinds], [], Counter())
    found = ChaosReport("orders", 7, 600.0, 3, events, evidence.verified, oracles(evidence))
    chaos.print_report(found, Path("chaos.html"), console)


def doctor_says() -> Iterator[str]:
    denied = "User:orders-worker may not Write to topic payments.card-authorizations.production.eu-central-1.v2.unique"
    found = [
        doctor.Symptom("TCP", "warning", "broker-3.example:9092 refuses connections", "Start it, or correct `brokers`"),
        doctor.Symptom("ACL", "error", denied, "Grant it: `dedup apply --acls` prints the commands"),
    ]
    return doctor.in_words(found, frozenset({"DNS", "TCP", "TLS", "authentication", "version", "ACL"}), 2)


def explain_says() -> Iterator[str]:
    first, second = (f"{TOPIC}/9 offset {at}" for at in (184_000_000, 184_000_077))
    records = [
        ExplainedRecord(first, NOW_MS, NOW_MS, NOW_MS, "unique", went=[f"{TOPIC}.unique/9 offset 120345678"]),
        ExplainedRecord(second, NOW_MS + 9, NOW_MS + 5, NOW_MS + 5, "duplicate", of=first, of_ms=NOW_MS),
        ExplainedRecord(f"{TOPIC}/9 offset 3", NOW_MS, NOW_MS - 10**9, NOW_MS, "late", wrong="it is in no topic"),
    ]
    found = Explanation("orders", "8d5e957f-2978-4348-b7bd-98fa830fa641", records)
    return explain_in_words(found, load_topology(ROOT / "topologies/orders.yaml"))


def as_lines(says: Callable[[], Iterator[str]], _width: int) -> str:
    return "".join(f"{line}\n" for line in says())


PAGES: Final = ["", "spark", "schemas", *(path for panel in COMMANDS.values() for path in panel)]
HELP: Final = {f"{path} help".strip().replace(" ", "-"): f"{path} --help" for path in PAGES}
ON_SPARK: Final = {
    "spark-audit": "spark audit topologies/orders.yaml",
    "spark-backfill": "spark backfill topologies/orders.yaml --input archive --out verdicts --run may",
    "spark-incremental": "spark incremental topologies/orders.yaml --input bronze --out silver/orders",
    "spark-seed": "spark seed topologies/orders.yaml --until latest",
    "spark-upsert": "spark upsert topologies/orders.yaml --input verdicts --jdbc jdbc:sqlite:shop.db --table orders "
    "--rejected s3a://lake/rejected/orders",
}
SHOWN: Final[dict[str, Callable[[int], str]]] = {
    **{
        name: partial(printed_by, command)
        for name, command in {
            **HELP,
            "apply-acls": "apply topologies/orders.yaml --acls",
            "check": "check topologies/simplest.yaml topologies/orders.yaml",
            "describe": "describe topologies/orders.yaml",
            "try-flow": "try topologies/routed.yaml DIR/orders.jsonl --allow-code --now 2024-01-02T00:00:00Z",
            "try": "try topologies/simplest.yaml tests/data/sample.jsonl --now 2024-01-02T00:00:00Z",
            "size": "size --rate 1000 --guard 1d",
        }.items()
    },
    **{name: partial(printed_by, command, fakes=made_up.on_spark) for name, command in ON_SPARK.items()},
    "apply": partial(printed_by, "apply topologies/orders.yaml", fakes=made_up.applied),
    "apply-dry-run": partial(printed_by, "apply topologies/orders.yaml --dry-run", fakes=made_up.applied),
    "checkpoint": partial(
        printed_by,
        "checkpoint topologies/orders.yaml --to DIR/backups --state-dir DIR/state",
        fakes=made_up.checkpointed,
    ),
    "demo-chain": partial(printed_by, "demo --chain", fakes=made_up.chain),
    "demo": partial(printed_by, "demo --fast", fakes=made_up.demo),
    "ingest": partial(printed_by, "ingest topologies/files-to-topic.yaml", fakes=made_up.connected),
    "replay": partial(printed_by, "replay topologies/orders.yaml", fakes=made_up.replayed),
    "reset": partial(printed_by, "reset topologies/orders.yaml --yes", fakes=made_up.reset),
    "reset-asks": partial(printed_by, "reset topologies/orders.yaml", fakes=made_up.reset),
    "schemas-export": partial(
        printed_by,
        "schemas export DIR/payments.yaml DIR/schemas --set schema_registry.url=http://registry:8081",
        fakes=made_up.exported,
    ),
    "sink": partial(printed_by, "sink topologies/orders.yaml", fakes=made_up.connected),
    "run": made_up.run,
    "status": partial(on_a_console, status),
    "verify": partial(on_a_console, verify),
    "verify-long-name": partial(on_a_console, partial(verify, topic=TOPIC)),
    "chaos": partial(on_a_console, chaos_report, soft_wrap=True),
    "doctor": partial(as_lines, doctor_says),
    "explain": partial(as_lines, explain_says),
    "layout": partial(as_lines, lambda: layout_in_words("payments", Layout(4, {TOPIC: 24}, 2), 2)),
    "lookup": partial(as_lines, made_up.looked_up),
}
"""What is shown without a broker and without Spark; the answers of both are made up where a command needs them."""
SHOWN_ELSEWHERE: Final = {
    "broker": ("integration/test_local_kafka.py", "test_the_command_shows_addresses_and_how_to_stop_it"),
    "spark-run": ("spark/test_reports.py", "test_a_stream_and_a_sink_show_what_they_did"),
    "spark-sink": ("spark/test_reports.py", "test_a_stream_and_a_sink_show_what_they_did"),
}
"""What a real broker or a real Spark shows, with the test that compares it."""
WITHOUT_A_SNAPSHOT: Final = {
    "schema": "1,200 lines of JSON for editors, the same on every terminal; public_api.json lists the keys"
}
"""The commands without a snapshot of what they print, and why."""
WRAPPED_BY_THE_TERMINAL: Final = {
    *("apply", "apply-acls", "apply-dry-run", "check", "checkpoint", "demo-chain", "doctor", "explain", "ingest"),
    *("layout", "lookup", "replay", "reset", "reset-asks", "schemas-export", "sink", "spark-backfill"),
    *("spark-incremental", "spark-seed", "spark-upsert", "try", "try-flow"),
}
"""Commands whose lines are messages, one for each finding, which people also search and pipe."""


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", SHOWN)
def test_it_looks_as_it_did(name, width):
    if name in ON_SPARK:
        pytest.importorskip("pyspark")
    shown = SHOWN[name](width)
    assert_looks_as_before(name, width, shown)
    if name not in WRAPPED_BY_THE_TERMINAL:
        assert max(map(len, shown.splitlines())) <= width


@pytest.mark.parametrize("name", SHOWN)
def test_no_number_is_cut(name):
    if name in ON_SPARK:
        pytest.importorskip("pyspark")
    narrow = SHOWN[name](80)
    cut = {word for word in narrow.split() if "…" in word}
    assert all(re.fullmatch(r"pay.*….*2/\d+", word) for word in cut), cut


def test_each_command_is_one_line_of_the_help_at_80_columns():
    lines = [
        line.strip("│ ") for name in ("help", "spark-help", "schemas-help") for line in SHOWN[name](80).splitlines()
    ]
    for panel in COMMANDS.values():
        for path, (_, purpose) in panel.items():
            assert any(line.startswith(path.split()[-1]) and line.endswith(purpose) for line in lines), path


def test_columns_are_left_out_whole_and_a_name_that_is_too_long_is_folded():
    columns = [Column("partition", ["x" * 30], is_text=True), Column("lag", ["1"]), Column("end", ["2"])]
    for width, heads in ((41, ["partition", "lag", "end"]), (36, ["partition", "lag"]), (20, ["partition"])):
        text = on_a_console(lambda console, width=width: console.print(fitted(columns, width)), width)
        assert text.splitlines()[0].split() == heads
        assert text.count("x") == 30


def paths(command: Any, path: str = "") -> Iterator[str]:
    """Yield each command of the command line that is not a group of commands."""
    below = getattr(command, "commands", None)
    if below is None:
        yield path
        return
    for name, each in below.items():
        yield from paths(each, f"{path} {name}".strip())


@pytest.mark.parametrize("path", [*paths(get_command(create_app()))])
def test_each_command_has_a_snapshot_of_its_output_and_one_of_its_help(path):
    name = path.replace(" ", "-")
    assert f"{name}-help" in SHOWN
    ways = [name in known for known in (SHOWN, SHOWN_ELSEWHERE, WITHOUT_A_SNAPSHOT)]
    assert sum(ways) == 1, f"show what `dedup {path}` prints: in SHOWN or, with a test of its own, in SHOWN_ELSEWHERE"


def test_the_files_are_those_that_tests_compare():
    names = [*SHOWN, *SHOWN_ELSEWHERE]
    assert {file.name for file in SNAPSHOTS.iterdir()} == {f"{name}-{width}.txt" for name in names for width in WIDTHS}


@pytest.mark.parametrize("name", SHOWN_ELSEWHERE)
def test_the_tests_that_compare_what_is_shown_elsewhere_exist(name):
    file, test = SHOWN_ELSEWHERE[name]
    tree = ast.parse((made_up.ROOT / "tests" / file).read_text(encoding="utf-8"))
    (found,) = (each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == test)
    compared = {
        call.args[0].value
        for call in ast.walk(found)
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "assert_looks_as_before"
        if isinstance(call.args[0], ast.Constant)
    }
    assert name in compared
