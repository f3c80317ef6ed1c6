"""What a verification found: books, violations, and what could not be proved."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Final, Literal

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
    "duplicated": "its tracking ID is there more often than the guard period allows",
    "phantom": "there, but no judged record belongs there",
    "changed": "key, value, headers or timestamp are not those of the source record",
    "reordered": "passed another record of its partition",
    "wrong_late": "in the late topic, but the model does not call it late",
    "wrong_dead_letter": "a dead letter for a reason that the model does not find",
    "wrong_duplicate": "in the duplicates or conflicts topic, but the model does not put it there",
    "unbalanced": "read is not unique + duplicates + late + dead letters",
}

SAMPLES_PER_KIND: Final = 100
_MOST_BUCKETS: Final = 240
_FIRST_BUCKET_MS: Final = 1_000

VERDICTS: Final = ("unique", "duplicates", "late", "dead_letters")


@dataclass(frozen=True, slots=True)
class Violation:
    """One record that is not as the model says."""

    kind: ViolationKind
    place: str
    """``topic/partition offset n`` of the record it is about."""
    text: str


@dataclass(slots=True)
class Books:
    """How many records of one judged partition ended where, by the model."""

    topic: str
    partition: int
    read: int = 0
    unique: int = 0
    exempt: int = 0
    """Of ``unique``: forwarded under a policy that is outside the promise, and marked so."""
    duplicates: int = 0
    conflicts: int = 0
    """Of ``duplicates``: with another payload."""
    late: int = 0
    dead_letters: int = 0
    replayed: int = 0
    """Of ``read``: sent again by ``dedup replay``."""
    pending: int = 0
    """Beyond the committed offset: not judged yet, or judged while we were reading."""
    skipped: int = 0
    """Before the offset at which the topology started: never judged."""
    not_provable: int = 0
    """Of ``read``: judged, but the log no longer says what the verdict had to be."""
    ended: int | None = None
    """Records found where they ended, duplicates that are dropped included; None where that can not be told apart."""

    @property
    def balanced(self) -> bool:
        """Whether every record read ended in exactly one place, by the model and, where it can be told, in Kafka."""
        by_model = self.unique + self.duplicates + self.late + self.dead_letters
        return self.read == by_model and self.ended in {None, self.read}


@dataclass(slots=True)
class Timeline:
    """Verdicts over event time, in at most a few hundred steps however long the span is."""

    step_ms: int = _FIRST_BUCKET_MS
    counts: dict[int, list[int]] = field(default_factory=dict)
    """Start of the step in ms -> records by verdict, in the order of ``VERDICTS``."""

    def add(self, time_ms: int, verdict: int, number: int = 1) -> None:
        """Count a record; the steps become twice as wide when there are too many."""
        start = time_ms - time_ms % self.step_ms
        counts = self.counts.get(start)
        if counts is None:
            counts = self.counts[start] = [0] * len(VERDICTS)
        counts[verdict] += number
        while len(self.counts) > _MOST_BUCKETS:
            self._widen()

    def _widen(self) -> None:
        self.step_ms *= 2
        finer = self.counts
        self.counts = {}
        for start, counts in finer.items():
            wider = self.counts.setdefault(start - start % self.step_ms, [0] * len(VERDICTS))
            for verdict, number in enumerate(counts):
                wider[verdict] += number


@dataclass(slots=True)
class Report:
    """The outcome of a verification. Violations are counted in full and shown up to a limit of each kind."""

    topology: str
    cluster: str
    method: str
    """How it was done: what was replayed, and where only order-free checks were possible."""
    started_at_ms: int
    seconds: float = 0.0
    books: list[Books] = field(default_factory=list)
    counts: dict[ViolationKind, int] = field(default_factory=lambda: dict.fromkeys(MEANINGS, 0))
    samples: list[Violation] = field(default_factory=list)
    sample: int = 1
    """One tracking ID in so many was looked at."""
    unsampled: int = 0
    """Records judged of which nothing is said: their IDs are not in the sample."""
    not_provable: dict[str, int] = field(default_factory=dict)
    """Reason, as a sentence -> records."""
    timeline: Timeline = field(default_factory=Timeline)

    @property
    def passed(self) -> bool:
        """Whether nothing violates the guarantee; what can not be proved neither passes nor fails."""
        return not any(self.counts.values())

    @property
    def read(self) -> int:
        """Records judged, over all partitions."""
        return sum(books.read for books in self.books)

    def violation(self, kind: ViolationKind, place: str, text: str) -> None:
        """Count a violation, and keep it as a sample while there are few of its kind."""
        self.counts[kind] += 1
        if self.counts[kind] <= SAMPLES_PER_KIND:
            self.samples.append(Violation(kind, place, text))

    def unprovable(self, reason: str, number: int = 1) -> None:
        """Count records about which nothing is claimed."""
        if number:
            self.not_provable[reason] = self.not_provable.get(reason, 0) + number

    def closing_line(self) -> str:
        """Return the two numbers that everything is about, and any others that are not 0."""
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
        """Return what a sample can not see, as sentences; nothing for a full verification."""
        if self.sample == 1:
            return []
        told = (
            f"This is a sample: one tracking ID in {self.sample}, chosen by its hash, was judged with all its records; "
            f"{self.unsampled:,} records of other IDs were read for their event times only."
        )
        unseen = (
            "Not seen: a loss, a duplicate or a change of an ID outside the sample; a record that passed one outside "
            "the sample; books that do not balance there."
        )
        return [told, unseen]

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
            "books": [asdict(books) | {"balanced": books.balanced} for books in self.books],
            "samples": [asdict(sample) for sample in self.samples],
            "timeline": {
                "step_ms": self.timeline.step_ms,
                "verdicts": list(VERDICTS),
                "steps": [[start, *counts] for start, counts in sorted(self.timeline.counts.items())],
            },
        }
        return json.dumps(document, indent=2) + "\n"
