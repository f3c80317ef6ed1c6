"""Whose checkpoint a directory is: written when it is new, compared at every start after that.

Spark itself resumes any query from any checkpoint: another topology's offsets would be taken for this one's.
The directory may be on any file system that Hadoop knows.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from dedup.errors import StateIncompatible

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FILE: Final = "dedup.json"
_BESIDE: Final = ".new"
_VERSION: Final = 1
Semantics = Literal["exact", "watermark"]
_ANEW: Final[Mapping[Semantics, str]] = {
    "exact": "the position is in the state, nothing is read twice or lost",
    "watermark": "the topics are then read from `start` on again, and what was forwarded before is forwarded again",
}
"""What an empty directory means."""


@dataclass(frozen=True, slots=True)
class CheckpointIdentity:
    """What must be the same for a checkpoint to be gone on with."""

    topology: str
    semantics: Semantics
    state: str
    """`Topology.state_identity`: rules and partition counts."""
    topics: Mapping[str, str]
    """Kafka's ids of the topics read: one made anew has other records under the same offsets."""


def claim(spark: SparkSession, directory: str, identity: CheckpointIdentity) -> str:
    """The directory is this identity's; return the checkpoint's own id, another for every new one.

    Raises StateIncompatible, with nothing touched, where it is another's.
    """
    jvm: Any = spark._jvm  # noqa: SLF001  # the only way to Hadoop's file systems
    path = jvm.org.apache.hadoop.fs.Path(directory, FILE)
    files = path.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())  # noqa: SLF001
    if files.exists(path):
        return _refuse_other(directory, identity, _read(jvm, files, path))
    there = files.listStatus(path.getParent()) if files.exists(path.getParent()) else []
    # A driver killed while it wrote leaves the file beside.
    if any(status.getPath().getName() != FILE + _BESIDE for status in there):
        raise StateIncompatible(
            f"{directory}: is not empty, and no checkpoint of `dedup spark run`: {FILE} is missing. Nothing was "
            f"touched. Name a directory of its own."
        )
    own_id = uuid.uuid4().hex
    _write(files, path, json.dumps({"version": _VERSION, "id": own_id, **asdict(identity)}, sort_keys=True))
    return own_id


def _refuse_other(directory: str, identity: CheckpointIdentity, text: str) -> str:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise StateIncompatible(f"{directory}/{FILE}: is damaged ({error}). Use an empty directory.") from error
    wanted = {"version": _VERSION, **asdict(identity)}
    differs = [name for name in wanted if found.get(name) != wanted[name]]
    if differs:
        told = "; ".join(f"{name}: {found.get(name)!r}, now {wanted[name]!r}" for name in differs)
        raise StateIncompatible(
            f"{directory}: is the checkpoint of another topology ({told}). Nothing was touched. Go back to that one, "
            f"or name an empty directory: {_ANEW[identity.semantics]}."
        )
    return str(found["id"])


def _read(jvm: Any, files: Any, path: Any) -> str:  # noqa: ANN401  # objects of the JVM
    stream = files.open(path)
    try:
        return str(jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
    finally:
        stream.close()


def _write(files: Any, path: Any, text: str) -> None:  # noqa: ANN401  # objects of the JVM
    """Write beside it and rename: a driver killed in between leaves no half a file."""
    beside = path.suffix(_BESIDE)
    stream = files.create(beside, True)  # noqa: FBT003  # Java has no keywords
    try:
        stream.write(bytearray(text.encode()))
    finally:
        stream.close()
    files.rename(beside, path)
