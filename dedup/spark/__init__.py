"""Provides deduplication on Spark.

`dedup` and `unique` deduplicate a DataFrame, and `read_run` reads the verdicts that a backfill published. `dedup.spark`
imports each function on first use, so that executors load only the modules they need.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dedup.spark.dataframe import dedup, unique
    from dedup.spark.manifest import read_run

__all__ = ["dedup", "read_run", "unique"]


def __getattr__(name: str) -> Any:  # noqa: ANN401  # one of the public functions
    if name not in __all__:
        raise AttributeError(f"module 'dedup.spark' has no attribute {name!r}")
    return getattr(import_module("dedup.spark.manifest" if name == "read_run" else "dedup.spark.dataframe"), name)
