"""Where a schedule's choices come from: every one in turn, or a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol


class Chooser(Protocol):
    """Picks one of several ways to go on; the first is the one without a fault."""

    def pick(self, ways: Sequence[str]) -> int: ...


class Odometer:
    """Enumerates all sequences of choices, as TigerBeetle's exhaustigen does: the last digit turns first."""

    def __init__(self, digits: Sequence[int] = (), most: Sequence[int] = ()) -> None:
        """``digits`` and ``most`` of another odometer: go on after the schedule it was at."""
        self._digits: list[int] = list(digits)
        self._most: list[int] = list(most)
        self._at = 0
        self._begun = bool(digits)

    @property
    def reading(self) -> tuple[list[int], list[int]]:
        """Where it is, for another one to go on from."""
        return list(self._digits), list(self._most)

    def next_schedule(self) -> bool:
        """Move on to the next schedule; False when there is none left."""
        self._at = 0
        if not self._begun:
            self._begun = True
            return True
        while self._digits:
            if self._digits[-1] < self._most[-1]:
                self._digits[-1] += 1
                return True
            self._digits.pop()
            self._most.pop()
        return False

    def pick(self, ways: Sequence[str]) -> int:
        if self._at == len(self._digits):
            self._digits.append(0)
            self._most.append(0)
        self._most[self._at] = len(ways) - 1
        self._at += 1
        return self._digits[self._at - 1]


class Seeded:
    """Goes on without a fault most of the time; the seed says when not."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self._calm = self.dice.choice([0.6, 0.75, 0.85, 0.92])

    def pick(self, ways: Sequence[str]) -> int:
        if self.dice.random() < self._calm:
            return 0
        return self.dice.randrange(len(ways))


class Healthy:
    """Goes on, always."""

    def pick(self, ways: Sequence[str]) -> int:
        return 0


class Script:
    """Takes the named ways, one after the other, each as soon as it can be taken."""

    def __init__(self, *wanted: str) -> None:
        self.left = list(wanted)

    def pick(self, ways: Sequence[str]) -> int:
        if self.left and self.left[0] in ways:
            return ways.index(self.left.pop(0))
        return 0
