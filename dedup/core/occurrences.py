"""How often member names occur in joined JSON values that are known to be well-formed.

Each function may say no where yes is true, never the other way: a name that occurs more often than it may is a
repeated member, or only looks like one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

_WORD_BYTES: Final = 4
_MARGIN_BYTES: Final = 2
"""Behind a name there is at least a colon and a brace."""


@dataclass(frozen=True, slots=True)
class Name:
    """A member name that IDs or times are found by."""

    text: str
    depths: tuple[int, ...]
    """How deep in containers it is expected, one entry per place."""

    @property
    def quoted(self) -> bytes:
        """The name as a value holds it, if no character is escaped."""
        return f'"{self.text}"'.encode()


def occurs_at_most(joined: bytes, quoted: bytes, times: int) -> bool:
    """Whether a quoted name occurs no more than this often, anywhere."""
    # Four bytes as one word, compared by the vector unit at each of four offsets, are found in half the time that
    # bytes.count takes. Another name may begin alike; then the count is not good enough.
    if len(quoted) >= _WORD_BYTES:
        word = np.frombuffer(quoted, "<u4", 1)
        found = 0
        for offset in range(_WORD_BYTES):
            words = np.frombuffer(joined, "<u4", (len(joined) - offset) // _WORD_BYTES, offset)
            found += int(np.count_nonzero(words == word))
        if found <= times:
            return True
    return joined.count(quoted) <= times


def occur_in_places(joined: bytes, names: tuple[Name, ...], count: int) -> bool:
    """Whether each name is a member at its depths once per value, and not more; elsewhere it may occur.

    Only for text without backslashes: every quote begins or ends a string.
    """
    text = np.frombuffer(joined, np.uint8)
    quotes = text == ord('"')
    # The parity of the quotes so far: 1 from a string's first quote on, 0 from its last.
    inside = np.cumsum(quotes, dtype=np.uint8) & 1
    outside = inside == 0
    # `[` and `{`, `]` and `}` differ in one bit.
    folded = text | 0x20
    steps = ((folded == ord("{")) & outside).view(np.int8) - ((folded == ord("}")) & outside).view(np.int8)
    depths = np.cumsum(steps, dtype=np.int32)
    openings = np.flatnonzero(quotes & (inside == 1))
    at_depth = depths[openings]
    return all(
        _members_at(text, openings[at_depth == depth], name.quoted) <= name.depths.count(depth) * count
        for name in names
        for depth in set(name.depths)
    )


def _members_at(text: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], quoted: bytes) -> int:
    """Count the strings that begin at these places, equal the name, and may be a member's name."""
    starts = starts[starts < len(text) - len(quoted) - _MARGIN_BYTES]
    for at, char in enumerate(quoted):
        starts = starts[text[starts + at] == char]
    behind = text[starts + len(quoted)]
    # A string before a comma or the end of its container is a value. What follows a blank is not looked for.
    is_value = (behind == ord(",")) | (behind == ord("}")) | (behind == ord("]"))
    return int(np.count_nonzero(~is_value))
