"""Defines the schemas of topology files and ingest files, with the values, default, and description of each key.

These pydantic models are also published as JSON Schemas, whose descriptions editors show. `model` and `ingest_file`
define the values that the program uses instead of the models named ``*File``. The program uses the other models
directly.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetPydanticSchema,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic_core.core_schema import no_info_after_validator_function, str_schema

from dedup.core.event_time import TimeUnit, rfc3339_ms
from dedup.core.json_path import Path, format_path, parse_path
from dedup.core.tracking_id import Normalizing
from dedup.quantities import DURATION_PATTERN, SIZE_PATTERN, parse_duration, parse_size
from dedup.yaml_document import Keys, matching, some, within

_VERSION: Final = 1
_HEADER_CHARS: Final = 1_000
_MOST_STANDBYS: Final = 10
RULES: Final = ("key", "header", "field", "fields", "content")
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,99}")
_TOPIC: Final = re.compile(r"[a-zA-Z0-9._-]{1,249}")
_COLUMN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")
_TABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}(\.[A-Za-z_][A-Za-z0-9_]{0,62})?")
_URL: Final = re.compile(r"(sqlite:///.+|postgres(ql)?://.+|\$\{(env|file):[^}]+\})")
_QUERY: Final = re.compile(r"\s*(select|with)\b", re.IGNORECASE)
_PASSWORD: Final = re.compile(r"://[^/@:]*:(?!\$\{)[^@/]+@")
_ALWAYS: Final = {"acks", "idempotence", "enable_idempotence", "transactional_id", "transactions", "retries"}
_RESERVED: Final = frozenset({"tracking_id", "event_time_ms"})
"""The columns that every sink table has."""

Start = Literal["earliest", "latest"] | int
"""Where a topology without state starts to read. A number is a record's time in milliseconds."""
CsvType = Literal["text", "integer", "number", "boolean"]
ColumnType = Literal["text", "integer", "number", "boolean", "time", "json"]


# The validators raise ValueError with a message that says what to write instead.


def _topic(text: str) -> str:
    if _TOPIC.fullmatch(text) is None or text in {".", ".."}:
        raise ValueError(f'"{text}" is not a valid topic name; Kafka allows 1 to 249 of a-z A-Z 0-9 "." "_" "-"')
    return text


def _late(text: str) -> str:
    return text if text in {"forward", "drop"} else _topic(text)


def _version(number: Any) -> Any:  # noqa: ANN401 - any value in the file
    if number != _VERSION or isinstance(number, bool):
        raise ValueError(f'"{number}" is not a version this program reads; write {_VERSION}')
    return number


