"""The dashboard's files, as they lie beside this module: served by name, nothing else of the directory.

The plotting library is uPlot 1.6.32, as npm has it, with its licence beside it. Nothing is fetched from elsewhere: the
content security policy allows this host only, and no inline script or style.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from importlib.resources import files
from typing import Final

from aiohttp import web

HOME: Final = "/"
FILES: Final[Mapping[str, str]] = {
    HOME: "index.html",
    **{
        f"/static/{name}": name
        for name in (
            "dashboard.css",
            "dashboard.js",
            "lookup.js",
            "plots.js",
            "tables.js",
            "words.js",
            "icon.svg",
            "uPlot.esm.js",
            "uPlot.min.css",
            "uPlot.LICENSE.txt",
        )
    },
}
"""Path -> file."""

_KINDS: Final[Mapping[str, str]] = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
    "txt": "text/plain",
}
SECURED: Final[Mapping[str, str]] = {
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
}
"""On every answer."""


def file_answer(name: str) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return what serves one file, read when it is first asked for."""
    content: bytes | None = None

    async def answer(_: web.Request) -> web.Response:
        nonlocal content
        if content is None:
            content = files("dedup.web").joinpath("static", name).read_bytes()
        kind = _KINDS[name.rpartition(".")[2]]
        return web.Response(body=content, content_type=kind, charset="utf-8")

    return answer
