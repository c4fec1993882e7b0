"""The rule of each retention policy, the reason it gives, and what no rule may ever drop."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptman.errors import ConfigError, IntervalError
from ckptman.policies.retention import (
    KeepAny,
    KeepBest,
    KeepDaily,
    KeepEvery,
    KeepLast,
    KeepSteps,
    Record,
    Verdict,
    plan,
)

quick = settings(max_examples=80, deadline=None, print_blob=True)


def record(step, sequence, verified=False, **metrics):
    return Record(step, sequence, 1_700_000_000.0 + sequence, 1000, metrics, verified)


def run(*steps):
    """Checkpoints of these steps, committed in this order."""
    return [record(step, sequence) for sequence, step in enumerate(steps, start=1)]


def kept(records, policy):
    return [verdict.record.step for verdict in plan(records, policy) if verdict.keep]


def reasons(records, policy):
    """The reasons for each step; of what nothing keeps only that, and not why (see `test_policy_reasons`)."""
    return {
        verdict.record.step: tuple(each.partition(":")[0] if "no rule" in each else each for each in verdict.reasons)
        for verdict in plan(records, policy)
    }


# KeepLast


def test_keep_last_says_which_of_how_many():
    assert reasons(run(10, 20, 30, 40), KeepLast(3)) == {
        10: ("no rule keeps it",),
        20: ("keep last 3 of 3",),
        30: ("keep last 2 of 3",),
        40: ("newest", "keep last 1 of 3"),
    }


def test_after_a_rollback_the_last_committed_is_the_newest_not_the_highest_step():
    rolled_back = run(100, 200, 300, 110)
    assert kept(rolled_back, KeepLast(1)) == [110]
    assert kept(rolled_back, KeepLast(2)) == [300, 110]


def test_steps_are_compared_as_numbers():
    assert kept(run(900, 1000, 10_000), KeepLast(2)) == [1000, 10_000]


# KeepEvery


def test_keep_every_keeps_the_multiples():
    assert reasons(run(5, 10, 15, 20, 25), KeepEvery(steps=10)) == {
        5: ("no rule keeps it",),
        10: ("keep every 10 steps",),
        15: ("no rule keeps it",),
        20: ("keep every 10 steps",),
        25: ("newest",),
    }


def test_keep_every_keeps_the_first_after_a_multiple_where_none_falls_on_it():
    assert reasons(run(7, 14, 16, 34, 41), KeepEvery(steps=10)) == {
        7: ("no rule keeps it",),
        14: ("keep every 10 steps (first after 10)",),
        16: ("no rule keeps it",),
        34: ("keep every 10 steps (first after 30)",),
        41: ("newest", "keep every 10 steps (first after 40)"),
    }


def test_keep_every_after_a_rollback_takes_the_later_of_two_with_one_step():
    twice = [record(20, 1), record(30, 2), record(20, 3), record(25, 4)]
    assert set(KeepEvery(steps=10).keeps(twice)) == {2, 3}


def test_keep_every_single_step_reads_well():
    assert KeepEvery(steps=1).keeps(run(3)) == {1: "keep every step"}


# KeepBest


def test_keep_best_names_place_metric_mode_and_value():
    records = [record(10, 1, loss=0.5), record(20, 2, loss=0.31), record(30, 3, loss=0.4), record(40, 4, loss=0.9)]
    assert reasons(records, KeepBest("loss", count=2)) == {
        10: ("no rule keeps it",),
        20: ("keep best 1 by loss (min): 0.31",),
        30: ("keep best 2 by loss (min): 0.4",),
        40: ("newest",),
    }
    assert reasons(records, KeepBest("loss", mode="max"))[40] == ("newest", "keep best 1 by loss (max): 0.9")


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_no_number_is_never_best(mode, value):
    records = [record(10, 1, loss=value), record(20, 2), record(30, 3, loss=7.0), record(40, 4, other=0.0)]
    assert set(KeepBest("loss", count=4, mode=mode).keeps(records)) == {3}


def test_of_equals_the_later_commit_is_best():
    records = [record(10, 1, loss=0.5), record(30, 3, loss=0.5), record(20, 2, loss=0.5)]
    assert list(KeepBest("loss", count=2).keeps(records)) == [3, 2]


# plan


def test_without_a_policy_everything_is_kept():
    assert reasons(run(10, 20), None) == {10: ("no retention policy",), 20: ("newest", "no retention policy")}


def test_the_newest_verified_stays_whatever_the_rules_say():
    records = [record(10, 1, verified=True), record(20, 2, verified=True), record(30, 3), record(40, 4)]
    assert reasons(records, KeepLast(1)) == {
        10: ("no rule keeps it",),
        20: ("newest verified",),
        30: ("no rule keeps it",),
        40: ("newest", "keep last 1 of 1"),
    }
    newest = [*records, record(50, 5, verified=True)]
    assert reasons(newest, KeepLast(1))[50] == ("newest", "newest verified", "keep last 1 of 1")


def test_while_the_newest_is_not_finite_the_newest_finite_and_what_a_restore_takes_stay():
    inf, nan = {"norm": math.inf}, {"norm": math.nan}
    records = [
        record(10, 1),
        record(20, 2),
        replace(record(30, 3, **inf), nonfinite_metrics=("norm",)),
        replace(record(40, 4, **nan), nonfinite_metrics=("norm",)),
        replace(record(50, 5, **inf), nonfinite_metrics=("norm",), nonfinite_tensors=("model.weight",)),
    ]
    assert [each.spoilt for each in records[2:]] == ["", "metric norm", "tensor model.weight"]
    kept = {each.record.step: each.reasons for each in plan(records, KeepLast(1)) if each.keep}
    assert kept == {
        20: ("newest finite",),
        30: ("newest that a restore takes",),
        50: ("newest", "keep last 1 of 1"),
    }
    assert [each.record.step for each in plan([*records, record(60, 6)], KeepLast(1)) if each.keep] == [60]


def test_a_plan_of_nothing_is_empty():
    assert plan([], KeepLast(1)) == plan([], None) == []


def test_a_verdict_gives_every_reason_of_a_union():
    records = [record(10, 1, loss=0.3), record(20, 2, loss=0.5)]
    policy = KeepLast(2) | KeepEvery(steps=10) | KeepBest("loss")
    assert plan(records, policy)[0] == Verdict(
        records[0], True, ("keep last 2 of 2", "keep every 10 steps", "keep best 1 by loss (min): 0.3")
    )
    assert policy.keeps(records)[1] == "keep last 2 of 2; keep every 10 steps; keep best 1 by loss (min): 0.3"


def test_a_union_is_flat_and_reads_like_what_was_written():
    policy = (KeepLast(3) | KeepEvery(steps=10)) | (KeepBest("loss") | KeepLast(1))
    assert len(policy.policies) == 4
    assert repr(KeepLast(3) | KeepBest("loss")) == "KeepLast(count=3) | KeepBest(metric='loss', count=1, mode='min')"


# What holds for any history


@st.composite
def histories(draw):
    """Checkpoints in any order, with rollbacks (steps that go back), gaps in the sequence, and missing metrics."""
    sequences = draw(st.lists(st.integers(1, 10_000), unique=True, max_size=25))
    losses = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True))
    return [
        record(draw(st.integers(1, 500)), sequence, draw(st.booleans()), **({} if loss is None else {"loss": loss}))
        for sequence in sequences
        for loss in [draw(losses)]
    ]


policies = st.recursive(
    st.one_of(
        st.builds(KeepLast, st.integers(1, 8)),
        st.builds(KeepEvery, st.integers(1, 100)),
        st.builds(KeepBest, st.just("loss"), st.integers(1, 4)),
        st.builds(KeepDaily, st.integers(1, 4)),
        st.builds(lambda steps: KeepSteps(*steps), st.sets(st.integers(0, 500), min_size=1)),
    ),
    lambda some: st.builds(lambda left, right: left | right, some, some),
    max_leaves=4,
)


@quick
@given(histories(), st.none() | policies)
def test_newest_and_newest_verified_are_never_dropped(records, policy):
    verdicts = plan(records, policy)
    assert [verdict.record for verdict in verdicts] == sorted(records, key=lambda each: each.sequence)
    assert all(verdict.reasons for verdict in verdicts)
    assert all(verdict.keep != verdict.reasons[0].startswith("no rule keeps it: ") for verdict in verdicts)
    if records:
        assert verdicts[-1].keep
        assert verdicts[-1].reasons[0] == "newest"
    verified = [verdict for verdict in verdicts if verdict.record.verified]
    if verified:
        assert verified[-1].keep
        assert "newest verified" in verified[-1].reasons


@quick
@given(histories(), st.integers(1, 30))
def test_keep_last_keeps_exactly_its_count(records, count):
    expected = sorted(each.sequence for each in records)[-count:]
    assert sorted(KeepLast(count).keeps(records)) == expected
    unverified = [replace(each, verified=False) for each in records]
    assert sum(verdict.keep for verdict in plan(unverified, KeepLast(count))) == min(count, len(records))


@quick
@given(histories(), st.integers(1, 30))
def test_keep_best_keeps_exactly_its_count_and_nothing_better_is_left_out(records, count):
    losses = {
        each.sequence: each.metrics["loss"] for each in records if math.isfinite(each.metrics.get("loss", math.nan))
    }
    chosen = KeepBest("loss", count).keeps(records)
    assert len(chosen) == min(count, len(losses))
    left_out = [loss for sequence, loss in losses.items() if sequence not in chosen]
    assert not chosen or not left_out or max(losses[sequence] for sequence in chosen) <= min(left_out)


@quick
@given(histories(), policies, policies)
def test_a_union_keeps_what_either_keeps_and_nothing_else(records, left, right):
    assert set((left | right).keeps(records)) == set(left.keeps(records)) | set(right.keeps(records))


@quick
@given(histories(), policies, st.randoms(use_true_random=False))
def test_the_order_of_the_records_does_not_matter(records, policy, random):
    shuffled = list(records)
    random.shuffle(shuffled)
    assert plan(shuffled, policy) == plan(records, policy)


@quick
@given(histories(), policies)
def test_pruning_twice_prunes_nothing_more(records, policy):
    once = [verdict.record for verdict in plan(records, policy) if verdict.keep]
    assert [verdict.record for verdict in plan(once, policy) if verdict.keep] == once


@quick
@given(st.sets(st.integers(1, 300), min_size=1, max_size=40), st.integers(1, 60), st.integers(1, 5))
def test_pruning_after_every_save_leaves_what_one_plan_over_all_would(steps, every, count):
    policy = KeepLast(count) | KeepEvery(steps=every)
    everything = run(*sorted(steps))
    on_disk = []
    for each in everything:
        on_disk = [verdict.record for verdict in plan([*on_disk, each], policy) if verdict.keep]
    assert on_disk == [verdict.record for verdict in plan(everything, policy) if verdict.keep]


# Bad input


@pytest.mark.parametrize("value", [0, -1, 2.5, math.nan, math.inf, True, "3", None])
@pytest.mark.parametrize(
    ("build", "name"),
    [
        (KeepLast, "KeepLast: count"),
        (KeepEvery, "KeepEvery: steps"),
        (lambda value: KeepBest("loss", value), "KeepBest: count"),
    ],
)
def test_zero_never_means_all(build, name, value):
    with pytest.raises(ConfigError) as refused:
        build(value)
    assert str(refused.value) == (
        f"{name} must be a whole number of at least 1, not {value!r} "
        "(0 never means all; to keep all, give no retention policy)"
    )
    assert isinstance(refused.value, IntervalError) == (type(value) in (int, float))


def test_keep_best_refuses_other_modes_and_names():
    with pytest.raises(ConfigError, match='mode must be "min" or "max", not \'lowest\''):
        KeepBest("loss", mode="lowest")
    with pytest.raises(ConfigError, match="metric must be the name of a metric"):
        KeepBest("")
    with pytest.raises(ConfigError, match=r"metric must be the name of a metric.*not 3"):
        KeepBest(3)


def test_combining_with_what_is_no_policy_is_refused():
    with pytest.raises(TypeError):
        KeepLast(3) | 5
    with pytest.raises(ConfigError, match="every policy must be a RetentionPolicy, not 5"):
        KeepAny((KeepLast(3), 5))
    with pytest.raises(ConfigError, match="give at least one policy"):
        KeepAny(())
