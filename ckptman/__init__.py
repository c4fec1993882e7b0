"""Checkpoints and job life for PyTorch training on Slurm clusters.

The policies, the errors, and what is for torch's distributed checkpoint are in `ckptman.policies`, `ckptman.errors` and
`ckptman.dcp`; their names can be had from here, too.

Importing ckptman does not import torch: names are looked up when they are first used (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_ROOMS = ("dcp", "errors", "policies")
_HOME = {
    "Checkpointer": "ckptman.checkpointer",
    "RNGState": "ckptman.engine.state.generators",
    "ElasticSampler": "ckptman.data.elastic_sampler",
    "FromRank0": "ckptman.engine.state.rank_values",
    "PerRank": "ckptman.engine.state.rank_values",
    "Trainable": "ckptman.engine.state.trainable",
    "ResumableLoader": "ckptman.data.resumable_loader",
    "Skipped": "ckptman.engine.loading.accepted",
    "save": "ckptman.api",
    "load": "ckptman.api",
    "read": "ckptman.engine.loading.read",
    "Run": "ckptman.run",
    "TrackedRun": "ckptman.runtime.tracker",
    "Tracker": "ckptman.runtime.tracker",
    "export": "ckptman.tools.exporting.export",
    "diff": "ckptman.tools.diff.compare",
    "verify": "ckptman.tools.verify.verify",
    "prune": "ckptman.tools.manage",
    "pin": "ckptman.tools.manage",
    "unpin": "ckptman.tools.manage",
    "copy": "ckptman.tools.copy",
    "adopt": "ckptman.tools.adopt.adopt",
    "StorageReader": "ckptman.engine.dcp.storage",
    "StorageWriter": "ckptman.engine.dcp.storage",
    "SignalHandler": "ckptman.runtime.signals",
    "AtStep": "ckptman.policies.save_policies",
    "BeforeDeadline": "ckptman.policies.save_policies",
    "DalyInterval": "ckptman.policies.save_policies",
    "EverySeconds": "ckptman.policies.save_policies",
    "EverySteps": "ckptman.policies.save_policies",
    "InitTimeInterval": "ckptman.policies.save_policies",
    "OnStop": "ckptman.policies.save_policies",
    "SavePolicy": "ckptman.policies.save_policies",
    "KeepBest": "ckptman.policies.retention",
    "KeepEvery": "ckptman.policies.retention",
    "KeepLast": "ckptman.policies.retention",
    "KeepSteps": "ckptman.policies.retention_rules",
    "KeepWithin": "ckptman.policies.calendar",
    "KeepHourly": "ckptman.policies.calendar",
    "KeepDaily": "ckptman.policies.calendar",
    "KeepWeekly": "ckptman.policies.calendar",
    "KeepMonthly": "ckptman.policies.calendar",
    "AtMost": "ckptman.policies.retention_rules",
    "Tier": "ckptman.policies.tiers",
    "MemoryTier": "ckptman.policies.memory_tier",
    "HealthThresholds": "ckptman.policies.health",
    "RetentionPolicy": "ckptman.policies.retention",
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

__all__ = [
    "Checkpointer",
    "CkptmanError",
    "ElasticSampler",
    "MemoryTier",
    "RNGState",
    "ResumableLoader",
    "SignalHandler",
    "Tier",
    "__version__",
    "adopt",
    "dcp",
    "errors",
    "export",
    "load",
    "policies",
    "save",
]


def __getattr__(name: str) -> object:
    if name in _ROOMS:
        return importlib.import_module(f"ckptman.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'ckptman' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_HOME})


if TYPE_CHECKING:
    from ckptman import dcp as dcp
    from ckptman import errors as errors
    from ckptman import policies as policies
    from ckptman.api import load as load
    from ckptman.api import save as save
    from ckptman.checkpointer import Checkpointer as Checkpointer
    from ckptman.data.elastic_sampler import ElasticSampler as ElasticSampler
    from ckptman.data.resumable_loader import ResumableLoader as ResumableLoader
    from ckptman.engine.dcp.storage import StorageReader as StorageReader
    from ckptman.engine.dcp.storage import StorageWriter as StorageWriter
    from ckptman.engine.loading.accepted import Skipped as Skipped
    from ckptman.engine.loading.read import read as read
    from ckptman.engine.state.generators import RNGState as RNGState
    from ckptman.engine.state.rank_values import FromRank0 as FromRank0
    from ckptman.engine.state.rank_values import PerRank as PerRank
    from ckptman.engine.state.trainable import Trainable as Trainable
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
    from ckptman.policies.calendar import KeepDaily as KeepDaily
    from ckptman.policies.calendar import KeepHourly as KeepHourly
    from ckptman.policies.calendar import KeepMonthly as KeepMonthly
    from ckptman.policies.calendar import KeepWeekly as KeepWeekly
    from ckptman.policies.calendar import KeepWithin as KeepWithin
    from ckptman.policies.health import HealthThresholds as HealthThresholds
    from ckptman.policies.memory_tier import MemoryTier as MemoryTier
    from ckptman.policies.retention import KeepBest as KeepBest
    from ckptman.policies.retention import KeepEvery as KeepEvery
    from ckptman.policies.retention import KeepLast as KeepLast
    from ckptman.policies.retention import RetentionPolicy as RetentionPolicy
    from ckptman.policies.retention_rules import AtMost as AtMost
    from ckptman.policies.retention_rules import KeepSteps as KeepSteps
    from ckptman.policies.save_policies import AtStep as AtStep
    from ckptman.policies.save_policies import BeforeDeadline as BeforeDeadline
    from ckptman.policies.save_policies import DalyInterval as DalyInterval
    from ckptman.policies.save_policies import EverySeconds as EverySeconds
    from ckptman.policies.save_policies import EverySteps as EverySteps
    from ckptman.policies.save_policies import InitTimeInterval as InitTimeInterval
    from ckptman.policies.save_policies import OnStop as OnStop
    from ckptman.policies.save_policies import SavePolicy as SavePolicy
    from ckptman.policies.tiers import Tier as Tier
    from ckptman.run import Run as Run
    from ckptman.runtime.signals import SignalHandler as SignalHandler
    from ckptman.runtime.tracker import TrackedRun as TrackedRun
    from ckptman.runtime.tracker import Tracker as Tracker
    from ckptman.tools.adopt.adopt import adopt as adopt
    from ckptman.tools.copy import copy as copy
    from ckptman.tools.diff.compare import diff as diff
    from ckptman.tools.exporting.export import export as export
    from ckptman.tools.manage import pin as pin
    from ckptman.tools.manage import prune as prune
    from ckptman.tools.manage import unpin as unpin
    from ckptman.tools.verify.verify import verify as verify
