"""Whatever stands in a file, the answer is a topology or its problems with their places; never another error."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dedup.errors import SettingsError, TopologyError
from dedup.settings import load_settings
from dedup.topology.ingest_file import parse_ingest
from dedup.topology.model import extractor_of
from dedup.topology.parse import parse

ROOT = Path(__file__).parents[2]
ORDERS = (ROOT / "topologies" / "orders.yaml").read_text(encoding="utf-8")
INGESTS = [
    (ROOT / "topologies" / f"{name}.yaml").read_text(encoding="utf-8")
    for name in ("chain-ingest", "files-to-topic", "table-to-topic")
]
PRODUCTION = (ROOT / "config" / "production.yaml").read_text(encoding="utf-8")
WORDS = re.compile(r"[A-Za-z0-9_./${}:-]+|[\[\]{},:#\n-]| +")
PLACE = re.compile(r"f:([0-9]+:[0-9]+:)? .")
PIECES = st.one_of(
    st.sampled_from(
        [
            "0",
            "-1",
            "1e9",
            ".inf",
            ".nan",
            "0x10",
            "null",
            "~",
            "true",
            "false",
            "yes",
            "[]",
            "{}",
            "[[]]",
            "{a:1}",
            "''",
            '""',
            "1h",
            "0s",
            "999999d",
            "*a",
            "&a",
            "!!str",
            "!x",
            "<<",
            "?",
            "-",
            "|",
            ">",
            "%",
            "@",
            "`",
            "forward",
            "drop",
            "fail",
            "record",
            "${env:X}",
            "${file:/}",
            "${",
            "2024-01-01",
            "1:1",
        ]
    ),
    st.text(max_size=6),
)


@st.composite
def damaged(draw, text: str) -> str:
    """A correct file with some of its words replaced, removed or doubled."""
    words = WORDS.findall(text)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(words) - 1))
        words[at] = draw(st.one_of(PIECES, st.just(""), st.just(words[at] * 2), st.sampled_from(words)))
    return "".join(words)


def problems(text: str, read=parse) -> list[str]:
    try:
        found = read(text, name="f")
        if read is parse:
            extractor_of(found)  # raises ValueError for what could never find an ID or a time
    except TopologyError as error:
        return [str(problem) for problem in error.problems]
    return []


@settings(deadline=None)
@given(damaged(ORDERS))
def test_a_damaged_topology_file(text):
    assert all(PLACE.match(problem) for problem in problems(text))


@settings(deadline=None)
@given(st.sampled_from(INGESTS).flatmap(damaged))
def test_a_damaged_ingest_file(text):
    assert all(PLACE.match(problem) for problem in problems(text, parse_ingest))


@pytest.mark.parametrize("more", ["output: {topic: [a]}", "output: {topic: a}\ndead_letter: {a: 1}"])
def test_a_topic_that_is_no_text_is_a_problem_with_a_place(more):
    text = f"ingest: 1\nname: x\nsource: {{files: {{directory: d}}}}\n{more}\n"
    (found,) = problems(text, parse_ingest)
    assert found.endswith("; write the text alone")


@settings(deadline=None)
@given(st.text())
def test_any_text_at_all(text):
    assert problems(text) != []


@settings(deadline=None)
@given(damaged(PRODUCTION), st.lists(st.text(max_size=20) | st.just("web.port=[1"), max_size=2))
def test_a_damaged_config_file(tmp_path_factory, text, overrides):
    path = tmp_path_factory.mktemp("config") / "c.yaml"
    path.write_bytes(text.encode(errors="replace"))
    with contextlib.suppress(SettingsError):
        load_settings(path, overrides, {"KAFKA_USER": "u", "X": "x"})
