"""Whether a chain starts another attempt. A run that stopped or crashed goes on; one that crashes in a loop ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from ckptman.policies.parameters import check_count

Ending = Literal["finished", "stopped", "crashed", "interrupted"]
"""How an attempt ended. Stopped: it saved and left on purpose (exit code 75). Interrupted: ended from outside, by
a time limit, a preemption, a node that failed, somebody's `scancel`. Crashed: anything else that was not the end."""
Reaction = Literal["again", "elsewhere", "wait", "count", "hold"]
"""What a chain does after a cause. again: it starts the next attempt at once. elsewhere: at once, without the nodes
that failed. wait: after a pause of at least five minutes. count: the attempt counts towards the crash limit. hold: the
chain stops, because the next one would most likely fail in the same way."""
FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS = 60.0, 3600.0
"""The wait after the first crash with no new checkpoint, and the longest."""
WAIT_SECONDS = 300.0
"""The first wait after a cause that passes with time, such as a file system that is gone."""
LONG_SECONDS = 600.0
"""An attempt that ran for this long is not part of a crash loop, if nobody knows whether it left a checkpoint."""


@dataclass(frozen=True)
class Attempt:
    """One attempt of a chain that has ended."""

    number: int
    """1 for the first attempt of the chain."""
    outcome: Ending
    reason: str
    """Why it ended, for people: "SIGTERM on rank 2", "exit code 1"."""
    has_saved: bool | None
    """Whether it left a new checkpoint; None if that is unknown: the program saves in its own way."""
    seconds: float = 0.0
    """How long it ran."""
    reaction: Reaction = "count"
    """What its cause asks for, if it crashed."""


@dataclass(frozen=True)
class Next:
    """Whether to start another attempt (`again`), why, and how long to wait before it. `crashes`: how many in a row
    count towards the limit."""

    again: bool
    reason: str
    delay_seconds: float = 0.0
    crashes: int = 0


def decide(
    attempts: Sequence[Attempt],
    crash_limit: int = 3,
    max_attempts: int | None = None,
    stall_limit: int | None = None,
) -> Next:
    """Decide, from all attempts so far (oldest first), whether there is another one.

    A finished attempt ends the chain. A stopped one is followed by the next. So is a crashed one, until `crash_limit`
    attempts in a row crashed without a new checkpoint: the next would crash, too. Interrupted attempts in between
    neither count nor begin a new row; nor do crashes whose reaction is "again", "elsewhere" or "wait". A crash whose
    reaction is "hold" ends the chain. After `stall_limit` attempts (None: no limit) of any kind without a new
    checkpoint the chain ends as well, because a time limit that is too short for one save would repeat forever.
    `max_attempts` (None: no limit) bounds the chain in any case.

    If nobody knows whether an attempt left a checkpoint, it counts as one without if it ran for less than
    `LONG_SECONDS`, and as one with a new checkpoint if it ran longer; but after `stall_limit` of them in a row that
    crashed the chain ends.

    After a crash without a new checkpoint the next attempt waits: a minute, and twice as long each time; after the
    reaction "wait" five minutes, and after "again" and "elsewhere" only from the second time on.

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
    if last.outcome == "crashed" and last.reaction == "hold":
        return Next(False, f"{told}; the next one would most likely fail in the same way")
    in_vain = list(takewhile(_is_in_vain, reversed(attempts)))
    counted = [
        each
        for each in in_vain
        if each.outcome != "interrupted" and (each.outcome != "crashed" or each.reaction == "count")
    ]
    crashed = list(takewhile(lambda each: each.outcome == "crashed", counted))
    if len(crashed) >= crash_limit:
        return Next(False, f"{_row(crashed)} crashed {_nothing_saved(crashed)}{_hint(crashed)}; {told}")
    if stall_limit is not None and len(in_vain) >= stall_limit:
        return Next(False, f"{_row(in_vain)} ended {_nothing_saved(in_vain)}{_hint(in_vain)}; {told}")
    unknown = list(takewhile(lambda each: each.outcome == "crashed" and each.has_saved is None, reversed(attempts)))
    if stall_limit is not None and len(unknown) >= stall_limit:
        return Next(False, f"{_row(unknown)} crashed{_hint(unknown)}; {told}")
    if max_attempts is not None and last.number >= max_attempts:
        return Next(False, f"{told}; no more than {max_attempts} attempts were allowed")
    if last.outcome != "crashed":
        return Next(True, told)
    if last.reaction != "count":
        alike = [each for each in in_vain if each.outcome == "crashed" and each.reaction == last.reaction]
        return Next(True, told, _delay(last.reaction, len(alike)))
    if crashed:
        told = f"{told} (crash {len(crashed)} of {crash_limit} {_nothing_saved(crashed)})"
    return Next(True, told, _delay("count", len(crashed)), len(crashed))


def _delay(reaction: Reaction, times: int) -> float:
    """Return the wait after so many crashes in a row that had the same reaction and left no new checkpoint."""
    if reaction == "wait":
        first, doubled = WAIT_SECONDS, max(times - 1, 0)
    else:
        first, doubled = FIRST_DELAY_SECONDS, times - (1 if reaction == "count" else 2)
    return min(first * 2**doubled, LONGEST_DELAY_SECONDS) if doubled >= 0 else 0.0


def counts_as_saved(has_saved: bool | None, seconds: float) -> bool:
    """Return whether an attempt is taken to have left a new checkpoint: by its length if nobody knows."""
    return seconds >= LONG_SECONDS if has_saved is None else has_saved


def _is_in_vain(attempt: Attempt) -> bool:
    return not counts_as_saved(attempt.has_saved, attempt.seconds)


def _row(attempts: Sequence[Attempt]) -> str:
    return "1 attempt" if len(attempts) == 1 else f"{len(attempts)} attempts in a row"


def _nothing_saved(attempts: Sequence[Attempt]) -> str:
    if all(attempt.has_saved is not None for attempt in attempts):
        return "with no new checkpoint"
    return f"within {LONG_SECONDS / 60:.0f} min"


def _hint(attempts: Sequence[Attempt]) -> str:
    is_known = all(attempt.has_saved is not None for attempt in attempts)
    return "" if is_known else ", with no known checkpoint (name yours with --progress)"
