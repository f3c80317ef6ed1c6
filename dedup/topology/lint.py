"""Finds settings in a topology that are valid but have a cost or a risk that the author may not expect."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Final, Literal

from dedup.core.event_time import EventTime, FieldTime
from dedup.core.fold import OnConflict, OnFuture, OnMissing, OnTombstone
from dedup.core.formats import TYPED, Format, has_content_at, member_types, text_of, unreadable_as
from dedup.core.framing import SchemaRefused, SchemaText
from dedup.core.json_schema import json_types
from dedup.core.tracking_id import (
    ContentRule,
    FieldRule,
    FieldsRule,
    FirstOfRule,
    KeyFieldRule,
    PartsRule,
    Path,
    RawContentRule,
    Rule,
    alternatives_of,
    format_path,
    has_key,
    key_paths,
    member_paths,
)
from dedup.quantities import format_duration
from dedup.topology.model import LateDrop, LateForward, LateTo, Topology, rule_text
from dedup.topology.state_size import UUID_KEY_BYTES, format_bytes, predict
from dedup.yaml_document import At, dotted

FORMAT: Final[At] = ("source", "format")
KEY_FORMAT: Final[At] = ("source", "key_format")
"""The paths of the formats of values and of keys in a topology file."""
LARGEST_CHANGELOG_RECORD_BYTES: Final = 900_000
"""A size slightly below the broker's default `max.message.bytes`, which leaves space for the record batch's header."""
_LONG_GUARD_MS: Final = 2 * 86_400_000
"""If the guard period is at least this long, an equally long grace is worth a warning."""
_HOUR_MS: Final = 3_600_000
_IDS_PER_S: Final = 1_000
_SIGHTING_BYTES: Final = 24
_FINGERPRINT_BYTES: Final = 8
_CHANGES: Final[Mapping[Format, str]] = {
    "json": "a change of white space or member order",
    "json_schema": "a change of white space, member order, or schema id",
    "avro": "another order of a map's keys, or another schema,",
    "protobuf": "another order of fields or of a map's keys, or another schema,",
    "msgpack": "another order of members, or another encoding of a number or a length,",
    "cbor": "another order of members, or another encoding of a number or a length,",
    "csv": "another use of quotes, or a line break at the end,",
}
"""Maps each format to the possible differences between the bytes of two values with the same content."""
_KEYS_DIFFER: Final[Mapping[Format, str]] = dict.fromkeys(
    ("json_schema", "avro", "protobuf"),
    "keys contain the schema ID, so their bytes differ between versions of the schema",
)
"""Maps each format with a framing to the reason why keys with an equal member have different bytes."""

_WORDS: Final = frozenset(
    {"dead_letter", "discard", "drop", "fail", "false", "forward", "ignore", "none", "skip", "stop", "true"}
)
"""Words that name an action in other keys or programs. Where a topic is expected, they are topic names."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem that must be fixed (an error), or a risk that the author should know about (a warning)."""

    level: Literal["error", "warning"]
    code: str
    text: str
    weak: bool = False
    """True if a record may be sent twice or not at all."""
    at: At = ()
    """The path in the topology file of the value that the finding is about, or an empty path for the whole file."""


def lint(topology: Topology) -> list[Finding]:
    """Return the findings about a topology, with errors first."""
    findings = [
        *_changelog_record(topology),
        *_policies(topology),
        *_words_as_topics(topology),
        *_without_effect(topology),
        *_window(topology),
        *_where_ids_meet(topology),
        *_tracking_id(topology),
        *_paths(topology),
        *_schema(topology),
    ]
    return sorted(findings, key=lambda finding: finding.level)


def worst_record_bytes(topology: Topology) -> int:
    """Return the maximum changelog value size in bytes, which occurs if an ID recurs after every guard period."""
    window = topology.window
    sightings = window.segment_ms // window.guard_ms + 2
    return sightings * (_SIGHTING_BYTES + (_FINGERPRINT_BYTES if topology.fingerprints_wanted else 0))


def warning(code: str, text: str, *, weak: bool = False, at: At = ()) -> Finding:
    """Return a finding with the level "warning"."""
    return Finding("warning", code, text, weak, at)


