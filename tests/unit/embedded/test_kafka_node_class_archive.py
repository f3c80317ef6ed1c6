"""The archive of Kafka's classes: which one fits, and that only a whole one is ever kept."""

import os
from pathlib import Path

import pytest

from dedup.embedded.kafka_node import ClassArchive


@pytest.fixture
def places(tmp_path):
    """Return a Java and a directory of jars."""
    java, jars = tmp_path / "jdk" / "bin" / "java", tmp_path / "cache" / "kafka"
    java.parent.mkdir(parents=True)
    java.touch()
    (java.parents[1] / "release").write_text("17.0.1", encoding="ascii")
    jars.mkdir(parents=True)
    (jars / "kafka.jar").write_bytes(b"classes")
    return java, jars


def made(archive: ClassArchive) -> Path:
    assert archive.made is not None
    assert archive.options[0] == f"-XX:ArchiveClassesAtExit={archive.made}"
    archive.made.write_bytes(b"archive")
    return archive.made


@pytest.mark.parametrize("code", [0, 143])
def test_what_a_good_end_leaves_is_what_the_next_one_starts_with(places, code):
    first = ClassArchive.of(*places)
    written = made(first)
    first.keep(code)
    assert not written.exists()
    second = ClassArchive.of(*places)
    assert second.options[0] == f"-XX:SharedArchiveFile={first.file}"
    second.keep(137)
    assert first.file.read_bytes() == b"archive"


@pytest.mark.parametrize("code", [137, 1])
def test_what_a_bad_end_leaves_is_deleted(places, code):
    archive = ClassArchive.of(*places)
    written = made(archive)
    archive.keep(code)
    assert not written.exists()
    assert ClassArchive.of(*places).made is not None


def test_a_java_that_makes_none_is_no_error(places):
    ClassArchive.of(*places).keep(143)
    assert ClassArchive.of(*places).made is not None


@pytest.mark.parametrize("touched", ["java", "jar"])
def test_another_java_or_jar_wants_another_archive(places, touched):
    java, jars = places
    archive = ClassArchive.of(java, jars)
    made(archive)
    archive.keep(0)
    if touched == "java":
        (java.parents[1] / "release").write_text("17.0.2", encoding="ascii")
    else:
        os.utime(jars / "kafka.jar", (1, 1))
    other = ClassArchive.of(java, jars)
    assert other.file != archive.file
    assert other.made is not None
