"""Decisions: when to save, what to keep, whether to run again. No I/O, no clock.

For users: the save policies and the retention policies, which combine with `|`, and `Tier`.

Names are looked up when they are first used (PEP 562): a listing needs one module of the room, and not the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptman.policies.health import HealthThresholds
    from ckptman.policies.retention_by_time import KeepDaily, KeepHourly, KeepMonthly, KeepWeekly, KeepWithin
    from ckptman.policies.retention_rules import AtMost, KeepBest, KeepEvery, KeepLast, KeepSteps, RetentionPolicy
    from ckptman.policies.save_policies import (
        AtStep,
        BeforeDeadline,
        DalyInterval,
        EverySeconds,
        EverySteps,
        InitTimeInterval,
        OnStop,
        SavePolicy,
    )
    from ckptman.policies.tiers import CostShare, MemoryTier, Tier

__all__ = [
    "AtMost",
    "AtStep",
    "BeforeDeadline",
    "CostShare",
    "DalyInterval",
    "EverySeconds",
    "EverySteps",
    "HealthThresholds",
    "InitTimeInterval",
    "KeepBest",
    "KeepDaily",
    "KeepEvery",
    "KeepHourly",
    "KeepLast",
    "KeepMonthly",
    "KeepSteps",
    "KeepWeekly",
    "KeepWithin",
    "MemoryTier",
    "OnStop",
    "RetentionPolicy",
    "SavePolicy",
    "Tier",
]


_MODULES = ("health", "retention_by_time", "retention_plan", "retention_rules", "save_policies", "tiers")


def __getattr__(name: str) -> object:
    if name in _MODULES or name in __all__:
        import ckptman.policies.health
        import ckptman.policies.retention_by_time
        import ckptman.policies.retention_plan
        import ckptman.policies.retention_rules
        import ckptman.policies.save_policies
        import ckptman.policies.tiers  # noqa: F401

        for module in map(globals().__getitem__, _MODULES):
            globals().update((each, getattr(module, each)) for each in __all__ if hasattr(module, each))
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
