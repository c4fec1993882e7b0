"""What to keep: each policy is data with one pure method, `keeps(records)`, and policies combine with `|`.

    KeepLast(3) | KeepEvery(steps=10_000) | KeepBest("loss", count=2)

Newest means last committed (the sequence), not the highest step: after a rollback the newest checkpoint has a lower
step. `plan` gives a verdict on every checkpoint, with its reasons; nothing here touches a disk.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ckptman.errors import ConfigError
from ckptman.policy.checks import check_count

_ZERO_HINT = "0 never means all; to keep all, give no retention policy"


@dataclass(frozen=True)
class Record:
    """What retention needs to know about one committed checkpoint."""

    step: int
    sequence: int
    """Grows by one with every commit to the root; two checkpoints never share one."""
    time_seconds: float
    """When it was committed (Unix time)."""
    bytes: int
    metrics: Mapping[str, float]
    verified: bool = False
    """All its bytes were read back and found to be what was saved."""
    damaged: str = ""
    """What was found not to be what was saved: then it is not to be counted."""


@dataclass(frozen=True)
class Verdict:
    """Whether a checkpoint is kept, and every reason why: "newest", "keep last 2 of 3", or "no rule keeps it"."""

    record: Record
    keep: bool
    reasons: tuple[str, ...]


class RetentionPolicy(ABC):
    """Names the checkpoints to keep. To write your own, subclass it and keep `keeps` a pure function of the records."""

    @abstractmethod
    def keeps(self, records: Sequence[Record]) -> dict[int, str]:
        """The sequence of each record to keep, with the reason. Records come in any order. Called by `plan`."""

    def __or__(self, other: RetentionPolicy) -> KeepAny:
        return KeepAny((self, other)) if isinstance(other, RetentionPolicy) else NotImplemented


@dataclass(frozen=True, repr=False)
class KeepAny(RetentionPolicy):
    """Keeps what any of its policies keeps: what `|` makes."""

    policies: tuple[RetentionPolicy, ...]

    def __post_init__(self) -> None:
        flat: list[RetentionPolicy] = []
        for policy in self.policies:
            if not isinstance(policy, RetentionPolicy):
                raise ConfigError(f"KeepAny: every policy must be a RetentionPolicy, not {policy!r}")
            flat += policy.policies if isinstance(policy, KeepAny) else (policy,)
        if not flat:
            raise ConfigError("KeepAny: give at least one policy; with none, only the newest would be kept")
        object.__setattr__(self, "policies", tuple(flat))

    def keeps(self, records: Sequence[Record]) -> dict[int, str]:
        return {sequence: "; ".join(reasons) for sequence, reasons in _all_reasons(self, records).items()}

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.policies))


@dataclass(frozen=True)
class KeepLast(RetentionPolicy):
    """Keeps the `count` checkpoints that were committed last. Raises IntervalError unless `count` is at least 1."""

    count: int

    def __post_init__(self) -> None:
        check_count("KeepLast", "count", self.count, _ZERO_HINT)

    def keeps(self, records: Sequence[Record]) -> dict[int, str]:
        newest_first = sorted(records, key=_sequence, reverse=True)[: self.count]
        return {
            record.sequence: f"keep last {place} of {self.count}" for place, record in enumerate(newest_first, start=1)
        }


@dataclass(frozen=True)
class KeepEvery(RetentionPolicy):
    """Keeps, for each multiple of `steps`, the first checkpoint at it or between it and the next multiple.

    So milestones stay also where saves fall beside the multiples, as they do with an interval in seconds. Whichever
    checkpoints go in between, the same milestones are chosen again. Raises IntervalError unless `steps` is at least 1.
    """

    steps: int

    def __post_init__(self) -> None:
        check_count("KeepEvery", "steps", self.steps, _ZERO_HINT)

    def keeps(self, records: Sequence[Record]) -> dict[int, str]:
        milestones: dict[int, Record] = {}
        for record in sorted(records, key=lambda record: (record.step, -record.sequence)):
            multiple = record.step - record.step % self.steps
            if multiple > 0:
                milestones.setdefault(multiple, record)
        rule = "keep every step" if self.steps == 1 else f"keep every {self.steps} steps"
        return {
            record.sequence: rule if record.step == multiple else f"{rule} (first after {multiple})"
            for multiple, record in milestones.items()
        }


@dataclass(frozen=True)
class KeepBest(RetentionPolicy):
    """Keeps the `count` checkpoints with the lowest (`mode="min"`) or highest ("max") value of a metric.

    A checkpoint without the metric, or whose value is NaN or infinite, is never among the best. Of equals, the one
    committed later is better. Raises IntervalError unless `count` is at least 1, ConfigError for another mode.
    """

    metric: str
    count: int = 1
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric:
            raise ConfigError(f'KeepBest: metric must be the name of a metric, such as "loss", not {self.metric!r}')
        check_count("KeepBest", "count", self.count, _ZERO_HINT)
        if self.mode not in ("min", "max"):
            raise ConfigError(f'KeepBest: mode must be "min" or "max", not {self.mode!r}')

    def keeps(self, records: Sequence[Record]) -> dict[int, str]:
        sign = 1 if self.mode == "min" else -1
        measured = [record for record in records if math.isfinite(record.metrics.get(self.metric, math.nan))]
        best_first = sorted(measured, key=lambda record: (sign * record.metrics[self.metric], -record.sequence))
        return {
            record.sequence: f"keep best {place} by {self.metric} ({self.mode}): {record.metrics[self.metric]:.6g}"
            for place, record in enumerate(best_first[: self.count], start=1)
        }


def plan(records: Sequence[Record], policy: RetentionPolicy | None) -> list[Verdict]:
    """A verdict on every checkpoint, in the order of their commits.

    The newest is always kept, and so is the newest that was verified, whatever the policy says. Without a policy
    everything is kept. Called after a commit, by the leader only, and by `ckptman prune`.
    """
    if policy is None:
        reasons = {record.sequence: ["no retention policy"] for record in records}
    else:
        reasons = _all_reasons(policy, records)
    for name, group in (("newest verified", [record for record in records if record.verified]), ("newest", records)):
        if group:
            reasons.setdefault(max(map(_sequence, group)), []).insert(0, name)
    return [
        Verdict(record, record.sequence in reasons, tuple(reasons.get(record.sequence, ["no rule keeps it"])))
        for record in sorted(records, key=_sequence)
    ]


def _all_reasons(policy: RetentionPolicy, records: Sequence[Record]) -> dict[int, list[str]]:
    reasons: dict[int, list[str]] = {}
    for member in policy.policies if isinstance(policy, KeepAny) else (policy,):
        for sequence, reason in member.keeps(records).items():
            reasons.setdefault(sequence, []).append(reason)
    return reasons


def _sequence(record: Record) -> int:
    return record.sequence
