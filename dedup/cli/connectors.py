"""Implements `dedup ingest` and `dedup sink`, and creates the tables for `dedup apply --table`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

from dedup.cli.inputs import ConfigOption, SetOption, read_ingest, read_settings, read_topology
from dedup.errors import Problem, SettingsError, TaskMigrated
from dedup.quantities import counted

if TYPE_CHECKING:
    from dedup.connect.source_connector import OpenSource
    from dedup.topology.model import SinkSpec, Topology

T = TypeVar("T")

_PARTITIONS: Final = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_LAST_PARTITION: Final = 999_999
"""The greatest partition that an option may name; a cluster cannot have as many."""


def ingest(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="Ingest file.")],
    config: ConfigOption = None,
    overrides: SetOption = None,
    exit_when_done: Annotated[
        bool, typer.Option("--exit-when-done", help="Stop when the whole source has been sent.")
    ] = False,
) -> None:
    """Send each line of a set of files, or each row of a table, to a topic exactly once, even across crashes.

    Each Kafka transaction contains records and the position reached in the source. If you start a second process with
    the same ingest file, the new process takes over, and the old one stops with the error TaskMigrated.

    Examples: dedup ingest topologies/files-to-topic.yaml

    dedup ingest topologies/table-to-topic.yaml --exit-when-done
    """
    from dedup.connect.open_database import refuse_unusable
    from dedup.connect.source_connector import open_source, run_ingest
    from dedup.settings import with_references
    from dedup.topology.schema import TableSource
    from dedup.worker.logs import set_up_logging

    settings = read_settings(config, overrides)
    parsed = read_ingest(source)
    set_up_logging(settings)
    opener: OpenSource = open_source
    if isinstance(parsed.source, TableSource):
        url = with_references(parsed.source.url, f"{source}: source.table.url", os.environ)
        refuse_unusable(url)
        opener = partial(open_source, url=url)
    done = _run(run_ingest(parsed, settings, opener, exit_when_done=exit_when_done))
    for text in done.waiting:
        typer.echo(text, err=True)
    typer.echo(
        f"{parsed.name}: {counted(done.records, 'record')} to {parsed.topic}, "
        f"{counted(done.dead_letters, 'dead letter')}, {counted(done.transactions, 'transaction')}"
    )


def sink(
    topology: Annotated[Path, typer.Argument(metavar="TOPOLOGY", help="Topology file with a `sink`.")],
    config: ConfigOption = None,
    overrides: SetOption = None,
    partitions: Annotated[
        str | None, typer.Option(metavar="0,2-5", help="Partitions that this process reads. Default: all.")
    ] = None,
    exit_when_done: Annotated[
        bool,
        typer.Option(
            "--exit-when-done", help="Stop when every record that was in the topic at startup is in the table."
        ),
    ] = False,
) -> None:
    """Write a topic to a database table, with one row per tracking ID.

    Each database transaction contains rows and the offsets reached in the topic. Reading the topic a second time does
    not change the table. If you start a second process for the same partitions of the topic, the new process takes
    over, and the old one stops with the error TaskMigrated.

    Examples: dedup sink topologies/topic-to-database.yaml

    dedup sink topologies/topic-to-database.yaml --exit-when-done
    """
    from dedup.connect.sink_connector import run_sink
    from dedup.kafka.schema_registry import TASK_PATIENCE_S, asking
    from dedup.worker.logs import set_up_logging

    settings = read_settings(config, overrides)
    parsed = asking(read_topology(topology), settings, patience_s=TASK_PATIENCE_S, keeps_unknown=False)
    spec = resolved_sink(parsed, topology)
    set_up_logging(settings)
    numbers = None if partitions is None else _numbers(partitions)
    done = _run(run_sink(parsed, spec, settings, partitions=numbers, exit_when_done=exit_when_done))
    typer.echo(
        f"{spec.table}: {counted(done.inserted, 'row')} inserted, {done.updated:,} updated, {done.unchanged:,} "
        f"unchanged, {counted(done.dead_letters, 'dead letter')}, {counted(done.transactions, 'transaction')}"
    )


def _run(work: Coroutine[Any, Any, T]) -> T:
    try:
        return asyncio.run(work)
    except TaskMigrated as error:
        typer.echo(f"TaskMigrated: {error}", err=True)
        raise typer.Exit(error.exit_code) from error


def _numbers(text: str) -> set[int]:
    found: set[int] = set()
    for part in text.split(","):
        written = _PARTITIONS.fullmatch(part.strip())
        if written is None or int(written[2] or written[1]) < int(written[1]):
            raise SettingsError([Problem("--partitions", f'"{text}" is not a list of partitions such as 0,2-5')])
        first, last = int(written[1]), int(written[2] or written[1])
        if last > _LAST_PARTITION:
            raise SettingsError([Problem("--partitions", f"{last} is more than {_LAST_PARTITION:,}, the limit")])
        found |= set(range(first, last + 1))
    return found


def resolved_sink(topology: Topology, path: Path) -> SinkSpec:
    """Return the topology's sink, with references such as ${env:NAME} in the sink's URL resolved.

    Raises TopologyError if the topology has no sink, SettingsError if the URL is invalid or a reference has no value,
    and PackageMissing if the database's driver is not installed.
    """
    from dedup.connect.open_database import refuse_unusable
    from dedup.connect.sink_connector import spec_of
    from dedup.settings import with_references

    spec = spec_of(topology, str(path))
    url = with_references(spec.url, f"{path}: sink.url", os.environ)
    refuse_unusable(url)
    return replace(spec, url=url)


def apply_tables(topology: str, spec: SinkSpec, *, dry_run: bool, quiet: bool) -> dict[str, str]:
    """Map the name of each missing sink table to its CREATE statement, and create the tables unless ``dry_run`` is set.

    Raises StateIncompatible if an existing table is unsuitable, or if the topology's sink has written to another table
    or to a table that no longer exists, and DatabaseUnavailable if the database does not respond.
    """
    from dedup.connect.database import OFFSETS, FencedOffsets
    from dedup.connect.open_database import RetryingDatabase
    from dedup.connect.upsert import make_tables, plan_tables, refuse_lost_table

    with contextlib.closing(RetryingDatabase(spec.url)) as database:
        offsets = FencedOffsets(topology, spec.topic, "", spec.table)
        database.first(lambda connection: refuse_lost_table(connection, offsets))
        missing = database.first(lambda connection: plan_tables(connection, spec))
        if not dry_run:
            database.first(lambda connection: make_tables(connection, spec))
    for name in (OFFSETS, spec.table) if not quiet else ():
        word = "would create" if dry_run else "created"
        typer.echo(f"{word} table {name}: {missing[name]}" if name in missing else f"ok table {name}")
    return missing
