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
    "Trainable": "ckptman.engine.state.modules",
    "ResumableLoader": "ckptman.data.resumable_loader",
    "Skipped": "ckptman.engine.loading.allowed_mismatches",
    "save": "ckptman.api",
    "load": "ckptman.api",
    "read": "ckptman.engine.loading.read_as_dicts",
    "Run": "ckptman.run",
    "TrackedRun": "ckptman.runtime.tracker",
    "Tracker": "ckptman.runtime.tracker",
    "export": "ckptman.tools.exporting.export",
    "diff": "ckptman.tools.diff.diff",
    "verify": "ckptman.tools.verify.verify",
    "prune": "ckptman.tools.prune_and_pin",
    "pin": "ckptman.tools.prune_and_pin",
    "unpin": "ckptman.tools.prune_and_pin",
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
    "KeepBest": "ckptman.policies.retention_plan",
    "KeepEvery": "ckptman.policies.retention_plan",
    "KeepLast": "ckptman.policies.retention_plan",
    "KeepSteps": "ckptman.policies.retention_rules",
    "KeepWithin": "ckptman.policies.retention_by_time",
    "KeepHourly": "ckptman.policies.retention_by_time",
    "KeepDaily": "ckptman.policies.retention_by_time",
    "KeepWeekly": "ckptman.policies.retention_by_time",
    "KeepMonthly": "ckptman.policies.retention_by_time",
    "AtMost": "ckptman.policies.retention_rules",
    "Tier": "ckptman.policies.tiers",
    "MemoryTier": "ckptman.policies.tiers",
    "HealthThresholds": "ckptman.policies.health",
    "RetentionPolicy": "ckptman.policies.retention_plan",
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
    "AtMost",
    "AtStep",
    "BeforeDeadline",
    "BusyError",
    "Checkpointer",
    "CkptmanError",
    "CommitError",
    "ConfigError",
    "CorruptError",
    "DalyInterval",
    "ElasticSampler",
    "EverySeconds",
    "EverySteps",
    "ExistsError",
    "FormatVersionError",
    "FromRank0",
    "HealthThresholds",
    "InitTimeInterval",
    "IntervalError",
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
    "MismatchError",
    "NotFoundError",
    "OnStop",
    "PerRank",
    "RNGState",
    "RankLostError",
    "ResumableLoader",
    "RetentionPolicy",
    "RootError",
    "Run",
    "SavePolicy",
    "SchedulerError",
    "SignalHandler",
    "Skipped",
    "StorageReader",
    "StorageWriter",
    "SuspectError",
    "Tier",
    "TrackedRun",
    "Tracker",
    "Trainable",
    "UnknownKeyError",
    "__version__",
    "adopt",
    "copy",
    "dcp",
    "diff",
    "errors",
    "export",
    "load",
    "pin",
    "policies",
    "prune",
    "read",
    "save",
    "unpin",
    "verify",
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
    return __all__


if TYPE_CHECKING:
    from ckptman import dcp, errors, policies
    from ckptman.api import load, save
    from ckptman.checkpointer import Checkpointer
    from ckptman.data.elastic_sampler import ElasticSampler
    from ckptman.data.resumable_loader import ResumableLoader
    from ckptman.engine.dcp.storage import StorageReader, StorageWriter
    from ckptman.engine.loading.allowed_mismatches import Skipped
    from ckptman.engine.loading.read_as_dicts import read
    from ckptman.engine.state.generators import RNGState
    from ckptman.engine.state.modules import Trainable
    from ckptman.engine.state.rank_values import FromRank0, PerRank
    from ckptman.errors import (
        BusyError,
        CkptmanError,
        CommitError,
        ConfigError,
        CorruptError,
        ExistsError,
        FormatVersionError,
        IntervalError,
        MismatchError,
        NotFoundError,
        RankLostError,
        RootError,
        SchedulerError,
        SuspectError,
        UnknownKeyError,
    )
    from ckptman.policies.health import HealthThresholds
    from ckptman.policies.retention_by_time import KeepDaily, KeepHourly, KeepMonthly, KeepWeekly, KeepWithin
    from ckptman.policies.retention_plan import KeepBest, KeepEvery, KeepLast, RetentionPolicy
    from ckptman.policies.retention_rules import AtMost, KeepSteps
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
    from ckptman.policies.tiers import MemoryTier, Tier
    from ckptman.run import Run
    from ckptman.runtime.signals import SignalHandler
    from ckptman.runtime.tracker import TrackedRun, Tracker
    from ckptman.tools.adopt.adopt import adopt
    from ckptman.tools.copy import copy
    from ckptman.tools.diff.diff import diff
    from ckptman.tools.exporting.export import export
    from ckptman.tools.prune_and_pin import pin, prune, unpin
    from ckptman.tools.verify.verify import verify
