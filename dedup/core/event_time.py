"""Finds a record's event time, and converts the time to milliseconds since 1970 UTC, rounded down."""

from __future__ import annotations

import re
from calendar import monthrange
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar, assert_never

import msgspec
import numpy as np
import numpy.typing as npt

from dedup.core.exact_json import ABSENT, NotJudged, Number, Unreadable
from dedup.core.odd_rows import NotInColumns
from dedup.core.tracking_id import Path, format_path

TimeUnit = Literal["rfc3339", "s", "ms", "us", "timestamp"]
"""The format or unit of a time. With ``timestamp``, the value's type or the schema determines the unit."""
_Integers = npt.NDArray[np.int64]
_Count = TypeVar("_Count", int, _Integers)

MIN_MS: Final = -(1 << 63)
MAX_MS: Final = (1 << 63) - 1

_POWER: Final = {"s": 3, "ms": 0, "us": -3}
"""Maps each unit to the exponent of the power of ten that converts a number of this unit to milliseconds."""

_MONTH_DAYS: Final = np.array([0, 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31])
_MANY: Final = 16
"""The minimum number of strings for which conversion as a column is faster than conversion one by one."""
_FRACTION_AT: Final = 19
"""The index of the decimal point in an RFC 3339 string with fractions of a second."""

_RFC3339: Final = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[Tt](\d\d):(\d\d):(\d\d)(?:\.(\d+))?(?:[Zz]|([+-])(\d\d):(\d\d))", re.ASCII
)


class BadTime(NotJudged):
    """Raised if a record has no usable event time."""

    kind = "bad_time"


@dataclass(frozen=True, slots=True)
class RecordTime:
    """The rule that a record's Kafka timestamp is its event time."""


@dataclass(frozen=True, slots=True)
class ArrivalTime(RecordTime):
    """The rule that the event time is the time at which the source's broker appended the record (LogAppendTime)."""


@dataclass(frozen=True, slots=True)
class FieldTime:
    """The rule that a member of the value is the event time, as an RFC 3339 string, a number, or a timestamp."""

    path: Path
    unit: TimeUnit


EventTime = RecordTime | FieldTime


def create_time_fault(topic: str, what: str) -> str:
    """Return the error message for records that have the producer's timestamp although `event_time` is `arrival`.

    ``what`` is the subject of the message: one record, or all records of the source topic. The message also tells the
    user how to proceed.
    """
    return (
        f"{what} has the time that its producer wrote (CreateTime), but `event_time: arrival` needs the time at which "
        "the broker appended it. Such records are neither judged nor dropped. Run `kafka-configs.sh --bootstrap-server "
        f"BROKER --alter --entity-type topics --entity-name {topic} --add-config message.timestamp.type=LogAppendTime`."
        " Records that were appended before keep their timestamps. To judge them, use another `event_time`, or another "
        "topology that has one. To skip them, stop the workers and run `dedup reset --to TIME`, with the time of the "
        "change, or `--to latest` if one of them has a later time; this also skips all other records that were not "
        "judged yet: those before TIME, and those in a repartition topic."
    )


def time_ms_of(found: object, time: FieldTime) -> int:
    """Convert a field's value to an event time. Raises BadTime if the value is missing or cannot be converted.

    If ``found`` is a number, its type is `Number` or int. With the unit ``timestamp``, ``found`` is already in
    milliseconds.
    """
    place = format_path(time.path)
    if found is ABSENT:
        raise BadTime("time_missing", f"no event time at {place}")
    if found is None:
        raise BadTime("time_missing", f"the event time at {place} is null")
    match time.unit:
        case "rfc3339":
            return _text_ms(found, place)
        case "timestamp":
            if type(found) is not int:
                raise BadTime("time_ill_typed", f"the event time at {place} is not a timestamp with a zone")
            if not MIN_MS <= found <= MAX_MS:
                raise BadTime("time_out_of_range", f"the event time at {place} does not fit 64-bit milliseconds")
            return found
        case "s" | "ms" | "us":
            number = Number(str(found)) if type(found) is int else found
            if not isinstance(number, Number):
                raise BadTime("time_ill_typed", f"the event time at {place} is not a number")
            time_ms = _number_ms(number, _POWER[time.unit])
            if time_ms is None:
                raise BadTime("time_out_of_range", f"the event time at {place} does not fit 64-bit milliseconds")
            return time_ms
        case never:
            assert_never(never)


