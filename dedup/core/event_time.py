"""Event time: which clock a record carries, in milliseconds since 1970 UTC.

Fractions of a millisecond are cut towards the past. A negative time is returned as it is: the fold decides.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal, assert_never

import numpy as np
import numpy.typing as npt

from dedup.core.exact_json import ABSENT, Absent, JsonValue, Number, Unreadable
from dedup.core.paths import Path, format_path

TimeUnit = Literal["rfc3339", "s", "ms", "us"]

MIN_MS: Final = -(1 << 63)
MAX_MS: Final = (1 << 63) - 1

_POWER: Final = {"s": 3, "ms": 0, "us": -3}
"""Power of ten that turns a unit into milliseconds."""

_RFC3339: Final = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[Tt](\d\d):(\d\d):(\d\d)(?:\.(\d+))?(?:[Zz]|([+-])(\d\d):(\d\d))", re.ASCII
)
_DAY_MS: Final = 86_400_000


class BadTime(Exception):
    """The record carries no usable event time; has a stable code and a sentence without payload."""

    def __init__(self, code: str, detail: str) -> None:
        self.code: Final = code
        self.detail: Final = detail
        super().__init__(detail)


@dataclass(frozen=True, slots=True)
class RecordTime:
    """The record's own timestamp."""


@dataclass(frozen=True, slots=True)
class FieldTime:
    """One member of the JSON value: a number in a unit, or RFC 3339 text."""

    path: Path
    unit: TimeUnit


EventTime = RecordTime | FieldTime


def time_ms_of(found: JsonValue | Absent, time: FieldTime) -> int:
    """Return the time that stands in a field. Raises BadTime when it is missing, ill-typed or out of range."""
    place = format_path(time.path)
    if found is ABSENT:
        raise BadTime("time_missing", f"no event time at {place}")
    if found is None:
        raise BadTime("time_missing", f"the event time at {place} is null")
    match time.unit:
        case "rfc3339":
            if not isinstance(found, str):
                raise BadTime("time_ill_typed", f"the event time at {place} is not RFC 3339 text")
            time_ms = rfc3339_ms(found)
            if time_ms is None:
                raise BadTime("time_unparsable", f"the event time at {place} is not RFC 3339, as 2026-01-31T08:00:00Z")
        case "s" | "ms" | "us":
            if not isinstance(found, Number):
                raise BadTime("time_ill_typed", f"the event time at {place} is not a number")
            time_ms = _number_ms(found, _POWER[time.unit])
            if time_ms is None:
                raise BadTime("time_out_of_range", f"the event time at {place} does not fit 64-bit milliseconds")
        case never:
            assert_never(never)
    return time_ms


def rfc3339_ms(text: str) -> int | None:
    """Return the time of an RFC 3339 text; None when it is not one.

    Strict: ``T`` between date and time, an offset always, real days. A leap second is the first of the next minute
    and stands only at 23:59:60 UTC. Digits beyond milliseconds are cut.
    """
    match = _RFC3339.fullmatch(text)
    if match is None:
        return None
    year, month, day, hour, minute, second = map(int, match.groups()[:6])
    if not (1 <= month <= 12 and 1 <= day <= _days_in(year, month)):  # noqa: PLR2004 - the calendar
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
    """Return the times of many texts of one layout; None when any needs `rfc3339_ms`.

    Layouts: ``YYYY-MM-DDTHH:MM:SS[.f…](Z|±HH:MM)`` in capitals, the same length in every row, no leap second.
    """
    joined = "\n".join(texts)
    width = len(texts[0]) + 1
    if len(joined) + 1 != width * len(texts) or not joined.isascii():
        return None
    rows = np.frombuffer((joined + "\n").encode(), np.uint8).reshape(len(texts), width)
    digits = rows.astype(np.int64) - ord("0")
    utc = texts[0].endswith("Z")
    zone = width - 2 if utc else width - 7
    if not _layout_holds(rows, zone, utc=utc):
        return None
    year = digits[:, 0] * 1000 + digits[:, 1] * 100 + _two(digits, 2)
    month, day = _two(digits, 5), _two(digits, 8)
    hour, minute, second = _two(digits, 11), _two(digits, 14), _two(digits, 17)
    if not ((month >= 1) & (month <= 12) & (hour <= 23) & (minute <= 59) & (second <= 59)).all():  # noqa: PLR2004
        return None
    leap = (year % 4 == 0) & ((year % 100 != 0) | (year % 400 == 0))
    if not ((day >= 1) & (day <= _MONTH_DAYS[month] + (leap & (month == 2)))).all():  # noqa: PLR2004 - February
        return None
    minutes = _days_column(year, month, day) * 1440 + hour * 60 + minute
    if not utc:
        ahead = _two(digits, zone + 1) * 60 + _two(digits, zone + 4)
        if not ((_two(digits, zone + 1) <= 23) & (_two(digits, zone + 4) <= 59)).all():  # noqa: PLR2004 - the clock
            return None
        minutes -= np.where(rows[:, zone] == ord("-"), -ahead, ahead)
    times_ms = minutes * 60_000 + second * 1000
    for place, weight in enumerate((100, 10, 1)):
        if 20 + place < zone:
            times_ms += digits[:, 20 + place] * weight
    result: list[int] = times_ms.tolist()
    return result


