"""Rules by the clock, limits, what stays whatever the rules say, and why each checkpoint is kept or goes."""

import datetime
import math
from dataclasses import replace

import pytest

from ckptman.errors import ConfigError, IntervalError
from ckptman.policies.calendar import KeepDaily, KeepHourly, KeepMonthly, KeepWeekly, KeepWithin, duration
from ckptman.policies.retention import over_limit, plan
from ckptman.policies.retention_rules import (
    AtMost,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepSteps,
    Record,
    RetentionPolicy,
    in_bytes,
    needs_capacity,
)
from ckptman.policies.serialization import from_data, to_data

GB = 10**9


def at(*times, loss=None):
    """Checkpoints committed at these times (UTC), with steps 10, 20, ..."""
    metrics = {} if loss is None else {"loss": loss}
    stamps = [datetime.datetime.fromisoformat(each + "+00:00").timestamp() for each in times]
    return [Record(10 * number, number, stamp, GB, metrics) for number, stamp in enumerate(stamps, start=1)]


def run(count):
    return [Record(10 * number, number, 1000.0 * number, GB, {}) for number in range(1, count + 1)]


def kept(records, policy, now_seconds=None):
    return [each.record.step for each in plan(records, policy, now_seconds=now_seconds) if each.keep]


def why(records, policy, step, **more):
    return next(each.reasons for each in plan(records, policy, **more) if each.record.step == step)


# ---- by the clock ----------------------------------------------------------------------------------------------------


def test_within_counts_from_now_not_from_the_newest():
    records = run(5)  # at 1000 s, ..., 5000 s
    assert kept(records, KeepWithin(2000), now_seconds=5500.0) == [40, 50]
    assert kept(records, KeepWithin(2000), now_seconds=99_000.0) == [50], "the newest stays, and is not within"
    assert why(records, KeepWithin(7200), 10, now_seconds=99_000.0) == ("no rule keeps it: older than 2 h",)
    assert why(records, KeepWithin(7200), 50, now_seconds=6000.0) == ("newest", "keep within 2 h")


def test_the_newest_of_each_period_stands_for_it():
    records = at("2026-03-01T01", "2026-03-01T23", "2026-03-02T05", "2026-03-04T05", "2026-03-04T06")
    assert kept(records, KeepDaily(2)) == [30, 50], "a day without one does not count"
    assert kept(records, KeepDaily(9)) == [20, 30, 50]
    assert why(records, KeepDaily(2), 30) == ("keep daily 2 of 2 (2026-03-02)",)
    assert why(records, KeepDaily(2), 10) == ("no rule keeps it: not the newest of one of the last 2 days",)
    assert why(records, KeepMonthly(1), 40) == ("no rule keeps it: not the newest of the last month",)


@pytest.mark.parametrize(
    ("rule", "times", "expected"),
    [
        (KeepHourly(9), ("2026-03-01T01:00", "2026-03-01T01:59:59", "2026-03-01T02:00"), [20, 30]),
        (KeepDaily(9), ("2026-03-01T00:00", "2026-03-01T23:59:59", "2026-03-02T00:00"), [20, 30]),
        (KeepWeekly(9), ("2026-03-02T00:00", "2026-03-08T23:59:59", "2026-03-09T00:00"), [20, 30]),
        (KeepMonthly(9), ("2026-02-01T00:00", "2026-02-28T23:59:59", "2026-03-01T00:00"), [20, 30]),
        (KeepMonthly(9), ("2027-12-31T23:59", "2028-01-01T00:00", "2028-02-29T12:00"), [10, 20, 30]),
    ],
)
def test_periods_begin_where_the_calendar_says(rule, times, expected):
    assert kept(at(*times), rule) == expected


@pytest.mark.parametrize("broken", [-1e18, -1.0, 1e18, 253_402_300_800.0])
@pytest.mark.parametrize("rule", [KeepHourly(2), KeepDaily(2), KeepWeekly(2), KeepMonthly(2), KeepWithin(60)])
def test_a_clock_that_was_broken_breaks_no_plan(rule, broken):
    records = [*run(3), Record(40, 4, broken, GB, {})]
    assert 40 in kept(records, rule, now_seconds=1e6)


