"""The embedded schema registry's download; the registry itself runs in tests/integration."""

from __future__ import annotations

import hashlib
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from dedup.embedded import registry_node
from dedup.embedded.registry_node import EmbeddedRegistry, install_registry
from dedup.errors import RegistryUnavailable

JAR = "apicurio-registry-app-2.5.11.Final-runner.jar"


class Maven:
    """Stands for Maven Central, with one archive."""

    def __init__(self, archive):
        self.archive, self.asked = archive, []

    def project(self, *names):
        return self

    def at_version(self, version):
        return self

    def artifact(self, **what):
        self.asked.append(what)
        return self

    def resolve(self):
        return self.archive


@pytest.fixture
def maven(tmp_path, monkeypatch):
    (tmp_path / JAR).write_bytes(b"jar")
    archive = tmp_path / "all.tar.gz"
    with tarfile.open(archive, "w:gz") as files:
        files.add(tmp_path / JAR, JAR)
    served = Maven(archive)
    monkeypatch.setattr(registry_node, "maven", lambda repository, add: add(len(archive.read_bytes())) or served)
    monkeypatch.setattr(registry_node, "_SHA256", hashlib.sha256(archive.read_bytes()).hexdigest())
    return served


def test_it_is_fetched_once(maven, tmp_path):
    told = []
    for _ in range(2):
        jar = install_registry(tmp_path / "cache" / "registry", lambda *bytes_: told.append(bytes_))
        assert jar.read_bytes() == b"jar"
    assert maven.asked == [{"classifier": "all", "packaging": "tar.gz"}]
    assert told == [(len(maven.archive.read_bytes()), registry_node._SIZE_BYTES)]
    assert sorted(each.name for each in (tmp_path / "cache").iterdir()) == ["registry", "registry.lock"]


def test_another_archive_is_refused_and_nothing_is_kept(maven, tmp_path):
    maven.archive.write_bytes(b"other")
    with pytest.raises(RegistryUnavailable, match="but dedup expects"):
        install_registry(tmp_path / "cache" / "registry")
    assert [each.name for each in (tmp_path / "cache").iterdir()] == ["registry.lock"]


@pytest.mark.parametrize("error", [OSError("no route"), RuntimeError("not found")])
def test_without_a_network_it_says_what_to_do(maven, tmp_path, monkeypatch, error):
    def fail():
        raise error

    monkeypatch.setattr(maven, "resolve", fail)
    with pytest.raises(RegistryUnavailable, match=rf"{error}. Check the network .* use a running registry"):
        install_registry(tmp_path / "cache" / "registry")


def test_a_registry_that_ends_by_itself_says_why(tmp_path, monkeypatch):
    java = tmp_path / "java"
    java.write_text("#!/bin/sh\necho address in use\nexit 1\n")
    java.chmod(0o755)
    monkeypatch.setattr(registry_node, "find_java", lambda _: java)
    monkeypatch.setattr(registry_node, "install_registry", lambda *_: Path("registry.jar"))
    registry = EmbeddedRegistry()
    with pytest.raises(RegistryUnavailable, match=r"ended unexpectedly[\s\S]*address in use"):
        registry.start()
    assert not registry.log_file.parent.exists()


class Schemas(BaseHTTPRequestHandler):
    """Answers as a registry without schemas does."""

    def do_GET(self):
        self.send_response(200 if self.path == "/apis/ccompat/v7/subjects" else 404)
        self.end_headers()

    def log_message(self, *_):
        """Write nothing to stderr."""


def test_a_registry_behind_a_proxy_of_the_environment_is_found_to_be_ready(monkeypatch):
    """Was: the proxy was asked, so `dedup broker --registry` ended after 120 s: it did not start."""
    for name in ("http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with HTTPServer(("127.0.0.1", 0), Schemas) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert EmbeddedRegistry(port=server.server_port)._answers()
        server.shutdown()
