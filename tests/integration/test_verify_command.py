"""`dedup verify` as it is typed: what it prints, what it writes, how it ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from dedup.cli.main import create_app
from dedup.errors import SettingsError, VerificationFailed
from tests.brokers import Admin, RunningKafka
from tests.integration.fleet import KEPT
from tests.integration.planting import BASE_MS, Sent, commit, send

pytestmark = pytest.mark.broker

TOPOLOGY = """
dedup: 1
name: {name}
source: {{topics: [{name}-in], partitioned_by: tracking_id}}
tracking_id: {{field: id}}
guard_period: 10s
output: {{topic: {name}-out}}
"""


@pytest.fixture
def typed(
    kafka: RunningKafka, admin: Admin, topic_names: Callable[[str], str], tmp_path: Path
) -> Callable[[int], tuple[list[str], Path]]:
    """Return a function that writes a run with so many of its two records in the output, and the arguments."""

    def write(forwarded: int) -> tuple[list[str], Path]:
        name = topic_names("typed")
        for topic in ("in", "out", "out.late", "out.dead-letter"):
            admin.create_topic(f"{name}-{topic}", 1, KEPT)
        records = [Sent(f"{name}-in", 0, b"k", b'{"id": %d}' % row, [], BASE_MS + row) for row in range(2)]
        send(kafka, records)
        send(kafka, [Sent(f"{name}-out", 0, r.key, r.value, [], r.timestamp_ms) for r in records[:forwarded]])
        commit(kafka, name, f"{name}-in", {0: 2})
        topology, config, report = tmp_path / "topology.yaml", tmp_path / "config.yaml", tmp_path / "to" / "report.html"
        topology.write_text(TOPOLOGY.format(name=name), encoding="utf-8")
        config.write_text(f"brokers: ['{kafka.bootstrap}']\n", encoding="utf-8")
        return ["verify", str(topology), "--config", str(config), "--report", str(report)], report

    return write


@pytest.fixture
def app() -> typer.Typer:
    return create_app()


def test_a_correct_run_ends_with_the_two_numbers(
    app: typer.Typer, typed: Callable[[int], tuple[list[str], Path]]
) -> None:
    arguments, report = typed(2)
    result = CliRunner().invoke(app, arguments)
    assert result.exception is None, result.output
    assert result.output.strip().endswith("lost 0  duplicated 0")
    assert "<svg" in report.read_text(encoding="utf-8")
    assert json.loads(report.with_suffix(".json").read_text(encoding="utf-8"))["passed"] is True


def test_a_loss_is_an_error_with_exit_code_4(app: typer.Typer, typed: Callable[[int], tuple[list[str], Path]]) -> None:
    arguments, report = typed(1)
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert isinstance(result.exception, VerificationFailed)
    assert result.exception.exit_code == 4
    assert str(report) in str(result.exception)
    assert json.loads(result.stdout)["violations"]["lost"] == 1


@pytest.mark.parametrize("text", ["1", "2/3", "1/0", "1/x", "0.01"])
def test_a_share_that_is_none_is_refused(app: typer.Typer, text: str) -> None:
    result = CliRunner().invoke(app, ["verify", "no-such.yaml", "--sample", text])
    assert isinstance(result.exception, SettingsError)
    assert "--sample" in str(result.exception)


def test_a_scratch_directory_that_is_none_is_refused(app: typer.Typer, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["verify", "no-such.yaml", "--scratch", str(tmp_path / "none")])
    assert result.exit_code == 2
    assert "Invalid value for '--scratch'" in result.output


def test_a_sample_says_so_on_the_terminal(app: typer.Typer, typed: Callable[[int], tuple[list[str], Path]]) -> None:
    arguments, _ = typed(2)
    result = CliRunner().invoke(app, [*arguments, "--sample", "1/2"])
    assert result.exception is None, result.output
    assert "This is a sample" in result.output
    assert result.output.strip().endswith("(a sample of 1/2)")
