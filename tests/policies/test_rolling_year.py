"""A year of a run, rolled through: saves, prunes, crashes, rollbacks, pins, readers, verifies and a clock that jumps.

After each prune, what may not be touched is there, and the plan is idempotent, independent of the order in which the
checkpoints are listed, and monotone: more rules keep more.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptman.policies.calendar import KeepDaily, KeepHourly, KeepMonthly, KeepWeekly, KeepWithin
from ckptman.policies.retention import over_limit, plan, untouchables
from ckptman.policies.retention_rules import AtMost, KeepBest, KeepEvery, KeepLast, KeepSteps, Record, RetentionPolicy

DAY = 86_400.0
BIRTH = 1_790_000_000.0
SIZE = 1000

RULE_SETS = [
    KeepLast(3),
    KeepEvery(steps=5000),
    KeepBest("loss", 3),
    KeepBest("accuracy", 2, "max"),
    KeepWithin(2 * DAY),
    KeepHourly(12) | KeepDaily(7) | KeepWeekly(4) | KeepMonthly(6),
    KeepSteps(1000, 20_000, 50_000),
    KeepLast(2) | KeepEvery(steps=10_000) | KeepBest("loss", 2),
    AtMost(bytes=10 * SIZE),
    (KeepLast(20) | KeepDaily(30) | KeepBest("loss", 5)) & AtMost(bytes=12 * SIZE),
    (KeepWithin(30 * DAY) | KeepMonthly(12)) & AtMost(bytes=SIZE),
]
rules = st.one_of(
    st.builds(KeepLast, st.integers(1, 6)),
    st.builds(KeepEvery, st.integers(1, 20_000)),
    st.builds(KeepBest, st.just("loss"), st.integers(1, 4)),
    st.builds(KeepWithin, st.floats(60.0, 60 * DAY)),
    st.builds(KeepHourly, st.integers(1, 30)),
    st.builds(KeepDaily, st.integers(1, 10)),
    st.builds(KeepWeekly, st.integers(1, 6)),
    st.builds(KeepMonthly, st.integers(1, 6)),
)
unions = st.recursive(rules, lambda some: st.builds(lambda left, right: left | right, some, some), max_leaves=5)


@dataclass
class Run:
    """What lies on disk, and what has been promised to stay."""

    policy: RetentionPolicy
    dice: random.Random
    now: float = BIRTH
    step: int = 0
    sequence: int = 0
    disk: dict[int, Record] = field(default_factory=dict)
    deleted: set[int] = field(default_factory=set)
    prunes: int = 0

    def save(self):
        self.now += self.dice.uniform(0.1, 3) * DAY / 2
        self.step += self.dice.choice((250, 500, 1000))
        self.sequence += 1
        # The same step, saved again after a rollback, takes the place of the one before.
        self.disk = {number: each for number, each in self.disk.items() if each.step != self.step}
        metrics = {"loss": self.dice.choice((self.dice.random(), 0.5, float("nan"))), "accuracy": self.dice.random()}
        if self.dice.random() < 0.1:
            del metrics["loss"]
        jump = self.dice.choice((0.0,) * 20 + (400 * DAY, -400 * DAY))
        self.disk[self.sequence] = Record(self.step, self.sequence, self.now + jump, SIZE, metrics)

    def crash(self):
        """The steps since the last save that counts are lost; readers of that host are gone."""
        counted = [each for each in self.disk.values() if not each.abandoned]
        self.step = max(counted, key=lambda each: each.sequence).step if counted else 0
        self.change(lambda each: replace(each, in_use=""))

    def rollback(self):
        counted = sorted((each for each in self.disk.values() if not each.abandoned), key=lambda each: each.sequence)
        if not counted:
            return
        target = self.dice.choice(counted)
        self.step = target.step
        why = f"abandoned by the rollback to step {target.step}"
        self.change(lambda each: each if each.sequence <= target.sequence else replace(each, abandoned=why))

    def touch(self):
        """Somebody verifies, pins, unpins, reads, or stops reading one of them."""
        if not self.disk:
            return
        chosen = self.dice.choice(list(self.disk))
        change = self.dice.choice(
            (
                {"verified": True},
                {"pinned": "the paper"},
                {"pinned": ""},
                {"in_use": "in use by verify"},
                {"in_use": ""},
            )
        )
        self.disk[chosen] = replace(self.disk[chosen], **change)

    def change(self, how):
        self.disk = {number: how(each) for number, each in self.disk.items()}

    def listed(self):
        found = list(self.disk.values())
        self.dice.shuffle(found)
        return found

    def prune(self):
        """Check what a plan promises, and carry it out: all of it, or the part until somebody kills the prune."""
        self.prunes += 1
        verdicts = plan(self.listed(), self.policy, now_seconds=self.now)
        assert [each.record for each in verdicts] == sorted(self.disk.values(), key=lambda each: each.sequence)
        assert all(each.reasons for each in verdicts)
        assert plan(self.listed(), self.policy, now_seconds=self.now) == verdicts, "the order of the listing counts"
        kept = [each.record for each in verdicts if each.keep]
        sacred = untouchables(list(self.disk.values()))
        assert sacred.keys() <= {each.sequence for each in kept}
        self.check_sacred(kept)
        again = plan(kept, self.policy, now_seconds=self.now)
        assert all(each.keep for each in again), "a second prune removes more"
        if over_limit(verdicts, self.policy):
            assert sacred.keys() == {each.sequence for each in kept}, "over the limit, and something may still go"
        going = [each.record.sequence for each in verdicts if not each.keep]
        if self.dice.random() < 0.1:
            self.dice.shuffle(going)
            going = going[: self.dice.randrange(len(going) + 1)]
        for sequence in going:
            del self.disk[sequence]
            self.deleted.add(sequence)

    def check_sacred(self, kept):
        """Told apart by hand here, not by the code that is on trial."""
        all_of_them = sorted(self.disk.values(), key=lambda each: each.sequence)
        counted = [each for each in all_of_them if not each.abandoned]
        verified = [each for each in counted if each.verified]
        must = [each for each in all_of_them if each.pinned or each.in_use] + counted[-1:] + verified[-1:]
        assert all(each in kept for each in must)
        assert bool(kept) == bool(all_of_them), "a plan removes everything"


def a_year_of(policy, seed):
    run = Run(policy, random.Random(seed))
    while run.now < BIRTH + 365 * DAY:
        event = run.dice.random()
        if event < 0.75:
            run.save()
            run.prune()
        elif event < 0.85:
            run.crash()
        elif event < 0.88:
            run.rollback()
        else:
            run.touch()
        if run.dice.random() < 0.1:
            run.prune()
    return run


@pytest.mark.parametrize("policy", RULE_SETS, ids=repr)
def test_a_year_under_each_rule_set(policy):
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    run = a_year_of(policy, seed)
    assert run.prunes > 300
    assert run.deleted, "nothing was ever pruned: this proves nothing"


@pytest.mark.slow
@settings(max_examples=15, deadline=None, print_blob=True)
@given(unions, st.integers(0, 2**32))
def test_a_year_under_any_rules(policy, seed):
    a_year_of(policy, seed)


@settings(max_examples=15, deadline=None, print_blob=True)
@given(unions, st.integers(1, 40), st.integers(0, 2**32))
def test_a_year_under_any_rules_and_a_limit(policy, room, seed):
    a_year_of(policy & AtMost(bytes=room * SIZE), seed)


@settings(max_examples=60, deadline=None, print_blob=True)
@given(unions, unions, st.integers(0, 2**32))
def test_more_rules_keep_more(left, right, seed):
    run = Run(left, random.Random(seed))
    for _ in range(60):
        run.dice.choice((run.save, run.save, run.save, run.touch, run.rollback))()

    def kept(policy):
        verdicts = plan(run.listed(), policy, now_seconds=run.now)
        return {each.record.sequence for each in verdicts if each.keep}

    assert kept(left) | kept(right) == kept(left | right)
    assert kept(left | right) == kept(right | left)
    assert kept(left & AtMost(bytes=5 * SIZE)) <= kept(left)
