"""How dedup/ is built: names stand once, imports have no cycles, each module is tested, the public API is written down."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from typer.main import get_command

import dedup
from dedup.cli.main import create_app
from dedup.metrics import METRICS
from dedup.settings import settings_schema
from dedup.topology.ingest_file import ingest_schema
from dedup.topology.parse import json_schema
from tests.conftest import SLOW

ROOT = Path(__file__).parents[2]
API = Path(__file__).parent / "public_api.json"
SMALL_LINES = 80
FEW_IMPORTERS = 3

SMALL: Mapping[str, str] = {
    "dedup.embedded.flights": "the demo's data: where they come from, and nothing of Kafka",
    "dedup.embedded.watchdog": "a program of its own, started for each child: it must import nothing",
}
"""Modules of less than 80 lines with fewer than three importers, and why they stand alone."""

ONLY_TESTS_CALL: Mapping[str, str] = {}
"""Public names of dedup/ that nothing else in dedup/, bench/ or docs/ names, and why they are there."""

SUITES: Mapping[str, list[str]] = json.loads((Path(__file__).parent / "suites.json").read_text(encoding="utf-8"))
"""Module -> the suites below tests/ that test it, where no test of its name does."""


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted((ROOT / "dedup").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()
NAMED = {name: path for name, path in MODULES.items() if path.name != "__init__.py"}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def imported(name: str) -> Iterator[str]:
    """Yield what a module imports of dedup: at its top, in functions, and for type checkers."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "dedup":
            for each in node.names:
                full = f"{node.module}.{each.name}"
                yield full if full in MODULES else node.module


IMPORTS = {name: set(imported(name)) - {name} for name in MODULES}


def test_no_imports_go_in_a_circle():
    left = {name: set(found) for name, found in IMPORTS.items()}
    while free := [name for name, found in left.items() if not found & left.keys()]:
        for name in free:
            del left[name]
    assert not left


def test_a_small_module_has_three_importers_or_a_reason():
    importers = Counter(target for found in IMPORTS.values() for target in found)
    small = {
        name
        for name, path in NAMED.items()
        if len(path.read_text(encoding="utf-8").splitlines()) < SMALL_LINES and importers[name] < FEW_IMPORTERS
    }
    assert small == SMALL.keys()


def test_a_file_name_stands_once():
    again = [stem for stem, count in Counter(path.stem for path in NAMED.values()).items() if count > 1]
    assert not again


def test_every_module_is_in_the_glossary():
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    lacking = [path.name for path in NAMED.values() if f"`{path.name}`" not in glossary]
    gone = set(re.findall(r"`(\w+\.py)`", glossary)) - {path.name for path in NAMED.values()}
    assert not lacking
    assert not gone


def test_the_name_of_a_public_class_stands_once():
    where = defaultdict(list)
    for name, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(name)
    assert not {name: found for name, found in where.items() if len(found) > 1}


def test_nothing_is_there_for_tests_alone():
    text = "\n".join(
        path.read_text(encoding="utf-8")
        for folder, pattern in (("dedup", "*.py"), ("bench", "*.py"), ("docs", "*.py"), ("docs", "*.md"))
        for path in sorted((ROOT / folder).rglob(pattern))
    )
    words = Counter(re.findall(r"\w+", text))
    alone = {
        f"{name}.{node.name}"
        for name, tree in TREES.items()
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith("_")
        and words[node.name] == 1
    }
    assert alone == ONLY_TESTS_CALL.keys()


@pytest.mark.parametrize("name", NAMED)
def test_a_module_has_tests_of_its_name_or_names_its_suites(name: str):
    *packages, stem = name.split(".")[1:]
    own = sorted((ROOT / "tests" / "unit").joinpath(*packages).glob(f"test_{stem}*.py"))
    suites = SUITES.get(name.removeprefix("dedup."), [])
    assert own or suites
    for suite in suites:
        assert (ROOT / "tests" / suite).exists()


def test_suites_are_named_for_modules_that_are_there():
    assert {f"dedup.{name}" for name in SUITES} <= NAMED.keys()


def options(command: object, name: str) -> Iterator[str]:
    for below, each in getattr(command, "commands", {}).items():
        yield from options(each, f"{name} {below}".strip())
    if name and not hasattr(command, "commands"):
        yield " ".join([name, *sorted(opt for own in command.params for opt in own.opts if opt.startswith("--"))])


def keys(schema: Mapping[str, object], place: str = "", *, whole: Mapping[str, object] | None = None) -> Iterator[str]:
    """Yield every key that a JSON Schema knows, with those above it."""
    whole = whole or schema
    if isinstance(reference := schema.get("$ref"), str):
        yield from keys(whole["$defs"][reference.rsplit("/", 1)[1]], place, whole=whole)
    for name, below in schema.get("properties", {}).items():
        yield f"{place}{name}"
        yield from keys(below, f"{place}{name}.", whole=whole)
    for kind in ("anyOf", "oneOf", "allOf"):
        for below in schema.get(kind, ()):
            yield from keys(below, place, whole=whole)
    if isinstance(items := schema.get("items"), dict):
        yield from keys(items, place, whole=whole)


def signatures(name: str) -> Iterator[str]:
    """Yield an exported name and, of a class of ours, its public members, with the parameters of what can be called."""
    thing = getattr(dedup, name)
    yield f"{name}{parameters(thing)}" if inspect.isfunction(thing) else name
    if inspect.isclass(thing) and name not in {"Settings", "Topology"}:
        yield f"{name}{parameters(thing)}"
        for own, member in vars(thing).items():
            if not own.startswith("_"):
                yield f"{name}.{own}{parameters(member) if callable(member) else ''}"


def parameters(thing: Callable[..., object]) -> str:
    shown = [each.replace(annotation=each.empty) for each in inspect.signature(thing).parameters.values()]
    return str(inspect.Signature([each for each in shown if each.name != "self"]))


def public_api() -> dict[str, list[str]]:
    """What users name: a change of it is a change for them."""
    schemas = {"topology": json_schema(), "ingest": ingest_schema(), "config": settings_schema()}
    return {
        "python": sorted({line for name in dedup.__all__ for line in signatures(name)}),
        "commands": sorted(options(get_command(create_app()), "")),
        "metrics": sorted(each.name for each in METRICS),
        **{f"{name} keys": sorted(set(keys(schema))) for name, schema in schemas.items()},
    }


def test_the_public_api_is_what_is_written_down():
    found = public_api()
    assert found == json.loads(API.read_text(encoding="utf-8")), (
        "the public API changed: if it is meant, say so in CHANGELOG.md and run: python -m tests.unit.test_architecture"
    )


if __name__ == "__main__":
    API.write_text(json.dumps(public_api(), indent=1) + "\n", encoding="utf-8")


@pytest.mark.parametrize("test", SLOW)
def test_every_test_in_slow_txt_exists(test):
    file, _, function = test.partition("::")
    assert f"def {function.partition('[')[0]}" in (ROOT / file).read_text(encoding="utf-8")
