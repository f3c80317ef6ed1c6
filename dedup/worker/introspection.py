"""Reports a worker's readiness, tasks, and metrics, and looks up the sightings of an ID."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, product
from typing import Any, Final, assert_never, cast
from uuid import UUID

import msgspec
from faust.assignor.partition_assignor import PartitionAssignor
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from yarl import URL

from dedup.code_loader import imported_digest
from dedup.core.avro import Instant, Leaf
from dedup.core.avro_schema import Scalar, nodes_at, parse_schema, type_name
from dedup.core.event_time import rfc3339_ms
from dedup.core.exact_json import ABSENT, Number, Unreadable, decode
from dedup.core.extract_one import Fault, One, Recipe, extract_one, of_leaves
from dedup.core.formats import Format, member_types, text_of
from dedup.core.framing import framed
from dedup.core.partitioner import partitions
from dedup.core.proto_schema import SCALARS
from dedup.core.tracking_id import (
    Alternative,
    CodeRule,
    ContentRule,
    FieldRule,
    FieldsRule,
    FirstOfRule,
    HeaderRule,
    IdFunction,
    KeyFieldRule,
    KeyRule,
    Part,
    PartsRule,
    Path,
    RawContentRule,
    Rule,
    TrackingId,
    code_rules,
    encode_alternative,
    key_paths,
    member_paths,
    state_key,
)
from dedup.core.window import Sighting
from dedup.errors import BrokerUnavailable, InvariantBroken, Problem, SettingsError, StateIncompatible
from dedup.kafka.wire import NoAnswer, TopicNow, TopicPartition
from dedup.metrics import METRICS, RESULTS, Durations, Metric, TaskNumbers, TaskSeen, WorkerSeen
from dedup.topology.model import SourceSpec, Topology
from dedup.worker.dedup_task import DedupTask
from dedup.worker.faust_app import NOWHERE, DedupApp
from dedup.worker.task import Task, TaskState
from dedup.worker_view import LookedUp, Noted, Peer, SeenId, ShownRecord, TaskPulse, id_bytes

_FRESH_S: Final = 2.0
"""The maximum age, in seconds, of a partition leader's response; a leader without new records responds every 0.2 s."""
_Headers = Sequence[tuple[str, bytes | None]]
_Record = tuple[bytes | None, bytes | None, _Headers]
Value = float | Durations | Mapping[str, float] | None
"""The value of a sample (None if unknown), or a mapping from the values of the metric's last label to sample values."""


def _stream_time_s(task: TaskSeen) -> float | None:
    known_ms = task.numbers.stream_time_ms
    return None if known_ms is None else known_ms / 1000


COUNTER_READERS: Final[Mapping[str, Callable[[TaskNumbers], Value]]] = {
    "dedup_records_total": lambda numbers: numbers.verdicts,
    "dedup_conflicts_total": lambda numbers: numbers.conflicts,
    "dedup_flow_filtered_total": lambda numbers: numbers.filtered,
    "dedup_flow_seconds_total": lambda numbers: numbers.flow_seconds,
    "dedup_dead_letters_total": lambda numbers: numbers.dead_reasons,
    "dedup_other_formats_total": lambda numbers: numbers.formats,
    "dedup_replayed_total": lambda numbers: numbers.replayed,
    "dedup_misplaced_ids_total": lambda numbers: numbers.misplaced,
    "dedup_transactions_total": lambda numbers: {"committed": numbers.transactions, "aborted": numbers.aborted},
    "dedup_commit_seconds": lambda numbers: numbers.commits,
    "dedup_end_to_end_seconds": lambda numbers: numbers.end_to_end,
}
"""Maps each metric of the worker's current and former tasks to the function that reads it from a task's counters."""
TASK_READERS: Final[Mapping[str, Callable[[TaskSeen], Value]]] = {
    "dedup_stream_time_seconds": _stream_time_s,
    "dedup_state_ids": lambda task: task.state_ids,
    "dedup_state_bytes": lambda task: task.state_bytes,
    "dedup_state_max_bytes": lambda task: task.state_max_bytes,
    "dedup_restore_remaining_records": lambda task: task.numbers.restore_remaining,
    "dedup_task_state": lambda task: {state.value: float(state.value == task.state) for state in TaskState},
    "dedup_lag_records": lambda task: task.lag_records,
    "dedup_lag_seconds": lambda task: task.lag_seconds,
    "dedup_last_stable_offset_lag": lambda task: task.unstable_records,
    "dedup_seconds_since_commit": lambda task: task.seconds_since_commit,
}
"""Maps each metric of the worker's current tasks to the function that reads it from a task."""
WORKER_READERS: Final[Mapping[str, Callable[[WorkerSeen], Value]]] = {
    "dedup_standby_lag_records": lambda seen: {str(partition): lag for partition, lag in seen.standby_lag.items()},
    "dedup_start_time_seconds": lambda seen: seen.started_s,
    "dedup_group_transactions_total": lambda seen: {each: seen.transactions.get(each, 0) for each in RESULTS},
    "dedup_fenced_total": lambda seen: seen.fenced,
    "dedup_schemas_awaited": lambda seen: seen.schemas_awaited,
    "dedup_corrupted_total": lambda seen: seen.corrupted,
    "dedup_checkpoints_unusable_total": lambda seen: seen.checkpoints_unusable,
}
"""Maps each metric of the whole worker to the function that reads it."""


