"""Errors, one class per action to take.

    DedupError
    ├── AuthorMistake            exit 2: correct the file or the command line
    │   ├── TopologyError            the topology file
    │   └── SettingsError            the config file, --set, DEDUP_*
    ├── StateIncompatible        exit 3: nothing was touched; the message names the command that accepts it
    ├── VerificationFailed       exit 4: the proof found a violation
    ├── BrokerUnavailable        exit 5: no broker answers, or it refuses us
    ├── DatabaseUnavailable      exit 5: the same of a source's or a sink's database
    ├── CheckpointUnusable       go on without it: the changelog holds everything; exit 5 where making one failed
    ├── TaskMigrated             discard the task and rejoin: another owner has the partition
    │   └── CommitUnknown            the same: whether the commit happened is not known
    ├── TaskCorrupted            delete this partition's local state, restore it from the changelog
    ├── RecordRefused            the broker will never accept this record: dead letter
    └── InvariantBroken          exit 1: a defect of ours; stop

An error's text says what happened, where, and what to do next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


class DedupError(Exception):
    """Base of every error this package raises on purpose."""

    exit_code: int = 1


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake in a file: where it is, what it is, what to write instead."""

    place: str
    """``file:line:column``; only the name where there is no position."""
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


class AuthorMistake(DedupError):
    """Something a person wrote is wrong; all of it is reported at once."""

    exit_code = 2

    def __init__(self, problems: list[Problem]) -> None:
        self.problems: Final = problems
        super().__init__("\n".join(str(problem) for problem in problems))


class TopologyError(AuthorMistake):
    """The topology file does not describe a topology."""


class SettingsError(AuthorMistake):
    """The config file, an override or an environment variable is wrong."""


class StateIncompatible(DedupError):
    """State, changelog and topology do not belong together; nothing was touched."""

    exit_code = 3


class VerificationFailed(DedupError):
    """The records in Kafka are not what the model says they must be."""

    exit_code = 4


class BrokerUnavailable(DedupError):
    """No broker answered in time, or it refused to talk to us."""

    exit_code = 5


class DatabaseUnavailable(DedupError):
    """The database of a source or a sink did not answer in time, or it refused to talk to us."""

    exit_code = 5


class CheckpointUnusable(DedupError):
    """A checkpoint is damaged, or the place where checkpoints lie does not answer or refuses us."""

    exit_code = 5


class TaskMigrated(DedupError):
    """The partition has another owner (KIP-98 fencing); this task is void."""


class CommitUnknown(TaskMigrated):
    """A transactional request had no answer; only a new epoch can tell what happened."""


class TaskCorrupted(DedupError):
    """The local store of one partition can not be believed."""


class RecordRefused(DedupError):
    """The broker will never accept one record of a batch."""

    def __init__(self, text: str, *, topic: str, partition: int, rows: tuple[int, ...]) -> None:
        self.topic: Final = topic
        self.partition: Final = partition
        self.rows: Final = rows
        """Feeding offsets of the records in the refused batch, -1 for one of our own; the broker names none."""
        super().__init__(text)


class InvariantBroken(DedupError):
    """Something that can not happen did; go on and data would be lost."""
