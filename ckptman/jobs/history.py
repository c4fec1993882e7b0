"""What a chain has been through: how each attempt ended, what it left, and what follows from that."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from ckptman.errors import CkptmanError, CorruptError, SchedulerError
from ckptman.forecast.save_costs import warning_seconds
from ckptman.jobs.causes import CRASHES, Cause, asked_by, with_reaction
from ckptman.jobs.chain_notes import Say
from ckptman.jobs.chain_record import AttemptRecord, Chain, EndRecord, Spec, State
from ckptman.jobs.evidence import find_outcome, logs_of, newest_sequence, passed_over_text
from ckptman.jobs.newest_checkpoints import Left, Newest, find_left, later_of
from ckptman.jobs.slurm.commands import Job, Slurm
from ckptman.jobs.verdict import Verdict, by_state, crashed, explained, interrupted, why_killed, why_requeued
from ckptman.policies.intervals import seconds_text
from ckptman.policies.resubmit import Attempt, Next, counts_as_saved, decide
from ckptman.runtime.deadline import parse_end_time
from ckptman.runtime.journal import save_seconds
from ckptman.runtime.outcome import Outcome, read_outcome, reported_nodes

AVOIDED_SECONDS = 86_400.0
"""A node is left out for so long after it was found bad: by then somebody has repaired it, or Slurm knows."""
H = TypeVar("H", bound="History")


@dataclass
class History:
    """The attempts of a chain and their ends, in order, as they were when they were read."""

    chain: Chain
    spec: Spec
    state: State
    attempts: list[AttemptRecord]
    ends: dict[int, EndRecord]

    @classmethod
    def read(cls: type[H], chain: Chain) -> H:
        return cls(chain, chain.spec, chain.state, chain.attempts(), chain.ends())

    def add(self, end: EndRecord) -> None:
        self.ends = dict(sorted({**self.ends, end.number: end}.items()))

    @property
    def root(self) -> str:
        """The checkpoint root that the last attempt named which named one; "" if none did."""
        return next((end.root for end in reversed(self.ends.values()) if end.root), "")

    @property
    def save_seconds(self) -> float | None:
        """What a save took, as the last attempt knew that knew it."""
        return next((end.save_seconds for end in reversed(self.ends.values()) if end.save_seconds is not None), None)

    def workdir_of(self, attempt: AttemptRecord) -> Path:
        """Return where the script of an attempt runs: as a rule, and before that was recorded, where it was
        submitted."""
        return Path(os.path.realpath(attempt.workdir or self.spec.workdir))  # whatever links lead there

    def following(self, now: float) -> Next:
        """Return whether there is another attempt, by the limits of the chain and all that have ended."""
        spec, ends = self.spec, self.ends
        begun = {each.number: each.begun_seconds for each in self.attempts}
        until = {n: end.ended_seconds if end.seen_seconds is None else end.seen_seconds for n, end in ends.items()}
        seconds = {n: max(0.0, until[n] - begun[n]) if n in begun else 0.0 for n in ends}
        attempts = [
            Attempt(number, end.ending, end.reason, end.committed, seconds[number], end.reaction)
            for number, end in ends.items()
            if number > self.state.forgiven
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

    def lost(self) -> str | None:
        """Say that the checkpoints of the run have gone, in words: the next attempt would start over. None: all is
        well.

        A root that cannot be read has not gone: the attempt says what is wrong with it.
        """
        root = self.root
        held = [end.number for end in self.ends.values() if end.root == root and end.sequence > 0]
        if not held or max(held) <= self.state.given_up:
            return None
        try:
            if newest_sequence(root):
                return None
        except (CkptmanError, OSError):
            return None
        return (
            f"{root} held checkpoints of earlier attempts and holds none now: it was moved, deleted, or is not mounted"
        )

    def avoided(self, now: float) -> dict[str, str]:
        """Return the nodes that were found bad in the last day, which the next attempt had better not run on, and
        why."""
        recent = [end for end in self.ends.values() if now - end.ended_seconds < AVOIDED_SECONDS]
        nodes: dict[str, str] = {}
        for end in sorted(recent, key=lambda end: end.ended_seconds):
            nodes |= end.bad_nodes
        return dict(sorted(nodes.items()))

    def warned_too_late(self) -> str:
        """Say that the user's own --signal comes too late for a save, in words; "" if it does not, or nobody knows."""
        own, save = self.spec.warned_seconds, self.save_seconds
        if own is None or save is None or own >= (needed := warning_seconds(save)):
            return ""
        return (
            f"--signal warns {own} s before the end, and a save takes {seconds_text(save)}: give {needed} s, as in "
            f"--signal=B:USR2@{needed}"
        )


def settle(history: History, slurm: Slurm, running_id: str, now: float, say: Say) -> AttemptRecord | None:
    """Note how the attempts ended that could not do so themselves, because they were killed.

    Called when the next one begins: as a rule Slurm starts it only after the one before is over. Returns an attempt
    that runs all the same.
    """
    chain, attempts = history.chain, history.attempts
    open_ones = [attempt for attempt in attempts if attempt.number not in history.ends]
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
        outcome = outcome_of(history, attempt, None, say)
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
        end = end_record(history, attempt, slurm, outcome, verdict, ended, seen_seconds=seen)
        with suppress(OSError):
            note_end(history, end)
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


