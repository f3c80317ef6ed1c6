"""A PostgreSQL server for the tests of JDBC tables, from the binaries of this machine."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dedup.embedded.child_process import ChildProcess

USER = "dedup"
READY_WITHIN_S = 60


@dataclass(frozen=True, slots=True)
class RunningPostgres:
    """A server that ends with the test run."""

    url: str
    password: str = field(repr=False)


def _binaries() -> Path | None:
    """Return the directory of initdb and postgres; Debian keeps them off the path, by version."""
    found = shutil.which("initdb")
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if found is not None:
        return Path(found).resolve().parent
    return versions[-1].parent if versions else None


def _as_owner(directory: Path) -> list[str]:
    """Return the prefix under which PostgreSQL runs: it refuses root, so the directory gets another owner."""
    if os.geteuid() != 0:
        return []
    owner = pwd.getpwnam("postgres")
    os.chown(directory, owner.pw_uid, owner.pw_gid)
    return ["setpriv", f"--reuid={owner.pw_uid}", f"--regid={owner.pw_gid}", "--clear-groups"]


@contextmanager
def running_postgres() -> Iterator[RunningPostgres]:
    """A new server runs. Without the binaries: a named skip, in CI a failure."""
    binaries = _binaries()
    if binaries is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("PostgreSQL: apt-get install postgresql")
    password = secrets.token_hex(8)
    # Not pytest's directory: root's, and closed to the user that PostgreSQL runs as.
    with tempfile.TemporaryDirectory(prefix="dedup-pg-") as home, socket.create_server(("127.0.0.1", 0)) as taken:
        directory = Path(home)
        (directory / "password").write_text(password, encoding="ascii")
        (directory / "password").chmod(0o644)
        prefix = _as_owner(directory)
        options = ["-A", "scram-sha-256", "-U", USER, f"--pwfile={directory}/password", "--no-sync", "-E", "UTF8"]
        subprocess.run(
            [*prefix, binaries / "initdb", "-D", directory / "data", *options], check=True, capture_output=True
        )
        port = taken.getsockname()[1]
        taken.close()
        settings = [f"port={port}", "listen_addresses=127.0.0.1", "unix_socket_directories=", "fsync=off"]
        command = [*prefix, str(binaries / "postgres"), "-D", str(directory / "data")]
        server = ChildProcess([*command, *(part for each in settings for part in ("-c", each))], directory / "log")
        try:
            _until_ready(binaries, port, directory / "log", server)
            yield RunningPostgres(f"jdbc:postgresql://127.0.0.1:{port}/postgres", password)
        finally:
            server.stop()


def _until_ready(binaries: Path, port: int, log: Path, server: ChildProcess) -> None:
    deadline = time.monotonic() + READY_WITHIN_S
    asking: list[str | Path] = [binaries / "pg_isready", "-h", "127.0.0.1", "-p", str(port), "-q"]
    while subprocess.run(asking, check=False).returncode != 0:
        text = log.read_text(encoding="utf-8", errors="replace")
        assert server.running, f"PostgreSQL ended:\n{text}"
        assert time.monotonic() < deadline, f"PostgreSQL is not ready:\n{text}"
        time.sleep(0.05)
