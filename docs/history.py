"""The input of tutorial-history.md: years of real flights as files with duplicates in them, and what comes after, live.

``python docs/history.py files history`` writes two years; ``topic`` makes the source topic; ``live`` sends the end of
the history once more, as producers do that were not sure, and then the next year.
"""
# ruff: noqa: INP001  # a script beside its pages, not a package

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import typer
from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from dedup.embedded.flights import flights

FIRST_YEAR: Final = 2013
YEARS: Final = 2
DUPLICATES: Final = 0.03
FARTHEST: Final = 2_000
"""Events between a record and its duplicate, at most: two days."""
FILES_A_YEAR: Final = 4
TOPIC: Final = "flights"
PARTITIONS: Final = 4
NOT_AT_ONCE: Final = {"retention.ms": "-1"}
"""The event times are years ago."""

app = typer.Typer(help=__doc__)
Flights = Annotated[int, typer.Option(help="Of each year; all of them are 336,776.")]
Brokers = Annotated[str, typer.Option(help="host:port")]


def year_of_flights(year: int, limit: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield (key, value) of a year's flights, 3 % of them once more a little later; the same at every call."""
    dice = random.Random(year)  # noqa: S311  # no secret
    waiting: dict[int, list[tuple[bytes, bytes]]] = {}
    for at, flight in enumerate(flights(limit)):
        key = flight.key.replace(b"%d" % FIRST_YEAR, b"%d" % year, 1)
        value = flight.value.replace(b"%d" % FIRST_YEAR, b"%d" % year)
        yield key, value
        yield from waiting.pop(at, ())
        if dice.random() < DUPLICATES:
            waiting.setdefault(at + 1 + dice.randrange(FARTHEST), []).append((key, value))
    for late in waiting.values():
        yield from late


@app.command()
def files(directory: Path, count: Annotated[int, typer.Option("--flights")] = 336_776) -> None:
    """Write two years as lines of JSON, one per record: its key and its value as text."""
    directory.mkdir(parents=True, exist_ok=True)
    written = 0
    for year in range(FIRST_YEAR, FIRST_YEAR + YEARS):
        lines = [
            json.dumps({"key": key.decode(), "value": value.decode()}) + "\n"
            for key, value in year_of_flights(year, count)
        ]
        for part in range(FILES_A_YEAR):
            with gzip.open(directory / f"{year}-{part}.json.gz", "wt", encoding="utf-8") as file:
                file.writelines(lines[part * len(lines) // FILES_A_YEAR : (part + 1) * len(lines) // FILES_A_YEAR])
        written += len(lines)
    typer.echo(f"{written:,} records of {YEARS * count:,} flights in {directory}")


@app.command()
def topic(brokers: Brokers = "127.0.0.1:9092") -> None:
    """Make the source topic."""
    admin = AdminClient({"bootstrap.servers": brokers})
    wanted = NewTopic(TOPIC, num_partitions=PARTITIONS, replication_factor=1, config=NOT_AT_ONCE)
    try:
        admin.create_topics([wanted])[TOPIC].result(timeout=30)
    except KafkaException as error:
        if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
            raise
        text = f"topic {TOPIC} exists already. To start again, stop the broker, delete state/, and start a new broker."
        typer.echo(text, err=True)
        raise typer.Exit(1) from None
    typer.echo(f"topic {TOPIC} made")


@app.command()
def live(
    count: Annotated[int, typer.Option("--flights")] = 20_000,
    again: Annotated[int, typer.Option(help="Records of the history's end that come once more.")] = 5_000,
    history: Annotated[int, typer.Option(help="Flights a year, as the files were made with.")] = 336_776,
    brokers: Brokers = "127.0.0.1:9092",
) -> None:
    """Send the end of the history again, then the next year's first flights with their duplicates."""
    last = list(year_of_flights(FIRST_YEAR + YEARS - 1, history))[-again:]
    records = [*last, *year_of_flights(FIRST_YEAR + YEARS, count)]
    # Kafka's own partitioner: librdkafka's default is another one.
    producer = Producer({"bootstrap.servers": brokers, "partitioner": "murmur2_random", "linger.ms": 20})
    for at, (key, value) in enumerate(records):
        producer.produce(TOPIC, value, key)
        if at % 10_000 == 0:
            producer.flush()
    producer.flush()
    typer.echo(f"{len(records):,} records sent, {len(last):,} of them not for the first time")


if __name__ == "__main__":
    app()
