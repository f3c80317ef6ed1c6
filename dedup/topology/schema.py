"""Defines topology files and ingest files as pydantic models, whose docstrings appear in JSON Schemas and in docs/."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetPydanticSchema,
    PlainValidator,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic_core.core_schema import no_info_after_validator_function, str_schema

from dedup.core.csv_row import Delimiter
from dedup.core.event_time import TimeUnit, rfc3339_ms
from dedup.core.tracking_id import Normalizing, Path, format_path, parse_path
from dedup.quantities import DURATION_PATTERN, SIZE_PATTERN, parse_duration, parse_size
from dedup.yaml_document import Keys, accepting, matching, some, within

_HEADER_CHARS: Final = 1_000
_MOST_STANDBYS: Final = 10
_MOST_PARTITIONS: Final = 256
"""The maximum number of partitions that share a transaction. Brokers write the markers one by one, which takes time."""
PART_RULES: Final = ("key", "header", "field")
ALTERNATIVE_RULES: Final = (*PART_RULES, "fields", "parts", "content", "python")
RULES: Final = (*ALTERNATIVE_RULES, "first_of")
_MOST_ALTERNATIVES: Final = 16
_GREATEST_VERSION: Final = 1_000_000_000
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,99}")
_TOPIC: Final = re.compile(r"[a-zA-Z0-9._-]{1,249}")
_COLUMN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")
_TABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}(\.[A-Za-z_][A-Za-z0-9_]{0,62})?")
_URL: Final = re.compile(r"(sqlite:///.+|postgres(ql)?://.+|\$\{(env|file):[^}]+\})")
_FLOW: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
_FILE: Final = re.compile(r"[^\0]*[^\0/]")
_DIRECTORY: Final = re.compile(r"[^\0]+")
_SUBJECT: Final = re.compile(r"[^\s\0]{1,255}")
_QUERY: Final = re.compile(r"\s*(select|with)\b", re.IGNORECASE)
_PASSWORD: Final = re.compile(r"://[^/@:]*:(?!\$\{)[^@/]+@")
_ALWAYS: Final = {"acks", "idempotence", "enable_idempotence", "transactional_id", "transactions", "retries"}
RESERVED_COLUMNS: Final = frozenset({"tracking_id", "event_time_ms"})
"""The columns that every sink table has."""

Start = Literal["earliest", "latest"] | int
"""Where a topology without state starts to read its source. A number is a record timestamp in milliseconds."""
CsvType = Literal["text", "integer", "number", "boolean"]
ColumnType = Literal["text", "integer", "number", "boolean", "time", "json"]


# The validators raise ValueError with a message that says what to write instead.


def _as_text(value: Any) -> Any:  # noqa: ANN401 - any value in the file
    """Convert a number, true, or false to a string, so that the error names valid values."""
    return str(value).lower() if isinstance(value, int | float) else value


def _key_rule(value: Any) -> Literal[True] | Path:  # noqa: ANN401 - any value in the file
    if value is True:
        return True
    if not isinstance(value, str):
        raise ValueError("takes true, or the path of a member of the key; leave it out to use another rule")  # noqa: TRY004 - pydantic takes only ValueError
    return parse_path(value)


def _positive(parse: Callable[[str], int]) -> Callable[[str], int]:
    def parse_positive(text: str) -> int:
        found = parse(text)
        if found == 0:
            raise ValueError(f'"{text}" must be {"longer" if parse is parse_duration else "more"} than zero')
        return found

    return parse_positive


def _distinct_paths(paths: list[Path]) -> list[Path]:
    for at, path in enumerate(paths):
        if path in paths[:at]:
            raise ValueError(f'"{format_path(path)}" is listed twice')
    return paths


def _distinct(names: list[str]) -> list[str]:
    for at, name in enumerate(names):
        if name in names[:at]:
            raise ValueError(f'"{name}" is listed twice')
    return names


def _start(text: str) -> Start:
    match text:
        case "earliest" | "latest" as named:
            return named
        case _ if (time_ms := rfc3339_ms(text)) is not None:
            return time_ms
        case _:
            raise ValueError(f'"{text}" is not a start; write earliest, latest, or a time such as 2024-01-31T00:00:00Z')


def _shape(value: Any) -> str:  # noqa: ANN401 - any value in the file
    return "mapping" if isinstance(value, dict | BaseModel) else "plain"


def _text_as(parse: Callable[[str], Any]) -> GetPydanticSchema:
    """Return a schema that accepts only a string and converts it with ``parse``."""
    return GetPydanticSchema(lambda _type, _handler: no_info_after_validator_function(parse, str_schema(strict=True)))


def _text_like(pattern: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "pattern": pattern})


_TOPIC_RULE: Final = accepting(
    lambda text: _TOPIC.fullmatch(text) and text not in {".", ".."},
    '"{}" is not a valid topic name; Kafka allows 1 to 249 of a-z A-Z 0-9 "." "_" "-"',
)
_NAME_RULE: Final = matching(
    _NAME, 'is not a valid name; use a-z, 0-9 and "-", at most 100 characters, a letter or digit first'
)
_A = TypeVar("_A")
_B = TypeVar("_B")
_PlainOrMapping = Annotated[Annotated[_A, Tag("plain")] | Annotated[_B, Tag("mapping")], Discriminator(_shape)]
_Version = Annotated[
    Literal[1],
    accepting(
        lambda number: number == 1 and not isinstance(number, bool),
        '"{}" is not a version this program reads; write 1',
        kind=BeforeValidator,
    ),
]
_True = Annotated[
    Literal[True],
    accepting(lambda value: value is True, "takes true only; leave it out to use another rule", kind=BeforeValidator),
]
_Key = Annotated[
    Literal[True] | Path,
    PlainValidator(_key_rule),
    WithJsonSchema({"anyOf": [{"const": True, "type": "boolean"}, {"type": "string"}]}),
]
_KeyFormat = Literal["json", "json_schema", "avro", "protobuf", "msgpack", "cbor", "bytes"]
_Format = Literal["json", "json_schema", "avro", "protobuf", "msgpack", "cbor", "csv", "bytes"]
_Path = Annotated[Path, _text_as(parse_path)]
_Paths = Annotated[list[_Path], some("path"), AfterValidator(_distinct_paths)]
_SchemaFile = Annotated[str, matching(_FILE, "is not the name of a file")]
_Duration = Annotated[int, _text_as(parse_duration), BeforeValidator(_as_text), _text_like(DURATION_PATTERN)]
_PositiveDuration = Annotated[
    int, _text_as(_positive(parse_duration)), BeforeValidator(_as_text), _text_like(DURATION_PATTERN)
]
_Size = Annotated[int, _text_as(_positive(parse_size)), BeforeValidator(_as_text), _text_like(SIZE_PATTERN)]
_Header = Annotated[
    str, accepting(lambda text: 0 < len(text) <= _HEADER_CHARS, f"a header's name has 1 to {_HEADER_CHARS} characters")
]
_FilePattern = Annotated[
    str,
    accepting(
        lambda text: text and "/" not in text,
        '"{}" is not a pattern of file names, such as "*.jsonl"; directories go into `directory`',
    ),
]
_Query = Annotated[
    str,
    accepting(
        lambda text: _QUERY.match(text) and ";" not in text, '"{}" is not a query; write one SELECT, without ";"'
    ),
]
_Topic = Annotated[str, _TOPIC_RULE, _text_like(f"^{_TOPIC.pattern}$")]
_CsvColumn = Annotated[str, accepting(lambda name: name, "a column has a name")]
_Column = Annotated[str, matching(_COLUMN, 'is not a valid column name; use letters, digits and "_"')]
_SinkColumn = Annotated[
    _Column,
    accepting(lambda name: name not in RESERVED_COLUMNS, '"{}" is a column of every sink table; choose another name'),
]
_Table = Annotated[
    str, matching(_TABLE, 'is not a valid table name; use letters, digits and "_", as name or schema.name')
]
_FlowName = Annotated[str, matching(_FLOW, "is not a flow; write module:attribute, such as flows:flow")]
_FunctionName = Annotated[str, matching(_FLOW, "is not a function; write module:function, such as ids:order_id")]
_Url = Annotated[
    str,
    accepting(
        lambda text: not _PASSWORD.search(text),
        'a password must not be written here; write "${env:NAME}" for the whole address',
    ),
    matching(_URL, 'is not a database URL; write sqlite:///FILE, postgresql://USER@HOST/DATABASE or "${env:NAME}"'),
]


class _ExactlyOne(Keys):
    one_of: ClassVar[tuple[str, str]]

    @model_validator(mode="after")
    def _one(self) -> Self:
        first, second = self.one_of
        if (getattr(self, first) is None) == (getattr(self, second) is None):
            raise ValueError(f"takes exactly one of {first} and {second}")
        return self


class FieldTimeFile(Keys):
    """An event time that is read from a member of the value."""

    field: _Path
    """Path of the member, such as order.placed_at."""
    unit: TimeUnit = Field(
        description="With rfc3339, the member is a string. With s, ms, or us, it is a number of seconds, milliseconds, "
        "or microseconds. With timestamp, it has a timestamp type of the format avro, protobuf, msgpack, or cbor, "
        "which determines the unit."
    )


class JsonTimeFile(FieldTimeFile):
    """An event time that is read from a member of a JSON value."""

    unit: Literal["rfc3339", "s", "ms", "us"]
    """The member is a string (rfc3339), or a number of seconds (s), milliseconds (ms), or microseconds (us)."""


class ColumnFile(Keys):
    """One column of a sink's table."""

    field: _Path
    """Path of a member. The column is NULL if a record lacks this member."""
    type: ColumnType = "text"
    """Required type of the member; `json` needs JSON values. A record whose member has another type becomes a dead
    letter.
    """


