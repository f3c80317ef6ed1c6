"""What commands that write a report refuse before they begin, and that an embedded Kafka is the only one they use."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
from rich.console import Console
from typer.testing import CliRunner

from dedup.chaos.checks import ChaosReport
from dedup.cli import chaos, demo_run, spark
from dedup.cli.main import create_app
from dedup.errors import BrokerUnavailable, DedupError, InvariantBroken, SettingsError, Terminated, VerificationFailed
from dedup.verify.report import BY_THE_TOPOLOGY_NOW, Report

TOPOLOGY = """
dedup: 1
name: orders
source: {topics: [in], partitioned_by: tracking_id}
tracking_id: {field: id}
guard_period: 10s
"""


def typed(directory: Path, *words: str, more: str = "") -> Any:
    file = directory / "topology.yaml"
    file.write_text(TOPOLOGY + more, encoding="utf-8")
    config = directory / "config.yaml"
    config.write_text("brokers: ['127.0.0.1:1']\n", encoding="utf-8")
    command, *options = words
    above = ["spark"] if command == "audit" else []
    return CliRunner().invoke(create_app(), [*above, command, str(file), "--config", str(config), *options])


@pytest.mark.parametrize("report", ["x.json", "a_file/x.html", "a_directory"])
@pytest.mark.parametrize("command", ["verify", "audit", "chaos"])
def test_a_report_that_can_not_be_written_is_refused_before_anything_is_read(
    tmp_path: Path, command: str, report: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_file").touch()
    (tmp_path / "a_directory").mkdir()
    monkeypatch.setattr("dedup.verify.verifier.verify", lambda *_, **__: pytest.fail("it reads"))
    monkeypatch.setattr(spark, "open_session", lambda *_: pytest.fail("it starts Spark"))
    monkeypatch.setattr(chaos, "_on_test_cluster", lambda *_: pytest.fail("it begins"))
    result = typed(tmp_path, command, "--report", str(tmp_path / report), more="output: {topic: out}\n")
    assert isinstance(result.exception, SettingsError), result.exception
    assert "--report" in str(result.exception)


@pytest.mark.parametrize("report", [None, "reports/x.html"])
def test_a_report_is_written_where_it_is_told_and_nowhere_else(
    tmp_path: Path, report: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = Report("t", "", "replay", 0)
    bad.violation("lost", "in/0 offset 1", "it is gone")
    monkeypatch.setattr("dedup.verify.verifier.verify", lambda *_, **__: bad)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    options = () if report is None else ("--report", report)
    result = typed(tmp_path, "verify", *options, more="output: {topic: out}\n")
    assert isinstance(result.exception, VerificationFailed)
    assert ("--report" if report is None else f"{report} names the records") in str(result.exception)
    assert str(result.exception).endswith(BY_THE_TOPOLOGY_NOW)
    files = {str(path.relative_to(Path.cwd())) for path in Path.cwd().rglob("*") if path.is_file()}
    assert files == (set() if report is None else {"reports/x.html", "reports/x.json"})


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_result_is_printed_although_the_disk_is_full_to_which_the_report_goes(
    tmp_path: Path, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Was: "standard output: cannot be written", and the result of perhaps hours was lost."""
    bad = Report("t", "", "replay", 0)
    bad.violation("lost", "in/0 offset 1", "it is gone")
    monkeypatch.setattr("dedup.verify.verifier.verify", lambda *_, **__: bad)
    page = tmp_path / "x.html"
    page.symlink_to("/dev/full")
    result = typed(tmp_path, "verify", "--report", str(page), *options, more="output: {topic: out}\n")
    assert isinstance(result.exception, DedupError), result.exception
    assert str(result.exception).startswith(f"{page}: the report cannot be written: No space left on device.")
    assert "in/0 offset 1" in result.stdout


def test_the_demo_refuses_a_report_that_can_not_be_written_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dedup.cli.demo_run.run_demo", lambda *_: pytest.fail("it begins"))
    result = CliRunner().invoke(create_app(), ["demo", "--report", str(tmp_path)])
    assert isinstance(result.exception, SettingsError), result.exception
    assert "--report" in str(result.exception)


