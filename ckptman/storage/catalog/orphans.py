"""What crashes leave: folders of saves and deletions that nobody will finish, half-written files, dead leases."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptman.errors import CkptmanError, plain
from ckptman.storage.catalog.catalog import Catalog
from ckptman.storage.catalog.liveness import Owner, is_this_process
from ckptman.storage.catalog.overwrite import strangers_in
from ckptman.storage.catalog.pins import read_pin
from ckptman.storage.catalog.reader_lease import Leases, look
from ckptman.storage.catalog.writer_lock import owner_lives, read_owner
from ckptman.storage.format.manifest import missing_file, read_manifest
from ckptman.storage.format.paths import Kind, StepName, parse_half_written, run_folder, step_folder

_REASONS: dict[Kind, str] = {
    "tmp": "a save that was never committed; its writer is gone",
    "trash": "a deletion that was interrupted",
    "old": "an earlier save of a step that was saved again",
}


@dataclass(frozen=True)
class Leftover:
    """What a crash left of a save or of a deletion, and nobody will finish. `bytes` on disk.

    `step` is None for a file of the run itself that was being written, and for a lease.
    """

    path: Path
    step: int | None
    reason: str
    bytes: int

    def of_others(self) -> str:
        """What ckptman did not write of it, so that it has to stay, in words; "": nothing."""
        if self.step is None:
            return ""
        try:
            names = strangers_in(self.path)
        except FileNotFoundError:
            return ""
        except OSError as error:
            return f"it cannot be looked at ({error.strerror})"
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return f"{plain(names[0])}{more} in it is nothing that ckptman wrote: move it away" if names else ""


def find_leftovers(
    root: Path, leases: Leases | None = None, there: Sequence[tuple[Path, StepName]] | None = None
) -> list[Leftover]:
    """The leftovers whose owner is gone. Those of a run that is alive are its own business.

    A run that asks for itself also gets what its own deletions left; the folder of a save may be in use. `leases`: of
    the root, where they have been looked for, and `there` what `Catalog.leftovers` says of names that were listed
    before that: whoever has made one since is not known. Raises: RootError (it cannot be read, so nobody can tell).
    """
    there = Catalog(root).leftovers() if there is None else there
    leases = look(root, wait=False) if leases is None else leases
    left = [Leftover(path, None, "a lease whose reader is gone", _tree_bytes(path)) for path in leases.dead]
    found = [
        (path, parsed)
        for path, parsed in there
        if not _is_held(path, parsed, leases) and os.path.lexists(path)  # a save may have been committed meanwhile
    ]
    halves = _half_written(root)
    if not found and not halves:
        return left
    owner = _owner_alive(root)
    mine = owner is not None and is_this_process(owner)
    left += [
        Leftover(path, parsed.step, _REASONS[parsed.kind], _tree_bytes(path))
        for path, parsed in found
        if owner is None or _tagger(parsed) != owner.nonce or (mine and parsed.kind != "tmp")
    ]
    if owner is None or mine:
        left += [
            Leftover(path, None, "a file that was never finished", _tree_bytes(path))
            for path, pid in halves
            if not mine or pid != os.getpid()
        ]
    return left


def find_strays(root: Path, leases: Leases, there: Sequence[tuple[Path, StepName]]) -> list[Leftover]:
    """Checkpoints under a trash name that are whole, and wanted: who took one away was killed before it saw that.

    `leases` and `there`: as in `find_leftovers`. Who has taken one away since then may be removing it this moment.
    """
    trash = [(path, parsed) for path, parsed in there if parsed.kind == "trash"]
    owner = _owner_alive(root) if trash else None
    at_work = {*leases.nonces, *([owner.nonce] if owner is not None else [])}
    strays = []
    for path, parsed in trash:
        if _tagger(parsed) in at_work:
            continue
        reason = leases.holder(step_folder(parsed.step)) or ("it is pinned" if _is_pinned(path) else "")
        if reason and _is_whole(path):
            strays.append(Leftover(path, parsed.step, f"{reason}, and the prune that took it was killed", 0))
    return strays


def _owner_alive(root: Path) -> Owner | None:
    owner = read_owner(root)
    return owner if owner is not None and owner_lives(root, owner) else None


def _is_held(path: Path, parsed: StepName, leases: Leases) -> bool:
    """Whether somebody writes, reads or removes there, or wants it kept."""
    if leases.holder(path.name) or _tagger(parsed) in leases.nonces:
        return True
    if parsed.kind not in ("old", "trash"):
        return False
    # See `find_strays`.
    return bool(leases.holder(step_folder(parsed.step))) or (_is_pinned(path) and _is_whole(path))


def _tagger(parsed: StepName) -> str:
    """The nonce of who gave a folder its name: of a claim, or of a lease."""
    return parsed.tag.partition("-")[0]


def _is_pinned(path: Path) -> bool:
    return not path.is_symlink() and read_pin(path) is not None


def _is_whole(path: Path) -> bool:
    try:
        return not path.is_symlink() and missing_file(path, read_manifest(path)) is None
    except (CkptmanError, OSError):
        return False


def _half_written(root: Path) -> list[tuple[Path, int]]:
    folder = run_folder(root)
    if not folder.is_dir() or folder.is_symlink():
        return []
    try:
        paths = sorted(folder.iterdir())
    except OSError:
        return []
    names = [(path, pid) for path in paths if (pid := parse_half_written(path.name)) is not None]
    return [(path, pid) for path, pid in names if path.is_symlink() or not path.is_dir()]


def _tree_bytes(path: Path) -> int:
    total = 0
    is_folder = path.is_dir() and not path.is_symlink()
    for folder, _, names in os.walk(path) if is_folder else [(path.parent, (), [path.name])]:
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total