class SinkFile(Keys):
    """The table that `dedup sink` fills, with one row per tracking ID."""

    url: _Url
    """sqlite:///FILE, postgresql://USER@HOST/DATABASE, or "${env:NAME}"."""
    table: _Table
    """Name of the table, or schema.table. The table is created if it does not exist."""
    columns: dict[_SinkColumn, _PlainOrMapping[_Path, ColumnFile]] | None = None
    """Maps each column to the path of a member, or to {field, type}. Default: the columns key and value, as bytes."""
    topic: _Topic | None = None
    """Topic to read. Default: the output topic."""
    on_reuse: Literal["update", "append"] = "update"
    """Whether to update an ID's row or append another row if the ID is forwarded again after its guard period."""
    dead_letter: _Topic | None = None
    """Topic for records that the table cannot hold. Default: <name>.sink.dead-letter."""


class SourceFile(Keys):
    """The topics that a topology reads, and how the topology reads them."""

    topics: Annotated[list[_Topic], some("topic")] = Field(json_schema_extra={"minItems": 1})
    """Topics to read. Several topics are always repartitioned."""
    format: _Format = Field(
        default="json",
        description="Format of values. With json_schema, values are JSON with a schema registry's framing, and no "
        "registry is needed. With avro and protobuf, either the framing names a schema in the schema registry, or "
        "values have no framing and all have the same schema. With msgpack and cbor, values contain the types of their "
        "members. With csv, each value is one row of text. With bytes, values are not parsed, so the ID is the key, a "
        "header, or the whole value.",
    )
    schema_id: Literal["auto", "header", "prefix", "none"] = Field(
        default="auto",
        description="Where the schema ID is. With header, it is in the header __value_schema_id. With prefix, it is in "
        "the first 5 bytes of the value. With auto, it is in the header if the record has this header, and otherwise "
        "in the prefix. With none, which requires format avro or protobuf, values have no framing.",
    )
    schema_file: _SchemaFile | None = Field(default=None, alias="schema")
    """File with the schema of all values, relative to the topology file. Requires `schema_id: none`. Protobuf values
    have the type of the first message in a .proto file."""
    subject: Annotated[str, matching(_SUBJECT, "is not a subject of a schema registry")] | None = Field(
        default=None,
        description="Subject in the schema registry that contains the schemas of all values. A context may precede the "
        "subject (:.context:name). `dedup check --broker` and `dedup schemas export` read the subject. Default: "
        "TOPIC-value, for each source topic.",
    )
    columns: Annotated[list[_CsvColumn], some("column"), AfterValidator(_distinct)] | None = None
    """With format csv, the names of the columns, in order. Each path must be the name of one column."""
    delimiter: Delimiter | None = None
    """With format csv, the character between the cells. Default: comma."""
    key_format: _KeyFormat = Field(
        default="bytes",
        description="Format of keys. Set it only if the ID is a member of the key (`key: PATH` in tracking_id). Keys "
        "are read like values of the same format. With json_schema, avro, and protobuf, the schema ID is in the header "
        "__key_schema_id if the record has this header, and otherwise in the first 5 bytes of the key. With avro and "
        "protobuf, the schema is in the schema registry. With bytes, keys are not parsed.",
    )
    key_subject: Annotated[str, matching(_SUBJECT, "is not a subject of a schema registry")] | None = Field(
        default=None,
        description="Subject in the schema registry that contains the schemas of all keys, as `subject` does for "
        "values. Requires `key_format: avro` or `protobuf`. Default: TOPIC-key, for each source topic.",
    )
    partitioned_by: Literal["tracking_id"] | None = Field(
        default=None,
        description="Declares that producers put equal IDs into the same partition. If this key is missing, records go "
        "through a repartition topic.",
    )
    start: Annotated[Start, _text_as(_start), BeforeValidator(_as_text)] = "earliest"
    """Where a new topology starts to read: earliest, latest, or a time (RFC 3339)."""


