"""Retention rules by the clock: periods of the calendar, ages, and clocks that are wrong."""

import datetime

import pytest

from ckptman.policies.calendar import KeepDaily, KeepHourly, KeepMonthly, KeepWeekly, KeepWithin, duration
from ckptman.policies.retention import plan
from ckptman.policies.retention_rules import Record

DAYS = [f"2026-03-{day:02d}T12" for day in range(1, 11)]


def at(*times):
    """Checkpoints of the steps 10, 20, ..., committed at these times (UTC) or unix seconds."""
    stamps = [datetime.datetime.fromisoformat(f"{each}+00:00").timestamp() if isinstance(each, str) else each
              for each in times]  # fmt: skip
    return [Record(10 * number, number, stamp, 1, {}) for number, stamp in enumerate(stamps, start=1)]


def kept(records, policy, now_seconds=None):
    return [each.record.step for each in plan(records, policy, now_seconds=now_seconds) if each.keep]


def why(records, policy, step, now_seconds=None):
    return next(each.reasons for each in plan(records, policy, now_seconds=now_seconds) if each.record.step == step)


@pytest.mark.parametrize(
    ("rule", "times", "expected"),
    [
        (KeepHourly(9), ("2026-03-01T01:00", "2026-03-01T01:59:59", "2026-03-01T02:00"), [20, 30]),
        (KeepDaily(9), ("2026-03-01T00:00", "2026-03-01T23:59:59", "2026-03-02T00:00"), [20, 30]),
        (KeepWeekly(9), ("2026-03-02T00:00", "2026-03-08T23:59:59", "2026-03-09T00:00"), [20, 30]),
        (KeepMonthly(9), ("2026-02-01T00:00", "2026-02-28T23:59:59", "2026-03-01T00:00"), [20, 30]),
        (KeepMonthly(9), ("2027-12-31T23:59", "2028-01-01T00:00", "2028-02-29T12:00"), [10, 20, 30]),
        # A day without a checkpoint does not count.
        (KeepDaily(2), ("2026-03-01T01", "2026-03-02T05", "2026-03-04T05", "2026-03-04T06"), [20, 40]),
        # After a clock that went back, the order is that of the commits.
        (KeepDaily(1), ("2026-03-05T01", "2026-03-05T02", "2026-03-03T01", "2026-03-03T02"), [40]),
        (KeepDaily(2), ("2026-03-05T01", "2026-03-05T02", "2026-03-03T01", "2026-03-03T02"), [20, 40]),
    ],
)
def test_the_newest_of_each_period_stays(rule, times, expected):
    assert kept(at(*times), rule) == expected


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (KeepHourly(2), "keep hourly 2 of 2 (2026-03-02 05 h)"),
        (KeepDaily(2), "keep daily 2 of 2 (2026-03-02)"),
        (KeepWeekly(2), "keep weekly 1 of 2 (week of 2026-03-02)"),
        (KeepMonthly(1), "keep monthly 1 of 1 (2026-03)"),
    ],
)
def test_the_reason_names_the_period(rule, reason):
    records = at("2026-03-01T01", "2026-03-02T05", "2026-03-04T06")
    assert reason in rule.keeps(records).values()


def test_the_age_counts_from_now_not_from_the_newest():
    records = at(1000, 2000, 3000, 4000, 5000)
    assert set(KeepWithin(2000).keeps_at(records, 5500.0)) == {4, 5}
    assert set(KeepWithin(2000).keeps_at(records, 6000.0)) == {4, 5}
    assert KeepWithin(7200).keeps_at(records, 99_000.0) == {}
    assert KeepWithin(2000).keeps(records) == dict.fromkeys((3, 4, 5), "keep within 2000 s")


@pytest.mark.parametrize("broken", [-1e18, -1.0, 1e18, 253_402_300_800.0])
def test_a_broken_clock_breaks_no_plan(broken):
    records = at(1000, 2000, 3000, broken)
    for rule in (KeepHourly(2), KeepDaily(2), KeepWeekly(2), KeepMonthly(2), KeepWithin(60)):
        assert 40 in kept(records, rule, 1e6)
    assert why(records, KeepDaily(1), 40, 1e6)[-1] == "its time is not known"
    assert KeepWithin(60).keeps_at(records, broken) == dict.fromkeys(
        (1, 2, 3, 4), "keep within 1 min, and the clock is broken"
    )
    # Without a time of its own, a checkpoint is as old as the next one.
    assert set(KeepWithin(60).keeps_at(at(1000, broken, 2000, broken, 3000), 3000.0)) == {4, 5}


def test_a_clock_that_is_behind_moves_no_checkpoint_to_another_day():
    records = at(*DAYS)
    early = records[0].time_seconds - 20 * 86_400
    assert kept(records, KeepDaily(7), early) == [40, 50, 60, 70, 80, 90, 100]
    assert kept(records, KeepWeekly(3), early) == kept(records, KeepWeekly(3)) == [10, 80, 100]
    assert kept(records, KeepWithin(60), early) == list(range(10, 110, 10))
    assert why(records, KeepDaily(1), 100, early)[-1] == "its time is in the future"
    assert why(records, KeepWithin(60), 100, early)[-1] == "its time is in the future, and counts as now"
    assert why(records, KeepDaily(1), 100, records[-1].time_seconds)[-1] == "keep daily 1 of 1 (2026-03-10)"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(604_800, "7 d"), (1_209_600, "2 w"), (5400, "90 min"), (7200, "2 h"), (60, "1 min"), (90.5, "90.5 s")],
)
def test_durations_read_well(seconds, text):
    assert duration(seconds) == text
