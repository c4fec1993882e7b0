"""Rules that go by the clock: what is young enough, and the newest of each hour, day, week or month.

All in UTC: a run that moves, or a change to summer time, must not move a checkpoint to another day.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckptman.policies.checks import check_count, check_positive
from ckptman.policies.rules import ZERO_HINT, Record, RetentionPolicy, sequence_of

_DAY = 86_400
_UNITS = ((7 * _DAY, "w"), (_DAY, "d"), (3600, "h"), (60, "min"), (1, "s"))
_LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_LAST_DAY = 2_932_896
"""31 December 9999, in days since 1 January 1970. Only a broken clock is later, or earlier than the latter."""
LATEST_SECONDS = 253_402_300_799
"""The end of that day, in unix seconds."""


def is_known_time(seconds: float) -> bool:
    """Whether a unix time can be one: a clock that says another one was not set, or is broken."""
    return 0 < seconds < LATEST_SECONDS


def time_to_store(seconds: float) -> float:
    """What is written down of a unix time: itself, or the bound that it is beyond, where it is no known time."""
    return min(max(seconds, 0.0), float(LATEST_SECONDS))


@dataclass(frozen=True)
class KeepWithin(RetentionPolicy):
    """Keeps what was committed within the last `seconds`, as the clock says when the plan is made.

    What was saved by a broken clock is taken to be as old as the next save whose time is known, and as young as can be
    where there is none. Where the clock is broken now, nobody can tell what is old, and all is kept.

    Raises: IntervalError unless `seconds` is above 0.
    """

    seconds: float

    def __post_init__(self) -> None:
        check_positive("KeepWithin", "seconds", self.seconds)

    def keeps(self, records: Sequence[Record]) -> dict[int, str]:
        return self.keeps_at(records, newest_time(records))

    def keeps_at(self, records: Sequence[Record], now_seconds: float) -> dict[int, str]:
        rule = f"keep within {duration(self.seconds)}"
        if not is_known_time(now_seconds):
            return {record.sequence: f"{rule}, and the clock is broken" for record in records}
        kept, later = dict[int, str](), now_seconds
        for record in sorted(records, key=sequence_of, reverse=True):
            later = record.time_seconds if is_known_time(record.time_seconds) else later
            if now_seconds - later <= self.seconds:
                kept[record.sequence] = rule
        return kept

    def why_not(self, record: Record) -> str:
        return f"older than {duration(self.seconds)}"


def newest_time(records: Sequence[Record]) -> float:
    """The latest time of the records, in unix seconds, that can be one; 0 where none can."""
    return max((each.time_seconds for each in records if is_known_time(each.time_seconds)), default=0.0)


class Period(NamedTuple):
    """A unit of the calendar. `of` names the period in which a time (unix seconds) lies."""

    name: str
    unit: str
    of: Callable[[float], str]


@dataclass(frozen=True)
class KeepByPeriod(RetentionPolicy):
    """Keeps the newest checkpoint of each of the last `count` periods that have one; those without do not count.

    Raises: IntervalError unless `count` is at least 1.
    """

    count: int

    def __post_init__(self) -> None:
        check_count(type(self).__name__, "count", self.count, ZERO_HINT)

    @property
    @abstractmethod
    def period(self) -> Period:
        """Which periods."""

    def keeps(self, records: Sequence[Record]) -> dict[int, str]:
        period, found = self.period, dict[str, int]()
        for record in sorted(records, key=sequence_of, reverse=True):
            found.setdefault(period.of(record.time_seconds), record.sequence)
            if len(found) == self.count:
                break
        return {
            sequence: f"keep {period.name} {place} of {self.count} ({label})"
            for place, (label, sequence) in enumerate(found.items(), start=1)
        }

    def why_not(self, record: Record) -> str:
        few = self.period.unit if self.count == 1 else f"{self.count} {self.period.unit}s"
        return f"not the newest of one of the last {few}" if self.count > 1 else f"not the newest of the last {few}"


class KeepHourly(KeepByPeriod):
    """Keeps the newest checkpoint of each of the last `count` hours that have one."""

    period = Period("hourly", "hour", lambda seconds: f"{_date(seconds)} {_hour(seconds):02d} h")


class KeepDaily(KeepByPeriod):
    """Keeps the newest checkpoint of each of the last `count` days that have one."""

    period = Period("daily", "day", lambda seconds: _date(seconds))


class KeepWeekly(KeepByPeriod):
    """Keeps the newest checkpoint of each of the last `count` weeks (Monday to Sunday) that have one."""

    period = Period("weekly", "week", lambda seconds: f"week of {_monday(seconds)}")


class KeepMonthly(KeepByPeriod):
    """Keeps the newest checkpoint of each of the last `count` months that have one."""

    period = Period("monthly", "month", lambda seconds: _date(seconds)[:7])


def duration(seconds: float) -> str:
    """Seconds in the largest unit that says them exactly: `7 d`, `36 h`, `90 s`."""
    for size, unit in _UNITS:
        if seconds >= size and seconds % size == 0:
            # 2 weeks read well; 7 days are what people say.
            if unit == "w" and seconds < 2 * size:
                continue
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:g} s"


def _day(seconds: float) -> int:
    return min(max(math.floor(seconds / _DAY), 0), _LAST_DAY) if math.isfinite(seconds) else 0


def _hour(seconds: float) -> int:
    return math.floor(seconds % _DAY / 3600) if math.isfinite(seconds) else 0


def _monday(seconds: float) -> str:
    day = _day(seconds)
    # 1 January 1970 was a Thursday.
    return civil(day - (day + 3) % 7)


def _date(seconds: float) -> str:
    return civil(_day(seconds))


def civil(days: int) -> str:
    """The date of a number of days since 1 January 1970, by the Gregorian calendar: 2026-11-22."""
    year = 1970 + days * 400 // 146_097  # the days of 400 years; at most one year off
    while _new_year(year) > days:
        year -= 1
    while _new_year(year + 1) <= days:
        year += 1
    left = days - _new_year(year)
    month = 1
    for month, length in enumerate(_LENGTHS, start=1):
        length += month == 2 and _new_year(year + 1) - _new_year(year) == 366
        if left < length:
            break
        left -= length
    return f"{year:04d}-{month:02d}-{left + 1:02d}"


def _new_year(year: int) -> int:
    """Its first day, in days since 1 January 1970."""
    before = year - 1
    return 365 * (year - 1970) + before // 4 - before // 100 + before // 400 - 477  # leap days until 1970
