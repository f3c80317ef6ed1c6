"""The measured job on stock Faust (faust-streaming): an agent per event, processing_guarantee="exactly_once".

Its output is written outside every transaction and it loses or repeats events when it is killed; this measures its
speed where nothing goes wrong. The ID is the record's key: no JSON is parsed, and IDs never expire.

Settings come from the environment, because Faust's own command line owns the arguments:
BENCH_BROKER BENCH_SOURCE BENCH_OUTPUT BENCH_GROUP BENCH_STATE_DIR BENCH_COMPRESSION BENCH_COMMIT_INTERVAL_MS
BENCH_PARTITIONS
"""

from __future__ import annotations

import os

import faust
from faust.types import StreamT

GUARD_S = 3600.0

app = faust.App(
    os.environ["BENCH_GROUP"],
    broker=f"aiokafka://{os.environ['BENCH_BROKER']}",
    store="rocksdb://",
    datadir=os.environ["BENCH_STATE_DIR"],
    processing_guarantee="exactly_once",
    topic_partitions=int(os.environ["BENCH_PARTITIONS"]),
    topic_replication_factor=1,
    broker_commit_interval=int(os.environ["BENCH_COMMIT_INTERVAL_MS"]) / 1000,
    producer_compression_type=os.environ["BENCH_COMPRESSION"],
    producer_linger=0.02,
    consumer_auto_offset_reset="earliest",
    topic_disable_leader=True,
    web_enabled=False,
)
source = app.topic(os.environ["BENCH_SOURCE"], key_serializer="raw", value_serializer="raw")
output = app.topic(os.environ["BENCH_OUTPUT"], key_serializer="raw", value_serializer="raw")
seen = app.Table(
    "seen",
    partitions=int(os.environ["BENCH_PARTITIONS"]),
    key_type=bytes,
    value_type=float,
    options={"driver": "rocksdict"},
)


@app.agent(source)
async def dedup(stream: StreamT[bytes]) -> None:
    """Forward the first event of every ID."""
    async for event in stream.events():
        before = seen.get(event.key)
        if before is None or abs(event.message.timestamp - before) > GUARD_S:
            seen[event.key] = event.message.timestamp
            await output.send(key=event.key, value=event.value, timestamp=event.message.timestamp)


if __name__ == "__main__":
    app.main()