class _Scrape(Collector):
    """The metrics of a worker at one moment."""

    def __init__(self, seen: WorkerSeen) -> None:
        self._seen: Final = seen
        self._counted: Final = [
            ((*place[:2], str(place[2])), counted) for place, counted in sorted(seen.counters().items())
        ]
        self._tasks: Final = [((task.sub_topology, task.topic, str(task.partition)), task) for task in seen.tasks]

    def collect(self) -> Iterator[Family]:
        """Yield every metric in `METRICS`, including metrics that have no sample."""
        for metric in METRICS:
            yield _family(metric, self._values(metric.name))

    def _values(self, name: str) -> Iterator[tuple[tuple[str, ...], Value]]:
        if name in WORKER_READERS:
            yield (), WORKER_READERS[name](self._seen)
        elif name in TASK_READERS:
            yield from ((labels, TASK_READERS[name](task)) for labels, task in self._tasks)
        else:
            yield from ((labels, COUNTER_READERS[name](numbers)) for labels, numbers in self._counted)


def _family(metric: Metric, values: Iterable[tuple[tuple[str, ...], Value]]) -> Any:  # noqa: ANN401  # one of three
    kinds = {"histogram": HistogramMetricFamily, "counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
    family = kinds[metric.kind](metric.name, metric.help, labels=metric.labels)
    for labels, value in values:
        if isinstance(value, Durations):
            family.add_metric(labels, _cumulated(value), value.total_s)
        elif isinstance(value, Mapping):
            for name, each in sorted(value.items()):
                family.add_metric((*labels, name), each)
        elif value is not None:
            family.add_metric(labels, value)
    return family


def _cumulated(durations: Durations) -> list[tuple[str, int]]:
    """Return cumulative buckets, as Prometheus expects: the count of each bucket includes all lower buckets."""
    bounds = [*map(floatToGoString, durations.bounds_s), "+Inf"]
    return list(zip(bounds, accumulate(durations.counts), strict=True))


def exposition(seen: WorkerSeen) -> bytes:
    """Return the worker's metrics in the Prometheus text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Scrape(seen))
    return generate_latest(registry)


@dataclass(frozen=True, slots=True)
class Introspection:
    """Reads the state of the app and its tasks, and changes nothing."""

    app: DedupApp
    topology: Topology

    def not_ready(self) -> str | None:
        """Return the reason why this worker is not ready, or None if it is ready."""
        tasks = self.app.tasks
        if tasks.failure.done():
            return "the worker is stopping after a failure"
        if not tasks.opened.is_set():
            return "there is no assignment yet, or a rebalance is in progress"
        waiting = [task for task in tasks.running.values() if task.state is not TaskState.RUNNING]
        if waiting:
            text = f"{len(waiting)} of {len(tasks.running)} tasks are not running yet"
            since_s = tasks.unanswered_since_s
            if since_s is None:
                return text
            return f"{text}: no broker has given a usable answer for {time.monotonic() - since_s:.0f} s"
        return None if self.app.schemas is None else self.app.schemas.waiting

    def seen(self) -> WorkerSeen:
        """Return the current state of the worker and its tasks."""
        app = self.app
        return WorkerSeen(
            topology=self.topology.name,
            worker_id=app.settings.worker_id or "",
            tasks=tuple(self._task(feeding, task) for feeding, task in sorted(app.tasks.running.items())),
            standby_lag=dict(app.standbys.lag),
            transactions=app.factory.transactions,
            fenced=app.tasks.fenced,
            corrupted=app.tasks.corrupted + app.standbys.corrupted,
            not_ready=self.not_ready(),
            checkpoints_unusable=0 if app.factory.bootstrap is None else app.factory.bootstrap.unusable,
            schemas_awaited=0 if app.schemas is None else len(app.schemas.awaited),
            alert=app.alert,
            ended=app.tasks.ended,
            commit_interval_s=app.settings.commit_interval_ms / 1000,
            user_code=self._user_code(),
        )

    def _user_code(self) -> dict[str, str]:
        functions = [rule.name for rule in code_rules(self.topology.tracking_id.rule)]
        flows = [] if self.topology.then is None else [self.topology.then.name]
        digests = {name: imported_digest(name) for name in (*functions, *flows)}
        return {name: digest for name, digest in digests.items() if digest}

    def metrics(self) -> bytes:
        """Return the worker's metrics in the Prometheus text format."""
        return exposition(self.seen())

    def caught_up(self, feeding: TopicPartition, task: Task) -> bool:
        """Return whether a task has judged and committed all records of its partition."""
        end = self.app.member.fetcher.end(feeding)
        # If the leader does not respond, it may have records that no worker has read.
        if end is None or asyncio.get_running_loop().time() - end.seen_s > _FRESH_S:
            return False
        return task.all_committed and self.app.member.passed(feeding, end.high_watermark, task.next_offset)

    def _lag(self, feeding: TopicPartition, task: Task) -> int | None:
        end = self.app.member.fetcher.end(feeding)
        if end is None or task.numbers.committed_offset is None:
            return None
        return 0 if self.caught_up(feeding, task) else max(0, end.high_watermark - task.numbers.committed_offset)

    def _unstable(self, feeding: TopicPartition) -> int | None:
        end = self.app.member.fetcher.end(feeding)
        return None if end is None else end.high_watermark - end.last_stable_offset

    def _task(self, feeding: TopicPartition, task: Task) -> TaskSeen:
        store = task.work.store if task.state is TaskState.RUNNING else None
        return TaskSeen(
            sub_topology=task.task_id.sub_topology,
            topic=feeding.topic,
            partition=feeding.partition,
            state=task.state.value,
            numbers=task.numbers,
            lag_records=self._lag(feeding, task),
            unstable_records=self._unstable(feeding),
            state_ids=0 if store is None else store.count_ids(),
            state_bytes=0 if store is None else store.approximate_bytes(),
            state_max_bytes=None if store is None else self.topology.state.max_bytes_per_partition,
        )

    def look_up(self, text: str) -> LookedUp:
        """Return an ID's sightings in this worker's partitions, and the partitions to which the ID may belong.

        Raises SettingsError if ``text`` cannot be an ID of this topology.
        """
        keys = state_keys(self.topology, text)
        dedup_tasks = {
            feeding.partition: task.work
            for feeding, task in sorted(self.app.tasks.running.items())
            if task.state is TaskState.RUNNING and isinstance(task.work, DedupTask)
        }
        found = tuple(
            self._seen_id(partition, sighting, live=sighting.last_ms >= dedup_task.oldest_live_ms)
            for partition, dedup_task in dedup_tasks.items()
            for key in keys
            for sighting in sorted(dedup_task.sightings_of(key))
        )
        # Before the first assignment, the group member knows no topics.
        assigned = self.app.tasks.opened.is_set()
        count = (self.app.member.topic_partitions(self.topology.feeding_topics[0]) or 0) if assigned else 0
        placed = set(range(count)) if self.topology.direct or not count else set(partitions(keys, count))
        belongs_to = next(iter(placed)) if len(placed) == 1 and not self.topology.direct else None
        name, worker = self.topology.name, self.app.settings.worker_id or ""
        home, feeding = tuple(sorted(placed)), self.topology.feeding_topics
        return LookedUp(name, worker, text, found, tuple(dedup_tasks), count, belongs_to, home, feeding)

    def _seen_id(self, partition: int, sighting: Sighting, *, live: bool) -> SeenId:
        topology = self.topology
        place, source_partition = sighting.source.place(topology.source.topics), sighting.source.partition
        guarded_ms = sighting.last_ms + topology.window.guard_ms
        went = None
        if topology.then is not None:
            went = f"the flow {topology.then.name}"
        elif topology.output is not None:
            # With a repartition topic, the record key, which a sighting does not contain, determines the output
            # partition.
            went = f"{topology.output.topic}/{source_partition}" if topology.direct else topology.output.topic
        return SeenId(partition, sighting.first_ms, sighting.last_ms, guarded_ms, place, live, went)

    def pulse(self) -> Iterator[TaskPulse]:
        """Yield the counters and the lag of every task. `pulse` is cheap, because it reads no store."""
        for feeding, task in self.app.tasks.running.items():
            lag, unstable = self._lag(feeding, task), self._unstable(feeding)
            yield TaskPulse(task.numbers, lag, feeding.topic, feeding.partition, task.state.value, unstable)

    def latest(self) -> Iterator[Noted]:
        """Yield the latest committed duplicates, conflicts, late records, and dead letters of every task."""
        # A content ID would reveal the payload, so it is not displayed.
        ids = not isinstance(self.topology.tracking_id.rule, ContentRule | RawContentRule)
        for task in self.app.tasks.running.values():
            yield from task.work.recent.shown(self.topology.source.topics, ids=ids)

    def peers(self) -> tuple[Peer, ...]:
        """Return the group's members at the last assignment, sorted by name, or () before the first assignment.

        Each member announces its address when it joins, as with `application.server` in Kafka Streams (KIP-67). Some of
        these members may no longer be running.
        """
        tasks: defaultdict[str, set[tuple[str, int]]] = defaultdict(set)
        assignor = cast("PartitionAssignor", self.app.assignor)
        for spread in (assignor.changelog_distribution, assignor.external_topic_distribution):
            for name, by_topic in spread.items():
                tasks[name].update((topic, number) for topic in by_topic for number in by_topic[topic])
        own, feeding = str(self.app.conf.canonical_url), self.app.feeding_topics
        peers = []
        for name, assigned in tasks.items():
            url = URL(name)
            # A URL without a fragment belongs to a worker whose release does not offer its pages to other workers.
            hidden = url.host == NOWHERE or not url.fragment
            address = None if hidden else str(url.with_fragment(None)).rstrip("/")
            owned = tuple(sorted(task for task in assigned if task[0] in feeding))
            peers.append(Peer(url.fragment or url.host or name, address, owned, here=name == own))
        return tuple(sorted(peers, key=lambda peer: peer.worker))

    async def record(self, topic: str, partition: int, offset: int) -> ShownRecord | None:
        """Return a source record, truncated if it is long, or None if the topic does not contain the record.

        Raises BrokerUnavailable if the broker does not respond. Raises StateIncompatible if the topic is not a source
        of this topology, if it has no such partition, or if the fetch is refused.
        """
        if topic not in self.topology.source.topics:
            raise StateIncompatible(f"{topic!r} is not a source topic of {self.topology.name!r}.")
        wire = self.app.wire
        try:
            now = (await wire.topics((topic,))).get(topic)
            if isinstance(now, TopicNow) and partition >= now.partitions:
                raise StateIncompatible(f"{topic!r} has {now.partitions} partitions, and the first one is 0.")
            found = await wire.fetch(TopicPartition(topic, partition), offset, max_bytes=1, wait_ms=0)
        except NoAnswer as error:
            raise BrokerUnavailable(f"{topic}/{partition}/{offset} cannot be read now: {error}. Try again.") from error
        if offset not in found.offsets:
            return None
        row = found.offsets.index(offset)
        place = f"{topic}/{partition}/{offset}"
        return ShownRecord.of(place, found.timestamps_ms[row], found.keys[row], found.values[row])


def state_keys(topology: Topology, text: str) -> list[bytes]:
    """Return the state keys of all IDs that a user's input may represent.

    For example, the input ``7`` can mean the string "7" or the number 7. Users write a composite ID as a JSON array of
    its parts, and a content ID as the content itself.

    Raises SettingsError if ``text`` cannot be an ID of the topology.
    """
    id_bytes(text)  # raises an error for text that no rule below can encode
    if isinstance(topology.tracking_id.rule, FirstOfRule):
        return _of_alternatives(topology, topology.tracking_id.rule.alternatives, text)
    if isinstance(topology.tracking_id.rule, KeyFieldRule):
        return state_keys(_of_value(topology), text)
    source, keys = topology.source, list[bytes]()
    why = "it is not one"
    if isinstance(topology.tracking_id.rule, CodeRule):
        found = list(_returned(topology.tracking_id, topology.tracking_id.rule, text))
    elif isinstance(topology.tracking_id.rule, ContentRule) and source.is_memberwise:
        found, why = [], f"an ID is the content of a value in {source.format}, and only JSON content can be looked up"
    elif key_paths(topology.tracking_id.rule) or (source.is_memberwise and member_paths(topology.tracking_id.rule)):
        recipe = Recipe(_of_value(topology).tracking_id, fmt=source.format)
        found = [of_leaves(recipe, key, b"", headers, 0, leaves) for key, headers, leaves in _typed(topology, text)]
    else:
        fmt: Format = "bytes" if source.is_memberwise else source.format
        recipe = Recipe(topology.tracking_id, fmt=fmt, schema_id=source.schema_id)
        found = [extract_one(recipe, key, value, headers, 0) for key, value, headers in _records(topology, text)]
    for one in found:
        if isinstance(one, Fault):
            why = one.detail
        elif one.id not in keys:
            keys.append(one.id)
    if not keys:
        raise SettingsError([Problem("ID", f"{text!r} cannot be an ID of {topology.name!r}: {why}")])
    return keys


def _of_value(topology: Topology) -> Topology:
    """Return a topology that computes the same IDs, but reads the key's members from the value.

    The value then has the format of the key, except for an ID with several parts.
    """
    rule, source = topology.tracking_id.rule, topology.source
    if isinstance(rule, KeyFieldRule):
        fmt: Format = "json" if source.key_format == "json_schema" else source.key_format
        source = replace(source, format=fmt, schema=None)
        rule = FieldRule(rule.path)
    elif isinstance(rule, PartsRule):
        parts = [
            replace(part, rule=FieldRule(part.rule.path)) if isinstance(part.rule, KeyFieldRule) else part
            for part in rule.parts
        ]
        rule = PartsRule(tuple(parts))
    return replace(topology, source=source, tracking_id=replace(topology.tracking_id, rule=rule))


def _returned(tracking_id: TrackingId, rule: CodeRule, text: str) -> Iterator[One | Fault]:
    """Yield the ID for each value that the user's function may have returned, without calling the function."""
    values: list[str | bytes | int] = [text, text.encode()]
    if _JSON_INTEGER.fullmatch(text):
        with suppress(ValueError):  # Python parses and formats at most a few thousand digits
            values.append(int(text))
    for value in values:
        known = replace(tracking_id, rule=replace(rule, load=partial(_returning, value)))
        yield extract_one(Recipe(known, fmt="bytes"), None, None, (), 0)


def _returning(value: str | bytes | int) -> IdFunction:
    return lambda *_: value


def _of_alternatives(topology: Topology, alternatives: Sequence[Alternative], text: str) -> list[bytes]:
    keys, problems = list[bytes](), list[Problem]()
    for index, rule in enumerate(alternatives):
        tracking_id = replace(topology.tracking_id, rule=rule)
        try:
            found = state_keys(replace(topology, tracking_id=tracking_id), text)
        except SettingsError as error:
            problems += error.problems
            continue
        keys += [state_key(encode_alternative(index, key)) for key in found]
    if not keys:
        raise SettingsError(problems)
    return keys


def _typed(topology: Topology, text: str) -> Iterator[tuple[bytes | None, _Headers, tuple[Leaf, ...]]]:
    """Yield the key, the headers, and the members of each ID that a user's input may represent.

    Yields one result for each combination of types that the schema allows for the members.
    """
    rule, source = topology.tracking_id.rule, topology.source
    key: bytes | None = None
    headers: _Headers = []
    if isinstance(rule, PartsRule):
        key, headers, literals = _divided(rule.parts, _array(topology.name, text, len(rule.parts)))
        members = [part.rule for part in rule.parts if isinstance(part.rule, FieldRule | KeyFieldRule)]
        of_each = [_part_leaves(source, member, literal) for member, literal in zip(members, literals, strict=True)]
    else:
        paths, texts = member_paths(rule), [text]
        if isinstance(rule, FieldsRule):
            texts = list(map(_text_of, _array(topology.name, text, len(paths))))
        of_each = [_leaves(source.format, _names(source, path), part) for path, part in zip(paths, texts, strict=True)]
    for leaves in product(*of_each):
        yield key, headers, leaves


def _part_leaves(source: SourceSpec, rule: FieldRule | KeyFieldRule, literal: str) -> list[Leaf]:
    """Return each member of the value or key that a part of a user's input may represent."""
    fmt = source.key_format if isinstance(rule, KeyFieldRule) else source.format
    if fmt in {"json", "json_schema"}:
        found: list[Any] = []
        with suppress(Unreadable):
            found.append(ABSENT if literal == _NOTHING else decode(literal.encode()))
        return found
    return _leaves(
        fmt, _ANY_TYPE[fmt] if isinstance(rule, KeyFieldRule) else _names(source, rule.path), _text_of(literal)
    )


def _names(source: SourceSpec, path: Path) -> Collection[str]:
    if source.schema is None:
        return _ANY_TYPE[source.format]
    if source.format == "protobuf":
        return member_types(source.format, text_of(source.schema), path, None, first=True)
    nodes = nodes_at(parse_schema(source.schema.text), path)
    return ["string" if isinstance(each, Scalar) and each.kind == "string" else type_name(each) for each in nodes]


def _leaves(fmt: Format, names: Iterable[str], text: str) -> list[Leaf]:
    found: list[Leaf] = []
    for name in names:
        with suppress(ValueError, KeyError):  # the text is not a value of this type, or IDs cannot have this type
            found.append(_FROM_TEXT[fmt][name](text))
    return [*found, _LACKING[text]] if text in _LACKING else found


def _integer(text: str) -> Number:
    if not _JSON_INTEGER.fullmatch(text):
        raise ValueError(text)
    return Number(text)


def _decimal(text: str) -> Number:
    if not _JSON_NUMBER.fullmatch(text):
        raise ValueError(text)
    return Number(text if {".", "e", "E"} & set(text) else f"{text}e0")


def _instant(text: str) -> Instant:
    time_ms, fraction = rfc3339_ms(text), _FRACTION.search(text)
    if time_ms is None:
        raise ValueError(text)
    return Instant(time_ms // 1000 * 10**9 + (int(f"{fraction[1]:0<9.9}") if fraction else 0))


_JSON_INTEGER: Final = re.compile(r"-?(0|[1-9][0-9]*)")
_JSON_NUMBER: Final = re.compile(rf"{_JSON_INTEGER.pattern}(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_FRACTION: Final = re.compile(r"\.(\d+)")
_BOOLEANS: Final[Mapping[str, Leaf]] = {"true": True, "false": False}
_FROM_TEXT: Final[Mapping[Format, Mapping[str, Callable[[str], Leaf]]]] = {
    "avro": {
        "string": str,
        "enum": str,
        "int": _integer,
        "long": _integer,
        "boolean": _BOOLEANS.__getitem__,
        "decimal": _decimal,
        "bytes": str.encode,
        "fixed": str.encode,
        "uuid": UUID,
        **dict.fromkeys(("timestamp-millis", "timestamp-micros", "timestamp-nanos"), _instant),
    },
    "protobuf": {
        "string": str,
        "bytes": str.encode,
        "bool": _BOOLEANS.__getitem__,
        **dict.fromkeys(SCALARS.keys() - {"string", "bytes", "bool", "float", "double"}, _integer),
    },
    "msgpack": {"text": str, "bytes": str.encode, "boolean": _BOOLEANS.__getitem__, "integer": _integer},
    "cbor": {
        "text": str,
        "bytes": str.encode,
        "boolean": _BOOLEANS.__getitem__,
        "integer": _integer,
        "decimal": _decimal,
        "uuid": UUID,
    },
    "csv": {"text": str},
}
"""Maps each type that an ID can have in a format to the function that parses a user's input as that type."""
_NOTHING: Final = "{}"
"""The input that stands for an absent part."""
_LACKING: Final[Mapping[str, Leaf]] = {"null": None, _NOTHING: ABSENT}
"""Maps the input for a null part and the input for an absent part to the values of these parts."""
_ANY_TYPE: Final[Mapping[Format, Sequence[str]]] = {
    "avro": [name for name in _FROM_TEXT["avro"] if name not in {"enum", "int", "fixed"}],
    "protobuf": ["string", "bytes", "bool", "int64"],
    "msgpack": list(_FROM_TEXT["msgpack"]),
    "cbor": list(_FROM_TEXT["cbor"]),
    "csv": ["text"],
}
"""The types that a member may have if the schema is unknown, except types that are parsed like another listed type."""


def _array(name: str, text: str, count: int) -> list[str]:
    """Return the parts of a JSON array as text, because a float cannot represent every number."""
    parts: list[msgspec.Raw] = []
    if _is_json(text):
        with suppress(msgspec.MsgspecError):
            parts = msgspec.json.decode(text, type=list[msgspec.Raw])
    if len(parts) != count:
        why = f"write it as a JSON array of its {count} parts"
        raise SettingsError([Problem("ID", f"the ID of {name!r} is composite; {why}")])
    return [bytes(part).decode() for part in parts]


def _text_of(literal: str) -> str:
    return str(json.loads(literal)) if literal.startswith('"') else literal


def _records(topology: Topology, text: str) -> list[_Record]:
    """Return one record for each ID that a user's input may represent."""
    rule, framing = topology.tracking_id.rule, topology.source.framing
    if framing is not None and isinstance(rule, RawContentRule):
        return [(None, text.encode(), []), (None, *framed("header", text.encode()))]  # the ID includes the framing
    found: list[_Record] = []
    for key, value, headers in _unframed(rule, topology.name, text):
        written, added = (None, ()) if value is None else framed(framing, value)
        found.append((key, written, [*headers, *added]))
    return found


def _unframed(rule: Rule, name: str, text: str) -> list[_Record]:
    match rule:
        case KeyRule():
            return [(text.encode(), None, [])]
        case HeaderRule(header):
            return [(None, None, [(header, text.encode())])]
        case FieldRule(path):
            literals = [json.dumps(text), *([text] if _is_json(text) else [])]
            return [(None, _nested([(path, literal)]).encode(), []) for literal in literals]
        case FieldsRule(paths):
            pairs = list(zip(paths, _array(name, text, len(paths)), strict=True))
            return [(None, _nested(pairs).encode(), [])]
        case PartsRule(parts):
            return [_of_parts(rule, _array(name, text, len(parts)))]
        case ContentRule() | RawContentRule():
            return [(None, text.encode(), [])]
        case FirstOfRule() | CodeRule() | KeyFieldRule():
            raise InvariantBroken(
                "the alternatives of an ID, the results of a function, and members of keys are looked up one by one."
            )
        case never:
            assert_never(never)


def _of_parts(rule: PartsRule, written: Sequence[str]) -> _Record:
    """Return a record whose ID has the given parts."""
    key, headers, literals = _divided(rule.parts, written)
    members = [each for each in zip(member_paths(rule), literals, strict=True) if each[1] != _NOTHING]
    return key, _nested(members).encode(), headers


def _divided(parts: Sequence[Part], written: Sequence[str]) -> tuple[bytes | None, _Headers, list[str]]:
    """Split the parts of an ID into the record key, the headers, and the literals of value members.

    In the input, an empty JSON object stands for an absent part.
    """
    key: bytes | None = None
    headers: list[tuple[str, bytes | None]] = []
    members: list[str] = []
    for part, literal in zip(parts, written, strict=True):
        absent = json.loads(literal) == {}
        text = None if absent or literal == "null" else id_bytes(_text_of(literal))
        match part.rule:
            case FieldRule() | KeyFieldRule():
                members.append(_NOTHING if absent else literal)
            case KeyRule():
                key = text
            case HeaderRule(header):
                headers += [] if absent else [(header, text)]
            case never:
                assert_never(never)
    return key, headers, members


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        # A RecursionError means that the JSON is nested too deeply for an ID, so the input can only be a string.
        return False
    return True


def _nested(members: list[tuple[Path, str]]) -> str:
    """Return a JSON value that has each given literal at its path."""
    at_once: dict[str | int, list[tuple[Path, str]]] = {}
    for path, literal in members:
        if not path:
            return literal
        at_once.setdefault(path[0], []).append((path[1:], literal))
    inside = {step: _nested(rest) for step, rest in at_once.items()}
    indices = [step for step in inside if isinstance(step, int)]
    if indices:
        return "[" + ", ".join(inside.get(index, "null") for index in range(max(indices) + 1)) + "]"
    return "{" + ", ".join(f"{json.dumps(step)}: {value}" for step, value in inside.items()) + "}"
