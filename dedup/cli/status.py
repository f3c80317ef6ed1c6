"""Queries brokers and workers for the data that `dedup status` and `dedup lookup` show."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import typer
from rich.console import Console, RenderableType
from rich.console import Group as Lines
from rich.live import Live

from dedup.cli.inputs import Column, fitted, shortened
from dedup.errors import BrokerUnavailable, DedupError, Problem, SettingsError, StateIncompatible
from dedup.kafka.client import KafkaWire
from dedup.kafka.topic_admin import Admin, Group
from dedup.kafka.wire import NoAnswer, TopicPartition
from dedup.quantities import counted, instant
from dedup.worker.layout import read_layout
from dedup.worker.offsets import RESETTING, bounds_of, committed_offset, committed_position
from dedup.worker.topics import known_names, state_topics, topic_names
from dedup.worker_view import STUCK_S, id_bytes

if TYPE_CHECKING:
    from dedup.kafka.topic_admin import GroupMember, Topic
    from dedup.settings import Settings
    from dedup.topology.model import Topology

WATCH_S: Final = 2.0
_PIPED_COLUMNS: Final = 1_000
RATE_S: Final = 1.0
"""The interval, in seconds, between the two observations from which `dedup status` without --watch computes rates."""
PATIENCE_S: Final = 5.0
"""The timeout of a request to a worker, in seconds."""
LEADER_REMEDY: Final = (
    "start the brokers that hold these partitions; if they run, look in their logs for a failed log directory"
)
_NO_CHANGELOG: Final[dict[str, int | None]] = {"changelog_begin": None, "changelog_end": None}
_FROM_WORKER: Final = (
    "state",
    "restore_remaining",
    "restore_total",
    "state_ids",
    "state_bytes",
    "state_max_bytes",
    "verdicts",
    "filtered",
    "seconds_since_commit",
)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object, **__: object) -> None:
        """Return None to turn the redirect into an error."""


_OTHER_SERVER: Final = "is it a worker of this release? Write https:// if the port expects TLS."
_PAGE_KEYS: Final[Mapping[str, frozenset[str]]] = {
    "status": frozenset({"topology", "worker", "tasks"}),
    "ids": frozenset({"topology", "sightings", "asked", "partitions", "belongs_to"}),
}
"""Maps the name of each API page to the keys that every worker's version of the page has."""
_OPENER: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)
"""Opens URLs without following redirects or using proxies, so that only the requested address gets the token."""


class NotReached(DedupError):
    """Raised if no worker of the topology responds at the given URL."""


class OtherAnswer(NotReached):
    """Raised if the server at the given URL rejects `web.token` or is not a worker of this release."""


async def survey(topology: Topology, wire: KafkaWire, admin: Admin) -> dict[str, Any]:
    """Return the brokers' data about a topology's consumer group, topics, and tasks.

    For a partition without a leader, only the committed offset is known, because no broker serves the partition.
    """
    have = await admin.topics(known_names(topology))
    offline = leaderless(have)
    missing = [name for name in topic_names(topology) if name not in have]
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
    tasks = []
    for kind, feeding in feedings:
        has_leader = feeding.partition not in have[feeding.topic].leaderless
        known = await _progress(topology, wire, feeding, has_leader=has_leader)
        if kind == "dedup":
            known |= await _changelog_bounds(wire, have.get(topology.changelog_topic), feeding.partition)
        owner = owners.get(feeding)
        tasks.append({"task": kind, **feeding._asdict(), "owner": owner, "has_leader": has_leader, **known})
    size = None if topology.layout_topic in offline else (await read_layout(wire, topology)).partitions
    judged = any(task["committed"] is not None for task in tasks)
    return {
        "topology": topology.name,
        "partitions_in_a_transaction": size,
        "attention": [] if size is None else _idle(topology, have, members, size),
        "members": [
            {"worker": each.worker_id, "host": each.host, "partitions": [f"{t}/{p}" for t, p in each.partitions]}
            for each in members
        ],
        "missing_topics": missing,
        "missing_sources": [name for name in missing if name in topology.source.topics],
        "deleted_topics": [name for name in missing if judged and name in state_topics(topology)],
        "leaderless": offline,
        "reset_interrupted": await _reset_interrupted(topology, wire),
        "tasks": tasks,
    }


