"""How an attempt ended and why, from everything that is known of it: Slurm, its outcome, its exit code, its log."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckptman.errors import CkptmanError, SchedulerError
from ckptman.jobs.causes import Cause, asked_by, cause_of_crash
from ckptman.jobs.slurm.commands import Job, Slurm
from ckptman.policies.resubmit import Ending
from ckptman.runtime.journal import read_journal
from ckptman.runtime.outcome import Outcome

if TYPE_CHECKING:
    from ckptman.jobs.chain_record import AttemptRecord, Chain

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
    """How an attempt ended. `reason`: one line for people."""

    ending: Ending
    reason: str
    cause: Cause | None = None


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
    if asked.line in verdict.reason:
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
