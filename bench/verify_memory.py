"""Peak memory of `dedup verify` over millions of records: ``python -m bench.verify_memory --records 2000000``.

A correct run is written by hand, without a worker: IDs in order, every tenth record a duplicate of one just before. The
verifier runs as a process of its own, whose greatest resident size is asked for at its end. Exit code 1 above
--bound-mb.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from dedup.embedded.kafka_node import EmbeddedKafka

PARTITIONS = 2
BASE_MS = 1_700_000_000_000
TOPOLOGY = """
dedup: 1
name: big
source: {topics: [big-in], partitioned_by: tracking_id}
tracking_id: {field: id}
guard_period: 24h
output: {topic: big-out}
"""
RESULTS = Path(__file__).parent / "results"


def write(bootstrap: str, records: int, value_bytes: int) -> None:
    """The source, the output and the group's offsets are those of a correct run."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    topics = [NewTopic(name, PARTITIONS, 1, config={"retention.ms": "-1"}) for name in ("big-in", "big-out")]
    topics += [NewTopic(f"big-out.{side}", PARTITIONS, 1) for side in ("late", "dead-letter")]
    for made in admin.create_topics(topics).values():
        made.result(60)
    # Idempotent: a request that is sent again must not pass the next one.
    settings = {"bootstrap.servers": bootstrap, "linger.ms": 50, "compression.type": "lz4", "enable.idempotence": True}
    producer = Producer(settings)
    padding = "x" * value_bytes
    for number in range(records):
        fresh = number % 10 != 9
        name = number if fresh else number - 2 * PARTITIONS
        value = f'{{"id":"event-{name:012d}","text":"{padding}"}}'.encode()
        partition, time_ms = number % PARTITIONS, BASE_MS + number
        for topic in ("big-in", "big-out") if fresh else ("big-in",):
            while True:
                try:
                    producer.produce(topic, value, b"k", partition=partition, timestamp=time_ms)
                    break
                except BufferError:
                    producer.poll(0.1)
        producer.poll(0)
    if producer.flush(120):
        raise SystemExit("the broker did not take all records")
    group = Consumer({"bootstrap.servers": bootstrap, "group.id": "big"})
    ends = [TopicPartition("big-in", part, len(range(part, records, PARTITIONS))) for part in range(PARTITIONS)]
    group.commit(offsets=ends, asynchronous=False)
    group.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=2_000_000)
    parser.add_argument("--value-bytes", type=int, default=100)
    parser.add_argument("--bound-mb", type=int, default=512)
    parser.add_argument("--sample", default="1/1")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place, EmbeddedKafka() as kafka:
        directory = Path(place)
        (directory / "big.yaml").write_text(TOPOLOGY, encoding="utf-8")
        (directory / "config.yaml").write_text(f"brokers: ['{kafka.bootstrap}']\n", encoding="utf-8")
        write(kafka.bootstrap, options.records, options.value_bytes)
        command = [sys.executable, "-m", "dedup.cli.main", "verify", str(directory / "big.yaml"), "--json"]
        command += ["--config", str(directory / "config.yaml"), "--report", str(directory / "r.html")]
        began = time.monotonic()
        with (directory / "out").open("wb") as out:
            process = subprocess.Popen([*command, "--sample", options.sample], stdout=out)
            _, status, used = os.wait4(process.pid, 0)
        code = process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.monotonic() - began
        found = json.loads((directory / "out").read_text(encoding="utf-8"))
    peak_mb = used.ru_maxrss // 1024
    figures = {
        "bench": "verify_memory",
        "records": options.records,
        "sample": options.sample,
        "read": found["read"],
        "violations": sum(found["violations"].values()),
        "peak_mb": peak_mb,
        "bound_mb": options.bound_mb,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "load": os.getloadavg()[0],
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "verify_memory.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(figures))
    return 0 if code == 0 and peak_mb <= options.bound_mb else 1


if __name__ == "__main__":
    sys.exit(main())
