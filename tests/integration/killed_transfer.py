"""A `dedup` process that dies in the middle of an archive: ``DEDUP_TEST_DIES_IN=upload`` or ``=download``.

``python killed_transfer.py [accidents of child.py] -- ARGUMENTS OF dedup``
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

VARIABLE = "DEDUP_TEST_DIES_IN"


def main() -> None:
    """Be `child.py`, and die where it was said."""
    from dedup.store import archive  # noqa: PLC0415  # as child.py: nothing is imported before it is asked for

    where = {"upload": archive._Out, "download": archive._In}.get(os.environ.get(VARIABLE, ""))
    if where is not None:
        where.saw = deadly(where.saw)  # type: ignore[attr-defined]
    spec = importlib.util.spec_from_file_location("child", Path(__file__).with_name("child.py"))
    assert spec is not None
    assert spec.loader is not None
    child = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(child)
    child.main(sys.argv[1:])


def deadly(saw: Callable[[Any, bytes], None]) -> Callable[[Any, bytes], None]:
    """Return what kills the process once a piece of the archive has gone through."""

    def dies(self: Any, piece: bytes) -> None:
        saw(self, piece)
        if self.count:
            os.kill(os.getpid(), signal.SIGKILL)

    return dies


if __name__ == "__main__":
    main()
