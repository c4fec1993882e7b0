"""What "finished" means for a program that exits with 0 in any case: `ckptman submit --done`."""

from __future__ import annotations

import glob
import os
import subprocess
from collections.abc import Mapping

from ckptman.policies.resubmit import Ending

DONE_SECONDS = 60.0
"""How long a command may take to say so."""


def by_done(done: str, workdir: str, environ: Mapping[str, str], ending: Ending, reason: str) -> tuple[Ending, str]:
    """Return how an attempt ended, and why, by what the user said that finished means; `done` "": as it seemed."""
    if not done:
        return ending, reason
    is_done, why = is_finished(done, workdir, environ)
    if is_done:
        return "finished", f"{reason}; {why}"
    return ("stopped" if ending == "finished" else ending), f"{reason}; {why}"


def is_finished(done: str, workdir: str, environ: Mapping[str, str]) -> tuple[bool, str]:
    """Return whether a run is finished, and why, for people.

    Args:
        done: a file or a glob pattern, relative to `workdir`, of which there is one when the run is finished; or a
            command with arguments, which exits with 0 then.
    """
    if not any(map(str.isspace, done)):
        is_there = bool(glob.glob(os.path.join(workdir, os.path.expanduser(done)), recursive=True))  # noqa: PTH111, PTH207
        return is_there, f"--done {done} is there" if is_there else f"not finished, as --done {done} is not there"
    try:
        ended = subprocess.run(
            ["/bin/bash", "-c", done],
            cwd=workdir,
            env=dict(environ),
            timeout=DONE_SECONDS,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return False, f"not finished, as --done did not answer within {DONE_SECONDS:.0f} s: {done}"
    except OSError as error:
        return False, f"not finished, as --done cannot be run ({error.strerror}): {done}"
    if ended.returncode:
        return False, f"not finished, as --done exits with {ended.returncode}: {done}"
    return True, f"--done exits with 0: {done}"
