"""The page cache: which part of a folder is in it, and how to have it out or in."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

_LIBC = ctypes.CDLL(None, use_errno=True)


def files_under(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file()) if folder.is_dir() else iter([folder])


def make_durable(folder: Path) -> None:
    """Flush every file and folder: costs next to nothing where they are on storage already."""
    parts = [folder, *folder.rglob("*")] if folder.is_dir() else [folder]
    for path in (*parts, folder.parent):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def resident_share(folder: Path) -> float:
    """The part of the bytes under a folder that is in the page cache (mincore)."""
    there = pages = 0
    for path in files_under(folder):
        if not (size := path.stat().st_size):
            continue
        with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as memory:
            view = np.frombuffer(memory, np.uint8)
            states = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
            if _LIBC.mincore(
                ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(size), states.ctypes.data_as(ctypes.c_void_p)
            ):
                raise OSError(ctypes.get_errno(), "mincore", str(path))
            del view
            there, pages = there + int((states & 1).sum()), pages + len(states)
    return there / max(1, pages)


def evict(folder: Path) -> float:
    """Have it out of the page cache; the share that stayed, which is more than 0 on tmpfs."""
    make_durable(folder)
    for path in files_under(folder):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    return resident_share(folder)


def warm(folder: Path) -> None:
    """Have it in the page cache."""
    if resident_share(folder) > 0.999:
        return
    buffer = bytearray(4 << 20)
    for path in files_under(folder):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
