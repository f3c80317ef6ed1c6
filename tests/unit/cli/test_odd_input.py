"""Files and streams that are not plain files, as a shell hands them to a command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from dedup.cli.connectors import _numbers
from dedup.cli.inputs import say_report
from dedup.cli.main import create_app
from dedup.cli.verify import _one_in
from dedup.errors import SettingsError

ROOT = Path(__file__).parents[3]
SIMPLEST = ROOT / "topologies" / "simplest.yaml"
INGEST = ROOT / "topologies" / "files-to-topic.yaml"


def of_shell(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of dedup in bash, in which $D stands for the program, and "$1" and so on for the arguments."""
    script = f"D=({sys.executable} -m dedup.cli.main); {command}"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}  # for a script that changes its directory
    return subprocess.run(
        ["bash", "-c", script, "bash", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=env,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("command", "file", "says"),
    [
        ("check", SIMPLEST, ": ok"),
        ("check", INGEST, ": ok"),
        ("describe", SIMPLEST, "topology simplest"),
        ("apply --acls --set brokers=127.0.0.1:1", SIMPLEST, "kafka-acls"),
        ("size", SIMPLEST, "disk:"),
    ],
)
def test_a_file_may_be_a_pipe_which_can_be_read_only_once(command, file, says):
    found = of_shell(f'"${{D[@]}}" {command} <(cat "$1")', str(file))
    assert (found.returncode, found.stderr) == (0, "")
    assert says in found.stdout


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        ('try "$1" <&-', 0, "no records\n"),
        ("schema >&-", 0, ""),
        ('status "$1" --set brokers=x >&-', 2, ""),
        ("check nowhere.yaml 2>&-", 2, ""),
    ],
)
def test_a_stream_that_is_closed_is_like_an_empty_one(command, code, says):
    found = of_shell(f'"${{D[@]}}" {command}', str(SIMPLEST))
    assert (found.returncode, found.stdout) == (code, says)
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize("command", ["schema", "--help", 'check "$1"'])
def test_a_full_disk_behind_standard_output_is_told_in_a_sentence(command):
    """Was: a traceback."""
    found = of_shell(f'"${{D[@]}}" {command} >/dev/full', str(SIMPLEST))
    said = "standard output: cannot be written: No space left on device. Free space, and run the command again.\n"
    assert (found.returncode, found.stderr) == (1, said)


def test_a_full_disk_elsewhere_is_not_called_standard_output():
    """The error of a write names no file."""
    code = "import dedup.cli.main as cli; cli.create_app = lambda: lambda: open('/dev/full', 'w').write('x' * 99_999)"
    found = subprocess.run(
        [sys.executable, "-c", f"{code}; cli.main()"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    said = (
        "a file of this command: cannot be written: No space left on device. Free space, and run the command again.\n"
    )
    assert (found.returncode, found.stderr) == (1, said)


@pytest.mark.parametrize("option", [("--config", "nowhere.yaml"), ("--set", "brokers=a:1")])
def test_check_refuses_an_option_that_it_would_not_use(option):
    result = CliRunner().invoke(create_app(), ["check", str(SIMPLEST), *option])
    assert result.exit_code == 2
    assert "add --broker" in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (("apply", str(SIMPLEST), "--principal", "User:a"), "--principal: names whose permissions --acls prints"),
        (("broker", "--registry-port", "0"), "--registry-port is the port of the schema registry; add --registry"),
    ],
)
def test_an_option_that_would_not_be_used_is_refused(line, says):
    """Was: ignored."""
    assert says in told(line, 2)


@pytest.mark.parametrize("text", ["²", "0-²", "3-1", "", "9999999999", "0-4000000000", "0-400000000", "9" * 5_000])
def test_partitions_that_cannot_be_are_refused(text):
    """Was: a traceback, or a set of all of them that filled the memory."""
    with pytest.raises(SettingsError, match="--partitions: "):
        _numbers(text)
    assert _numbers("0, 2-4,3") == {0, 2, 3, 4}


@pytest.mark.parametrize("text", ["1/" + "9" * 5_000, "1/0", "1/²", "2/3"])
def test_a_sample_that_is_no_fraction_is_refused(text):
    """Was: a traceback for a number of more than 4,300 digits."""
    with pytest.raises(SettingsError, match="is not a fraction"):
        _one_in(text)


