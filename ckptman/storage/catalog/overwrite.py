"""What may be replaced, and so be removed: a checkpoint, or what is left of one. A name alone makes nothing ours."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from ckptman.errors import CkptmanError, CorruptError, FormatVersionError
from ckptman.storage.catalog.pins import PINNED
from ckptman.storage.catalog.verified import VERIFIED
from ckptman.storage.format.manifest import read_manifest
from ckptman.storage.format.paths import (
    CHUNKS,
    DOT,
    INDEX,
    MANIFEST,
    METADATA,
    parse_half_written,
    parse_owner,
    rank_of,
)
from ckptman.storage.io.safe_open import open_regular

_COMMON = frozenset({MANIFEST, INDEX, CHUNKS, METADATA, VERIFIED, PINNED, DOT})
"""Names of ours that others may give to files of theirs."""
_BLOCKS = re.compile(r"blocks-[0-9]{5,}-[0-9]+\.bin", re.ASCII)
_OF_FLUSHES = re.compile(r"offer\.json|manifest-[0-9a-f]{32}\.json", re.ASCII)
"""What a flush of memory has in its draft besides."""
_DATA = ".distcp"
_PICKLE = b"\x80"


def may_be_replaced(folder: Path) -> bool:
    """Whether a folder is empty, a checkpoint of ckptman or of plain DCP, or holds only what is left of one.

    Raises: OSError if it cannot be read.
    """
    if folder.is_symlink() or not folder.is_dir():
        return False
    with os.scandir(folder) as items:
        names = {item.name: item.is_dir(follow_symlinks=False) for item in items}
    others = [name for name, is_folder in names.items() if is_folder and name != DOT]
    if names.get(DOT) and not _is_of_claims(folder / DOT):
        others.append(DOT)
    if are_replaceable(names, lambda: read_manifest(folder), has_others=bool(others)):
        return True
    return not others and _has_data(names) and METADATA in names and _begins_a_pickle(folder / METADATA)


def strangers_in(folder: Path) -> list[str]:
    """The names in a folder of what ckptman does not write there; of a file that is not empty, its own.

    Raises: OSError if it cannot be read.
    """
    if folder.is_symlink():
        return []  # as far as it is removed, it is only the link
    if not folder.is_dir():
        return [folder.name] if folder.lstat().st_size else []
    named: Iterable[str] = ()
    with contextlib.suppress(CkptmanError, FileNotFoundError):
        named = read_manifest(folder).files
    with os.scandir(folder) as items:
        folders = {item.name: item.is_dir(follow_symlinks=False) for item in items}
    return sorted(
        name
        for name, is_folder in folders.items()
        if not (name == DOT and _is_of_claims(folder / DOT) if is_folder else name in named or _is_ours(name))
    )


def are_replaceable(
    names: Iterable[str], read: Callable[[], object], *, is_noted: bool = False, has_others: bool = False
) -> bool:
    """Whether files of these names are a checkpoint, or what is left of one, wherever they lie.

    Args:
        names: Of all that is there.
        read: Reads the manifest. Raises: FormatVersionError, CorruptError, FileNotFoundError.
        is_noted: A note beside them says that they are of a copy or of a deletion.
        has_others: There is more than files: then only a manifest that is whole makes it a checkpoint.
    """
    every = set(names)
    if not every:
        return True
    try:
        read()
        return True
    except FormatVersionError:
        return _has_data(every)
    except (CorruptError, FileNotFoundError):
        return all(map(_is_ours, every)) and not has_others and (is_noted or _has_data(every))


def _has_data(names: Iterable[str]) -> bool:
    """Whether one of these names is of a file that holds what a rank saved: nobody else gives it."""
    return any(map(_is_of_rank, names))


def _is_ours(name: str) -> bool:
    # What NFS calls a file that is removed while somebody has it open goes by itself.
    is_known = name in _COMMON or _is_of_rank(name) or _OF_FLUSHES.fullmatch(name) is not None
    return is_known or parse_half_written(name) is not None or name.startswith(".nfs")


def _is_of_rank(name: str) -> bool:
    return rank_of(name) is not None or name.endswith(_DATA) or _BLOCKS.fullmatch(name) is not None


def _is_of_claims(folder: Path) -> bool:
    """Whether a folder holds only what copies leave that are at work, or were killed."""
    names = [each.name for each in folder.iterdir()]
    return all(parse_owner(name) is not None or parse_half_written(name) is not None for name in names)


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
