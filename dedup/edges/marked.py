"""A source whose own records say where a transaction ends: what comes before a marker is visible together, or not yet.

As `transaction.boundary=connector` of KIP-618, but the marker is a member of a record, which is sent as any other.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import orjson

from dedup.edges.rows import look_up
from dedup.edges.source import Dead, Found, Source
from dedup.errors import StateIncompatible
from dedup.topology.ingest import Marker

MOST_RECORDS: Final = 500_000
MOST_BYTES: Final = 256 << 20
"""Between two markers: they are held in memory."""
log: Final = logging.getLogger(__name__)


@dataclass(slots=True)
class _Pending:
    """Records of one part whose marker has not come."""

    values: list[bytes] = field(default_factory=list)
    places: list[int | str] = field(default_factory=list)
    dead: list[Dead] = field(default_factory=list)
    size_bytes: int = 0

    def __bool__(self) -> bool:
        return bool(self.values or self.dead)

    def add(self, found: Found, first: int, end: int | None = None) -> None:
        """Records from row ``first`` up to ``end`` are here, too, and the dead ones between them."""
        # A dead one before the row after a marker comes after that marker.
        last = len(found.values) if end is None else end - 1
        self.dead += [each for each in found.dead if first <= each.row <= last]
        values = found.values[first:end]
        self.size_bytes += sum(map(len, values))
        self.values += values
        self.places += found.places[first:end]


class Marked:
    """See `Source`: each piece is what is sent in one transaction."""

    def __init__(self, source: Source, marker: Marker) -> None:
        self._source: Final = source
        self._marker: Final = marker
        self._pending: Final[dict[str, _Pending]] = {}
        self._ready: Final[deque[Found]] = deque()

    def restore(self, positions: Mapping[str, bytes]) -> None:
        """See `Source`."""
        self._pending.clear()
        self._ready.clear()
        self._source.restore(positions)

    def poll(self) -> Found | None:
        """See `Source`. Raises StateIncompatible where no marker comes."""
        while not self._ready:
            found = self._source.poll()
            if found is None:
                return None
            self._take(found)
        return self._ready.popleft()

    def waiting(self) -> list[str]:
        """See `Source`."""
        return self._source.waiting() + [
            f"{len(pending.values)} records after {pending.places[0]} of {part} wait for their marker"
            for part, pending in self._pending.items()
            if pending.values
        ]

    def close(self) -> None:
        """See `Source`."""
        self._source.close()

    def _take(self, found: Found) -> None:
        pending = self._pending.setdefault(found.part, _Pending())
        if not pending and not found.values and not found.dead:
            self._ready.append(found)  # only a position
            return
        if not found.values and not found.dead:
            text = "%s: after %d records without their marker came blank lines or the end; they are not sent without it"
            log.warning(text, found.part, len(pending.values))
        first = 0
        for row in [row for row, value in enumerate(found.values) if self._ends(value)]:
            pending.add(found, first, row + 1)
            positions = found.after(row)
            self._ready.append(
                Found(found.part, found.prefix, pending.values, pending.places, positions, found.after, pending.dead)
            )
            pending = self._pending[found.part] = _Pending()
            first = row + 1
        pending.add(found, first)
        if len(pending.values) > MOST_RECORDS or pending.size_bytes > MOST_BYTES:
            raise StateIncompatible(
                f"{found.prefix}{pending.places[0]}: no marker among the {len(pending.values):,} records after this "
                f"one. None of them was sent; correct `boundary`, or write markers more often."
            )

    def _ends(self, value: bytes) -> bool:
        try:
            found = look_up(orjson.loads(value), self._marker.path)
        except orjson.JSONDecodeError:
            return False  # a dead letter
        return type(found) is type(self._marker.equals) and found == self._marker.equals
