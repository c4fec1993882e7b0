"""When the save policies save, the reasons they give, and what they promise of any simulated run."""

import math
import pickle
import random
from dataclasses import FrozenInstanceError, dataclass
from functools import reduce
from itertools import count, pairwise
from operator import or_

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
    defaults = {"previous_step": step - 1, "saved_step": None, "start_step": 0, "seconds_since_save": 0.0}
    return Facts(step=step, **{**defaults, **known})


def reason(policy, known):
    decision = policy.decide(known)
    return None if decision is None else decision.reason


def policy_id(each):
    return repr(each) if isinstance(each, SavePolicy) else None


class Own(SavePolicy):
    """A user's own policy."""

    def decide(self, facts):
        return Decision("it is Friday") if facts.step % 7 == 5 else None


# ---- examples --------------------------------------------------------------------------------------------------------


def since(seconds):
    return {"seconds_since_save": seconds}


INIT = {"init_seconds": 95.0, "step_seconds": 31.0}
INIT_95 = {"init_seconds": 95.0}
INIT_380 = "(4 x init of 95 s = 380 s at 31 s a step)"
SAVED_0 = {"saved_step": 0}
RESTORED_100 = {"saved_step": 100, "start_step": 100}
DALY = {"stall_seconds": 10.0, "init_seconds": 600.0, "step_seconds": 15.0, "saved_step": 1}
UNMEASURED = DALY | {"stall_seconds": None, "saved_step": 40, "start_step": 40}
GIVE = "save of 10 s, restart of 600 s and MTBF of 6,000 s give 373 s"
FIRST = "first save, to measure its cost"


@pytest.mark.parametrize(
    ("policy", "step", "known", "why"),
    [
        (EverySteps(3), 3, SAVED_0, "every 3 steps"),
        (EverySteps(1), 1, {}, "every step"),
        # Step numbers may jump.
        (EverySteps(100), 104, {"previous_step": 96, "saved_step": 0}, "every 100 steps"),
        (EverySteps(10), 20, {"saved_step": 20}, None),  # by another policy
        (EverySteps(10), 30, {"saved_step": 29}, "every 10 steps"),
        (EverySteps(3), 4, {}, "every 3 steps (due since step 3)"),  # a save failed
        (AtStep(100, 200), 100, {}, "at step 100"),
        (AtStep(100), 104, {"previous_step": 96}, "at step 100 (now at 104)"),
        (AtStep(100, 102), 104, {"previous_step": 96}, "at step 102 (now at 104)"),
        (AtStep(100), 151, {"saved_step": 150, "start_step": 150}, None),
        (EverySeconds(900), 1, since(900.0), "every 900 s"),
        (EverySeconds(900), 1, {"seconds_since_save": 861.0, "step_seconds": 40.0}, "every 900 s"),
        (InitTimeInterval(), 112, INIT | RESTORED_100 | since(372.0), f"12 steps since the last save {INIT_380}"),
        (
            InitTimeInterval(),
            30,
            {"init_seconds": 3600.0, "step_seconds": 30.0},
            "30 steps since the start (4 x init of 3,600 s = 14,400 s, held to 900 s at 30 s a step)",
        ),
        (
            InitTimeInterval(min_seconds=60),
            2,
            {"init_seconds": 5.0, "step_seconds": 30.0},
            "2 steps since the start (4 x init of 5 s = 20 s, held to 60 s at 30 s a step)",
        ),
        # By the clock when steps slow down; and due again after a failed save.
        (InitTimeInterval(), 5, INIT | SAVED_0 | since(352.0), f"352 s since the last save {INIT_380}"),
        (
            InitTimeInterval(),  # an interval shorter than a step
            7,
            {"init_seconds": 1.0, "step_seconds": 31.0, "saved_step": 6, "seconds_since_save": 31.0},
            "1 step since the last save (4 x init of 1 s = 4 s at 31 s a step)",
        ),
        (InitTimeInterval(), 9, since(900.0), "900 s since the start (900 s until the interval can be derived)"),
        (InitTimeInterval(), 9, since(380.0) | INIT_95, "380 s since the start (4 x init of 95 s = 380 s)"),
        (DalyInterval(6000), 25, DALY, f"24 steps since the last save ({GIVE} at 15 s a step)"),
        (DalyInterval(6000, 0, 150), 11, DALY, f"10 steps since the last save ({GIVE}, held to 150 s at 15 s a step)"),
        (
            DalyInterval(6000),
            5,
            DALY | {"stall_seconds": 0.0, "durable_seconds": 60.0},
            "4 steps since the last save "
            "(save of 0 s, restart of 600 s and MTBF of 6,000 s give 0 s, a save takes 60 s at 15 s a step)",
        ),
        (DalyInterval(6000), 41, UNMEASURED | {"step_seconds": None}, None),
        (DalyInterval(6000), 42, UNMEASURED, FIRST),
        (DalyInterval(6000), 2, DALY | {"stall_seconds": None, "saved_step": None}, FIRST),
        (DalyInterval(6000), 43, UNMEASURED | {"saved_step": 42}, None),  # it is on its way
        (DalyInterval(6000), 44, UNMEASURED, FIRST),  # it failed
        (DalyInterval(6000, 0, 300), 50, UNMEASURED | {"saved_step": 42} | since(120.0), None),
        (
            DalyInterval(6000, 0, 300),
            62,
            UNMEASURED | {"saved_step": 42} | since(300.0),
            "20 steps since the last save (300 s until the interval can be derived at 15 s a step)",
        ),
    ],
    ids=policy_id,
)
def test_when_a_policy_saves_and_why(policy, step, known, why):
    decision = policy.decide(facts(step, **known))
    assert decision == (None if why is None else Decision(why, stop=False))


