"""Implements `dedup doctor`, which checks a cluster layer by layer for anything that prevents a topology from running.

The command checks a layer, such as DNS or TLS, only if the layers below it work, so it reports each problem only once.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final, Literal, assert_never, get_args

import typer

from dedup.cli.inputs import ConfigOption, JsonOption, OptionalTopology, SetOption, read_settings, read_topology, say
from dedup.errors import BrokerUnavailable, RegistryUnavailable, StateIncompatible

if TYPE_CHECKING:
    from dedup.kafka.authorization import Rights
    from dedup.kafka.client import KafkaWire
    from dedup.kafka.connection import Diagnosis, Trouble
    from dedup.kafka.topic_admin import Admin, Topic
    from dedup.settings import Settings
    from dedup.topology.model import Topology

Layer = Literal["DNS", "TCP", "TLS", "authentication", "version", "ACL", "leaders", "topics", "schema registry"]
LAYERS: Final[tuple[Layer, ...]] = get_args(Layer)
_DETAIL: Final = re.compile(r"(?P<what>.*?)\. (?P<remedy>.*?)(?P<detail> \(.*\))?", re.DOTALL)
_REFUSAL: Final = re.compile(r"(?P<what>.*?)[.;] Nothing was \w+[.;] (?P<remedy>.*?)\.?", re.DOTALL)
"""Matches the problem and the remedy in the message of a StateIncompatible error."""
_TOPIC_REMEDIES: Final[Mapping[str, str]] = {
    "source_missing": "Create the source topic, or correct `source.topics`",
    "topic_missing": "`dedup apply` creates it; so does `dedup run`, unless `topics.create` is false",
    "topic_differs": "Alter the topic, or accept the difference; if the partition counts differ, recreate the topic",
    "forwarded_deleted": "Raise the topic's retention.ms to the longest retention.ms of the source topics",
    "source_create_time": "Set the topic's message.timestamp.type to LogAppendTime, or use another `event_time`",
    "retention_below_guard": "If resets must lose nothing, raise the topic's retention.ms to at least the guard period",
    "source_compacted": "Set the topic's cleanup.policy to delete, or accept that compacted records are not provable",
}


@dataclass(frozen=True, slots=True)
class Symptom:
    """A problem or a warning, with its remedy."""

    layer: Layer
    level: Literal["error", "warning"]
    problem: str
    remedy: str


def doctor(
    topology: OptionalTopology = None,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    overrides: SetOption = None,
) -> None:
    """Find problems that prevent a topology from running, from DNS and TLS to ACLs, topics, and the schema registry.

    The command prints each problem with a remedy. The command changes nothing, and does not affect any worker. Without
    TOPOLOGY, the command checks only the cluster and, if the config file names a schema registry, that registry. The
    exit code is 5 for a problem with the brokers or the registry, 3 for a problem with the topics, and 0 if the command
    finds no problems or only warnings.

    Examples: dedup doctor topologies/orders.yaml --config config/production.yaml

    dedup doctor --set brokers=localhost:9092
    """
    parsed = None if topology is None else read_topology(topology)
    settings = read_settings(config, overrides)
    # Check the registry first, because a config file that lacks a needed registry is a mistake.
    registry, wrong = _registry(parsed, settings)
    found, looked_at, transactions = asyncio.run(_examined(parsed, settings))
    found += wrong
    if registry is not None or wrong:
        looked_at |= {"schema registry"}
    layers = [{"layer": layer, "looked_at": layer in looked_at} for layer in LAYERS]
    symptoms = [asdict(each) for each in found]
    data = {"layers": layers, "transaction_version": transactions, "schema_registry": registry, "symptoms": symptoms}
    say(data, in_words(found, looked_at, transactions, registry), as_json=as_json)
    errors = [each for each in found if each.level == "error"]
    if errors:
        kind = StateIncompatible if errors[0].layer == "topics" else BrokerUnavailable
        raise typer.Exit(kind.exit_code)


def in_words(
    found: list[Symptom], looked_at: frozenset[Layer], transactions: int | None, registry: str | None = None
) -> Iterator[str]:
    """Yield a line for each layer, and two lines for each problem: the problem and its remedy.

    ``transactions`` is the cluster's transaction version, and ``registry`` is the kind of schema registry. Each
    argument is None if the value is unknown.
    """
    more: dict[Layer, str] = {}
    if transactions is not None:
        more["version"] = f" (transactions of version {max(transactions, 1)})"
    if registry is not None:
        more["schema registry"] = f" ({registry})"
    for layer in LAYERS:
        own = [each for each in found if each.layer == layer]
        if layer not in looked_at:
            yield f"{layer}: not checked"
            continue
        state = "ok" if not own else "wrong" if any(each.level == "error" for each in own) else "warning"
        yield f"{layer}: {state}{more.get(layer, '')}"
        for each in own:
            yield f"    {each.problem}"
            yield f"    -> {each.remedy}"


def _registry(topology: Topology | None, settings: Settings) -> tuple[str | None, list[Symptom]]:
    """Return the kind of schema registry, or None and a symptom if the registry does not work.

    Return ``(None, [])`` if no registry is configured and none is needed.

    Raises SettingsError if the topology needs a registry and the settings name none.
    """
    from dedup.kafka.schema_registry import SchemaRegistry

    section = settings.schema_registry
    if section.url is None and section.directory is None and (topology is None or not topology.source.needs_registry):
        return None, []
    try:
        return SchemaRegistry.of(section).kind(), []
    except RegistryUnavailable as error:
        remedy = "Start the registry, or correct `schema_registry` in the config file; records wait until it answers"
        return None, [Symptom("schema registry", "error", str(error).rstrip("."), remedy)]


async def _examined(
    topology: Topology | None, settings: Settings
) -> tuple[list[Symptom], frozenset[Layer], int | None]:
    """Return the problems that were found, the layers that were checked, and the cluster's transaction version."""
    from dedup.kafka.authorization import Rights
    from dedup.kafka.connection import Connection, diagnose
    from dedup.kafka.topic_admin import connected

    connection = Connection.of(settings, client_id="dedup-doctor")
    troubles = await diagnose(connection)
    found = [_symptom(each, "") for each in troubles]
    if len(troubles) == len(connection.brokers):
        deepest = max(LAYERS.index(each.layer) for each in found)
        return found, frozenset(LAYERS[: deepest + 1]), None
    # One broker that answers is enough to continue; brokers that do not answer are reported.
    bad = {each.broker for each in troubles}
    good = replace(connection, brokers=tuple(broker for broker in connection.brokers if broker not in bad))
    looked_at: set[Layer] = {"DNS", "TCP", "TLS", "authentication"}
    async with Rights(good) as rights:
        # Clients send every request except the first to the advertised addresses.
        elsewhere = await diagnose(replace(good, brokers=rights.advertised()))
        if elsewhere:
            before = "the broker answers, but advertises another address: "
            return [*found, *(_symptom(each, before) for each in elsewhere)], frozenset(looked_at), None
        for broker, lacks in (await rights.lacking()).items():
            if lacks:
                text = f"{broker} is too old: it does not support {', '.join(sorted(lacks))}"
                found.append(Symptom("version", "error", text, "Use brokers of Kafka 3.1 or later"))
        looked_at.add("version")
        transactions = await rights.transaction_version()
        if topology is not None:
            denied = [each async for each in _denied(rights, topology, settings)]
            found += denied
            looked_at.add("ACL")
            if not any(each.level == "error" for each in denied):
                wrong, layers = await connected(good, partial(_of_topics, topology, settings))
                found += wrong
                looked_at |= layers
    return found, frozenset(looked_at), transactions


