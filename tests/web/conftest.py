"""A real Chromium for the dashboard's tests: Debian's, driven by Playwright.

Buttons and links are activated by the keyboard. The page grows when figures arrive, and a click whose target moves between
press and release does nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.integration.conftest import make_job
from tests.integration.fleet import WITHIN_S
from tests.web.staged import serving

__all__ = ["make_job"]
expect.set_options(timeout=1000 * WITHIN_S)
CHROMIUM = shutil.which("chromium")
Open = Callable[..., Page]
Serve = Callable[..., str]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Return Chromium, one a module: while Playwright runs, no other event loop can in this thread."""
    if CHROMIUM is None:
        pytest.skip("Chromium is missing: apt-get install chromium")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield chromium
        chromium.close()


@pytest.fixture
def servers() -> Iterator[ExitStack]:
    """Return what ends the servers of a test. Pages ask until they are closed, so ``open_page`` ends before this."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def serve(servers: ExitStack) -> Serve:
    """Return what serves a worker's pages until the browser's are closed."""
    return lambda worker, **settings: servers.enter_context(serving(worker, **settings))


@pytest.fixture
def open_page(browser: Browser, servers: ExitStack) -> Iterator[Open]:
    """Return what opens a page; at the end no script has failed, nothing was blocked, no other host was asked."""
    contexts: list[BrowserContext] = []
    wrong: list[str] = []

    def opened(url: str, *, expected: tuple[str, ...] = (), **options) -> Page:
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(1000 * WITHIN_S)
        page.on("pageerror", lambda error: wrong.append(f"script failed: {error}"))
        page.on(
            "console",
            lambda message: (
                wrong.append(f"{message.type}: {message.text}")
                if message.type in {"error", "warning"} and not any(text in message.text for text in expected)
                else None
            ),
        )
        page.on("request", lambda request: wrong.append(request.url) if not request.url.startswith(url) else None)
        page.on("dialog", lambda dialog: (wrong.append(f"dialog {dialog.message}"), dialog.dismiss()))
        page.goto(url)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert wrong == []
