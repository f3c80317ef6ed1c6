"""A topology file to a `Topology`: everything that is wrong with it is said at once, each with its place."""

from __future__ import annotations

from typing import Any, Final

from pydantic import ValidationError

from dedup.core.event_time import EventTime, FieldTime, RecordTime, rfc3339_ms
from dedup.core.extract import compile_extractor
from dedup.core.fold import OnConflict, OnFuture, OnMissing, OnTombstone
from dedup.core.paths import parse_path
from dedup.core.tracking_id import (
    ContentRule,
    FieldRule,
    FieldsRule,
    HeaderRule,
    KeyRule,
    RawContentRule,
    Rule,
    TrackingId,
)
from dedup.core.window import Window
from dedup.document import in_order, read, told
from dedup.errors import Problem, TopologyError
from dedup.quantities import parse_duration, parse_size
from dedup.topology.file import FIELDS, ConflictsFile, TopologyFile, TrackingIdFile
from dedup.topology.model import Late, LateDrop, LateForward, LateTo, Output, SourceSpec, Start, StateSpec, Topology
from dedup.topology.sense import contradictions
from dedup.topology.shapes import FieldTimeFile
from dedup.topology.sink import sink_spec

_EXTENSIONS_OF_GUARD: Final = 7


def parse(text: str, *, name: str) -> Topology:
    """Return the topology a file describes; ``name`` is what its mistakes are reported under.

    Raises TopologyError with every problem of the file.
    """
    document = read(text, name=name)
    problems = document.problems
    if document.value is None and not problems:
        problems.append(Problem(name, 'is empty; begin with "dedup: 1", and see `dedup schema`'))
    elif document.value is not None and not isinstance(document.value, dict):
        problems.append(Problem(document.place(()), "must be a mapping of keys to values; begin with `dedup: 1`"))
    if not isinstance(document.value, dict):
        raise TopologyError(problems)
    checked: TopologyFile | None = None
    try:
        checked = TopologyFile.model_validate(document.value)
    except ValidationError as error:
        problems.extend(told(error.errors(include_url=False), document, FIELDS))
    problems.extend(contradictions(document))
    if problems or checked is None:
        raise TopologyError(in_order(problems))
    topology = _topology(checked)
    # Whatever the extractor would refuse is refused here, so that no worker starts with it.
    try:
        compile_extractor(topology.tracking_id, topology.event_time, fmt=topology.source.format, fingerprint=False)
    except ValueError as error:
        raise TopologyError([Problem(document.place(("tracking_id",)), str(error))]) from error
    return topology


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of topology files, for editors."""
    schema = TopologyFile.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "dedup topology"}


def _topology(file: TopologyFile) -> Topology:
    tracking_id = TrackingId(_rule(file.tracking_id), tuple(file.tracking_id.normalize))
    guard_ms = parse_duration(file.guard_period)
    cap_ms = guard_ms * _EXTENSIONS_OF_GUARD if file.extend_at_most is None else parse_duration(file.extend_at_most)
    grace_ms = guard_ms if file.grace is None else parse_duration(file.grace)
    output = None if file.output is None else Output(file.output.topic, file.output.headers)
    side_prefix = file.name if output is None else output.topic
    conflicts = file.conflicts if isinstance(file.conflicts, ConflictsFile) else ConflictsFile(topic=file.conflicts)
    return Topology(
        name=file.name,
        source=_source(file, tracking_id),
        tracking_id=tracking_id,
        window=Window(guard_ms, grace_ms, file.extend, cap_ms if file.extend else 0),
        dead_letter=file.dead_letter or f"{side_prefix}.dead-letter",
        late=_late(file.late or f"{side_prefix}.late"),
        output=output,
        event_time=_event_time(file.event_time),
        missing=OnMissing(file.tracking_id.missing),
        tombstones=OnTombstone(file.tracking_id.tombstones),
        future=OnFuture(file.future),
        max_clock_skew_ms=parse_duration(file.max_clock_skew),
        idle_after_ms=parse_duration(file.idle_after),
        duplicates=file.duplicates,
        conflicts=conflicts.topic,
        conflicts_counted=file.conflicts is not None,
        fingerprint_exclude=tuple(map(parse_path, conflicts.exclude)),
        on_conflict=OnConflict(file.on_conflict),
        state=_state(file),
        sink=None if file.sink is None else sink_spec(file.name, file.sink, output),
    )


def _source(file: TopologyFile, tracking_id: TrackingId) -> SourceSpec:
    # A normalized key may be equal where the producers' partitioner saw two keys: then nothing is implied.
    implied = isinstance(tracking_id.rule, KeyRule) and not tracking_id.normalize
    start: Start = "earliest"
    match file.source.start:
        case "earliest" | "latest" as named:
            start = named
        case text:
            start = rfc3339_ms(text) or 0
    declared = file.source.partitioned_by == "tracking_id"
    return SourceSpec(tuple(file.source.topics), file.source.format, declared or implied, start)


def _rule(file: TrackingIdFile) -> Rule:
    if file.header is not None:
        return HeaderRule(file.header)
    if file.field is not None:
        return FieldRule(parse_path(file.field))
    if file.fields is not None:
        return FieldsRule(tuple(map(parse_path, file.fields)))
    if file.content is True:
        return RawContentRule()
    if file.content is not None:
        return ContentRule(tuple(map(parse_path, file.content.exclude)))
    return KeyRule()


def _event_time(written: str | FieldTimeFile) -> EventTime:
    if isinstance(written, str):
        return RecordTime()
    return FieldTime(parse_path(written.field), written.unit)


def _late(written: str) -> Late:
    match written:
        case "forward":
            return LateForward()
        case "drop":
            return LateDrop()
        case topic:
            return LateTo(topic)


def _state(file: TopologyFile) -> StateSpec:
    most = file.state.max_bytes_per_partition
    return StateSpec(file.state.standby_replicas, None if most is None else parse_size(most))
