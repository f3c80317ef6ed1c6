"""Lists the minimum permissions that a worker's principal needs, for `dedup apply --acls`.

In Kafka's authorizer, Read, Write, and Delete imply Describe. Since KIP-679, an idempotent producer needs no other
permission. `dedup apply` creates topics under another principal, which needs Create.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from dedup.topology.model import Topology


class Resource(enum.Enum):
    """A resource type of Kafka's authorizer. The value is the name of the kafka-acls option for that type."""

    TOPIC = "topic"
    GROUP = "group"
    TRANSACTIONAL_ID = "transactional-id"


@dataclass(frozen=True, slots=True)
class Permission:
    """A set of operations that are allowed on one resource, or on all resources with a prefix."""

    resource: Resource
    name: str
    prefixed: bool
    operations: tuple[str, ...]
    """The operations as kafka-acls spells them."""
    why: str


def worker_permissions(topology: Topology) -> tuple[Permission, ...]:
    """Return the permissions that `dedup run` needs if all topics exist."""
    return tuple(_permissions(topology))


def _permissions(topology: Topology) -> Iterator[Permission]:
    own = {topology.changelog_topic: "changelog: written, restored, truncated"}
    if not topology.direct:
        own[topology.repartition_topic] = "repartition topic: written, read, purged"
    for name in topology.source.topics:
        yield _topic(name, ("Read", "DescribeConfigs"), "source")
    for name in topology.written_topics:
        operations = ("Read", "Write", "Delete", "DescribeConfigs") if name in own else ("Write", "DescribeConfigs")
        yield _topic(name, operations, own.get(name, "output or side topic"))
    yield Permission(Resource.GROUP, topology.name, prefixed=False, operations=("Read",), why="membership and offsets")
    mark = "a new fleet on an output with records: where `dedup reset` left off"
    yield Permission(Resource.GROUP, topology.reset_group, prefixed=False, operations=("Describe",), why=mark)
    yield Permission(
        Resource.TRANSACTIONAL_ID,
        f"{topology.name}.",  # a topology's name contains no dot, so no other topology's IDs have this prefix
        prefixed=True,
        operations=("Write", "Describe"),
        why="one id per partition",
    )


def _topic(name: str, operations: tuple[str, ...], why: str) -> Permission:
    return Permission(Resource.TOPIC, name, prefixed=False, operations=operations, why=why)