def _changelog_record(topology: Topology) -> Iterator[Finding]:
    worst_bytes = worst_record_bytes(topology)
    if worst_bytes > LARGEST_CHANGELOG_RECORD_BYTES:
        guard, grace = format_duration(topology.window.guard_ms), format_duration(topology.window.grace_ms)
        yield Finding(
            "error",
            "changelog_record_too_large",
            f"grace {grace} is too long for guard_period {guard}: an ID reused every guard period would leave "
            f"{worst_bytes:,} bytes in one changelog record, more than {LARGEST_CHANGELOG_RECORD_BYTES:,}. "
            f"Shorten grace or lengthen guard_period.",
        )


def _policies(topology: Topology) -> Iterator[Finding]:
    outside = "They are outside the guarantee, and marked by the header dedup-verdict"
    if isinstance(topology.late, LateForward):
        text = f"late: forward sends late records to the output unjudged, so duplicates among them pass. {outside}."
        yield warning("late_forwarded", text, weak=True)
    if isinstance(topology.late, LateDrop):
        text = (
            "late: drop loses late records; only their number is kept. Name a topic, or omit late for the default "
            "topic; `dedup replay` can forward them later."
        )
        yield warning("late_dropped", text, weak=True)
    if topology.missing is OnMissing.FORWARD:
        text = f"tracking_id.missing: forward sends every record without an ID to the output. {outside}."
        yield warning("missing_forwarded", text, weak=True)
    if topology.missing is OnMissing.FAIL:
        text = "tracking_id.missing: fail stops the worker at the first record without an ID, until the cause is fixed."
        yield warning("missing_stops", text)
    if topology.needs_value and topology.tombstones is OnTombstone.FORWARD:
        text = f"tracking_id.tombstones: forward (the default) sends every null value to the output. {outside}."
        yield warning("tombstones_forwarded", text)
    if topology.on_conflict is OnConflict.FORWARD:
        text = (
            f"on_conflict: forward forwards a duplicate whose payload differs: identity is ID and payload. {outside}."
        )
        yield warning("conflicts_forwarded", text, weak=True)
    if topology.on_conflict is OnConflict.FAIL:
        text = "on_conflict: fail stops the worker at the first conflicting duplicate, until the cause is fixed."
        yield warning("conflict_stops", text)


def _words_as_topics(topology: Topology) -> Iterator[Finding]:
    late = topology.late.topic if isinstance(topology.late, LateTo) else None
    topics = {
        "late": late,
        "duplicates": topology.duplicates,
        "conflicts": topology.conflicts,
        "dead_letter": topology.dead_letter,
    }
    for key, topic in topics.items():
        if topic is not None and topic.lower().replace("-", "_") in _WORDS:
            remedy = "write forward or drop" if key == "late" else "leave the key out"
            text = f"{key}: {topic} sends records to a topic of this name. If you do not mean a topic, {remedy}."
            yield warning("word_as_topic", text, at=(key,))


def _without_effect(topology: Topology) -> Iterator[Finding]:
    if topology.conflicts is not None and topology.on_conflict in {OnConflict.FORWARD, OnConflict.FAIL}:
        text = (
            f"conflicts: {topology.conflicts} never gets a record with on_conflict: {topology.on_conflict.value}. "
            f"Remove one of them; without on_conflict, conflicting duplicates go to this topic."
        )
        yield warning("conflicts_unused", text)
    if topology.sink is not None and not topology.sink.topic:
        text = "sink: there is no output and no sink.topic, so `dedup sink` has no topic to read. Add one of them."
        yield Finding("error", "sink_without_topic", text, at=("sink",))


def _window(topology: Topology) -> Iterator[Finding]:
    window = topology.window
    if window.grace_ms == 0:
        text = "grace: 0s: a record that is out of order by 1 ms is late, unless its ID is known."
        yield warning("no_grace", text)
    elif window.guard_ms >= _LONG_GUARD_MS and window.grace_ms == window.guard_ms:
        shorter = replace(window, grace_ms=_HOUR_MS)
        now, then = (
            format_bytes(predict(each, _IDS_PER_S, UUID_KEY_BYTES, fingerprints=False)["disk_most_bytes"])
            for each in (window, shorter)
        )
        guard = format_duration(window.guard_ms)
        text = (
            f"grace is {guard}, as long as guard_period (the default), so the state keeps each ID for twice as long. "
            f"At {_IDS_PER_S:,} new UUIDs per second, it takes up to {now} of disk, and {then} with grace: 1h, which "
            "suffices if records are at most 1 hour out of order. `dedup size` predicts it for your records."
        )
        yield warning("grace_doubles_state", text)
    if window.extend and window.extend_at_most_ms < window.guard_ms:
        text = (
            f"extend_at_most {format_duration(window.extend_at_most_ms)} is shorter than guard_period "
            f"{format_duration(window.guard_ms)}: extending has hardly any effect. Lengthen it, or remove extend."
        )
        yield warning("cap_below_guard", text)
    if topology.future is OnFuture.CLAMP:
        text = "future: clamp changes the event time, and with it the timestamp, of records too far ahead of the clock."
        yield warning("times_clamped", text)
    if topology.max_clock_skew_ms == 0:
        text = "max_clock_skew: 0s: every record of a producer whose clock is 1 ms ahead becomes a dead letter."
        yield warning("no_clock_skew", text)
    if topology.source.start == "latest":
        text = "source.start: latest skips what is in the topic when the topology first runs; those IDs stay unknown."
        yield warning("start_latest", text)


