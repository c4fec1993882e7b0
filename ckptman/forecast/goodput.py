"""What an interval between saves costs when failures come at random, and which one costs least.

The model, which `simulation` plays and whose mean is exact here: failures are exponential with mean M. After one, the
run needs R seconds undisturbed until it trains again. It begins a save every T seconds, the first T after it began to
train; each blocks training for S and is durable D >= S after it began. What was trained since the last durable save
is lost. So the time between two failures, of which the run is up a mean of M, yields

    E = ((T - S) / (e^(T/M) - 1) + S e^(-T/M)) e^(-D/M)

seconds of training that last, and takes M e^(R/M) with its restart (failures hit the restart, too).

If checkpoints in memory survive a share of the failures, each of the two kinds has its own E and R.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ckptman.errors import IntervalError
from ckptman.policies.parameters import check_at_least, check_positive


@dataclass(frozen=True)
class Costs:
    """How long a save blocks training and takes to be durable, and the time from a failure until training resumes.

    Raises: IntervalError.
    """

    stall_seconds: float
    durable_seconds: float
    restart_seconds: float

    def __post_init__(self) -> None:
        for name in ("stall_seconds", "durable_seconds", "restart_seconds"):
            check_at_least("Costs", name, getattr(self, name), 0)

    @property
    def settled_seconds(self) -> float:
        """How long a save takes to count: not before it has let go of training."""
        return max(self.stall_seconds, self.durable_seconds)


@dataclass(frozen=True)
class InMemory:
    """How a run saves to memory, in addition to disk.

    `costs`: of such a save, until it counts, and of a restart from it. `flushed`: what is in memory is written to disk
    before training resumes from it.
    """

    costs: Costs
    interval_seconds: float
    flushed: bool = False

    def __post_init__(self) -> None:
        if not self.interval_seconds > 0 or self.interval_seconds < self.costs.settled_seconds:
            raise IntervalError(
                f"InMemory: interval_seconds must be above 0 and no shorter than a save, not {self.interval_seconds!r}"
            )


@dataclass(frozen=True)
class Shares:
    """Where the time goes, as shares that add up to 1, and the mean training that one failure loses.

    `good`: training that lasts.
    """

    good: float
    lost: float
    stalled: float
    restarting: float
    lost_per_failure_seconds: float


def best_interval_seconds(stall_seconds: float, mtbf_seconds: float) -> float:
    """Return the seconds from the start of one save to that of the next that lose least, when failures are exponential.

    T = M (1 + S/M + W(-e^(-1 - S/M))), with W the main branch of Lambert's function. It does not depend on the restart,
    which is paid once per failure, whatever the interval. sqrt(2 M S) is its limit for short saves, 0 for S = 0.
    Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
    Generation Computer Systems 22(3), 2006.

    Raises: IntervalError.
    """
    check_at_least("best_interval_seconds", "stall_seconds", stall_seconds, 0)
    check_positive("best_interval_seconds", "mtbf_seconds", mtbf_seconds)
    part = stall_seconds / mtbf_seconds
    # x = T/M solves 1 - e^-x = x - S/M, whose left side bends down: Newton from above never leaves that side.
    x = part + math.sqrt(2 * part) + 1e-12
    for _ in range(60):
        step = (x - part + math.expm1(-x)) / -math.expm1(-x)
        x -= step
        if abs(step) <= 1e-14 * x:
            break
    return max(x, 0.0) * mtbf_seconds if part else 0.0


def shares(interval_seconds: float, costs: Costs, mtbf_seconds: float) -> Shares:
    """Return where the time goes in the long run at a fixed interval, but no shorter than a save takes.

    Raises: IntervalError.
    """
    check_positive("shares", "interval_seconds", interval_seconds)
    check_positive("shares", "mtbf_seconds", mtbf_seconds)
    mean, stall = mtbf_seconds, costs.stall_seconds
    interval = max(interval_seconds, costs.settled_seconds)
    # The mean number of intervals that pass before a failure: 1 / (e^(T/M) - 1).
    rounds = 1 / math.expm1(interval / mean) if interval / mean < 700 else 0.0
    lasts = ((interval - stall) * rounds + stall * math.exp(-interval / mean)) * math.exp(-costs.settled_seconds / mean)
    # Of a stall that a failure cuts short, the mean of what had passed counts.
    stalled = rounds * mean * -math.expm1(-stall / mean)
    up = math.exp(-costs.restart_seconds / mean)
    lost = max(0.0, mean - lasts - stalled)
    return Shares(lasts / mean * up, lost / mean * up, stalled / mean * up, 1 - up, lost)


def goodput_with_memory(
    interval_seconds: float, costs: Costs, memory: InMemory, mtbf_seconds: float, survived: float
) -> float:
    """Return the share of time that is training that lasts, if memory survives `survived` of the failures.

    A little more than `simulation` plays if nothing is flushed: what one failure left in memory alone, the next may
    take. Raises: IntervalError.
    """
    disk = shares(interval_seconds, replace(costs, restart_seconds=0), mtbf_seconds)
    near = shares(memory.interval_seconds, replace(memory.costs, restart_seconds=0), mtbf_seconds)
    up = survived * math.exp(-memory.costs.restart_seconds / mtbf_seconds)
    up += (1 - survived) * math.exp(-costs.restart_seconds / mtbf_seconds)
    return up * (survived * near.good * (1 - disk.stalled) + (1 - survived) * disk.good * (1 - near.stalled))
