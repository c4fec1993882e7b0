"""The retention rules: what each keeps and why, by step, value, age and calendar; limits; what is refused; and how a
policy is stored."""

import json
import math
from dataclasses import dataclass, replace
from datetime import datetime, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptman.errors import ConfigError, IntervalError
from ckptman.policies.retention_by_time import KeepDaily, KeepHourly, KeepMonthly, KeepWeekly, KeepWithin, duration
from ckptman.policies.retention_plan import plan
from ckptman.policies.retention_rules import (
    AtMost,
    KeepAny,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepSteps,
    Record,
    RetentionPolicy,
    in_bytes,
    is_known_time,
    needs_capacity,
)
from ckptman.policies.stored_retention import from_data, to_data

GB = 10**9


def record(step, sequence, **metrics):
    return Record(step, sequence, 1_700_000_000.0 + sequence, GB, metrics)


def run(*steps, losses=()):
    """Checkpoints of these steps, committed in this order with the sequences 1, 2, ..."""
    metrics = [{"loss": loss} for loss in losses] or [{}] * len(steps)
    return [record(step, sequence, **metrics[sequence - 1]) for sequence, step in enumerate(steps, 1)]


def at(*times):
    """Checkpoints of the steps 10, 20, ..., committed at these times (UTC) or unix seconds."""
    stamps = [datetime.fromisoformat(f"{each}+00:00").timestamp() if isinstance(each, str) else each for each in times]
    return [Record(10 * number, number, stamp, 1, {}) for number, stamp in enumerate(stamps, start=1)]


DATED = at("2026-03-01T01", "2026-03-02T05", "2026-03-04T06")


def kept(records, policy, now_seconds=None):
    return [verdict.record.step for verdict in plan(records, policy, now_seconds=now_seconds) if verdict.keep]


def why(records, policy, step, now_seconds=None):
    return next(each.reasons for each in plan(records, policy, now_seconds=now_seconds) if each.record.step == step)


@dataclass(frozen=True)
class Odd(RetentionPolicy):
    """A user's own rule."""

    def keeps(self, records):
        return {each.sequence: "odd" for each in records if each.step % 20}


@pytest.mark.parametrize(
    ("rule", "records", "reasons"),
    [
        (KeepLast(2), run(900, 1000, 110), {2: "keep last 2 of 2", 3: "keep last 1 of 2"}),
        (KeepEvery(10), run(10, 16, 34), {1: "keep every 10 steps", 3: "keep every 10 steps (first after 30)"}),
        (KeepEvery(1), run(3), {1: "keep every step"}),
        (KeepSteps(30, 20, 999), run(20, 30, 40), {1: "keep step 20", 2: "keep step 30"}),
        (KeepSteps(0), run(0, 10), {1: "keep step 0"}),
        (
            KeepBest("loss", 2),
            run(10, 20, 30, losses=(1, 1, 1)),
            {3: "keep best 1 by loss (min): 1", 2: "keep best 2 by loss (min): 1"},
        ),
        (KeepBest("loss", mode="max"), run(10, 20, losses=(0.5, 0.31)), {1: "keep best 1 by loss (max): 0.5"}),
        (KeepHourly(2), DATED, {2: "keep hourly 2 of 2 (2026-03-02 05 h)", 3: "keep hourly 1 of 2 (2026-03-04 06 h)"}),
        (KeepDaily(2), DATED, {2: "keep daily 2 of 2 (2026-03-02)", 3: "keep daily 1 of 2 (2026-03-04)"}),
        (
            KeepWeekly(2),
            DATED,
            {1: "keep weekly 2 of 2 (week of 2026-02-23)", 3: "keep weekly 1 of 2 (week of 2026-03-02)"},
        ),
        (KeepMonthly(1), DATED, {3: "keep monthly 1 of 1 (2026-03)"}),
        (KeepWithin(7200), DATED, {3: "keep within 2 h"}),
        (
            KeepLast(2) | KeepEvery(10) | KeepBest("loss"),
            run(10, 15, losses=(0.3, 0.5)),
            {1: "keep last 2 of 2; keep every 10 steps; keep best 1 by loss (min): 0.3", 2: "keep last 1 of 2"},
        ),
    ],
    ids=lambda each: repr(each) if isinstance(each, RetentionPolicy) else "",
)
def test_what_a_rule_keeps_and_why(rule, records, reasons):
    assert rule.keeps(records) == reasons


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_not_finite_is_never_best(mode, value):
    records = [*run(10, 20, losses=(value, 7.0)), record(30, 3), record(40, 4, other=0.0)]
    assert set(KeepBest("loss", 4, mode).keeps(records)) == {2}
    nonfinite_reason = replace(record(50, 5, loss=7.0), nonfinite_tensors=("model.weight",))
    assert set(KeepBest("loss", 4, mode).keeps([*records, nonfinite_reason])) == {2}


