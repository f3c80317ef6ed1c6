"""The class archive is taken where it is and fits; a JVM that can not use one starts as ever, and says nothing."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pyspark
import pytest

from dedup.local.java import use_java_of_spark
from dedup.spark.class_archive import OPTIONS, archive_file, options_of


@pytest.fixture
def environ(tmp_path):
    return {"XDG_CACHE_HOME": str(tmp_path / "a cache")}


@pytest.fixture
def java_home():
    return use_java_of_spark(dict(os.environ))


def test_there_is_an_option_where_there_is_an_archive(environ, java_home):
    assert options_of(java_home, environ) == {}
    file = archive_file(java_home, environ)
    file.parent.mkdir(parents=True)
    file.touch()
    (option, *_) = shlex.split(options_of(java_home, environ)[OPTIONS])
    assert option == f"-XX:SharedArchiveFile={file}"


def test_another_java_and_other_jars_have_another_archive(environ, java_home, tmp_path, monkeypatch):
    (tmp_path / "java").mkdir()
    (tmp_path / "java" / "release").write_text("another", encoding="ascii")
    (tmp_path / "pyspark" / "jars").mkdir(parents=True)
    jar = tmp_path / "pyspark" / "jars" / "spark.jar"
    jar.touch()
    files = {archive_file(java_home, environ), archive_file(tmp_path / "java", environ)}
    monkeypatch.setattr(pyspark, "__file__", str(tmp_path / "pyspark" / "__init__.py"))
    files.add(archive_file(java_home, environ))
    os.utime(jar, ns=(1, 1))
    files.add(archive_file(java_home, environ))
    assert len(files) == 4


def test_an_archive_that_is_damaged_is_left_alone_without_a_word(environ, java_home):
    file = archive_file(java_home, environ)
    file.parent.mkdir(parents=True)
    file.write_bytes(b"no archive" * 1_000)
    options = shlex.split(options_of(java_home, environ)[OPTIONS])
    java = Path(java_home) / "bin" / "java"
    said, plain = (
        subprocess.run([java, *each, "-version"], capture_output=True, text=True, check=True) for each in (options, [])
    )
    assert said.stdout == plain.stdout == ""
    assert said.stderr.splitlines()[0] == plain.stderr.splitlines()[0]
    assert "cds" not in said.stderr
