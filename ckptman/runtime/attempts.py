"""Which numbers attempts of a run have had. None is given again: checkpoints on disk, in tiers and in memory are
compared by them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from ckptman.errors import CkptmanError
from ckptman.runtime.journal import read_journal
from ckptman.runtime.outcome import own_outcome
from ckptman.storage.catalog.rollback_records import read_rollbacks
from ckptman.storage.format.paths import journal_path

_MOST_ATTEMPTS = 10**6
"""What claims to have a higher number is damaged."""


def highest_attempt(root: Path, saved_by: Iterable[int]) -> int:
    """Return the highest number that anything of a root tells of: its journal, outcome and rollbacks, and those that
    saved its checkpoints, which may be in its tiers. 0: there was no attempt. Raises: as `read_rollbacks`; OSError."""
    numbers = list(saved_by)
    numbers += [each.attempt for each in read_rollbacks(root).values() if each.attempt is not None]
    with contextlib.suppress(CkptmanError):  # gone, or damaged: the others tell
        events = read_journal(journal_path(root))[0]
        # Not all starts are in what is read of a long journal; each event says of which attempt it is.
        numbers += [each["attempt"] for each in events if type(each.get("attempt")) is int]
        numbers.append(sum(each.get("event") == "attempt_started" for each in events))
    with contextlib.suppress(CkptmanError, OSError):
        outcome = own_outcome(root)
        numbers += [] if outcome is None else [outcome.attempt]
    return max((each for each in numbers if each < _MOST_ATTEMPTS), default=0)
