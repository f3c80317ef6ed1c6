"""Finds problems in ingest files, and finds each stage that is not exactly-once in a chain of several files.

A complete chain is source → topic → deduplication → topic → table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from posixpath import normpath
from typing import Final, TypeVar

from dedup.core.tracking_id import FieldsRule, HeaderRule, KeyFieldRule, KeyRule, PartsRule, has_key
from dedup.quantities import format_duration
from dedup.topology.ingest_file import Ingest, Source, settle_sentence
from dedup.topology.lint import Finding, path_findings, warning
from dedup.topology.model import Topology, rule_text
from dedup.topology.schema import FilesSource, Marker

Stage = Ingest | Topology
_Stage = TypeVar("_Stage", Ingest, Topology)
_ID_HEADER: Final = "dedup-id"


@dataclass(frozen=True, slots=True)
class Named:
    """The name of a file, and the ingest source or the topology that the file describes."""

    file: str
    stage: Stage


def lint_ingest(ingest: Ingest) -> list[Finding]:
    """Return the findings about a single ingest file."""
    rule = ingest.tracking_id or FieldsRule(())
    last = [(("boundary", "field"), ingest.boundary.field)] if isinstance(ingest.boundary, Marker) else []
    return [*_lint_source(ingest.source), *path_findings(rule, ingest.event_time, last)]


def _lint_source(source: Source) -> Iterator[Finding]:
    if isinstance(source, FilesSource):
        if source.changed == "start_over":
            yield warning(
                "source_starts_over",
                "changed: start_over reads a truncated or replaced file from its beginning: older lines not yet "
                "read are lost, copied lines are sent again. This stage is then not exactly-once.",
                weak=True,
            )
        if source.last_line == "take":
            yield warning(
                "last_line_taken",
                "last_line: take sends a last line without a line feed: if the file is still being written, it may "
                "be half a line. Exact only if files arrive complete.",
                weak=True,
            )
        return
    if source.url.startswith("sqlite:"):
        yield warning(
            "numbers_given_again",
            f"SQLite reuses the number of a deleted last row, unless {source.column} is AUTOINCREMENT: "
            f"the new row with that number is not read.",
            weak=True,
        )
    if source.settle:
        yield warning("settled", settle_sentence(source), weak=True)
    if source.query:
        yield warning(
            "query",
            "source.table.query: a query does not show whether each row becomes visible by the INSERT that takes its "
            "number. A row that an UPDATE or a row of another table makes visible may never be read.",
            weak=True,
        )


def lint_chain(files: Sequence[Named]) -> list[tuple[str, Finding]]:
    """Return the findings that involve several files, each with the name of the file concerned."""
    if len(files) < 2:  # noqa: PLR2004  # a single file is not a chain
        return []
    joints = (
        (file, finding)
        for _, ingest in _stages(files, Ingest)
        for file, topology in _readers_of(files, ingest.topic)
        for finding in _joint(ingest, topology)
    )
    return [*joints, *_loose_ends(files), *_taken_twice(files), *_shared_topics(files)]


def describe_chain(files: Sequence[Named], weak: frozenset[str]) -> list[str]:
    """Return one line per chain, which lists the stages in order and says whether all stages are exactly-once.

    ``weak`` contains the files that have at least one finding for which `is_weak` is true.
    """
    lines: list[str] = []
    for file, ingest in _stages(files, Ingest):
        source = ingest.source
        if isinstance(source, FilesSource):
            place = f"{source.directory}/{source.pattern}"
        else:
            place = f"table {source.table}" if source.table else "a query"
        lines += _paths(files, ingest.topic, f"{place} → {ingest.topic}", [file], weak)
    return lines


def _paths(files: Sequence[Named], topic: str, text: str, passed: list[str], weak: frozenset[str]) -> list[str]:
    """Return one line per chain. The arguments ``text`` and ``passed`` describe the stages before ``topic``."""
    after = [(file, topology) for file, topology in _readers_of(files, topic) if file not in passed]
    if not after:
        bad = [file for file in passed if file in weak]
        return [f"{text}: " + (f"not exactly-once at {', '.join(bad)}" if bad else "exactly-once at every stage")]
    lines: list[str] = []
    for file, topology in after:
        for out in topology.forwards_to or ("",):
            more = f"{text} → {topology.name}" + (f" → {out}" if out else "")
            if topology.sink is not None and (topology.sink.topic == out or not topology.routes):
                more += f" → table {topology.sink.table}"
            lines += _paths(files, out, more, [*passed, file], weak)
    return lines


def is_weak(finding: Finding) -> bool:
    """Return whether a finding means that a stage is not exactly-once."""
    return finding.level == "error" or finding.weak


def _stages(files: Sequence[Named], kind: type[_Stage]) -> list[tuple[str, _Stage]]:
    return [(each.file, each.stage) for each in files if isinstance(each.stage, kind)]


def _readers_of(files: Sequence[Named], topic: str) -> list[tuple[str, Topology]]:
    return [(file, topology) for file, topology in _stages(files, Topology) if topic in topology.source.topics]


def _joint(ingest: Ingest, topology: Topology) -> Iterator[Finding]:
    """Yield findings about contradictions between an ingest file and a topology that reads its topic."""
    rule, reads = topology.tracking_id.rule, topology.source.format
    if reads not in {"json", "bytes"}:
        text = f"source.format: {reads} does not fit {ingest.name}, which writes JSON; use `format: json`."
        yield Finding("error", "json_is_written", text)
    parts = [part.rule for part in rule.parts if not part.absent_is_value] if isinstance(rule, PartsRule) else [rule]
    if ingest.tracking_id is None and not topology.direct and any(isinstance(each, KeyRule) for each in parts):
        text = (
            f"tracking_id.key: {ingest.name} writes null keys, so every record would become a dead letter. Use the "
            f"same rule in both files."
        )
        yield Finding("error", "null_keys", text)
    if any(isinstance(each, KeyFieldRule) for each in parts):
        keys = "null keys" if ingest.tracking_id is None else "the tracking ID itself as the key"
        text = (
            f"tracking_id.key: {ingest.name} writes {keys}, so keys have no members, and every record would become a "
            f"dead letter. Use the same rule in both files."
        )
        yield Finding("error", "key_without_members", text)
    if HeaderRule(_ID_HEADER) in parts and ingest.tracking_id is not None:
        text = (
            f"tracking_id.header: {_ID_HEADER} is not on the records of {ingest.name}, which has its own tracking_id: "
            f"every record would become a dead letter. Use the same rule in both files."
        )
        yield Finding("error", "no_id_header", text)
    # The source also writes the tracking ID as the record's key.
    same = ingest.tracking_id is not None and (rule == ingest.tracking_id or has_key(rule))
    if topology.direct and not same:
        own = "its place in the source" if ingest.tracking_id is None else rule_text(ingest.tracking_id)
        text = (
            f"source.partitioned_by: tracking_id is wrong: {ingest.name} puts records into partitions by {own}, and "
            f"the tracking ID is {rule_text(rule)}. Equal IDs would be in different partitions, where duplicates are "
            f"not found. Use the same rule in both files, or remove partitioned_by."
        )
        yield Finding("error", "partitioned_by_another_id", text)


def _loose_ends(files: Sequence[Named]) -> Iterator[tuple[str, Finding]]:
    written = {ingest.topic for _, ingest in _stages(files, Ingest)}
    written |= {topic for _, topology in _stages(files, Topology) for topic in topology.forwards_to}
    for file, ingest in _stages(files, Ingest):
        if not _readers_of(files, ingest.topic):
            text = f"no file given here reads the topic {ingest.topic}, which {ingest.name} writes."
            yield file, warning("nobody_reads", text)
    for file, topology in _stages(files, Topology):
        unknown = [topic for topic in topology.source.topics if topic not in written]
        if unknown:
            text = (
                f"no file given here writes {', '.join(unknown)}: the producer may send a record twice, or lose it. A "
                f"record sent twice within {format_duration(topology.window.guard_ms)} is found here; a record lost "
                f"before is not."
            )
            yield file, warning("nobody_writes", text, weak=True)


def _taken_twice(files: Sequence[Named]) -> Iterator[tuple[str, Finding]]:
    """Yield findings about stages with the same name, and about sources that read the same directory."""
    names: dict[str, str] = {}
    directories: dict[str, str] = {}
    for file, stage in ((each.file, each.stage) for each in files):
        if stage.name in names:
            text = (
                f"the name {stage.name} is also that of {names[stage.name]}: they would fence each other, or write "
                f"to each other's topics."
            )
            yield file, Finding("error", "same_name", text)
        names.setdefault(stage.name, file)
        if not isinstance(stage, Ingest) or not isinstance(stage.source, FilesSource):
            continue
        directory = normpath(stage.source.directory)
        if directory in directories:
            text = (
                f"source.files.directory: {directory} is read by {directories[directory]}, too: a file that matches "
                f"both patterns, or is renamed from one to the other, is sent by both. Give each its own directory."
            )
            yield file, warning("same_directory", text, weak=True)
        directories.setdefault(directory, stage.name)


def _shared_dead_letters(topology: Topology, other: Topology) -> str:
    """Explain what happens to the dead letters of two topologies that share a dead-letter topic.

    A dead letter names its source record, but not the topology that wrote the dead letter.
    """
    both = ", ".join(name for name in topology.source.topics if name in other.source.topics)
    effect = "`dedup replay` skips those, but `dedup verify` reports them as records without a source."
    if both:
        effect = (
            f"Both topologies read {both}: `dedup replay` of each one sends the dead letters of both that came from "
            "there, and `dedup verify` reports them as duplicated."
        )
    return (
        f"dead_letter: {topology.dead_letter} also receives the dead letters of {other.name}. {effect} Give each "
        "its own topic."
    )


def _shared_topics(files: Sequence[Named]) -> Iterator[tuple[str, Finding]]:
    """Yield a finding for each pair of topologies that write to the same topics."""
    topologies = _stages(files, Topology)
    for at, (file, topology) in enumerate(topologies):
        for _, other in topologies[:at]:
            theirs = set(other.written_topics)
            shared = [name for name in topology.written_topics if name in theirs]
            if not shared or topology.name == other.name:
                continue  # `_taken_twice` reports the equal names, which cause the equal topics
            names = ", ".join(shared)
            if shared == [topology.dead_letter] == [other.dead_letter]:
                yield file, warning("shared_dead_letters", _shared_dead_letters(topology, other))
            else:
                text = (
                    f"{names}: written by {other.name}, too. An ID that both judge is forwarded twice, and neither "
                    f"output can be verified. Give each topology its own topics, or read both sources in one topology."
                )
                yield file, Finding("error", "shared_topics", text)
