"""Local state for a partition that has none: its checkpoint, unless reading the changelog is the only way.

A checkpoint is never needed. The changelog holds all of what counts, so whatever is wrong with a checkpoint's bytes or
with the place where it lies costs time only: a warning, a number, and the ordinary restore. What says that state,
changelog and topology do not belong together is refused as it is for state on the local disk: StateIncompatible.

The archive is unpacked beside the state, under a name of its own, and renamed into place when all of it was read and
its digest is right. The renaming is done by the event loop: a thread that nobody waits for any more changes nothing
that a later owner of the partition could see.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dedup.errors import CheckpointUnusable, StateIncompatible, TaskCorrupted
from dedup.session.wire import LogBounds, TopicPartition, Wire
from dedup.store.archive import Moved, unpack
from dedup.store.base import Store, StoreIdentity
from dedup.store.checkpoint import Checkpoint
from dedup.store.depot import Depot
from dedup.store.directory import delete_store, prepare_directory
from dedup.worker.restore import refuse_other_fingerprint
from dedup.worker.starting import bounds_of
from dedup.worker.transfer import transfer

MOST_AT_ONCE: Final = 4
SCRATCH: Final = ".bootstrap"
INSTEAD: Final = "It is restored from the changelog instead, which holds all of it: nothing is lost, it takes longer."
log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A partition that is about to open its store."""

    identity: StoreIdentity
    fingerprint: bytes
    segment_ms: int
    feeding: TopicPartition
    changelog: TopicPartition
    state_dir: Path
    directory: Path
    """Where the store will be opened."""


class Bootstrap:
    """What a process knows of the checkpoints it took."""

    def __init__(self) -> None:
        self.unusable = 0
        """Checkpoints that were there, or may have been, and not taken."""
        self._slots: Final = asyncio.Semaphore(MOST_AT_ONCE)
        self._tried: Final[set[str]] = set()
        """Archives by digest: one whose store was found damaged is not taken again."""
        self._fresh: Final[dict[Path, Checkpoint]] = {}
        """Put into place, and not opened yet."""
        self._swept: Final[set[Path]] = set()

    async def prepare(self, url: str, wire: Wire, wanted: Wanted) -> None:
        """The partition's directory holds its checkpoint, if nothing was there and the checkpoint can be taken.

        Raises StateIncompatible, with nothing touched, where the checkpoint is another changelog's or topology's.
        """
        self._sweep(wanted)
        if has_state(wanted.directory):
            return
        try:
            async with self._slots:
                await self._try(Depot(url), wire, wanted)
        except CheckpointUnusable as error:
            self._count(wanted, str(error))

    def opened(self, directory: Path, open_store: Callable[[], Store]) -> Store:
        """Return the opened store; one just taken that can not be believed is deleted first, and is empty then."""
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
            why = f"{directory}: is at changelog position {store.position}, and should be at {taken.position}."
            store.close()
        self._count(taken, why)
        delete_store(directory)
        return open_store()

    def _count(self, whose: Wanted | Checkpoint, why: str) -> None:
        self.unusable += 1
        log.warning("the checkpoint of %s was not taken: %s %s", whose.identity, why, INSTEAD)

    async def _try(self, depot: Depot, wire: Wire, wanted: Wanted) -> None:
        identity = wanted.identity
        place = depot.place(identity.topology, identity.partition)
        found = await transfer(lambda _: depot.find(identity.topology, identity.partition), place)
        if found is None:
            log.info("%s: no checkpoint at %s", identity, place)
            return
        bounds = await bounds_of(wire, wanted.changelog)
        refuse_anothers(found, wanted, bounds, place)
        useless = self._useless(found, wanted, bounds)
        if useless:
            log.warning("%s: the checkpoint at %s was not taken: %s", identity, place, useless)
            return
        self._tried.add(found.sha256)
        began_s = time.monotonic()
        await self._take(depot, found, wanted)
        log.info(
            "%s: taken over from the checkpoint at %s: %d IDs up to changelog position %d, %d bytes in %.1f s",
            identity,
            place,
            found.ids,
            found.position,
            found.archive_bytes,
            time.monotonic() - began_s,
        )

    def _useless(self, found: Checkpoint, wanted: Wanted, bounds: LogBounds) -> str:
        """Return why reading the whole changelog is as quick; empty where it is not."""
        if found.sha256 in self._tried:
            return f"it was taken before, and its state is gone or was damaged. {INSTEAD}"
        if found.segment_ms != wanted.segment_ms:
            return "it was made under another guard period or grace: sightings stand in other segments now."
        if found.position < bounds.start:
            # The owner deletes below what live segments hold: what is left is all that counts, and has to be read.
            return (
                f"it ends at changelog position {found.position}, and the changelog begins at {bounds.start} by now: "
                f"nothing in it counts any more. Run `dedup checkpoint` more often."
            )
        return ""

    async def _take(self, depot: Depot, found: Checkpoint, wanted: Wanted) -> None:
        scratch = _scratch_home(wanted) / f"{wanted.identity.partition}-{secrets.token_hex(4)}"
        prepare_directory(scratch)

        def fetch(moved: Moved) -> None:
            try:
                with depot.reading(found) as file:
                    unpack(file, scratch, size_bytes=found.archive_bytes, sha256=found.sha256, moved=moved)
            except OSError as error:
                raise CheckpointUnusable(f"{scratch}: {error}.") from error

        try:
            await transfer(fetch, str(depot))
            prepare_directory(wanted.directory)
            scratch.rename(wanted.directory)
        except OSError as error:
            raise CheckpointUnusable(f"{wanted.directory}: {error}.") from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        self._fresh[wanted.directory] = found

    def _sweep(self, wanted: Wanted) -> None:
        """Delete, once, what an earlier process left half unpacked: this one alone uses the directory now."""
        home = _scratch_home(wanted)
        if home not in self._swept:
            self._swept.add(home)
            shutil.rmtree(home, ignore_errors=True)


