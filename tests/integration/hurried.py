"""A worker process with quicker upkeep: ``python hurried.py [accidents of child.py] -- ARGUMENTS OF dedup``."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

EVERY_S = 0.3
KEEP_MS = 0
DONE = "upkeep is done"


def main() -> None:
    """Delete old records at once, whatever their age, and then be `child.py`."""
    from dedup.worker import upkeep, worker  # noqa: PLC0415  # as child.py: nothing is imported before it is asked for

    worker.MAINTENANCE_EVERY_S = EVERY_S  # type: ignore[misc]
    upkeep.KEEP_MS = KEEP_MS  # type: ignore[misc]
    delete = worker.Maintenance.delete

    async def told(self: worker.Maintenance) -> None:
        await delete(self)
        worker.log.info(DONE)

    worker.Maintenance.delete = told  # type: ignore[method-assign]
    spec = importlib.util.spec_from_file_location("child", Path(__file__).with_name("child.py"))
    assert spec is not None
    assert spec.loader is not None
    child = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(child)
    child.main(sys.argv[1:])


if __name__ == "__main__":
    main()
