"""What saves to a tier cost: seconds, stall, interval, lost training, disk, and how early to warn a job."""

from __future__ import annotations

import math
from functools import lru_cache

from ckptman.errors import ConfigError
from ckptman.forecast.figures import Figure, time_text
from ckptman.forecast.goodput import Costs, best_interval_seconds, shares
from ckptman.forecast.scenario import Scenario, Tier
from ckptman.policies.intervals import daly_interval_seconds
from ckptman.policies.retention_by_time import KeepByPeriod
from ckptman.policies.retention_rules import (
    KeepAny,
    KeepBest,
    KeepSteps,
    Record,
    RetentionPolicy,
    limited,
    rules_of,
    size_text,
)
from ckptman.policies.save_policies import BeforeDeadline

BOUND_SECONDS = 900.0
"""The longest interval that is advised: HKUST, training of a 7B model, 2024."""
LEAST_INTERVAL_SECONDS = 1.0
UNMEASURED_SECONDS = 180
"""How early to warn a job before any save was measured."""
SHORTEST_LIMIT_SECONDS = 600.0
"""Slurm checks every 30 seconds and may warn a minute early, so it would warn a shorter job as soon as it starts."""
_CHECK_SECONDS, _FULL_SECONDS = 30, 30
_DAY = 86_400
_MOST_RECORDS = 1_000_000
_BAD_DAY = 1_801_439_999
"""The end of Sunday, 31 January 2027 (UTC): of an hour, a day, a week and a month at once, before a short month."""

_LASTS = "E = ((T - S) / (e^(T/M) - 1) + S e^(-T/M)) e^(-D/M)"
_BLOCKED = "B = M (1 - e^(-S/M)) / (e^(T/M) - 1)"
_WARNING = "60 s, in full half minutes  [BeforeDeadline, and 30 s between two checks of Slurm]"
_BY_DALY = "S + sqrt(2 (M + R) S + S^2)  [DalyInterval; Saxena et al., arXiv 2410.18124]"
_BEST = "M (1 + S/M + W(-e^(-1 - S/M)))  [J. T. Daly, FGCS 22(3), 2006: the optimum for failures at random]"


def tier_figures(scenario: Scenario, tier: Tier) -> dict[str, Figure]:
    """Return everything about saves to one tier. Raises: IntervalError, ConfigError."""
    size, part, staging = scenario.checkpoint_bytes, scenario.rank_bytes, scenario.staging_bytes_per_second
    save, load = size / tier.write_bytes_per_second, size / tier.read_bytes_per_second
    staged, total = part / staging, size_text(size)
    stall, stalled = save, "as long as the save: saves block training"
    if not scenario.blocking:
        stall = min(staged, save)
        stalled = f"private copy: {size_text(part)} of a rank / {size_text(staging)}/s (--staging)"
    if staged > stall:
        stalled += f" = {time_text(staged)}, but no longer than the save, {time_text(save)}"
    restart, how = restart_of(scenario, load)
    costs = Costs(stall, save, restart)
    found = [
        Figure("rate", tier.write_bytes_per_second, "bytes_per_second", tier.formula),
        Figure("save", save, "seconds", f"{total} / {size_text(tier.write_bytes_per_second)}/s"),
        Figure("load", load, "seconds", f"{total} / {size_text(tier.read_bytes_per_second)}/s"),
        Figure("stall", stall, "seconds", stalled),
        Figure("restart", restart, "seconds", how),
        *_interval_figures(scenario, costs, scenario.init_seconds + load),
        Figure("warning", warning_seconds(save), "seconds", f"1.5 x {time_text(save)} + {_WARNING}"),
    ]
    by_name = {each.name: each for each in found}
    between = max(by_name["interval"].value, scenario.step_seconds or 0.0)
    return by_name | {each.name: each for each in _disk_figures(scenario, between)}


def restart_of(scenario: Scenario, load_seconds: float, *, queue: bool = True) -> tuple[float, str]:
    """Return the seconds from a failure until training resumes, and their parts in words."""
    parts = (
        ("notice", scenario.notice_seconds),
        ("queue", scenario.queue_seconds if queue else 0.0),
        ("init", scenario.init_seconds),
        ("load", load_seconds),
    )
    shown = [f"{name} {time_text(seconds)}" for name, seconds in parts if seconds or name in ("init", "load")]
    return sum(seconds for _, seconds in parts), " + ".join(shown)


