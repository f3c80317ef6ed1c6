"""Placeholder."""

from __future__ import annotations

from dedup.core.content_tree import Content
from dedup.core.framing import SchemaText
from dedup.core.tracking_id import Path


def protobuf_content(
    schema: SchemaText, indexes: tuple[int, ...], pinned: SchemaText | None, exclude: tuple[Path, ...]
) -> Content:
    """Placeholder."""
    raise NotImplementedError
