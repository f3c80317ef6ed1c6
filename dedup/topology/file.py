"""The shape of a topology file: its keys, what each takes, what is published as the JSON Schema.

Descriptions are shown by editors while someone writes a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from dedup.core.event_time import rfc3339_ms
from dedup.core.tracking_id import Normalizing
from dedup.quantities import SIZE_PATTERN, parse_size
from dedup.topology.edge_file import SinkFile
from dedup.topology.shapes import (
    NAME,
    TOPIC,
    Duration,
    FieldPath,
    FieldTimeFile,
    Keys,
    PositiveDuration,
    field_paths,
    name_text,
    no_number,
    text_like,
    topic_text,
    version_text,
)

_HEADER_CHARS: Final = 1_000
_MOST_STANDBYS: Final = 10


def _size(text: str) -> str:
    if parse_size(text) == 0:
        raise ValueError(f'"{text}" must be more than nothing')
    return text


def _late(text: str) -> str:
    return text if text in {"forward", "drop"} else topic_text(text)


def _header(text: str) -> str:
    if not 0 < len(text) <= _HEADER_CHARS:
        raise ValueError(f"a header's name has 1 to {_HEADER_CHARS} characters")
    return text


def _start(text: str) -> str:
    if text not in {"earliest", "latest"} and rfc3339_ms(text) is None:
        raise ValueError(f'"{text}" is not a start; write earliest, latest, or a time such as 2024-01-31T00:00:00Z')
    return text


def _standbys(number: int) -> int:
    if not 0 <= number <= _MOST_STANDBYS:
        raise ValueError(f'"{number}" must be 0 to {_MOST_STANDBYS}')
    return number


def _format(text: Any) -> Any:  # noqa: ANN401 - whatever stands in the file
    if isinstance(text, str) and text.lower() in {"avro", "protobuf", "json_schema", "json-schema"}:
        raise ValueError(f'"{text}" is not supported; use json, or bytes with the ID in the key or a header')
    return text


def _rule_true(value: Any) -> Any:  # noqa: ANN401 - whatever stands in the file
    if value is not True:
        raise ValueError("takes true only; leave it out to use another rule")
    return value


def _topics(topics: list[str]) -> list[str]:
    if not topics:
        raise ValueError("is an empty list; name at least one topic")
    return topics


def _shape(value: Any) -> str:  # noqa: ANN401 - whatever stands in the file
    return "mapping" if isinstance(value, dict | BaseModel) else "plain"


Size = Annotated[str, BeforeValidator(no_number), AfterValidator(_size), text_like(SIZE_PATTERN)]
Topic = Annotated[str, AfterValidator(topic_text), text_like(f"^{TOPIC.pattern}$")]


class SourceFile(Keys):
    """Where records come from."""

    topics: Annotated[list[Topic], AfterValidator(_topics)] = Field(
        description="Topics to read. Several are always repartitioned.", json_schema_extra={"minItems": 1}
    )
    format: Annotated[Literal["json", "bytes"], BeforeValidator(_format)] = Field(
        default="json",
        description="How values are read; bytes: not at all, the ID is in the key, a header or the whole value.",
    )
    partitioned_by: Literal["tracking_id"] | None = Field(
        default=None,
        description="Says that producers put equal IDs into equal partitions. Without it records go through a "
        "repartition topic.",
    )
    start: Annotated[str, AfterValidator(_start)] = Field(
        default="earliest", description="Where a new topology begins: earliest, latest, or a time (RFC 3339)."
    )


class ContentFile(Keys):
    """The canonical content of the JSON value is the ID."""

    exclude: list[FieldPath] = Field(description="Members that change with every send.")


class TrackingIdFile(Keys):
    """What identifies the logical event: exactly one of key, header, field, fields, content."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": [rule]} for rule in ("key", "header", "field", "fields", "content")]}
    )

    key: Annotated[Literal[True], BeforeValidator(_rule_true)] | None = Field(
        default=None, description="The record's key."
    )
    header: Annotated[str, AfterValidator(_header)] | None = Field(
        default=None, description="The value of this header."
    )
    field: FieldPath | None = Field(
        default=None, description='A member of the JSON value: order.id, items[0].id, a["b.c"].'
    )
    fields: Annotated[list[FieldPath], AfterValidator(field_paths)] | None = Field(
        default=None, description="Several members together, in this order; the tenant first."
    )
    content: (
        Annotated[
            Annotated[Literal[True], BeforeValidator(_rule_true), Tag("plain")]
            | Annotated[ContentFile, Tag("mapping")],
            Discriminator(_shape),
        ]
        | None
    ) = Field(
        default=None, description="true: the raw bytes of the value; {exclude: [...]}: its JSON content without these."
    )
    normalize: list[Normalizing] = Field(
        default_factory=list, description="What is smoothed over, in this order, before IDs are compared."
    )
    missing: Literal["dead_letter", "forward", "fail"] = Field(
        default="dead_letter", description="What becomes of a record without a usable ID."
    )
    tombstones: Literal["forward", "dead_letter"] = Field(
        default="forward", description="What becomes of a null value where the ID would be in the value."
    )