def _number_as_text(value: Any) -> Any:  # noqa: ANN401 - any value in the file
    """Convert a bare number to text, so that its missing unit is reported."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _duration(text: str) -> str:
    parse_duration(text)
    return text


def _positive_duration(text: str) -> str:
    if parse_duration(text) == 0:
        raise ValueError(f'"{text}" must be longer than zero')
    return text


def _size(text: str) -> int:
    size_bytes = parse_size(text)
    if size_bytes == 0:
        raise ValueError(f'"{text}" must be more than zero')
    return size_bytes


def _distinct_paths(paths: list[Path]) -> list[Path]:
    for at, path in enumerate(paths):
        if path in paths[:at]:
            raise ValueError(f'"{format_path(path)}" is listed twice')
    return paths


def _header(text: str) -> str:
    if not 0 < len(text) <= _HEADER_CHARS:
        raise ValueError(f"a header's name has 1 to {_HEADER_CHARS} characters")
    return text


def _start(text: str) -> Start:
    match text:
        case "earliest" | "latest" as named:
            return named
        case _ if (time_ms := rfc3339_ms(text)) is not None:
            return time_ms
        case _:
            raise ValueError(f'"{text}" is not a start; write earliest, latest, or a time such as 2024-01-31T00:00:00Z')


def _partitions(count: int) -> int:
    if count < 1:
        raise ValueError(f'"{count}" is not a number of partitions; write 1 or more')
    return count


def _format(text: Any) -> Any:  # noqa: ANN401 - any value in the file
    if isinstance(text, str) and text.lower() in {"avro", "protobuf", "json_schema", "json-schema"}:
        raise ValueError(f'"{text}" is not supported; use json, or bytes with the ID in the key or a header')
    return text


def _rule_true(value: Any) -> Any:  # noqa: ANN401 - any value in the file
    if value is not True:
        raise ValueError("takes true only; leave it out to use another rule")
    return value


def _not_reserved(column: str) -> str:
    if column in _RESERVED:
        raise ValueError(f'"{column}" is a column of every sink table; choose another name')
    return column


def _query(text: str) -> str:
    if _QUERY.match(text) is None or ";" in text:
        raise ValueError(f'"{text[:40]}" is not a query; write one SELECT, without ";"')
    return text


def _url(text: str) -> str:
    if _PASSWORD.search(text):
        raise ValueError('a password must not be written here; write "${env:NAME}" for the whole address')
    if _URL.fullmatch(text) is None:
        raise ValueError(
            f'"{text}" is not a database URL; write sqlite:///FILE, postgresql://USER@HOST/DATABASE or "${{env:NAME}}"'
        )
    return text


def _file_pattern(text: str) -> str:
    if not text or "/" in text:
        raise ValueError(f'"{text}" is not a pattern of file names, such as "*.jsonl"; directories go into `directory`')
    return text


def _shape(value: Any) -> str:  # noqa: ANN401 - any value in the file
    return "mapping" if isinstance(value, dict | BaseModel) else "plain"


_PLAIN: Final = Tag("plain")
_MAPPING: Final = Tag("mapping")
_BY_SHAPE: Final = Discriminator(_shape)


def _text_as(parse: Callable[[str], Any]) -> GetPydanticSchema:
    """Return a schema that accepts only text, and converts it with ``parse``."""
    return GetPydanticSchema(lambda _type, _handler: no_info_after_validator_function(parse, str_schema(strict=True)))


def _text_like(pattern: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "pattern": pattern})


_NAME_RULE: Final = matching(
    _NAME, 'is not a valid name; use a-z, 0-9 and "-", at most 100 characters, a letter or digit first'
)
_Path = Annotated[Path, _text_as(parse_path)]
_DURATION_TEXT: Final = _text_like(DURATION_PATTERN)
_Duration = Annotated[str, BeforeValidator(_number_as_text), AfterValidator(_duration), _DURATION_TEXT]
_PositiveDuration = Annotated[str, BeforeValidator(_number_as_text), AfterValidator(_positive_duration), _DURATION_TEXT]
_Size = Annotated[int, _text_as(_size), BeforeValidator(_number_as_text), _text_like(SIZE_PATTERN)]
_Topic = Annotated[str, AfterValidator(_topic), _text_like(f"^{_TOPIC.pattern}$")]
_Column = Annotated[str, matching(_COLUMN, 'is not a valid column name; use letters, digits and "_"')]
_SinkColumn = Annotated[_Column, AfterValidator(_not_reserved)]
_Table = Annotated[
    str, matching(_TABLE, 'is not a valid table name; use letters, digits and "_", as name or schema.name')
]
_Url = Annotated[str, AfterValidator(_url)]
_Query = Annotated[str, AfterValidator(_query)]


class _ExactlyOne(Keys):
    """A mapping that must have exactly one of two keys."""

    one_of: ClassVar[tuple[str, str]]

    @model_validator(mode="after")
    def _one(self) -> Self:
        first, second = self.one_of
        if (getattr(self, first) is None) == (getattr(self, second) is None):
            raise ValueError(f"takes exactly one of {first} and {second}")
        return self


class FieldTimeFile(Keys):
    """An event time that is a member of the JSON value."""

    field: _Path = Field(description="Path of the member, such as order.placed_at.")
    unit: TimeUnit = Field(
        description="rfc3339 is text; s, ms, and us are numbers of seconds, milliseconds, or microseconds."
    )


class ColumnFile(Keys):
    """One column of a sink's table."""

    field: _Path = Field(description="A member of the JSON value; NULL if it is missing.")
    type: ColumnType = Field(
        default="text", description="The required kind of value; a record with another kind becomes a dead letter."
    )


