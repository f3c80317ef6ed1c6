"""Complete lines of one growing file, each with the byte it begins at, from any byte on.

A line ends with a line feed; what stands after the last one is not a line yet. A line that no record can hold is read
through without being kept: its length and digest are what a dead letter says of it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate
from typing import Any, Final

CHUNK_BYTES: Final = 1 << 20
HEAD_BYTES: Final = 4096
DIGEST_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class LongLine:
    """A line that is too long for a record."""

    offset: int
    length_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Piece:
    """Lines one after the other, without their line feeds."""

    lines: list[bytes]
    offsets: list[int]
    next_position: int
    long_lines: list[LongLine] = field(default_factory=list)


class LineReader:
    """One open file; a rename does not disturb it."""

    def __init__(self, descriptor: int, position: int, most_bytes: int) -> None:
        self._descriptor: Final = descriptor
        self._most_bytes: Final = most_bytes
        self._position = position
        """Where the first line that was not handed over begins."""
        self._rest = b""
        """What was read of it."""
        self._digest: Any = None
        """Of a line that is too long, as far as it was read; then `_rest` is empty."""
        self._digested_bytes = 0

    @property
    def read_to(self) -> int:
        """The byte after all that was read."""
        return self._position + self._digested_bytes + len(self._rest)

    @property
    def rest_bytes(self) -> int:
        """How much stands after the last line feed."""
        return self._digested_bytes + len(self._rest)

    def read(self) -> Piece | None:
        """Return the next lines; None where no line has become complete. Call again while `read_to` moves."""
        data = os.pread(self._descriptor, CHUNK_BYTES, self.read_to)
        if not data:
            return None
        if self._digest is not None:
            return self._through_long_line(data)
        data = self._rest + data
        end = data.rfind(b"\n")
        if end < 0:
            self._rest = data
            if len(data) > self._most_bytes:
                self._digest, self._digested_bytes, self._rest = blake2b(data, digest_size=DIGEST_BYTES), len(data), b""
            return None
        self._rest = data[end + 1 :]
        return self._piece(data[:end].split(b"\n"))

    def last_line(self) -> Piece | None:
        """Return what stands after the last line feed as a line; None where nothing does."""
        if self._digest is not None:
            return self._end_long_line(b"", feed=0)
        if not self._rest:
            return None
        line, self._rest = self._rest, b""
        return self._piece([line], feed=0)

    def _piece(self, lines: list[bytes], *, feed: int = 1) -> Piece:
        offsets = list(accumulate([len(line) + 1 for line in lines], initial=self._position))
        self._position = offsets.pop() - (1 - feed)
        if max(map(len, lines)) <= self._most_bytes:
            return Piece(lines, offsets, self._position)
        long = [(line, at) for line, at in zip(lines, offsets, strict=True) if len(line) > self._most_bytes]
        kept = [(line, at) for line, at in zip(lines, offsets, strict=True) if len(line) <= self._most_bytes]
        found = [LongLine(at, len(line), blake2b(line, digest_size=DIGEST_BYTES).hexdigest()) for line, at in long]
        return Piece([line for line, _ in kept], [at for _, at in kept], self._position, found)

    def _through_long_line(self, data: bytes) -> Piece | None:
        end = data.find(b"\n")
        if end < 0:
            self._digest.update(data)
            self._digested_bytes += len(data)
            return None
        self._rest = b""
        return self._end_long_line(data[:end], feed=1)

    def _end_long_line(self, last: bytes, *, feed: int) -> Piece:
        self._digest.update(last)
        length = self._digested_bytes + len(last)
        line = LongLine(self._position, length, self._digest.hexdigest())
        self._position += length + feed
        self._digest, self._digested_bytes = None, 0
        return Piece([], [], self._position, [line])


def head_digest(descriptor: int, length_bytes: int) -> str:
    """Return the digest of a file's first bytes, by which it is known again; empty where it is shorter."""
    head = os.pread(descriptor, length_bytes, 0)
    return blake2b(head, digest_size=16).hexdigest() if len(head) == length_bytes else ""
