"""Parses ingest files, whose structure the module `schema` defines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from dedup.core.event_time import EventTime
from dedup.core.tracking_id import FieldRule, FieldsRule
from dedup.errors import Problem
from dedup.quantities import format_duration
from dedup.topology.parse import checked_file, event_time_of
from dedup.topology.schema import FilesSource, IngestFile, Marker, TableSource
from dedup.yaml_document import Document, schema_of

_VERSION_KEY: Final = re.compile(r"""^\ufeff?(?:\{\s*)?(["']?)(ingest|dedup)\1\s*:""", re.MULTILINE)
"""Matches the key that identifies the kind of file. A byte order mark, a quote, or a brace may precede the key."""


Source = FilesSource | TableSource
Boundary = Literal["interval", "poll"] | Marker


@dataclass(frozen=True, slots=True)
class Ingest:
    """The content of an ingest file, which describes a source and how `dedup ingest` sends the source's records."""

    name: str
    source: Source
    topic: str
    partitions: int | None
    tracking_id: FieldRule | FieldsRule | None
    event_time: EventTime
    dead_letter: str
    boundary: Boundary = "interval"
    """The rule that determines when a transaction ends."""

    @property
    def offsets_topic(self) -> str:
        """The compacted topic that stores the position of `dedup ingest` in the source."""
        return f"{self.name}-source-offsets"


def is_ingest(text: str) -> bool:
    """Return whether a file is an ingest file, even if it is invalid."""
    return "ingest" in _kinds(text)


def is_topology(text: str) -> bool:
    """Return whether a file is a topology file, even if it is invalid."""
    return _kinds(text) == {"dedup"}


def _kinds(text: str) -> set[str]:
    return {match[2] for match in _VERSION_KEY.finditer(text)}


def parse_ingest(text: str, *, name: str) -> Ingest:
    """Parse the text of an ingest file. Raises TopologyError, listing every problem, if the file is invalid."""
    file = checked_file(text, name, IngestFile, [_one_role_each])
    source = file.source.files or file.source.table
    assert source is not None  # noqa: S101  # the schema requires exactly one of files and table
    rule: FieldRule | FieldsRule | None = None
    if file.tracking_id is not None:
        one, several = file.tracking_id.field, file.tracking_id.fields
        rule = FieldsRule(tuple(several or ())) if one is None else FieldRule(one)
    return Ingest(
        name=file.name,
        source=source,
        topic=file.output.topic,
        partitions=file.output.partitions,
        tracking_id=rule,
        event_time=event_time_of(file.event_time),
        dead_letter=file.dead_letter or f"{file.name}.dead-letter",
        boundary=file.boundary,
    )


def ingest_schema() -> dict[str, Any]:
    """Return the JSON Schema of ingest files, for use in editors."""
    return schema_of(IngestFile, "dedup ingest")


def _one_role_each(document: Document) -> Iterator[Problem]:
    name, topic, dead = (document.get(at) for at in (("name",), ("output", "topic"), ("dead_letter",)))
    offsets = f"{name}-source-offsets"
    roles = ((dead or f"{name}.dead-letter", "takes dead letters"), (offsets, "holds the source offsets"))
    for taken, role in roles:
        if topic == taken:
            text = f'output.topic: "{topic}" {role}; name another'
            yield Problem(document.place(("output", "topic")), text)
    if dead == offsets:
        yield Problem(document.place(("dead_letter",)), f'dead_letter: "{dead}" holds the source offsets; name another')


def settle_sentence(table: TableSource) -> str:
    """Return the warning shown for a source that sets `settle`."""
    settle = format_duration(table.settle_ms)
    return (
        f"settle: {settle} is not exact: a row of {table.named} that becomes visible more than {settle} after a "
        f"greater number is never read. To be exact, let the INSERT itself take the number, and remove `settle`."
    )