CAREFUL = BeforeDeadline(margin_seconds=10, assumed_save_seconds=60, safety=2)
MEASURED = {"durable_seconds": 120.0, "step_seconds": 31.0}
UNDER_WAY = {"saved_step": 5, "start_step": 4, "seconds_since_save": 20.0, "step_seconds": 5.0}
FAILED = UNDER_WAY | {"saved_step": 4}
TEXT = "{left} s left before the deadline, {needed} s needed ({summands})"


@pytest.mark.parametrize(
    ("policy", "known", "needed", "summands", "stop"),
    [
        (BeforeDeadline(), MEASURED, 241, "1.5 x save of 120 s + margin of 30 s + step of 31 s", True),
        # Nothing was measured: it saves once to measure while there is time for two.
        (CAREFUL, {}, 250, "2 x two assumed saves of 60 s + margin of 10 s + step of 0 s", False),
        (CAREFUL, {"step_seconds": 10.0}, 260, "2 x two assumed saves of 60 s + margin of 10 s + step of 10 s", False),
        (CAREFUL, FAILED, 255, "2 x two assumed saves of 60 s + margin of 10 s + step of 5 s", False),
        # Not where a step takes longer than a save: it would gain nothing.
        (CAREFUL, {"step_seconds": 61.0}, 191, "2 x assumed save of 60 s + margin of 10 s + step of 61 s", True),
        # A first save that is under way takes at least what it has taken until the next chance.
        (CAREFUL, UNDER_WAY, 65, "2 x save under way of 25 s + margin of 10 s + step of 5 s", True),
    ],
)
def test_before_a_deadline_it_saves_at_the_last_step_that_is_in_time(policy, known, needed, summands, stop):
    assert policy.decide(facts(9, time_left_seconds=float(needed), **known)) is None
    text = TEXT.format(left=needed - 1, needed=needed, summands=summands)
    text = text if stop else f"first save, to measure its cost: {text}"
    assert policy.decide(facts(9, time_left_seconds=needed - 1.0, **known)) == Decision(text, stop)


def test_before_a_deadline_that_is_near_nothing_is_measured():
    room = 2 * 10 + 10 + 10  # for a save as short as a step, after the next step
    assert not CAREFUL.decide(facts(time_left_seconds=room, step_seconds=10.0)).stop
    assert CAREFUL.decide(facts(time_left_seconds=room - 1.0, step_seconds=10.0)) == Decision(
        TEXT.format(left=39, needed=140, summands="2 x assumed save of 60 s + margin of 10 s + step of 10 s"), stop=True
    )
    late = BeforeDeadline().decide(facts(time_left_seconds=-5.0))
    assert late.stop
    assert late.reason.startswith("-5 s left before the deadline, 120 s needed")
    assert BeforeDeadline().decide(facts()) is None, "no deadline is known"
    assert BeforeDeadline(0, 600, 1).decide(facts(time_left_seconds=10.0, durable_seconds=0.0)) is None


