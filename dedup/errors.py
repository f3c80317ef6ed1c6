"""Defines the errors of this package, with one class for each action to take.

The text of an error says what happened, where, and what to do next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Final


class DedupError(Exception):
    """The base class of every error that this package raises on purpose."""

    exit_code: int = 1


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake in a file, with its position and what to write instead."""

    place: str
    """``file:line:column``, or only the file's name if the position is unknown."""
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


class AuthorMistake(DedupError):
    """A file or the command line has mistakes: correct them. One error reports all of them."""

    exit_code = 2

    def __init__(self, problems: list[Problem]) -> None:
        self.problems: Final = problems
        super().__init__("\n".join(str(problem) for problem in problems))


class TopologyError(AuthorMistake):
    """The topology file does not describe a valid topology."""


class SettingsError(AuthorMistake):
    """The config file, a `--set` option, or an environment variable is wrong."""


class StateIncompatible(DedupError):
    """State, changelog, and topology do not match; nothing was changed. The message names what accepts the change."""

    exit_code = 3


class VerificationFailed(DedupError):
    """The records in Kafka differ from those that the model expects."""

    exit_code = 4


class BrokerUnavailable(DedupError):
    """No broker answered in time, or the broker refused the connection."""

    exit_code = 5


class DatabaseUnavailable(DedupError):
    """The database of a source or a sink did not respond in time, or it refused the connection."""

    exit_code = 5


class CheckpointUnusable(DedupError):
    """A checkpoint or its storage is damaged or unreachable: continue from the changelog, which holds everything."""

    exit_code = 5


class TaskMigrated(DedupError):
    """Another worker owns the partition now (KIP-98 fencing): discard the task and rejoin."""


class CommitUnknown(TaskMigrated):
    """A transactional request got no response: the same, and a new epoch finds out whether it took effect."""


class TaskCorrupted(DedupError):
    """The local store of one partition cannot be trusted: delete it and restore it from the changelog."""


@dataclass(eq=False, repr=False)
class RecordRefused(DedupError):
    """The broker will never accept one or more records of a batch: make them dead letters."""

    text: str
    _: KW_ONLY
    topic: str
    partition: int
    rows: tuple[int, ...]
    """Feeding offsets of the refused records, or of the whole batch if the broker names none. An offset of -1 stands
    for a record that dedup itself made.
    """
    reasons: Mapping[int, str] = field(default_factory=dict)
    """The broker's message for each refused record, if the broker names the records (KIP-467)."""
    too_large: bool = False
    also: list[RecordRefused] = field(default_factory=list, init=False)
    """Other refused batches of the same transaction."""

    def __post_init__(self) -> None:
        super().__init__(self.text)


class ClockBehind(DedupError):
    """A record was judged as in the future because this clock is behind the broker's: judge the transaction again."""


class InvariantBroken(DedupError):
    """Something impossible happened, a bug in dedup: stop, because continuing could lose data."""
