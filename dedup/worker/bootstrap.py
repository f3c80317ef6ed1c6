"""Fetches a partition's checkpoint if the partition has no local state.

A checkpoint is never required, because the changelog contains all state. If a checkpoint is damaged or unreachable, the
worker logs a warning and restores the state from the changelog alone. If a checkpoint belongs to another changelog or
topology, the worker raises StateIncompatible.

The files are written into a temporary directory, which is renamed only after the files' digests have been checked. The
event loop renames the directory, so an abandoned transfer thread cannot interfere with a later owner of the partition.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from dedup.errors import CheckpointUnusable, StateIncompatible, TaskCorrupted
from dedup.kafka.wire import LogBounds, TopicPartition, Wire
from dedup.store.base import Store, StoreIdentity
from dedup.store.checkpoint import Checkpoint, Moved
from dedup.store.checkpoint_storage import CheckpointStorage
from dedup.store.directory import delete_store, prepare_directory
from dedup.worker.restore import bounds_reaching, refuse_other_fingerprint

log: Final = logging.getLogger(__name__)
_STALLED_S: Final = 60.0
T = TypeVar("T")
_MOST_AT_ONCE: Final = 4
SCRATCH: Final = ".bootstrap"
_INSTEAD: Final = (
    "It is restored from the changelog instead, which contains everything. Nothing is lost, but it takes longer."
)


async def transfer(work: Callable[[Moved], T], what: str, *, stalled_s: float = _STALLED_S) -> T:
    """Run the blocking function ``work`` in a daemon thread, and return its result.

    ``work`` receives a callback, and calls it with the size of each transferred piece in bytes. Raises any exception
    that ``work`` raises, and CheckpointUnusable if no bytes are transferred for ``stalled_s`` seconds. The thread does
    not come from the event loop's pool, because unresponsive storage would exhaust that pool, which also resolves host
    names.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()
    moved_bytes, given_up = 0, False

    def moved(size_bytes: int) -> None:
        nonlocal moved_bytes
        moved_bytes += size_bytes
        if given_up:
            raise CheckpointUnusable("the transfer was abandoned.")

    def run() -> None:
        tell: Callable[[], None]
        try:
            tell = partial(done.set_result, work(moved))
        except BaseException as error:  # noqa: BLE001  # the error is raised again where the transfer is awaited
            tell = partial(done.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the event loop is closed, so nothing awaits the result
            loop.call_soon_threadsafe(lambda: None if done.done() else tell())

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    try:
        while not done.done():
            before = moved_bytes
            await asyncio.wait({done}, timeout=stalled_s)
            if not done.done() and moved_bytes == before:
                raise CheckpointUnusable(f"{what}: nothing was moved for {stalled_s:.0f} s.")
        return done.result()
    finally:
        given_up = True
        done.cancel()


@dataclass(frozen=True, slots=True)
class WantedCheckpoint:
    """The values that a checkpoint must match before it becomes a partition's store."""

    identity: StoreIdentity
    fingerprint: bytes
    segment_ms: int
    feeding: TopicPartition
    changelog: TopicPartition
    directory: Path
    """The directory in which the store will be opened."""

    @property
    def scratch_home(self) -> Path:
        """The parent of the temporary directories for the topology's checkpoint files."""
        # The temporary directories are not in the topology's own directory, which exists only if there is state.
        return self.directory.parents[1] / SCRATCH / self.identity.topology


class Bootstrap:
    """Fetches checkpoints from a URL. A process uses each checkpoint at most once."""

    def __init__(self, url: str) -> None:
        self._url: Final = url
        self.unusable = 0
        """The number of failed attempts to use a checkpoint that existed or may have existed."""
        self._slots: Final = asyncio.Semaphore(_MOST_AT_ONCE)
        self._tried: Final[set[Checkpoint]] = set()
        """The checkpoints that this process has used. A checkpoint is used only once: if it is needed again, the state
        restored from it was lost or damaged.
        """
        self._fresh: Final[dict[Path, Checkpoint]] = {}
        """Maps each directory to the checkpoint that was written into it, until the store is opened."""
        self._swept: Final[set[Path]] = set()

    async def prepare(self, wire: Wire, wanted: WantedCheckpoint) -> None:
        """Fill the partition's directory from its checkpoint if the directory is empty and the checkpoint is usable.

        Raises StateIncompatible, and changes nothing, if the checkpoint belongs to another changelog or topology.
        """
        if wanted.scratch_home not in self._swept:
            # Earlier processes may have left partly written checkpoints.
            self._swept.add(wanted.scratch_home)
            shutil.rmtree(wanted.scratch_home, ignore_errors=True)
        if _has_state(wanted.directory):
            return
        try:
            async with self._slots:
                await self._try(CheckpointStorage(self._url), wire, wanted)
        except CheckpointUnusable as error:
            self._count(wanted, str(error))

    def opened(self, directory: Path, open_store: Callable[[], Store]) -> Store:
        """Open and return a store. If it came from a checkpoint and is unusable, return an empty store instead."""
        taken = self._fresh.pop(directory, None)
        if taken is None:
            return open_store()
        try:
            store = open_store()
        except (TaskCorrupted, StateIncompatible) as error:
            why = str(error)
        else:
            if store.position == taken.position:
                return store
            why = f"{directory}: is at changelog position {store.position}, but should be at {taken.position}."
            store.close()
        self._count(taken, why)
        delete_store(directory)
        return open_store()

    def _count(self, whose: WantedCheckpoint | Checkpoint, why: str) -> None:
        self.unusable += 1
        log.warning("the checkpoint of %s was not used: %s %s", whose.identity, why, _INSTEAD)

    async def _try(self, storage: CheckpointStorage, wire: Wire, wanted: WantedCheckpoint) -> None:
        identity = wanted.identity
        place = storage.place(identity.topology, identity.partition)
        found = await transfer(lambda _: storage.find(identity.topology, identity.partition), place)
        if found is None:
            log.info("%s: no checkpoint at %s", identity, place)
            return
        bounds = await bounds_for(found, wanted, wire)
        refuse_anothers(found, wanted, bounds, place)
        useless = self._useless(found, wanted, bounds)
        if useless:
            log.warning("%s: the checkpoint at %s was not used: %s", identity, place, useless)
            return
        self._tried.add(found)
        began_s = time.monotonic()
        await self._take(storage, found, wanted)
        text = "%s: taken over from the checkpoint at %s: %d IDs up to changelog position %d, %d bytes in %.1f s"
        took_s = time.monotonic() - began_s
        log.info(text, identity, place, found.ids, found.position, found.size_bytes, took_s)

    def _useless(self, found: Checkpoint, wanted: WantedCheckpoint, bounds: LogBounds) -> str:
        """Return the reason not to use the checkpoint, or an empty string if the checkpoint is useful."""
        if found in self._tried:
            return f"it was used before, and its state was lost or damaged. {_INSTEAD}"
        if found.segment_ms != wanted.segment_ms:
            return "it was made with another guard period or grace, so sightings now belong to different segments."
        if found.position < bounds.start:
            # Owners delete only changelog records that no live segment needs, so a restore must read all that remain.
            return (
                f"it ends at changelog position {found.position}, and the changelog begins at {bounds.start} now, so "
                "nothing in it is needed anymore. Run `dedup checkpoint` more often."
            )
        return ""

    async def _take(self, storage: CheckpointStorage, found: Checkpoint, wanted: WantedCheckpoint) -> None:
        scratch = wanted.scratch_home / f"{wanted.identity.partition}-{secrets.token_hex(4)}"
        prepare_directory(scratch)

        def fetch(moved: Moved) -> None:
            try:
                storage.read(found, scratch, moved)
            except OSError as error:
                raise CheckpointUnusable(f"{scratch}: {error}.") from error

        try:
            await transfer(fetch, str(storage))
            prepare_directory(wanted.directory)
            scratch.rename(wanted.directory)
        except OSError as error:
            raise CheckpointUnusable(f"{wanted.directory}: {error}.") from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        self._fresh[wanted.directory] = found


def _has_state(directory: Path) -> bool:
    try:
        return any(directory.iterdir())
    except FileNotFoundError:
        return False
    except OSError:
        return True  # opening the store reports the problem


async def bounds_for(found: Checkpoint, wanted: WantedCheckpoint, wire: Wire) -> LogBounds:
    """Return the changelog's bounds. If the changelog ends before the checkpoint's position, retry for about 10 s."""
    # Waiting cannot help if the checkpoint belongs to another changelog.
    position = found.position if found.identity == wanted.identity else 0
    return await bounds_reaching(wire, wanted.changelog, position)


def refuse_anothers(found: Checkpoint, wanted: WantedCheckpoint, bounds: LogBounds, place: str) -> None:
    """Raise StateIncompatible if the checkpoint belongs to another partition, changelog, or topology."""
    theirs, ours = found.identity, wanted.identity
    if (theirs.topology, theirs.partition) != (ours.topology, ours.partition):
        raise StateIncompatible(
            f"{place}: is the checkpoint of {theirs}, not of {ours}: somebody has moved it. Nothing was changed. Put "
            f"it back, or set another state.checkpoint."
        )
    remedy = (
        f"Nothing was changed. Bring the old changelog back. If it was discarded on purpose, delete the directory "
        f"{place}, which `dedup reset` does if state.checkpoint is set."
    )
    if theirs.changelog_topic_id != ours.changelog_topic_id:
        raise StateIncompatible(
            f"{place}: is a checkpoint of another changelog topic (id {theirs.changelog_topic_id}, now "
            f"{ours.changelog_topic_id}): the changelog was deleted and recreated. {remedy}"
        )
    refuse_other_fingerprint(found.fingerprint, wanted.fingerprint, wanted.feeding)
    if found.position > bounds.end:
        raise StateIncompatible(
            f"{wanted.changelog} ends at offset {bounds.end}, but the checkpoint at "
            f"{place} was made at offset {found.position}: the changelog was truncated or replaced. {remedy}"
        )