@pytest.mark.parametrize(("distinct", "exit_code"), [(0, 0), (1, 1)])
def test_the_demo_s_json_is_all_that_is_on_stdout(
    monkeypatch: pytest.MonkeyPatch, distinct: int, exit_code: int
) -> None:
    """Also of a demo that fails; the rest is on stderr."""
    found = Report("flights", "", "replay", 0)
    monkeypatch.setattr("dedup.cli.demo_run.run_demo", lambda *_: (found, distinct))
    result = CliRunner().invoke(create_app(), ["demo", "--json"])
    assert result.exit_code == exit_code, result.output
    assert result.stdout == found.to_json()
    assert f"distinct flights {distinct}" in result.stderr


def test_the_demo_of_the_chain_has_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dedup.cli.demo_run.demo_chain", lambda *_: pytest.fail("it begins"))
    result = CliRunner().invoke(create_app(), ["demo", "--json", "--chain"])
    assert result.exit_code != 0
    assert "--json and --chain exclude each other" in result.output.replace("\n", " ")


def test_chaos_refuses_what_forwards_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "_on_test_cluster", lambda *_: pytest.fail("it begins"))
    result = typed(tmp_path, "chaos")
    assert isinstance(result.exception, SettingsError), result.exception
    assert "forwards nothing" in str(result.exception)


PROGRAM = "import os, sys; sys.exit(str(sorted(each for each in os.environ if each.startswith('DEDUP_'))))"
SHOWS_ITS_VARIABLES = (sys.executable, "-c", PROGRAM)
"""Takes the place of `dedup`, and fails with the names of dedup's variables."""
OWN = "127.0.0.1:1"


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Export settings and a crash point, and let nothing run but what shows its variables."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("DEDUP_BROKERS", "prod:9092")
    monkeypatch.setenv("DEDUP_TOPICS__REPLICATION_FACTOR", "3")
    monkeypatch.setenv("DEDUP_CRASH_AT", "after_end:1")
    kafka = MagicMock(bootstrap=OWN, proxied=SimpleNamespace(bootstrap=OWN, broker_port=1, proxy_port=2))
    kafka.__enter__.return_value = kafka
    for module in ("chaos.fault_run", "cli.demo_run", "embedded.child_process"):
        monkeypatch.setattr(f"dedup.{module}.DEDUP", SHOWS_ITS_VARIABLES)
    for module in ("chaos", "demo_run"):
        monkeypatch.setattr(f"dedup.cli.{module}.embedded_kafka", lambda *_, **_options: kafka)
    for name in ("cli.demo_run.make_topic", "chaos.load.make_topic"):
        monkeypatch.setattr(f"dedup.{name}", lambda *_, **_options: None)
    for name in ("cli.demo_run.FaultProxy", "embedded.fault_proxy.FaultProxy"):
        monkeypatch.setattr(f"dedup.{name}", MagicMock())


def assert_only_the_crash_point(said: str) -> None:
    assert "'DEDUP_CRASH_AT'" in said
    assert "DEDUP_BROKERS" not in said
    assert "DEDUP_TOPICS" not in said


@pytest.mark.usefixtures("exported")
def test_the_demo_stays_on_its_own_kafka_whatever_brokers_are_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Was: its workers joined the exported brokers' group `flights`."""
    watch = MagicMock()
    monkeypatch.setattr(demo_run, "Watch", watch)
    with pytest.raises(InvariantBroken, match="ended by itself") as ended:
        demo_run.run_demo(demo_run.FAST, tmp_path, Console(quiet=True))
    assert watch.call_args.args[0].brokers == (OWN,)
    assert_only_the_crash_point(str(ended.value))


@pytest.mark.usefixtures("exported")
def test_the_demo_of_the_chain_stays_on_its_own_kafka_whatever_brokers_are_exported(tmp_path: Path) -> None:
    with pytest.raises(InvariantBroken, match="ended by itself") as ended:
        demo_run.demo_chain(1_000, tmp_path, Console(quiet=True))
    assert_only_the_crash_point(str(ended.value))


