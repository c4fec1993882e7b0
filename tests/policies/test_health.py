"""Recorded samples: what has to be told is told, once, and over a healthy day nothing is."""

import random
from dataclasses import replace

import pytest

import ckptman
from ckptman.errors import ConfigError, IntervalError
from ckptman.policies.health import HealthSample, HealthThresholds, HealthWatch

PERIOD, STEP = 5.0, 1.0


def healthy(chance, **other):
    """A sample of an H100 that trains: now and then it is between two kernels."""
    dips = chance.random() < 0.02
    figures = {
        "utilisation": chance.uniform(0.2, 0.9) if dips else min(1.0, chance.gauss(0.98, 0.01)),
        "power_watts": chance.uniform(250, 400) if dips else chance.gauss(610, 40),
        "power_limit_watts": 700.0,
        "pcie_in_bytes_per_second": abs(chance.gauss(1e9, 1e9)),
        "pcie_out_bytes_per_second": abs(chance.gauss(0.2e9, 0.2e9)),
        "temperature_celsius": chance.gauss(62, 3),
        "slowdown_celsius": 87.0,
        "clock": chance.gauss(0.9, 0.02),
        "loader": abs(chance.gauss(0.01, 0.01)),
        "host_available_bytes": 900e9,
        "host_total_bytes": 2000e9,
    }
    return HealthSample(**{**figures, **other})


SAVING = {"utilisation": 0.1, "power_watts": 150.0, "pcie_out_bytes_per_second": 27e9}
EVALUATING = {"utilisation": 0.5, "power_watts": 290.0, "pcie_in_bytes_per_second": 2e9}
FIRST_BATCH = {"utilisation": 0.0, "power_watts": 120.0, "loader": 1.0}


def day(seed, seconds, **fault):
    """The samples of a day, each with the last step (None: a save was under way). There is a save every half an hour,
    an evaluation every hour that nobody speaks of, and an epoch's first batch that takes 20 s. `fault`: figures of all
    samples in training."""
    chance, step, time = random.Random(seed), 0, 0.0
    while time < seconds:
        step += int(PERIOD / STEP)
        yield step, healthy(chance, **fault)
        time += PERIOD
        for every, count, figures in ((1800, 4, SAVING), (3600, 60, EVALUATING), (2700, 4, FIRST_BATCH)):
            if time % every < PERIOD:
                for _ in range(count):
                    yield None if figures is SAVING else step, healthy(chance, **figures)
                    time += PERIOD


def watched(recorded, watch=None, start=0.0):
    watch = watch or HealthWatch(HealthThresholds())
    found = []
    for number, (step, sample) in enumerate(recorded):
        found += watch.see(start + number * PERIOD, step, sample, STEP)
    return found


@pytest.mark.parametrize(
    ("fault", "what", "level"),
    [
        ({"utilisation": 0.55}, "utilisation", "problem"),
        ({"utilisation": 0.8}, "utilisation", "look"),
        ({"utilisation": 0.6, "loader": 0.4}, "loader", "problem"),
        ({"power_watts": 300.0}, "power_watts", "problem"),
        ({"power_watts": 480.0, "power_limit_watts": 1000.0}, "power_watts", "problem"),
        ({"throttled": ("temperature",), "clock": 0.5}, "throttled", "problem"),
        ({"temperature_celsius": 84.0}, "temperature_celsius", "problem"),
        ({"pcie_in_bytes_per_second": 22e9}, "pcie_in_bytes_per_second", "look"),
        ({"host_available_bytes": 50e9}, "host_available_bytes", "problem"),
    ],
)
def test_a_fault_is_told_once_within_minutes_while_it_lasts(fault, what, level):
    found = [each for each in watched(day(3, 2 * 3600, **fault)) if each.what == what]
    assert [(each.level, each.ended) for each in found] == [(level, False)]
    assert 150 <= found[0].since + found[0].seconds <= 600  # of the trace, not of a clock
    assert found[0].share > 0.9
    assert not found[0].bad_node


