"""What may go wrong with each call of a simulated process, by the kinds of fault that a scenario allows."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from tests.simulation.scenario import Fault

READS = frozenset({"OffsetFetch", "ListOffsets", "Fetch", "Metadata", "Heartbeat"})
LOCAL = frozenset({"Poll", "Timer"})
ENDS = frozenset({"EndTxn", "InitProducerId"})
REBALANCES = ("rebalance, old owner goes on", "rebalance, old owner drains")
CLOCKS = ("crash, clock a day ahead", "crash, clock a day back")
GROWS = "source grows"
REGROUPED = "the layout changes, and another worker starts"
CHANGES = ("source made again", "source gets a partition", "frozen through a reset")
"""What may happen to the topics of a running worker, at any moment: it must commit nothing of what comes after."""


WRITES_WAYS: Mapping[Fault, tuple[str, ...]] = {
    "crash": ("crash before", "crash after"),
    "wipe": ("crash and wipe",),
    "stale": ("crash and old copy",),
    "lost": ("done, answer lost", "not done, answer lost"),
    "late": ("done late, no answer", "crash, done late"),
    "expire": ("transaction timed out",),
    "rebalance": REBALANCES,
}
READS_WAYS: Mapping[Fault, tuple[str, ...]] = {"crash": ("crash before",), "lost": ("not done, answer lost",)}
LOCAL_WAYS: Mapping[Fault, tuple[str, ...]] = {"crash": ("crash before",), "rebalance": REBALANCES}
SETTLED_WAYS: Mapping[Fault, tuple[str, ...]] = {"clock": CLOCKS, "grow": (GROWS,)}
"""What may happen once there is a committed stream time: before, a clock a day back makes dead letters of all, rightly."""


@lru_cache(maxsize=1_000)
def ways(kinds: tuple[Fault, ...], name: str, *, writes: bool, again: bool) -> tuple[str, ...]:
    """Return what may go wrong with a call."""
    table = WRITES_WAYS if writes else READS_WAYS if name in READS else LOCAL_WAYS if name in LOCAL else {}
    found = [way for kind in kinds for way in table.get(kind, ())]
    if again and "again" in kinds:
        found.append("put off")
    if name in ENDS and "markers" in kinds:
        found.append("markers late")
    if "change" in kinds:
        found += CHANGES
    if "regroup" in kinds:
        found.append(REGROUPED)
    return tuple(f"{name} {way}" for way in found)
