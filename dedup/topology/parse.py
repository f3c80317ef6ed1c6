"""Parses a topology file into a `Topology`, or raises one TopologyError that lists every problem with its position."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from errno import ENOENT
from functools import cache, partial
from typing import Any, Final, Literal, TypeVar

from pydantic import BaseModel

from dedup.code_loader import directory_of, load_id_function, source_digest
from dedup.core.event_time import ArrivalTime, EventTime, FieldTime, RecordTime
from dedup.core.fold import OnConflict, OnFuture, OnMissing, OnTombstone
from dedup.core.proto_schema import read_schema
from dedup.core.tracking_id import (
    Alternative,
    CodeRule,
    ContentRule,
    FieldRule,
    FieldsRule,
    FirstOfRule,
    HeaderRule,
    KeyFieldRule,
    KeyRule,
    Part,
    PartsRule,
    Path,
    RawContentRule,
    Rule,
    SchemaFile,
    TrackingId,
    has_key,
    parse_path,
)
from dedup.core.window import Window
from dedup.errors import InvariantBroken, Problem, TopologyError
from dedup.topology.format_checks import (
    TRACKING_ID,
    at_key,
    columns_fit,
    content_fits,
    each_at,
    format_fits,
    key_format_fits,
    rules_at,
    schema_fits,
)
from dedup.topology.model import (
    FlowSpec,
    Late,
    LateDrop,
    LateForward,
    LateTo,
    SinkColumn,
    SinkSpec,
    SourceSpec,
    Topology,
)
from dedup.topology.schema import (
    ALTERNATIVE_RULES,
    PART_RULES,
    RESERVED_COLUMNS,
    RULES,
    AlternativeFile,
    ColumnFile,
    ConflictsFile,
    ContentFile,
    FieldTimeFile,
    FlowFile,
    FunctionFile,
    Output,
    PartFile,
    SinkFile,
    TopologyFile,
    TrackingIdFile,
)
from dedup.yaml_document import At, Document, dotted, in_order, read, schema_of, validated

_File = TypeVar("_File", bound=BaseModel)
_Check = Callable[[Document], Iterator[Problem]]
_MOST_TOPIC_CHARS: Final = 249
_EXTENSIONS_OF_GUARD: Final = 7
_LATE: Final[Mapping[str, Late]] = {"forward": LateForward(), "drop": LateDrop()}
_CHANGELOG: Final = "the changelog topic"
_REPARTITION: Final = "the repartition topic"
_LAYOUT: Final = "the layout topic"
_SINK_LETTERS: Final = "the topic of the sink's dead letters"


def _no_file(name: str) -> str:
    raise FileNotFoundError(ENOENT, "No such file or directory", name)


def parse(text: str, *, name: str, read_file: Callable[[str], str] = _no_file) -> Topology:
    """Parse the text of a topology file. Raises TopologyError, listing every problem, if the file is invalid.

    ``read_file`` returns the content of a file that the topology names, or raises OSError or UnicodeDecodeError.
    """
    read_once = cache(read_file)
    checks = (
        _one_rule_each,
        _whole_parts,
        _instant_last,
        format_fits,
        content_fits,
        key_format_fits,
        columns_fit,
        partial(schema_fits, read_file=read_once),
        _flow_fits,
        _columns_differ,
        _one_role_each,
    )
    return _topology(checked_file(text, name, TopologyFile, checks), read_once, name)


def checked_file(text: str, name: str, model: type[_File], checks: Iterable[_Check]) -> _File:
    """Return a file as an instance of ``model``. Raises TopologyError, listing every problem, if the file is invalid.

    The first field of ``model`` must be the version of the file format. The ``checks`` find problems that involve
    several keys. Each check gets a document whose top-level value is a mapping, but other values may be invalid.
    """
    begin = f"{next(iter(model.model_fields))}: 1"
    document = read(text, name=name)
    problems = document.problems
    if document.value is None and not problems:
        problems.append(Problem(name, f'is empty; begin with "{begin}", and see `dedup schema`'))
    elif document.value is not None and not isinstance(document.value, dict):
        problems.append(Problem(document.place(()), f"must be a mapping of keys to values; begin with `{begin}`"))
    if not isinstance(document.value, dict):
        raise TopologyError(problems)
    checked, found = validated(document, model)
    problems += found
    for check in checks:
        problems += check(document)
    if problems or checked is None:
        raise TopologyError(in_order(problems))
    return checked


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of topology files, for use in editors."""
    return schema_of(TopologyFile, "dedup topology")


