"""A Spark driver with planned accidents: ``python driver.py [name=number ...] -- ARGUMENTS OF dedup spark [-- ...]``.

Several commands are one application, one after the other: each starts a JVM and executors otherwise.

`failures=N`: attempts fail N times, in turn upstream of the judge, inside it, and by SIGKILL of the Python worker; each
takes a token from the directory ``DRIVER_TOKENS``, so that drivers started one after the other share the number.

`publishing=N`: the driver of a backfill is killed at step N of publishing, of `STEPS`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

AFTER_BATCHES = 3
"""Arrow batches that an attempt sees before its accident: it has committed some of them."""
MOST_OF_ONE_TASK = 2


class AttemptFailedOnPurpose(Exception):
    """What a planned accident raises."""


def take(tokens: Path, failures: int) -> int | None:
    """Take the next accident's number; None when all have happened."""
    for number in range(failures):
        try:
            (tokens / str(number)).open("x").close()
        except FileExistsError:
            continue
        return number
    return None


def upstream(tokens: Path, failures: int, batches: Iterable[Any]) -> Iterator[Any]:
    """An operator before the judge; it fails in the middle of a partition."""
    from pyspark import TaskContext  # noqa: PLC0415  on executors only

    # Spark gives up at the fourth failure of a task.
    may_fail = TaskContext.get().attemptNumber() < MOST_OF_ONE_TASK
    for seen, batch in enumerate(batches):
        if seen == AFTER_BATCHES and may_fail:
            number = take(tokens, failures)
            if number is not None and number % 3 == 0:
                raise AttemptFailedOnPurpose(f"upstream, accident {number}")
            if number is not None:
                yield _marked(batch, number)
                continue
        yield batch


def _marked(batch: Any, number: int) -> Any:
    """Tell the judge's side of the same attempt which accident is its own, by the topic of an impossible name."""
    import pyarrow as pa  # noqa: PLC0415  on executors only

    return batch.replace_schema_metadata(None).set_column(
        batch.schema.get_field_index("topic"), "topic", pa.array([f"accident {number}"] * batch.num_rows)
    )


def judging(judge: Callable[..., Iterator[Any]], plan: Any, batches: Iterable[Any]) -> Iterator[Any]:
    """The judge, whose attempt may be broken off in its middle."""
    return judge(plan, _breaking(batches))


def _breaking(batches: Iterable[Any]) -> Iterator[Any]:
    for batch in batches:
        topic = batch.column("topic")[0].as_py()
        if topic.startswith("accident"):
            if int(topic.split()[1]) % 3 == 1:
                raise AttemptFailedOnPurpose(topic)
            os.kill(os.getpid(), signal.SIGKILL)
        yield batch


def attempts_fail(failures: int) -> None:
    """Accidents happen in this driver's tasks."""
    from dedup.spark import stream  # noqa: PLC0415  only where it is asked for

    tokens = Path(os.environ["DRIVER_TOKENS"])
    columns, judge = stream.feeding_columns, stream.judge_partition

    def feeding_columns(rows: Any) -> Any:
        plain = columns(rows)
        return plain.mapInArrow(partial(upstream, tokens, failures), plain.schema)

    stream.feeding_columns = feeding_columns
    stream.judge_partition = partial(judging, judge)


STEPS = (
    "half of the rows are written",
    "the files are there",
    "they are counted",
    "they are listed",
    "it is published",
)


def killed_while_publishing(step: int) -> None:
    """This driver is killed at a step of publishing a backfill by its manifest."""
    from dedup.spark import backfill, batch_verdicts, session  # noqa: PLC0415  only where it is asked for

    driver = os.getpid()
    frame, write = batch_verdicts.Judging.frame, session.HadoopDirectory.write

    def kill(*_: Any, **__: Any) -> Any:
        os.kill(driver, signal.SIGKILL)

    def half(batches: Iterable[Any]) -> Iterator[Any]:
        from pyspark import TaskContext  # noqa: PLC0415  on executors only

        for batch in batches:
            if TaskContext.get().partitionId():
                kill()
            yield batch

    def write_last(self: Any, path: Any, text: str, part_name: str) -> None:
        write(self, path, text, part_name)
        if path.getParent().getName() == "_runs":
            kill()

    patches: list[tuple[Any, str, Any]] = [
        (batch_verdicts.Judging, "frame", lambda self: frame(self).mapInArrow(half, self.schema)),
        (backfill, "counts_of", kill),
        (backfill, "listed", kill),
        (backfill.RunDirectory, "_publish_manifest", kill),
        (session.HadoopDirectory, "write", write_last),
    ]
    setattr(*patches[step])


ACCIDENTS: dict[str, Callable[[int], None]] = {"failures": attempts_fail, "publishing": killed_while_publishing}


def main() -> None:
    """Plan the accidents, then be `dedup spark`, as often as there are commands."""
    planned, *commands = _split(sys.argv[1:])
    for accident in planned:
        name, _, number = accident.partition("=")
        ACCIDENTS[name](int(number))
    from dedup.cli.main import main as dedup  # noqa: PLC0415  it must see what was patched

    for at, command in enumerate(commands):
        sys.argv[1:] = ["spark", *command]
        if at == len(commands) - 1:
            dedup()
            return
        with _session_stays():
            try:
                dedup()
            except SystemExit as ended:
                if ended.code:
                    raise


def _split(arguments: list[str]) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for each in arguments:
        if each == "--":
            parts.append([])
        else:
            parts[-1].append(each)
    return parts


@contextmanager
def _session_stays() -> Iterator[None]:
    """Inside ``with``, a command that is done leaves the session to the next one."""
    from pyspark.sql import SparkSession  # noqa: PLC0415  with the driver

    stop = SparkSession.stop
    SparkSession.stop = lambda _session: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        SparkSession.stop = stop  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
