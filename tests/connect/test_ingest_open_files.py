"""The files that ingest has open: busy, many, no longer readable, with an inode that is reused; and some never read."""

from __future__ import annotations

import errno
import json
import os
import resource
from pathlib import Path

import pytest

from dedup.connect import file_source
from dedup.connect.file_source import Files
from dedup.connect.source_connector import open_source
from dedup.errors import AuthorMistake
from dedup.topology.ingest_file import parse_ingest
from dedup.topology.schema import FilesSource
from tests.connect.stage import lines

MOST_FILES = 2_000


def files_in(directory):
    return Files("in", FilesSource(directory=str(directory), pattern="*.log"), 1_000_000)


def test_a_file_that_always_has_more_lines_does_not_hide_the_others(tmp_path, monkeypatch):
    """Was: a new file was found only when every other was read to its end, and never if it was rotated and deleted."""
    monkeypatch.setattr(file_source, "_SCAN_AGAIN_S", 0, raising=False)
    busy, fresh = tmp_path / "a.log", tmp_path / "b.log"
    busy.write_bytes(lines(0, 3))
    files = files_in(tmp_path)
    found = files.poll().values
    fresh.write_bytes(lines(100, 3))
    for _ in range(4):
        with busy.open("ab") as file:
            file.write(lines(3, 3))
        found += files.poll().values
        fresh.unlink(missing_ok=True)  # it is open by now
    assert [value for value in found if value in lines(100, 3)] == lines(100, 3).splitlines()
    files.close()


