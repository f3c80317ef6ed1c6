"""`dedup apply --table`: the tables of a sink, made by whoever may make tables."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from pathlib import Path

    from dedup.topology.model import SinkSpec, Topology


def resolved_sink(topology: Topology, path: Path) -> SinkSpec:
    """Return the sink of a topology, its database's address resolved. Raises TopologyError where it has none."""
    import os

    from dedup.edges.sink import spec_of
    from dedup.settings import with_references

    spec = spec_of(topology, str(path))
    return replace(spec, url=with_references(spec.url, f"{path}: sink.url", os.environ))


def apply_tables(spec: SinkSpec, *, dry_run: bool, quiet: bool) -> dict[str, str]:
    """The sink's tables are there, unless it is a dry run; return the statements of those that were missing.

    Raises StateIncompatible where a table that is there does not fit, DatabaseUnavailable where none answers.
    """
    from dedup.edges.database import OFFSETS
    from dedup.edges.opening import connect
    from dedup.edges.patience import Patient
    from dedup.edges.upsert import make_tables, plan_tables

    database = Patient(lambda: connect(spec.url))
    try:
        missing = database.first(lambda connection: plan_tables(connection, spec))
        if not dry_run:
            database.first(lambda connection: make_tables(connection, spec))
    finally:
        database.close()
    for name in (OFFSETS, spec.table) if not quiet else ():
        word = "would make" if dry_run else "made"
        typer.echo(f"{word} table {name}: {missing[name]}" if name in missing else f"fine table {name}")
    return missing
