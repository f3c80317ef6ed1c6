"""Lists the formats of values and keys, and finds the reader for values of one format and schema."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Final, Literal

from dedup.core import avro, protobuf
from dedup.core.avro import AvroReader, avro_reader
from dedup.core.avro_content import avro_content, unresolvable
from dedup.core.avro_schema import Record, nodes_at, parse_schema, type_name
from dedup.core.cbor import cbor_reader
from dedup.core.content_tree import Content, without_names
from dedup.core.csv_row import CsvLayout, csv_content, csv_reader
from dedup.core.event_time import FieldTime
from dedup.core.exact_json import Unreadable
from dedup.core.framing import (
    LinkedSchema,
    SchemaBook,
    SchemaRef,
    SchemaRefused,
    SchemaText,
    indexes_of,
    named,
    schema_of,
)
from dedup.core.member_reader import MemberReader
from dedup.core.message_pack import message_pack_reader
from dedup.core.proto_schema import Message, parse_proto
from dedup.core.protobuf import ProtobufReader, protobuf_reader
from dedup.core.protobuf_content import has_member, protobuf_content
from dedup.core.tracking_id import ContentRule, Path, SchemaFile

Format = Literal["json", "json_schema", "avro", "protobuf", "msgpack", "cbor", "csv", "bytes"]
TYPED: Final = frozenset[Format]({"avro", "protobuf"})
"""The formats whose values can be read only with their schema."""
MEMBERWISE: Final = TYPED | frozenset[Format]({"msgpack", "cbor", "csv"})
"""The formats whose values are read member by member. Payloads are compared as bytes unless a rule names content."""

Schema = SchemaText | SchemaBook | CsvLayout
"""A schema, the schemas of a registry, or the columns of CSV values."""
Reader = AvroReader | ProtobufReader | MemberReader

SCHEMA_UNKNOWN: Final = "schema_unknown"
"""The fault code for a record whose schema the registry did not know when the record was judged."""


def reader_of(
    fmt: Format, schema: Schema, ref: SchemaRef, paths: tuple[Path, ...], time: FieldTime | None, *, zeros: bool
) -> Reader:
    """Return the reader for values of a format in `MEMBERWISE` with a given schema ID.

    Raises Unreadable if the schema is unknown or unusable.
    """
    if fmt == "msgpack":
        return message_pack_reader(paths, time)
    if fmt == "cbor":
        return cbor_reader(paths, time)
    if isinstance(schema, CsvLayout):
        return csv_reader(schema, paths, time)
    found = _typed_reader(fmt, _text_of(schema, ref), indexes_of(ref), paths, time, zeros=zeros)
    if isinstance(found, str):
        raise Unreadable("schema_refused", f"the value's schema, {named(ref)}, {found}")
    return found


def content_reader(fmt: Format, schema: Schema, ref: SchemaRef, rule: ContentRule) -> Content:
    """Return a function that reads the content of values of a format in `MEMBERWISE` with a given schema ID.

    Raises Unreadable if the schema is unknown or unusable.
    """
    if fmt == "msgpack":
        return partial(message_pack_reader((), None).content, without_names(rule.exclude))
    if fmt == "cbor":
        return partial(cbor_reader((), None).content, without_names(rule.exclude))
    if isinstance(schema, CsvLayout):
        return partial(csv_content, schema, without_names(rule.exclude))
    found = _typed_content(fmt, _text_of(schema, ref), indexes_of(ref), rule)
    if isinstance(found, str):
        raise Unreadable("schema_refused", f"the value's schema, {named(ref)}, {found}")
    return found


def _text_of(schema: SchemaText | SchemaBook, ref: SchemaRef) -> SchemaText:
    text = schema if isinstance(schema, str | LinkedSchema) else schema[schema_of(ref)]
    if text is None:
        said = f"the schema registry does not know the value's schema, {named(ref)}, or a schema that it refers to"
        raise Unreadable(SCHEMA_UNKNOWN, said)
    return text


def text_of(file: SchemaFile) -> SchemaText:
    """Return the schema in a file, together with the files that it imports."""
    return LinkedSchema(file.text, file.imports) if file.imports else file.text


@lru_cache(maxsize=256)
def _typed_content(fmt: Format, text: SchemaText, indexes: tuple[int, ...], rule: ContentRule) -> Content | str:
    """Return the function that reads the content, or the reason why a schema is refused. Both are cached, because
    parsing is slow.
    """
    pinned = None if rule.schema is None else text_of(rule.schema)
    try:
        if fmt == "protobuf":
            return protobuf_content(text, indexes, pinned, rule.exclude)
        return avro_content(text, pinned, rule.exclude)
    except SchemaRefused as refused:
        return str(refused)


@lru_cache(maxsize=256)
def _typed_reader(
    fmt: Format,
    text: SchemaText,
    indexes: tuple[int, ...],
    paths: tuple[Path, ...],
    time: FieldTime | None,
    *,
    zeros: bool,
) -> Reader | str:
    """Return the reader, or why the schema is refused. Both are cached, because parsing is slow."""
    try:
        if fmt == "protobuf":
            return protobuf_reader(text, indexes, paths, time, zeros=zeros)
        return avro_reader(text, paths, time)
    except SchemaRefused as refused:
        return str(refused)


def member_types(
    fmt: Format, schema: SchemaText, path: Path, time: FieldTime | None, *, first: bool
) -> dict[str, bool]:
    """Return the non-null types that the member at a path can have, each mapped to True if the type is unusable.

    A type is unusable if it cannot be an ID or, if ``time`` is given, an event time. If ``first`` is true, all Protobuf
    values have the schema's first message type. Raises SchemaRefused if the schema is invalid.
    """
    if fmt == "protobuf":
        names = {protobuf.type_at(each, path) for each in _messages(schema, first=first)}
        return {name: protobuf.is_refused(name, time) for name in names if name is not None}
    nodes = nodes_at(parse_schema(schema), path)
    return {type_name(each): avro.is_refused(each, time) for each in nodes if type_name(each) != "null"}


def member_names(fmt: Format, schema: SchemaText, path: Path, *, first: bool) -> list[str]:
    """Return the names of a schema's members at the last step of a path. `member_types` must accept the schema."""
    if fmt == "protobuf":
        return [name for each in _messages(schema, first=first) for name in protobuf.names_at(each, path[:-1])]
    holders = nodes_at(parse_schema(schema), path[:-1])
    return [name for each in holders if isinstance(each, Record) for name in each.fields]


