"""How fast the edges are: 1,000,000 JSON lines into a topic, the topic into PostgreSQL and SQLite.

Run: `python -m bench.edges [--records 1000000]`.

Each command runs once, as a process of its own, with `--exit-when-done`; its time includes starting and stopping.
Needs the binaries of PostgreSQL on this machine (tests/spark/postgres.py starts them).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dedup.chaos.load import make_topic
from dedup.embedded.kafka_node import EmbeddedKafka
from tests.spark.postgres import running_postgres

DEDUP = (sys.executable, "-c", "from dedup.cli.main import main; main()")
PARTITIONS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=1_000_000)
    records = parser.parse_args().records
    with tempfile.TemporaryDirectory(prefix="dedup-edges-") as home:
        directory = Path(home)
        size = write_lines(directory / "incoming", records)
        print(f"{records:,} lines, {size / records:.0f} bytes each; {os.cpu_count()} cores, {platform.platform()}")
        with EmbeddedKafka(data_dir=directory / "kafka", profile="bench") as kafka, running_postgres() as server:
            make_topic(kafka.bootstrap, "edges", PARTITIONS)
            address = server.url.replace("jdbc:postgresql://", f"postgresql://dedup:{server.password}@")
            config = directory / "config.yaml"
            config.write_text(json.dumps({"brokers": [kafka.bootstrap], "web": {"enabled": False}}), encoding="utf-8")
            timed("ingest", ingest_file(directory), config, records)
            timed("sink", sink_file(directory, "pg"), config, records, {"SINK_URL": address})
            timed("sink", sink_file(directory, "lite"), config, records, {"SINK_URL": f"sqlite:///{directory}/x.db"})


def write_lines(directory: Path, records: int) -> int:
    directory.mkdir()
    line = '{"order_id":"%032x","amount":%d.25,"currency":"EUR","created_at":"2024-01-01T00:00:00Z","customer":%d}\n'
    with (directory / "a.jsonl").open("w", encoding="ascii") as file:
        for number in range(records):
            file.write(line % (number * 0x9E3779B97F4A7C15 % 2**128, number % 1000, number % 5000))
    return (directory / "a.jsonl").stat().st_size


def ingest_file(directory: Path) -> Path:
    path = directory / "ingest.yaml"
    path.write_text(
        f"ingest: 1\nname: edges-ingest\nsource: {{files: {{directory: {directory}/incoming}}}}\n"
        f"output: {{topic: edges}}\ntracking_id: {{field: order_id}}\n",
        encoding="utf-8",
    )
    return path


def sink_file(directory: Path, name: str) -> Path:
    path = directory / f"{name}.yaml"
    path.write_text(
        f"dedup: 1\nname: edges-{name}\nsource: {{topics: [edges], partitioned_by: tracking_id}}\n"
        "tracking_id: {field: order_id}\nguard_period: 1d\n"
        'sink:\n  url: "${env:SINK_URL}"\n  table: orders\n  topic: edges\n  columns:\n    order_id: order_id\n'
        "    amount: {field: amount, type: number}\n    currency: currency\n"
        "    created_at: {field: created_at, type: time}\n    customer: {field: customer, type: integer}\n",
        encoding="utf-8",
    )
    return path


def timed(command: str, file: Path, config: Path, records: int, environ: dict[str, str] | None = None) -> None:
    arguments = [*DEDUP, command, str(file), "--exit-when-done", "--config", str(config)]
    began_s, began_cpu_s = time.perf_counter(), cpu_s()
    done = subprocess.run(arguments, env={**os.environ, **(environ or {})}, check=True, capture_output=True, text=True)
    seconds, used_s = time.perf_counter() - began_s, cpu_s() - began_cpu_s
    print(
        f"{command} {file.stem}: {seconds:.1f} s, {records / seconds:,.0f} records/s; "
        f"{used_s:.1f} s of CPU, {records / used_s:,.0f} records per CPU second; {done.stdout.strip()}",
        flush=True,
    )


def cpu_s() -> float:
    # Of all processes that have ended, so of the commands: on a busy machine, too, it says something.
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
