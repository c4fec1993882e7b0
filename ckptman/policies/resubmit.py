"""Whether a chain starts another attempt. A run that stopped or crashed goes on; one that crashes in a loop ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Literal

from ckptman.policies.parameters import check_count

Ending = Literal["finished", "stopped", "crashed", "interrupted"]
"""How an attempt ended. Stopped: it saved and left on purpose (exit code 75). Interrupted: ended from outside, by
a time limit, a preemption, a node that failed, somebody's `scancel`. Crashed: anything else that was not the end."""
FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS = 60.0, 3600.0
"""How long to wait after the first crash with no new checkpoint, and at most."""


@dataclass(frozen=True)
class Attempt:
    """One attempt of a chain that is over."""

    number: int
    """1 for the first attempt of the chain."""
    outcome: Ending
    reason: str
    """Why it ended, for people: "SIGTERM on rank 2", "exit code 1"."""
    committed_sequence: int
    """The newest commit sequence on disk after it; 0: no checkpoint."""


@dataclass(frozen=True)
class Next:
    """Whether to start another attempt (`again`), why, and how long to wait before it."""

    again: bool
    reason: str
    delay_seconds: float = 0.0


def decide(
    attempts: Sequence[Attempt],
    crash_limit: int = 3,
    max_attempts: int | None = None,
    sequence_before: int = 0,
    stall_limit: int | None = None,
) -> Next:
    """Decide, from all attempts so far (oldest first), whether there is another one.

    Finished ends the chain. Stopped goes on. Crashed goes on, until `crash_limit` attempts in a row crashed without
    one new checkpoint: the next would meet the same end. What was interrupted in between neither counts nor begins a
    new row; but after `stall_limit` attempts (None: no limit) of any kind with no new checkpoint the chain ends too: a
    time limit that is too short for one save would go on for ever. `max_attempts` (None: no limit) bounds the chain in
    any case. `sequence_before` is the newest commit sequence on disk before the first attempt.

    After a crash with no new checkpoint the next attempt waits: a minute, and twice as long each time.

    Raises IntervalError unless all limits are at least 1. Called by the chain, after each attempt.
    """
    check_count("resubmit", "crash_limit", crash_limit)
    for name, limit in (("max_attempts", max_attempts), ("stall_limit", stall_limit)):
        if limit is not None:
            check_count("resubmit", name, limit)
    if not attempts:
        return Next(True, "nothing has run yet")

    last = attempts[-1]
    told = f"attempt {last.number} {last.outcome}: {last.reason}"
    if last.outcome == "finished":
        return Next(False, told)
    in_vain = list(_in_vain(attempts, sequence_before))
    counted = [attempt.outcome for attempt in in_vain if attempt.outcome != "interrupted"]
    crashes = len(list(takewhile("crashed".__eq__, counted)))
    if crashes >= crash_limit:
        row = "1 attempt" if crashes == 1 else f"{crashes} attempts in a row"
        return Next(False, f"{row} crashed with no new checkpoint; {told}")
    if stall_limit is not None and len(in_vain) >= stall_limit:
        return Next(False, f"{len(in_vain)} attempts in a row ended with no new checkpoint; {told}")
    if max_attempts is not None and last.number >= max_attempts:
        return Next(False, f"{told}; no more than {max_attempts} attempts were allowed")
    if not crashes or last.outcome != "crashed":
        return Next(True, told)
    delay_seconds = min(FIRST_DELAY_SECONDS * 2 ** (crashes - 1), LONGEST_DELAY_SECONDS)
    return Next(True, f"{told} (crash {crashes} of {crash_limit} with no new checkpoint)", delay_seconds)


def _in_vain(attempts: Sequence[Attempt], sequence_before: int) -> Iterator[Attempt]:
    """Return the attempts after the one that committed last, the newest first."""
    committed = [sequence_before, *(attempt.committed_sequence for attempt in attempts)]
    for attempt, (before, after) in zip(reversed(attempts), reversed(list(pairwise(committed)))):
        if after > before:
            return
        yield attempt