@pytest.mark.parametrize("minutes", ["inf", "nan", "10081"])
def test_chaos_refuses_a_duration_that_it_cannot_run_for_before_it_starts_anything(minutes):
    """Was: a traceback after Kafka had started."""
    assert "--minutes" in told(("chaos", "nowhere.yaml", "--minutes", minutes), 2)


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("run", "--checkpoint"),
        ("run", "--delta"),
        ("run", "--iceberg"),
        ("backfill", "--input"),
        ("backfill", "--out"),
        ("incremental", "--input"),
        ("seed", "--history"),
        ("upsert", "--delta"),
        ("upsert", "--rejected"),
    ],
)
def test_an_empty_place_is_refused(command, option):
    """Was: an error of Java, or an empty name that meant something else. Shell variables without a value are empty."""
    assert f"Invalid value for '{option}': is empty" in told(("spark", command, str(SIMPLEST), option, ""), 2)


@pytest.mark.parametrize(
    ("line", "parameter"),
    [
        (("checkpoint", str(SIMPLEST), "--to", ""), "--to"),
        (("checkpoint", str(SIMPLEST), "--state-dir", ""), "--state-dir"),
        (("broker", "--data-dir", ""), "--data-dir"),
        (("verify", str(SIMPLEST), "--report", " "), "--report"),
        (("run", str(SIMPLEST), "--config", ""), "--config"),
        (("status", str(SIMPLEST), "--url", "http://a:1", "--url", ""), "--url"),
        (("schemas", "export", str(SIMPLEST), ""), "DIRECTORY"),
    ],
)
def test_an_empty_option_is_not_the_default_and_an_empty_path_is_not_the_working_directory(line, parameter):
    assert f"Invalid value for '{parameter}': is empty" in told(line, 2)


def test_a_character_that_the_encoding_of_the_output_does_not_have_is_escaped():
    """Was: a traceback."""
    chain = [str(ROOT / "topologies" / name) for name in ("chain-ingest.yaml", "chain.yaml")]
    found = of_shell('PYTHONIOENCODING=latin-1 "${D[@]}" check "$1" "$2"', *chain)
    assert (found.returncode, found.stderr) == (0, "")
    assert r" \u2192 table " in found.stdout


def test_a_schema_whose_name_holds_a_nul_is_a_mistake_in_the_file(tmp_path):
    """Was: a traceback."""
    file = tmp_path / "nul.yaml"
    written = 'source:\n  format: avro\n  schema_id: none\n  schema: "a\\0b"'
    file.write_text(SIMPLEST.read_text(encoding="utf-8").replace("source:", written, 1), encoding="utf-8")
    assert "cannot be read: a path cannot contain a NUL character" in told(("check", str(file)), 2)


def told(line, code) -> str:
    """Return what a command says in one line; it exits with this code."""
    result = CliRunner().invoke(create_app(), line)
    assert getattr(result.exception, "exit_code", result.exit_code) == code, result.output
    return " ".join(f"{result.output} {result.exception or ''}".replace("│", " ").split())


def test_the_path_of_a_report_is_printed_as_it_is(capsys):
    page = Path("reports [prod]") / f"{'x' * 90}[/y]:100:.html"
    say_report(page, Console())
    assert capsys.readouterr().out == f"report: {page} and {page.with_suffix('.json').name}\n"


TALKING = """
print("imported")
def of(key, value, headers):
    print("called")
    return "a"
"""


@pytest.mark.parametrize("command", ["try --json", "check --json --allow-code --samples"])
def test_what_the_users_code_prints_is_not_mixed_with_json(command, tmp_path):
    (tmp_path / "talking.py").write_text(TALKING)
    (tmp_path / "values.jsonl").write_text("1\n")
    (tmp_path / "t.yaml").write_text(
        "dedup: 1\nname: t\nsource: {topics: [c]}\ntracking_id: {python: talking:of}\nguard_period: 1h\n"
    )
    arguments = ("t.yaml", "values.jsonl") if command.startswith("try") else ("values.jsonl", "t.yaml")
    found = of_shell(f'cd "$1"; "${{D[@]}}" {command} "$2" "$3"', str(tmp_path), *arguments)
    assert found.returncode == 0
    assert json.loads(found.stdout)
    assert {"imported", "called"} <= set(found.stderr.split())
