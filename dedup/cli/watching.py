"""Something is done again each time a file is saved: `dedup check --watch`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

LOOK_S: Final = 0.3
"""Between two looks at the files: less than a person notices."""


def again_at_each_save(paths: Sequence[Path], act: Callable[[], None], wait: Callable[[], None]) -> None:
    """Act at once, and again whenever a file was written, replaced, made or removed; returns only by an exception.

    Two looks at a file's time and size, not the system's notices: editors replace files, and shares send none.
    """
    seen: list[tuple[int, int, int] | None] | None = None
    while True:
        found = [_stamp(path) for path in paths]
        if found != seen:
            seen = found
            act()
        wait()


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Return what changes with a save; None where there is no file."""
    try:
        known = path.stat()
    except OSError:
        return None
    return known.st_mtime_ns, known.st_size, known.st_ino
