"""How an attempt ended and why, from everything that is known of it: Slurm, its outcome, its exit code, its log."""

from __future__ import annotations

import glob
import math
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckptman.errors import EXIT_AGAIN, EXIT_OK, CkptmanError, SchedulerError
from ckptman.jobs.causes import Cause, asked_by, cause_of_crash
from ckptman.jobs.slurm.commands import Job, Slurm
from ckptman.policies.resubmit import Ending
from ckptman.runtime.journal import read_journal
from ckptman.runtime.outcome import Outcome

if TYPE_CHECKING:
    from ckptman.jobs.chain_record import AttemptRecord, Chain

DONE_SECONDS = 60.0
"""How long a command may take to tell whether a run is finished."""
_NEAR_SECONDS = 120.0
_FROM_OUTSIDE = {
    "TIMEOUT": ("time-limit", "the time limit"),
    "PREEMPTED": ("preempted", "preempted"),
    "CANCELLED": ("cancelled", "cancelled"),
    "NODE_FAIL": ("node", "a node failed"),
    "BOOT_FAIL": ("node", "a node did not start"),
    "DEADLINE": ("time-limit", "its deadline"),
    "REVOKED": ("cancelled", "revoked"),
}
_LOSSES = ("peer", "signal", "nccl", "exit")
_SIGNAL = re.compile(r"\bSIG[A-Z]+[0-9]*\b")


@dataclass(frozen=True)
class Verdict:
    """How an attempt ended. `reason`: one line for people. `down`: its nodes that are down, and what Slurm knows of
    them; None if it was not asked."""

    ending: Ending
    reason: str
    cause: Cause | None = None
    down: Mapping[str, str] | None = None


def judge(
    returncode: int,
    outcome: Outcome | None,
    logs: Sequence[Sequence[str]],
    asked: Cause | None,
    find_down: Callable[[], Mapping[str, str]] = dict,
) -> Verdict:
    """Return how an attempt ended whose script has ended. What the run wrote wins over the exit code, which launchers
    and scripts swallow.

    Args:
        returncode: the exit code of the script; -n if signal n killed it.
        outcome: what the run reported. If it still says "running", the run was killed: exit code 0 is then no proof of
            an end.
        logs: the ends of its logs.
        asked: why it was asked to stop, if it was. Many programs save then, and exit with 0.
        find_down: asks for the nodes that are down.
    """
    code = _describe(returncode)
    if outcome is None or outcome.state == "running":
        verdict = _by_code(returncode, code, asked, has_begun=outcome is not None)
    elif outcome.state == "failed":
        verdict = Verdict("crashed", f"{outcome.reason} ({code})")
    else:
        verdict = explained(Verdict(outcome.state, outcome.reason), asked)
    if verdict.ending not in ("crashed", "interrupted"):
        return verdict
    down = find_down()
    if verdict.ending == "crashed":
        verdict = crashed(outcome, verdict.reason, logs, down, asked)
    return replace(verdict, down=down)


def _by_code(returncode: int, code: str, asked: Cause | None, *, has_begun: bool) -> Verdict:
    """Return how an attempt ended that did not report it. `has_begun`: its run reported that it runs."""
    if returncode == EXIT_AGAIN:
        return Verdict("stopped", code, asked)
    if asked is not None:
        return Verdict("stopped" if returncode == EXIT_OK else "interrupted", f"{asked.line} ({code})", asked)
    if not has_begun:
        return Verdict("finished" if returncode == EXIT_OK else "crashed", code)
    hint = ": use the Checkpointer in a `with` block, or call close()" if returncode == EXIT_OK else ""
    return Verdict("crashed", f"{code}, and the run did not say that it ended{hint}")


def _describe(returncode: int) -> str:
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"


def by_done(verdict: Verdict, outcome: Outcome | None, done: str, workdir: str, environ: Mapping[str, str]) -> Verdict:
    """Return how an attempt ended by what the user said that finished means. What its run reported wins."""
    if not done or (outcome is not None and outcome.state != "running"):
        return verdict
    is_done, why = is_finished(done, workdir, environ)
    ending: Ending = "stopped" if verdict.ending == "finished" else verdict.ending
    return replace(verdict, ending="finished" if is_done else ending, reason=f"{verdict.reason}; {why}")


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


def interrupted(cause: Cause) -> Verdict:
    return Verdict("interrupted", cause.line, cause)