class SinkFile(Keys):
    """The table with one row per tracking ID that `dedup sink` writes."""

    url: _Url = Field(description='sqlite:///FILE, postgresql://USER@HOST/DATABASE, or "${env:NAME}".')
    table: _Table = Field(description="The table or schema.table; created if it does not exist.")
    columns: (
        dict[_SinkColumn, Annotated[Annotated[_Path, _PLAIN] | Annotated[ColumnFile, _MAPPING], _BY_SHAPE]] | None
    ) = Field(
        default=None, description="Maps each column to a path, or to {field, type}. Default: key and value, as bytes."
    )
    topic: _Topic | None = Field(default=None, description="Topic to read. Default: the output topic.")
    on_reuse: Literal["update", "append"] = Field(
        default="update",
        description="If an ID is forwarded again after its guard period, update its row or append another.",
    )
    dead_letter: _Topic | None = Field(
        default=None, description="Topic for records that the table cannot hold. Default: <name>.sink.dead-letter."
    )


class SourceFile(Keys):
    """The topics that a topology reads, and how it reads them."""

    topics: Annotated[list[_Topic], some("topic")] = Field(
        description="Topics to read. Several topics are always repartitioned.", json_schema_extra={"minItems": 1}
    )
    format: Annotated[Literal["json", "bytes"], BeforeValidator(_format)] = Field(
        default="json",
        description="Format of values; bytes are not parsed: the ID is the key, a header, or the whole value.",
    )
    partitioned_by: Literal["tracking_id"] | None = Field(
        default=None,
        description="Declares that producers put equal IDs into the same partition. Without it, records go through a "
        "repartition topic.",
    )
    start: Annotated[Start, _text_as(_start)] = Field(
        default="earliest", description="Where a new topology starts: earliest, latest, or a time (RFC 3339)."
    )


class ContentFile(Keys):
    """A tracking ID that is the canonical content of the JSON value."""

    exclude: list[_Path] = Field(
        description="Members that are not part of the ID because they differ each time a record is sent."
    )


class TrackingIdFile(Keys):
    """The rule for the tracking ID, with exactly one of key, header, field, fields, and content."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": [rule]} for rule in RULES]})

    key: Annotated[Literal[True], BeforeValidator(_rule_true)] | None = Field(
        default=None, description="The record's key."
    )
    header: Annotated[str, AfterValidator(_header)] | None = Field(
        default=None, description="The value of this header."
    )
    field: _Path | None = Field(
        default=None, description='A member of the JSON value: order.id, items[0].id, a["b.c"].'
    )
    fields: Annotated[list[_Path], some("path"), AfterValidator(_distinct_paths)] | None = Field(
        default=None, description="Several members in this order, such as tenant and order number."
    )
    content: (
        Annotated[
            Annotated[Literal[True], BeforeValidator(_rule_true), _PLAIN] | Annotated[ContentFile, _MAPPING], _BY_SHAPE
        ]
        | None
    ) = Field(
        default=None,
        description="true is the raw bytes of the value; {exclude: [...]} is its JSON content without these members.",
    )
    normalize: list[Normalizing] = Field(
        default_factory=list,
        description="Normalizations that are applied to IDs, in this order, before they are compared.",
    )
    missing: Literal["dead_letter", "forward", "fail"] = Field(
        default="dead_letter", description="The policy for a record without a usable ID."
    )
    tombstones: Literal["forward", "dead_letter"] = Field(
        default="forward", description="The policy for a null value if the ID is read from the value."
    )


class Output(Keys):
    """The output for unique records."""

    topic: _Topic = Field(description="Topic for unique records; key, value, headers, and timestamp stay unchanged.")
    headers: bool = Field(default=False, description="Adds the header dedup-source to every record.")


class ConflictsFile(Keys):
    """How duplicates whose payload differs are recognized, and where they are sent."""

    topic: _Topic | None = Field(
        default=None, description="Topic for conflicts. Default: the topic for duplicates. They are always counted."
    )
    exclude: list[_Path] = Field(
        default_factory=list, description="Members ignored when payloads are compared, such as the send time."
    )


class StateSpec(Keys):
    """Settings for the state of a topology's tasks."""

    standby_replicas: Annotated[int, within(0, _MOST_STANDBYS)] = Field(
        default=1, description="Number of other workers that keep a warm copy of each partition's state."
    )
    max_bytes_per_partition: _Size | None = Field(
        default=None, description="Limit for a partition's state. The worker stops before the state exceeds it."
    )


