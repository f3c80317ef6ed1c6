"""Implements `dedup status` and `dedup lookup`, with data from the brokers and from the workers."""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import typer
from rich.console import Console, RenderableType
from rich.console import Group as Lines
from rich.live import Live
from rich.table import Table

from dedup.errors import DedupError, Problem, SettingsError
from dedup.kafka.client import KafkaWire
from dedup.kafka.topic_admin import Admin, Group
from dedup.kafka.wire import NoAnswer, TopicPartition
from dedup.quantities import instant
from dedup.worker.layout import read_layout
from dedup.worker.offsets import bounds_of, committed_offset
from dedup.worker.topics import topic_names

if TYPE_CHECKING:
    from dedup.kafka.topic_admin import GroupMember, Topic
    from dedup.settings import Settings
    from dedup.topology.model import Topology

WATCH_S: Final = 2.0
PATIENCE_S: Final = 5.0
"""Timeout of a request to a worker."""
_FROM_WORKER: Final = (
    "state",
    "restore_remaining",
    "restore_total",
    "state_ids",
    "state_bytes",
    "state_max_bytes",
    "verdicts",
    "seconds_since_commit",
)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object, **__: object) -> None:
        """Return no new request, so that the redirect becomes an error."""


_OPENER: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)
"""Opens URLs without redirects or proxies, so that only the named address gets the token."""


class NotReached(DedupError):
    """No worker responds at the given URL."""


async def survey(topology: Topology, wire: KafkaWire, admin: Admin) -> dict[str, Any]:
    """Return what the brokers know about the consumer group, topics, and tasks of a topology."""
    names = topic_names(topology)
    have = await admin.topics(names)
    members = await Group(wire, topology.name).members()
    owners = {partition: member.worker_id for member in members for partition in member.partitions}
    kinds = {} if topology.direct else {"repartition": topology.source.topics}
    feedings = [
        (kind, TopicPartition(topic, partition))
        for kind, topics in {**kinds, "dedup": topology.feeding_topics}.items()
        for topic in topics
        if topic in have
        for partition in range(have[topic].partitions)
    ]
    changelog = have.get(topology.changelog_topic)
    tasks = []
    for kind, feeding in feedings:
        begin = end = None
        if kind == "dedup" and changelog is not None and feeding.partition < changelog.partitions:
            kept = await bounds_of(wire, TopicPartition(changelog.name, feeding.partition))
            begin, end = kept.start, kept.end
        known = await _progress(topology, wire, feeding)
        known |= {"changelog_begin": begin, "changelog_end": end}
        tasks.append({"task": kind, **feeding._asdict(), "owner": owners.get(feeding), **known})
    size = (await read_layout(wire, topology)).partitions
    return {
        "topology": topology.name,
        "partitions_in_a_transaction": size,
        "attention": _idle(topology, have, members, size),
        "members": [
            {"worker": each.worker_id, "host": each.host, "partitions": [f"{t}/{p}" for t, p in each.partitions]}
            for each in members
        ],
        "missing_topics": [name for name in names if name not in have],
        "tasks": tasks,
    }


async def idle_now(topology: Topology, wire: KafkaWire, admin: Admin) -> list[str]:
    """Return the sentence of `idle_workers` about the workers that are in the group now."""
    members = await Group(wire, topology.name).members()
    have = await admin.topics(topic_names(topology))
    return _idle(topology, have, members, (await read_layout(wire, topology)).partitions)


def _idle(topology: Topology, have: Mapping[str, Topic], members: list[GroupMember], size: int) -> list[str]:
    # A standby is assigned as a partition of the changelog, but its worker may judge nothing.
    read = {*topology.source.topics, *topology.feeding_topics}
    held = {each.worker_id: sum(place.topic in read for place in each.partitions) for each in members}
    counts = (have[topic].partitions for topic in topology.feeding_topics if topic in have)
    return idle_workers(held, size, max(counts, default=0))


