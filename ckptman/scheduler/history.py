"""What a chain has been through, and what follows from it."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from ckptman.errors import CkptmanError, CorruptError, SchedulerError
from ckptman.forecast.save_costs import warning_seconds
from ckptman.format.paths import journal_path
from ckptman.policies.intervals import seconds_text
from ckptman.policies.resubmit import Attempt, Ending, Next, decide
from ckptman.runtime.deadline import parse_end_time
from ckptman.runtime.journal import read_journal
from ckptman.runtime.measurements import save_seconds, start_up
from ckptman.runtime.outcome import Outcome, read_outcome, reported_nodes
from ckptman.scheduler.chain import gone_text, newest_sequence, spoilt_text
from ckptman.scheduler.chain_record import AttemptRecord, Chain, EndRecord, JobRecord
from ckptman.scheduler.lost_outcome import find_outcome
from ckptman.scheduler.slurm.commands import Job, Slurm

AVOIDED_SECONDS = 86_400.0
"""A node is left out for so long after it was found bad: by then somebody has repaired it, or Slurm knows."""
_FROM_OUTSIDE = {
    "TIMEOUT": "the time limit",
    "PREEMPTED": "preempted",
    "CANCELLED": "cancelled",
    "NODE_FAIL": "a node failed",
    "BOOT_FAIL": "a node did not start",
    "DEADLINE": "its deadline",
    "REVOKED": "revoked",
}


@dataclass(frozen=True)
class RestartGap:
    """The pause before an attempt, in seconds; a part is None where it is not known, or not over."""

    attempt: int
    queue: float | None = None
    """From the end of the attempt before to the beginning of this one's batch script."""
    start_up: float | None = None
    """From there until its Checkpointer has begun: the launcher, imports, the process group, the model."""
    restore: float | None = None
    """Until the checkpoint was loaded."""
    first_step: float | None = None
    """Until the first step has ended."""
    total: float | None = None
    """All of it."""


def settle(chain: Chain, slurm: Slurm, running_id: str, now: float) -> AttemptRecord | None:
    """Note how the attempts ended that could not do so themselves, because they were killed.

    Called when the next one begins: as a rule Slurm starts it only after the one before is over. Returns an attempt
    that runs all the same. Raises: OSError.
    """
    ends = chain.ends()
    open_ones = [attempt for attempt in chain.attempts() if attempt.number not in ends]
    if not open_ones:
        return None
    known: dict[str, Job] | None = None
    try:
        known = slurm.jobs(sorted({each.job_id for each in open_ones if each.job_id != running_id}))
    except SchedulerError as error:
        chain.events.record("jobs not known", why=str(error))
    for attempt in open_ones:
        job = known.get(attempt.job_id) if known else None
        if job is not None and job.runs:
            return attempt
        outcome = outcome_of(chain, attempt)
        ending: Ending
        if outcome is not None and (outcome.state == "finished" or outcome.state == "stopped"):
            ending, reason = outcome.state, outcome.reason
        elif attempt.job_id == running_id:
            ending, reason = "interrupted", "the job was requeued"
        elif known is None:
            ending, reason = "interrupted", "killed, and Slurm could not be asked by whom"
        elif job is None:
            ending, reason = "crashed", "killed, and nobody knows by whom: Slurm has forgotten the job"
        elif job.state in _FROM_OUTSIDE:
            ending, reason = "interrupted", _FROM_OUTSIDE[job.state]
        else:
            ending, reason = "crashed", f"killed ({job.told})"
        ended = _time(job.ends, now) if job is not None and job.over else now
        note_end(chain, attempt, slurm, outcome, ending, reason, ended)
    return None


def outcome_of(chain: Chain, attempt: AttemptRecord, returncode: int | None = None) -> Outcome | None:
    """Return what an attempt said of its end, to its chain or in its root; None: nothing that can be read."""
    try:
        outcome = read_outcome(chain.outcome_path(attempt.number))
    except CorruptError as error:
        chain.events.record("outcome not known", attempt=attempt.number, why=str(error))
        return None
    if outcome is None:
        roots = [end.root for end in chain.ends().values()]
        below = Path(chain.spec.workdir)
        outcome = find_outcome(below, reversed(roots), attempt.begun_seconds, returncode, attempt.job_id)
    return outcome


def note_end(
    chain: Chain,
    attempt: AttemptRecord,
    slurm: Slurm,
    outcome: Outcome | None,
    ending: Ending,
    reason: str,
    now: float,
    returncode: int | None = None,
) -> None:
    """Note how an attempt ended, with what it left on disk and which of its nodes are bad.

    `returncode`: None where it is noted by a later attempt, because this one was killed.
    """
    root = outcome.root if outcome else ""
    sequence, committed = _left_under(chain, root)
    with suppress(CkptmanError, OSError):
        if root and ending != "finished" and (spoilt := spoilt_text(root)):
            reason = f"{reason}; {spoilt}"
    record = EndRecord(
        number=attempt.number,
        ending=ending,
        reason=reason,
        returncode=returncode,
        root=root,
        step=outcome.step if outcome else 0,
        sequence=sequence,
        committed=committed,
        ended_seconds=now,
        bad_nodes=_bad_nodes(chain, attempt, ending, slurm),
        save_seconds=save_seconds(root) if root else None,
    )
    chain.end(record)
    event = "found ended" if returncode is None else "end"
    chain.events.record(event, sync=True, attempt=attempt.number, ending=ending, reason=reason)


