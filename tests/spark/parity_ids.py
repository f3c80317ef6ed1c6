"""The function of the topology `python` in parity.py; every process finds it as an installed module."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec


def _decoded(value: bytes) -> Any:
    try:
        return msgspec.msgpack.decode(value)
    except msgspec.DecodeError:
        return json.loads(value)


def own_id(key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes | None]]) -> object:
    """Return IDs of every type, and now and then what is none."""
    if value is None:
        return key
    for name, content in headers:
        if name == "id" and content:
            return content
    found = _decoded(value)["id"]
    if isinstance(found, float):
        raise TypeError("an amount is no order")
    return found
