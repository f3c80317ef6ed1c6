"""Parses a topology file into a `Topology`, or raises one TopologyError that lists every problem with its position."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from errno import ENOENT
from functools import cache, partial
from itertools import chain
from typing import Any, Final, Literal, TypeVar, get_args

from pydantic import BaseModel

from dedup.code_loader import directory_of, load_id_function, source_digest
from dedup.core.event_time import ArrivalTime, EventTime, FieldTime, RecordTime, TimeUnit
from dedup.core.fold import OnConflict, OnFuture, OnMissing, OnTombstone
from dedup.core.formats import MEMBERWISE, TYPED, Format, member_names, member_types, text_of
from dedup.core.framing import SchemaRefused, SchemaText
from dedup.core.proto_schema import TIMESTAMP, read_schema
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
    format_path,
    has_key,
    parse_path,
)
from dedup.core.window import Window
from dedup.errors import InvariantBroken, Problem, TopologyError
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
from dedup.yaml_document import At, Document, did_you_mean, dotted, in_order, read, schema_of, validated

_File = TypeVar("_File", bound=BaseModel)
_Check = Callable[[Document], Iterator[Problem]]
_MOST_TOPIC_CHARS: Final = 249
_EXTENSIONS_OF_GUARD: Final = 7
_LATE: Final[Mapping[str, Late]] = {"forward": LateForward(), "drop": LateDrop()}
_CHANGELOG: Final = "the changelog topic"
_REPARTITION: Final = "the repartition topic"
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
        _format_fits,
        _content_fits,
        _key_format_fits,
        _columns_fit,
        partial(_schema_fits, read_file=read_once),
        _flow_fits,
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
    # Normalization may make two keys equal although the producers' partitioner treated them as different.
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
    for at in _rules_at(document):
        file = document.get(at)
        if not isinstance(file, dict):
            continue
        rules = RULES if at == _TRACKING_ID else ALTERNATIVE_RULES
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
    for rule_at in _rules_at(document):
        seen: list[dict[str, Any]] = []
        for at in _each(document, (*rule_at, "parts")):
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
    """Return the rules in a mapping. The paths of `field` and `key` are parsed, so that two spellings are equal."""
    written = {rule: file[rule] for rule in file if rule in rules}
    for rule in ("field", "key"):
        if isinstance(written.get(rule), str):
            with suppress(ValueError):  # `validated` reports the invalid path
                written[rule] = parse_path(written[rule])
    return written


def _rules_at(document: Document) -> list[At]:
    """Return the paths of the mappings that contain a rule, which are `tracking_id` and each of its alternatives."""
    return [_TRACKING_ID, *_each(document, (*_TRACKING_ID, "first_of"))]


def _each(document: Document, at: At) -> list[At]:
    several = document.get(at)
    return [(*at, row) for row in range(len(several) if isinstance(several, list) else 0)]


def _instant_last(document: Document) -> Iterator[Problem]:
    tracking_id = document.value.get("tracking_id")
    steps = tracking_id.get("normalize") if isinstance(tracking_id, dict) else None
    if isinstance(steps, list) and "instant" in steps[:-1]:
        place = document.place(("tracking_id", "normalize", steps.index("instant")))
        yield Problem(place, "tracking_id.normalize: instant must be the last step, as it makes the text a moment")


_TRACKING_ID: Final[At] = ("tracking_id",)
_ZERO: Final[At] = ("tracking_id", "zero")
_FORMAT: Final[At] = ("source", "format")
_COLUMNS: Final[At] = ("source", "columns")
_SCHEMA: Final[At] = ("source", "schema")
_SCHEMA_ID: Final[At] = ("source", "schema_id")
_SUBJECT: Final[At] = ("source", "subject")
_KEY_FORMAT: Final[At] = ("source", "key_format")
_KEY_SUBJECT: Final[At] = ("source", "key_subject")
_UNIT: Final[At] = ("event_time", "unit")
_TYPED: Final = "`source.format: avro` or `protobuf`"
_FRAMED: Final = "`source.format: json_schema`, `avro`, or `protobuf`"
_TIMESTAMPS: Final = TYPED | {"msgpack", "cbor"}
"""The formats that have a type for timestamps."""
_WITH_TIMESTAMPS: Final = "`source.format: avro`, `protobuf`, `msgpack`, or `cbor`"


def _format_of(document: Document) -> Format | None:
    """Return the format of the values, or None if the file does not state a format as text."""
    written: Format | None = document.get(_FORMAT)
    # A list or a mapping is not hashable, and thus cannot be looked up in a set of formats.
    return written if isinstance(written, str) else None


def _format_fits(document: Document) -> Iterator[Problem]:
    """Report keys that do not apply to the format of the values, and missing keys that the format needs."""
    found, schema_id = _format_of(document), document.get(_SCHEMA_ID)
    if "protobuf" not in (found, document.get(_KEY_FORMAT)) and document.has(_ZERO):
        yield _at_key(document, _ZERO, "needs `source.format: protobuf`; in other formats, 0 and empty are values")
    if found in MEMBERWISE:
        yield from _memberwise_fits(document)
    if found in TYPED:
        yield from _typed_fits(document)
        return
    needed = {_SCHEMA: _TYPED} if found == "json_schema" else {_SCHEMA: _TYPED, _SUBJECT: _FRAMED}
    for at in filter(document.has, needed):
        yield _at_key(document, at, f"needs {needed[at]}")
    if document.get(_UNIT) == "timestamp" and found not in _TIMESTAMPS:
        yield _at_key(document, _UNIT, f"timestamp needs {_WITH_TIMESTAMPS}; write rfc3339, s, ms, or us")
    if schema_id == "none":
        yield _at_key(document, _SCHEMA_ID, f"none needs {_TYPED}; JSON without framing is `format: json`")
    elif found != "json_schema" and document.has(_SCHEMA_ID):
        yield _at_key(document, _SCHEMA_ID, "needs `source.format: json_schema`")
    members: list[At] = []
    for at in _rules_at(document):
        members += [(*at, "field"), (*at, "fields"), (*at, "content", "exclude")]
        members += [(*part, "field") for part in _each(document, (*at, "parts"))]
    members += [("event_time", "field"), ("conflicts", "exclude")]
    for at in filter(document.has, members if found == "bytes" else ()):
        yield _at_key(document, at, "needs `source.format: json`; a value of format bytes has no fields")


def _key_format_fits(document: Document) -> Iterator[Problem]:
    """Report members of the key without a format of keys, and a format of keys without members of the key."""
    written = document.get(_KEY_FORMAT)
    is_read = isinstance(written, str) and written != "bytes"
    rules = _rules_at(document)
    holders = [*rules, *(part for at in rules for part in _each(document, (*at, "parts")))]
    # `validated` reports whatever is neither true nor a path.
    members: list[At] = [(*at, "key") for at in holders if document.get((*at, "key")) not in (None, True)]
    for at in () if is_read else (each for each in members if isinstance(document.get(each), str)):
        text = f'"{document.get(at)}" is a member of the key and needs `source.key_format`, such as json or avro'
        yield Problem(document.place(at), f"{dotted(at)}: {text}; for the whole key, write true")
    if is_read and not members:
        text = f"{written} has no effect, because tracking_id has no `key: PATH` (a member of the key); leave it out"
        yield _at_key(document, _KEY_FORMAT, text)
    if document.has(_KEY_SUBJECT) and not (is_read and written in TYPED):
        yield _at_key(document, _KEY_SUBJECT, "needs `source.key_format: avro` or `protobuf`")


def _typed_fits(document: Document) -> Iterator[Problem]:
    framed = document.get(_SCHEMA_ID) != "none"
    if framed and document.has(_SCHEMA):
        text = "needs `source.schema_id: none`; a schema registry has the schemas that the framings of values name"
        yield _at_key(document, _SCHEMA, text)
    elif not framed and not document.has(_SCHEMA):
        text = "none needs `source.schema`: the file with the schema of all values"
        yield _at_key(document, _SCHEMA_ID, text)
    if not framed and document.has(_SUBJECT):
        text = "has no effect with `source.schema_id: none`; no schema registry has the schema of these values"
        yield _at_key(document, _SUBJECT, text)


def _memberwise_fits(document: Document) -> Iterator[Problem]:
    for at in _sink_columns_at(document):
        kind = (*at[:-1], "type")
        if at[-1] == "field" and document.get(kind) == "json":
            text = f"json needs `source.format: json`; with {_format_of(document)}, name the members one by one"
            yield Problem(document.place(kind), f"{dotted(kind)}: {text}")


def _content_fits(document: Document) -> Iterator[Problem]:
    """Report content without a key, and schemas of content in a format without schemas."""
    for at in _contents_at(document):
        if at[-1] == "content" and document.get(at) == {}:
            yield Problem(document.place_of_key(at), f"{dotted(at)}: has no key; write exclude, schema, or both")
        if document.has((*at, "schema")) and _format_of(document) not in TYPED:
            yield _at_key(document, (*at, "schema"), f"needs {_TYPED}")


def _contents_at(document: Document) -> list[At]:
    """Return the places in the document that say what the content of a value is."""
    return [*((*at, "content") for at in _rules_at(document)), ("conflicts",)]


def _excluded_at(document: Document) -> Iterator[At]:
    """Yield the position in the document of each member path that is left out of content."""
    for at in _contents_at(document):
        yield from _each(document, (*at, "exclude"))


def _sink_columns_at(document: Document) -> Iterator[At]:
    """Yield the position in the document of each member path of a sink's columns."""
    columns = document.get(("sink", "columns"))
    for name, written in columns.items() if isinstance(columns, dict) else ():
        yield ("sink", "columns", name) if isinstance(written, str) else ("sink", "columns", name, "field")


