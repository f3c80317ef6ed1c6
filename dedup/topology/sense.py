"""What single keys can not show: rules that exclude each other, topics that meet themselves.

These look at the file as written, so that they are reported together with the mistakes in single keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from dedup.document import At, Document, dotted
from dedup.errors import Problem

_RULES: Final = ("key", "header", "field", "fields", "content")
_MOST_TOPIC_CHARS: Final = 249
_CHANGELOG: Final = "the changelog topic"
_REPARTITION: Final = "the repartition topic"
_SINK_LETTERS: Final = "the topic of the sink's dead letters"


def contradictions(document: Document) -> Iterator[Problem]:
    """Yield what does not go together."""
    yield from _one_rule(document)
    yield from _bytes_have_no_fields(document)
    yield from _topics_meet(document)


def _one_rule(document: Document) -> Iterator[Problem]:
    tracking_id = document.value.get("tracking_id")
    if not isinstance(tracking_id, dict):
        return
    written = [rule for rule in tracking_id if rule in _RULES]
    choice = ", ".join(_RULES)
    if not written:
        place = document.place_of_key(("tracking_id",))
        yield Problem(place, f"tracking_id: no rule; write exactly one of {choice}")
    if len(written) > 1:
        place = document.place_of_key(("tracking_id", written[1]))
        yield Problem(place, f"tracking_id: {' and '.join(written)} exclude each other; keep exactly one")


def _bytes_have_no_fields(document: Document) -> Iterator[Problem]:
    if document.get(("source", "format")) != "bytes":
        return
    fields: list[At] = [("tracking_id", "field"), ("tracking_id", "fields"), ("tracking_id", "content", "exclude")]
    for at in [*fields, ("event_time", "field"), ("conflicts", "exclude")]:
        if document.has(at):
            text = f"{dotted(at)}: needs `source.format: json`; a value of format bytes has no fields"
            yield Problem(document.place_of_key(at), text)


def _topics_meet(document: Document) -> Iterator[Problem]:
    """Every topic has one role: a topic that is read and written would feed itself."""
    roles: dict[str, str] = {}
    for at, topic, role in _topics(document):
        # Kafka refuses two topics that differ in "." and "_" only: their metrics would collide.
        same = topic.replace(".", "_")
        place = document.place_of_key(at) if at and at[-1] == "name" else document.place(at)
        label = f"{dotted(at)}: " if at else ""
        if len(topic) > _MOST_TOPIC_CHARS and topic != document.get(at):
            text = f'the topic "{topic[:40]}..." it makes has {len(topic)} characters; Kafka takes {_MOST_TOPIC_CHARS}'
            yield Problem(place, f"{label}{text}")
        if same in roles:
            yield Problem(place, f'{label}"{topic}" is also {roles[same]}; every topic has one role')
        else:
            roles[same] = role
    # A sink may read any topic of records; these hold something else, or what it wrote itself.
    read = document.get(("sink", "topic"))
    role = roles.get(read.replace(".", "_"), "") if isinstance(read, str) else ""
    if role in {_CHANGELOG, _REPARTITION, _SINK_LETTERS}:
        text = f'sink.topic: "{read}" is also {role}; every topic has one role'
        yield Problem(document.place(("sink", "topic")), text)


def _topics(document: Document) -> Iterator[tuple[At, str, str]]:
    """Yield place, topic and role of every topic, as far as the file can be understood."""
    sources = document.get(("source", "topics"))
    for row, topic in enumerate(sources if isinstance(sources, list) else ()):
        if isinstance(topic, str):
            yield ("source", "topics", row), topic, "a source topic"
    name = document.get(("name",))
    if isinstance(name, str):
        yield ("name",), f"{name}.changelog", _CHANGELOG
        yield ("name",), f"{name}.repartition", _REPARTITION
        if isinstance(document.get(("sink",)), dict) and not document.has(("sink", "dead_letter")):
            yield ("name",), f"{name}.sink.dead-letter", _SINK_LETTERS
    yield from _given(document, ("output", "topic"), "the output topic")
    yield from _given(document, ("duplicates",), "the topic of duplicates")
    conflicts: At = ("conflicts", "topic") if document.has(("conflicts", "topic")) else ("conflicts",)
    yield from _given(document, conflicts, "the topic of conflicts")
    output = document.get(("output", "topic"))
    prefix_at: At = ("output", "topic") if isinstance(output, str) else ("name",)
    prefix = output if isinstance(output, str) else name
    for key, suffix, role in (
        ("late", "late", "the topic of late records"),
        ("dead_letter", "dead-letter", "the topic of dead letters"),
    ):
        written = document.get((key,))
        if isinstance(written, str):
            if key != "late" or written not in {"forward", "drop"}:
                yield (key,), written, role
        elif isinstance(prefix, str):
            yield prefix_at, f"{prefix}.{suffix}", role
    yield from _given(document, ("sink", "dead_letter"), _SINK_LETTERS)


def _given(document: Document, at: At, role: str) -> Iterator[tuple[At, str, str]]:
    topic = document.get(at)
    if isinstance(topic, str):
        yield at, topic, role
