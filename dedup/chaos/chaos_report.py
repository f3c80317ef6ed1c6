"""Creates the report of `dedup chaos`, as JSON and as an HTML page with throughput, lag, and faults over time."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from html import escape
from itertools import pairwise
from typing import Final

from dedup.chaos.fault_run import ChaosEvents, FaultType, Tick
from dedup.verify.render import LEFT, html_table, legend, page, plot, scale
from dedup.verify.report import Report

_HEIGHT: Final = 200


@dataclass(slots=True)
class Oracle:
    """A condition that must hold in every run of `dedup chaos`, and whether the condition held."""

    name: str
    meaning: str
    held: bool
    figure: str

    @property
    def verdict(self) -> str:
        """The word that reports use for the outcome: "held" or "BROKEN"."""
        return "held" if self.held else "BROKEN"


@dataclass(slots=True)
class ChaosReport:
    """The results of a whole run of `dedup chaos`."""

    topology: str
    seed: int
    seconds: float
    workers: int
    events: ChaosEvents
    verified: Report | None
    """The result of the verification; None if the verification was not possible (the oracles contain the reason)."""
    oracles: list[Oracle] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """True if the verification was possible and every oracle held."""
        return self.verified is not None and bool(self.oracles) and not self.broken

    @property
    def broken(self) -> list[Oracle]:
        """The oracles that did not hold."""
        return [oracle for oracle in self.oracles if not oracle.held]

    @property
    def closing_line(self) -> str:
        """The numbers of lost and duplicated records, and the names of the oracles that did not hold."""
        line = "nothing was verified" if self.verified is None else self.verified.closing_line()
        return line + (f"  BROKEN: {', '.join(oracle.name for oracle in self.broken)}" if self.broken else "")

    @property
    def counts(self) -> Counter[FaultType]:
        """Maps each kind of fault to the number of faults that hit their targets."""
        return Counter(fault.kind for fault in self.events.injected if fault.hit)

    def to_json(self) -> str:
        """Return the report as JSON, in which "blows" counts the faults by kind and "struck" lists all faults."""
        document = {
            "dedup_chaos": 1,
            "passed": self.passed,
            "topology": self.topology,
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "workers": self.workers,
            "blows": dict(self.counts),
            "restarts": self.events.restarts,
            "oracles": [asdict(oracle) for oracle in self.oracles],
            "struck": [asdict(fault) for fault in self.events.injected],
            "ticks": [asdict(tick) for tick in self.events.ticks],
            "verified": None if self.verified is None else json.loads(self.verified.to_json()),
        }
        return json.dumps(document, indent=2) + "\n"

    def to_html(self) -> str:
        """Return the report as a self-contained HTML page."""
        faults = ", ".join(f"{number} x {kind}" for kind, number in self.counts.most_common())
        parts = (
            f"<h1>{escape(self.topology)}: {self.seconds / 60:.1f} minutes of chaos</h1>",
            f"<p class='line{'' if self.passed else ' bad'}'>{escape(self.closing_line)}</p>",
            f"<p class=soft>{self.workers} workers · {escape(faults)} · seed {self.seed}</p>",
            html_table((each.name, each.meaning, each.figure, each.verdict) for each in self.oracles),
            "<h2>Records per second</h2>",
            self._plot("records per second", lambda now, before: (now.judged - before.judged, now.at_s - before.at_s)),
            "<h2>Lag: records sent and not judged yet</h2>",
            self._plot("lag", lambda now, _: (now.in_topic - now.judged, 1.0)),
            legend({kind: kind.colour for kind in sorted(self.counts)}),
        )
        return page(f"dedup chaos {self.topology}", parts)

    def _plot(self, label: str, figure: Callable[[Tick, Tick], tuple[float, float]]) -> str:
        """Return an SVG plot of a figure over time, with a mark for each fault that hit its target."""
        steps = [
            (now.at_s, max(0.0, number / per))
            for before, now in pairwise(self.events.ticks)
            for number, per in [figure(now, before)]
            if per > 0
        ]
        if not steps:
            return "<p class=soft>No figures were recorded.</p>"
        last_s = max(steps[-1][0], *(fault.at_s for fault in self.events.injected), 1.0)
        most = max(value for _, value in steps) or 1.0
        across, up, floor = scale(last_s, most, _HEIGHT)
        line = " ".join(f"{LEFT + at_s * across:.1f},{floor - value * up:.1f}" for at_s, value in steps)
        marks = "".join(
            f"<line x1='{LEFT + fault.at_s * across:.1f}' x2='{LEFT + fault.at_s * across:.1f}' y1='12' y2='{floor}' "
            f"stroke='{fault.kind.colour}' opacity='.55'><title>{fault.at_s:.1f} s: {escape(fault.kind)}</title></line>"
            for fault in self.events.injected
            if fault.hit
        )
        marks += f"<polyline points='{line}' fill='none' stroke='currentColor' stroke-width='1.5'/>"
        return plot(f"{label} over time", marks, _HEIGHT, most, ("0 s", f"{last_s:,.0f} s"))
