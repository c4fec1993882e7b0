"""The outcome of a run that did not know where its chain looks for it: some launchers start the ranks with an
environment of their own, without `CKPTMAN_OUTCOME`. Its root has it, too."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptman.errors import CkptmanError
from ckptman.runtime.journal import read_journal
from ckptman.runtime.outcome import Outcome, own_outcome
from ckptman.storage.format.paths import DOT, journal_path

_DEPTH, _MOST_FOLDERS = 6, 2000
_CAUSES = "which env -i, apptainer --cleanenv and srun --export=NONE take away"
NO_ROOT = (
    "no attempt reported a checkpoint root. If the program saves checkpoints, pass the variables CKPTMAN_* on to its "
    "ranks: env -i, apptainer --cleanenv and srun --export=NONE drop them"
)


def find_outcome(
    below: Path, roots: Iterable[str], since_seconds: float, returncode: int | None, job_id: str = ""
) -> Outcome | None:
    """Return what the run of an attempt has written into its root; None where that is not known for sure.

    Args:
        below: the folder in which the chain was submitted, in which roots are looked for.
        roots: those that earlier attempts had, which are looked at first.
        since_seconds: when the attempt began, in unix seconds.
        returncode: the exit code of the attempt; None: it was killed. One that is over with 0 has nothing that runs,
            and one that is over with another has not finished.
        job_id: its job, if a scheduler has given it one.
    """
    known = [each for each in dict.fromkeys(roots) if each]
    for places in (map(Path, known), _roots_below(below)):
        found = [outcome for root in places if (outcome := _fresh(root, since_seconds, job_id)) is not None]
        if len(found) == 1:
            if found[0].state == ("running" if returncode == 0 else "finished") and returncode is not None:
                return None
            told = f"as its root says: the ranks had no CKPTMAN_OUTCOME, {_CAUSES}"
            return replace(found[0], reason=f"{found[0].reason} ({told})")
    return None


def _fresh(root: Path, since_seconds: float, job_id: str) -> Outcome | None:
    """Return the outcome in a root, if it may be that of an attempt: of a run that began and ended since then, and is
    of no other chain or job."""
    from ckptman.storage.catalog.liveness import process_lives
    from ckptman.storage.catalog.writer_lock import read_owner  # pydantic, which a chain does without

    with suppress(CkptmanError, OSError):
        outcome = own_outcome(root)
        if outcome is None or outcome.time_seconds <= since_seconds:
            return None
        starts = [each for each in read_journal(journal_path(root))[0] if each.get("event") == "attempt_started"]
        last: dict[str, Any] = starts[-1] if starts else {"time": outcome.time_seconds}
        is_of_other = bool(last.get("chain")) or (job_id and last.get("job_id") not in (None, job_id))
        if is_of_other or last["time"] <= since_seconds:
            return None
        owner = read_owner(root)
        return None if owner is not None and process_lives(owner) else outcome
    return None


def _roots_below(folder: Path) -> Iterator[Path]:
    """Yield the roots in a folder and some levels below it; of a large tree, those that are met first."""
    level, looked = [folder], 0
    for _ in range(_DEPTH + 1):
        below: list[Path] = []
        for each in level:
            looked += 1
            if looked > _MOST_FOLDERS:
                return
            if os.path.isdir(each / DOT):  # noqa: PTH112 Path.is_dir() raises where it may not look
                yield each
                continue
            with suppress(OSError), os.scandir(each) as items:
                below += [Path(item.path) for item in items if item.is_dir(follow_symlinks=False)]
        level = below
