"""Opening what a checkpoint calls a file, and nothing else: no link is followed, no pipe waited for, no device read.

A checkpoint may come from anywhere, and whoever made it may have put anything in the place of a file: a link to what is
none of its business, a pipe that nobody writes to, a device that never ends.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from ckptman.errors import CorruptError

_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
_NO_FILE = (errno.ELOOP, errno.ENXIO)
"""A link; a socket."""
SHORTAGE = (errno.ENOMEM, errno.EMFILE, errno.ENFILE)
"""This process or its host has no memory or no descriptor left."""
AWAY = (
    *(errno.ETIMEDOUT, errno.ENOTCONN, errno.ENODEV, errno.ESHUTDOWN, errno.EHOSTDOWN, errno.EHOSTUNREACH),
    *(errno.ENETDOWN, errno.ENETUNREACH, errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED),
)
"""The server of a mount is not reached, or its client was shut out."""
DENIED = (errno.EACCES, errno.EPERM)
"""This user may not read it."""
ELSEWHERE = (*SHORTAGE, *AWAY, *DENIED)
"""The fault is elsewhere: that says nothing about what was to be read."""


def open_regular(path: Path | str, *, follow: bool = False, direct: bool = False) -> int:
    """A descriptor to read a regular file, for the caller to close. `follow`: a link to one will do.

    `direct`: past the page cache.

    Raises: CorruptError where something else lies there, OSError.
    """
    try:
        fd = os.open(path, (_OPEN & ~os.O_NOFOLLOW if follow else _OPEN) | (os.O_DIRECT if direct else 0))
    except OSError as error:
        if error.errno in _NO_FILE:
            raise _no_file(path) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _no_file(path)
    return fd


def read_regular(path: Path | str, most_bytes: int, *, follow: bool = False) -> bytes:
    """All bytes of a regular file. Raises: CorruptError, also where it has more than `most_bytes`; OSError."""
    fd = open_regular(path, follow=follow)
    try:
        size = os.fstat(fd).st_size
        if size > most_bytes:
            raise CorruptError(
                f"{path} has {size} bytes, and no more than {most_bytes} can be right: it is not what was saved; "
                f"restore an older checkpoint"
            )
        pieces = []
        while size > 0 and (piece := os.read(fd, size)):
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)
    except MemoryError as error:
        raise CorruptError(f"{path} is larger than the memory there is: restore an older checkpoint") from error
    finally:
        os.close(fd)


def _no_file(path: Path | str) -> CorruptError:
    return CorruptError(
        f"{path} is not a regular file: links, pipes and devices are not read; restore an older checkpoint, or put a "
        f"copy of the file there"
    )
