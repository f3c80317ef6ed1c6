"""The other workers of the group: which partitions they have, and where they can be asked.

Each member tells an address when it joins, and the assignment tells all of them to everybody: Faust's metadata does
what `application.server` does in Kafka Streams (KIP-67). It is as old as the last assignment: a worker that died since
is found out by asking it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, cast

from yarl import URL

from dedup.glance import Peer

if TYPE_CHECKING:
    from faust.assignor.partition_assignor import PartitionAssignor

    from dedup.worker.app import DedupApp

NOWHERE: Final = "no-pages.invalid"
"""The host of a worker without pages: a name that is promised never to exist (RFC 2606)."""


def identity(worker_id: str | None, url: str | None) -> str:
    """Return what a worker is called in the group: where its pages are, and its id, so that no two are equal."""
    return str(URL(url or f"http://{NOWHERE}").with_fragment(worker_id))


def peers_of(app: DedupApp) -> tuple[Peer, ...]:
    """Return the members of the group, by name; none before the first assignment."""
    partitions: defaultdict[str, set[tuple[str, int]]] = defaultdict(set)
    assignor = cast("PartitionAssignor", app.assignor)
    for spread in (assignor.changelog_distribution, assignor.external_topic_distribution):
        for name, by_topic in spread.items():
            tasks = partitions[name]
            tasks.update((topic, number) for topic in by_topic for number in by_topic[topic])
    own = str(app.conf.canonical_url)
    feeding = app.feeding_topics
    peers = [
        _peer(name, tuple(sorted(task for task in tasks if task[0] in feeding)), here=name == own)
        for name, tasks in partitions.items()
    ]
    return tuple(sorted(peers, key=lambda peer: peer.worker))


def _peer(name: str, partitions: tuple[tuple[str, int], ...], *, here: bool) -> Peer:
    url = URL(name)
    # A worker of a release without pages for others has no fragment.
    address = None if url.host == NOWHERE or not url.fragment else str(url.with_fragment(None)).rstrip("/")
    return Peer(url.fragment or url.host or name, address, partitions, here)
