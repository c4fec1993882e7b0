"""Decisions: when to save, what to keep, whether to run again. No I/O, no clock.

For users: the save policies and the retention policies, which combine with `|`, and `Tier`.

Names are looked up when they are first used (PEP 562): a listing needs one module of the room, and not the others.
"""

from __future__ import annotations

import importlib
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


_MODULES = ("calendar", "retention_rules", "save_policies", "tiers", "retention")


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in __all__:
        for module in (importlib.import_module(f"{__name__}.{each}") for each in _MODULES):
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
