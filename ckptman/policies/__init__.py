"""Decisions: when to save, what to keep, whether to run again. No I/O, no clock.

For users: the save policies and the retention policies, which combine with `|`, and `Tier`.

Names are looked up when they are first used (PEP 562): a listing needs one module of the room, and not the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptman.policies.calendar import KeepDaily, KeepHourly, KeepMonthly, KeepWeekly, KeepWithin
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
    from ckptman.policies.tiers import Tier

__all__ = [
    "AtMost",
    "AtStep",
    "BeforeDeadline",
    "DalyInterval",
    "EverySeconds",
    "EverySteps",
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
    "OnStop",
    "RetentionPolicy",
    "SavePolicy",
    "Tier",
]


def __getattr__(name: str) -> object:
    if name in __all__:
        from ckptman.policies import calendar, retention_rules, save_policies, tiers

        for module in (calendar, retention_rules, save_policies, tiers):
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
