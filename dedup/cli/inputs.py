"""Files that commands read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dedup.errors import Problem, TopologyError

if TYPE_CHECKING:
    from dedup.topology.ingest import Ingest
    from dedup.topology.model import Topology


def read_topology(path: Path) -> Topology:
    """Return the topology of a file. Raises TopologyError with every problem, also where it can not be read."""
    from dedup.topology.parse import parse

    return parse(text_of(path), name=str(path))


def read_ingest(path: Path) -> Ingest:
    """Return the source of a file of `dedup ingest`. Raises TopologyError with every problem."""
    from dedup.topology.ingest import parse_ingest

    return parse_ingest(text_of(path), name=str(path))


def text_of(path: Path) -> str:
    """Return the text of a file. Raises TopologyError where it can not be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise TopologyError([Problem(str(path), f"can not be read: {error.strerror}; name a topology file")]) from error
    except UnicodeDecodeError as error:
        raise TopologyError([Problem(str(path), f"is not UTF-8 at byte {error.start}; save it as UTF-8")]) from error
