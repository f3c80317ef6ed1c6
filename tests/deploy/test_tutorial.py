"""Every command of docs/tutorial.md is pasted into an empty directory, terminal by terminal, and prints what the page shows."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dedup.embedded.child_process import ChildProcess
from tests.brokers import RunningKafka, read_all
from tests.integration.fleet import until

pytestmark = [pytest.mark.broker, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorial.md"
BROKER = "2"
"""Its terminal: the test run's own broker stands for it."""
WORKERS = ("3", "4")


def blocks() -> list[tuple[str, str, str | None]]:
    """Return terminal, commands, and the output that the page shows after them."""
    found = re.findall(r"^```(sh|text)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    pairs: list[tuple[str, str, str | None]] = []
    for kind, text in found:
        if kind == "text":
            terminal, commands, shown = pairs[-1]
            assert shown is None
            pairs[-1] = (terminal, commands, text)
            continue
        head, _, commands = text.partition("\n")
        pairs.append((head.removeprefix("# terminal "), commands, None))
    return pairs


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Terminals:
    """One directory, and what runs in it; of the page only addresses are changed."""

    def __init__(self, directory: Path, kafka: RunningKafka) -> None:
        self.directory = directory
        self._changed = {"localhost:9092": kafka.bootstrap, "6066": str(free_port()), "6067": str(free_port())}
        self.workers: dict[str, ChildProcess] = {}
        unset = {name for name in os.environ if name.startswith("DEDUP_")}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._environ = {name: value for name, value in os.environ.items() if name not in unset} | {"PATH": path}
        # The page's first worker has the default port.
        self._environ |= {"DEDUP_WEB__PORT": self._changed["6066"], "COLUMNS": "200"}

    def _here(self, commands: str) -> str:
        for shown, here in self._changed.items():
            commands = commands.replace(shown, here)
        return commands

    def paste(self, commands: str) -> str:
        """Return what the commands printed; they must end well."""
        done = subprocess.run(
            ["bash", "-ec", self._here(commands)], cwd=self.directory, env=self._environ, capture_output=True,
            text=True, check=False, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, (commands, done.stdout, done.stderr, self.logs())
        return done.stdout

    def begin(self, terminal: str, commands: str) -> None:
        """The commands run in a terminal of their own."""
        variables = [f"{name}={value}" for name, value in self._environ.items() if name in {"PATH", "DEDUP_WEB__PORT"}]
        line = ["env", f"--chdir={self.directory}", *variables, "bash", "-ec", f"exec {self._here(commands).strip()}"]
        self.workers[terminal] = ChildProcess(line, self.log_of(terminal))

    def log_of(self, terminal: str) -> Path:
        return self.directory.parent / f"terminal-{terminal}.log"

    def logs(self) -> str:
        return "\n".join(self.log_of(each).read_text(encoding="utf-8")[-3000:] for each in self.workers)

    def running(self) -> int:
        """Count tasks that run; a worker that ended before its time is a failure."""
        assert all(worker.running for worker in self.workers.values()), self.logs()
        return self.logs().count("running from offset")


@pytest.fixture
def terminals(tmp_path: Path, kafka: RunningKafka) -> Iterator[Terminals]:
    """Return an empty directory with terminals; nothing runs in them when the test ends."""
    directory = tmp_path / "empty"
    directory.mkdir()
    found = Terminals(directory, kafka)
    yield found
    for worker in found.workers.values():
        worker.kill()


def test_from_an_empty_directory_to_two_workers_and_the_proof(terminals, kafka):
    given = blocks()
    assert [terminal for terminal, _, _ in given if terminal != "1"] == [BROKER, *WORKERS]
    said = {}
    for terminal, commands, shown in given:
        if terminal == BROKER:
            assert commands == "dedup broker\n"
            continue
        if terminal in WORKERS:
            terminals.begin(terminal, commands)
            continue
        if len(terminals.workers) == len(WORKERS):
            # A person looks when both workers say that they run.
            until(lambda: terminals.running() >= 4, terminals.logs)
            until(lambda: len(read_all(kafka.bootstrap, "orders.unique")) >= 4, terminals.logs)
        said[commands] = terminals.paste(commands)
        if shown is not None:
            # `…` stands for what differs from run to run.
            wanted = re.escape(shown).replace("…", r"\w+") + r"\Z"
            assert re.search(wanted, said[commands]), (commands, said[commands])
    by_first_words = {" ".join(commands.split()[:2]): output for commands, output in said.items()}
    assert by_first_words["dedup status"].count("orders/") >= 4
    for worker in terminals.workers.values():
        assert worker.stop() == 0, terminals.logs()
