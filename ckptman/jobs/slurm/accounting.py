"""When the jobs of a run were submitted, began and ended: by the records of a chain, and by Slurm's accounting."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckptman.errors import CkptmanError
from ckptman.jobs.chain_record import SPEC, Chain
from ckptman.jobs.slurm.commands import call

_SACCT = ("sacct", "--noheader", "--parsable2", "--allocations", "--duplicates", "--format")
_FIELDS = "JobIDRaw,Submit,Start,End,State"
_LONGEST_END = 1800.0
"""Seconds. A later sign of life of an attempt is the copy of its record."""
_MOST_IDS = 500
"""In one question."""


@dataclass(frozen=True)
class JobTimes:
    """One start of a job; a job that was requeued has several. Times in unix seconds; None: not known, or not yet.

    `ending`, `reason`: how its attempt ended, as the chain says (finished, stopped, crashed, interrupted), or Slurm.
    `attempt`, `chain`: its number in the chain, and the folder of that; 0 and "" where there is none. `root`: that of
    its run, where it said so.
    """

    job_id: str
    submitted: float | None = None
    begun: float | None = None
    ended: float | None = None
    ending: str = ""
    reason: str = ""
    attempt: int = 0
    chain: str = ""
    root: str = ""


def jobs_of_chains(folders: Iterable[Path]) -> tuple[list[JobTimes], list[str]]:
    """Return the jobs of some chains, oldest first, and what could not be read of them."""
    found: list[JobTimes] = []
    notes: list[str] = []
    for folder in folders:
        if not (folder / SPEC).is_file():
            notes.append(f"the records of its chain are gone ({folder}): when its jobs waited is not known")
            continue
        try:
            found += _jobs_of(Chain(folder))
        except (CkptmanError, OSError) as error:
            notes.append(f"the records of its chain cannot be read: {error}")
    return found, notes


def _jobs_of(chain: Chain) -> list[JobTimes]:
    submitted = {job.job_id: job.time_seconds for job in chain.jobs()}
    ends, is_local = chain.ends(), chain.spec.scheduler == "local"
    found = []
    attempts = chain.attempts()
    following = [*(each.begun_seconds for each in attempts[1:]), math.inf]
    for attempt, bound in zip(attempts, following):
        end = ends.get(attempt.number)
        ended = end.ended_seconds if end else None
        if end is not None and end.returncode is not None:
            # Its batch script stayed for a while, as when the controller was away.
            left = min(chain.last_sign(attempt, math.inf), bound)
            ended = left if end.ended_seconds < left < end.ended_seconds + _LONGEST_END else ended
        # A job that is requeued was in the queue again since its attempt before ended; without Slurm there is none.
        waited_since = submitted.get(attempt.job_id) if attempt.restart == 0 else None
        found.append(
            JobTimes(
                "" if is_local else attempt.job_id,
                attempt.begun_seconds if is_local else waited_since,
                attempt.begun_seconds,
                ended,
                end.ending if end else "",
                end.reason if end else "",
                attempt.number,
                str(chain.folder),
                end.root if end else "",
            )
        )
    return found


def ask_accounting(ids: Collection[str]) -> tuple[list[JobTimes], str]:
    """Return what Slurm's accounting knows of jobs, one entry for each start, and why not if it does not answer.

    Nothing, and no reason, where there is none to ask.
    """
    wanted, found = sorted(each for each in ids if each.isdigit()), list[JobTimes]()
    if not wanted or shutil.which(_SACCT[0]) is None:
        return [], ""
    # As seconds since 1970: a time of day says nothing of its zone.
    environ = {**os.environ, "SLURM_TIME_FORMAT": "%s"}
    for place in range(0, len(wanted), _MOST_IDS):
        command = (*_SACCT, _FIELDS, "--jobs", ",".join(wanted[place : place + _MOST_IDS]))
        answer = call(command, environ, None)
        if answer.code != 0:
            return found, "" if "accounting storage is disabled" in answer.said.lower() else answer.said
        found += parse_accounting(answer.out)
    return found, ""


def parse_accounting(text: str) -> list[JobTimes]:
    """Return the jobs in what `sacct` prints, with times in unix seconds."""
    found = []
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) < 5 or not fields[0].isdigit():
            continue
        job_id, submitted, begun, ended, state = fields[:5]
        found.append(JobTimes(job_id, _seconds(submitted), _seconds(begun), _seconds(ended), reason=state.lower()))
    return found


def merge(chain: Sequence[JobTimes], slurm: Sequence[JobTimes]) -> list[JobTimes]:
    """Return the jobs of both, with the times of Slurm where it has them: it saw a job begin before its script did, and
    end when nobody else could tell."""
    merged = []
    left = list(slurm)
    for job in chain:
        # The same start of a job: that of Slurm begins at most a minute before the script.
        same = next((each for each in left if _is_same(each, job)), None)
        if same is not None:
            left.remove(same)
            job = replace(
                job, submitted=same.submitted or job.submitted, begun=same.begun, ended=same.ended or job.ended
            )
        merged.append(job)
    merged += [each for each in left if each.begun is not None]
    return sorted(merged, key=lambda job: job.begun or 0.0)


def _is_same(slurm: JobTimes, chain: JobTimes) -> bool:
    if slurm.job_id != chain.job_id or slurm.begun is None or chain.begun is None:
        return False
    return slurm.begun - 2 <= chain.begun and (slurm.ended is None or chain.begun <= slurm.ended + 2)


def _seconds(written: str) -> float | None:
    return float(written) if written.isdigit() and int(written) > 0 else None
