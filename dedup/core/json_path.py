"""Parses and formats paths within a JSON value, which topology files write as ``a.b[0].c`` or ``a["b.c"]``."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Final

Path = tuple[str | int, ...]
"""A path, which contains at least one member name or array position, outermost first."""

_NAME: Final = re.compile(r'[^.\[\]"\s]+')
_INDEX: Final = re.compile(r"\[(0|[1-9][0-9]{0,8})\]")
_QUOTED: Final = re.compile(r'\[("(?:[^"\\]|\\.)*")\]')


def parse_path(text: str) -> Path:
    """Parse a path. Raises ValueError, with a message that says what to write instead, if the path is not valid."""
    if not text:
        raise ValueError('the path is empty; write a member name, such as "order.id"')
    steps: list[str | int] = []
    at = 0
    while at < len(text):
        step, at = _step(text, at, first=not steps)
        steps.append(step)
    return tuple(steps)


@cache
def format_path(path: Path) -> str:
    """Return a path in the notation of topology files, which `parse_path` reads."""
    parts: list[str] = []
    for step in path:
        match step:
            case int():
                parts.append(f"[{step}]")
            case _ if _NAME.fullmatch(step):
                parts.append(f".{step}" if parts else step)
            case _:
                parts.append(f"[{json.dumps(step, ensure_ascii=False)}]")
    return "".join(parts)


def _step(text: str, at: int, *, first: bool) -> tuple[str | int, int]:
    if index := _INDEX.match(text, at):
        return int(index[1]), index.end()
    if quoted := _QUOTED.match(text, at):
        return _unquote(text, quoted[1]), quoted.end()
    if text[at] == "[":
        raise ValueError(f'path {text}: after "[" write a position or a quoted name, such as [0] or ["b.c"]')
    start = at if first else at + 1
    if not first and text[at] != ".":
        raise ValueError(f'path {text}: write "." or "[" before position {at + 1}')
    name = _NAME.match(text, start)
    if name is None:
        raise ValueError(f'path {text}: a member name is missing at position {start + 1}; quote odd names: a["b.c"]')
    return name[0], name.end()


def _unquote(text: str, quoted: str) -> str:
    try:
        name = json.loads(quoted)
    except ValueError:
        raise ValueError(f"path {text}: {quoted} is not a JSON string; escape it as JSON does") from None
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"path {text}: {quoted} has an unpaired surrogate, which no UTF-8 value can contain") from None
    return str(name)
