"""Defines `Topology`, the checked content of a topology file with all defaults filled in."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from typing import Final, Literal, Self, assert_never

from dedup.core.csv_row import CsvLayout, Delimiter
from dedup.core.event_time import ArrivalTime, EventTime, FieldTime, RecordTime
from dedup.core.extract import Extractor, Recipe, extractor_for
from dedup.core.fold import OnConflict, OnFuture, OnMissing, OnTombstone, Rules
from dedup.core.formats import MEMBERWISE, TYPED, Format, Schema, text_of
from dedup.core.framing import KEY_HEADER, SchemaBook, SchemaIdPlace, SchemaRef, refs_of
from dedup.core.key_members import KeyFormat
from dedup.core.tracking_id import (
    ENCODING_VERSION,
    CodeRule,
    ContentRule,
    FieldRule,
    FieldsRule,
    FirstOfRule,
    HeaderRule,
    KeyFieldRule,
    KeyRule,
    PartsRule,
    Path,
    RawContentRule,
    Rule,
    SchemaFile,
    TrackingId,
    alternatives_of,
    code_rules,
    format_path,
    needs_value,
)
from dedup.core.window import Window
from dedup.errors import InvariantBroken, Problem, SettingsError
from dedup.topology.schema import ColumnType, Output, Start, StateSpec, TransactionsSpec

_FINGERPRINT_BYTES: Final = 16
_SCHEMA_DIGEST_BYTES: Final = 8
_WINDOW_RULE: Final = 1
"""The version of the rule that defines the meaning of stored sightings. A task cannot use another version's state."""

_MOST_ALONE: Final = 16
_AUTO_GROUPS: Final = 8
_MOST_AUTO: Final = 64

SubTopology = Literal["dedup", "repartition"]
"""The two sub-topologies, each of which has its own kind of task."""


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """The topics that a topology reads, and how it reads them."""

    topics: tuple[str, ...]
    format: Format = "json"
    partitioned_by_tracking_id: bool = False
    """True if the producers send equal IDs to the same partition."""
    start: Start = "earliest"
    schema_id: SchemaIdPlace = "auto"
    """The place of a value's schema ID, if the format has schema IDs."""
    columns: tuple[str, ...] = ()
    """The names of the columns of each value, if the format is csv."""
    delimiter: Delimiter = "comma"
    """The character between the cells of a value, if the format is csv."""
    schema: SchemaFile | None = None
    """The schema of all values, if the format is avro or protobuf and values have no framing."""
    schemas: SchemaBook | None = field(default=None, compare=False)
    """The schemas that the framings of values refer to, or None until `Topology.knowing` sets them."""
    subject: str | None = field(default=None, compare=False)
    """The schema registry's subject with the schemas of all source topics, or None if each topic has its own."""
    key_format: Format = "bytes"
    """The format of keys. With bytes, keys are not read."""
    key_subject: str | None = field(default=None, compare=False)
    """The schema registry's subject with the schemas of all keys, or None if each topic has its own."""

    @property
    def subjects(self) -> tuple[str, ...]:
        """The schema registry's subjects for the values, which only `dedup check` and `dedup schemas export` use."""
        if self.framing is None:
            return ()
        return (self.subject,) if self.subject is not None else tuple(f"{topic}-value" for topic in self.topics)

    @property
    def key_subjects(self) -> tuple[str, ...]:
        """The schema registry's subjects for the keys, which only `dedup check` and `dedup schemas export` use."""
        if not self.names_key_schemas:
            return ()
        return (self.key_subject,) if self.key_subject is not None else tuple(f"{topic}-key" for topic in self.topics)

    @property
    def framing(self) -> SchemaIdPlace | None:
        """The place of a value's schema ID, or None if values have no framing."""
        return self.schema_id if self.format == "json_schema" or self.names_schemas else None

    @property
    def names_schemas(self) -> bool:
        """True if the framing of each value refers to a schema in a schema registry."""
        return self.is_typed and self.schema is None

    @property
    def names_key_schemas(self) -> bool:
        """True if the framing of each key refers to a schema in a schema registry."""
        return self.key_format in TYPED

    @property
    def needs_registry(self) -> bool:
        """True if the framing of values or keys refers to schemas in a schema registry."""
        return self.names_schemas or self.names_key_schemas

    def schema_refs(
        self,
        keys: Sequence[bytes | None],
        values: Sequence[bytes | None],
        headers: Sequence[Sequence[tuple[str, bytes | None]]],
    ) -> list[SchemaRef | None]:
        """Return the IDs of the registry's schemas that are needed to read these records."""
        refs: list[SchemaRef | None] = []
        if self.names_schemas:
            refs += refs_of(self.schema_id, values, headers, indexed=self.format == "protobuf")
        if self.names_key_schemas:
            refs += refs_of("auto", keys, headers, indexed=self.key_format == "protobuf", header=KEY_HEADER)
        return refs

    @property
    def is_typed(self) -> bool:
        """True if values of this format can be read only with their schema."""
        return self.format in TYPED

    @property
    def is_memberwise(self) -> bool:
        """True if values are never decoded as a whole, so payloads are compared as bytes."""
        return self.format in MEMBERWISE

    @property
    def is_binary(self) -> bool:
        """True if values have a binary format: avro, protobuf, msgpack, or cbor."""
        return self.is_memberwise and self.format != "csv"


