"""The files that ingest has open: busy ones, many, and some that can no longer be read."""

from __future__ import annotations

import errno
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
