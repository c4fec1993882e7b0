"""Modules under the names that they had before: what users import goes on working."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "ckptman.policy.calendar": "ckptman.policies.calendar",
    "ckptman.policy.limit": "ckptman.policies.retention_rules",
    "ckptman.policy.retention": "ckptman.policies.retention",
    "ckptman.policy.rules": "ckptman.policies.retention_rules",
    "ckptman.policy.saving": "ckptman.policies.save_policies",
    "ckptman.policy.tiers": "ckptman.policies.tiers",
    "ckptman.policy.timing": "ckptman.policies.intervals",
    "ckptman.lifecycle.outcome": "ckptman.runtime.outcome",
    "ckptman.lifecycle.signals": "ckptman.runtime.signals",
    "ckptman.monitor.journal": "ckptman.runtime.journal",
    "ckptman.store.catalogue": "ckptman.catalog.catalog",
    "ckptman.store.copy": "ckptman.transfer.copy",
    "ckptman.store.names": "ckptman.format.paths",
    "ckptman.store.place": "ckptman.catalog.backends.local",
}
"""Those that the documentation named, by what they are called now."""
_FOLDERS = {name.rpartition(".")[0] for name in MOVED}


class _Alias(Loader):
    """Gives the module of today under its name of before, so that there are never two of one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        if spec.name in _FOLDERS:
            return None  # an empty one
        module = importlib.import_module(MOVED[spec.name])
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        if self._spec is not None:  # it has been executed, under this one
            module.__spec__ = self._spec


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in MOVED and fullname not in _FOLDERS:
            return None
        return ModuleSpec(fullname, _Alias(fullname), is_package=fullname in _FOLDERS)


def install() -> None:
    """Have the old names found. Called once, by the package."""
    sys.meta_path.append(_Finder())