def _where_ids_meet(topology: Topology) -> Iterator[Finding]:
    several = len(topology.source.topics) > 1
    rule = topology.tracking_id.rule
    if not topology.direct:
        why = "there are several source topics" if several else "source.partitioned_by is not set"
        text = (
            f"Records go through {topology.repartition_topic}, because {why}. Order is then kept per tracking ID, "
            f"no longer per key, and each record is written one more time."
        )
        yield warning("order_per_tracking_id", text)
    if several and topology.source.partitioned_by_tracking_id and not has_key(rule):
        yield warning("partitioned_by_unused", "source.partitioned_by has no effect with several source topics.")
    if topology.direct and key_paths(rule) and not has_key(rule):
        differs = _KEYS_DIFFER.get(topology.source.key_format, "keys with an equal member may have different bytes")
        text = (
            f"source.partitioned_by: tracking_id with key: PATH: {differs}, and producers choose the partition by the "
            f"bytes of the key. Equal IDs in different partitions are not found. Remove source.partitioned_by, unless "
            f"producers partition by the tracking ID itself."
        )
        yield warning("partitioned_by_key_bytes", text, weak=True)
    if topology.direct and topology.tracking_id.normalize:
        text = (
            "IDs that normalize makes equal must already be in the same partition: producers must partition by the "
            "normalized ID. Otherwise remove source.partitioned_by."
        )
        yield warning("normalized_after_partitioning", text)
    if has_key(rule) and not topology.direct and not several:
        text = "the key in tracking_id with normalize: equal IDs may have different keys, so records are repartitioned."
        yield warning("normalized_keys_repartitioned", text)


def _schema(topology: Topology) -> Iterator[Finding]:
    if topology.source.schema is not None:
        yield from schema_findings(topology, text_of(topology.source.schema), topology.source.schema.name)
    rules = [rule for rule in alternatives_of(topology.tracking_id.rule) if isinstance(rule, ContentRule)]
    if topology.fingerprints_wanted and topology.compared is not None:
        rules.append(topology.compared)
    if topology.source.names_schemas and any(rule.schema is None for rule in rules):
        text = "a record that is sent again with another schema may have other content; name one schema for all records"
        yield warning("content_of_schemas", f"{text}: content: {{schema: FILE}}, or conflicts: {{schema: FILE}}.")
    if topology.source.is_memberwise and topology.fingerprints_wanted and topology.compared is None:
        text = f"conflicts compare bytes: {_CHANGES[topology.source.format]} makes another payload."
        yield warning("payload_bytes_compared", text)


def schema_findings(topology: Topology, schema: SchemaText, name: str) -> Iterator[Finding]:
    """Yield the findings about a topology whose values have the given schema."""
    members = [*_id_members(topology.tracking_id.rule, ("tracking_id",))]
    if isinstance(topology.event_time, FieldTime):
        members.append(_Member(("event_time", "field"), topology.event_time.path, topology.event_time))
    first = topology.source.schema is not None
    findings = [*_schema_findings(topology, members, topology.source.format, schema, name, first=first)]
    yield from findings
    if all(finding.code != "schema_refused" for finding in findings):
        yield from _content_findings(topology, schema, name, first=first)


def key_schema_findings(topology: Topology, schema: SchemaText, name: str) -> Iterator[Finding]:
    """Yield the findings about a topology whose keys have the given schema."""
    members = [*_id_members(topology.tracking_id.rule, ("tracking_id",), of_key=True)]
    yield from _schema_findings(topology, members, topology.source.key_format, schema, name, place=KEY_FORMAT)


