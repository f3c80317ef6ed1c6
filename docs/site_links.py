"""What mkdocs does beside rendering: the site has the files that pages link to, and its menu the decisions."""
# ruff: noqa: INP001  # a hook beside its pages, not a package

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

LINK: Final = re.compile(r"(\]\()((?:\.\./)+[^)#\s]+)(#[^)\s]*)?(\))")
BESIDE: Final = "repository"
"""Where such files are in the site."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Every decision is in the menu by its number, and every page that mkdocs.yml does not place is under More."""
    docs = Path(config.docs_dir)
    menu = [entry for entry in config.nav or () if "Decisions" not in entry]
    decisions = [
        {_title(page): page.relative_to(docs).as_posix()} for page in sorted((docs / "decisions").glob("*.md"))
    ]
    placed = set(_pages(menu))
    more = [{_title(page): page.name} for page in sorted(docs.glob("*.md")) if page.name not in placed]
    config.nav = [*menu, *([{"More": more}] if more else []), {"Decisions": decisions}]
    return config


def _pages(menu: Any) -> Iterator[str]:  # noqa: ANN401  # lists, mappings and texts, as YAML has them
    match menu:
        case str():
            yield menu
        case dict():
            yield from _pages(list(menu.values()))
        case _:
            for entry in menu:
                yield from _pages(entry)


def _title(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    return next(line.lstrip("# ") for line in text.splitlines() if line.startswith("# "))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Every file outside the docs that a page links to is in the site, as text."""
    docs = Path(config.docs_dir)
    for page in list(files.documentation_pages()):
        for _, target, _, _ in LINK.findall(page.content_string):
            path = _outside(docs, page.src_uri, target)
            if path is not None and files.get_file_from_path(_place(docs, path)) is None:
                files.append(File.generated(config, _place(docs, path), content=path.read_bytes()))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, **_: Any) -> str:  # noqa: ANN401  # mkdocs'
    """Links to such files lead to their copies."""
    docs = Path(config.docs_dir)

    def moved(found: re.Match[str]) -> str:
        path = _outside(docs, page.file.src_uri, found[2])
        if path is None:
            return found[0]
        here = Path(page.file.src_uri).parent.as_posix()
        return f"{found[1]}{os.path.relpath(_place(docs, path), here)}{found[4]}"

    return LINK.sub(moved, markdown)


def _outside(docs: Path, page: str, target: str) -> Path | None:
    """Return the file that a link of a page leads to, if that is outside the docs."""
    path = (docs / page).parent.joinpath(target).resolve()
    return path if path.is_file() and not path.is_relative_to(docs) else None


def _place(docs: Path, path: Path) -> str:
    # Not as a page: its own links are to its neighbours in the repository.
    return f"{BESIDE}/{path.relative_to(docs.parent).as_posix()}" + (".txt" if path.suffix == ".md" else "")
