"""Parses and formats durations and byte sizes (such as ``24h`` and ``20GiB``), and formats times in UTC."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Final

_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_BYTES: Final = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_TEXT: Final = re.compile(r"([0-9]{1,19})(\s*)([A-Za-z]*)")
_LONGEST_MS: Final = 36_500 * _MS["d"]
_LARGEST_BYTES: Final = 1 << 60
_YEAR_9999_MS: Final = 253_402_300_799_999

DURATION_PATTERN: Final = r"^[0-9]{1,19}(ms|s|m|h|d)$"
SIZE_PATTERN: Final = r"^[0-9]{1,19}(B|KiB|MiB|GiB|TiB)$"


def parse_duration(text: str, *, short: bool = False) -> int:
    """Parse a duration such as ``15m``, and return milliseconds. Raises ValueError with a message for the user.

    If the text is a number of one or two digits without a unit, the error suggests seconds (with ``short``) or hours.
    """
    # Without a unit, 24 probably means hours, and 500 probably means milliseconds.
    few = ("s", "ms") if short else ("h", "m")
    likely, other = ("ms", "s") if len(text) > 2 else few  # noqa: PLR2004 - two digits
    value_ms = _quantity(text, _MS, likely, other)
    if value_ms > _LONGEST_MS:
        raise ValueError(f'"{text}" is longer than 100 years; write at most "36500d"')
    return value_ms


def parse_size(text: str) -> int:
    """Parse a size such as ``20GiB``, and return bytes. Raises ValueError with a message for the user."""
    value_bytes = _quantity(text, _BYTES, "GiB", "MiB")
    if value_bytes > _LARGEST_BYTES:
        raise ValueError(f'"{text}" is more than a disk holds; write at most "1048576TiB"')
    return value_bytes


def format_duration(value_ms: int) -> str:
    """Return a duration as a whole number of the largest unit that divides it, such as ``15m``."""
    return _in_largest_unit(value_ms, _MS) if value_ms else "0s"


def format_size(value_bytes: int) -> str:
    """Return a size as a whole number of the largest unit that divides it, such as ``20GiB``."""
    return _in_largest_unit(value_bytes, _BYTES) if value_bytes else "0B"


def _in_largest_unit(value: int, units: dict[str, int]) -> str:
    unit = next(unit for unit in reversed(units) if value % units[unit] == 0)
    return f"{value // units[unit]}{unit}"


def instant(time_ms: int) -> str:
    """Return a time as an RFC 3339 string in UTC, with milliseconds only if they are not 0.

    A time before 1970 or after 9999 is returned as a number of milliseconds, such as ``-1 ms``.
    """
    if not 0 <= time_ms <= _YEAR_9999_MS:
        return f"{time_ms} ms"
    moment = datetime.fromtimestamp(time_ms // 1000, UTC)
    fraction = f".{time_ms % 1000:03}" if time_ms % 1000 else ""
    return f"{moment:%Y-%m-%dT%H:%M:%S}{fraction}Z"


def _quantity(text: str, units: dict[str, int], likely: str, other: str) -> int:
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ValueError(f'"{text}" is not a whole number and a unit; write for example "15{other}"')
    number, space, unit = match.groups()
    if not unit:
        raise ValueError(f'"{text}" has no unit; write "{number}{likely}" or "{number}{other}"')
    if unit not in units:
        near = next((known for known in units if known.lower() == unit.lower()), None)
        remedy = f'write "{number}{near}"' if near else f"the units are {', '.join(units)}"
        raise ValueError(f'"{text}" has the unknown unit "{unit}"; {remedy}')
    if space:
        raise ValueError(f'"{text}" contains a space; write "{number}{unit}"')
    return int(number) * units[unit]


def counted(count: int, noun: str, plural: str = "s") -> str:
    """Return a count with its noun, such as ``1 record`` or ``1,204 records``. ``plural`` is the plural suffix."""
    return f"{count:,} {noun}{'' if count == 1 else plural}"
