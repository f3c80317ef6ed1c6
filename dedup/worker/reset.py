"""Implements `dedup reset`, which deletes the offsets, changelog, repartition topic, and local state of a topology.

After a reset, the topology starts like a new topology. To finish an interrupted reset, run `dedup reset` again. Before
a reset deletes topics or local state, it replaces the group's offsets with offsets whose metadata says so. While this
metadata exists, workers refuse to start.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dedup.core.window import BEFORE_ALL_TIME
from dedup.errors import BrokerUnavailable, CommitUnknown, DedupError, StateIncompatible
from dedup.kafka.client import KafkaWire
from dedup.kafka.record_batch import OWN_ROW, Line, fill
from dedup.kafka.topic_admin import Admin, Group, Topic, WantedTopic
from dedup.kafka.transactional_producer import Session
from dedup.kafka.wire import NoAnswer, Position, TopicPartition
from dedup.settings import Settings
from dedup.store.changelog import TASK_RECORD_KEY, TaskRecord, encode_task_record
from dedup.store.checkpoint_storage import CheckpointStorage
from dedup.store.directory import delete_store, refuse_used
from dedup.topology.model import Topology
from dedup.topology.schema import Start
from dedup.worker.bootstrap import transfer
from dedup.worker.layout import LayoutChange, read_layout, with_layout
from dedup.worker.offsets import RESETTING, ends_of, first_offset
from dedup.worker.task import SteadyClock
from dedup.worker.topics import Cluster, known_names, missing_topics, state_topics

_BEGUN: Final = "The reset has begun: run the same `dedup reset` again to complete it."
MOST_ATTEMPTS: Final = 50
_KNOWN_WITHIN_S: Final = 30.0
LOOK_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Doomed:
    """Everything that a reset will delete."""

    group: str
    topics: tuple[str, ...]
    partitions: tuple[Path, ...]
    """The state directories on this machine."""
    checkpoints: tuple[str, ...] = ()
    """The URLs of the checkpoints, if `state.checkpoint` is set."""


def local_state(topology: Topology, state_dir: Path) -> tuple[Path, ...]:
    """Return the directories of a topology's partitions on this machine, written by one worker or by a fleet."""
    homes = [state_dir, *(path for path in state_dir.iterdir() if path.is_dir())] if state_dir.is_dir() else []
    owned = [home / topology.name for home in homes if (home / topology.name).is_dir()]
    return tuple(sorted(path for directory in owned for path in directory.iterdir() if path.name.isdigit()))


def delete_local_state(partitions: Sequence[Path]) -> None:
    """Delete the stores and any parent directory that becomes empty. Raises StateIncompatible if a store is in use."""
    for path in partitions:
        delete_store(path)
        with contextlib.suppress(OSError):  # the directory still contains another partition or a foreign file
            path.parent.rmdir()


