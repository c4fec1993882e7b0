"""What a run has been through, from its journal, the records of its chain and what Slurm knows of its jobs.

Anybody can edit a journal, and clocks jump. The order of the lines is what happened first: a time that goes back counts
as the time of the line before, and that is noted.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from ckptman.errors import NotFoundError
from ckptman.jobs.slurm.accounting import JobTimes
from ckptman.runtime.journal import number_in, read_journal
from ckptman.storage.format.paths import check_is_no_checkpoint, journal_path

_JUMP_SECONDS = 1.0
"""The clocks of two nodes differ a little: a smaller jump is not worth a note."""
_MOST_SKEW_SECONDS = 3600.0


@dataclass
class Stretch:
    """Training without interruption from a step on, within an attempt: until it ends, or restores once more.

    `marks`: moments at which a step was known to have ended, as (unix seconds, step), ascending in time.
    """

    start_step: int
    begin: float
    marks: list[tuple[float, int]] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        return self.marks[-1][1] if self.marks else self.start_step

    @property
    def last_time(self) -> float:
        """When the last step ended; when it began, before the first."""
        return self.marks[-1][0] if self.marks else self.begin

    def time_of(self, step: float) -> float:
        """Return when a step ended, in unix seconds; between two marks as if all steps took the same time."""
        before = (self.begin, self.start_step)
        for mark in self.marks:
            if mark[1] >= step:
                share = (step - before[1]) / (mark[1] - before[1]) if mark[1] > before[1] else 1.0
                return before[0] + max(0.0, share) * (mark[0] - before[0])
            before = mark
        return before[0]


@dataclass
class Save:
    """A save of a run: when it was decided, when it was durable, for how long training waited, its size. Seconds, and
    bytes; None where it is not known, or did not come to it."""

    step: int
    begun: float
    reason: str = ""
    durable: float | None = None
    stall_seconds: float | None = None
    bytes: int | None = None
    failed: str = ""


@dataclass
class Attempt:
    """One attempt, as its events tell of it. All times in unix seconds; None: it did not come to it, or did not say."""

    number: int
    run_id: str
    job_id: str
    host: str
    world_size: int
    chain: str
    launch: str
    process: float
    """When its process began."""
    started: float
    """When it took the root."""
    restores: list[tuple[float, float]] = field(default_factory=list)
    """Beginning and end of each restore."""
    first_step: float | None = None
    stretches: list[Stretch] = field(default_factory=list)
    stalls: list[tuple[float, float]] = field(default_factory=list)
    """Beginning and end of what training waited for saves."""
    stalled_seconds: float = 0.0
    """The sum of `stalls`."""
    other_stall_seconds: float = 0.0
    """What training waited for saves besides those `stalls`: the journal tells of saves to memory in all."""
    saves: list[Save] = field(default_factory=list)
    metrics_step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The newest, and their step; a run records them about every 30 s."""
    speaks: bool = False
    """Whether it says every 30 s or so that steps have ended, so that silence means something."""
    silent_seconds: float = 0.0
    """For how long its watchdog had seen no sign of life when it ended it."""
    state: str = "running"
    """finished, stopped, failed, or running: then it goes on, or was killed."""
    reason: str = ""
    ended: float | None = None
    last: float = 0.0
    """The last that was heard of it."""
    total_steps: int | None = None
    deadline: float | None = None
    next_save: Mapping[str, Any] | None = None

    @property
    def step(self) -> int:
        """The last step that is known to have ended; that of the restore, before the first."""
        return self.stretches[-1].last_step if self.stretches else 0

    @property
    def step_seconds(self) -> float | None:
        """What a step took of late, saves included, by the last marks; None before two of them."""
        marks = self.stretches[-1].marks[-10:] if self.stretches else []
        steps = marks[-1][1] - marks[0][1] if marks else 0
        seconds = marks[-1][0] - marks[0][0] if marks else 0.0
        return seconds / steps if steps > 0 and seconds > 0 else None


@dataclass(frozen=True)
class RunHistory:
    """The attempts of a run, oldest first, the jobs that they ran in, and what is worth a word about the records."""

    root: Path
    run_id: str
    attempts: tuple[Attempt, ...]
    jobs: tuple[JobTimes, ...]
    events: tuple[Mapping[str, Any], ...]
    rollbacks: tuple[tuple[float, int], ...]
    """When somebody took the run back, and to which step."""
    notes: tuple[str, ...]

    @property
    def last(self) -> Attempt | None:
        return self.attempts[-1] if self.attempts else None

    def job_of(self, attempt: Attempt) -> JobTimes | None:
        """Return the job in which an attempt ran; None where that is not known."""
        own = [job for job in self.jobs if job.begun is not None and ran(job, attempt)]
        same = [job for job in own if job.job_id and job.job_id == attempt.job_id]
        earlier = [job for job in same or own if (job.begun or 0.0) <= attempt.started + _JUMP_SECONDS * bool(same)]
        going_on = [job for job in earlier if job.ended is None or job.ended >= attempt.started]
        return (going_on or earlier)[-1] if earlier else next(iter(same), None)


