"""Defines `TopologyTestDriver`, which tests a topology file without a broker, like its namesake in Kafka Streams
(KIP-247).

The driver runs the same tasks, task groups, and transactions as a worker, but with an in-memory cluster and stores.
Only the code that passes records to the tasks differs from a worker's: each call of `feed` returns after the fed
records are judged and committed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Self

from dedup.core.event_time import rfc3339_ms
from dedup.core.flow import FlowValue, decoded, encoded
from dedup.core.framing import SchemaBook, ref_named
from dedup.core.partitioner import partitions as partitions_of
from dedup.kafka.memory_wire import MemoryWire
from dedup.kafka.record_batch import OWN_ROW, FeedBatch, Header
from dedup.kafka.topic_admin import Topic
from dedup.kafka.wire import TopicPartition
from dedup.quantities import parse_duration
from dedup.settings import Settings
from dedup.topology.model import LateTo, Topology
from dedup.worker.task import SteadyClock
from dedup.worker.task_factory import TaskFactory
from dedup.worker.task_group import TaskGroup
from dedup.worker.topics import Cluster, missing_topics, refuse_misfits

Text = bytes | str
Time = int | str | datetime
_BROKER: Final = "test-driver.invalid:9092"
_LIMIT: Final = {"max.message.bytes": "1048588"}
"""Kafka's default for `max.message.bytes`."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_CLOSED: Final = "the driver is closed"


@dataclass(frozen=True, slots=True)
class OutputRecord:
    """A record that a topology has written to one of its topics."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...]
    """The record's own headers, followed by the headers that dedup has added."""

    @property
    def json(self) -> Any:  # noqa: ANN401  # the result is any JSON value
        """The record's value, decoded as JSON, without the framing of `source.format: json_schema`."""
        return decoded(self.value)

    def header(self, name: str) -> bytes | None:
        """Return the value of the last header with this name, or None if no header has the name."""
        return next((value for own, value in reversed(self.headers) if own == name), None)


class DriverClock(SteadyClock):
    """A clock that moves only when the driver advances it."""

    def __init__(self, time_ms: int) -> None:
        super().__init__()
        self._time_ms = time_ms

    def now_ms(self) -> int:
        """Return the driver's time in ms since 1970."""
        return self._time_ms

    def advance(self, by_ms: int) -> None:
        """Advance the clock by a number of milliseconds."""
        self._time_ms += by_ms


