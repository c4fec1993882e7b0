"""How a run stands: what it is at, what is saved and where, when it will end."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ckptman.errors import CkptmanError, RootError
from ckptman.jobs.chain_record import Chain, State, is_gone
from ckptman.jobs.newest_checkpoints import Newest, find_newest, latest
from ckptman.jobs.slurm.commands import Job, ask_queue
from ckptman.policies.retention_rules import is_known_time
from ckptman.runtime.journal import read_journal
from ckptman.storage.catalog.catalog import Catalog, Entry
from ckptman.storage.catalog.liveness import process_lives
from ckptman.storage.catalog.tiers import read_drained
from ckptman.storage.catalog.writer_lock import read_owner
from ckptman.storage.format.paths import check_is_no_checkpoint, journal_path
from ckptman.tools.monitoring.history import Attempt, RunHistory, chain_folders, history_of
from ckptman.tools.monitoring.other_programs import chains_of

RunState = Literal["running", "silent", "starting", "queued", "finished", "stopped", "failed", "killed", "not started"]
SILENT_SECONDS = 600.0
"""A run on another machine that has said nothing for so long may be dead; only its lock and its scheduler know."""
_TAIL_BYTES = 512 * 1024
"""Of a journal so much is read first: as a rule a day, and the whole of the last attempt."""
_BREACHES_SHOWN = 3


@dataclass(frozen=True)
class Status:
    """How a run stands. Times in unix seconds, durations in seconds; None: not known, or there is none.

    `state`: running; silent (it should be running, and nothing is heard of it); starting (its next attempt has begun,
    and has not said so yet); queued (its next job waits); finished; stopped, failed, killed (the last attempt ended so,
    and nothing of it is to be seen); not started.
    """

    root: str
    state: RunState
    reason: str = ""
    run_id: str = ""
    attempt: int | None = None
    job_id: str = ""
    host: str = ""
    ranks: int | None = None
    step: int | None = None
    total_steps: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    metrics_step: int | None = None
    """The step that they are of: a run tells them every 30 s, and with each checkpoint."""
    step_seconds: float | None = None
    heard: float | None = None
    saved_step: int | None = None
    saved: float | None = None
    places: tuple[str, ...] = ()
    """Where the newest checkpoint is: disk, and the tiers that have it."""
    memory_step: int | None = None
    """The newest step that is known to be in the memory of the nodes."""
    next_save: Mapping[str, Any] | None = None
    """`step`, `seconds` and `reason` of the next save, as the run foresees it."""
    deadline: float | None = None
    """When its job ends."""
    end: float | None = None
    """When the run will be finished, at its pace and without further pauses."""
    chain: str = ""
    chain_state: str = ""
    queue: tuple[str, ...] = ()
    """Jobs of its chain that wait or run, each with its state."""
    checkpoints: int = 0
    bytes: int = 0
    health: tuple[str, ...] = ()
    trouble: str = ""
    """What could not be read of it."""


def read_status(roots: Sequence[str | os.PathLike[str]], now: float, *, slurm: bool = True) -> list[Status]:
    """Return how runs stand, one for each root; what is wrong with one is its `trouble`.

    Slurm is asked once for all of them, and not at all where no job is known, or `slurm` is false.
    """
    looks = [_Look.at(Path(root), now) for root in roots]
    ids = {job_id for look in looks for job_id in look.job_ids}
    queue = ask_queue(ids, os.environ) if slurm and ids else None
    return [look.status(now, queue) for look in looks]


@dataclass
class _Look:
    """What was found in one root."""

    root: Path
    history: RunHistory | None = None
    entries: Sequence[Entry] = ()
    chain: Chain | None = None
    chain_state: State | None = None
    job_ids: tuple[str, ...] = ()
    goes_on: bool = False
    """Whether its chain does, as far as that knows."""
    lives: bool | None = False
    """Whether its last process does; None: this machine cannot tell."""
    trouble: str = ""
    newest: Newest | None = None
    """Of a program that saves in its own way."""

    @classmethod
    def at(cls, root: Path, now: float) -> _Look:
        look = cls(root)
        try:
            check_is_no_checkpoint(root)
            look.entries = Catalog(root).look()
            look.history = _recent(root, now)
            owner = read_owner(root)
            look.lives = process_lives(owner) if owner is not None else False
            last = look.history.last
            if last is not None:
                look._look_at_last_attempt(last)
            if owner is not None and last is not None and owner.run_id != last.run_id:
                look.lives = False  # somebody works in the root, such as a rollback, and not the run
            if last is None and not look.entries:
                look._look_for_other_programs()
        except (CkptmanError, OSError) as error:
            look.trouble = (error.strerror if isinstance(error, RootError) else None) or str(error)
        return look

    def _look_for_other_programs(self) -> None:
        """Look for the checkpoints of a program that saves in its own way, and for its chain among those from here."""
        self.newest = latest(find_newest((str(self.root),), Path.cwd()))
        for chain in chains_of(self.root, Path.cwd())[-1:]:
            self._look_at_chain(chain)

    def _look_at_last_attempt(self, last: Attempt) -> None:
        self.job_ids = (last.job_id,) if last.job_id else ()
        for folder in chain_folders([last]):
            try:
                self._look_at_chain(Chain(folder))
            except (CkptmanError, OSError) as error:
                if folder.is_dir():  # else it was removed: the run is known by its root alone
                    self.trouble = str(error)

    def _look_at_chain(self, chain: Chain) -> None:
        self.chain_state = chain.state
        self.chain = chain
        self.goes_on = self.chain_state.state == "active" and not is_gone(chain.spec, self.chain_state)
        self.job_ids = tuple(dict.fromkeys([*self.job_ids, *(job.job_id for job in chain.jobs()[-3:])]))

    def status(self, now: float, queue: Mapping[str, Job] | None) -> Status:
        if self.trouble and self.history is None:
            return Status(str(self.root), "not started", trouble=self.trouble)
        newest = next((entry for entry in reversed(self.entries) if entry.complete), None)
        saved: dict[str, Any] = {
            "checkpoints": sum(entry.complete for entry in self.entries),
            "bytes": sum(entry.manifest.total_bytes for entry in self.entries if entry.manifest is not None),
            "saved_step": newest.step if newest is not None else None,
            "saved": newest.time_seconds if newest is not None and is_known_time(newest.time_seconds) else None,
            "places": self._places(newest),
            "trouble": self.trouble,
        }
        last = self.history.last if self.history is not None else None
        if last is None and self.newest is not None:
            return self._of_other_program(self.newest, queue)
        if last is None:
            return Status(str(self.root), "not started", **saved)
        state, reason = self._state(last, now, queue)
        metrics_step, metrics = _metrics(last, newest)
        pace, is_at_work = last.step_seconds, state in ("running", "silent")
        step = last.step if last.stretches else saved["saved_step"] or 0
        left = last.total_steps - step if last.total_steps is not None else None
        mark = last.stretches[-1].last_time if last.stretches else last.last
        return Status(
            str(self.root),
            state,
            reason,
            run_id=last.run_id,
            attempt=last.number,
            job_id=last.job_id,
            host=last.host,
            ranks=last.world_size,
            step=step,
            total_steps=last.total_steps,
            metrics=metrics,
            metrics_step=metrics_step,
            step_seconds=pace,
            heard=last.last,
            memory_step=self._memory_step(last) if is_at_work else None,
            next_save=_upcoming(last, newest) if is_at_work else None,
            deadline=last.deadline if is_at_work else None,
            end=mark + max(0, left) * pace if state == "running" and left is not None and pace is not None else None,
            chain=str(self.chain.folder) if self.chain is not None else "",
            chain_state=self.chain_state.state if self.chain_state is not None else "",
            queue=self._queue(queue),
            health=_breaches(self.history, last),
            **saved,
        )

    def _of_other_program(self, newest: Newest, queue: Mapping[str, Job] | None) -> Status:
        state: RunState = "stopped"
        chain, reason = self.chain, "its newest checkpoint is all that is known of it"
        if chain is not None and self.chain_state is not None:
            runs = [job for job_id, job in (queue or {}).items() if job_id in self.job_ids and job.runs]
            waits = [job for job_id, job in (queue or {}).items() if job_id in self.job_ids and job.waits]
            reason = "" if self.goes_on else self.chain_state.reason
            if self.goes_on and (runs or chain.spec.scheduler == "local"):
                state = "running"
            elif self.goes_on and waits:
                state = "queued"
            elif self.goes_on and queue is None:
                state, reason = "running", "as far as its chain knows: Slurm was not asked, or does not answer"
            elif self.chain_state.state == "finished":
                state = "finished"
        return Status(
            str(self.root),
            state,
            reason,
            step=newest.step or None,
            saved_step=newest.step,
            saved=newest.time_seconds,
            places=("disk",),
            bytes=newest.size_bytes,
            checkpoints=1,
            chain=str(chain.folder) if chain is not None else "",
            chain_state=self.chain_state.state if self.chain_state is not None else "",
            queue=self._queue(queue),
            trouble=self.trouble,
        )

    def _state(self, last: Attempt, now: float, queue: Mapping[str, Job] | None) -> tuple[RunState, str]:
        own = (queue or {}).get(last.job_id)
        waits = [job for job_id, job in (queue or {}).items() if job_id in self.job_ids and job.waits]
        if last.state == "running":
            lives = self.lives
            if lives is None:
                lives = own.runs if own is not None else queue is None or not last.job_id
            if lives:
                quiet = now - last.last
                limit = max(SILENT_SECONDS, 10 * (last.step_seconds or 0.0))
                return ("silent", f"nothing was heard of it for {quiet:.0f} s") if quiet > limit else ("running", "")
        if last.state == "finished":
            return "finished", last.reason
        ended = f"attempt {last.number} was killed" if last.state == "running" else last.reason
        runs = next((job for job_id, job in (queue or {}).items() if job_id in self.job_ids and job.runs), None)
        if runs is not None and self.goes_on:
            return "starting", f"job {runs.id} runs; before it: {ended}"
        if self.goes_on and self.chain is not None and self.chain.spec.scheduler == "local":
            return "starting", f"its chain goes on; before: {ended}"
        if waits and (self.chain_state is None or self.goes_on):
            job = waits[0]
            return "queued", f"job {job.id}: {job.told.lower()}; before it: {ended}"
        if last.state == "running":
            return "killed", "it did not say that it ended"
        return ("stopped" if last.state == "stopped" else "failed"), last.reason

    def _places(self, newest: Entry | None) -> tuple[str, ...]:
        if newest is None:
            return ()
        held = read_drained(self.root)
        whole = {tier: {each.step for each in records if not each.damaged} for tier, records in held.items()}
        return ("disk", *(tier for tier, steps in whole.items() if newest.step in steps))

    def _memory_step(self, last: Attempt) -> int | None:
        """Return the newest step in memory as the attempt told it last."""
        events = self.history.events if self.history is not None else ()
        own = [each for each in events if each.get("event") == "progress" and each.get("attempt") == last.number]
        step = own[-1].get("memory_step") if own else None
        return step if isinstance(step, int) else None

    def _queue(self, queue: Mapping[str, Job] | None) -> tuple[str, ...]:
        found = [(queue or {}).get(job_id) for job_id in self.job_ids]
        return tuple(f"job {job.id} {job.told.lower()}" for job in found if job is not None and not job.over)


def _upcoming(last: Attempt, newest: Entry | None) -> Mapping[str, Any] | None:
    """Return the save that the run foresaw; where that has been made since, the one that comes as the last two came."""
    step = last.next_save.get("step") if last.next_save is not None else None
    if isinstance(step, int) and (newest is None or step > newest.step):
        return last.next_save
    if len(last.saves) < 2:
        return None
    before, save = last.saves[-2:]
    step = 2 * save.step - before.step
    seconds = max(0, step - last.step) * (last.step_seconds or 0.0)
    return {"step": step, "seconds": seconds, "reason": save.reason} if step > save.step else None


def _metrics(last: Attempt, newest: Entry | None) -> tuple[int | None, Mapping[str, float]]:
    """Return the step of the newest known metrics, and these."""
    manifest = newest.manifest if newest is not None else None
    if manifest is None or not manifest.metrics or manifest.attempt != last.number:
        return last.metrics_step, last.metrics
    is_newer = last.metrics_step is None or manifest.step > last.metrics_step
    return (manifest.step, dict(manifest.metrics)) if is_newer else (last.metrics_step, last.metrics)


def _recent(root: Path, now: float) -> RunHistory:
    """Return the history of a run, as a rule no more than its last attempt. Raises: NotFoundError, OSError."""
    path = journal_path(root)
    if not os.path.lexists(path):
        return history_of(root, [])
    events, _ = read_journal(path, _TAIL_BYTES)
    numbers = [event["attempt"] for event in events if "attempt" in event]
    starts = [event.get("attempt") for event in events if event.get("event") == "attempt_started"]
    if numbers and numbers[-1] not in starts:  # one attempt that goes on for long
        events, _ = read_journal(path)
    return history_of(root, events, now=now)


def _breaches(history: RunHistory | None, last: Attempt) -> tuple[str, ...]:
    """Return what was found wrong with devices and nodes in the last attempt, the newest first."""
    own = [
        str(event.get("text") or event.get("what"))
        for event in (history.events if history is not None else ())
        if event.get("event") in ("health_breach", "straggler") and event.get("attempt") == last.number
    ]
    return tuple(reversed(own[-_BREACHES_SHOWN:]))
