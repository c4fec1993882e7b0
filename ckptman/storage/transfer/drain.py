"""Draining a root: what its tiers are still to get is copied there, proved there, and only then may go here.

Nothing is deleted in the root: that is for its own retention, which leaves alone what is still awaited (see `tiers`).
A tier is pruned by its own retention after each copy into it.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ckptman.errors import CkptmanError, CorruptError, RootError, warn
from ckptman.policies.retention_plan import keeps_any, policy_mistake
from ckptman.policies.retention_rules import Record
from ckptman.policies.tiers import Tier, due
from ckptman.storage.catalog.backends.backend import Backend
from ckptman.storage.catalog.backends.copy_draft import BusyCopyingError
from ckptman.storage.catalog.catalog import Catalog, Entry, mark
from ckptman.storage.catalog.rollback_records import Rollback, abandoned_by, copy_rollbacks, read_rollbacks
from ckptman.storage.catalog.tiers import (
    TierContents,
    check_tier,
    contents_of_tier,
    keeping,
    make_identity,
    mark_tier,
    open_tier,
    read_drained,
    read_identity,
    trouble_of,
    write_drained,
)
from ckptman.storage.catalog.verified import remember_damage
from ckptman.storage.format.paths import drained_path
from ckptman.storage.integrity.folder_check import verify_folder
from ckptman.storage.io.failure_cause import FULL
from ckptman.storage.transfer.copy import Copied, CopyOptions, copy_checkpoint

_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


@dataclass(frozen=True)
class DrainTask:
    """A checkpoint that has to go to a tier, and the reason. `over`: what has its name there counts for nothing."""

    tier: Tier
    entry: Entry
    reason: str
    over: bool = False


@dataclass(frozen=True)
class Drained:
    """What became of a task: the copy, or what was in its way. `busy`: another drain is at it."""

    task: DrainTask
    copied: Copied | None = None
    error: CkptmanError | None = None
    busy: bool = False


@dataclass(frozen=True)
class DrainPlan:
    """What is still to be done: `tasks`, tier by tier, the newest first; the tiers, of which nobody can look at some;
    and what is wrong in the root, which keeps nothing else from being copied."""

    tasks: list[DrainTask]
    holdings: list[TierContents]
    root_errors: tuple[RootError, ...] = ()

    @property
    def troubles(self) -> list[TierContents]:
        return [each for each in self.holdings if each.trouble]


def plan_drain(root: Path, tiers: Sequence[Tier], *, new: bool = False) -> DrainPlan:
    """What the tiers of a root have still to get. `new`: one that is not there holds nothing.

    Raises: as `Catalog.look`.
    """
    holdings = [
        TierContents(tier) if new and not os.path.lexists(str(tier)) else contents_of_tier(root, tier) for tier in tiers
    ]
    every = [*read_rollbacks(root).values(), *(rollback for each in holdings for rollback in each.rollbacks)]
    left = abandoned_by(every)
    there = Catalog(root).look()
    entries = [entry for entry in there if entry.complete]
    records = [mark(entry, left).record() for entry in entries]
    tasks: list[DrainTask] = []
    for number, holding in enumerate(holdings):
        if holding.trouble:
            continue
        has = [mark(entry, left).record() for entry in holding.entries]
        holdings[number] = replace(holding, records=tuple(has))
        good = {record.step for record in has if not record.abandoned and not record.damaged}
        wanted = due(records, has, holding.tier, time.time())
        for place in sorted(wanted, reverse=True):
            entry = entries[place]
            # Nothing that comes there from now on is replaced.
            over = entry.step in holding.taken and entry.step not in good
            tasks.append(DrainTask(holding.tier, entry, wanted[place], over))
    return DrainPlan(tasks, holdings, tuple(entry.unreadable for entry in there if entry.unreadable is not None))


def prepare(root: Path, plan: DrainPlan) -> DrainPlan:
    """Before anything is copied: the tiers learn whose they are, all places of all rollbacks, and prunes of the root of
    what the tiers hold.

    What is left of the plan: without a tier to which nothing can be written. Raises: CkptmanError, OSError.
    """
    every = [*read_rollbacks(root).values(), *(rollback for each in plan.holdings for rollback in each.rollbacks)]
    copy_rollbacks(every, root)
    holdings = [_told(root, each, every) for each in plan.holdings]
    tasks = [task for task in plan.tasks if not any(each.trouble for each in holdings if each.tier == task.tier)]
    return DrainPlan(tasks, holdings, (*plan.root_errors, *_tell_prunes(root, holdings)))


def _told(root: Path, holding: TierContents, rollbacks: Sequence[Rollback]) -> TierContents:
    """A tier that was told whose it is, and of rollbacks; or why that cannot be."""
    if holding.trouble:
        return holding
    try:
        _mark(root, holding)
        open_tier(holding.tier).copy_rollbacks(rollbacks)
    except (CkptmanError, OSError) as error:
        return replace(holding, trouble=trouble_of(error))
    return holding


def _mark(root: Path, holding: TierContents) -> None:
    """Raises: CkptmanError, OSError."""
    place = open_tier(holding.tier)
    manifests = [entry.require_manifest() for entry in Catalog(root).look() if entry.complete]
    run_id = manifests[-1].run_id if manifests else ""
    try:
        id = check_tier(root, place)
        if read_identity(root) is None:
            make_identity(root, run_id, id)
    except OSError as error:
        if error.errno not in (*FULL, *_READ_ONLY):
            raise
        return  # a root that is full needs copies all the more; a drain that can write to it marks the tier
    mark_tier(root, place, run_id, renew=False)


def _tell_prunes(root: Path, holdings: Iterable[TierContents]) -> tuple[RootError, ...]:
    """Note in the root what the tiers hold, or why that cannot be: a root that is full needs copies all the more."""
    held = {str(each.tier): list(each.records) for each in holdings if not each.trouble}
    try:
        write_drained(root, {**read_drained(root), **held})
    except OSError as error:
        return (
            RootError(
                error.errno or errno.EIO,
                f"{drained_path(root)} cannot be written ({error.strerror}), so the run does not know what may go: "
                f"check its permissions, or make room with ckptman prune, which looks at the tiers itself",
            ),
        )
    return ()


def carry_out(
    root: Path, plan: DrainPlan, options_for: Callable[[DrainTask], AbstractContextManager[CopyOptions]]
) -> Iterator[Drained]:
    """Copy what is to be copied, and prune each tier that has got something. Trouble with one keeps no other.

    `options_for` says how each copy is to be made. What the tiers hold then is noted in the root.
    """
    fuller: dict[Tier, DrainTask] = {}
    for task in plan.tasks:
        try:
            with options_for(task) as how:
                over = replace(how, overwrite=how.overwrite or task.over)
                place = open_tier(task.tier)
                with keeping(place):
                    check_tier(root, place)  # again: it may be hours since that was planned
                    copied = Drained(task, copy_checkpoint(task.entry, place, over))
                yield copied
            fuller[task.tier] = task
        except CkptmanError as error:
            if isinstance(error, CorruptError):  # so that it is not read again by each drain
                _note_damaged(task.entry)
            if getattr(error, "errno", None) in FULL:  # perhaps of what a drain was killed before it could prune
                fuller[task.tier] = task
            yield Drained(task, error=error, busy=isinstance(error, BusyCopyingError))
    for tier, task in fuller.items():
        try:
            place = open_tier(tier)
            with keeping(place):
                check_tier(root, place)
                prune_tier(tier, place)
        except CkptmanError as error:
            yield Drained(task, error=error)
        except OSError as error:
            what = f"{error.filename or 'a checkpoint'} cannot be removed ({error.strerror})"
            yield Drained(task, error=RootError(error.errno or errno.EIO, f"{tier}: {what}: check its permissions"))
    if fuller:
        left = abandoned_by(read_rollbacks(root).values())
        # Where that cannot be, the next one says so.
        _tell_prunes(root, [contents_of_tier(root, tier, left) for tier in fuller])


def prune_tier(tier: Tier, place: Backend) -> None:
    """Delete in a tier what its own retention no longer keeps, and what crashes left. Raises: CkptmanError, OSError."""

    def is_meant(records: Sequence[Record]) -> bool:
        now_seconds = time.time()
        cause = policy_mistake(tier.retention, records, now_seconds, goes_on=True)
        if not cause or keeps_any(tier.retention, records, now_seconds):
            return True
        warn(f"nothing is deleted in {tier}: {cause}. Check the retention of this tier")
        return False

    place.prune(tier.retention, is_meant)


def _note_damaged(entry: Entry) -> None:
    """Note what is damaged. It is looked at again: the error may have been about the tier."""
    with suppress(OSError, CkptmanError):
        report = verify_folder(entry.path, entry.require_manifest())
        if report.damage:
            remember_damage(entry.path, entry.require_manifest(), "; ".join(report.problems))