@dataclass(frozen=True, slots=True)
class LateTo:
    """The policy that sends late records to their own topic."""

    topic: str


@dataclass(frozen=True, slots=True)
class LateForward:
    """The policy that sends late records to the output with the header `dedup-verdict`."""


@dataclass(frozen=True, slots=True)
class LateDrop:
    """The policy that counts late records but sends them nowhere."""


Late = LateTo | LateForward | LateDrop


@dataclass(frozen=True, slots=True)
class FlowSpec:
    """The user's flow, which runs after the verdict. `flow_loader` imports the flow."""

    name: str
    """The flow as module:attribute."""
    directory: str
    """The directory of the topology file, which contains the module unless the module is installed."""
    stop: bool = False
    """True if a failure of the flow stops the worker, instead of making the record a dead letter."""
    file: str = field(default="the topology", compare=False)
    """The name of the topology file, for error messages."""


@dataclass(frozen=True, slots=True)
class SinkColumn:
    """A column of a sink's table, which holds the JSON member at ``path`` if the member has the required type."""

    name: str
    path: Path
    type: ColumnType


@dataclass(frozen=True, slots=True)
class SinkSpec:
    """The table that `dedup sink` fills, with one row per tracking ID."""

    url: str
    """The URL as written. A reference such as ``${env:DATABASE_URL}`` is replaced by its value when the URL is used."""
    table: str
    columns: tuple[SinkColumn, ...]
    """The columns of the table. Without columns, the table holds the record's key and value, as bytes."""
    topic: str
    append: bool
    """True if an ID that is forwarded again after its guard period gets another row."""
    dead_letter: str


