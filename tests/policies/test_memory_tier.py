"""How often is saved to memory, and why; and what a tier in memory refuses."""

import math
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptman.errors import ConfigError, IntervalError
from ckptman.policies import CostShare, EverySteps, MemoryTier, OnStop
from ckptman.policies.save_policies import Facts

MEASURED = Facts(
    step=30,
    previous_step=29,
    saved_step=10,
    start_step=0,
    seconds_since_save=10.0,
    step_seconds=0.5,
    stall_seconds=0.1,
    durable_seconds=2.0,
)
quick = settings(max_examples=100, deadline=None, print_blob=True)


def reason(policy, facts):
    decision = policy.decide(facts)
    assert decision is None or not decision.stop
    return None if decision is None else decision.reason


def test_the_first_save_is_made_after_a_second_and_two_steps_to_measure_what_it_costs():
    fresh = Facts(step=1, previous_step=0, saved_step=None, start_step=0, seconds_since_save=0.6, step_seconds=0.3)
    assert reason(CostShare(), fresh) is None
    assert reason(CostShare(), fresh._replace(step=4, seconds_since_save=1.0)) == "first save, to measure its cost"
    slow = fresh._replace(step=2, step_seconds=20.0, seconds_since_save=21.0)
    assert reason(CostShare(), slow) is None
    assert reason(CostShare(), slow._replace(seconds_since_save=40.0)) == "first save, to measure its cost"
    assert reason(CostShare(), fresh._replace(step_seconds=None, seconds_since_save=9.0)) is None
    resumed = fresh._replace(step=104, saved_step=100, start_step=100, seconds_since_save=1.2)
    assert reason(CostShare(), resumed) == "first save, to measure its cost"


def test_a_first_save_that_is_under_way_is_not_made_twice_and_one_that_failed_is_made_again():
    begun = Facts(step=9, previous_step=8, saved_step=8, start_step=0, seconds_since_save=500.0, step_seconds=0.3)
    assert reason(CostShare(), begun) is None
    assert reason(CostShare(max_seconds=600), begun) is None
    failed = begun._replace(step=10, saved_step=None)
    assert reason(CostShare(), failed) == "first save, to measure its cost"
    resumed = begun._replace(step=110, saved_step=100, start_step=100)
    assert reason(CostShare(), resumed) == "first save, to measure its cost"


def test_a_decision_says_what_it_is_derived_from():
    assert reason(CostShare(), MEASURED._replace(seconds_since_save=9.9)) is None
    assert reason(CostShare(), MEASURED) == "10 s since the last save (a stall of 0.1 s is 1 % of 10 s at 0.5 s a step)"
    assert reason(CostShare(share=0.05), MEASURED) == (
        "10 s since the last save (a stall of 0.1 s is 5 % of 2 s at 0.5 s a step)"
    )
    slow = MEASURED._replace(durable_seconds=12.0)
    assert reason(CostShare(), slow) is None
    assert reason(CostShare(), slow._replace(seconds_since_save=12.0)) == (
        "12 s since the last save (a stall of 0.1 s is 1 % of 10 s, a save takes 12 s at 0.5 s a step)"
    )
    assert reason(CostShare(max_seconds=4), MEASURED) == (
        "10 s since the last save (a stall of 0.1 s is 1 % of 10 s, held to 4 s at 0.5 s a step)"
    )
    assert reason(CostShare(min_seconds=30), MEASURED) is None
    assert reason(CostShare(), MEASURED._replace(step=10, saved_step=10)) is None  # it is saved already


@quick
@given(
    stall=st.floats(0, 1e3),
    durable=st.floats(0, 1e4),
    step=st.floats(1e-3, 1e3),
    share=st.floats(1e-4, 0.9),
    bounds=st.tuples(st.floats(0, 1e3), st.none() | st.floats(1e-3, 1e4)),
)
def test_what_saves_take_stays_below_the_share(stall, durable, step, share, bounds):
    low, high = bounds[0], bounds[1]
    if high is not None and low > high:
        low, high = high, low
    policy = CostShare(share, low, high)
    facts = MEASURED._replace(stall_seconds=stall, durable_seconds=durable, step_seconds=step)
    interval, steps = policy.interval_seconds(facts), policy.interval_steps(facts)
    assert interval is not None
    assert steps is not None
    assert interval >= max(durable, low)
    assert steps * step >= interval * (1 - 1e-9)
    assert interval <= max(durable, low, math.inf if high is None else high)
    if high is None:
        assert stall <= share * interval * (1 + 1e-9)
    assert policy.decide(facts._replace(seconds_since_save=interval)) is not None
    if interval > 0:
        assert policy.decide(facts._replace(seconds_since_save=math.nextafter(interval, 0))) is None


