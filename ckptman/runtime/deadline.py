"""When the allocation of this job ends."""

from __future__ import annotations

import math
import os
import subprocess
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime

SQUEUE_TIMEOUT_SECONDS = 10.0
_NO_END = {"", "N/A", "NONE", "UNKNOWN", "UNLIMITED"}


def run_command(command: Sequence[str], timeout_seconds: float | None = None) -> str:
    """Run a command that must succeed in time, and return its output. Raises: OSError, subprocess.SubprocessError."""
    # SLURM_TIME_FORMAT of the user would change what squeue prints.
    environment = {**os.environ, "SLURM_TIME_FORMAT": "standard"}
    done = subprocess.run(
        command,
        check=True,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout_seconds or SQUEUE_TIMEOUT_SECONDS,
        stdin=subprocess.DEVNULL,
        env=environment,
    )
    return done.stdout


def deadline_from_environment(
    environ: Mapping[str, str], run: Callable[[Sequence[str]], str] = run_command
) -> float | None:
    """When the Slurm job described by `environ` ends, in unix seconds; None outside a job or with no time limit.

    Taken from SLURM_JOB_END_TIME where this version of Slurm sets it (22.05 does not), else asked of `squeue` once.
    If that fails: a RuntimeWarning, and None. Called at start by the leader only: a thousand ranks that ask at once
    would hurt the controller.
    """
    with suppress(ValueError):
        given = float(environ.get("SLURM_JOB_END_TIME", ""))
        if math.isfinite(given) and given > 0:
            return given
    # The id of an array's last task is that of the whole array, and squeue would answer for every task of it.
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    job_id = f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID")
    if not job_id:
        return None
    try:
        answer = run(("squeue", "-h", "-j", job_id, "-o", "%e"))
        times = [parse_end_time(line) for line in answer.splitlines()]
    except subprocess.CalledProcessError as error:
        _warn(job_id, f"squeue failed: {(error.stderr or '').strip() or f'exit code {error.returncode}'}")
        return None
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        _warn(job_id, str(error))
        return None
    return min((each for each in times if each is not None), default=None)


def parse_end_time(text: str) -> float | None:
    """Return unix seconds of what `squeue -o %e` prints: local time such as 2026-11-21T15:03:00; None for no time.

    Raises: ValueError.
    """
    text = text.strip()
    if text.upper() in _NO_END:
        return None
    return datetime.fromisoformat(text).timestamp()


def _warn(job_id: str, why: str) -> None:
    warnings.warn(
        f"it is not known when Slurm job {job_id} ends ({why}): no save is made ahead of its time limit. "
        f"Pass deadline= (unix seconds), or set SLURM_JOB_END_TIME in the batch script",
        RuntimeWarning,
        stacklevel=3,
    )