class TopologyTestDriver:
    """Runs a topology without a broker, to test a topology file. Use the driver as a context manager.

    The worker's own code judges and commits every record before `feed` returns. Only the event times of records advance
    stream time, and only `advance_clock` advances the clock, so results do not depend on how fast a test runs. Times
    are milliseconds since 1970, RFC 3339 strings, or datetimes with a time zone.
    """

    _closed = False

    def __init__(
        self,
        topology: Topology,
        *,
        partitions: int | Mapping[str, int] = 1,
        now: Time | None = None,
        schemas: Mapping[int | str, str] | None = None,
    ) -> None:
        """Start the tasks of the topology with empty state.

        ``partitions`` is the partition count of every source topic, or a mapping from source topics to counts. ``now``
        is the time at which the driver's clock starts; the default is the machine's time. ``schemas`` replaces the
        schema registry: it maps each schema's ID, or its GUID as a string, to the schema's text.
        """
        if topology.source.needs_registry:
            if schemas is None:
                raise ValueError(
                    f"{topology.name}: values or keys name their schemas; pass them, such as `schemas={{1: text}}`"
                )
            for name, text in schemas.items():
                if not isinstance(text, str):
                    raise TypeError(f"schemas: the schema {name!r} is a {type(text).__name__}; pass its text")
            known = {ref_named(str(name)): text for name, text in schemas.items()}
            topology = topology.knowing(SchemaBook(known.get))
        elif schemas is not None:
            raise ValueError(f"{topology.name}: neither values nor keys name their schemas; leave out `schemas`")
        counts = dict.fromkeys(topology.source.topics, partitions) if isinstance(partitions, int) else dict(partitions)
        if counts.keys() != set(topology.source.topics) or min(counts.values()) < 1:
            topics = ", ".join(topology.source.topics)
            raise ValueError(f"partitions: name a count of at least 1 for each source topic: {topics}")
        self.topology: Final = topology
        """The topology under test."""
        self._clock: Final = DriverClock(SteadyClock().now_ms() if now is None else _ms(now, "now"))
        self._wire: Final = MemoryWire(self._clock.now_ms)
        self._counts: Final = counts
        self._factory: Final = _factory(topology, counts, self._clock, self._wire)
        self._groups: Final[dict[TopicPartition, TaskGroup]] = {}
        """Maps each feeding partition to the task group that reads it."""
        self._read_to: Final[dict[str, int]] = {}
        self._stopped_by: Exception | None = None
        # A test may itself run in an event loop, so the tasks run in the event loop of another thread.
        self._thread: Final = ThreadPoolExecutor(1, thread_name_prefix="topology-test-driver")
        self._runner: Final = asyncio.Runner()
        self._run(self._start)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the tasks. Closing a driver twice is safe; any other call on a closed driver raises ValueError."""
        if not self._closed:
            self._thread.submit(self._runner.run, self._close_groups()).result()
            self._thread.submit(self._runner.close).result()
            self._thread.shutdown()
            self._closed = True

    def feed(
        self,
        *values: FlowValue,
        key: Text | None = None,
        headers: Mapping[str, Text | None] | Iterable[tuple[str, Text | None]] = (),
        timestamp: Time | None = None,
        topic: str | None = None,
        partition: int | None = None,
    ) -> None:
        """Write records to a source topic, judge them as one batch, and commit the results.

        A value is bytes, a string, None for a tombstone, or an object or array that is encoded as JSON. All ``values``
        get the same ``key``, ``headers``, and ``timestamp``; the default timestamp is the clock's time. ``topic`` may
        be omitted if there is only one source topic. Without ``partition``, Kafka's default partitioner chooses the
        partition by the key; a record without a key goes to partition 0.

        With `event_time: arrival`, the append time is the clock's time, so passing a ``timestamp`` raises ValueError.

        Raises the error that would stop a worker, such as `RecordFailed` if a policy is `fail`. After an error, the
        batch is not committed, and every later call raises the same error.
        """
        if timestamp is not None and self.topology.by_arrival:
            raise ValueError("with `event_time: arrival`, the time of a record is the clock's; use `advance_clock`")
        data = None if key is None else _bytes(key, "key")
        place = self._source(topic, partition, data)
        time_ms = self._clock.now_ms() if timestamp is None else _ms(timestamp, "timestamp")
        pairs = headers.items() if isinstance(headers, Mapping) else headers
        own: list[Header] = [
            (name, None if value is None else _bytes(value, f"headers: {name}")) for name, value in pairs
        ]
        self._refuse_if_over()
        self._wire.append(place, [(OWN_ROW, time_ms, data, encoded(value), own) for value in values])
        self._run(self._judge, place)

    def idle(self, partition: int = 0, *, topic: str | None = None) -> None:
        """Mark a source partition as idle, as a worker does after `idle_after` without records.

        Until it gets another record, an idle partition does not hold stream time back. Raises ValueError for a topology
        that reads its source directly, because each partition then has its own stream time.
        """
        if self.topology.direct:
            raise ValueError(f"{self.topology.name} has no repartition topic, so no partition holds another one back")
        self._run(self._mark_idle, self._source(topic, partition, None))

    def advance_clock(self, by: timedelta | str) -> None:
        """Advance the clock by a duration such as ``"25h"``. Stream time does not advance, and no partition becomes
        idle.

        The clock provides the default timestamp of records and, with `max_clock_skew`, the limit for event times.
        Raises ValueError for a negative duration.
        """
        if not isinstance(by, str | timedelta):
            raise TypeError(f'{by!r} is no duration; write for example "25h" or timedelta(hours=25)')
        by_ms = parse_duration(by) if isinstance(by, str) else by // timedelta(milliseconds=1)
        if by_ms < 0:
            raise ValueError("the clock never goes back; name a positive duration")
        self._refuse_if_over()
        self._clock.advance(by_ms)

    @property
    def now_ms(self) -> int:
        """The clock's time in ms since 1970."""
        return self._clock.now_ms()

    @property
    def verdicts(self) -> Counter[str]:
        """The number of records with each verdict so far. Conflicts count as duplicates."""
        tasks = [task for group in self._groups.values() for task in group.tasks.values()]
        found = sum((task.numbers.verdicts for task in tasks), Counter[str]())
        del found["repartitioned"]
        return found

    def read(self, topic: str) -> list[OutputRecord]:
        """Return the records that a topic has received since the last call, in the order in which they were written.

        Raises ValueError if the topology does not write to the topic.
        """
        if topic not in self.topology.written_topics:
            known = ", ".join(self.topology.written_topics)
            raise ValueError(f"{self.topology.name} does not write to {topic!r}, but to {known}")
        if self._closed:
            raise ValueError(_CLOSED)
        found, self._read_to[topic] = self._wire.read_in_order(topic, self._read_to.get(topic, 0))
        return [
            OutputRecord(topic, place.partition, offset, time_ms, key, value, tuple(headers))
            for place, rows in found
            for offset, time_ms, key, value, headers in zip(
                rows.offsets, rows.timestamps_ms, rows.keys, rows.values, rows.headers, strict=True
            )
        ]

    def read_output(self) -> list[OutputRecord]:
        """Return the records in the output; see `read`. Raises ValueError if the topology has no output."""
        output = self.topology.output
        return self._read_role("output", None if output is None else output.topic)

    def read_late(self) -> list[OutputRecord]:
        """Return the late records; see `read`. Raises ValueError if the topology has no topic for late records."""
        late = self.topology.late
        return self._read_role("late", late.topic if isinstance(late, LateTo) else None)

    def read_duplicates(self) -> list[OutputRecord]:
        """Return the duplicates; see `read`. Raises ValueError if the topology has no topic for duplicates."""
        return self._read_role("duplicates", self.topology.duplicates)

    def read_conflicts(self) -> list[OutputRecord]:
        """Return the conflicts; see `read`. Raises ValueError if the topology has no topic for conflicts."""
        return self._read_role("conflicts", self.topology.conflicts_go_to)

    def read_dead_letters(self) -> list[OutputRecord]:
        """Return the dead letters; see `read`. The header `dedup-reason` of each dead letter contains the reason."""
        return self.read(self.topology.dead_letter)

    def _read_role(self, role: str, topic: str | None) -> list[OutputRecord]:
        if topic is None:
            raise ValueError(f"{self.topology.name} names no topic for {role!r}")
        return self.read(topic)

    def _source(self, topic: str | None, partition: int | None, key: bytes | None) -> TopicPartition:
        if topic is None and len(self._counts) == 1:
            (topic,) = self._counts
        if topic is None or topic not in self._counts:
            raise ValueError(f"name one of the source topics: {', '.join(self._counts)}")
        count = self._counts[topic]
        if partition is None:
            partition = 0 if key is None else partitions_of([key], count)[0]
        if not 0 <= partition < count:
            raise ValueError(f"{topic} has the partitions 0 to {count - 1}; pass `partitions` to the driver for more")
        return TopicPartition(topic, partition)

    def _refuse_if_over(self) -> None:
        if self._closed:
            raise ValueError(_CLOSED)
        if self._stopped_by is not None:
            raise self._stopped_by

    def _run(self, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:  # noqa: ANN401  # the arguments of `work`
        self._refuse_if_over()
        try:
            self._thread.submit(self._runner.run, work(*arguments)).result()
        except Exception as error:
            self._stopped_by = error
            raise

    async def _start(self) -> None:
        for places in self._hops:
            for members in self._factory.grouped(places):
                group = self._factory.build(members)
                self._groups.update(dict.fromkeys(members, group))
                await group.open()
                for task in group.tasks.values():
                    await task.start()
                await group.commit()  # commits the starting position, unless it is the earliest offset

    async def _close_groups(self) -> None:
        for group in self._groups.values():
            await group.close(drain=False)

    @property
    def _hops(self) -> list[list[TopicPartition]]:
        """The feeding partitions of each sub-topology, in the order in which records pass through them."""
        cluster, sources = self._factory.cluster, self.topology.source.topics
        return [cluster.places(topics) for topics in dict.fromkeys((sources, self.topology.feeding_topics))]

    async def _judge(self, fed: TopicPartition) -> None:
        """Judge a source partition's new records, after passing them through the repartition topic if there is one."""
        for place in (fed, *(place for hop in self._hops[1:] for place in hop)):
            group = self._groups[place]
            task = group.tasks[place]
            columns = self._wire.read(place, task.next_offset)
            if columns.offsets:
                await task.process(FeedBatch.of(place, columns, follows=task.next_offset))
                await group.commit()

    async def _mark_idle(self, place: TopicPartition) -> None:
        group = self._groups[place]
        if group.tasks[place].say_idle():
            await group.commit()
        await self._judge(place)


def _factory(topology: Topology, counts: Mapping[str, int], clock: SteadyClock, wire: MemoryWire) -> TaskFactory:
    """Create the topics as a worker does, and return a task factory that keeps state in memory."""
    settings = Settings(brokers=(_BROKER,), session_timeout="30m")  # leaves time to debug a flow
    configs = _LIMIT | ({"message.timestamp.type": "LogAppendTime"} if topology.by_arrival else {})
    sources = {name: Topic(name, f"{at:032x}", counts[name], configs) for at, name in enumerate(topology.source.topics)}
    wanted = enumerate(missing_topics(topology, settings, sources), len(sources))
    topics = sources | {
        each.name: Topic(each.name, f"{at:032x}", each.partitions, {**_LIMIT, **each.configs}) for at, each in wanted
    }
    refuse_misfits(topology, topics)
    for topic in topics.values():
        wire.create(topic)
    # The number of partitions that share a transaction does not affect the records in the transaction.
    return TaskFactory(topology.grouped_by(1), settings, Cluster(topics), wire, clock, None)


def _bytes(text: Text, name: str) -> bytes:
    if not isinstance(text, bytes | str):
        raise TypeError(f"{name}: {text!r} is neither bytes nor a string")
    return text if isinstance(text, bytes) else text.encode()


def _ms(time: Time, name: str) -> int:
    if not isinstance(time, int | str | datetime):
        raise TypeError(f"{name}: {time!r} is no time; write milliseconds as an int, an RFC 3339 string, or a datetime")
    if isinstance(time, int):
        return time
    if isinstance(time, datetime):
        if time.tzinfo is None:
            raise ValueError(f"{time!r} has no time zone; write for example datetime(2024, 1, 1, tzinfo=UTC)")
        return (time - _EPOCH) // timedelta(milliseconds=1)
    found = rfc3339_ms(time)
    if found is None:
        raise ValueError(f'"{time}" is not a time; write for example "2024-01-01T00:00:00Z"')
    return found