def idle_workers(held: Mapping[str, int], size: int, partitions: int) -> list[str]:
    """Return a sentence if workers have nothing to do although others have; ``held`` counts each worker's partitions.

    ``size`` partitions share a transaction, and the topic that is judged has ``partitions``.
    """
    idle = sorted(worker for worker, count in held.items() if not count)
    if not idle or len(idle) == len(held):
        return []  # with no assignment at all, the group is rebalancing
    who = f"{len(idle)} of {len(held)} workers have no partition ({', '.join(idle)})"
    wanted = max(1, partitions // len(held))
    if wanted < size:
        remedy = f"set it to {wanted} or less, stop all workers, and run `dedup layout --apply`"
        return [f"{who}, because transactions.partitions is {size}: {remedy}"]
    return [f"{who}: there are {partitions} partitions in groups of {size}, so fewer workers are enough"]


async def _progress(topology: Topology, wire: KafkaWire, feeding: TopicPartition) -> dict[str, int | None]:
    bounds = await bounds_of(wire, feeding)
    committed = await committed_offset(wire, topology.name, feeding, stable=False)
    # A recreated topic may end before the committed offset.
    lag = max(0, bounds.end - max(bounds.start, committed or 0))
    if lag and committed is not None and await _only_markers(wire, feeding, max(bounds.start, committed)):
        lag = 0
    return {"committed": committed, "end": bounds.end, "lag": lag}


async def _only_markers(wire: KafkaWire, feeding: TopicPartition, offset: int) -> bool:
    """Tell whether an offset is followed only by transaction markers and aborted records, which no task sees."""
    try:
        found = await wire.fetch(feeding, offset, max_bytes=1, wait_ms=0)
    except NoAnswer:
        return False
    return not found.records and found.next_offset >= found.high_watermark


def default_urls(settings: Settings) -> list[str]:
    """Return a list with the URL of a worker's web pages, or an empty list if the settings define no URL."""
    web = settings.web
    if not web.enabled or web.port == 0:
        return []
    # A worker that listens on all addresses also listens on loopback.
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(web.host.strip("[]"), web.host.strip("[]"))  # noqa: S104
    return [f"http://{f'[{host}]' if ':' in host else host}:{web.port}"]


def ask(url: str, page: str, settings: Settings) -> dict[str, Any]:
    """Return a worker's page as JSON. Raises NotReached if no worker responds, and SettingsError for a bad request."""
    if not url.startswith(("http://", "https://")):
        raise SettingsError([Problem("--url", f'"{url}" is not the address of a worker; write http://127.0.0.1:6066')])
    headers = {} if settings.web.token is None else {"Authorization": f"Bearer {settings.web.token.get_secret_value()}"}
    request = urllib.request.Request(url.rstrip("/") + page, headers=headers)  # noqa: S310  # checked above
    try:
        with _OPENER.open(request, timeout=PATIENCE_S) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except urllib.error.HTTPError as error:
        with error:
            if error.code == HTTPStatus.BAD_REQUEST:
                raise SettingsError([Problem("ID", str(json.load(error).get("error", "is not valid")))]) from error
            remedy = (
                "set web.token to the worker's"
                if error.code == HTTPStatus.UNAUTHORIZED
                else "is it a worker of this release?"
            )
            raise NotReached(f"{url} answered {error.code} {error.reason}; {remedy}") from error
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", error)
        raise NotReached(f"no worker answers at {url} ({why}). Start one, or name its pages with --url.") from error


def ask_fleet(topology: str, urls: Sequence[str], settings: Settings) -> list[dict[str, Any]]:
    """Return the status of all workers of a topology that respond at ``urls`` or at URLs that these workers report."""
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
            # The key is the worker's name, because two addresses may belong to the same worker.
            found.setdefault(seen["worker"], seen)
            left += [peer["url"] for peer in seen.get("workers", []) if peer["url"] and not peer["here"]]
    return list(found.values())


def ask_id(topology: Topology, tracking_id: str, urls: Sequence[str], settings: Settings) -> dict[str, Any]:
    """Ask the workers at ``urls`` about a tracking ID, and merge their answers. Raises NotReached."""
    if not urls:
        raise NotReached("web.port is 0 or web is off, so no worker's address is known. Name one with --url.")
    together: dict[str, Any] = {"topology": topology.name, "id": tracking_id}
    together |= {"sightings": [], "asked": [], "unreached": []}
    for url in urls:
        found = ask(url, "/api/ids/" + urllib.parse.quote(tracking_id, safe=""), settings)
        if found["topology"] != topology.name:
            raise NotReached(f"{url} is a worker of {found['topology']!r}, not of {topology.name!r}. Name another.")
        # Each worker asks the owners of partitions that it does not hold, so several workers may report the same
        # sighting.
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
    """Yield the merged answers about a tracking ID as lines of text."""
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


def looked(surveyed: dict[str, Any], pages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Combine what the brokers and the workers report about the tasks into the JSON of `dedup status`."""
    said = {
        (task["task"], task["topic"], task["partition"]): {**task, "owner": page["worker"]}
        for page in pages
        for task in page["tasks"]
    }
    tasks = []
    for task in surveyed["tasks"]:
        known = said.get((task["task"], task["topic"], task["partition"]), {})
        # A stream on Spark is not a member of the group.
        owner = task["owner"] or known.get("owner")
        tasks.append({**task, "owner": owner, **{key: known.get(key) for key in _FROM_WORKER}})
    return {
        **surveyed,
        "lag": sum(task["lag"] for task in tasks),
        "dead_letters": _summed(pages, "dead_letters"),
        "other_formats": _summed(pages, "other_formats"),
        "alerts": [
            *surveyed.get("attention", ()),
            *(f"{page['worker']}: {page['alert']}" for page in pages if page.get("alert")),
        ],
        "workers_that_answered": [page["worker"] for page in pages],
        "tasks": tasks,
    }


def _summed(pages: Sequence[dict[str, Any]], name: str) -> dict[str, int]:
    found: Counter[str] = Counter()
    for page in pages:
        found.update(page.get(name) or {})  # workers of older versions may lack some counters
    return dict(found.most_common())


@contextlib.contextmanager
def showing(*, watch: bool, as_json: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield a function that prints a status or, with --watch on a terminal, refreshes it in place."""
    console = Console(highlight=False)
    if as_json:
        yield lambda seen: typer.echo(json.dumps(seen, indent=None if watch else 2))
    elif watch and console.is_terminal:
        # `screen` is the terminal's alternate screen: the previous contents come back at the end.
        with Live(console=console, screen=True, auto_refresh=False) as live:
            yield lambda seen: live.update(table(seen), refresh=True)
    else:
        yield lambda seen: console.print(table(seen))


def table(seen: dict[str, Any]) -> RenderableType:
    """Return the status as a table for a terminal."""
    found = Table("task", "partition", "owner", box=None, pad_edge=False, header_style="bold")
    for name in ("committed", "end", "lag", "changelog", "state", "IDs", "bytes", "restoring", "duplicates"):
        found.add_column(name, justify="right")
    for task in seen["tasks"]:
        begin, end = task["changelog_begin"], task["changelog_end"]
        found.add_row(
            task["task"],
            f"{task['topic']}/{task['partition']}",
            task["owner"] or "nobody",
            _number(task["committed"]),
            _number(task["end"]),
            _number(task["lag"]),
            _number(None if end is None else end - begin),
            task["state"] or "-",
            _number(task["state_ids"]),
            _bytes(task),
            _restoring(task),
            _share(task["verdicts"]),
        )
    members = [f"{each['worker']} at {each['host']}" for each in seen["members"]]
    workers = ", ".join(members or seen["workers_that_answered"]) or "none"
    lines: list[RenderableType] = [f"{seen['topology']}: lag {seen['lag']:,}; workers: {workers}", found]
    for name, what in (("dead_letters", "dead letters"), ("other_formats", "of them in a format other than JSON")):
        if seen[name]:
            counts = ", ".join(f"{count:,} {reason}" for reason, count in seen[name].items())
            lines.append(f"{what}: {counts}, since the responding workers started")
    lines += [f"attention: {alert}" for alert in seen["alerts"]]
    if seen["missing_topics"]:
        lines.append(f"missing topics: {', '.join(seen['missing_topics'])}; `dedup apply` creates them")
    return Lines(*lines)


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _restoring(task: dict[str, Any]) -> str:
    left, total = task["restore_remaining"], task["restore_total"]
    if task["state"] != "restoring" or left is None:
        return "-"
    return f"{1 - left / total:.0%}, {left:,} left" if total else "starting"


def _bytes(task: dict[str, Any]) -> str:
    size, most = task["state_bytes"], task["state_max_bytes"]
    return _number(size) if size is None or not most else f"{size:,} ({size / most:.0%} of its limit)"


def _share(verdicts: dict[str, int] | None) -> str:
    counts = Counter(verdicts or {})
    judged = counts.total() - counts["repartitioned"]
    return f"{counts['duplicate'] / judged:.1%}" if judged else "-"
