"""`dedup check --broker`: findings about topics as they are."""

from dataclasses import replace

import pytest

from dedup.errors import StateIncompatible
from dedup.kafka.topic_admin import Topic
from dedup.settings import Settings
from dedup.topology.parse import parse
from dedup.worker.topics import compare, missing_topics, refuse_misfits

TEXT = """
dedup: 1
name: t
source: {topics: [in], partitioned_by: tracking_id}
tracking_id: {field: id}
guard_period: 1h
output: {topic: out}
"""
TOPOLOGY = parse(TEXT, name="t.yaml")
SETTINGS = Settings(brokers=("127.0.0.1:1",))
SOURCE = Topic("in", "a", 3, {"retention.ms": "604800000", "cleanup.policy": "delete"})


def cluster(**changed):
    wanted = missing_topics(TOPOLOGY, SETTINGS, {"in": SOURCE})
    have = {"in": SOURCE, **{topic.name: Topic(topic.name, "b", topic.partitions, topic.configs) for topic in wanted}}
    return {**have, **changed}


def codes(have):
    return [(finding.level, finding.code) for finding in compare(TOPOLOGY, SETTINGS, have)]


def test_nothing_is_found_where_all_is_as_wanted():
    assert codes(cluster()) == []


def test_a_missing_source_is_an_error():
    assert codes({}) == [("error", "source_missing")]


def test_topics_to_be_made_are_named():
    assert codes({"in": SOURCE}) == [("warning", "topic_missing")] * 4


@pytest.mark.parametrize("name", ["out", "t.changelog"])
def test_another_partition_count_is_an_error_where_partitions_must_fit(name):
    have = cluster()
    have[name] = Topic(name, "b", 5, have[name].configs)
    assert ("error", "topic_differs") in codes(have)


@pytest.mark.parametrize(
    ("out", "changelog", "says"),
    [
        (5, 3, "name another output topic, which dedup creates with the right number of partitions; the state is kept"),
        (2, 3, "add partitions to the output."),
        (3, 2, "fix the topics or run `dedup reset`."),
        (2, 2, "fix the topics or run `dedup reset`."),
    ],
)
def test_the_remedy_for_another_partition_count_costs_state_only_if_the_state_does_not_fit(out, changelog, says):
    """Was: with a larger output, partitions were to be added to the source, whose state is then refused."""
    numbers = {"out": out, "t.changelog": changelog}
    changed = {name: replace(cluster()[name], partitions=number) for name, number in numbers.items()}
    with pytest.raises(StateIncompatible) as refused:
        refuse_misfits(TOPOLOGY, cluster(**changed))
    assert f"Nothing was changed; {says}" in str(refused.value)
    assert "partitions to the source" not in str(refused.value)


def test_a_changelog_that_expires_is_named():
    have = cluster()
    changelog = have["t.changelog"]
    have["t.changelog"] = Topic("t.changelog", "b", 3, {**changelog.configs, "retention.ms": "1000"})
    assert codes(have) == [("warning", "topic_differs")]


def test_a_source_kept_shorter_than_the_guard_period_and_compacted_is_named():
    source = Topic("in", "a", 3, {"retention.ms": "1000", "cleanup.policy": "compact,delete"})
    assert {("warning", "retention_below_guard"), ("warning", "source_compacted")} <= set(
        codes(cluster(**{"in": source}))
    )


def test_a_source_with_the_producers_times_is_an_error_only_by_arrival():
    have = cluster(**{"in": Topic("in", "a", 3, {**SOURCE.configs, "message.timestamp.type": "CreateTime"})})
    assert codes(have) == []
    (found,) = compare(parse(TEXT + "event_time: arrival\n", name="t.yaml"), SETTINGS, have)
    assert (found.level, found.code) == ("error", "source_create_time")
    assert "--entity-name in --add-config message.timestamp.type=LogAppendTime" in found.text
    have["in"] = Topic("in", "a", 3, {**SOURCE.configs, "message.timestamp.type": "LogAppendTime"})
    assert compare(parse(TEXT + "event_time: arrival\n", name="t.yaml"), SETTINGS, have) == []
