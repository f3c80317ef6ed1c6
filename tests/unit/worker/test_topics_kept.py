"""How long topics that dedup makes keep records, and what is said of those that would delete what is sent to them."""

import pytest

from dedup.kafka.topic_admin import Topic
from dedup.settings import Settings, TopicDefaults
from dedup.topology.parse import parse
from dedup.worker.topics import compare, missing_topics

DAY_MS = 86_400_000
TEXT = """
dedup: 1
name: t
source: {topics: [a, b]}
tracking_id: {field: id}
guard_period: 1h
output: {topic: out}
duplicates: dup
conflicts: con
"""
TOPOLOGY = parse(TEXT, name="t.yaml")
FORWARDED = ("out", "dup", "con")


def settings(retention=None):
    return Settings(brokers=("127.0.0.1:1",), topics=TopicDefaults(retention=retention))


def source(name, days, policy="delete"):
    kept_ms = -1 if days is None else days * DAY_MS
    return Topic(name, name, 3, {"retention.ms": str(kept_ms), "cleanup.policy": policy})


def sources(*spec):
    return {name: source(name, *each) for name, each in zip(("a", "b"), spec, strict=True)}


def made(have, retention=None):
    return {topic.name: topic.configs for topic in missing_topics(TOPOLOGY, settings(retention), have)}


@pytest.mark.parametrize(
    ("spec", "kept_ms"),
    [
        (((1,), (30,)), 30 * DAY_MS),
        (((30,), (1,)), 30 * DAY_MS),
        (((7,), (None,)), -1),
        (((7,), (1, "compact")), -1),
        (((1, "compact,delete"), (7,)), -1),
    ],
)
def test_what_is_forwarded_is_kept_as_long_as_in_the_longest_source(spec, kept_ms):
    found = made(sources(*spec))
    for name in (*FORWARDED, "out.late", "out.dead-letter"):
        assert found[name]["retention.ms"] == str(kept_ms), name


def test_letters_are_kept_a_week_at_least_whatever_is_chosen_for_the_output():
    found = made(sources((1,), (1,)), retention="1h")
    assert found["out"]["retention.ms"] == found["dup"]["retention.ms"] == "3600000"
    assert found["out.late"]["retention.ms"] == found["out.dead-letter"]["retention.ms"] == str(7 * DAY_MS)


def test_no_topic_is_bounded_by_size_or_compacted_by_a_default_of_the_brokers():
    found = made(sources((1,), (1,)))
    assert {configs["retention.bytes"] for configs in found.values()} == {"-1"}
    policies = {name: configs["cleanup.policy"] for name, configs in found.items()}
    assert policies.pop("t.changelog") == "compact,delete"
    assert policies.pop("t.layout") == "compact"
    assert set(policies.values()) == {"delete"}
    assert found["t.repartition"]["retention.ms"] == found["t.changelog"]["retention.ms"] == "-1"


def test_the_brokers_time_is_only_for_topics_that_do_not_forward():
    found = made(sources((1,), (1,)))
    stamped = {name for name, configs in found.items() if configs.get("message.timestamp.type") == "LogAppendTime"}
    assert stamped == {"t.changelog", "t.repartition", "out.late", "out.dead-letter"}


def there(have, **changed):
    topics = {topic.name: topic for topic in missing_topics(TOPOLOGY, settings(), have)}
    found = {name: Topic(name, name, topic.partitions, topic.configs) for name, topic in topics.items()}
    for name, configs in changed.items():
        found[name] = Topic(name, name, 3, {**found[name].configs, **configs})
    return {**have, **found}


def said(have, retention=None):
    findings = compare(TOPOLOGY, settings(retention), have)
    return [each.text for each in findings if each.code == "forwarded_deleted"]


def test_a_retention_that_is_asked_for_is_taken_and_told_of_where_it_deletes():
    have = sources((1,), (30,))
    assert made(have, "7d")["out"]["retention.ms"] == str(7 * DAY_MS)
    texts = said(have, "7d")
    assert len(texts) == len(FORWARDED)
    assert all("keeps records for 7d" in text and "increase it" in text for text in texts)
    assert "source topic 'b' keeps records for 30d" in texts[0]
    assert said(have, "30d") == []
    assert said(have) == []


@pytest.mark.parametrize("name", FORWARDED)
def test_a_topic_that_would_delete_what_is_sent_to_it_is_named_with_the_command_that_mends_it(name):
    have = there(sources((1,), (30,)), **{name: {"retention.ms": str(DAY_MS)}})
    (text,) = said(have)
    assert text.startswith(f"Topic '{name}' ")
    assert "keeps records for 1d" in text
    assert f"--entity-name {name} --add-config retention.ms={30 * DAY_MS}`" in text
    differing = [each.text for each in compare(TOPOLOGY, settings(), have) if each.code == "topic_differs"]
    assert differing == [], "said once"


def test_of_a_compacted_source_no_finite_retention_is_enough():
    have = there(sources((1,), (1, "compact")), out={"retention.ms": str(3650 * DAY_MS)})
    (text,) = said(have)
    assert "source topic 'b' is compacted" in text
    assert "retention.ms=-1`" in text


@pytest.mark.parametrize(
    "configs",
    [
        {"retention.ms": str(31 * DAY_MS)},
        {"retention.ms": "1", "message.timestamp.type": "LogAppendTime"},
        {"retention.ms": "1", "cleanup.policy": "compact"},
    ],
    ids=["longer", "the broker's time", "nothing deleted by time"],
)
def test_a_topic_that_deletes_nothing_early_is_not_named(configs):
    assert said(there(sources((1,), (30,)), out=configs)) == []


def test_of_a_topic_whose_configs_may_not_be_read_nothing_is_said():
    have = there(sources((1,), (30,)))
    assert said({**have, "out": Topic("out", "out", 3)}) == []
