"""The sender of `dedup chaos`: every made-up record arrives, also where its client stands still."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from dedup.chaos import load as sending
from dedup.chaos.load import MadeRecords, Sender
from dedup.settings import Settings
from dedup.topology.parse import parse
from tests.brokers import Admin, RunningKafka, read_all, unique
from tests.integration.fleet import until

pytestmark = pytest.mark.broker


def test_another_producer_goes_on_with_what_was_not_confirmed(
    kafka: RunningKafka, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kafka.embedded is None:
        pytest.skip("the broker in a container can not be frozen")
    topic = admin.create_topic(unique("made"), 2, {"retention.ms": "-1"})
    text = Path("topologies/simplest.yaml").read_text(encoding="utf-8").replace("[events]", f"[{topic}]")
    records = MadeRecords(parse(text, name="simplest.yaml"), {topic: 2}, run="test", seed=5)
    next_record, made = records.at, []
    monkeypatch.setattr(records, "at", lambda now_ms: made.append((each := next_record(now_ms)).value) or each)
    producers = []
    real = sending.Producer
    monkeypatch.setattr(sending, "_STANDS_STILL_S", 0.5)
    monkeypatch.setattr(sending, "Producer", lambda config: producers.append(real(config)) or producers[-1])
    with Sender(records, Settings(brokers=(kafka.bootstrap,)), per_s=200) as sender:
        until(lambda: sender.sent > 100, lambda: f"{sender.sent} sent")
        kafka.embedded.process.pause()
        try:
            until(lambda: len(producers) > 1, lambda: "no other producer")
        finally:
            kafka.embedded.process.resume()
        sent = sender.stop()
    found = Counter(message.value() for message in read_all(kafka.bootstrap, topic))
    assert len(made) == sent > 100
    assert not Counter(made) - found
