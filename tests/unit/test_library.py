"""What `import dedup` gives a program: quickly, typed, and with the errors of the commands."""

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import dedup

ROOT = Path(__file__).parents[2]


def test_importing_dedup_imports_no_library():
    code = "import sys; before = set(sys.modules); import dedup; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    ours = {name for name in done.stdout.split() if name.partition(".")[0] not in sys.stdlib_module_names}
    assert ours == {"dedup", "dedup.errors"}


@pytest.mark.parametrize("name", dedup.__all__)
def test_every_name_is_there(name):
    assert getattr(dedup, name) is not None


def test_another_name_is_not_there():
    with pytest.raises(AttributeError, match="module 'dedup' has no attribute 'Flows'"):
        dedup.Flows  # noqa: B018  # it is looked up


def test_a_file_with_mistakes_names_all_of_them(tmp_path):
    path = tmp_path / "wrong.yaml"
    path.write_text("dedup: 1\nname: A\nsorce: {}\n", encoding="utf-8")
    with pytest.raises(dedup.errors.TopologyError, match=r"wrong\.yaml:2:7: (?s:.*)wrong\.yaml:3:1: "):
        dedup.load_topology(path)
    with pytest.raises(dedup.errors.TopologyError, match=r"gone\.yaml: cannot be read"):
        dedup.load_topology("gone.yaml")
    path.write_text("brokers: [localhost:9092]\ncommit_interval: 5\n", encoding="utf-8")
    with pytest.raises(dedup.errors.SettingsError, match=r"wrong\.yaml:2:18: "):
        dedup.load_settings(path, environ={})


def test_settings_come_from_the_file_the_environment_and_overrides(tmp_path, monkeypatch):
    path = tmp_path / "config.yaml"
    path.write_text("brokers: [localhost:9092]\n", encoding="utf-8")
    monkeypatch.setenv("DEDUP_COMMIT_INTERVAL", "50ms")
    assert dedup.load_settings(str(path)).commit_interval_ms == 50
    assert dedup.load_settings(path, ["commit_interval=1s"]).commit_interval_ms == 1_000
    assert dedup.load_settings(path, environ={}).commit_interval_ms == 100


def test_run_belongs_in_the_main_thread():
    assert threading.current_thread() is threading.main_thread()
    topology, settings = dedup.load_topology(ROOT / "topologies" / "simplest.yaml"), dedup.Settings(brokers=["b:9092"])
    with ThreadPoolExecutor(1) as thread, pytest.raises(RuntimeError, match="main thread"):
        thread.submit(dedup.run, topology, settings).result()


def test_run_belongs_in_no_event_loop():
    async def cell():
        dedup.run(dedup.load_topology(ROOT / "topologies" / "simplest.yaml"), dedup.Settings(brokers=["localhost:1"]))

    with pytest.raises(RuntimeError, match="as it does in a notebook"):
        asyncio.run(cell())