def _schema_findings(
    topology: Topology,
    members: Sequence[_Member],
    fmt: Format,
    schema: SchemaText,
    name: str,
    *,
    first: bool = False,
    place: At = FORMAT,
) -> Iterator[Finding]:
    try:
        if not members:
            _types_of(fmt, schema, _Member((), ("",)), first=first)  # to refuse an invalid schema
        found = [_types_of(fmt, schema, member, first=first) for member in members]
    except SchemaRefused as refused:
        said = f"the schema {name} {refused}"
        if fmt == "json_schema":  # No schema is needed to read the records.
            yield warning("schema_refused", f"{said}, so the types of members were not checked.", at=place)
        else:
            yield Finding("error", "schema_refused", f"{said}: its records would become dead letters.", at=place)
        return
    for member, types in zip(members, found, strict=True):
        yield from _member_findings(topology, name, member, types)


@dataclass(frozen=True, slots=True)
class _Member:
    """A member of the value that a topology reads, with the place of its path in the topology file."""

    at: At
    path: Path
    time: FieldTime | None = None
    in_parts: bool = False


def _id_members(rule: Rule, at: At, *, of_key: bool = False) -> Iterator[_Member]:
    """Yield the members of the value or the key that form the ID."""
    match rule:
        case FirstOfRule(alternatives):
            for row, each in enumerate(alternatives):
                yield from _id_members(each, (*at, "first_of", row), of_key=of_key)
        case KeyFieldRule(path) if of_key:
            yield _Member((*at, "key"), path)
        case FieldRule(path) if not of_key:
            yield _Member((*at, "field"), path)
        case FieldsRule(paths) if not of_key:
            yield from (_Member((*at, "fields", row), path) for row, path in enumerate(paths))
        case PartsRule(parts):
            for row, part in enumerate(parts):
                if isinstance(part.rule, KeyFieldRule) and of_key:
                    yield _Member((*at, "parts", row, "key"), part.rule.path, in_parts=True)
                elif isinstance(part.rule, FieldRule) and not of_key:
                    yield _Member((*at, "parts", row, "field"), part.rule.path, in_parts=True)
        case _:
            return


def _paths(topology: Topology) -> Iterator[Finding]:
    if topology.source.format == "csv":  # Each path is the name of a column.
        return
    excluded = (
        ((*at, "exclude", row), path) for at, rule in _contents(topology) for row, path in enumerate(rule.exclude)
    )
    columns = () if topology.sink is None else topology.sink.columns
    cells = ((("sink", "columns", column.name), column.path) for column in columns)
    yield from path_findings(topology.tracking_id.rule, topology.event_time, (*excluded, *cells))


def path_findings(rule: Rule, event_time: EventTime, more: Iterable[tuple[At, Path]]) -> Iterator[Finding]:
    """Yield a warning for each path that looks like a JSONPath or a JSON Pointer, which dedup would read differently.

    ``more`` contains paths besides those of the tracking ID and of the event time, with their places in the file.
    """
    members = [*_id_members(rule, ("tracking_id",)), *_id_members(rule, ("tracking_id",), of_key=True)]
    paths = [(member.at, member.path) for member in members]
    if isinstance(event_time, FieldTime):
        paths.append((("event_time", "field"), event_time.path))
    for at, path in (*paths, *more):
        if meant := _meant(path):
            text = f'{dotted(at)}: {format_path(path)} begins with a member named "{path[0]}". Unless the records have '
            yield warning("path_notation", f"{text}such a member, write {format_path(meant)}.", at=at)


def _meant(path: Path) -> Path:
    """Return the path that a JSONPath or a JSON Pointer represents, or an empty path for any other text."""
    first, *others = path
    if first == "$":
        return tuple(others)
    if not isinstance(first, str) or not first.startswith("/"):
        return ()
    steps = (int(step) if step.isdecimal() else step for step in first.split("/") if step)
    return (*steps, *others)


def _contents(topology: Topology) -> Iterator[tuple[At, ContentRule]]:
    """Yield the rules for content, with their places in the topology file."""
    rule = topology.tracking_id.rule
    several = isinstance(rule, FirstOfRule)
    for row, each in enumerate(alternatives_of(rule)):
        if isinstance(each, ContentRule):
            yield ("tracking_id", "first_of", row, "content") if several else ("tracking_id", "content"), each
    if topology.compared is not None:
        yield ("conflicts",), topology.compared