def _topology(file: TopologyFile, read_file: Callable[[str], str], name: str) -> Topology:
    rule = _rule(file.tracking_id, partial(_code, name=name, read_file=read_file), read_file)
    tracking_id = TrackingId(rule, tuple(file.tracking_id.normalize), zeros=file.tracking_id.zero == "value")
    source = file.source
    framing = "auto" if source.schema_id == "none" else source.schema_id
    declared = source.partitioned_by == "tracking_id"
    # Normalization may make keys equal that the producers' partitioner treated as different.
    implied = has_key(tracking_id.rule) and not tracking_id.normalize
    cap_ms = file.extend_at_most or file.guard_period * _EXTENSIONS_OF_GUARD
    grace_ms = file.guard_period if file.grace is None else file.grace
    output = file.output
    side_prefix = file.name if output is None else output.topic
    conflicts = file.conflicts if isinstance(file.conflicts, ConflictsFile) else ConflictsFile(topic=file.conflicts)
    return Topology(
        name=file.name,
        source=SourceSpec(
            tuple(source.topics),
            source.format,
            declared or implied,
            source.start,
            framing,
            tuple(source.columns or ()),
            source.delimiter or "comma",
            _schema_file(source.schema_file, read_file),
            subject=source.subject,
            key_format=source.key_format,
            key_subject=source.key_subject,
        ),
        tracking_id=tracking_id,
        window=Window(file.guard_period, grace_ms, file.extend, cap_ms if file.extend else 0),
        dead_letter=file.dead_letter or f"{side_prefix}.dead-letter",
        late=_LATE.get(file.late or "") or LateTo(file.late or f"{side_prefix}.late"),
        output=output,
        event_time=event_time_of(file.event_time),
        missing=OnMissing(file.tracking_id.missing),
        tombstones=OnTombstone(file.tracking_id.tombstones),
        future=OnFuture(file.future),
        max_clock_skew_ms=file.max_clock_skew,
        idle_after_ms=file.idle_after,
        duplicates=file.duplicates,
        conflicts=conflicts.topic,
        conflicts_counted=file.conflicts is not None,
        compared=_compared(conflicts, read_file),
        on_conflict=OnConflict(file.on_conflict),
        state=file.state,
        transactions=file.transactions,
        sink=None if file.sink is None else _sink(file.name, file.sink, output),
        then=None if file.then is None else _flow(file.then, name),
        routes=tuple(file.routes or ()),
    )


def _schema_file(name: str | None, read_file: Callable[[str], str]) -> SchemaFile | None:
    return None if name is None else read_schema(name, read_file)


def _compared(file: ConflictsFile, read_file: Callable[[str], str]) -> ContentRule | None:
    if file.exclude is None and file.schema_file is None:
        return None
    return ContentRule(tuple(file.exclude or ()), _schema_file(file.schema_file, read_file))


def _flow(written: str | FlowFile, name: str) -> FlowSpec:
    file = FlowFile(flow=written) if isinstance(written, str) else written
    return FlowSpec(file.flow, directory_of(name), file.on_error == "stop", name)


def _code(written: str | FunctionFile, name: str, read_file: Callable[[str], str]) -> CodeRule:
    file = FunctionFile(function=written) if isinstance(written, str) else written
    module = file.function.partition(":")[0].replace(".", "/")
    digest = ""  # for an installed module
    for candidate in (f"{module}/__init__.py", f"{module}.py"):  # in the order in which Python looks for them
        with suppress(OSError, UnicodeDecodeError):
            digest = source_digest(read_file(candidate))
            break
    load = partial(load_id_function, file.function, directory_of(name), name, digest)
    return CodeRule(file.function, file.version, load, digest, name)


_Code = Callable[[str | FunctionFile], CodeRule]


def _rule(file: TrackingIdFile, code: _Code, read_file: Callable[[str], str]) -> Rule:
    if file.first_of is None:
        return _alternative(file, code, read_file)
    return FirstOfRule(tuple(_alternative(each, code, read_file) for each in file.first_of))


