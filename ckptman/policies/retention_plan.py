"""What to keep: a plan gives a verdict on every checkpoint, with its reasons. Nothing here touches a disk or a clock.

    plan(records, (KeepLast(3) | KeepBest("loss", count=2)) & AtMost(bytes=2_000_000_000_000))

The rules are in `retention_rules` and `calendar`. Whatever they say, these stay: the newest checkpoint, the newest that
was verified, the newest that is finite, one that is pinned, and one that somebody reads or went on from. A rule that
cannot be meant, by a slip in a step or in the name of a metric, is found before it deletes what it was to keep
(`policy_mistake`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise

from ckptman.policies.retention_by_time import KeepWithin
from ckptman.policies.retention_rules import (
    ROOM,
    KeepAll,
    KeepSteps,
    is_known_time,
    limited,
    newest_finite,
    newest_time,
    rules_of,
    sequence_of,
    size_text,
    trim,
)
from ckptman.policies.retention_rules import KeepBest as KeepBest
from ckptman.policies.retention_rules import KeepEvery as KeepEvery
from ckptman.policies.retention_rules import KeepLast as KeepLast
from ckptman.policies.retention_rules import Record as Record
from ckptman.policies.retention_rules import RetentionPolicy as RetentionPolicy


@dataclass(frozen=True)
class Verdict:
    """Whether a checkpoint is kept, and every reason why: "newest", "keep last 2 of 3"; or why nothing keeps it."""

    record: Record
    keep: bool
    reasons: tuple[str, ...]


def plan(
    records: Sequence[Record],
    policy: RetentionPolicy | None,
    *,
    now_seconds: float | None = None,
    coming: Record | None = None,
) -> list[Verdict]:
    """A verdict on every checkpoint, in the order of their commits.

    The newest is always kept, and so are the newest that was verified, the newest that is finite, what is pinned and
    what is in use, whatever the policy says. Without a policy everything is kept. For rules by age, what was
    committed later than now (unix time; None: as the newest says) is as young as can be. `coming` has no verdict and
    counts as committed: what would go once it is there.

    Raises: ConfigError for a limit in percent (see `limit.in_bytes`). Called after a commit, by the leader only, and by
    `ckptman prune`.
    """
    if now_seconds is None:
        now_seconds = newest_time(records)
    counted = [record for record in records if not record.abandoned]
    untouchable = untouchables(records)
    rules = rules_of(policy)
    considered = [*counted, coming] if coming is not None else counted
    kept_by = [rule.keeps_at(considered, now_seconds) for rule in rules]
    if policy is None:
        kept_by = [{record.sequence: "no retention policy" for record in records}]
    trimmed = _trimmed(policy, records, coming, kept_by, untouchable)
    verdicts = []
    for record in sorted(records, key=sequence_of):
        reasons = [each[record.sequence] for each in kept_by if record.sequence in each]
        keep = bool(reasons)
        if record.sequence in untouchable:
            reasons, keep = [*untouchable[record.sequence], *reasons], True
        elif record.sequence in trimmed:
            worth = "" if reasons == [ROOM] else f" ({', '.join(reasons)})"
            reasons, keep = [trimmed[record.sequence] + worth], False
        elif not keep:
            reasons = [record.abandoned or f"no rule keeps it: {', '.join(rule.why_not(record) for rule in rules)}"]
        if not is_known_time(record.time_seconds):
            reasons.append("its time is not known")
        elif record.time_seconds > now_seconds:
            # Which day it was does not depend on what the clock says today; how old it is does.
            by_age = ", and counts as now" if any(isinstance(rule, KeepWithin) for rule in rules) else ""
            reasons.append(f"its time is in the future{by_age}")
        verdicts.append(Verdict(record, keep, tuple(reasons)))
    return verdicts


def untouchables(records: Sequence[Record]) -> dict[int, list[str]]:
    """Return what stays whatever the rules say, by sequence, with the reasons."""
    reasons: dict[int, list[str]] = {}
    # Where a rollback left all of them behind (nobody should), the newest of them is still the only way on.
    counted = [record for record in records if not record.abandoned] or records
    groups = {"newest": counted, "newest verified": [each for each in counted if each.verified]}
    for name, group in groups.items():
        if group:
            reasons.setdefault(max(map(sequence_of, group)), []).append(name)
    if counted and max(counted, key=sequence_of).nonfinite_reason:
        for sequence, name in newest_finite(counted).items():
            reasons.setdefault(sequence, []).append(name)
    for record in records:
        if record.pinned:
            reasons.setdefault(record.sequence, []).append(f"pinned: {record.pinned}")
        if record.in_use:
            reasons.setdefault(record.sequence, []).append(record.in_use)
    return reasons


def relied_on(verdicts: Sequence[Verdict], policy: RetentionPolicy | None, now_seconds: float) -> set[int]:
    """Return what a plan has to be right about before it is carried out, by sequence: what goes, and what stays in its
    place. That is all that is kept by a rule that counts, or within a limit; of rules that go by the step alone, what
    stays next to what goes. Called by a run, which does not look at each of thousands after each save."""
    counted = [each.record for each in verdicts if not each.record.abandoned]
    found = {each.record.sequence for each in verdicts if not each.keep or each.record.pinned}
    for rule in rules_of(policy):
        if limited(policy) is not None or not isinstance(rule, KeepEvery | KeepSteps):
            found |= rule.keeps_at(counted, now_seconds).keys()
    for before, after in pairwise(verdicts):
        if before.keep != after.keep:
            found |= {before.record.sequence, after.record.sequence}
    return found


def over_limit(verdicts: Sequence[Verdict], policy: RetentionPolicy | None) -> int:
    """By how many bytes what a plan keeps is more than the limit of its policy: nothing more of it may go."""
    limit = limited(policy)
    return max(0, sum(each.record.bytes for each in verdicts if each.keep) - limit.bytes) if limit is not None else 0


def _trimmed(
    policy: RetentionPolicy | None,
    records: Sequence[Record],
    coming: Record | None,
    kept_by: Sequence[Mapping[int, str]],
    untouchable: Mapping[int, object],
) -> dict[int, str]:
    """Return what goes although a rule keeps it, because a limit has no room for it, by sequence, with the reason."""
    limit = limited(policy)
    if limit is None:
        return {}
    count = Counter(sequence for each in kept_by for sequence in each)
    fixed = sum(record.bytes for record in records if record.sequence in untouchable) + (coming.bytes if coming else 0)
    loose = [record for record in records if record.sequence in count and record.sequence not in untouchable]

    def standing(rules: int) -> str:
        if limit.policies == (KeepAll(),):
            return "and there are newer ones"
        return "and only 1 rule keeps it" if rules == 1 else f"although {rules} rules keep it"

    return {
        record.sequence: f"no room within {size_text(limit.bytes)}, {standing(count[record.sequence])}"
        for record in trim(loose, count, limit.bytes, fixed)
    }


def policy_mistake(
    policy: RetentionPolicy | None, records: Sequence[Record], now_seconds: float, *, goes_on: bool
) -> str:
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
    if goes_on and any(_waits(rule, last, told) for rule in rules):
        return ""
    return f"the rules keep none of {len(counted)} checkpoints ({' | '.join(map(repr, rules))})"


def keeps_any(policy: RetentionPolicy | None, records: Sequence[Record], now_seconds: float) -> bool:
    """Return whether a rule keeps at least one of the checkpoints there are."""
    counted = [record for record in records if not record.abandoned]
    return any(rule.keeps_at(counted, now_seconds) for rule in rules_of(policy))


def _waits(rule: RetentionPolicy, last: int, told: Set[str]) -> bool:
    """Return whether a rule that keeps nothing may be about a step that has not come yet, or about a metric that is
    finite in none (`told`: all there are). One of the user's own may be."""
    if isinstance(rule, KeepBest):
        return rule.metric in told
    return rule.steps[-1] > last if isinstance(rule, KeepSteps) else True
