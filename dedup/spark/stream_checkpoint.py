"""Reads and checks the checkpoint directory of a stream, in which Spark stores the offsets of each query.

The state contains the position, so a stream needs the directory only to continue in the middle of a micro-batch.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Mapping
from typing import Any, Final

from py4j.protocol import Py4JJavaError

from dedup.errors import StateIncompatible
from dedup.kafka.wire import TopicPartition
from dedup.spark.session import HadoopDirectory

log: Final = logging.getLogger(__name__)
_IDENTITY_FILE: Final = "dedup.json"
_PART_FILE: Final = "dedup.json.new"


def has_begun(checkpoint: HadoopDirectory) -> bool:
    """Return whether a stream has already used the directory."""
    return bool(checkpoint.files.exists(checkpoint.at(_IDENTITY_FILE)))


def refuse_unusable(checkpoint: HadoopDirectory) -> None:
    """Raise StateIncompatible if a directory that no stream has used contains files, and SettingsError if the
    directory cannot be written.
    """
    _refuse_files(checkpoint)
    checkpoint.refuse_unwritable("--checkpoint", _PART_FILE)


def _refuse_files(checkpoint: HadoopDirectory) -> None:
    left = checkpoint.files.listStatus(checkpoint.path) if checkpoint.files.exists(checkpoint.path) else []
    # If a driver was killed while writing the identity, it may have left the part file behind.
    if any(status.getPath().getName() != _PART_FILE for status in left):
        raise StateIncompatible(
            f"{checkpoint.path}: is not empty, and not a checkpoint of `dedup spark run`: {_IDENTITY_FILE} is "
            f"missing. Nothing was changed. Use a directory for this topology only."
        )


def claim(checkpoint: HadoopDirectory, identity: Mapping[str, object]) -> None:
    """Write the stream's identity (`Prepared.identity`) to a new checkpoint directory.

    The identity is necessary because Spark does not check whether a checkpoint belongs to a query. Without it, Spark
    would use one topology's offsets for another topology. Raises StateIncompatible and changes nothing if the directory
    contains a different identity, or contains files but no identity.
    """
    path = checkpoint.at(_IDENTITY_FILE)
    if not has_begun(checkpoint):
        _refuse_files(checkpoint)
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
    """Return the offsets at which Spark would continue a query. Spark repeats a micro-batch that it has not committed.

    The result is empty if no offsets are stored yet, or if the offsets cannot be read.
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


def leave_behind(
    checkpoint: HadoopDirectory, query: str, kept: Mapping[TopicPartition, int], committed: Mapping[TopicPartition, int]
) -> None:
    """Delete a query's checkpoint if Kafka has deleted records that Spark would read, but that the group has judged.

    This can happen if a fleet has judged the records, or if the stream was stopped before Spark committed its last
    micro-batch. Without a checkpoint, the query begins at the group's committed offsets. ``kept`` maps each partition
    to the first offset that Kafka holds. ``committed`` maps each partition to the group's offset, which is not below
    the first offset.

    Raises StateIncompatible if the group has no offset of such a partition.
    """
    gone = {place: at for place, at in continues_at(checkpoint, query).items() if at < kept.get(place, 0)}
    unknown = next((place for place in gone if place not in committed), None)
    if unknown is not None:
        raise StateIncompatible(
            f"{checkpoint.path}: continues at offset {gone[unknown]} of {unknown}, but Kafka has deleted the records "
            f"below {kept[unknown]}, and the group has no offset that says whether they were judged. Nothing was "
            f"changed. With an empty checkpoint directory, the stream begins where the state ends, or else at the "
            f"topology's start."
        )
    for place, at in gone.items():
        log.info(
            "%s: the checkpoint continues at offset %d, but the group has judged the records up to %d, and Kafka "
            "has deleted those below %d. The query %s begins at the group's offsets.",
            *(place, at, committed[place], kept[place], query),
        )
    if gone:
        path, old = checkpoint.at(query), checkpoint.at(f"{query}.old")
        checkpoint.files.delete(old, True)  # noqa: FBT003  # Java has no keywords: recursive
        # Spark cannot continue from a partially deleted directory.
        if not checkpoint.files.rename(path, old):
            raise StateIncompatible(f"{path}: cannot be renamed to {old}. Use an empty checkpoint directory.")
        checkpoint.files.delete(old, True)  # noqa: FBT003


def _numbers(checkpoint: HadoopDirectory, name: str) -> set[int]:
    """Return the numbers of the micro-batches that have a file in one of Spark's directories."""
    path: Any = checkpoint.at(name)
    if not checkpoint.files.exists(path):
        return set()
    names = [status.getPath().getName() for status in checkpoint.files.listStatus(path)]
    return {int(each) for each in names if each.isdecimal()}