@pytest.mark.parametrize(
    ("rule", "given", "text"),
    [
        (KeepLast(1), {}, "older than the last one"),
        (KeepLast(2), {}, "older than the last 2"),
        (KeepEvery(30), {}, "not the first from a multiple of 30 on"),
        (KeepSteps(20), {}, "not a step that is named"),
        (KeepBest("loss"), {}, "it has no loss"),
        (KeepBest("loss"), {"metrics": {"loss": math.nan}}, "its loss is nan"),
        (KeepBest("loss", 2), {"metrics": {"loss": 2.4}}, "loss 2.4 is not among the best 2"),
        (KeepBest("loss"), {"metrics": {"loss": 1}, "nonfinite_tensors": ("w",)}, "it is not finite (tensor w)"),
        (KeepWithin(7200), {}, "older than 2 h"),
        (KeepDaily(2), {}, "not the newest of one of the last 2 days"),
        (KeepMonthly(1), {}, "not the newest of the last month"),
        (Odd(), {}, "Odd does not name it"),
        (KeepLast(2) | KeepSteps(20), {}, "older than the last 2, not a step that is named"),
        (KeepLast(2) & AtMost(bytes=GB), {}, "older than the last 2"),
    ],
    ids=lambda each: repr(each) if isinstance(each, RetentionPolicy) else "",
)
def test_why_a_rule_does_not_keep_a_record(rule, given, text):
    assert rule.why_not(replace(record(10, 1), **given)) == text


def test_a_time_is_known_from_1970_to_the_end_of_9999():
    latest = 253_402_300_799
    assert [is_known_time(seconds) for seconds in (-1, 0, 1, latest - 1, latest)] == [False, False, True, True, False]


@st.composite
def histories(draw):
    """Checkpoints in any order, with rollbacks (steps that go back), gaps in the sequence, and missing metrics."""
    losses = st.none() | st.floats(allow_nan=True, allow_infinity=True)
    records = []
    for sequence in draw(st.lists(st.integers(1, 10_000), unique=True, max_size=25)):
        loss = draw(losses)
        records.append(record(draw(st.integers(1, 500)), sequence, **({} if loss is None else {"loss": loss})))
    return records


