"""The file of `dedup ingest`: an exactly-once source, checked and complete."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, assert_never

from pydantic import ValidationError

from dedup.core.event_time import EventTime, FieldTime, RecordTime
from dedup.core.paths import Path, parse_path
from dedup.core.tracking_id import FieldRule, FieldsRule
from dedup.document import Document, in_order, read, told
from dedup.errors import Problem, TopologyError
from dedup.quantities import format_duration, parse_duration
from dedup.topology.edge_file import (
    CsvType,
    FilesFile,
    IngestFile,
    IngestIdFile,
    IngestOutputFile,
    IngestSourceFile,
    MarkerFile,
    TableFile,
)

_MARK: Final = re.compile(r"^ingest\s*:", re.MULTILINE)
FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "": tuple(IngestFile.model_fields),
    "source": tuple(IngestSourceFile.model_fields),
    "source.files": tuple(FilesFile.model_fields),
    "source.table": tuple(TableFile.model_fields),
    "tracking_id": tuple(IngestIdFile.model_fields),
    "output": tuple(IngestOutputFile.model_fields),
    "event_time": ("field", "unit"),
    "boundary": tuple(MarkerFile.model_fields),
}
"""The keys of each mapping, for did-you-mean."""


@dataclass(frozen=True, slots=True)
class FilesSource:
    """Files of one directory."""

    directory: str
    pattern: str
    columns: tuple[tuple[str, CsvType], ...] | None
    """Of CSV; None: a JSON value a line."""
    start_over: bool
    """A file that was truncated or replaced is read from its beginning; else ingest stops."""
    take_last_line: bool


@dataclass(frozen=True, slots=True)
class TableSource:
    """A table, or a query's rows, to which rows are added, each with a greater number."""

    url: str
    """As written: a reference such as ``${env:DATABASE_URL}`` is resolved where it is used."""
    table: str
    """Empty where there is a query."""
    column: str
    unique: str | None
    query: str = ""
    settle_ms: int = 0
    """How long a number may be taken before its row is there; 0: numbers are taken by the INSERT itself."""

    @property
    def named(self) -> str:
        """The table's name; of a query "query"."""
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
    """Where a transaction ends."""

    @property
    def offsets_topic(self) -> str:
        """The compacted topic that holds how far the source was read."""
        return f"{self.name}-source-offsets"

    @property
    def has_header(self) -> bool:
        """Whether records get the header `dedup-id`."""
        return self.tracking_id is None


def is_ingest(text: str) -> bool:
    """Tell whether a file is one of `dedup ingest`, also where the rest of it is wrong."""
    return _MARK.search(text) is not None


def parse_ingest(text: str, *, name: str) -> Ingest:
    """Return the source that a file describes. Raises TopologyError with every problem of the file."""
    document = read(text, name=name)
    problems = document.problems
    if not isinstance(document.value, dict):
        if not problems:
            problems.append(Problem(name, "must be a mapping of keys to values; begin with `ingest: 1`"))
        raise TopologyError(problems)
    checked: IngestFile | None = None
    try:
        checked = IngestFile.model_validate(document.value)
    except ValidationError as error:
        problems.extend(told(error.errors(include_url=False), document, FIELDS))
    problems.extend(_topics_meet(document))
    if problems or checked is None:
        raise TopologyError(in_order(problems))
    return _ingest(checked)


def ingest_schema() -> dict[str, Any]:
    """Return the JSON Schema of ingest files, for editors."""
    schema = IngestFile.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "dedup ingest"}


def _topics_meet(document: Document) -> list[Problem]:
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
        event_time=_event_time(file),
        dead_letter=file.dead_letter or f"{file.name}.dead-letter",
        boundary=_boundary(file),
    )


def _boundary(file: IngestFile) -> Boundary:
    match file.boundary:
        case "interval" | "poll" as plain:
            return plain
        case marker:
            return Marker(parse_path(marker.field), marker.equals)


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
            raise AssertionError("one of files and table was checked to be there")


def _rule(file: IngestIdFile | None) -> FieldRule | FieldsRule | None:
    if file is None:
        return None
    if file.field is not None:
        return FieldRule(parse_path(file.field))
    return FieldsRule(tuple(map(parse_path, file.fields or ())))


def _event_time(file: IngestFile) -> EventTime:
    match file.event_time:
        case str():
            return RecordTime()
        case written:
            return FieldTime(parse_path(written.field), written.unit)


def place_of(source: Source) -> str:
    """Return a source in a few words, for messages and drawings."""
    match source:
        case FilesSource():
            return f"{source.directory}/{source.pattern}"
        case TableSource():
            return f"table {source.table}" if source.table else "a query"
        case never:
            assert_never(never)


def settle_sentence(table: TableSource) -> str:
    """Return what a source with `settle` does not promise."""
    settle = format_duration(table.settle_ms)
    return (
        f"settle: {settle} is not exact: a row of {table.named} that can be seen more than {settle} after a greater "
        f"number was is never read. Exact is a number that the INSERT itself takes, and no `settle`."
    )
