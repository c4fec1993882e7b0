"""Rules that cannot be meant: a slip in a step or in the name of a metric must not delete what it was to keep."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ckptman.policies.calendar import KeepWithin
from ckptman.policies.limit import rules_of
from ckptman.policies.rules import KeepBest, KeepSteps, Record, RetentionPolicy


def slip(policy: RetentionPolicy | None, records: Sequence[Record], now_seconds: float, *, goes_on: bool) -> str:
    """Return why a policy cannot be meant for the checkpoints there are; "" where it can.

    `goes_on`: it is that of a run. Then a metric that no checkpoint has is a slip only where they have others, and a
    step that has not come yet is none. Called before anything is deleted.
    """
    rules = rules_of(policy)
    if not records:
        return ""
    told = {name for record in records for name in record.metrics}
    known = {name for record in records for name, value in record.metrics.items() if math.isfinite(value)}
    for metric in sorted({rule.metric for rule in rules if isinstance(rule, KeepBest)} - known):
        if goes_on and (metric in told or not known):
            continue
        if metric in told:
            return f"the metric {metric!r} is a finite number in no checkpoint"
        there = f"they have {', '.join(sorted(known))}" if known else "they have no metrics"
        return f"no checkpoint has the metric {metric!r}; {there}"
    counted = [record for record in records if not record.abandoned]
    # By its age all of it may well be over.
    if len(counted) < 2 or not rules or any(isinstance(rule, KeepWithin) for rule in rules):
        return ""
    if keeps_any(policy, records, now_seconds):
        return ""
    last = max(record.step for record in counted)
    if goes_on and any(_waits(rule, last) for rule in rules):
        return ""
    return f"the rules keep none of {len(counted)} checkpoints ({' | '.join(map(repr, rules))})"


def keeps_any(policy: RetentionPolicy | None, records: Sequence[Record], now_seconds: float) -> bool:
    """Return whether a rule keeps at least one of the checkpoints there are."""
    counted = [record for record in records if not record.abandoned]
    return any(rule.keeps_at(counted, now_seconds) for rule in rules_of(policy))


def _waits(rule: RetentionPolicy, last: int) -> bool:
    """Return whether a rule that keeps nothing may be about a step that has not come yet. One of the user's own may
    be."""
    return rule.steps[-1] > last if isinstance(rule, KeepSteps) else not isinstance(rule, KeepBest)
