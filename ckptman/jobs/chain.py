"""How the attempts of a chain are judged, wherever they run, and what they left on disk."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from ckptman.errors import EXIT_AGAIN, EXIT_OK, NotFoundError
from ckptman.policies.resubmit import Ending
from ckptman.policies.retention_rules import is_known_time
from ckptman.runtime.outcome import Outcome

if TYPE_CHECKING:
    from ckptman.storage.catalog.catalog import Entry

CHAINS = "ckptman-chains"
"""The folder that holds chains, in the directory where they were submitted."""
Say = Callable[[str], None]


def patient(say: Say) -> Say:
    """Return the same `say`, which does not mind that nobody can hear it: after a SIGHUP the terminal is gone."""

    def tell(text: str) -> None:
        with suppress(OSError):
            say(text)

    return tell


def judge(returncode: int, outcome: Outcome | None, asked: str = "") -> tuple[Ending, str]:
    """Return how an attempt ended, and why. What it wrote wins over its exit code, which launchers and scripts swallow.

    An outcome that still says "running" was left by an attempt that was killed: exit code 0 is then no proof of an end.
    `asked`: who asked the attempt to stop, in words; "" if nobody did. Many programs save then, and exit with 0.
    """
    code = _describe(returncode)
    if asked and (outcome is None or outcome.state == "running") and returncode != EXIT_AGAIN:
        return ("stopped" if returncode == EXIT_OK else "interrupted"), f"{asked} ({code})"
    if outcome is None:
        known: dict[int, tuple[Ending, str]] = {EXIT_OK: ("finished", code), EXIT_AGAIN: ("stopped", code)}
        return known.get(returncode, ("crashed", code))
    if outcome.state == "finished" or outcome.state == "stopped":
        return outcome.state, outcome.reason
    if outcome.state == "failed":
        return "crashed", f"{outcome.reason} ({code})"
    if returncode == EXIT_AGAIN:
        return "stopped", code
    untold = f"{code}, and the run did not say that it ended"
    if returncode == EXIT_OK:
        untold += ": use the Checkpointer in a `with` block, or call close()"
    return "crashed", untold


def newest_sequence(root: str, since_seconds: float = 0.0) -> int:
    """Commit sequence of the complete checkpoint under `root` that the next attempt goes on from: the newest, or the
    newest finite one; 0 if it was not made since `since_seconds` (unix), or there is none.

    Raises: RootError.
    """
    complete = _complete(root)
    newest = next((entry for entry in reversed(complete) if not entry.spoilt), complete[-1] if complete else None)
    if newest is None or (is_known_time(newest.time_seconds) and newest.time_seconds < since_seconds):
        return 0
    return newest.sequence


def spoilt_text(root: str) -> str:
    """Say that what was saved last under `root` is not finite, so that the next attempt goes back behind it; "" where
    that is not so.

    Raises: RootError.
    """
    complete = _complete(root)
    spoilt = list(takewhile(lambda entry: entry.spoilt, reversed(complete)))
    if not spoilt or len(spoilt) == len(complete):
        return ""
    return (
        f"its checkpoints from step {spoilt[-1].step} on are not finite (NaN or infinity in {spoilt[-1].spoilt}), so "
        f"the next attempt goes back to step {complete[-len(spoilt) - 1].step}: find out what makes them so, or say "
        f'nonfinite="ignore" where that is meant'
    )


def _complete(root: str) -> list[Entry]:
    """The complete ones; behind the newest finite one nobody has looked."""
    from ckptman.storage.catalog.catalog import Catalog, is_finite

    try:
        return Catalog(root).complete(is_finite)
    except NotFoundError:
        return []


def gone_text(root: str) -> str:
    """Say that no checkpoint is left of those that attempts made under `root`: another one would start over."""
    return f"{root} held checkpoints of earlier attempts and holds none now: it was moved, deleted, or is not mounted"


def new_chain_dir(now: float) -> Path:
    """Return a name for the folder of a new chain, with the time and our process id: `20261121-150300-4711`."""
    return Path.cwd() / CHAINS / f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-{os.getpid()}"


def _describe(returncode: int) -> str:
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"
