"""Builds the options of Spark's Kafka source, and reads the records in given offset ranges from Kafka."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

from pyspark.sql import DataFrame, SparkSession

from dedup.core.window import Feed
from dedup.errors import BrokerUnavailable, Problem, SettingsError, StateIncompatible
from dedup.kafka.wire import TopicPartition
from dedup.settings import Security, Settings
from dedup.spark.columns import as_records
from dedup.spark.files import History
from dedup.spark.session import RECORD_BYTES
from dedup.topology.model import Topology
from dedup.verify.cut import begun_with
from dedup.verify.kafka_reader import Bounds, KafkaReader

Start = Literal["whole", "earliest"] | int
"""``whole`` begins at offset 0 and fails if retention has deleted records, ``earliest`` begins at the first record that
still exists, and a number is a time in ms.
"""
Until = Literal["now"] | int
Ranges = Mapping[str, Mapping[int, tuple[int, int]]]
"""Maps topic and partition to the first offset to read and the offset after the last one to read."""
Ends = Mapping[str, Mapping[int, int]]
"""Maps topic and partition to the offset after the last one to read."""

log: Final = logging.getLogger(__name__)

_SHOWN: Final = 5
_SETTLED_WITHIN_S: Final = 120.0
_SETTLED_LOOK_S: Final = 0.2
_CONSUMER: Final = {
    # Records of an aborted transaction must never be judged.
    "kafka.isolation.level": "read_committed",
    "includeHeaders": "true",
    "failOnDataLoss": "true",
    # Otherwise, a consumer makes brokers recreate a deleted topic.
    "kafka.allow.auto.create.topics": "false",
    # After each poll, Spark asks for the partition's first and last offsets, and then discards records that were
    # fetched in advance, so each poll should return many records. The default is 500.
    "kafka.max.poll.records": "50000",
    "kafka.max.partition.fetch.bytes": str(4 << 20),
}
_PEM_BLOCK: Final = re.compile(r"^-----BEGIN ([A-Z0-9 ]+)-----.*?^-----END \1-----", re.MULTILINE | re.DOTALL)
_READ_BY_JAVA: Final = frozenset({"PRIVATE KEY", "ENCRYPTED PRIVATE KEY"})
"""The labels of keys in the format PKCS#8."""
_LOGIN: Final[Mapping[str, str]] = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
}


def kafka_options(settings: Settings) -> dict[str, str]:
    """Return the options of Spark's Kafka source for the given settings, with certificates as PEM text.

    Raises SettingsError for settings that Spark's connector does not support, and for unreadable certificates.
    """
    security = settings.security
    options = _CONSUMER | {
        "kafka.bootstrap.servers": ",".join(settings.brokers),
        "kafka.security.protocol": security.protocol,
    }
    if security.protocol.endswith("SSL"):
        options |= _tls(security)
    if security.protocol.startswith("SASL"):
        options |= _sasl(security)
    return options


def _tls(security: Security) -> dict[str, str]:
    options: dict[str, str] = {}
    if security.ca_file:
        options |= {
            "kafka.ssl.truststore.type": "PEM",
            "kafka.ssl.truststore.certificates": _certificates(security.ca_file),
        }
    if security.cert_file and security.key_file:
        options |= {
            "kafka.ssl.keystore.type": "PEM",
            "kafka.ssl.keystore.certificate.chain": _certificates(security.cert_file),
            "kafka.ssl.keystore.key": _private_key(security.key_file, encrypted=security.key_password is not None),
        }
    if security.key_password:
        options["kafka.ssl.key.password"] = security.key_password.get_secret_value()
    return options


def _sasl(security: Security) -> dict[str, str]:
    module = _LOGIN.get(security.mechanism or "")
    if module is None or security.password is None or security.username is None:
        text = f"{security.mechanism} cannot be used with Spark's Kafka source; use one of {', '.join(_LOGIN)}"
        raise SettingsError([Problem("security.mechanism", text)])
    user, password = (
        text.replace("\\", "\\\\").replace('"', '\\"')
        for text in (security.username, security.password.get_secret_value())
    )
    return {
        "kafka.sasl.mechanism": security.mechanism or "",
        "kafka.sasl.jaas.config": f'{module} required username="{user}" password="{password}";',
    }


def _certificates(path: str) -> str:
    return "\n".join(block for _, block in _pem_blocks(path, "CERTIFICATE"))


