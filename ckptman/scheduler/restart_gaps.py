"""Where the time goes between two attempts: from the end of one to the end of the next one's first step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from ckptman.errors import CkptmanError
from ckptman.format.paths import journal_path
from ckptman.runtime.journal import read_journal
from ckptman.runtime.measurements import StartUp, start_up
from ckptman.scheduler.chain_record import Chain
from ckptman.scheduler.history import root_of


@dataclass(frozen=True)
class RestartGap:
    """The pause before an attempt, in seconds; a part is None where it is not known, or not over."""

    attempt: int
    queue: float | None = None
    """From the end of the attempt before to the beginning of this one's batch script."""
    start_up: float | None = None
    """From there until its Checkpointer has begun: the launcher, imports, the process group, the model."""
    restore: float | None = None
    """Until the checkpoint was loaded."""
    first_step: float | None = None
    """Until the first step has ended."""
    total: float | None = None
    """All of it."""


def restart_gaps(chain: Chain) -> list[RestartGap]:
    """Return the pause before each attempt but the first, as far as it is known."""
    attempts, ends = chain.attempts(), chain.ends()
    root = root_of(chain)
    try:
        events, _ = read_journal(journal_path(Path(root))) if root else ([], 0)
    except (CkptmanError, OSError):
        events = []
    found = []
    begun = [attempt.begun_seconds for attempt in attempts]
    for (before, attempt), until in zip(pairwise(attempts), [*begun[2:], math.inf]):
        ended = ends[before.number].ended_seconds if before.number in ends else None
        up = start_up(events, attempt.job_id, attempt.begun_seconds, until)
        found.append(_gap(attempt.number, ended, attempt.begun_seconds, up))
    return found


def _gap(number: int, ended: float | None, begun: float, up: StartUp) -> RestartGap:
    ready = up.started_seconds if up.restored_seconds is None else up.restored_seconds
    parts = (
        _between(ended, begun),
        _between(begun, up.started_seconds),
        _between(up.started_seconds, up.restored_seconds),
        _between(ready, up.first_step_seconds),
    )
    return RestartGap(number, *parts, total=_between(ended, up.first_step_seconds))


def _between(since: float | None, until: float | None) -> float | None:
    # Two machines wrote these times: their clocks differ a little.
    return None if since is None or until is None else max(0.0, until - since)
