"""Combines the health reports of all ranks for the journal of a run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median, median_low
from typing import Any, NamedTuple

from ckptman.policies.health import HealthBreach, HealthThresholds

MOST_NAMED = 8
"""The most ranks named for each kind of breach: thousands might have the same one."""
_FEWEST_STEPS, _FEWEST_SAMPLES = 20, 12
_OUTLIERS = 0.02
_DIGITS = 4


@dataclass(frozen=True)
class RankHealth:
    """The report of one rank since its last one.

    `figures`: one number for each known figure; `step_seconds` among them is a whole step, `work_seconds` the rank's
    own work in it, and `loader_seconds` its wait for the loader.
    """

    rank: int
    node: str
    seconds: float = 0.0
    samples: int = 0
    set_aside: int = 0
    figures: dict[str, float] = field(default_factory=dict)
    breaches: tuple[HealthBreach, ...] = ()


class Straggler(NamedTuple):
    """A slow rank. `of`: "work", "loader" or "clock"; `value` and `median`: seconds of a step, or the clock as a share
    of its maximum; `behind`: the share of a step it delays the others."""

    rank: int
    node: str
    of: str
    value: float
    median: float
    behind: float

    def __str__(self) -> str:
        said = {
            "work": f"its own work takes {self.value:.3g} s a step, the median rank {self.median:.3g} s",
            "loader": f"it waits {self.value:.3g} s a step for its loader, the median rank {self.median:.3g} s",
            "clock": f"its GPU runs at {self.value:.0%} of its clock, that of the median rank at {self.median:.0%}",
        }[self.of]
        return f"rank {self.rank} on {self.node} is a straggler: {said}; that is {self.behind:.0%} of a step"


def usual_seconds(laps: Sequence[float]) -> float | None:
    """Return the mean step time without the longest steps; None: there are too few."""
    if len(laps) < _FEWEST_STEPS:
        return None
    kept = sorted(laps)[: len(laps) - math.ceil(_OUTLIERS * len(laps))]
    return math.fsum(kept) / len(kept)


def stragglers(reports: Sequence[RankHealth], thresholds: HealthThresholds) -> list[Straggler]:
    """Return the ranks that slow the others down: of each kind those above the median by a share of a step, the slowest
    first."""
    share, busy = thresholds.straggler_share, thresholds.utilisation_look or 1.0
    if share is None:
        return []
    figures = [each.figures for each in reports]
    waits = [each.get("loader_seconds") for each in figures]
    # A busy device hides the wait of its rank for the loader.
    hidden = [wait and (0.0 if each.get("utilisation", 0.0) >= busy else wait) for wait, each in zip(waits, figures)]
    clocks = [each.figures.get("clock") if each.samples >= _FEWEST_SAMPLES else None for each in reports]
    steps = [each["step_seconds"] for each in figures if each.get("step_seconds")]
    found = []
    for of, values in (
        ("work", [each.get("work_seconds") for each in figures]),
        ("loader", hidden),
        ("clock", [1 / each if each else None for each in clocks]),
    ):
        known = [value for value in values if value is not None]
        if len(known) < 2 or not (steps or of == "clock"):
            continue
        middle = median_low(known)  # of two ranks, the faster one
        whole = middle if of == "clock" else median(steps)
        slow = [(value, each) for value, each in zip(values, reports) if value and value - middle > share * whole]
        for value, each in sorted(slow, key=lambda pair: -pair[0]):
            shown = (1 / value, 1 / middle) if of == "clock" else (value, middle)
            found.append(Straggler(each.rank, each.node, of, *shown, (value - middle) / whole))
    return found


def over_ranks(reports: Sequence[RankHealth]) -> dict[str, Any]:
    """Return the fields of the event `health`: each figure over the ranks, with the ranks of its extremes."""
    fields: dict[str, Any] = {
        "ranks": len(reports),
        "seconds": round(max(each.seconds for each in reports), 3),
        "samples": sum(each.samples for each in reports),
        "set_aside": sum(each.set_aside for each in reports),
    }
    figures = fields["figures"] = {}
    for name in sorted({name for each in reports for name in each.figures}):
        known = [(each.figures[name], each.rank) for each in reports if name in each.figures]
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
    """Return the fields of the events `health_breach`, for at most `MOST_NAMED` ranks of each kind, and the number of
    ranks in which each kind began."""
    found: dict[tuple[str, str, bool], list[tuple[RankHealth, HealthBreach]]] = {}
    for each in reports:
        for breach in each.breaches:
            found.setdefault((breach.what, breach.level, breach.ended), []).append((each, breach))
    events: list[dict[str, Any]] = []
    counts: Counter[str] = Counter()
    for (what, _, ended), those in sorted(found.items()):
        if not ended:
            counts[what] += len({each.rank for each, _ in those})
        for each, breach in those[:MOST_NAMED]:
            event = {
                "rank": each.rank,
                "node": each.node,
                **asdict(breach),
                "value": _rounded(breach.value),
                "seconds": round(breach.seconds, 3),
                "share": round(breach.share, 3),
                "text": f"rank {each.rank} on {each.node}: {breach}" + ("; it is over" if ended else ""),
            }
            del event["bad_node"]
            events.append(event)
    return events, counts


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