def crashed(
    outcome: Outcome | None,
    code: str,
    logs: Sequence[Sequence[str]],
    down: Mapping[str, str],
    asked: Cause | None = None,
) -> Verdict:
    """Return why an attempt crashed.

    A crash because of a node is an interruption: the run is not to blame. So is the loss of a rank after the attempt
    was asked to stop.

    Args:
        outcome: what the run reported.
        code: how its script ended, in words.
        logs: the ends of its logs.
        down: its nodes that are down, and what Slurm knows of them.
        asked: why it was asked to stop, if it was.
    """
    reported = outcome.reason if outcome is not None and outcome.state == "failed" else ""
    cause = cause_of_crash(reported, logs, code)
    if down:
        echo = "the other ranks lost it" if cause.name == "peer" else cause.line
        told = f"node failure: {', '.join(down)}; {echo}"
        return interrupted(replace(cause, name="node", line=told, reaction="elsewhere"))
    if cause.name == "node":
        return interrupted(cause)
    if asked is not None and cause.name in _LOSSES:
        return interrupted(asked)
    return Verdict("crashed", cause.line, cause)


def explained(verdict: Verdict, asked: Cause | None) -> Verdict:
    """Return the verdict of an attempt that stopped because of a signal, with the reason that Slurm had to send it."""
    if asked is None or verdict.ending == "finished" or not _SIGNAL.search(verdict.reason):
        return verdict
    if asked.name == "asked" or asked.line in verdict.reason:
        return replace(verdict, cause=asked)
    return Verdict(verdict.ending, f"{asked.line} ({verdict.reason})", asked)


def by_state(job: Job) -> Cause | None:
    """Return why Slurm ended a job, from its state; None if Slurm did not end it, or does not say why."""
    name, line = _FROM_OUTSIDE.get(job.state, ("", ""))
    if not name and job.state == "COMPLETING":
        name, line = {
            "TimeLimit": ("time-limit", "the time limit"),
            "Preempted": ("preempted", "preempted"),
        }.get(job.reason, ("", ""))
    return Cause(name, line, (f"Slurm: {job.told}",), "again") if name else None


def why_killed(chain: Chain, attempt: AttemptRecord, logs: Sequence[Sequence[str]]) -> Cause:
    """Return why an attempt was killed that nobody saw end, and whose job the queue no longer shows."""
    from ckptman.jobs.slurm.accounting import ask_accounting  # pydantic

    if (asked := asked_by(logs, attempt.job_id)) is not None:
        return asked
    starts = [each for each in ask_accounting([attempt.job_id])[0] if each.begun is not None and each.reason]
    own = [each for each in starts if (each.begun or 0.0) <= attempt.begun_seconds + 60.0]  # a requeued job has several
    if own:
        state = max(own, key=lambda each: each.begun or 0.0).reason.upper().split()[0]
        if state in _FROM_OUTSIDE:
            name, line = _FROM_OUTSIDE[state]
            return Cause(name, line, (f"sacct: {state}",), "again")
        if state in ("OUT_OF_MEMORY", "FAILED"):
            return cause_of_crash("", [*logs, [state]], f"killed ({state})")
    if (logged := cause_of_crash("", logs, "")).name in ("host-oom", "node", "ecc"):
        return logged
    limit = chain.spec.limit_seconds
    last = chain.last_sign(attempt, math.inf) + _NEAR_SECONDS
    if limit is not None and last >= attempt.begun_seconds + limit:
        return Cause("time-limit", "the time limit", ("its last sign of life was near the time limit",), "again")
    with suppress(CkptmanError, OSError):
        events, _ = read_journal(chain.events.path)
        asked_at = [each for each in events if each["time"] >= attempt.begun_seconds and each.get("event") == "signal"]
        if asked_at:
            line = f"killed after {asked_at[-1].get('signal')} from Slurm"
            return Cause("asked", line, (f"events.jsonl: {asked_at[-1].get('signal')}",), "again")
    return Cause("unknown", "killed; the cause is unknown", (), "again")


def why_requeued(attempt: AttemptRecord, slurm: Slurm, logs: Sequence[Sequence[str]]) -> Cause:
    """Return why Slurm requeued the job of an attempt."""
    with suppress(SchedulerError):
        if down := slurm.bad_nodes(attempt.nodes):
            line = f"node failure: {', '.join(down)}; Slurm requeued the job"
            return Cause("node", line, tuple(f"Slurm: {node} {why}" for node, why in down.items()), "elsewhere")
    asked = asked_by(logs, attempt.job_id)
    if asked is not None and asked.name != "requeued":
        return replace(asked, line=f"{asked.line}; Slurm requeued the job")
    return Cause("requeued", "the job was requeued", asked.evidence if asked else (), "again")
