"""The plan: what stays whatever the rules say, why each checkpoint is kept or goes, and rules that cannot be meant.

A long run is rolled through: saves, prunes, crashes, rollbacks, pins, readers, verifies and a clock that jumps. After
each prune, what may not be touched is there, and the plan is idempotent, independent of the order in which the
checkpoints are listed, and monotone: more rules keep more.
"""

import math
import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ckptman.engine.saving.draft import SaveInfo
from ckptman.engine.saving.retention_runner import RetentionRunner
from ckptman.policies.retention_by_time import KeepDaily, KeepHourly, KeepMonthly, KeepWeekly, KeepWithin
from ckptman.policies.retention_plan import over_limit, plan, policy_mistake, untouchables
from ckptman.policies.retention_rules import AtMost, KeepBest, KeepEvery, KeepLast, KeepSteps, Record, RetentionPolicy
from ckptman.runtime.journal import Journal, read_journal
from ckptman.storage.catalog.backends.run_store import RunStore
from ckptman.storage.catalog.catalog import Catalog
from ckptman.storage.catalog.writer_lock import claim
from ckptman.storage.format.paths import journal_path
from tests.helpers.checkpoints import commit, steps_of

DAY = 86_400.0
BIRTH = 1_790_000_000.0
GB = 10**9
NAN = math.nan
LOSS = {"loss": 1.0}


def run(count, **changes):
    """Checkpoints of the steps 10, 20, ...; `changes`: fields of a step, as `at20={"pinned": "why"}`."""
    records = [Record(10 * number, number, 1000.0 * number, GB, {}) for number in range(1, count + 1)]
    return [replace(each, **changes.pop(f"at{each.step}", {})) for each in records]


def reasons(records, policy, **more):
    """The reasons by step of what is kept."""
    return {each.record.step: each.reasons for each in plan(records, policy, **more) if each.keep}


def why_not(records, policy, step):
    return next(each.reasons for each in plan(records, policy) if each.record.step == step and not each.keep)


VERIFIED = {"verified": True}
ABANDONED = {"abandoned": "abandoned by the rollback to step 20"}
INFINITE = {"metrics": {"norm": math.inf}, "nonfinite_metrics": ("norm",)}
SPOILT = {"metrics": {"norm": NAN}, "nonfinite_metrics": ("norm",)}
WEIGHTS = {**INFINITE, "nonfinite_tensors": ("model.weight",)}


@pytest.mark.parametrize(
    ("records", "policy", "kept"),
    [
        ([], KeepLast(1), {}),
        ([], None, {}),
        (run(2), None, {10: ("no retention policy",), 20: ("newest", "no retention policy")}),
        (run(3), KeepLast(2), {20: ("keep last 2 of 2",), 30: ("newest", "keep last 1 of 2")}),
        (
            run(4, at10=VERIFIED, at20=VERIFIED),
            KeepLast(1),
            {20: ("newest verified",), 40: ("newest", "keep last 1 of 1")},
        ),
        (run(2, at20=VERIFIED), KeepSteps(5), {20: ("newest", "newest verified")}),
        (
            run(3, at10={"pinned": "the paper"}, at20={"pinned": "a", "in_use": "in use by verify"}),
            KeepLast(2),
            {
                10: ("pinned: the paper",),
                20: ("pinned: a", "in use by verify", "keep last 2 of 2"),
                30: ("newest", "keep last 1 of 2"),
            },
        ),
        (
            run(5, at30=INFINITE, at40=SPOILT, at50=WEIGHTS),
            KeepSteps(5),
            {40: ("newest finite",), 50: ("newest",)},
        ),
        (run(4, at20=INFINITE, at40=SPOILT), KeepSteps(5), {40: ("newest",)}),
        (
            run(5, at30=ABANDONED | VERIFIED, at40=ABANDONED | {"pinned": "to look"}, at50=ABANDONED),
            KeepLast(9) | KeepEvery(steps=20),
            {
                10: ("keep last 2 of 9",),
                20: ("newest", "keep last 1 of 9", "keep every 20 steps"),
                40: ("pinned: to look",),
            },
        ),
        (run(2, at10=ABANDONED, at20=ABANDONED), KeepLast(1), {20: ("newest",)}),
    ],
)
def test_what_stays_says_why(records, policy, kept):
    assert reasons(records, policy) == kept