@given(histories(), st.integers(1, 30))
def test_each_rule_does_what_its_docstring_says(records, number):
    by_sequence = {each.sequence: each for each in records}
    assert sorted(KeepLast(number).keeps(records)) == sorted(by_sequence)[-number:]

    losses = {each.sequence: each.metrics.get("loss", math.nan) for each in records}
    losses = {sequence: loss for sequence, loss in losses.items() if math.isfinite(loss)}
    for mode, worst in (("min", max), ("max", min)):
        best = KeepBest("loss", number, mode).keeps(records)
        assert len(best) == min(number, len(losses))
        left_out = losses.keys() - best
        assert all(worst(losses[each], losses[other]) == losses[other] for each in best for other in left_out)

    last_of_step = {each.step: each.sequence for each in sorted(records, key=lambda each: each.sequence)}
    named = {sequence for step, sequence in last_of_step.items() if step < number}
    assert KeepSteps(*range(number)).keeps(records).keys() == named

    milestones = [by_sequence[each] for each in KeepEvery(number).keeps(records)]
    reached = {each.step // number for each in records} - {0}
    assert sorted(each.step // number for each in milestones) == sorted(reached)
    for each in milestones:
        same = [other for other in records if other.step // number == each.step // number]
        assert each.step == min(other.step for other in same)
        assert each.sequence == max(other.sequence for other in same if other.step == each.step)


def month(day):
    return (datetime.fromtimestamp(day * 86_400, timezone.utc)).strftime("%Y-%m")


@pytest.mark.parametrize(
    ("kind", "period_of"),
    [
        (KeepHourly, lambda seconds: seconds // 3600),
        (KeepDaily, lambda seconds: seconds // 86_400),
        (KeepWeekly, lambda seconds: (seconds // 86_400 + 3) // 7),  # 1970 began on a Thursday
        (KeepMonthly, lambda seconds: month(seconds // 86_400)),
    ],
)
@given(
    st.lists(st.tuples(st.integers(0, 60), st.sampled_from([900, 10_800, 86_400, 600_000]), st.integers(0, 1))),
    st.integers(1, 6),
)
def test_the_newest_of_each_of_the_last_periods_stays(kind, period_of, ticks, count):
    """The order is that of the commits, by a clock that may go back; a period without a checkpoint does not count."""
    begun = 1_767_225_600  # 2026-01-01, midnight; some ticks are a second before an hour, a day or a month
    times = [begun + number * unit - early for number, unit, early in ticks]
    newest = {period_of(seconds): sequence for sequence, seconds in enumerate(times, 1)}
    assert kind(count).keeps(at(*times)).keys() == set(sorted(newest.values())[-count:])


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
    records = at(*(f"2026-03-{day:02d}T12" for day in range(1, 11)))
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


def test_a_union_is_flat_and_reads_like_what_was_written():
    policy = (KeepLast(3) | KeepEvery(steps=10)) | (KeepBest("loss") | KeepSteps(2, 1))
    assert policy.policies == (KeepLast(3), KeepEvery(10), KeepBest("loss"), KeepSteps(1, 2))
    assert repr(KeepLast(3) | KeepBest("loss")) == "KeepLast(count=3) | KeepBest(metric='loss', count=1, mode='min')"
    assert repr(KeepSteps(2, 1)) == "KeepSteps(1, 2)"
    assert repr(KeepLast(3) & AtMost(bytes=5)) == "(KeepLast(count=3)) & AtMost(bytes=5)"
    assert repr(AtMost(bytes=5) & AtMost(percent=12.5)) == "AtMost(bytes=5) & AtMost(percent=12.5)"


@given(histories(), st.integers(1, 9), st.integers(1, 60), st.integers(1, 12), st.booleans())
def test_over_a_limit_goes_first_what_the_fewest_rules_keep_and_of_these_the_oldest(records, last, every, room, alone):
    rules = KeepLast(last) | KeepEvery(every) | KeepBest("loss")
    limit = AtMost(bytes=room)
    records = [replace(each, bytes=1 + each.sequence % 3) for each in records]
    size, newest = {each.sequence: each.bytes for each in records}, max((each.sequence for each in records), default=0)
    if alone:
        times = dict.fromkeys(size, 1)
        verdicts = plan(records, limit)
    else:
        by_rule = [rule.keeps(records) for rule in rules.policies]
        times = {sequence: sum(sequence in each for each in by_rule) for each in by_rule for sequence in each}
        verdicts = plan(records, rules & limit)
    stays = {each.record.sequence for each in verdicts if each.keep}
    worst_first = sorted(times.keys() - {newest}, key=lambda sequence: (times[sequence], sequence))
    gone = len(times.keys() - stays)
    assert stays == {*worst_first[gone:], *([newest] if records else [])}
    used = sum(size[each] for each in stays)
    assert used <= room or stays == {newest}
    assert not gone or used + size[worst_first[gone - 1]] > room, "more goes than has to"


SEVEN = run(10, 20, 30, 40, 50, 60, 70)


def test_a_limited_policy_keeps_by_itself_what_fits():
    assert (KeepLast(4) & AtMost(bytes=2 * GB)).keeps(SEVEN) == {6: "keep last 2 of 4", 7: "keep last 1 of 4"}
    assert AtMost(bytes=GB).keeps(SEVEN) == {7: "there is room for it"}


def test_a_percentage_is_of_the_disk():
    policy = KeepLast(9) & AtMost(percent=30)
    assert needs_capacity(policy)
    assert needs_capacity(AtMost(percent=100))
    assert not needs_capacity(KeepLast(9) & AtMost(bytes=3))
    with pytest.raises(ConfigError, match="only where the size of the disk is known"):
        plan(SEVEN, policy)
    for limits, steps in (
        (AtMost(percent=30), [50, 60, 70]),
        (AtMost(percent=30) & AtMost(bytes=2 * GB), [60, 70]),
        (AtMost(percent=10) & AtMost(bytes=2 * GB), [70]),
    ):
        assert kept(SEVEN, in_bytes(limits, 10 * GB)) == steps
    assert in_bytes(policy, 1) == KeepLast(9) & AtMost(bytes=1)
    assert in_bytes(KeepLast(2), 5) == KeepLast(2)
    assert in_bytes(None, 5) is None


@pytest.mark.parametrize(
    "policy",
    [
        None,
        KeepLast(3),
        KeepLast(3) | KeepEvery(steps=10) | KeepBest("loss", 2, "max") | KeepWithin(3600) | KeepSteps(5, 7),
        KeepHourly(1) | KeepDaily(2) | KeepWeekly(3) | KeepMonthly(4),
        KeepLast(3) & AtMost(bytes=5),
        AtMost(percent=50),
        (KeepLast(3) | KeepDaily(2)) & AtMost(bytes=5) & AtMost(percent=12.5),
    ],
    ids=repr,
)
def test_a_policy_is_the_same_after_it_was_stored(policy):
    assert from_data(json.loads(json.dumps(to_data(policy)))) == policy


def test_a_users_own_rule_is_named_and_cannot_be_restored():
    with pytest.raises(ConfigError, match=r"a rule of its own, tests\.policies\.test_retention_rules\.Odd"):
        from_data(to_data(KeepLast(3) | Odd()))


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


@pytest.mark.parametrize("value", [0, -1, 2.5, math.nan, math.inf, True, "3", None])
@pytest.mark.parametrize(
    ("build", "name"),
    [
        (KeepLast, "KeepLast: count"),
        (KeepEvery, "KeepEvery: steps"),
        (KeepDaily, "KeepDaily: count"),
        (lambda value: KeepBest("loss", value), "KeepBest: count"),
    ],
)
def test_zero_never_means_all(build, name, value):
    with pytest.raises(ConfigError) as refused:
        build(value)
    assert str(refused.value) == (
        f"{name} must be a whole number of at least 1, not {value!r} "
        "(0 never means all; to keep all, give no retention policy)"
    )
    assert isinstance(refused.value, IntervalError) == (type(value) in (int, float))


@pytest.mark.parametrize(
    ("build", "error", "text"),
    [
        (lambda: KeepBest("loss", mode="lowest"), ConfigError, 'mode must be "min" or "max", not \'lowest\''),
        (lambda: KeepBest(""), ConfigError, "metric must be the name of a metric"),
        (lambda: KeepBest(3), ConfigError, "metric must be the name of a metric.*not 3"),
        (lambda: KeepSteps(), ConfigError, "name at least one step"),
        (lambda: KeepSteps(-1), IntervalError, "each step must be"),
        (lambda: KeepSteps(False), ConfigError, "each step must be"),
        (lambda: KeepWithin(0), IntervalError, "seconds must be"),
        (lambda: KeepWithin(math.inf), IntervalError, "seconds must be"),
        (lambda: AtMost(bytes=0), IntervalError, "bytes must be.*0 never means no limit"),
        (lambda: AtMost(bytes=-5), IntervalError, "bytes must be"),
        (lambda: AtMost(bytes="2TB"), ConfigError, "bytes must be"),
        (lambda: AtMost(percent=0), IntervalError, "percent must be a finite number above 0"),
        (lambda: AtMost(percent=math.nan), IntervalError, "percent must be a finite number above 0"),
        (lambda: AtMost(percent=101), IntervalError, "percent must be at most 100, not 101"),
        (lambda: AtMost(), ConfigError, "say either"),
        (lambda: AtMost(bytes=3, percent=3), ConfigError, "say either"),
        (lambda: KeepLast(1) | AtMost(bytes=3), ConfigError, "contradict each other"),
        (lambda: AtMost(bytes=3) | KeepLast(1), ConfigError, "contradict each other"),
        (lambda: (KeepLast(1) & AtMost(bytes=3)) | KeepLast(2), ConfigError, "contradict each other"),
        (lambda: KeepLast(3) & AtMost(bytes=3) & AtMost(bytes=4), ConfigError, "two limits in bytes, 3 and 4"),
        (lambda: AtMost(percent=3) & AtMost(percent=4), ConfigError, "two limits in percent, 3 and 4"),
        (lambda: KeepLast(3) & KeepLast(2), ConfigError, r"combine rules with \|"),
        (lambda: KeepBest("loss") | KeepBest("loss", mode="max"), ConfigError, "both the lowest and the highest"),
        (lambda: KeepAny((KeepLast(3), 5)), ConfigError, "every policy must be a RetentionPolicy, not 5"),
        (lambda: KeepAny(()), ConfigError, "give at least one policy"),
        (lambda: KeepLast(3) | 5, TypeError, "unsupported operand"),
        (lambda: KeepLast(3) & 5, TypeError, "unsupported operand"),
    ],
)
def test_what_cannot_be_meant_is_refused(build, error, text):
    with pytest.raises(error, match=text):
        build()
