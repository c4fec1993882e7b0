"""Copying checkpoints from root to root: one function for the command, and for whoever drains a root.

A copy counts only after every byte of it was read back and found to be what was saved. It keeps step and sequence, so
what is newest stays newest. Torch-free.
"""

from __future__ import annotations

import os
from pathlib import Path

from ckptman.catalog.backends.backend import Backend
from ckptman.catalog.backends.local import LocalBackend
from ckptman.catalog.backends.object_store import ObjectBackend
from ckptman.catalog.backends.source import ForeignOriginal, Original
from ckptman.catalog.catalog import Entry
from ckptman.errors import ConfigError
from ckptman.format.paths import MANIFEST, parse_step
from ckptman.transfer.read_back import Means
from ckptman.transfer.to_folder import Copied, copy_to_folder
from ckptman.transfer.to_object_store import copy_to_objects

__all__ = ["Copied", "Means", "check_apart", "copy_checkpoint", "copy_foreign"]

USUAL = Means()
"""As a save and a verify would, and nothing is replaced."""


def copy_checkpoint(entry: Entry, place: Backend, means: Means = USUAL, *, source: Backend | None = None) -> Copied:
    """Copy one complete checkpoint to another place, verified there, and then visible as a whole.

    One that is there already is not copied again. Interrupted anywhere, it can be called again and goes on from what
    was copied. Both sides are leased meanwhile, so no prune takes anything away. Called by `ckptman copy`, and by a
    drain, which may remove the source once this returns.

    Args:
        entry: As `source` lists it.
        place: Where to.
        means: How.
        source: Where the entry lies, if not in the folder at its path.
    Raises: ConfigError, and as `copy_to_folder` and `copy_to_objects`.
    """
    source = source if source is not None else LocalBackend(entry.path.parent)
    if entry.in_folder and isinstance(place, LocalBackend):
        check_apart(entry.path, place.root)
    with source.reading(entry, "copy"):
        return _copy(source.open(entry), place, means)


def copy_foreign(folder: Path, place: LocalBackend, means: Means = USUAL) -> Copied:
    """The same of what plain DCP wrote: its files as they are, held against digests of what was read.

    Raises: ConfigError, and as `copy_to_folder`.
    """
    check_apart(folder, place.root)
    return copy_to_folder(ForeignOriginal(folder), place, means)


def _copy(original: Original, place: Backend, means: Means) -> Copied:
    if isinstance(place, LocalBackend):
        return copy_to_folder(original, place, means)
    assert isinstance(place, ObjectBackend)
    return copy_to_objects(original, place, means)


def check_apart(folder: Path, root: Path) -> None:
    """Refuse a destination that is where the checkpoint lies, in it, or no root. Raises: ConfigError."""
    source, target = Path(os.path.realpath(folder)), Path(os.path.realpath(root))
    if parse_step(target.name) or os.path.lexists(target / MANIFEST):
        raise ConfigError(f"{root} is a checkpoint: name the root to copy to; a copy keeps the name of its folder")
    if target == source.parent:
        raise ConfigError(f"{folder} is in {root} already: name another root to copy to")
    # What is in a root is a run's; a folder without a checkpoint's name may lie anywhere.
    around = source.parent if parse_step(source.name) else source
    if around == target or around in target.parents:
        raise ConfigError(f"{root} is inside of {around}, from which is copied: name a root outside of it")
