"""The page cache of this host: having a file out of it, so that the next read of it comes from storage.

Whether a file is in it is asked with mincore. A read that does not wait (RWF_NOWAIT) would tell as well, but on newer
kernels it makes them read ahead: then what it asked for is there because it asked.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ckptman.storage.io.durable_files import DISK

_ATTEMPTS = 4
_PAUSE_SECONDS = 0.01
"""Pages that somebody holds at this moment, such as the journal of the file system, go a little later."""
_WINDOW_BYTES = 1 << 30
_mincore = ctypes.CDLL(None).mincore
_mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


def drop(fd: int, size: int, attempts: int = _ATTEMPTS) -> bool:
    """Have the first `size` bytes of an open file out of the page cache, after they were flushed. False where some of
    it stays there, as in a file system that is nothing but memory, or where nobody can tell."""
    for attempt in range(attempts):
        if attempt:
            time.sleep(_PAUSE_SECONDS)
        with contextlib.suppress(OSError, AttributeError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if not _is_resident(fd, size):
            return True
    return False


def drop_all(folder: Path, sizes: Mapping[str, int], flush: bool = False) -> bool:
    """Take files out of the page cache of this host; whether some of one may have stayed in it.

    `flush`: before that, as who brought them may not have done it. Raises: OSError, where that fails.
    """
    stayed = False
    for name, size in sizes.items():
        if not size:
            continue
        try:
            fd = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue  # the verification will tell
        try:
            if flush:
                DISK.sync_file(fd)
            # Where one stays, all may: then none is waited for.
            stayed = not drop(fd, size, 1 if stayed else _ATTEMPTS) or stayed
        finally:
            os.close(fd)
    return stayed


def _is_resident(fd: int, size: int) -> bool:
    for low in range(0, size, _WINDOW_BYTES):
        length = min(_WINDOW_BYTES, size - low)
        try:
            with mmap.mmap(fd, length, access=mmap.ACCESS_READ, offset=low) as memory:
                pages = np.frombuffer(memory, np.uint8)
                states = np.zeros(-(-length // mmap.PAGESIZE), np.uint8)
                failed = _mincore(pages.ctypes.data, length, states.ctypes.data)
                del pages  # else the memory cannot be let go of
        except (OSError, ValueError):  # it cannot be mapped, or is shorter
            return True
        if failed or (states & 1).any():
            return True
    return False
