"""What an attempt leaves behind: the end of its log, the outcome of its run, and checkpoints under its root."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptman.errors import CkptmanError, NotFoundError
from ckptman.policies.restore_choice import Choice, choose
from ckptman.policies.retention_rules import is_known_time
from ckptman.runtime.journal import read_journal, suspects_of
from ckptman.runtime.outcome import Outcome, own_outcome
from ckptman.storage.format.paths import DOT, journal_path

if TYPE_CHECKING:
    from ckptman.jobs.chain_record import AttemptRecord
    from ckptman.storage.catalog.catalog import Entry

MOST_BYTES = 8 * 1024 * 1024
"""Of a log."""
_LONGEST_LINE = 2000
_DEPTH, _MOST_FOLDERS = 6, 2000
"""How far below a folder roots are looked for."""
_CAUSES = "which env -i, apptainer --cleanenv and srun --export=NONE take away"
NO_ROOT = (
    "no attempt reported a checkpoint root. If the program saves checkpoints, pass the variables CKPTMAN_* on to its "
    "ranks: env -i, apptainer --cleanenv and srun --export=NONE drop them"
)


def logs_of_this_process() -> dict[str, Any]:
    """Return the log fields of an `AttemptRecord` for the output of this process."""
    (log, log_begin), (error_log, error_begin) = _file_of(1), _file_of(2)
    if error_log == log:
        error_log, error_begin = "", 0
    return {"log": log, "log_begin": log_begin, "error_log": error_log, "error_begin": error_begin}


def logs_of(attempt: AttemptRecord, later: Sequence[AttemptRecord] = ()) -> list[list[str]]:
    """Return the last lines that an attempt wrote, at most 8 MiB of each file; the file of its errors first.

    `later`: attempts that may have written to the same files since.
    """
    errors = [each.error_begin for each in later if each.error_log == attempt.error_log]
    output = [each.log_begin for each in later if each.log == attempt.log]
    return [
        list(_tail(attempt.error_log, attempt.error_begin, min(errors, default=None))),
        list(_tail(attempt.log, attempt.log_begin, min(output, default=None))),
    ]


def _tail(path: str, begin: int, end: int | None) -> Iterator[str]:
    with suppress(OSError, ValueError):
        if not path or not stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116 a FIFO would block
            return
        with open(path, "rb") as log:
            size = os.fstat(log.fileno()).st_size
            end = size if end is None else min(end, size)
            begin = max(begin if begin <= end else 0, end - MOST_BYTES)
            log.seek(begin)
            text = log.read(end - begin).decode(errors="replace")
        for line in text.splitlines():
            yield line[:_LONGEST_LINE]


def _file_of(descriptor: int) -> tuple[str, int]:
    """Return the file that a descriptor leads to, and its size; "" if it is not a file."""
    try:
        path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        path.encode()  # else it could not be recorded
        found = os.fstat(descriptor)
    except (OSError, UnicodeEncodeError):
        return "", 0
    return (path, found.st_size) if stat.S_ISREG(found.st_mode) else ("", 0)


def find_outcome(
    below: Path, roots: Iterable[str], since_seconds: float, returncode: int | None, job_id: str = ""
) -> Outcome | None:
    """Return what the run of an attempt has written into its root; None where that is not known for sure.

    Some launchers start the ranks with an environment of their own, without `CKPTMAN_OUTCOME`: then the chain finds no
    outcome where it looks for it.

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
