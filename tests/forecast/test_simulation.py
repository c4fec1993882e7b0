"""The derived interval against the best one that can be found, on failures that are played; and the formulas' means."""

import math
import random
from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptman.errors import IntervalError
from ckptman.forecast.goodput import Costs, InMemory, best_interval_seconds, goodput_with_memory, shares
from ckptman.forecast.simulation import add_up, play
from ckptman.policies.intervals import daly_interval_seconds

SEED = 20_240
FAILURES = 4_000
HOUR, MINUTE = 3600.0, 60.0


def best_of(failures, costs, shortest, longest):
    """The goodput of the best of 97 intervals on these failures."""
    grid = (shortest * (longest / shortest) ** (number / 96) for number in range(97))
    return max(play(failures, failures[-1], costs, each).goodput for each in grid)


def young(stall, mtbf):
    return math.sqrt(2 * stall * mtbf)


def at_random(mean, count=FAILURES, seed=SEED):
    """Times of failures that are exponential with this mean."""
    print(f"seed {seed}")
    generator = random.Random(seed)
    return list(accumulate(generator.expovariate(1 / mean) for _ in range(count)))


def step_by_step(failures, seconds, costs, interval):
    """The same run, one second after another, with nothing but what the documentation says. Whole numbers only."""
    interval = max(interval, int(costs.settled_seconds))
    lasting = kept_work = work = 0
    up_since, save_since = 0, -1
    durable = []  # when a save counts, and the work that is in it
    for now in range(seconds + 1):
        if now in failures:
            done = [held for when, held in durable if when <= now]
            lasting += max(done, default=0)
            work, durable, save_since, up_since = 0, [], -1, now + int(costs.restart_seconds)
        if now == seconds or now < up_since:
            continue
        begun = now - up_since
        if begun and begun % interval == 0:
            save_since = now
            durable.append((now + int(costs.settled_seconds), work))
        if save_since < 0 or now - save_since >= costs.stall_seconds:
            work += 1
    kept_work = work if up_since <= seconds else 0
    return lasting + kept_work


@pytest.mark.parametrize("seed", range(12))
def test_playing_from_failure_to_failure_is_playing_second_by_second(seed):
    print(f"seed {seed}")
    generator = random.Random(seed)
    seconds = 3_000
    failures = sorted(generator.sample(range(1, seconds), generator.choice([0, 1, 5, 40])))
    costs = Costs(generator.choice([0, 3, 20]), generator.choice([0, 3, 25]), generator.choice([0, 7, 90]))
    for interval in (1, 17, 60, 400, 5_000):
        played = play(failures, seconds, costs, interval)
        assert played.good_seconds == step_by_step(failures, seconds, costs, interval), interval
        assert played.failures == len(failures)


@settings(max_examples=100, deadline=None, print_blob=True)
@given(
    gaps=st.lists(st.tuples(st.floats(0, 5_000), st.booleans()), max_size=30),
    stall=st.floats(0, 300),
    more=st.floats(0, 300),
    restart=st.floats(0, 2_000),
    interval=st.floats(1, 10_000),
    near=st.none() | st.tuples(*(st.floats(0, most) for most in (20, 20, 300, 200)), st.booleans()),
    seconds=st.floats(1, 20_000),
)
def test_all_time_is_accounted_for(gaps, stall, more, restart, interval, near, seconds):
    failures = [(time, survives) for time, (_, survives) in zip(accumulate(gap for gap, _ in gaps), gaps)]
    failures = [each for each in failures if each[0] < seconds]
    times, survived = [time for time, _ in failures], [survives for _, survives in failures]
    costs = Costs(stall, stall + more, restart)
    alone = played = play(times, seconds, costs, interval)
    if near is not None:
        memory = InMemory(Costs(near[0], near[0] + near[1], near[2]), near[0] + near[1] + near[3] + 0.1, near[4])
        played = play(times, seconds, costs, interval, memory, survived)
    parts = (played.good_seconds, played.lost_seconds, played.stalled_seconds, played.restarting_seconds)
    assert min(parts) >= -1e-6
    assert sum(parts) == pytest.approx(seconds, abs=1e-5)
    assert played.failures == len(times)
    assert 0 <= played.goodput <= 1 + 1e-9
    if near is not None and not near[0]:  # memory that survives nothing costs its stalls and no more
        lost = play(times, seconds, costs, interval, memory, [False] * len(times))
        assert lost.good_seconds == pytest.approx(alone.good_seconds, abs=1e-6)