def _text_ms(found: object, place: str) -> int:
    if not isinstance(found, str):
        raise BadTime("time_ill_typed", f"the event time at {place} is not RFC 3339 text")
    time_ms = rfc3339_ms(found)
    if time_ms is None:
        text = f"the event time at {place} is not an RFC 3339 time such as 2026-01-31T08:00:00Z"
        raise BadTime("time_unparsable", text)
    return time_ms


def rfc3339_ms(text: str) -> int | None:
    """Convert an RFC 3339 string to milliseconds since 1970 UTC, or return None if the string is not valid.

    The string must have ``T`` between date and time, an offset from UTC, and a date that exists. A leap second is
    accepted only at 23:59:60 UTC, and counts as the first second of the next minute. Fractions of a millisecond are
    dropped.
    """
    match = _RFC3339.fullmatch(text)
    if match is None:
        return None
    year, month, day, hour, minute, second = map(int, match.groups()[:6])
    if not (1 <= month <= 12 and 1 <= day <= monthrange(year, month)[1]):  # noqa: PLR2004 - the calendar
        return None
    offset_minutes = 0
    if match[8]:
        if match[9] > "23" or match[10] > "59":
            return None
        offset_minutes = (int(match[9]) * 60 + int(match[10])) * (-1 if match[8] == "-" else 1)
    if hour > 23 or minute > 59 or second > 60:  # noqa: PLR2004 - the clock
        return None
    minutes = _days(year, month, day) * 1440 + hour * 60 + minute - offset_minutes
    if second == 60 and minutes % 1440 != 1439:  # noqa: PLR2004 - the last minute of a UTC day
        return None
    return minutes * 60_000 + second * 1000 + int((match[7] or "")[:3].ljust(3, "0"))


