"""Renders a report as a table on the terminal and as a self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Final

from rich.console import Console
from rich.table import Table

from dedup.verify.report import MEANINGS, VERDICTS, Books, Report, Timeline

_SHOWN_ON_THE_TERMINAL: Final = 20
_COLOURS: Final = ("#2a78d6", "#eda100", "#1baf7a", "#e34948")
_EXEMPT_COLOUR: Final = "#8a63d2"
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 960, 240, 56, 28
_BAR, _NAMES, _NAME_CHARACTERS, _MOST_BARS = 20, 240, 34, 48
_COLUMNS: Final = ("read", "unique", "exempt", "duplicates", "late", "dead_letters", "pending", "not_provable")
_ONLY_IF_ANY: Final = frozenset({"exempt", "pending", "not_provable"})
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
    """Print the books, the violations, the records that are not provable, and the closing line."""
    table = Table(title=f"{report.topology}: {report.method}, {report.read:,} records in {report.seconds:.1f} s")
    sums = [sum(column) for column in zip(*map(_numbers, report.books), strict=True)]
    # Empty columns would take the space of others on a narrow terminal.
    shown = [at for at, name in enumerate(_COLUMNS) if name not in _ONLY_IF_ANY or (sums and sums[at])]
    table.add_column("partition", no_wrap=True)
    for at in shown:
        table.add_column(_COLUMNS[at].replace("_", " "), justify="right")
    table.add_column("balanced")
    for books in report.books:
        numbers = _numbers(books)
        cells = [f"{numbers[at]:,}" for at in shown]
        table.add_row(f"{books.topic}/{books.partition}", *cells, "yes" if books.balanced else "NO")
    if len(report.books) > 1:
        table.add_section()
        table.add_row("all", *(f"{sums[at]:,}" for at in shown), "")
    console.print(table)
    for sentence in report.blind_spots():
        console.print(sentence, style="bold yellow", highlight=False)
    for sample in report.samples[:_SHOWN_ON_THE_TERMINAL]:
        console.print(f"{sample.kind}: {sample.place}: {sample.text}", style="red", markup=False, highlight=False)
    hidden = sum(report.counts.values()) - min(len(report.samples), _SHOWN_ON_THE_TERMINAL)
    if hidden > 0:
        console.print(f"… and {hidden:,} more; the report file has up to 100 of each kind")
    for reason, number in report.not_provable.items():
        console.print(f"not provable, {number:,} records: {reason}", style="yellow", markup=False, highlight=False)
    console.print(report.closing_line(), style="bold" if report.passed else "bold red", highlight=False)


def to_html(report: Report, command: str = "dedup verify") -> str:
    """Return the report of a command as one self-contained HTML page."""
    when = datetime.fromtimestamp(report.started_at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    facts = f"{report.read:,} records judged · {report.method} · {report.cluster} · {when} · {report.seconds:.1f} s"
    parts = [
        f"<h1>{escape(report.topology)}</h1>",
        f"<p class='line{'' if report.passed else ' bad'}'>{escape(report.closing_line())}</p>",
        f"<p class=soft>{escape(facts)}</p>",
        "".join(f"<p class=loud>{escape(sentence)}</p>" for sentence in report.blind_spots()),
        "<h2>Verdicts over event time</h2>",
        _legend(report.books),
        _plot(report.timeline),
        "<h2>Books</h2>",
        _bars(report.books),
        _books(report),
        _violations(report),
        _not_provable(report),
    ]
    return page(f"{command} {report.topology}", parts)


def page(title: str, parts: Iterable[str]) -> str:
    """Return an HTML page in the reader's dark or light scheme; empty parts are left out."""
    head = (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
    )
    return "\n".join([*head, *(part for part in parts if part), "</html>\n"])


def _bars(books: Sequence[Books]) -> str:
    """Return a bar per partition that shows the verdicts on its records; unbalanced partitions are labeled in red."""
    shown = [each for each in books if each.read][:_MOST_BARS]
    if not shown:
        return ""
    most, height = max(each.read for each in shown), _BAR * len(shown)
    rows = []
    for at, each in enumerate(shown):
        left, y = float(_NAMES), at * _BAR
        numbers = {name: getattr(each, name) for name in _OUTCOMES}
        text = _as_text(numbers)
        rects = ""
        for outcome, number in numbers.items():
            colour = _OUTCOMES[outcome]
            wide = number / most * (_WIDTH - _NAMES)
            rects += f"<rect x='{left:.2f}' y='{y + 3}' width='{wide:.2f}' height='{_BAR - 6}' fill='{colour}'/>"
            left += wide
        wrong = "" if each.balanced else " style='fill:var(--bad)'"
        label = f"{each.topic}/{each.partition}"[-_NAME_CHARACTERS:]
        name = f"<text x='{_NAMES - 8}' y='{y + _BAR - 6}' text-anchor='end'{wrong}>{escape(label)}</text>"
        rows.append(f"<g><title>{escape(f'{each.topic}/{each.partition}: {text}')}</title>{name}{rects}</g>")
    hidden = sum(1 for each in books if each.read) - len(shown)
    rest = f"<p class=soft>{hidden} more partitions are in the table.</p>" if hidden else ""
    return f"<svg viewBox='0 0 {_WIDTH} {height}' role=img aria-label='Books'>{''.join(rows)}</svg>{rest}"


