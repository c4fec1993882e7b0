"""A run that was never made: its journal, the jobs of its chain, and where its hours really went."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ckptman.jobs.slurm.accounting import JobTimes
from ckptman.tools.monitoring.ledger import Kind

ENDINGS = ("stopped", "killed", "failed", "stalled", "silent", "in vain", "no run", "restarted")
PROGRESS_SECONDS = 30.0


@dataclass
class InventedRun:
    """Time goes on as it is told to; what the run does in it is written to `events`, `jobs` and `truth`."""

    seed: int
    step_seconds: float = 2.0
    interval_steps: int = 100
    stall_seconds: float = 3.0
    durable_seconds: float = 20.0
    now: float = 1_790_000_000.0
    events: list[dict[str, Any]] = field(default_factory=list)
    jobs: list[JobTimes] = field(default_factory=list)
    truth: Counter[Kind] = field(default_factory=Counter)
    durable_step: int = 0
    attempt: int = 0

    def __post_init__(self):
        self.random = random.Random(self.seed)
        self.begun = self.now
        self._trained = []
        """Steps that count so far, with the seconds each took."""

    def pass_time(self, kind, seconds):
        self.truth[kind] += seconds
        self.now += seconds

    def note(self, event, **fields):
        self.events.append({"time": self.now, "event": event, "attempt": self.attempt, **fields})

    def job(self, ending, steps, *, idle=0.0):
        """One job from its submission to its end, with `steps` steps before the end comes."""
        self.pass_time("idle", idle)
        submitted, job_id = self.now, str(len(self.jobs) + 1)
        self.pass_time("queueing", self.random.uniform(10, 4000))
        begun = self.now
        if ending == "no run":
            self.pass_time("starting", self.random.uniform(1, 30))
        else:
            self._attempt(job_id, ending, steps)
            if ending == "restarted":
                self._attempt(job_id, "stopped", steps)
        if ending not in ("killed", "silent"):
            self.pass_time("starting" if ending in ("in vain", "no run") else "ending", self.random.uniform(0.5, 5))
        self.jobs.append(JobTimes(job_id, submitted, begun, self.now, reason=ending))

    def finish(self):
        self.job("finished", 250)

    def roll_back(self, step):
        self.events.append({"time": self.now, "event": "rolled_back", "step": step})
        self.durable_step = step

    def _attempt(self, job_id, ending, steps):
        self.attempt += 1
        process = self.now
        self.pass_time("starting", self.random.uniform(5, 200))
        self.note("attempt_started", run_id="invented", job_id=job_id, world_size=8, process_seconds=process)
        if self.durable_step:
            took = self.random.uniform(1, 60)
            self.pass_time("restoring", took)
            self.note("restored", step=self.durable_step, seconds=took)
        if ending == "in vain":
            self.pass_time("starting", 3.0)
            self.note("failed", step=self.durable_step, reason="OSError: no data", error="OSError")
            return
        self._lose_after(self.durable_step)
        first, told, stalled = self.durable_step, self.now, 0.0
        self.pass_time("starting", 7.0)  # what the first step takes more than the others: it is compiled
        step, pending = first, None
        for step in range(first + 1, first + steps + 1):
            self._train(step)
            if step == first + 1:
                self.note("first_step", step=step, init_seconds=self.now - process)
                self.note("progress", step=step, stall_seconds=0.0, metrics={"loss": 1 / step})
            if pending and self.now >= pending[1]:
                self.durable_step = pending[0]
                self.note("save_durable", step=pending[0], stall_seconds=self.stall_seconds, bytes=8, seconds=20.0)
                pending = None
            if step % self.interval_steps == 0 and pending is None:
                self.note("save_begun", step=step, reason="every 100 steps")
                pending = (step, self.now + self.durable_seconds)
                self.pass_time("saving", self.stall_seconds)
                stalled += self.stall_seconds
                self.note("save_staged", step=step, seconds=self.stall_seconds)
            if self.now - told >= PROGRESS_SECONDS:
                told = self.now
                self.note("progress", step=step, stall_seconds=stalled, metrics={"loss": 1 / step})
        self._end(ending, step)

    def _end(self, ending, step):
        if ending in ("stopped", "finished"):
            self.note("save_begun", step=step, reason="the end")
            self.pass_time("saving", self.stall_seconds)
            self.note("save_durable", step=step, stall_seconds=self.stall_seconds, bytes=8, seconds=self.stall_seconds)
            self.durable_step = step
            self.note(ending, step=step, reason="SIGTERM on rank 0")
            return
        self._lose_after(self.durable_step)
        if ending == "stalled":
            self.pass_time("hung", 600.0)
            self.note("failed", step=step, reason="Stalled: ...", error="Stalled", silent_seconds=600.0)
        elif ending == "silent":
            self.pass_time("hung", 1800.0)
        elif ending == "failed":
            self.pass_time("repeated", 0.5)
            self.note("failed", step=step, reason="RuntimeError: boom", error="RuntimeError", cause="program")
        elif ending == "restarted":
            self.pass_time("repeated", 0.5)

    def _train(self, step):
        took = self.random.uniform(0.97, 1.03) * self.step_seconds
        self._trained.append((step, took))
        self.pass_time("training", took)

    def _lose_after(self, step):
        for _, seconds in [each for each in self._trained if each[0] > step]:
            self.truth["training"] -= seconds
            self.truth["repeated"] += seconds
        self._trained = [each for each in self._trained if each[0] <= step]


def invented(seed, attempts=24):
    """A run with every kind of end, a rollback in its middle, and an end."""
    run = InventedRun(seed)
    endings = [*ENDINGS, *(run.random.choice(ENDINGS) for _ in range(attempts - len(ENDINGS)))]
    run.random.shuffle(endings)
    for place, ending in enumerate(endings):
        run.job(ending, run.random.randint(20, 700), idle=run.random.choice([0.0, 0.0, 900.0]) if place else 0.0)
        if place == attempts // 2 and run.durable_step > 50:
            run.roll_back(run.durable_step - 50)
    run.finish()
    return run
