"""The goodput ledger: where the hours of a run went. Each moment from its beginning on is counted once, and only once.

The run is told as marks in order, "until then it was of this kind". The maximum of their times so far never goes back,
so the spans between them do not overlap, and add up to the whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from statistics import median
from typing import Literal, NamedTuple

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


@dataclass
class AttemptLedger:
    """Where the hours of one attempt went, by kind, the wait before it included, and how it ended.

    `ending`: finished, stopped, failed, killed or running. `seconds` and `waited_seconds` are summed up at last.
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
    seconds: Mapping[Kind, float] = field(default_factory=dict)
    waited_seconds: float = 0.0


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
    teller = _Teller(history, now, durable_step, is_now)
    marks = list(teller.marks())
    times = list(accumulate((min(mark.until, now) for mark in marks[1:]), max, initial=marks[0].until)) if marks else []
    pieces = [each for each in zip(marks[1:], times, times[1:]) if each[1] < each[2]]
    spans: list[Span] = []
    own: dict[int, list[Span]] = {}
    for (kind, attempt, ranks, place), group in groupby(pieces, lambda each: each[0][:-1]):
        together = list(group)
        spans.append(Span(kind, together[0][1], together[-1][2], attempt, ranks))
        own.setdefault(place, []).append(spans[-1])
    for place, each in enumerate(teller.attempts):
        parts = own.get(place, [])
        each.ended = parts[-1].end if parts else each.ended
        each.seconds = _sums(parts)
        each.waited_seconds = sum(span.seconds for span in parts if not span.world_size)
    seconds = _sums(spans)
    held = sum(span.seconds for span in spans if span.world_size)
    failures = sum(1 for each in teller.attempts if each.ending in FAILURES)
    mtbf = held / failures if failures else None
    begun = spans[0].begin if spans else now
    return Ledger(
        begun=begun,
        ended=spans[-1].end if spans else begun,
        is_running=is_now != "over",
        spans=tuple(spans),
        attempts=tuple(teller.attempts),
        seconds=seconds,
        rank_seconds={k: sum(span.seconds * span.world_size for span in spans if span.kind == k) for k in KINDS},
        failures=failures,
        mtbf_seconds=mtbf,
        interval_seconds=_interval_seconds(history),
        advised_seconds=_advised_seconds(history, mtbf),
        notes=history.notes,
    )


def add(ledgers: Sequence[Ledger]) -> Mapping[Kind, float]:
    """Return the seconds of several runs by kind."""
    return {kind: sum(each.seconds[kind] for each in ledgers) for kind in KINDS}


class _Mark(NamedTuple):
    """Since the mark before, the run was of this kind.

    `attempt`: the number of the attempt, 0 before it began. `ranks`: how many it held. `place`: the attempt that this
    counts to, by its place in the list, or -1.
    """

    kind: Kind
    attempt: int
    ranks: int
    place: int
    until: float


@dataclass(frozen=True)
class _Stay:
    """One start of a job and the attempts in it; without a known job, the attempts of one launch."""

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
        """Whether its end is known: an attempt that recorded none may have held its nodes for long."""
        return self.ended is not None or (bool(self.attempts) and self.attempts[-1].ended is not None)


