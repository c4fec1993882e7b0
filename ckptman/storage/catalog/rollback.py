"""Going back to an earlier checkpoint: the newer ones are abandoned by one small file, and none of them is touched."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from ckptman.errors import ConfigError, CorruptError, NotFoundError
from ckptman.storage.catalog.backends.run_store import RunStore
from ckptman.storage.catalog.catalog import Entry
from ckptman.storage.catalog.reader_lease import reading
from ckptman.storage.catalog.rollback_records import Left, Rollback, copy_rollbacks, read_rollbacks, standing
from ckptman.storage.catalog.tiers import read_tiers
from ckptman.storage.catalog.verified import read_verified
from ckptman.storage.catalog.writer_lock import claim
from ckptman.storage.format.paths import journal_path, step_folder
from ckptman.storage.io.durable_files import holding


@dataclass(frozen=True)
class Change:
    """What a rollback does: `target` becomes the newest, and `entries` are left behind, or come back from there.

    `undoes`: the id of the rollback that is undone; None: this is a new one.
    """

    target: Entry
    entries: list[Entry]
    undoes: str | None = None


def plan_rollback(root: Path, step: int) -> Change:
    """What going back to a step leaves behind, in the root and in its tiers. Nothing is changed.

    Raises: NotFoundError (no such step, or it was abandoned itself), ConfigError (a restore would go back behind it),
    CorruptError (it is not whole, or was found damaged), FormatVersionError (a newer ckptman wrote one after it),
    RootError (also of a tier: what is there and newer would be restored).
    """
    entries = _everywhere(root).list(abandoned=True)
    counting = [entry for entry in entries if not entry.abandoned]
    at = max((number for number, entry in enumerate(counting) if entry.step == step), default=None)
    if at is None:
        gone = next((entry for entry in entries if entry.step == step), None)
        if gone is not None:
            why = f"was abandoned {gone.abandoned}: name an earlier one, or undo that with --undo"
            raise NotFoundError(f"{root}: step {step} {why}")
        known = ", ".join(dict.fromkeys(str(entry.step) for entry in counting[-10:])) or "none"
        raise NotFoundError(f"{root} has no checkpoint of step {step}; the latest there are: {known}")
    target = counting[at]
    if found := _damage(target):
        raise CorruptError(f"{target.path} is damaged ({found}): roll back to another step")
    finite = (
        [entry for entry in counting[:at] if entry.complete and not entry.nonfinite_reason]
        if target.nonfinite_reason
        else []
    )
    finite = [entry for entry in finite if not _damage(entry)]
    if finite:
        raise ConfigError(
            f"{root}: step {step} is not finite (NaN or infinity in {target.nonfinite_reason}), so a restore would go "
            f"back to step {finite[-1].step}: roll back to that one. To start from step {step} all the same, no "
            f"rollback is needed, but restore(step={step})"
        )
    newer = counting[at + 1 :]
    for entry in newer:
        if entry.newer_format is not None:
            raise entry.newer_format
    return Change(target, _each_once(entry for entry in newer if entry.complete))


def plan_undo(root: Path) -> Change:
    """What comes back when the last rollback is undone.

    Raises: NotFoundError (there is none), ConfigError (what was saved since would be in its way), RootError.
    """
    holding = standing(read_rollbacks(root).values())
    if not holding:
        raise NotFoundError(f"{root}: there is no rollback to undo")
    last = holding[-1]
    lost = {left.identity for left in last.abandoned}
    entries = _everywhere(root).list(abandoned=True)
    back = [entry for entry in entries if entry.abandoned and entry.complete and entry.identity in lost]
    counting = [entry for entry in entries if entry.complete and not entry.abandoned]
    known = {entry.step for entry in counting}
    again = sorted(entry.step for entry in back if entry.step in known or entry.path.name != step_folder(entry.step))
    if again:
        raise ConfigError(
            f"{root}: step {again[0]} was saved again after the rollback to step {last.to_step}, so that "
            f"rollback cannot be undone: a restore(step=...) or ckptman export can still read what was abandoned"
        )
    if not back and last.abandoned:
        raise NotFoundError(f"{root}: no checkpoint is left of those that the last rollback abandoned")
    return Change(max(counting + back, key=lambda entry: entry.sequence), _each_once(back), last.id)


def _damage(entry: Entry) -> str:
    """Return what was found damaged in it before; "" where nothing was."""
    note = read_verified(entry.path, entry.require_manifest())
    return note.damaged if note is not None else ""


def _everywhere(root: Path) -> RunStore:
    return RunStore(root, read_tiers(root), strict=True)


def _each_once(entries: Iterable[Entry]) -> list[Entry]:
    """One of several copies: the nearest."""
    return list({entry.identity: entry for entry in entries}.values())


def execute(
    root: Path,
    make: Callable[[], Change],
    *,
    why: str,
    by: str,
    time_seconds: float,
    highest: Callable[[Path, Iterable[int]], int],
    job_id: str | None = None,
) -> Change:
    """Make a plan while no run writes to the root, and write it down: it holds for all who look from then on.

    Nothing is written if neither the disk nor the memory of nodes can hold anything newer. `highest`: returns the
    highest attempt number of the root, given those that saved its checkpoints. Raises: BusyError (a run is alive), and
    as the plans.
    """
    with holding(root, through_link=True), _claimed(root, job_id):
        change = make()
        target = change.target
        # A prune that made its plan before this must not take what the run is to go on from.
        with reading(target.path, what="rollback") if target.in_folder else nullcontext():
            if target.in_folder and not target.path.exists():
                raise NotFoundError(f"{target.path} was pruned meanwhile: ckptman list shows what is left")
            everywhere = _everywhere(root)
            saved_by = [each.attempt for each in everywhere.list(abandoned=True)]
            is_known = change.undoes is None and journal_path(root).exists()
            begun = highest(root, saved_by) if is_known else None
            known = max((each.attempt or 0 for each in standing(read_rollbacks(root).values())), default=0)
            # Without anything newer on disk, nodes may still have it in memory.
            if change.entries or change.undoes is not None or begun is None or begun > known:
                left = [Left(step=each.step, sequence=each.sequence, identity=each.identity) for each in change.entries]
                rollback = Rollback(
                    id=os.urandom(8).hex(),
                    to_step=target.step,
                    time_seconds=time_seconds,
                    why=why,
                    by=by,
                    abandoned=[] if change.undoes is not None else left,
                    attempt=begun,
                    undoes=change.undoes,
                )
                copy_rollbacks([rollback], root)
                everywhere.copy_all_rollbacks()
        return change


@contextmanager
def _claimed(root: Path, job_id: str | None) -> Iterator[None]:
    """While this lasts, no run begins in the root. Raises: BusyError."""
    claimed = claim(root, "rollback", job_id)
    try:
        yield
    finally:
        claimed.release()
