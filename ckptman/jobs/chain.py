"""How the attempts of a chain are judged, wherever they run, and what they left on disk."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ckptman.errors import EXIT_AGAIN, EXIT_OK, NotFoundError
from ckptman.policies.restore_choice import Choice, choose
from ckptman.policies.resubmit import Ending
from ckptman.policies.retention_rules import is_known_time
from ckptman.runtime.journal import suspects_of
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
    """Commit sequence of the newest checkpoint under `root` that counts as progress: complete, and finite if there is
    a finite one; 0 if it was not made since `since_seconds` (unix), or there is none.

    Raises: RootError.
    """
    choice = _choice(root, {})
    if not choice.tried:
        return 0
    newest = choice.tried[0]
    return 0 if is_known_time(newest.time_seconds) and newest.time_seconds < since_seconds else newest.sequence


def passed_over_text(root: str) -> str:
    """Say why the next attempt goes back behind the newest checkpoint under `root`; "" if it does not.

    Raises: OSError.
    """
    suspects = suspects_of(root)
    choice = _choice(root, suspects)
    if choice.only_suspects:
        step = choice.suspects[0].step
        return f"step {step} is all there is to restore, and {suspects[step]}"
    if not choice.tried:
        return ""
    to, reasons = f"the next attempt goes back to step {choice.tried[0].step}", []
    if choice.nonfinite:
        first = choice.nonfinite[-1]
        reasons = [
            f"its checkpoints from step {first.step} on are not finite (NaN or infinity in {first.nonfinite_reason}), "
            f'so {to}: find out what makes them so, or say nonfinite="ignore" where that is meant'
        ]
    reasons += [f"step {entry.step}: {suspects[entry.step]}, so {to}" for entry in choice.suspects]
    return "; ".join(reasons)


def _choice(root: str, suspects: Mapping[int, str]) -> Choice[Entry]:
    """What a restore does with the checkpoints under `root`. Behind the first it would take, nobody has looked."""
    from ckptman.storage.catalog.catalog import Catalog

    try:
        found = Catalog(root).scan(until=lambda entry: not entry.nonfinite_reason and entry.step not in suspects)
    except NotFoundError:
        found = []
    return choose(reversed(found), suspects)


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
