"""Implements `dedup try`, which judges records as a worker does, but without a broker, and explains the verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Final, Literal

import msgspec

from dedup.core.event_time import RecordTime
from dedup.core.extract import Extractor, Fault
from dedup.core.flow import Flow, FlowRecord, yielded
from dedup.core.fold import Outcome, Rows, Sightings, fold
from dedup.core.framing import HEADER, KEY_HEADER, framed
from dedup.core.window import Feed, Sighting, StreamTime
from dedup.errors import AuthorMistake, Problem, RecordFailed
from dedup.quantities import format_duration, instant
from dedup.topology.model import LateForward, LateTo, SourceSpec, Topology, extractor_of
from dedup.yaml_document import did_you_mean

_FEED: Final = Feed(0, 0)
_PLACE: Final = ("topic", "partition", "offset")
"""The members of an envelope that change no verdict, so they are skipped."""
_INDENT: Final = " " * 11
_EXEMPT: Final = {
    "missing_id": "it has no ID, and the topology says missing: forward",
    "tombstone": "its value is null, and the topology says tombstones: forward",
    "conflict": "its ID is known with another payload, and the topology says on_conflict: forward",
}

VerdictName = Literal["unique", "duplicate", "conflict", "late", "dead letter", "forwarded"]


@dataclass(frozen=True, slots=True)
class Entry:
    """A record to judge, with its line number in the file."""

    line: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]
    timestamp_ms: int


@dataclass(frozen=True, slots=True)
class YieldedRecord:
    """A record that the flow yields, with its contents as text, in which bytes that are not UTF-8 are escaped."""

    topic: str
    key: str | None
    value: str | None
    headers: tuple[tuple[str, str | None], ...]


@dataclass(frozen=True, slots=True)
class Judgment:
    """The verdict on one record, with the reason."""

    line: int
    verdict: VerdictName
    reason: str
    topic: str | None
    """The topic that the record is sent to, or None if it is not sent."""
    time: str | None
    """The event time on which the verdict is based, or None if the record has no event time."""
    yielded: tuple[YieldedRecord, ...] | None = None
    """The records that the flow yields, or None if the flow was not run for this record."""

    def as_json(self) -> str:
        """Return the judgment as one line of JSON, without ``yielded`` if the flow was not run."""
        data = asdict(self)
        if self.yielded is None:
            del data["yielded"]
        return msgspec.json.encode(data).decode()

    def as_text(self) -> str:
        """Return the judgment as one line of text, with another line for each record that the flow yields."""
        lines = [f"line {self.line:<5} {self.verdict:<11} {self.reason}"]
        if self.yielded is not None:
            lines += [f"{_INDENT}to {each.topic}: {_in_words(each)}" for each in self.yielded]
            lines += [] if self.yielded else [f"{_INDENT}filtered: the flow yields nothing"]
        return "\n".join(lines)


def _in_words(record: YieldedRecord) -> str:
    headers = [f"{name}={_or_null(value)}" for name, value in record.headers]
    key = [] if record.key is None else [f"key {record.key}"]
    return ", ".join([*key, *(["headers " + " ".join(headers)] if headers else []), f"value {_or_null(record.value)}"])


def _or_null(text: str | None) -> str:
    return "null" if text is None else text


def _text(content: bytes | None) -> str | None:
    return None if content is None else content.decode("utf-8", "backslashreplace")


class _Envelope(msgspec.Struct):
    value: msgspec.Raw = msgspec.Raw(b"null")
    key: str | None = None
    headers: dict[str, str] = {}
    timestamp: int | None = None
    value_base64: bytes | None = None
    """The bytes of the value, which msgspec decodes from base64."""
    key_base64: bytes | None = None

    def record(self, source: SourceSpec) -> tuple[bytes | None, bytes | None, tuple[tuple[str, bytes], ...]]:
        """Return the record's key, value, and headers.

        Raises ValueError if the envelope contains two values or keys, or text for a binary format.
        """
        key = self._key(source)
        headers = tuple((header, content.encode()) for header, content in self.headers.items())
        value = bytes(self.value)
        if self.value_base64 is not None:
            if value != b"null":
                raise ValueError("it has both value and value_base64")
            return key, self.value_base64, headers
        if value == b"null":
            return key, None, headers
        if source.is_binary:
            raise ValueError(f"the topology reads {source.format}, so the value must be value_base64")
        if source.format == "csv":
            value = msgspec.json.decode(value, type=str).encode()
        if HEADER in self.headers and source.framing != "prefix":
            return key, value, headers
        value, added = framed(source.framing, value)
        return key, value, (*headers, *added)

    def _key(self, source: SourceSpec) -> bytes | None:
        """Return the record's key. Text gets the framing of the topology's keys unless a header contains one."""
        if self.key_base64 is not None:
            if self.key is not None:
                raise ValueError("it has both key and key_base64")
            return self.key_base64
        if self.key is None:
            return None
        if source.key_format not in {"bytes", "json", "json_schema"}:
            raise ValueError(f"the topology reads keys of format {source.key_format}, so the key must be key_base64")
        if source.key_format == "json_schema" and KEY_HEADER not in self.headers:
            return framed("prefix", self.key.encode())[0]
        return self.key.encode()


def _envelope(text: bytes) -> _Envelope:
    """Return the record in a line.

    Raises ValueError if the line is not an envelope (for example, a bare value), or has a member that no envelope has.
    """
    whole = msgspec.json.decode(text, type=_Envelope)
    members = msgspec.json.decode(text, type=dict[str, msgspec.Raw]).keys()
    known = _Envelope.__struct_fields__
    if members and members.isdisjoint(known):
        raise ValueError(f"it has no member {', '.join(known)}")
    # A member that was skipped, such as the payload of `kcat -J`, would make the verdict that of another record.
    unknown = next((name for name in members if name not in {*known, *_PLACE}), None)
    if unknown is not None:
        raise ValueError(f'it has the unknown member "{unknown}"{did_you_mean(unknown, known)}')
    return whole


def entries(lines: Iterable[bytes], *, name: str, envelope: bool, start_ms: int, source: SourceSpec) -> Iterator[Entry]:
    """Yield the records in a file, and skip blank lines.

    If the source has the format csv or bytes, a line that contains only white space is a record, and is not skipped.

    Line n gets the timestamp ``start_ms`` plus n-1 seconds, unless ``envelope`` is set and the line contains a
    timestamp. Values need not be JSON. The function adds the framing of ``source`` to each value that is not in base64.

    Raises AuthorMistake if ``envelope`` is set and a line is not an envelope. Also raises AuthorMistake if ``envelope``
    is not set and the source has a binary format, which a line of text cannot hold.
    """
    if source.is_binary and not envelope:
        why = f"is needed, because the topology reads {source.format}; "
        why += 'write each line as {"value_base64": ..., "timestamp": ms}'
        raise AuthorMistake([Problem("--envelope", why)])
    plain = not envelope and source.format in {"csv", "bytes"}
    for number, line in enumerate(lines, 1):
        text = line[:-2] if line.endswith(b"\r\n") else line.removesuffix(b"\n")
        if not (text if plain else text.strip()):
            continue
        timestamp_ms = start_ms + (number - 1) * 1_000
        if not envelope:
            yield Entry(number, None, *framed(source.framing, text), timestamp_ms)
            continue
        try:
            whole = _envelope(text)
            key, value, headers = whole.record(source)
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
            remedy = 'write {"key": ..., "value": ..., "headers": {...}, "timestamp": ms}, or leave --envelope out'
            raise AuthorMistake([Problem(f"{name}:{number}:1", f"is not an envelope ({error}); {remedy}")]) from error
        at_ms = timestamp_ms if whole.timestamp is None else whole.timestamp
        yield Entry(number, key, value, headers, at_ms)


class RecordJudge:
    """Judges the records of one partition in the given order, and keeps the partition's state in memory."""

    def __init__(self, topology: Topology, *, now_ms: int, flow: Flow | None = None) -> None:
        """Create a judge that runs ``flow``, if given, on each record that the topology forwards."""
        self._topology: Final = topology
        self._flow: Final = flow
        self._now_ms: Final = now_ms
        self._extractor: Final[Extractor] = extractor_of(topology)
        self._stream_time = StreamTime.before([_FEED])
        self._known: Final[dict[bytes, dict[int, Sightings]]] = {}

    def judge(self, entry: Entry) -> Judgment:
        """Return the verdict on a record.

        Raises RecordFailed if the topology's policy for the record is `fail`, or if the flow fails and the topology
        says `on_error: stop`.
        """
        extracted = self._extractor([entry.key], [entry.value], [entry.headers], [entry.timestamp_ms])
        rows = Rows(extracted, [entry.line], [_FEED])
        ceiling_ms = max(self._now_ms, self._stream_time.value_ms) + self._topology.max_clock_skew_ms
        outcome = fold(rows, self._topology.rules, self._stream_time, self._look_up, ceiling_ms=ceiling_ms)
        made = self._yielded(entry, outcome)
        if isinstance(made, Fault):  # As in a worker, the record becomes a dead letter and creates no sighting.
            reason = f"{made.code}: {made.detail}"
            return Judgment(entry.line, "dead letter", reason, self._topology.dead_letter, None)
        self._stream_time = outcome.stream_time
        self._remember(rows, outcome)
        return replace(self._judgment(entry.line, outcome), yielded=made)

    def _yielded(self, entry: Entry, outcome: Outcome) -> tuple[YieldedRecord, ...] | Fault | None:
        """Run the flow on a forwarded record, and return the records that it yields, or None if no flow has to run."""
        topology = self._topology
        late = "late" if outcome.late and isinstance(topology.late, LateForward) else None
        verdict = outcome.exempt.get(0) or late or ("unique" if outcome.unique else None)
        if self._flow is None or topology.output is None or topology.then is None or verdict is None:
            return None
        clamped = outcome.clamped if isinstance(topology.event_time, RecordTime) else {}
        time_ms = clamped.get(0, entry.timestamp_ms)
        record = FlowRecord(topology.output.topic, entry.key, entry.value, entry.headers, time_ms, verdict)
        made = yielded(self._flow, record, topology.forwards_to)
        if not isinstance(made, Fault):
            return tuple(
                YieldedRecord(
                    each.topic,
                    _text(each.key),
                    _text(each.value),
                    tuple((n, _text(value)) for n, value in each.headers),
                )
                for each in made
            )
        if topology.then.stop:
            text = f"line {entry.line}: the flow failed: {made.detail}. The topology says `on_error: stop`."
            raise RecordFailed(text)
        return made

    def _look_up(self, keys: Sequence[bytes], least_ms: int) -> Mapping[bytes, Sightings]:  # noqa: ARG002 - `fold` needs this signature
        return {key: tuple(chain.from_iterable(self._known[key].values())) for key in keys if key in self._known}

    def _remember(self, rows: Rows, outcome: Outcome) -> None:
        fingerprints = rows.extracted.fingerprints
        for row in outcome.singles:
            key, time_ms = rows.extracted.ids[row], outcome.judged_times_ms[row]
            if key is not None:
                fingerprint = b"" if fingerprints is None else fingerprints[row]
                seen = Sighting(time_ms, time_ms, rows.source(row), fingerprint)
                self._known.setdefault(key, {})[self._topology.window.segment_of(time_ms)] = (seen,)
        for (segment, key), sightings in outcome.rewritten.items():
            self._known.setdefault(key, {})[segment] = sightings

    def _judgment(self, line: int, outcome: Outcome) -> Judgment:
        time_ms = outcome.judged_times_ms[0]
        time = instant(time_ms)
        # Only the flow determines the topics; if the flow is run, `Judgment.yielded` contains them.
        output = self._topology.output.topic if self._topology.output and self._topology.then is None else None
        if outcome.dead:
            _row, dead = outcome.dead[0]
            return Judgment(line, "dead letter", f"{dead.code}: {dead.detail}", self._topology.dead_letter, None)
        if outcome.exempt:
            why = outcome.exempt[0]
            reason = f"{_EXEMPT.get(why, why)}; outside the guarantee, marked by dedup-verdict"
            return Judgment(line, "forwarded", reason, output, time if outcome.unique else None)
        clamped = f"time set to {time}; " if outcome.clamped else ""
        for _row, seen in outcome.conflicts:
            reason = f"{clamped}another payload; {self._since(seen, time_ms)}"
            return Judgment(line, "conflict", reason, self._topology.conflicts_go_to, time)
        for _row, seen in outcome.duplicates:
            reason = f"{clamped}{self._since(seen, time_ms)}"
            return Judgment(line, "duplicate", reason, self._topology.duplicates, time)
        for _row, late in outcome.late:
            grace = format_duration(self._topology.window.grace_ms)
            behind = f"{_span(late.behind_ms)} behind stream time, more than the grace of {grace}"
            policy = self._topology.late
            where = policy.topic if isinstance(policy, LateTo) else None
            if isinstance(policy, LateForward):
                where = output
            return Judgment(line, "late", f"{time} is {behind}, and its ID is not known", where, time)
        guarded = instant(time_ms + self._topology.window.guard_ms)
        return Judgment(line, "unique", f"{clamped}first of its ID at {time}; guarded until {guarded}", output, time)

    def _since(self, seen: Sighting, time_ms: int) -> str:
        window = self._topology.window
        now = window.extended(seen, time_ms) if window.extend else seen
        return (
            f"seen {instant(seen.first_ms)} in line {seen.source.offset}, {_distance(time_ms, seen)}; "
            f"guarded until {instant(now.last_ms + window.guard_ms)}"
        )


def _distance(time_ms: int, seen: Sighting) -> str:
    if time_ms < seen.first_ms:
        return f"{_span(seen.first_ms - time_ms)} after this one"
    if time_ms == seen.first_ms:
        return "at the same time"
    return f"{_span(time_ms - seen.first_ms)} before"


def _span(span_ms: int) -> str:
    """Return a duration in its two largest units, such as ``1 h 5 min``."""
    parts: list[str] = []
    rest_ms = span_ms
    for unit, unit_ms in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1_000), ("ms", 1)):
        count, rest_ms = divmod(rest_ms, unit_ms)
        if count:
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2]) or "0 ms"
