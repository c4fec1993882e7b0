"""Going back to an earlier checkpoint: the newer ones are abandoned by one small file, and none of them is touched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ckptman.errors import ConfigError, CorruptError, NotFoundError
from ckptman.store.abandoned import Left, Rollback, read_rollbacks, standing
from ckptman.store.catalogue import Catalogue, Entry
from ckptman.store.durable import DISK, Disk
from ckptman.store.lease import reading
from ckptman.store.names import rollback_path, run_folder, step_folder
from ckptman.store.owner import claim
from ckptman.store.verified import read_verified


@dataclass(frozen=True)
class Change:
    """What a rollback does: `target` becomes the newest, and `entries` are left behind, or come back from there.

    `undoes`: the number of the rollback that is undone; None: this is a new one.
    """

    target: Entry
    entries: list[Entry]
    undoes: int | None = None


def plan_rollback(root: Path, step: int) -> Change:
    """What going back to a step leaves behind. Nothing is changed.

    Raises: NotFoundError (no such step, or it was abandoned itself), CorruptError (it is not whole, or was found
    damaged), FormatVersionError (a newer ckptman wrote one after it), RootError.
    """
    entries = Catalogue(root).scan()
    at = next((number for number, entry in enumerate(entries) if entry.step == step), None)
    if at is None:
        why = Catalogue(root).entry(step).abandoned
        raise NotFoundError(f"{root}: step {step} was abandoned {why}: name an earlier one, or undo that with --undo")
    target = entries[at]
    note = read_verified(target.path, target.require_manifest())
    if note is not None and note.damaged:
        raise CorruptError(f"{target.path} is damaged ({note.damaged}): roll back to another step")
    newer = entries[at + 1 :]
    for entry in newer:
        if entry.newer_format is not None:
            raise entry.newer_format
    return Change(target, [entry for entry in newer if entry.complete])


def plan_undo(root: Path) -> Change:
    """What comes back when the last rollback is undone.

    Raises: NotFoundError (there is none), ConfigError (what was saved since would be in its way), RootError.
    """
    holding = standing(read_rollbacks(root))
    if not holding:
        raise NotFoundError(f"{root}: there is no rollback to undo")
    number = max(holding)
    lost = {left.identity for left in holding[number].abandoned}
    entries = Catalogue(root).scan(abandoned=True)
    back = [entry for entry in entries if entry.abandoned and entry.identity in lost]
    counting = [entry for entry in entries if entry.complete and not entry.abandoned]
    known = {entry.step for entry in counting}
    again = sorted(entry.step for entry in back if entry.step in known or entry.path.name != step_folder(entry.step))
    if again:
        raise ConfigError(
            f"{root}: step {again[0]} was saved again after the rollback to step {holding[number].to_step}, so that "
            f"rollback cannot be undone: a restore(step=...) or ckptman export can still read what was abandoned"
        )
    if not back:
        raise NotFoundError(f"{root}: no checkpoint is left of those that the last rollback abandoned")
    return Change(max(counting + back, key=lambda entry: entry.sequence), back, number)


def execute(
    root: Path,
    make: Callable[[], Change],
    *,
    why: str,
    by: str,
    time_seconds: float,
    job_id: str | None = None,
    disk: Disk = DISK,
) -> Change:
    """Make a plan while no run writes to the root, and write it down: it holds for all who look from then on.

    Where there is nothing to leave behind, nothing is written. Raises: BusyError (a run is alive), and as the plans.
    """
    claimed = claim(root, "rollback", job_id, disk=disk)
    try:
        change = make()
        # A prune that made its plan before this must not take what the run is to go on from.
        with reading(change.target.path, what="rollback", disk=disk):
            if not change.target.path.exists():
                raise NotFoundError(f"{change.target.path} was pruned meanwhile: ckptman list shows what is left")
            if change.entries or change.undoes is not None:
                _write_down(root, change, why, by, time_seconds, disk)
        return change
    finally:
        claimed.release()


def _write_down(root: Path, change: Change, why: str, by: str, time_seconds: float, disk: Disk) -> None:
    left = [Left(step=each.step, sequence=each.sequence, identity=each.identity) for each in change.entries]
    rollback = Rollback(
        to_step=change.target.step,
        time_seconds=time_seconds,
        why=why,
        by=by,
        abandoned=[] if change.undoes is not None else left,
        undoes=change.undoes,
    )
    number = max(read_rollbacks(root), default=0) + 1
    disk.create_whole_file(rollback_path(root, number), rollback.model_dump_json(indent=1).encode() + b"\n")
    disk.sync_folder(run_folder(root))
