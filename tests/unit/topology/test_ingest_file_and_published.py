"""Every file that a user copies is correct, and says what the program does."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from dedup.errors import TopologyError
from dedup.topology.describe import as_data, describe, graph, to_dot, to_svg
from dedup.topology.ingest_file import ingest_schema, is_ingest, parse_ingest
from dedup.topology.lint import lint
from dedup.topology.model import Topology
from dedup.topology.parse import json_schema, parse

DIRECTORY = Path(__file__).parents[3] / "topologies"
INGEST_FILES = sorted(path for path in DIRECTORY.glob("*.yaml") if is_ingest(path.read_text(encoding="utf-8")))
FILES = sorted(set(DIRECTORY.glob("*.yaml")) - set(INGEST_FILES))
SCHEMA = DIRECTORY / "topology.schema.json"


def load(path: Path) -> Topology:
    return parse(path.read_text(encoding="utf-8"), name=path.name)


def named(path: Path) -> str:
    return path.stem


def test_the_files_are_there():
    assert {path.stem for path in FILES} >= {
        "simplest", "orders", "flights", "two-sources", "payments-key", "content-hash", "observe-only",
    }  # fmt: skip


@pytest.mark.parametrize("path", FILES, ids=named)
def test_a_file_parses_without_errors(path):
    made = load(path)
    assert made.name == path.stem
    assert [finding for finding in lint(made) if finding.level == "error"] == []


@pytest.mark.parametrize("path", FILES, ids=named)
def test_a_file_begins_with_the_schema_for_editors(path):
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first == "# yaml-language-server: $schema=topology.schema.json"


@pytest.mark.parametrize("path", INGEST_FILES, ids=named)
def test_an_ingest_file_parses_and_begins_with_its_schema(path):
    text = path.read_text(encoding="utf-8")
    assert parse_ingest(text, name=path.name).name == path.stem
    assert text.splitlines()[0] == "# yaml-language-server: $schema=ingest.schema.json"


@pytest.mark.parametrize(
    "text",
    [
        "ingest: 1\n",
        "\ufeffingest: 1\n",  # as some editors save UTF-8
        '\ufeff{"ingest": 1}',
        '{\n  "ingest": 1\n}',
        "'ingest' : 1\n",
        "# a comment\n---\nname: x\ningest: 1\n",
    ],
)
def test_an_ingest_file_is_recognized_however_its_key_is_written(text):
    assert is_ingest(text)


@pytest.mark.parametrize("text", ["dedup: 1\n# ingest: 1\n", "sink:\n  columns:\n    ingest: a\n", "ingest-2: 1\n"])
def test_the_word_ingest_elsewhere_makes_no_ingest_file(text):
    assert not is_ingest(text)


def test_a_pattern_without_quotes_is_to_be_put_in_quotes():
    """Was: "write the value out", as for an alias that is meant as one."""
    text = "ingest: 1\nname: x\nsource: {files: {directory: d, pattern: *.jsonl}}\noutput: {topic: o}\n"
    with pytest.raises(TopologyError, match=r'3:41: without quotes, "\*\.jsonl" is an alias.*put the text in quotes'):
        parse_ingest(text, name="x.yaml")


@pytest.mark.parametrize("written", ["1.5", "[a]", "{a: b}"])
def test_the_value_at_a_boundary_has_one_problem(written):
    """Was: three problems at one place, which contradicted each other."""
    text = "ingest: 1\nname: x\nsource: {files: {directory: d}}\noutput: {topic: o}\n"
    with pytest.raises(TopologyError) as caught:
        parse_ingest(f"{text}boundary: {{field: last, equals: {written}}}\n", name="x.yaml")
    assert str(caught.value) == "x.yaml:5:33: boundary.equals: takes text, a whole number, true, or false"


def test_the_published_schema_of_ingest_files_is_the_program_s():
    assert json.loads((DIRECTORY / "ingest.schema.json").read_text(encoding="utf-8")) == ingest_schema(), (
        "run: dedup schema ingest > topologies/ingest.schema.json"
    )


def test_the_published_schema_is_the_program_s():
    assert json.loads(SCHEMA.read_text(encoding="utf-8")) == json_schema(), (
        "run: dedup schema topology > topologies/topology.schema.json"
    )


def test_the_schema_refuses_unknown_keys_everywhere():
    schema = json_schema()
    for part in [schema, *schema["$defs"].values()]:
        assert part["additionalProperties"] is False


def test_orders_has_every_key():
    text = (DIRECTORY / "orders.yaml").read_text(encoding="utf-8")
    schema = json_schema()
    keys = set(schema["properties"]) | {
        key for part in ("SourceFile", "StateSpec", "TransactionsSpec") for key in schema["$defs"][part]["properties"]
    }
    assert [key for key in sorted(keys) if f"{key}:" not in text] == []


@pytest.mark.parametrize("path", FILES, ids=named)
def test_the_drawing_names_every_topic_that_records_go_through(path):
    made = load(path)
    boxes, arrows = graph(made)
    nodes = {node.name for node in boxes}
    assert {*made.source.topics, *made.written_topics} - {made.layout_topic} <= nodes
    for edge in arrows:
        assert {edge.start, edge.end} <= nodes
    assert all(f'"{name}"' in to_dot(made) for name in nodes)
    assert ET.fromstring(to_svg(made)).tag == "{http://www.w3.org/2000/svg}svg"


@pytest.mark.parametrize("path", FILES, ids=named)
def test_the_description_names_every_topic(path):
    made = load(path)
    words = describe(made)
    assert all(topic in words for topic in (*made.source.topics, *made.written_topics))
    assert as_data(made)["name"] == made.name


def test_boxes_do_not_overlap():
    made = load(DIRECTORY / "orders.yaml")
    root = ET.fromstring(to_svg(made))
    corners = [(box.get("x"), box.get("y")) for box in root.iter("{http://www.w3.org/2000/svg}rect") if box.get("x")]
    assert len(set(corners)) == len(corners) == len(graph(made)[0])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("conflicts: {}", "counted only"),
        ("conflicts: {}\nduplicates: d", "to d"),
        ("conflicts: c\nduplicates: d", "to c"),
        ("on_conflict: fail", "stops the worker"),
    ],
)
def test_where_conflicts_go(more, said):
    text = (DIRECTORY / "simplest.yaml").read_text(encoding="utf-8")
    assert as_data(parse(f"{text}{more}\n", name="t.yaml"))["verdicts"]["conflict"] == said


def test_what_describe_says_of_the_simplest():
    assert describe(load(DIRECTORY / "simplest.yaml")).splitlines()[:8] == [
        "topology simplest",
        "",
        "what is a duplicate",
        "  tracking ID   field: event_id",
        "  event time    the field ts (ms)",
        "  guard period  1h: the same ID within it, earlier or later, is a duplicate",
        "  grace         1h: an unknown ID further behind stream time is late",
        "  future        more than 1h ahead of the clock: dead_letter",
    ]


def test_the_field_of_the_event_time_is_written_as_in_the_file():
    made = parse(
        "dedup: 1\nname: t\nsource: {topics: [c]}\ntracking_id: {field: id}\nguard_period: 1h\n"
        "event_time: {field: 'a[0][\"b.c\"]', unit: ms}\n",
        name="t.yaml",
    )
    assert 'the field a[0]["b.c"] (ms)' in describe(made)
