"""What a run measures about itself: how long its start, its steps and its saves take."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckptman.engine.saving.writer import SaveReport
from ckptman.policies.intervals import StepMeter
from ckptman.policies.retention_rules import is_known_time
from ckptman.policies.save_policies import Facts, SavePolicy, next_save


class TimeLost:
    """Adds up how long a thread was in its blocks. One within another counts once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._begun, self._depth = 0.0, 0

    def __enter__(self) -> None:
        if not self._depth:
            self._begun = time.monotonic()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self.seconds += time.monotonic() - self._begun

    def around(self, function: Callable[[], None]) -> Callable[[], None]:
        """Return a function whose time is added up."""

        def call() -> None:
            with self:
                function()

        return call


class SaveTimes:
    """When saves to one place began and ended, and what they took. All times in seconds.

    `durable_seconds`: what a save took in earlier attempts; it stands until one of this attempt was measured.
    """

    def __init__(self, monotonic: Callable[[], float], durable_seconds: float | None = None) -> None:
        self._monotonic = monotonic
        self.stall_seconds: float | None = None
        self.durable_seconds = durable_seconds
        self.durable_step: int | None = None
        """The step of the last save of this attempt that is durable."""
        # What a crash now would fall back to: (step or None, when its save began), and the same for what is durable.
        self._saved: tuple[int | None, float] = (None, monotonic())
        self._committed: tuple[int | None, float] = self._saved
        self._begun: deque[tuple[int | None, float]] = deque()

    @property
    def saved_step(self) -> int | None:
        """The last step saved, being saved, or restored from."""
        return self._saved[0]

    @property
    def seconds_since_save(self) -> float:
        """Since the last save began, or training did."""
        return self._monotonic() - self._saved[1]

    def start(self, step: int | None, age_seconds: float = 0.0) -> None:
        """Start training with a checkpoint that is so old; `step` None: there is none."""
        self._saved = self._committed = (step, self._monotonic() - age_seconds)

    def begins(self, step: int) -> None:
        """Note that a save of `step` begins."""
        self._saved = (step, self._monotonic())
        self._begun.append(self._saved)

    def ended(self, report: SaveReport) -> None:
        """Note that a save is durable."""
        self.stall_seconds, self.durable_seconds = report.stall_seconds, report.durable_seconds
        self.durable_step = report.step
        while self._begun:
            begun = self._begun.popleft()
            if begun[0] == report.step:
                self._committed = begun
                break

    def failed(self) -> None:
        """Note that a save failed, and none is running: what was committed last is what counts."""
        self._saved = self._committed
        self._begun.clear()


class Timings:
    """Turns what happens into the facts that policies decide on. All times in seconds; `deadline` is unix time.

    `durable_seconds`: what a save took in earlier attempts; it stands until one of this attempt was measured.
    """

    def __init__(
        self,
        process_started: float,
        deadline: float | None,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        durable_seconds: float | None = None,
    ) -> None:
        self.deadline = deadline
        self._monotonic = monotonic
        self.previous_step = 0
        """The last step that ended; before the first, the one training starts from."""
        self._process_started, self._wall = process_started, wall
        self._meter = StepMeter()
        self._init_seconds: float | None = None
        self._start_step = 0
        self._made = self._step_began = monotonic()
        self.saves = SaveTimes(monotonic, durable_seconds)
        """Those to the root of the run."""
        self.memory_saves = SaveTimes(monotonic)
        """Those to the memory of the nodes."""
        self.stall = TimeLost()
        """How long the training has waited for saves of both kinds in this attempt."""

    @property
    def step_seconds(self) -> float | None:
        """How long a step takes; None before it was measured."""
        return self._meter.step_seconds

    def start(self, step: int, restored: bool, on_disk: tuple[int, float] | None = None) -> None:
        """Start training after `step`. `on_disk`: where that is in memory alone, the newest step on disk, 0 where there
        is none, and its age in seconds."""
        self._start_step = self.previous_step = step
        self._step_began = self._monotonic()
        self.saves.start(*((step if restored else None,) if on_disk is None else on_disk))
        self.memory_saves.start(step if restored else None)

    def step_ended(self) -> tuple[str, dict[str, Any]] | None:
        """End a step. Returns what the journal is to say of it, as event and fields; None: nothing.

        `first_step`: the first one of this attempt. `pace_changed`: steps have become so much slower or faster that
        intervals were derived anew.
        """
        drifted = self._meter.observe(max(0.0, self._monotonic() - self._step_began))
        if self._init_seconds is None:
            self._init_seconds = self._seconds_since_start()
            return "first_step", {"init_seconds": self._init_seconds}
        if drifted:
            return "pace_changed", {"step_seconds": self._meter.step_seconds}
        return None

    def step_begins(self, after: int) -> None:
        """Begin the step after `after`: what was spent since `step_ended` is not counted as its time."""
        self.previous_step = after
        self._step_began = self._monotonic()

    def facts(self, step: int, *, ahead: bool, stop: str | None = None, of: SaveTimes | None = None) -> Facts:
        """Return the facts at the end of `step`; `ahead`: it is the next one, so one step's time is added to now.
        `of`: which saves they are about; None: those to the root."""
        of = of or self.saves
        step_seconds = self._meter.step_seconds
        later = step_seconds or 0.0 if ahead else 0.0
        left = None
        if self.deadline is not None and is_known_time(now := self._wall()):  # a signal comes by a broken clock too
            left = self.deadline - now - later
        return Facts(
            step,
            self.previous_step,
            of.saved_step,
            self._start_step,
            of.seconds_since_save + later,
            self._init_seconds,
            step_seconds,
            of.stall_seconds,
            of.durable_seconds,
            left,
            stop,
        )

    def outlook(self, policy: SavePolicy) -> dict[str, Any]:
        """Return what the run foresees: `next_save` with its step, the seconds until then and the reason."""
        facts = self.facts(self.previous_step, ahead=False)
        found = next_save(policy, facts)
        if found is None:
            return {}
        step, reason = found
        seconds = (step - facts.step) * (facts.step_seconds or 0.0)
        return {"next_save": {"step": step, "seconds": round(seconds, 3), "reason": reason}}

    def _seconds_since_start(self) -> float:
        """Return what the attempt took until now; without a clock that can be believed, since this was made."""
        now, here = self._wall(), self._monotonic() - self._made
        is_told = is_known_time(now) and is_known_time(self._process_started)
        return max(now - self._process_started, here) if is_told else here


def process_started() -> float:
    """Return when this process began, in unix seconds."""
    try:  # psutil goes by the time of the boot, which Linux tells to the second
        ticks = int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19])
        return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        import psutil

        return psutil.Process().create_time()
