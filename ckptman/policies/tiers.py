"""Where a run's checkpoints go besides its root: places further away, and the memory of the nodes that train.

Tier("/project/run/checkpoints", every=4, retention=KeepLast(10))
Tier("s3://archive/run", retention=KeepBest("loss"))
MemoryTier()
MemoryTier(save_policy=EverySteps(10), copies=2, max_bytes=400 * 2**30)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ckptman.errors import ConfigError, IntervalError, masked_address, plain
from ckptman.policies.intervals import seconds_text
from ckptman.policies.parameters import check_count, check_positive, check_range
from ckptman.policies.retention_rules import Record, RetentionPolicy, needs_capacity, newest_finite, sequence_of
from ckptman.policies.save_policies import Decision, DerivedInterval, Facts, SavePolicy


class AsPath(Protocol):
    """What `pathlib.Path` is, without looking at a disk."""

    def __fspath__(self) -> str: ...


@dataclass(frozen=True)
class Tier:
    """Describe a place for copies of a run's checkpoints.

    Args:
        path: a folder, or the address of an object store such as `s3://bucket/prefix`. It belongs to one tier of
            one root: that of another run is refused.
        every: every N-th commit of the run's root is a candidate.
        retention: candidates that it would keep are copied, and while the newest of them is not finite, the newest that
            is; and it prunes the tier after a copy. None: all are copied,
            and nothing is deleted.
        bytes_per_second: the most that a copy may take; None: no limit.

    Raises:
        ConfigError: the path is no address, holds a secret, or the retention policy does not fit a tier.
        IntervalError: `every` is less than 1, or `bytes_per_second` is not above 0.
    """

    path: str | AsPath
    every: int = 1
    retention: RetentionPolicy | None = None
    bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        path = self.path if isinstance(self.path, str) else getattr(self.path, "__fspath__", lambda: None)()
        if not isinstance(path, str) or not path:
            raise ConfigError(f"Tier: path must be a folder, or an address such as s3://bucket/run, not {self.path!r}")
        if masked_address(path) != path:
            raise ConfigError(
                f"Tier: {plain(masked_address(path))} has a secret in it, and an address is shown and stored: take it "
                f"out, and give credentials in the environment, such as AWS_PROFILE"
            )
        object.__setattr__(self, "path", path)
        check_count("Tier", "every", self.every, "to copy nothing, leave the tier away")
        if self.retention is not None and not isinstance(self.retention, RetentionPolicy):
            raise ConfigError(f"Tier: retention must be a retention policy such as KeepLast(3), not {self.retention!r}")
        if needs_capacity(self.retention):
            raise ConfigError("Tier: a limit in percent is one of the disk that the root is on: say AtMost(bytes=...)")
        if self.bytes_per_second is not None:
            check_positive("Tier", "bytes_per_second", self.bytes_per_second)

    def __str__(self) -> str:
        return str(self.path)


def due(records: Sequence[Record], there: Sequence[Record], tier: Tier, now_seconds: float) -> dict[int, str]:
    """Return what of a root has still to be copied to a tier: the index of each in `records`, with the reason.

    `there`: what the tier holds; what is damaged there is copied again. What is damaged or abandoned in the root is not
    copied. Called by drains, and by prunes of the root, which leave alone what is due.
    """
    good = [record for record in there if not record.damaged]
    known = {_key(record) for record in good}
    new = {
        place: record
        for place, record in enumerate(records)
        if record.sequence % tier.every == 0
        and not record.damaged
        and not record.abandoned
        and _key(record) not in known
    }
    if tier.retention is None:
        rule = "every commit" if tier.every == 1 else f"every {tier.every} commits"
        return dict.fromkeys(new, rule)
    counted = [*(record for record in good if not record.abandoned), *new.values()]
    wanted = tier.retention.keeps_at(counted, now_seconds)
    kept = [record for record in counted if record.sequence in wanted]
    if kept and max(kept, key=sequence_of).nonfinite_reason:  # what goes there is to be of use
        wanted = newest_finite(counted) | wanted
    return {place: wanted[record.sequence] for place, record in new.items() if record.sequence in wanted}


def _key(record: Record) -> tuple[int, int, float]:
    return record.step, record.sequence, record.time_seconds


SHARE = 0.01
_FIRST_SECONDS = 1.0
"""The first checkpoint in memory, by which its cost is measured, is not made before training has run for so long."""


@dataclass(frozen=True)
class CostShare(DerivedInterval):
    """Save as often as keeps what saves take from the training below a share of it.

    The interval is what a save makes the training wait, over `share`; and, whatever `max_seconds` says, no less than a
    save takes until it counts, so that one is over when the next begins. It is never cut short by a part of a step.
    What saves cost is measured by the first, after a few steps.

    Args:
        share: of the training's time, such as 0.01.
        min_seconds: the shortest interval.
        max_seconds: the longest interval, and the interval until the cost was measured; None: no upper bound. What is
            left of the step that is under way comes on top.

    Raises:
        IntervalError: a share that is not between 0 and 1, or bounds that are negative or cross.
    """

    share: float = SHARE
    min_seconds: float = 0
    max_seconds: float | None = None

    def __post_init__(self) -> None:
        check_positive("CostShare", "share", self.share)
        if self.share >= 1:
            raise IntervalError(f"CostShare: share must be below 1, such as {SHARE}, not {self.share!r}")
        check_range("CostShare", self.min_seconds, self.max_seconds)

    def decide(self, facts: Facts) -> Decision | None:
        if facts.step <= facts.base_step:
            return None
        if facts.stall_seconds is None and facts.step_seconds is not None and facts.base_step == facts.start_step:
            due = facts.seconds_since_save >= max(_FIRST_SECONDS, 2 * facts.step_seconds)
            return Decision("first save, to measure its cost") if due else None
        seconds = self.interval_seconds(facts)
        if seconds is None or facts.seconds_since_save < seconds:
            return None
        since = "since the start" if facts.saved_step is None else "since the last save"
        return Decision(f"{seconds_text(facts.seconds_since_save)} {since} ({self._explain(facts, seconds)})")

    def interval_seconds(self, facts: Facts) -> float | None:
        seconds = super().interval_seconds(facts)
        return None if seconds is None else max(seconds, facts.durable_seconds or 0.0)

    def interval_steps(self, facts: Facts) -> int | None:
        """As many steps as the interval takes, the last one in full; None: not known yet."""
        seconds = self.interval_seconds(facts)
        return max(1, math.ceil(seconds / facts.step_seconds)) if seconds is not None and facts.step_seconds else None

    def derived_seconds(self, facts: Facts) -> float | None:
        if facts.stall_seconds is None:
            return None
        return max(facts.stall_seconds / self.share, facts.durable_seconds or 0.0)

    def derivation(self, facts: Facts) -> str:
        stall_seconds, whole_seconds = facts.stall_seconds or 0.0, facts.durable_seconds or 0.0
        wanted_seconds = stall_seconds / self.share
        text = f"a stall of {seconds_text(stall_seconds)} is {100 * self.share:.3g} % of {seconds_text(wanted_seconds)}"
        return f"{text}, a save takes {seconds_text(whole_seconds)}" if whole_seconds > wanted_seconds else text


@dataclass(frozen=True)
class MemoryTier:
    """Keep the newest checkpoint in the memory of the nodes that train, each part on several of them.

    Args:
        save_policy: when to save to memory; None: as often as costs 1 % of the training's time (`CostShare`).
        copies: on how many nodes each part lies. 2: any one node may be lost, and with luck more. 1: none may, and what
            is in memory survives the death of processes only.
        path: a folder in the memory of each node; or on a disk of each node's own.
        max_bytes: the most memory that this may take on a node, what is copied from the devices included; None: what
            the job's limits leave.

    Raises:
        ConfigError: a path that is not absolute, or something else than a policy.
        IntervalError: `copies` is less than 1, or `max_bytes` is not above 0.
    """

    save_policy: SavePolicy | None = None
    copies: int = 2
    path: str | AsPath = "/dev/shm"
    max_bytes: int | None = None
    policy: SavePolicy = field(init=False, repr=False, compare=False)
    """`save_policy`, or the one that takes its place."""

    def __post_init__(self) -> None:
        path = self.path if isinstance(self.path, str) else getattr(self.path, "__fspath__", lambda: None)()
        if not isinstance(path, str) or not path.startswith("/"):
            raise ConfigError(f"MemoryTier: path must be an absolute path of each node, not {self.path!r}")
        object.__setattr__(self, "path", path)
        check_count("MemoryTier", "copies", self.copies, "to keep nothing in memory, leave the tier out")
        if self.max_bytes is not None:
            check_positive("MemoryTier", "max_bytes", self.max_bytes)
        if self.save_policy is not None and not isinstance(self.save_policy, SavePolicy):
            raise ConfigError(f"MemoryTier: save_policy is a policy such as EverySteps(10), not {self.save_policy!r}")
        object.__setattr__(self, "policy", self.save_policy if self.save_policy is not None else CostShare())

    def __str__(self) -> str:
        return f"memory ({self.path})"