def _alternative(file: AlternativeFile, code: _Code, read_file: Callable[[str], str]) -> Alternative:
    if file.header is not None:
        return HeaderRule(file.header)
    if file.field is not None:
        return FieldRule(file.field)
    if file.fields is not None:
        return FieldsRule(tuple(file.fields))
    if file.parts is not None:
        return PartsRule(tuple(map(_part, file.parts)))
    if file.content is not None:
        return RawContentRule() if file.content is True else _content(file.content, read_file)
    if file.key is not None:
        return _key(file.key)
    if file.python is not None:
        return code(file.python)
    raise InvariantBroken("`_one_rule_each` has accepted a tracking ID without a rule that is known here.")


def _content(file: ContentFile, read_file: Callable[[str], str]) -> ContentRule:
    return ContentRule(tuple(file.exclude), _schema_file(file.schema_file, read_file))


def _key(written: Literal[True] | Path) -> KeyRule | KeyFieldRule:
    return KeyRule() if written is True else KeyFieldRule(written)


def _part(file: PartFile) -> Part:
    absent_is_value = file.absent == "as_value"
    if file.header is not None:
        return Part(HeaderRule(file.header), absent_is_value)
    if file.field is not None:
        return Part(FieldRule(file.field), absent_is_value)
    if file.key is not None:
        return Part(_key(file.key), absent_is_value)
    raise InvariantBroken("`_one_rule_each` has accepted a part without a rule that is known here.")


def event_time_of(written: str | FieldTimeFile) -> EventTime:
    """Return the rule for the event time. The words `record` and `now` in a file mean the record's timestamp."""
    if isinstance(written, str):
        return ArrivalTime() if written == "arrival" else RecordTime()
    return FieldTime(written.field, written.unit)