@pytest.mark.parametrize(
    ("hours", "thresholds", "fault"),
    [
        (24, {}, {}),
        (4, {}, {"loader": 0.8}),  # a busy GPU hides it
        (4, {}, {"power_watts": 210.0, "power_limit_watts": 400.0}),
        (4, {}, {"power_watts": None, "utilisation": None, "pcie_in_bytes_per_second": None}),
        (4, {}, {"pcie_in_bytes_per_second": 18e9}),
        (1, {"utilisation": None, "utilisation_look": 0.5}, {"utilisation": 0.6}),
        (1, {"power_watts": None, "power_share": None}, {"power_watts": 100.0}),
    ],
)
def test_nothing_is_told_of_a_healthy_day(hours, thresholds, fault):
    watch = HealthWatch(ckptman.HealthThresholds(**thresholds))
    assert watched(day(4, hours * 3600, **fault), watch) == []


def test_a_loader_that_starves_long_steps_shows_in_the_mean():
    # 10 s steps of which the last 4 s wait for data: a sample is all of one or of the other.
    busy = [1.0, 0.2]
    trace = ((number // 2, healthy(random.Random(number), utilisation=busy[number % 2])) for number in range(400))
    assert {(each.what, each.level) for each in watched(trace)} == {("utilisation", "problem")}
    # And 10 s steps with half a second between them are as they should be.
    chance = random.Random(5)
    dips = (0.5 if chance.random() < 0.08 else 0.99 for _ in range(3000))
    assert watched((n // 2, healthy(random.Random(n), utilisation=each)) for n, each in enumerate(dips)) == []


def test_a_breach_ends_and_its_return_is_told_again():
    watch, slow = HealthWatch(HealthThresholds()), {"throttled": ("power brake",)}
    first = watched(day(6, 1800, **slow), watch)
    assert [each.ended for each in first] == [False]
    [over] = watched(day(7, 3600), watch, 2000.0)
    assert over.ended
    assert over.since == first[0].since
    assert 1500 < over.seconds < 2100
    assert [each.ended for each in watched(day(8, 1800, **slow), watch, 9000.0)] == [False]


def test_few_samples_make_no_breach():
    trace = ((n, healthy(random.Random(n), throttled=("temperature",) if n % 25 == 0 else ())) for n in range(4000))
    assert watched(trace) == []


def test_errors_of_a_device_count_at_once_whatever_the_run_is_at():
    watch, chance = HealthWatch(HealthThresholds()), random.Random(9)
    assert watch.see(0.0, None, healthy(chance)) == []
    [ecc] = watch.see(5.0, None, healthy(chance, ecc_errors=2))
    assert (ecc.what, ecc.value, ecc.bad_node) == ("ecc_errors", 2, True)
    assert str(ecc) == "2 uncorrected ECC errors of the GPU"
    assert watch.see(10.0, None, healthy(chance, ecc_errors=2)) == []
    found = watch.see(15.0, 1, healthy(chance, xids=(79, 31)))
    assert [(each.what, each.value, each.level, each.bad_node) for each in found] == [
        ("xid", 79, "problem", True),
        ("xid", 31, "look", False),
    ]
    assert watch.see(20.0, 1, healthy(chance, xids=(79,))) == []
    assert [each.value for each in watch.see(3620.0, 1, healthy(chance, xids=(79,)))] == [79]  # after an hour, again
    [lost] = watch.see(3625.0, 1, HealthSample(lost="GPU is lost"))
    assert lost.bad_node


def test_the_summary_is_of_training_alone():
    watch = HealthWatch(HealthThresholds())
    steady = HealthSample(utilisation=0.95, temperature_celsius=60.0)
    hot = replace(steady, temperature_celsius=70.0)
    watched([(1, steady), (2, hot), (None, HealthSample(utilisation=0.0)), (3, steady)], watch)
    assert (watch.summary.samples, watch.summary.set_aside) == (2, 1)
    assert watch.summary.values() == {"utilisation": 0.95, "temperature_celsius": 70.0}


def test_the_power_that_is_expected_of_a_device():
    assert [HealthThresholds().least_watts(limit) for limit in (700, 500, 400, None)] == [350, 350, 200, None]


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("share", 0, IntervalError),
        ("share", None, ConfigError),
        ("utilisation", 90, IntervalError),
        ("utilisation", "70 %", ConfigError),
        ("period_seconds", 1e9, IntervalError),
        ("bad_xids", "79", ConfigError),
        ("bad_xids", (4.8,), ConfigError),
    ],
)
def test_thresholds_are_checked(name, value, error):
    with pytest.raises(error, match=name):
        HealthThresholds(**{name: value})