def test_the_first_save_and_the_last_failure_count():
    played = play([], 1000.0, Costs(10, 20, 600), 100.0)
    assert played.saves == 10  # the last one begins at the end, and blocks nothing any more
    costs = Costs(0, 0, 5)
    played = play([40.0, 100.0], 100.0, costs, 30.0)
    assert (played.failures, played.good_seconds, played.lost_seconds) == (2, 30 + 30, 10 + 25)
    assert played.restarting_seconds == 5
    assert play([100.0, 101.0], 100.0, costs, 30.0).failures == 1  # the other one comes when nobody looks any more
    assert play([98.0, 100.0], 100.0, costs, 30.0).failures == 2  # and this one hits a restart


def test_runs_are_added_up_at_the_interval_that_was_played():
    costs = Costs(1, 2, 3)
    each = [play(failures, 100.0, costs, 1.0) for failures in ([50.0], [], [10.0, 11.0, 90.0])]
    together = add_up(each)
    assert together.interval_seconds == 2  # no shorter than a save
    assert together.goodput == pytest.approx(sum(one.goodput for one in each) / 3)
    assert together.failures == 4


@pytest.mark.parametrize(
    ("call", "told"),
    [
        *((lambda each=each: play([], 10, Costs(0, 0, 0), each), "interval_seconds") for each in (0, -1)),
        (lambda: play([], 0, Costs(0, 0, 0), 1), "seconds"),
        (lambda: Costs(0, 0, -1), "restart_seconds"),
        (lambda: best_interval_seconds(math.nan, 1), "stall_seconds"),
        (lambda: best_interval_seconds(1, 0), "mtbf_seconds"),
        (lambda: InMemory(Costs(1, 60, 0), 30), "no shorter than a save"),
        *((lambda each=each: InMemory(Costs(0, 0, 0), each), "interval_seconds") for each in (0.0, math.nan)),
    ],
)
def test_times_that_cannot_be_are_refused(call, told):
    with pytest.raises(IntervalError, match=told):
        call()


SETTINGS = [(mtbf, stall, restart) for mtbf in (1, 8, 100) for stall in (1, 30, 300) for restart in (1, 20)]


@pytest.mark.parametrize(
    ("mtbf", "stall", "durable", "restart"),
    [
        *((mtbf, stall, stall, restart) for mtbf, stall, restart in SETTINGS),
        *((mtbf, 5, durable, 10) for mtbf, durable in [(1, 120), (8, 30), (8, 900), (100, 600)]),
    ],
)
def test_the_derived_interval_is_within_a_percent_of_the_best_fixed_one(mtbf, stall, durable, restart):
    failures = at_random(mtbf * HOUR)
    costs = Costs(stall, durable, restart * MINUTE)
    best = best_of(failures, costs, durable, 6 * young(stall, mtbf * HOUR) + durable)
    derived = play(failures, failures[-1], costs, best_interval_seconds(stall, mtbf * HOUR))
    assert derived.goodput >= 0.99 * best
    # The bar can be missed: three times as long, or as short, misses it if saves cost something.
    if mtbf / stall <= 8 / 30 and durable == stall:
        for factor in (1 / 3, 3):
            assert play(failures, failures[-1], costs, derived.interval_seconds * factor).goodput < 0.99 * best
    if stall <= 30 and durable == stall:
        daly = play(failures, failures[-1], costs, daly_interval_seconds(stall, mtbf * HOUR, restart * MINUTE))
        assert daly.goodput >= 0.99 * best


