"""The pictures of the window in docs/semantics.md: run `python docs/window_pictures.py` after a change of the rule.

Nothing is drawn from memory: every coloured stretch is what `dedup.core.reference_model` says of each time.
"""
# ruff: noqa: INP001  # a script beside its pages, not a package

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Final

from dedup.core.reference_model import ModelRecord, ModelRules, ReferenceModel
from dedup.core.window import Source

PICTURES: Final = Path(__file__).parent / "pictures"
COLOURS: Final = {"unique": "#2a78b8", "duplicate": "#d98324", "late": "#8a8f98"}
"""Told apart without colour, too: each stretch is labelled."""
STYLE: Final = (
    "<style>svg{fill:#222}.panel{fill:#fff}.line{stroke:#444}.ring{stroke:#222}"
    "@media (prefers-color-scheme: dark){svg{fill:#ddd}.panel{fill:#1e2129}.line{stroke:#999}.ring{stroke:#1e2129}}"
    "</style>"
)
"""The colors of both themes. A browser gives a picture the theme of the page that shows it."""
WIDTH, LEFT, RIGHT, LANE, TOP = 760, 150, 20, 46, 44


@dataclass(frozen=True, slots=True)
class Lane:
    """One line of a picture: what has been judged before, and of which ID every time is asked."""

    label: str
    before: Sequence[tuple[str, int]]
    asked: str


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawing of what becomes of a record at each time, given what came before."""

    name: str
    title: str
    rules: ModelRules
    first: int
    last: int
    lanes: Sequence[Lane]

    def verdicts(self, lane: Lane) -> list[str]:
        """Return the verdict of each time from ``first`` to ``last``, each on a model of its own."""
        found = []
        for time in range(self.first, self.last + 1):
            model = ReferenceModel(self.rules, ((0, 0),))
            for row, (name, at) in enumerate([*lane.before, (lane.asked, time)]):
                verdict = model.judge(ModelRecord(name.encode(), at, Source(0, 0, row))).kind
            found.append(verdict)
        return found


RULES: Final = ModelRules(guard_ms=10, grace_ms=10, extend=False, extend_at_most_ms=0)
EXTENDED: Final = ModelRules(guard_ms=10, grace_ms=10, extend=True, extend_at_most_ms=20)
ALL: Final = (
    Picture(
        "both-directions",
        "An ID seen at 100, guard period 10: what becomes of its next record",
        RULES,
        86,
        114,
        (Lane("same ID", (("a", 100),), "a"), Lane("another ID", (("a", 100),), "b")),
    ),
    Picture(
        "late",
        "Stream time 100, guard period 10, grace 10: old records",
        RULES,
        74,
        104,
        (
            Lane("ID never seen", (("s", 100),), "a"),
            Lane("ID seen at 92", (("a", 92), ("s", 100)), "a"),
            Lane("ID seen at 82", (("a", 82), ("s", 100)), "a"),
            Lane("ID seen at 78", (("a", 78), ("s", 100)), "a"),
        ),
    ),
    Picture(
        "extend",
        "extend: true, guard period 10, at most 20: duplicates move the end",
        EXTENDED,
        96,
        134,
        (
            Lane("seen at 100", (("a", 100),), "a"),
            Lane("and at 109", (("a", 100), ("a", 109)), "a"),
            Lane("and at 118", (("a", 100), ("a", 109), ("a", 118)), "a"),
            Lane("and at 127", (("a", 100), ("a", 109), ("a", 118), ("a", 127)), "a"),
        ),
    ),
)


def svg(picture: Picture) -> str:
    """Return the picture as SVG, readable on light and on dark."""
    step = (WIDTH - LEFT - RIGHT) / (picture.last - picture.first + 1)
    height = TOP + LANE * len(picture.lanes) + 46

    def x(time: float) -> float:
        return LEFT + (time - picture.first) * step

    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
            f'font-family="sans-serif" font-size="13">'
        ),
        f"<title>{escape(picture.title)}</title>",
        STYLE,
        f'<rect class="panel" width="{WIDTH}" height="{height}" rx="6"/>',
        f'<text x="12" y="24" font-size="15" font-weight="bold">{escape(picture.title)}</text>',
    ]
    for number, lane in enumerate(picture.lanes):
        parts += _lane(picture, lane, TOP + number * LANE, x)
    axis = TOP + LANE * len(picture.lanes) + 6
    parts.append(f'<line x1="{LEFT}" y1="{axis}" x2="{WIDTH - RIGHT}" y2="{axis}" class="line"/>')
    every = 2 if picture.last - picture.first < 32 else 4  # noqa: PLR2004  # as many labels as fit
    for time in range(picture.first + picture.first % every, picture.last + 1, every):
        parts.append(f'<text x="{x(time + 0.5):.1f}" y="{axis + 16}" text-anchor="middle">{time}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{axis + 32}" text-anchor="end">event time of the record</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _lane(picture: Picture, lane: Lane, top: float, x: Callable[[float], float]) -> Iterator[str]:
    """Yield a line of the picture: a stretch per verdict, a ring where the ID was seen before."""
    yield f'<text x="12" y="{top + 23}">{escape(lane.label)}</text>'
    time = picture.first
    for verdict, group in groupby(picture.verdicts(lane)):
        length = len(list(group))
        width = x(time + length) - x(time)
        size = f'width="{width - 2:.1f}" height="26"'
        yield f'<rect x="{x(time) + 1:.1f}" y="{top + 6}" {size} fill="{COLOURS[verdict]}"/>'
        if width > 7.5 * len(verdict):
            place = f'x="{x(time) + width / 2:.1f}" y="{top + 24}" text-anchor="middle"'
            yield f'<text {place} fill="#ffffff" font-weight="bold">{verdict}</text>'
        time += length
    for name, at in lane.before:
        if name == lane.asked:
            ring = 'class="ring" r="4.5" fill="#ffffff" stroke-width="2"'
            yield f'<circle cx="{x(at + 0.5):.1f}" cy="{top + 6}" {ring}/>'


def main() -> None:
    """The files in docs/pictures are what the rule says."""
    PICTURES.mkdir(exist_ok=True)
    for picture in ALL:
        (PICTURES / f"{picture.name}.svg").write_text(svg(picture), encoding="utf-8")
        sys.stdout.write(f"{picture.name}.svg\n")


if __name__ == "__main__":
    main()
