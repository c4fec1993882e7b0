"""Retention rules: each is data with one pure method, `keeps(records)`, and rules combine with `|`.

    KeepLast(3) | KeepEvery(steps=10_000) | KeepBest("loss", count=2)

A rule only ever adds to what is kept. Newest means last committed (the sequence), not the highest step: after a
rollback the newest checkpoint has a lower step. What a plan makes of them is in `retention`.

`AtMost` limits what rules keep: `(KeepLast(10) | KeepEvery(1000)) & AtMost(bytes=2_000_000_000_000)`. Over the limit
goes first what the fewest rules keep, and of these the oldest commit; never what no rule may remove (`retention.plan`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ckptman.errors import ConfigError, IntervalError
from ckptman.policies.parameters import check_count, check_positive

LATEST_SECONDS = 253_402_300_799
"""The end of the year 9999, in unix seconds. Only a broken clock is later, or earlier than 1970."""
_NAMED = 3
"""So many names of what is not finite are in a message."""
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
    nonfinite_metrics: tuple[str, ...] = ()
    """Names of metrics that are NaN or infinite."""
    nonfinite_tensors: tuple[str, ...] = ()
    """Names of some parameters and optimizer tensors in it that hold NaN or infinity."""
    attempt: int = 1
    """The attempt that saved it."""

    @property
    def nonfinite(self) -> str:
        """What in it is NaN or infinite; "" where nothing is, or nobody looked."""
        return nonfinite_text(self.nonfinite_metrics, self.nonfinite_tensors)

    @property
    def nonfinite_reason(self) -> str:
        """The tensors in it that are NaN or infinite, for which a restore skips it. Metrics do not count: they are
        labels, and often NaN until there is a value."""
        return nonfinite_text((), self.nonfinite_tensors)


def newest_finite(records: Sequence[Record]) -> dict[int, str]:
    """Return the newest that a restore takes, by sequence with the reason; empty where none is finite."""
    finite = [sequence_of(each) for each in records if not each.nonfinite_reason]
    return {max(finite): "newest finite"} if finite else {}


def nonfinite_text(metrics: Sequence[str], tensors: Sequence[str]) -> str:
    """Return what is NaN or infinite in a checkpoint, in words: `metric loss; tensors model.weight, model.bias`."""
    parts = []
    for kind, names in (("metric", metrics), ("tensor", tensors)):
        more = f" and {len(names) - _NAMED} more" * (len(names) > _NAMED)
        if names:
            parts.append(f"{kind}{'s' * (len(names) > 1)} {', '.join(names[:_NAMED])}{more}")
    return "; ".join(parts)


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

    def __and__(self, limit: AtMost) -> KeepAny:
        if isinstance(limit, AtMost):
            return KeepAny(rules_of(self), (*limits_of(self), limit))
        if isinstance(limit, RetentionPolicy):
            raise ConfigError(
                f"& sets a limit to what rules keep, as in KeepLast(10) & AtMost(bytes=2_000_000_000_000), and "
                f"{limit!r} is not a limit: combine rules with |"
            )
        return NotImplemented


@dataclass(frozen=True, repr=False)
class KeepAny(RetentionPolicy):
    """Keep what any of its policies keeps, as far as its limits allow: what `|` and `&` make."""

    policies: tuple[RetentionPolicy, ...]
    limits: tuple[AtMost, ...] = ()

    def __post_init__(self) -> None:
        flat: list[RetentionPolicy] = []
        for policy in self.policies:
            if not isinstance(policy, RetentionPolicy):
                raise ConfigError(f"KeepAny: every policy must be a RetentionPolicy, not {policy!r}")
            if limits_of(policy):
                raise ConfigError(
                    f"a limit trims what rules keep, and | adds to it, so the two contradict each other: write "
                    f"(KeepLast(10) | KeepEvery(1000)) & AtMost(...), with {policy!r} last and outside of the brackets"
                )
            flat += rules_of(policy)
        if not flat:
            raise ConfigError("KeepAny: give at least one policy; with none, only the newest would be kept")
        modes: dict[str, str] = {}
        for rule in flat:
            if isinstance(rule, KeepBest) and modes.setdefault(rule.metric, rule.mode) != rule.mode:
                raise ConfigError(
                    f"KeepBest: the best by {rule.metric!r} cannot be both the lowest and the highest: say min or max"
                )
        for kind in ("bytes", "percent"):
            said = {getattr(limit, kind) for limit in self.limits} - {None}
            if len(said) > 1:
                several = " and ".join(map(str, sorted(said)))
                raise ConfigError(f"AtMost: there are two limits in {kind}, {several}: say one")
        object.__setattr__(self, "policies", tuple(flat))

    def keeps(self, records: Sequence[Record]) -> dict[int, str]:
        return self.keeps_at(records, newest_time(records))

    def keeps_at(self, records: Sequence[Record], now_seconds: float) -> dict[int, str]:
        found: dict[int, list[str]] = {}
        for policy in self.policies:
            for sequence, reason in policy.keeps_at(records, now_seconds).items():
                found.setdefault(sequence, []).append(reason)
        if self.limits:
            kept = [record for record in records if record.sequence in found]
            for record in trim(kept, {sequence: len(reasons) for sequence, reasons in found.items()}, self.bytes):
                del found[record.sequence]
        return {sequence: "; ".join(reasons) for sequence, reasons in found.items()}

    def why_not(self, record: Record) -> str:
        return ", ".join(policy.why_not(record) for policy in self.policies)

    @property
    def bytes(self) -> int:
        """The tightest limit. Raises: ConfigError while one is in percent."""
        if any(limit.percent is not None for limit in self.limits):
            raise ConfigError("AtMost: a limit in percent is one in bytes only where the size of the disk is known")
        return min(limit.bytes for limit in self.limits if limit.bytes is not None)

    def __repr__(self) -> str:
        rules, limits = " | ".join(map(repr, self.policies)), " & ".join(map(repr, self.limits))
        if not limits:
            return rules
        return limits if self.policies == (KeepAll(),) else f"({rules}) & {limits}"


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

    A checkpoint without the metric, or whose value is NaN or infinite, is never among the best, nor is one whose
    parameters are not finite. Of equals, the one committed later is better.

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
        sound = [record for record in records if not record.nonfinite_tensors]
        measured = [record for record in sound if math.isfinite(record.metrics.get(self.metric, math.nan))]
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
        if record.nonfinite_tensors:
            return f"it is not finite ({nonfinite_text((), record.nonfinite_tensors)})"
        return f"{self.metric} {value:.6g} is not among the best {self.count}"


def sequence_of(record: Record) -> int:
    """For sorting: in the order of commits."""
    return record.sequence


def is_known_time(seconds: float) -> bool:
    """Return whether a unix time can be one: a clock that says another one was not set, or is broken."""
    return 0 < seconds < LATEST_SECONDS


def time_to_store(seconds: float) -> float:
    """Return a unix time, or the bound that it is beyond, where it is no known time."""
    return min(max(seconds, 0.0), float(LATEST_SECONDS))


def newest_time(records: Sequence[Record]) -> float:
    """Return the latest known time of the records, in unix seconds; 0 where none is known."""
    return max((each.time_seconds for each in records if is_known_time(each.time_seconds)), default=0.0)


ROOM = "there is room for it"


@dataclass(frozen=True)
class AtMost(RetentionPolicy):
    """Limit the room that the checkpoints of a root take: `KeepLast(10) & AtMost(bytes=2_000_000_000_000)`.

    Alone it keeps all that there is room for, the last committed first. One of the two is given.

    Args:
        bytes: of all checkpoints together.
        percent: of the file system, or of the smallest quota that counts for the root.

    Raises:
        ConfigError: neither or both are given.
        IntervalError: the limit is not above 0, or is more than 100 percent.
    """

    bytes: int | None = None
    percent: float | None = None

    def __post_init__(self) -> None:
        if (self.bytes is None) == (self.percent is None):
            raise ConfigError("AtMost: say either bytes=2_000_000_000_000 or percent=80")
        if self.bytes is not None:
            check_count("AtMost", "bytes", self.bytes, "0 never means no limit; without one, leave AtMost away")
        if self.percent is not None:
            check_positive("AtMost", "percent", self.percent)
            if self.percent > 100:
                raise IntervalError(f"AtMost: percent must be at most 100, not {self.percent!r}")

    def keeps(self, records: Sequence[Record]) -> dict[int, str]:
        return KeepAny((KeepAll(),), (self,)).keeps(records)

    def __repr__(self) -> str:
        return f"AtMost(bytes={self.bytes})" if self.bytes is not None else f"AtMost(percent={self.percent:g})"


@dataclass(frozen=True)
class KeepAll(RetentionPolicy):
    """Keeps everything: what a limit alone trims."""

    def keeps(self, records: Sequence[Record]) -> dict[int, str]:
        return {record.sequence: ROOM for record in records}


def limits_of(policy: RetentionPolicy | None) -> tuple[AtMost, ...]:
    """Return the limits of a policy."""
    if isinstance(policy, AtMost):
        return (policy,)
    return policy.limits if isinstance(policy, KeepAny) else ()


def rules_of(policy: RetentionPolicy | None) -> tuple[RetentionPolicy, ...]:
    """Return the single rules of a policy, without its limits."""
    if policy is None or isinstance(policy, AtMost):
        return () if policy is None else (KeepAll(),)
    return policy.policies if isinstance(policy, KeepAny) else (policy,)


def limited(policy: RetentionPolicy | None) -> KeepAny | None:
    """Return a policy with its limits; None if it has none."""
    limits = limits_of(policy)
    return KeepAny(rules_of(policy), limits) if limits else None


def in_bytes(policy: RetentionPolicy | None, capacity_bytes: int) -> RetentionPolicy | None:
    """Return a policy whose limits are in bytes, on a disk (or quota) of this size. Called before `retention.plan`."""
    limits = [
        each.bytes if each.percent is None else max(1, int(capacity_bytes * each.percent / 100))
        for each in limits_of(policy)
    ]
    return KeepAny(rules_of(policy), (AtMost(min(each for each in limits if each)),)) if limits else policy


def needs_capacity(policy: RetentionPolicy | None) -> bool:
    """Return whether the size of the disk has to be known."""
    return any(each.percent is not None for each in limits_of(policy))


def trim(
    candidates: Sequence[Record], rules_that_keep: Mapping[int, int], most_bytes: int, other_bytes: int = 0
) -> list[Record]:
    """Return which of the candidates go so that they and `other_bytes` are no more than `most_bytes`: first what the
    fewest rules keep, of these the oldest commit."""
    over_bytes = sum(record.bytes for record in candidates) + other_bytes - most_bytes
    going = []
    for record in sorted(candidates, key=lambda each: (rules_that_keep[each.sequence], each.sequence)):
        if over_bytes <= 0:
            break
        going.append(record)
        over_bytes -= record.bytes
    return going


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def bytes_text(count: int) -> str:
    """Return an amount of data that is there, in powers of 1024: `512 B`, `1.2 GiB`."""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{count} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def size_text(size_bytes: float, digits: int = 4) -> str:
    """Return bytes in powers of 1000: rates, limits and plans, as storage is sold: `70 GB`, `1.5 TB`."""
    value = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if abs(value) < 999.5 or unit == "PB":
            break
        value /= 1000
    return f"{value:,.{digits}g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"