def _content_findings(topology: Topology, schema: SchemaText, name: str, *, first: bool) -> Iterator[Finding]:
    """Yield the findings about content. The parser has already checked the members excluded from a schema file."""
    fmt = topology.source.format
    for holder, rule in _contents(topology):
        pinned = None if rule.schema is None else text_of(rule.schema)
        fault = None if pinned is None or fmt not in TYPED else unreadable_as(fmt, schema, pinned)
        if rule.schema is not None and fault is not None:
            said = f"{rule.schema.name} cannot be the schema of content: the schema {name} {fault}."
            yield Finding("error", "schema_unresolvable", f"{dotted(holder)}: {said}", at=(*holder, "schema"))
        for row, path in enumerate(rule.exclude if rule.schema is None else ()):
            at = (*holder, "exclude", row)
            if fmt in TYPED:
                there = has_content_at(fmt, schema, path, first=first)
            else:
                there = bool(_types_of(fmt, schema, _Member(at, path), first=first))
            if not there:
                said = f"{format_path(path)} is not in the schema {name}, so nothing is left out there."
                yield warning("exclude_missing", f"{dotted(at[:-1])}: {said}", at=at)


def _types_of(fmt: Format, schema: SchemaText, member: _Member, *, first: bool) -> dict[str, bool]:
    if fmt == "json_schema":
        text = schema if isinstance(schema, str) else schema.text
        return json_types(text, member.path, member.time, containers=member.in_parts)
    return member_types(fmt, schema, member.path, member.time, first=first)


def _member_findings(topology: Topology, name: str, member: _Member, types: Mapping[str, bool]) -> Iterator[Finding]:
    of_key = ".key" if member.at[-1:] == ("key",) else ""
    key = f"tracking_id{of_key}" if member.time is None else "event_time"
    place = f"{key}: {format_path(member.path)}"
    refused_types = " or ".join(sorted(name for name, refused in types.items() if refused))
    if not types and member.time is None and isinstance(topology.tracking_id.rule, FirstOfRule):
        text = f"{place} is not in the schema {name}, so another alternative gives the IDs of its records."
        yield warning("alternative_missing", text, at=member.at)
    elif not types:
        yield Finding("error", "member_missing", f"{place} is not in the schema {name}.", at=member.at)
    elif all(types.values()):
        text = f"{place} has the type {refused_types} in the schema {name}."
        yield Finding("error", "member_refused", text, at=member.at)
    elif refused_types:
        text = f"{place} may also have the type {refused_types}, which makes a record a dead letter."
        yield warning("type_sometimes_refused", text, at=member.at)


def _tracking_id(topology: Topology) -> Iterator[Finding]:
    rules = alternatives_of(topology.tracking_id.rule)
    if all(isinstance(rule, ContentRule | RawContentRule) for rule in rules):
        if topology.tracking_id.normalize:
            yield warning("normalize_unused", "tracking_id.normalize has no effect on content, only on text.")
        # An excluded member is not part of the ID, so this member may differ between payloads with equal IDs. In a
        # format whose payloads are compared as bytes, the bytes of equal content may also differ.
        differing = any(
            isinstance(rule, ContentRule) and (rule.exclude or rule.schema or topology.source.is_memberwise)
            for rule in rules
        )
        if topology.fingerprints_wanted and not differing:
            text = "conflicts and on_conflict have no effect: records with equal content have equal payloads."
            yield warning("no_conflicts_possible", text)
    members_used = member_paths(topology.tracking_id.rule) or topology.source.key_format == "protobuf"
    if topology.tracking_id.zeros and not members_used:
        yield warning("zero_unused", "tracking_id.zero has no effect: no member of the value is part of the ID.")
    if topology.tombstones is OnTombstone.DEAD_LETTER and not topology.needs_value:
        text = "neither the ID nor the event time is read from the value by a path, so null values are judged, too."
        yield warning("tombstones_unused", f"tracking_id.tombstones has no effect: {text}")
    for rule in rules[:-1]:
        if isinstance(rule, ContentRule | RawContentRule):
            written = rule_text(rule, attrgetter("name"))
            text = f"tracking_id.first_of: every value has {written}, so later alternatives are hardly used."
            yield warning("alternatives_unused", text)
    if RawContentRule() in rules and topology.source.format != "bytes":
        text = f"tracking_id.content: true compares bytes: {_CHANGES[topology.source.format]} makes a new event."
        yield warning("bytes_compared", text)
