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
    """Attempts given as (outcome, whether it saved[, seconds]), in order."""
    return [
        Attempt(number, outcome, REASONS[outcome], has_saved, *seconds)
        for number, (outcome, has_saved, *seconds) in enumerate(attempts, start=1)
    ]


SAVED, STOPPED, CRASHED, CUT = ("stopped", True), ("stopped", False), ("crashed", False), ("interrupted", False)
UNKNOWN, LONG = ("crashed", None, 599.0), ("crashed", None, 600.0)


@pytest.mark.parametrize(
    ("attempts", "given", "expected"),
    [
        ([], {}, Next(True, "nothing has run yet")),
        ([SAVED, ("finished", True)], {}, Next(False, "attempt 2 finished: 500 steps done")),
        ([("finished", False)], {"max_attempts": 1}, Next(False, "attempt 1 finished: 500 steps done")),
        ([STOPPED], {}, Next(True, "attempt 1 stopped: SIGTERM on rank 2")),
        ([("crashed", True)], {}, Next(True, "attempt 1 crashed: exit code 1")),
        (
            [SAVED, CRASHED],
            {},
            Next(True, "attempt 2 crashed: exit code 1 (crash 1 of 3 with no new checkpoint)", 60.0, 1),
        ),
        (
            [SAVED, CRASHED, CRASHED],
            {},
            Next(True, "attempt 3 crashed: exit code 1 (crash 2 of 3 with no new checkpoint)", 120.0, 2),
        ),
        (
            [SAVED, CRASHED, CRASHED, CRASHED],
            {},
            Next(False, "3 attempts in a row crashed with no new checkpoint; attempt 4 crashed: exit code 1"),
        ),
        (
            [CRASHED],
            {"crash_limit": 1},
            Next(False, "1 attempt crashed with no new checkpoint; attempt 1 crashed: exit code 1"),
        ),
        (
            [CRASHED, CUT, CRASHED, CUT],  # neither counts nor begins a new row
            {},
            Next(True, "attempt 4 interrupted: the time limit"),
        ),
        ([STOPPED], {"max_attempts": 2}, Next(True, "attempt 1 stopped: SIGTERM on rank 2")),
        (
            [STOPPED, STOPPED],
            {"max_attempts": 2},
            Next(False, "attempt 2 stopped: SIGTERM on rank 2; no more than 2 attempts were allowed"),
        ),
        (
            [STOPPED] * 10,
            {"stall_limit": 10},
            Next(False, "10 attempts in a row ended with no new checkpoint; attempt 10 stopped: SIGTERM on rank 2"),
        ),
        ([UNKNOWN, UNKNOWN, LONG], {}, Next(True, "attempt 3 crashed: exit code 1")),
        (
            [LONG, UNKNOWN, UNKNOWN, UNKNOWN],
            {},
            Next(
                False,
                "3 attempts in a row crashed within 10 min, with no known checkpoint (name yours with --progress); "
                "attempt 4 crashed: exit code 1",
            ),
        ),
    ],
)
def test_what_comes_next_and_why(attempts, given, expected):
    assert decide(chain(*attempts), **given) == expected


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.sampled_from(["stopped", "crashed", "interrupted"]), st.booleans()), min_size=1),
    st.integers(1, 4),
    st.none() | st.integers(1, 5),
)
def test_a_chain_ends_exactly_when_the_last_attempts_saved_nothing(attempts, limit, stall_limit):
    outcomes = ""
    for outcome, has_saved in attempts:
        outcomes = "" if has_saved else outcomes + outcome[0]
    crashed = outcomes.replace("i", "").endswith("c" * limit)
    stalled = stall_limit is not None and len(outcomes) >= stall_limit
    found = decide(chain(*attempts), crash_limit=limit, stall_limit=stall_limit)
    assert found.again == (not crashed and not stalled)
    assert (found.delay_seconds > 0) == (found.again and outcomes.endswith("c"))


def test_the_delay_after_a_crash_has_an_end():
    assert decide(chain(*[CRASHED] * 20), crash_limit=99).delay_seconds == 3600


@pytest.mark.parametrize("name", ["crash_limit", "max_attempts", "stall_limit"])
@pytest.mark.parametrize("value", [0, -1, 2.5, True, "3"])
def test_limits_are_whole_numbers_from_one(name, value):
    told = f"resubmit: {name} must be a whole number of at least 1, not {value!r}"
    with pytest.raises(ConfigError, match=told) as refused:
        decide([], **{name: value})
    assert isinstance(refused.value, IntervalError) == (type(value) in (int, float))
