"""Implements `dedup verify` and `dedup explain`, which need only Kafka, not a worker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console

from dedup.cli.inputs import (
    ConfigOption,
    JsonOption,
    ReportOption,
    SetOption,
    TopologyArgument,
    publish,
    read_both,
    reading_bar,
    refuse_no_page,
    say,
    where_named,
)
from dedup.errors import Problem, SettingsError, VerificationFailed
from dedup.quantities import format_duration, instant

if TYPE_CHECKING:
    from dedup.topology.model import Topology
    from dedup.verify.explanation import ExplainedRecord, Explanation

_MOST_DIGITS: Final = 18
"""The maximum number of digits in an option. Python refuses to convert thousands of digits."""


def explain(
    topology: TopologyArgument,
    tracking_id: Annotated[str, typer.Argument(metavar="ID", help="Tracking ID.")],
    config: ConfigOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the records with a given tracking ID, the reason for each verdict, and the topics that contain the records.

    The command reads only from Kafka, so no worker needs to run. It reads all topics from the beginning, but keeps only
    the records with the given ID in memory. Write a composite ID as a JSON array of its parts. The exit code is 4 if
    the topics that workers write to contradict the verdicts; otherwise, it is 0, even if no record has the ID.

    Examples: dedup explain topologies/orders.yaml 8d5e957f-297893487bd98fa830fa6413

    dedup explain topologies/two-sources.yaml '["shop-7", 4711]' --json
    """
    from dedup.verify.explanation import explain_id
    from dedup.verify.report import BY_THE_TOPOLOGY_NOW
    from dedup.worker.introspection import state_keys

    parsed, settings = read_both(topology, config, overrides)
    keys = frozenset(state_keys(parsed, tracking_id))
    with reading_bar(Console(stderr=True)) as show:
        found = explain_id(parsed, settings, tracking_id, keys, progress=show)
    data = asdict(found) | {"contradictions": found.contradictions}
    say(data, in_words(found, parsed), as_json=as_json)
    if found.contradictions:
        raise VerificationFailed(
            f"{parsed.name}: the topics contradict the rule in {found.contradictions} places for {tracking_id!r}. Keep "
            f"the topics as they are: they are the evidence. `dedup verify` checks every ID. {BY_THE_TOPOLOGY_NOW}"
        )


def in_words(found: Explanation, topology: Topology) -> Iterator[str]:
    """Yield the explanation of a tracking ID as lines of text."""
    if not found.records:
        yield f"no record with the ID {found.id!r} is in the source topics now"
    for record in found.records:
        yield from _record(record, topology)
    if found.more:
        yield f"and {found.more} more records of this ID"
    for place in found.strays:
        yield f"{place} has this ID, too; no record listed here accounts for it"
    for kept in found.sightings:
        until = f"guarded until {instant(kept.guarded_until_ms)} of event time" if kept.live else "expired"
        extended = "" if kept.last_ms == kept.first_ms else f", last at {instant(kept.last_ms)}"
        yield f"sighting in {kept.place}: seen {instant(kept.first_ms)}{extended} in {kept.source}; {until}"
    if not found.sightings:
        yield "the changelog has no sighting of this ID: it was never judged unique, or its sighting has expired"


def _record(record: ExplainedRecord, topology: Topology) -> Iterator[str]:
    other = "" if record.timestamp_ms == record.event_time_ms else f", record timestamp {instant(record.timestamp_ms)}"
    yield f"{record.verdict}: {record.place}"
    yield f"    event time {instant(record.event_time_ms)}{other}"
    yield f"    {_why(record, topology)}"
    if record.log_place is not None:
        yield f"    judged as {record.log_place}"
    for place in record.went:
        yield f"    is now in {place}"
    if record.doubt:
        yield f"    not provable: {record.doubt}"
    if record.wrong:
        yield f"    WRONG: {record.wrong}"


def _why(record: ExplainedRecord, topology: Topology) -> str:
    window = topology.window
    match record.verdict:
        case "unique" if record.conflict:
            return f"the ID was seen in {record.of} with another payload; on_conflict: forward"
        case "unique":
            return f"no record of this ID was seen less than {format_duration(window.guard_ms)} of event time away"
        case "duplicate":
            away = format_duration(abs(record.event_time_ms - (record.of_ms or 0)))
            payload = ", with another payload" if record.conflict else ""
            return f"repeats {record.of}{payload}, {away} away; the guard period is {format_duration(window.guard_ms)}"
        case "late":
            behind = format_duration(record.stream_time_ms - record.event_time_ms)
            return (
                f"{behind} behind stream time {instant(record.stream_time_ms)}, more than the grace period of "
                f"{format_duration(window.grace_ms)}: it was no longer possible to tell whether it is a duplicate"
            )
        case "dead_letter":
            return f"a dead letter, because: {record.reason}"
        case "exempt":
            return f"forwarded without being judged, as the topology says ({record.reason})"
        case "fail":
            return f"the worker stops at this record, as the topology says ({record.reason})"
        case "purged":
            return "judged, but the log it was judged in has been purged"
        case _:
            return "not judged yet: it is beyond the group's committed offset"


def verify_topology(
    topology: TopologyArgument,
    config: ConfigOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
    report: ReportOption = None,
    sample: Annotated[
        str,
        typer.Option(
            metavar="1/N", help="Judge only one in N tracking IDs, chosen by hash, and report what was not verified."
        ),
    ] = "1/1",
    scratch: Annotated[
        Path | None,
        typer.Option(
            metavar="DIRECTORY",
            help="Directory for temporary files. Default: the system's temporary directory.",
            exists=True,
            file_okay=False,
            writable=True,
        ),
    ] = None,
) -> None:
    """Prove from the data in Kafka alone that nothing was lost or duplicated.

    The command reads the source topics, the topics that workers write to, and the group's offsets, and uses another
    Kafka client than workers do. The command then judges the source records again with a simple model, and checks that
    the written records have the expected keys, values, headers, timestamps, and order. The exit code is 4 if a record
    violates the guarantee. Memory use does not grow with the size of the topics. The --scratch directory temporarily
    holds about 200 bytes for each record, plus the record's key.

    Examples: dedup verify topologies/orders.yaml --report reports/orders.html

    dedup verify topologies/orders.yaml --sample 1/100
    """
    from dedup.verify.report import BY_THE_TOPOLOGY_NOW
    from dedup.verify.verifier import verify

    one_in = _one_in(sample)
    parsed, settings = read_both(topology, config, overrides)
    refuse_no_page(report)
    with reading_bar(Console(stderr=as_json)) as show:
        found = verify(parsed, settings, progress=show, sample=one_in, scratch=scratch)
    publish(found, report, "dedup verify", as_json=as_json)
    if not found.passed:
        raise VerificationFailed(
            f"{parsed.name}: {found.closing_line()}. {where_named(report)} Keep the topics as they are: they are the "
            f"evidence. `dedup explain` says what happened to one ID. {BY_THE_TOPOLOGY_NOW}"
        )


def _one_in(text: str) -> int:
    one, _, number = text.partition("/")
    if one != "1" or not number.isdecimal() or len(number) > _MOST_DIGITS or not int(number):
        raise SettingsError([Problem("--sample", f'"{text}" is not a fraction; write for example 1/100')])
    return int(number)
