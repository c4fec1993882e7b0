"""A run as it is stopped by failures, played from one failure to the next: what an interval yields on given failures.

The failures are an argument, in seconds from the beginning, so that every interval can be played against the same
ones. Between two failures everything is arithmetic, so a month costs microseconds and a century a second.

Checkpoints in memory come on top of those on disk: a failure that they survive goes back to the newest of both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from ckptman.forecast.goodput import Costs, InMemory
from ckptman.policies.parameters import check_positive


@dataclass(frozen=True)
class Played:
    """Where the time went: `good`, `lost`, `stalled` and `restarting` add up to `seconds`.

    `interval_seconds`: as played, no shorter than a save. `failures`: those that hit, during a restart too. `saves`: to
    disk and to memory.
    """

    interval_seconds: float
    seconds: float
    good_seconds: float
    lost_seconds: float
    stalled_seconds: float
    restarting_seconds: float
    failures: int
    saves: int

    @property
    def goodput(self) -> float:
        """The share of the time in which training was done that lasted."""
        return self.good_seconds / self.seconds


_NO_MEMORY = InMemory(Costs(0, 0, 0), math.inf)


def play(
    failures: Sequence[float],
    seconds: float,
    costs: Costs,
    interval_seconds: float,
    memory: InMemory | None = None,
    survived: Sequence[bool] = (),
) -> Played:
    """Play a run of `seconds` with failures at these times (ascending) and saves every `interval_seconds`.

    It begins to train at 0. A save begins each interval, counted from the start of the one before, or from where
    training went on; while one is not durable the next waits. At the end the run is stopped in order, and saves: what
    was trained since the last failure counts, unless a failure comes at that very moment.

    Args:
        failures: when each hits, in seconds.
        memory: how the run saves to memory, too. While it saves there, the clock of saves to disk stands still.
        survived: of each failure, whether what is in memory survives it.

    Raises:
        IntervalError: times that cannot be.
    """
    check_positive("play", "seconds", seconds)
    check_positive("play", "interval_seconds", interval_seconds)
    near = memory or _NO_MEMORY
    settled, stall = costs.settled_seconds, costs.stall_seconds
    interval = max(interval_seconds, settled)
    good = lost = stalled = restarting = begun = 0.0
    unsaved = 0.0
    """Trained, and in memory alone."""
    saves = hits = 0
    for number, failure in enumerate([*failures, seconds]):
        over = number == len(failures) or failure > seconds
        from_memory = memory is not None and not over and survived[number]
        restart = near.costs.restart_seconds if from_memory else costs.restart_seconds
        if failure < begun:  # it hit the restart, which begins again
            if not over:
                hits += 1
                restarting += failure + restart - begun
                begun = failure + restart
                if not from_memory:
                    good, lost, unsaved = good - unsaved, lost + unsaved, 0.0
            continue
        up = min(failure, seconds) - begun
        if up < 0:
            break
        free = up - _blocked(up, near.interval_seconds, near.costs.stall_seconds)
        trained = free - _blocked(free, interval, stall)
        on_disk = _saved_after(free, interval, stall, settled)
        lasting = trained
        if from_memory:
            here = _saved_after(up, near.interval_seconds, near.costs.stall_seconds, near.costs.settled_seconds) or 0.0
            lasting = max(here - _blocked(here, interval, stall), on_disk or 0.0)
            unsaved = 0.0 if near.flushed else lasting - on_disk if on_disk is not None else unsaved + lasting
        elif not over:
            lasting, unsaved = -unsaved if on_disk is None else on_disk, 0.0
        good, lost, stalled = good + lasting, lost + trained - lasting, stalled + up - trained
        saves += int(free / interval) + int(up / near.interval_seconds)
        if over:
            break
        hits += 1
        restarting += restart
        begun = failure + restart
    # A restart that goes on beyond the end is counted to the end.
    restarting -= max(0.0, begun - seconds)
    return Played(interval, seconds, good, lost, stalled, restarting, hits, saves)


def _blocked(up: float, interval: float, stall: float) -> float:
    """Return for how long saves have blocked of `up` seconds: of the one at work, for the part that has passed."""
    started = int(up / interval)
    return stall * (started - 1) + min(stall, up - started * interval) if started else 0.0


def _saved_after(up: float, interval: float, stall: float, settled: float) -> float | None:
    """Return the seconds, without those that saves blocked, after which the last save began that counts after `up`."""
    kept = 0 if up < interval + settled else int((up - settled) / interval)
    return interval + (kept - 1) * (interval - stall) if kept else None


def add_up(runs: Sequence[Played]) -> Played:
    """Add up runs that were played at the same interval."""
    sums = {part.name: sum(getattr(one, part.name) for one in runs) for part in fields(Played)}
    return Played(**sums | {"interval_seconds": runs[0].interval_seconds})