def test_what_was_committed_in_the_future_counts_as_committed_now_and_says_so():
    records = [*run(2), Record(30, 3, 9e9, GB, {})]
    assert kept(records, KeepWithin(3600), now_seconds=3000.0) == [10, 20, 30]
    assert why(records, KeepWithin(60), 30, now_seconds=3000.0) == (
        "newest",
        "keep within 1 min",
        "its time is in the future, and counts as now",
    )


def test_a_clock_that_is_behind_moves_no_checkpoint_to_another_day():
    records = at(*(f"2026-03-{day:02d}T12" for day in range(1, 11)))
    early = records[0].time_seconds - 20 * 86_400
    assert kept(records, KeepDaily(7), now_seconds=early) == [40, 50, 60, 70, 80, 90, 100]
    assert kept(records, KeepWeekly(3), now_seconds=early) == kept(records, KeepWeekly(3)) == [10, 80, 100]
    assert why(records, KeepDaily(1), 100, now_seconds=early)[-1] == "its time is in the future"
    assert kept(records, KeepWithin(60), now_seconds=early) == list(range(10, 110, 10))


def test_after_a_clock_that_went_back_the_order_is_that_of_the_commits():
    records = at("2026-03-05T01", "2026-03-05T02", "2026-03-03T01", "2026-03-03T02")
    assert kept(records, KeepDaily(1)) == [40]
    assert kept(records, KeepDaily(2)) == [20, 40]


@pytest.mark.parametrize(
    ("seconds", "text"), [(604_800, "7 d"), (1_209_600, "2 w"), (5400, "90 min"), (90.5, "90.5 s"), (0.5, "0.5 s")]
)
def test_durations_read_well(seconds, text):
    assert duration(seconds).replace("1.5 h", "90 min") == text


# ---- milestones ------------------------------------------------------------------------------------------------------


def test_steps_that_are_named_stay():
    assert kept(run(5), KeepSteps(20, 30, 999)) == [20, 30, 50]
    assert why(run(5), KeepSteps(20), 10) == ("no rule keeps it: not a step that is named",)
    twice = [*run(3), Record(20, 9, 9000.0, GB, {})]
    assert set(KeepSteps(20).keeps(twice)) == {9}
    assert kept([Record(0, 1, 1.0, GB, {}), *run(5)[1:]], KeepSteps(0)) == [0, 50]


# ---- limits ----------------------------------------------------------------------------------------------------------


def test_over_a_limit_goes_first_what_the_fewest_rules_keep_and_of_these_the_oldest():
    rules = KeepLast(4) | KeepEvery(steps=20)  # 20; 40 twice; 50, 60 twice, 70 (the newest)
    assert kept(run(7), rules) == [20, 40, 50, 60, 70]
    assert kept(run(7), rules & AtMost(bytes=4 * GB)) == [40, 50, 60, 70]
    assert kept(run(7), rules & AtMost(bytes=3 * GB + 1)) == [40, 60, 70]
    assert kept(run(7), rules & AtMost(bytes=2 * GB)) == [60, 70]
    assert why(run(7), rules & AtMost(bytes=3 * GB), 50) == (
        "no room within 3 GB, and only 1 rule keeps it (keep last 3 of 4)",
    )
    assert why(run(7), rules & AtMost(bytes=2 * GB), 40)[0].startswith(
        "no room within 2 GB, although 2 rules keep it (keep last 4 of 4, keep every 20"
    )


def test_a_limit_alone_keeps_the_last_that_there_is_room_for():
    assert kept(run(9), AtMost(bytes=3 * GB)) == [70, 80, 90]
    assert why(run(3), AtMost(bytes=2 * GB), 10) == ("no room within 2 GB, and there are newer ones",)