def test_a_stop_that_was_asked_for_saves_and_leaves():
    assert OnStop().decide(facts()) is None
    assert OnStop().decide(facts(stop="SIGTERM on rank 2")) == Decision("stop asked: SIGTERM on rank 2", stop=True)


# ---- unions ----------------------------------------------------------------------------------------------------------


def test_a_union_names_every_reason_once_and_stops_if_a_member_stops():
    policy = EverySteps(3) | EverySteps(3) | AtStep(6) | OnStop()
    assert policy.decide(facts(1)) is None
    assert policy.decide(facts(6, saved_step=3)) == Decision("every 3 steps; at step 6")
    assert policy.decide(facts(6, saved_step=3, stop="SIGTERM on rank 0")) == Decision(
        "every 3 steps; at step 6; stop asked: SIGTERM on rank 0", stop=True
    )
    assert reason(EverySteps(5) | Own(), facts(5)) == "every 5 steps; it is Friday"


def test_policies_are_values_that_read_like_what_was_written():
    left, right = EverySteps(3) | OnStop(), AtStep(2, 1, 2) | EverySeconds(900)
    union = left | right
    assert union.policies == (EverySteps(3), OnStop(), AtStep(1, 2), EverySeconds(900))
    assert repr(union) == "EverySteps(steps=3) | OnStop() | AtStep(1, 2) | EverySeconds(seconds=900)"
    assert repr(InitTimeInterval()) == "InitTimeInterval(factor=4, min_seconds=0, max_seconds=900)"
    with pytest.raises(FrozenInstanceError):
        union.policies = ()
    for each in (*union.policies, BeforeDeadline(), InitTimeInterval(), DalyInterval(6000), union):
        same = pickle.loads(pickle.dumps(each))
        assert (same, hash(same)) == (each, hash(each))


@given(step=st.integers(1, 500), saved=st.integers(0, 500), since=st.floats(0, 5000), left=st.floats(-10, 500))
def test_a_union_saves_exactly_when_a_member_does(step, saved, since, left):
    members = [EverySteps(7), AtStep(50, 60), EverySeconds(900), OnStop(), BeforeDeadline(), InitTimeInterval()]
    known = facts(step, saved_step=min(saved, step), seconds_since_save=since, time_left_seconds=left, **INIT)
    decisions = [decision for member in members if (decision := member.decide(known))]
    decided = reduce(or_, members).decide(known)
    assert (decided is not None) == bool(decisions)
    if decided is not None:
        assert decided.stop == any(decision.stop for decision in decisions)
        assert all(decision.reason in decided.reason for decision in decisions)


# ---- the next save, foreseen -----------------------------------------------------------------------------------------


class Unasked(SavePolicy):
    def decide(self, facts):
        raise AssertionError("asked about what may never come")


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (EverySteps(100), (300, "every 100 steps")),
        (EverySeconds(60), (275, "every 60 s")),
        (AtStep(50, 260), (260, "at step 260")),
        (EverySteps(1000) | AtStep(251), (251, "at step 251")),
        (OnStop(), None),
        (BeforeDeadline(), None),
        (Unasked(), None),
        (Unasked() | EverySteps(100), (300, "every 100 steps")),
    ],
)
def test_the_next_save_is_foreseen(policy, expected):
    now = facts(step=250, previous_step=250, saved_step=240, seconds_since_save=10.0, step_seconds=2.0)
    assert next_save(policy, now) == expected


def test_the_last_save_before_a_deadline_is_foreseen():
    now = facts(10, saved_step=5, step_seconds=1.0, durable_seconds=20.0, time_left_seconds=500.0)
    step, why = next_save(BeforeDeadline(margin_seconds=30, safety=1.5), now)
    assert step == 10 + 500 - 60, "less than 30 + 30 + 1 s are left after it"
    assert why.startswith("60 s left before the deadline, 61 s needed")