class TopologyFile(Keys):
    """The schema of a topology file, which describes one deduplication job."""

    dedup: Annotated[Literal[1], BeforeValidator(_version)] = Field(description="Version of this format.")
    name: Annotated[str, _NAME_RULE, _text_like(f"^{_NAME.pattern}$")] = Field(
        description="Consumer group, and prefix of transactional IDs and topics."
    )
    source: SourceFile = Field(description="The source of records.")
    tracking_id: TrackingIdFile = Field(description="What identifies the logical event.")
    guard_period: _PositiveDuration = Field(
        description="How long another record with the same ID is a duplicate: 15m, 24h, 7d."
    )
    grace: _Duration | None = Field(
        default=None,
        description="How far behind stream time a record may be and still be judged. Default: the guard period.",
    )
    extend: bool = Field(default=False, description="Whether a duplicate extends the guard period of its ID.")
    extend_at_most: _PositiveDuration | None = Field(
        default=None, description="Limit of extend, counted from the first sighting. Default: 7 guard periods."
    )
    event_time: Annotated[Annotated[Literal["record"], _PLAIN] | Annotated[FieldTimeFile, _MAPPING], _BY_SHAPE] = Field(
        default="record", description="The record's timestamp, or a member of the value."
    )
    future: Literal["dead_letter", "clamp"] = Field(
        default="dead_letter", description="What happens to a record whose event time is too far ahead of the clock."
    )
    max_clock_skew: _Duration = Field(default="1h", description="How far ahead of the clock an event time may be.")
    idle_after: _PositiveDuration = Field(
        default="1m",
        description="Time after which a source partition without lag no longer holds stream time back.",
    )
    output: Output | None = Field(
        default=None, description="Where unique records go. Without it, the topology only observes."
    )
    duplicates: _Topic | None = Field(
        default=None, description="Topic for duplicates. Without it, they are only counted."
    )
    conflicts: Annotated[Annotated[_Topic, _PLAIN] | Annotated[ConflictsFile, _MAPPING], _BY_SHAPE] | None = Field(
        default=None, description="Topic for duplicates whose payload differs, or {topic: ..., exclude: [...]}."
    )
    on_conflict: Literal["duplicate", "forward", "fail"] = Field(
        default="duplicate", description="What happens to a duplicate whose payload differs."
    )
    late: Annotated[str, AfterValidator(_late)] | None = Field(
        default=None,
        description="What happens to late records: a topic, forward, or drop. Default: <output topic>.late.",
    )
    dead_letter: _Topic | None = Field(
        default=None, description="Topic for dead letters. Default: <output topic>.dead-letter."
    )
    state: StateSpec = Field(default=StateSpec(), description="Settings for state.")
    sink: SinkFile | None = Field(default=None, description="The table that `dedup sink` fills from the output.")


class FilesSource(Keys):
    """Files in one directory that only grow, and that are renamed when they are full."""

    directory: str = Field(description="Directory of the files, relative to the current directory of the command.")
    pattern: Annotated[str, AfterValidator(_file_pattern)] = Field(
        default="*.jsonl",
        description="Pattern for the names of the files to read. A file that is renamed is still read to its end.",
    )
    format: Literal["jsonl", "csv"] = Field(
        default="jsonl",
        description="jsonl is one JSON value per line; csv is one row per line, after a line of column names.",
    )
    columns: dict[_Column, CsvType] | None = Field(
        default=None, description="All columns of the CSV files, each with its type in JSON."
    )
    changed: Literal["stop", "start_over"] = Field(
        default="stop", description="What happens when a file is truncated or replaced after part of it was read."
    )
    last_line: Literal["wait", "take"] = Field(
        default="wait",
        description="If the last line has no line feed: wait for one, or take the line because files arrive complete.",
    )

    @model_validator(mode="after")
    def _columns_of_csv(self) -> FilesSource:
        if self.format == "csv" and not self.columns:
            raise ValueError("format csv needs columns: {name: text | integer | number | boolean}")
        if self.format == "jsonl" and self.columns is not None:
            raise ValueError("columns need format csv; a line of jsonl is sent as it is")
        return self

    @property
    def start_over(self) -> bool:
        """True if a truncated or replaced file is read from its beginning; otherwise, ingest stops."""
        return self.changed == "start_over"

    @property
    def take_last_line(self) -> bool:
        """True if a last line without a line feed is sent immediately."""
        return self.last_line == "take"


