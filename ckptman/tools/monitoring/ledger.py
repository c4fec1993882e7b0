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

from ckptman.forecast.goodput import best_interval_seconds
from ckptman.jobs.slurm.accounting import JobTimes
from ckptman.tools.monitoring.history import Attempt, RunHistory, Stretch

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
FAILURES = ("failed", "killed", "crashed", "interrupted")
"""Ends that nobody asked for."""
HEARTBEAT_SECONDS = 30.0
"""An attempt records so often that steps end."""
SILENCE_SECONDS, SILENCE_STEPS = 90.0, 10
"""An attempt that has recorded nothing for so long and so many steps makes none."""
Now = Literal["running", "queued", "starting", "over"]
"""What a run is at: it trains; its next job waits, or has begun and does not train yet; or nothing of it is there."""


@dataclass(frozen=True)
class Span:
    """A piece of a run. Times in unix seconds; `attempt`: its number, 0 between attempts; `world_size`: the ranks that
    were held; 0 where nothing was, as far as is known."""

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
    waited_seconds: float


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
        """The time for which the run held an allocation, or a machine, as far as is known."""
        return sum(span.seconds for span in self.spans if span.world_size)

    @property
    def goodput(self) -> float | None:
        """Training that counted, as a share of the time that was held; None where none was."""
        return self.seconds["training"] / self.held_seconds if self.held_seconds > 0 else None


def make_ledger(history: RunHistory, now: float, *, durable_step: int | None = None, is_now: Now = "over") -> Ledger:
    """Return the ledger of a run.

    Args:
        history: what is known of it.
        now: unix seconds.
        durable_step: the newest step that is on disk; None: as the journal knows.
        is_now: what it is at.
    """
    counter = _Counter(history, now, durable_step, is_now)
    counter.count()
    spans = tuple(counter.spans)
    seconds = _sums(spans)
    gpu = {kind: sum(span.seconds * span.world_size for span in spans if span.kind == kind) for kind in KINDS}
    failures = sum(1 for each in counter.attempts if each.ending in FAILURES)
    held = sum(span.seconds for span in spans if span.world_size)
    mtbf = held / failures if failures else None
    used = _interval_seconds(history)
    begun = spans[0].begin if spans else now
    return Ledger(
        begun=begun,
        ended=spans[-1].end if spans else begun,
        is_running=is_now != "over",
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

    @property
    def is_over(self) -> bool:
        """Whether it is known when it ended: an attempt that did not say so may have held its nodes for long."""
        return self.ended is not None or (bool(self.attempts) and self.attempts[-1].ended is not None)


class _Counter:
    """Goes through a run from its beginning to now."""

    def __init__(self, history: RunHistory, now: float, durable_step: int | None, is_now: Now) -> None:
        self.spans: list[Span] = []
        self.attempts: list[AttemptLedger] = []
        self._history, self._now, self._is_now = history, now, is_now
        self._alive = history.last if is_now == "running" else None
        self._bounds = _bounds(history, durable_step, self._alive is not None)
        self._cursor = 0.0
        self._attempt: Attempt | None = None
        self._ranks = 0
        """So many are held at the moment."""
        self._first = 0
        """The first span of the attempt that is counted."""

    def count(self) -> None:
        before: _Stay | None = None
        stays = _stays(self._history)
        for number, stay in enumerate(stays, 1):
            self._attempt, self._first, held = None, len(self.spans), max(1, self._ranks)
            self._ranks = 0
            self._wait(before, stay)
            self._ranks = stay.attempts[0].world_size if stay.attempts else held
            for place, attempt in enumerate(stay.attempts):
                self._attempt, self._ranks = attempt, attempt.world_size
                is_last = place + 1 == len(stay.attempts)
                self._run(attempt, stay.ended if is_last else stay.attempts[place + 1].process)
                self._note(stay, attempt)
            if not stay.attempts and stay.job is not None:  # its script ended before a run began, or has just begun
                is_starting = stay.ended is None and number == len(stays) and self._is_now == "starting"
                self._advance("starting", self._now if is_starting else (stay.ended or self._cursor))
                self.attempts.append(_of_job(stay.job, self.spans[self._first :], is_starting))
            before = stay
        self._attempt, self._first = None, len(self.spans)
        if before is not None and before.attempts and self._is_now == "starting":
            self._advance("starting", self._now)
        elif before is not None and self._is_now == "queued":
            self._ranks = 0
            self._advance("queueing" if before.is_over else "unknown", self._now)

    def _wait(self, before: _Stay | None, stay: _Stay) -> None:
        """Count the time until a job began: it waited in the queue, or nobody had submitted it."""
        job = stay.job
        submitted = job.submitted if job is not None else None
        if before is None:
            self._cursor = stay.begun if submitted is None else min(submitted, stay.begun)
        earlier = before.job if before is not None else None
        if job is not None and earlier is not None and job.job_id and earlier.job_id == job.job_id:
            submitted = self._cursor  # it was requeued
        is_over = before is None or before.is_over
        if submitted is not None:
            self._advance("idle" if is_over else "unknown", submitted)
            self._advance("queueing", stay.begun)
        elif is_over and not any(attempt.job_id for attempt in stay.attempts):
            self._advance("idle", stay.begun)
        else:
            self._advance("unknown", stay.begun)

    def _run(self, attempt: Attempt, until: float | None) -> None:
        """Count one attempt, until its job ended or the next attempt in it began; None: nobody knows when."""
        if attempt is self._alive:
            until = self._now
        last_heard = attempt.last - attempt.silent_seconds
        ends = until if until is not None else attempt.last
        if attempt.ended is not None:
            silent_since = trained = last_heard
        else:
            # If it was killed, it can have trained until its next heartbeat; the rest passed until Slurm noticed.
            is_silent = attempt.speaks and ends - last_heard > silence_seconds(attempt)
            trained = last_heard
            if attempt is self._alive and not is_silent:
                trained = ends
            elif attempt.speaks and not is_silent:
                trained = min(ends, last_heard + max(HEARTBEAT_SECONDS, attempt.step_seconds or 0.0))
            silent_since = trained
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
            self._advance("hung" if is_silent else "ending" if attempt.speaks else "unknown", ends)

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
        number, held = self._attempt.number if self._attempt is not None else 0, self._ranks
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
        job = stay.job if attempt is stay.attempts[-1] and attempt is not self._alive else None
        if ending == "running" and attempt is not self._alive:
            ending, reason = "killed", (job.reason if job is not None else "") or "it did not say that it ended"
        if job is not None and job.chain and job.reason:  # it knows who asked the run to stop, and what failed first
            ending = "interrupted" if job.ending == "interrupted" else ending
            reason = job.reason
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
                waited_seconds=sum(span.seconds for span in own if not span.world_size),
            )
        )


