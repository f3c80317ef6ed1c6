"""Draws which package of dedup/ imports which: `python docs/import_graph.py CHECKOUT PICTURE.svg TITLE`.

A box is a package with its number of modules, an arrow the imports from one package to another, as thick as they are
many. Imports for type checkers and in functions count. Red: packages with modules that import each other in a
circle. Imports of the modules at the root are not drawn.
"""
# ruff: noqa: INP001, T201  # a script beside its pages, not a package

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

WIDTH, ROW, BOX, HEIGHT = 960, 104, 128, 46
ROOT = "(root)"
LAYERS = (
    ("cli",),
    ("spark", "chaos"),
    ("edges", "connect", "verify", "proof"),
    ("worker", "web", "local", "embedded"),
    ("session", "kafka"),
    ("store",),
    ("topology",),
    ("core",),
    (ROOT,),
)


def modules_of(root: Path) -> dict[str, Path]:
    """Return module -> file; packages' own `__init__` left out."""
    files = (path for path in (root / "dedup").rglob("*.py") if path.name != "__init__.py")
    return {".".join(path.relative_to(root).with_suffix("").parts): path for path in files}


def imports_of(modules: Mapping[str, Path]) -> dict[str, set[str]]:
    """Return module -> the modules it imports."""
    found: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                for each in node.names:
                    found[name] |= {node.module, f"{node.module}.{each.name}"} & modules.keys() - {name}
    return found


def in_circles(imports: Mapping[str, set[str]]) -> set[str]:
    """Return the modules that import themselves by way of others."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        left = [start]
        while left:
            new = imports[left.pop()] - seen
            seen |= new
            left += new
        return seen

    return {name for name in imports if name in reached(name)}


def package_of(module: str) -> str:
    """Return the package below dedup/, or the name for its root."""
    parts = module.split(".")
    return parts[1] if len(parts) > 2 else ROOT  # noqa: PLR2004  # dedup, package, module


def drawn(modules: Mapping[str, Path], imports: Mapping[str, set[str]], title: str) -> str:
    """Return the picture."""
    sizes = Counter(package_of(name) for name in modules)
    circles = in_circles(imports)
    edges: Counter[tuple[str, str]] = Counter()
    bad: defaultdict[str, int] = defaultdict(int)
    for name, targets in imports.items():
        for target in targets:
            pair = package_of(name), package_of(target)
            edges[pair] += pair[0] != pair[1]
    for name in circles:
        bad[package_of(name)] += 1
    rows = [[package for package in layer if package in sizes] for layer in LAYERS]
    rows = [row for row in rows if row]
    at = {
        package: (WIDTH * (column + 1) / (len(row) + 1), 84 + ROW * number)
        for number, row in enumerate(rows)
        for column, package in enumerate(row)
    }
    tall = 84 + ROW * len(rows)
    crossing = sum(edges.values())
    told = f"{len(modules)} modules, {crossing} imports across packages, {len(circles)} modules in circles"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {tall}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{tall}" fill="#fff"/>',
        f'<text x="24" y="32" font-size="17" font-weight="bold">{title}</text>',
        f'<text x="24" y="52" font-size="14" fill="#555">{told}</text>',
    ]
    for (source, target), count in sorted(edges.items(), key=lambda each: each[1]):
        if count and target != ROOT:
            (x1, y1), (x2, y2) = at[source], at[target]
            bend = (x1 + x2) / 2 + (y2 - y1) * 0.35 * (1 if x1 <= WIDTH / 2 else -1) * (abs(y2 - y1) > ROW)
            color = "#c0392b" if y2 <= y1 else "#2b78b9"
            way = f"M{x1:.0f},{y1 + HEIGHT / 2:.0f} Q{bend:.0f},{(y1 + y2) / 2:.0f} {x2:.0f},{y2 - HEIGHT / 2:.0f}"
            style = f'stroke="{color}" stroke-opacity="0.45" stroke-width="{min(1 + count / 6, 9):.1f}"'
            lines.append(f'<path d="{way}" fill="none" {style}/>')
    for package, (x, y) in at.items():
        color = "#c0392b" if bad[package] else "#2b78b9"
        inside = f"{sizes[package]} modules" + (f", {bad[package]} in circles" if bad[package] else "")
        place = f'x="{x - BOX / 2:.0f}" y="{y - HEIGHT / 2:.0f}" width="{BOX}" height="{HEIGHT}" rx="6"'
        middle = f'x="{x:.0f}" text-anchor="middle"'
        lines += [
            f'<rect {place} fill="#eef3f7" stroke="{color}" stroke-width="1.5"/>',
            f'<text {middle} y="{y - 3:.0f}" font-size="14" font-weight="bold">{package}</text>',
            f'<text {middle} y="{y + 15:.0f}" font-size="11" fill="#555">{inside}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    checkout, picture, title = sys.argv[1:]
    found = modules_of(Path(checkout))
    Path(picture).write_text(drawn(found, imports_of(found), title), encoding="utf-8")
    print(picture)
