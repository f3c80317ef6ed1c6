"""Defines the report of a verification: counts per partition, violations, and records that are not provable."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

ViolationKind = Literal[
    "lost",
    "duplicated",
    "phantom",
    "changed",
    "reordered",
    "wrong_late",
    "wrong_dead_letter",
    "wrong_duplicate",
    "unbalanced",
]

MEANINGS: Final[dict[ViolationKind, str]] = {
    "lost": "judged, but absent from the topic it belongs to",
    "duplicated": "its tracking ID is present more often than the guard period allows",
    "phantom": "present, but no judged record belongs there",
    "changed": "key, value, headers, or timestamp are not those of the source record",
    "reordered": "not in the order of the log",
    "wrong_late": "in the late topic, but the model does not call it late",
    "wrong_dead_letter": "a dead letter for a reason that, according to the model, does not apply",
    "wrong_duplicate": "in the duplicates or conflicts topic, but the model does not put it there",
    "unbalanced": "the number of records read is not the sum of the verdicts",
}

BY_THE_TOPOLOGY_NOW: Final = (
    "Every record was judged by the topology file that was given; no topic says which rule was in force earlier. If "
    "the topology was changed and its state was kept, records that were judged before the change may be reported "
    'although nothing is wrong with them. "Verify after a change" in docs/operations.md says how to tell.'
)
"""What a report with violations says about itself."""
SAMPLES_PER_KIND: Final = 100
PLACES_PER_SCHEMA: Final = 5
_MOST_BUCKETS: Final = 240
_FIRST_BUCKET_MS: Final = 1_000
VERDICTS: Final = ("unique", "duplicates", "late", "dead_letters")


@dataclass(frozen=True, slots=True)
class Violation:
    """A record that contradicts the model."""

    kind: ViolationKind
    place: str
    """The place of the record, as ``topic/partition offset n``."""
    text: str


@dataclass(slots=True)
class GoneSchema:
    """The records whose schema is no longer in the schema registry or among the exported schemas."""

    records: int = 0
    first: list[str] = field(default_factory=list)
    """The places of the first `PLACES_PER_SCHEMA` records, as ``topic/partition offset n``."""


@dataclass(slots=True)
class Books:
    """The model's counts of records by verdict for one partition."""

    topic: str
    partition: int
    read: int = 0
    unique: int = 0
    """The number of records that were forwarded as the first record with their ID, including forwarded conflicts."""
    exempt: int = 0
    """The number of records without an ID or a value that are marked and forwarded, but not judged."""
    filtered: int = 0
    """The number of forwarded records for which the flow yields nothing in the replay."""
    sent_on: int = 0
    """The number of source records from which the flow made at least one record in the topics.

    With a flow, every forwarded record is in ``filtered`` or ``sent_on``, unless it is lost or not provable.
    """
    duplicates: int = 0
    conflicts: int = 0
    """The number of duplicates whose payload differs from that of every sighting in range."""
    late: int = 0
    dead_letters: int = 0
    unjudged: int = 0
    """The number of records in ``not_provable`` whose verdict and result are unknown because a schema was deleted."""
    replayed: int = 0
    """The number of records in ``read`` that were sent again by ``dedup replay``."""
    pending: int = 0
    """The number of offsets from the committed offset to the end, as in `dedup status`, or 0 if they contain no record.
    """
    skipped: int = 0
    """The number of offsets that were never judged, because they precede the topology's start."""
    not_provable: int = 0
    """The number of records in ``read`` for which the log alone cannot show that the verdict was right."""
    ended: int | None = None
    """The number of records that were written to a topic or correctly dropped; None if the number is unknown."""

    @property
    def balanced(self) -> bool:
        """True if the counts of verdicts add up to ``read`` and, if ``ended`` is known, ``ended`` equals ``read``."""
        by_model = self.unique + self.exempt + self.duplicates + self.late + self.dead_letters + self.unjudged
        return self.read == by_model and self.ended in {None, self.read}


@dataclass(slots=True)
class Timeline:
    """The number of verdicts over event time, in at most a few hundred steps regardless of the time span."""

    step_ms: int = _FIRST_BUCKET_MS
    counts: dict[int, list[int]] = field(default_factory=dict)
    """Maps the start of each step in ms to the number of records by verdict, in the order of ``VERDICTS``."""
    undated: dict[str, int] = field(default_factory=dict)
    """Maps each verdict to its number of records without a usable event time, which a time axis cannot show."""

    def add(self, verdict: str, time_ms: int | None, number: int = 1) -> None:
        """Count ``number`` records with this event time. If there are too many steps, merge them in pairs."""
        if time_ms is None:
            self.undated[verdict] = self.undated.get(verdict, 0) + number
            return
        start = time_ms - time_ms % self.step_ms
        counts = self.counts.get(start)
        if counts is None:
            counts = self.counts[start] = [0] * len(VERDICTS)
        counts[VERDICTS.index(verdict)] += number
        while len(self.counts) > _MOST_BUCKETS:
            self.step_ms *= 2
            finer, self.counts = self.counts, {}
            for start, counts in finer.items():
                wider = self.counts.setdefault(start - start % self.step_ms, [0] * len(VERDICTS))
                wider[:] = map(sum, zip(wider, counts, strict=True))

    def add_all(self, verdict: str, times_ms: npt.NDArray[np.int64]) -> None:
        """Count records with these event times."""
        starts, numbers = np.unique(times_ms - times_ms % self.step_ms, return_counts=True)
        for start, number in zip(starts.tolist(), numbers.tolist(), strict=True):
            self.add(verdict, start, number)


