"""Checkpoints and job life for PyTorch training on Slurm clusters.

Importing ckptman does not import torch: names are looked up when they are first used (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOME = {
    "Checkpointer": "ckptman.sharded.checkpointer",
    "RNGState": "ckptman.sharded.rng",
    "save": "ckptman.sharded.api",
    "load": "ckptman.sharded.api",
    "export": "ckptman.sharded.export",
    "adopt": "ckptman.sharded.adopt",
    "StorageReader": "ckptman.sharded.storage",
    "StorageWriter": "ckptman.sharded.storage",
    "SignalHandler": "ckptman.lifecycle.signals",
    "AtStep": "ckptman.policy.saving",
    "BeforeDeadline": "ckptman.policy.saving",
    "DalyInterval": "ckptman.policy.saving",
    "EverySeconds": "ckptman.policy.saving",
    "EverySteps": "ckptman.policy.saving",
    "InitTimeInterval": "ckptman.policy.saving",
    "OnStop": "ckptman.policy.saving",
    "SavePolicy": "ckptman.policy.saving",
    "KeepBest": "ckptman.policy.retention",
    "KeepEvery": "ckptman.policy.retention",
    "KeepLast": "ckptman.policy.retention",
    "KeepSteps": "ckptman.policy.rules",
    "KeepWithin": "ckptman.policy.calendar",
    "KeepHourly": "ckptman.policy.calendar",
    "KeepDaily": "ckptman.policy.calendar",
    "KeepWeekly": "ckptman.policy.calendar",
    "KeepMonthly": "ckptman.policy.calendar",
    "AtMost": "ckptman.policy.limit",
    "Tier": "ckptman.policy.tiers",
    "RetentionPolicy": "ckptman.policy.retention",
    "BusyError": "ckptman.errors",
    "CkptmanError": "ckptman.errors",
    "CommitError": "ckptman.errors",
    "ConfigError": "ckptman.errors",
    "CorruptError": "ckptman.errors",
    "ExistsError": "ckptman.errors",
    "FormatVersionError": "ckptman.errors",
    "IntervalError": "ckptman.errors",
    "MismatchError": "ckptman.errors",
    "NotFoundError": "ckptman.errors",
    "RankLostError": "ckptman.errors",
    "RootError": "ckptman.errors",
    "SchedulerError": "ckptman.errors",
    "SuspectError": "ckptman.errors",
    "UnknownKeyError": "ckptman.errors",
}

__all__ = ["__version__", *_HOME]  # noqa: PLE0604


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'ckptman' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


if TYPE_CHECKING:
    from ckptman.errors import BusyError as BusyError
    from ckptman.errors import CkptmanError as CkptmanError
    from ckptman.errors import CommitError as CommitError
    from ckptman.errors import ConfigError as ConfigError
    from ckptman.errors import CorruptError as CorruptError
    from ckptman.errors import ExistsError as ExistsError
    from ckptman.errors import FormatVersionError as FormatVersionError
    from ckptman.errors import IntervalError as IntervalError
    from ckptman.errors import MismatchError as MismatchError
    from ckptman.errors import NotFoundError as NotFoundError
    from ckptman.errors import RankLostError as RankLostError
    from ckptman.errors import RootError as RootError
    from ckptman.errors import SchedulerError as SchedulerError
    from ckptman.errors import SuspectError as SuspectError
    from ckptman.errors import UnknownKeyError as UnknownKeyError
    from ckptman.lifecycle.signals import SignalHandler as SignalHandler
    from ckptman.policy.calendar import KeepDaily as KeepDaily
    from ckptman.policy.calendar import KeepHourly as KeepHourly
    from ckptman.policy.calendar import KeepMonthly as KeepMonthly
    from ckptman.policy.calendar import KeepWeekly as KeepWeekly
    from ckptman.policy.calendar import KeepWithin as KeepWithin
    from ckptman.policy.limit import AtMost as AtMost
    from ckptman.policy.retention import KeepBest as KeepBest
    from ckptman.policy.retention import KeepEvery as KeepEvery
    from ckptman.policy.retention import KeepLast as KeepLast
    from ckptman.policy.retention import RetentionPolicy as RetentionPolicy
    from ckptman.policy.rules import KeepSteps as KeepSteps
    from ckptman.policy.saving import AtStep as AtStep
    from ckptman.policy.saving import BeforeDeadline as BeforeDeadline
    from ckptman.policy.saving import DalyInterval as DalyInterval
    from ckptman.policy.saving import EverySeconds as EverySeconds
    from ckptman.policy.saving import EverySteps as EverySteps
    from ckptman.policy.saving import InitTimeInterval as InitTimeInterval
    from ckptman.policy.saving import OnStop as OnStop
    from ckptman.policy.saving import SavePolicy as SavePolicy
    from ckptman.policy.tiers import Tier as Tier
    from ckptman.sharded.adopt import adopt as adopt
    from ckptman.sharded.api import load as load
    from ckptman.sharded.api import save as save
    from ckptman.sharded.checkpointer import Checkpointer as Checkpointer
    from ckptman.sharded.export import export as export
    from ckptman.sharded.rng import RNGState as RNGState
    from ckptman.sharded.storage import StorageReader as StorageReader
    from ckptman.sharded.storage import StorageWriter as StorageWriter