class ContentFile(Keys):
    """A tracking ID that consists of the whole value in canonical form, without the excluded members."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1})

    exclude: list[_Path] = Field(default_factory=list)
    """Members that are not part of the ID because they differ each time a record is sent."""
    schema_file: _SchemaFile | None = Field(default=None, alias="schema")
    """File with the schema whose members are the content, relative to the topology file. Requires format avro or
    protobuf. Without this file, each value is read with its own schema.
    """


class PartFile(Keys):
    """One part of a tracking ID, which has exactly one of key, header, and field."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": [rule]} for rule in PART_RULES]})

    key: _Key | None = None
    """With true, the part is the record's key. With a path, it is a member of the key (see source.key_format)."""
    header: _Header | None = None
    """Name of the header whose value is the part."""
    field: _Path | None = None
    """Path of the member that is the part. A JSON object or array is compared as canonical JSON."""
    absent: Literal["dead_letter", "as_value"] = "dead_letter"
    """Whether a record in which the part is absent, null, or empty has no ID, or has an ID that includes this state."""


_some_alternatives: Final = accepting(
    lambda several: 1 < len(several) <= _MOST_ALTERNATIVES, f"must have 2 to {_MOST_ALTERNATIVES} alternatives"
)


class FunctionFile(Keys):
    """Your function that returns the ID, and its version."""

    function: _FunctionName
    """The function, as module:function. The module is in the directory of the topology file, or is installed."""
    version: Annotated[int, within(1, _GREATEST_VERSION)] = 1
    """Version of the function. Increase it when the function starts to return different IDs."""