def read_history(root: str | os.PathLike[str], now: float) -> RunHistory:
    """Read what a root tells of its run. `now`: unix seconds.

    Raises: NotFoundError (no run was started there), ConfigError (it is one checkpoint), OSError.
    """
    root = Path(root)
    check_is_no_checkpoint(root)
    events, torn = read_journal(journal_path(root)) if os.path.lexists(journal_path(root)) else ([], 0)
    notes = [f"{torn} of the lines of its journal cannot be read, and are left out"] if torn else []
    history = history_of(root, events, now=now, notes=notes)
    if history.last is None:
        raise NotFoundError(
            f"there is no run of ckptman in {root}; that of another program is found by its chain, from the directory "
            "in which you submitted it"
        )
    return history


def history_of(
    root: Path,
    events: Sequence[Mapping[str, Any]],
    jobs: Sequence[JobTimes] = (),
    now: float = math.inf,
    notes: Sequence[str] = (),
) -> RunHistory:
    """Return the history that the events of a journal tell. `jobs`: what is known of the jobs of its attempts."""
    events, off_seconds = in_order(events, now)
    reader = _Reader()
    for event in events:
        with suppress(TypeError, ValueError, OverflowError):  # a line that no run has written
            reader.take(event)
    told = list(notes)
    run_id = reader.attempts[-1].run_id if reader.attempts else ""
    own = [attempt for attempt in reader.attempts if attempt.run_id == run_id]
    others = sorted({attempt.run_id or "no name" for attempt in reader.attempts} - {run_id or "no name"})
    if others:
        told.append(f"its journal tells of other runs, too, which are left out: {', '.join(others)}")
    if own and own[0].number > 1 and not others:
        told.append(f"its journal begins with attempt {own[0].number}: what was before is not counted")
    if off_seconds > _JUMP_SECONDS:
        told.append(f"clocks were off by up to {off_seconds:,.0f} s: times around that are not exact")
    if reader.unknown:
        told.append(f"events of attempts whose beginning is not in the journal are left out: {reader.unknown}")
    ordered = tuple(sorted(jobs, key=lambda job: (job.begun is None, job.begun or 0.0)))
    return RunHistory(root, run_id, tuple(own), ordered, tuple(events), tuple(reader.rollbacks), tuple(told))


def chain_folders(attempts: Sequence[Attempt]) -> list[Path]:
    """Return the folders of the chains that attempts belonged to, oldest first."""
    return [Path(each) for each in dict.fromkeys(attempt.chain for attempt in attempts if attempt.chain)]


def ran(job: JobTimes, attempt: Attempt) -> bool:
    """Return whether an attempt may have run in a job, by the chain or the id of both."""
    return bool((job.chain and job.chain == attempt.chain) or (job.job_id and job.job_id == attempt.job_id))


def in_order(events: Sequence[Mapping[str, Any]], now: float) -> tuple[list[Mapping[str, Any]], float]:
    """Return the events that have a time, with times that never go back, and by how many seconds one was off at most.

    A time after `now` counts as now if a clock that is a little ahead explains it, and else not at all.
    """
    known = [event for event in events if number_in(event.get("time")) is not None]
    told = [float(event["time"]) for event in known]
    times = list(accumulate((min(time, now) if time < now + _MOST_SKEW_SECONDS else 0.0 for time in told), max))
    off_seconds = max((abs(before - after) for before, after in zip(told, times)), default=0.0)
    return [{**event, "time": time} for time, event in zip(times, known)], off_seconds


# ---- events ---------------------------------------------------------------------------------------------------------


class _Reader:
    """Takes in the events of a journal, in order."""

    def __init__(self) -> None:
        self.attempts: list[Attempt] = []
        self.rollbacks: list[tuple[float, int]] = []
        self.unknown = 0

    def take(self, event: Mapping[str, Any]) -> None:
        time, kind = float(event["time"]), event.get("event")
        if kind == "attempt_started":
            self.attempts.append(_begun(event, time, self.attempts[-1] if self.attempts else None))
            return
        if kind == "rolled_back":
            self.rollbacks.append((time, _whole(event.get("step"))))
        if "attempt" not in event:
            return
        attempt = self.attempts[-1] if self.attempts else None
        if attempt is None or event.get("attempt") != attempt.number:
            # A drain or a removal of an attempt before may be told late; it tells nothing of the hours.
            attempt = next((each for each in reversed(self.attempts) if each.number == event.get("attempt")), None)
            if attempt is None:
                self.unknown += 1
            return
        if kind not in ("drained", "drain_failed", "pruned"):
            attempt.last = time
        _take_in(attempt, event, time)


