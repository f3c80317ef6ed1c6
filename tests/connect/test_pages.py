"""The code of docs/edges-*.md runs, and prints what the pages say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from confluent_kafka import Producer

from tests.brokers import read_all

pytestmark = pytest.mark.broker
DOCS = Path(__file__).parents[2] / "docs"
FENCE = re.compile(r"^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run(page: str, stage) -> None:
    """Run a page's code beside its files, and compare what it prints."""
    (stage.directory / "config.yaml").write_text(
        json.dumps({"brokers": [stage.kafka.bootstrap], "web": {"enabled": False}})
    )
    blocks = FENCE.findall((DOCS / page).read_text(encoding="utf-8"))
    for text in (text for kind, text in blocks if kind == "yaml"):
        name = re.search(r"^name: (\S+)", text, re.MULTILINE)
        assert name is not None
        (stage.directory / f"{name[1]}.yaml").write_text(text, encoding="utf-8")
    (code,) = [text for kind, text in blocks if kind == "python"]
    (shown,) = [text for kind, text in blocks if kind == "text"]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=stage.directory, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == shown


def test_retries(stage, admin):
    admin.create_topic("checkout.orders", 2)
    run("edges-retries.md", stage)
    found = read_all(stage.kafka.bootstrap, "checkout.orders")
    assert sorted(message.key() for message in found) == [b"order-0", b"order-1", b"order-2"]


def test_restarts(stage, admin):
    admin.create_topic("meter.readings", 2)
    run("edges-restarts.md", stage)
    found = read_all(stage.kafka.bootstrap, "meter.readings")
    assert [message.value() for message in found] == [f"reading {number}".encode() for number in range(10)]


def test_counting_once(stage, admin):
    admin.create_topic("payments", 2)
    run("edges-counting-once.md", stage)


def test_history(stage, admin):
    admin.create_topic("visits", 2, {"retention.ms": "-1"})
    producer = Producer({"bootstrap.servers": stage.kafka.bootstrap})
    for number in range(100):
        visit = {"id": f"v-{number % 40}", "page": "/", "at": f"2019-01-{number % 40 % 28 + 1:02}T00:00:00Z"}
        producer.produce("visits", json.dumps(visit), visit["id"], partition=number % 40 % 2)
    assert producer.flush(30) == 0
    run("edges-history.md", stage)


def test_the_demo_s_files_are_those_to_copy():
    for name in ("chain-ingest.yaml", "chain.yaml"):
        ours = Path(__file__).parents[2] / "dedup" / "connect" / name
        assert ours.read_text(encoding="utf-8") == (DOCS.parent / "topologies" / name).read_text(encoding="utf-8")