class AlternativeFile(Keys):
    """One alternative of a tracking ID: exactly one of key, header, field, fields, parts, content, and python."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": [rule]} for rule in ALTERNATIVE_RULES]})

    key: _Key | None = None
    """With true, the ID is the record's key. With a path, it is a member of the key (see source.key_format)."""
    header: _Header | None = None
    """Name of the header whose value is the ID."""
    field: _Path | None = None
    """Path of the member that is the ID, such as order.id, items[0].id, or a["b.c"]."""
    fields: _Paths | None = None
    """Paths of several members that together form the ID, in this order, such as tenant and order number."""
    parts: Annotated[list[PartFile], some("part")] | None = Field(default=None, json_schema_extra={"minItems": 1})
    """Parts of the record that together form the ID, in this order, such as the key and a header."""
    content: _PlainOrMapping[_True, ContentFile] | None = None
    """With true, the ID is the raw value. With {exclude: [...]}, the ID is the content without these members."""
    python: _PlainOrMapping[_FunctionName, FunctionFile] | None = None
    """Your function of (key, value, headers) that returns the ID, as module:function or {function: ..., version: 2}."""


class TrackingIdFile(AlternativeFile):
    """The source of the tracking ID: exactly one of key, header, field, fields, parts, content, python, first_of."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": [rule]} for rule in RULES]})

    first_of: Annotated[list[AlternativeFile], _some_alternatives] | None = Field(
        default=None, json_schema_extra={"minItems": 2, "maxItems": _MOST_ALTERNATIVES}
    )
    """Alternatives, such as a header and then the content. The first alternative with a value in the record is used."""
    normalize: list[Normalizing] = Field(default_factory=list)
    """Steps applied to IDs, in this order, before comparison. With instant, an RFC 3339 time becomes an instant."""
    zero: Literal["missing", "value"] = "missing"
    """Whether an unsent Protobuf field without presence is missing, or has the value 0, false, or empty."""
    missing: Literal["dead_letter", "forward", "fail"] = "dead_letter"
    """The policy for a record without a usable ID."""
    tombstones: Literal["forward", "dead_letter"] = "forward"
    """The policy for a null value if the ID or the event time is read from the value."""


class Output(Keys):
    """The output for unique records."""

    topic: _Topic
    """Topic for unique records, whose key, value, headers, and timestamp stay unchanged."""
    headers: bool = False
    """Whether to add the header dedup-source to every record."""


class ConflictsFile(Keys):
    """How conflicts (duplicates whose payload differs) are recognized, and where they are sent."""

    topic: _Topic | None = None
    """Topic for conflicts, which are always counted. Default: the topic for duplicates."""
    exclude: list[_Path] | None = None
    """Members that are ignored when payloads are compared, such as the send time. With a list, even an empty list,
    payloads are compared by content. Without a list, JSON is compared by content, and other formats are compared by
    bytes.
    """
    schema_file: _SchemaFile | None = Field(default=None, alias="schema")
    """File with the schema whose members are compared, as in `tracking_id.content`."""


class FlowFile(Keys):
    """The flow, and what happens if it fails."""

    flow: _FlowName
    """The flow, as module:attribute. The module is in the directory of the topology file, or is installed."""
    on_error: Literal["dead_letter", "stop"] = "dead_letter"
    """What happens if the flow fails: the record becomes a dead letter, or the worker stops."""


class StateSpec(Keys):
    """Settings for the state of a topology's tasks."""

    standby_replicas: Annotated[int, within(0, _MOST_STANDBYS)] = 1
    """Number of other workers that keep a warm copy of each partition's state."""
    max_bytes_per_partition: _Size | None = None
    """Limit for a partition's state. The worker stops when the state exceeds this limit."""


