"""The way of one batch through the code, from fetch to commit: files entered, functions, and switches between files.

    python -m bench.batch_trace
    python -m bench.batch_trace --walk

A worker runs in this process on the embedded broker. Once it has nothing left to do, one batch of records arrives;
every call in dedup/ is noted from the moment the fetch answer is decoded until the task's commit has returned. Also
counted: files entered from reading the topology until the first record is judged.

Two counts of switches: all, and those without what runs meanwhile and serves no batch or other batches: the worker's
look at its own state, the group's heartbeat, and, once the batch has reached its task, the next fetch and the reader
that waits for it.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Annotated, Any

import typer
from confluent_kafka import Producer

import dedup
from dedup.chaos.load import make_topic
from dedup.embedded.kafka_node import EmbeddedKafka
from dedup.settings import Settings
from dedup.topology.parse import parse
from dedup.worker.worker import RunOptions, run_worker

PACKAGE = str(Path(dedup.__file__).parent) + "/"
TOPOLOGY = """
dedup: 1
name: traced
source: {topics: [traced], partitioned_by: tracking_id}
tracking_id: {field: event_id}
guard_period: 1h
output: {topic: traced.unique}
"""
BEGIN, END = ("record_batch.py", "columns_of"), ("task_group.py", "_commit_once")
JUDGED = ("dedup_task.py", "judge")
RECORDS = 500


WORKER = "run_worker"
"""The name of the asyncio task that looks after the worker and serves no batch."""
HEARTBEAT = "GroupCoordinator._heartbeat_routine"
"""The coroutine of aiokafka that tells the group's coordinator that this worker is alive."""
NEXT_BATCHES = ("fetch from ", "Fetcher._fetcher")
"""In the names of asyncio tasks that serve the next batches once a batch has reached its task."""


@dataclass
class Trace:
    """Files and functions in the order entered; on while `noting`."""

    files: list[str] = field(default_factory=list)
    own: list[str] = field(default_factory=list)
    """`files` without what runs meanwhile."""
    judging: bool = False
    functions: set[CodeType] = field(default_factory=set)
    start_files: set[str] = field(default_factory=set)
    starting: bool = True
    armed: bool = False
    noting: bool = False
    done: bool = False

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        if event not in {"call", "return"}:
            return
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            return
        name = code.co_filename.removeprefix(PACKAGE)
        at = (Path(name).name, code.co_name)
        if self.starting and event == "call":
            self.start_files.add(name)
            self.starting = at != JUDGED
        if self.armed and at == BEGIN and event == "call":
            self.armed, self.noting = False, True
        if self.noting:
            self.judging = self.judging or at == JUDGED
            _append(self.files, name)
            running = _running()
            if running not in {WORKER, HEARTBEAT} and not (
                self.judging and any(each in running for each in NEXT_BATCHES)
            ):
                _append(self.own, name)
            if event == "call":
                self.functions.add(code)
            # A coroutine returns once for good, and whenever it waits: only the end of the commit has no await left.
            if at == END and event == "return" and frame.f_lasti >= _last_return(code):
                self.noting, self.done = False, True


def _append(files: list[str], name: str) -> None:
    if not files or files[-1] != name:
        files.append(name)


def _running() -> str:
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return ""
    if task is None:
        return ""
    return HEARTBEAT if getattr(task.get_coro(), "__qualname__", "") == HEARTBEAT else task.get_name()


def _last_return(code: CodeType) -> int:
    import dis  # noqa: PLC0415

    return min(each.offset for each in dis.get_instructions(code) if each.opname in {"RETURN_VALUE", "RETURN_CONST"})


async def _until(condition: Callable[[], bool]) -> None:
    for _ in itertools.count():
        if condition():
            return
        await asyncio.sleep(0.01)


def _send(bootstrap: str, first: int, count: int) -> None:
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 500, "batch.num.messages": count})
    for number in range(first, first + count):
        producer.produce("traced", b'{"event_id":"%d"}' % (number // 2), partition=0)
    producer.flush(30)


async def _traced(bootstrap: str, directory: Path, trace: Trace) -> None:
    sys.setprofile(trace)
    topology = parse(TOPOLOGY, name="traced.yaml")
    settings = Settings(brokers=(bootstrap,), state_dir=directory)
    options: Any = RunOptions()
    running = asyncio.create_task(run_worker(topology, settings, options), name=WORKER)
    await _until(lambda: not trace.starting or running.done())
    await asyncio.sleep(2)
    trace.armed = True
    await asyncio.to_thread(_send, bootstrap, RECORDS, RECORDS)
    await _until(lambda: trace.done or running.done())
    sys.setprofile(None)
    running.cancel()
    (ended,) = await asyncio.gather(running, return_exceptions=True)
    if not trace.done:
        raise SystemExit(f"the worker ended before it had committed the batch: {ended!r}")


def main(
    *, walk: Annotated[bool, typer.Option("--walk", help="Print the files of the batch in the order entered.")] = False
) -> None:
    """Print the figures of one batch."""
    trace = Trace()
    with EmbeddedKafka() as kafka, tempfile.TemporaryDirectory() as directory:
        make_topic(kafka.bootstrap, "traced", 1)
        _send(kafka.bootstrap, 0, RECORDS)
        asyncio.run(_traced(kafka.bootstrap, Path(directory), trace))
    if walk:
        print("\n".join(trace.own))
    all_files, own = (f"{len(set(each))} files, {len(each) - 1} switches" for each in (trace.files, trace.own))
    print(f"one batch: {own}; with what runs meanwhile: {all_files}; {len(trace.functions)} functions")
    print(f"from the topology file to the first record judged: {len(trace.start_files)} files")
    print("batch:", *sorted(set(trace.own)))
    print("to the first record:", *sorted(trace.start_files))


if __name__ == "__main__":
    typer.run(main)
