"""Whether a chain goes on, and the reason it gives."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptman.errors import ConfigError, IntervalError
from ckptman.policies.resubmit import Attempt, Next, decide

REASONS = {
    "finished": "500 steps done",
    "stopped": "SIGTERM on rank 2",
    "crashed": "exit code 1",
    "interrupted": "the time limit",
}


def chain(*attempts):
    """Attempts given as (outcome, newest sequence on disk after it), in order."""
    return [
        Attempt(number, outcome, REASONS[outcome], committed)
        for number, (outcome, committed) in enumerate(attempts, start=1)
    ]


def test_a_chain_begins():
    assert decide([]) == Next(True, "nothing has run yet")


def test_finished_ends_the_chain():
    assert decide(chain(("stopped", 3), ("finished", 5))) == Next(False, "attempt 2 finished: 500 steps done")


def test_stopped_goes_on():
    assert decide(chain(("stopped", 3))) == Next(True, "attempt 1 stopped: SIGTERM on rank 2")


def test_a_crash_with_progress_goes_on():
    assert decide(chain(("crashed", 3))) == Next(True, "attempt 1 crashed: exit code 1")


def test_a_crash_loop_without_progress_ends_with_its_reason():
    loop = chain(("stopped", 4), ("crashed", 4), ("crashed", 4), ("crashed", 4))
    assert decide(loop[:2]) == Next(True, "attempt 2 crashed: exit code 1 (crash 1 of 3 with no new checkpoint)", 60.0)
    assert decide(loop[:3]) == Next(True, "attempt 3 crashed: exit code 1 (crash 2 of 3 with no new checkpoint)", 120.0)
    assert decide(loop) == Next(
        False, "3 attempts in a row crashed with no new checkpoint; attempt 4 crashed: exit code 1"
    )


def test_a_run_that_never_saves_anything_ends_after_three_crashes():
    assert not decide(chain(("crashed", 0), ("crashed", 0), ("crashed", 0))).again


def test_checkpoints_from_before_the_chain_are_no_progress():
    loop = chain(("crashed", 50), ("crashed", 50), ("crashed", 50))
    assert not decide(loop, sequence_before=50).again
    assert decide(loop).again


@pytest.mark.parametrize("progress", [0, 1, 2])
def test_one_new_checkpoint_among_three_crashes_goes_on(progress):
    committed = [4 + (attempt >= progress) for attempt in range(3)]
    assert decide(chain(("stopped", 4), *(("crashed", each) for each in committed))).again


def test_a_stop_between_crashes_starts_the_count_again():
    assert decide(chain(("crashed", 0), ("crashed", 0), ("stopped", 0), ("crashed", 0), ("crashed", 0))).again


def test_a_new_checkpoint_counts_also_where_the_newest_had_been_removed():
    assert decide(chain(("stopped", 9), ("crashed", 7), ("crashed", 8), ("crashed", 8))).again
    assert not decide(chain(("stopped", 9), ("crashed", 7), ("crashed", 7), ("crashed", 7))).again


def test_the_limit_of_crashes_can_be_set():
    assert decide(chain(("crashed", 0)), crash_limit=1) == Next(
        False, "1 attempt crashed with no new checkpoint; attempt 1 crashed: exit code 1"
    )
    assert decide(chain(*[("crashed", 0)] * 4), crash_limit=5).again


def test_the_chain_has_at_most_so_many_attempts():
    assert decide(chain(("stopped", 1)), max_attempts=2).again
    assert decide(chain(("stopped", 1), ("stopped", 2)), max_attempts=2) == Next(
        False, "attempt 2 stopped: SIGTERM on rank 2; no more than 2 attempts were allowed"
    )
    assert decide(chain(("finished", 1)), max_attempts=1).reason == "attempt 1 finished: 500 steps done"


@settings(max_examples=200, deadline=None, print_blob=True)
@given(
    st.lists(st.tuples(st.sampled_from(["stopped", "crashed"]), st.integers(0, 2)), min_size=1, max_size=8),
    st.integers(1, 4),
    st.integers(0, 2),
)
def test_a_chain_ends_exactly_when_the_last_attempts_all_crashed_and_committed_nothing(steps, limit, before):
    committed, attempts = before, []
    for outcome, new in steps:
        committed += new
        attempts.append((outcome, committed))
    in_vain = len(steps) >= limit and all(outcome == "crashed" and new == 0 for outcome, new in steps[-limit:])
    assert decide(chain(*attempts), crash_limit=limit, sequence_before=before).again == (not in_vain)


@pytest.mark.parametrize("name", ["crash_limit", "max_attempts"])
@pytest.mark.parametrize("value", [0, -1, 2.5, True, "3"])
def test_limits_are_whole_numbers_from_one(name, value):
    with pytest.raises(
        ConfigError, match=f"resubmit: {name} must be a whole number of at least 1, not {value!r}"
    ) as no:
        decide([], **{name: value})
    assert isinstance(no.value, IntervalError) == (type(value) in (int, float))


def test_what_was_interrupted_neither_counts_nor_begins_a_new_row():
    row = chain(("crashed", 4), ("interrupted", 4), ("crashed", 4), ("interrupted", 4))
    assert decide(row, sequence_before=4) == Next(True, "attempt 4 interrupted: the time limit")
    assert not decide([*row, Attempt(5, "crashed", "exit code 1", 4)], sequence_before=4).again
    assert decide(chain(*[("interrupted", 4)] * 50), sequence_before=4).again


@pytest.mark.parametrize("ending", ["stopped", "interrupted"])
def test_attempts_without_progress_end_a_chain_some_time(ending):
    rows = chain(*[(ending, 4)] * 10)
    assert decide(rows[:9], sequence_before=4, stall_limit=10).again
    assert "10 attempts in a row ended" in decide(rows, sequence_before=4, stall_limit=10).reason
    assert decide(chain(*[(ending, 4)] * 9, (ending, 5)), sequence_before=4, stall_limit=10).again
    with pytest.raises(IntervalError):
        decide(rows, stall_limit=0)


def test_the_delay_after_a_crash_has_an_end():
    assert decide(chain(*[("crashed", 0)] * 20), crash_limit=99).delay_seconds == 3600
