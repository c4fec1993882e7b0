"""How often is saved to memory, and why; and what a tier in memory refuses."""

import math
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptman.errors import ConfigError, IntervalError
from ckptman.policies import CostShare, EverySteps, MemoryTier, OnStop
from ckptman.policies.save_policies import Decision, Facts

FRESH = Facts(step=4, previous_step=3, saved_step=None, start_step=0, seconds_since_save=1.0, step_seconds=0.3)
RESUMED = {"step": 104, "saved_step": 100, "start_step": 100}
BEGUN = {"step": 9, "saved_step": 8, "seconds_since_save": 500.0}
MEASURED = {"step": 30, "saved_step": 10, "seconds_since_save": 10.0, "step_seconds": 0.5, "stall_seconds": 0.1}
MEASURED["durable_seconds"] = 2.0
SLOW = MEASURED | {"durable_seconds": 12.0}
FREE = MEASURED | {"stall_seconds": 0.0, "durable_seconds": 0.0, "step": 11, "seconds_since_save": 0.0}
FIRST = "first save, to measure its cost"


@pytest.mark.parametrize(
    ("policy", "known", "why"),
    [
        # The first save: after a second and two steps.
        (CostShare(), {}, FIRST),
        (CostShare(), {"seconds_since_save": 0.99}, None),
        (CostShare(), {"step_seconds": 20.0, "seconds_since_save": 39.0}, None),
        (CostShare(), {"step_seconds": 20.0, "seconds_since_save": 40.0}, FIRST),
        (CostShare(), {"step_seconds": None, "seconds_since_save": 9.0}, None),
        (CostShare(), RESUMED, FIRST),
        (CostShare(), BEGUN, None),  # it is under way
        (CostShare(max_seconds=600), BEGUN, None),
        (CostShare(), BEGUN | {"saved_step": None}, FIRST),  # it failed
        (CostShare(), MEASURED | {"seconds_since_save": 9.9}, None),
        (CostShare(), MEASURED | {"step": 10}, None),  # it is saved already
        (CostShare(), MEASURED, "10 s since the last save (a stall of 0.1 s is 1 % of 10 s at 0.5 s a step)"),
        (CostShare(0.05), MEASURED, "10 s since the last save (a stall of 0.1 s is 5 % of 2 s at 0.5 s a step)"),
        (CostShare(), SLOW, None),
        (
            CostShare(),
            SLOW | {"seconds_since_save": 12.0},
            "12 s since the last save (a stall of 0.1 s is 1 % of 10 s, a save takes 12 s at 0.5 s a step)",
        ),
        (
            CostShare(max_seconds=4),
            MEASURED,
            "10 s since the last save (a stall of 0.1 s is 1 % of 10 s, held to 4 s at 0.5 s a step)",
        ),
        (CostShare(min_seconds=30), MEASURED, None),
        (CostShare(), FREE, "0 s since the last save (a stall of 0 s is 1 % of 0 s at 0.5 s a step)"),
    ],
)
def test_when_it_saves_to_memory_and_why(policy, known, why):
    assert policy.decide(FRESH._replace(**known)) == (None if why is None else Decision(why, stop=False))


@given(
    stall=st.floats(0, 1e3),
    durable=st.floats(0, 1e4),
    step=st.floats(1e-3, 1e3),
    share=st.floats(1e-4, 0.9),
    low=st.floats(0, 1e3),
    above=st.none() | st.floats(1e-3, 1e4),
)
def test_what_saves_take_stays_below_the_share(stall, durable, step, share, low, above):
    high = None if above is None else low + above
    policy = CostShare(share, low, high)
    measured = {"stall_seconds": stall, "durable_seconds": durable, "step_seconds": step}
    facts = FRESH._replace(**MEASURED | measured)
    interval, steps = policy.interval_seconds(facts), policy.interval_steps(facts)
    assert max(durable, low) <= interval <= max(durable, low, math.inf if high is None else high)
    assert steps >= 1
    assert steps * step >= interval * (1 - 1e-9)
    if high is None:
        assert stall <= share * interval * (1 + 1e-9)
    assert policy.decide(facts._replace(seconds_since_save=interval)) is not None
    if interval > 0:
        assert policy.decide(facts._replace(seconds_since_save=math.nextafter(interval, 0))) is None


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
    ("kind", "arguments", "error", "told"),
    [
        (CostShare, {"share": 0}, IntervalError, "share must be a finite number above 0, not 0"),
        (CostShare, {"share": -0.1}, IntervalError, "share must be a finite number above 0"),
        (CostShare, {"share": math.nan}, IntervalError, "share must be a finite number above 0"),
        (CostShare, {"share": math.inf}, IntervalError, "share must be a finite number above 0"),
        (CostShare, {"share": 1}, IntervalError, "share must be below 1, such as 0.01, not 1"),
        (CostShare, {"share": "1 %"}, ConfigError, "share must be"),
        (CostShare, {"min_seconds": -1}, IntervalError, "min_seconds must be a finite number of at least 0"),
        (CostShare, {"min_seconds": math.inf}, IntervalError, "min_seconds must be a finite number"),
        (CostShare, {"max_seconds": 0}, IntervalError, "max_seconds must be a finite number above 0"),
        (CostShare, {"max_seconds": math.inf}, IntervalError, "max_seconds must be a finite number above 0"),
        (CostShare, {"min_seconds": 9, "max_seconds": 5}, IntervalError, r"min_seconds \(9\) must not be above max"),
        (MemoryTier, {"copies": 0}, IntervalError, r"copies must be a whole number.*not 0 \(to keep nothing"),
        (MemoryTier, {"copies": -1}, IntervalError, "copies must be"),
        (MemoryTier, {"copies": 1.5}, IntervalError, "copies must be"),
        (MemoryTier, {"copies": True}, ConfigError, "copies must be"),
        (MemoryTier, {"copies": "2"}, ConfigError, "copies must be"),
        (MemoryTier, {"max_bytes": 0}, IntervalError, "max_bytes must be a finite number above 0"),
        (MemoryTier, {"max_bytes": math.inf}, IntervalError, "max_bytes must be"),
        (MemoryTier, {"max_bytes": "9GB"}, ConfigError, "max_bytes must be"),
        (MemoryTier, {"path": "dev/shm"}, ConfigError, "path must be an absolute path of each node, not 'dev/shm'"),
        (MemoryTier, {"path": ""}, ConfigError, "path must be an absolute path"),
        (MemoryTier, {"path": None}, ConfigError, "path must be an absolute path"),
        (MemoryTier, {"path": b"/dev/shm"}, ConfigError, "path must be an absolute path"),
        (MemoryTier, {"save_policy": 10}, ConfigError, r"save_policy is a policy such as EverySteps\(10\), not 10"),
        (MemoryTier, {"save_policy": EverySteps}, ConfigError, "save_policy is a policy"),
    ],
)
def test_what_cannot_be_is_refused(kind, arguments, error, told):
    with pytest.raises(error, match=f"^{kind.__name__}: .*{told}"):
        kind(**arguments)