async def _of_topics(
    topology: Topology, settings: Settings, wire: KafkaWire, admin: Admin
) -> tuple[list[Symptom], set[Layer]]:
    """Return the problems with the topics, their leaders, and the state, and the layers that were checked."""
    from dedup.worker.topics import compare, known_names

    have = await admin.topics(known_names(topology))
    offline = _offline(have)
    if offline:
        return offline, {"leaders"}
    refusal = await _refusal(topology, settings, wire, admin, have)
    found = [] if refusal is None else [refusal]
    for each in compare(topology, settings, have):
        missing = each.code == "topic_missing"
        if missing and refusal is not None:
            continue  # no command creates the topic before the refusal's cause is removed
        level = "error" if missing and not settings.topics.create else each.level
        found.append(Symptom("topics", level, each.text.rstrip("."), _TOPIC_REMEDIES[each.code]))
    return [*found, *await _idle(topology, wire, admin)], {"leaders", "topics"}


def _offline(have: Mapping[str, Topic]) -> list[Symptom]:
    """Return a list with one symptom if partitions have no leader, or else an empty list."""
    from dedup.cli.status import LEADER_REMEDY, leaderless, without_leader

    offline = leaderless(have)
    if not offline:
        return []
    text = f"{without_leader(offline)}; no transaction that includes one of them can complete"
    return [Symptom("leaders", "error", text, f"{LEADER_REMEDY[:1].upper()}{LEADER_REMEDY[1:]}")]


async def _refusal(
    topology: Topology, settings: Settings, wire: KafkaWire, admin: Admin, have: Mapping[str, Topic]
) -> Symptom | None:
    """Return the reason why the state in the cluster makes every worker refuse to start, or None."""
    try:
        await _refuse_start(topology, settings, wire, admin, have)
    except StateIncompatible as error:
        said = _REFUSAL.fullmatch(str(error))
        what, remedy = (str(error), "") if said is None else said.group("what", "remedy")
        return Symptom("topics", "error", what, f"{remedy[:1].upper()}{remedy[1:]}")
    return None


