"""A backfill from S3 to S3, by a real interface (moto's server, Hadoop's S3A client), killed while it is published.

The jars are a download of 600 MB; moto is not in the lock files: pip install 'moto[server]'.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from dedup.embedded.child_process import ChildProcess
from tests.spark.driver import STEPS
from tests.spark.streaming import DRIVER, FAST_JAVA
from tests.spark.test_batch_files import LOG, VERDICTS, write
from tests.spark.test_cluster import free_port
from tests.waiting import until

pytest.importorskip("moto", reason="no S3: pip install 'moto[server]'")
pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
COMMAND_S = 300
SHOP = """
dedup: 1
name: shop
source: {topics: [orders], partitioned_by: tracking_id}
tracking_id: {field: id}
guard_period: 10s
grace: 5s
output: {topic: orders.unique}
"""
READER = """
import json, sys
from dedup.errors import SettingsError
from dedup.spark import read_run
from dedup.spark.session import session_for
spark = session_for(None, master="local[1]", packages=("s3",), conf=dict(each.split("=", 1) for each in sys.argv[1:]))
spark.read.parquet("log.parquet").write.parquet("s3a://archive/in")
for line in sys.stdin:
    try:
        rows = read_run(spark, "s3a://archive/out").select("partition", "offset", "verdict").collect()
        print(json.dumps([list(row) for row in rows]), flush=True)
    except SettingsError as error:
        print(json.dumps(str(error)), flush=True)
"""


@pytest.fixture
def s3(tmp_path):
    """The settings by which Spark reaches an S3 server with the bucket `archive`."""
    port = free_port()
    server = ChildProcess(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], tmp_path / "moto.log"
    )
    try:
        until(lambda: "Running on" in server.log or not server.running, "an S3 server")
        assert server.running, server.log
        address = f"http://127.0.0.1:{port}"
        urllib.request.urlopen(urllib.request.Request(f"{address}/archive", method="PUT"), timeout=30).close()
        conf = {
            "spark.hadoop.fs.s3a.endpoint": address,
            "spark.hadoop.fs.s3a.endpoint.region": "us-east-1",
            "spark.hadoop.fs.s3a.path.style.access": "true",
            "spark.hadoop.fs.s3a.access.key": "nobody",
            "spark.hadoop.fs.s3a.secret.key": "nothing",
            "spark.hadoop.fs.s3a.aws.credentials.provider": ("org.apache.hadoop.fs.s3a.SimpleAWSCredentialsProvider"),
            "spark.driver.extraJavaOptions": FAST_JAVA,
            "spark.sql.shuffle.partitions": "2",
            "spark.ui.enabled": "false",
        }
        yield [f"{key}={value}" for key, value in conf.items()]
    finally:
        server.stop()


class Reader:
    """A session of its own that reads the run whenever it is asked."""

    def __init__(self, directory: Path, conf: list[str]) -> None:
        with (directory / "reader.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", READER, *conf],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=directory,
                text=True,
            )

    def see(self) -> str | dict[tuple[int, int], str]:
        """Return why there is nothing to read, or the verdict of each record."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        found = json.loads(self.process.stdout.readline())
        if isinstance(found, str):
            return found
        assert len(found) == len(LOG)
        return {(partition, offset): verdict for partition, offset, verdict in found}


@pytest.fixture
def reader(tmp_path, s3):
    write(tmp_path / "log.parquet", LOG)
    made = Reader(tmp_path, s3)
    yield made
    made.process.kill()
    made.process.wait()


def test_whenever_the_driver_is_killed_readers_see_all_of_the_run_or_nothing(tmp_path, s3, reader):
    assert "has no run backfill" in reader.see()
    (tmp_path / "shop.yaml").write_text(SHOP, encoding="utf-8")
    (tmp_path / "accidents").mkdir()
    options = ["shop.yaml", "--input", "s3a://archive/in", "--out", "s3a://archive/out", "--quiet"]
    options += [part for each in s3 for part in ("--conf", each)]
    environ = {**os.environ, "DRIVER_TOKENS": str(tmp_path / "accidents")}

    def command(*accidents, name="backfill", arguments=options):
        line = [sys.executable, str(DRIVER), *accidents, "--", name, *arguments]
        return subprocess.run(
            line, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False, timeout=COMMAND_S
        )

    for step, what in enumerate(STEPS):
        done = command(f"publishing={step}")
        assert done.returncode == -signal.SIGKILL, (what, done.stdout, done.stderr)
        seen = reader.see()
        if what == "it is published":
            assert seen == VERDICTS
        else:
            assert "has no run backfill" in seen, what
    again = command()
    assert again.returncode == 0, again.stderr
    assert "was already published" in again.stderr
    assert reader.see() == VERDICTS
    upsert = ["shop.yaml", "--input", "s3a://archive/out/run=backfill/verdict=unique", "--quiet"]
    upsert += ["--jdbc", "jdbc:sqlite:shop.db", "--table", "orders", *options[options.index("--conf") :]]
    done = command(name="upsert", arguments=upsert)
    assert done.returncode == 0, done.stderr