# ---- simulated runs --------------------------------------------------------------------------------------------------

ROUNDING = 1e-6


@dataclass(frozen=True)
class Save:
    step: int
    decided_seconds: float
    durable_seconds: float
    stopped: bool
    failed: bool


def simulate(
    policy,
    steps,
    seconds,
    *,
    start_step=0,
    reference_seconds=None,
    init_seconds=None,
    stall_seconds=0.0,
    save_seconds=0.0,
    known_seconds=None,
    limit_seconds=None,
    failing=(),
):
    """Train until the policy stops, on a simulated clock that starts at 0, and return the saves.

    As the Checkpointer does: a step is decided on when the one before it ends, the first one at its own end; a save
    blocks training for the stall and becomes durable in the background; one runs at a time. `failing`: which saves, as
    numbers from 0.
    """
    saves, now, previous_step = [], 0.0, start_step
    for step in steps:
        asked = now or seconds(step)
        now += seconds(step)
        measured = any(each.durable_seconds <= asked and not each.failed for each in saves)
        standing = next((each for each in reversed(saves) if each.durable_seconds > asked or not each.failed), None)
        decision = policy.decide(
            Facts(
                step=step,
                previous_step=previous_step,
                saved_step=standing.step if standing else start_step or None,
                start_step=start_step,
                seconds_since_save=now - (standing.decided_seconds if standing else 0.0),
                init_seconds=init_seconds,
                step_seconds=reference_seconds,
                stall_seconds=stall_seconds if measured else None,
                durable_seconds=save_seconds if measured else known_seconds,
                time_left_seconds=None if limit_seconds is None else limit_seconds - now,
            )
        )
        previous_step = step
        if decision is None:
            continue
        begun = max(now, saves[-1].durable_seconds) if saves else now
        saves.append(Save(step, now, begun + save_seconds, decision.stop, len(saves) in failing))
        now += stall_seconds
        if decision.stop:
            break
    return saves


def longest_gap(marks):
    return max(after - before for before, after in pairwise(marks))


step_times = st.floats(0.2, 40)


