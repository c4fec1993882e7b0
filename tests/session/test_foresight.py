"""Looking many steps ahead must not change a single decision."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import ckptman
from ckptman.policies.save_policies import Decision, Facts, SavePolicy
from ckptman.saving.saver import SaveReport
from ckptman.session.foresight import Foresight
from ckptman.session.timings import Timings

POLICIES = [
    ckptman.EverySteps(7),
    ckptman.AtStep(3, 40, 41),
    ckptman.EverySeconds(0.5),
    ckptman.InitTimeInterval(factor=3, max_seconds=2.0),
    ckptman.DalyInterval(mtbf_seconds=5.0),
    ckptman.BeforeDeadline(margin_seconds=0.5, assumed_save_seconds=0.2),
    ckptman.EverySteps(50) | ckptman.EverySeconds(0.9) | ckptman.BeforeDeadline(margin_seconds=1),
]


class Clock:
    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


class Counting(SavePolicy):
    """Counts how often the policy behind it is asked."""

    def __init__(self, policy: SavePolicy) -> None:
        self.policy, self.asked = policy, 0

    def decide(self, facts: Facts) -> Decision | None:
        self.asked += 1
        return self.policy.decide(facts)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@example(policy=ckptman.EverySeconds(0.5), typical=0.004, factors=[1.0, 1.0, *[30.0] * 3, *[1.0] * 55], durable=1)
@given(
    policy=st.sampled_from(POLICIES),
    typical=st.sampled_from([0.004, 0.02, 0.2]),
    factors=st.lists(st.floats(0.2, 1.6) | st.sampled_from([1.0, 1.0, 30.0]), min_size=60, max_size=120),
    durable=st.integers(1, 5),
)
def test_decisions_are_those_of_asking_at_every_step(
    policy: SavePolicy, typical: float, factors: list[float], durable: int
) -> None:
    clock = Clock()
    pace = Timings(clock.seconds - 0.3, clock.seconds + 4.0, clock, clock)
    foresight = Foresight(policy, pace)
    pace.start(0, restored=False)
    saving_since = None
    for step, factor in enumerate(factors, 1):
        clock.seconds += typical * factor
        pace.step_ended()
        if saving_since is not None and step - saving_since == durable:
            pace.save_ended(SaveReport(saving_since, 0.001, 0.05))
            saving_since = None
        pace.step_begins(after=step)
        plain = policy.decide(pace.facts(step + 1, ahead=True))
        assert foresight.decide(step + 1) == plain
        if plain is not None and saving_since is None:
            pace.save_begins(step + 1)
            saving_since = step + 1


def test_the_policy_is_rarely_asked_on_short_steps() -> None:
    clock, counting = Clock(), Counting(ckptman.EverySteps(1000))
    pace = Timings(clock.seconds, None, clock, clock)
    foresight = Foresight(counting, pace)
    pace.start(0, restored=False)
    asked = []
    for step in range(1, 500):
        clock.seconds += 0.008
        pace.step_ended()
        pace.step_begins(after=step)
        before = counting.asked
        assert foresight.decide(step + 1) is None
        asked.append(counting.asked > before)
    assert sum(asked) < 40
