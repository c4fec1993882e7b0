"""Deleting by plan: what to keep is decided by the pure rules of `ckptman.policy.retention`; here it is carried out."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ckptman.errors import NotFoundError
from ckptman.policy.retention import RetentionPolicy, Verdict, plan
from ckptman.store.catalogue import Catalogue, Entry
from ckptman.store.durable import DISK, Disk
from ckptman.store.owner import is_alive, read_owner
from ckptman.store.place import FolderPlace


@dataclass(frozen=True)
class Leftover:
    """A folder that nobody will finish: what a crash left of a save or of a deletion. `bytes` on disk."""

    path: Path
    step: int
    reason: str
    bytes: int


@dataclass(frozen=True)
class PrunePlan:
    """What a prune would do. `verdicts` oldest commit first; `entries` by sequence."""

    verdicts: list[Verdict]
    entries: dict[int, Entry]
    leftovers: list[Leftover]

    @property
    def freed_bytes(self) -> int:
        return sum(v.record.bytes for v in self.verdicts if not v.keep) + sum(each.bytes for each in self.leftovers)


def plan_prune(root: Path, policy: RetentionPolicy | None) -> PrunePlan:
    """What to delete under a root. Incomplete entries never count and are not touched. Raises: as `Catalogue.scan`."""
    catalogue = Catalogue(root)
    entries = {entry.sequence: entry for entry in catalogue.complete()}
    verdicts = plan([entry.record() for entry in entries.values()], policy)
    return PrunePlan(verdicts, entries, find_leftovers(root))


def find_leftovers(root: Path) -> list[Leftover]:
    """The leftovers whose owner is gone. Those of a run that is alive are its own business."""
    catalogue = Catalogue(root)
    found = catalogue.leftovers()
    if not found:
        return []
    owner = read_owner(root)
    alive = owner.nonce if owner is not None and is_alive(root, owner) else None
    reasons = {
        "tmp": "a save that was never committed; its writer is gone",
        "trash": "a deletion that was interrupted",
        "old": "an earlier save of a step that was saved again",
    }
    return [
        Leftover(path, parsed.step, reasons[parsed.kind], _tree_bytes(path))
        for path, parsed in found
        if alive is None or parsed.tag.partition("-")[0] != alive
    ]


def execute(root: Path, steps: PrunePlan, tag: str, disk: Disk = DISK) -> None:
    """Carry out a plan: oldest first, each entry invisible at once and then removed. Can be run again at any point."""
    place = FolderPlace(root, disk)
    for count, verdict in enumerate(verdict for verdict in steps.verdicts if not verdict.keep):
        place.delete(steps.entries[verdict.record.sequence], f"{tag}-{count}")
    clear(root, steps.leftovers, tag, disk)


def clear(root: Path, leftovers: Iterable[Leftover], tag: str, disk: Disk = DISK) -> None:
    """Remove leftovers."""
    place = FolderPlace(root, disk)
    for count, leftover in enumerate(leftovers):
        place.remove(leftover.path, leftover.step, f"{tag}-left{count}")


def _tree_bytes(path: Path) -> int:
    total = 0
    with contextlib.suppress(OSError, NotFoundError):
        for folder, _, names in os.walk(path):
            for name in names:
                total += os.lstat(os.path.join(folder, name)).st_size
    return total
