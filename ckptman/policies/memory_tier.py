"""The nearest tier: checkpoints in the memory of the nodes that train, and how often they are made.

MemoryTier()
MemoryTier(save_policy=EverySteps(10), copies=2, max_bytes=400 * 2**30)
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ckptman.errors import ConfigError
from ckptman.policies.intervals import seconds_text
from ckptman.policies.parameters import check_count, check_positive
from ckptman.policies.save_policies import Decision, DerivedInterval, Facts, SavePolicy
from ckptman.policies.tiers import AsPath

DEFAULT_PATH = "/dev/shm"
SHARE = 0.01
_FIRST_SECONDS = 1.0
"""The first checkpoint in memory, by which its cost is measured, is not made before training has run for so long."""


@dataclass(frozen=True)
class CostShare(DerivedInterval):
    """Save as often as keeps what saves take from the training below a share of it.

    The interval is what a save makes the training wait, over `share`; and no less than a save takes until it counts, so
    that one is over when the next begins. What saves cost is measured by the first, after a few steps.

    Args:
        share: of the training's time.
        min_seconds: the shortest interval.
        max_seconds: the longest interval; None: no upper bound.

    Raises:
        IntervalError: a share that is not above 0, or bounds that cross.
    """

    share: float = SHARE
    min_seconds: float = 0
    max_seconds: float | None = None

    def __post_init__(self) -> None:
        check_positive("CostShare", "share", self.share)
        if self.share >= 1:
            raise ConfigError(f"CostShare: share must be below 1, such as {SHARE}, not {self.share!r}")

    def decide(self, facts: Facts) -> Decision | None:
        if facts.stall_seconds is None and facts.step_seconds is not None and facts.base_step == facts.start_step:
            due = facts.seconds_since_save >= max(_FIRST_SECONDS, 2 * facts.step_seconds)
            return Decision("first save, to measure its cost") if due else None
        return super().decide(facts)

    def derived_seconds(self, facts: Facts) -> float | None:
        if facts.stall_seconds is None:
            return None
        return max(facts.stall_seconds / self.share, facts.durable_seconds or 0.0)

    def derivation(self, facts: Facts) -> str:
        stall_seconds, whole_seconds = facts.stall_seconds or 0.0, facts.durable_seconds or 0.0
        wanted_seconds = stall_seconds / self.share
        text = f"a stall of {seconds_text(stall_seconds)} is {self.share:.2g} of {seconds_text(wanted_seconds)}"
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
        ConfigError: no path, or a policy that is none.
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
        check_count("MemoryTier", "copies", self.copies, "to keep nothing in memory, leave the tier away")
        if self.max_bytes is not None:
            check_positive("MemoryTier", "max_bytes", self.max_bytes)
        if self.save_policy is not None and not isinstance(self.save_policy, SavePolicy):
            raise ConfigError(f"MemoryTier: save_policy is a policy such as EverySteps(10), not {self.save_policy!r}")
        object.__setattr__(self, "policy", self.save_policy if self.save_policy is not None else CostShare())

    def __str__(self) -> str:
        return f"memory ({self.path})"
