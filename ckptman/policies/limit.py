"""A limit to what rules keep: `(KeepLast(10) | KeepEvery(1000)) & AtMost(bytes=2_000_000_000_000)`.

Rules say what is worth keeping, a limit what there is room for. Over it goes first what the fewest rules keep, and of
these the oldest commit; never what no rule may remove (see `retention.plan`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptman.errors import ConfigError, IntervalError
from ckptman.policies.calendar import newest_time
from ckptman.policies.checks import check_count, check_positive
from ckptman.policies.rules import KeepAny, Record, RetentionPolicy, sequence_of

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
        return Limited(_EVERYTHING, (self,)).keeps(records)

    def __and__(self, limit: AtMost) -> Limited:
        return Limited(_EVERYTHING, (self,)) & limit

    def __repr__(self) -> str:
        return f"AtMost(bytes={self.bytes})" if self.bytes is not None else f"AtMost(percent={self.percent:g})"


@dataclass(frozen=True, repr=False)
class Limited(RetentionPolicy):
    """Keep what a policy keeps, as far as its limits allow: what `&` makes."""

    policy: RetentionPolicy
    limits: tuple[AtMost, ...]

    def __post_init__(self) -> None:
        inner = self.policy
        if isinstance(inner, AtMost):
            inner = Limited(_EVERYTHING, (inner,))
        if isinstance(inner, Limited):
            object.__setattr__(self, "policy", inner.policy)
            object.__setattr__(self, "limits", inner.limits + self.limits)
        for kind in ("bytes", "percent"):
            said = {getattr(limit, kind) for limit in self.limits} - {None}
            if len(said) > 1:
                several = " and ".join(map(str, sorted(said)))
                raise ConfigError(f"AtMost: there are two limits in {kind}, {several}: say one")

    def keeps(self, records: Sequence[Record]) -> dict[int, str]:
        return self.keeps_at(records, newest_time(records))

    def keeps_at(self, records: Sequence[Record], now_seconds: float) -> dict[int, str]:
        reasons = self.policy.keeps_at(records, now_seconds)
        by_sequence = {record.sequence: record for record in records}
        going, _ = trim([by_sequence[each] for each in reasons], dict.fromkeys(reasons, 1), self.bytes)
        gone = {record.sequence for record in going}
        return {sequence: reason for sequence, reason in reasons.items() if sequence not in gone}

    def why_not(self, record: Record) -> str:
        return self.policy.why_not(record)

    @property
    def bytes(self) -> int:
        """The tightest limit. Raises: ConfigError while one is in percent."""
        if any(limit.percent is not None for limit in self.limits):
            raise ConfigError("AtMost: a limit in percent is one in bytes only where the size of the disk is known")
        return min(limit.bytes for limit in self.limits if limit.bytes is not None)

    def __repr__(self) -> str:
        limits = " & ".join(map(repr, self.limits))
        return limits if self.policy == _EVERYTHING else f"({self.policy!r}) & {limits}"


@dataclass(frozen=True)
class KeepAll(RetentionPolicy):
    """Keeps everything: what a limit alone trims."""

    def keeps(self, records: Sequence[Record]) -> dict[int, str]:
        return {record.sequence: ROOM for record in records}


_EVERYTHING = KeepAll()


def limited(policy: RetentionPolicy | None) -> Limited | None:
    """A policy with its limits; None where it has none."""
    if isinstance(policy, AtMost):
        return Limited(_EVERYTHING, (policy,))
    return policy if isinstance(policy, Limited) else None


def rules_of(policy: RetentionPolicy | None) -> tuple[RetentionPolicy, ...]:
    """Return the single rules of a policy, without its limits."""
    limit = limited(policy)
    rule = limit.policy if limit is not None else policy
    if isinstance(rule, KeepAny):
        return rule.policies
    return (rule,) if rule is not None else ()


def in_bytes(policy: RetentionPolicy | None, capacity_bytes: int) -> RetentionPolicy | None:
    """A policy whose limits are all in bytes, for a disk (or quota) of that size. Called before `retention.plan`."""
    limit = limited(policy)
    if limit is None:
        return policy
    limits = [
        each if each.percent is None else AtMost(bytes=max(1, int(capacity_bytes * each.percent / 100)))
        for each in limit.limits
    ]
    return Limited(limit.policy, (min(limits, key=lambda each: each.bytes or 0),))


def needs_capacity(policy: RetentionPolicy | None) -> bool:
    """Return whether somebody has to look how large the disk is."""
    limit = limited(policy)
    return limit is not None and any(each.percent is not None for each in limit.limits)


def trim(
    candidates: Sequence[Record], rules_that_keep: dict[int, int], most_bytes: int, other_bytes: int = 0
) -> tuple[list[Record], int]:
    """Return which of the candidates go so that they and `other_bytes` are no more than `most_bytes`; and the bytes
    that are still too many. First what the fewest rules keep, of these the oldest commit."""
    over = sum(record.bytes for record in candidates) + other_bytes - most_bytes
    going = []
    for record in sorted(candidates, key=lambda each: (rules_that_keep.get(each.sequence, 0), sequence_of(each))):
        if over <= 0:
            break
        going.append(record)
        over -= record.bytes
    return going, max(0, over)


def size_text(size_bytes: float, digits: int = 4) -> str:
    """Return bytes in powers of 1000, as storage is sold and checkpoints are talked about: `70 GB`, `1.5 TB`."""
    value = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if abs(value) < 999.5 or unit == "PB":
            break
        value /= 1000
    return f"{value:,.{digits}g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"
