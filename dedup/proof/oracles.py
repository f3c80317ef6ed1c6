"""The nine oracles of `dedup chaos`, computed from what was found after a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from dedup.proof.chaos_report import Oracle
from dedup.proof.report import Report
from dedup.proof.witness import Sightings


@dataclass(slots=True)
class Evidence:
    """What was found after a run; what could not be found out is None, with the reason in `unknown`."""

    verified: Report | None = None
    seen: Sightings | None = None
    """By the reader that looked on all the while."""
    reached: bool = False
    """The reader came to the output's end: no transaction is open there."""
    judged: bool = False
    """The group has no lag."""
    stores: int = 0
    wrong_stores: list[str] | None = None
    zombies: int = 0
    """Workers frozen beyond their session."""
    fenced: int = 0
    """Tasks that the broker told that another owner has their partition."""
    batches: int = 0
    owners: int = 0
    behind: int | None = None
    """Committed batches of an older epoch behind a newer one: what a zombie had visible."""
    unprovoked: list[str] = field(default_factory=list)
    away: int = 0
    """Ends of workers while the broker was away."""
    unclean: list[str] = field(default_factory=list)
    starts: int = 0
    unknown: dict[str, str] = field(default_factory=dict)
    """Name of an oracle -> why it could not be computed."""


def oracles(found: Evidence) -> list[Oracle]:
    """Return O1 to O9; one that could not be computed did not hold."""
    return [*_of_records(found), *_of_workers(found)]


def _of_records(found: Evidence) -> list[Oracle]:
    report, seen = found.verified, found.seen
    counts = report.counts if report is not None else {}
    lost, doubled = counts.get("lost", 0), counts.get("duplicated", 0)
    others = sum(counts.values()) - lost - doubled
    books = report.books if report is not None else []
    unbalanced = [each for each in books if not each.balanced]
    there = report is not None
    watched = "it did not look on" if seen is None else f"the reader {seen.duplicated} in {seen.records:,} records"
    return [
        _oracle(found, "O1", "nothing is lost", there and not lost, f"lost {lost} of {report.read if report else 0:,}"),
        _oracle(
            found,
            "O2",
            "nothing is duplicated, also for the reader that looked on",
            there and not doubled and seen is not None and not seen.duplicated,
            f"verify {doubled}, {watched}",
        ),
        _oracle(found, "O3", "order and content are the source's", there and not others, f"{others} violations"),
        _oracle(found, "O4", "the books balance", there and not unbalanced, f"{len(books)} partitions"),
        _oracle(
            found,
            "O5",
            "stores are the fold of their changelog",
            found.wrong_stores == [],
            found.wrong_stores[0] if found.wrong_stores else f"{found.stores} stores",
        ),
        _oracle(
            found,
            "O6",
            "no lag and no open transaction is left",
            found.judged and found.reached,
            _alive(found),
        ),
    ]


def _alive(found: Evidence) -> str:
    if not found.judged:
        return "records are left that nobody judged"
    return "everything judged and read" if found.reached else "the reader does not come to the output's end"


def _of_workers(found: Evidence) -> list[Oracle]:
    doubled = found.seen.duplicated if found.seen is not None else None
    return [
        _oracle(
            found,
            "O7",
            "nothing of a zombie is visible",
            found.behind == 0 and doubled == 0,
            f"{found.zombies} frozen beyond the session, {found.fenced} tasks fenced; {found.behind} of "
            f"{found.batches:,} batches by {found.owners} owners stand behind a newer owner's",
        ),
        _oracle(
            found,
            "O8",
            "no worker ended that nothing had hit",
            not found.unprovoked,
            found.unprovoked[0] if found.unprovoked else f"{found.away} ended while the broker was away",
        ),
        _oracle(
            found,
            "O9",
            "every SIGTERM ended in good order",
            not found.unclean,
            found.unclean[0] if found.unclean else f"{found.starts} starts",
        ),
    ]


def _oracle(found: Evidence, name: str, meaning: str, held: bool, figure: str) -> Oracle:  # noqa: FBT001  # a row
    why = found.unknown.get(name)
    return Oracle(name, meaning, held and why is None, figure if why is None else f"not known: {why}")
