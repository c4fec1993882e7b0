"""Rules that go by the clock: what is young enough, and the newest of each hour, day, week or month.

All in UTC: a run that moves, or a change to summer time, must not move a checkpoint to another day.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import ClassVar, NamedTuple

from ckptman.policies.parameters import check_count, check_positive
from ckptman.policies.retention_rules import (
    ZERO_HINT,
    Record,
    RetentionPolicy,
    is_known_time,
    newest_time,
    sequence_of,
    time_to_store,
)

_DAY = 86_400
_UNITS = ((7 * _DAY, "w"), (_DAY, "d"), (3600, "h"), (60, "min"), (1, "s"))
_EPOCH = datetime(1970, 1, 1)


@dataclass(frozen=True)
class KeepWithin(RetentionPolicy):
    """Keep what was committed within the last `seconds`, by the clock when the plan is made.

    A checkpoint saved under a broken clock is as old as the next save whose time is known, and as young as can be where
    there is none. While the clock is broken, everything is kept.

    Args:
        seconds: the greatest age, in seconds.

    Raises:
        IntervalError: `seconds` is not above 0, or not finite.
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


class Period(NamedTuple):
    """A unit of the calendar. `of` names the period in which a time (unix seconds) lies."""

    name: str
    unit: str
    of: Callable[[float], str]


@dataclass(frozen=True)
class KeepByPeriod(RetentionPolicy):
    """Keep the newest checkpoint of each of the last `count` periods that have one; those without do not count."""

    period: ClassVar[Period]
    count: int

    def __post_init__(self) -> None:
        check_count(type(self).__name__, "count", self.count, ZERO_HINT)

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
        last = self.period.unit if self.count == 1 else f"{self.count} {self.period.unit}s"
        return f"not the newest of {'one of ' * (self.count > 1)}the last {last}"


class KeepHourly(KeepByPeriod):
    """Keep the newest checkpoint of each of the last `count` hours (UTC) that have one.

    Args:
        count: hours; those without a checkpoint do not count.

    Raises:
        IntervalError: `count` is less than 1.
    """

    period = Period("hourly", "hour", lambda seconds: f"{_when(seconds):%Y-%m-%d %H} h")


class KeepDaily(KeepByPeriod):
    """Keep the newest checkpoint of each of the last `count` days (UTC) that have one. See `KeepHourly`."""

    period = Period("daily", "day", lambda seconds: f"{_when(seconds):%Y-%m-%d}")


class KeepWeekly(KeepByPeriod):
    """Keep the newest checkpoint of each of the last `count` weeks (Monday to Sunday, UTC) that have one.

    See `KeepHourly`.
    """

    period = Period("weekly", "week", lambda seconds: f"week of {_monday(seconds)}")


class KeepMonthly(KeepByPeriod):
    """Keep the newest checkpoint of each of the last `count` months (UTC) that have one. See `KeepHourly`."""

    period = Period("monthly", "month", lambda seconds: f"{_when(seconds):%Y-%m}")


def duration(seconds: float) -> str:
    """Return seconds in the largest unit that says them exactly: `7 d`, `36 h`, `90 s`."""
    for size, unit in _UNITS:
        if seconds >= size and seconds % size == 0:
            # 2 weeks read well; 7 days are what people say.
            if unit == "w" and seconds < 2 * size:
                continue
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:g} s"


def _when(seconds: float) -> datetime:
    """Return a unix time in UTC, to the second below; of a broken clock, the first or the last that there is."""
    return _EPOCH + timedelta(seconds=int(time_to_store(seconds)) if math.isfinite(seconds) else 0)


def _monday(seconds: float) -> date:
    day = _when(seconds).date()
    return day - timedelta(days=day.weekday())