@dataclass(slots=True)
class Report:
    """The result of a verification, with the number of violations of each kind and some examples."""

    topology: str
    cluster: str
    method: str
    """A description of the parts that were replayed, and of those that could only be checked without regard to order.
    """
    started_at_ms: int
    seconds: float = 0.0
    books: list[Books] = field(default_factory=list)
    counts: dict[ViolationKind, int] = field(default_factory=lambda: dict.fromkeys(MEANINGS, 0))
    samples: list[Violation] = field(default_factory=list)
    sample: int = 1
    """The verification judged one in every ``sample`` tracking IDs."""
    unsampled: int = 0
    """The number of records that were not judged, because their IDs are not in the sample."""
    not_provable: dict[str, int] = field(default_factory=dict)
    """Maps each reason to the number of records that are not provable for that reason."""
    schemas_gone: dict[str, GoneSchema] = field(default_factory=dict)
    """Maps the ID of each deleted schema to the judged records with this schema, sampled or not."""
    timeline: Timeline = field(default_factory=Timeline)

    @property
    def passed(self) -> bool:
        """True if no violation was found. A record that is not provable does not count as a violation."""
        return not any(self.counts.values())

    @property
    def read(self) -> int:
        """The number of judged records in all partitions."""
        return sum(books.read for books in self.books)

    def copy(self) -> Report:
        """Return a copy for `restore`. The copy shares the books and the timeline, because reading a log does not
        change them.
        """
        gone = deepcopy(self.schemas_gone)
        counts, why = dict(self.counts), dict(self.not_provable)
        return replace(
            self, books=[*self.books], samples=[*self.samples], counts=counts, not_provable=why, schemas_gone=gone
        )

    def restore(self, earlier: Report) -> None:
        """Restore the state in which `copy` returned ``earlier``."""
        for each in fields(self):
            setattr(self, each.name, getattr(earlier, each.name))

    def violation(self, kind: ViolationKind, place: str, text: str) -> None:
        """Count a violation, and keep the first `SAMPLES_PER_KIND` violations of each kind as examples."""
        self.counts[kind] += 1
        if self.counts[kind] <= SAMPLES_PER_KIND:
            self.samples.append(Violation(kind, place, text))

    def unprovable(self, reason: str, number: int = 1) -> None:
        """Count ``number`` records as not provable for the given reason."""
        if number:
            self.not_provable[reason] = self.not_provable.get(reason, 0) + number

    def schema_gone(self, schema: str, place: str) -> None:
        """Name a judged record whose schema was deleted, so that the record cannot be judged again."""
        gone = self.schemas_gone.setdefault(schema, GoneSchema())
        gone.records += 1
        if len(gone.first) < PLACES_PER_SCHEMA:
            gone.first.append(place)

    def lacking(self) -> list[str]:
        """Return one sentence for each deleted schema: the schema's ID, the number of its records, and the first of
        these records.
        """
        return [
            f"schema {schema} was deleted; records with this schema: {gone.records:,} (first: {', '.join(gone.first)}"
            + (", …)" if gone.records > len(gone.first) else ")")
            for schema, gone in self.schemas_gone.items()
        ]

    def closing_line(self) -> str:
        """Return a one-line summary: how many records were lost and duplicated, and every other count that is not 0."""
        others = "".join(
            f"  {kind} {number}"
            for kind, number in self.counts.items()
            if number and kind not in {"lost", "duplicated"}
        )
        unproved = sum(self.not_provable.values())
        tail = f"  not provable {unproved}" if unproved else ""
        tail += f"  (a sample of 1/{self.sample})" if self.sample > 1 else ""
        return f"lost {self.counts['lost']}  duplicated {self.counts['duplicated']}{others}{tail}"

    def blind_spots(self) -> list[str]:
        """Return sentences about the limits of a sample, or an empty list if all records were judged."""
        if self.sample == 1:
            return []
        sampled = (
            f"This is a sample: one tracking ID in {self.sample}, chosen by its hash, was judged with all its records; "
            f"{self.unsampled:,} records of other IDs were read for their event times only."
        )
        unseen = (
            "Not checked: losses, duplicates, and changes of IDs outside the sample; the order of a record inside the "
            "sample and one outside; whether the books of all records balance."
        )
        return [sampled, unseen]

    def to_json(self) -> str:
        """Return the report as a JSON document."""
        document = {
            "dedup_report": 1,
            "passed": self.passed,
            "topology": self.topology,
            "cluster": self.cluster,
            "method": self.method,
            "started_at_ms": self.started_at_ms,
            "seconds": round(self.seconds, 3),
            "read": self.read,
            "sample": self.sample,
            "unsampled": self.unsampled,
            "violations": self.counts,
            "not_provable": self.not_provable,
            "schemas_gone": {schema: asdict(gone) for schema, gone in self.schemas_gone.items()},
            "books": [asdict(books) | {"balanced": books.balanced} for books in self.books],
            "samples": [asdict(sample) for sample in self.samples],
            "timeline": {
                "step_ms": self.timeline.step_ms,
                "verdicts": list(VERDICTS),
                "steps": [[start, *counts] for start, counts in sorted(self.timeline.counts.items())],
                "undated": self.timeline.undated,
            },
        }
        return json.dumps(document, indent=2) + "\n"
