"""Describes a topology as text, data, and a drawing, and lists the permissions that the topology's workers need."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from operator import attrgetter
from typing import Any, Final, Literal

from dedup.core.event_time import ArrivalTime, FieldTime
from dedup.core.fold import OnConflict, OnMissing, OnTombstone
from dedup.core.tracking_id import code_rules, format_path
from dedup.quantities import counted, format_duration, format_size
from dedup.topology.model import LateForward, LateTo, Topology, rule_text

_COLUMN_PX: Final = 250
_ROW_PX: Final = 58
_BOX_WIDTH_PX: Final = 190
_BOX_HEIGHT_PX: Final = 38
_MARGIN_PX: Final = 20
_CHARS_IN_BOX: Final = 26
_ARROW_HEAD: Final = (
    '<marker id="end" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
    '<path d="M0 0L8 4L0 8z" fill="#555"/></marker>'
)

_SCHEMA_IDS: Final = {"auto": "in the header or prefix", "header": "in the header", "prefix": "in the prefix"}
_OUTSIDE: Final = "forwarded, marked; outside the guarantee"
_STOPS: Final = "stops the worker"
_name: Final = attrgetter("name")
_FILLS: Final = {"topic": "#eef4fb", "agent": "#fdf3e0", "table": "#e9f5ea"}

Kind = Literal["topic", "agent", "table"]


@dataclass(frozen=True, slots=True)
class Node:
    """A box in the drawing of a topology, identified by its name."""

    name: str
    kind: Kind
    column: int


@dataclass(frozen=True, slots=True)
class Edge:
    """An arrow between two boxes in the drawing of a topology. The label says which records follow the arrow."""

    start: str
    end: str
    label: str = ""


def graph(topology: Topology) -> tuple[list[Node], list[Edge]]:
    """Return the boxes in the drawing of a topology, from left to right, and the arrows between them."""
    first = 0 if topology.direct else 2
    nodes = [Node(topic, "topic", 0) for topic in topology.source.topics]
    edges: list[Edge] = []
    if not topology.direct:
        nodes += [Node("agent repartition", "agent", 1), Node(topology.repartition_topic, "topic", 2)]
        edges += [Edge(topic, "agent repartition") for topic in topology.source.topics]
        edges.append(Edge("agent repartition", topology.repartition_topic, "by tracking ID"))
    nodes += [Node("agent dedup", "agent", first + 1), Node(f"table {topology.name}", "table", first + 1)]
    edges += [Edge(topic, "agent dedup") for topic in topology.feeding_topics]
    edges.append(Edge("agent dedup", f"table {topology.name}", "sightings"))
    for topic, label in topology.outlets:
        if topic not in {node.name for node in nodes}:
            nodes.append(Node(topic, "topic", first + 2))
        edges.append(Edge("agent dedup", topic, label))
    nodes.append(Node(topology.changelog_topic, "topic", first + 2))
    edges.append(Edge(f"table {topology.name}", topology.changelog_topic, "restore"))
    return nodes, edges


def describe(topology: Topology) -> str:
    """Return a description of the topology with one fact per line."""
    lines = [f"topology {topology.name}", ""]
    for title, _key, facts in _SECTIONS:
        rows = list(facts(topology))
        width = max(len(name) for name, _text in rows)
        lines += [title, *(f"  {name:<{width}}  {text}" for name, text in rows), ""]
    return "\n".join(lines).rstrip() + "\n"


def as_data(topology: Topology) -> dict[str, Any]:
    """Return the facts that `describe` lists, and the boxes and arrows of the drawing, as JSON-compatible values."""
    nodes, edges = graph(topology)
    return {
        "name": topology.name,
        "direct": topology.direct,
        **{key: dict(facts(topology)) for _title, key, facts in _SECTIONS},
        "nodes": [{"name": node.name, "kind": node.kind} for node in nodes],
        "edges": [{"from": edge.start, "to": edge.end, "label": edge.label} for edge in edges],
    }


def to_dot(topology: Topology) -> str:
    """Return the drawing of a topology in Graphviz's DOT language."""
    shapes = {"topic": "box", "agent": "ellipse", "table": "cylinder"}
    nodes, edges = graph(topology)
    lines = [f'digraph "{topology.name}" {{', "  rankdir=LR;"]
    lines += [f'  "{node.name}" [shape={shapes[node.kind]}];' for node in nodes]
    lines += [f'  "{edge.start}" -> "{edge.end}" [label="{edge.label}"];' for edge in edges]
    return "\n".join([*lines, "}"]) + "\n"


