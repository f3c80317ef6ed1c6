"""Encodes decoded values of formats with their own types as canonical content. (For JSON, canonical JSON is used.)

Two values have equal canonical content if they have the same members, elements, and scalars, regardless of the order of
the members and the encoding of each part. Types matter: the integer 1, the decimal 1.0, the floating-point number 1.0,
and the text "1" all differ. The encoding never changes. It begins with the byte ``00``, which no JSON text contains,
and then one item follows:

    scalar             its length in LEB128, and its canonical bytes: those of an ID (tracking_id.py), except for bytes
                       (``02``, even if they look like a UUID), instants (``0e``, then an integer of nanoseconds), and
                       floating-point numbers (``0f``, then a big-endian double; there is one zero and one NaN)
    00 01              an array: the number of its elements (LEB128), the elements
    00 02              an object: the number of its members (LEB128), the members in the order of their keys, each as
                       its key and an item; the key is a scalar, or the length (LEB128) and bytes of canonical content
    00 03              an item with a type that no ID can have: the name of the type (as a text), an item
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from math import isnan
from typing import Any, Final
from uuid import UUID

from dedup.core import tracking_id as encoding
from dedup.core.avro import Instant
from dedup.core.exact_json import Excluded, Number, Unreadable, excluded
from dedup.core.tracking_id import Path

MAX_DEPTH: Final = 200
"""The maximum nesting depth of a value whose content is read."""
_BEGIN: Final = b"\0"
_ARRAY: Final = b"\0\x01"
_OBJECT: Final = b"\0\x02"
_NAMED: Final = b"\0\x03"
_FLOAT: Final = b"\x0f"
_INT64: Final = 1 << 63
_NAN: Final = _FLOAT + struct.pack(">d", float("nan"))
_DOUBLE: Final = struct.Struct(">d").pack


@dataclass(frozen=True, slots=True)
class TypedValue:
    """A value whose type has a name but no canonical bytes of its own, such as a date or a CBOR tag."""

    type_name: str
    content: Tree


Scalar = None | bool | int | float | str | bytes | Number | UUID | Instant
Tree = Scalar | TypedValue | list["Tree"] | dict[bytes, "Tree"]
"""A decoded value. The keys of an object are canonical bytes: `text_key` for a name."""

Without = Mapping[bytes | int, "Without | None"]
"""The members (by canonical keys) and elements (by positions) to leave out: a tree with None at the end of a path."""

Content = Callable[[bytes], bytes]
"""Returns the canonical content of a payload, or raises Unreadable."""

_NOTHING: Final[Without] = {}

text_key: Final = encoding.encode_text
"""Returns the canonical key of a member with a name."""
_REMEMBERED: Final = 1 << 12
"""The maximum number of names whose keys are cached."""
_SHORT_NAME: Final = 100
"""The maximum length of a key that is cached."""


class KeyCache(dict[Any, bytes]):
    """Caches the canonical keys of member names, because nearly all values have the same member names."""

    def __init__(self, key_of_name: Callable[[Any], bytes]) -> None:
        super().__init__()
        self._key_of: Final = key_of_name

    def __missing__(self, name: Any) -> bytes:  # noqa: ANN401 - text, or the UTF-8 of a text
        key = self._key_of(name)
        if len(key) <= _SHORT_NAME:
            if len(self) >= _REMEMBERED:
                self.clear()
            self[name] = key
        return key


@cache
def without_names(paths: tuple[Path, ...]) -> Without:
    """Return the members to leave out of values with named members, given the excluded paths."""
    return _named(excluded(paths))


def _named(steps: Excluded) -> Without:
    return {
        text_key(step) if isinstance(step, str) else step: None if below is None else _named(below)
        for step, below in steps.items()
    }


def deeper(depth: int) -> int:
    """Return the depth of the members of a value at ``depth``. Raises Unreadable if this depth is too great."""
    if depth >= MAX_DEPTH:
        raise Unreadable("too_deep", f"the value is nested more than {MAX_DEPTH} levels deep")
    return depth + 1


def scalar_key(scalar: Scalar) -> bytes:
    """Return the canonical bytes of a scalar, which are also the key of a member that the scalar names."""
    return _KEY_OF[type(scalar)](scalar)


def _integer_key(number: int) -> bytes:
    return encoding.encode_integer(number) if -_INT64 <= number < _INT64 else encoding.encode_integer_text(str(number))


def _float_key(number: float) -> bytes:
    return _NAN if isnan(number) else _FLOAT + _DOUBLE(number or 0.0)


def _number_key(number: Number) -> bytes:
    if number.is_integer:
        return encoding.encode_integer_text(number.integer_text())
    return encoding.DECIMAL + number.decimal_text().encode()


_KEY_OF: Final[dict[type, Callable[[Any], bytes]]] = {
    type(None): lambda _: encoding.NULL,
    bool: lambda flag: encoding.TRUE if flag else encoding.FALSE,
    int: _integer_key,
    float: _float_key,
    str: encoding.encode_text,
    bytes: lambda raw: encoding.BYTES + raw,
    Number: _number_key,
    UUID: lambda uuid: encoding.UUID + uuid.bytes,
    Instant: lambda instant: encoding.INSTANT + encoding.encode_integer(instant.nanoseconds),
}
"""Maps each scalar type to its encoder. (A `match` statement would take longer than encoding a short text.)"""


def key_of(tree: Tree) -> bytes:
    """Return the canonical key of a member of a map whose keys can be any value."""
    if isinstance(tree, dict | list | TypedValue):
        return encode_content(tree, _NOTHING)
    return scalar_key(tree)


def encode_content(tree: Tree, without: Without) -> bytes:
    """Return the canonical content of a value without some of its members. Raises Unreadable for a number too large."""
    parts = [_BEGIN]
    _append(tree, without, parts)
    return b"".join(parts)


def _append(tree: Tree, without: Without, parts: list[bytes]) -> None:
    # Like the readers that make the tree, this function recurses once per level, so `deeper` limits its recursion.
    key_of_scalar = _KEY_OF.get(type(tree))
    if key_of_scalar is not None:
        parts.append(encoding.prefixed(key_of_scalar(tree)))
    elif isinstance(tree, dict):
        kept = [key for key in sorted(tree) if without.get(key, _NOTHING) is not None] if without else sorted(tree)
        parts.append(_OBJECT + encoding.length(len(kept)))
        for key in kept:
            parts.append(encoding.prefixed(key))
            _append(tree[key], without.get(key) or _NOTHING, parts)
    elif isinstance(tree, list):
        left = [(at, each) for at, each in enumerate(tree) if without.get(at, _NOTHING) is not None]
        parts.append(_ARRAY + encoding.length(len(left)))
        for at, each in left:
            _append(each, without.get(at) or _NOTHING, parts)
    elif isinstance(tree, TypedValue):
        parts.append(_NAMED + encoding.prefixed(tree.type_name.encode()))
        _append(tree.content, without, parts)
