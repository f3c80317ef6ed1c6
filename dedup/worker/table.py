"""The Faust table of sightings: the tasks' stores and the changelog topic, as Faust sees them.

Reading a key asks the task that has it. Writing is refused: a sighting is kept only in the transaction of the record
that left it. Restore and standby are the tasks' own, so Faust's recovery service is never started.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, NoReturn

import faust
from faust.stores.base import Store as FaustStore
from faust.tables import TableManager as FaustTableManager
from faust.types import TP

from dedup.core.window import Sighting
from dedup.errors import InvariantBroken
from dedup.worker.judge import Judge

if TYPE_CHECKING:
    from dedup.worker.app import DedupApp

SCHEME: Final = "dedup"


class SightingsStore(FaustStore[Any, Any]):
    """What ``dedup://`` as store URL stands for: all sightings this worker's tasks have applied."""

    app: DedupApp

    def __getitem__(self, state_key: bytes) -> tuple[Sighting, ...]:
        found = [seen for judge in self._judges() for seen in judge.sightings_of(state_key)]
        if not found:
            raise KeyError(state_key)
        return tuple(found)

    def __iter__(self) -> Iterator[bytes]:
        for judge in self._judges():
            if judge.store is not None:
                for _, key, _ in judge.store.sightings():
                    yield key

    def __len__(self) -> int:
        return sum(judge.store.count_ids() for judge in self._judges() if judge.store is not None)

    def __setitem__(self, state_key: bytes, value: object) -> NoReturn:
        raise _read_only()

    def __delitem__(self, state_key: bytes) -> NoReturn:
        raise _read_only()

    def _judges(self) -> Iterator[Judge]:
        for task in self.app.tasks.running.values():
            if isinstance(task.work, Judge):
                yield task.work

    def reset_state(self) -> None:
        """Do nothing: `dedup reset` is the way."""

    async def backup_partition(self, *_: Any, **__: Any) -> NoReturn:
        """Raise InvariantBroken: the changelog is the backup."""
        raise InvariantBroken("a backup is not Faust's to make here; the changelog topic holds all state.")

    def restore_backup(self, *_: Any, **__: Any) -> NoReturn:
        """Raise InvariantBroken: the changelog is the backup."""
        raise InvariantBroken("a backup is not Faust's to restore here; the changelog topic holds all state.")

    def apply_changelog_batch(self, *_: Any, **__: Any) -> NoReturn:
        """Raise InvariantBroken: restore is the tasks' own."""
        raise InvariantBroken("Faust's recovery must not write the store; restore belongs to the tasks.")


class SightingsTable(faust.Table[Any, Any]):
    """A `faust.Table` whose every write is refused."""

    def on_key_set(self, key: object, value: object) -> NoReturn:
        """Raise InvariantBroken."""
        raise _read_only()

    def on_key_del(self, key: object) -> NoReturn:
        """Raise InvariantBroken."""
        raise _read_only()


class TableManager(FaustTableManager):
    """Faust's table manager without its recovery: tasks restore themselves, partition by partition."""

    app: DedupApp

    async def on_start(self) -> None:
        """Register the changelog, so that the assignor places it beside its feeding partition."""
        await self._update_channels()

    async def on_rebalance(
        self, assigned: set[TP], revoked: set[TP], newly_assigned: set[TP], generation_id: int = 0
    ) -> None:
        """Let Faust's flow go on at once: a partition is read when its own task is running."""
        app = self.app
        self._recovery_started.set()
        await self._update_channels()
        # Faust assigns topics of each partition count apart: what it calls a standby may be a partition that is ours.
        ours = {feeding.partition for feeding in app.tasks.running if feeding.topic in app.sub_topologies["dedup"]}
        standbys = {tp.partition for tp in app.assignor.assigned_standbys() if tp.topic in self.changelog_topics}
        app.standbys.assign(standbys - ours)
        app.shelf.keep_only(standbys | ours)
        app.flow_control.resume()
        app.consumer.resume_flow()
        await app._fetcher.maybe_start()  # noqa: SLF001  # as Faust's own recovery does when it is done
        self.on_actives_ready()
        self.on_standbys_ready()

    def on_partitions_revoked(self, revoked: set[TP]) -> None:
        """Stop the standbys; a task that is about to open needs their stores."""
        self.app.standbys.release()

    async def on_stop(self) -> None:
        """Stop fetching and the tables."""
        await self.app._fetcher.stop()  # noqa: SLF001  # as Faust's own manager does
        for table in self.values():
            await table.stop()

    async def wait_until_recovery_completed(self) -> bool:
        """Return at once: no app-wide recovery exists."""
        return False


def _read_only() -> InvariantBroken:
    return InvariantBroken(
        "the table of sightings can not be written by key: a sighting belongs to the transaction of its record."
    )
