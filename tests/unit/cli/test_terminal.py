"""What every command shows on a terminal: no type beside a flag, and no color where NO_COLOR is set."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from dedup.cli.main import COMMANDS, create_app

COLOR = re.compile(rb"\x1b\[(?:[\d;]*;)?(?:3\d|4\d|9\d|10\d)(?:;[\d;]*)?m")
PATHS = [path for panel in COMMANDS.values() for path in panel]


@pytest.mark.parametrize("path", ["", "spark", *PATHS])
def test_a_flag_has_no_type(path):
    result = CliRunner().invoke(create_app(), [*path.split(), "--help"])
    assert result.exit_code == 0
    assert "--help" in result.output
    assert "<bool>" not in result.output


def on_a_terminal(*arguments: str, **environ: str) -> bytes:
    """Return what a command writes to a terminal, with its escape sequences."""
    master, slave = pty.openpty()
    kept = {name: value for name, value in os.environ.items() if name not in {"NO_COLOR", "FORCE_COLOR", "CI"}}
    environ = {**kept, "TERM": "xterm-256color", **environ}
    command = [sys.executable, "-m", "dedup.cli.main", *arguments]
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environ) as process:
        os.close(slave)
        found = b"".join(pieces(master))
        process.wait(60)
    os.close(master)
    return found


def pieces(master: int) -> Iterator[bytes]:
    while True:
        try:
            piece = os.read(master, 65_536)
        except OSError:  # Linux reports the end of a terminal as an error
            return
        if not piece:
            return
        yield piece


@pytest.mark.parametrize(
    "arguments", [("--help",), ("run", "--nothing"), ("size", "--rate", "1000", "--guard", "1d")], ids=lambda a: a[0]
)
def test_no_color_is_respected(arguments):
    assert not COLOR.search(on_a_terminal(*arguments, NO_COLOR="1"))


def test_a_terminal_gets_colors_otherwise():
    assert COLOR.search(on_a_terminal("--help"))
