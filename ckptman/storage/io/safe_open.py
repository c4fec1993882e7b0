"""Opening what a checkpoint calls a file, and nothing else: no link is followed, no pipe waited for, no device read.

A checkpoint may come from anywhere, and whoever made it may have put anything in the place of a file: a link to what is
none of its business, a pipe that nobody writes to, a device that never ends.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from pathlib import Path

from ckptman.errors import CorruptError

_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
STALE_TRIES, STALE_SECONDS = 30, 0.1
"""For so long a file is looked for anew that another client has replaced (ESTALE): a client learns of that within a
second or two."""
_NO_FILE = (errno.ELOOP, errno.ENXIO)
"""A link; a socket."""


def open_regular(
    path: Path | str, *, follow: bool = False, direct: bool = False, remedy: str = "restore an older checkpoint"
) -> int:
    """Open a regular file to read it; the descriptor is for the caller to close. `follow`: a link to one will do.

    `direct`: past the page cache.

    Raises: CorruptError where something else lies there, OSError.
    """
    tries_left = STALE_TRIES
    while True:
        try:
            fd = os.open(path, (_OPEN & ~os.O_NOFOLLOW if follow else _OPEN) | (os.O_DIRECT if direct else 0))
            break
        except OSError as error:
            tries_left -= 1
            if error.errno in _NO_FILE:
                raise _no_file(path, remedy) from error
            if error.errno != errno.ESTALE or not tries_left:
                raise
            time.sleep(STALE_SECONDS)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise _no_file(path, remedy)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_regular(
    path: Path | str, most_bytes: int, *, follow: bool = False, remedy: str = "restore an older checkpoint"
) -> bytes:
    """Read all bytes of a regular file, as many as it had when it was opened. `remedy`: what to do where it is none.

    Raises: CorruptError, also where it has more than `most_bytes`, of which none is read then; OSError.
    """
    fd = open_regular(path, follow=follow, remedy=remedy)
    try:
        size = os.fstat(fd).st_size
        if size > most_bytes:
            raise CorruptError(
                f"{path} has {size} bytes, and no more than {most_bytes} can be right: it is not what was saved; "
                f"{remedy}"
            )
        return _read(fd, size)
    except MemoryError as error:
        raise CorruptError(f"{path} is larger than the memory there is: {remedy}") from error
    finally:
        os.close(fd)


def read_end(fd: int, most_bytes: int) -> tuple[bytes, bool]:
    """Read the last bytes of an open file, at most `most_bytes`; and whether that is all of it. Raises: OSError."""
    size = os.fstat(fd).st_size
    os.lseek(fd, max(0, size - most_bytes), os.SEEK_SET)
    # A byte at least: what has no size, such as a file of /proc, says itself what it is.
    return _read(fd, max(1, min(size, most_bytes))), size <= most_bytes


def _read(fd: int, size: int) -> bytes:
    pieces = []
    while size > 0 and (piece := os.read(fd, size)):
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def _no_file(path: Path | str, remedy: str) -> CorruptError:
    return CorruptError(
        f"{path} is not a regular file: links, pipes and devices are not read; {remedy}, or put a copy of the file "
        f"there"
    )
