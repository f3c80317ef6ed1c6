"""The docs as a site: it builds without a warning, fits its column and both themes, and shows what the rule says."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect
from ruamel.yaml import YAML

from tests.web.conftest import browser

__all__ = ["browser"]
ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
COLUMN = 76
"""The characters of code that fit into the site's column."""
LIGHT, DARK = (255, 255, 255), (0x1E, 0x21, 0x29)
"""The backgrounds of pictures."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the site; it was built without a warning."""
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs (extra docs) is not installed here")
    directory = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(directory)]
    # Its maker's announcement is a warning.
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Return where a browser finds the site."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=site)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def background(page: Page, picture: Locator) -> tuple[int, ...]:
    """Return the colour near the picture's upper left corner, as the page shows it."""
    picture.scroll_into_view_if_needed()
    box = picture.bounding_box()
    assert box is not None
    png = page.screenshot(clip={"x": round(box["x"]) + 8, "y": round(box["y"]) + 6, "width": 1, "height": 1})
    data, at = b"", 8
    while at < len(png):
        size = int.from_bytes(png[at : at + 4])
        data += png[at + 8 : at + 8 + size] if png[at + 4 : at + 8] == b"IDAT" else b""
        at += size + 12
    # One pixel, so no filter changes it: the filter's number, then red, green, and blue.
    return tuple(zlib.decompress(data)[1:4])


def test_the_site_fetches_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(list((ROOT / "docs").rglob("*.md")))  # and the page of what is not found
    fetched = re.compile(
        r"<(?:script|img|iframe)\b[^>]*\bsrc=[\"']?(https?:)?//|<link\b[^>]*\bhref=[\"']?https?://[^>]*\bstylesheet"
    )
    assert [page for page in pages if fetched.search(page.read_text(encoding="utf-8"))] == []
    for linked in ("repository/config/grafana/alerts.yaml", "repository/topologies/chain.yaml", "pictures/late.svg"):
        assert (site / linked).is_file(), linked


def test_the_rule_has_short_lines():
    text = (ROOT / "docs" / "semantics.md").read_text(encoding="utf-8")
    rule = re.search(r"^## The rule\n.*?^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert rule is not None
    assert max(map(len, rule[1].splitlines())) <= COLUMN


def test_the_rule_fits_the_column_of_the_site(browser, address):
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(f"{address}/semantics/")
    box = page.locator("#the-rule ~ div.highlight code").first
    expect(box).to_contain_text("unique: the record is forwarded")
    assert box.evaluate("box => box.scrollWidth - box.clientWidth") == 0
    # The same box tells how many characters fit.
    box.evaluate("(box, most) => { box.textContent = 'x'.repeat(most); }", COLUMN)
    assert box.evaluate("box => box.scrollWidth - box.clientWidth") == 0
    page.close()


@pytest.mark.parametrize(
    ("machine", "button", "wanted", "theme"), [("light", "Dark", DARK, "dark"), ("dark", "Light", LIGHT, "light")]
)
def test_pictures_have_the_theme_of_the_page(browser, address, machine, button, wanted, theme):
    page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme=machine)
    page.goto(address)
    page.locator(f"label[title={button}]:visible").click()
    shown = {
        "": ["overview"],
        "benchmarks/": ["throughput"],
        "semantics/": sorted(each.stem for each in PICTURES.iterdir()),
    }
    for place, names in shown.items():
        page.goto(f"{address}/{place}")
        for name in names:
            picture = page.locator(f"img[src$='/{name}.svg'], img[src='images/{name}.svg']")
            expect(picture).to_have_count(1)
            assert background(page, picture) == wanted, name
    page.goto(f"{address}/dashboard/")
    visible = page.locator("article img:visible")
    written = (ROOT / "docs" / "dashboard.md").read_text(encoding="utf-8")
    expect(visible).to_have_count(written.count(".png#only-light"))
    assert {re.sub(r".*-(\w+)\.png#only-\w+", r"\1", each.get_attribute("src") or "") for each in visible.all()} == {
        theme
    }
    page.close()


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
