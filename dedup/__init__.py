"""Exactly-once deduplication for Kafka topics.

`IdempotentWriter` and `IdempotentReader` are for applications that produce to a deduplicated topic or consume from it.
Both are imported on first access, which keeps `import dedup` fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from dedup.connect.idempotent_reader import Event, IdempotentReader, Work
    from dedup.connect.idempotent_writer import IdempotentWriter

__all__ = ["Event", "IdempotentReader", "IdempotentWriter", "Work"]

_MODULES: Final = {
    "Event": "dedup.connect.idempotent_reader",
    "IdempotentReader": "dedup.connect.idempotent_reader",
    "IdempotentWriter": "dedup.connect.idempotent_writer",
    "Work": "dedup.connect.idempotent_reader",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401  # any of the public classes
    """Import and return a public class."""
    if name not in _MODULES:
        raise AttributeError(f"module 'dedup' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