@dataclass(frozen=True)
class Topology:
    """The source, rules, and topics of one deduplication job."""

    name: str
    source: SourceSpec
    tracking_id: TrackingId
    window: Window
    dead_letter: str
    late: Late
    output: Output | None = None
    event_time: EventTime = field(default_factory=RecordTime)
    missing: OnMissing = OnMissing.DEAD_LETTER
    tombstones: OnTombstone = OnTombstone.FORWARD
    future: OnFuture = OnFuture.DEAD_LETTER
    max_clock_skew_ms: int = 3_600_000
    idle_after_ms: int = 60_000
    duplicates: str | None = None
    conflicts: str | None = None
    conflicts_counted: bool = False
    """True if the topology file has the key `conflicts`, with or without a topic. Payloads are then compared."""
    compared: ContentRule | None = None
    """The content by which payloads are compared, or None to compare whole JSON values or bytes."""
    on_conflict: OnConflict = OnConflict.DUPLICATE
    state: StateSpec = field(default_factory=StateSpec)
    transactions: TransactionsSpec = field(default_factory=TransactionsSpec)
    sink: SinkSpec | None = None
    then: FlowSpec | None = None
    routes: tuple[str, ...] = ()
    """The topics other than the output to which the flow may send records."""

    @property
    def forwards_to(self) -> tuple[str, ...]:
        """The output topic, if any, and the routes of the flow."""
        return (*(() if self.output is None else (self.output.topic,)), *self.routes)

    @property
    def direct(self) -> bool:
        """True if dedup tasks read the source topic directly, without repartitioning."""
        return len(self.source.topics) == 1 and self.source.partitioned_by_tracking_id

    @property
    def changelog_topic(self) -> str:
        """The compacted topic from which a worker restores state."""
        return f"{self.name}.changelog"

    @property
    def reset_group(self) -> str:
        """The consumer group that stores where reading starts, and where the old output ends, after `dedup reset`."""
        return f"{self.name}.reset"

    @property
    def replay_group(self) -> str:
        """The consumer group that stores the position of `dedup replay` in the late-record and dead-letter topics."""
        return f"{self.name}.replay"

    @property
    def replay_mark_group(self) -> str:
        """The consumer group that holds the replay mark: whether a replay has run, and where the last replay ended."""
        return f"{self.name}.replay-mark"

    @property
    def repartition_topic(self) -> str:
        """The topic to which records are repartitioned by tracking ID, unless `direct` is true."""
        return f"{self.name}.repartition"

    @property
    def layout_topic(self) -> str:
        """The topic that holds the layout record, if `has_layout` is true."""
        return f"{self.name}.layout"

    def has_layout(self, size: int) -> bool:
        """Return whether the topology needs a layout record.

        The record is needed if ``size``, the number of partitions per transaction, exceeds 1, or if `direct` is false.
        """
        return size > 1 or not self.direct

    @property
    def layout_id(self) -> str:
        """The only transactional ID that writes the layout record."""
        return f"{self.name}.layout"

    @property
    def feeding_topics(self) -> tuple[str, ...]:
        """The topics that the dedup tasks read."""
        return self.source.topics if self.direct else (self.repartition_topic,)

    @property
    def outlets(self) -> tuple[tuple[str, str], ...]:
        """The topics to which dedup tasks send records, each with the kind of records that it receives."""
        outlets = (
            (self.output.topic if self.output else None, "unique records"),
            *((topic, "records of the flow") for topic in self.routes),
            (self.duplicates, "duplicates"),
            (self.conflicts, "duplicates with another payload"),
            (self.late.topic if isinstance(self.late, LateTo) else None, "late records"),
            (self.dead_letter, "dead letters"),
        )
        return tuple((topic, records) for topic, records in outlets if topic is not None)

    @property
    def written_topics(self) -> tuple[str, ...]:
        """All topics that tasks write to, in the order of the topology file."""
        repartition = () if self.direct else (self.repartition_topic,)
        chosen = self.transactions.partitions
        layout = (self.layout_topic,) if self.has_layout(1 if chosen == "auto" else chosen) else ()
        return (*repartition, *(topic for topic, _ in self.outlets), self.changelog_topic, *layout)

    @property
    def fingerprints_wanted(self) -> bool:
        """True if payloads are compared, which takes eight more bytes of state per ID."""
        return self.conflicts_counted or self.on_conflict is not OnConflict.DUPLICATE

    def _content_depends_on(self, *, pinned: bool) -> list[str]:
        """Return, for the state fingerprint, the settings that determine a value's content in addition to its bytes."""
        source = self.source
        if source.format == "csv":
            return [source.format, source.delimiter, *source.columns]
        return [source.format] if pinned or source.schema is None else [source.format, _digest(source.schema)]

    @property
    def _compared_without(self) -> tuple[Path, ...]:
        return () if self.compared is None else self.compared.exclude

    @property
    def conflicts_go_to(self) -> str | None:
        """The topic for conflicts (by default, the topic for duplicates), or None if conflicts are only counted."""
        return self.duplicates if self.conflicts is None else self.conflicts

    @property
    def needs_value(self) -> bool:
        """True if the ID or the event time comes from the value, so that a record with a null value is a tombstone."""
        return needs_value(self.tracking_id.rule) or isinstance(self.event_time, FieldTime)

    @property
    def by_arrival(self) -> bool:
        """True if the event time is the time at which the source's broker appended a record."""
        return isinstance(self.event_time, ArrivalTime)

    @cached_property
    def rules(self) -> Rules:
        """The rules that `fold` applies to records."""
        wanted, topics = self.fingerprints_wanted, self.source.topics
        return Rules(self.window, self.missing, self.tombstones, self.future, self.on_conflict, wanted, topics)

    @property
    def runs_code(self) -> bool:
        """True if the topology file names user code: an ID function or a flow."""
        return self.then is not None or bool(code_rules(self.tracking_id.rule))

    @property
    def passes_ids_on(self) -> bool:
        """True if repartition tasks pass on the IDs from a user's function, which therefore runs once per record."""
        return not self.direct and bool(code_rules(self.tracking_id.rule))

    def knowing(self, schemas: SchemaBook) -> Self:
        """Return a copy of the topology that uses the given schemas."""
        return replace(self, source=replace(self.source, schemas=schemas))

    @property
    def group_size(self) -> int:
        """The number of partitions that share a transaction. Raises InvariantBroken if the number is still `auto`."""
        size = self.transactions.partitions
        if not isinstance(size, int):
            raise InvariantBroken(f"{self.name}: the layout on the cluster was not read, so no transaction can begin.")
        return size

    def grouped_by(self, size: int) -> Self:
        """Return a copy of the topology with ``size`` partitions per transaction."""
        return replace(self, transactions=TransactionsSpec(partitions=size))

    def transactional_id(
        self, sub_topology: SubTopology, partition: int, source_topic: str | None = None, *, size: int | None = None
    ) -> str:
        """Return the transactional ID of a partition's task group. Only repartition tasks have a ``source_topic``.

        ``size`` is the number of partitions that share a transaction, and defaults to `group_size`.
        """
        size = size or self.group_size
        group = str(partition) if size == 1 else f"g{partition // size}"
        parts = [self.name, sub_topology, source_topic, group]
        return ".".join(part for part in parts if part is not None)

    def state_fingerprint(self, partitions: Mapping[str, int]) -> bytes:
        """Return 16 bytes that differ between two topologies if one cannot use the other's state.

        ``partitions`` maps each source topic, and each topic that the dedup tasks read, to its number of partitions.
        """
        return blake2b(self.state_identity(partitions).encode(), digest_size=_FINGERPRINT_BYTES).digest()

    def state_identity(self, partitions: Mapping[str, int]) -> str:
        """Return the text that `state_fingerprint` hashes, so that an error message can name the differences."""
        rule = self.tracking_id.rule
        compared = self.compared if self.fingerprints_wanted else None
        # The string for the event time is part of the state fingerprint, so do not change its wording.
        match self.event_time:
            case FieldTime(path, unit):
                time = f"{{field: {format_path(path)}, unit: {unit}}}"
            case ArrivalTime():
                time = "arrival"
            case RecordTime():
                time = "record"
        identity = {
            "encoding": ENCODING_VERSION,
            "window_rule": _WINDOW_RULE,
            "tracking_id": rule_text(rule),
            "normalize": list(self.tracking_id.normalize),
            "event_time": time,
            "source_topics": list(self.source.topics),
            "direct": self.direct,
            "partitions": dict(sorted(partitions.items())),
            "payloads": list(map(format_path, self._compared_without)) if self.fingerprints_wanted else None,
        }
        if self.tracking_id.zeros:
            identity["zero"] = "value"  # only if used, so that the state of older topologies stays usable
        if self.fingerprints_wanted and self.source.is_memberwise:  # not the canonical JSON that other formats compare
            identity["payloads"] = f"{self.source.format} {'bytes' if compared is None else rule_text(compared)}"
        contents = [each for each in (*alternatives_of(rule), compared) if isinstance(each, ContentRule)]
        if self.source.is_memberwise and contents:
            identity["content"] = self._content_depends_on(pinned=all(each.schema is not None for each in contents))
        return json.dumps(identity, sort_keys=True, separators=(",", ":"))


