"""Sends made-up records at a steady rate, in a thread, until told to stop; each is in its topic once or more."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from confluent_kafka import KafkaError, Message, Producer

from dedup.errors import BrokerUnavailable
from dedup.proof.kafka_reader import client_config

if TYPE_CHECKING:
    from dedup.proof.made import Made, MadeRecords
    from dedup.settings import Settings

_TICK_S: Final = 0.02
_ENDS_WITHIN_S: Final = 120.0


class Sender:
    """Use with `with`; `stop` returns when everything has arrived."""

    def __init__(self, records: MadeRecords, settings: Settings, *, per_s: int) -> None:
        self._records: Final = records
        self._per_s: Final = per_s
        self._ended: Final = threading.Event()
        self._failure: BaseException | None = None
        self._refused: Final[Counter[str]] = Counter()
        self.sent = 0
        self._producer: Final = Producer(
            {
                **client_config(settings),
                "enable.idempotence": True,
                "linger.ms": 5,
                "compression.type": "lz4",
                "delivery.timeout.ms": 120_000,
                "delivery.report.only.error": True,
                "on_delivery": self._note_refusal,
            }
        )
        self._thread: Final = threading.Thread(target=self._run, name="sender", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(_ENDS_WITHIN_S)

    def stop(self) -> int:
        """Everything handed over has arrived; returns how many records. Raises BrokerUnavailable otherwise."""
        self._ended.set()
        self._thread.join(_ENDS_WITHIN_S)
        if self._failure is not None:
            raise self._failure
        unsent = self._producer.flush(_ENDS_WITHIN_S)
        if unsent or self._refused:
            raise BrokerUnavailable(
                f"{unsent} of {self.sent} made-up records were not sent, and {sum(self._refused.values())} refused "
                f"({', '.join(self._refused) or 'no answer'}). Look at the broker, and run this again."
            )
        return self.sent

    def _note_refusal(self, error: KafkaError | None, _message: Message) -> None:
        if error is not None:
            self._refused[error.name()] += 1

    def _run(self) -> None:
        try:
            began_s = time.monotonic()
            while not self._ended.is_set():
                due = int((time.monotonic() - began_s) * self._per_s)
                while self.sent < due and not self._ended.is_set():
                    self._send(self._records.at(time.time_ns() // 1_000_000))
                self._producer.poll(0)
                self._ended.wait(_TICK_S)
        except BaseException as failure:  # noqa: BLE001  # handed over to who stops it
            self._failure = failure

    def _send(self, made: Made) -> None:
        while not self._ended.is_set():
            # A full queue: the broker is away; it comes back, or the deadline of a record tells.
            with contextlib.suppress(BufferError):
                self._producer.produce(
                    made.topic,
                    made.value,
                    made.key,
                    made.partition,
                    headers=list(made.headers),
                    timestamp=made.time_ms,
                )
                self.sent += 1
                return
            self._producer.poll(_TICK_S)