def following(chain: Chain, now: float) -> Next:
    """Return whether there is another attempt, by the limits of the chain and all that have ended."""
    spec, ends, forgiven = chain.spec, chain.ends(), chain.state.forgiven
    attempts, count, before = [], 0, 0
    for number, end in ends.items():
        count += end.committed
        if number > forgiven:
            attempts.append(Attempt(number, end.ending, end.reason, count))
        else:
            before = count
    decision = decide(attempts, spec.crash_limit, spec.max_attempts, before, spec.stall_limit)
    if not decision.again:
        return decision
    if spec.until_seconds is not None and now >= spec.until_seconds:
        return Next(False, f"{decision.reason}; the date until which it was to go on is past")
    begun = {each.number: each.begun_seconds for each in chain.attempts()}
    used = sum(max(0.0, end.ended_seconds - begun[n]) for n, end in ends.items() if n in begun)
    if spec.max_walltime_seconds is not None and used >= spec.max_walltime_seconds:
        return Next(False, f"{decision.reason}; {used / 3600:.1f} h were used, and no more were allowed")
    return decision


def lost(chain: Chain) -> str | None:
    """Say that the checkpoints of the run have gone, in words: the next attempt would start over. None: all is well.

    A root that cannot be read has not gone: the attempt says what is wrong with it.
    """
    root = root_of(chain)
    held = [end.number for end in chain.ends().values() if end.root == root and end.sequence > 0]
    if not held or max(held) <= chain.state.given_up:
        return None
    try:
        return None if newest_sequence(root) else gone_text(root)
    except (CkptmanError, OSError):
        return None


def avoided(chain: Chain, now: float) -> dict[str, str]:
    """Return the nodes that were found bad in the last day, which the next attempt had better not run on, and why."""
    recent = [end for end in chain.ends().values() if now - end.ended_seconds < AVOIDED_SECONDS]
    nodes: dict[str, str] = {}
    for end in sorted(recent, key=lambda end: end.ended_seconds):
        nodes |= end.bad_nodes
    return dict(sorted(nodes.items()))


def root_of(chain: Chain) -> str:
    """Return the checkpoint root that the last attempt named which named one; "" where none did."""
    return next((end.root for end in reversed(chain.ends().values()) if end.root), "")


def measured_save_seconds(chain: Chain) -> float | None:
    """Return what a save took, as the last attempt knew that knew it."""
    return next((end.save_seconds for end in reversed(chain.ends().values()) if end.save_seconds is not None), None)


def warned_too_late(chain: Chain) -> str:
    """Say that the user's own --signal comes too late for a save, in words; "" where it does not, or nobody
    knows."""
    own, save = chain.spec.warned_seconds, measured_save_seconds(chain)
    if own is None or save is None or own >= (needed := warning_seconds(save)):
        return ""
    return (
        f"--signal warns {own} s before the end, and a save takes {seconds_text(save)}: give {needed} s, as in "
        f"--signal=B:USR2@{needed}"
    )


def job_number_after(chain: Chain, number: int) -> JobRecord | None:
    """Return the job of a chain that comes after another."""
    return next((each for each in chain.jobs() if each.number == number + 1), None)


def restart_gaps(chain: Chain) -> list[RestartGap]:
    """Return where the time went from the end of each attempt to the end of the next one's first step."""
    attempts, ends, root = chain.attempts(), chain.ends(), root_of(chain)
    try:
        events, _ = read_journal(journal_path(Path(root))) if root else ([], 0)
    except (CkptmanError, OSError):
        events = []
    found = []
    begun = [attempt.begun_seconds for attempt in attempts]
    for (before, attempt), until in zip(pairwise(attempts), [*begun[2:], math.inf]):
        ended = ends[before.number].ended_seconds if before.number in ends else None
        up = start_up(events, attempt.job_id, attempt.begun_seconds, until)
        gap = RestartGap(
            attempt.number,
            queue=_between(ended, attempt.begun_seconds),
            start_up=_between(attempt.begun_seconds, up.started_seconds),
            restore=_between(up.started_seconds, up.restored_seconds),
            first_step=_between(up.restored_seconds or up.started_seconds, up.first_step_seconds),
            total=_between(ended, up.first_step_seconds),
        )
        found.append(gap)
    return found


def _between(since: float | None, until: float | None) -> float | None:
    # Two machines wrote these times: their clocks differ a little.
    return None if since is None or until is None else max(0.0, until - since)


def _left_under(chain: Chain, root: str) -> tuple[int, bool]:
    """Return the newest commit sequence under a root, and whether it is a new one since the attempts before."""
    known = [end.sequence for end in chain.ends().values() if end.root == root]
    try:
        sequence = newest_sequence(root) if root else 0
        if known:
            return sequence, sequence not in (0, known[-1])
        return sequence, bool(root and newest_sequence(root, chain.spec.created_seconds))
    except (CkptmanError, OSError):
        return known[-1] if known else 0, False


def _bad_nodes(chain: Chain, attempt: AttemptRecord, ending: Ending, slurm: Slurm) -> dict[str, str]:
    """Return the nodes of an attempt that Slurm says are down, after a bad ending, or that the attempt itself reported.

    None where those are more than half of its nodes: then something else is wrong.
    """
    found: dict[str, str] = {}
    try:
        reported = reported_nodes(chain.outcome_path(attempt.number))
        if ending in ("crashed", "interrupted"):
            found = slurm.bad_nodes(attempt.nodes)
        if not found and not reported:
            return {}
        own = slurm.names_of(attempt.nodes)
        found = {node: why for node, why in {**found, **reported}.items() if node in own}
    except (SchedulerError, OSError) as error:
        chain.events.record("nodes not known", attempt=attempt.number, why=str(error))
        return {}
    if len(found) > max(1, len(own) // 2):
        chain.events.record("too many bad nodes", attempt=attempt.number, nodes=found)
        return {}
    return found


def _time(text: str, otherwise: float) -> float:
    try:
        found = parse_end_time(text)
    except ValueError:
        found = None
    return otherwise if found is None else min(found, otherwise)