def rfc3339_column_ms(texts: list[str]) -> list[int] | None:
    """Convert many strings of the same layout at once, or return None if `rfc3339_ms` must convert them one by one.

    The layout is ``YYYY-MM-DDTHH:MM:SS[.f…](Z|±HH:MM)`` with a capital T and Z. The result is None if the
    strings differ in length, or if any string is invalid or names a leap second.
    """
    lines = ("\n".join(texts) + "\n").encode("utf-8", "surrogatepass")
    utc = texts[0].endswith("Z")
    zone = len(texts[0]) - (1 if utc else 6)
    if not _layout_holds(lines, len(texts), zone, utc=utc):
        return None
    digits = np.frombuffer(lines, np.uint8).reshape(len(texts), -1)[:, : zone + 6] - np.uint8(ord("0"))
    year = _two(digits, 0) * 100 + _two(digits, 2)
    month, day = _two(digits, 5), _two(digits, 8)
    hour, minute, second = _two(digits, 11), _two(digits, 14), _two(digits, 17)
    if not ((month >= 1) & (month <= 12) & (hour <= 23) & (minute <= 59) & (second <= 59)).all():  # noqa: PLR2004
        return None
    leap = (year % 4 == 0) & ((year % 100 != 0) | (year % 400 == 0))
    if not ((day >= 1) & (day <= _MONTH_DAYS[month] + (leap & (month == 2)))).all():  # noqa: PLR2004 - February
        return None
    minutes = _days(year, month, day) * 1440 + hour * 60 + minute
    if not utc:
        zone_hour, zone_minute = _two(digits, zone + 1), _two(digits, zone + 4)
        if not ((zone_hour <= 23) & (zone_minute <= 59)).all():  # noqa: PLR2004 - the clock
            return None
        ahead = zone_hour * 60 + zone_minute
        minutes -= np.where(np.frombuffer(lines, np.uint8)[zone :: len(lines) // len(texts)] == ord("-"), -ahead, ahead)
    times_ms = minutes * 60_000 + second * 1000
    for place, weight in enumerate((100, 10, 1)):
        if 20 + place < zone:
            times_ms += digits[:, 20 + place].astype(np.int64) * weight
    result: list[int] = times_ms.tolist()
    return result


def _layout_holds(lines: bytes, count: int, zone: int, *, utc: bool) -> bool:
    marks = {4: b"-", 7: b"-", 10: b"T", 13: b":", 16: b":"}
    if zone > _FRACTION_AT:
        marks[_FRACTION_AT] = b"."
    if utc:
        marks |= {zone: b"Z", zone + 1: b"\n"}
    else:
        marks |= {zone + 3: b":", zone + 6: b"\n"}
    width = max(marks) + 1
    if zone < _FRACTION_AT or zone == _FRACTION_AT + 1 or len(lines) != width * count:
        return False
    if any(lines[place::width] != mark * count for place, mark in marks.items()):
        return False
    if not utc and lines[zone::width].translate(None, b"+-"):
        return False
    # `translate` also removes misplaced separators, which leaves too few digits.
    digits = lines.translate(None, b"-T:.Z+\n")
    return digits.isdigit() and len(digits) == (width - len(marks) - (not utc)) * count


def _two(digits: npt.NDArray[np.uint8], at: int) -> _Integers:
    pair: _Integers = (digits[:, at] * np.uint8(10) + digits[:, at + 1]).astype(np.int64)
    return pair


def _days(year: _Count, month: _Count, day: _Count) -> _Count:
    """Return the number of days since 1970-01-01, for one date or for columns of dates (Hinnant's days_from_civil)."""
    shifted = year - (month <= 2)  # noqa: PLR2004 - years begin in March here, so that leap days come last
    era = shifted // 400
    of_era = shifted - era * 400
    of_year = (153 * ((month + 9) % 12) + 2) // 5 + day - 1
    days: _Count = era * 146_097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719_468
    return days


def _number_ms(number: Number, power: int) -> int | None:
    """Return floor(number * 10**power), or None if the result exceeds 64 bits or the exponent has over 18 digits."""
    if power == 0 and number.is_integer and len(number.text) <= 18:  # noqa: PLR2004 - certainly within 64 bits
        return int(number.text)
    try:
        sign, digits, exponent = number.parts()
    except Unreadable:
        return None
    exponent += power
    whole_digits = len(digits) + exponent
    if whole_digits > 19:  # noqa: PLR2004 - digits of a 64-bit number
        return None
    if exponent >= 0:
        size, rest = int(digits) * 10**exponent, False
    else:
        # The digits have no trailing zeros, so at least one of the truncated digits is not zero.
        size, rest = int(digits[: max(0, whole_digits)] or "0"), True
    time_ms = -size - rest if sign else size
    return time_ms if MIN_MS <= time_ms <= MAX_MS else None


def times_ms_of(column: list[Any], unit: TimeUnit) -> list[int]:
    """Convert a column of decoded JSON values to milliseconds. Raises NotInColumns if any row requires `time_ms_of`."""
    match unit:
        case "ms" | "timestamp":
            return column
        case "us":
            return [time // 1000 for time in column]
        case "s":
            if isinstance(column[0], int):
                return [time * 1000 for time in column]
            return _all(list(map(_seconds_ms, column)))
        case "rfc3339":
            return rfc3339_column_ms(column) or _all(_by_length(column))
        case never:
            assert_never(never)


def typed_times_ms(column: Sequence[Any], unit: TimeUnit) -> list[int]:
    """Convert a column of strings (for RFC 3339) or integers to milliseconds.

    Raises NotInColumns if any row requires `time_ms_of`.
    """
    if unit in {"s", "timestamp"}:
        most = MAX_MS // 1000 if unit == "s" else MAX_MS
        if max(column) > most or min(column) < -most:
            raise NotInColumns([row for row, time in enumerate(column) if not -most <= time <= most])
    return times_ms_of(list(column), unit)


def _all(times_ms: list[int | None]) -> list[int]:
    known = [time_ms for time_ms in times_ms if time_ms is not None]
    if len(known) < len(times_ms):
        raise NotInColumns([row for row, time_ms in enumerate(times_ms) if time_ms is None])
    return known


def _by_length(texts: list[str]) -> list[int | None]:
    """Convert RFC 3339 strings of different lengths. For example, Java's Instant writes 0, 3, 6, or 9 decimals."""
    rows: defaultdict[int, list[int]] = defaultdict(list)
    for row, text in enumerate(texts):
        rows[len(text)].append(row)
    times_ms: list[int | None] = [None] * len(texts)
    for equal in rows.values():
        part = [texts[row] for row in equal]
        column = rfc3339_column_ms(part) if _MANY <= len(part) < len(texts) else None
        for row, time_ms in zip(equal, column or map(rfc3339_ms, part), strict=True):
            times_ms[row] = time_ms
    return times_ms


def _seconds_ms(raw: msgspec.Raw) -> int | None:
    whole, point, fraction = bytes(raw).partition(b".")
    if not whole.isdigit() or len(whole) > 15 or not (fraction.isdigit() if point else True):  # noqa: PLR2004
        return None
    return int(whole) * 1000 + int(fraction[:3].ljust(3, b"0"))
