"""What may be replaced, and so be removed: a checkpoint, or what is left of one. A name alone makes nothing ours."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from ckptman.errors import CkptmanError, CorruptError, FormatVersionError
from ckptman.store.manifest import read_manifest
from ckptman.store.names import CHUNKS, DOT, INDEX, MANIFEST, METADATA, parse_data, parse_half_written, rank_of
from ckptman.store.pins import PINNED
from ckptman.store.regular import open_regular
from ckptman.store.verified import VERIFIED

_BESIDE = frozenset({MANIFEST, INDEX, VERIFIED, PINNED, DOT})
"""Ours, but others give such names too."""
_BLOCKS = re.compile(r"blocks-[0-9]{5,}-[0-9]+\.bin", re.ASCII)
_PICKLE = b"\x80"


def may_be_replaced(folder: Path) -> bool:
    """Whether a folder is empty, a checkpoint of ckptman or of plain DCP, or holds only what is left of one.

    Raises: OSError where it cannot be looked at.
    """
    if folder.is_symlink() or not folder.is_dir():
        return False
    with os.scandir(folder) as items:
        names = {item.name: item.is_dir(follow_symlinks=False) and item.name != DOT for item in items}
    if not names or (is_left(names) and not any(names.values())):
        return True
    if METADATA in names and _begins_a_pickle(folder / METADATA):
        return True
    try:
        read_manifest(folder)
    except FormatVersionError:
        return True
    except (CkptmanError, FileNotFoundError):
        return False
    return True


def is_left(names: Iterable[str]) -> bool:
    """Whether all of these are names of files of a checkpoint, and one is such that nobody else gives it."""
    every = set(names)
    known = {name for name in every if name in (METADATA, CHUNKS) or _is_of_rank(name)}
    others = every - known - _BESIDE
    return bool(known) and all(parse_half_written(name) is not None for name in others)


def _is_of_rank(name: str) -> bool:
    return rank_of(name) is not None or parse_data(name) is not None or _BLOCKS.fullmatch(name) is not None


def _begins_a_pickle(path: Path) -> bool:
    """Whether a file may be what torch writes under that name; others have folders and texts of it."""
    try:
        fd = open_regular(path)
    except CorruptError:
        return False
    try:
        return os.read(fd, 1) == _PICKLE
    finally:
        os.close(fd)
