"""What saves cost on a tier of storage: seconds, stall, the interval between them, what is lost, the time of a warning.
Each number comes with its formula.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ckptman.forecast.figures import Figure, time_text
from ckptman.forecast.goodput import Costs, best_interval_seconds, shares
from ckptman.policies.intervals import daly_interval_seconds
from ckptman.policies.parameters import check_positive
from ckptman.policies.retention_rules import size_text
from ckptman.policies.save_policies import BeforeDeadline

BOUND_SECONDS = 900.0
"""A run should save at least so often: HKUST, training of a 7B model, 2024."""
LEAST_INTERVAL_SECONDS = 1.0
UNMEASURED_SECONDS = 180
"""Before any save was measured."""
SHORTEST_LIMIT_SECONDS = 600.0
"""Slurm looks every 30 seconds, and may warn a minute early: a job that is shorter would be warned when it begins."""
_LOOK_SECONDS, _FULL_SECONDS = 30, 30
_SAXENA = "DalyInterval; Saxena et al., arXiv 2410.18124"
_DALY = "J. T. Daly, FGCS 22(3), 2006: the optimum for failures at random (forecast/goodput.py)"

_LASTING = "E = ((T - S) / (e^(T/M) - 1) + S e^(-T/M)) e^(-D/M)"
_BLOCKED = "B = M (1 - e^(-S/M)) / (e^(T/M) - 1)"


@dataclass(frozen=True)
class TierRates:
    """A place that checkpoints go to. Rates are what the whole run gets there; `how`: by which formula; `source`: whose
    number that is."""

    name: str
    write_bytes_per_second: float
    read_bytes_per_second: float
    how: str
    source: str = ""

    @property
    def lasts(self) -> bool:
        """Whether it outlives a node, as far as its name tells."""
        return self.name.lower() not in IN_MEMORY


IN_MEMORY = ("shm", "ram", "tmpfs", "memory", "dev-shm")
TABLE = (("shm", 4e9), ("scratch", 2e9), ("project", 0.5e9))
TABLE_SOURCE = "assumed: one process, by the practitioners' table (2024). Measure yours: --tier NAME=DIR"


@dataclass(frozen=True)
class Saving:
    """How a run saves. `largest_bytes`: the most that one rank writes; `staging`: bytes per second into its private
    copy. `blocking`: training waits until a save is durable."""

    total_bytes: int
    largest_bytes: int
    staging_bytes_per_second: float
    blocking: bool = False
    source: str = ""


@dataclass(frozen=True)
class Life:
    """How a run lives. `init_seconds`: from the start of a process to the end of its first step, the load left out, and
    where that number is from; `factor`: of the rule by init time. `notice_seconds`: until a failure is found out;
    `queue_seconds`: until the next job starts."""

    init_seconds: float
    mtbf_seconds: float
    factor: float = 4.0
    source: str = ""
    notice_seconds: float = 0.0
    queue_seconds: float = 0.0

    def restart_text(self, load_seconds: float) -> str:
        """Return what a restart from disk takes, part by part."""
        away = (("noticed", self.notice_seconds), ("queue", self.queue_seconds))
        parts = [f"{name} {time_text(seconds)}" for name, seconds in away if seconds]
        return " + ".join([*parts, f"init {time_text(self.init_seconds)}", f"load {time_text(load_seconds)}"])


def tier_figures(tier: TierRates, saving: Saving, life: Life) -> list[Figure]:
    """Everything about saves to one tier. Raises IntervalError."""
    for name, rate in (("write rate", tier.write_bytes_per_second), ("read rate", tier.read_bytes_per_second)):
        check_positive(f"tier {tier.name}", name, rate)
    check_positive("plan", "staging rate", saving.staging_bytes_per_second)
    save = saving.total_bytes / tier.write_bytes_per_second
    load = saving.total_bytes / tier.read_bytes_per_second
    size = size_text(saving.total_bytes)
    staged = saving.largest_bytes / saving.staging_bytes_per_second
    stall = save if saving.blocking else min(staged, save)
    restart = life.notice_seconds + life.queue_seconds + life.init_seconds + load
    copied = f"{size_text(saving.largest_bytes)} of a rank / {size_text(saving.staging_bytes_per_second)}/s"
    stalled = "as long as the save: saves block training" if saving.blocking else f"private copy: {copied}"
    if not saving.blocking and staged > save:
        stalled += f" = {time_text(staged)}, but no longer than the save, {time_text(save)}"
    return [
        Figure("rate", tier.write_bytes_per_second, "bytes_per_second", tier.how, tier.source),
        Figure("save", save, "seconds", f"{size} / {size_text(tier.write_bytes_per_second)}/s"),
        Figure("load", load, "seconds", f"{size} / {size_text(tier.read_bytes_per_second)}/s"),
        Figure("stall", stall, "seconds", stalled, "" if saving.blocking else saving.source),
        Figure("restart", restart, "seconds", life.restart_text(load), life.source),
        *interval_figures(Costs(stall, save, restart), life),
        _warning(save),
    ]


def interval_figures(costs: Costs, life: Life) -> list[Figure]:
    """Return the interval by each rule, the one to take, and what it yields. Raises IntervalError."""
    # A run measures its own start, and not what came before it.
    start = costs.restart_seconds - life.notice_seconds - life.queue_seconds
    init = life.factor * start
    daly = daly_interval_seconds(costs.stall_seconds, life.mtbf_seconds, start)
    best = best_interval_seconds(costs.stall_seconds, life.mtbf_seconds)
    least = max(costs.settled_seconds, LEAST_INTERVAL_SECONDS)
    free = max(least, best)
    taken = max(least, min(best, BOUND_SECONDS))
    unbound = shares(free, costs, life.mtbf_seconds)
    at = shares(taken, costs, life.mtbf_seconds)
    s, m, r = (time_text(each) for each in (costs.stall_seconds, life.mtbf_seconds, costs.restart_seconds))
    own = time_text(start)
    where, parts = f"T = {time_text(taken)}, S = {s}, M = {m}", f"{_LASTING}; {_BLOCKED}"
    held = "" if taken == best else f", held to {time_text(taken)}"
    return [
        Figure("interval_by_init", init, "seconds", f"{life.factor:g} x {own}, what a start costs", "InitTimeInterval"),
        Figure(
            "interval_by_daly", daly, "seconds", f"S + sqrt(2 (M + R) S + S^2); S = {s}, M = {m}, R = {own}", _SAXENA
        ),
        Figure("interval_best", best, "seconds", f"M (1 + S/M + W(-e^(-1 - S/M))); S = {s}, M = {m}", _DALY),
        Figure("interval_bound", BOUND_SECONDS, "seconds", "at least every 15 minutes", "HKUST, a 7B model, 2024"),
        Figure(
            "interval",
            taken,
            "seconds",
            f"the best, {time_text(best)}, but no shorter than a save ({time_text(least)}) and no longer than the "
            f"bound{held}",
        ),
        Figure(
            "lost_per_failure",
            at.lost_per_failure_seconds,
            "seconds",
            f"M - E - B; {parts}; {where}, D = {time_text(costs.settled_seconds)}",
            "trained since the last durable save: of the M between failures E lasts, and saves block B",
        ),
        Figure("lost", at.lost, "share", f"(M - E - B) e^(-R/M) / M; {parts}; {where}, R = {r}: trained and lost"),
        Figure("stalled", at.stalled, "share", f"B e^(-R/M) / M; {_BLOCKED}; {where}, R = {r}: blocked by saves"),
        Figure("restarting", at.restarting, "share", f"1 - e^(-R/M); R = {r}, M = {m}"),
        Figure(
            "goodput",
            at.good,
            "share",
            f"E e^(-R/M) / M; {_LASTING}; {where}, D = {time_text(costs.settled_seconds)}, R = {r}",
            "forecast/goodput.py; ckptman simulate plays it",
        ),
        Figure("goodput_best", unbound.good, "share", f"the same without the bound: T = {time_text(free)}"),
    ]


def warning_seconds(save_seconds: float | None) -> int:
    """Return how long before the time limit a job has to be warned, so that a save is durable in time: a save with its
    reserve (as `BeforeDeadline` reckons, the step that runs and an evaluation included), and half a minute between two
    looks of the controller.

    `save_seconds`: until a save is durable, as measured; None: not yet.
    """
    if save_seconds is None:
        return UNMEASURED_SECONDS
    policy = BeforeDeadline()
    needed_seconds = save_seconds * policy.safety + policy.margin_seconds + _LOOK_SECONDS
    return math.ceil(needed_seconds / _FULL_SECONDS) * _FULL_SECONDS


def _warning(save_seconds: float) -> Figure:
    policy = BeforeDeadline()
    return Figure(
        "warning",
        warning_seconds(save_seconds),
        "seconds",
        f"{policy.safety:g} x {time_text(save_seconds)} + margin of {policy.margin_seconds:g} s + 30 s between two "
        f"looks of Slurm, in full half minutes",
        "BeforeDeadline; sbatch --signal",
    )