@given(every=st.integers(1, 50), stride=st.integers(1, 9), start=st.integers(0, 120))
def test_every_steps_never_leaves_a_gap_longer_than_its_interval_and_one_stride(every, stride, start):
    steps = range(start + stride, start + 300, stride)
    saved = [save.step for save in simulate(EverySteps(every), steps, lambda _: 1.0, start_step=start)]
    assert longest_gap([start, *saved, steps[-1]]) <= every + stride - 1
    assert all(step // every > (step - stride) // every for step in saved)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), reference=step_times, interval=st.floats(60, 900))
@pytest.mark.parametrize("build", [EverySeconds, lambda s: InitTimeInterval(factor=1, max_seconds=s)])
def test_intervals_in_seconds_are_never_passed_while_steps_take_at_most_the_reference(build, seed, reference, interval):
    dice = random.Random(seed)
    drawn = [dice.uniform(0.1, 1.0) * reference for _ in range(301)]
    known = {"reference_seconds": reference, "init_seconds": interval, "stall_seconds": 0.1 * interval}
    saved = [save.decided_seconds for save in simulate(build(interval), range(1, 301), drawn.__getitem__, **known)]
    assert longest_gap([0.0, *(saved or [sum(drawn[1:])])]) <= interval * (1 + 1e-9)


@settings(max_examples=60)
@given(step_seconds=step_times, init_seconds=st.floats(0.1, 4000), stride=st.integers(1, 3))
def test_derived_interval_holds_in_seconds_when_steps_are_regular(step_seconds, init_seconds, stride):
    policy = InitTimeInterval(factor=4, max_seconds=900)
    steps = range(stride, 200, stride)
    known = {"reference_seconds": step_seconds, "init_seconds": init_seconds}
    saved = [save.decided_seconds for save in simulate(policy, steps, lambda _: step_seconds, **known)]
    promise = max(step_seconds, min(4 * init_seconds, 900))  # one step is the least there is
    assert longest_gap([0.0, *saved, len(steps) * step_seconds]) <= promise * (1 + 1e-9)


def test_daly_run_saves_about_every_24_steps_with_the_save_itself_in_the_interval():
    known = {"reference_seconds": 15.0, "init_seconds": 600.0, "stall_seconds": 10.0}
    saved = [save.step for save in simulate(DalyInterval(6000), range(1, 400), lambda _: 15.0, **known)]
    assert saved[0] == 1
    assert {after - before for before, after in pairwise(saved)} == {24}


@settings(max_examples=60)
@given(
    st.sampled_from([EverySteps(7), AtStep(50, 100), EverySeconds(70), InitTimeInterval(1), DalyInterval(600)]),
    st.sets(st.integers(0, 12), max_size=10),
)
def test_a_failed_save_is_made_up_for_at_the_next_step_that_can_save(policy, failing):
    def run(bad):
        known = {"reference_seconds": 10.0, "init_seconds": 70.0, "stall_seconds": 1.0}
        return [save.step for save in simulate(policy, range(1, 301), lambda _: 10.0, failing=bad, **known)]

    wanted, made = run(()), run(failing)
    first = min(failing, default=math.inf)
    if first >= len(wanted):
        assert made == wanted
    else:
        tries = next(tries for tries in count(1) if first + tries not in failing)
        assert made[:first] == wanted[:first]
        assert made[first : first + tries + 1] == [wanted[first] + late for late in range(tries + 1)]


# ---- simulated deadlines ---------------------------------------------------------------------------------------------

deadline_policies = st.builds(BeforeDeadline, st.floats(0, 60), st.floats(0.1, 300), st.floats(1, 3))
save_times = st.floats(0.01, 300)
limits = st.floats(1, 1000)


def until_stopped(policy, step_seconds, **known):
    return simulate(policy, count(1), lambda _: step_seconds, reference_seconds=step_seconds, **known)


def needed(policy, save_seconds):
    """What a save is to have left when it begins."""
    return policy.safety * save_seconds + policy.margin_seconds


@given(deadline_policies, step_times, save_times, limits)
def test_measuring_costs_one_save_and_comes_no_later_than_leaving_would_have(policy, step, save, limit):
    known = {"save_seconds": save, "limit_seconds": limit}
    saves = until_stopped(policy, step, **known)
    assert [each.stopped for each in saves] in ([True], [False, True])
    leaving = until_stopped(policy, step, known_seconds=policy.assumed_save_seconds, **known)
    assert saves[0].step <= leaving[0].step
    if len(saves) == 2 and saves[0].durable_seconds <= saves[1].decided_seconds:
        assert limit - saves[1].decided_seconds >= needed(policy, save) - ROUNDING, "measured, and not in time"


@given(deadline_policies, step_times, st.floats(0.01, 1), st.floats(0, 2000))
def test_a_save_that_takes_no_longer_than_assumed_is_in_time_if_there_was_time_for_two(policy, step, share, spare):
    save = share * policy.assumed_save_seconds
    limit = step + needed(policy, 2 * policy.assumed_save_seconds) + spare
    saves = until_stopped(policy, step, save_seconds=save, limit_seconds=limit)
    assert saves[-1].durable_seconds <= limit - policy.margin_seconds + ROUNDING


@given(st.builds(BeforeDeadline, st.floats(0, 60), st.just(1e6), st.floats(1, 3)), step_times, save_times, limits)
def test_with_room_to_measure_each_attempt_of_a_chain_stops_where_one_would_that_knew(policy, step, save, spare):
    # What is to be left at the end of the first step so that the first save is measured before it must stop.
    room = (1 + policy.safety) * (save + 2 * step) + policy.margin_seconds
    known = {"save_seconds": save, "limit_seconds": step + room + spare}
    first, *last = until_stopped(policy, step, **known)
    assert (first.step, first.stopped) == (1, False), "the limit is shorter than the assumption, and it goes on"
    second = until_stopped(policy, step, known_seconds=save, **known)
    assert [each.step for each in last] == [each.step for each in second]
    best = (known["limit_seconds"] - needed(policy, save)) / step
    assert math.floor(best - ROUNDING) <= second[0].step <= math.floor(best + ROUNDING)
    assert second[0].step >= 3
    assert last[0].durable_seconds <= known["limit_seconds"]


@given(deadline_policies, step_times, save_times, limits, st.sets(st.integers(0, 40)))
def test_whatever_fails_it_stops_while_the_margin_is_left_or_at_the_first_step(policy, step, save, limit, failing):
    saves = until_stopped(policy, step, save_seconds=save, limit_seconds=limit, failing=failing)
    assert saves[-1].stopped
    left = limit - saves[-1].decided_seconds
    assert left >= policy.margin_seconds - ROUNDING or saves[-1].step == 1
    assert sum(not each.failed for each in saves[:-1]) <= 1, "once is enough to measure"


@given(
    policy=deadline_policies,
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
    measured = {"start_step": 3, "saved_step": saved_step, "step_seconds": step_seconds}
    measured["durable_seconds"] = durable_seconds
    now = policy.decide(facts(8, seconds_since_save=since, time_left_seconds=left, **measured))
    then = policy.decide(facts(9, seconds_since_save=since + later, time_left_seconds=left - later, **measured))
    if now is not None:
        assert then is not None
        assert then.stop >= now.stop
    if left < policy.margin_seconds + (step_seconds or 0.0):
        assert now is not None
        assert now.stop, "nothing is measured when no time is left for it"


# ---- bad input -------------------------------------------------------------------------------------------------------

CANNOT_BE = [-1, math.nan, math.inf, True, "3"]
WHOLE, POSITIVE = "must be a whole number of at least 1", "must be a finite number above 0"
AT_LEAST = "must be a finite number of at least"


@pytest.mark.parametrize(
    ("build", "name", "values", "rule"),
    [
        (EverySteps, "EverySteps: steps", [0, -0.5, 2.5, None, [3]], WHOLE),
        (AtStep, "AtStep: step", [0, -0.5, 2.5, None, [3]], WHOLE),
        (EverySeconds, "EverySeconds: seconds", [0, -math.inf, None, [3]], POSITIVE),
        (InitTimeInterval, "InitTimeInterval: factor", [0, None], POSITIVE),
        (lambda value: InitTimeInterval(max_seconds=value), "InitTimeInterval: max_seconds", [0], POSITIVE),
        (DalyInterval, "DalyInterval: mtbf_seconds", [0, None], POSITIVE),
        (lambda value: DalyInterval(6000, max_seconds=value), "DalyInterval: max_seconds", [0], POSITIVE),
        (lambda value: BeforeDeadline(30, value), "BeforeDeadline: assumed_save_seconds", [0, None], POSITIVE),
        (BeforeDeadline, "BeforeDeadline: margin_seconds", [], f"{AT_LEAST} 0"),
        (lambda value: BeforeDeadline(30, 60, value), "BeforeDeadline: safety", [0.9], f"{AT_LEAST} 1"),
        (lambda value: InitTimeInterval(4, value), "InitTimeInterval: min_seconds", [], f"{AT_LEAST} 0"),
        (lambda value: DalyInterval(6000, value), "DalyInterval: min_seconds", [], f"{AT_LEAST} 0"),
    ],
)
def test_numbers_that_cannot_be_are_refused(build, name, values, rule):
    for value in CANNOT_BE + values:
        with pytest.raises(ConfigError) as refused:
            build(value)
        assert str(refused.value) == f"{name} {rule}, not {value!r}"
        assert isinstance(refused.value, IntervalError) == (type(value) in (int, float))


@pytest.mark.parametrize(
    ("build", "error", "text"),
    [
        (lambda: InitTimeInterval(min_seconds=901, max_seconds=900), IntervalError, r"min_seconds \(901\) must not be"),
        (lambda: DalyInterval(6000, 901, 900), IntervalError, r"must not be above max_seconds \(900\)"),
        (lambda: EverySteps(3) | 5, TypeError, "unsupported operand"),
        (lambda: AnyOf((EverySteps(3), 5)), ConfigError, "every policy must be a SavePolicy, not 5"),
        (lambda: AnyOf(()), ConfigError, "give at least one policy"),
        (lambda: AtStep(), ConfigError, "name at least one step"),
    ],
)
def test_what_cannot_be_meant_is_refused(build, error, text):
    with pytest.raises(error, match=text):
        build()
