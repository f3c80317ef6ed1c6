"""What takes IDs, times and fingerprints from records, as a topology says: one for every engine and the proof."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dedup.core.extract import Extractor, compile_extractor

if TYPE_CHECKING:
    from dedup.topology.model import Topology


def extractor_of(topology: Topology) -> Extractor:
    """Return the extractor; payloads are fingerprinted only where the topology compares them."""
    return compile_extractor(
        topology.tracking_id,
        topology.event_time,
        fmt=topology.source.format,
        fingerprint=topology.fingerprints_wanted,
        fingerprint_exclude=topology.fingerprint_exclude,
    )
