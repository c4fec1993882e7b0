"""Retention rules: each is data with one pure method, `keeps(records)`, and rules combine with `|`.

    KeepLast(3) | KeepEvery(steps=10_000) | KeepBest("loss", count=2)

A rule only ever adds to what is kept. Newest means last committed (the sequence), not the highest step: after a
rollback the newest checkpoint has a lower step. What a plan makes of them is in `retention`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ckptman.errors import ConfigError
from ckptman.policies.checks import check_count

if TYPE_CHECKING:
    from ckptman.policies.limit import AtMost, Limited

ZERO_HINT = "0 never means all; to keep all, give no retention policy"


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
    pinned: str = ""
    """Why somebody wants it kept, whatever the rules say."""
    in_use: str = ""
    """Who reads it, or went on from it and still runs."""
    abandoned: str = ""
    """The rollback that left it behind: no rule counts it, and only a pin or a reader keeps it."""


class RetentionPolicy(ABC):
    """Choose the checkpoints to keep. Policies combine with `|`, and `&` sets a limit (`AtMost`).

    To write your own, subclass it and keep `keeps` a pure function of the records.
    """

    @abstractmethod
    def keeps(self, records: Sequence[Record]) -> dict[int, str]:
        """Choose the records to keep. Called by `plan`.

        Args:
            records: the committed checkpoints of a root, in any order.

        Returns:
            The reason to keep it, by the sequence of each record that is kept.
        """

    def keeps_at(self, records: Sequence[Record], now_seconds: float) -> dict[int, str]:
        """Choose by age too; override it where a rule depends on the time. Called by `plan`.

        Args:
            records: as for `keeps`.
            now_seconds: unix time; where the clock is behind, records are later.

        Returns:
            As `keeps`.
        """
        return self.keeps(records)

    def why_not(self, record: Record) -> str:
        """Explain why a record is not kept. Called by `plan`.

        Args:
            record: one that `keeps` did not choose.

        Returns:
            A few words, such as "older than the last 3".
        """
        return f"{type(self).__name__} does not name it"

    def __or__(self, other: RetentionPolicy) -> KeepAny:
        return KeepAny((self, other)) if isinstance(other, RetentionPolicy) else NotImplemented

    def __and__(self, limit: AtMost) -> Limited:
        from ckptman.policies.limit import AtMost, Limited

        if isinstance(limit, RetentionPolicy) and not isinstance(limit, AtMost):
            raise ConfigError(
                f"& sets a limit to what rules keep, as in KeepLast(10) & AtMost(bytes=2_000_000_000_000), and "
                f"{limit!r} is not a limit: combine rules with |"
            )
        return Limited(self, (limit,)) if isinstance(limit, AtMost) else NotImplemented


@dataclass(frozen=True, repr=False)
class KeepAny(RetentionPolicy):
    """Keep what any of its policies keeps: what `|` makes."""

    policies: tuple[RetentionPolicy, ...]

    def __post_init__(self) -> None:
        from ckptman.policies.limit import AtMost, Limited

        flat: list[RetentionPolicy] = []
        for policy in self.policies:
            if not isinstance(policy, RetentionPolicy):
                raise ConfigError(f"KeepAny: every policy must be a RetentionPolicy, not {policy!r}")
            if isinstance(policy, (AtMost, Limited)):
                raise ConfigError(
                    f"a limit trims what rules keep, and | adds to it, so the two contradict each other: write "
                    f"(KeepLast(10) | KeepEvery(1000)) & AtMost(...), with {policy!r} last and outside of the brackets"
                )
            flat += policy.policies if isinstance(policy, KeepAny) else (policy,)
        if not flat:
            raise ConfigError("KeepAny: give at least one policy; with none, only the newest would be kept")
        _refuse_contradictions(flat)
        object.__setattr__(self, "policies", tuple(flat))

    def keeps(self, records: Sequence[Record]) -> dict[int, str]:
        return _joined(policy.keeps(records) for policy in self.policies)

    def keeps_at(self, records: Sequence[Record], now_seconds: float) -> dict[int, str]:
        return _joined(policy.keeps_at(records, now_seconds) for policy in self.policies)

    def why_not(self, record: Record) -> str:
        return ", ".join(policy.why_not(record) for policy in self.policies)

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.policies))


@dataclass(frozen=True)
class KeepLast(RetentionPolicy):
    """Keep the `count` checkpoints that were committed last.

    Args:
        count: checkpoints.

    Raises:
        IntervalError: `count` is less than 1.
    """

    count: int

    def __post_init__(self) -> None:
        check_count("KeepLast", "count", self.count, ZERO_HINT)

    def keeps(self, records: Sequence[Record]) -> dict[int, str]:
        newest_first = sorted(records, key=sequence_of, reverse=True)[: self.count]
        return {
            record.sequence: f"keep last {place} of {self.count}" for place, record in enumerate(newest_first, start=1)
        }

    def why_not(self, record: Record) -> str:
        return "older than the last one" if self.count == 1 else f"older than the last {self.count}"


@dataclass(frozen=True)
class KeepEvery(RetentionPolicy):
    """Keep, for each multiple of `steps`, the first checkpoint at it or between it and the next multiple.

    So milestones stay also where saves fall beside the multiples, as they do with an interval in seconds. Whichever
    checkpoints go in between, the same milestones are chosen again.

    Args:
        steps: optimizer steps from one milestone to the next.

    Raises:
        IntervalError: `steps` is less than 1.
    """

    steps: int

    def __post_init__(self) -> None:
        check_count("KeepEvery", "steps", self.steps, ZERO_HINT)

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

    def why_not(self, record: Record) -> str:
        return f"not the first from a multiple of {self.steps} on"


@dataclass(frozen=True)
class KeepSteps(RetentionPolicy):
    """Keep the checkpoints of the steps named: `KeepSteps(1_000, 5_000)`.

    Args:
        *steps: optimizer steps; 0 is a step.

    Raises:
        ConfigError: no step is given.
        IntervalError: a step is below 0.
    """

    steps: tuple[int, ...]

    def __init__(self, *steps: int) -> None:
        if not steps:
            raise ConfigError("KeepSteps: name at least one step; with none, it keeps nothing")
        for step in steps:
            # 0 is a step: what a run has before it trains.
            check_count("KeepSteps", "each step", step if step != 0 or isinstance(step, bool) else 1)
        object.__setattr__(self, "steps", tuple(sorted(set(steps))))

    def keeps(self, records: Sequence[Record]) -> dict[int, str]:
        wanted = frozenset(self.steps)
        # A step that was saved again after a rollback: the later one stands for it.
        newest: dict[int, Record] = {}
        for record in sorted(records, key=sequence_of):
            if record.step in wanted:
                newest[record.step] = record
        return {record.sequence: f"keep step {record.step}" for record in newest.values()}

    def why_not(self, record: Record) -> str:
        return "not a step that is named"

    def __repr__(self) -> str:
        return f"KeepSteps({', '.join(map(str, self.steps))})"


@dataclass(frozen=True)
class KeepBest(RetentionPolicy):
    """Keep the `count` checkpoints with the lowest or highest value of a metric.

    A checkpoint without the metric, or whose value is NaN or infinite, is never among the best. Of equals, the one
    committed later is better.

    Args:
        metric: its name, as given to `Checkpointer.step(metrics=...)`.
        count: checkpoints.
        mode: "min" keeps the lowest values, "max" the highest.

    Raises:
        IntervalError: `count` is less than 1.
        ConfigError: the metric has no name, or the mode is another one.
    """

    metric: str
    count: int = 1
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric:
            raise ConfigError(f'KeepBest: metric must be the name of a metric, such as "loss", not {self.metric!r}')
        check_count("KeepBest", "count", self.count, ZERO_HINT)
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

    def why_not(self, record: Record) -> str:
        value = record.metrics.get(self.metric)
        if value is None:
            return f"it has no {self.metric}"
        if not math.isfinite(value):
            return f"its {self.metric} is {value}"
        return f"{self.metric} {value:.6g} is not among the best {self.count}"


def sequence_of(record: Record) -> int:
    """For sorting: in the order of commits."""
    return record.sequence


def _joined(each_keeps: Iterable[Mapping[int, str]]) -> dict[int, str]:
    found: dict[int, list[str]] = {}
    for keeps in each_keeps:
        for sequence, reason in keeps.items():
            found.setdefault(sequence, []).append(reason)
    return {sequence: "; ".join(reasons) for sequence, reasons in found.items()}


def _refuse_contradictions(rules: Sequence[RetentionPolicy]) -> None:
    modes: dict[str, str] = {}
    for rule in rules:
        if isinstance(rule, KeepBest) and modes.setdefault(rule.metric, rule.mode) != rule.mode:
            raise ConfigError(
                f"KeepBest: the best by {rule.metric!r} cannot be both the lowest and the highest: say min or max"
            )