async def _changelog_bounds(wire: KafkaWire, changelog: Topic | None, partition: int) -> dict[str, int | None]:
    if changelog is None or partition >= changelog.partitions or partition in changelog.leaderless:
        return _NO_CHANGELOG
    kept = await bounds_of(wire, TopicPartition(changelog.name, partition))
    return {"changelog_begin": kept.start, "changelog_end": kept.end}


async def _reset_interrupted(topology: Topology, wire: KafkaWire) -> bool:
    # Workers check the same partition, because a reset finishes with it.
    found = await committed_position(wire, topology.name, TopicPartition(topology.source.topics[0], 0), stable=False)
    return found is not None and found.metadata == RESETTING


def leaderless(have: Mapping[str, Topic]) -> dict[str, list[int]]:
    """Map each topic that has partitions without a leader to the numbers of these partitions."""
    return {name: list(topic.leaderless) for name, topic in sorted(have.items()) if topic.leaderless}


def without_leader(offline: Mapping[str, Sequence[int]]) -> str:
    """Return a clause that names the partitions without a leader."""
    named = "; ".join(f"{topic} {', '.join(map(str, numbers))}" for topic, numbers in offline.items())
    return f"partitions without a leader: {named}"


async def idle_now(topology: Topology, wire: KafkaWire, admin: Admin) -> list[str]:
    """Return a sentence if some current members of the consumer group have no partition (see `idle_workers`)."""
    members = await Group(wire, topology.name).members()
    have = await admin.topics(topic_names(topology))
    return _idle(topology, have, members, (await read_layout(wire, topology)).partitions)


def _idle(topology: Topology, have: Mapping[str, Topic], members: list[GroupMember], size: int) -> list[str]:
    # Changelog partitions do not count: they represent standbys, and a worker that has only standbys judges nothing.
    read = {*topology.source.topics, *topology.feeding_topics}
    held = {each.worker_id: sum(place.topic in read for place in each.partitions) for each in members}
    counts = (have[topic].partitions for topic in topology.feeding_topics if topic in have)
    return idle_workers(held, size, max(counts, default=0))


