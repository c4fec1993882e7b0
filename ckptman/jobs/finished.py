"""What "finished" means for a program that exits with 0 in any case: `ckptman submit --done`."""

from __future__ import annotations

import glob
import os
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path

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
            command, which exits with 0 then: an executable file, or words.
    """
    path = Path(workdir, done)
    is_program = os.access(path, os.X_OK) and not path.is_dir()
    if not any(map(str.isspace, done)) and not is_program:
        pattern = os.path.join(glob.escape(workdir), done)
        is_there = bool(glob.glob(pattern, recursive=True))  # noqa: PTH207 of an absolute pattern
        return is_there, f"--done {done} is there" if is_there else f"not finished, as --done {done} is not there"
    try:
        ended = subprocess.run(
            ["/bin/bash", "-c", shlex.quote(str(path)) if is_program else done],
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
