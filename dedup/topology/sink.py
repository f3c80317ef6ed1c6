"""`sink` of a topology file, checked and complete."""

from __future__ import annotations

from dedup.core.paths import parse_path
from dedup.topology.edge_file import ColumnFile, SinkFile
from dedup.topology.model import Output, SinkColumn, SinkSpec


def sink_spec(name: str, file: SinkFile, output: Output | None) -> SinkSpec:
    """Return what is sunk where; without a topic of its own it is the output, and of an observer it is nothing."""
    columns = tuple(
        SinkColumn(column, parse_path(written.field), written.type)
        if isinstance(written, ColumnFile)
        else SinkColumn(column, parse_path(written), "text")
        for column, written in (file.columns or {}).items()
    )
    return SinkSpec(
        url=file.url,
        table=file.table,
        columns=columns,
        topic=file.topic or ("" if output is None else output.topic),
        append=file.on_reuse == "append",
        dead_letter=file.dead_letter or f"{name}.sink.dead-letter",
    )
