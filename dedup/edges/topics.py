"""The topics of the edges, made where they are missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from dedup.errors import StateIncompatible
from dedup.session.admin import Admin, Topic, WantedTopic

if TYPE_CHECKING:
    from dedup.settings import Settings

BROKER_DEFAULT: Final = -1


def wanted(name: str, partitions: int | None, settings: Settings, configs: Mapping[str, str]) -> WantedTopic:
    """Return a topic as the config asks for it; without a number of partitions it has the brokers' default."""
    least = settings.topics.min_insync_replicas
    base = {} if least is None else {"min.insync.replicas": str(least)}
    return WantedTopic(name, partitions or BROKER_DEFAULT, settings.topics.replication_factor, {**base, **configs})


async def provide(admin: Admin, topics: Sequence[WantedTopic], settings: Settings) -> dict[str, Topic]:
    """Return all the topics, those that were missing made. Raises StateIncompatible where that is not allowed."""
    names = [topic.name for topic in topics]
    have = await admin.topics(names)
    missing = [topic for topic in topics if topic.name not in have]
    if missing and not settings.topics.create:
        listed = ", ".join(repr(topic.name) for topic in missing)
        raise StateIncompatible(f"missing topics {listed}, and `topics.create` is false. Make them, or allow it.")
    if missing:
        await admin.create(missing)
    return await admin.settled(names)
