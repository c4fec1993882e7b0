"""The step meter, and the textbook intervals."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptman.errors import ConfigError, IntervalError
from ckptman.policies.intervals import StepMeter, daly_interval_seconds, seconds_text, young_interval_seconds

STEADY = [10.0] * 40


def metered(*times):
    """The reference after steps of these times, and the numbers of the steps at which it was derived again."""
    meter = StepMeter()
    drifts = [number for number, seconds in enumerate(times) if meter.observe(seconds)]
    return meter.step_seconds, drifts


@pytest.mark.parametrize(
    ("times", "reference", "drifts"),
    [
        ([], None, []),
        ([120.0], 120.0, []),
        ([120.0, 1.0, 1.0, 1.0, 1.0], 1.0, []),  # a slow first step
        ([1.0, 1.1, 1.2] * 7 + [30.0, *[1.15] * 9] * 10, 1.1, []),  # noise and single slow steps
        # The eleventh of twenty moves the median, and every fifth step looks.
        (STEADY + [13.0] * 40, 13.0, [54]),
        (STEADY + [7.0] * 40, 7.0, [54]),
        (STEADY + [11.9] * 60, 10.0, []),
        (STEADY + [8.1] * 60, 10.0, []),
    ],
)
def test_the_reference_is_stable_until_half_a_window_drifted_by_a_fifth(times, reference, drifts):
    assert metered(*times) == (reference, drifts)


def test_the_reference_follows_a_slow_creep():
    times = [1.0 + 0.005 * step for step in range(400)]
    reference, drifts = metered(*times)
    assert len(drifts) >= 3
    assert reference == pytest.approx(times[-1], rel=0.25)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60))
def test_the_reference_lies_among_what_was_observed(times):
    assert min(times) <= metered(*times)[0] <= max(times)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_step_meter_refuses_times_that_cannot_be(value):
    meter = StepMeter()
    with pytest.raises(IntervalError, match=f"seconds must be a finite number of at least 0, not {value}"):
        meter.observe(value)
    assert meter.step_seconds is None


def test_daly_and_young_worked_check_every_24_steps():
    exact = daly_interval_seconds(save_seconds=10, mtbf_seconds=6000, restart_seconds=600)
    assert exact == pytest.approx(373.5, abs=0.1)
    assert young_interval_seconds(save_seconds=10, mtbf_seconds=6000) == pytest.approx(346.4, abs=0.1)
    assert int(exact / 15) == 24
    assert daly_interval_seconds(0, 6000, 600) == young_interval_seconds(0, 6000) == 0


@given(save=st.floats(1e-3, 100), restart=st.floats(0, 1000))
def test_young_is_the_limit_of_daly_when_failures_are_rare(save, restart):
    def ratio(mtbf):
        return daly_interval_seconds(save, mtbf, restart) / young_interval_seconds(save, mtbf)

    assert ratio(1e12) == pytest.approx(1.0, abs=1e-4)
    assert 1.0 < ratio(1e9) <= ratio(1e6)


@given(save=st.floats(0.1, 100), mtbf=st.floats(1e3, 1e6), restart=st.floats(0, 1000), away=st.floats(1.01, 3))
def test_daly_has_the_highest_availability(save, mtbf, restart, away):
    def availability(interval):
        return (interval - save) / (interval * (1 + (interval / 2 + restart) / mtbf))

    best = daly_interval_seconds(save, mtbf, restart)
    assert availability(best) > availability(best * away)
    assert availability(best) > availability(best / away)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("save_seconds", -1, "a finite number of at least 0"),
        ("save_seconds", math.nan, "a finite number of at least 0"),
        ("save_seconds", "10", "a finite number of at least 0"),
        ("mtbf_seconds", 0, "a finite number above 0"),
        ("mtbf_seconds", math.inf, "a finite number above 0"),
        ("restart_seconds", -1, "a finite number of at least 0"),
    ],
)
def test_costs_that_cannot_be_are_refused(name, value, rule):
    costs = {"save_seconds": 10, "mtbf_seconds": 6000, "restart_seconds": 600, name: value}
    error = ConfigError if isinstance(value, str) else IntervalError
    with pytest.raises(error, match=f"daly_interval_seconds: {name} must be {rule}, not {value!r}"):
        daly_interval_seconds(**costs)
    del costs["restart_seconds"]
    if name in costs:
        with pytest.raises(error, match=f"young_interval_seconds: {name} must be {rule}"):
            young_interval_seconds(**costs)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (0.0312, "0.0312 s"), (4.25, "4.25 s"), (12.5, "12.5 s"), (95, "95 s"), (380.4, "380 s"),
     (99.99, "100 s"), (6000, "6,000 s"), (-5, "-5 s")],
)  # fmt: skip
def test_durations_are_written_as_people_read_them(seconds, text):
    assert seconds_text(seconds) == text
