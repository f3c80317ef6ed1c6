"""The shape of what the edges are told: the file of `dedup ingest`, and `sink` in a topology file."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Discriminator, Field, Tag, model_validator

from dedup.topology.shapes import (
    FieldPath,
    FieldTimeFile,
    Keys,
    PositiveDuration,
    field_paths,
    name_text,
    topic_text,
    version_text,
)

_COLUMN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")
_TABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}(\.[A-Za-z_][A-Za-z0-9_]{0,62})?")
_URL: Final = re.compile(r"(sqlite:///.+|postgres(ql)?://.+|\$\{(env|file):[^}]+\})")
_QUERY: Final = re.compile(r"\s*(select|with)\b", re.IGNORECASE)
_PASSWORD: Final = re.compile(r"://[^/@:]*:(?!\$\{)[^@/]+@")
_ALWAYS: Final = {"acks", "idempotence", "enable_idempotence", "transactional_id", "transactions", "retries"}
RESERVED: Final = frozenset({"tracking_id", "event_time_ms"})
"""Columns that every table of a sink has."""

CsvType = Literal["text", "integer", "number", "boolean"]
ColumnType = Literal["text", "integer", "number", "boolean", "time", "json"]


def _column(text: str) -> str:
    if _COLUMN.fullmatch(text) is None:
        raise ValueError(f'"{text}" is no column name; write letters, digits and "_"')
    return text


def _sink_column(text: str) -> str:
    if text in RESERVED:
        raise ValueError(f'"{text}" is a column of every sink; choose another name')
    return _column(text)


def _table(text: str) -> str:
    if _TABLE.fullmatch(text) is None:
        raise ValueError(f'"{text}" is no table; write letters, digits and "_", as name or schema.name')
    return text


def _query(text: str) -> str:
    if _QUERY.match(text) is None or ";" in text:
        raise ValueError(f'"{text[:40]}" is no query; write one SELECT, without ";"')
    return text


def _url(text: str) -> str:
    if _PASSWORD.search(text):
        raise ValueError('a password must not be written here; write "${env:NAME}" for the whole address')
    if _URL.fullmatch(text) is None:
        raise ValueError(
            f'"{text}" is no database; write sqlite:///FILE, postgresql://USER@HOST/DATABASE or "${{env:NAME}}"'
        )
    return text


def _plain_name(text: str) -> str:
    if not text or "/" in text:
        raise ValueError(f'"{text}" is no pattern of file names, such as "*.jsonl"; directories go into `directory`')
    return text


def _partitions(count: int) -> int:
    if count < 1:
        raise ValueError(f'"{count}" is no number of partitions; write 1 or more')
    return count


def _shape(value: Any) -> str:  # noqa: ANN401 - whatever stands in the file
    return "mapping" if isinstance(value, dict | BaseModel) else "plain"


Column = Annotated[str, AfterValidator(_column)]
SinkColumn = Annotated[str, AfterValidator(_sink_column)]
Table = Annotated[str, AfterValidator(_table)]
Url = Annotated[str, AfterValidator(_url)]
Query = Annotated[str, AfterValidator(_query)]
Topic = Annotated[str, AfterValidator(topic_text)]


class FilesFile(Keys):
    """Files of one directory that only grow, and are moved away when they are full."""

    directory: str = Field(description="Where they are; relative to where the command runs.")
    pattern: Annotated[str, AfterValidator(_plain_name)] = Field(
        default="*.jsonl", description='Which names are read: "*.jsonl". A file renamed out of it is read to its end.'
    )
    format: Literal["jsonl", "csv"] = Field(
        default="jsonl", description="A JSON value a line; or a CSV row a line below a line of names."
    )
    columns: dict[Column, CsvType] | None = Field(
        default=None, description="The columns of a CSV file, all of them, and how each is written into JSON."
    )
    changed: Literal["stop", "start_over"] = Field(
        default="stop",
        description="What becomes of a file that was truncated or replaced after it was read in part.",
    )
    last_line: Literal["wait", "take"] = Field(
        default="wait",
        description="Of a last line without a line feed: wait until it has one, or take it, as files come complete.",
    )

    @model_validator(mode="after")
    def _columns_of_csv(self) -> FilesFile:
        if self.format == "csv" and not self.columns:
            raise ValueError("format csv needs columns: {name: text | integer | number | boolean}")
        if self.format == "jsonl" and self.columns is not None:
            raise ValueError("columns are of format csv; a line of jsonl is taken as it is")
        return self


class TableFile(Keys):
    """A table that rows are added to, each with a greater number."""

    url: Url = Field(description='sqlite:///FILE, postgresql://USER@HOST/DATABASE, or "${env:NAME}".')
    table: Table | None = Field(default=None, description="The table or schema.table.")
    query: Query | None = Field(
        default=None,
        description="A SELECT instead of a table; each of its rows must appear by the INSERT that takes its number.",
    )
    column: Column = Field(description="Whole numbers that grow: an identity, a sequence, an AUTOINCREMENT key.")
    unique: Column | None = Field(
        default=None, description="A second whole number that tells rows of one number apart, where there are such."
    )
    settle: PositiveDuration | None = Field(
        default=None,
        description="Where numbers are not taken by the INSERT itself: rows are read this long after they were there. "
        "Not exact: a row that comes later still is never read.",
    )

    @model_validator(mode="after")
    def _one(self) -> TableFile:
        if (self.table is None) == (self.query is None):
            raise ValueError("takes exactly one of table and query")
        return self


class IngestSourceFile(Keys):
    """Where records come from: files or a table."""

    files: FilesFile | None = Field(default=None, description="Files of one directory.")
    table: TableFile | None = Field(default=None, description="A table of SQLite or PostgreSQL.")

    @model_validator(mode="after")
    def _one(self) -> IngestSourceFile:
        if (self.files is None) == (self.table is None):
            raise ValueError("takes exactly one of files and table")
        return self


class IngestIdFile(Keys):
    """Which members of a record are its tracking ID."""

    field: FieldPath | None = Field(default=None, description="A member of the JSON value.")
    fields: Annotated[list[FieldPath], AfterValidator(field_paths)] | None = Field(
        default=None, description="Several members together."
    )

    @model_validator(mode="after")
    def _one(self) -> IngestIdFile:
        if (self.field is None) == (self.fields is None):
            raise ValueError("takes exactly one of field and fields")
        return self


class IngestOutputFile(Keys):
    """Where records go."""

    topic: Topic = Field(description="Made if it is not there.")
    partitions: Annotated[int, AfterValidator(_partitions)] | None = Field(
        default=None, description="Of a topic that is made; the brokers' default."
    )


class MarkerFile(Keys):
    """The record that is the last of its transaction; it is sent as any other."""

    field: FieldPath = Field(description="A member of the JSON value.")
    equals: str | int | bool = Field(description="What stands there in such a record.")


class IngestFile(Keys):
    """One exactly-once source."""

    ingest: Annotated[Literal[1], BeforeValidator(version_text)] = Field(description="Version of this format.")
    name: Annotated[str, AfterValidator(name_text)] = Field(
        description="Prefix of the transactional id and of the topic of source offsets."
    )
    source: IngestSourceFile = Field(description="Where records come from.")
    output: IngestOutputFile = Field(description="Where records go.")
    tracking_id: IngestIdFile | None = Field(
        default=None,
        description="Becomes the record's key. Without it a record gets the header dedup-id: its place in the source.",
    )
    event_time: Annotated[
        Annotated[Literal["now"], Tag("plain")] | Annotated[FieldTimeFile, Tag("mapping")], Discriminator(_shape)
    ] = Field(default="now", description="The record's timestamp: when it is sent, or a member of the value.")
    dead_letter: Topic | None = Field(default=None, description="Default: <name>.dead-letter.")
    boundary: Annotated[
        Annotated[Literal["interval", "poll"], Tag("plain")] | Annotated[MarkerFile, Tag("mapping")],
        Discriminator(_shape),
    ] = Field(
        default="interval",
        description="Where a transaction ends: after the commit interval, after each piece that is read at once (1 MiB "
        "of a file, 5,000 rows), or after each record with a marker of the source's own.",
    )

    @model_validator(mode="before")
    @classmethod
    def _no_way_out(cls, value: Any) -> Any:  # noqa: ANN401 - whatever stands in the file
        asked = sorted(_ALWAYS & set(value)) if isinstance(value, dict) else []
        if asked:
            raise ValueError(
                f"{', '.join(asked)}: producers are always idempotent, transactional and acks=all; leave it out"
            )
        return value


class ColumnFile(Keys):
    """One column of a sink's table."""

    field: FieldPath = Field(description="A member of the JSON value; null where it is missing.")
    type: ColumnType = Field(default="text", description="What it must be; another kind of value is a dead letter.")


class SinkFile(Keys):
    """A table with one row per tracking ID: what `dedup sink` writes."""

    url: Url = Field(description='sqlite:///FILE, postgresql://USER@HOST/DATABASE, or "${env:NAME}".')
    table: Table = Field(description="The table or schema.table; made if it is not there.")
    columns: (
        dict[
            SinkColumn,
            Annotated[
                Annotated[FieldPath, Tag("plain")] | Annotated[ColumnFile, Tag("mapping")], Discriminator(_shape)
            ],
        ]
        | None
    ) = Field(default=None, description="Column: a path, or {field, type}. Without it: key and value, as bytes.")
    topic: Topic | None = Field(default=None, description="What is read. Default: the output topic.")
    on_reuse: Literal["update", "append"] = Field(
        default="update",
        description="An ID forwarded again after its guard period: its row gets the newer values, or there is another.",
    )
    dead_letter: Topic | None = Field(default=None, description="Default: <name>.sink.dead-letter.")
