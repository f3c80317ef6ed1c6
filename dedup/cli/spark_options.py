"""Defines the options of the Spark commands."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import typer

PASSWORD: Final = "DEDUP_JDBC_PASSWORD"  # noqa: S105  # the name of a variable

MasterOption = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Spark master. Default: the master set by spark-submit, or this machine."),
]
ConfOption = Annotated[list[str] | None, typer.Option("--conf", metavar="KEY=VALUE", help="Spark setting. Repeatable.")]
RowsAreEvents = Annotated[
    bool,
    typer.Option(
        "--rows-are-events", help="Convert each input row to a JSON event; the input needs no column `value`."
    ),
]
EveryOption = Annotated[
    str, typer.Option(metavar="DURATION", help="How long to wait if no new records can be appended to the table.")
]
DeltaOption = Annotated[
    str | None, typer.Option(metavar="PATH", help="Append the output topic to the Delta table at this path.")
]
IcebergOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Append the output topic to this Iceberg table; the name includes the catalog."),
]
QuietOption = Annotated[bool, typer.Option("--quiet", help="Do not show progress.")]
ExitWhenDone = Annotated[
    bool, typer.Option("--exit-when-done", help="Stop at the end offsets that the topics have at startup.")
]
NowOption = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Time to use as the current time; later event times are future times."),
]

InputFormat = Literal["parquet", "json", "json-records", "delta", "table"]
_FILE_FORMATS: Final = "parquet, json (one event per line), json-records"
_FORMATS: Final = f"{_FILE_FORMATS}, delta, or table (a table's name)"
HistoryFormat = Annotated[
    InputFormat, typer.Option("--format", metavar="FORMAT", help=f"Format of --history: {_FORMATS}.")
]
FormatOption = Annotated[
    InputFormat, typer.Option("--format", metavar="FORMAT", help=f"Format of --input: {_FORMATS}.")
]
GrowingFormat = Annotated[
    InputFormat, typer.Option("--format", metavar="FORMAT", help=f"Format of --input: {_FILE_FORMATS}, or delta.")
]
"""`dedup spark incremental` refuses the format `table`, with an error that says what to use instead."""
Checkpoint = Annotated[
    str,
    typer.Option(metavar="DIRECTORY", help="Directory for Spark's checkpoint; each topology needs its own directory."),
]
MostOffsets = Annotated[int, typer.Option(min=1, metavar="N", help="Maximum number of offsets per micro-batch.")]
CommitRows = Annotated[int, typer.Option(min=1, metavar="N", help="Approximate number of records per transaction.")]
OntoExistingOutput = Annotated[
    bool, typer.Option("--onto-existing-output", help="Let a new group write to an output topic that has records.")
]
VerdictsPlace = Annotated[str, typer.Option(metavar="PATH", help="Directory or Delta table for the verdicts.")]
HistoryInputs = Annotated[
    list[str] | None,
    typer.Option("--input", metavar="PATH", help="Files, directories, or tables. Default: the source topics."),
]
VerdictsFormat = Annotated[
    Literal["parquet", "delta"], typer.Option(metavar="FORMAT", help="Format of the verdicts: parquet or delta.")
]
RunName = Annotated[str, typer.Option(metavar="NAME", help="Name of the run; a completed run is not repeated.")]
StartOfTopics = Annotated[
    str,
    typer.Option(
        metavar="TIME", help="Where to start in topics: whole (offset 0), earliest (oldest record), or a timestamp."
    ),
]
EndOfTopics = Annotated[str, typer.Option(metavar="TIME", help="Where to stop in topics: now or a timestamp.")]
Repartitioned = Annotated[
    bool, typer.Option("--repartitioned", help="Read the repartition topic, in the same order as workers.")
]
GrowingInputs = Annotated[
    list[str],
    typer.Option("--input", metavar="PATH", help="Files, directories that receive new files, or a Delta table."),
]
VerdictsTable = Annotated[
    str, typer.Option(metavar="PATH", help="Path of the Delta table for the verdicts; the first run creates it.")
]
EndOfHistory = Annotated[
    str,
    typer.Option(
        metavar="PLACE",
        help="Where the history ends and the fleet takes over: earliest, latest, a time, or offsets such as "
        "orders/0=1200,orders/1=900.",
    ),
]
SeedHistory = Annotated[
    list[str] | None,
    typer.Option(metavar="PATH", help="Files, directories, or tables with the history. Default: the source topics."),
]
ChangelogRows = Annotated[int, typer.Option(min=1, metavar="N", help="Number of changelog records per transaction.")]
SeededHistory = Annotated[
    list[str] | None, typer.Option(metavar="PATH", help="Files or tables that seeded the fleet, if any.")
]
BeginOffsets = Annotated[
    str | None,
    typer.Option(
        "--from", metavar="OFFSETS", help="Offsets at which the fleet began, if the topics no longer show them."
    ),
]
UpsertDelta = Annotated[str | None, typer.Option(metavar="PATH", help="Path of the Delta table.")]
JdbcUrl = Annotated[
    str | None, typer.Option(metavar="URL", help="Database URL: jdbc:postgresql://HOST/DB or jdbc:sqlite:FILE.")
]
JdbcTable = Annotated[str | None, typer.Option(metavar="NAME", help="Name of the table in the database.")]
JdbcUser = Annotated[str | None, typer.Option(metavar="NAME", help=f"Database user; set {PASSWORD} to the password.")]
OutputInputs = Annotated[
    list[str] | None,
    typer.Option("--input", metavar="PATH", help="Files, directories, or tables. Default: the output topic."),
]
TableSchema = Annotated[
    str | None,
    typer.Option(metavar="DDL", help="Columns to fill from members of the value. Default: the columns key and value."),
]
TableOrder = Annotated[
    str,
    typer.Option(
        metavar="COLUMN", help="Value by which records are ordered, oldest first: event_time, offset, or a column."
    ),
]
RejectedPath = Annotated[
    str | None,
    typer.Option(
        metavar="PATH", help="Directory for records that cannot become rows; each run adds a subdirectory to it."
    ),
]
OffsetsPerCommit = Annotated[int, typer.Option(min=1, metavar="N", help="Approximate number of offsets per commit.")]
