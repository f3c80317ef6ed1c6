"""The pages of running workers, asked by commands."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from dedup.cli.trial import instant
from dedup.errors import DedupError, Problem, SettingsError

if TYPE_CHECKING:
    from dedup.settings import Settings
    from dedup.topology.model import Topology

PATIENCE_S: Final = 5.0
BAD_REQUEST: Final = 400
UNAUTHORIZED: Final = 401


class NotReached(DedupError):
    """No worker answers at an address."""


def default_urls(settings: Settings) -> list[str]:
    """Return where a worker of this config has its pages; nothing where the port is any free one."""
    web = settings.web
    if not web.enabled or web.port == 0:
        return []
    # A worker that listens everywhere also does on loopback.
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(web.host.strip("[]"), web.host.strip("[]"))  # noqa: S104
    return [f"http://{f'[{host}]' if ':' in host else host}:{web.port}"]


def ask(url: str, page: str, settings: Settings) -> dict[str, Any]:
    """Return a page's JSON. Raises NotReached, or SettingsError for a question that has no answer."""
    if not url.startswith(("http://", "https://")):
        raise SettingsError([Problem("--url", f'"{url}" is no address of a worker; write http://127.0.0.1:6066')])
    headers = {} if settings.web.token is None else {"Authorization": f"Bearer {settings.web.token.reveal()}"}
    request = urllib.request.Request(url.rstrip("/") + page, headers=headers)  # noqa: S310  # checked above
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:  # noqa: S310
            found: dict[str, Any] = json.load(answer)
            return found
    except urllib.error.HTTPError as error:
        if error.code == BAD_REQUEST:
            raise SettingsError([Problem("ID", str(json.load(error).get("error", "is none")))]) from error
        remedy = "set web.token to the worker's" if error.code == UNAUTHORIZED else "is it a worker of this release?"
        raise NotReached(f"{url} answered {error.code} {error.reason}; {remedy}") from error
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", error)
        raise NotReached(f"no worker answers at {url} ({why}). Start one, or name its pages with --url.") from error


def ask_fleet(topology: str, urls: Sequence[str], settings: Settings) -> list[dict[str, Any]]:
    """Return what the reachable workers of a topology say of themselves: those named, and those that they know of."""
    left, asked, found = list(urls), set[str](), dict[str, dict[str, Any]]()
    while left:
        url = left.pop(0).rstrip("/")
        if url in asked:
            continue
        asked.add(url)
        try:
            seen = ask(url, "/api/status", settings)
        except NotReached:
            continue
        if seen.get("topology") == topology:
            # By name: two addresses may be the same worker's.
            found.setdefault(seen["worker"], seen)
            left += [peer["url"] for peer in seen.get("workers", []) if peer["url"] and not peer["here"]]
    return list(found.values())


def ask_id(topology: Topology, tracking_id: str, urls: Sequence[str], settings: Settings) -> dict[str, Any]:
    """Return what the workers know of an ID, put together. Raises NotReached if one does not answer."""
    if not urls:
        raise NotReached("web.port is 0 or web is off, so where a worker listens is not known. Name it with --url.")
    together: dict[str, Any] = {
        "topology": topology.name,
        "id": tracking_id,
        "sightings": [],
        "asked": [],
        "unreached": [],
    }
    for url in urls:
        found = ask(url, "/api/ids/" + urllib.parse.quote(tracking_id, safe=""), settings)
        if found["topology"] != topology.name:
            raise NotReached(f"{url} is a worker of {found['topology']!r}, not of {topology.name!r}. Name another.")
        # Each worker asks the owners of what it does not have, so several may tell of one sighting.
        together["sightings"] += [seen for seen in found["sightings"] if seen not in together["sightings"]]
        together["asked"] = sorted({*together["asked"], *found["asked"]})
        together["partitions"] = max(found["partitions"], together.get("partitions", 0))
        together["belongs_to"] = found["belongs_to"] if found["partitions"] else together.get("belongs_to")
        together["unreached"] += found.get("unreached", [])
    known = set(together["asked"])
    if together["partitions"]:
        together["unreached"] = [row for row in together["unreached"] if not set(row["partitions"]) <= known]
    return together


def in_words(found: dict[str, Any]) -> Iterator[str]:
    """Yield what was found as sentences."""
    for seen in found["sightings"]:
        first, until = instant(seen["first_ms"]), instant(seen["guarded_until_ms"])
        extended = "" if seen["last_ms"] == seen["first_ms"] else f", last at {instant(seen['last_ms'])}"
        guarded = f"guarded until {until} of event time" if seen.get("live", True) else f"was guarded until {until}"
        yield f"seen {first}{extended} in {seen['source']}; {guarded}"
        if seen.get("went"):
            yield f"    forwarded to {seen['went']}; known to worker {seen['worker']}, partition {seen['partition']}"
    for row in found.get("unreached", []):
        who = "" if row["worker"] is None else f"worker {row['worker']}: "
        which = f"partitions {', '.join(map(str, row['partitions']))}" if row["partitions"] else "all partitions"
        yield f"not asked: {which} ({who}{row['why']})"
    if found["sightings"] or not found["partitions"]:
        return
    asked, count = found["asked"], found["partitions"]
    home = found["belongs_to"]
    if (home is None and len(asked) == count) or home in asked:
        yield "not known: never seen, or its sighting has expired"
        return
    where = f"partition {home}" if home is not None else f"one of {count} partitions"
    yield f"not known to this worker, which has {asked or 'none'}; the ID is in {where}. Ask the others with --url."