def has_content_at(fmt: Format, schema: SchemaText, path: Path, *, first: bool) -> bool:
    """Return whether values can have content at a path. `member_types` must accept the schema."""
    if fmt == "protobuf":
        return any(has_member(each, path) for each in _messages(schema, first=first))
    return bool(nodes_at(parse_schema(schema), path))


def unreadable_as(fmt: Format, schema: SchemaText, pinned: SchemaText) -> str | None:
    """Return why values with a given schema have no content with the pinned schema, or None if values can have content.

    The reason begins with a verb, so that it can follow the schema's name. A Protobuf schema with several
    messages counts as readable if values of one of them can be read.
    """
    try:
        if fmt == "avro":
            fault = unresolvable(schema, pinned)
            return None if fault is None else f"cannot be read with it: {fault}"
        refused = [_refusal(schema, at, pinned) for at, _ in enumerate(_messages(schema, first=False))]
    except SchemaRefused as fault:
        return str(fault)
    return refused[0] if refused and None not in refused else None


def _refusal(schema: SchemaText, index: int, pinned: SchemaText) -> str | None:
    try:
        protobuf_content(schema, (index,), pinned, ())
    except SchemaRefused as refused:
        return str(refused)
    return None


def _messages(schema: SchemaText, *, first: bool) -> list[Message]:
    return [each for each in parse_proto(schema).nested[: 1 if first else None] if each is not None]
