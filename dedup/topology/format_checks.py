"""Checks the settings of a topology file for the formats of values and keys, and the schemas that the file names."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from typing import Final, get_args

from dedup.core.event_time import FieldTime, TimeUnit
from dedup.core.formats import (
    MEMBERWISE,
    TYPED,
    Format,
    has_content_at,
    member_names,
    member_types,
    text_of,
    unreadable_as,
)
from dedup.core.framing import SchemaRefused, SchemaText
from dedup.core.proto_schema import TIMESTAMP, read_schema
from dedup.core.tracking_id import Path, format_path, parse_path
from dedup.errors import Problem
from dedup.yaml_document import At, Document, did_you_mean, dotted

TRACKING_ID: Final[At] = ("tracking_id",)
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


def rules_at(document: Document) -> list[At]:
    """Return the paths of the mappings that contain a rule: `tracking_id` and each of its alternatives."""
    return [TRACKING_ID, *each_at(document, (*TRACKING_ID, "first_of"))]


def each_at(document: Document, at: At) -> list[At]:
    """Return the paths of the items of a list, or an empty list if the path has no list."""
    several = document.get(at)
    return [(*at, row) for row in range(len(several) if isinstance(several, list) else 0)]


def _format_of(document: Document) -> Format | None:
    """Return the format of the values, or None if the file does not name a format or the name is not a string."""
    written: Format | None = document.get(_FORMAT)
    # A list or a mapping is not hashable, so it cannot be looked up in a set of formats.
    return written if isinstance(written, str) else None


def format_fits(document: Document) -> Iterator[Problem]:
    """Report keys that do not apply to the format of the values, and missing keys that the format needs."""
    found, schema_id = _format_of(document), document.get(_SCHEMA_ID)
    if "protobuf" not in (found, document.get(_KEY_FORMAT)) and document.has(_ZERO):
        yield at_key(document, _ZERO, "needs `source.format: protobuf`; in other formats, 0 and empty are values")
    if found in MEMBERWISE:
        yield from _memberwise_fits(document)
    if found in TYPED:
        yield from _typed_fits(document)
        return
    needed = {_SCHEMA: _TYPED} if found == "json_schema" else {_SCHEMA: _TYPED, _SUBJECT: _FRAMED}
    for at in filter(document.has, needed):
        yield at_key(document, at, f"needs {needed[at]}")
    if document.get(_UNIT) == "timestamp" and found not in _TIMESTAMPS:
        yield at_key(document, _UNIT, f"timestamp needs {_WITH_TIMESTAMPS}; write rfc3339, s, ms, or us")
    if schema_id == "none":
        yield at_key(document, _SCHEMA_ID, f"none needs {_TYPED}; JSON without framing is `format: json`")
    elif found != "json_schema" and document.has(_SCHEMA_ID):
        yield at_key(document, _SCHEMA_ID, "needs `source.format: json_schema`")
    members: list[At] = []
    for at in rules_at(document):
        members += [(*at, "field"), (*at, "fields"), (*at, "content", "exclude")]
        members += [(*part, "field") for part in each_at(document, (*at, "parts"))]
    members += [("event_time", "field"), ("conflicts", "exclude")]
    for at in filter(document.has, members if found == "bytes" else ()):
        yield at_key(document, at, "needs `source.format: json`; a value of format bytes has no fields")


def key_format_fits(document: Document) -> Iterator[Problem]:
    """Report members of the key without a key format, and a key format without members of the key."""
    written = document.get(_KEY_FORMAT)
    is_read = isinstance(written, str) and written != "bytes"
    rules = rules_at(document)
    holders = [*rules, *(part for at in rules for part in each_at(document, (*at, "parts")))]
    # `validated` reports any value that is neither true nor a path.
    members: list[At] = [(*at, "key") for at in holders if document.get((*at, "key")) not in (None, True)]
    for at in () if is_read else (each for each in members if isinstance(document.get(each), str)):
        text = f'"{document.get(at)}" is a member of the key and needs `source.key_format`, such as json or avro'
        yield Problem(document.place(at), f"{dotted(at)}: {text}; for the whole key, write true")
    if is_read and not members:
        text = f"{written} has no effect, because tracking_id has no `key: PATH` (a member of the key); leave it out"
        yield at_key(document, _KEY_FORMAT, text)
    if document.has(_KEY_SUBJECT) and not (is_read and written in TYPED):
        yield at_key(document, _KEY_SUBJECT, "needs `source.key_format: avro` or `protobuf`")


def _typed_fits(document: Document) -> Iterator[Problem]:
    framed = document.get(_SCHEMA_ID) != "none"
    if framed and document.has(_SCHEMA):
        text = "needs `source.schema_id: none`; a schema registry has the schemas that the framings of values name"
        yield at_key(document, _SCHEMA, text)
    elif not framed and not document.has(_SCHEMA):
        text = "none needs `source.schema`: the file with the schema of all values"
        yield at_key(document, _SCHEMA_ID, text)
    if not framed and document.has(_SUBJECT):
        text = "has no effect with `source.schema_id: none`; no schema registry has the schema of these values"
        yield at_key(document, _SUBJECT, text)


def _memberwise_fits(document: Document) -> Iterator[Problem]:
    for at in _sink_columns_at(document):
        kind = (*at[:-1], "type")
        if at[-1] == "field" and document.get(kind) == "json":
            text = f"json needs `source.format: json`; with {_format_of(document)}, name the members one by one"
            yield Problem(document.place(kind), f"{dotted(kind)}: {text}")


def content_fits(document: Document) -> Iterator[Problem]:
    """Report content without a key, and schemas of content in a format without schemas."""
    for at in _contents_at(document):
        if at[-1] == "content" and document.get(at) == {}:
            yield Problem(document.place_of_key(at), f"{dotted(at)}: has no key; write exclude, schema, or both")
        if document.has((*at, "schema")) and _format_of(document) not in TYPED:
            yield at_key(document, (*at, "schema"), f"needs {_TYPED}")


def _contents_at(document: Document) -> list[At]:
    """Return the places in the document that define the content of a value."""
    return [*((*at, "content") for at in rules_at(document)), ("conflicts",)]


def _excluded_at(document: Document) -> Iterator[At]:
    """Yield the position in the document of each member path that is excluded from content."""
    for at in _contents_at(document):
        yield from each_at(document, (*at, "exclude"))


def _sink_columns_at(document: Document) -> Iterator[At]:
    """Yield the position in the document of each member path of a sink's columns."""
    columns = document.get(("sink", "columns"))
    for name, written in columns.items() if isinstance(columns, dict) else ():
        yield ("sink", "columns", name) if isinstance(written, str) else ("sink", "columns", name, "field")


