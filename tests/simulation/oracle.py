"""What must be true of the cluster: the exact model's word on every topic, at every moment and at the end."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dedup.core.extract import Extractor
from dedup.core.fold import Rules
from dedup.core.reference_model import ModelRecord, ModelRules, ReferenceModel
from dedup.core.window import Sighting, Source
from dedup.kafka.wire import TopicPartition
from dedup.store.base import MemoryStore, Store
from dedup.store.changelog import collect, decode_sightings
from dedup.worker.restore import apply_changelog
from tests.simulation.cluster import Cluster, Record

Kind = Literal["lost", "duplicated", "order", "state", "books", "stopped", "stuck", "wrong"]
Line = tuple[bytes | None, bytes | None, int]
"""Key, value and, on the output, the timestamp."""
VERDICT_TOPICS = {"unique": "out", "exempt": "out", "duplicate": "duplicates", "late": "late", "dead_letter": "dead"}


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that must not be."""

    kind: Kind
    text: str


def too_large(topic: str, record: Record) -> bool:
    """Tell whether the simulated broker refuses a record."""
    refused = {"out": b"BIG", "t.repartition": b"VAST"}.get(topic)
    return refused is not None and record.value is not None and refused in record.value


@dataclass(slots=True)
class Judged:
    """What the model says must be on every topic, for what was fed to it so far."""

    model: ReferenceModel
    extractor: Extractor
    topics: dict[str, list[Line]] = field(default_factory=lambda: {name: [] for name in VERDICT_TOPICS.values()})
    count: int = 0

    def feed(self, record: Record, source: Source) -> None:
        """The next record of the task's log."""
        found = self.extractor([record.key], [record.value], [record.headers], [record.timestamp])
        own = ModelRecord(found.ids[0], found.times_ms[0], source)
        if 0 in found.faults:
            own = own._replace(id=None, fault="missing_id")
        elif too_large("out", record) and copy.deepcopy(self.model).judge(own).kind == "unique":
            own = own._replace(id=None, fault="unreadable")
        topic = VERDICT_TOPICS[self.model.judge(own).kind]
        self.topics[topic].append((record.key, record.value, record.timestamp))
        self.count += 1


def compare(
    topic: str, expected: Mapping[str, Sequence[Line]], seen: Mapping[str, Reader], *, whole: bool
) -> Violation | None:
    """Return how a topic differs from what it must hold, or from a beginning of it.

    Lost: an event that must be forwarded is passed over, or stands elsewhere only. Duplicated: anything that stands
    twice, or is forwarded though it must not be.
    """
    own, found = expected[topic], seen[topic].lines
    if found == own[: len(found)] and (len(found) == len(own) or not whole):
        return None
    wanted, values = [line[1] for line in own], [line[1] for line in found]
    text = f"{topic} holds {values}, the model says {wanted}"
    forwarded = {line[1] for line in seen["out"].lines}
    strange = set(values).difference(wanted)
    if topic != "out" and strange and not strange <= forwarded:
        silenced = strange.intersection(line[1] for line in expected["out"])
        return Violation("lost" if silenced else "wrong", text)
    if len(set(values)) < len(values) or strange:
        return Violation("duplicated", text)
    # What is passed over can never come in its place; at the end, whatever is absent is lost.
    last = max((wanted.index(value) for value in values), default=-1)
    if whole or not set(wanted[: last + 1]) <= set(values):
        return Violation("lost", text)
    return Violation("order", text)


class Reader:
    """A `read_committed` reader of one partition that looks after every step."""

    def __init__(self, cluster: Cluster, target: TopicPartition) -> None:
        self.lines: list[Line] = []
        self._log = cluster.partition(target)
        self._position = 0

    def read(self) -> bool:
        """Take what has become visible; False if that is nothing."""
        end = self._log.stable_end
        if end == self._position:
            return False
        for record in self._log.committed(self._position, end):
            self.lines.append((record.key, record.value, record.timestamp))
        self._position = end
        return True


def fold_of_changelog(cluster: Cluster, changelog: TopicPartition, rules: Rules) -> MemoryStore:
    """Return the state that the changelog alone says."""
    log = cluster.partition(changelog)
    store = MemoryStore()
    rows = log.committed(0, log.stable_end)
    found = collect([row.key for row in rows], [row.value for row in rows])
    apply_changelog(store, rules.window, found, log.stable_end)
    return store


def longest(held: Sequence[tuple[int, bytes, bytes]]) -> set[tuple[int, bytes, Sighting]]:
    """Return each sighting once, with its segment, and as long as the longest of its copies."""
    found: dict[object, tuple[int, bytes, Sighting]] = {}
    for segment, state_key, value in held:
        for seen in decode_sightings(value):
            name = (state_key, seen.first_ms, seen.source, seen.fingerprint)
            found[name] = max((segment, state_key, seen), found.get(name, (segment, state_key, seen)))
    return set(found.values())


def compare_state(
    cluster: Cluster, changelog: TopicPartition, rules: Rules, store: Store, model: ReferenceModel
) -> list[Violation]:
    """Compare the store with the fold of the changelog, and both with the model's live sightings."""
    folded = fold_of_changelog(cluster, changelog, rules)
    found: list[Violation] = []
    if folded.task_record != store.task_record:
        found.append(Violation("state", f"task record {store.task_record}, in the changelog {folded.task_record}"))
    oldest_ms = rules.window.oldest_live_ms(model.stream_time_ms)
    folded.drop_below(oldest_ms, rules.window.segment_ms)
    own, others = list(store.sightings()), list(folded.sightings())
    # Where a record repeats sightings of later segments, a restore puts them into another order, and leaves out the
    # shorter copies of extended ones.
    if longest(own) != longest(others):
        found.append(Violation("state", f"the store holds {own}, the changelog says {others}"))
    births = list(store.segments().values())
    record = store.task_record
    if record is not None and births and min(births) > record.kept_from:
        # The owner deletes below the births; a later restore takes more than its record allows for an accident.
        found.append(Violation("state", f"births {births}, but the task record keeps from {record.kept_from}"))
    live: dict[tuple[bytes, int, Source], int] = {}
    for _, state_key, value in own:
        for seen in decode_sightings(value):
            # An extended sighting also stands, shorter, in the segments it was in before.
            name = (state_key, seen.first_ms, seen.source)
            if seen.last_ms >= oldest_ms:
                live[name] = max(seen.last_ms, live.get(name, 0))
    expected = {
        (state_key, seen.first_ms, seen.source): seen.last_ms
        for state_key, sightings in model.sightings.items()
        for seen in sightings
        if seen.last_ms >= oldest_ms
    }
    if live != expected:
        found.append(Violation("state", f"live sightings {live}, the model has {expected}"))
    if store.task_record is not None and store.task_record.stream_time_ms != model.stream_time_ms:
        text = f"stream time {store.task_record.stream_time_ms}, the model's {model.stream_time_ms}"
        found.append(Violation("state", text))
    return found


def new_model(rules: ModelRules, feeds: Sequence[tuple[int, int]], extractor: Extractor) -> Judged:
    """Return a model that has seen nothing."""
    return Judged(ReferenceModel(rules, feeds), extractor)