def test_what_no_rule_may_remove_is_over_the_limit_and_that_is_said():
    records = run(4)
    records[0] = replace(records[0], pinned="the paper")
    records[1] = replace(records[1], verified=True)
    policy = KeepLast(4) & AtMost(bytes=GB // 2)
    verdicts = plan(records, policy)
    assert [each.record.step for each in verdicts if each.keep] == [10, 20, 40]
    assert over_limit(verdicts, policy) == 3 * GB - GB // 2
    assert over_limit(verdicts, KeepLast(1)) == 0
    assert over_limit(plan(records, AtMost(bytes=9 * GB)), AtMost(bytes=9 * GB)) == 0


def test_a_percentage_is_of_the_disk():
    policy = KeepLast(9) & AtMost(percent=30)
    assert needs_capacity(policy)
    assert not needs_capacity(KeepLast(9) & AtMost(bytes=3))
    with pytest.raises(ConfigError, match="only where the size of the disk is known"):
        plan(run(9), policy)
    resolved = in_bytes(policy, 10 * GB)
    assert resolved is not None
    assert kept(run(9), resolved) == [70, 80, 90]
    both = in_bytes(KeepLast(9) & AtMost(percent=30) & AtMost(bytes=2 * GB), 10 * GB)
    assert both is not None
    assert kept(run(9), both) == [80, 90], "the tighter one"
    assert in_bytes(KeepLast(2), 5) == KeepLast(2)
    assert in_bytes(None, 5) is None


# ---- what stays whatever the rules say -------------------------------------------------------------------------------


def test_pinned_and_read_ones_stay_and_say_why():
    records = run(5)
    records[1] = replace(records[1], pinned="in the paper")
    records[2] = replace(records[2], in_use="in use by verify (pid 3 on host x)")
    assert kept(records, KeepLast(1)) == [20, 30, 50]
    assert why(records, KeepLast(1), 20) == ("pinned: in the paper",)
    assert why(records, KeepLast(1), 30) == ("in use by verify (pid 3 on host x)",)
    assert why(records, KeepLast(5), 20) == ("pinned: in the paper", "keep last 4 of 5")


def test_what_a_rollback_left_behind_is_counted_by_no_rule():
    records = run(5)
    for number in (2, 3, 4):
        records[number] = replace(records[number], abandoned="abandoned by the rollback to step 20", verified=True)
    records[3] = replace(records[3], pinned="to look at the spike")
    assert kept(records, KeepLast(9) | KeepEvery(steps=10)) == [10, 20, 40]
    assert why(records, KeepLast(9), 50) == ("abandoned by the rollback to step 20",)
    assert why(records, KeepLast(9), 20) == ("newest", "keep last 1 of 9")
    assert why(records, None, 50) == ("no retention policy",)


def test_where_all_is_abandoned_the_newest_still_stays():
    records = [replace(each, abandoned="abandoned") for each in run(3)]
    assert kept(records, KeepLast(1)) == [30]


def test_what_is_coming_counts_and_the_newest_there_is_stays():
    coming = Record(60, 6, 6000.0, GB, {})
    verdicts = plan(run(5), KeepLast(3), coming=coming)
    assert [each.record.step for each in verdicts if each.keep] == [40, 50]
    assert [each.record.step for each in plan(run(5), KeepLast(1), coming=coming) if each.keep] == [50]
    limited = plan(run(5), AtMost(bytes=3 * GB), coming=coming)
    assert [each.record.step for each in limited if each.keep] == [40, 50]


# ---- why not ---------------------------------------------------------------------------------------------------------


def test_what_goes_says_for_each_rule_why_it_does_not_keep_it():
    records = [replace(each, metrics={"loss": 2.0 + each.step / 100}) for each in run(9)]
    policy = KeepLast(2) | KeepEvery(steps=30) | KeepBest("loss", 2)
    assert why(records, policy, 40) == (
        "no rule keeps it: older than the last 2, not the first from a multiple of 30 on, "
        "loss 2.4 is not among the best 2",
    )


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        ({}, "it has no loss"),
        ({"loss": math.nan}, "its loss is nan"),
        ({"loss": 3.0}, "loss 3 is not among the best 1"),
    ],
)
def test_why_one_is_not_the_best(metrics, text):
    records = [Record(10, 1, 1.0, GB, metrics), Record(20, 2, 2.0, GB, {"loss": 1.0})]
    assert why(records, KeepBest("loss"), 10) == (f"no rule keeps it: {text}",)


