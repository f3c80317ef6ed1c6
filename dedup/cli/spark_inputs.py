"""What the commands of `dedup spark` read from their command lines, where several need it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from dedup.errors import Problem, SettingsError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dedup.session.wire import TopicPartition
    from dedup.spark.jars import Package
    from dedup.spark.seed_state import Until
    from dedup.topology.model import Topology


def open_session(
    topology: Topology, master: str | None, conf: list[str] | None, packages: Iterable[Package]
) -> SparkSession:
    """Return a session with ``--conf key=value`` in it. Raises SettingsError for one without a value."""
    from dedup.spark.session import session_for

    wrong = [text for text in conf or () if "=" not in text]
    if wrong:
        raise SettingsError([Problem(f"--conf {text}", "has no value; write --conf key=value") for text in wrong])
    pairs = {key: value for key, _, value in (text.partition("=") for text in conf or ())}
    return session_for(topology, master=master, packages=packages, conf=pairs)


def parse_until(text: str) -> Until:
    """Return what ``--until`` says: `earliest`, `latest`, a time, or `topic/partition=offset,...`."""
    match text:
        case "earliest" | "latest":
            return text
        case _ if "=" in text:
            return parse_offsets(text, "--until")
        case _:
            return parse_time(text, "--until", "latest, 2024-01-01T00:00:00Z or orders/0=1200,orders/1=900")


def parse_time(text: str, option: str, write: str) -> int:
    """Return a time in ms; raises SettingsError that says what to write instead."""
    from dedup.core.event_time import rfc3339_ms

    found = int(text) if text.isdecimal() else rfc3339_ms(text)
    if found is None:
        raise SettingsError([Problem(option, f'"{text}" is no time; write {write}')])
    return found


def parse_offsets(text: str, option: str) -> dict[TopicPartition, int]:
    """Return the offsets of `topic/partition=offset,...`; raises SettingsError for what is none."""
    from dedup.session.wire import TopicPartition

    found = {}
    for each in text.split(","):
        place, _, offset = each.strip().partition("=")
        topic, _, partition = place.rpartition("/")
        if not (topic and partition.isdecimal() and offset.isdecimal()):
            raise SettingsError([Problem(option, f'"{each}" is no offset; write topic/partition=offset')])
        found[TopicPartition(topic, int(partition))] = int(offset)
    return found