def _private_key(path: str, *, encrypted: bool) -> str:
    label, block = _pem_blocks(path, "PRIVATE KEY")[0]
    if label not in _READ_BY_JAVA:
        option = "" if encrypted else "-nocrypt "
        text = (
            f'has a key of the kind "{label}", which Java\'s Kafka client cannot read; convert it with `openssl pkcs8 '
            f"-topk8 {option}-in {path} -out {path}.pkcs8`, and name the new file in `security.key_file`"
        )
        raise SettingsError([Problem(path, text)])
    return block


def _pem_blocks(path: str, kind: str) -> list[tuple[str, str]]:
    """Return the labeled blocks of one kind in a PEM file, without the comments between the blocks.

    Raises SettingsError if the file cannot be read or has no such block.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise SettingsError([Problem(path, f"cannot be read as PEM text: {error}; name a PEM file")]) from error
    # Comments may have any encoding, but the blocks are ASCII.
    found = [(each[1], each[0]) for each in _PEM_BLOCK.finditer(content.decode("latin-1")) if each[1].endswith(kind)]
    if not found:
        text = f"cannot be read as PEM text: it has no line `-----BEGIN {kind}-----`; name a PEM file"
        raise SettingsError([Problem(path, text)])
    return found


def read_kafka(
    spark: SparkSession,
    topology: Topology,
    settings: Settings,
    *,
    start: Start = "whole",
    until: Until = "now",
    repartitioned: bool = False,
) -> History:
    """Return the committed records of the source topics, or of the repartition topic if ``repartitioned`` is true.

    If a transaction stays open, ``now`` means the offset where the transaction began, and a warning says so. Raises
    StateIncompatible if ``start`` is ``whole`` and retention has deleted a partition's first records. Raises
    BrokerUnavailable if a topic does not exist, or if a transaction that began before the time ``until`` stays open.
    """
    topics = (topology.repartition_topic,) if repartitioned else topology.source.topics
    begins: dict[str, dict[int, int]] = {}
    ends: dict[str, dict[int, int]] = {}
    deleted: list[str] = []
    with KafkaReader(settings) as reader:
        counts = reader.partitions([*topics, *topology.source.topics])
        begun = counts | begun_with(topology, reader) if repartitioned else counts
        missing = [topic for topic in topics if not counts[topic]]
        if missing:
            raise BrokerUnavailable(f"{', '.join(missing)} does not exist on {', '.join(settings.brokers)}.")
        for topic in topics:
            bounds = reader.bounds(topic, range(counts[topic]))
            begins[topic] = {at: each.low for at, each in bounds.items()}
            ends[topic] = {at: each.high for at, each in bounds.items()}
            deleted += (
                f"{topic}/{at} begins at offset {low} (0 to {low - 1} are deleted)"
                for at, low in sorted(begins[topic].items())
                if start == "whole" and low > 0
            )
            if isinstance(start, int):
                begins[topic] = offsets_at(reader, topic, bounds, start)
            if isinstance(until, int):
                ends[topic] = offsets_at(reader, topic, bounds, until)
        if not deleted:
            if until == "now":
                ends = settled_ends(reader, ends)
            else:
                refuse_open(reader, ends)
    if deleted:
        more = f" and {len(deleted) - _SHOWN} more" if len(deleted) > _SHOWN else ""
        raise StateIncompatible(
            f"retention deleted the first records: {'; '.join(deleted[:_SHOWN])}{more}. Nothing was written. Without "
            f"them, later verdicts could be wrong. Judge what is left with --start earliest, or read an archive."
        )
    ranges = {topic: {at: (low, max(low, ends[topic][at])) for at, low in begins[topic].items()} for topic in topics}
    feeds = feeds_of(topology, begun) if repartitioned else ()
    by_arrival = topology.by_arrival and not repartitioned
    return replace(history_of_range(spark, settings, ranges, by_arrival=by_arrival), feeds=feeds)


def feeds_of(topology: Topology, counts: Mapping[str, int]) -> tuple[Feed, ...]:
    """Return the feeds of all source partitions; ``counts`` maps each topic to the partition count that the topic had
    when the state was created.
    """
    return tuple(
        Feed(position, partition)
        for position, topic in enumerate(topology.source.topics)
        for partition in range(counts[topic])
    )


def read_range(spark: SparkSession, settings: Settings, ranges: Ranges, **options: str) -> DataFrame:
    """Return the committed records in the given offset ranges, with the columns of Spark's Kafka source."""
    begins, ends = ({name: {at: each[i] for at, each in part.items()} for name, part in ranges.items()} for i in (0, 1))
    given = {
        **kafka_options(settings),
        "assign": json.dumps({topic: sorted(part) for topic, part in ranges.items()}),
        "startingOffsets": json.dumps(begins),
        "endingOffsets": json.dumps(ends),
        **options,
    }
    return spark.read.format("kafka").options(**given).load()


