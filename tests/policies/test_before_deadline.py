"""BeforeDeadline before a save was measured, and its promises, on simulated attempts that save behind the training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import count

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ckptman.policies.save_policies import BeforeDeadline, Decision, Facts
from tests.policies.test_save_policies import facts

# Two of three draws are left out, and at times so many of the first that hypothesis gives up. A hundred others are
# looked at all the same.
rare = [HealthCheck.filter_too_much]
quick = settings(max_examples=100, deadline=None, print_blob=True, suppress_health_check=rare)
ROUNDING = 1e-6


def test_before_deadline_saves_once_to_measure_while_there_is_time_for_two():
    policy = BeforeDeadline(margin_seconds=10, assumed_save_seconds=60, safety=2)
    assert policy.decide(facts(time_left_seconds=250.0)) is None
    assert policy.decide(facts(time_left_seconds=249.0)) == Decision(
        "first save, to measure its cost: 249 s left before the deadline, 250 s needed "
        "(2 x two assumed saves of 60 s + margin of 10 s + step of 0 s)"
    )


def test_before_deadline_measures_only_where_a_save_of_one_step_would_have_room_after_the_next_step():
    policy = BeforeDeadline(margin_seconds=10, assumed_save_seconds=60, safety=2)
    room = policy.decide(facts(time_left_seconds=40.0, step_seconds=10.0))  # 2 x 10 + 10 + 10
    assert room is not None
    assert not room.stop
    assert policy.decide(facts(time_left_seconds=39.0, step_seconds=10.0)) == Decision(
        "39 s left before the deadline, 140 s needed (2 x assumed save of 60 s + margin of 10 s + step of 10 s)",
        stop=True,
    )


def test_before_deadline_goes_on_while_the_first_save_is_under_way_and_leaves_when_it_takes_long():
    policy = BeforeDeadline(margin_seconds=10, assumed_save_seconds=60, safety=2)
    known = {"saved_step": 5, "start_step": 4, "seconds_since_save": 20.0, "step_seconds": 5.0}
    assert policy.decide(facts(9, time_left_seconds=65.0, **known)) is None  # 2 x (20 + 5) + 10 + 5
    assert policy.decide(facts(9, time_left_seconds=64.0, **known)) == Decision(
        "64 s left before the deadline, 65 s needed (2 x save under way of 25 s + margin of 10 s + step of 5 s)",
        stop=True,
    )
    failed = policy.decide(facts(9, time_left_seconds=64.0, **{**known, "saved_step": 4}))
    assert failed is not None
    assert not failed.stop, "it is tried again"


def test_before_deadline_learns_from_a_first_save_that_takes_longer_than_assumed():
    policy = BeforeDeadline(margin_seconds=0, assumed_save_seconds=60, safety=1)
    known = {"saved_step": 5, "seconds_since_save": 500.0}
    assert policy.decide(facts(9, time_left_seconds=500.0, **known)) is None
    asked = policy.decide(facts(9, time_left_seconds=499.0, **known))
    assert asked is not None
    assert asked.stop


@dataclass(frozen=True)
class Save:
    step: int
    decided_seconds: float
    durable_seconds: float
    stopped: bool
    failed: bool


def attempt(policy, *, step_seconds, save_seconds, limit_seconds, known_seconds=None, failing=()):
    """Train until the policy stops, on a simulated clock that starts at 0, and return the saves.

    As the Checkpointer does: a step is decided on when the one before it ends, the first one at its own end; one save
    runs at a time; the last one waits for the one before it.
    """
    saves = []
    now = 0.0
    for step in count(1):
        asked = now if step > 1 else step_seconds
        now += step_seconds
        measured = [each for each in saves if each.durable_seconds <= asked and not each.failed]
        standing = [each for each in saves if each.durable_seconds > asked or not each.failed]
        decision = policy.decide(
            Facts(
                step=step,
                previous_step=step - 1,
                saved_step=standing[-1].step if standing else None,
                start_step=0,
                seconds_since_save=now - (standing[-1].decided_seconds if standing else 0.0),
                step_seconds=step_seconds,
                durable_seconds=save_seconds if measured else known_seconds,
                time_left_seconds=limit_seconds - now,
            )
        )
        if decision is None:
            continue
        begun = max([now, *(each.durable_seconds for each in saves)])
        saves.append(Save(step, now, begun + save_seconds, decision.stop, len(saves) in failing))
        if decision.stop:
            break
    return saves


policies = st.builds(BeforeDeadline, st.floats(0, 60), st.floats(0.1, 300), st.floats(1, 3))
step_times, save_times = st.floats(0.05, 40), st.floats(0.01, 300)


def needed(policy, save_seconds):
    """What a save is to have left when it begins."""
    return policy.safety * save_seconds + policy.margin_seconds


def room_to_measure(policy, step_seconds, save_seconds):
    """What is to be left at the end of the first step so that the first save is measured before it must stop."""
    return (1 + policy.safety) * (save_seconds + 2 * step_seconds) + policy.margin_seconds


@quick
@given(policy=policies, step_seconds=step_times, save_seconds=save_times, limit_seconds=st.floats(1, 1000))
def test_measuring_never_comes_later_than_leaving_would_have_and_costs_one_save(
    policy, step_seconds, save_seconds, limit_seconds
):
    times = {"step_seconds": step_seconds, "save_seconds": save_seconds, "limit_seconds": limit_seconds}
    saves = attempt(policy, **times)
    assert [each.stopped for each in saves] in ([True], [False, True])
    leaving = attempt(policy, known_seconds=policy.assumed_save_seconds, **times)
    assert saves[0].step <= leaving[0].step


@quick
@given(
    policy=policies,
    step_seconds=step_times,
    share=st.floats(0.01, 1),
    spare_seconds=st.floats(0, 2000),
)
def test_a_save_that_takes_no_longer_than_assumed_is_in_time_if_there_was_time_for_two(
    policy, step_seconds, share, spare_seconds
):
    save_seconds = share * policy.assumed_save_seconds
    limit_seconds = step_seconds + needed(policy, 2 * policy.assumed_save_seconds) + spare_seconds
    saves = attempt(policy, step_seconds=step_seconds, save_seconds=save_seconds, limit_seconds=limit_seconds)
    assert saves[-1].durable_seconds <= limit_seconds - policy.margin_seconds + ROUNDING


@quick
@given(policy=policies, step_seconds=step_times, save_seconds=save_times, limit_seconds=st.floats(1, 1000))
def test_after_a_first_save_that_has_ended_the_last_one_is_in_time(policy, step_seconds, save_seconds, limit_seconds):
    saves = attempt(policy, step_seconds=step_seconds, save_seconds=save_seconds, limit_seconds=limit_seconds)
    assume(len(saves) == 2 and saves[0].durable_seconds <= saves[1].decided_seconds)
    assert limit_seconds - saves[1].decided_seconds >= needed(policy, save_seconds) - ROUNDING


@quick
@given(
    policy=st.builds(BeforeDeadline, st.floats(0, 60), st.just(1e6), st.floats(1, 3)),
    step_seconds=step_times,
    save_seconds=save_times,
    spare_seconds=st.floats(0.1, 500),
)
def test_with_room_to_measure_each_attempt_of_a_chain_stops_where_one_would_that_knew(
    policy, step_seconds, save_seconds, spare_seconds
):
    limit_seconds = step_seconds + room_to_measure(policy, step_seconds, save_seconds) + spare_seconds
    times = {"step_seconds": step_seconds, "save_seconds": save_seconds, "limit_seconds": limit_seconds}
    first, *last = attempt(policy, **times)
    assert (first.step, first.stopped) == (1, False), "the limit is shorter than the assumption, and it goes on"
    second = attempt(policy, known_seconds=save_seconds, **times)
    assert [each.step for each in last] == [each.step for each in second]
    best = (limit_seconds - needed(policy, save_seconds)) / step_seconds
    assert math.floor(best - ROUNDING) <= second[0].step <= math.floor(best + ROUNDING)
    assert second[0].step >= 3
    assert last[0].durable_seconds <= limit_seconds


@quick
@given(
    policy=policies,
    step_seconds=step_times,
    save_seconds=save_times,
    limit_seconds=st.floats(1, 1000),
    failing=st.sets(st.integers(0, 40)),
)
def test_whatever_fails_it_stops_while_the_margin_is_left_or_at_the_first_step(
    policy, step_seconds, save_seconds, limit_seconds, failing
):
    saves = attempt(
        policy,
        step_seconds=step_seconds,
        save_seconds=save_seconds,
        limit_seconds=limit_seconds,
        failing=failing,
    )
    assert saves[-1].stopped
    left = limit_seconds - saves[-1].decided_seconds
    assert left >= policy.margin_seconds - ROUNDING or saves[-1].step == 1
    good = [each for each in saves[:-1] if not each.failed]
    assert len(good) <= 1, "once is enough to measure"


@quick
@given(
    policy=policies,
    saved_step=st.sampled_from([None, 3, 7]),
    since=st.floats(0, 500),
    step_seconds=st.none() | step_times,
    durable_seconds=st.none() | save_times,
    left=st.floats(-100, 1000),
    later=st.floats(0, 1000),
)
def test_what_is_due_stays_due_and_less_time_never_undoes_a_stop(
    policy, saved_step, since, step_seconds, durable_seconds, left, later
):
    known = Facts(
        step=8,
        previous_step=7,
        saved_step=saved_step,
        start_step=3,
        seconds_since_save=since,
        step_seconds=step_seconds,
        durable_seconds=durable_seconds,
        time_left_seconds=left,
    )
    now = policy.decide(known)
    then = policy.decide(
        known._replace(step=9, previous_step=8, seconds_since_save=since + later, time_left_seconds=left - later)
    )
    if now is not None:
        assert then is not None
        assert then.stop >= now.stop
    if left < policy.margin_seconds + (step_seconds or 0.0):
        assert now is not None
        assert now.stop, "nothing is measured when no time is left for it"
