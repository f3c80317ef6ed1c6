"""The docs as a site: it builds without a warning, and its pictures are what the rule says."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs (extra docs) is not installed here")
def test_the_site_builds_and_fetches_nothing_from_elsewhere(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    # Its maker's announcement is a warning.
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > len(list((ROOT / "docs").rglob("*.md")))  # and the page of what is not found
    fetched = re.compile(
        r"<(?:script|img|iframe)\b[^>]*\bsrc=[\"']?(https?:)?//|<link\b[^>]*\bhref=[\"']?https?://[^>]*\bstylesheet"
    )
    assert [page for page in pages if fetched.search(page.read_text(encoding="utf-8"))] == []
    for linked in ("repository/config/grafana/alerts.yaml", "repository/topologies/chain.yaml", "pictures/late.svg"):
        assert (tmp_path / "site" / linked).is_file(), linked


def test_pictures_have_not_drifted():
    drawn = runpy.run_path(str(ROOT / "docs" / "window_pictures.py"))
    made = {f"{picture.name}.svg": drawn["svg"](picture) for picture in drawn["ALL"]}
    there = {path.name: path.read_text(encoding="utf-8") for path in PICTURES.glob("*.svg")}
    assert made == there, "run: python docs/window_pictures.py"


def test_every_picture_is_shown_with_words_for_those_who_do_not_see_it():
    text = (ROOT / "docs" / "semantics.md").read_text(encoding="utf-8")
    shown = dict(re.findall(r"!\[([^\]]{40,})\]\(pictures/([\w-]+\.svg)\)", text))
    assert set(shown.values()) == {path.name for path in PICTURES.glob("*.svg")}


def test_every_topology_names_its_schema():
    files = [*sorted((ROOT / "topologies").glob("*.yaml")), ROOT / "config" / "kubernetes" / "topology.yaml"]
    for path in files:
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        named = re.fullmatch(r"# yaml-language-server: \$schema=(\S+)", first)
        assert named is not None, path
        kind = "ingest" if "ingest" in YAML(typ="safe").load(path.read_text(encoding="utf-8")) else "topology"
        assert (path.parent / named[1]).resolve() == ROOT / "topologies" / f"{kind}.schema.json", path
