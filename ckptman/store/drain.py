"""Draining a root: what its tiers are still to get is copied there, proved there, and only then may go here.

Nothing is deleted in the root: that is for its own retention, which leaves alone what is still awaited (see `tiers`).
A tier is pruned by its own retention after each copy into it.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from ckptman.errors import BusyError, CkptmanError, RootError
from ckptman.policy.retention import plan
from ckptman.policy.tiers import Tier, due
from ckptman.store.catalogue import Catalogue, Entry
from ckptman.store.copy import copy_checkpoint
from ckptman.store.copyfolder import Copied
from ckptman.store.copyproof import Means
from ckptman.store.names import MANIFEST
from ckptman.store.objects import ObjectEntry, ObjectPlace
from ckptman.store.place import FolderPlace
from ckptman.store.prune import execute, plan_prune
from ckptman.store.tiers import Holding, entries_of, holding_of, open_tier, record_of


@dataclass(frozen=True)
class Task:
    """A checkpoint that has to go to a tier, and the reason."""

    tier: Tier
    entry: Entry
    reason: str


@dataclass(frozen=True)
class Drained:
    """What became of a task: the copy, or what was in its way. `busy`: another drain is at it."""

    task: Task
    copied: Copied | None = None
    error: CkptmanError | None = None
    busy: bool = False


@dataclass(frozen=True)
class DrainPlan:
    """What is still to be done: `tasks`, tier by tier, the newest first; and the tiers nobody can look at."""

    tasks: list[Task]
    troubles: list[Holding]


def plan_drain(root: Path, tiers: Sequence[Tier], now_seconds: float | None = None) -> DrainPlan:
    """What the tiers of a root have still to get. Raises: as `Catalogue.scan`."""
    now_seconds = time.time() if now_seconds is None else now_seconds
    entries = {entry.sequence: entry for entry in Catalogue(root).complete()}
    records = [entry.record() for entry in entries.values()]
    tasks: list[Task] = []
    troubles: list[Holding] = []
    for tier in tiers:
        holding = holding_of(tier)
        if holding.trouble:
            troubles.append(holding)
            continue
        wanted = due(records, holding.records, tier, now_seconds)
        tasks += [Task(tier, entries[sequence], wanted[sequence]) for sequence in sorted(wanted, reverse=True)]
    return DrainPlan(tasks, troubles)


def carry_out(tasks: Sequence[Task], means: Callable[[Task], AbstractContextManager[Means]]) -> Iterator[Drained]:
    """Copy what is to be copied, and prune each tier that has got something. Trouble with one keeps no other.

    `means` is asked for each copy how it is to be made.
    """
    fuller: dict[Tier, Task] = {}
    for task in tasks:
        try:
            with means(task) as how:
                yield Drained(task, copy_checkpoint(task.entry, open_tier(task.tier, how.disk), how))
            fuller[task.tier] = task
        except CkptmanError as error:
            yield Drained(task, error=error, busy=isinstance(error, BusyError))
    for tier, task in fuller.items():
        try:
            prune_tier(tier, open_tier(tier))
        except (CkptmanError, OSError) as error:
            yield Drained(task, error=error if isinstance(error, CkptmanError) else _as_ours(tier, error))


def prune_tier(tier: Tier, place: FolderPlace | ObjectPlace) -> None:
    """Delete in a tier what its own retention no longer keeps. Raises: CkptmanError, OSError."""
    if tier.retention is None:
        return
    if isinstance(place, FolderPlace):
        execute(place.root, plan_prune(place.root, tier.retention), tag=f"drain{os.urandom(4).hex()}")
        return
    entries = {entry.require_manifest().sequence: entry for entry in entries_of(place)}
    verdicts = plan([record_of(entry) for entry in entries.values()], tier.retention, now_seconds=time.time())
    for verdict in verdicts:
        entry = entries[verdict.record.sequence]
        if not verdict.keep and isinstance(entry, ObjectEntry):
            _remove(place, entry)


def _as_ours(tier: Tier, error: OSError) -> RootError:
    return RootError(
        error.errno or errno.EIO,
        f"{tier}: {error.filename or 'a checkpoint'} cannot be removed ({error.strerror}): check its permissions",
    )


def _remove(place: ObjectPlace, entry: ObjectEntry) -> None:
    place.remove(f"{entry.name}/{MANIFEST}")  # first: from then on it is no checkpoint
    for name in sorted(entry.sizes.keys() - {MANIFEST}):
        place.remove(f"{entry.name}/{name}")
