"""What a chain has been through, and what follows from it."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from ckptman.errors import CkptmanError, CorruptError, SchedulerError
from ckptman.forecast.save_costs import warning_seconds
from ckptman.jobs.attempt_log import logs_of
from ckptman.jobs.causes import CRASHES, Cause, asked_by, with_reaction
from ckptman.jobs.chain import gone_text, newest_sequence, passed_over_text
from ckptman.jobs.chain_record import AttemptRecord, Chain, EndRecord, JobRecord
from ckptman.jobs.lost_outcome import find_outcome
from ckptman.jobs.progress import Left, Newest, find_left, later_of
from ckptman.jobs.slurm.commands import Job, Slurm
from ckptman.jobs.verdict import Verdict, by_state, crashed, explained, interrupted, why_killed, why_requeued
from ckptman.policies.intervals import seconds_text
from ckptman.policies.resubmit import Attempt, Ending, Next, counts_as_saved, decide
from ckptman.runtime.deadline import parse_end_time
from ckptman.runtime.journal import read_journal
from ckptman.runtime.measurements import save_seconds, start_up
from ckptman.runtime.outcome import Outcome, read_outcome, reported_nodes
from ckptman.storage.format.paths import journal_path

AVOIDED_SECONDS = 86_400.0
"""A node is left out for so long after it was found bad: by then somebody has repaired it, or Slurm knows."""


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
    attempts = chain.attempts()
    open_ones = [attempt for attempt in attempts if attempt.number not in ends]
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
        logs = logs_of(attempt, [each for each in attempts if each.number > attempt.number])
        if outcome is not None and (outcome.state == "finished" or outcome.state == "stopped"):
            verdict = explained(Verdict(outcome.state, outcome.reason), asked_by(logs, attempt.job_id))
        elif attempt.job_id == running_id:
            verdict = interrupted(why_requeued(attempt, slurm, logs))
        elif job is not None and (cause := by_state(job) or asked_by(logs, job.id)) is not None:
            verdict = interrupted(cause)
        elif job is not None:
            verdict = crashed(outcome, f"killed ({job.told})", [*logs, [job.state]], {})
        else:
            verdict = _of_forgotten(chain, attempt, outcome, logs, is_away=known is None)
        is_known = job is not None and job.over
        ended = _time(job.ends, now) if job is not None and is_known else now
        seen = None if is_known else chain.last_sign(attempt, now)
        note_end(chain, attempt, slurm, outcome, verdict, ended, seen_seconds=seen)
    return None


def _of_forgotten(
    chain: Chain, attempt: AttemptRecord, outcome: Outcome | None, logs: Sequence[Sequence[str]], *, is_away: bool
) -> Verdict:
    """Return how an attempt ended whose job Slurm no longer knows."""
    cause = why_killed(chain, attempt, logs)
    if cause.name in CRASHES:
        return Verdict("crashed", cause.line, cause)
    if cause.name == "unknown":
        if outcome is not None and outcome.state == "failed":
            return crashed(outcome, "killed", logs, {})
        why = "Slurm could not be asked" if is_away else f"Slurm no longer knows job {attempt.job_id}"
        cause = replace(cause, line=f"{cause.line}, as {why}")
    return interrupted(cause)


def outcome_of(chain: Chain, attempt: AttemptRecord, returncode: int | None = None) -> Outcome | None:
    """Return what an attempt said of its end, to its chain or in its root; None: nothing that can be read."""
    try:
        outcome = read_outcome(chain.outcome_path(attempt.number))
    except CorruptError as error:
        chain.events.record("outcome not known", attempt=attempt.number, why=str(error))
        return None
    if outcome is None:
        roots = [end.root for end in chain.ends().values()]
        outcome = find_outcome(
            _workdir_of(chain, attempt), reversed(roots), attempt.begun_seconds, returncode, attempt.job_id
        )
    return outcome


def note_end(
    chain: Chain,
    attempt: AttemptRecord,
    slurm: Slurm,
    outcome: Outcome | None,
    verdict: Verdict,
    now: float,
    returncode: int | None = None,
    down: Mapping[str, str] | None = None,
    seen_seconds: float | None = None,
) -> EndRecord:
    """Note how an attempt ended, with what it left on disk and which of its nodes are bad. Where it cannot be written
    down, it is returned all the same.

    `returncode`: None if it is noted by a later attempt, because this one was killed. `down`: the nodes that Slurm says
    are down, if it was asked. `seen_seconds`: when it was last known to run, if nobody knows when it ended.
    """
    ending, reason, cause = verdict.ending, verdict.reason, verdict.cause
    root = outcome.root if outcome else root_of(chain)
    sequence, left = _left_by(chain, attempt, root)
    if cause is not None and ending == "crashed":
        until = now if seen_seconds is None else seen_seconds
        cause = _with_reaction(chain, cause, counts_as_saved(left.has_saved, until - attempt.begun_seconds))
    with suppress(CkptmanError, OSError):
        if root and ending != "finished" and (why := passed_over_text(root)):
            reason = f"{reason}; {why}"
    if ending != "finished" and left.note:
        reason = f"{reason}; {left.note}"
    record = EndRecord(
        number=attempt.number,
        ending=ending,
        reason=reason,
        returncode=returncode,
        root=root,
        step=outcome.step if outcome else left.step,
        sequence=sequence,
        committed=left.has_saved,
        ended_seconds=now,
        seen_seconds=seen_seconds,
        newest=left.newest,
        bad_nodes=_bad_nodes(chain, attempt, ending, slurm, down, cause),
        save_seconds=save_seconds(root) if root else None,
        cause=cause.name if cause else "",
        evidence=cause.evidence if cause else (),
        reaction=cause.reaction if cause else "count",
    )
    with suppress(OSError):
        record = chain.end(record)
    event = "found ended" if returncode is None else "end"
    chain.events.record(event, sync=True, attempt=attempt.number, ending=ending, reason=reason)
    return record


def _with_reaction(chain: Chain, cause: Cause, has_saved: bool) -> Cause:
    earlier = [end for end in chain.ends().values() if end.number > chain.state.forgiven]
    before = earlier[-1] if earlier and earlier[-1].ending == "crashed" else None
    last = Cause(before.cause, before.reason, before.evidence) if before else None
    return with_reaction(cause, chain.spec.on, last, has_saved, any(end.committed for end in chain.ends().values()))


def following(chain: Chain, now: float, last: EndRecord | None = None) -> Next:
    """Return whether there is another attempt, by the limits of the chain and all that have ended. `last`: the end of
    the last one, which may not be on disk."""
    spec, ends, forgiven = chain.spec, chain.ends(), chain.state.forgiven
    if last is not None:
        ends.setdefault(last.number, last)
    begun = {each.number: each.begun_seconds for each in chain.attempts()}
    until = {n: end.ended_seconds if end.seen_seconds is None else end.seen_seconds for n, end in ends.items()}
    seconds = {n: max(0.0, until[n] - begun[n]) if n in begun else 0.0 for n in ends}
    attempts = [
        Attempt(number, end.ending, end.reason, end.committed, seconds[number], end.reaction)
        for number, end in ends.items()
        if number > forgiven
    ]
    decision = decide(attempts, spec.crash_limit, spec.max_attempts, spec.stall_limit)
    if not decision.again:
        return decision
    if spec.until_seconds is not None and now >= spec.until_seconds:
        return Next(False, f"{decision.reason}; the date until which it was to go on is past")
    used = sum(seconds.values())
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


def _workdir_of(chain: Chain, attempt: AttemptRecord) -> Path:
    """Return where the script of an attempt runs: as a rule, and before that was recorded, where it was submitted."""
    return Path(os.path.realpath(attempt.workdir or chain.spec.workdir))  # whatever links lead there


def _left_by(chain: Chain, attempt: AttemptRecord, root: str) -> tuple[int, Left]:
    """Return the newest commit sequence under the root of an attempt, and what the attempt left."""
    spec, ends = chain.spec, list(chain.ends().values())
    sequence, has_saved = _left_under(chain, root) if root else (0, None)
    before: dict[str, Newest] = {}
    ends = [end for end in ends if end.number > chain.state.given_up]
    for end in ends:
        before = later_of(before, end.newest)
    left = find_left(
        spec.progress,
        () if root else spec.places,  # the checkpoints of ckptman itself are known better
        _workdir_of(chain, attempt),
        before,
        attempt.begun_seconds,
        spec.created_seconds,
        is_known=bool(root) or any(end.committed for end in ends),
    )
    return sequence, replace(left, has_saved=True, note="") if has_saved else left


def _left_under(chain: Chain, root: str) -> tuple[int, bool]:
    """Return the newest commit sequence under a root, and whether it is a new one since the attempts before."""
    known = [end.sequence for end in chain.ends().values() if end.root == root]
    try:
        sequence = newest_sequence(root)
        if known:
            return sequence, sequence not in (0, known[-1])
        return sequence, bool(newest_sequence(root, chain.spec.created_seconds))
    except (CkptmanError, OSError):
        return known[-1] if known else 0, False


def _bad_nodes(
    chain: Chain,
    attempt: AttemptRecord,
    ending: Ending,
    slurm: Slurm,
    down: Mapping[str, str] | None,
    cause: Cause | None,
) -> dict[str, str]:
    """Return the nodes of an attempt that Slurm says are down, after a bad ending, that its cause blames, or that the
    attempt itself reported.

    None where those are more than half of its nodes: then something else is wrong.
    """
    found = dict(down or {})
    try:
        reported = reported_nodes(chain.outcome_path(attempt.number))
        if cause is not None and cause.reaction == "elsewhere" and cause.node:
            reported = {cause.node: cause.rule.title, **reported}
        if ending in ("crashed", "interrupted") and down is None:
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
