"""Reads and checks the checkpoint directory of a stream, in which Spark stores the offsets of each query.

The position is in the state, so a stream needs the directory only to continue in the middle of a micro-batch.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Any, Final

from py4j.protocol import Py4JJavaError

from dedup.errors import StateIncompatible
from dedup.kafka.wire import TopicPartition
from dedup.spark.session import HadoopDirectory

_IDENTITY_FILE: Final = "dedup.json"
_PART_FILE: Final = "dedup.json.new"


def has_begun(checkpoint: HadoopDirectory) -> bool:
    """Return whether a stream has already used the directory."""
    return bool(checkpoint.files.exists(checkpoint.at(_IDENTITY_FILE)))


def claim(checkpoint: HadoopDirectory, identity: Mapping[str, object]) -> None:
    """Write the stream's identity (`Prepared.identity`) to a new checkpoint directory.

    The identity is necessary because Spark does not check whether a checkpoint belongs to a query; without the
    identity, Spark would use one topology's offsets for another topology. Raises StateIncompatible and changes nothing
    if the directory contains a different identity, or contains files but no identity.
    """
    path, files = checkpoint.at(_IDENTITY_FILE), checkpoint.files
    if not files.exists(path):
        left = files.listStatus(checkpoint.path) if files.exists(checkpoint.path) else []
        # If a driver was killed while writing the identity, it may have left the part file behind.
        if any(status.getPath().getName() != _PART_FILE for status in left):
            raise StateIncompatible(
                f"{checkpoint.path}: is not empty, and not a checkpoint of `dedup spark run`: {_IDENTITY_FILE} is "
                f"missing. Nothing was changed. Use a directory for this topology only."
            )
        checkpoint.write(path, json.dumps({"id": uuid.uuid4().hex, **identity}, sort_keys=True), _PART_FILE)
        return
    try:
        found = json.loads(checkpoint.read(path))
    except ValueError as error:
        raise StateIncompatible(f"{path}: is damaged ({error}). Use an empty directory.") from error
    differs = [f"{name}: {found.get(name)!r}, now {own!r}" for name, own in identity.items() if found.get(name) != own]
    if differs:
        raise StateIncompatible(
            f"{checkpoint.path}: is the checkpoint of another topology ({'; '.join(differs)}). Nothing was changed. "
            f"Use that topology, or use an empty directory. The position is in the state, so nothing is read twice or "
            f"lost."
        )


def continues_at(checkpoint: HadoopDirectory, query: str) -> dict[TopicPartition, int]:
    """Return the offsets at which Spark would continue a query; a micro-batch that Spark has not committed is repeated.

    The result is empty if there are no offsets yet, or if they cannot be read.
    """
    try:
        planned = _numbers(checkpoint, f"{query}/offsets")
        newest = max(planned, default=None)
        if newest is None:
            return {}
        done = newest if newest in _numbers(checkpoint, f"{query}/commits") else newest - 1
        # Before the first micro-batch, Spark stores the offsets at which this micro-batch begins.
        name = f"offsets/{done}" if done in planned else "sources/0/0"
        found = json.loads(checkpoint.read(checkpoint.at(f"{query}/{name}")).splitlines()[-1])
        offsets = [(topic, number, offset) for topic, each in found.items() for number, offset in each.items()]
        return {TopicPartition(topic, int(number)): int(offset) for topic, number, offset in offsets}
    except (Py4JJavaError, ValueError, AttributeError, LookupError):
        return {}  # Spark says what is wrong with its files when it reads them


def _numbers(checkpoint: HadoopDirectory, name: str) -> set[int]:
    """Return the numbers of the micro-batches that have a file in a directory of Spark's."""
    path: Any = checkpoint.at(name)
    if not checkpoint.files.exists(path):
        return set()
    names = [status.getPath().getName() for status in checkpoint.files.listStatus(path)]
    return {int(each) for each in names if each.isdecimal()}
