"""Late records and dead letters as they are in their topics, by the source record they came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Final, NamedTuple

from dedup.core.extract import Extracted, Extractor
from dedup.core.extract_one import ODD_HEADER_NAME
from dedup.core.window import Source
from dedup.proof.compare import Headers, digest
from dedup.proof.kafka_reader import Bounds, Columns, KafkaReader, OpenTransaction

SOURCE_HEADER: Final = "dedup-source"
TIMESTAMP_HEADER: Final = "dedup-timestamp"
REASON_HEADER: Final = "dedup-reason"
DETAIL_HEADER: Final = "dedup-detail"
DIGEST_HEADER: Final = "dedup-digest"
VERDICT_HEADER: Final = "dedup-verdict"
IDLE_HEADER: Final = "dedup-idle"
REPLAYED_HEADER: Final = "dedup-replayed"
FIRST_TIME_HEADER: Final = "dedup-first-time"
FIRST_SOURCE_HEADER: Final = "dedup-first-source"


LATE_TAIL: Final = (SOURCE_HEADER, TIMESTAMP_HEADER)
DEAD_TAIL: Final = (REASON_HEADER, DETAIL_HEADER, SOURCE_HEADER, TIMESTAMP_HEADER)
"""The headers the worker appends, in this order; what stands before them is the source record's."""

_NO_TIME_MS: Final = -(1 << 62)


class Filed(NamedTuple):
    """One record of a side topic."""

    digest: bytes
    """Over the record as it was in the source, its original timestamp included."""
    stands_for: bytes
    """What a value too large for the topic was replaced by; empty where the record is whole."""
    reason: str
    partition: int
    offset: int


@dataclass(slots=True)
class SideTopic:
    """A late or dead-letter topic, indexed by source position."""

    name: str
    complete: bool = True
    """False where retention deleted its beginning: then absence says nothing."""
    filed: dict[Source, Filed] = field(default_factory=dict)
    repeated: list[tuple[Source, Filed]] = field(default_factory=list)
    """A source record that is there a second time."""
    strangers: list[tuple[int, int]] = field(default_factory=list)
    """(partition, offset) of records that name no record of our sources."""

    def place(self, filed: Filed) -> str:
        """Return where a record is, for people."""
        return f"{self.name}/{filed.partition} offset {filed.offset}"


def extracted_of(extract: Extractor, columns: Columns) -> Extracted:
    """Return IDs, times and faults of records as a worker finds them, header names that are not UTF-8 included."""
    extracted = extract(columns.keys, columns.values, columns.headers, columns.timestamps_ms)
    if not columns.odd_names:
        return extracted
    odd = {row: ODD_HEADER_NAME for row, offset in enumerate(columns.offsets) if offset in columns.odd_names}
    return replace(extracted, faults=extracted.faults | odd)


def header(headers: Headers, name: str) -> bytes | None:
    """Return the last header of a name: ours are appended, whatever a producer wrote before."""
    for each, content in reversed(headers):
        if each == name:
            return content
    return None


def parse_source(content: bytes | None, topics: Sequence[str]) -> Source | None:
    """Return the position named by ``topic/partition/offset``; None if it is none of these topics."""
    if content is None:
        return None
    topic, _, position = content.decode("utf-8", "replace").partition("/")
    partition, _, offset = position.partition("/")
    if topic not in topics or not partition.isdecimal() or not offset.isdecimal():
        return None
    return Source(topics.index(topic), int(partition), int(offset))


def forwarded_by_replay(headers: Headers, topics: Sequence[str]) -> bool:
    """Tell whether `dedup replay --late --forward` put this record into the output: its two headers stand last."""
    if len(headers) < 2 or tuple(headers[-2]) != (VERDICT_HEADER, b"late"):  # noqa: PLR2004  # verdict and position
        return False
    name, place = headers[-1]
    return name == REPLAYED_HEADER and parse_source(place, topics) is not None


def parse_time_ms(content: bytes | None) -> int | None:
    """Return a time written as ASCII decimal milliseconds; None if it is not one."""
    if content is None or not content.removeprefix(b"-").isdigit():
        return None
    return int(content)


def stand_in(value: bytes | None) -> bytes:
    """Return what is written in place of a value that does not fit the side topic."""
    content = value or b""
    return f"blake2b-256:{blake2b(content, digest_size=32).hexdigest()} of {len(content)} bytes".encode()


def read_side_topic(
    reader: KafkaReader,
    name: str,
    bounds: Mapping[int, Bounds],
    topics: Sequence[str],
    tail: Sequence[str],
) -> SideTopic:
    """Return the committed records of a side topic within bounds."""
    side = SideTopic(name, complete=not any(each.beheaded for each in bounds.values()))
    for partition, each in bounds.items():
        try:
            for columns in reader.read(name, partition, each.low, each.high):
                rows = zip(columns.offsets, columns.keys, columns.values, columns.headers, strict=True)
                for offset, key, value, headers in rows:
                    _file(side, (partition, offset), (key, value, headers), topics, tail)
        except OpenTransaction:
            side.complete = False
    return side


def _file(
    side: SideTopic,
    place: tuple[int, int],
    record: tuple[bytes | None, bytes | None, Headers],
    topics: Sequence[str],
    tail: Sequence[str],
) -> None:
    key, value, headers = record
    source = parse_source(header(headers, SOURCE_HEADER), topics)
    if source is None:
        side.strangers.append(place)
        return
    stands_for = b""
    if headers[-1][0] == DIGEST_HEADER:
        stands_for = headers[-1][1] or b""
        headers = headers[:-1]
    timestamp_ms = parse_time_ms(header(headers, TIMESTAMP_HEADER))
    whole = tuple(name for name, _ in headers[-len(tail) :]) == tuple(tail)
    original = headers[: -len(tail)] if whole else headers
    reason = (header(headers, REASON_HEADER) or b"").decode("utf-8", "replace")
    if reason == ODD_HEADER_NAME.code:
        original = ()  # the source's can not be read, so there is nothing to compare them with
    filed = Filed(
        digest(key, value, original, _NO_TIME_MS if timestamp_ms is None else timestamp_ms),
        stands_for,
        reason,
        *place,
    )
    if source in side.filed:
        side.repeated.append((source, filed))
    else:
        side.filed[source] = filed