def _begun(event: Mapping[str, Any], time: float, before: Attempt | None) -> Attempt:
    process = number_in(event.get("process_seconds"))
    known = process is not None and time - 86400 < process <= time
    earliest = before.last if before is not None else 0.0  # it may have waited, or be the same process
    return Attempt(
        number=_whole(event.get("attempt")),
        run_id=str(event.get("run_id") or ""),
        job_id=str(event.get("job_id") or ""),
        host=str(event.get("host") or ""),
        world_size=max(1, _whole(event.get("world_size"))),
        chain=str(event.get("chain") or ""),
        launch=str(event.get("launch") or ""),
        process=max(process, earliest) if process is not None and known else time,
        started=time,
        last=time,
        total_steps=_whole(event.get("total_steps")) or None,
    )


def _take_in(attempt: Attempt, event: Mapping[str, Any], time: float) -> None:
    kind, step, seconds = event.get("event"), event.get("step"), number_in(event.get("seconds"))
    saves = reversed(attempt.saves) if str(kind).startswith("save_") else ()
    save = next((each for each in saves if each.step == step), None)
    match kind:
        case "restored":
            attempt.restores.append((time - (seconds or 0.0), time))
            attempt.stretches.append(Stretch(_whole(step), time))
        case "first_step":
            if not attempt.stretches:
                attempt.stretches.append(Stretch(_whole(step) - 1, attempt.started))
            if (init := number_in(event.get("init_seconds"))) is not None and attempt.process == attempt.started:
                attempt.process = min(attempt.process, time - init)
            _mark(attempt, time, step)
        case "progress":
            attempt.speaks = True
            late = attempt.step - _whole(step)
            if not 0 < late < _whole(event.get("steps")):  # else a save of a later step was told first
                _mark(attempt, time, step)
            _count_stalls(attempt, event)
            metrics = event.get("metrics")
            found = {str(k): _metric(v) for k, v in metrics.items()} if isinstance(metrics, Mapping) else {}
            if numbers := {name: value for name, value in found.items() if value is not None}:
                attempt.metrics_step, attempt.metrics = _whole(step), numbers
            upcoming = event.get("next_save")
            attempt.next_save = upcoming if isinstance(upcoming, Mapping) else None
        case "save_begun":
            _mark(attempt, time, step)
            attempt.saves.append(Save(_whole(step), time, str(event.get("reason") or "")))
        case "save_staged" if save is not None and seconds is not None:
            _stalled(attempt, save, seconds, time)
        case "save_durable" if save is not None:
            save.durable, save.bytes = time, _whole(event.get("bytes"))
            took = number_in(event.get("stall_seconds"))
            if save.stall_seconds is None and took is not None:  # it blocked training until it was durable
                _stalled(attempt, save, took, time)
        case "save_failed" if save is not None:
            save.failed = str(event.get("cause") or "it failed")
        case "deadline":
            attempt.deadline = number_in(event.get("until_seconds"))
        case "finished" | "stopped" | "failed":
            attempt.state, attempt.ended = str(kind), time
            attempt.reason = str(event.get("reason") or "")
            attempt.silent_seconds = number_in(event.get("silent_seconds")) or 0.0
            _count_stalls(attempt, event)
            if attempt.first_step is not None:
                _mark(attempt, time - attempt.silent_seconds, step)


def _mark(attempt: Attempt, time: float, step: object) -> None:
    """Note that a step had ended by then. A step before the last one begins a stretch: the loop went back by itself."""
    step = _whole(step)
    if attempt.first_step is None:
        attempt.first_step = time
    if not attempt.stretches:
        attempt.stretches.append(Stretch(min(step, 0), attempt.started))
    stretch = attempt.stretches[-1]
    if step > stretch.last_step:
        stretch.marks.append((time, step))
    elif step < stretch.last_step:
        attempt.stretches.append(Stretch(step, time))


def _stalled(attempt: Attempt, save: Save, took: float, until: float) -> None:
    save.stall_seconds = took
    attempt.stalls.append((until - took, until))
    attempt.stalled_seconds += took


def _count_stalls(attempt: Attempt, event: Mapping[str, Any]) -> None:
    other = (number_in(event.get("stall_seconds")) or 0.0) - attempt.stalled_seconds
    attempt.other_stall_seconds = max(attempt.other_stall_seconds, other)


def _whole(value: object) -> int:
    return int(number_in(value) or 0)


def _metric(value: object) -> float | None:
    """A metric as the journal writes it: a number, or the text of one that is not finite."""
    if isinstance(value, str):
        return float(value) if value in ("nan", "inf", "-inf") else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