def test_what_of_a_checkpoint_a_restore_goes_back_for():
    records = run(4, at20=INFINITE, at30=SPOILT, at40=WEIGHTS)
    assert [each.nonfinite_reason for each in records] == ["", "", "", "tensor model.weight"]
    assert [each.nonfinite for each in records][1::2] == ["metric norm", "metric norm; tensor model.weight"]
    many = replace(records[0], nonfinite_tensors=("a", "b", "c", "d", "e"))
    assert many.nonfinite == "tensors a, b, c and 2 more"


def test_what_goes_says_why():
    loss = [replace(each, metrics={"loss": 2.0 + each.step / 100}) for each in run(9)]
    assert why_not(loss, KeepLast(2) | KeepEvery(steps=30) | KeepBest("loss", 2), 40) == (
        "no rule keeps it: older than the last 2, not the first from a multiple of 30 on, "
        "loss 2.4 is not among the best 2",
    )
    rules = KeepLast(4) | KeepEvery(steps=20)
    assert why_not(run(7), rules & AtMost(bytes=3 * GB), 50) == (
        "no room within 3 GB, and only 1 rule keeps it (keep last 3 of 4)",
    )
    assert why_not(run(7), rules & AtMost(bytes=2 * GB), 40) == (
        "no room within 2 GB, although 2 rules keep it (keep last 4 of 4, keep every 20 steps)",
    )
    assert why_not(run(3), AtMost(bytes=2 * GB), 10) == ("no room within 2 GB, and there are newer ones",)
    assert why_not(run(3, at30=ABANDONED), KeepLast(9), 30) == ("abandoned by the rollback to step 20",)


def test_a_plan_without_a_policy_keeps_what_was_abandoned():
    assert reasons(run(2, at20=ABANDONED), None)[20] == ("no retention policy",)


