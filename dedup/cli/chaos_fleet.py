"""The workers of `dedup chaos`: `dedup run`, each with an id and a state directory of its own."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from dedup.errors import BrokerUnavailable
from dedup.local.leashed import Leashed

_DEDUP: Final = (sys.executable, "-c", "from dedup.cli.main import main; main()")
_KILLED: Final = 137
_NOT_UP_YET: Final = 143
"""SIGTERM before the worker listens to it: it has done nothing then."""
_GOOD_ENDS: Final = frozenset({0, BrokerUnavailable.exit_code, _NOT_UP_YET})
_TAIL_LINES: Final = 15
_DRAINS_WITHIN_S: Final = 60.0
"""A commit that meets a broker that is away waits for its own deadline first."""


@dataclass(slots=True)
class _Member:
    process: Leashed
    frozen: bool = False


class ChaosFleet:
    """Workers 0 to `count` - 1, and now and then a guest. Use with `with`."""

    def __init__(self, directory: Path, topology_file: Path, config: Path, overrides: list[str], count: int) -> None:
        self._directory: Final = directory
        where = ["--config", str(config.resolve())]
        self._command: Final = [*_DEDUP, "run", str(topology_file.resolve()), *where, "--quiet"]
        self._overrides: Final = overrides
        self._count: Final = count
        self._members: Final[dict[int, _Member]] = {}
        self.starts = 0
        self.unprovoked: Final[list[str]] = []
        """Sentences: workers that ended though nothing had hit them."""
        self.unclean: Final[list[str]] = []
        """Sentences: workers that SIGTERM did not end in good order."""

    def __enter__(self) -> Self:
        for number in range(self._count):
            self._start(number)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for member in self._members.values():
            member.process.kill()

    def kill(self, number: int) -> bool:
        """The worker was killed by SIGKILL and started again at once with the state it left; False if frozen."""
        member = self._members.get(number)
        if member is None or member.frozen:
            return False
        member.process.kill()
        self._start(number)
        return True

    def stop(self, number: int) -> bool:
        """The worker drained after SIGTERM and was started again; how it ended is noted."""
        member = self._members.get(number)
        if member is None or member.frozen:
            return False
        self._end(number, member)
        self._start(number)
        return True

    def pause(self, number: int) -> bool:
        """The worker is frozen; False if it is already."""
        member = self._members.get(number)
        if member is None or member.frozen or not member.process.running:
            return False
        member.process.pause()
        member.frozen = True
        return True

    def resume(self, number: int) -> None:
        """The worker goes on."""
        member = self._members[number]
        member.process.resume()
        member.frozen = False

    def invite(self) -> bool:
        """One more worker runs; False if there is a guest already."""
        if self._count in self._members:
            return False
        self._start(self._count)
        return True

    def dismiss(self) -> None:
        """The guest has left in good order."""
        member = self._members.pop(self._count)
        self._end(self._count, member)

    def bring_back(self) -> Counter[int]:
        """Start workers again that ended by themselves, as a supervisor does; return their exit codes.

        Only that the broker is away is a reason to end; any other is noted as unprovoked.
        """
        codes: Counter[int] = Counter()
        for number, member in list(self._members.items()):
            code = member.process.exit_code
            if code is None:
                continue
            if code != BrokerUnavailable.exit_code:
                self.unprovoked.append(
                    f"worker {number} ended by itself with exit code {code}. The end of its log:\n{self.tail(number)}"
                )
            codes[code] += 1
            self._start(number)
        return codes

    def stop_all(self) -> None:
        """All have drained and ended; how is noted. The broker is there by now, so code 5 is no good end any more."""
        for number, member in list(self._members.items()):
            self._end(number, member, good=frozenset({0, _NOT_UP_YET}))
        self._members.clear()

    @property
    def most(self) -> int:
        """Return how many workers there were at most, the guest included; they are numbered from 0."""
        return self._count + 1

    def count_logged(self, number: int, text: str) -> int:
        """Return how often a worker logged a text, over all its starts."""
        path = self.log(number)
        return path.read_text(encoding="utf-8", errors="replace").count(text) if path.exists() else 0

    def log(self, number: int) -> Path:
        """Return where a worker logs."""
        return self._directory / f"worker-{number}.log"

    def state_dir(self, number: int) -> Path:
        """Return where a worker keeps its state."""
        return self._directory / f"state-{number}"

    def tail(self, number: int) -> str:
        """Return the last lines of a worker's log."""
        text = self.log(number).read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-_TAIL_LINES:])

    def _start(self, number: int) -> None:
        own = (f"state_dir={self.state_dir(number)}", f"worker_id=chaos-{number}", "web.enabled=false")
        settings = [part for each in (*self._overrides, *own) for part in ("--set", each)]
        self._members[number] = _Member(Leashed([*self._command, *settings], self.log(number)))
        self.starts += 1

    def _end(self, number: int, member: _Member, *, good: frozenset[int] = _GOOD_ENDS) -> None:
        if member.frozen:
            self.resume(number)
        code = member.process.stop(_DRAINS_WITHIN_S)
        if code not in good:
            why = "was killed: it did not drain in time" if code == _KILLED else f"ended with exit code {code}"
            self.unclean.append(f"worker {number} {why} after SIGTERM. The end of its log:\n{self.tail(number)}")
