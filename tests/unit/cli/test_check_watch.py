"""`dedup check --watch` checks at once and at each save; completion is there for every usual shell."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from dedup.cli import check as inspect
from dedup.cli import check as watching
from dedup.cli.check import at_each_save
from dedup.cli.main import create_app

ROOT = Path(__file__).parents[3]
GOOD = (ROOT / "topologies" / "simplest.yaml").read_text(encoding="utf-8")


class Enough(Exception):
    """The test has seen what it wanted."""


def script(*steps):
    """Return what waits: each time the next step is done, and at the end the watch is over."""
    left = list(steps)

    def wait(_seconds: float):
        if not left:
            raise Enough
        left.pop(0)()

    return wait


def test_it_acts_at_once_and_after_each_kind_of_save(tmp_path, monkeypatch):
    file = tmp_path / "a.yaml"
    seen: list[str | None] = []

    def look() -> None:
        seen.append(file.read_text(encoding="utf-8") if file.exists() else None)

    def replaced() -> None:
        other = tmp_path / "b"
        other.write_text("4", encoding="utf-8")
        known = file.stat()
        os.utime(other, ns=(known.st_atime_ns, known.st_mtime_ns))
        other.replace(file)

    steps = [
        lambda: None,
        lambda: file.write_text("1", encoding="utf-8"),
        lambda: None,
        lambda: file.write_text("22", encoding="utf-8"),
        file.unlink,
        lambda: file.write_text("3", encoding="utf-8"),
        replaced,
    ]
    monkeypatch.setattr(inspect, "time", SimpleNamespace(sleep=script(*steps)))
    with pytest.raises(Enough):
        [look() for _ in at_each_save([file])]
    assert seen == [None, "1", "22", None, "3", "4"]


def test_a_mistake_is_told_and_mended_and_ctrl_c_ends_with_130(tmp_path, monkeypatch):
    file = tmp_path / "t.yaml"
    file.write_text(GOOD.replace("guard_period: 1h", "guard_perod: 1h"), encoding="utf-8")
    steps = [lambda: file.write_text(GOOD, encoding="utf-8")]

    def waited(_seconds: float) -> None:
        if not steps:
            raise KeyboardInterrupt
        steps.pop()()

    # Only this module's: other threads of the test run sleep, too.
    monkeypatch.setattr(inspect, "time", SimpleNamespace(**{**vars(time), "sleep": waited}))
    result = CliRunner().invoke(create_app(), ["check", "--watch", str(file)])
    assert result.exit_code == 130
    first, second = result.output.split("--- ")[1:]
    assert 'unknown key "guard_perod"' in first
    assert f"{file}: ok" in second
    assert watching.LOOK_S < 1


def test_what_a_topology_names_is_watched_and_the_code_is_checked_as_it_is_now(tmp_path, monkeypatch, capfd):
    """Was: only the topology files were watched, and each check reported on the code of the first one."""
    file, schema, samples = tmp_path / "t.yaml", tmp_path / "s.avsc", tmp_path / "lines"
    module = tmp_path / "watched_code.py"
    file.write_text(f"{GOOD}then: watched_code:flow\n", encoding="utf-8")
    for path in (module, samples):
        path.write_text("", encoding="utf-8")
    steps = [lambda: module.write_text("raise ValueError('the second version')", encoding="utf-8")]

    def waited(_seconds: float) -> None:
        if not steps:
            raise KeyboardInterrupt
        steps.pop()()

    monkeypatch.setattr(inspect, "time", SimpleNamespace(**{**vars(time), "sleep": waited}))
    result = CliRunner().invoke(create_app(), ["check", "--watch", "--allow-code", str(file)])
    assert result.exit_code == 130
    told = capfd.readouterr().err
    assert "is not a dedup.Flow" in told.split("the second version")[0]
    assert "watched_code cannot be imported: ValueError: the second version" in told
    assert set(inspect._files_named_in([file], code=True)) == {module, tmp_path / "watched_code/__init__.py"}
    assert not list(inspect._files_named_in([file], code=False))
    avro = GOOD.replace("source:", "source:\n  format: avro\n  schema: s.avsc", 1)
    file.write_text(avro, encoding="utf-8")
    assert set(inspect._files_named_in([file], code=False)) == {schema}


def test_a_repeated_file_is_checked_once(tmp_path, monkeypatch):
    """Was: an error, because the name of the topology is also that of the other one."""
    (tmp_path / "t.yaml").write_text(GOOD, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(create_app(), ["check", "t.yaml", str(tmp_path / "t.yaml"), "./t.yaml"])
    assert (result.exit_code, result.output.count("t.yaml: ok")) == (0, 1), result.output


def test_watching_and_json_exclude_each_other(tmp_path):
    result = CliRunner().invoke(create_app(), ["check", "--watch", "--json", str(tmp_path / "t.yaml")])
    assert result.exit_code == 2
    assert "exclude" in result.output


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_commands_are_completed(shell):
    words = {"bash": {"COMP_WORDS": "dedup des", "COMP_CWORD": "1"}}.get(shell, {"_TYPER_COMPLETE_ARGS": "dedup des"})
    environ = {"_DEDUP_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_FISH_ACTION": "get-args", **words}
    result = CliRunner().invoke(create_app(), [], env=environ, prog_name="dedup")
    assert "describe" in result.output
    assert "status" not in result.output
