"""The progress line of a running worker, and SIGTERM before it runs."""

import io
import logging
import os
import platform
import resource
import signal
import socket
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console, Group
from rich.text import Text

from dedup.cli.run import RunProgress, VerdictProgress, restore_bar, run
from dedup.kafka.outage_lines import quiet_logging
from dedup.metrics import TaskNumbers
from tests.terminal import screen

FREES_40_MIB = """
import ctypes
from dedup.cli.run import keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)


class Mallinfo2(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]


libc.mallinfo2.restype = Mallinfo2
kept = keep_freed_memory()
libc.free(libc.malloc(40 << 20))
print(kept, libc.mallinfo2().fordblks >= 40 << 20)
"""


def drawn(numbers):
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(Group(*restore_bar(numbers)))
    return console.export_text()


def test_no_bar_without_a_restore():
    assert restore_bar([TaskNumbers(), TaskNumbers(restore_total=10)]) == []


def test_a_bar_over_the_restores_under_way():
    numbers = [TaskNumbers(restore_total=1000, restore_remaining=250), TaskNumbers(restore_total=50)]
    text = drawn(numbers)
    assert "restoring 1 task, 250 of 1,000 changelog offsets to go" in text
    assert text.count("━") > 50


def test_the_line_below_a_bar_begins_on_its_own():
    numbers = [TaskNumbers(restore_total=1000, restore_remaining=250)]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(Group(*restore_bar(numbers), Text("24 tasks")))
    assert console.export_text().splitlines()[-1] == "24 tasks"


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


def test_a_worker_may_open_as_many_files_as_the_hard_limit_allows(tmp_path):
    """Was: as few as a shell or a container allows at first, so that a worker with many stores ended."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        broker, state = f"brokers=127.0.0.1:{mute.getsockname()[1]}", f"state_dir={tmp_path}"
        command = ["run", "topologies/simplest.yaml", "--set", broker, "--set", state]
        worker = subprocess.Popen(
            [sys.executable, "-m", "dedup.cli.main", *command],
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, most)),  # noqa: PLW1509
        )
        try:
            connection, _ = mute.accept()
            with connection:
                assert resource.prlimit(worker.pid, resource.RLIMIT_NOFILE) == (most, most)
        finally:
            worker.kill()
            worker.wait()


def test_progress_counts_tasks_that_close_and_that_have_moved_away(monkeypatch, capsys):
    now_s = [0.0]
    monkeypatch.setattr("dedup.cli.run.time.monotonic", lambda: now_s[0])
    progress, shown = RunProgress(enabled=True), []
    progress._enabled = True  # as on a terminal
    monkeypatch.setattr(
        progress, "show", lambda doing, per_s, *_: shown.append((doing, per_s, dict(progress.verdicts)))
    )
    one, two = (SimpleNamespace(numbers=TaskNumbers(verdicts=Counter(unique=10 * count))) for count in (1, 2))
    tasks = SimpleNamespace(running={0: one, 1: two}, ended={})
    for running in ({0: one, 1: two}, {1: two}):
        now_s[0] += 1
        tasks.running = running
        progress.tick(SimpleNamespace(tasks=tasks))
        two.numbers.verdicts["duplicate"] += 5
        progress.tick(SimpleNamespace(tasks=tasks))  # too early
    assert shown == [("2 tasks", 30, {"unique": 30}), ("1 task", 5, {"unique": 30, "duplicate": 5})]
    tasks.running, tasks.ended = {}, {("dedup", "t", 0): one.numbers, ("dedup", "t", 1): two.numbers}
    progress.closing_line()
    assert "judged 40: duplicate 10  unique 30" in capsys.readouterr().err


def test_the_closing_line_is_complete_off_a_terminal(capsys):
    numbers = TaskNumbers(verdicts=Counter(unique=3))
    with RunProgress(enabled=False) as progress:
        progress.tick(SimpleNamespace(tasks=SimpleNamespace(running={}, ended={("dedup", "t", 0): numbers})))
    progress.closing_line()
    assert "judged 3: unique 3" in capsys.readouterr().err


def test_run_quiet_writes_only_the_log(monkeypatch, caplog, capsys):
    """Was: the closing line was plain text, also amid a log in JSON."""

    def judge(*_, on_tick, **__):
        numbers = TaskNumbers(verdicts=Counter(unique=3, duplicate=2))
        on_tick(SimpleNamespace(tasks=SimpleNamespace(running={}, ended={("dedup", "t", 0): numbers})))

    monkeypatch.setattr("dedup.run", judge)
    monkeypatch.setattr("dedup.cli.run.keep_freed_memory", lambda: None)
    monkeypatch.setattr("dedup.worker.logs.set_up_logging", lambda _: None)
    monkeypatch.setattr(logging.getLogger(), "handlers", [caplog.handler])
    caplog.set_level(logging.INFO)
    run(Path("topologies/simplest.yaml"), overrides=["brokers=127.0.0.1:1"], quiet=True)
    assert capsys.readouterr().err == ""
    assert [each.getMessage() for each in caplog.records] == ["judged 5: duplicate 2  unique 3"]


def test_a_log_line_is_above_the_progress_line_and_is_not_wrapped(monkeypatch, capsys):
    """Was: its first words were on the line with the progress."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    for name, value in (("COLUMNS", "80"), ("FORCE_COLOR", "1"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
    quiet_logging()
    long = "a warning that is longer than the eighty columns of the terminal, and of which no word may be moved: [x/1]"
    with VerdictProgress(enabled=True) as progress:
        progress.verdicts["unique"] = 3
        progress.show("2 tasks", 5.0)
        logging.getLogger("dedup").warning("%s", long)
        written = capsys.readouterr().err
        progress.show("2 tasks", 6.0)
    assert screen(written).partition(" ")[2] == f"WARNING {long}\n2 tasks  3 judged  5/s  unique 3\n"
    assert screen(written + capsys.readouterr().err).partition(" ")[2] == f"WARNING {long}\n"


def test_no_thread_writes_a_log_line_while_the_progress_line_is_written(monkeypatch):
    """Was: the first line of the log was sometimes on the line with the progress."""
    (handler,) = handlers = [logging.StreamHandler()]
    monkeypatch.setattr(logging.getLogger(), "handlers", handlers)
    monkeypatch.setenv("FORCE_COLOR", "1")
    free = []

    def asked(*_: object, **__: object) -> None:
        with ThreadPoolExecutor(1) as other:
            free.append(other.submit(handler.lock.acquire, blocking=False).result())

    with VerdictProgress(enabled=True) as progress:
        for name in ("update", "stop"):
            monkeypatch.setattr(progress._live, name, asked)
        progress.show("2 tasks", 5.0)
    assert free == [False, False]
    monkeypatch.undo()
    progress._live.stop()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="tunes glibc's malloc")
@pytest.mark.parametrize(
    ("environ", "kept"),
    [({}, "True True"), ({"MALLOC_TRIM_THRESHOLD_": "131072"}, "False False")],
    ids=["by default", "thresholds of the user's"],
)
def test_freed_memory_is_kept_for_the_next_batch(environ, kept):
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        (sys.executable, "-c", FREES_40_MIB), env={**plain, **environ}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == kept