def outcome_of(history: History, attempt: AttemptRecord, returncode: int | None, say: Say) -> Outcome | None:
    """Return what an attempt reported of its end, to its chain or in its root; None: nothing that can be read.

    `returncode`: None if it was killed.
    """
    chain = history.chain
    try:
        outcome = read_outcome(chain.outcome_path(attempt.number))
    except CorruptError as error:
        say(f"{error}; going by the exit code")
        chain.events.record("outcome not known", attempt=attempt.number, why=str(error))
        return None
    if outcome is not None:
        return outcome
    roots = [end.root for end in reversed(history.ends.values())]
    return find_outcome(history.workdir_of(attempt), roots, attempt.begun_seconds, returncode, attempt.job_id)


def end_record(
    history: History,
    attempt: AttemptRecord,
    slurm: Slurm | None,
    outcome: Outcome | None,
    verdict: Verdict,
    now: float,
    returncode: int | None = None,
    seen_seconds: float | None = None,
) -> EndRecord:
    """Return how an attempt ended, with what it left on disk and which of its nodes are bad.

    `slurm`: None on this machine. `returncode`: None if the attempt was killed, and a later one found that.
    `seen_seconds`: when it was last known to run, if nobody knows when it ended.
    """
    ending, reason, cause = verdict.ending, verdict.reason, verdict.cause
    root = outcome.root if outcome else history.root
    sequence, left = _left_by(history, attempt, root)
    if cause is not None and ending == "crashed":
        until = now if seen_seconds is None else seen_seconds
        cause = _with_reaction(history, cause, counts_as_saved(left.has_saved, until - attempt.begun_seconds))
        verdict = replace(verdict, cause=cause)
    with suppress(CkptmanError, OSError):
        if root and ending != "finished" and (why := passed_over_text(root)):
            reason = f"{reason}; {why}"
    if ending != "finished" and left.note:
        reason = f"{reason}; {left.note}"
    return EndRecord(
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
        bad_nodes=_bad_nodes(history.chain, attempt, slurm, verdict) if slurm is not None else {},
        save_seconds=save_seconds(root) if root else None,
        cause=cause.name if cause else "",
        evidence=cause.evidence if cause else (),
        reaction=cause.reaction if cause else "count",
    )


def note_end(history: History, end: EndRecord) -> None:
    """Write down how an attempt ended; what was noted first counts. Raises: OSError (it is in `history` alone)."""
    try:
        end = history.chain.end(end)
    finally:  # the listeners get the event on a full disk, too
        history.add(end)
        event = "found ended" if end.returncode is None else "end"
        history.chain.events.record(event, sync=True, attempt=end.number, ending=end.ending, reason=end.reason)


def _with_reaction(history: History, cause: Cause, has_saved: bool) -> Cause:
    earlier = [end for end in history.ends.values() if end.number > history.state.forgiven]
    before = earlier[-1] if earlier and earlier[-1].ending == "crashed" else None
    last = Cause(before.cause, before.reason, before.evidence) if before else None
    any_saved = any(end.committed for end in history.ends.values())
    return with_reaction(cause, history.spec.on, last, has_saved, any_saved)


def _left_by(history: History, attempt: AttemptRecord, root: str) -> tuple[int, Left]:
    """Return the newest commit sequence under the root of an attempt, and what the attempt left."""
    spec = history.spec
    sequence, has_saved, note = _left_under(history, root) if root else (0, False, "")
    before: dict[str, Newest] = {}
    ends = [end for end in history.ends.values() if end.number > history.state.given_up]
    for end in ends:
        before = later_of(before, end.newest)
    left = find_left(
        spec.progress,
        () if root else spec.places,  # the checkpoints of ckptman itself are known better
        history.workdir_of(attempt),
        before,
        attempt.begun_seconds,
        spec.created_seconds,
        is_known=bool(root) or any(end.committed for end in ends),
    )
    if has_saved:
        return sequence, replace(left, has_saved=True, note="")
    return sequence, replace(left, note=note or left.note)


def _left_under(history: History, root: str) -> tuple[int, bool, str]:
    """Return the newest commit sequence under a root, whether it is a new one since the attempts before, and why that
    is not known."""
    known = [end.sequence for end in history.ends.values() if end.root == root]
    try:
        sequence = newest_sequence(root)
        if known:
            return sequence, sequence not in (0, known[-1]), ""
        return sequence, bool(newest_sequence(root, history.spec.created_seconds)), ""
    except (CkptmanError, OSError) as error:
        return known[-1] if known else 0, False, f"{error}; counted as no progress"


def _bad_nodes(chain: Chain, attempt: AttemptRecord, slurm: Slurm, verdict: Verdict) -> dict[str, str]:
    """Return the nodes of an attempt that Slurm says are down, after a bad ending, that its cause blames, or that the
    attempt itself reported.

    None where those are more than half of its nodes: then something else is wrong.
    """
    cause, found = verdict.cause, dict(verdict.down or {})
    try:
        reported = reported_nodes(chain.outcome_path(attempt.number))
        if cause is not None and cause.reaction == "elsewhere" and cause.node:
            reported = {cause.node: cause.rule.title, **reported}
        if verdict.ending in ("crashed", "interrupted") and verdict.down is None:
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