@dataclass(frozen=True, slots=True)
class Reset:
    """Resets one topology: `look` returns what a reset would delete, and `run` deletes it."""

    topology: Topology
    settings: Settings
    wire: KafkaWire
    admin: Admin

    async def look(self) -> Doomed:
        """Return everything that a reset would delete.

        Raises DedupError if the group still has members, if another process uses a local store, or if the output does
        not have as many partitions as the source needs.
        """
        await Group(self.wire, self.topology.name).refuse_members()
        have = await self.admin.topics(state_topics(self.topology))
        await self._refuse_other_output()
        places = tuple(storage.place(self.topology.name, each) for storage, each in await self._checkpoints())
        partitions = local_state(self.topology, self.settings.state_dir)
        for directory in partitions:
            refuse_used(directory)
        return Doomed(self.topology.name, tuple(sorted(have)), partitions, places)

    async def _refuse_other_output(self) -> None:
        """Raise StateIncompatible if workers would refuse the output after the reset."""
        topology = self.topology
        if topology.output is None or not topology.direct:
            return
        source, output = topology.source.topics[0], topology.output.topic
        have = await self.admin.topics([source, output])
        if len(have) > 1 and have[output].partitions != have[source].partitions:
            raise StateIncompatible(
                f"the output {output!r} has {have[output].partitions} partitions, but {source!r} has "
                f"{have[source].partitions}: an output record keeps its source partition. Nothing was changed. Add "
                "partitions to the topic that has fewer; then run the same reset again."
            )

    async def run(self, doomed: Doomed, to: Start | None) -> dict[TopicPartition, int]:
        """Delete the state, recreate the topics, and return the offsets that were set (none if ``to`` is None).

        Once `run` has deleted something, every error says that the reset must be run again.
        """
        topology = self.topology
        await self.look()  # a worker may have joined the group in the meantime
        have = await self.admin.topics(known_names(topology))
        left = {name: topic for name, topic in have.items() if name not in doomed.topics}
        wanted = missing_topics(topology, self.settings, left)
        sources = [place for name in topology.source.topics for place in have[name].places]
        offsets = {} if to is None else {feeding: await first_offset(self.wire, feeding, to) for feeding in sources}
        await self._fence(have)
        group = Group(self.wire, topology.name)
        try:
            # The metadata is written after all workers have been fenced, so none of them can overwrite it.
            await group.delete()
            await group.set_offsets(dict.fromkeys(sources, 0), metadata=RESETTING, for_ever=True)
            await self._start_over(doomed, left, wanted, offsets)
        except CommitUnknown as error:
            raise BrokerUnavailable(f"the brokers did not confirm a transaction: {error} {_BEGUN}") from error
        except DedupError as error:
            error.args = (f"{error} {_BEGUN}",)
            raise
        except (NoAnswer, TimeoutError) as error:
            raise BrokerUnavailable(f"the brokers gave no usable answer: {error!r}. {_BEGUN}") from error
        except OSError as error:
            raise DedupError(f"{error}. {_BEGUN}") from error
        return offsets

    async def _start_over(
        self,
        doomed: Doomed,
        left: Mapping[str, Topic],
        wanted: Sequence[WantedTopic],
        offsets: Mapping[TopicPartition, int],
    ) -> None:
        topology, group = self.topology, Group(self.wire, self.topology.name)
        await self.admin.delete(doomed.topics)
        await self._until(0, doomed.topics, "not deleted yet")
        delete_local_state(doomed.partitions)
        # The checkpoints belong to the deleted changelog, so workers would refuse them.
        for storage, partition in await self._checkpoints():
            await transfer(lambda _, s=storage, p=partition: s.delete(topology.name, p), str(storage))  # type: ignore[misc]
        # No changelog exists now, so the recorded ends precede any new state.
        await self._leave_mark(left, offsets)
        made = await self.admin.create(wanted)
        await self._until(len(made), made, "not visible yet")
        await self._renew_layout()
        if offsets and topology.direct:
            await self._begin_at(offsets)
        elif offsets:
            # If these offsets expire, no task record says where the repartition tasks begin.
            await group.set_offsets(offsets, for_ever=True)
        else:
            await group.delete()

    async def _checkpoints(self) -> list[tuple[CheckpointStorage, int]]:
        """Return each partition that has a checkpoint, together with the checkpoint's storage."""
        url = self.settings.state.checkpoint
        if url is None:
            return []
        storage = CheckpointStorage(url)
        kept = await transfer(lambda _: storage.partitions(self.topology.name), str(storage))
        return [(storage, partition) for partition in kept]

    async def _leave_mark(self, left: Mapping[str, Topic], offsets: Mapping[TopicPartition, int]) -> None:
        """Record the current ends of the topics that dedup writes to. `dedup verify` checks only records after these
        ends.
        """
        written = [place for name in self.topology.written_topics if name in left for place in left[name].places]
        ends = await ends_of(self.wire, written)
        mark = Group(self.wire, self.topology.reset_group)
        await mark.delete()
        await mark.set_offsets({**ends, **offsets}, for_ever=True)

    async def _fence(self, have: Mapping[str, Topic]) -> None:
        """Fence all workers and end their transactions, so that a suspended worker cannot write to the new topics."""
        topology = self.topology
        names = (*topology.source.topics, *topology.feeding_topics)
        known = Cluster({name: have[name] for name in names if name in have})
        change = LayoutChange(topology, known, self.wire, self.settings.transaction_timeout_ms)
        await change.fence(await read_layout(self.wire, topology))

    async def _renew_layout(self) -> None:
        """Write the layout with the topics' current partition counts."""
        topology = self.topology
        cluster = Cluster(await self.admin.topics(known_names(topology)))
        if topology.layout_topic in cluster.topics:
            wanted = await with_layout(topology, cluster, self.wire, fresh=True)
            change = LayoutChange(wanted, cluster, self.wire, self.settings.transaction_timeout_ms)
            await change.run(wanted.group_size, anew=True)

    def _session(self, transactional_id: str) -> Session:
        timeout_ms = self.settings.transaction_timeout_ms
        return Session(self.wire, transactional_id, self.topology.name, timeout_ms=timeout_ms)

    async def _until(self, there: int, names: Sequence[str], what: str) -> None:
        """Wait until exactly ``there`` of the named topics exist; brokers learn of changes at different times."""
        deadline_s = asyncio.get_running_loop().time() + _KNOWN_WITHIN_S
        while len(await self.admin.topics(names)) != there:
            if asyncio.get_running_loop().time() > deadline_s:
                raise BrokerUnavailable(f"topics {', '.join(names)} are {what}.")
            await asyncio.sleep(LOOK_S)

    async def _begin_at(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Commit each partition's offset together with a task record, because workers refuse offsets without task
        records.
        """
        cluster = Cluster(await self.admin.topics(known_names(self.topology)))
        topology = await with_layout(self.topology, cluster, self.wire, fresh=True)
        fingerprint = topology.state_fingerprint(cluster.source_partitions(topology))
        # The first partition is written last, because a worker looks there for the metadata of a reset in progress.
        for feeding, offset in sorted(offsets.items(), reverse=True):
            width_ms, topic_id = topology.window.segment_ms, cluster.topics[feeding.topic].topic_id
            record = TaskRecord(fingerprint, BEFORE_ALL_TIME, (), offset, width_ms, feeding_topic_id=topic_id)
            line: Line = (OWN_ROW, SteadyClock().now_ms(), TASK_RECORD_KEY, encode_task_record(record), [])
            changelog = TopicPartition(topology.changelog_topic, feeding.partition)
            session = self._session(topology.transactional_id("dedup", feeding.partition))
            await self._write(session, changelog, line, {feeding: offset})

    async def _write(
        self, session: Session, changelog: TopicPartition, line: Line, offsets: Mapping[TopicPartition, int]
    ) -> None:
        """Commit one record and the offsets, and repeat the idempotent commit if the outcome is unknown."""
        for attempt in range(MOST_ATTEMPTS):
            try:
                await session.open()
                session.add(fill(changelog, [line], compression="none"))
                await session.commit({place: Position(offset) for place, offset in offsets.items()})
            except CommitUnknown:
                # The leader of a new partition may not know the partition yet.
                if attempt + 1 == MOST_ATTEMPTS:
                    raise
                await self.wire.refresh()
                await asyncio.sleep(LOOK_S)
            else:
                return