async def _refuse_start(
    topology: Topology, settings: Settings, wire: KafkaWire, admin: Admin, have: Mapping[str, Topic]
) -> None:
    """Run the checks that a starting worker and its tasks run, but change nothing.

    Raises StateIncompatible if a worker would raise it. `dedup.worker.worker` runs the same checks in the same order.
    """
    from dedup.worker.layout import read_layout, refuse_other_layout, with_layout
    from dedup.worker.restore import refuse_other_state
    from dedup.worker.topics import Cluster, begins_anew, missing_topics, refuse_deleted, refuse_misfits

    fresh = await begins_anew(topology, settings, wire, admin, meant=False)
    if not fresh:
        refuse_deleted(topology, have)
    if not have.keys() >= {*topology.source.topics, *topology.feeding_topics}:
        return  # the layout depends on the partition counts of these topics
    if not missing_topics(topology, settings, have):
        refuse_misfits(topology, have)
    cluster = Cluster(have)
    topology = await with_layout(topology, cluster, wire, fresh=fresh)
    layout = await read_layout(wire, topology)
    # A starting worker writes a missing layout, and finishes an interrupted change to its own layout.
    settles = (fresh or not topology.direct) and (not layout.counts or layout.changing_to == topology.group_size)
    if not (settles and topology.has_layout(topology.group_size)):
        await refuse_other_layout(wire, topology, cluster)
    if topology.changelog_topic in have:
        await refuse_other_state(topology, replace(cluster, begun_with=layout.counts), wire)


async def _idle(topology: Topology, wire: KafkaWire, admin: Admin) -> list[Symptom]:
    from dedup.cli.status import idle_now

    parts = [sentence.partition(": ") for sentence in await idle_now(topology, wire, admin)]
    return [Symptom("topics", "warning", what, remedy[:1].upper() + remedy[1:]) for what, _, remedy in parts]


async def _denied(rights: Rights, topology: Topology, settings: Settings) -> AsyncIterator[Symptom]:
    from dedup.kafka.authorization import REFUSED_ID, TIMEOUT_TOO_LONG
    from dedup.topology.describe import Resource, worker_permissions

    wanted = worker_permissions(topology)
    topics = await rights.on_topics(each.name for each in wanted if each.resource is Resource.TOPIC)
    for each in wanted:
        match each.resource:
            case Resource.TOPIC:
                allowed = topics.get(each.name)
            case Resource.GROUP:
                allowed = await rights.on_group(each.name)
            case Resource.TRANSACTIONAL_ID:
                # No task has a transactional ID with this suffix, so the request fences no task.
                timeout_ms = settings.transaction_timeout_ms
                code = await rights.try_transactional_id(f"{each.name}doctor", timeout_ms)
                if code == TIMEOUT_TOO_LONG:
                    text = f"transaction_timeout ({timeout_ms} ms) is more than the brokers allow"
                    remedy = "Shorten it, or raise the brokers' transaction.max.timeout.ms"
                    yield Symptom("topics", "error", text, remedy)
                allowed = frozenset() if code == REFUSED_ID else None
            case never:
                assert_never(never)
        # The permissions for a missing topic are unknown; the next layer reports the missing topic.
        lacks = [] if allowed is None else [name for name in each.operations if name not in allowed]
        if lacks:
            what = f"{each.resource.value} {each.name}"
            if each.resource is Resource.TRANSACTIONAL_ID:
                what = f"transactional IDs that begin with {each.name}"
            text = f"this principal lacks {', '.join(lacks)} on {what}"
            remedy = "Grant it; `dedup apply --acls` prints the commands for all permissions needed"
            yield Symptom("ACL", "error", text, remedy)


def layer_of(trouble: Trouble) -> Layer:
    """Return the layer in which a connection problem occurs."""
    from dedup.kafka.connection import Trouble

    match trouble:
        case Trouble.NAME:
            return "DNS"
        case Trouble.UNREACHABLE | Trouble.SILENT:
            return "TCP"
        case Trouble.CREDENTIALS | Trouble.MECHANISM | Trouble.SASL_WANTED | Trouble.NO_SASL:
            return "authentication"
        case _:
            return "TLS"


def _symptom(finding: Diagnosis, before: str) -> Symptom:
    said = _DETAIL.fullmatch(finding.sentence)
    what, remedy, detail = (finding.sentence, "", "") if said is None else said.group("what", "remedy", "detail")
    return Symptom(layer_of(finding.trouble), "error", f"{before}{what}{detail or ''}", remedy)
