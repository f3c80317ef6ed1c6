"""Exactly-once deduplication for Kafka topics.

`IdempotentWriter` and `IdempotentReader` are for applications that produce to a deduplicated topic or consume from it.
Each class is imported when it is first accessed, which keeps `import dedup` fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dedup.connect.idempotent_reader import Event, IdempotentReader, Work
    from dedup.connect.idempotent_writer import IdempotentWriter

__all__ = ["Event", "IdempotentReader", "IdempotentWriter", "Work"]


def __getattr__(name: str) -> Any:  # noqa: ANN401  # any of the public classes
    """Import and return a public class."""
    if name not in __all__:
        raise AttributeError(f"module 'dedup' has no attribute {name!r}")
    module = "idempotent_writer" if name == "IdempotentWriter" else "idempotent_reader"
    return getattr(import_module(f"dedup.connect.{module}"), name)
