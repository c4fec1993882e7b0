"""The rule of each save policy, and the reason it gives."""

import math
import pickle
from dataclasses import FrozenInstanceError

import pytest

from ckptman.errors import ConfigError, IntervalError
from ckptman.policies.save_policies import (
    AnyOf,
    AtStep,
    BeforeDeadline,
    DalyInterval,
    Decision,
    EverySeconds,
    EverySteps,
    Facts,
    InitTimeInterval,
    OnStop,
    SavePolicy,
    next_save,
)


def facts(step=1, **known):
    """Facts of a fresh run that asked about every step so far; `known` replaces what a test is about."""
    defaults = {
        "previous_step": step - 1,
        "saved_step": None,
        "start_step": 0,
        "seconds_since_save": 0.0,
    }
    return Facts(step=step, **{**defaults, **known})


def reason(policy, known):
    decision = policy.decide(known)
    return None if decision is None else decision.reason


# EverySteps


def test_every_steps_saves_at_the_multiples():
    due = {step: reason(EverySteps(3), facts(step, saved_step=(step - 1) // 3 * 3)) for step in range(1, 8)}
    assert due == {1: None, 2: None, 3: "every 3 steps", 4: None, 5: None, 6: "every 3 steps", 7: None}


def test_every_steps_saves_when_step_numbers_jump_over_a_multiple():
    assert reason(EverySteps(100), facts(96, previous_step=88, saved_step=0)) is None
    assert reason(EverySteps(100), facts(104, previous_step=96, saved_step=0)) == "every 100 steps"
    assert reason(EverySteps(100), facts(112, previous_step=104, saved_step=104)) is None


def test_every_steps_counts_from_the_restored_step():
    assert reason(EverySteps(10), facts(25, previous_step=24, saved_step=24, start_step=24)) is None
    assert reason(EverySteps(10), facts(30, saved_step=24, start_step=24)) == "every 10 steps"


def test_every_steps_is_due_again_after_a_failed_save():
    assert reason(EverySteps(3), facts(4, saved_step=None)) == "every 3 steps (due since step 3)"
    assert reason(EverySteps(3), facts(4, saved_step=3)) is None


def test_every_steps_does_not_repeat_what_another_policy_saved():
    assert reason(EverySteps(10), facts(20, previous_step=19, saved_step=20)) is None
    assert reason(EverySteps(10), facts(30, saved_step=29)) == "every 10 steps"


def test_every_single_step_reads_well():
    assert reason(EverySteps(1), facts(1)) == "every step"


# AtStep


def test_at_step_saves_at_each_named_step_only():
    policy = AtStep(200, 100, 200)
    assert policy.steps == (100, 200)
    assert reason(policy, facts(99)) is None
    assert reason(policy, facts(100)) == "at step 100"
    assert reason(policy, facts(101, saved_step=100)) is None
    assert reason(policy, facts(200, saved_step=100)) == "at step 200"
    assert reason(policy, facts(300, saved_step=200)) is None


def test_at_step_saves_when_step_numbers_jump_over_it_and_after_a_failed_save():
    assert reason(AtStep(100), facts(104, previous_step=96)) == "at step 100 (now at 104)"
    assert reason(AtStep(100), facts(101, saved_step=90)) == "at step 100 (now at 101)"
    assert reason(AtStep(100, 102), facts(104, previous_step=96)) == "at step 102 (now at 104)"


def test_at_step_is_over_for_a_run_that_was_restored_beyond_it():
    assert reason(AtStep(100), facts(151, previous_step=150, saved_step=150, start_step=150)) is None


# EverySeconds


def test_every_seconds_saves_when_the_time_is_over():
    assert reason(EverySeconds(900), facts(seconds_since_save=899.0)) is None
    assert reason(EverySeconds(900), facts(seconds_since_save=900.0)) == "every 900 s"


def test_every_seconds_saves_at_the_last_step_that_keeps_the_promise():
    assert reason(EverySeconds(900), facts(seconds_since_save=860.0, step_seconds=40.0)) is None
    assert reason(EverySeconds(900), facts(seconds_since_save=861.0, step_seconds=40.0)) == "every 900 s"


def test_every_seconds_saves_every_step_when_steps_are_longer():
    assert reason(EverySeconds(2.5), facts(seconds_since_save=31.0, step_seconds=31.0)) == "every 2.5 s"


# OnStop and BeforeDeadline


def test_on_stop_saves_and_leaves():
    assert OnStop().decide(facts()) is None
    asked = OnStop().decide(facts(stop="SIGTERM on rank 2"))
    assert asked == Decision("stop asked: SIGTERM on rank 2", stop=True)


def test_before_deadline_leaves_at_the_last_step_from_which_a_save_is_in_time():
    policy = BeforeDeadline(margin_seconds=30, safety=1.5)
    known = {"durable_seconds": 120.0, "step_seconds": 31.0}  # 1.5 x 120 + 30 + 31 = 241
    assert policy.decide(facts(time_left_seconds=241.0, **known)) is None
    assert policy.decide(facts(time_left_seconds=240.0, **known)) == Decision(
        "240 s left before the deadline, 241 s needed (1.5 x save of 120 s + margin of 30 s + step of 31 s)", stop=True
    )


def test_before_deadline_assumes_a_save_time_until_one_was_measured():
    policy = BeforeDeadline(margin_seconds=10, assumed_save_seconds=60, safety=2)
    assert policy.decide(facts(time_left_seconds=130.0, step_seconds=61.0)) == Decision(
        "130 s left before the deadline, 191 s needed (2 x assumed save of 60 s + margin of 10 s + step of 61 s)",
        stop=True,
    )
    assert policy.decide(facts(time_left_seconds=191.0, step_seconds=61.0)) is None
    assert policy.decide(facts(time_left_seconds=200.0, step_seconds=61.0)) is None, "measuring would gain nothing"


def test_before_deadline_trusts_the_measured_save_over_the_assumed_one():
    policy = BeforeDeadline(margin_seconds=0, assumed_save_seconds=600, safety=1)
    assert policy.decide(facts(time_left_seconds=10.0, durable_seconds=0.0)) is None


def test_before_deadline_is_silent_without_a_deadline_and_stops_after_it():
    assert BeforeDeadline().decide(facts()) is None
    late = BeforeDeadline().decide(facts(time_left_seconds=-5.0))
    assert late is not None
    assert late.stop
    assert late.reason.startswith("-5 s left before the deadline, 120 s needed")


# InitTimeInterval


def test_init_time_interval_is_converted_into_steps():
    policy = InitTimeInterval(factor=4)
    known = {"init_seconds": 95.0, "step_seconds": 31.0, "saved_step": 100, "start_step": 100}
    assert policy.interval_steps(facts(**known)) == 12
    assert policy.decide(facts(111, seconds_since_save=341.0, **known)) is None
    assert reason(policy, facts(112, seconds_since_save=372.0, **known)) == (
        "12 steps since the last save (4 x init of 95 s = 380 s at 31 s a step)"
    )


def test_init_time_interval_is_held_between_its_bounds():
    policy = InitTimeInterval(factor=4, min_seconds=60, max_seconds=900)
    assert reason(policy, facts(30, init_seconds=3600.0, step_seconds=30.0)) == (
        "30 steps since the start (4 x init of 3,600 s = 14,400 s, held to 900 s at 30 s a step)"
    )
    assert reason(policy, facts(2, init_seconds=5.0, step_seconds=30.0)) == (
        "2 steps since the start (4 x init of 5 s = 20 s, held to 60 s at 30 s a step)"
    )
    assert InitTimeInterval(max_seconds=None).interval_seconds(facts(init_seconds=3600.0)) == 14_400


def test_init_time_interval_saves_by_the_clock_when_steps_slow_down():
    known = facts(5, saved_step=0, seconds_since_save=352.0, init_seconds=95.0, step_seconds=31.0)
    assert reason(InitTimeInterval(), known) == "352 s since the last save (4 x init of 95 s = 380 s at 31 s a step)"


def test_init_time_interval_uses_seconds_until_something_was_measured():
    policy = InitTimeInterval(factor=4, max_seconds=900)
    assert policy.interval_steps(facts()) is None
    assert policy.decide(facts(500, seconds_since_save=899.0)) is None
    assert reason(policy, facts(500, seconds_since_save=900.0)) == (
        "900 s since the start (900 s until the interval can be derived)"
    )
    assert reason(policy, facts(500, seconds_since_save=380.0, init_seconds=95.0)) == (
        "380 s since the start (4 x init of 95 s = 380 s)"
    )
    assert InitTimeInterval(max_seconds=None).decide(facts(500, seconds_since_save=1e9)) is None


def test_an_interval_shorter_than_a_step_saves_every_step():
    known = facts(7, saved_step=6, init_seconds=1.0, step_seconds=31.0, seconds_since_save=31.0)
    assert InitTimeInterval().interval_steps(known) == 1
    assert reason(InitTimeInterval(), known) == "1 step since the last save (4 x init of 1 s = 4 s at 31 s a step)"


def test_derived_intervals_are_due_again_after_a_failed_save():
    known = {"init_seconds": 95.0, "step_seconds": 31.0, "seconds_since_save": 403.0}
    assert reason(InitTimeInterval(), facts(13, saved_step=0, **known)) == (
        "13 steps since the last save (4 x init of 95 s = 380 s at 31 s a step)"
    )


# DalyInterval


def daly_facts(step, **known):
    measured = {"stall_seconds": 10.0, "init_seconds": 600.0, "step_seconds": 15.0, "saved_step": 1}
    return facts(step, **{**measured, **known})


def test_daly_interval_worked_check():
    policy = DalyInterval(mtbf_seconds=6000)
    assert policy.interval_steps(daly_facts(2)) == 24
    assert policy.decide(daly_facts(24)) is None
    assert reason(policy, daly_facts(25)) == (
        "24 steps since the last save (save of 10 s, restart of 600 s and MTBF of 6,000 s give 373 s at 15 s a step)"
    )


def test_daly_interval_saves_once_to_measure_the_cost_and_not_while_that_save_is_on_its_way():
    policy = DalyInterval(mtbf_seconds=6000)
    unmeasured = {"stall_seconds": None, "saved_step": 40, "start_step": 40}
    assert policy.decide(daly_facts(41, step_seconds=None, **unmeasured)) is None
    assert reason(policy, daly_facts(42, **unmeasured)) == "first save, to measure its cost"
    assert reason(policy, daly_facts(2, stall_seconds=None, saved_step=None)) == "first save, to measure its cost"
    on_its_way = {**unmeasured, "saved_step": 42}
    assert policy.decide(daly_facts(43, **on_its_way)) is None
    failed = unmeasured
    assert reason(policy, daly_facts(44, **failed)) == "first save, to measure its cost"


def test_daly_interval_keeps_its_upper_bound_while_the_cost_is_not_measured():
    policy = DalyInterval(mtbf_seconds=6000, max_seconds=300)
    known = {"stall_seconds": None, "saved_step": 42, "start_step": 40}
    assert policy.decide(daly_facts(50, seconds_since_save=120.0, **known)) is None
    assert reason(policy, daly_facts(62, seconds_since_save=300.0, **known)) == (
        "20 steps since the last save (300 s until the interval can be derived at 15 s a step)"
    )


def test_daly_interval_is_held_between_its_bounds():
    assert reason(DalyInterval(6000, max_seconds=150), daly_facts(11)) == (
        "10 steps since the last save "
        "(save of 10 s, restart of 600 s and MTBF of 6,000 s give 373 s, held to 150 s at 15 s a step)"
    )
    assert DalyInterval(6000, min_seconds=600).interval_steps(daly_facts(2)) == 40


def test_daly_interval_is_never_shorter_than_a_save_takes():
    known = {"stall_seconds": 0.0, "durable_seconds": 60.0}
    assert DalyInterval(6000).interval_steps(daly_facts(2, **known)) == 4
    assert reason(DalyInterval(6000), daly_facts(5, **known)) == (
        "4 steps since the last save "
        "(save of 0 s, restart of 600 s and MTBF of 6,000 s give 0 s, a save takes 60 s at 15 s a step)"
    )


# Combination


def test_any_of_names_every_reason_and_stops_if_one_stops():
    policy = EverySteps(3) | AtStep(6) | OnStop()
    assert policy.decide(facts(1)) is None
    assert policy.decide(facts(6, saved_step=3)) == Decision("every 3 steps; at step 6")
    assert policy.decide(facts(6, saved_step=3, stop="SIGTERM on rank 0")) == Decision(
        "every 3 steps; at step 6; stop asked: SIGTERM on rank 0", stop=True
    )


def test_any_of_says_the_same_reason_once():
    assert reason(EverySteps(3) | EverySteps(3), facts(3)) == "every 3 steps"


def test_any_of_is_flat_and_reads_like_what_was_written():
    left = EverySteps(3) | OnStop()
    right = AtStep(1, 2) | EverySeconds(900)
    assert (left | right).policies == (EverySteps(3), OnStop(), AtStep(1, 2), EverySeconds(900))
    assert repr(left | right) == "EverySteps(steps=3) | OnStop() | AtStep(1, 2) | EverySeconds(seconds=900)"
    assert repr(InitTimeInterval()) == "InitTimeInterval(factor=4, min_seconds=0, max_seconds=900)"


def test_a_policy_of_ones_own_combines():
    class OnFridays(SavePolicy):
        def decide(self, facts):
            return Decision("it is Friday") if facts.step % 7 == 5 else None

    assert reason(EverySteps(5) | OnFridays(), facts(5)) == "every 5 steps; it is Friday"


def test_policies_are_values():
    policy = InitTimeInterval() | AtStep(5) | BeforeDeadline()
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert hash(policy) == hash(InitTimeInterval() | AtStep(5) | BeforeDeadline())
    with pytest.raises(FrozenInstanceError):
        policy.policies = ()


# Bad input

NUMBERS_THAT_CANNOT_BE = [0, -1, -0.5, math.nan, math.inf, -math.inf]
NO_NUMBERS = [True, "3", None, [3]]


@pytest.mark.parametrize("value", [*NUMBERS_THAT_CANNOT_BE, 2.5, *NO_NUMBERS])
@pytest.mark.parametrize(("build", "name"), [(EverySteps, "EverySteps: steps"), (AtStep, "AtStep: step")])
def test_step_counts_are_whole_numbers_from_one(build, name, value):
    with pytest.raises(ConfigError) as refused:
        build(value)
    assert str(refused.value) == f"{name} must be a whole number of at least 1, not {value!r}"
    assert isinstance(refused.value, IntervalError) == (value not in NO_NUMBERS or type(value) is float)


@pytest.mark.parametrize("value", [*NUMBERS_THAT_CANNOT_BE, *NO_NUMBERS])
@pytest.mark.parametrize(
    ("policy", "name"),
    [
        (EverySeconds, "seconds"),
        (InitTimeInterval, "factor"),
        (DalyInterval, "mtbf_seconds"),
        (BeforeDeadline, "assumed_save_seconds"),
    ],
)
def test_times_and_factors_are_finite_and_above_zero(policy, name, value):
    with pytest.raises(ConfigError) as refused:
        policy(**{name: value})
    assert str(refused.value) == f"{policy.__name__}: {name} must be a finite number above 0, not {value!r}"
    assert isinstance(refused.value, IntervalError) == (type(value) in (int, float))


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, True, "3"])
@pytest.mark.parametrize(
    ("policy", "given", "name", "least"),
    [
        (BeforeDeadline, {}, "margin_seconds", 0),
        (BeforeDeadline, {}, "safety", 1),
        (InitTimeInterval, {}, "min_seconds", 0),
        (DalyInterval, {"mtbf_seconds": 6000}, "min_seconds", 0),
    ],
)
def test_margins_and_lower_bounds(policy, given, name, least, value):
    with pytest.raises(ConfigError) as refused:
        policy(**given, **{name: value})
    assert str(refused.value) == f"{policy.__name__}: {name} must be a finite number of at least {least}, not {value!r}"


def test_a_safety_below_one_plans_to_be_late():
    with pytest.raises(IntervalError, match=r"safety must be a finite number of at least 1, not 0\.9"):
        BeforeDeadline(safety=0.9)


@pytest.mark.parametrize("policy", [InitTimeInterval, lambda **bounds: DalyInterval(6000, **bounds)])
def test_bounds_that_cross_are_refused(policy):
    with pytest.raises(IntervalError, match=r"min_seconds \(901\) must not be above max_seconds \(900\)"):
        policy(min_seconds=901, max_seconds=900)
    with pytest.raises(IntervalError, match="max_seconds must be a finite number above 0, not 0"):
        policy(max_seconds=0)


def test_combining_with_what_is_no_policy_is_refused():
    with pytest.raises(TypeError):
        EverySteps(3) | 5
    with pytest.raises(ConfigError, match="every policy must be a SavePolicy, not 5"):
        AnyOf((EverySteps(3), 5))
    with pytest.raises(ConfigError, match="give at least one policy"):
        AnyOf(())
    with pytest.raises(ConfigError, match="name at least one step"):
        AtStep()


# ---- the next save, foreseen -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (EverySteps(100), (300, "every 100 steps")),
        (EverySeconds(60), (275, "every 60 s")),
        (AtStep(50, 260), (260, "at step 260")),
        (EverySteps(1000) | AtStep(251), (251, "at step 251")),
        (OnStop(), None),
        (BeforeDeadline(), None),
    ],
)
def test_the_next_save_is_foreseen(policy, expected):
    now = facts(step=250, previous_step=250, saved_step=240, seconds_since_save=10.0, step_seconds=2.0)
    assert next_save(policy, now) == expected


def test_the_last_save_before_a_deadline_is_foreseen():
    measured = {"step_seconds": 1.0, "durable_seconds": 20.0, "time_left_seconds": 500.0}
    now = facts(step=10, previous_step=10, saved_step=5, **measured)
    found = next_save(BeforeDeadline(margin_seconds=30, safety=1.5), now)
    assert found is not None
    assert found[0] == 10 + 500 - 60  # less than 30 + 30 + 1 s are left after it


def test_a_policy_of_the_user_is_not_asked_about_what_may_never_come():
    class Own(SavePolicy):
        def decide(self, facts):
            raise AssertionError("asked")

    now = facts(step=7, previous_step=7, step_seconds=1.0)
    assert next_save(Own(), now) is None
    assert next_save(Own() | EverySteps(10), now) == (10, "every 10 steps")
