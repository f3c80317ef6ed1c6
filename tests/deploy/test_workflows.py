"""Workflows and issue forms: valid by the published schemas, pinned, and nothing in them that does not run elsewhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import jsonschema
import pytest

from dedup.core.tracking_id import ENCODING_VERSION
from dedup.spark import table_sink
from dedup.store import changelog, checkpoint, directory
from dedup.worker import layout
from tests.deploy.conftest import tool
from tests.deploy.test_files import ROOT, load, schema

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
JOB = ROOT / ".ci" / "job"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def steps(path: Path):
    return [step for job in load(path)["jobs"].values() for step in job.get("steps", ())]


def matrix(job: str, name: str) -> list[str]:
    return load(ROOT / ".github" / "workflows" / "ci.yml")["jobs"][job]["strategy"]["matrix"][name]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_is_valid_by_the_published_schema(path):
    document = load(path)
    jsonschema.validate(document, schema("github-workflows"))
    next(iter(document["jobs"].values()))["step"] = []
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, schema("github-workflows"))


def actionlint(*paths: Path) -> str:
    """Return what actionlint finds; it gives the scripts of steps to shellcheck."""
    program, shellcheck = (
        tool("actionlint", "`.ci/job programs deploy`"),
        tool("shellcheck", "Debian's package shellcheck"),
    )
    command = [program, "-no-color", "-shellcheck", shellcheck, *map(str, paths)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == bool(done.stdout), done.stderr
    return done.stdout


def test_actionlint_finds_nothing():
    assert actionlint(*WORKFLOWS) == ""


@pytest.mark.parametrize(
    ("line", "wrong", "says"),
    [
        ("needs: green", "needs: gren", 'needs job "gren" which does not exist'),
        ("contents: read", "content: read", 'unknown permission scope "content"'),
        ('"$GITHUB_REF_NAME"', "$GITHUB_REF_NAME", "SC2086"),
    ],
)
def test_actionlint_finds_a_mistake(tmp_path, line, wrong, says):
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    assert line in text
    (tmp_path / "release.yml").write_text(text.replace(line, wrong, 1), encoding="utf-8")
    assert says in actionlint(tmp_path / "release.yml")


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_an_issue_form_is_valid_by_the_published_schema(path):
    jsonschema.validate(load(path), schema("github-issue-config" if path.stem == "config" else "github-issue-forms"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_what_a_workflow_runs_is_a_job_that_runs_anywhere(path):
    named = subprocess.run(["bash", JOB], capture_output=True, text=True, check=False)
    assert named.returncode == 1
    known = set(named.stderr.partition("there are: ")[2].split())
    runs = [step["run"] for step in steps(path) if "run" in step]
    assert {re.match(r"\.ci/job (\w+)[^\n]*$", run)[1] for run in runs} <= known


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_action_is_pinned_to_a_commit_with_its_version_beside_it(path):
    lines = [
        line for line in path.read_text(encoding="utf-8").splitlines() if "uses: " in line and "uses: ./" not in line
    ]
    assert lines
    assert [line for line in lines if not re.search(r"uses: [\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line)] == []


def test_every_suite_is_in_a_shard():
    suites = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    suites |= {path.parents[1].name for path in (ROOT / "tests" / "unit").glob("*/test_*.py")}
    sharded = [name for shard in matrix("suites", "suites") for name in shard.split()]
    assert sorted(sharded) == sorted(suites - {"unit", "property", "contract"})


def test_the_pythons_are_the_same_everywhere():
    pythons = matrix("quick", "python")
    classifiers = [each.rpartition(" :: ")[2] for each in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", each)]
    assert pythons == classifiers
    assert PROJECT["requires-python"] == f">={pythons[0]}"
    for page in ("README.md", "docs/index.md", "docs/pypi.md"):
        assert f"Python {pythons[0]} to {pythons[-1]}" in (ROOT / page).read_text(encoding="utf-8"), page
    assert set(matrix("package", "python")) <= set(pythons)


@pytest.mark.parametrize(
    ("tag", "wrong"), [(f"v{PROJECT['version']}", "placeholder"), ("v99.0.0", f"version is {PROJECT['version']}")]
)
def test_a_release_without_an_address_or_with_another_version_is_refused(tag, wrong):
    done = subprocess.run(["bash", JOB, "publishable", tag], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert wrong in done.stderr


PUBLISHED = ("dedup_streams-1.0.0-py3-none-any.whl", "dedup_streams-1.0.0.tar.gz", "sbom.cdx.json")


def released(directory: Path, *, lacks: str = "") -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the jobs that make the release, with a `gh` that writes down how it is called; return that, too."""
    for name in (".ci", "dist", "bin"):
        (directory / name).mkdir()
    shutil.copy(JOB, directory / ".ci" / "job")
    for name in PUBLISHED:
        (directory / "dist" / name).touch()
    (directory / "attestation.json").write_text("{}", encoding="utf-8")
    said = directory / "said"
    said.touch()
    (directory / "bin" / "gh").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {said}\n', encoding="utf-8")
    (directory / "bin" / "gh").chmod(0o755)
    environ = os.environ | {"PATH": f"{directory / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    environ |= {"GITHUB_SERVER_URL": "https://github.example", "GITHUB_REPOSITORY": "o/r"}
    line = f".ci/job provenance {directory}/attestation.json && rm -f dist/{lacks or 'x'} && .ci/job release v1.0.0"
    done = subprocess.run(["bash", "-c", line], cwd=directory, env=environ, capture_output=True, text=True, check=False)
    return done, said.read_text(encoding="utf-8").splitlines()


def test_a_release_has_what_the_security_page_promises_as_files(tmp_path):
    done, said = released(tmp_path)
    assert done.returncode == 0, done.stderr
    files = [f"dist/{name}" for name in (*PUBLISHED, "provenance.sigstore.json")]
    assert said[:8] == ["release", "create", "v1.0.0", *files, "--verify-tag"]
    assert "https://github.example/o/r/blob/v1.0.0/CHANGELOG.md" in said[-1]
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert [name for name in files[2:] if f"`{Path(name).name}`" not in page] == []


@pytest.mark.parametrize("name", [*PUBLISHED, "provenance.sigstore.json"])
def test_a_release_without_one_of_its_files_is_not_made(tmp_path, name):
    done, said = released(tmp_path, lacks=name)
    assert (done.returncode, said) == (1, [])
    assert "is missing, and each release has it" in done.stderr


def test_the_release_is_made_from_what_was_built_attested_and_published():
    jobs = load(ROOT / ".github" / "workflows" / "release.yml")["jobs"]
    release = jobs["release"]
    assert release["permissions"] == {"contents": "write"}
    assert set(release["needs"]) == {"package", "image"}
    package = [step.get("run") or step["uses"].partition("@")[0] for step in jobs["package"]["steps"]]
    assert package[-4:] == [
        "actions/attest-build-provenance",
        '.ci/job provenance "$BUNDLE"',
        "actions/upload-artifact",
        ".ci/job publish",
    ]
    (given,) = (step["with"] for step in jobs["package"]["steps"] if "upload-artifact" in step.get("uses", ""))
    (taken,) = (step["with"] for step in release["steps"] if "download-artifact" in step.get("uses", ""))
    assert (taken["name"], taken["path"]) == (given["name"], given["path"])


def test_the_versions_page_has_the_numbers_of_the_code():
    page = (ROOT / "docs" / "versioning.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ([^|]+?) \| [^|]+ \| (\d[\d; a-z]*) \|$", page, re.MULTILINE))
    assert rows == {
        "tracking ID": str(ENCODING_VERSION),
        "sighting": str(changelog._CHANGELOG_VERSION >> 4),
        "task record": f"{changelog._RECORD_VERSION}; reads {changelog._RECORD_WITHOUT_ID}",
        "seed mark": str(changelog._MARK_VERSION),
        "layout": str(layout._VERSION),
        "local state": directory._FORMAT,
        "checkpoint": str(checkpoint._FORMAT),
        "position of `dedup spark sink`": str(table_sink._VERSION),
    }


def test_the_page_on_pypi_links_to_nothing_that_is_not_there():
    page = (ROOT / PROJECT["readme"]).read_text(encoding="utf-8")
    assert re.findall(r"\]\((?!https://)[^)]*\)", page) == []
    extras = set(re.findall(r"`dedup-streams\[(\w+)\]` \|", page))
    assert extras == PROJECT["optional-dependencies"].keys() - {"dev", "docs"}
    assert json.dumps(PROJECT["urls"]).count("https://") == len(PROJECT["urls"])
