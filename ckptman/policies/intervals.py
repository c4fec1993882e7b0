"""Measured step time, and the textbook intervals between saves that follow from measured costs."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from ckptman.policies.parameters import check_at_least, check_positive

WINDOW_STEPS = 20
DRIFT = 0.20
LOOK_EVERY_STEPS = 5


class StepMeter:
    """The time a step takes, as a reference that is stable until the steps really change.

    While the first window of 20 steps fills, the reference is the median so far, which a slow first step (compilation,
    warm-up) cannot spoil. Then it stays, until the median of a window of 20 steps is more than 20 % away from it; that
    is looked at every 5 steps, because this runs in every training step.

    The Checkpointer feeds it, once a step, with the seconds that step took, less what a save held it up.
    """

    def __init__(self) -> None:
        self.step_seconds: float | None = None
        """The reference, in seconds a step; None before the first step was observed."""
        self._last: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._observed = 0

    def observe(self, seconds: float) -> bool:
        """Take in one step of `seconds`. True when the steps drifted and the reference was derived again.

        Raises IntervalError for a time that is negative, infinite or not a number.
        """
        if not 0.0 <= seconds < math.inf:
            check_at_least("StepMeter.observe", "seconds", seconds, 0)
        self._last.append(seconds)
        self._observed += 1
        if self._observed <= WINDOW_STEPS:
            self.step_seconds = median(self._last)
            return False
        if self._observed % LOOK_EVERY_STEPS:
            return False
        typical = median(self._last)
        if self.step_seconds is not None and abs(typical - self.step_seconds) <= DRIFT * self.step_seconds:
            return False
        self.step_seconds = typical
        return True


def daly_interval_seconds(save_seconds: float, mtbf_seconds: float, restart_seconds: float) -> float:
    """Return the seconds from the start of one save to the start of the next that give the highest availability.

    T = T_s + sqrt(2 (T_f + T_r) T_s + T_s^2), with T_s the time a save blocks training, T_f the mean time between
    failures and T_r the time from a failure until training goes on.
    Source: Saxena et al., "Optimal Checkpoint Interval with Availability as an Objective Function", arXiv 2410.18124.
    It is the maximum of (T - T_s) / (T (1 + (T/2 + T_r) / T_f)): a failure costs the restart and half an interval.

    Raises IntervalError for negative times, NaN or an MTBF of 0. Called by DalyInterval.
    """
    _check_costs("daly_interval_seconds", save_seconds, mtbf_seconds)
    check_at_least("daly_interval_seconds", "restart_seconds", restart_seconds, 0)
    return save_seconds + math.sqrt(2 * (mtbf_seconds + restart_seconds) * save_seconds + save_seconds**2)


def young_interval_seconds(save_seconds: float, mtbf_seconds: float) -> float:
    """Return the seconds of training between saves by the first-order rule sqrt(2 T_f T_s), free of the restart time.

    Source: J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974. It is what
    `daly_interval_seconds` tends to when saving and restarting are short beside the mean time between failures.

    Raises IntervalError for negative times, NaN or an MTBF of 0.
    """
    _check_costs("young_interval_seconds", save_seconds, mtbf_seconds)
    return math.sqrt(2 * mtbf_seconds * save_seconds)


def seconds_text(seconds: float) -> str:
    """A duration in seconds, for sums that a reader may check: "0.031 s", "4.25 s", "95 s", "6,000 s"."""
    return f"{seconds:,.0f} s" if abs(seconds) >= 100 else f"{seconds:.3g} s"


def duration_text(seconds: float) -> str:
    """A duration as people say it: `0.8 ms`, `67 ms`, `42.1 s`, `12.5 min`, `3.2 h`, `12.1 d`."""
    size = abs(seconds)
    if 0 < size < 0.9995:
        return f"{seconds * 1000:.0f} ms" if size >= 0.0095 else f"{seconds * 1000:.1f} ms"
    if size < 120:
        return f"{seconds:.1f} s"
    if size < 2 * 3600:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h" if size < 4 * 86400 else f"{seconds / 86400:.1f} d"


def _check_costs(where: str, save_seconds: float, mtbf_seconds: float) -> None:
    check_at_least(where, "save_seconds", save_seconds, 0)
    check_positive(where, "mtbf_seconds", mtbf_seconds)