class TransactionsSpec(Keys):
    """Settings for the transactions of a topology's tasks."""

    partitions: Annotated[
        Literal["auto"] | int,
        accepting(
            lambda size: size == "auto" or (type(size) is int and 1 <= size <= _MOST_PARTITIONS),
            f'"{{}}" must be auto, or 1 to {_MOST_PARTITIONS}',
            kind=BeforeValidator,
        ),
    ] = "auto"
    """Number of partitions whose tasks commit in one transaction. With auto, dedup sets it when a topology is new."""


class TopologyFile(Keys):
    """The content of a topology file, which describes one deduplication job."""

    dedup: _Version
    """Version of this file format."""
    name: Annotated[str, _NAME_RULE, _text_like(f"^{_NAME.pattern}$")]
    """Name of the consumer group, and prefix of the names of transactional IDs and topics."""
    source: SourceFile
    """The topics that are read, and how they are read."""
    tracking_id: TrackingIdFile
    """The rule for the tracking ID, which identifies the logical event."""
    guard_period: _PositiveDuration
    """How long another record with the same ID counts as a duplicate, such as 15m, 24h, or 7d."""
    grace: _Duration | None = None
    """How far behind stream time a record with an unknown ID may be without being late. Default: the guard period."""
    extend: bool = False
    """Whether a duplicate extends the guard period of its ID."""
    extend_at_most: _PositiveDuration | None = None
    """How far duplicates may extend a sighting, counted from the sighting's start. Default: 7 guard periods."""
    event_time: _PlainOrMapping[Literal["record", "arrival"], FieldTimeFile] = "record"
    """The record's timestamp (record), the source's append time (arrival), or a member of the value."""
    future: Literal["dead_letter", "clamp"] = "dead_letter"
    """What happens to a record whose event time is too far ahead of the clock."""
    max_clock_skew: _Duration = Field(default="1h", validate_default=True)
    """How far ahead of the clock an event time may be."""
    idle_after: _PositiveDuration = Field(default="1m", validate_default=True)
    """Time after which a source partition without lag stops holding back stream time."""
    output: Output | None = None
    """Where unique records are sent. If this key is missing, the topology is observe-only."""
    then: _PlainOrMapping[_FlowName, FlowFile] | None = None
    """Your code for each forwarded record, as module:attribute of a Flow or as {flow: ..., on_error: ...}."""
    routes: Annotated[list[_Topic], some("topic"), AfterValidator(_distinct)] | None = Field(
        default=None, json_schema_extra={"minItems": 1}
    )
    """Topics other than the output to which the flow sends records."""
    duplicates: _Topic | None = None
    """Topic for duplicates. If this key is missing, duplicates are only counted."""
    conflicts: _PlainOrMapping[_Topic, ConflictsFile] | None = None
    """Topic for duplicates whose payload differs, or a mapping {topic: ..., exclude: [...]}."""
    on_conflict: Literal["duplicate", "forward", "fail"] = "duplicate"
    """What happens to a duplicate whose payload differs."""
    late: Annotated[str, _TOPIC_RULE] | None = None
    """Topic for late records, or one of the words forward and drop. Default: the topic <output topic>.late."""
    dead_letter: _Topic | None = None
    """Topic for dead letters. Default: <output topic>.dead-letter."""
    state: StateSpec = StateSpec()
    """Settings for the state of the tasks."""
    transactions: TransactionsSpec = TransactionsSpec()
    """Settings for the transactions of the tasks."""
    sink: SinkFile | None = None
    """The table that `dedup sink` fills from the output."""


