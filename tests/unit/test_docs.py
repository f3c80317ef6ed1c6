"""README and docs say what the program does: examples run, links lead somewhere, generated pages do not drift."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
from concurrent.futures import Future
from functools import cache
from pathlib import Path

import pytest
import typer
from confluent_kafka import KafkaError, KafkaException
from typer.main import get_command
from typer.testing import CliRunner

from bench.candidates import CANDIDATES
from dedup.cli.main import create_app
from dedup.core.event_time import RecordTime
from dedup.core.extract import compile_extractor
from dedup.core.extract_one import EXTRACTED
from dedup.core.reference_model import ModelRecord, ModelRules, ReferenceModel
from dedup.core.tracking_id import FieldRule, TrackingId
from dedup.core.window import Source
from dedup.metrics import METRICS
from dedup.settings import load_settings
from dedup.topology.ingest_file import parse_ingest
from dedup.topology.lint import lint
from dedup.topology.parse import parse
from dedup.worker import record_collector as publish
from dedup.worker.task import MOVES
from dedup.yaml_document import beside

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "page.yaml"
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CHANGELOG.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "bench" / "README.md",
        ROOT / "tests" / "README.md",
        *(ROOT / "docs").rglob("*.md"),
    ]
)
RUNS_HERE = {"check", "describe", "schema", "size", "try"}
"""Commands that need no broker."""
FENCE = re.compile(r"^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
TEST_ID = re.compile(r"`(tests/[\w/.-]+?\.py)(?:::(\w+))?(?:::(\w+))?`")


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def blocks(*kinds: str) -> list:
    return [
        pytest.param(found[2], id=f"{named(page)}:{text_of(page)[: found.start()].count(chr(10)) + 1}")
        for page in PAGES
        for found in FENCE.finditer(text_of(page))
        if found[1] in kinds
    ]


def commands() -> list:
    """Every `$ dedup ...` line of a console block, with the output that the page shows after it."""
    found = []
    for param in blocks("console"):
        for part in re.split(r"^\$ ", param.values[0], flags=re.MULTILINE)[1:]:
            line, _, output = part.partition("\n")
            if line.startswith("dedup "):
                found.append(pytest.param(shlex.split(line)[1:], output.strip(), id=f"{param.id} {line}"))
    return found


@pytest.mark.parametrize("text", blocks("yaml"))
def test_a_yaml_block_is_a_topology_an_ingest_file_or_a_config(text, tmp_path):
    if re.search(r"^ingest:", text, re.MULTILINE):
        parse_ingest(text, name="page.yaml")
        return
    if re.search(r"^brokers:", text, re.MULTILINE):
        path = tmp_path / "config.yaml"
        secret = tmp_path / "secret"
        secret.write_text("s", encoding="utf-8")
        path.write_text(re.sub(r"/run/secrets/\w+", str(secret), text), encoding="utf-8")
        load_settings(path, [], {"KAFKA_USER": "u"})
        return
    assert [
        finding for finding in lint(parse(text, name="page.yaml", read_file=beside(DATA))) if finding.level == "error"
    ] == []


@pytest.mark.parametrize(("arguments", "output"), commands())
def test_a_command_line_is_understood_and_gives_what_the_page_shows(arguments, output, monkeypatch):
    monkeypatch.chdir(ROOT)
    group = get_command(create_app())
    command = group.commands.get(arguments[0])
    if command is None:
        assert arguments[0] in {"--help", "--version"}, f"there is no command {arguments[0]}"
        return
    # Parses the options, runs nothing.
    command.make_context(arguments[0], arguments[1:], parent=typer.Context(group))
    if arguments[0] in RUNS_HERE and output:
        result = CliRunner().invoke(create_app(), arguments)
        assert result.output.strip() == output


def test_the_page_of_commands_has_defaults_that_are_floats_or_paths():
    text = text_of(ROOT / "docs" / "cli.md")
    told = re.findall(r"^\| `(--minutes|--harder|--report) .*Default: `(.*)`\. \|$", text, re.MULTILINE)
    assert {("--minutes", "2.0"), ("--harder", "1.0"), ("--report", "chaos.html")} <= set(told)


def test_the_topic_of_the_history_tutorial_that_is_there_already_is_told(monkeypatch):
    """Was: a traceback with a KafkaException."""
    spec = importlib.util.spec_from_file_location("history", ROOT / "docs" / "history.py")
    history = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(history)

    class Admin:
        def __init__(self, _conf):
            self.made = Future()
            self.made.set_exception(KafkaException(KafkaError(KafkaError.TOPIC_ALREADY_EXISTS)))

        def create_topics(self, wanted):
            return {topic.topic: self.made for topic in wanted}

    monkeypatch.setattr(history, "AdminClient", Admin)
    result = CliRunner().invoke(history.app, ["topic"])
    assert result.exit_code == 1
    assert result.output.startswith("topic flights exists already. To start again, ")


@pytest.mark.parametrize("text", blocks("vector"))
def test_a_vector_of_the_semantics_holds_on_the_exact_model(text):
    head, *lines = text.strip().splitlines()
    numbers = {name: int(value) for name, value in re.findall(r"(guard|grace|most) (\d+)", head)}
    rules = ModelRules(
        guard_ms=numbers["guard"],
        grace_ms=numbers["grace"],
        extend="most" in numbers,
        extend_at_most_ms=numbers.get("most", 0),
    )
    model = ReferenceModel(rules, ((0, 0),))
    for row, line in enumerate(lines):
        name, time_ms, verdict = line.split(maxsplit=2)
        judged = model.judge(ModelRecord(name.encode(), int(time_ms), Source(0, 0, row)))
        assert judged.kind.replace("_", " ") == verdict, line


@pytest.mark.parametrize("text", blocks("ids"))
def test_ids_are_equal_and_differ_as_the_semantics_say(text):
    keys = compile_extractor(TrackingId(FieldRule(("id",))), RecordTime(), fmt="json", fingerprint=False)
    for line in text.strip().splitlines():
        found = re.fullmatch(r"(.+?) +(equals|differs from) +(.+)", line)
        assert found, line
        values = [f'{{"id":{found[group]}}}'.encode() for group in (1, 3)]
        one, other = keys([None, None], values, [(), ()], [0, 0]).ids
        assert one is not None
        assert (one == other) is (found[2] == "equals"), line


@pytest.mark.parametrize("text", blocks("states"))
def test_the_states_of_a_task_are_the_code_s(text):
    shown = {
        line.split(" ->")[0]: set(filter(None, line.split(" ->")[1].strip().split(", "))) for line in text.splitlines()
    }
    assert shown == {state.value: {after.value for after in afters} for state, afters in MOVES.items()}


@cache
def messages() -> list[str]:
    """Every text of the package but docstrings, `…` where a value is put in."""
    found = []
    for path in sorted((ROOT / "dedup").rglob("*.py")):
        nodes = list(ast.walk(ast.parse(text_of(path))))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if id(node) in docstrings:
                continue
            match node:
                case ast.JoinedStr(values=parts):
                    texts = [part.value if isinstance(part, ast.Constant) else "…" for part in parts]
                    found.append("".join(map(str, texts)))
                case ast.Constant(value=str(text)):
                    found.append(text)
    return found


def test_the_messages_of_exit_code_3_are_the_program_s():
    section = text_of(ROOT / "docs" / "operations.md").partition("### Exit code 3")[2].partition("\n## ")[0]
    quoted = re.findall(r"^\| (?!the message|---)(.+?) \|", section, re.MULTILINE)
    assert len(quoted) > 5
    # In the page a message is cut before its values' quotes; `…` stands for whatever is put in.
    known = re.sub(r"[\"']|…/…", "", "\n".join(messages()))
    assert not [text for text in quoted if not sought(text).search(known)]


def sought(quoted: str) -> re.Pattern[str]:
    return re.compile(r".{0,80}?".join(map(re.escape, quoted.strip("… ").split("…"))))


def test_latency_means_the_same_in_the_metrics_the_dashboard_and_its_page():
    (meant,) = [each.help for each in METRICS if each.name == "dedup_end_to_end_seconds"]
    assert f"Latency is the t{meant[1:]}" in text_of(ROOT / "docs" / "dashboard.md")
    span = meant.partition(".")[0].removeprefix("Time ")
    assert f'<h3>Latency<span class="wide">, {span}</span></h3>' in text_of(
        ROOT / "dedup" / "web" / "static" / "index.html"
    )


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_metrics_and_headers_that_a_page_names_exist(page):
    text = text_of(page)
    metrics = {metric.name for metric in METRICS}
    columns = set(re.findall(r'"(dedup_[a-z_]+)":', text_of(ROOT / "dedup" / "spark" / "dataframe.py")))
    assert set(re.findall(r"\bdedup_[a-z_]+\b(?!\.py)", text)) <= metrics | columns
    named_headers = set(re.findall(r"`(dedup-[a-z-]+)`", text))
    ours = {value for name, value in vars(publish).items() if name.isupper() and isinstance(value, str)}
    ours.add(EXTRACTED)
    assert named_headers - {"dedup-streams", *CANDIDATES} <= ours


NOT_YET: set[str] = set()
"""Named by messages of the program, but not there: to be made, or to be named no more."""


def test_commands_that_pages_and_messages_name_exist_with_these_options():
    group = get_command(create_app())
    options = {name: options_of(command) for name, command in group.commands.items()}
    texts = [text_of(page) for page in PAGES] + messages()
    lacking = {
        f"{name}{rest}"
        for name, rest in {found for text in texts for found in re.findall(r"`dedup ([a-z]+)([^`]*)`", text)}
        if name not in options or not set(re.findall(r"--[a-z-]+", rest)) <= {*options[name], "--help"}
    }
    assert lacking <= NOT_YET


def options_of(command) -> set[str]:
    """Return the options of a command, or of all commands below it: `dedup spark run --checkpoint`."""
    below = [option for name in getattr(command, "commands", {}) for option in options_of(command.commands[name])]
    return {option for own in command.params for option in own.opts} | set(below)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page):
    for target in LINK.findall(FENCE.sub("", text_of(page))):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        if anchor and there.suffix == ".png":
            assert anchor in {"only-light", "only-dark"}, target  # which theme of the site shows the picture
        elif anchor:
            assert anchor in anchors(there), target


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text_of(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_the_tests_that_a_page_names_exist(page):
    for path, *names in TEST_ID.findall(text_of(page)):
        assert (ROOT / path).is_file(), path
        for name in filter(None, names):
            assert re.search(rf"^\s*(?:async def|def|class) {name}\b", text_of(ROOT / path), re.MULTILINE), (
                f"{path}::{name}"
            )


def test_the_readme_begins_with_two_commands_of_one_line():
    first, second, *_ = (found[2].splitlines() for found in FENCE.finditer(text_of(ROOT / "README.md")))
    assert len(first) == len(second) == 1
    assert first[0].endswith(".venv/bin/dedup demo")
    assert ".venv/bin/python -m pytest -q" in second[0]


def test_the_readme_shows_a_topology_file_as_it_is():
    assert text_of(ROOT / "topologies" / "simplest.yaml") in text_of(ROOT / "README.md")


def test_the_licence_is_complete():
    text = text_of(ROOT / "LICENSE")
    assert all(f"\n   {number}. " in text for number in range(1, 10))
    assert "END OF TERMS AND CONDITIONS" in text


def test_decisions_have_numbers_of_their_own():
    numbers = [path.name[:4] for path in sorted((ROOT / "docs" / "decisions").glob("*.md"))]
    assert numbers == [f"{number:04}" for number in range(1, len(numbers) + 1)]


def generator():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["topology-file.md", "config-file.md", "metrics.md", "cli.md", "api.md"])
def test_a_generated_page_has_not_drifted(page):
    made = generator().PAGES[page]()
    assert made == text_of(ROOT / "docs" / page), "run: python docs/generate.py"


MAPPED = ("dedup", "tests", "docs", "bench")


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_the_code_that_a_map_names_is_there(page):
    """`READERS` and `_refuse_impossible` were named for weeks after they were renamed."""
    quoted = re.findall(r"`([A-Za-z_]\w*(?:\.\w+)*)`", FENCE.sub("", text_of(ROOT / page)))
    names = {part for name in quoted if not name.endswith((".py", ".md", ".yaml", ".json")) for part in name.split(".")}
    assert len(names) > 20
    code = "\n".join(text_of(path) for folder in ("dedup", "tests") for path in sorted((ROOT / folder).rglob("*.py")))
    words = set(re.findall(r"\w+", code)) | {path.stem for path in (ROOT / "dedup").rglob("*")}
    # What belongs to Faust, and to the settings of tools.
    others = {"_stop_consumer", "importlinter", "testpaths"}
    assert names - words - others == set()
    files = ["/" + path.relative_to(ROOT).as_posix() for folder in MAPPED for path in (ROOT / folder).rglob("*.py")]
    named = set(re.findall(r"`([\w./]+\.py)`", FENCE.sub("", text_of(ROOT / page))))
    assert {name for name in named if not any(path.endswith(f"/{name}") for path in files)} == set()