def test_a_directory_may_be_in_the_home_directory(tmp_path, monkeypatch):
    """Was: the directory "~" in the current directory."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "incoming").mkdir()
    (tmp_path / "incoming" / "a.log").write_bytes(lines(0, 3))
    files = files_in("~/incoming")
    assert list(files.poll().values) == lines(0, 3).splitlines()
    files.close()
    with pytest.raises(AuthorMistake, match=r"~nobody-here/x: cannot be read: No such file or directory"):
        files_in("~nobody-here/x").poll()


def test_a_file_that_can_no_longer_be_read_stops_ingest_with_its_name(tmp_path, monkeypatch):
    """Was: an uncaught OSError."""
    path = tmp_path / "a.log"
    path.write_bytes(lines(0, 3))
    files = files_in(tmp_path)

    def stale(*_):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "pread", stale)
    with pytest.raises(
        AuthorMistake, match=r"a\.log: cannot be read: Stale file handle\. Nothing was skipped; make it"
    ):
        files.poll()
    files.close()


def test_more_files_stay_open_than_a_shell_allows(tmp_path):
    """Was: ingest stopped at file 1,000 or so, and asked for permission to read it."""
    for number in range(40):
        (tmp_path / f"{number}.jsonl").write_bytes(lines(number, 1))
    text = f"ingest: 1\nname: x\nsource: {{files: {{directory: {tmp_path}}}}}\noutput: {{topic: y}}\n"
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(each.name) for each in Path("/proc/self/fd").iterdir()}
    few = next(number for number in range(10, allowed[1]) if len(set(range(number)) - used) == 10)
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, allowed[1]))
    try:
        files = open_source(parse_ingest(text, name="x"), 1_000_000, lambda: False)
        assert sum(len(files.poll().values) for _ in range(40)) == 40
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, allowed[1]))
        with pytest.raises(AuthorMistake, match=r"cannot be read: Too many open .* allow more open files"):
            [files.poll() for _ in range(50)]
        files.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, allowed)


def file_with_inode(directory, inode):
    """Return a new, empty file, to which the file system has given this inode again."""
    made = []
    try:
        while len(made) < MOST_FILES:
            made.append(directory / f"new-{len(made)}")
            made[-1].touch()
            if made[-1].stat().st_ino == inode:
                return made.pop()
        pytest.skip("this file system does not reuse an inode number at once")
    finally:
        for each in made:
            each.unlink()


@pytest.mark.parametrize("restarted", [False, True])
def test_a_new_file_with_the_inode_of_a_file_that_was_moved_away_and_deleted(tmp_path, restarted):
    """Was: if it began with the same line, it was read from where the old one ended."""
    incoming = tmp_path / "in"
    incoming.mkdir()
    files = files_in(incoming)
    path, away = incoming / "a.log", tmp_path / "a.log"
    path.write_bytes(lines(0, 1))
    found = files.poll()
    files.committed({found.part: found.position})
    if not json.loads(found.position)["inode_version"]:
        pytest.skip("this file system does not tell one use of an inode number from the next")
    assert files.poll() is None  # the rest of the first scan's turns
    path.rename(away)
    assert files.poll() is None  # that it is gone is seen, and it is closed
    inode = away.stat().st_ino
    away.unlink()
    new = file_with_inode(tmp_path, inode)
    new.write_bytes(lines(0, 3))
    if restarted:
        files.close()
        files = files_in(incoming)
        files.restore({found.part: found.position})
    new.rename(path)
    with pytest.raises(AuthorMistake, match="is it a copy"):  # as with a new file of any other inode
        files.poll()
    path.rename(incoming / "b.log")
    assert files.poll().values == lines(0, 3).splitlines()
    files.close()


def test_a_file_that_was_rotated_before_it_was_ever_read_is_told_of_once(tmp_path, caplog):
    """Was: it was skipped without a word."""
    for name in ("a.log", "b.log", "empty.log"):
        (tmp_path / name).write_bytes(b"" if name == "empty.log" else lines(0, 3))
    files = files_in(tmp_path)
    for found in (files.poll(), files.poll()):
        files.committed({found.part: found.position})
    assert files.poll() is None
    for name, rotated in (("a.log", "a.log.1"), ("b.log", "b.log-20261201"), ("empty.log", "empty.log.1")):
        (tmp_path / name).rename(tmp_path / rotated)
    # They lived shorter than the gap between two scans.
    missed = ["a.log.0", "a.log-20261130", "a.log.2026-11-30_23-59-59", "a.log-2026-11-30T23:59:59.123"]
    others = ["a.log.2.gz", "a.log.3.zst", "a.log.1.old", "a.log2", "b.txt.1", ".1", "a.log.", "none.log.2"]
    for name in missed + others:
        (tmp_path / name).write_bytes(b"" if name == "none.log.2" else lines(10, 3))
    (tmp_path / "sub.log.1").mkdir()
    (tmp_path / "soft.log.1").symlink_to("b.log-20261201")
    assert [files.poll() for _ in range(9)].count(None) >= 7
    assert sorted(record.args[0] for record in caplog.records if "was never read" in record.message) == sorted(
        str(tmp_path / name) for name in missed
    )
    assert 'such as "*.log*"' in caplog.text
    (tmp_path / "a.log.0").rename(tmp_path / "a.log.9")
    caplog.clear()
    assert files.poll() is None
    assert "never read" not in caplog.text
    files.close()


def test_a_pattern_that_matches_rotated_names_misses_no_file_and_sends_none_twice(tmp_path, caplog):
    (tmp_path / "a.log").write_bytes(lines(0, 3))
    spec = FilesSource(directory=str(tmp_path), pattern="*.lo*[g0-9]")
    files, positions = Files("in", spec, 1_000_000), {}
    found = files.poll()
    positions[found.part] = found.position
    files.close()
    (tmp_path / "a.log").rename(tmp_path / "a.log.2")
    (tmp_path / "a.log.1").write_bytes(lines(3, 3))
    (tmp_path / "a.log.3.gz").write_bytes(lines(50, 3))
    (tmp_path / "a.log").write_bytes(lines(6, 3))
    files = Files("in", spec, 1_000_000)
    files.restore(positions)
    read = [found.values for found in (files.poll() for _ in range(6)) if found is not None]
    assert sorted(json.loads(value)["n"] for values in read for value in values) == [3, 4, 5, 6, 7, 8]
    assert "never read" not in caplog.text
    files.close()
