"""Files and streams that are not plain files, as a shell hands them to a command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SIMPLEST = ROOT / "topologies" / "simplest.yaml"
INGEST = ROOT / "topologies" / "files-to-topic.yaml"


def of_shell(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of dedup in bash, in which $D stands for the program, and "$1" and so on for the arguments."""
    script = f"D=({sys.executable} -m dedup.cli.main); {command}"
    return subprocess.run(
        ["bash", "-c", script, "bash", *arguments], capture_output=True, text=True, cwd=ROOT, check=False, timeout=60
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
