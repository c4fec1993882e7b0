"""What the ranks say of their health, brought together for the journal of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median, median_low
from typing import Any, NamedTuple

from ckptman.policies.health import HealthBreach, HealthThresholds

MOST_NAMED = 8
"""So many ranks are named of each kind of breach: all of thousands may be in one."""
FEWEST_STEPS, _FEWEST_SAMPLES = 20, 12
_OUTLIERS = 0.02
_DIGITS = 4


@dataclass(frozen=True)
class RankHealth:
    """What one rank has to say since it was asked before.

    `figures`: one number for each that is known, by name; `work_seconds`, `loader_seconds`: of a step, in work of its
    own and waiting for its loader, None where it is not measured; `step_seconds`: all of a step.
    """

    rank: int
    node: str
    seconds: float = 0.0
    samples: int = 0
    set_aside: int = 0
    figures: dict[str, float] = field(default_factory=dict)
    step_seconds: float | None = None
    work_seconds: float | None = None
    loader_seconds: float | None = None
    breaches: tuple[HealthBreach, ...] = ()


class Straggler(NamedTuple):
    """A rank that holds the others up. `of`: "work", "loader" or "clock"; `value` and `median`: seconds of a step, or
    the clock as a share of its maximum; `behind`: by what share of a step."""

    rank: int
    node: str
    of: str
    value: float
    median: float
    behind: float

    def __str__(self) -> str:
        what = {"work": "its own work takes {} a step", "loader": "it waits {} a step for its loader"}
        if self.of == "clock":
            said = f"its GPU runs at {self.value:.0%} of its clock, that of the median rank at {self.median:.0%}"
        else:
            said = f"{what[self.of].format(f'{self.value:.3g} s')}, the median rank {self.median:.3g} s"
        return f"rank {self.rank} on {self.node} is a straggler: {said}; that is {self.behind:.0%} of a step"


def usual_seconds(laps: Sequence[float]) -> float | None:
    """Return the mean of what steps took, without the longest; None: there are too few."""
    if len(laps) < FEWEST_STEPS:
        return None
    kept = sorted(laps)[: len(laps) - math.ceil(_OUTLIERS * len(laps))]
    return math.fsum(kept) / len(kept)


def exceeding(values: Sequence[float | None], whole: float, share: float) -> list[tuple[int, float, float]]:
    """Find the values that are above the median of all by more than a share of the whole.

    Args:
        values: one for each rank; None: not known.
        whole: what the share is of, such as the seconds of a step.

    Returns: index, value and median, the largest value first.
    """
    known = [each for each in values if each is not None]
    if len(known) < 2:
        return []
    middle = median_low(known)  # of two ranks, the faster one
    found = [
        (index, value, middle)
        for index, value in enumerate(values)
        if value is not None and value - middle > share * whole
    ]
    return sorted(found, key=lambda each: -each[1])


def stragglers(reports: Sequence[RankHealth], thresholds: HealthThresholds) -> list[Straggler]:
    """Return the ranks that hold the others up, the slowest of each kind first."""
    steps = [each.step_seconds for each in reports if each.step_seconds]
    share = thresholds.straggler_share
    if share is None or len(reports) < 2:
        return []
    found = []
    if steps:
        whole = median(steps)
        # Where its device is busy all the same, nobody waits for the loader of a rank.
        low = thresholds.utilisation_look or 1.0
        waits = [each.loader_seconds if each.figures.get("utilisation", 0.0) < low else None for each in reports]
        waits = [
            0.0 if wait is None and each.loader_seconds is not None else wait for wait, each in zip(waits, reports)
        ]
        for of, values in (("work", [each.work_seconds for each in reports]), ("loader", waits)):
            for index, value, middle in exceeding(values, whole, share):
                behind = (value - middle) / whole
                found.append(Straggler(reports[index].rank, reports[index].node, of, value, middle, behind))
    clocks = [each.figures.get("clock") if each.samples >= _FEWEST_SAMPLES else None for each in reports]
    times = [1 / each if each else None for each in clocks]
    whole = median_low([each for each in times if each] or [1.0])
    for index, value, middle in exceeding(times, whole, share):
        behind = (value - middle) / whole
        found.append(Straggler(reports[index].rank, reports[index].node, "clock", 1 / value, 1 / middle, behind))
    return found


def over_ranks(reports: Sequence[RankHealth]) -> dict[str, Any]:
    """Return the fields of the event `health`: each figure over the ranks, whose extremes are named."""
    fields: dict[str, Any] = {
        "ranks": len(reports),
        "seconds": round(max(each.seconds for each in reports), 3),
        "samples": sum(each.samples for each in reports),
        "set_aside": sum(each.set_aside for each in reports),
    }
    values = {each.rank: {**each.figures, **_laps(each)} for each in reports}
    figures = fields["figures"] = {}
    for name in sorted({name for each in values.values() for name in each}):
        known = [(each[name], rank) for rank, each in values.items() if name in each]
        (least, least_rank), (most, most_rank) = min(known), max(known)
        figures[name] = {
            "min": _rounded(least),
            "median": _rounded(median(value for value, _ in known)),
            "max": _rounded(most),
            "min_rank": least_rank,
            "max_rank": most_rank,
        }
    return fields


def breaches_over_ranks(reports: Sequence[RankHealth]) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return the fields of each event `health_breach`, of so many ranks that a journal can hold them, and the number of
    ranks by what began in them."""
    found: dict[tuple[str, str, bool], list[tuple[RankHealth, HealthBreach]]] = {}
    for each in reports:
        for breach in each.breaches:
            found.setdefault((breach.what, breach.level, breach.ended), []).append((each, breach))
    events: list[dict[str, Any]] = []
    counts: dict[str, int] = {}
    for (what, _, ended), those in sorted(found.items()):
        if not ended:
            counts[what] = counts.get(what, 0) + len({each.rank for each, _ in those})
        events += [_event(each, breach) for each, breach in those[:MOST_NAMED]]
    return events, counts


def _event(each: RankHealth, breach: HealthBreach) -> dict[str, Any]:
    return {
        "rank": each.rank,
        "node": each.node,
        "what": breach.what,
        "level": breach.level,
        "value": _rounded(breach.value),
        "threshold": breach.threshold,
        "since": breach.since,
        "seconds": round(breach.seconds, 3),
        "share": round(breach.share, 3),
        "ended": breach.ended,
        "text": f"rank {each.rank} on {each.node}: {breach}" + ("; it is over" if breach.ended else ""),
    }


def _laps(each: RankHealth) -> dict[str, float]:
    laps = {name: getattr(each, name) for name in ("step_seconds", "work_seconds", "loader_seconds")}
    return {name: value for name, value in laps.items() if value is not None}


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