class FilesSource(Keys):
    """Append-only files in one directory. Files may be renamed, as in log rotation."""

    directory: Annotated[str, matching(_DIRECTORY, 'is not a directory; write a path, such as "."')]
    """Directory of the files. A relative path starts at the command's current directory; ~ is the home directory."""
    pattern: _FilePattern = "*.jsonl"
    """Pattern for the names of the files to read. A partly read file is read to its end under any name."""
    format: Literal["jsonl", "csv"] = "jsonl"
    """With jsonl, each line is one JSON value. With csv, each line is one row, after a line of column names."""
    columns: dict[_Column, CsvType] | None = None
    """All columns of the CSV files, each with the JSON type of its values."""
    changed: Literal["stop", "start_over"] = "stop"
    """What happens if a file is truncated or replaced after part of it was read."""
    last_line: Literal["wait", "take"] = "wait"
    """When to read the last line: after its line feed (wait), or at once, for files that arrive complete (take)."""

    @model_validator(mode="after")
    def _columns_of_csv(self) -> FilesSource:
        if self.format == "csv" and not self.columns:
            raise ValueError("format csv needs columns: {name: text | integer | number | boolean}")
        if self.format == "jsonl" and self.columns is not None:
            raise ValueError("columns need format csv; a line of jsonl is sent as it is")
        return self


