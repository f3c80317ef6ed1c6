"""Placeholder."""

from __future__ import annotations

from dedup.core.content_tree import Content
from dedup.core.framing import SchemaText
from dedup.core.tracking_id import Path


def avro_content(schema: SchemaText, pinned: SchemaText | None, exclude: tuple[Path, ...]) -> Content:
    """Placeholder."""
    raise NotImplementedError