def auto_group_size(partitions: int) -> int:
    """Return how many partitions share a transaction in a new topology with the given number of partitions.

    With up to 16 partitions, each partition has its own transaction. With 17 to 512 partitions, the topology has at
    most eight groups, which can keep eight workers busy. Above 512 partitions, the topology has more groups, with up to
    64 partitions each.
    """
    return 1 if partitions <= _MOST_ALONE else min(-(-partitions // _AUTO_GROUPS), _MOST_AUTO)


def _digest(schema: SchemaFile) -> str:
    content = json.dumps([schema.text, *schema.imports]).encode()
    return blake2b(content, digest_size=_SCHEMA_DIGEST_BYTES).hexdigest()


def rule_text(rule: Rule, schema_text: Callable[[SchemaFile], str] = _digest) -> str:
    """Return a tracking ID rule as text. The text must never change, because the state fingerprint depends on it."""
    match rule:
        case KeyRule() | KeyFieldRule():
            return f"key: {_key_text(rule)}"
        case HeaderRule(name):
            return f"header: {name}"
        case FieldRule(path):
            return f"field: {format_path(path)}"
        case FieldsRule(paths):
            return f"fields: [{', '.join(map(format_path, paths))}]"
        case PartsRule(parts):
            texts = (rule_text(part.rule) + (", absent: as_value" if part.absent_is_value else "") for part in parts)
            return f"parts: [{', '.join(f'{{{text}}}' for text in texts)}]"
        case ContentRule(exclude, schema):
            pinned = "" if schema is None else f", schema: {schema_text(schema)}"
            return f"content: {{exclude: [{', '.join(map(format_path, exclude))}]{pinned}}}"
        case FirstOfRule(alternatives):
            return f"first_of: [{', '.join(f'{{{rule_text(each, schema_text)}}}' for each in alternatives)}]"
        case RawContentRule():
            return "content: true"
        case CodeRule(name, version):
            return f"python: {{function: {name}, version: {version}}}"
        case never:
            assert_never(never)


def _key_text(rule: KeyRule | KeyFieldRule) -> str:
    if isinstance(rule, KeyRule):
        return "true"
    return '["true"]' if rule.path == ("true",) else format_path(rule.path)  # a member "true" is not the whole key


def schema_of(source: SourceSpec) -> Schema:
    """Return the schemas or columns that reading values requires. Raises SettingsError without a registry's schemas."""
    if source.format == "csv":
        return CsvLayout(source.columns, source.delimiter)
    if source.names_schemas:
        return _known_schemas(source, "source.format", source.format)
    return "" if source.schema is None else text_of(source.schema)


def _known_schemas(source: SourceSpec, key: str, fmt: Format) -> SchemaBook:
    if source.schemas is None:
        text = "needs schemas of a schema registry, which is not known here; pass settings with schema_registry.url"
        raise SettingsError([Problem(key, f"{fmt} {text}")])
    return source.schemas


def _keys_of(source: SourceSpec) -> KeyFormat | None:
    if source.key_format == "bytes":
        return None
    named = source.names_key_schemas
    book = _known_schemas(source, "source.key_format", source.key_format) if named else None
    return KeyFormat(source.key_format, book)


def extractor_of(topology: Topology, *, fingerprint: bool = True) -> Extractor:
    """Return the extractor of IDs, event times, and, if the topology compares payloads, payload fingerprints.

    If ``fingerprint`` is false, the extractor returns no fingerprints.
    """
    recipe = Recipe(
        topology.tracking_id,
        topology.event_time,
        topology.source.format,
        fingerprint and topology.fingerprints_wanted,
        topology.compared,
        topology.source.schema_id,
        schema_of(topology.source),
        _keys_of(topology.source),
    )
    return extractor_for(recipe)
