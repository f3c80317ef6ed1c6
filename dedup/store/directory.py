"""The directory of one task's store on disk: its name, who may use it, its end.

A store's directory can always be restored from the changelog, so it may be deleted; nothing else may. Whatever does not
look like a store (a symbolic link, foreign files) is refused and left alone.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

from dedup.errors import DedupError, StateIncompatible, TaskCorrupted
from dedup.store.base import StoreIdentity

_TOPOLOGY_NAME: Final = re.compile(r"[a-z0-9-]{1,200}", re.ASCII)
_STORE_FILE: Final = re.compile(
    r"CURRENT|IDENTITY|LOCK|LOG(\.old\.\d+)?|MANIFEST-\d+|OPTIONS-\d+(\.dbtmp)?|\d+\.(sst|log|dbtmp|blob)"
    r"|rocksdict-config\.json",
    re.ASCII,
)
RESTORE: Final = "The directory will be deleted and restored from the changelog."
_NOT_THE_STORES_FAULT: Final = (
    "No space left",
    "File too large",
    "Disk quota",
    "Read-only file system",
    "Permission denied",
    "Too many open files",
    "Cannot allocate memory",
)


@dataclass(frozen=True, slots=True)
class Manifest:
    """Which of RocksDB's lists of files is in use, and its length: it only grows until the next open."""

    number: int
    size_bytes: int

    @classmethod
    def of(cls, directory: Path) -> Self | None:
        """Return the one that CURRENT names; None if there is none."""
        try:
            name = (directory / "CURRENT").read_text(encoding="ascii").strip()
            return cls(int(name.removeprefix("MANIFEST-")), (directory / name).stat().st_size)
        except (FileNotFoundError, ValueError):
            return None

    def now(self, directory: Path) -> Self:
        """Return it with the length it has by now, or its successor."""
        path = f"{directory}/MANIFEST-{self.number:06}"
        try:
            return replace(self, size_bytes=os.stat(path).st_size)  # noqa: PTH116  twice as quick, in every apply
        except FileNotFoundError:
            # RocksDB begins a new one when the old one has become long.
            return type(self).of(directory) or self

    def was_cut(self, found: Self) -> bool:
        """The list found is this one, but shorter: files that it named are forgotten."""
        return found.number == self.number and found.size_bytes < self.size_bytes

    def __str__(self) -> str:
        return f"MANIFEST-{self.number:06} of {self.size_bytes} bytes"


def store_directory(state_dir: Path, identity: StoreIdentity) -> Path:
    """Return where a task's store lives; a name becomes part of a path only from a fixed alphabet."""
    if _TOPOLOGY_NAME.fullmatch(identity.topology) is None or identity.partition < 0:
        raise StateIncompatible(
            f"no directory can be named after topology {identity.topology!r}, partition {identity.partition}: "
            "a topology's name has only a-z, 0-9 and '-'. Rename the topology."
        )
    return state_dir / identity.topology / str(identity.partition)


def prepare_directory(directory: Path) -> None:
    """The directory exists, is ours, no link, holds nothing foreign and can be written; else StateIncompatible."""
    for path in (directory, directory.parent):
        if path.is_symlink():
            raise StateIncompatible(
                f"{path}: is a symbolic link, which a state directory must not be: another's data could be reached "
                "through it. Remove the link or set another state_dir."
            )
        _refuse_anothers(path)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StateIncompatible(
            f"{directory}: can not be made: {error.strerror}. Make state_dir writable for this user, "
            "or set another one."
        ) from error
    names = _names(directory)
    if not os.access(directory, os.W_OK | os.X_OK):
        raise StateIncompatible(
            f"{directory}: is not writable for this user. Make state_dir writable, or set another one."
        )
    _refuse_foreign(directory, names)


def _refuse_anothers(path: Path) -> None:
    """Raise StateIncompatible if the directory is another user's, who could change what we believe."""
    try:
        owner = path.stat().st_uid
    except (FileNotFoundError, NotADirectoryError):
        return  # where something is in the way, making it says so
    except OSError as error:
        raise StateIncompatible(
            f"{path}: can not be looked at: {error.strerror}. Give it to this user, or set another state_dir."
        ) from error
    if owner != os.geteuid():
        raise StateIncompatible(
            f"{path}: belongs to user {owner}, and this worker is user {os.geteuid()}. Nothing was touched; run it as "
            f"that user, give the directory to this one, or set another state_dir."
        )


def delete_store(directory: Path) -> None:
    """The store's directory is gone; nothing happens if it was not there.

    Raises StateIncompatible, with nothing deleted, if it is not a store's directory or another process has it open.
    The store must not be open in this process.
    """
    if not directory.exists() and not directory.is_symlink():
        return
    prepare_directory(directory)
    lock = os.open(directory / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        _lock(directory, lock)
        # CURRENT last: a half-deleted directory then still reads as a damaged store, never as a fresh one.
        for name in sorted(_names(directory), key=lambda name: name == "CURRENT"):
            (directory / name).unlink()
        directory.rmdir()
    finally:
        os.close(lock)


@contextmanager
def own_state(state_dir: Path, topology: str) -> Iterator[None]:
    """Inside ``with``, this process alone keeps state of the topology there; raises StateIncompatible if another does.

    A store has a lock of its own, but it is free while partitions move: two workers would take them from each other.
    """
    directory = state_dir / topology
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Beside the state, not in it: that there is a directory says that there is state.
        file = os.open(state_dir / f".{topology}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise StateIncompatible(
            f"{state_dir}: can not be used: {error.strerror}. Make state_dir writable for this user, "
            "or set another one."
        ) from error
    try:
        _lock(directory, file)
        yield
    finally:
        os.close(file)


def _lock(directory: Path, lock: int) -> None:
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise in_use(directory) from error


def in_use(directory: Path) -> StateIncompatible:
    """Return the error for a directory that another process has open."""
    return StateIncompatible(
        f"{directory}: is in use by another process. Two workers share a state_dir; stop one, or give each its own "
        "state_dir and worker_id."
    )


def _names(directory: Path) -> list[str]:
    try:
        return sorted(path.name for path in directory.iterdir())
    except OSError as error:
        raise StateIncompatible(
            f"{directory}: can not be read: {error.strerror}. Give it to this user, or set another state_dir."
        ) from error


def _refuse_foreign(directory: Path, names: list[str]) -> None:
    for name in names:
        if _STORE_FILE.fullmatch(name) is None or not (directory / name).is_file() or (directory / name).is_symlink():
            raise StateIncompatible(
                f"{directory}: holds {name!r}, which is not part of a store. Nothing was touched; "
                "empty the directory or set another state_dir."
            )


class ErrorsOf:
    """Inside ``with``, what RocksDB reports of a directory is raised as the error named by what to do about it.

    rocksdict raises bare Exception for everything; only that exact class is translated.
    """

    __slots__ = ("_directory",)

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Raise the translated error instead of RocksDB's."""
        if kind is not Exception:
            return
        text = str(error)
        if "/LOCK" in text and "lock" in text:
            raise in_use(self._directory) from error
        if any(reason in text for reason in _NOT_THE_STORES_FAULT):
            raise DedupError(
                f"{self._directory}: {text}. Nothing is lost: make room or give this user access, then start again; "
                "what is missing here comes from the changelog."
            ) from error
        raise TaskCorrupted(f"{self._directory}: {text}. {RESTORE}") from error
