"""Names, checks, and deletes store directories, keeps released stores open, and raises the limit of open files.

Deleting a store's directory is safe while no worker uses it, because the state can be restored from the changelog. A
directory that is a symbolic link or contains other files is refused and left unchanged.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import resource
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dedup.errors import InvariantBroken, StateIncompatible, TaskCorrupted
from dedup.store.base import Store, StoreIdentity

log: Final = logging.getLogger(__name__)
_TOPOLOGY_NAME: Final = re.compile(r"[a-z0-9-]{1,200}", re.ASCII)
_STORE_FILE: Final = re.compile(
    r"CURRENT|IDENTITY|LOCK|LOG(\.old\.\d+)?|MANIFEST-\d+|OPTIONS-\d+(\.dbtmp)?|\d+\.(sst|log|dbtmp|blob)"
    r"|rocksdict-config\.json|filter-log--?\d+(\.bits(-new)?)?",
    re.ASCII,
)
FILTER_LOG: Final = "filter-log-"
"""The prefix of a Bloom filter log's file name; the segment's start in ms follows it."""
SNAPSHOT_SUFFIX: Final = ".bits"
NEW_SNAPSHOT_SUFFIX: Final = ".bits-new"
"""The suffixes that turn the name of a filter's log into the names of its snapshot and of a snapshot being written."""
_MOST_LOG_BYTES: Final = 1 << 20
_FORMAT: Final = "1"
RESTORE: Final = "The directory will be deleted and restored from the changelog."
_TOO_MANY_FILES: Final = "Too many open files"
NOT_THE_STORES_FAULT: Final = (
    "No space left",
    "File too large",
    "Disk quota",
    "Read-only file system",
    "Permission denied",
    _TOO_MANY_FILES,
    "Cannot allocate memory",
)
"""Texts in RocksDB's error messages that show that the machine, not a damaged store, caused the error."""


def open_more_files() -> None:
    """Let this process open as many files as its hard limit allows, because each store may keep hundreds of files open.

    Shells, and containers of newer releases of Docker, start processes with a soft limit of only 1,024 files.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS refuses a hard limit of infinity as a soft limit.
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def remedy_of(reason: str) -> str:
    """Return the remedy for an error that the machine, not a damaged store, has caused."""
    if _TOO_MANY_FILES in reason:
        return "raise the hard limit of open files (`ulimit -Hn`, or LimitNOFILE in a systemd unit), then restart"
    return "make room or give this user access, then restart"


def store_directory(state_dir: Path, identity: StoreIdentity) -> Path:
    """Return the directory of a task's store. Raises StateIncompatible for an invalid topology name or partition."""
    if _TOPOLOGY_NAME.fullmatch(identity.topology) is None or identity.partition < 0:
        raise StateIncompatible(
            f"no directory can be named after topology {identity.topology!r}, partition {identity.partition}: "
            "a topology's name has only a-z, 0-9 and '-'. Rename the topology."
        )
    return state_dir / identity.topology / str(identity.partition)


def prepare_directory(directory: Path) -> None:
    """Create the store's directory if needed. Raises StateIncompatible if the directory is not safe for a store."""
    for path in (directory, directory.parent):
        if path.is_symlink():
            raise StateIncompatible(
                f"{path}: is a symbolic link, which a state directory must not be: it could lead to foreign data. "
                "Remove the link or set another state_dir."
            )
        _refuse_anothers(path)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StateIncompatible(
            f"{directory}: cannot be created: {error.strerror}. Make state_dir writable by this user, "
            "or set another one."
        ) from error
    names = _names(directory)
    if not os.access(directory, os.W_OK | os.X_OK):
        raise StateIncompatible(
            f"{directory}: is not writable by this user. Make state_dir writable, or set another one."
        )
    for name in names:
        if _STORE_FILE.fullmatch(name) is None or not (directory / name).is_file() or (directory / name).is_symlink():
            raise StateIncompatible(
                f"{directory}: holds {name!r}, which is not part of a store. Nothing was changed; "
                "empty the directory or set another state_dir."
            )


def _refuse_anothers(path: Path) -> None:
    """Raise StateIncompatible if the directory belongs to another user, who could change the state."""
    try:
        owner = path.stat().st_uid
    except (FileNotFoundError, NotADirectoryError):
        return  # if a file has this name, creating the directory raises an error
    except OSError as error:
        raise StateIncompatible(
            f"{path}: cannot be accessed: {error.strerror}. Give this user access, or set another state_dir."
        ) from error
    if owner != os.geteuid():
        raise StateIncompatible(
            f"{path}: belongs to user {owner}, but this worker runs as user {os.geteuid()}. Nothing was changed; run "
            f"the worker as the owner, change the owner of the directory, or set another state_dir."
        )


def delete_store(directory: Path) -> None:
    """Delete the directory of a store, if it exists. The store must not be open in this process.

    Raises StateIncompatible, and deletes nothing, if the directory is not safe for a store or another process uses it.
    """
    if not directory.exists() and not directory.is_symlink():
        return
    with _locked(directory):
        # CURRENT is deleted last, so that a partly deleted store is later recognized as damaged and never opened as a
        # new store.
        for name in sorted(_names(directory), key=lambda name: name == "CURRENT"):
            (directory / name).unlink()
        directory.rmdir()


