"""Where a command leaves its report: an HTML page and, beside it, the same as JSON."""

from __future__ import annotations

import os
from pathlib import Path

from dedup.errors import Problem, SettingsError


def refuse_no_page(page: Path) -> None:
    """Raise SettingsError now rather than after hours of work; the directory of the reports is made."""
    if page.suffix == ".json":
        told = f"{page} is where the JSON report goes, beside the HTML one; name that, for example "
        raise SettingsError([Problem("--report", told + str(page.with_suffix(".html")))])
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError([Problem("--report", f"{page.parent} can not be made: {error.strerror}")]) from error
    for file in (page, page.with_suffix(".json")):
        if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
            raise SettingsError([Problem("--report", f"{file} can not be written")])


def write_report(page: Path, html: str, json: str) -> None:
    """Both files hold the report; ``page`` is one that `refuse_no_page` let pass."""
    page.write_text(html, encoding="utf-8")
    page.with_suffix(".json").write_text(json, encoding="utf-8")
