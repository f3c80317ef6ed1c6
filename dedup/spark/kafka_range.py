"""A range of Kafka offsets as records to judge: whole, or refused with the offsets that are gone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal

from dedup.core.stream_time import Feed
from dedup.errors import BrokerUnavailable, StateIncompatible
from dedup.proof.kafka_reader import Bounds, KafkaReader
from dedup.spark.files import History
from dedup.spark.kafka_options import kafka_options
from dedup.spark.rows import records_of_kafka

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dedup.settings import Settings
    from dedup.topology.model import Topology

Start = Literal["whole", "earliest"] | int
"""``whole``: from offset 0, refused where retention ate it. ``earliest``: what is left. A number: a time in ms."""
Until = Literal["now"] | int
Offsets = Mapping[str, Mapping[int, int]]
"""By topic and partition."""

_SHOWN: Final = 5


def read_kafka(
    spark: SparkSession,
    topology: Topology,
    settings: Settings,
    *,
    start: Start = "whole",
    until: Until = "now",
    repartitioned: bool = False,
) -> History:
    """Return the committed records of the source topics, or of the repartition topic.

    Raises StateIncompatible where retention deleted the beginning, and BrokerUnavailable for a topic that is missing.
    """
    topics = (topology.repartition_topic,) if repartitioned else topology.source.topics
    with KafkaReader(settings) as reader:
        counts = reader.partitions([*topics, *topology.source.topics])
        missing = [topic for topic in topics if not counts[topic]]
        if missing:
            raise BrokerUnavailable(f"{', '.join(missing)} does not exist on {', '.join(settings.brokers)}.")
        bounds = {topic: reader.bounds(topic, range(counts[topic])) for topic in topics}
        begins = {topic: _begins(reader, topic, bounds[topic], start) for topic in topics}
        ends = {topic: _ends(reader, topic, bounds[topic], until) for topic in topics}
    if start == "whole":
        _refuse_eaten(bounds)
    for topic, found in begins.items():
        ends[topic] = {partition: max(end, found[partition]) for partition, end in ends[topic].items()}
    feeds = tuple(
        Feed(position, partition)
        for position, topic in enumerate(topology.source.topics)
        for partition in range(counts[topic])
    )
    return replace(history_of_range(spark, settings, begins, ends), feeds=feeds if repartitioned else ())


def history_of_range(spark: SparkSession, settings: Settings, begins: Offsets, ends: Offsets) -> History:
    """Return the committed records of these offsets, ends not included."""
    ranges = {
        f"{topic}/{partition}": [begin, ends[topic][partition]]
        for topic, part in begins.items()
        for partition, begin in part.items()
    }
    options = {
        **kafka_options(settings),
        "assign": json.dumps({topic: sorted(part) for topic, part in begins.items()}),
        "startingOffsets": json.dumps(begins),
        "endingOffsets": json.dumps(ends),
        # Pieces of a partition are read side by side: their order is put together again (`stretches`).
        "minPartitions": str(spark.sparkContext.defaultParallelism * 2),
    }
    table = spark.read.format("kafka").options(**options).load()
    place = ", ".join(f"{name} {begin}..{end}" for name, (begin, end) in sorted(ranges.items()))
    return History(records_of_kafka(table), placed=True, contiguous=True, identity=json.dumps(ranges), place=place)


def _begins(reader: KafkaReader, topic: str, bounds: Mapping[int, Bounds], start: Start) -> dict[int, int]:
    match start:
        case "whole" | "earliest":
            return {partition: each.low for partition, each in bounds.items()}
        case int():
            return _at(reader, topic, bounds, start)


def _ends(reader: KafkaReader, topic: str, bounds: Mapping[int, Bounds], until: Until) -> dict[int, int]:
    if until == "now":
        return {partition: each.high for partition, each in bounds.items()}
    return _at(reader, topic, bounds, until)


def _at(reader: KafkaReader, topic: str, bounds: Mapping[int, Bounds], time_ms: int) -> dict[int, int]:
    found = {partition: reader.offset_for_time(topic, partition, time_ms) for partition in bounds}
    return {partition: bounds[partition].high if at is None else at for partition, at in found.items()}


def _refuse_eaten(bounds: Mapping[str, Mapping[int, Bounds]]) -> None:
    eaten = [
        f"{topic}/{partition} begins at offset {each.low} (0 to {each.low - 1} are deleted)"
        for topic, part in bounds.items()
        for partition, each in sorted(part.items())
        if each.low > 0
    ]
    if eaten:
        more = f" and {len(eaten) - _SHOWN} more" if len(eaten) > _SHOWN else ""
        raise StateIncompatible(
            f"retention ate the start: {'; '.join(eaten[:_SHOWN])}{more}. Nothing was written. The first records would "
            f"be judged without those before them. Judge what is left with --start earliest, or read an archive."
        )