def to_svg(topology: Topology) -> str:
    """Return the drawing of a topology as an SVG image."""
    nodes, edges = graph(topology)
    columns: defaultdict[int, list[Node]] = defaultdict(list)
    for node in nodes:
        columns[node.column].append(node)
    tallest = max(map(len, columns.values()))
    corners = {
        node.name: (_MARGIN_PX + column * _COLUMN_PX, _MARGIN_PX + (2 * row + tallest - len(boxes)) * _ROW_PX // 2)
        for column, boxes in columns.items()
        for row, node in enumerate(boxes)
    }
    width = max(x for x, _y in corners.values()) + _BOX_WIDTH_PX + _MARGIN_PX
    height = max(y for _x, y in corners.values()) + _BOX_HEIGHT_PX + _MARGIN_PX
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
        f"<title>topology {escape(topology.name)}</title>",
        f"<defs>{_ARROW_HEAD}</defs>",
        '<rect width="100%" height="100%" fill="#fff"/>',
        *(_arrow(edge, *corners[edge.start], *corners[edge.end]) for edge in edges),
        *(_box(node, *corners[node.name]) for node in nodes),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _arrow(edge: Edge, x1: int, y1: int, x2: int, y2: int) -> str:
    if x1 == x2:
        x1, y1, x2 = x1 + _BOX_WIDTH_PX // 2, y1 + _BOX_HEIGHT_PX, x2 + _BOX_WIDTH_PX // 2
    else:
        x1, y1, y2 = x1 + _BOX_WIDTH_PX, y1 + _BOX_HEIGHT_PX // 2, y2 + _BOX_HEIGHT_PX // 2
    label = f"<title>{escape(edge.label)}</title>" if edge.label else ""
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#555" marker-end="url(#end)">{label}</line>'


def _box(node: Node, x: int, y: int) -> str:
    radius = 18 if node.kind == "agent" else 3
    shown = node.name if len(node.name) <= _CHARS_IN_BOX else f"{node.name[: _CHARS_IN_BOX - 1]}…"
    return (
        f'<g><title>{escape(node.name)}</title><rect x="{x}" y="{y}" width="{_BOX_WIDTH_PX}" height="{_BOX_HEIGHT_PX}" '
        f'rx="{radius}" fill="{_FILLS[node.kind]}" stroke="#555"/><text x="{x + _BOX_WIDTH_PX // 2}" y="{y + 23}" '
        f'text-anchor="middle">{escape(shown)}</text></g>'
    )


def _rule_facts(topology: Topology) -> Iterator[tuple[str, str]]:
    window = topology.window
    guard = format_duration(window.guard_ms)
    steps, zero = topology.tracking_id.normalize, ", 0 and empty are values" if topology.tracking_id.zeros else ""
    normalized = f", normalized: {', '.join(steps)}" if steps else ""
    yield "tracking ID", rule_text(topology.tracking_id.rule, _name) + normalized + zero
    for rule in code_rules(topology.tracking_id.rule):
        source = f"source digest {rule.digest}" if rule.digest else "not next to the topology file"
        yield "ID function", f"{rule.name}, {source}"
    match topology.event_time:
        case FieldTime(path, unit):
            yield "event time", f"the field {format_path(path)} ({unit})"
        case ArrivalTime():
            yield "event time", "when the source's broker appended the record (LogAppendTime)"
        case _:
            yield "event time", "the record's timestamp"
    yield "guard period", f"{guard}: the same ID within it, earlier or later, is a duplicate"
    yield "grace", f"{format_duration(window.grace_ms)}: an unknown ID further behind stream time is late"
    if window.extend:
        yield "extended", f"by every duplicate, to at most {format_duration(window.extend_at_most_ms)} after the first"
    skew = format_duration(topology.max_clock_skew_ms)
    yield "future", f"more than {skew} ahead of the clock: {topology.future.value}"


def _flow_topics(topology: Topology) -> str:
    return " or ".join(topology.forwards_to)


def _to(topic: str | None) -> str:
    return "counted only" if topic is None else f"to {topic}"


def _verdict_facts(topology: Topology) -> Iterator[tuple[str, str]]:
    letters = _to(topology.dead_letter)
    unchanged = "counted only" if topology.output is None else f"to {topology.output.topic}, unchanged"
    then = topology.then
    yield "unique", unchanged if then is None else f"to the flow {then.name}, and then to {_flow_topics(topology)}"
    if then is not None:
        yield "flow fails", _STOPS if then.stop else letters
    yield "duplicate", _to(topology.duplicates)
    if topology.fingerprints_wanted:
        duplicate = _to(topology.conflicts_go_to)
        conflict = {OnConflict.DUPLICATE: duplicate, OnConflict.FORWARD: _OUTSIDE, OnConflict.FAIL: _STOPS}
        by = "" if topology.compared is None else f"; compares {rule_text(topology.compared, _name)}"
        yield "conflict", conflict[topology.on_conflict] + by
    late = topology.late
    yield "late", _OUTSIDE if isinstance(late, LateForward) else _to(late.topic if isinstance(late, LateTo) else None)
    missing = {OnMissing.DEAD_LETTER: letters, OnMissing.FORWARD: _OUTSIDE, OnMissing.FAIL: _STOPS}
    yield "without an ID", missing[topology.missing]
    if topology.needs_value:
        yield "null value", _OUTSIDE if topology.tombstones is OnTombstone.FORWARD else letters
    yield "unreadable", letters


def _agent_facts(topology: Topology) -> Iterator[tuple[str, str]]:
    if not topology.direct:
        yield "repartition", f"reads {', '.join(topology.source.topics)}; one task per partition; writes by tracking ID"
    yield "dedup", f"reads {', '.join(topology.feeding_topics)}; one task per partition; judges and forwards"


def _topic_facts(topology: Topology) -> Iterator[tuple[str, str]]:
    source = topology.source
    read = source.format + ("" if source.framing is None else f" with the schema id {_SCHEMA_IDS[source.framing]}")
    if source.schema is not None:
        read += f" of the schema {source.schema.name}"
    if source.columns:
        read += f" with the delimiter {source.delimiter} and the columns {', '.join(source.columns)}"
    if source.key_format != "bytes":
        framed = source.key_format in {"json_schema", "avro", "protobuf"}
        read += f", keys {source.key_format}" + (f" with the schema id {_SCHEMA_IDS['auto']}" if framed else "")
    for topic in source.topics:
        yield topic, f"read, {read}, from {source.start}"
    labels = dict(topology.outlets)
    for topic in topology.written_topics:
        if topic == topology.repartition_topic and not topology.direct:
            yield topic, "written and read: equal IDs in the same partition"
        elif topic == topology.changelog_topic:
            yield topic, "written, read to restore state"
        elif topic == topology.layout_topic:
            yield topic, "read: partition counts, and how many partitions share a transaction"
        else:
            yield topic, f"written: {labels[topic]}"


def _table_facts(topology: Topology) -> Iterator[tuple[str, str]]:
    window, state = topology.window, topology.state
    yield "keeps", f"sightings for {format_duration(window.retention_ms)} (guard period + grace) of event time"
    yield "segments", f"{format_duration(window.segment_ms)} each, dropped whole"
    standby = state.standby_replicas
    yield "standby", f"a copy on {counted(standby, 'other worker')}" if standby else "none"
    most = state.max_bytes_per_partition
    yield "bound", "none" if most is None else f"{format_size(most)} per partition"


_SECTIONS: Final = (
    ("what is a duplicate", "rule", _rule_facts),
    ("what happens to a record", "verdicts", _verdict_facts),
    ("agents", "agents", _agent_facts),
    ("topics", "topics", _topic_facts),
    ("table", "table", _table_facts),
)
"""The sections, each with its title in `describe`, its key in `as_data`, and the function that yields its facts."""


class Resource(enum.Enum):
    """A resource type of Kafka's authorizer. The value is the name of the kafka-acls option for the resource type."""

    TOPIC = "topic"
    GROUP = "group"
    TRANSACTIONAL_ID = "transactional-id"


@dataclass(frozen=True, slots=True)
class Permission:
    """Operations that are allowed on one resource, or on all resources whose names start with a prefix."""

    resource: Resource
    name: str
    operations: tuple[str, ...]
    """The names of the operations, as kafka-acls spells them."""
    why: str
    prefixed: bool = False


def worker_permissions(topology: Topology) -> tuple[Permission, ...]:
    """Return the permissions that `dedup run` needs if all topics exist.

    In Kafka's authorizer, Read, Write, and Delete imply Describe. Since KIP-679, an idempotent producer does not need
    the permission IdempotentWrite.
    """
    own = {topology.changelog_topic: "changelog: written, restored, truncated"}
    if not topology.direct:
        own[topology.repartition_topic] = "repartition topic: written, read, purged"
    found = [Permission(Resource.TOPIC, name, ("Read", "DescribeConfigs"), "source") for name in topology.source.topics]
    layout = topology.layout_topic
    found.append(Permission(Resource.TOPIC, layout, ("Read", "Write"), "layout: written for a new topology, read"))
    for name in topology.written_topics:
        if name == layout:
            continue
        operations = ("Read", "Write", "Delete", "DescribeConfigs") if name in own else ("Write", "DescribeConfigs")
        found.append(Permission(Resource.TOPIC, name, operations, own.get(name, "output or side topic")))
    mark = "the offsets of the last `dedup reset`, for a new fleet on an output with records"
    ids = f"{topology.name}."  # a topology's name contains no dot, so no other topology's IDs have this prefix
    return (
        *found,
        Permission(Resource.GROUP, topology.name, ("Read",), "membership and offsets"),
        Permission(Resource.GROUP, topology.reset_group, ("Describe",), mark),
        Permission(Resource.TRANSACTIONAL_ID, ids, ("Write", "Describe"), "one ID per task group", prefixed=True),
    )
