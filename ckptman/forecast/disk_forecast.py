"""How many checkpoints rules keep of a run, at most, and the room that takes.

By arithmetic, so that a run may save millions of times: rules keep the last saves without a gap (`KeepLast`,
`KeepWithin`), and single ones among the older. Rules of the calendar say themselves where a period ends. Tests hold it
against what `retention.plan` keeps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckptman.forecast.figures import Figure, time_text
from ckptman.policies.calendar import KeepByPeriod, KeepWithin
from ckptman.policies.parameters import check_positive
from ckptman.policies.retention_rules import (
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepSteps,
    RetentionPolicy,
    limited,
    rules_of,
    size_text,
)
from ckptman.policies.save_policies import AnyOf, DerivedInterval, EverySeconds, EverySteps, Facts, SavePolicy

_DAY = 86_400
_FIRST_DAY = 20_454
"""1 January 2026, in days since 1 January 1970: the starts that are tried end January, a short month, and weeks."""
_STARTS = {"month": 61, "week": 7}
"""So many days in a row are tried to start on, where a rule counts months or weeks."""
_LONGEST = {"hour": 3600, "day": _DAY, "week": 7 * _DAY, "month": 31 * _DAY}
_MOST_PERIODS = 10_000
"""Of more periods each has a save of its own."""


@dataclass(frozen=True)
class Saves:
    """Saves 1 to `count`, one each `interval_seconds`, of a run of `run_seconds` whose steps take `step_seconds`."""

    run_seconds: float
    interval_seconds: float
    step_seconds: float = 1.0

    def __post_init__(self) -> None:
        for name in ("run_seconds", "interval_seconds", "step_seconds"):
            check_positive("plan", name, getattr(self, name))

    @property
    def count(self) -> int:
        return max(1, int(self.run_seconds / self.interval_seconds))

    def step(self, number: int) -> int:
        return max(number, round(number * self.interval_seconds / self.step_seconds))


def cadence_seconds(
    policy: SavePolicy | None,
    stall_seconds: float,
    save_seconds: float,
    restart_seconds: float,
    step_seconds: float | None,
) -> float | None:
    """Return the seconds from one save to the next by the intervals of a policy: the shortest of them, and no shorter
    than a save. None where it has none that is known."""
    measured = Facts(
        step=1,
        previous_step=0,
        saved_step=None,
        start_step=0,
        seconds_since_save=0.0,
        init_seconds=restart_seconds,
        step_seconds=step_seconds,
        stall_seconds=stall_seconds,
        durable_seconds=save_seconds,
    )
    known = []
    for each in intervals_of(policy):
        if isinstance(each, EverySeconds):
            known.append(each.seconds)
        elif isinstance(each, EverySteps):
            known += [] if step_seconds is None else [each.steps * step_seconds]
        elif (derived := each.interval_seconds(measured)) is not None:
            known.append(derived)
    return max(min(known), save_seconds) if known else None


def intervals_of(policy: SavePolicy | None) -> list[EverySteps | EverySeconds | DerivedInterval]:
    """Return those of its policies that save again and again."""
    single = policy.policies if isinstance(policy, AnyOf) else (policy,)
    return [each for each in single if isinstance(each, EverySteps | EverySeconds | DerivedInterval)]


def disk_figures(policy: RetentionPolicy | None, bytes_each: int, saves: Saves, cadence: str = "") -> list[Figure]:
    """Return what the rules keep of a run, at most, and what lies beside that. Without a rule all is kept.

    `cadence`: who says the interval. Raises IntervalError.
    """
    made = f"{time_text(saves.run_seconds)} / {time_text(saves.interval_seconds)}{cadence} = {saves.count:,} saves"
    if policy is None:
        kept, copies, counted = saves.count, saves.count, f"{saves.count:,}"
        rules = "no --keep rule: all are kept"
    else:
        kept, copies, counted = _with_others(
            policy, bytes_each, most_kept(policy, saves), saves.count + _named(policy, saves)
        )
        rules = f"{policy}"
    return [
        Figure("saves", saves.count, "count", made),
        Figure("kept", kept, "count", f"{rules}; of {saves.count:,} saves"),
        Figure("disk", copies * bytes_each, "bytes", f"{counted} x {size_text(bytes_each)}"),
    ]


def _with_others(policy: RetentionPolicy, bytes_each: int, by_rules: int, most: int) -> tuple[int, int, str]:
    """Return what is kept by the rules within the limit, how many checkpoints there are at once, and these in words.

    No rule removes what the run went on from, nor the newest that was verified; a limit makes room for them.
    """
    limit = limited(policy)
    room = most if limit is None else limit.bytes // bytes_each
    kept = min(by_rules, max(room, 1))
    others = min(by_rules + 2, max(room, 3)) - kept
    if kept + others + 1 >= most:
        return kept, most, f"{most:,}, every save,"
    words = "1 that the run went on from + 1 the newest verified" if others == 2 else f"{others} no rule may remove"
    return kept, kept + others + 1, f"({kept:,} by the rules + {words} + 1 being saved)"


def most_kept(policy: RetentionPolicy, saves: Saves) -> int:
    """Return the most saves that the rules keep at the end of the run: wherever in the calendar it begins, whichever
    of the others are the best by a metric, and with a save at each step that is named (`AtStep`)."""
    rules = rules_of(policy)
    last = min(saves.count, max(_last(rule, saves) for rule in rules))
    older = saves.count - last
    every = [rule.steps for rule in rules if isinstance(rule, KeepEvery)]
    milestones = sum(min(older, saves.step(older) // steps) for steps in every) if older else 0

    def alone(number: int) -> bool:
        """Return whether no other rule keeps this save."""
        before = saves.step(number - 1) if number > 1 else 0
        return number <= older and not any(saves.step(number) // steps > before // steps for steps in every)

    periods = [rule for rule in rules if isinstance(rule, KeepByPeriod)]
    starts = _starts(periods, saves) if periods else ()
    by_period = max((sum(map(alone, _newest_of_periods(periods, saves, start))) for start in starts), default=0)
    by_period += sum(max(0, min(rule.count, saves.count) - _MOST_PERIODS) for rule in periods)
    best: dict[str, int] = {}
    for rule in rules:
        if isinstance(rule, KeepBest):
            best[rule.metric] = max(best.get(rule.metric, 0), rule.count)
    named = _named(policy, saves)
    return min(saves.count + named, last + milestones + by_period + named + sum(best.values()))


def _last(rule: RetentionPolicy, saves: Saves) -> int:
    """Return how many of the last saves a rule keeps without a gap; the newest is always kept."""
    if isinstance(rule, KeepLast):
        return rule.count
    if isinstance(rule, KeepWithin):
        return 1 + int(rule.seconds / saves.interval_seconds)
    return 1 if isinstance(rule, KeepEvery | KeepBest | KeepSteps | KeepByPeriod) else saves.count


def _named(policy: RetentionPolicy, saves: Saves) -> int:
    """Return how many steps of the run are named, by `KeepSteps`."""
    named = {step for rule in rules_of(policy) if isinstance(rule, KeepSteps) for step in rule.steps}
    return sum(step <= saves.run_seconds / saves.step_seconds for step in named)


def _starts(periods: Sequence[KeepByPeriod], saves: Saves) -> Iterator[float]:
    """Return unix times to begin at: so that the first save, or the last, is the last of a day, and by turns of a week
    or of a month."""
    days = max(_STARTS.get(rule.period.unit, 1) for rule in periods)
    for day in range(_FIRST_DAY + 1, _FIRST_DAY + days + 1):
        for number in {1, saves.count}:
            yield day * _DAY - 1 - number * saves.interval_seconds


def _newest_of_periods(periods: Sequence[KeepByPeriod], saves: Saves, start: float) -> set[int]:
    """Return the saves that rules of the calendar keep of a run that begins at `start` (unix seconds), by their
    numbers."""
    found = set()
    for rule in periods:

        def period(number: int, rule: KeepByPeriod = rule) -> str:
            return rule.period.of(start + number * saves.interval_seconds)

        number = saves.count
        for _ in range(min(rule.count, _MOST_PERIODS)):
            found.add(number)
            newest = period(number)
            # The saves of a period lie side by side, so the first of them is found by halving.
            low = max(0, number - 2 - int(_LONGEST[rule.period.unit] / saves.interval_seconds))
            same = bisect_left(range(low + 1, number + 1), True, key=lambda each: period(each) == newest)
            number = low + same
            if number < 1:
                break
    return found