@pytest.mark.parametrize(("mtbf", "stall", "restart"), SETTINGS[::3])
def test_the_shares_are_the_means_of_what_is_played(mtbf, stall, restart):
    failures = at_random(mtbf * HOUR, count=20_000)
    costs = Costs(stall, 2 * stall, restart * MINUTE)
    interval = best_interval_seconds(stall, mtbf * HOUR)
    played = play(failures, failures[-1], costs, interval)
    told = shares(interval, costs, mtbf * HOUR)
    assert told.good + told.lost + told.stalled + told.restarting == pytest.approx(1)
    for name in ("good", "lost", "stalled", "restarting"):
        found = getattr(played, f"{name}_seconds") / played.seconds
        assert found == pytest.approx(getattr(told, name), abs=0.004), name
    # Of the failures that hit a restart nothing is lost: the mean is over those that hit training.
    hit_training = played.failures * math.exp(-costs.restart_seconds / (mtbf * HOUR))
    assert played.lost_seconds / hit_training == pytest.approx(told.lost_per_failure_seconds, rel=0.05)


def test_young_is_the_limit_of_the_best_interval():
    assert best_interval_seconds(1, 1e10) == pytest.approx(young(1, 1e10), rel=1e-4)
    assert best_interval_seconds(0, 1e4) == 0


def test_a_failure_that_memory_survives_loses_its_interval_alone():
    costs, memory = Costs(0, 0, 100), InMemory(Costs(0, 2, 10), 20)
    played = play([95.0], 500.0, costs, 60.0, memory, [True])
    assert (played.lost_seconds, played.restarting_seconds) == (15, 10)
    assert play([95.0], 500.0, costs, 60.0, memory, [False]).lost_seconds == 35
    assert play([81.0], 500.0, costs, 60.0, memory, [True]).lost_seconds == 21  # the save at 80 does not count yet
    assert play([61.0], 500.0, costs, 60.0, memory, [True]).lost_seconds == 1  # the disk has a newer one
    stalls = play([], 100.0, Costs(0, 0, 0), 1000.0, InMemory(Costs(1, 2, 10), 20))
    assert (stalls.good_seconds, stalls.stalled_seconds, stalls.saves) == (96, 4, 5)


def test_what_is_in_memory_alone_is_lost_with_it():
    costs = Costs(0, 0, 100)
    in_place, flushed = (InMemory(Costs(0, 0, 10), 20, flushed=each) for each in (False, True))
    # 40 s were in memory alone when the second failure came: 30 s after the first, 20 s of them in memory.
    assert play([50.0, 90.0], 1000.0, costs, 60.0, in_place, [True, False]).lost_seconds == 10 + 40 + 30
    assert play([50.0, 90.0], 1000.0, costs, 60.0, flushed, [True, False]).lost_seconds == 10 + 30
    assert play([50.0, 90.0], 1000.0, costs, 60.0, in_place, [True, True]).lost_seconds == 10 + 10
    # A save to disk takes it in, and a failure that hits the restart takes it, too.
    assert play([50.0, 130.0], 1000.0, costs, 60.0, in_place, [True, False]).lost_seconds == 10 + 10
    assert play([50.0, 55.0], 1000.0, costs, 60.0, in_place, [True, False]).lost_seconds == 50


@pytest.mark.parametrize("mean", [HOUR, 8 * HOUR])
@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize("share", [0.5, 0.9, 1.0])
def test_the_goodput_with_memory_is_what_is_played(mean, flushed, share):
    failures = at_random(mean)
    generator = random.Random(SEED)
    survived = [generator.random() < share for _ in failures]
    costs = Costs(2, 60, 30 * MINUTE)
    memory = InMemory(Costs(1, 5, 32 * MINUTE if flushed else 90.0), 100, flushed)
    interval = best_interval_seconds(2, mean)
    played = play(failures, failures[-1], costs, interval, memory, survived)
    told = goodput_with_memory(interval, costs, memory, mean, share)
    assert told == pytest.approx(played.goodput, rel=0.02)
    assert told >= shares(interval, costs, mean).good or flushed
    assert goodput_with_memory(interval, costs, replace(memory, costs=Costs(0, 0, 90)), mean, 0.0) == pytest.approx(
        shares(interval, costs, mean).good
    )
