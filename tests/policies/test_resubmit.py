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


STOPPED, CRASHED, CUT = ("stopped", 4), ("crashed", 4), ("interrupted", 4)


@pytest.mark.parametrize(
    ("attempts", "given", "expected"),
    [
        ([], {}, Next(True, "nothing has run yet")),
        ([STOPPED, ("finished", 5)], {}, Next(False, "attempt 2 finished: 500 steps done")),
        ([("finished", 1)], {"max_attempts": 1}, Next(False, "attempt 1 finished: 500 steps done")),
        ([STOPPED], {}, Next(True, "attempt 1 stopped: SIGTERM on rank 2")),
        ([CRASHED], {}, Next(True, "attempt 1 crashed: exit code 1")),
        (
            [STOPPED, CRASHED],
            {},
            Next(True, "attempt 2 crashed: exit code 1 (crash 1 of 3 with no new checkpoint)", 60.0),
        ),
        (
            [STOPPED, CRASHED, CRASHED],
            {},
            Next(True, "attempt 3 crashed: exit code 1 (crash 2 of 3 with no new checkpoint)", 120.0),
        ),
        (
            [STOPPED, CRASHED, CRASHED, CRASHED],
            {},
            Next(False, "3 attempts in a row crashed with no new checkpoint; attempt 4 crashed: exit code 1"),
        ),
        (
            [("crashed", 0)],
            {"crash_limit": 1},
            Next(False, "1 attempt crashed with no new checkpoint; attempt 1 crashed: exit code 1"),
        ),
        (
            [CRASHED, CUT, CRASHED, CUT],  # neither counts nor begins a new row
            {"sequence_before": 4},
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
            {"sequence_before": 4, "stall_limit": 10},
            Next(False, "10 attempts in a row ended with no new checkpoint; attempt 10 stopped: SIGTERM on rank 2"),
        ),
    ],
)
def test_what_comes_next_and_why(attempts, given, expected):
    assert decide(chain(*attempts), **given) == expected


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.sampled_from(["stopped", "crashed", "interrupted"]), st.integers(-1, 2)), min_size=1),
    st.integers(1, 4),
    st.none() | st.integers(1, 5),
    st.integers(3, 5),
)
def test_a_chain_ends_exactly_when_the_last_attempts_committed_nothing(steps, limit, stall_limit, before):
    """`steps`: outcomes, and by how much the newest sequence grew; it falls where the newest was removed."""
    committed, attempts = before, []
    for outcome, new in steps:
        committed = max(0, committed + new)
        attempts.append((outcome, committed))
    outcomes = ""
    for outcome, new in steps:
        outcomes = "" if new > 0 else outcomes + outcome[0]
    crashed = outcomes.replace("i", "").endswith("c" * limit)
    stalled = stall_limit is not None and len(outcomes) >= stall_limit
    found = decide(chain(*attempts), crash_limit=limit, sequence_before=before, stall_limit=stall_limit)
    assert found.again == (not crashed and not stalled)
    assert (found.delay_seconds > 0) == (found.again and outcomes.endswith("c"))


def test_the_delay_after_a_crash_has_an_end():
    assert decide(chain(*[("crashed", 0)] * 20), crash_limit=99).delay_seconds == 3600


@pytest.mark.parametrize("name", ["crash_limit", "max_attempts", "stall_limit"])
@pytest.mark.parametrize("value", [0, -1, 2.5, True, "3"])
def test_limits_are_whole_numbers_from_one(name, value):
    told = f"resubmit: {name} must be a whole number of at least 1, not {value!r}"
    with pytest.raises(ConfigError, match=told) as refused:
        decide([], **{name: value})
    assert isinstance(refused.value, IntervalError) == (type(value) in (int, float))