def at_key(document: Document, at: At, text: str) -> Problem:
    """Return a problem with a key, at the key's position."""
    return Problem(document.place_of_key(at), f"{dotted(at)}: {text}")


def schema_fits(document: Document, *, read_file: Callable[[str], str]) -> Iterator[Problem]:
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
        yield from _content_schema_fits(document, holder, schema, read_file)


def _content_schema_fits(
    document: Document, holder: At, schema: SchemaText | None, read_file: Callable[[str], str]
) -> Iterator[Problem]:
    """Report a schema of content that cannot be used, and excluded members that do not exist."""
    at, fmt = (*holder, "schema"), document.get(_FORMAT)
    pinned = yield from _read_schema(document, at, read_file)
    if pinned is not None:
        fault = unreadable_as(fmt, schema or pinned, pinned)
        if fault is not None:
            said = f'{dotted(at)}: "{document.get(at)}" cannot be the schema of content'
            yield Problem(document.place(at), f"{said}: the schema of the values {fault}")
    name, text = (_SCHEMA, schema) if document.get(at) is None else (at, pinned)
    if text is not None:
        for excluded in each_at(document, (*holder, "exclude")):
            yield from _missing_member(document, excluded, text, name)
        yield from _leaves_nothing(document, holder, member_names(fmt, text, ("",), first=name == _SCHEMA))


def _leaves_nothing(document: Document, holder: At, names: Iterable[object]) -> Iterator[Problem]:
    """Report content from which every member is excluded."""
    at = (*holder, "exclude")
    excluded = {_path_at(document, each) for each in each_at(document, at)}
    if excluded >= {(name,) for name in names} != set():
        yield at_key(document, at, "leaves nothing to compare, because it names every member; keep at least one")


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
    for rule_at in rules_at(document):
        yield (*rule_at, "field")
        yield from each_at(document, (*rule_at, "fields"))
        yield from ((*part, "field") for part in each_at(document, (*rule_at, "parts")))


def columns_fit(document: Document) -> Iterator[Problem]:
    """Report the format csv without columns, columns with another format, and paths that are not column names."""
    columns = document.get(_COLUMNS)
    if _format_of(document) != "csv":
        for at in filter(document.has, (_COLUMNS, ("source", "delimiter"))):
            yield at_key(document, at, "needs `source.format: csv`")
        return
    if not document.has(_COLUMNS):
        yield at_key(document, _FORMAT, "csv needs `source.columns`: the names of the columns, in their order")
    if not isinstance(columns, list):
        return
    for holder in _contents_at(document):
        yield from _leaves_nothing(document, holder, [name for name in columns if isinstance(name, str)])
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
"""The types that no column of a sink can hold."""


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
    """Report a path that the schema in the file at ``named_at`` lacks."""
    path, fmt, first = _path_at(document, at), document.get(_FORMAT), named_at == _SCHEMA
    if path is None:
        return
    if at[-2] == "exclude":
        there = has_content_at(fmt, schema, path, first=first)
    else:
        there = bool(member_types(fmt, schema, path, None, first=first))
    if there:
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
