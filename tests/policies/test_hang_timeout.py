"""How long a silence may be: the formula, what is learnt, and that no order of events makes a live rank look stuck."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptman.errors import ConfigError, IntervalError
from ckptman.policies.hang_timeout import OPEN_SECONDS, HangTimeout, Progress, ahead_of

seconds = st.floats(0, 1e6)
patiences = st.builds(HangTimeout, st.floats(0.01, 1e5), st.floats(1, 100))
kinds = st.sampled_from(["restore", "start", "step", "stage", "save"])


def test_the_worked_example_of_the_docs():
    patience = HangTimeout()
    assert patience.limit_seconds("step", 4.0) == 600
    assert patience.limit_seconds("step", 420.0) == 1260
    assert patience.limit_seconds("save", 90.0) == patience.limit_seconds("start") == 1800
    assert patience.limit_seconds("save", 1000.0) == 3000
    assert patience.notice_seconds("step", 4.0) == 610


@given(patiences, kinds, seconds, seconds)
def test_the_limit_is_above_what_was_seen_and_never_falls(patience, doing, first, more):
    limit = patience.limit_seconds(doing, first)
    assert limit >= max(patience.floor_seconds, patience.factor * first, first)
    assert limit <= patience.limit_seconds(doing, first + more)
    assert limit < patience.notice_seconds(doing, first) <= limit + 10.0
    assert patience.limit_seconds("step", first) <= limit


@given(patiences, st.lists(st.tuples(kinds, st.floats(0, 1.0)), max_size=30))
def test_a_rank_whose_pauses_are_below_the_floor_is_never_overdue(patience, pauses):
    progress, now = Progress(patience), 0.0
    for step, (doing, share) in enumerate(pauses):
        for part in (0.999, 0.001):
            now += share * patience.floor_seconds * part
            assert progress.overdue(now) is None
            progress.beat(now, doing, step)


@given(patiences, kinds, st.lists(st.floats(0, 1.0), max_size=20))
def test_it_is_overdue_exactly_after_the_limit_that_was_learnt(patience, doing, shares):
    progress, now = Progress(patience), 0.0
    progress.beat(now, doing, 0)
    for step, share in enumerate(shares, 1):
        now += share * progress.limit_seconds
        progress.beat(now, doing, step)
    limit = progress.limit_seconds
    assert progress.overdue(now + limit * 0.999) is None
    stall = progress.overdue(now + limit * 1.001)
    assert (stall.doing, stall.step, stall.behind, stall.limit_seconds) == (doing, len(shares), False, limit)
    assert str(stall).startswith("no sign of life for ")


def test_each_kind_of_pause_has_a_limit_of_its_own():
    progress = Progress(HangTimeout(10.0))
    assert progress.limit_seconds == 30
    progress.beat(29.0, "step", 1)
    assert {doing: longest for doing, longest in progress.longest_seconds.items() if longest} == {"start": 29.0}
    assert progress.patience.limit_seconds("open") == OPEN_SECONDS
    assert progress.limit_seconds == 10
    progress.beat(38.0, "step", 2)  # an evaluation that was seen is allowed again, and longer
    assert progress.limit_seconds == 27


def test_a_save_behind_the_training_is_watched_by_itself():
    progress = Progress(HangTimeout(10.0))
    save = progress.begin(0.0, 7)
    for second in range(30):
        progress.beat(float(second), "step", second)
        assert progress.overdue(float(second)) is None
        assert progress.training[0] is None
    progress.beat(31.0, "step", 31)
    stall = progress.overdue(31.0)
    assert (stall.behind, stall.step, stall.limit_seconds) == (True, 7, 30.0)
    assert stall.where == "from the save of step 7 in the background"
    progress.end(31.0, save)
    assert progress.overdue(31.0) is None
    assert progress.longest_seconds["save"] == 31.0
    assert progress.training[0] == 31


@given(st.floats(40, 1e5))
def test_it_speaks_before_a_collective_is_aborted(abort_seconds):
    patience = HangTimeout(speak_seconds=ahead_of(abort_seconds))
    until_all_answer = 2.0 + 4 * patience.look_seconds
    assert patience.speak_seconds + 2 * patience.look_seconds + until_all_answer < abort_seconds - 5


def test_a_silence_is_told_once_and_where_a_collective_may_be_waited_for():
    progress = Progress(HangTimeout(10.0, speak_seconds=4.0))
    for now, doing in ((0.0, "start"), (20.0, "step"), (40.0, "stage")):
        progress.beat(now, doing, 1)
        assert progress.late(now + 4.0) is None
        told = progress.late(now + 4.5)
        assert (told.doing, told.waited_seconds) == (doing, 4.5)
        assert progress.late(now + 9.0) is None
    for doing in ("restore", "save"):
        progress.beat(60.0, doing, 1)
        assert progress.late(69.0) is None


def test_a_pause_like_those_before_is_not_told():
    progress = Progress(HangTimeout(100.0, speak_seconds=4.0))
    for step in range(1, 4):
        progress.beat(20.0 * step, "step", step)
    assert progress.late(60.0 + 25.0) is None
    assert progress.late(60.0 + 25.5) is not None


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        *(
            ({"floor_seconds": floor}, IntervalError, "floor_seconds must be a finite number above 0")
            for floor in (0, -1, float("nan"), float("inf"))
        ),
        ({"floor_seconds": "long"}, ConfigError, "floor_seconds must be"),
        ({"speak_seconds": 0}, IntervalError, "speak_seconds must be a finite number above 0"),
        ({"factor": 0.9}, IntervalError, "factor must be a finite number of at least 1"),
    ],
)
def test_what_cannot_be_is_refused(arguments, error, told):
    with pytest.raises(error, match=told):
        HangTimeout(**arguments)
