"""What went wrong in an executor, as the error it was; and what Spark says of unreadable files, as a sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from dedup.core.fold import RecordFailed
from dedup.errors import BrokerUnavailable, DedupError, InvariantBroken, Problem, SettingsError, StateIncompatible

_OURS: Final[Mapping[str, type[DedupError]]] = {
    kind.__name__: kind for kind in (StateIncompatible, RecordFailed, InvariantBroken, BrokerUnavailable)
}
_RAISED: Final = re.compile(rf"^dedup\.[\w.]+\.({'|'.join(_OURS)}): (.*)$", re.MULTILINE)
_UNREADABLE: Final = re.compile(
    r"(?:FAILED_READ_FILE|CANNOT_READ_FILE|Error while reading file|is not a Parquet file|Could not read footer)"
)
_REFUSED: Final = re.compile(
    r"USER_RAISED_EXCEPTION\] (each line of json-records .*?)(?: SQLSTATE: \w+)?$", re.MULTILINE
)
_MALFORMED: Final = re.compile(r"MALFORMED_RECORD_IN_PARSING[^\]]*\] (.*)")
_FILE: Final = re.compile(r"(?:file|hdfs|s3a?|abfss?|gs):/[^\s,;'\"]+")
_RANGE: Final = re.compile(r"offsets? (?:range )?\[(\d+), ?(\d+)\) for topic partition (\S+)-(\d+)\b")
_GONE: Final = re.compile(r"OffsetOutOfRange|KAFKA_DATA_LOSS|data loss|Some data may have been lost", re.IGNORECASE)


@contextmanager
def told() -> Iterator[None]:
    """What an executor raised on purpose is raised here; unreadable files are named. Other errors go on as they are."""
    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        text = str(error)
        ours = _RAISED.search(text)
        if ours is not None:
            raise _OURS[ours[1]](ours[2]) from error
        line = _REFUSED.search(text) or _MALFORMED.search(text)
        if line is not None:
            raise SettingsError([Problem("the input", f"{line[1].strip()} Nothing was published.")]) from error
        if _UNREADABLE.search(text):
            files = sorted({found.rstrip(".") for found in _FILE.findall(text)})
            place = files[0] if files else "a file of the input"
            raise SettingsError(
                [Problem(place, "is damaged or not of the format named. Nothing was published. Mend or remove it")]
            ) from error
        if _GONE.search(text):
            found = _RANGE.search(text)
            place = f" (not all of {found[3]}/{found[4]} offsets {found[1]} to {found[2]} is left)" if found else ""
            raise StateIncompatible(
                f"Kafka deleted records of the range while they were read{place}. Nothing was published. Give the "
                f"topic a longer retention, or judge what is left with --start earliest."
            ) from error
        raise
