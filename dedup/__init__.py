"""Exactly-once deduplication for Kafka topics.

`IdempotentWriter` and `IdempotentReader` are for applications at its edges; they are imported when they are asked for,
so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from dedup.edges.reader import Event, IdempotentReader, Work
    from dedup.edges.writer import IdempotentWriter

__all__ = ["Event", "IdempotentReader", "IdempotentWriter", "Work"]

_MODULES: Final = {
    "Event": "dedup.edges.reader",
    "IdempotentReader": "dedup.edges.reader",
    "IdempotentWriter": "dedup.edges.writer",
    "Work": "dedup.edges.reader",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401  # a class of ours
    """Return a public class, imported now."""
    if name not in _MODULES:
        raise AttributeError(f"module 'dedup' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