def _interval_figures(scenario: Scenario, costs: Costs, start_seconds: float) -> list[Figure]:
    """Return the interval by each rule, the one to take and its goodput. `start_seconds`: what a run itself measures of
    a restart, which is its start without the queue."""
    mean, stall = scenario.mtbf_seconds, costs.stall_seconds
    best = best_interval_seconds(stall, mean)
    least = max(costs.settled_seconds, LEAST_INTERVAL_SECONDS)
    taken, free = max(least, min(best, BOUND_SECONDS)), max(least, best)
    at, unbound = shares(taken, costs, mean), shares(free, costs, mean)
    t, s, d, r, m, start = (
        time_text(each) for each in (taken, stall, costs.settled_seconds, costs.restart_seconds, mean, start_seconds)
    )
    known = f"T = {t}, S = {s}, M = {m}"
    by_init, by_daly = scenario.factor * start_seconds, daly_interval_seconds(stall, mean, start_seconds)
    lost = f"{_LASTS}; {_BLOCKED}; {known}, D = {d}"
    return [
        Figure("interval_by_init", by_init, "seconds", f"{scenario.factor:g} x {start}, a start  [InitTimeInterval]"),
        Figure("interval_by_daly", by_daly, "seconds", f"{_BY_DALY}; S = {s}, M = {m}, R = {start}"),
        Figure("interval_best", best, "seconds", f"{_BEST}; S = {s}, M = {m}"),
        Figure("interval_bound", BOUND_SECONDS, "seconds", "at least every 15 minutes  [HKUST, a 7B model, 2024]"),
        Figure(
            "interval",
            taken,
            "seconds",
            f"the best, no longer than the bound, no shorter than a save ({time_text(least)})",
        ),
        Figure("lost_per_failure", at.lost_per_failure_seconds, "seconds", f"M - E - B; {lost}"),
        Figure("lost", at.lost, "share", f"(M - E - B) e^(-R/M) / M; {lost}, R = {r}"),
        Figure("stalled", at.stalled, "share", f"B e^(-R/M) / M; {_BLOCKED}; {known}, R = {r}"),
        Figure("restarting", at.restarting, "share", f"1 - e^(-R/M); R = {r}, M = {m}"),
        Figure("goodput", at.good, "share", f"E e^(-R/M) / M; {_LASTS}; {known}, D = {d}, R = {r}"),
        Figure("goodput_best", unbound.good, "share", f"the same without the bound: T = {time_text(free)}"),
    ]


def _disk_figures(scenario: Scenario, interval_seconds: float) -> list[Figure]:
    """Return how many saves the rules keep at most, and the room for them.

    No rule removes the checkpoint that the run resumed from, or the newest that was verified; a limit makes room for
    these two. One more is being saved.
    """
    policy, size = scenario.retention, scenario.checkpoint_bytes
    saves = max(1, int(scenario.run_seconds / interval_seconds))
    made = f"{time_text(scenario.run_seconds)} / {time_text(interval_seconds)} = {saves:,} saves"
    kept = present = saves
    rules, counted = "no --keep rule: all are kept", f"{saves:,}"
    if policy is not None:
        rules = str(policy)
        step_seconds = scenario.step_seconds or interval_seconds
        by_rules, every = _most_kept(rules_of(policy), saves, interval_seconds, step_seconds)
        limit = limited(policy)
        room = every if limit is None else limit.bytes // size
        kept = min(by_rules, max(room, 1))
        present = min(every, min(by_rules + 2, max(room, 3)) + 1)
        counted = f"({kept:,} by the rules + {present - kept} that are verified, resumed from or being saved)"
    return [
        Figure("saves", saves, "count", made),
        Figure("kept", kept, "count", f"{rules}; of {saves:,} saves"),
        Figure("disk", present * size, "bytes", f"{counted} x {size_text(size)}"),
    ]


@lru_cache
def _most_kept(rules: tuple[RetentionPolicy, ...], saves: int, interval: float, step: float) -> tuple[int, int]:
    """Return how many saves of a whole run the rules keep at most, and how many there are with those at named steps.

    The first or the last save ends a day, a week or a month, whichever keeps more. The best by each metric are assumed
    to be saves that no other rule keeps.
    """
    starts = [_BAD_DAY - interval]
    if any(isinstance(rule, KeepByPeriod) for rule in rules):
        starts = [_BAD_DAY + day * _DAY - at for day in range(7) for at in (interval, saves * interval)]
    if saves * len(starts) > _MOST_RECORDS:
        raise ConfigError(f"{saves:,} saves are too many to plan what rules keep of them: give a shorter --length")
    times = {max(number, round(number * interval / step)): number * interval for number in range(1, saves + 1)}
    named = {named for rule in rules if isinstance(rule, KeepSteps) for named in rule.steps}
    times |= {each: each * step for each in named if each <= saves * interval / step}
    most = 0
    for begun in starts:
        records = [Record(each, number, begun + times[each], 1, {}) for number, each in enumerate(sorted(times))]
        most = max(most, len(KeepAny(rules).keeps(records).keys() | {records[-1].sequence}))
    best: dict[str, int] = {}
    for rule in rules:
        if isinstance(rule, KeepBest):
            best[rule.metric] = max(best.get(rule.metric, 0), rule.count)
    return min(len(times), most + sum(best.values())), len(times)


def warning_seconds(save_seconds: float | None) -> int:
    """Return how early a job must be warned of its time limit, so that a save is durable in time.

    That is a save with the reserve of `BeforeDeadline`, and half a minute between two checks of the controller.

    Args:
        save_seconds: until a save is durable, as measured; None: not yet.
    """
    if save_seconds is None:
        return UNMEASURED_SECONDS
    policy = BeforeDeadline()
    needed_seconds = save_seconds * policy.safety + policy.margin_seconds + _CHECK_SECONDS
    return math.ceil(needed_seconds / _FULL_SECONDS) * _FULL_SECONDS
