"""Deleting by plan: what to keep is decided by the pure rules of `ckptman.policy.retention`; here it is carried out."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ckptman.errors import CkptmanError
from ckptman.policy.retention import Record, RetentionPolicy, Verdict, plan
from ckptman.store.catalogue import Catalogue, Entry
from ckptman.store.durable import DISK, Disk
from ckptman.store.manifest import read_manifest
from ckptman.store.names import Kind, parse_half_written, run_folder, step_folder
from ckptman.store.owner import is_alive, is_this_process, read_owner
from ckptman.store.place import FolderPlace

LOCK_SECONDS = 300.0
_REASONS: dict[Kind, str] = {
    "tmp": "a save that was never committed; its writer is gone",
    "trash": "a deletion that was interrupted",
    "old": "an earlier save of a step that was saved again",
}


@dataclass(frozen=True)
class Leftover:
    """What a crash left of a save or of a deletion, and nobody will finish. `bytes` on disk.

    `step` is None for a file of the run itself that was being written.
    """

    path: Path
    step: int | None
    reason: str
    bytes: int


@dataclass(frozen=True)
class PrunePlan:
    """What a prune would do. `verdicts` oldest commit first; `entries` by sequence.

    `ignored`: what counts for nothing and is not touched, with the reason: a human has to look at it.
    """

    verdicts: list[Verdict]
    entries: dict[int, Entry]
    leftovers: list[Leftover]
    ignored: list[tuple[Entry, str]]

    @property
    def freed_bytes(self) -> int:
        return sum(v.record.bytes for v in self.verdicts if not v.keep) + sum(each.bytes for each in self.leftovers)


def plan_prune(root: Path, policy: RetentionPolicy | None, damaged: Collection[int] = ()) -> PrunePlan:
    """What to delete under a root. Incomplete entries never count and are not touched. Raises: as `Catalogue.scan`.

    Nor do those that were found damaged, by a verify or by the run that has their sequences in `damaged`: what no
    restore takes must not push out a good one.
    """
    entries: dict[int, Entry] = {}
    records: list[Record] = []
    ignored: list[tuple[Entry, str]] = []
    number = 0
    for entry in Catalogue(root).scan():
        if not entry.complete:
            ignored.append((entry, entry.problem or ""))
            continue
        record = entry.record()
        if record.damaged or entry.sequence in damaged:
            ignored.append((entry, f"damaged: {record.damaged or 'a restore refused it'}"))
            continue
        # Folders that were copied from another root can share a sequence: their order stays, and each gets a verdict.
        number = max(entry.sequence, number + 1)
        entries[number] = entry
        records.append(replace(record, sequence=number))
    return PrunePlan(plan(records, policy), entries, find_leftovers(root), ignored)


def find_leftovers(root: Path) -> list[Leftover]:
    """The leftovers whose owner is gone. Those of a run that is alive are its own business.

    A run that asks for itself also gets what its own deletions left; the folder of a save may be in use.
    """
    found = Catalogue(root).leftovers()
    halves = _half_written(root)
    if not found and not halves:
        return []
    owner = read_owner(root)
    alive = owner.nonce if owner is not None and is_alive(root, owner) else None
    mine = alive is not None and owner is not None and is_this_process(owner)
    left = [
        Leftover(path, parsed.step, _REASONS[parsed.kind], _tree_bytes(path))
        for path, parsed in found
        if parsed.tag.partition("-")[0] != alive or (mine and parsed.kind != "tmp")
    ]
    if alive is None or mine:
        left += [
            Leftover(path, None, "a file that was never finished", _tree_bytes(path))
            for path, pid in halves
            if not mine or pid != os.getpid()
        ]
    return left


@contextmanager
def one_at_a_time(root: Path) -> Iterator[None]:
    """Keep other prunes of this host waiting: two of them would report the same bytes as freed.

    A root in which no run ever was, or a file system without locks, is no obstacle: `execute` is safe alone.
    Raises: CkptmanError after `LOCK_SECONDS`.
    """
    from filelock import FileLock, Timeout

    lock_path = run_folder(root) / "prune.lock"
    # FileLock would make the folder, and the root too; and through a link it would write to what is none of ours.
    if not _is_folder(run_folder(root)) or lock_path.is_symlink():
        yield
        return
    lock = FileLock(lock_path, timeout=LOCK_SECONDS)
    try:
        lock.acquire()
    except Timeout:
        raise CkptmanError(
            f"another ckptman prune has been at work on {root} for {LOCK_SECONDS:.0f} s: let it end, or stop it"
        ) from None
    except (NotImplementedError, OSError):
        yield
        return
    try:
        yield
    finally:
        lock.release()


def execute(root: Path, plan: PrunePlan, tag: str, disk: Disk = DISK) -> None:
    """Carry out a plan: each entry is made invisible at once and then removed. Can be run again at any point.

    What cannot be removed does not keep the rest from being removed. Raises: OSError in the end, if there was such.
    """
    with _first_error_last() as attempt:
        # Leftovers first: an earlier save of a step must not come back when the later one goes.
        attempt(partial(clear, root, plan.leftovers, tag, disk))
        stuck = {leftover.step for leftover in plan.leftovers if os.path.lexists(leftover.path)}
        place = FolderPlace(root, disk)
        for count, verdict in enumerate(verdict for verdict in plan.verdicts if not verdict.keep):
            entry = plan.entries[verdict.record.sequence]
            if entry.step not in stuck and _is_as_planned(entry):
                attempt(partial(place.delete, entry, f"{tag}-{count}"))


def clear(root: Path, leftovers: Iterable[Leftover], tag: str, disk: Disk = DISK) -> None:
    """Remove leftovers. Raises: OSError in the end, if some could not be removed."""
    place = FolderPlace(root, disk)
    with _first_error_last() as attempt:
        for count, leftover in enumerate(leftovers):
            if leftover.step is None:
                attempt(partial(disk.remove_file, leftover.path))
            else:
                name = step_folder(leftover.step)
                attempt(partial(place.remove, leftover.path, name, f"{tag}-left{count}"))


@contextmanager
def _first_error_last() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Hands out a function that tries a step and goes on after an OSError; the first of those is raised at the end."""
    errors: list[OSError] = []

    def attempt(step: Callable[[], None]) -> None:
        try:
            step()
        except OSError as error:
            errors.append(error)

    yield attempt
    if errors:
        raise errors[0]


def _is_as_planned(entry: Entry) -> bool:
    """Whether the folder still holds what the plan was made for: a run may have saved this step again meanwhile."""
    try:
        # As bytes: a metric that is NaN is not equal to itself.
        return read_manifest(entry.path).to_json() == entry.require_manifest().to_json()
    except (OSError, CkptmanError):
        return False


def _half_written(root: Path) -> list[tuple[Path, int]]:
    if not _is_folder(run_folder(root)):
        return []
    try:
        paths = sorted(run_folder(root).iterdir())
    except OSError:
        return []
    return [(path, pid) for path in paths if (pid := parse_half_written(path.name)) is not None]


def _is_folder(path: Path) -> bool:
    """Whether there is a folder and not a link to one: what lies outside of the root is not looked at."""
    return path.is_dir() and not path.is_symlink()


def _tree_bytes(path: Path) -> int:
    total = 0
    for folder, _, names in os.walk(path) if _is_folder(path) else [(path.parent, (), [path.name])]:
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total
