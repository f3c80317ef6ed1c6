"""Records the demo: `python docs/demo_recording.py` runs `dedup demo --fast` and draws what it printed.

The picture is an SVG of text: each line appears after the pause that came before it, except that pauses are cut to
PAUSE_S. With `prefers-reduced-motion`, all lines are there at once.
"""
# ruff: noqa: INP001  # a script beside its pages, not a package

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Final

PICTURE: Final = Path(__file__).parent / "images" / "demo.svg"
COMMAND: Final = ("dedup", "demo", "--fast")
PAUSE_S: Final = 1.2
COLUMN, LINE, LEFT, TOP, FONT = 7.83, 18, 18, 62, 13
_STYLE: Final = (
    "text{font:%dpx ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#d7dce5;"
    "white-space:pre}text.c{fill:#8fb8ff}text.p{fill:#7bd88f;font-weight:600}"
    "@keyframes s{to{opacity:1}}g{opacity:0;animation:s .01s forwards}"
    "@media (prefers-reduced-motion:reduce){g{opacity:1;animation:none}}"
)


@dataclass(frozen=True, slots=True)
class Line:
    """One printed line, and the time from the command's start until it was printed."""

    text: str
    after_s: float


def recorded(command: Sequence[str]) -> Iterator[Line]:
    """Yield each line that the command prints. Raises RuntimeError if it fails."""
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603  # our own
        for text in process.stdout or ():
            yield Line(text.rstrip("\n"), time.monotonic() - began)
    if process.returncode:
        raise RuntimeError(f"{command[0]} ended with exit code {process.returncode}")


def drawn(lines: Sequence[Line]) -> str:
    """Return the picture of a terminal in which the lines appear."""
    width = round(2 * LEFT + COLUMN * max(len(line.text) for line in lines))
    height = TOP + LINE * (len(lines) + 1)
    shown = [_text("$ " + " ".join(COMMAND), 0, "c", 0.0)]
    begins_s, before_s = 0.6, 0.0
    for number, line in enumerate(lines, 1):
        begins_s += min(line.after_s - before_s, PAUSE_S)
        before_s = line.after_s
        shown.append(_text(line.text, number, "p" if line.text.startswith("lost ") else "", begins_s))
    dots = "".join(f'<circle cx="{20 + 18 * at}" cy="20" r="5.5" fill="#4a5160"/>' for at in range(3))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        ' role="img">'
        f"<title>A recording of {' '.join(COMMAND)}: {escape(lines[-1].text)}</title><style>{_STYLE % FONT}</style>"
        f'<rect width="{width}" height="{height}" rx="10" fill="#171a21"/>{dots}\n' + "\n".join(shown) + "\n</svg>\n"
    )


def _text(text: str, row: int, kind: str, begins_s: float) -> str:
    at = f'x="{LEFT}" y="{TOP + LINE * row}"'
    length = f' textLength="{COLUMN * len(text):.0f}"' if text else ""
    return f'<g style="animation-delay:{begins_s:.2f}s"><text {at}{length} class="{kind}">{escape(text)}</text></g>'


if __name__ == "__main__":
    PICTURE.write_text(drawn(list(recorded((str(Path(sys.executable).parent / COMMAND[0]), *COMMAND[1:])))), "utf-8")