def _at_key(document: Document, at: At, text: str) -> Problem:
    return Problem(document.place_of_key(at), f"{dotted(at)}: {text}")


def _schema_fits(document: Document, *, read_file: Callable[[str], str]) -> Iterator[Problem]:
    """Report a schema that cannot be read, and members that a schema lacks or whose types are not allowed."""
    fmt = _format_of(document)
    if fmt not in TYPED:
        return
    schema = yield from _read_schema(document, _SCHEMA, read_file)
    if schema is not None:
        for at in _members_at(document):
            yield from _member_fits(document, at, schema, None)
        unit = document.get(_UNIT)
        if unit in get_args(TimeUnit):
            yield from _member_fits(document, ("event_time", "field"), schema, unit)
        for at in _sink_columns_at(document):
            yield from _member_fits(document, at, schema, None, column=True)
    for holder in _contents_at(document):
        pinned_at = (*holder, "schema")
        pinned = yield from _read_schema(document, pinned_at, read_file)
        name, text = (_SCHEMA, schema) if document.get(pinned_at) is None else (pinned_at, pinned)
        if text is not None:
            for at in _each(document, (*holder, "exclude")):
                yield from _missing_member(document, at, text, name)
            yield from _leaves_nothing(document, holder, member_names(fmt, text, ("",), first=name == _SCHEMA))