def idle_workers(held: Mapping[str, int], size: int, partitions: int) -> list[str]:
    """Return a list with one sentence if some workers have partitions and others have none, or else an empty list.

    ``held`` maps each worker to its number of partitions, ``size`` is the number of partitions that share a
    transaction, and ``partitions`` is the partition count of the topic that the dedup tasks read.
    """
    idle = sorted(worker for worker, count in held.items() if not count)
    if not idle or len(idle) == len(held):
        return []  # If no worker has a partition, the group is rebalancing.
    who = f"{len(idle)} of {len(held)} workers have no partition ({', '.join(idle)})"
    wanted = max(1, partitions // len(held))
    if wanted < size:
        remedy = f"set it to {wanted} or less, stop all workers, and run `dedup layout --apply`"
        return [f"{who}, because transactions.partitions is {size}: {remedy}"]
    return [f"{who}: there are {partitions} partitions in groups of {size}, so fewer workers are enough"]


async def _progress(
    topology: Topology, wire: KafkaWire, feeding: TopicPartition, *, has_leader: bool
) -> dict[str, int | None]:
    committed = await committed_offset(wire, topology.name, feeding, stable=False)
    if not has_leader:
        return {"committed": committed, "end": None, "lag": None, "oldest_ms": None, **_NO_CHANGELOG}
    bounds = await bounds_of(wire, feeding)
    position = max(bounds.start, committed or 0)
    # A recreated topic may end before the committed offset.
    lag, oldest_ms = max(0, bounds.end - position), None
    if lag:
        with contextlib.suppress(NoAnswer):
            found = await wire.fetch(feeding, position, max_bytes=1, wait_ms=0)
            oldest_ms = next(iter(found.timestamps_ms), None)
            # Transaction markers and aborted records do not count as lag, because no task sees them.
            if committed is not None and not found.offsets and found.next_offset >= found.high_watermark:
                lag = 0
    return {"committed": committed, "end": bounds.end, "lag": lag, "oldest_ms": oldest_ms, **_NO_CHANGELOG}


def default_urls(settings: Settings) -> list[str]:
    """Return a list with the URL of a worker's web pages, or an empty list if the settings define no URL."""
    web = settings.web
    if not web.enabled or web.port == 0:
        return []
    # A worker that listens on all addresses also listens on loopback.
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(web.host.strip("[]"), web.host.strip("[]"))  # noqa: S104
    return [f"http://{f'[{host}]' if ':' in host else host}:{web.port}"]


def ask(url: str, page: str, settings: Settings) -> dict[str, Any]:
    """Return a worker's page as parsed JSON.

    Raises NotReached if no server responds, OtherAnswer if the response is not a worker's page, and SettingsError for a
    bad URL or ID.
    """
    _refuse_other_address(url)
    headers = {} if settings.web.token is None else {"Authorization": f"Bearer {settings.web.token.get_secret_value()}"}
    request = urllib.request.Request(url.rstrip("/") + page, headers=headers)  # noqa: S310  # checked above
    try:
        with _OPENER.open(request, timeout=PATIENCE_S) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            raise _refusal_of(error, url) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        why = getattr(error, "reason", error)
        raise NotReached(f"no worker answers at {url} ({why}). Start one, or name its pages with --url.") from error
    if not isinstance(found, dict) or not _PAGE_KEYS[page.split("/")[2]] <= found.keys():
        raise OtherAnswer(f"{url} answered, but not with the page {page}; {_OTHER_SERVER}")
    return found


def _refuse_other_address(url: str) -> None:
    """Raise SettingsError unless ``url`` is an HTTP URL with a host and, if it has a port, a valid port."""
    try:
        parts = urllib.parse.urlsplit(url)
        valid = parts.scheme in {"http", "https"} and parts.hostname is not None and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise SettingsError([Problem("--url", f'"{url}" is not the address of a worker; write http://127.0.0.1:6066')])


def _refusal_of(error: urllib.error.HTTPError, url: str) -> DedupError:
    """Return the error for a response that is not 200."""
    if error.code == HTTPStatus.UNAUTHORIZED:
        return OtherAnswer(f"{url} refused the token ({error.code} {error.reason}); set web.token to the worker's")
    if error.code == HTTPStatus.BAD_REQUEST:
        try:
            said = json.load(error)
        except (OSError, http.client.HTTPException, ValueError):
            said = None  # The server is not a worker; for example, it expects TLS.
        if isinstance(said, dict) and isinstance(said.get("error"), str):
            return SettingsError([Problem("ID", said["error"])])
    return OtherAnswer(f"{url} answered {error.code} {error.reason}; {_OTHER_SERVER}")


class Fleet(NamedTuple):
    """The reports of a topology's workers about themselves."""

    pages: list[dict[str, Any]]
    """The status of each worker that responded."""
    refusals: list[str]
    """A sentence for each URL whose server responded with something other than a worker's status."""


def ask_fleet(topology: str, urls: Sequence[str], settings: Settings) -> Fleet:
    """Request the status of all workers of a topology at ``urls`` and at the URLs that these workers report.

    The result omits URLs at which no server responds. Raises SettingsError for a bad URL.
    """
    left, asked, found = list(urls), set[str](), dict[str, dict[str, Any]]()
    refusals: list[str] = []
    while left:
        url = left.pop(0).rstrip("/")
        if url in asked:
            continue
        asked.add(url)
        try:
            seen = ask(url, "/api/status", settings)
        except OtherAnswer as error:
            refusals.append(str(error))
            continue
        except NotReached:
            continue
        if seen["topology"] == topology:
            # The key is the worker's name, because two addresses may belong to the same worker.
            found.setdefault(seen["worker"], seen)
            left += [peer["url"] for peer in seen.get("workers", []) if peer["url"] and not peer["here"]]
    return Fleet(list(found.values()), refusals)


def ask_id(topology: Topology, tracking_id: str, urls: Sequence[str], settings: Settings) -> dict[str, Any]:
    """Ask the worker at each of the ``urls`` about a tracking ID, and merge the answers.

    Raises NotReached if ``urls`` is empty, or if a URL does not belong to a worker of the topology. Raises
    SettingsError if the ID is empty or is not UTF-8.
    """
    if not tracking_id:
        raise SettingsError([Problem("ID", "is empty; name the ID to look up")])
    if not urls:
        raise NotReached("web.port is 0 or web is off, so no worker's address is known. Name one with --url.")
    page = f"/api/ids/{urllib.parse.quote(id_bytes(tracking_id), safe='')}"
    together: dict[str, Any] = {"topology": topology.name, "id": tracking_id}
    together |= {"sightings": [], "asked": [], "unreached": []}
    for url in urls:
        found = ask(url, page, settings)
        if found["topology"] != topology.name:
            raise NotReached(f"{url} is a worker of {found['topology']!r}, not of {topology.name!r}. Name another.")
        # Each worker also asks the owners of the other partitions, so several workers may report the same sighting.
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


@dataclass(frozen=True, slots=True)
class Look:
    """The reports of the brokers and the workers at one point in time."""

    surveyed: dict[str, Any]
    pages: Sequence[dict[str, Any]]
    at_ms: int
    refusals: Sequence[str] = ()
    """See `Fleet`."""


def looked(now: Look, before: Look | None = None) -> dict[str, Any]:
    """Combine the reports of the brokers and the workers into the JSON of `dedup status`.

    If ``before`` is given, the result includes the rates since that earlier `Look`.
    """
    surveyed, pages = now.surveyed, now.pages
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
    oldest_ms = min((task["oldest_ms"] for task in tasks if task["oldest_ms"] is not None), default=None)
    found = {
        **surveyed,
        "lag": sum(task["lag"] or 0 for task in tasks),
        "oldest_age_ms": None if oldest_ms is None else max(0, now.at_ms - oldest_ms),
        "arriving_per_s": _per_s(now, before, "end"),
        "committed_per_s": _per_s(now, before, "committed"),
        "dead_letters": _summed(pages, "dead_letters"),
        "other_formats": _summed(pages, "other_formats"),
        "workers_that_answered": [page["worker"] for page in pages],
        "refusals": [*now.refusals],
        "tasks": tasks,
    }
    alerts = (f"{page['worker']}: {page['alert']}" for page in pages if page.get("alert"))
    stuck_s = STUCK_S + max((page.get("commit_interval_s", 0.0) for page in pages), default=0.0)
    return {**found, "alerts": [*_wrong(found, stuck_s), *surveyed.get("attention", ()), *alerts]}


def _per_s(now: Look, before: Look | None, name: str) -> float | None:
    """Return the growth per second of the offset ``name``, summed over all tasks.

    An offset that decreased because a topic was recreated counts as 0.
    """
    if before is None or now.at_ms <= before.at_ms:
        return None
    past = {(task["task"], task["topic"], task["partition"]): task[name] for task in before.surveyed["tasks"]}
    grown = 0
    for task in now.surveyed["tasks"]:
        since = past.get((task["task"], task["topic"], task["partition"]))
        grown += max(0, (task[name] or 0) - since) if since is not None else 0
    return round(grown * 1000 / (now.at_ms - before.at_ms), 1)


def _blocking(seen: dict[str, Any]) -> Iterator[str]:
    """Yield a sentence, with a remedy, for each problem that prevents every worker from starting."""
    if seen.get("leaderless"):
        yield f"{without_leader(seen['leaderless'])}: {LEADER_REMEDY}"
    if seen.get("missing_sources"):
        yield f"missing source topics: {', '.join(seen['missing_sources'])}; create them, or correct `source.topics`"
    if seen.get("reset_interrupted"):
        yield (
            "a `dedup reset` was interrupted, and the state is partly deleted: run the same `dedup reset` again to "
            "finish it"
        )
    elif seen.get("deleted_topics"):
        yield (
            f"deleted topics: {', '.join(seen['deleted_topics'])}. The group has committed offsets, so `dedup "
            f"apply` does not create them again: bring them back, or start over with `dedup reset`"
        )


def _wrong(seen: dict[str, Any], stuck_s: float) -> Iterator[str]:
    """Yield a sentence, with a remedy, for each problem of the fleet. Records may wait for ``stuck_s`` seconds."""
    blocking = [*_blocking(seen)]
    yield from blocking
    others = {*seen.get("missing_sources", ()), *seen.get("deleted_topics", ())}
    missing = [name for name in seen["missing_topics"] if name not in others]
    # If the reset is run again, it creates the missing topics.
    if missing and not seen.get("reset_interrupted"):
        yield f"missing topics: {', '.join(missing)}; {'then ' if blocking else ''}`dedup apply` creates them"
    lost = [task for task in seen["tasks"] if task["owner"] is None]
    if lost and len(lost) == len(seen["tasks"]) and not seen["members"]:
        first = "remove the cause above, and then start" if blocking else "start"
        yield f"no worker is running; {first} one with `dedup run`"
    elif lost:
        yield (
            f"{len(lost)} of {len(seen['tasks'])} partitions have no worker: the group is assigning them, or a worker "
            f"died less than session_timeout ago. If this stays so, start a worker with `dedup run`"
        )
    silent = sorted({task["owner"] for task in seen["tasks"] if task["owner"]} - {*seen["workers_that_answered"]})
    yield from seen["refusals"]
    if silent:
        remedy = "see above" if seen["refusals"] else "name their pages with --url, or see their logs"
        yield (
            f"{len(silent)} of {len(seen['members'])} workers do not answer ({', '.join(silent)}), so their tasks' "
            f"states are unknown: {remedy}"
        )
    # Neither a quiet time nor an old record is a fault by itself, so both times must exceed the limit.
    waited_s = max((task["seconds_since_commit"] or 0 for task in seen["tasks"] if task["lag"]), default=0)
    waited_s = min(waited_s, (seen["oldest_age_ms"] or 0) / 1000)
    if waited_s > stuck_s and not lost and seen["committed_per_s"] == 0:
        yield (
            f"nothing was committed for {waited_s:.0f} s although records wait: `dedup doctor` finds what keeps the "
            f"workers from it"
        )


def _summed(pages: Sequence[dict[str, Any]], name: str) -> dict[str, int]:
    found: Counter[str] = Counter()
    for page in pages:
        found.update(page.get(name) or {})  # Workers of older versions may lack some counters.
    return dict(found.most_common())


class Show(Protocol):
    """Shows a status, or the error that prevented a later status from being determined."""

    def __call__(self, seen: dict[str, Any], failure: str | None = None) -> None:
        """Show the status ``seen`` or, if ``failure`` is given, this error; ``seen`` is then the last status."""


@contextlib.contextmanager
def showing(*, watch: bool, as_json: bool) -> Iterator[Show]:
    """Yield a function that prints a status or, with --watch on a terminal, refreshes it in place.

    The function prints an error to stderr; on a terminal, it shows the error below the last status.
    """
    # A pipe has no width, so nothing is omitted or wrapped. Without `markup=False`, Rich would omit the address
    # [fe80::1], which looks like a style.
    width = None if sys.stdout.isatty() else _PIPED_COLUMNS
    console = Console(highlight=False, markup=False, emoji=False, width=width)

    def show(seen: dict[str, Any], failure: str | None = None) -> None:
        if failure is not None:
            typer.echo(failure, err=True)
        elif as_json:
            typer.echo(json.dumps(seen, indent=None if watch else 2))
        else:
            console.print(table(seen, console.width))

    if as_json or not watch or not console.is_terminal:
        yield show
        return
    # With `screen`, Rich uses the alternate screen, and the terminal's previous contents reappear at the end.
    with Live(console=console, screen=True, auto_refresh=False) as live:

        def refresh(seen: dict[str, Any], failure: str | None = None) -> None:
            if failure is not None:
                seen = {**seen, "alerts": [f"{failure} The status above is the last one known."]}
            live.update(table(seen, console.width), refresh=True)

        yield refresh


async def follow(look: Callable[[], Awaitable[Look]], show: Show, *, watch: bool) -> None:
    """Show the status once, with rates. With ``watch``, show it every two seconds until the caller cancels.

    Raises BrokerUnavailable or StateIncompatible if the status cannot be determined. With ``watch``, only the first
    attempt raises an error; the function shows later errors and tries again.
    """
    before: Look | None = None
    seen: dict[str, Any] = {}
    while True:
        try:
            now = await look()
        except (BrokerUnavailable, StateIncompatible) as error:
            if before is None or not watch:
                raise
            show(seen, str(error))
        else:
            seen = looked(now, before)
            if watch or before is not None:
                show(seen)
            if before is not None and not watch:
                return
            before = now
        await asyncio.sleep(WATCH_S if watch else RATE_S)


def table(seen: dict[str, Any], width: int) -> RenderableType:
    """Return the status for a terminal of ``width`` columns. Each row names its partition at any width."""
    kinds = {task["task"] for task in seen["tasks"]}
    columns = [
        Column("partition", [_place(task, seen["tasks"]) for task in seen["tasks"]], is_text=True),
        Column("worker", [task["owner"] or "nobody" for task in seen["tasks"]], is_text=True),
        Column("state", [_state(task, seen["workers_that_answered"]) for task in seen["tasks"]], is_text=True),
        Column("lag", [_number(task["lag"]) for task in seen["tasks"]]),
        Column("duplicates", [_share(task["verdicts"]) for task in seen["tasks"]]),
        Column("IDs", [_number(task["state_ids"]) for task in seen["tasks"]]),
        Column("bytes", [_bytes(task) for task in seen["tasks"]]),
        Column("committed", [_number(task["committed"]) for task in seen["tasks"]]),
        Column("end", [_number(task["end"]) for task in seen["tasks"]]),
        Column("changelog", [_number(_changelog(task)) for task in seen["tasks"]]),
    ]
    if len(kinds) > 1:
        columns.insert(1, Column("task", [task["task"] for task in seen["tasks"]], is_text=True))
    lines: list[RenderableType] = [_headline(seen), fitted(columns, width)]
    for name, what in (("dead_letters", "dead letters"), ("other_formats", "of them in another format")):
        if seen[name]:
            counts = ", ".join(f"{count:,} {reason}" for reason, count in seen[name].items())
            lines.append(f"{what}: {counts}, since the responding workers started")
    if filtered := sum(task.get("filtered") or 0 for task in seen["tasks"]):
        lines.append(f"filtered by the flow: {counted(filtered, 'record')}, since the responding workers started")
    return Lines(*lines, *(f"attention: {alert}" for alert in seen["alerts"]))


def _headline(seen: dict[str, Any]) -> str:
    workers = [f"{each['worker']} at {each['host']}" for each in seen["members"]] or seen["workers_that_answered"]
    age = "" if seen["oldest_age_ms"] is None else f", oldest record waiting: {_age(seen['oldest_age_ms'])}"
    arriving, committed = seen["arriving_per_s"], seen["committed_per_s"]
    rates = "" if arriving is None else f"; {arriving:,.0f} records/s arrive, {committed:,.0f}/s are committed"
    return f"{seen['topology']}: lag {seen['lag']:,}{age}{rates}; workers: {', '.join(workers) or 'none'}"


def _place(task: dict[str, Any], tasks: Sequence[dict[str, Any]]) -> str:
    """Return topic/partition. A long topic name is shortened in the middle if the names can still be told apart."""
    return f"{shortened(task['topic'], {each['topic'] for each in tasks})}/{task['partition']}"


def _state(task: dict[str, Any], answered: Sequence[str]) -> str:
    if not task.get("has_leader", True):
        return "no leader"
    if task["owner"] is None:
        return "not running"
    if task["state"] is None:
        return "starting" if task["owner"] in answered else "no answer"
    left, total = task["restore_remaining"], task["restore_total"]
    if task["state"] != "restoring" or left is None:
        return str(task["state"])
    return f"restoring {1 - left / total:.0%}, {left:,} left" if total else "restoring"


def _changelog(task: dict[str, Any]) -> int | None:
    begin, end = task["changelog_begin"], task["changelog_end"]
    return None if end is None else end - begin


def _age(age_ms: int) -> str:
    """Return a duration in one unit, rounded down, such as ``3 min``."""
    for unit, unit_ms in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1_000)):
        if age_ms >= 2 * unit_ms:
            return f"{age_ms // unit_ms:,} {unit}"
    return f"{age_ms / 1000:.1f} s"


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _bytes(task: dict[str, Any]) -> str:
    size, most = task["state_bytes"], task["state_max_bytes"]
    return _number(size) if size is None or not most else f"{size:,} ({size / most:.0%} of its limit)"


def _share(verdicts: dict[str, int] | None) -> str:
    counts = Counter(verdicts or {})
    judged = counts.total() - counts["repartitioned"]
    return f"{counts['duplicate'] / judged:.1%}" if judged else "-"