def silence_seconds(attempt: Attempt) -> float:
    """Return after how long without a word an attempt is taken to hang."""
    return max(SILENCE_SECONDS, SILENCE_STEPS * (attempt.step_seconds or 0.0))


def _of_job(job: JobTimes, spans: Sequence[Span], is_starting: bool) -> AttemptLedger:
    begun = job.begun or (spans[0].begin if spans else 0.0)
    ended = spans[-1].end if spans else begun
    ending, reason = job.ending or "killed", job.reason or "no run began in it"
    if is_starting:
        ending, reason = "running", "no run has begun in it yet"
    waited = sum(span.seconds for span in spans if not span.world_size)
    return AttemptLedger(0, job.job_id, "", 0, begun, ended, 0, 0, ending, reason, _sums(spans), waited)


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
    return sorted([*stays.values(), *alone], key=lambda stay: stay.attempts[0].started if stay.attempts else stay.begun)


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

    Of saves to memory the journal tells in all, and not one by one: they are put before the `turn`, between the others.
    """
    own = sorted((max(begin, since), min(end, until)) for begin, end in attempt.stalls if end > since and begin < until)
    if turn < attempt.stretches[-1].begin:
        return own
    more, free_until, others = attempt.other_stall_seconds, turn, list[tuple[float, float]]()
    for begin, end in [*reversed([each for each in own if each[1] <= turn]), (since, since)]:
        piece = min(more, max(0.0, free_until - end))
        others.append((free_until - piece, free_until))
        more, free_until = more - piece, begin
    return sorted([*own, *(each for each in others if each[1] > each[0])])


def _sums(spans: Sequence[Span]) -> dict[Kind, float]:
    return {kind: sum(span.seconds for span in spans if span.kind == kind) for kind in KINDS}


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
    saves = [save for attempt in history.attempts for save in attempt.saves]
    stalls = [save.stall_seconds for save in saves if save.stall_seconds is not None]
    took = [save.durable - save.begun for save in saves if save.durable is not None]
    if mtbf_seconds is None or not stalls or not took:
        return None
    return max(best_interval_seconds(median(stalls), mtbf_seconds), median(took))
