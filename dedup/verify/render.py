"""Renders a report as a table on the terminal and as a self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Final

from rich.console import Console
from rich.table import Table

from dedup.quantities import counted
from dedup.verify.report import BY_THE_TOPOLOGY_NOW, MEANINGS, VERDICTS, Books, Report, Timeline

_SHOWN_ON_THE_TERMINAL: Final = 20
_SHORTEST_NAME: Final = 12
_COLOURS: Final = ("#2a78d6", "#eda100", "#1baf7a", "#e34948")
_EXEMPT_COLOUR: Final = "#8a63d2"
WIDTH, LEFT = 960, 64
"""The widths, in pixels, of a plot and of the labels on its left side."""
_HEIGHT, _BOTTOM = 240, 28
_BAR, _NAMES, _NAME_CHARACTERS, _MOST_BARS = 20, 240, 34, 48
_COLUMNS: Final = (
    "read",
    "unique",
    "exempt",
    "filtered",
    "sent_on",
    "duplicates",
    "late",
    "dead_letters",
    "unjudged",
    "pending",
    "not_provable",
)
_ONLY_IF_ANY: Final = frozenset({"exempt", "filtered", "sent_on", "unjudged", "pending", "not_provable"})
_OUTCOMES: Final = {**dict(zip(VERDICTS, _COLOURS, strict=True)), "exempt": _EXEMPT_COLOUR}

_STYLE: Final = """
:root{color-scheme:light dark;--ink:#1a1a19;--soft:#6b6a66;--line:#dddcd6;--page:#fcfcfb;--bad:#c62f2e}
@media(prefers-color-scheme:dark){:root{--ink:#f2f1ec;--soft:#a3a29b;--line:#3a3a37;--page:#1a1a19;--bad:#ff7a78}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);max-width:1000px;margin:2rem auto;
padding:0 1rem}h1{font-size:1.4rem;margin:0}h2{font-size:1.05rem;margin:2rem 0 .5rem}p{margin:.3rem 0}
.line{font:600 1.6rem/1.4 ui-monospace,monospace}.bad{color:var(--bad)}.soft{color:var(--soft)}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums;width:100%}
th,td{padding:.25rem .6rem;text-align:right;border-bottom:1px solid var(--line)}
th{font-weight:500;color:var(--soft)}th:first-child,td:first-child,td.text{text-align:left}
svg{width:100%;height:auto}svg text{fill:var(--soft);font:12px system-ui,sans-serif}
.loud{border-left:4px solid #eda100;padding:.2rem .8rem;margin:1rem 0}
.key{display:inline-block;width:.8rem;height:.8rem;border-radius:2px;margin:0 .35rem 0 1rem;vertical-align:-1px}
"""


def print_report(report: Report, console: Console) -> None:
    """Print a report's counts, violations, records that are not provable, and closing line."""
    places = [f"{books.topic}/{books.partition}" for books in report.books]
    table = _books(report, places)
    if _too_wide(table, console) > 0:
        # A table for a narrow terminal omits lines and the middle of long names, but never a number or a partition.
        longest = max(map(len, places))
        most = longest - _too_wide(_books(report, places, with_lines=False), console)
        table = _books(report, [_cut(place, max(most, _SHORTEST_NAME)) for place in places], with_lines=False)
    console.print(table)
    for sentence in report.blind_spots():
        console.print(sentence, style="bold yellow", highlight=False)
    for sample in report.samples[:_SHOWN_ON_THE_TERMINAL]:
        console.print(f"{sample.kind}: {sample.place}: {sample.text}", style="red", markup=False, highlight=False)
    hidden = sum(report.counts.values()) - min(len(report.samples), _SHOWN_ON_THE_TERMINAL)
    if hidden > 0:
        console.print(f"… and {hidden:,} more; a report file (--report) has up to 100 of each kind")
    for reason, number in report.not_provable.items():
        console.print(
            f"not provable, {counted(number, 'record')}: {reason}", style="yellow", markup=False, highlight=False
        )
    for sentence in report.lacking():
        console.print(sentence, style="yellow", markup=False, highlight=False)
    console.print(report.closing_line(), style="bold" if report.passed else "bold red", highlight=False)


def _books(report: Report, places: Sequence[str], *, with_lines: bool = True) -> Table:
    table = Table(title=f"{report.topology}: {report.method}, {report.read:,} records in {report.seconds:.1f} s")
    if not with_lines:
        table.box, table.pad_edge, table.padding = None, False, (0, 2, 0, 0)
    sums = [sum(column) for column in zip(*map(_numbers, report.books), strict=True)]
    shown = _shown(report)
    table.add_column("partition", no_wrap=True)
    for at in shown:
        table.add_column(_COLUMNS[at].replace("_", " "), justify="right", no_wrap=True)
    table.add_column("balanced", no_wrap=True)
    for place, books in zip(places, report.books, strict=True):
        numbers = _numbers(books)
        table.add_row(place, *(f"{numbers[at]:,}" for at in shown), "yes" if books.balanced else "NO")
    if len(report.books) > 1:
        table.add_section()
        table.add_row("all", *(f"{sums[at]:,}" for at in shown), "")
    return table


def _shown(report: Report) -> list[int]:
    """Return the numbers of the columns to show, without empty columns that would take space on a narrow terminal."""
    sums = [sum(column) for column in zip(*map(_numbers, report.books), strict=True)]
    return [at for at, name in enumerate(_COLUMNS) if name not in _ONLY_IF_ANY or (sums and sums[at])]


def _too_wide(table: Table, console: Console) -> int:
    """Return the number of terminal columns by which a table is too wide for the terminal."""
    return console.measure(table, options=console.options.update(width=1_000)).maximum - console.width


def _cut(name: str, most: int) -> str:
    """Return a name, shortened in the middle if it is longer than ``most`` characters."""
    half = (most - 1) // 2
    return name if len(name) <= most else f"{name[:half]}…{name[half + 1 - most :]}"


def to_html(report: Report, command: str = "dedup verify") -> str:
    """Return the report of a command as a self-contained HTML page."""
    when = f"{_time(report.started_at_ms)} UTC"
    facts = f"{report.read:,} records judged · {report.method} · {report.cluster} · {when} · {report.seconds:.1f} s"
    exempt, shown = any(each.exempt for each in report.books), _shown(report)
    parts = [
        f"<h1>{escape(report.topology)}</h1>",
        f"<p class='line{'' if report.passed else ' bad'}'>{escape(report.closing_line())}</p>",
        f"<p class=soft>{escape(facts)}</p>",
        "".join(f"<p class=loud>{escape(sentence)}</p>" for sentence in report.blind_spots()),
        "<h2>Verdicts over event time</h2>",
        legend({name.replace("_", " "): colour for name, colour in _OUTCOMES.items() if name != "exempt" or exempt}),
        _plot(report.timeline),
        "<h2>Books</h2>",
        _bars(report.books),
        html_table(
            (
                (
                    f"{books.topic}/{books.partition}",
                    *(_numbers(books)[at] for at in shown),
                    "yes" if books.balanced else "no",
                )
                for books in report.books
            ),
            ("partition", *(_COLUMNS[at].replace("_", " ") for at in shown), "balanced"),
        ),
    ]
    if not report.passed:
        kinds = html_table((kind, number, MEANINGS[kind]) for kind, number in report.counts.items() if number)
        samples = html_table((each.kind, each.place, each.text) for each in report.samples)
        parts += ("<h2>Violations</h2>", f"<p class=soft>{escape(BY_THE_TOPOLOGY_NOW)}</p>", kinds, samples)
    if report.not_provable:
        reasons = html_table((number, reason) for reason, number in report.not_provable.items())
        parts += ("<h2>Not provable</h2><p class=soft>Neither passed nor failed.</p>", reasons)
        parts += (f"<p>{escape(sentence)}</p>" for sentence in report.lacking())
    return page(f"{command} {report.topology}", parts)


def page(title: str, parts: Iterable[str]) -> str:
    """Return an HTML page that consists of the nonempty parts, with a dark and a light color scheme."""
    head = (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
    )
    return "\n".join([*head, *(part for part in parts if part), "</html>\n"])


def _bars(books: Sequence[Books]) -> str:
    """Return an SVG image with one bar of verdicts per partition. The label of an unbalanced partition is red."""
    shown = [each for each in books if each.read][:_MOST_BARS]
    if not shown:
        return ""
    most, height = max(each.read for each in shown), _BAR * len(shown)
    rows = []
    for at, each in enumerate(shown):
        left, y, rects = float(_NAMES), at * _BAR, ""
        numbers = {name: getattr(each, name) for name in _OUTCOMES}
        for outcome, number in numbers.items():
            wide = number / most * (WIDTH - _NAMES)
            rects += _rect(left, y + 3, wide, _BAR - 6, _OUTCOMES[outcome])
            left += wide
        wrong = "" if each.balanced else " style='fill:var(--bad)'"
        label = f"{each.topic}/{each.partition}"[-_NAME_CHARACTERS:]
        name = f"<text x='{_NAMES - 8}' y='{y + _BAR - 6}' text-anchor='end'{wrong}>{escape(label)}</text>"
        rows.append(
            f"<g><title>{escape(f'{each.topic}/{each.partition}: {_as_text(numbers)}')}</title>{name}{rects}</g>"
        )
    hidden = sum(1 for each in books if each.read) - len(shown)
    rest = f"<p class=soft>{hidden} more partitions are in the table.</p>" if hidden else ""
    return f"<svg viewBox='0 0 {WIDTH} {height}' role=img aria-label='Books'>{''.join(rows)}</svg>{rest}"


def _rect(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f"<rect x='{x:.2f}' y='{y:.2f}' width='{width:.2f}' height='{height:.2f}' fill='{colour}'/>"


def _numbers(books: Books) -> list[int]:
    return [getattr(books, name) for name in _COLUMNS]


def _as_text(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {number:,}" for name, number in numbers.items() if number)


def legend(colours: Mapping[str, str]) -> str:
    """Return an HTML legend; ``colours`` maps each name to its color."""
    keys = (f"<span class=key style='background:{colour}'></span>{escape(name)}" for name, colour in colours.items())
    return f"<p class=soft>{''.join(keys)}</p>"


def plot(label: str, marks: str, height: int, most: float, span: tuple[str, str]) -> str:
    """Return an SVG plot over time; ``most`` is the greatest value, and ``span`` labels the ends of the time axis."""
    floor = height - _BOTTOM
    return (
        f"<svg viewBox='0 0 {WIDTH} {height}' role=img aria-label='{label}'>{marks}"
        f"<line x1='{LEFT}' x2='{WIDTH}' y1='{floor}' y2='{floor}' stroke='currentColor' opacity='.3'/>"
        f"<text x='{LEFT - 6}' y='18' text-anchor='end'>{most:,.0f}</text>"
        f"<text x='{LEFT - 6}' y='{floor}' text-anchor='end'>0</text>"
        f"<text x='{LEFT}' y='{height - 8}'>{span[0]}</text>"
        f"<text x='{WIDTH}' y='{height - 8}' text-anchor='end'>{span[1]}</text></svg>"
    )


def scale(span: float, most: float, height: int) -> tuple[float, float, int]:
    """Return a plot's pixels per unit of time, its pixels per unit of value, and the y position of the time axis."""
    floor = height - _BOTTOM
    return (WIDTH - LEFT) / span, (floor - 10) / most, floor


def html_table(rows: Iterable[Sequence[str | int]], head: Sequence[str] = ()) -> str:
    """Return an HTML table that scrolls if it is too wide. Cells that report a problem are red."""
    lines = ["".join(f"<th>{name}</th>" for name in head), *("".join(map(_cell, row)) for row in rows)]
    return f"<div class=scroll><table>{''.join(f'<tr>{line}</tr>' for line in lines if line)}</table></div>"


def _cell(value: str | int) -> str:
    if isinstance(value, int):
        return f"<td>{value:,}</td>"
    return f"<td class='text{' bad' if value in {'no', 'BROKEN'} else ''}'>{escape(value)}</td>"


def _plot(timeline: Timeline) -> str:
    """Return the verdicts over event time as stacked bars, and a note about records without an event time."""
    undated = ""
    if timeline.undated:
        text = _as_text(timeline.undated)
        undated = f"<p class=soft>Records without a usable event time, which are not in the chart: {text}.</p>"
    if not timeline.counts:
        return undated or "<p class=soft>No records were judged.</p>"
    first, last = min(timeline.counts), max(timeline.counts)
    steps = (last - first) // timeline.step_ms + 1
    most = max(map(sum, timeline.counts.values()))
    wide, high, floor = scale(steps, most, _HEIGHT)
    bars = []
    for start, counts in sorted(timeline.counts.items()):
        left, base, rects = LEFT + (start - first) // timeline.step_ms * wide, float(floor), ""
        title = _as_text(dict(zip(VERDICTS, counts, strict=True)))
        for number, colour in zip(counts, _COLOURS, strict=True):
            if number:
                base -= number * high
                rects += _rect(left, base, max(wide * 0.92, 0.5), number * high, colour)
        bars.append(f"<g><title>{_time(start)}: {title}</title>{rects}</g>")
    span = (_time(first), _time(last + timeline.step_ms))
    drawn = plot("Verdicts over event time", "".join(bars), _HEIGHT, most, span)
    return f"{drawn}<p class=soft>One bar is {timeline.step_ms / 1000:,.0f} s of event time.</p>{undated}"


def _time(time_ms: int) -> str:
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError):
        # Event times may be beyond the year 9999.
        return f"{time_ms} ms"