def test_saves_that_cost_nothing_are_made_at_each_step():
    free = MEASURED._replace(stall_seconds=0.0, durable_seconds=0.0, step=11, seconds_since_save=0.0)
    assert CostShare().decide(free) is not None
    assert CostShare().interval_steps(free) == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"share": 0}, "share must be a finite number above 0, not 0"),
        ({"share": -0.1}, "share must be a finite number above 0"),
        ({"share": math.nan}, "share must be a finite number above 0"),
        ({"share": 1}, "share must be below 1, such as 0.01, not 1"),
        ({"share": math.inf}, "share must be a finite number above 0"),
        ({"min_seconds": -1}, "min_seconds must be a finite number of at least 0"),
        ({"min_seconds": math.inf}, "min_seconds must be a finite number"),
        ({"max_seconds": 0}, "max_seconds must be a finite number above 0"),
        ({"max_seconds": math.inf}, "max_seconds must be a finite number above 0"),
        ({"min_seconds": 9, "max_seconds": 5}, "must not be above max_seconds"),
    ],
)
def test_a_share_and_bounds_that_cannot_be_are_refused(arguments, told):
    with pytest.raises(IntervalError, match=f"^CostShare: .*{told}"):
        CostShare(**arguments)
    with pytest.raises(ConfigError):
        CostShare(share="1 %")


def test_a_tier_has_a_policy_of_its_own_where_none_is_given():
    assert MemoryTier() == MemoryTier(None, 2, "/dev/shm", None)
    assert MemoryTier().policy == CostShare()
    assert MemoryTier(EverySteps(10) | OnStop()).policy == EverySteps(10) | OnStop()
    tier = MemoryTier(path=Path("/local/nvme"), copies=3)
    assert (tier.path, f"{tier}") == ("/local/nvme", "memory (/local/nvme)")
    assert replace(tier, copies=1).copies == 1
    assert hash(MemoryTier()) == hash(MemoryTier())
    with pytest.raises(FrozenInstanceError):
        tier.copies = 4


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        (
            {"copies": 0},
            IntervalError,
            r"copies must be a whole number of at least 1, not 0 \(to keep nothing",
        ),
        ({"copies": -1}, IntervalError, "copies must be"),
        ({"copies": 1.5}, IntervalError, "copies must be"),
        ({"copies": True}, ConfigError, "copies must be"),
        ({"copies": "2"}, ConfigError, "copies must be"),
        ({"max_bytes": 0}, IntervalError, "max_bytes must be a finite number above 0"),
        ({"max_bytes": math.inf}, IntervalError, "max_bytes must be"),
        ({"max_bytes": "9GB"}, ConfigError, "max_bytes must be"),
        ({"path": "dev/shm"}, ConfigError, "path must be an absolute path of each node, not 'dev/shm'"),
        ({"path": ""}, ConfigError, "path must be an absolute path"),
        ({"path": None}, ConfigError, "path must be an absolute path"),
        ({"path": b"/dev/shm"}, ConfigError, "path must be an absolute path"),
        ({"save_policy": 10}, ConfigError, r"save_policy is a policy such as EverySteps\(10\), not 10"),
        ({"save_policy": EverySteps}, ConfigError, "save_policy is a policy"),
    ],
)
def test_what_a_tier_refuses(arguments, error, told):
    with pytest.raises(error, match=f"^MemoryTier: {told}"):
        MemoryTier(**arguments)


def test_a_policy_of_a_user_is_taken_as_it_is():
    class Never(CostShare):
        def decide(self, facts):
            return None

    assert MemoryTier(Never()).policy.decide(MEASURED) is None
