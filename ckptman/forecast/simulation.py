"""A run as it is stopped by failures, played from one failure to the next: what an interval yields on given failures.

The failures are an argument, in seconds from the beginning, so that every interval can be played against the same
ones. Between two failures everything is arithmetic, so a month costs microseconds and a century a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from ckptman.forecast.goodput import Costs
from ckptman.policies.parameters import check_positive


@dataclass(frozen=True)
class Played:
    """What became of the time. All in seconds but the counts; `good`, `lost`, `stalled` and `restarting` add up to
    `seconds`. `failures`: those that hit, during a restart too. `interval`: the one that was played, no shorter than a
    save."""

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


def play(failures: Sequence[float], seconds: float, costs: Costs, interval_seconds: float) -> Played:
    """Play a run of `seconds` with failures at these times (ascending) and saves every `interval_seconds`.

    It begins to train at 0. A save begins each interval, counted from the start of the one before, or from where
    training went on; while one is not durable the next waits. At the end the run is stopped in order, and saves: what
    was trained since the last failure counts, unless a failure comes at that very moment. Raises IntervalError for
    times that cannot be.
    """
    check_positive("play", "seconds", seconds)
    check_positive("play", "interval_seconds", interval_seconds)
    settled, stall, restart = costs.settled_seconds, costs.stall_seconds, costs.restart_seconds
    interval = max(interval_seconds, settled)
    good = lost = stalled = restarting = begun = 0.0
    saves = hits = 0
    for number, failure in enumerate([*failures, seconds]):
        over = number == len(failures) or failure > seconds
        if failure < begun:  # it hit the restart, which begins again
            if not over:
                hits += 1
                restarting += failure + restart - begun
                begun = failure + restart
            continue
        up = min(failure, seconds) - begun
        if up < 0:
            break
        started = int(up / interval)
        kept = 0 if up < interval + settled else int((up - settled) / interval)
        # Of the save that is at work when it ends, only a part of the stall has passed.
        blocked = stall * max(0, started - 1) + (min(stall, up - started * interval) if started else 0.0)
        trained = up - blocked
        lasting = trained if over else interval + (kept - 1) * (interval - stall) if kept else 0.0
        good, lost, stalled = good + lasting, lost + trained - lasting, stalled + blocked
        saves += started
        if over:
            break
        hits += 1
        restarting += restart
        begun = failure + restart
    # A restart that goes on beyond the end is counted to the end.
    restarting -= max(0.0, begun - seconds)
    return Played(interval, seconds, good, lost, stalled, restarting, hits, saves)


def play_all(runs: Sequence[Sequence[float]], seconds: float, costs: Costs, interval_seconds: float) -> Played:
    """Several runs of `seconds`, each with failures of its own, added up."""
    each = [play(failures, seconds, costs, interval_seconds) for failures in runs]
    sums = {part.name: sum(getattr(one, part.name) for one in each) for part in fields(Played)}
    return Played(**sums | {"interval_seconds": max(interval_seconds, costs.settled_seconds)})


def play_grid(
    runs: Sequence[Sequence[float]], seconds: float, costs: Costs, shortest: float, longest: float, points: int
) -> list[Played]:
    """Play intervals between two bounds, each a fixed factor longer than the one before. Raises IntervalError."""
    check_positive("play_grid", "shortest", shortest)
    factor = max(longest / shortest, 1.0001) ** (1 / (points - 1))
    return [play_all(runs, seconds, costs, shortest * factor**number) for number in range(points)]