class TableSource(_ExactlyOne):
    """A table to which rows are only added, each with a greater number than the rows before it."""

    one_of = ("table", "query")

    url: _Url = Field(description='sqlite:///FILE, postgresql://USER@HOST/DATABASE, or "${env:NAME}".')
    table: _Table | None = Field(default=None, description="The table or schema.table.")
    query: _Query | None = Field(
        default=None,
        description="A SELECT instead of a table. The INSERT that takes a row's number must make it visible.",
    )
    column: _Column = Field(description="Column of increasing integers: an identity, a sequence, an AUTOINCREMENT key.")
    unique: _Column | None = Field(
        default=None, description="Second integer column that distinguishes rows with the same number."
    )
    settle: _PositiveDuration | None = Field(
        default=None,
        description="Needed if the INSERT itself does not take the number: how long to wait before rows are read. "
        "This is not exact: a row that becomes visible even later is never read.",
    )

    @property
    def settle_ms(self) -> int:
        """The longest time from taking a number until its row is visible; 0 if the INSERT itself takes the number."""
        return parse_duration(self.settle) if self.settle else 0

    @property
    def named(self) -> str:
        """The name of the table, or "query" for a query."""
        return self.table or "query"


class IngestSourceFile(_ExactlyOne):
    """The source that records come from, which is files or a table."""

    one_of = ("files", "table")

    files: FilesSource | None = Field(default=None, description="Files in one directory.")
    table: TableSource | None = Field(default=None, description="A table of SQLite or PostgreSQL.")


class IngestIdFile(_ExactlyOne):
    """The members of a record that are its tracking ID."""

    one_of = ("field", "fields")

    field: _Path | None = Field(default=None, description="A member of the JSON value.")
    fields: Annotated[list[_Path], some("path"), AfterValidator(_distinct_paths)] | None = Field(
        default=None, description="Several members together."
    )


class IngestOutputFile(Keys):
    """The topic that records are sent to."""

    topic: _Topic = Field(description="Topic to write; created if it does not exist.")
    partitions: Annotated[int, AfterValidator(_partitions)] | None = Field(
        default=None, description="Partitions of a created topic. Default: the brokers' default."
    )


class Marker(Keys):
    """How to recognize the last record of a transaction, which is sent like any other record."""

    field: _Path = Field(description="A member of the JSON value.")
    equals: str | int | bool = Field(description="The value of that member in such a record.")


class IngestFile(Keys):
    """The schema of an ingest file, which describes one exactly-once source."""

    ingest: Annotated[Literal[1], BeforeValidator(_version)] = Field(description="Version of this format.")
    name: Annotated[str, _NAME_RULE] = Field(
        description="Prefix of the transactional ID and of the topic of source offsets."
    )
    source: IngestSourceFile = Field(description="The source of records.")
    output: IngestOutputFile = Field(description="Where records go.")
    tracking_id: IngestIdFile | None = Field(
        default=None,
        description="The record's key. Without it, the header dedup-id contains the place in the source.",
    )
    event_time: Annotated[Annotated[Literal["now"], _PLAIN] | Annotated[FieldTimeFile, _MAPPING], _BY_SHAPE] = Field(
        default="now", description="The record's timestamp: now (the time when it is sent) or a member of the value."
    )
    dead_letter: _Topic | None = Field(default=None, description="Topic for dead letters. Default: <name>.dead-letter.")
    boundary: Annotated[Annotated[Literal["interval", "poll"], _PLAIN] | Annotated[Marker, _MAPPING], _BY_SHAPE] = (
        Field(
            default="interval",
            description="Where a transaction ends: after the commit interval, after each read (poll: 1 MiB of a file, "
            "5,000 rows), or after each record that the source itself marks as the last.",
        )
    )

    @model_validator(mode="before")
    @classmethod
    def _no_way_out(cls, value: Any) -> Any:  # noqa: ANN401 - any value in the file
        asked = sorted(_ALWAYS & set(value)) if isinstance(value, dict) else []
        if asked:
            raise ValueError(
                f"{', '.join(asked)}: producers are always idempotent, transactional and acks=all; leave it out"
            )
        return value
