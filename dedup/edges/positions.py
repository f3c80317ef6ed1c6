"""How far a source was read, kept in a compacted topic and written in the transaction of the records themselves.

As in Kafka Connect's exactly-once sources (KIP-618), but the topic is one source's own, and each transaction also says
who wrote it and its number: after a commit whose answer was lost, the number tells whether it happened.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from dedup.errors import StateIncompatible
from dedup.session.wire import NoAnswer, TopicPartition, Wire
from dedup.worker.starting import bounds_of

OWNER_KEY: Final = b"owner"
POSITION: Final = b"at:"
FETCH_BYTES: Final = 4 << 20
WAIT_MS: Final = 100
PAUSE_MS: Final = 50
TOPIC_CONFIGS: Final[Mapping[str, str]] = {
    "cleanup.policy": "compact",
    # Only closed segments are compacted, and the whole topic is read at every start.
    "segment.bytes": "10485760",
    "retention.ms": "-1",
}


class Owner(msgspec.Struct, frozen=True):
    """Who wrote a transaction, and which of its own it was."""

    run: str
    """Of one process; another one has another."""
    transaction: int


@dataclass(slots=True)
class Positions:
    """What the topic holds up to an offset."""

    owner: Owner | None = None
    values: dict[str, bytes] = field(default_factory=dict)
    """By the names the source gives its parts."""
    read_to: int = 0


async def read_positions(wire: Wire, topic: str, known: Positions | None = None, *, stable: bool = False) -> Positions:
    """Return all positions that are committed, going on from what is known.

    To be called in an epoch of one's own: then nothing older is on its way. The end is the high watermark: at the last
    stable offset another writer's open transaction could hide our committed records. ``stable``: what an open
    transaction hides is not waited for; it may be one's own.
    """
    place = TopicPartition(topic, 0)
    found = Positions() if known is None else Positions(known.owner, dict(known.values), known.read_to)
    bounds = await bounds_of(wire, place)
    if found.read_to > bounds.end:
        raise StateIncompatible(
            f"topic {topic!r} ends at offset {bounds.end}, but it was read up to {found.read_to} before: it was "
            f"deleted and made anew. Nothing was sent. Bring it back; without it the source would be sent again."
        )
    found.read_to = max(found.read_to, bounds.start)
    while found.read_to < bounds.end:
        try:
            fetched = await wire.fetch(place, found.read_to, max_bytes=FETCH_BYTES, wait_ms=WAIT_MS)
        except NoAnswer:
            await wire.pause(PAUSE_MS)
            continue
        for key, value in zip(fetched.keys, fetched.values, strict=True):
            _take(found, topic, key or b"", value)
        found.read_to = fetched.next_offset
        if stable and found.read_to >= fetched.last_stable_offset:
            break
    return found


def _take(found: Positions, topic: str, key: bytes, value: bytes | None) -> None:
    if key == OWNER_KEY and value is not None:
        found.owner = msgspec.json.decode(value, type=Owner)
    elif key.startswith(POSITION):
        name = key.removeprefix(POSITION).decode()
        if value is None:
            found.values.pop(name, None)
        else:
            found.values[name] = value
    else:
        raise StateIncompatible(
            f"topic {topic!r} holds a record with the key {key[:40]!r}, which this program did not write. "
            f"Nothing was sent. Give the source another name, or delete that topic if it is nobody's."
        )