def refuse_used(directory: Path) -> None:
    """Raise StateIncompatible if another process uses the store, or if the directory is not safe for a store."""
    with _locked(directory):
        pass


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    prepare_directory(directory)
    lock = os.open(directory / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        _lock(directory, lock)
        yield
    finally:
        os.close(lock)


@contextmanager
def own_state(state_dir: Path, topology: str) -> Iterator[None]:
    """Reserve the topology's state for this process. Raises StateIncompatible if another process is using the state.

    A store's own lock is released while its partition moves to another task. Therefore, without the reservation, two
    workers that share a directory could take each other's stores.
    """
    directory = state_dir / topology
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The lock file is next to the topology's directory, not inside it, because the directory exists only if there
        # is state.
        file = os.open(state_dir / f".{topology}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise StateIncompatible(
            f"{state_dir}: cannot be used: {error.strerror}. Make state_dir writable by this user, or set another one."
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


def limit_log(directory: Path, emptied_at_bytes: int) -> int:
    """Truncate RocksDB's LOG file if it has grown by more than 1 MiB since the last truncation. Return its length at
    the last truncation.

    RocksDB can start a new log itself at a given size, but then it keeps the options of every column family ever
    created and repeats them in each new log. With such logs, adding and dropping a segment took 350 ms instead of 15 ms
    after 100 segments, and the time kept growing.
    """
    log = directory / "LOG"
    try:
        length = log.stat().st_size
    except FileNotFoundError:
        return emptied_at_bytes  # somebody has deleted the file
    if length - emptied_at_bytes <= _MOST_LOG_BYTES:
        return emptied_at_bytes
    # RocksDB continues to write at its old offset, so the file keeps its length, but its old blocks on the disk are
    # freed.
    os.truncate(log, 0)
    return length


def in_use(directory: Path) -> StateIncompatible:
    """Return the error for a directory that another process is using."""
    return StateIncompatible(
        f"{directory}: is in use by another process. Two workers share a state_dir; stop one, or give each its own "
        "state_dir and worker_id."
    )


def _names(directory: Path) -> list[str]:
    try:
        return sorted(path.name for path in directory.iterdir())
    except OSError as error:
        raise StateIncompatible(
            f"{directory}: cannot be read: {error.strerror}. Give this user access, or set another state_dir."
        ) from error


def close_or_delete(store: Store) -> None:
    """Close a store. If the store turns out to be damaged, delete it, so that its next owner restores it."""
    try:
        store.close()
    except TaskCorrupted as damage:
        log.warning("%s", damage)
        store.wipe()


@dataclass(frozen=True, slots=True)
class Keeping:
    """Defines how a task or a standby opens, releases, and deletes its partition's store."""

    open: Callable[[], Store]
    prepare: Callable[[], Awaitable[None]] | None = None
    """An asynchronous function that runs before the store is opened. It fetches state if there is no local state."""
    release: Callable[[Store], None] = close_or_delete
    wipe: Callable[[], None] = lambda: None
    """Deletes the released store and its directory after the store was found damaged."""


class StorePool:
    """Keeps released stores open for their next owners (tasks or standbys) in this process.

    When a task is rebuilt, or when a rebalance turns a task into a standby or a standby into a task, the same process
    needs the store again. Closing and reopening the store would block the event loop. Kafka Streams also recycles tasks
    in a rebalance (KAFKA-10199).
    """

    def __init__(self) -> None:
        self._stores: Final[dict[int, Store]] = {}

    def put(self, partition: int, store: Store) -> None:
        """Keep an open store for its next owner. The caller must not use the store afterward.

        Raises InvariantBroken if the pool already has a store of the partition.
        """
        if partition in self._stores:
            raise InvariantBroken(f"two stores of partition {partition} are open in this process. Restart the worker.")
        self._stores[partition] = store

    def take(self, partition: int) -> Store | None:
        """Remove the partition's store from the pool and return it, or return None if the pool has no such store."""
        return self._stores.pop(partition, None)

    def keep_only(self, partitions: Collection[int]) -> None:
        """Close and remove the stores of all partitions that are not in ``partitions``, and delete damaged ones."""
        for partition in sorted(self._stores.keys() - set(partitions)):
            close_or_delete(self._stores.pop(partition))


def encode_identity(identity: StoreIdentity) -> bytes:
    """Return the bytes that identify a store's format, its owner, and its changelog topic."""
    return "\n".join((_FORMAT, identity.topology, str(identity.partition), identity.changelog_topic_id)).encode()


def refuse_other_owner(stored: bytes, identity: StoreIdentity, directory: Path) -> None:
    """Raise TaskCorrupted if another task owns the store, or StateIncompatible if the format or topic differs."""
    version, *owner = stored.decode(errors="replace").split("\n")
    if version != _FORMAT:
        raise StateIncompatible(
            f"{directory}: is a store of format {version}; this release reads format {_FORMAT}. Run the release "
            "that wrote it, or delete the directory: it will be restored from the changelog."
        )
    if stored == encode_identity(identity):
        return
    theirs = StoreIdentity(owner[0], int(owner[1]), owner[2])
    if owner[:2] == [identity.topology, str(identity.partition)]:
        raise StateIncompatible(
            f"{directory}: was written with another changelog topic (id {theirs.changelog_topic_id}, now "
            f"{identity.changelog_topic_id}): the changelog was deleted and recreated. Nothing was changed. "
            "Bring the old topic back, or start over with `dedup reset`."
        )
    raise TaskCorrupted(f"{directory}: belongs to {theirs}, not to {identity}. {RESTORE}")
