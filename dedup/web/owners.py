"""One answer for an ID from all who may know it: this worker, and the owners of the partitions it does not have.

Owners are asked for their own state only, so a question never travels further than one step. What an owner does not
answer is told, never left out: "not known" is said only where every partition that may hold the ID was asked.
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

from dedup.glance import LookedUp, Peer

if TYPE_CHECKING:
    from dedup.settings import Secret

PATIENCE_S: Final = 3.0
MOST_ANSWER_BYTES: Final = 1 << 20
OK: Final = 200


async def ask_owners(own: LookedUp, peers: Sequence[Peer], token: Secret | None) -> dict[str, Any]:
    """Return what this worker and the owners of the other partitions know of an ID, as plain data."""
    whole = _plain(own)
    missing = set(own.candidates) - set(own.asked)
    others = [(peer, numbers) for peer in peers if not peer.here and (numbers := _of(peer, own) & missing)]
    headers = {} if token is None else {"Authorization": f"Bearer {token.reveal()}"}
    if others:
        # No redirect is followed and no proxy asked: the token goes to the group's members only.
        async with ClientSession(timeout=ClientTimeout(total=PATIENCE_S), headers=headers) as session:
            answers = await asyncio.gather(*(_ask(session, peer, own) for peer, _ in others))
        for (peer, numbers), answer in zip(others, answers, strict=True):
            if isinstance(answer, str):
                whole["unreached"].append(
                    {"worker": peer.worker, "url": peer.url, "partitions": sorted(numbers), "why": answer}
                )
            else:
                whole["sightings"] += [{**seen, "worker": peer.worker} for seen in answer["sightings"]]
                whole["asked"] += answer["asked"]
    named = {number for row in whole["unreached"] for number in row["partitions"]}
    nobody = sorted(missing - set(whole["asked"]) - named)
    if nobody:
        why = "nobody has them: a rebalance is going on, or they are restored"
        whole["unreached"].append({"worker": None, "url": None, "partitions": nobody, "why": why})
    if not own.partitions:
        why = "no assignment is in force: the worker is starting, or a rebalance is going on"
        whole["unreached"].append({"worker": None, "url": None, "partitions": [], "why": why})
    whole["asked"] = sorted(set(whole["asked"]))
    return whole


def _plain(own: LookedUp) -> dict[str, Any]:
    found = asdict(own)
    found["sightings"] = [{**seen, "worker": own.worker} for seen in found["sightings"]]
    return {**found, "asked": list(own.asked), "candidates": list(own.candidates), "unreached": []}


def _of(peer: Peer, own: LookedUp) -> set[int]:
    """Return the partitions of this peer's dedup tasks; those of repartition tasks hold no state."""
    return {number for topic, number in peer.partitions if topic in own.feeding_topics}


async def _ask(session: ClientSession, peer: Peer, own: LookedUp) -> dict[str, Any] | str:
    """Return an owner's answer, or why there is none."""
    if peer.url is None:
        return "it has no pages"
    # The ID is encoded whole: a slash in it is no path.
    url = f"{peer.url}/api/ids/{quote(own.id, safe='')}?here=1"
    try:
        async with session.get(URL(url, encoded=True), allow_redirects=False) as answer:
            if answer.status != OK:
                return f"it answered {answer.status}"
            if (answer.content_length or 0) > MOST_ANSWER_BYTES:
                return "its answer is too long"
            found: Any = json.loads(await answer.read())
    except TimeoutError:
        return f"no answer in {PATIENCE_S:g} s"
    except (ClientError, OSError, ValueError) as error:
        return f"it is not reached ({type(error).__name__})"
    return found if _fits(found, own.topology) else "it is a worker of another topology or release"


def _fits(found: object, topology: str) -> bool:
    return isinstance(found, dict) and found.get("topology") == topology and {"sightings", "asked"} <= found.keys()