def history_of_range(spark: SparkSession, settings: Settings, ranges: Ranges, *, by_arrival: bool = False) -> History:
    """Return the committed records in the given offset ranges as a `History`.

    If ``by_arrival`` is true, the job fails at any record whose timestamp was not set by the broker.
    """
    # Several tasks may read one partition, because `map_side.OffsetRuns` tracks the order of the offsets.
    table = read_range(spark, settings, ranges, minPartitions=str(spark.sparkContext.defaultParallelism * 2))
    named = {f"{topic}/{at}": list(each) for topic, part in ranges.items() for at, each in part.items()}
    return History(
        as_records(table, by_arrival=by_arrival),
        placed=True,
        contiguous=True,
        identity=json.dumps(named),
        place=", ".join(f"{name} {begin}..{end}" for name, (begin, end) in sorted(named.items())),
        size_bytes=sum(end - begin for begin, end in named.values()) * RECORD_BYTES,
        by_arrival=by_arrival,
    )


def offsets_at(reader: KafkaReader, topic: str, bounds: Mapping[int, Bounds], time_ms: int) -> dict[int, int]:
    """Map each partition to the offset of its first record at or after ``time_ms``, or to the end offset if no such
    record exists.
    """
    found = {partition: reader.offset_for_time(topic, partition, time_ms) for partition in bounds}
    return {partition: bounds[partition].high if at is None else at for partition, at in found.items()}


def settled_ends(reader: KafkaReader, ends: Ends) -> dict[str, dict[int, int]]:
    """Return the given end offsets, except in a partition with a transaction that stays open. There, the end is the
    offset where the transaction began, and the function logs a warning.
    """
    found = {topic: dict(part) for topic, part in ends.items()}
    for (topic, partition), stable in _open_below(reader, ends).items():
        log.warning(
            "%s/%d is read only up to offset %d: a transaction that began there was still open after %.0f s. Its "
            "records, and the later ones of this partition, are left for a later run.",
            *(topic, partition, stable, _SETTLED_WITHIN_S),
        )
        found[topic][partition] = stable
    return found


def refuse_open(reader: KafkaReader, ends: Ends) -> None:
    """Raise BrokerUnavailable if a transaction that began before one of the given end offsets stays open, because the
    job can neither read nor omit the transaction's records.
    """
    found = sorted(_open_below(reader, ends).items())
    if not found:
        return
    (topic, partition), stable = found[0]
    more = f" (and {len(found) - 1} more partitions)" if found[1:] else ""
    raise BrokerUnavailable(
        f"{topic}/{partition}{more} can be read only up to offset {stable} of {ends[topic][partition]}: a transaction "
        f"that began there was still open after {_SETTLED_WITHIN_S:.0f} s. Nothing was written. Wait until its "
        f"producer ends it, or find it with `kafka-transactions.sh describe-producers --topic {topic} --partition "
        f"{partition}` and abort it; then run the command again."
    )


def _open_below(reader: KafkaReader, ends: Ends) -> dict[TopicPartition, int]:
    """Wait up to `_SETTLED_WITHIN_S` seconds until all transactions that began before the end offsets have ended. Map
    each partition in which a transaction is still open to the offset where the transaction began.
    """
    # Spark would report the hidden records as deleted. Even after a commit, brokers may hide records for a moment.
    until_s, left = time.monotonic() + _SETTLED_WITHIN_S, ends
    while True:
        stable = {topic: reader.stable_ends(topic, part) for topic, part in left.items()}
        left = {topic: {at: end for at, end in part.items() if stable[topic][at] < end} for topic, part in left.items()}
        found = {TopicPartition(topic, at): stable[topic][at] for topic, part in left.items() for at in part}
        if not found or time.monotonic() >= until_s:
            return found
        time.sleep(_SETTLED_LOOK_S)