class OutputFile(Keys):
    """Where unique records go."""

    topic: Topic = Field(description="Key, value, headers and timestamp stay as they were.")
    headers: bool = Field(default=False, description="Adds the header dedup-source.")


class ConflictsFile(Keys):
    """Duplicates whose payload differs."""

    topic: Topic | None = Field(
        default=None, description="Where they go; without it where duplicates go. They are counted either way."
    )
    exclude: list[FieldPath] = Field(
        default_factory=list, description="Members left out when payloads are compared, such as the time of sending."
    )


class StateFile(Keys):
    """How state is kept."""

    standby_replicas: Annotated[int, AfterValidator(_standbys)] = Field(
        default=1, description="Other workers that keep a warm copy."
    )
    max_bytes_per_partition: Size | None = Field(
        default=None, description="The worker stops before state grows beyond."
    )


class TopologyFile(Keys):
    """One deduplication job."""

    dedup: Annotated[Literal[1], BeforeValidator(version_text)] = Field(description="Version of this format.")
    name: Annotated[str, AfterValidator(name_text), text_like(f"^{NAME.pattern}$")] = Field(
        description="Consumer group, and prefix of transactional ids and topics."
    )
    source: SourceFile = Field(description="Where records come from.")
    tracking_id: TrackingIdFile = Field(description="What identifies the logical event.")
    guard_period: PositiveDuration = Field(description="For how long a second sighting is a duplicate: 15m, 24h, 7d.")
    grace: Duration | None = Field(
        default=None, description="How far behind stream time a record is still judged. Default: the guard period."
    )
    extend: bool = Field(default=False, description="A duplicate prolongs the guard period.")
    extend_at_most: PositiveDuration | None = Field(
        default=None, description="How far after the first sighting. Default: 7 guard periods."
    )
    event_time: Annotated[
        Annotated[Literal["record"], Tag("plain")] | Annotated[FieldTimeFile, Tag("mapping")], Discriminator(_shape)
    ] = Field(default="record", description="The record's timestamp, or a member of the value.")
    future: Literal["dead_letter", "clamp"] = Field(
        default="dead_letter", description="What becomes of a time too far ahead of the clock."
    )
    max_clock_skew: Duration = Field(default="1h", description="How far ahead of the clock an event time may be.")
    idle_after: PositiveDuration = Field(
        default="1m",
        description="When a source partition without lag stops holding stream time back (repartitioned only).",
    )
    output: OutputFile | None = Field(default=None, description="Where unique records go. Without it: observe only.")
    duplicates: Topic | None = Field(
        default=None, description="Topic for duplicates. Without it they are counted only."
    )
    conflicts: (
        Annotated[Annotated[Topic, Tag("plain")] | Annotated[ConflictsFile, Tag("mapping")], Discriminator(_shape)]
        | None
    ) = Field(default=None, description="Topic for duplicates whose payload differs, or {topic: ..., exclude: [...]}.")
    on_conflict: Literal["duplicate", "forward", "fail"] = Field(
        default="duplicate", description="What becomes of a duplicate whose payload differs."
    )
    late: Annotated[str, AfterValidator(_late)] | None = Field(
        default=None, description="A topic, forward or drop. Default: <output topic>.late."
    )
    dead_letter: Topic | None = Field(default=None, description="Default: <output topic>.dead-letter.")
    state: StateFile = Field(default=StateFile(), description="How state is kept.")
    sink: SinkFile | None = Field(default=None, description="The table that `dedup sink` fills from the output.")


def _keys(model: type[BaseModel]) -> tuple[str, ...]:
    return tuple(model.model_fields)


FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "": _keys(TopologyFile),
    "source": _keys(SourceFile),
    "tracking_id": _keys(TrackingIdFile),
    "tracking_id.content": _keys(ContentFile),
    "event_time": _keys(FieldTimeFile),
    "output": _keys(OutputFile),
    "conflicts": _keys(ConflictsFile),
    "state": _keys(StateFile),
    "sink": _keys(SinkFile),
}
"""The keys of each mapping, for did-you-mean."""
