"""The same schedules on a real RocksDB store: a killed process leaves its files as they are at that moment."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from dedup.store.base import Store, StoreIdentity
from dedup.store.changelog import TaskRecord, Writes
from dedup.store.directory import store_directory
from dedup.store.rocks import RocksMemory, RocksStore
from tests.simulation.explore import enumerate_all, sample
from tests.simulation.process import Process
from tests.simulation.scenario import Scenario
from tests.simulation.scenarios import CRASHES, EXPIRY, ZOMBIE_REFUSED
from tests.simulation.variants import CORRECT

IDENTITY = StoreIdentity("t", 0, "topic-id")


class MortalStore(RocksStore):
    """A RocksDB store of a simulated process."""

    process: Process

    def apply(self, writes: Writes, record: TaskRecord | None, position: int) -> None:
        self.process.disk_write("apply")
        super().apply(writes, record, position)

    def close(self) -> None:
        # What a killed process would do at its end, it does not.
        if not self.process.dead:
            super().close()

    def let_go(self) -> None:
        """Free the database, which in this process outlives the one that was killed."""
        super().close()


class RocksDisk:
    """State directories: a kill leaves a copy of the files, and only the copy is opened again."""

    def __init__(self, root: Path, memory: RocksMemory) -> None:
        self._root = root
        self._memory = memory
        self._copies = 0
        self._store: MortalStore | None = None
        self._name = f"disk{len(list(root.iterdir()))}"
        self._directory.mkdir(parents=True)

    @property
    def _directory(self) -> Path:
        return store_directory(self._root / f"{self._name}-{self._copies}", IDENTITY)

    def open(self, process: Process) -> Store:
        self._let_go()
        self._store = MortalStore.open(self._directory, identity=IDENTITY, memory=self._memory)
        self._store.process = process
        return self._store

    def killed(self) -> None:
        before = self._directory
        self._copies += 1
        if before.exists():
            shutil.copytree(before, self._directory)
        self._let_go()
        shutil.rmtree(before, ignore_errors=True)

    def _let_go(self) -> None:
        if self._store is not None:
            self._store.let_go()
            self._store = None


@pytest.mark.parametrize("scenario", [CRASHES, EXPIRY, ZOMBIE_REFUSED], ids=lambda scenario: scenario.name)
def test_schedules_on_rocksdb(scenario: Scenario, tmp_path: Path) -> None:
    memory = RocksMemory(cache_bytes=1 << 20, write_buffer_bytes=1 << 20)
    variant = replace(CORRECT, name="RocksDB", disk=lambda: RocksDisk(tmp_path, memory))
    tally = enumerate_all(scenario, variant, most=8)
    tally.merge(sample(scenario, variant, range(8)))
    print(tally)  # noqa: T201  # shown with -s
    assert tally.wrong == 0, f"{tally}\n{tally.first}"
