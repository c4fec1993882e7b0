"""What the save policies promise, checked on simulated runs with drawn step times, strides and failures."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptman.policies.save_policies import (
    AtStep,
    BeforeDeadline,
    DalyInterval,
    EverySeconds,
    EverySteps,
    Facts,
    InitTimeInterval,
    OnStop,
)

quick = settings(max_examples=60, deadline=None, print_blob=True)  # no time limit per example: the machine may be busy


@dataclass(frozen=True)
class Save:
    step: int
    at_seconds: float
    stopped: bool


def simulate(
    policy,
    steps,
    seconds,
    *,
    start_step=0,
    reference_seconds=None,
    init_seconds=None,
    stall_seconds=0.0,
    durable_seconds=0.0,
    deadline_seconds=None,
    failing=(),
):
    """Run the steps on a simulated clock, ask the policy about each, and return the saves that succeeded."""
    saves = []
    now = saved_at = 0.0
    saved_step = start_step or None
    previous_step = start_step
    for step in steps:
        now += seconds(step)
        decision = policy.decide(
            Facts(
                step=step,
                previous_step=previous_step,
                saved_step=saved_step,
                start_step=start_step,
                seconds_since_save=now - saved_at,
                init_seconds=init_seconds,
                step_seconds=reference_seconds,
                stall_seconds=stall_seconds if saves else None,
                durable_seconds=durable_seconds if saves else None,
                time_left_seconds=None if deadline_seconds is None else deadline_seconds - now,
            )
        )
        previous_step = step
        if decision is None or step in failing:
            continue
        saves.append(Save(step, now, decision.stop))
        saved_step, saved_at = step, now
        now += stall_seconds
        if decision.stop:
            break
    return saves


def gaps(saves, measure, start, end):
    marks = [start, *map(measure, saves), end]
    return [after - before for before, after in pairwise(marks)]


step_times = st.floats(0.01, 40)


@quick
@given(every=st.integers(1, 50), stride=st.integers(1, 9), start=st.integers(0, 120))
def test_every_steps_never_leaves_a_gap_longer_than_its_interval_and_one_stride(every, stride, start):
    steps = range(start + stride, start + 300, stride)
    saves = simulate(EverySteps(every), steps, lambda _: 1.0, start_step=start)
    assert max(gaps(saves, lambda save: save.step, start, steps[-1])) <= every + stride - 1
    assert all(save.step // every > (save.step - stride) // every for save in saves)


@quick
@given(seed=st.randoms(use_true_random=False), reference=step_times, interval=st.floats(60, 900))
@pytest.mark.parametrize("build", [EverySeconds, lambda s: InitTimeInterval(factor=1, max_seconds=s)])
def test_intervals_in_seconds_are_never_passed_while_steps_take_at_most_the_reference(build, seed, reference, interval):
    drawn = [seed.uniform(0.1, 1.0) * reference for _ in range(300)]
    saves = simulate(
        build(interval),
        range(1, 301),
        lambda step: drawn[step - 1],
        reference_seconds=reference,
        init_seconds=interval,
        stall_seconds=0.1 * interval,
    )
    end = saves[-1].at_seconds if saves else sum(drawn)
    assert max(gaps(saves, lambda save: save.at_seconds, 0.0, end)) <= interval * (1 + 1e-9)


@quick
@given(step_seconds=step_times, init_seconds=st.floats(0.1, 4000), stride=st.integers(1, 3))
def test_derived_interval_holds_in_seconds_when_steps_are_regular(step_seconds, init_seconds, stride):
    policy = InitTimeInterval(factor=4, max_seconds=900)
    promise = max(step_seconds, min(4 * init_seconds, 900))  # one step is the least there is
    steps = range(stride, 200, stride)
    saves = simulate(policy, steps, lambda _: step_seconds, reference_seconds=step_seconds, init_seconds=init_seconds)
    times = gaps(saves, lambda save: save.at_seconds, 0.0, len(steps) * step_seconds)
    assert max(times) <= promise * (1 + 1e-9)


def test_daly_run_saves_about_every_24_steps_with_the_save_itself_in_the_interval():
    saves = simulate(
        DalyInterval(mtbf_seconds=6000),
        range(1, 400),
        lambda _: 15.0,
        reference_seconds=15.0,
        init_seconds=600.0,
        stall_seconds=10.0,
    )
    assert saves[0].step == 1
    assert {after.step - before.step for before, after in pairwise(saves)} == {24}


@quick
@given(
    failing=st.sets(st.integers(1, 200), max_size=40),
    policy=st.sampled_from(
        [EverySteps(7), AtStep(50, 100), EverySeconds(70), InitTimeInterval(factor=1), DalyInterval(600)]
    ),
)
def test_a_failed_save_is_made_up_for_at_the_next_step_that_can_save(policy, failing):
    def run(bad):
        saves = simulate(
            policy,
            range(1, 301),
            lambda _: 10.0,
            reference_seconds=10.0,
            init_seconds=70.0,
            stall_seconds=1.0,
            failing=bad,
        )
        return [save.step for save in saves]

    wanted, made = run(()), run(failing)
    first_bad = next((step for step in wanted if step in failing), None)
    if first_bad is None:
        assert made == wanted
    else:
        retried = next(step for step in range(first_bad, 302) if step not in failing)
        assert retried in made
        assert [step for step in made if step < first_bad] == [step for step in wanted if step < first_bad]


@quick
@given(
    step_seconds=st.floats(2, 40),
    durable_seconds=st.floats(0.1, 300),
    margin_seconds=st.floats(0, 60),
    safety=st.floats(1, 3),
    deadline_seconds=st.floats(1500, 4000),
)
def test_before_deadline_is_durable_in_time_and_not_a_step_too_early(
    step_seconds, durable_seconds, margin_seconds, safety, deadline_seconds
):
    stop = BeforeDeadline(margin_seconds, assumed_save_seconds=durable_seconds, safety=safety)
    count = int(deadline_seconds / step_seconds) + 2
    saves = simulate(
        stop,
        range(1, count + 1),
        lambda _: step_seconds,
        reference_seconds=step_seconds,
        durable_seconds=durable_seconds,
        deadline_seconds=deadline_seconds,
    )
    assert [save.stopped for save in saves] in ([True], [False, True]), "it may save once to measure"
    needed = durable_seconds * safety + margin_seconds
    rounding = 1e-6
    assert saves[-1].at_seconds + needed <= deadline_seconds + rounding
    assert saves[-1].at_seconds + needed + step_seconds >= deadline_seconds - rounding


@quick
@given(step=st.integers(1, 500), saved=st.integers(0, 500), since=st.floats(0, 5000), left=st.floats(-10, 500))
def test_a_union_saves_exactly_when_a_member_does(step, saved, since, left):
    members = [EverySteps(7), AtStep(50, 60), EverySeconds(900), OnStop(), BeforeDeadline(), InitTimeInterval()]
    known = Facts(
        step=step,
        previous_step=step - 1,
        saved_step=min(saved, step),
        start_step=0,
        seconds_since_save=since,
        init_seconds=95.0,
        step_seconds=31.0,
        time_left_seconds=left,
    )
    union = members[0]
    for member in members[1:]:
        union = union | member
    decisions = [decision for member in members if (decision := member.decide(known))]
    decided = union.decide(known)
    assert (decided is not None) == bool(decisions)
    if decided is not None:
        assert decided.stop == any(decision.stop for decision in decisions)
        assert all(decision.reason in decided.reason for decision in decisions)