_MONTH_DAYS: Final = np.array([0, 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31])

Integers = npt.NDArray[np.int64]


def _layout_holds(rows: npt.NDArray[np.uint8], zone: int, *, utc: bool) -> bool:
    """Whether every row has its digits and marks where the layout of this width has them."""
    marks = {4: "-", 7: "-", 10: "T", 13: ":", 16: ":"}
    if zone > 19:  # noqa: PLR2004 - where the fraction begins
        marks[19] = "."
    if utc:
        marks[zone] = "Z"
    else:
        marks |= {zone: "+-", zone + 3: ":"}
    last = rows.shape[1] - 1
    if zone < 19 or zone == 20:  # noqa: PLR2004 - no room for the seconds, or a point without digits
        return False
    marks[last] = "\n"
    places = [place for place in range(last) if place not in marks]
    numbers = rows[:, places]
    if not ((numbers >= ord("0")) & (numbers <= ord("9"))).all():
        return False
    return all(bool(np.isin(rows[:, place], list(allowed.encode())).all()) for place, allowed in marks.items())


def _two(digits: Integers, at: int) -> Integers:
    pair: Integers = digits[:, at] * 10 + digits[:, at + 1]
    return pair


def _days_column(year: Integers, month: Integers, day: Integers) -> Integers:
    """As `_days`, for columns."""
    shifted = year - (month <= 2)  # noqa: PLR2004 - the year begins in March
    era = shifted // 400
    of_era = shifted - era * 400
    of_year = (153 * ((month + 9) % 12) + 2) // 5 + day - 1
    days: Integers = era * 146_097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719_468
    return days


def _days(year: int, month: int, day: int) -> int:
    """Days since 1970-01-01, Gregorian throughout and with a year 0 (Hinnant, days_from_civil)."""
    shifted = year - (month <= 2)  # noqa: PLR2004 - the year begins in March, so that leap days end it
    era, of_era = divmod(shifted, 400)
    of_year = (153 * ((month + 9) % 12) + 2) // 5 + day - 1
    return era * 146_097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719_468


def _days_in(year: int, month: int) -> int:
    leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
    return int(_MONTH_DAYS[month]) + (leap and month == 2)  # noqa: PLR2004 - February


def _number_ms(number: Number, power: int) -> int | None:
    """Return floor(number * 10**power); None outside 64 bits, or with an exponent of absurd length."""
    if power == 0 and number.is_integer and len(number.text) <= 18:  # noqa: PLR2004 - surely within 64 bits
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
        size, rest = int(digits[: max(0, whole_digits)] or "0"), True  # digits end in no zero: something is cut
    time_ms = -size - rest if sign else size
    return time_ms if MIN_MS <= time_ms <= MAX_MS else None
