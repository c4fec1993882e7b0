"""The step meter, and the textbook intervals."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptman.errors import ConfigError, IntervalError
from ckptman.policies.intervals import StepMeter, daly_interval_seconds, seconds_text, young_interval_seconds

quick = settings(max_examples=60, deadline=None, print_blob=True)


# StepMeter


def test_step_meter_knows_nothing_before_the_first_step():
    assert StepMeter().step_seconds is None


def test_step_meter_is_not_spoiled_by_a_slow_first_step():
    meter = StepMeter()
    meter.observe(120.0)
    assert meter.step_seconds == 120.0
    for _ in range(4):
        meter.observe(1.0)
    assert meter.step_seconds == 1.0


def test_step_meter_keeps_its_reference_through_noise_and_single_slow_steps():
    meter = StepMeter()
    drifted = [meter.observe(1.0 + 0.1 * (step % 3)) for step in range(20)]
    reference = meter.step_seconds
    drifted += [meter.observe(30.0 if step % 10 == 0 else 1.15) for step in range(100)]
    assert not any(drifted)
    assert meter.step_seconds == reference == pytest.approx(1.1)


@pytest.mark.parametrize("factor", [1.3, 0.7])
def test_step_meter_derives_the_reference_again_when_half_a_window_drifted(factor):
    meter = StepMeter()
    for _ in range(40):
        meter.observe(10.0)
    drifted = [meter.observe(10.0 * factor) for _ in range(40)]
    assert drifted.index(True) == 14  # the eleventh of twenty moves the median, and every fifth step looks
    assert drifted.count(True) == 1
    assert meter.step_seconds == pytest.approx(10.0 * factor)


def test_step_meter_leaves_a_drift_of_less_than_a_fifth_alone():
    meter = StepMeter()
    for _ in range(20):
        meter.observe(10.0)
    assert not any(meter.observe(11.9) for _ in range(60))
    assert meter.step_seconds == 10.0


def test_step_meter_follows_a_slow_creep():
    meter = StepMeter()
    times = [1.0 + 0.005 * step for step in range(400)]
    drifts = sum(meter.observe(seconds) for seconds in times)
    assert drifts >= 3
    assert meter.step_seconds == pytest.approx(times[-1], rel=0.25)


@quick
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60))
def test_step_meter_reference_lies_among_what_was_observed(times):
    meter = StepMeter()
    for seconds in times:
        meter.observe(seconds)
    assert meter.step_seconds is not None
    assert min(times) <= meter.step_seconds <= max(times)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_step_meter_refuses_times_that_cannot_be(value):
    meter = StepMeter()
    with pytest.raises(IntervalError, match=f"seconds must be a finite number of at least 0, not {value}"):
        meter.observe(value)
    assert meter.step_seconds is None


# Daly and Young


def test_daly_worked_check_every_24_steps():
    exact = daly_interval_seconds(save_seconds=10, mtbf_seconds=6000, restart_seconds=600)
    assert exact == pytest.approx(10 + math.sqrt(2 * 6600 * 10 + 100))
    assert exact == pytest.approx(373.5, abs=0.1)
    dropped = math.sqrt(2 * 6600 * 10)
    assert dropped / 15 == pytest.approx(24.2, abs=0.1)
    assert int(exact / 15) == int(dropped / 15) == 24


def test_young_worked_check():
    assert young_interval_seconds(save_seconds=10, mtbf_seconds=6000) == pytest.approx(346.4, abs=0.1)


@quick
@given(save=st.floats(1e-3, 100), restart=st.floats(0, 1000))
def test_young_is_the_limit_of_daly_when_failures_are_rare(save, restart):
    def ratio(mtbf):
        return daly_interval_seconds(save, mtbf, restart) / young_interval_seconds(save, mtbf)

    assert ratio(1e12) == pytest.approx(1.0, abs=1e-4)
    assert 1.0 < ratio(1e9) <= ratio(1e6)


@quick
@given(save=st.floats(0.1, 100), mtbf=st.floats(1e3, 1e6), restart=st.floats(0, 1000), away=st.floats(1.01, 3))
def test_daly_has_the_highest_availability(save, mtbf, restart, away):
    def availability(interval):
        return (interval - save) / (interval * (1 + (interval / 2 + restart) / mtbf))

    best = daly_interval_seconds(save, mtbf, restart)
    assert availability(best) > availability(best * away)
    assert availability(best) > availability(best / away)


def test_a_save_that_costs_nothing_may_be_taken_all_the_time():
    assert daly_interval_seconds(0, 6000, 600) == 0
    assert young_interval_seconds(0, 6000) == 0


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("save_seconds", -1, "a finite number of at least 0"),
        ("save_seconds", math.nan, "a finite number of at least 0"),
        ("mtbf_seconds", 0, "a finite number above 0"),
        ("mtbf_seconds", math.inf, "a finite number above 0"),
        ("restart_seconds", -1, "a finite number of at least 0"),
    ],
)
def test_costs_that_cannot_be_are_refused(name, value, rule):
    costs = {"save_seconds": 10, "mtbf_seconds": 6000, "restart_seconds": 600, name: value}
    with pytest.raises(IntervalError, match=f"daly_interval_seconds: {name} must be {rule}, not {value!r}"):
        daly_interval_seconds(**costs)
    if name != "restart_seconds":
        del costs["restart_seconds"]
        with pytest.raises(IntervalError, match=f"young_interval_seconds: {name} must be {rule}"):
            young_interval_seconds(**costs)


def test_costs_of_the_wrong_kind_are_refused():
    with pytest.raises(ConfigError, match="save_seconds must be a finite number of at least 0, not '10'"):
        young_interval_seconds("10", 6000)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (0.0312, "0.0312 s"), (4.25, "4.25 s"), (12.5, "12.5 s"), (95, "95 s"), (380.4, "380 s"),
     (99.99, "100 s"), (6000, "6,000 s"), (-5, "-5 s")],
)  # fmt: skip
def test_durations_are_written_as_people_read_them(seconds, text):
    assert seconds_text(seconds) == text
