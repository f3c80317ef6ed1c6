"""The progress line of a running worker, and SIGTERM before it runs."""

import io
import signal
import socket
import subprocess
import sys

from rich.console import Console, Group

from dedup.cli.run import restore_bar
from dedup.metrics import TaskNumbers


def drawn(numbers):
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(Group(*restore_bar(numbers)))
    return console.export_text()


def test_no_bar_without_a_restore():
    assert restore_bar([TaskNumbers(), TaskNumbers(restore_total=10)]) == []


def test_a_bar_over_the_restores_under_way():
    numbers = [TaskNumbers(restore_total=1000, restore_remaining=250), TaskNumbers(restore_total=50)]
    text = drawn(numbers)
    assert "restoring 1 tasks, 250 of 1,000 changelog offsets to go" in text
    assert text.count("━") > 50


def test_sigterm_ends_a_worker_that_still_waits_for_its_broker_also_as_pid_1():
    with socket.create_server(("127.0.0.1", 0)) as mute:
        broker = f"brokers=127.0.0.1:{mute.getsockname()[1]}"
        worker = subprocess.Popen(
            [sys.executable, "-m", "dedup.cli.main", "run", "topologies/simplest.yaml", "--set", broker],
            # As the kernel treats PID 1: without a handler of its own, the signal is ignored.
            preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),  # noqa: PLW1509
        )
        try:
            connection, _ = mute.accept()
            with connection:
                worker.send_signal(signal.SIGTERM)
                assert worker.wait(timeout=30) == 128 + signal.SIGTERM
        finally:
            worker.kill()
