"""Several files as one chain: source → topic → deduplication → topic → table, and which stage is not exactly-once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from posixpath import normpath
from typing import Final

from dedup.core.tracking_id import FieldRule, FieldsRule, HeaderRule
from dedup.quantities import format_duration
from dedup.topology.ingest import FilesSource, Ingest, TableSource, place_of, settle_sentence
from dedup.topology.lint import Finding
from dedup.topology.model import Topology, rule_text

Stage = Ingest | Topology
ID_HEADER: Final = "dedup-id"
_WEAK: Final = frozenset(
    {
        "late_forwarded",
        "missing_forwarded",
        "conflicts_forwarded",
        "late_dropped",
        "source_starts_over",
        "last_line_taken",
        "numbers_given_again",
        "same_directory",
        "settled",
        "query",
        "nobody_writes",
    }
)
"""Findings by which a record may pass twice, or not at all."""


@dataclass(frozen=True, slots=True)
class Named:
    """A file and what it describes."""

    file: str
    stage: Stage


def lint_ingest(ingest: Ingest) -> list[Finding]:
    """Return what the author of a source may not have meant."""
    found: list[Finding] = []
    match ingest.source:
        case FilesSource() as files:
            if files.start_over:
                text = (
                    "changed: start_over reads a truncated or replaced file from its beginning: lines written before "
                    "and not read are lost, lines copied are sent again. This stage is then not exactly-once."
                )
                found.append(Finding("warning", "source_starts_over", text))
            if files.take_last_line:
                text = (
                    "last_line: take sends a line without a line feed: of a file that is still being written it may "
                    "be half a line. Exact only if files come complete."
                )
                found.append(Finding("warning", "last_line_taken", text))
        case TableSource() as table:
            found.extend(_lint_table(table))
    return found


def _lint_table(table: TableSource) -> Iterator[Finding]:
    if table.url.startswith("sqlite:"):
        text = (
            f"SQLite gives the number of a deleted last row again, unless {table.column} is AUTOINCREMENT: "
            f"the row that gets it is not read."
        )
        yield Finding("warning", "numbers_given_again", text)
    if table.settle_ms:
        yield Finding("warning", "settled", settle_sentence(table))
    if table.query:
        text = (
            "source.table.query: whether each row appears by the INSERT that takes its number, nobody can tell from a "
            "query. A row that appears otherwise, by an UPDATE or a row of another table, may never be read."
        )
        yield Finding("warning", "query", text)


def lint_chain(files: Sequence[Named]) -> list[tuple[str, Finding]]:
    """Return the findings that only several files together show, each with the file of its stage."""
    if len(files) < 2:  # noqa: PLR2004  # one file is no chain
        return []
    return [
        *_weak_joints(files),
        *_loose_ends(files),
        *_same_files(files),
        *_same_names(files),
    ]


def describe_chain(files: Sequence[Named], weak: frozenset[str]) -> list[str]:
    """Return a line per chain from a source on: its stages, and whether each is exactly-once.

    ``weak`` has the files of stages that are not, by the findings.
    """
    lines: list[str] = []
    for start in files:
        if isinstance(start.stage, Ingest):
            text = f"{place_of(start.stage.source)} → {start.stage.topic}"
            lines += _paths(files, start.stage.topic, text, [start.file], weak)
    return lines


def _paths(files: Sequence[Named], topic: str, text: str, passed: list[str], weak: frozenset[str]) -> list[str]:
    """Return a line per way from a topic on; ``text`` and ``passed`` have the stages before."""
    after = [each for each in _readers_of(files, topic) if each.file not in passed]
    if not after:
        bad = [file for file in passed if file in weak]
        return [f"{text}: " + (f"not exactly-once at {', '.join(bad)}" if bad else "exactly-once at every stage")]
    lines: list[str] = []
    for each in after:
        topology = each.stage
        assert isinstance(topology, Topology)  # noqa: S101  # nothing else reads topics
        out = topology.output.topic if topology.output else ""
        more = f"{text} → {topology.name}" + (f" → {out}" if out else "")
        more += f" → table {topology.sink.table}" if topology.sink is not None else ""
        lines += _paths(files, out, more, [*passed, each.file], weak)
    return lines


def is_weak(finding: Finding) -> bool:
    """Tell whether a finding says that a stage is not exactly-once."""
    return finding.level == "error" or finding.code in _WEAK


def _readers_of(files: Sequence[Named], topic: str) -> list[Named]:
    return [each for each in files if isinstance(each.stage, Topology) and topic in each.stage.source.topics]


def _weak_joints(files: Sequence[Named]) -> Iterator[tuple[str, Finding]]:
    for each in files:
        if not isinstance(each.stage, Ingest):
            continue
        for after in _readers_of(files, each.stage.topic):
            assert isinstance(after.stage, Topology)  # noqa: S101  # nothing else reads topics
            for finding in _joint(each.stage, after.stage):
                yield after.file, finding


def _joint(ingest: Ingest, topology: Topology) -> Iterator[Finding]:
    """Yield what does not fit between a source and the topology that reads its topic."""
    rule = topology.tracking_id.rule
    reads_header = isinstance(rule, HeaderRule) and rule.name == ID_HEADER
    if reads_header and not ingest.has_header:
        text = (
            f"tracking_id.header: {ID_HEADER} is not on the records of {ingest.name}, which has a tracking_id of its "
            f"own: every record would be a dead letter. Use the same rule in both files."
        )
        yield Finding("error", "no_id_header", text)
    same = isinstance(rule, FieldRule | FieldsRule) and rule == ingest.tracking_id
    if topology.source.partitioned_by_tracking_id and not same:
        own = "its place in the source" if ingest.tracking_id is None else rule_text(ingest.tracking_id)
        text = (
            f"source.partitioned_by: tracking_id is not so: {ingest.name} puts records into partitions by {own}, and "
            f"the tracking ID is {rule_text(rule)}. Equal IDs would be in different partitions, where they are not "
            f"found. Use the same rule in both files, or leave partitioned_by out."
        )
        yield Finding("error", "partitioned_by_another_id", text)


def _loose_ends(files: Sequence[Named]) -> Iterator[tuple[str, Finding]]:
    written = {each.stage.topic for each in files if isinstance(each.stage, Ingest)}
    written |= {each.stage.output.topic for each in files if isinstance(each.stage, Topology) and each.stage.output}
    for each in files:
        match each.stage:
            case Ingest(topic=topic):
                if not _readers_of(files, topic):
                    text = f"no file given here reads the topic {topic}, which {each.stage.name} writes."
                    yield each.file, Finding("warning", "nobody_reads", text)
            case Topology() as topology:
                unknown = [topic for topic in topology.source.topics if topic not in written]
                if unknown:
                    guard = format_duration(topology.window.guard_ms)
                    text = (
                        f"no file given here writes {', '.join(unknown)}: whoever does may send a record twice, or "
                        f"lose it. What is sent twice within {guard} is found here; what is lost before is not."
                    )
                    yield each.file, Finding("warning", "nobody_writes", text)


def _same_files(files: Sequence[Named]) -> Iterator[tuple[str, Finding]]:
    """Yield sources of one directory: a file renamed from the one's pattern into the other's is sent by both."""
    seen: dict[str, Named] = {}
    for each in files:
        if not isinstance(each.stage, Ingest) or not isinstance(each.stage.source, FilesSource):
            continue
        directory = normpath(each.stage.source.directory)
        before = seen.setdefault(directory, each)
        if before is not each:
            text = (
                f"source.files.directory: {directory} is read by {before.stage.name}, too: a file that both patterns "
                f"take, or that is renamed from the one to the other, is sent by both. Give each a directory."
            )
            yield each.file, Finding("warning", "same_directory", text)


def _same_names(files: Sequence[Named]) -> Iterator[tuple[str, Finding]]:
    seen: dict[str, str] = {}
    for each in files:
        if each.stage.name in seen:
            text = (
                f"the name {each.stage.name} is that of {seen[each.stage.name]}, too: they would fence each other, or "
                f"write each other's topics."
            )
            yield each.file, Finding("error", "same_name", text)
        seen.setdefault(each.stage.name, each.file)
