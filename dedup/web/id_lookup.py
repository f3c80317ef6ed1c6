"""Looks up an ID in this worker's state and asks the owners of the other partitions.

Owners are asked only for their own state, so a request is never forwarded twice. The answer lists the partitions whose
owners could not be asked. An ID is "not known" only if every partition that may contain it was searched.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from aiohttp import ClientError, ClientSession, ClientTimeout
from yarl import URL

from dedup.worker_view import LookedUp, Peer

if TYPE_CHECKING:
    from dedup.settings import Secret

TIMEOUT_S: Final = 3.0
MOST_ANSWER_BYTES: Final = 1 << 20
OK: Final = 200


async def ask_owners(own: LookedUp, peers: Sequence[Peer], token: Secret | None) -> dict[str, Any]:
    """Return what this worker and the owners of the other partitions know about an ID, as plain data.

    ``unreached`` in the result lists the partitions that were not searched, with reasons. No error is raised if a
    worker does not respond.
    """
    asked, unreached = set(own.asked), list[dict[str, Any]]()
    sightings = [{**asdict(seen), "worker": own.worker} for seen in own.sightings]

    def not_asked(why: str, partitions: set[int], worker: str | None = None, url: str | None = None) -> None:
        unreached.append({"worker": worker, "url": url, "partitions": sorted(partitions), "why": why})

    missing = set(own.candidates) - asked
    others = [(peer, numbers) for peer in peers if not peer.here and (numbers := _partitions(peer, own) & missing)]
    headers = {} if token is None else {"Authorization": f"Bearer {token.get_secret_value()}"}
    if others:
        # Without redirects and proxies, only the group's members get the token.
        async with ClientSession(timeout=ClientTimeout(total=TIMEOUT_S), headers=headers) as session:
            answers = await asyncio.gather(*(_ask(session, peer, own) for peer, _ in others))
        for (peer, numbers), answer in zip(others, answers, strict=True):
            if isinstance(answer, str):
                missing -= numbers
                not_asked(answer, numbers, peer.worker, peer.url)
            else:
                sightings += [{**seen, "worker": peer.worker} for seen in answer["sightings"]]
                asked.update(answer["asked"])
    if missing - asked:
        not_asked("nobody has them: a rebalance is in progress, or they are being restored", missing - asked)
    if not own.partitions:
        not_asked("no assignment is in force: the worker is starting, or a rebalance is in progress", set())
    return asdict(own) | {"sightings": sightings, "asked": sorted(asked), "unreached": unreached}


def _partitions(peer: Peer, own: LookedUp) -> set[int]:
    """Return the partitions of this peer's dedup tasks; repartition tasks have no state."""
    return {number for topic, number in peer.partitions if topic in own.feeding_topics}


async def _ask(session: ClientSession, peer: Peer, own: LookedUp) -> dict[str, Any] | str:
    """Return an owner's answer, or the reason why there is none."""
    if peer.url is None:
        return "it serves no pages"
    # Slashes in the ID are also encoded, because they do not separate path segments.
    url = f"{peer.url}/api/ids/{quote(own.id, safe='')}?here=1"
    try:
        async with session.get(URL(url, encoded=True), allow_redirects=False) as answer:
            if answer.status != OK:
                return f"it answered {answer.status}"
            if (answer.content_length or 0) > MOST_ANSWER_BYTES:
                return "its answer is too long"
            found: Any = json.loads(await answer.read())
    except TimeoutError:
        return f"no answer in {TIMEOUT_S:g} s"
    except (ClientError, OSError, ValueError) as error:
        return f"unreachable ({type(error).__name__})"
    if isinstance(found, dict) and found.get("topology") == own.topology and {"sightings", "asked"} <= found.keys():
        return found
    return "it is a worker of another topology or release"
