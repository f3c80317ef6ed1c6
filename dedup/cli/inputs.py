"""Files that commands read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dedup.errors import Problem, TopologyError

if TYPE_CHECKING:
    from dedup.topology.model import Topology


def read_topology(path: Path) -> Topology:
    """Return the topology of a file. Raises TopologyError with every problem, also where it can not be read."""
    from dedup.topology.parse import parse

    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise TopologyError([Problem(str(path), f"can not be read: {error.strerror}; name a topology file")]) from error
    except UnicodeDecodeError as error:
        raise TopologyError([Problem(str(path), f"is not UTF-8 at byte {error.start}; save it as UTF-8")]) from error
    return parse(text, name=str(path))
