"""What a chain has been through, and what follows from it."""

from __future__ import annotations

from ckptman.errors import CkptmanError, CorruptError, SchedulerError
from ckptman.lifecycle.deadline import parse_end_time
from ckptman.lifecycle.nodes import reported_nodes
from ckptman.lifecycle.outcome import read_outcome
from ckptman.monitor.measured import save_seconds
from ckptman.policy.avoidance import Found, nodes_to_avoid
from ckptman.policy.resubmit import Attempt, Next, decide
from ckptman.policy.timing import seconds_text
from ckptman.policy.warning import warning_seconds
from ckptman.scheduler.chain import gone_text, newest_sequence
from ckptman.scheduler.record import AttemptRecord, Chain, Ending, EndRecord, JobRecord
from ckptman.scheduler.slurm import Job, Slurm

_FROM_OUTSIDE = {
    "TIMEOUT": "the time limit",
    "PREEMPTED": "preempted",
    "CANCELLED": "cancelled",
    "NODE_FAIL": "a node failed",
    "BOOT_FAIL": "a node did not start",
    "DEADLINE": "its deadline",
    "REVOKED": "revoked",
}


def settle(chain: Chain, slurm: Slurm, running_id: str, now: float) -> None:
    """Note how the attempts ended that could not do so themselves, because they were killed.

    Called when the next one begins: Slurm starts it only after the one before is over. Raises: SchedulerError, OSError.
    """
    ends = chain.ends()
    open_ones = [attempt for attempt in chain.attempts() if attempt.number not in ends]
    if not open_ones:
        return
    known = slurm.jobs(sorted({each.job_id for each in open_ones if each.job_id != running_id}))
    for attempt in open_ones:
        record = _end_of(chain, attempt, known.get(attempt.job_id), attempt.job_id == running_id, now)
        record = record.model_copy(update={"bad_nodes": bad_nodes(chain, attempt, record.ending, slurm)})
        chain.end(record)
        chain.events.record(
            "found ended", sync=True, attempt=attempt.number, ending=record.ending, reason=record.reason
        )


def following(chain: Chain, now: float) -> Next:
    """Whether there is another attempt, by the limits of the chain and all that have ended."""
    spec, ends, forgiven = chain.spec, chain.ends(), chain.state.forgiven
    attempts = [Attempt(n, end.ending, end.reason, end.sequence) for n, end in sorted(ends.items()) if n > forgiven]
    before = max((end.sequence for n, end in ends.items() if n <= forgiven), default=0)
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


def bad_nodes(chain: Chain, attempt: AttemptRecord, ending: Ending, slurm: Slurm) -> dict[str, str]:
    """The nodes of an attempt that Slurm says are down, after a bad ending, or that the attempt itself reported."""
    found: dict[str, str] = {}
    try:
        if ending in ("crashed", "interrupted"):
            found = slurm.bad_nodes(attempt.nodes)
        if reported := reported_nodes(chain.outcome_path(attempt.number)):
            own = slurm.names_of(attempt.nodes)
            found |= {node: why for node, why in reported.items() if node in own}
    except (SchedulerError, OSError) as error:
        chain.events.record("nodes not known", attempt=attempt.number, why=str(error))
    return found


def avoided(chain: Chain, now: float) -> dict[str, str]:
    """The nodes that the next attempt had better not run on, and why."""
    return nodes_to_avoid([Found(end.bad_nodes, end.ended_seconds) for end in chain.ends().values()], now)


def root_of(chain: Chain) -> str:
    """The checkpoint root that the last attempt named which named one; "" where none did."""
    return next((end.root for _, end in sorted(chain.ends().items(), reverse=True) if end.root), "")


def measured_save_seconds(chain: Chain) -> float | None:
    """What a save took, as the run of this chain measured it."""
    root = root_of(chain)
    return save_seconds(root) if root else None


def warned_too_late(chain: Chain) -> str:
    """That the user's own --signal comes too late for a save, in words; "" where it does not, or nobody knows."""
    own, save = chain.spec.warned_seconds, measured_save_seconds(chain)
    if own is None or save is None or own >= (needed := warning_seconds(save)):
        return ""
    return (
        f"--signal warns {own} s before the end, and a save takes {seconds_text(save)}: give {needed} s, as in "
        f"--signal=B:USR2@{needed}"
    )


def lost(chain: Chain) -> str | None:
    """That the checkpoints of the run have gone, in words: the next attempt would start over. None: all is well.

    A root that cannot be looked at has not gone: the attempt says what is wrong with it.
    """
    root = root_of(chain)
    known = [end for end in chain.ends().values() if end.root == root and end.sequence > 0]
    if not known or chain.state.forgiven >= max(end.number for end in known):
        return None
    try:
        if newest_sequence(root):
            return None
    except (CkptmanError, OSError):
        return None
    return gone_text(root)


def job_number_after(chain: Chain, number: int) -> JobRecord | None:
    """The job of a chain that comes after another."""
    return next((each for each in chain.jobs() if each.number == number + 1), None)


def _end_of(chain: Chain, attempt: AttemptRecord, job: Job | None, requeued: bool, now: float) -> EndRecord:
    try:
        outcome = read_outcome(chain.outcome_path(attempt.number))
    except CorruptError:
        outcome = None
    ending: Ending = "crashed"
    reason = "killed, and nobody knows by whom: Slurm has forgotten the job"
    if outcome is not None and outcome.state == "finished":
        ending, reason = "finished", outcome.reason
    elif outcome is not None and outcome.state == "stopped":
        ending, reason = "stopped", outcome.reason
    elif requeued:
        ending, reason = "interrupted", "the job was requeued"
    elif job is not None and job.state in _FROM_OUTSIDE:
        ending, reason = "interrupted", _FROM_OUTSIDE[job.state]
    elif job is not None:
        reason = f"killed ({job.state}{f', {job.reason}' if job.reason not in ('', 'None') else ''})"
    if job is not None and job.over and not requeued:
        now = _time(job.ends, now)
    root = outcome.root if outcome else ""
    sequence = attempt.sequence_before
    if root:
        try:
            sequence = max(sequence, newest_sequence(root, chain.spec.created_seconds))
        except (CkptmanError, OSError):
            pass
    return EndRecord(
        number=attempt.number,
        ending=ending,
        reason=reason,
        returncode=None,
        root=root,
        step=outcome.step if outcome else 0,
        sequence=sequence,
        ended_seconds=now,
    )


def _time(text: str, otherwise: float) -> float:
    try:
        found = parse_end_time(text)
    except ValueError:
        found = None
    return otherwise if found is None else min(found, otherwise)
