"""Records that no client of the tests would write: header names that are not UTF-8."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from aiokafka.protocol.produce import ProduceRequest
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.record.util import calc_crc32c

from dedup.kafka.client import KafkaWire
from dedup.kafka.connection import Connection
from dedup.kafka.record_batch import Header, TopicPartition
from dedup.settings import Security

Row = tuple[int, bytes | None, bytes | None, list[Header]]
"""Timestamp, key, value, headers; a name `ODD` stands for `RAW`."""
ODD = "XXODD"
RAW = b"tr\xff\xfed"
WRITTEN = "tr\\xff\\xfed"
_CRC_AT = 17
_CRC_FROM = 21


def batch(rows: Sequence[Row], *, base_offset: int = 0, compression: int = 0) -> bytes:
    """Return a batch of message format v2; with a compression other than 0 it may hold no `ODD` name."""
    builder = DefaultRecordBatchBuilder(
        magic=2,
        compression_type=compression,
        is_transactional=0,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        batch_size=1 << 20,
    )
    for offset, (time_ms, key, value, headers) in enumerate(rows):
        assert builder.append(offset, time_ms, key, value, headers) is not None
    made = bytearray(bytes(builder.build()).replace(ODD.encode(), RAW))
    struct.pack_into(">q", made, 0, base_offset)
    struct.pack_into(">I", made, _CRC_AT, calc_crc32c(bytes(made[_CRC_FROM:])))
    return bytes(made)


async def send(bootstrap: str, target: TopicPartition, rows: Sequence[Row]) -> None:
    """The rows are in the partition, in one batch."""
    wire = KafkaWire(Connection((bootstrap,), Security()))
    await wire.start()
    try:
        request = ProduceRequest(
            transactional_id=None,
            required_acks=-1,
            timeout=10_000,
            topics=[(target.topic, [(target.partition, batch(rows))])],
        )
        answer: Any = await wire.send(await wire.leader(target), request, 0)
        assert [code for _, parts in answer.topics for _, code, *_ in parts] == [0]
    finally:
        await wire.stop()
