"""The nearest tier: checkpoints in the memory of the nodes that train, and how often they are made.

MemoryTier()
MemoryTier(save_policy=EverySteps(10), copies=2, max_bytes=400 * 2**30)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ckptman.errors import ConfigError, IntervalError
from ckptman.policies.intervals import seconds_text
from ckptman.policies.parameters import check_count, check_positive, check_range
from ckptman.policies.save_policies import Decision, DerivedInterval, Facts, SavePolicy
from ckptman.policies.tiers import AsPath

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