def _sink(name: str, file: SinkFile, output: Output | None) -> SinkSpec:
    columns = tuple(
        SinkColumn(column, written.field, written.type)
        if isinstance(written, ColumnFile)
        else SinkColumn(column, written, "text")
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


def _one_rule_each(document: Document) -> Iterator[Problem]:
    """Report a tracking ID or an alternative that does not have exactly one rule, and repeated alternatives."""
    seen: list[dict[str, Any]] = []
    for at in rules_at(document):
        file = document.get(at)
        if not isinstance(file, dict):
            continue
        rules = RULES if at == TRACKING_ID else ALTERNATIVE_RULES
        written = _written(file, rules)
        if not written:
            yield Problem(document.place_of_key(at), f"{dotted(at)}: no rule; write exactly one of {', '.join(rules)}")
        if len(written) > 1:
            text = f"{dotted(at)}: {' and '.join(written)} exclude each other; keep exactly one"
            yield Problem(document.place_of_key((*at, list(written)[1])), text)
        if written in seen:
            yield Problem(document.place(at), f"{dotted(at)}: this alternative occurs twice; remove one")
        seen.append(written)


def _whole_parts(document: Document) -> Iterator[Problem]:
    """Report each part that does not have exactly one rule, and each part that occurs twice."""
    for rule_at in rules_at(document):
        seen: list[dict[str, Any]] = []
        for at in each_at(document, (*rule_at, "parts")):
            part = document.get(at)
            if not isinstance(part, dict):
                continue
            written = _written(part, PART_RULES)
            if len(written) != 1:
                text = f"{' and '.join(written) or 'no rule'}; write exactly one of {', '.join(PART_RULES)}"
                yield Problem(document.place(at), f"{dotted(at)}: {text}")
            elif written in seen:
                yield Problem(document.place(at), f"{dotted(at)}: this part occurs twice; remove one")
            seen.append(written)


def _written(file: Mapping[str, Any], rules: Collection[str]) -> dict[str, Any]:
    """Return the rules in a mapping. The paths of `field` and `key` are parsed, so that spellings do not matter."""
    written = {rule: file[rule] for rule in file if rule in rules}
    for rule in ("field", "key"):
        if isinstance(written.get(rule), str):
            with suppress(ValueError):  # `validated` reports the invalid path
                written[rule] = parse_path(written[rule])
    return written


def _instant_last(document: Document) -> Iterator[Problem]:
    tracking_id = document.value.get("tracking_id")
    steps = tracking_id.get("normalize") if isinstance(tracking_id, dict) else None
    if isinstance(steps, list) and "instant" in steps[:-1]:
        place = document.place(("tracking_id", "normalize", steps.index("instant")))
        yield Problem(place, "tracking_id.normalize: instant must be the last step, as it makes the text a moment")


def _flow_fits(document: Document) -> Iterator[Problem]:
    """Report `then` without `output`, `then` with `output.headers`, and `routes` without `then`."""
    if document.has(("then",)):
        if not document.has(("output",)):
            yield at_key(document, ("then",), "needs `output`; without it, the topology forwards no record")
        if document.has(("output", "headers")):
            yield at_key(document, ("output", "headers"), "has no effect with `then`, which always adds dedup-source")
    elif document.has(("routes",)):
        yield at_key(document, ("routes",), "needs `then`, the flow that sends records there")


def _columns_differ(document: Document) -> Iterator[Problem]:
    """Report columns of a sink whose names differ only in case, which SQLite ignores, even for quoted names."""
    url, columns = document.get(("sink", "url")), document.get(("sink", "columns"))
    if not (isinstance(url, str) and url.startswith("sqlite:") and isinstance(columns, dict)):
        return
    names = {name: name for name in RESERVED_COLUMNS}
    for name in columns:
        first = names.setdefault(name.lower(), name)
        if first != name:
            text = f'SQLite ignores case, so this is also the column "{first}"; choose another name'
            yield at_key(document, ("sink", "columns", name), text)


def _one_role_each(document: Document) -> Iterator[Problem]:
    """Report topics with two roles, such as a source topic that is also the output topic."""
    roles: dict[str, str] = {}
    for at, topic, role in _topics(document):
        # Kafka rejects two topics whose names differ only in "." and "_", because their metrics would collide.
        same = topic.replace(".", "_")
        place = document.place_of_key(at) if at and at[-1] == "name" else document.place(at)
        label = f"{dotted(at)}: " if at else ""
        if len(topic) > _MOST_TOPIC_CHARS and topic != document.get(at):
            text = f'the derived topic "{topic[:40]}..." has {len(topic)} characters; Kafka allows {_MOST_TOPIC_CHARS}'
            yield Problem(place, f"{label}{text}")
        if same in roles:
            yield Problem(place, f'{label}"{topic}" is also {roles[same]}; every topic has one role')
        else:
            roles[same] = role
    # A sink may read any topic with records, except those that hold state or the sink's own dead letters.
    read = document.get(("sink", "topic"))
    role = roles.get(read.replace(".", "_"), "") if isinstance(read, str) else ""
    if role in {_CHANGELOG, _REPARTITION, _LAYOUT, _SINK_LETTERS}:
        text = f'sink.topic: "{read}" is also {role}; every topic has one role'
        yield Problem(document.place(("sink", "topic")), text)


def _topics(document: Document) -> Iterator[tuple[At, str, str]]:
    """Yield the path, name, and role of every topic in a file, even if other values in the file are invalid."""
    sources = document.get(("source", "topics"))
    for row, topic in enumerate(sources if isinstance(sources, list) else ()):
        if isinstance(topic, str):
            yield ("source", "topics", row), topic, "a source topic"
    name = document.get(("name",))
    if isinstance(name, str):
        yield ("name",), f"{name}.changelog", _CHANGELOG
        yield ("name",), f"{name}.repartition", _REPARTITION
        yield ("name",), f"{name}.layout", _LAYOUT  # which every worker reads, even if none has written a layout
        if isinstance(document.get(("sink",)), dict) and not document.has(("sink", "dead_letter")):
            yield ("name",), f"{name}.sink.dead-letter", _SINK_LETTERS
    output: At = ("output", "topic")
    conflicts: At = ("conflicts", "topic") if document.has(("conflicts", "topic")) else ("conflicts",)
    prefix_at: At = output if isinstance(document.get(output), str) else ("name",)
    given: tuple[tuple[At, str, str], ...] = (
        (output, "the output topic", ""),
        (("duplicates",), "the topic of duplicates", ""),
        (conflicts, "the topic of conflicts", ""),
        (("late",), "the topic of late records", "late"),
        (("dead_letter",), "the topic of dead letters", "dead-letter"),
        (("sink", "dead_letter"), _SINK_LETTERS, ""),
    )
    for at, role, default in given:
        topic = document.get(at)
        if isinstance(topic, str) and (at != ("late",) or topic not in _LATE):
            yield at, topic, role
        elif default and not isinstance(topic, str) and isinstance(document.get(prefix_at), str):
            yield prefix_at, f"{document.get(prefix_at)}.{default}", role
    routes = document.get(("routes",))
    for row, topic in enumerate(routes if isinstance(routes, list) else ()):
        if isinstance(topic, str) and topic not in routes[:row]:
            yield ("routes", row), topic, "a route"
