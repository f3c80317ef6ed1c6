"""Defines the errors of dedup, with one class for each action that the caller or the user must take."""

from __future__ import annotations

import errno
import importlib.util
import shlex
import sys
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Final

FULL_DISK: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""The error numbers of a write that fails because a disk is full or a quota or file-size limit is exceeded."""


class Terminated(SystemExit):
    """Raised in the main thread when SIGTERM arrives, unless a worker handles the signal. Code that catches all
    exceptions from user code must re-raise this one.
    """


class DedupError(Exception):
    """The base class of every error that this package raises on purpose."""

    exit_code: int = 1


@dataclass(frozen=True, slots=True)
class Problem:
    """The position of one mistake in a file, and a message that says what to write instead."""

    place: str
    """``file:line:column``, or only the file's name if the position is unknown."""
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


class AuthorMistake(DedupError):
    """A file or the command line has mistakes that the user must correct. The error lists all mistakes."""

    exit_code = 2

    def __init__(self, problems: list[Problem]) -> None:
        # Callers show only the problems, so an error without any would look like success.
        if not problems:
            raise InvariantBroken(f"{type(self).__name__} was raised without any problem.")
        self.problems: Final = problems
        super().__init__("\n".join(str(problem) for problem in problems))


class TopologyError(AuthorMistake):
    """The topology file does not describe a valid topology."""


class SettingsError(AuthorMistake):
    """The config file, a `--set` option, or an environment variable is wrong."""


def install_command(package: str) -> str:
    """Return the command that installs a package in the environment of this process."""
    python = shlex.quote(sys.executable)
    # An environment that `uv` creates has no pip.
    pip = f"{python} -m pip install" if importlib.util.find_spec("pip") else f"uv pip install --python {python}"
    return f"{pip} {shlex.quote(package)}"


class PackageMissing(DedupError):
    """The packages of an optional feature (an extra) are not installed. The message says how to install them."""

    exit_code = 2

    def __init__(self, need: str, extra: str) -> None:
        command = install_command(f"dedup-streams[{extra}]")
        super().__init__(f"{need} needs packages that are not installed; install them: {command}")


class StateIncompatible(DedupError):
    """The state, the changelog, and the topology do not match, so dedup has stopped without changing anything."""

    exit_code = 3


class RecordFailed(DedupError):
    """The policy for a record is `fail`, so the worker stops without committing the record."""


class VerificationFailed(DedupError):
    """The records in Kafka differ from the records that the exact model expects."""

    exit_code = 4


class BrokerUnavailable(DedupError):
    """No broker answered in time, or a broker refused a connection or a request."""

    exit_code = 5


class DatabaseUnavailable(DedupError):
    """The database of a source or a sink did not respond in time, refused the connection, or has lost commits."""

    exit_code = 5


class RegistryUnavailable(DedupError):
    """The schema registry did not answer, or did not say whether it has a schema, so the caller must ask again."""

    exit_code = 5


class CheckpointUnusable(DedupError):
    """A checkpoint or its storage is damaged or unreachable, so the caller must read the changelog instead."""

    exit_code = 5


class TaskMigrated(DedupError):
    """Another worker may now own the partition (KIP-98 fencing), so the caller must drop the task and rejoin."""


class CommitUnknown(TaskMigrated):
    """A transactional request got no response, so only a new task can find out whether the request took effect."""


class ProducerForgotten(TaskMigrated):
    """The coordinator does not know the producer ID, which was idle for too long or was taken over by another process.

    A caller that ensures that no other process has taken over may begin a new epoch, as after CommitUnknown. Every
    other caller must act as after TaskMigrated.
    """


class TaskCorrupted(DedupError):
    """A task's local store is damaged, so the caller must delete it and restore it from the changelog."""


@dataclass(eq=False, repr=False)
class RecordRefused(DedupError):
    """The broker will never accept some records of a batch, so the caller must turn them into dead letters."""

    text: str
    _: KW_ONLY
    topic: str
    partition: int
    rows: tuple[int, ...]
    """Feeding offsets of the refused records, or of all records in the batch if the broker names no record.

    An offset of -1 stands for a record that dedup itself created.
    """
    feeding: tuple[str, int] | None = None
    """The feeding partition of ``rows``, or None if no task sent the batch. Several tasks may share a transaction."""
    reasons: Mapping[int, str] = field(default_factory=dict)
    """The broker's message about each refused record, if the broker names the records (KIP-467)."""
    too_large: bool = False
    bad_time: bool = False
    """True if the broker does not accept the timestamp of a record."""
    also: list[RecordRefused] = field(default_factory=list, init=False)
    """The errors for other refused batches in the same transaction."""

    def __post_init__(self) -> None:
        super().__init__(self.text)

    def named(self, unsaid: str) -> Mapping[int, str]:
        """Map each record that the broker refuses to the reason. The reason is ``unsaid`` if the broker refused a batch
        of one record without a message. The result is empty if the broker does not say which records of a batch it
        refuses.
        """
        return self.reasons or (dict.fromkeys(self.rows, unsaid) if len(self.rows) == 1 else {})


class ClockBehind(DedupError):
    """A record seems to be in the future only because the worker's clock is behind, so the caller must retry."""


class InvariantBroken(DedupError):
    """Something happened that only a bug in dedup can explain, so the worker stops before data is lost."""
