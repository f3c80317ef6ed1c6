"""The demo's worker processes: `dedup run`, once each, on a leash."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from dedup.errors import InvariantBroken
from dedup.local.leashed import Leashed

_DEDUP: Final = (sys.executable, "-c", "from dedup.cli.main import main; main()")


class Workers:
    """Workers 1 to `count` of one topology, each with an id and a state directory of its own. Use with `with`."""

    def __init__(self, directory: Path, topology_file: Path, bootstrap: str, count: int) -> None:
        self._directory: Final = directory
        self._topology_file: Final = topology_file
        self._bootstrap: Final = bootstrap
        self._running: Final[dict[int, Leashed | None]] = dict.fromkeys(range(1, count + 1))

    def __enter__(self) -> Self:
        """Start all."""
        for number in self._running:
            self.start(number)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Kill what still runs."""
        for process in self._running.values():
            if process is not None:
                process.kill()

    def start(self, number: int) -> None:
        """The worker's process runs; what it knew before it was killed is still on its disk."""
        config = config_file(self._directory, self._bootstrap, number)
        command = [*_DEDUP, "run", str(self._topology_file), "--config", str(config), "--quiet"]
        self._running[number] = Leashed(command, self._log_file(number))

    def kill(self, number: int) -> None:
        """The worker is gone, by SIGKILL."""
        process = self._running[number]
        if process is not None:
            process.kill()
        self._running[number] = None

    def check(self) -> None:
        """All that should run do. Raises InvariantBroken with the end of the log of one that does not."""
        for number, process in self._running.items():
            if process is not None and not process.running:
                raise InvariantBroken(
                    f"worker {number} ended by itself with exit code {process.exit_code}. "
                    f"The end of {self._log_file(number)}:\n{self.log_tail(number)}"
                )

    def stop(self) -> None:
        """All ended in good order after SIGTERM. Raises InvariantBroken when one did not end with exit code 0."""
        self.check()
        for number, process in self._running.items():
            code = process.stop() if process is not None else 0
            self._running[number] = None
            if code != 0:
                raise InvariantBroken(
                    f"worker {number} ended with exit code {code} after SIGTERM. "
                    f"The end of {self._log_file(number)}:\n{self.log_tail(number)}"
                )

    def log_tail(self, number: int) -> str:
        """Return the last lines the worker logged."""
        text = self._log_file(number).read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-15:])

    def _log_file(self, number: int) -> Path:
        return self._directory / f"worker-{number}.log"


def config_file(directory: Path, bootstrap: str, number: int) -> Path:
    """Return a new config file for the worker of this number."""
    path = directory / f"worker-{number}.yaml"
    lines = (
        f"brokers: ['{bootstrap}']",
        f"state_dir: '{directory}/state-{number}'",
        f"worker_id: flights-{number}",
        "topics: {replication_factor: 1, min_insync_replicas: 1}",
        "web: {enabled: false}",
        "log: {format: text, level: info}",
    )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
