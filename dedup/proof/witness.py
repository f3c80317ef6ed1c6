"""A committed reader of the output that looks on all the while: the one who must never see an ID twice."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

from dedup.core.extract import compile_extractor
from dedup.proof.evidence import VERDICT_HEADER, header
from dedup.proof.kafka_reader import Columns, client_config

if TYPE_CHECKING:
    from dedup.settings import Settings
    from dedup.topology.model import Topology

_AT_ONCE: Final = 5_000
_POLL_S: Final = 0.2
_ENDS_WITHIN_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Sightings:
    """What the witness saw so far."""

    records: int
    duplicated: int
    """IDs seen a second time within the guard period, forwarded by no exception."""
    samples: tuple[str, ...]


class Witness:
    """Reads the output topic from its present end, in a thread. Use with `with`; call `finish` before the end."""

    def __init__(self, topology: Topology, settings: Settings, ends: dict[int, int]) -> None:
        if topology.output is None:
            raise ValueError(f"{topology.name} forwards nothing: it has no output topic")
        self._topic: Final = topology.output.topic
        self._guard_ms: Final = topology.window.guard_ms
        self._extract: Final = compile_extractor(
            topology.tracking_id, topology.event_time, fmt=topology.source.format, fingerprint=False
        )
        # With forwarded conflicts an ID may come again with another payload.
        self._by_payload: Final = topology.fingerprints_wanted
        self._next: Final = dict(ends)
        self._seen: Final[dict[bytes, int]] = {}
        self._records = self._duplicated = 0
        self._samples: Final[list[str]] = []
        self._targets: dict[int, int] | None = None
        self._ended: Final = threading.Event()
        self._failure: BaseException | None = None
        self._consumer: Final = Consumer(
            {
                **client_config(settings),
                "group.id": f"{topology.name}-witness",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                "fetch.wait.max.ms": 100,
                "log_level": 0,
            }
        )
        self._thread: Final = threading.Thread(target=self._read, name="witness", daemon=True)

    def __enter__(self) -> Self:
        self._consumer.assign([TopicPartition(self._topic, *each) for each in self._next.items()])
        self._thread.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(_ENDS_WITHIN_S)

    @property
    def sightings(self) -> Sightings:
        """What was seen; read it from any thread. Raises what ended the reading, if something did."""
        if self._failure is not None:
            raise self._failure
        return Sightings(self._records, self._duplicated, tuple(self._samples))

    def finish(self, ends: dict[int, int]) -> bool:
        """Read up to these ends; False when it could not within a minute: a transaction stays open."""
        self._targets = ends
        self._thread.join(_ENDS_WITHIN_S)
        return not self._thread.is_alive()

    def _read(self) -> None:
        try:
            while not self._ended.is_set() and not self._there():
                messages, ends = [], []
                for message in self._consumer.consume(_AT_ONCE, _POLL_S):
                    error = message.error()
                    if error is None:
                        messages.append(message)
                    elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001  # the client's name for it
                        ends.append(message)
                if messages:
                    self._note(messages)
                # After the records: an end is behind them, and behind the markers that follow them.
                for message in ends:
                    self._note_position(message)
        except BaseException as failure:  # noqa: BLE001  # handed over to who asks
            self._failure = failure
        finally:
            self._consumer.close()

    def _there(self) -> bool:
        targets = self._targets
        return targets is not None and all(self._next.get(at, 0) >= end for at, end in targets.items())

    def _note_position(self, message: Message) -> None:
        partition, offset = message.partition(), message.offset()
        if partition is not None and offset is not None:
            self._next[partition] = offset

    def _note(self, messages: list[Message]) -> None:
        columns = Columns.of(messages)
        extracted = self._extract(columns.keys, columns.values, columns.headers, columns.timestamps_ms)
        for row, (own, time_ms) in enumerate(zip(extracted.ids, extracted.times_ms, strict=True)):
            partition = messages[row].partition() or 0
            self._next[partition] = columns.offsets[row] + 1
            if own is None or header(columns.headers[row], VERDICT_HEADER) is not None:
                continue
            name = own + (columns.values[row] or b"") if self._by_payload else own
            before_ms = self._seen.get(name)
            if before_ms is not None and abs(time_ms - before_ms) < self._guard_ms:
                self._duplicated += 1
                if len(self._samples) < 20:  # noqa: PLR2004  # enough to look at
                    self._samples.append(f"{self._topic}/{partition} offset {columns.offsets[row]}")
            self._seen[name] = time_ms
        self._records += len(messages)
