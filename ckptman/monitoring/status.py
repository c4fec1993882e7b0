"""How a run stands: what it is at, what is saved and where, when it will end."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ckptman.catalog.catalog import Catalog, Entry
from ckptman.catalog.tiers import read_drained
from ckptman.catalog.writer_lock import process_lives, read_owner
from ckptman.errors import CkptmanError
from ckptman.format.paths import check_is_no_checkpoint, journal_path
from ckptman.monitoring.history import Attempt, RunHistory, chain_folders, history_of
from ckptman.policies.retention_rules import is_known_time
from ckptman.runtime.journal import read_journal
from ckptman.scheduler.chain_record import Chain, State
from ckptman.scheduler.slurm.commands import Job, ask_queue

RunState = Literal["running", "silent", "queued", "finished", "stopped", "failed", "killed", "not started"]
SILENT_SECONDS = 600.0
"""A run on another machine that has said nothing for so long may be dead; only its lock and its scheduler know."""
_TAIL_BYTES = 512 * 1024
"""Of a journal so much is read first: as a rule a day, and the whole of the last attempt."""
_BREACHES_SHOWN = 3


@dataclass(frozen=True)
class Status:
    """How a run stands. Times in unix seconds, durations in seconds; None: not known, or there is none.

    `state`: running; silent (it should be running, and nothing is heard of it); queued (its next job waits); finished;
    stopped, failed, killed (the last attempt ended so, and nothing of it is in the queue); not started.
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
    looks = [_Look.at(Path(root)) for root in roots]
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
    lives: bool | None = False
    """Whether its last process does; None: this machine cannot tell."""
    trouble: str = ""

    @classmethod
    def at(cls, root: Path) -> _Look:
        look = cls(root)
        try:
            check_is_no_checkpoint(root)
            look.entries = Catalog(root).look()
            look.history = _recent(root)
            owner = read_owner(root)
            look.lives = process_lives(owner) if owner is not None else False
            look._look_at_chain()
        except (CkptmanError, OSError) as error:
            look.trouble = str(error)
        return look

    def _look_at_chain(self) -> None:
        last = self.history.last if self.history is not None else None
        ids = [last.job_id] if last is not None and last.job_id else []
        for folder in chain_folders([last] if last is not None else [])[-1:]:
            try:
                self.chain = Chain(folder)
                self.chain_state = self.chain.state
                ids += [job.job_id for job in self.chain.jobs()[-3:]]
            except (CkptmanError, OSError):
                self.chain = None  # it was removed: the run is known by its root alone
        self.job_ids = tuple(dict.fromkeys(ids))

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
        if last is None:
            return Status(str(self.root), "not started", **saved)
        state, reason = self._state(last, now, queue)
        metrics = next((dict(each[2]) for each in reversed(last.curve) if each[2]), {})
        pace, is_at_work = last.step_seconds, state in ("running", "silent")
        left = last.total_steps - last.step if last.total_steps is not None else None
        return Status(
            str(self.root),
            state,
            reason,
            run_id=last.run_id,
            attempt=last.number,
            job_id=last.job_id,
            host=last.host,
            ranks=last.world_size,
            step=last.step,
            total_steps=last.total_steps,
            metrics=metrics,
            step_seconds=pace,
            heard=last.last,
            memory_step=self._memory_step(last),
            next_save=_upcoming(last, newest) if is_at_work else None,
            deadline=last.deadline if is_at_work else None,
            end=last.last + max(0, left) * pace if is_at_work and left is not None and pace is not None else None,
            chain=str(self.chain.folder) if self.chain is not None else "",
            chain_state=self.chain_state.state if self.chain_state is not None else "",
            queue=self._queue(queue),
            health=_breaches(self.history, last),
            **saved,
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
        if waits and (self.chain_state is None or self.chain_state.state == "active"):
            job = waits[0]
            return "queued", f"job {job.id}: {job.told.lower()}; before it: {ended}"
        if last.state == "running":
            return "killed", "it did not say that it ended"
        return ("stopped" if last.state == "stopped" else "failed"), last.reason

    def _places(self, newest: Entry | None) -> tuple[str, ...]:
        if newest is None:
            return ()
        held = read_drained(self.root)
        return ("disk", *(tier for tier, records in held.items() if newest.step in {each.step for each in records}))

    def _memory_step(self, last: Attempt) -> int | None:
        """Return the newest step in memory as far as the journal says: it notes the first of each attempt."""
        if self.history is None or not any(
            event.get("event") == "memory_saved" and event.get("attempt") == last.number
            for event in self.history.events
        ):
            return None
        steps = [event.get("memory_step") for event in self.history.events if event.get("event") == "progress"]
        return next((step for step in reversed(steps) if isinstance(step, int)), None)

    def _queue(self, queue: Mapping[str, Job] | None) -> tuple[str, ...]:
        found = [(queue or {}).get(job_id) for job_id in self.job_ids]
        return tuple(f"{job.id} {job.told.lower()}" for job in found if job is not None and not job.over)


def _upcoming(last: Attempt, newest: Entry | None) -> Mapping[str, Any] | None:
    """Return the save that the run foresaw, unless it has been made since."""
    step = last.next_save.get("step") if last.next_save is not None else None
    return last.next_save if isinstance(step, int) and (newest is None or step > newest.step) else None


def _recent(root: Path) -> RunHistory:
    """Return the history of a run, as a rule no more than its last attempt. Raises: NotFoundError, OSError."""
    path = journal_path(root)
    if not os.path.lexists(path):
        return history_of(root, [])
    events, _ = read_journal(path, _TAIL_BYTES)
    history = history_of(root, events)
    if history.last is None and events:  # one attempt that goes on for long
        history = history_of(root, read_journal(path)[0])
    return history


def _breaches(history: RunHistory | None, last: Attempt) -> tuple[str, ...]:
    """Return what was found wrong with devices and nodes in the last attempt, the newest first."""
    own = [
        str(event.get("text") or event.get("what"))
        for event in (history.events if history is not None else ())
        if event.get("event") in ("health_breach", "straggler") and event.get("attempt") == last.number
    ]
    return tuple(reversed(own[-_BREACHES_SHOWN:]))