class TableSource(_ExactlyOne):
    """An append-only table or query, with rows in increasing order of an integer column."""

    one_of = ("table", "query")

    url: _Url
    """sqlite:///FILE, postgresql://USER@HOST/DATABASE, or "${env:NAME}"."""
    table: _Table | None = None
    """Name of the table, or schema.table."""
    query: _Query | None = None
    """A SELECT statement instead of a table. The INSERT that takes a row's number must also make the row visible."""
    column: _Column
    """Column of increasing integers, such as an identity, serial, or AUTOINCREMENT column."""
    unique: _Column | None = None
    """Second integer column that distinguishes rows with the same number."""
    settle: _PositiveDuration | None = Field(
        default=None,
        description="How long to wait before rows are read, which is needed if the INSERT itself does not take the "
        "row's number. The setting is not exact, because a row that becomes visible even later is never read.",
    )

    @property
    def settle_ms(self) -> int:
        """The time in milliseconds to wait before rows are read, or 0 if `settle` is not set."""
        return self.settle or 0

    @property
    def named(self) -> str:
        """The name of the table, or the word "query" if the source is a query."""
        return self.table or "query"


class IngestSourceFile(_ExactlyOne):
    """The files or the table from which records are read."""

    one_of = ("files", "table")

    files: FilesSource | None = None
    """Files in one directory."""
    table: TableSource | None = None
    """A table in SQLite or PostgreSQL."""


class IngestIdFile(_ExactlyOne):
    """The members of a JSON value that form its tracking ID."""

    one_of = ("field", "fields")

    field: _Path | None = None
    """Path of the JSON member that is the ID."""
    fields: _Paths | None = None
    """Paths of several JSON members that together form the ID."""


class IngestOutputFile(Keys):
    """The topic to which records are sent."""

    topic: _Topic
    """Name of the topic, which is created if it does not exist."""
    partitions: (
        Annotated[int, accepting(lambda count: count >= 1, '"{}" is not a number of partitions; write 1 or more')]
        | None
    ) = None
    """Number of partitions, if the topic is created. Default: the brokers' default."""


class Marker(Keys):
    """How to recognize the last record of a transaction. The last record is sent like any other record."""

    field: _Path
    """Path of the JSON member that marks the last record."""
    equals: Annotated[
        str | int | bool,
        accepting(
            lambda value: isinstance(value, str | int),
            "takes text, a whole number, true, or false",
            kind=BeforeValidator,
        ),
    ]
    """The value of this member in the last record of a transaction."""


class IngestFile(Keys):
    """The content of an ingest file, which describes one exactly-once source."""

    ingest: _Version
    """Version of this file format."""
    name: Annotated[str, _NAME_RULE]
    """Prefix of the transactional ID and of the name of the topic for source offsets."""
    source: IngestSourceFile
    """The files or the table from which records are read."""
    output: IngestOutputFile
    """The topic to which records are sent."""
    tracking_id: IngestIdFile | None = None
    """Members to use as the record's key. Default: no key; the header dedup-id holds the position in the source."""
    event_time: _PlainOrMapping[Literal["now"], JsonTimeFile] = "now"
    """The record's timestamp, which is now (the time when the record is sent) or a member of the value."""
    dead_letter: _Topic | None = None
    """Topic for dead letters. Default: <name>.dead-letter."""
    boundary: _PlainOrMapping[Literal["interval", "poll"], Marker] = Field(
        default="interval",
        description="When a transaction ends: after the commit interval (interval), after each read of 1 MiB of a file "
        "or 5,000 rows (poll), or after each record that the source itself marks as the last one.",
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
