"""Picks sentences at random from the README, docs, help texts, and docstrings, for a reader to judge.

    python docs/sentences.py --seed 1 --count 40

Each sentence is printed with its place. The same seed and the same texts give the same sentences.
"""
# ruff: noqa: INP001  # a script beside its pages, not a package

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).parent.parent
_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`*\[])")
_FEWEST_WORDS = 5


def main(
    *,
    seed: Annotated[int, typer.Option(help="Seed of the choice.")] = 1,
    count: Annotated[int, typer.Option(help="Number of sentences.")] = 40,
) -> None:
    """Print ``count`` sentences with their places."""
    found = sorted(set(_of_pages()) | set(_of_code()))
    for number, (place, sentence) in enumerate(random.Random(seed).sample(found, count), 1):  # noqa: S311  # no secret
        typer.echo(f"{number}. {sentence}  [{place}]")
    typer.echo(f"{count} of {len(found)} sentences, seed {seed}")


def _of_pages() -> Iterator[tuple[str, str]]:
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for paragraph in re.split(r"\n\s*\n|\n(?=[-*|#>]|\d+\. )", text):
            if not paragraph.startswith(("|", "#", "!")):
                yield from _sentences(path, paragraph.lstrip("-*> 0123456789."))


def _of_code() -> Iterator[tuple[str, str]]:
    """Yield the sentences of docstrings, which include the commands' help, and of the options' help."""
    for path in sorted((ROOT / "dedup").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                for paragraph in re.split(r"\n\s*\n", ast.get_docstring(node) or ""):
                    yield from _sentences(path, paragraph)
            elif isinstance(node, ast.keyword) and node.arg == "help" and isinstance(node.value, ast.Constant):
                yield from _sentences(path, str(node.value.value))


def _sentences(path: Path, paragraph: str) -> Iterator[tuple[str, str]]:
    for sentence in _END.split(" ".join(paragraph.split())):
        if len(sentence.split()) >= _FEWEST_WORDS and sentence.endswith((".", "!", "?")):
            yield str(path.relative_to(ROOT)), sentence


if __name__ == "__main__":
    typer.run(main)