def _scratch_home(wanted: Wanted) -> Path:
    # Not below the topology's own directory: that there is one says that there is state.
    return wanted.state_dir / SCRATCH / wanted.identity.topology


def has_state(directory: Path) -> bool:
    """Tell whether anything is in a store's directory."""
    try:
        return any(directory.iterdir())
    except FileNotFoundError:
        return False
    except OSError:
        return True  # whatever it is, opening the store says what to do


def refuse_anothers(found: Checkpoint, wanted: Wanted, bounds: LogBounds, place: str) -> None:
    """Raise StateIncompatible for a checkpoint of another partition, changelog or topology."""
    theirs, ours = found.identity, wanted.identity
    if (theirs.topology, theirs.partition) != (ours.topology, ours.partition):
        raise StateIncompatible(
            f"{place}: is the checkpoint of {theirs}, not of {ours}: somebody has moved it. Nothing was touched. Put "
            f"it back, or set another state.checkpoint."
        )
    remedy = (
        f"Nothing was touched. Bring the old changelog back; or, if it was given up on purpose, delete the directory "
        f"{place}, which `dedup reset` does where state.checkpoint is set."
    )
    if theirs.changelog_topic_id != ours.changelog_topic_id:
        raise StateIncompatible(
            f"{place}: is a checkpoint of another changelog topic (id {theirs.changelog_topic_id}, now "
            f"{ours.changelog_topic_id}): the changelog was deleted and made again. {remedy}"
        )
    refuse_other_fingerprint(found.fingerprint, wanted.fingerprint, wanted.feeding)
    if found.position > bounds.end:
        raise StateIncompatible(
            f"{wanted.changelog.topic}/{wanted.changelog.partition} ends at offset {bounds.end}, but the checkpoint at "
            f"{place} was made at offset {found.position}: the changelog was truncated or is another. {remedy}"
        )