class _Teller:
    """Tells a run from its beginning to now, and lists its attempts."""

    def __init__(self, history: RunHistory, now: float, durable_step: int | None, is_now: Now) -> None:
        self.attempts: list[AttemptLedger] = []
        self._history, self._now, self._is_now = history, now, is_now
        self._alive = history.last if is_now == "running" else None
        self._bounds = _bounds(history, durable_step, self._alive is not None)

    def marks(self) -> Iterator[_Mark]:
        """The first one is the beginning of the run."""
        before: _Stay | None = None
        ranks = 1
        stays = _stays(self._history)
        for number, stay in enumerate(stays, 1):
            place = len(self.attempts)
            yield from (_Mark(kind, 0, 0, place, until) for kind, until in self._wait(before, stay))
            for attempt, following in zip(stay.attempts, [*stay.attempts[1:], None]):
                place, ranks = len(self.attempts), attempt.world_size
                until = stay.ended if following is None else following.process
                self.attempts.append(self._of_attempt(stay, attempt))
                for kind, end in self._run(attempt, until):
                    yield _Mark(kind, attempt.number, ranks, place, end)
            if not stay.attempts and stay.job is not None:  # its script ended before a run began, or has just begun
                is_starting = stay.ended is None and number == len(stays) and self._is_now == "starting"
                self.attempts.append(_of_job(stay.job, is_starting))
                yield _Mark("starting", 0, ranks, place, self._now if is_starting else stay.ended or 0.0)
            before = stay
        if before is not None and before.attempts and self._is_now == "starting":
            yield _Mark("starting", 0, ranks, -1, self._now)
        elif before is not None and self._is_now == "queued":
            yield _Mark("queueing" if before.is_over else "unknown", 0, 0, -1, self._now)

    def _wait(self, before: _Stay | None, stay: _Stay) -> Iterator[tuple[Kind, float]]:
        """The time until a job began: it waited in the queue, or nobody had submitted it."""
        job = stay.job
        submitted = job.submitted if job is not None else None
        if before is None:
            yield "idle", stay.begun if submitted is None else min(submitted, stay.begun)
        earlier = before.job if before is not None else None
        is_requeued = job is not None and earlier is not None and job.job_id != "" and earlier.job_id == job.job_id
        is_over = before is None or before.is_over
        if submitted is not None or is_requeued:
            if submitted is not None and not is_requeued:
                yield "idle" if is_over else "unknown", submitted
            yield "queueing", stay.begun
        else:
            was_there = is_over and not any(attempt.job_id for attempt in stay.attempts)
            yield "idle" if was_there else "unknown", stay.begun

    def _run(self, attempt: Attempt, until: float | None) -> Iterator[tuple[Kind, float]]:
        """One attempt, until its job ended or the next attempt in it began; None: nobody knows when."""
        if attempt is self._alive:
            until = self._now
        last_heard = attempt.last - attempt.silent_seconds
        ends = until if until is not None else attempt.last
        is_silent = attempt.ended is None and attempt.speaks and ends - last_heard > silence_seconds(attempt)
        trained = last_heard
        if attempt.ended is None and not is_silent:
            if attempt is self._alive:
                trained = ends
            elif attempt.speaks:
                # If it was killed, it can have trained until its next heartbeat; the rest passed until Slurm noticed.
                trained = min(ends, last_heard + max(HEARTBEAT_SECONDS, attempt.step_seconds or 0.0))
        for stretch, following in zip(attempt.stretches, [*attempt.stretches[1:], None]):
            yield from _start(attempt, stretch)
            if attempt.first_step is not None:
                yield from self._train(attempt, stretch, trained if following is None else stretch.last_time)
        if attempt.first_step is None:
            yield from _restore(attempt, math.inf)
            yield "starting", trained
        if attempt.ended is not None:
            yield "hung", attempt.ended
            yield "ending", ends
        elif attempt.first_step is None:
            yield "starting", ends
        else:
            yield "hung" if is_silent else "ending" if attempt.speaks else "unknown", ends

    def _train(self, attempt: Attempt, stretch: Stretch, until: float) -> Iterator[tuple[Kind, float]]:
        """Training until a moment: what counted, then what was for nothing, and the saves that it waited for."""
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
        since = stretch.begin
        if stretch is attempt.stretches[0] and attempt.first_step is not None:
            since = max(since, attempt.first_step - (attempt.step_seconds or 0.0))
        for begin, end in [*_stalls(attempt, since, turn, until), (until, until)]:
            yield "training", min(turn, begin)
            yield rest, begin
            yield "saving", end

    def _of_attempt(self, stay: _Stay, attempt: Attempt) -> AttemptLedger:
        """Note how an attempt ended; the wait before a job is that of its first."""
        ending, reason = attempt.state, attempt.reason
        job = stay.job if attempt is stay.attempts[-1] and attempt is not self._alive else None
        if ending == "running" and attempt is not self._alive:
            ending, reason = "killed", (job.reason if job is not None else "") or "it did not say that it ended"
        if job is not None and job.chain and job.reason:  # it knows who asked the run to stop, and what failed first
            ending = "interrupted" if job.ending == "interrupted" else ending
            reason = job.reason
        return AttemptLedger(
            number=attempt.number,
            job_id=attempt.job_id,
            host=attempt.host,
            world_size=attempt.world_size,
            begun=stay.begun if attempt is stay.attempts[0] else attempt.process,
            ended=attempt.last,
            start_step=attempt.stretches[0].start_step if attempt.stretches else 0,
            step=attempt.step,
            ending=ending,
            reason=reason,
        )


def _restore(attempt: Attempt, until: float) -> Iterator[tuple[Kind, float]]:
    for begin, end in attempt.restores:
        if end <= until:
            yield "starting", begin
            yield "restoring", end


def _start(attempt: Attempt, stretch: Stretch) -> Iterator[tuple[Kind, float]]:
    """What came before a stretch: imports, the restore, and what its first step took more than others."""
    yield from _restore(attempt, stretch.begin)
    yield "starting", stretch.begin
    usual = attempt.step_seconds
    if stretch is attempt.stretches[0] and attempt.first_step is not None and usual is not None:
        yield "starting", attempt.first_step - usual


def _of_job(job: JobTimes, is_starting: bool) -> AttemptLedger:
    ending, reason = job.ending or "killed", job.reason or "no run began in it"
    if is_starting:
        ending, reason = "running", "no run has begun in it yet"
    begun = job.begun or 0.0
    return AttemptLedger(0, job.job_id, "", 0, begun, begun, 0, 0, ending, reason)


def silence_seconds(attempt: Attempt) -> float:
    """Return after how long without a word an attempt is taken to hang."""
    return max(SILENCE_SECONDS, SILENCE_STEPS * (attempt.step_seconds or 0.0))


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
