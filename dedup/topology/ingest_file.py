"""The file of `dedup ingest` as the program works with it, and how it is parsed; `schema` has its shape."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final, Literal, assert_never

from dedup.core.event_time import EventTime
from dedup.core.json_path import Path, parse_path
from dedup.core.tracking_id import FieldRule, FieldsRule
from dedup.errors import Problem, TopologyError
from dedup.quantities import format_duration, parse_duration
from dedup.topology.parse import event_time_of
from dedup.topology.schema import CsvType, FilesFile, IngestFile, IngestIdFile, IngestSourceFile, MarkerFile, TableFile
from dedup.yaml_document import Document, in_order, read, schema_of, validated

_INGEST_KEY: Final = re.compile(r"^ingest\s*:", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class FilesSource:
    """Files of one directory."""

    directory: str
    pattern: str
    columns: tuple[tuple[str, CsvType], ...] | None
    """Of CSV; None: one JSON value per line."""
    start_over: bool
    """Whether a truncated or replaced file is read from its beginning; otherwise ingest stops."""
    take_last_line: bool


@dataclass(frozen=True, slots=True)
class TableSource:
    """A table or a query to which rows are only added, each with a greater number."""

    url: str
    """As written: a reference such as ``${env:DATABASE_URL}`` is resolved where it is used."""
    table: str
    """Empty if there is a query."""
    column: str
    unique: str | None
    query: str = ""
    settle_ms: int = 0
    """How long after its number is taken a row may become visible; 0: the INSERT itself takes the number."""

    @property
    def named(self) -> str:
        """The table's name, or "query"."""
        return self.table or "query"


Source = FilesSource | TableSource


@dataclass(frozen=True, slots=True)
class Marker:
    """The record in which this member has this value is the last of its transaction."""

    path: Path
    equals: str | int | bool


Boundary = Literal["interval", "poll"] | Marker


@dataclass(frozen=True, slots=True)
class Ingest:
    """One exactly-once source."""

    name: str
    source: Source
    topic: str
    partitions: int | None
    tracking_id: FieldRule | FieldsRule | None
    event_time: EventTime
    dead_letter: str
    boundary: Boundary = "interval"
    """When a transaction ends."""

    @property
    def offsets_topic(self) -> str:
        """The compacted topic that stores how far the source was read."""
        return f"{self.name}-source-offsets"

    @property
    def has_header(self) -> bool:
        """Whether records get the header `dedup-id`, because no member is their ID."""
        return self.tracking_id is None


def is_ingest(text: str) -> bool:
    """Tell whether a file is one of `dedup ingest`, even if it is invalid otherwise."""
    return _INGEST_KEY.search(text) is not None


def parse_ingest(text: str, *, name: str) -> Ingest:
    """Return the source that a file describes. Raises TopologyError with every problem of the file."""
    document = read(text, name=name)
    problems = document.problems
    if not isinstance(document.value, dict):
        if not problems:
            problems.append(Problem(name, "must be a mapping of keys to values; begin with `ingest: 1`"))
        raise TopologyError(problems)
    checked, found = validated(document, IngestFile)
    problems += [*found, *_one_role_each(document)]
    if problems or checked is None:
        raise TopologyError(in_order(problems))
    return _ingest(checked)


def ingest_schema() -> dict[str, Any]:
    """Return the JSON Schema of ingest files, for editors."""
    return schema_of(IngestFile, "dedup ingest")


def _one_role_each(document: Document) -> list[Problem]:
    name, topic, dead = (document.get(at) for at in (("name",), ("output", "topic"), ("dead_letter",)))
    offsets = f"{name}-source-offsets"
    taken = {dead or f"{name}.dead-letter": "takes dead letters", offsets: "holds the source offsets"}
    found: list[Problem] = []
    if topic in taken:
        text = f'output.topic: "{topic}" {taken[topic]}; name another'
        found.append(Problem(document.place(("output", "topic")), text))
    if dead == offsets:
        found.append(Problem(document.place(("dead_letter",)), f'dead_letter: "{dead}" {taken[offsets]}; name another'))
    return found


def _ingest(file: IngestFile) -> Ingest:
    return Ingest(
        name=file.name,
        source=_source(file.source),
        topic=file.output.topic,
        partitions=file.output.partitions,
        tracking_id=_rule(file.tracking_id),
        event_time=event_time_of(file.event_time),
        dead_letter=file.dead_letter or f"{file.name}.dead-letter",
        boundary=(
            Marker(parse_path(file.boundary.field), file.boundary.equals)
            if isinstance(file.boundary, MarkerFile)
            else file.boundary
        ),
    )


def _source(file: IngestSourceFile) -> Source:
    match file:
        case IngestSourceFile(files=FilesFile() as files):
            return FilesSource(
                directory=files.directory,
                pattern=files.pattern,
                columns=None if files.columns is None else tuple(files.columns.items()),
                start_over=files.changed == "start_over",
                take_last_line=files.last_line == "take",
            )
        case IngestSourceFile(table=TableFile() as table):
            settle_ms = parse_duration(table.settle) if table.settle else 0
            return TableSource(
                table.url, table.table or "", table.column, table.unique, query=table.query or "", settle_ms=settle_ms
            )
        case _:
            raise AssertionError("the shape requires one of files and table")


def _rule(file: IngestIdFile | None) -> FieldRule | FieldsRule | None:
    if file is None:
        return None
    if file.field is not None:
        return FieldRule(parse_path(file.field))
    return FieldsRule(tuple(map(parse_path, file.fields or ())))


def place_of(source: Source) -> str:
    """Return a source in a few words, for messages."""
    match source:
        case FilesSource():
            return f"{source.directory}/{source.pattern}"
        case TableSource():
            return f"table {source.table}" if source.table else "a query"
        case never:
            assert_never(never)


def settle_sentence(table: TableSource) -> str:
    """Return the warning about a source with `settle`."""
    settle = format_duration(table.settle_ms)
    return (
        f"settle: {settle} is not exact: a row of {table.named} that becomes visible more than {settle} after a "
        f"greater number is never read. To be exact, let the INSERT itself take the number, and remove `settle`."
    )
