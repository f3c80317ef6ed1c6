"""A producer that sends events at a steady rate, each stamped with the moment at which it is handed to the producer.

In a process of its own, so that it takes no time from the reader:
`python -m bench.pace BROKER TOPIC RATE SECONDS PARTITIONS SEED`.
Prints one line of JSON: how many events it sent, how long that took, how late it ever was.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import Final

from confluent_kafka import Producer

from bench.workload import Event, Workload, finish, producer, send

_TICK_S: Final = 0.002
_LINGER_MS: Final = 5


@dataclass(frozen=True, slots=True)
class Paced:
    """What was sent. `late_s` is the greatest lag behind the wanted rate."""

    events: int
    seconds: float
    late_s: float


def paced_workload(rate: int, seconds: int, partitions: int, seed: int) -> Workload:
    """Return what is sent; its times are set at sending."""
    return Workload(rate * seconds, partitions, seed)


def send_paced(sender: Producer, topic: str, workload: Workload, rate: int) -> Paced:
    """Send the workload at `rate` events a second; returns when the broker has taken all of it."""
    # Prepared whole, but for the time: little is left to do for an event at its moment.
    parts = [(one.event_id, *_cut(one.value, one.time_ms)) for one in workload.generate()]
    began = time.monotonic()
    sent, late_s = 0, 0.0
    while sent < len(parts):
        now = time.monotonic()
        due = min(int((now - began) * rate), len(parts))
        late_s = max(late_s, (due - sent) / rate - _TICK_S)
        for event_id, before, after in parts[sent:due]:
            time_ms = time.time_ns() // 1_000_000
            send(sender, topic, Event(event_id, b"%b%d%b" % (before, time_ms, after), time_ms))
        sent = due
        sender.poll(0)
        time.sleep(max(0.0, now + _TICK_S - time.monotonic()))
    finish(sender)
    return Paced(sent, time.monotonic() - began, late_s)


def _cut(value: bytes, time_ms: int) -> tuple[bytes, bytes]:
    before, mark, after = value.partition(b'"ts":%d' % time_ms)
    return before + mark[: len(b'"ts":')], after


def main() -> None:
    """Send, and print what was sent."""
    bootstrap, topic, rate, seconds, partitions, seed = sys.argv[1:]
    workload = paced_workload(int(rate), int(seconds), int(partitions), int(seed))
    done = send_paced(producer(bootstrap, linger_ms=_LINGER_MS), topic, workload, int(rate))
    print(json.dumps(asdict(done)))


if __name__ == "__main__":
    main()