def _leaves_nothing(document: Document, holder: At, names: Iterable[object]) -> Iterator[Problem]:
    """Report content from which every member is excluded."""
    at = (*holder, "exclude")
    excluded = {_path_at(document, each) for each in _each(document, at)}
    if excluded >= {(name,) for name in names} != set():
        yield _at_key(document, at, "leaves nothing to compare, because it names every member; keep at least one")


def _read_schema(
    document: Document, at: At, read_file: Callable[[str], str]
) -> Generator[Problem, None, SchemaText | None]:
    """Return the text of a schema file that the document names. Report a file that cannot be read, and return None."""
    name, fmt = document.get(at), _format_of(document)
    if not isinstance(name, str) or fmt is None:
        return None
    place, said = document.place(at), f'{dotted(at)}: "{name}"'
    try:
        schema = text_of(read_schema(name, read_file))
        member_types(fmt, schema, ("",), None, first=True)
    except OSError as error:
        yield Problem(place, f"{said} cannot be read: {error.strerror}; name a file, relative to the topology file")
    except UnicodeDecodeError as error:
        yield Problem(place, f"{said} is not UTF-8 at byte {error.start}; save it as UTF-8")
    except SchemaRefused as refused:
        yield Problem(place, f"{said} {refused}; correct the schema")
    else:
        return schema
    return None


def _members_at(document: Document) -> Iterator[At]:
    """Yield the position in the document of each member path that the tracking ID can contain."""
    for rule_at in _rules_at(document):
        yield (*rule_at, "field")
        yield from _each(document, (*rule_at, "fields"))
        yield from ((*part, "field") for part in _each(document, (*rule_at, "parts")))