@pytest.mark.usefixtures("exported")
def test_chaos_creates_no_topics_on_brokers_that_are_exported(tmp_path: Path) -> None:
    result = chaos_on_its_own_kafka(tmp_path)
    assert isinstance(result.exception, BrokerUnavailable), result.exception
    assert_only_the_crash_point(str(result.exception))


@pytest.mark.usefixtures("exported")
def test_chaos_kills_no_workers_on_brokers_that_are_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Was: its workers took partitions from the workers there, and were killed 12 times a minute."""

    def refuse(*given: Any) -> None:
        raise InvariantBroken(str(list(given[-1])))

    reader = MagicMock()
    reader.__enter__.return_value.partitions.return_value = {"in": 4}
    monkeypatch.setattr(chaos, "_apply", lambda *_: None)
    monkeypatch.setattr("dedup.verify.kafka_reader.KafkaReader", lambda settings: reader(settings) and reader)
    monkeypatch.setattr("dedup.chaos.fault_run.ChaosFleet", refuse)
    result = chaos_on_its_own_kafka(tmp_path)
    assert reader.call_args.args[0].brokers == (OWN,)
    assert_only_the_crash_point(str(result.exception))


@pytest.mark.usefixtures("exported")
@pytest.mark.parametrize("code", [2, 3, 5])
def test_chaos_keeps_the_exit_code_of_apply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Was: 5 also for a mistake in a file and for incompatible state."""
    command = (sys.executable, "-c", f"import sys; sys.exit({code})")
    monkeypatch.setattr("dedup.embedded.child_process.DEDUP", command)
    error = chaos_on_its_own_kafka(tmp_path).exception
    assert (error.exit_code, f"ended with exit code {code}" in str(error)) == (code, True)


def test_chaos_refuses_a_pipe() -> None:
    """Was: `dedup apply` read nothing from it, after Kafka had started."""
    reads, writes = os.pipe()
    try:
        os.write(writes, f"{TOPOLOGY}output: {{topic: out}}\n".encode())
        os.close(writes)
        result = CliRunner().invoke(create_app(), ["chaos", f"/dev/fd/{reads}"])
    finally:
        os.close(reads)
    assert isinstance(result.exception, SettingsError), result.exception
    assert "it is a pipe" in str(result.exception)


def test_a_result_of_chaos_or_the_demo_is_printed_although_its_report_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Was: lost, after minutes."""
    page = tmp_path / "none" / "r.html"
    found = ChaosReport("t", 1, 60, 2, MagicMock(injected=[]), None, [])
    monkeypatch.setattr(ChaosReport, "to_html", lambda _: "")
    monkeypatch.setattr(ChaosReport, "to_json", lambda _: "{}")
    with pytest.raises(DedupError, match="the report cannot be written"):
        chaos._publish(found, page, Console(width=200), as_json=True)
    told = capsys.readouterr().out
    assert "t: 1.0 minutes" in told
    assert "report:" not in told
    monkeypatch.setattr(demo_run, "print_report", lambda *_: None)
    monkeypatch.setattr(demo_run, "to_html", lambda *_: "")
    with pytest.raises(DedupError, match="the report cannot be written"):
        demo_run.print_books(MagicMock(books=(), to_json=lambda: "{}"), 0, page, Console())
    assert "forwarded 0 = distinct flights 0" in capsys.readouterr().out


def chaos_on_its_own_kafka(directory: Path) -> Any:
    file = directory / "topology.yaml"
    file.write_text(f"{TOPOLOGY}output: {{topic: out}}\n", encoding="utf-8")
    report = directory / "chaos.html"
    return CliRunner().invoke(create_app(), ["chaos", str(file), "--report", str(report)])


@pytest.mark.parametrize("end", [Terminated(143), KeyboardInterrupt()])
def test_a_demo_that_is_told_to_end_says_where_its_logs_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, end
) -> None:
    """Was: after SIGTERM, its directory stayed, and nobody was told."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(demo_run, "run_demo", Mock(side_effect=end))
    result = CliRunner().invoke(create_app(), ["demo", "--fast"])
    (kept,) = tmp_path.iterdir()
    assert f"the logs are in {kept}" in result.output
