"""The goodput ledger: where the hours of a run went. Each moment from its beginning on is counted once, and only once.

So the parts add up to the whole by the way they are made: a cursor goes through the run, from one moment to the next,
and each piece that it passes is of one kind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from ckptman.errors import CkptmanError
from ckptman.forecast.goodput import best_interval_seconds
from ckptman.monitoring.history import Attempt, RunHistory, Stretch
from ckptman.runtime.failure_trace import trace_of
from ckptman.scheduler.slurm.accounting import JobTimes

Kind = Literal[
    "training", "repeated", "saving", "restoring", "starting", "ending", "hung", "queueing", "idle", "unknown"
]
KINDS: Mapping[Kind, str] = {
    "training": "training that counted",
    "repeated": "training lost, and computed twice",
    "saving": "stalled by saves",
    "restoring": "restoring",
    "starting": "starting",
    "ending": "ending",
    "hung": "lost to hangs",
    "queueing": "queueing",
    "idle": "idle: nothing was in the queue",
    "unknown": "not known",
}
"""All kinds, in the order in which they are shown, and what each is."""
WAITING: tuple[Kind, ...] = ("queueing", "idle", "unknown")
"""Kinds in which the run held no GPUs, as far as is known."""
SILENCE_SECONDS = 90.0
"""An attempt that says every 30 s that steps end, and has said nothing for so long, makes none."""


@dataclass(frozen=True)
class Span:
    """A piece of a run. Times in unix seconds; `attempt`: its number, 0 between attempts; `world_size`: ranks that it
    held, 0 where it held none."""

    kind: Kind
    begin: float
    end: float
    attempt: int = 0
    world_size: int = 0

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class AttemptLedger:
    """Where the hours of one attempt went, by kind, the wait before it included, and how it ended.

    `ending`: finished, stopped, failed, killed or running. Seconds, and steps.
    """

    number: int
    job_id: str
    host: str
    world_size: int
    begun: float
    ended: float
    start_step: int
    step: int
    ending: str
    reason: str
    seconds: Mapping[Kind, float]


@dataclass(frozen=True)
class Ledger:
    """Where the hours of a run went. Seconds, and unix seconds.

    `rank_seconds`: the same, times the ranks (GPUs, as a rule) that were held meanwhile. `mtbf_seconds`: held time over
    failures; None: nothing failed. `interval_seconds`: from save to save, as it was; `advised_seconds`: as it should be
    at that MTBF; None: not known.
    """

    begun: float
    ended: float
    is_running: bool
    spans: tuple[Span, ...]
    attempts: tuple[AttemptLedger, ...]
    seconds: Mapping[Kind, float]
    rank_seconds: Mapping[Kind, float]
    failures: int
    mtbf_seconds: float | None
    interval_seconds: float | None
    advised_seconds: float | None
    notes: tuple[str, ...]

    @property
    def total_seconds(self) -> float:
        return self.ended - self.begun

    @property
    def held_seconds(self) -> float:
        """The time for which the run held an allocation, or a machine."""
        return self.total_seconds - sum(self.seconds[kind] for kind in WAITING)

    @property
    def goodput(self) -> float | None:
        """Training that counted, as a share of the time that was held; None where none was."""
        return self.seconds["training"] / self.held_seconds if self.held_seconds > 0 else None


def make_ledger(history: RunHistory, now: float, *, durable_step: int | None = None, is_alive: bool = False) -> Ledger:
    """Return the ledger of a run.

    Args:
        history: what is known of it.
        now: unix seconds.
        durable_step: the newest step that is on disk; None: as the journal knows.
        is_alive: whether the last attempt is at work.
    """
    counter = _Counter(history, now, durable_step, is_alive)
    counter.count()
    spans = tuple(counter.spans)
    seconds = _sums(spans)
    gpu = {kind: sum(span.seconds * span.world_size for span in spans if span.kind == kind) for kind in KINDS}
    failures, mtbf = _failures(history, seconds, counter.attempts)
    used = _interval_seconds(history)
    begun = spans[0].begin if spans else now
    return Ledger(
        begun=begun,
        ended=spans[-1].end if spans else begun,
        is_running=is_alive,
        spans=spans,
        attempts=tuple(counter.attempts),
        seconds=seconds,
        rank_seconds=gpu,
        failures=failures,
        mtbf_seconds=mtbf,
        interval_seconds=used,
        advised_seconds=_advised_seconds(history, mtbf),
        notes=history.notes,
    )


def add(ledgers: Sequence[Ledger]) -> Mapping[Kind, float]:
    """Return the seconds of several runs by kind."""
    return {kind: sum(each.seconds[kind] for each in ledgers) for kind in KINDS}


@dataclass(frozen=True)
class _Stay:
    """One start of a job and the attempts in it; or where no job is known, those of one launch, which have none."""

    job: JobTimes | None
    attempts: list[Attempt]

    @property
    def begun(self) -> float:
        told = [self.job.begun] if self.job is not None and self.job.begun is not None else []
        return min([*told, *(attempt.process for attempt in self.attempts)])

    @property
    def ended(self) -> float | None:
        return self.job.ended if self.job is not None else None


class _Counter:
    """Goes through a run from its beginning to now."""

    def __init__(self, history: RunHistory, now: float, durable_step: int | None, is_alive: bool) -> None:
        self.spans: list[Span] = []
        self.attempts: list[AttemptLedger] = []
        self._history, self._now = history, now
        self._alive = history.last if is_alive else None
        self._bounds = _bounds(history, durable_step, is_alive)
        self._cursor = 0.0
        self._attempt: Attempt | None = None
        self._first = 0
        """The first span of the attempt that is counted."""

    def count(self) -> None:
        before: _Stay | None = None
        for stay in _stays(self._history):
            self._attempt, self._first = None, len(self.spans)
            self._wait(before, stay)
            for place, attempt in enumerate(stay.attempts):
                self._attempt = attempt
                is_last = place + 1 == len(stay.attempts)
                self._run(attempt, stay.ended if is_last else stay.attempts[place + 1].process)
                self._note(stay, attempt)
            if not stay.attempts and stay.job is not None:  # its script ended before a run began
                self._advance("starting", stay.ended or self._cursor)
                self.attempts.append(_of_job(stay.job, self.spans[self._first :]))
            before = stay

    def _wait(self, before: _Stay | None, stay: _Stay) -> None:
        """Count the time until a job began: it waited in the queue, or nobody had submitted it."""
        job = stay.job
        submitted = job.submitted if job is not None else None
        if before is None:
            self._cursor = stay.begun if submitted is None else min(submitted, stay.begun)
        if job is not None and before is not None and before.job is not None and before.job.job_id == job.job_id:
            submitted = self._cursor  # it was requeued
        if submitted is not None:
            self._advance("idle", submitted)
            self._advance("queueing", stay.begun)
        elif any(attempt.job_id for attempt in stay.attempts):
            self._advance("unknown", stay.begun)
        else:
            self._advance("idle", stay.begun)

    def _run(self, attempt: Attempt, until: float | None) -> None:
        """Count one attempt, until its job ended or the next attempt in it began; None: nobody knows when."""
        if attempt is self._alive:
            until = self._now
        last_heard = attempt.last - attempt.silent_seconds
        ends = until if until is not None else attempt.last
        if attempt.ended is not None:
            silent_since = trained = last_heard
        else:
            # One that speaks is taken to have trained on if it was killed soon after; of another nobody knows.
            is_silent = attempt.speaks and ends - last_heard > SILENCE_SECONDS
            goes_on = attempt is self._alive or attempt.speaks
            trained = silent_since = ends if goes_on and not is_silent else last_heard
        for place, stretch in enumerate(attempt.stretches):
            following = attempt.stretches[place + 1].begin if place + 1 < len(attempt.stretches) else None
            self._start(attempt, stretch)
            if attempt.first_step is not None:
                self._train(attempt, stretch, trained if following is None else stretch.last_time)
        if attempt.first_step is None:
            self._restore(attempt, math.inf)
            self._advance("starting", silent_since)
        if attempt.ended is not None:
            self._advance("hung", attempt.ended)
            self._advance("ending", ends)
        elif attempt.first_step is None:
            self._advance("starting", ends)
        else:
            self._advance("hung" if attempt.speaks else "unknown", ends)

    def _restore(self, attempt: Attempt, until: float) -> None:
        for begin, end in attempt.restores:
            if self._cursor < end <= until:
                self._advance("starting", begin)
                self._advance("restoring", end)

    def _start(self, attempt: Attempt, stretch: Stretch) -> None:
        """Count what came before a stretch: imports, the restore, and what its first step took more than others."""
        self._restore(attempt, stretch.begin)
        self._advance("starting", stretch.begin)
        usual = attempt.step_seconds
        if stretch is attempt.stretches[0] and attempt.first_step is not None and usual is not None:
            self._advance("starting", attempt.first_step - usual)

    def _train(self, attempt: Attempt, stretch: Stretch, until: float) -> None:
        """Count training until a moment: what counted, then what was for nothing, and the saves it waited for."""
        bound = self._bounds[id(stretch)]
        rest: Kind = "repeated"
        if attempt is self._alive and math.isinf(bound):
            turn = until
        else:
            pace = attempt.step_seconds or 0.0
            beyond = 0.0 if math.isinf(bound) else max(0.0, bound - stretch.last_step) * pace
            turn = min(until, stretch.time_of(min(bound, stretch.last_step)) + beyond)
            if attempt.state in ("finished", "stopped") and bound >= stretch.last_step:
                rest = "ending"  # its last step counted, and there was nothing after it
        for begin, end in [*_stalls(attempt, self._cursor, turn, until), (until, until)]:
            self._advance("training", min(turn, begin))
            self._advance(rest, begin)
            self._advance("saving", end)

    def _advance(self, kind: Kind, until: float) -> None:
        until = min(until, self._now)
        if until <= self._cursor:
            return
        attempt = self._attempt
        held = 0 if kind in WAITING or attempt is None else attempt.world_size
        number = 0 if kind in WAITING or attempt is None else attempt.number
        if len(self.spans) > self._first and (self.spans[-1].kind, self.spans[-1].attempt) == (kind, number):
            self.spans[-1] = Span(kind, self.spans[-1].begin, until, number, held)
        else:
            self.spans.append(Span(kind, self._cursor, until, number, held))
        self._cursor = until

    def _note(self, stay: _Stay, attempt: Attempt) -> None:
        """Note how an attempt ended; the wait before a job is that of its first."""
        own = self.spans[self._first :]
        self._first = len(self.spans)
        ending, reason = attempt.state, attempt.reason
        if ending == "running" and attempt is not self._alive:
            told = stay.job.reason if stay.job is not None and attempt is stay.attempts[-1] else ""
            ending, reason = "killed", told or "it did not say that it ended"
        self.attempts.append(
            AttemptLedger(
                number=attempt.number,
                job_id=attempt.job_id,
                host=attempt.host,
                world_size=attempt.world_size,
                begun=stay.begun if attempt is stay.attempts[0] else attempt.process,
                ended=own[-1].end if own else attempt.last,
                start_step=attempt.stretches[0].start_step if attempt.stretches else 0,
                step=attempt.step,
                ending=ending,
                reason=reason,
                seconds=_sums(own),
            )
        )


def _of_job(job: JobTimes, spans: Sequence[Span]) -> AttemptLedger:
    begun = job.begun or (spans[0].begin if spans else 0.0)
    ended = spans[-1].end if spans else begun
    ending, reason = job.ending or "killed", job.reason or "no run began in it"
    return AttemptLedger(0, job.job_id, "", 0, begun, ended, 0, 0, ending, reason, _sums(spans))


def _stays(history: RunHistory) -> list[_Stay]:
    """Return the jobs of a run with the attempts in each, in the order in which they began."""
    stays = {id(job): _Stay(job, []) for job in history.jobs if job.begun is not None}
    alone: list[_Stay] = []
    for attempt in history.attempts:
        job = history.job_of(attempt)
        if job is not None:
            stays[id(job)].attempts.append(attempt)
        elif attempt.launch and alone and alone[-1].attempts[-1].launch == attempt.launch:
            alone[-1].attempts.append(attempt)
        else:
            alone.append(_Stay(None, [attempt]))
    return sorted([*stays.values(), *alone], key=lambda stay: stay.begun)


def _bounds(history: RunHistory, durable_step: int | None, is_alive: bool) -> dict[int, float]:
    """Return for each stretch the last step of it that counted: nothing later went on from an earlier one."""
    bounds: dict[int, float] = {}
    bound = math.inf
    last = history.last
    if last is not None and last.state != "finished" and not is_alive:
        saved = [save.step for attempt in history.attempts for save in attempt.saves if save.durable is not None]
        newest = durable_step if durable_step is not None else (saved[-1] if saved else 0)
        bound = float(newest)
    back = list(history.rollbacks)
    for attempt in reversed(history.attempts):
        for time, step in [each for each in back if each[0] >= attempt.started]:
            bound = min(bound, step)
            back.remove((time, step))
        for stretch in reversed(attempt.stretches):
            bounds[id(stretch)] = bound
            if attempt.first_step is not None:
                bound = min(bound, stretch.start_step)
    return bounds


def _stalls(attempt: Attempt, since: float, turn: float, until: float) -> list[tuple[float, float]]:
    """Return when training waited for saves between two moments, oldest first.

    Of saves to memory the journal tells in all, and not one by one: they are one piece, before the `turn`.
    """
    own = [(max(begin, since), min(end, until)) for begin, end in attempt.stalls if end > since and begin < until]
    more = attempt.other_stall_seconds
    if more > 0 and turn >= attempt.stretches[-1].begin:
        latest = max([since, *(end for _, end in own if end <= turn)])
        own.append((max(latest, turn - more), turn))
    return sorted(own)


def _sums(spans: Sequence[Span]) -> dict[Kind, float]:
    return {kind: sum(span.seconds for span in spans if span.kind == kind) for kind in KINDS}


def _failures(
    history: RunHistory, seconds: Mapping[Kind, float], attempts: Sequence[AttemptLedger]
) -> tuple[int, float | None]:
    """Return how many attempts failed or were killed, and the time that was held for each of them."""
    failures = sum(1 for each in attempts if each.ending in ("failed", "killed", "crashed", "interrupted"))
    held = sum(seconds[kind] for kind in KINDS if kind not in WAITING)
    return failures, held / failures if failures else None


def _interval_seconds(history: RunHistory) -> float | None:
    """Return the median time from save to save within an attempt."""
    gaps = [
        after.begun - before.begun
        for attempt in history.attempts
        for before, after in zip(attempt.saves, attempt.saves[1:])
    ]
    return median(gaps) if gaps else None


def _advised_seconds(history: RunHistory, mtbf_seconds: float | None) -> float | None:
    """Return the interval that loses least by Daly's formula, at the measured stall and MTBF."""
    if mtbf_seconds is None:
        return None
    try:
        trace = trace_of(history.events, history.root)
        saves = [save.durable - save.begun for each in history.attempts for save in each.saves if save.durable]
        if trace.stall_seconds is None:
            return None
        return max(best_interval_seconds(trace.stall_seconds, mtbf_seconds), median(saves) if saves else 0.0)
    except CkptmanError:
        return None
