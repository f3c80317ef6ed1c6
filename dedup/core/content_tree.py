"""Encodes decoded values of the formats that have their own types as canonical content. (JSON has canonical JSON.)

Two values have equal canonical content if they have the same members, elements, and scalars, whatever the order of
their members and the encoding of each part. Types matter: the integer 1, the decimal 1.0, the floating-point number
1.0, and the text "1" all differ. The encoding never changes. It begins with the byte ``00``, which no JSON text
contains, and then one item follows:

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
from math import isnan
from typing import Final, assert_never
from uuid import UUID

from dedup.core import tracking_id as encoding
from dedup.core.avro import Instant
from dedup.core.exact_json import Excluded, Number, Unreadable

MAX_DEPTH: Final = 200
"""The maximum nesting depth of a value whose content is read."""
_BEGIN: Final = b"\0"
_ARRAY: Final = b"\0\x01"
_OBJECT: Final = b"\0\x02"
_NAMED: Final = b"\0\x03"
_FLOAT: Final = b"\x0f"
_NAN: Final = _FLOAT + struct.pack(">d", float("nan"))
_DOUBLE: Final = struct.Struct(">d").pack


@dataclass(frozen=True, slots=True)
class Named:
    """A value whose type has a name and no canonical bytes of its own, such as a date or a CBOR tag."""

    type_name: str
    content: Tree


Scalar = None | bool | int | float | str | bytes | Number | UUID | Instant
Tree = Scalar | Named | list["Tree"] | dict[bytes, "Tree"]
"""A decoded value. The keys of an object are canonical bytes: `text_key` for a name."""

Without = Mapping[bytes | int, "Without | None"]
"""The members (by canonical keys) and elements (by positions) to leave out: a tree with None at the end of a path."""

Content = Callable[[bytes], bytes]
"""Returns the canonical content of a payload, or raises Unreadable."""

_NOTHING: Final[Without] = {}

text_key: Final = encoding.encode_text
"""Returns the canonical key of a member with a name."""


def without_names(excluded: Excluded) -> Without:
    """Return the members to leave out of values whose members are named."""
    return {
        text_key(step) if isinstance(step, str) else step: None if below is None else without_names(below)
        for step, below in excluded.items()
    }


def deeper(depth: int) -> int:
    """Return the depth of a value's members, given the value's own. Raises Unreadable if they would be too deep."""
    if depth >= MAX_DEPTH:
        raise Unreadable("too_deep", f"the value is nested more than {MAX_DEPTH} levels deep")
    return depth + 1


def scalar_key(scalar: Scalar) -> bytes:
    """Return the canonical bytes of a scalar, which are also its key as a name of a member."""
    match scalar:
        case None | bool():
            return encoding.NULL if scalar is None else encoding.TRUE if scalar else encoding.FALSE
        case int() | float() | Number():
            return _number_key(scalar)
        case str():
            return encoding.encode_text(scalar)
        case bytes():
            return encoding.BYTES + scalar
        case UUID():
            return encoding.UUID + scalar.bytes
        case Instant(nanoseconds):
            return encoding.INSTANT + encoding.encode_integer(nanoseconds)
        case never:
            assert_never(never)


def _number_key(number: float | Number) -> bytes:
    match number:
        case int():
            return encoding.encode_integer_text(str(number))
        case float():
            return _NAN if isnan(number) else _FLOAT + _DOUBLE(number or 0.0)
        case Number() if number.is_integer:
            return encoding.encode_integer_text(number.integer_text())
        case Number():
            return encoding.DECIMAL + number.decimal_text().encode()
        case never:
            assert_never(never)


def key_of(tree: Tree) -> bytes:
    """Return the canonical key of a member of a map whose keys can be any value."""
    if isinstance(tree, dict | list | Named):
        return encode_content(tree, _NOTHING)
    return scalar_key(tree)


def encode_content(tree: Tree, without: Without) -> bytes:
    """Return the canonical content of a value without some of its members. Raises Unreadable for a number too large."""
    parts = [_BEGIN]
    _append(tree, without, parts)
    return b"".join(parts)


def _append(tree: Tree, without: Without, parts: list[bytes]) -> None:
    # One call a level, like the readers that make the tree, whose depth `deeper` limits.
    match tree:
        case dict():
            kept = [key for key in sorted(tree) if without.get(key, _NOTHING) is not None] if without else sorted(tree)
            parts.append(_OBJECT + encoding.length(len(kept)))
            for key in kept:
                parts.append(encoding.prefixed(key))
                _append(tree[key], without.get(key) or _NOTHING, parts)
        case list():
            left = [(at, each) for at, each in enumerate(tree) if without.get(at, _NOTHING) is not None]
            parts.append(_ARRAY + encoding.length(len(left)))
            for at, each in left:
                _append(each, without.get(at) or _NOTHING, parts)
        case Named(type_name, content):
            parts.append(_NAMED + encoding.prefixed(type_name.encode()))
            _append(content, without, parts)
        case scalar:
            parts.append(encoding.prefixed(scalar_key(scalar)))