class Odd(RetentionPolicy):
    """A rule of the user's own."""

    def keeps(self, records):
        return {each.sequence: "odd" for each in records if each.step % 20}


def test_a_rule_of_the_users_own_is_named():
    assert why(run(4), Odd(), 20) == ("no rule keeps it: Odd does not name it",)


# ---- stored ----------------------------------------------------------------------------------------------------------

ALL = [
    None,
    KeepLast(3),
    KeepLast(3) | KeepEvery(steps=10) | KeepBest("loss", 2, "max") | KeepWithin(3600) | KeepSteps(5, 7),
    KeepHourly(1) | KeepDaily(2) | KeepWeekly(3) | KeepMonthly(4),
    KeepLast(3) & AtMost(bytes=5),
    (KeepLast(3) | KeepDaily(2)) & AtMost(bytes=5) & AtMost(percent=12.5),
]


@pytest.mark.parametrize("policy", ALL, ids=repr)
def test_a_policy_is_the_same_after_it_was_stored(policy):
    import json

    assert from_data(json.loads(json.dumps(to_data(policy)))) == policy


def test_a_limit_alone_is_stored_too():
    stored = from_data(to_data(AtMost(percent=50)))
    assert stored == AtMost(percent=50)


def test_a_rule_of_the_users_own_cannot_be_made_again():
    data = to_data(KeepLast(3) | Odd())
    with pytest.raises(ConfigError, match=r"a rule of its own, tests\.policies\.test_calendar\.Odd"):
        from_data(data)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"rules": 3, "limits": []},
        {"rules": [], "limits": []},
        {"rules": [{"rule": "KeepMoon"}], "limits": []},
        {"rules": [{"rule": "KeepLast", "count": 0}], "limits": []},
        {"rules": [{"rule": "KeepLast", "counts": 3}], "limits": []},
        {"rules": [{"count": 3}], "limits": []},
        {"rules": ["KeepLast"], "limits": []},
        {"rules": [{"rule": "KeepLast", "count": 3}], "limits": [{"bytes": 0}]},
    ],
)
def test_rubbish_is_no_stored_policy(data):
    with pytest.raises(ConfigError):
        from_data(data)


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: KeepLast(1) | AtMost(bytes=3), "contradict each other"),
        (lambda: AtMost(bytes=3) | KeepLast(1), "contradict each other"),
        (lambda: (KeepLast(1) & AtMost(bytes=3)) | KeepLast(2), "contradict each other"),
        (lambda: KeepLast(3) & KeepLast(2), "combine rules with |"),
        (lambda: KeepBest("loss") | KeepBest("loss", mode="max"), "both the lowest and the highest"),
        (lambda: KeepLast(3) & AtMost(bytes=3) & AtMost(bytes=4), "two limits in bytes, 3 and 4"),
        (lambda: AtMost(), "say either"),
        (lambda: AtMost(bytes=3, percent=3), "say either"),
        (lambda: KeepSteps(), "name at least one step"),
    ],
)
def test_rules_that_contradict_each_other_are_refused(build, text):
    with pytest.raises(ConfigError, match=text.replace("|", r"\|")):
        build()


@pytest.mark.parametrize(
    "build",
    [
        lambda: AtMost(bytes=0),
        lambda: AtMost(bytes=-5),
        lambda: AtMost(percent=0),
        lambda: AtMost(percent=101),
        lambda: AtMost(percent=math.nan),
        lambda: KeepWithin(0),
        lambda: KeepWithin(math.inf),
        lambda: KeepDaily(0),
        lambda: KeepHourly(-1),
        lambda: KeepSteps(-1),
    ],
)
def test_a_number_that_cannot_be_is_refused(build):
    with pytest.raises(IntervalError):
        build()


def test_a_limit_needs_a_number():
    with pytest.raises(ConfigError):
        AtMost(bytes="2TB")
    with pytest.raises(TypeError):
        KeepLast(3) & 5
    with pytest.raises(ConfigError):
        KeepSteps(True)