def _numbers(books: Books) -> list[int]:
    return [getattr(books, name) for name in _COLUMNS]


def _as_text(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {number:,}" for name, number in numbers.items() if number)


def _legend(books: Sequence[Books]) -> str:
    shown = [*VERDICTS, *(["exempt"] if any(each.exempt for each in books) else [])]
    keys = (f"<span class=key style='background:{_OUTCOMES[name]}'></span>{name.replace('_', ' ')}" for name in shown)
    return f"<p class=soft>{''.join(keys)}</p>"


def _plot(timeline: Timeline) -> str:
    """Return stacked bars, one per step of event time, and a sentence about records without an event time."""
    undated = ""
    if timeline.undated:
        text = _as_text(timeline.undated)
        undated = f"<p class=soft>Not in the chart, since they have no usable event time: {text}.</p>"
    if not timeline.counts:
        return undated or "<p class=soft>No records were judged.</p>"
    first, last = min(timeline.counts), max(timeline.counts)
    steps = (last - first) // timeline.step_ms + 1
    most = max(map(sum, timeline.counts.values()))
    wide = (_WIDTH - _LEFT) / steps
    high = (_HEIGHT - _BOTTOM - 10) / most
    bars = []
    for start, counts in sorted(timeline.counts.items()):
        left = _LEFT + (start - first) // timeline.step_ms * wide
        base = float(_HEIGHT - _BOTTOM)
        title = _as_text(dict(zip(VERDICTS, counts, strict=True)))
        rects = ""
        for number, colour in zip(counts, _COLOURS, strict=True):
            if number:
                base -= number * high
                rects += (
                    f"<rect x='{left:.2f}' y='{base:.2f}' width='{max(wide * 0.92, 0.5):.2f}' "
                    f"height='{number * high:.2f}' fill='{colour}'/>"
                )
        bars.append(f"<g><title>{_time(start)}: {title}</title>{rects}</g>")
    return (
        f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role=img aria-label='Verdicts over event time'>{''.join(bars)}"
        f"<line x1='{_LEFT}' x2='{_WIDTH}' y1='{_HEIGHT - _BOTTOM}' y2='{_HEIGHT - _BOTTOM}' stroke='currentColor' "
        f"opacity='.3'/><text x='{_LEFT - 6}' y='18' text-anchor='end'>{most:,}</text>"
        f"<text x='{_LEFT - 6}' y='{_HEIGHT - _BOTTOM}' text-anchor='end'>0</text>"
        f"<text x='{_LEFT}' y='{_HEIGHT - 8}'>{_time(first)}</text>"
        f"<text x='{_WIDTH}' y='{_HEIGHT - 8}' text-anchor='end'>{_time(last + timeline.step_ms)}</text></svg>"
        f"<p class=soft>One bar is {timeline.step_ms / 1000:,.0f} s of event time.</p>{undated}"
    )


def _time(time_ms: int) -> str:
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError):
        # Event times may lie beyond the year 9999.
        return f"{time_ms} ms"


def _books(report: Report) -> str:
    head = "".join(f"<th>{name.replace('_', ' ')}</th>" for name in _COLUMNS)
    rows = "".join(
        f"<tr><td>{escape(books.topic)}/{books.partition}</td>"
        + "".join(f"<td>{number:,}</td>" for number in _numbers(books))
        + ("<td>yes</td></tr>" if books.balanced else "<td class=bad>no</td></tr>")
        for books in report.books
    )
    table = f"<table><tr><th>partition</th>{head}<th>balanced</th></tr>{rows}</table>"
    return f"<div class=scroll>{table}</div>"


def _violations(report: Report) -> str:
    if report.passed:
        return ""
    found = "".join(
        f"<tr><td>{kind}</td><td>{number:,}</td><td class=text>{escape(MEANINGS[kind])}</td></tr>"
        for kind, number in report.counts.items()
        if number
    )
    samples = "".join(
        f"<tr><td>{each.kind}</td><td class=text>{escape(each.place)}</td><td class=text>{escape(each.text)}</td></tr>"
        for each in report.samples
    )
    return f"<h2>Violations</h2><table>{found}</table><div class=scroll><table>{samples}</table></div>"


def _not_provable(report: Report) -> str:
    if not report.not_provable:
        return ""
    rows = "".join(
        f"<tr><td>{number:,}</td><td class=text>{escape(reason)}</td></tr>"
        for reason, number in report.not_provable.items()
    )
    return f"<h2>Not provable</h2><p class=soft>Neither passed nor failed.</p><table>{rows}</table>"
