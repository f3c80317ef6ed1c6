"""`dedup check --broker`: what a topology would meet in the cluster it is to run in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal

from dedup.errors import StateIncompatible
from dedup.session.admin import Admin, Topic
from dedup.session.connection import Connection
from dedup.topology.lint import Finding
from dedup.worker.apply import plan_topics
from dedup.worker.plan import topic_names

if TYPE_CHECKING:
    from dedup.settings import Settings
    from dedup.topology.model import Topology


async def broker_findings(topology: Topology, settings: Settings) -> list[Finding]:
    """Return what differs from what the topology needs; raises BrokerUnavailable."""
    async with Admin(Connection.of(settings)) as admin:
        have = await admin.topics(topic_names(topology))
    return compare(topology, settings, have)


def compare(topology: Topology, settings: Settings, have: Mapping[str, Topic]) -> list[Finding]:
    """Return the findings about topics as they are; an error is what a worker would refuse to start over."""
    try:
        plan = plan_topics(topology, settings, have)
    except StateIncompatible as error:
        return [Finding("error", "source_missing", str(error))]
    findings = [
        Finding("warning", "topic_missing", f"Topic {topic.name!r} does not exist; `run` or `apply` makes it.")
        for topic in plan.make
    ]
    for each in plan.differences:
        misfit = each.what == "partitions" and _must_fit(topology, each.topic)
        level: Literal["error", "warning"] = "error" if misfit else "warning"
        text = f"Topic {each.topic!r} has {each.what} {each.found}, not {each.wanted}."
        findings.append(Finding(level, "topic_differs", text))
    findings += _sources(topology, have)
    return sorted(findings, key=lambda finding: finding.level != "error")


def _must_fit(topology: Topology, name: str) -> bool:
    output = topology.output.topic if topology.output is not None and topology.direct else None
    return name in {topology.changelog_topic, output}


def _sources(topology: Topology, have: Mapping[str, Topic]) -> Iterator[Finding]:
    for name in topology.source.topics:
        configs = have[name].configs
        kept_ms = int(configs.get("retention.ms", -1))
        if 0 <= kept_ms < topology.window.guard_ms:
            yield Finding(
                "warning",
                "retention_below_guard",
                f"Source topic {name!r} keeps records for {kept_ms} ms, less than the guard period: after `dedup "
                f"reset` its sightings could not be made again.",
            )
        if "compact" in configs.get("cleanup.policy", ""):
            yield Finding(
                "warning",
                "source_compacted",
                f"Source topic {name!r} is compacted: records may vanish before they are judged, and `verify` can not "
                f"tell that from a loss.",
            )
