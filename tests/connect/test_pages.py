"""A reader who pastes docs/edges-*.md into an empty directory, block by block, sees what the pages show."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.brokers import RunningKafka, read_all

pytestmark = pytest.mark.broker
DOCS = Path(__file__).parents[2] / "docs"
FENCE = re.compile(r"^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BROKER = "# terminal 2\ndedup broker\n"
"""The test run's own broker stands for it."""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def follow(page: str, directory: Path, kafka: RunningKafka) -> None:
    """Save and paste a page's blocks in their order, and compare what the commands print; only addresses are changed."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DEDUP_")}
    environ |= {"PATH": path, "DEDUP_WEB__PORT": str(free_port())}
    blocks = FENCE.findall((DOCS / page).read_text(encoding="utf-8"))
    assert [text for kind, text in blocks if text.startswith("# terminal 2")] == [BROKER]
    printed = None
    for kind, shown in blocks:
        text = shown.replace("localhost:9092", kafka.bootstrap)
        head = text.partition("\n")[0].removeprefix("# ")
        if kind == "text":
            assert printed == text
        elif kind != "sh":
            (directory / head).write_text(text, encoding="utf-8")
        elif shown != BROKER:
            assert head == "terminal 1"
            done = subprocess.run(
                ["bash", "-ec", text], cwd=directory, env=environ, capture_output=True, text=True, check=False,
                timeout=120,
            )  # fmt: skip
            assert done.returncode == 0, (text, done.stdout, done.stderr)
            printed = done.stdout


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    return tmp_path


def test_retries(empty, kafka):
    follow("edges-retries.md", empty, kafka)
    found = read_all(kafka.bootstrap, "checkout.orders")
    assert sorted(message.key() for message in found) == [b"order-0", b"order-1", b"order-2"]


def test_restarts(empty, kafka):
    follow("edges-restarts.md", empty, kafka)
    found = read_all(kafka.bootstrap, "meter.readings")
    assert [message.value() for message in found] == [f"reading {number}".encode() for number in range(10)]


def test_counting_once(empty, kafka):
    follow("edges-counting-once.md", empty, kafka)
    assert len(read_all(kafka.bootstrap, "payments")) == 5


def test_history(empty, kafka):
    follow("edges-history.md", empty, kafka)
    assert len(read_all(kafka.bootstrap, "visits")) == 100


def test_the_demo_s_files_are_those_to_copy():
    for name in ("chain-ingest.yaml", "chain.yaml"):
        ours = Path(__file__).parents[2] / "dedup" / "connect" / name
        assert ours.read_text(encoding="utf-8") == (DOCS.parent / "topologies" / name).read_text(encoding="utf-8")