def test_what_no_rule_may_remove_can_be_over_the_limit():
    policy = KeepLast(4) & AtMost(bytes=GB // 2)
    verdicts = plan(run(4, at10={"pinned": "the paper"}, at20=VERIFIED), policy)
    assert [each.record.step for each in verdicts if each.keep] == [10, 20, 40]
    assert over_limit(verdicts, policy) == 3 * GB - GB // 2
    assert over_limit(verdicts, KeepLast(1)) == 0
    assert over_limit(verdicts, AtMost(bytes=9 * GB)) == 0


def test_what_is_coming_counts_and_the_newest_there_is_stays():
    coming = Record(60, 6, 6000.0, GB, {})
    assert list(reasons(run(5), KeepLast(3), coming=coming)) == [40, 50]
    assert list(reasons(run(5), KeepLast(1), coming=coming)) == [50]
    assert list(reasons(run(5), AtMost(bytes=3 * GB), coming=coming)) == [40, 50]


rules = st.one_of(
    st.builds(KeepLast, st.integers(1, 6)),
    st.builds(KeepEvery, st.integers(1, 20_000)),
    st.builds(KeepBest, st.just("loss"), st.integers(1, 4)),
    st.builds(KeepBest, st.just("accuracy"), st.integers(1, 4), st.just("max")),
    st.builds(KeepSteps, st.integers(0, 200).map(lambda number: number * 250)),
    st.builds(KeepWithin, st.floats(60.0, 60 * DAY)),
    *(st.builds(kind, st.integers(1, 10)) for kind in (KeepHourly, KeepDaily, KeepWeekly, KeepMonthly)),
)
unions = st.recursive(rules, lambda some: st.builds(lambda left, right: left | right, some, some), max_leaves=5)
limits = st.none() | st.builds(AtMost, st.integers(1, 40).map(lambda room: room * GB))
seeds = st.integers(0, 2**32)


@dataclass
class Run:
    """What lies on disk, and what has been promised to stay."""

    policy: RetentionPolicy
    dice: random.Random
    now: float = BIRTH
    step: int = 0
    sequence: int = 0
    disk: dict[int, Record] = field(default_factory=dict)
    prunes: int = 0
    deleted: int = 0

    def save(self):
        self.now += self.dice.uniform(0.1, 3) * DAY / 2
        self.step += self.dice.choice((250, 500, 1000))
        self.sequence += 1
        # The same step, saved again after a rollback, takes the place of the one before.
        self.disk = {number: each for number, each in self.disk.items() if each.step != self.step}
        metrics = {"loss": self.dice.choice((self.dice.random(), 0.5, NAN)), "accuracy": self.dice.random()}
        if self.dice.random() < 0.1:
            del metrics["loss"]
        jump = self.dice.choice((0.0,) * 20 + (400 * DAY, -400 * DAY))
        self.disk[self.sequence] = Record(self.step, self.sequence, self.now + jump, GB, metrics)

    def counted(self):
        return [each for _, each in sorted(self.disk.items()) if not each.abandoned]

    def crash(self):
        """The steps since the last save that counts are lost; readers of that host are gone."""
        counted = self.counted()
        self.step = counted[-1].step if counted else 0
        self.change(lambda each: replace(each, in_use=""))

    def rollback(self):
        if counted := self.counted():
            target = self.dice.choice(counted)
            self.step = target.step
            why = f"abandoned by the rollback to step {target.step}"
            self.change(lambda each: each if each.sequence <= target.sequence else replace(each, abandoned=why))

    def touch(self):
        """Somebody verifies, pins, unpins, reads, or stops reading one of them."""
        if self.disk:
            chosen = self.dice.choice(list(self.disk))
            values = ({"verified": True}, {"pinned": "paper"}, {"pinned": ""}, {"in_use": "verify"}, {"in_use": ""})
            self.disk[chosen] = replace(self.disk[chosen], **self.dice.choice(values))

    def change(self, how):
        self.disk = {number: how(each) for number, each in self.disk.items()}

    def planned(self, policy, records=None):
        records = list(self.disk.values()) if records is None else records
        self.dice.shuffle(records)
        return plan(records, policy, now_seconds=self.now)

    def prune(self):
        """Check what a plan promises, and carry it out: all of it, or the part until somebody kills the prune."""
        self.prunes += 1
        verdicts = self.planned(self.policy)
        assert [each.record for each in verdicts] == [each for _, each in sorted(self.disk.items())]
        assert all(each.reasons for each in verdicts)
        assert self.planned(self.policy) == verdicts, "the order of the listing counts"
        kept = [each.record for each in verdicts if each.keep]
        sacred = untouchables(list(self.disk.values()))
        assert sacred.keys() <= {each.sequence for each in kept}
        self.check_sacred(kept)
        assert all(each.keep for each in self.planned(self.policy, kept)), "a second prune removes more"
        if over_limit(verdicts, self.policy):
            assert len(sacred) == len(kept), "over the limit, and something may still go"
        going = [each.record.sequence for each in verdicts if not each.keep]
        if self.dice.random() < 0.1:
            self.dice.shuffle(going)
            going = going[: self.dice.randrange(len(going) + 1)]
        for sequence in going:
            del self.disk[sequence]
            self.deleted += 1

    def check_sacred(self, kept):
        """Told apart by hand here, not by the code that is on trial."""
        counted = self.counted()
        verified = [each for each in counted if each.verified]
        wanted = [each for each in self.disk.values() if each.pinned or each.in_use]
        assert all(each in kept for each in [*wanted, *counted[-1:], *verified[-1:]])
        assert bool(kept) == bool(self.disk), "a plan removes everything"


def roll(policy, seed, days):
    run = Run(policy, random.Random(seed))
    while run.now < BIRTH + days * DAY:
        event = run.dice.random()
        if event < 0.75:
            run.save()
            run.prune()
        else:
            (run.crash if event < 0.85 else run.rollback if event < 0.88 else run.touch)()
        if run.dice.random() < 0.1:
            run.prune()
    return run


@pytest.mark.parametrize("days", [90, pytest.param(365, marks=pytest.mark.campaign)])
@settings(max_examples=30, deadline=None)
@example(KeepLast(3), None, 1)
@given(unions, limits, seeds)
def test_a_long_run_under_any_rules(days, policy, limit, seed):
    run = roll(policy if limit is None else policy & limit, seed, days)
    assert run.prunes > days * 0.8
    assert run.deleted or not isinstance(policy, KeepLast), "nothing was ever pruned: this proves nothing"


@settings(max_examples=60)
@given(unions, unions, seeds)
def test_more_rules_keep_more(left, right, seed):
    run = Run(left, random.Random(seed))
    for _ in range(60):
        run.dice.choice((run.save, run.save, run.save, run.touch, run.rollback))()

    def kept(policy):
        return {each.record.sequence for each in run.planned(policy) if each.keep}

    assert kept(left) | kept(right) == kept(left | right) == kept(right | left)
    assert kept(left & AtMost(bytes=5 * GB)) <= kept(left)


@given(st.sets(st.integers(1, 300), min_size=1, max_size=40), st.integers(1, 60), st.integers(1, 5))
def test_pruning_after_every_save_leaves_what_one_plan_over_all_would(steps, every, count):
    policy = KeepLast(count) | KeepEvery(steps=every)
    everything = [Record(step, number, BIRTH, GB, {}) for number, step in enumerate(sorted(steps), 1)]
    on_disk = []
    for each in everything:
        on_disk = [verdict.record for verdict in plan([*on_disk, each], policy) if verdict.keep]
    assert on_disk == [verdict.record for verdict in plan(everything, policy) if verdict.keep]


class Own(RetentionPolicy):
    def keeps(self, records):
        return {}


def with_metrics(*metrics):
    return [replace(each, metrics=said) for each, said in zip(run(len(metrics)), metrics, strict=True)]


@pytest.mark.parametrize(
    ("policy", "metrics", "by_hand", "in_the_run"),
    [
        (KeepBest("lozz"), (LOSS, LOSS), "no checkpoint has the metric 'lozz'; they have loss", "the same"),
        (KeepLast(1) | KeepBest("lozz"), (LOSS,), "has the metric 'lozz'", "the same"),
        (KeepLast(1) | KeepBest("loss"), ({}, {}), "has the metric 'loss'; they have no metrics", ""),
        (KeepBest("loss"), ({}, {}), "has the metric 'loss'; they have no metrics", "keep none of 2 checkpoints"),
        (KeepLast(1) | KeepBest("loss"), ({"loss": NAN}, {"x": 1.0}), "'loss' is a finite number in no", ""),
        (KeepBest("loss"), ({"loss": NAN}, {"x": 1.0}), "is a finite number in no checkpoint", ""),
        (KeepBest("loss") & AtMost(bytes=1), (LOSS, {}), "", ""),
        (KeepSteps(15, 25), (LOSS, LOSS), "the rules keep none of 2 checkpoints (KeepSteps(15, 25))", ""),
        (KeepSteps(15, 16), (LOSS, LOSS), "keep none of 2 checkpoints (KeepSteps(15, 16))", "the same"),
        (KeepSteps(15), (LOSS,), "", ""),
        (KeepEvery(100), (LOSS, LOSS), "keep none of 2 checkpoints (KeepEvery(steps=100))", ""),
        (KeepEvery(100) | KeepLast(1), (LOSS, LOSS), "", ""),
        (KeepEvery(100) | KeepDaily(1), (LOSS, LOSS), "", ""),
        (KeepWithin(5.0), (LOSS, LOSS), "", ""),
        (Own(), (LOSS, LOSS), "keep none of 2 checkpoints", ""),
        (AtMost(bytes=1), (LOSS, LOSS), "", ""),
        (None, (LOSS, LOSS), "", ""),
        (KeepBest("loss"), (), "", ""),
    ],
)
def test_what_is_a_slip(policy, metrics, by_hand, in_the_run):
    for goes_on, expected in ((False, by_hand), (True, by_hand if in_the_run == "the same" else in_the_run)):
        found = policy_mistake(policy, with_metrics(*metrics), 1e6, goes_on=goes_on)
        assert expected in found
        assert bool(found) == bool(expected)


EVAL = {"eval": 1.0}


@pytest.mark.parametrize(
    ("policy", "metrics", "left", "warning"),
    [
        (KeepBest("eval"), [LOSS] * 3, [1, 2, 3], "no checkpoint has the metric 'eval'; they have loss"),
        (KeepBest("eval"), [LOSS] * 3 + [EVAL, LOSS], [4, 5], "no checkpoint has the metric 'eval'; they have loss"),
        (
            KeepLast(2) | KeepBest("eval"),
            [LOSS] * 4 + [EVAL] + [LOSS] * 3,
            [5, 7, 8],
            "pruned by the other rules alone: no checkpoint has",
        ),
        (KeepBest("loss"), [{"loss": NAN}] * 3, [3], None),  # or the root would grow without a bound
    ],
)
def test_a_run_warns_once_and_waits_for_the_metric(policy, metrics, left, warning, tmp_path, recwarn):
    held, journal = claim(tmp_path, "run", None), Journal(journal_path(tmp_path))
    keeper = RetentionRunner(RunStore(tmp_path), policy, "prune", held, journal)
    for step, each in enumerate(metrics, 1):
        commit(tmp_path, step, metrics=each)
        keeper.prune()
    told = [str(each.message) for each in recwarn]
    assert [warning in each for each in told] == ([] if warning is None else [True])
    if len(left) == len(metrics):  # what is kept while the metric is awaited does not make room either
        assert not keeper.make_room(SaveInfo(4, "every step"), "no space")
    keeper.end()
    keeper.close()
    held.release()
    journal.close()
    assert steps_of(Catalog(tmp_path).scan()) == left
    failed = any(each["event"] == "prune_failed" for each in read_journal(journal_path(tmp_path))[0])
    assert failed == (warning is not None and "other rules" not in warning)
