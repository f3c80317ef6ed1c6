"""`dedup apply`: the topics a topology needs, those to make, and how those that exist differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dedup.session.admin import Admin, Topic, WantedTopic
from dedup.session.wire import Wire
from dedup.worker.plan import group_is_new, missing_topics, refuse_deleted, refuse_misfits, state_topics, topic_names

if TYPE_CHECKING:
    from dedup.settings import Settings
    from dedup.topology.model import Topology


@dataclass(frozen=True, slots=True)
class Difference:
    """An existing topic is not as `apply` would make it; nothing is changed about it."""

    topic: str
    what: str
    found: str
    wanted: str


@dataclass(frozen=True, slots=True)
class TopicPlan:
    """What `apply` does."""

    make: tuple[WantedTopic, ...]
    as_wanted: tuple[str, ...]
    differences: tuple[Difference, ...]
    sources: tuple[str, ...]


def plan_topics(topology: Topology, settings: Settings, have: Mapping[str, Topic]) -> TopicPlan:
    """Return what is missing and what differs; raises StateIncompatible where a source topic is missing."""
    sources = {name: topic for name, topic in have.items() if name in topology.source.topics}
    wanted = missing_topics(topology, settings, sources)
    differences = [each for topic in wanted if topic.name in have for each in _differences(have[topic.name], topic)]
    differing = {each.topic for each in differences}
    return TopicPlan(
        make=tuple(topic for topic in wanted if topic.name not in have),
        as_wanted=tuple(topic.name for topic in wanted if topic.name in have and topic.name not in differing),
        differences=tuple(differences),
        sources=topology.source.topics,
    )


def _differences(found: Topic, wanted: WantedTopic) -> Iterator[Difference]:
    if found.partitions != wanted.partitions:
        yield Difference(found.name, "partitions", str(found.partitions), str(wanted.partitions))
    for key, value in wanted.configs.items():
        known = found.configs.get(key)
        if known is None or set(known.split(",")) == set(value.split(",")):
            continue
        if key == "max.message.bytes" and int(known) >= int(value):
            continue  # room to spare is no difference
        yield Difference(found.name, key, known, value)


async def look(topology: Topology, settings: Settings, admin: Admin) -> TopicPlan:
    """Return the plan against the cluster as it is."""
    return plan_topics(topology, settings, await admin.topics(topic_names(topology)))


async def make(topology: Topology, plan: TopicPlan, wire: Wire, admin: Admin) -> list[str]:
    """Make what the plan says; return the names made.

    Raises StateIncompatible, with nothing made, where changelog or repartition topic is missing although the group has
    read records; and, after making, where partition counts do not fit each other.
    """
    missing = {topic.name for topic in plan.make}
    if not missing.isdisjoint(state_topics(topology)) and not await group_is_new(topology, wire, admin):
        refuse_deleted(topology, set(topic_names(topology)) - missing, done="made")
    made = await admin.create(plan.make)
    refuse_misfits(topology, await admin.settled(topic_names(topology)))
    return made
