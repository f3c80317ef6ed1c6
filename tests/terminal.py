"""Commands on terminals of a chosen width, what is then on the screen, and snapshots of it as files."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

SNAPSHOTS = Path(__file__).parent / "unit" / "cli" / "snapshots"
WIDTHS = (80, 120)
WRITE = "DEDUP_TEST_SNAPSHOTS"
"""With this variable, tests write snapshots instead of comparing with them."""
_CONTROL = re.compile(r"(\r|\n|\x1b\[\??[\d;]*[A-Za-z])")


def file_of(name: str, width: int) -> Path:
    """Return the file with what is shown on a terminal of so many columns."""
    return SNAPSHOTS / f"{name}-{width}.txt"


def assert_looks_as_before(name: str, width: int, shown: str) -> None:
    """What is shown is what the snapshot's file holds."""
    file = file_of(name, width)
    if os.environ.get(WRITE):
        file.write_text(shown, encoding="utf-8")
    assert shown == file.read_text(encoding="utf-8"), f"look at it, then write {file.name} with {WRITE}=1"


def screen(written: str) -> str:
    """Return what is on a screen after text with the controls that Rich uses; lines are not wrapped."""
    lines, row, column = [""], 0, 0
    for part in _CONTROL.split(written):
        if part == "\n":
            row, column = row + 1, 0
            lines += [""] * (row == len(lines))
        elif part == "\r":
            column = 0
        elif not part.startswith("\x1b"):
            line = lines[row]
            lines[row] = line[:column].ljust(column) + part + line[column + len(part) :]
            column += len(part)
        elif part.endswith("A"):
            row -= int(part[2:-1])
        elif part.endswith("K"):
            assert part == "\x1b[2K", f"{part!r} is not known here"
            lines[row] = ""
    return "\n".join(lines).rstrip("\n") + "\n"


class OnTerminal:
    """A program on a terminal of its own."""

    def __init__(self, command: Sequence[str], width: int = 80, **environ: str) -> None:
        """Start it with these variables beside this process's; those that change what it shows are left out."""
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
        asked = {"NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "CI", "COLUMNS", "LINES"}
        kept = {name: value for name, value in os.environ.items() if name not in asked}
        self._written = b""
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env={**kept, "TERM": "xterm-256color", **environ}
        )
        os.close(slave)

    def __enter__(self) -> Self:
        """Return the running program."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it, if it still runs."""
        with self.process:
            self.process.kill()
        os.close(self._master)

    def until_written(self, text: str) -> None:
        """It has written this; raises AssertionError if it ends before."""
        while text.encode() not in self._written:
            assert self._read(), self._written.decode(errors="replace")

    def to_the_end(self) -> bytes:
        """Return all that it has written, with its escape sequences, once it has ended."""
        while self._read():
            pass
        self.process.wait(60)
        return self._written

    def _read(self) -> bool:
        try:
            piece = os.read(self._master, 65_536)
        except OSError:  # Linux reports the end of a terminal as an error
            return False
        self._written += piece
        return piece != b""
