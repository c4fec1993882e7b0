"""Whether a chain starts another attempt. A run that stopped or crashed goes on; one that crashes in a loop ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from ckptman.policy.checks import check_count


@dataclass(frozen=True)
class Attempt:
    """One attempt of a chain that is over."""

    number: int
    """1 for the first attempt of the chain."""
    outcome: Literal["finished", "stopped", "crashed"]
    """Stopped: it saved and left on purpose (exit code 75). Crashed: anything else that was not the end."""
    reason: str
    """Why it ended, for people: "SIGTERM on rank 2", "exit code 1"."""
    committed_sequence: int
    """The newest commit sequence on disk after it; 0: no checkpoint."""


@dataclass(frozen=True)
class Next:
    """Whether to start another attempt (`again`), and why."""

    again: bool
    reason: str


def decide(
    attempts: Sequence[Attempt],
    crash_limit: int = 3,
    max_attempts: int | None = None,
    sequence_before: int = 0,
) -> Next:
    """Decide, from all attempts so far (oldest first), whether there is another one.

    Finished ends the chain. Stopped goes on. Crashed goes on, until `crash_limit` attempts in a row crashed without
    one new checkpoint: the next would meet the same end. `max_attempts` (None: no limit) bounds the chain in any case.
    `sequence_before` is the newest commit sequence on disk before the first attempt.

    Raises IntervalError unless both limits are at least 1. Called by the chain, after each attempt.
    """
    check_count("resubmit", "crash_limit", crash_limit)
    if max_attempts is not None:
        check_count("resubmit", "max_attempts", max_attempts)
    if not attempts:
        return Next(True, "nothing has run yet")

    last = attempts[-1]
    told = f"attempt {last.number} {last.outcome}: {last.reason}"
    if last.outcome == "finished":
        return Next(False, told)
    in_vain = _crashed_in_vain(attempts, sequence_before)
    if in_vain >= crash_limit:
        row = "1 attempt" if in_vain == 1 else f"{in_vain} attempts in a row"
        return Next(False, f"{row} crashed with no new checkpoint; {told}")
    if max_attempts is not None and last.number >= max_attempts:
        return Next(False, f"{told}; no more than {max_attempts} attempts were allowed")
    return Next(True, f"{told} (crash {in_vain} of {crash_limit} with no new checkpoint)" if in_vain else told)


def _crashed_in_vain(attempts: Sequence[Attempt], sequence_before: int) -> int:
    """How many attempts at the end of the list crashed with no new checkpoint."""
    committed = [sequence_before, *(attempt.committed_sequence for attempt in attempts)]
    count = 0
    for attempt, (before, after) in zip(reversed(attempts), reversed(list(pairwise(committed)))):
        if attempt.outcome != "crashed" or after > before:
            break
        count += 1
    return count