def _columns_fit(document: Document) -> Iterator[Problem]:
    """Report the format csv without columns, columns with another format, and paths that are not column names."""
    columns = document.get(_COLUMNS)
    if _format_of(document) != "csv":
        for at in filter(document.has, (_COLUMNS, ("source", "delimiter"))):
            yield _at_key(document, at, "needs `source.format: csv`")
        return
    if not document.has(_COLUMNS):
        yield _at_key(document, _FORMAT, "csv needs `source.columns`: the names of the columns, in their order")
    if not isinstance(columns, list):
        return
    for holder in _contents_at(document):
        yield from _leaves_nothing(document, holder, columns)
    named = (_members_at(document), (("event_time", "field"),), _sink_columns_at(document), _excluded_at(document))
    for at in chain.from_iterable(named):
        text, path = document.get(at), _path_at(document, at)
        if not isinstance(text, str):
            continue
        if text in columns and path != (text,):
            written = format_path((text,)).replace("'", "''")
            yield Problem(document.place(at), f"{dotted(at)}: for the column \"{text}\", write '{written}'")
        elif path is not None and (len(path) > 1 or path[0] not in columns):
            hint = did_you_mean(str(path[0]), [name for name in columns if isinstance(name, str)])
            yield Problem(document.place(at), f'{dotted(at)}: "{text}" is not a column{hint or "; name a column"}')


_TAKEN: Final = {
    "avro": (
        "an ID is a string, integer, decimal, boolean, enum, bytes, fixed, uuid, or timestamp",
        "a timestamp with a zone",
    ),
    "protobuf": ("an ID is a string, integer, boolean, enum, or bytes", f"a {TIMESTAMP}"),
}
"""Maps each format to the types that an ID may have, and to the type of event times with the unit timestamp."""


_NO_COLUMN: Final = {"record", "array", "map", "message", "group", "repeated", "bytes", "fixed", "duration"}
"""The types that no column of a sink holds."""


def _member_fits(
    document: Document, at: At, schema: SchemaText, unit: TimeUnit | None, *, column: bool = False
) -> Iterator[Problem]:
    path = _path_at(document, at)
    if path is None:
        return
    said, file = f'{dotted(at)}: "{document.get(at)}"', document.get(_SCHEMA)
    time = None if unit is None else FieldTime(path, unit)
    fmt: Format = document.get(_FORMAT)
    types = member_types(fmt, schema, path, time, first=True)
    if not types:
        yield from _missing_member(document, at, schema, _SCHEMA)
    elif column:
        if types.keys() <= _NO_COLUMN:
            said = f"{said} has the type {' or '.join(sorted(types))} in {file}, which a column cannot hold"
            yield Problem(document.place(at), f"{said}; name a member of another type")
    elif all(types.values()):
        wanted, zoned = _TAKEN[fmt]
        if time is not None:
            wanted = f"unit timestamp takes {zoned}, rfc3339 a string, and s, ms, and us a number"
        yield Problem(document.place(at), f"{said} has the type {' or '.join(sorted(types))} in {file}; {wanted}")


def _missing_member(document: Document, at: At, schema: SchemaText, named_at: At) -> Iterator[Problem]:
    """Report a path that the schema in the file at ``named_at`` does not have."""
    path, fmt, first = _path_at(document, at), document.get(_FORMAT), named_at == _SCHEMA
    if path is None or member_types(fmt, schema, path, None, first=first):
        return
    hint = did_you_mean(str(path[-1]), member_names(fmt, schema, path, first=first))
    said = f'{dotted(at)}: "{document.get(at)}" is not in {document.get(named_at)}'
    yield Problem(document.place(at), f"{said}{hint or '; name a field of the schema'}")


def _path_at(document: Document, at: At) -> Path | None:
    """Return the path at a position in the document, or None for an invalid path, which `validated` reports."""
    text = document.get(at)
    with suppress(ValueError):
        return parse_path(text if isinstance(text, str) else "")
    return None


def _flow_fits(document: Document) -> Iterator[Problem]:
    """Report `then` without `output`, `then` with `output.headers`, and `routes` without `then`."""
    if document.has(("then",)):
        if not document.has(("output",)):
            yield _at_key(document, ("then",), "needs `output`; without it, the topology forwards no record")
        if document.has(("output", "headers")):
            yield _at_key(document, ("output", "headers"), "has no effect with `then`, which always adds dedup-source")
    elif document.has(("routes",)):
        yield _at_key(document, ("routes",), "needs `then`, the flow that sends records there")


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
    if role in {_CHANGELOG, _REPARTITION, _SINK_LETTERS}:
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
