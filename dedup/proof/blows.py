"""What `dedup chaos` does to a fleet, and when: drawn beforehand from a seed, so that a run can be repeated."""

from __future__ import annotations

import enum
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


class BlowKind(enum.Enum):
    """One kind of fault; the value is its name in reports."""

    KILL = "SIGKILL"
    FREEZE = "frozen beyond the session"
    NAP = "frozen for a second"
    STOP = "SIGTERM"
    GUEST = "another worker joins and leaves"
    CUT = "connections cut"
    BROKER_KILL = "broker SIGKILL"


OF_WORKERS: Final = frozenset({BlowKind.KILL, BlowKind.FREEZE, BlowKind.NAP, BlowKind.STOP, BlowKind.GUEST})
OF_THE_BROKER: Final = frozenset({BlowKind.CUT, BlowKind.BROKER_KILL})
PER_MINUTE: Final[Mapping[BlowKind, float]] = {
    BlowKind.KILL: 12.0,
    BlowKind.FREEZE: 0.5,
    BlowKind.NAP: 1.0,
    BlowKind.STOP: 1.0,
    BlowKind.GUEST: 0.5,
    BlowKind.CUT: 1.0,
    BlowKind.BROKER_KILL: 0.2,
}
QUIET_S: Final = 5.0
"""At the start nothing is hit: a fleet that does not work at all should say so."""


@dataclass(frozen=True, slots=True, order=True)
class Blow:
    """One fault: when, what, and which worker it hits where it hits one."""

    at_s: float
    kind_name: str
    worker: int

    @property
    def kind(self) -> BlowKind:
        """What is done."""
        return BlowKind[self.kind_name]


def draw(*, seed: int, seconds: float, workers: int, per_minute: Mapping[BlowKind, float]) -> list[Blow]:
    """Return the blows of a run in order of time; each kind at random moments, as often as its rate says on average."""
    dice = random.Random(seed)  # noqa: S311  # no secret; a run must be repeatable
    span_s = max(0.0, seconds - QUIET_S)
    return sorted(
        Blow(QUIET_S + dice.random() * span_s, kind.name, dice.randrange(workers))
        for kind, rate in per_minute.items()
        for _ in range(round(rate * span_s / 60))
    )
