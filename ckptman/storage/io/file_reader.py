"""One file that several threads read: out of the page cache, or past it where a large piece has to come from a disk.

Whatever reads the bytes of a checkpoint file reads them through this: a load its ranges, `verify` and a copy all of it.
It checks nothing: what came is held against digests by those who asked for it.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ckptman.errors import CorruptError
from ckptman.storage.io.safe_open import open_regular
from ckptman.storage.io.threads import ALIGN_BYTES, STRIDE_BYTES

DIRECT_BYTES = 1024 * 1024
"""Less than this is read through the page cache: what follows lies near, and it reads ahead."""
_POPULATE_READ = 22
"""MADV_POPULATE_READ, of Linux 5.14: read a file as if its memory was touched, which takes no copy and no signal."""
_IOV_MAX = 1024


class FileReader:
    """A regular file, opened when it is wanted, and again if it was closed. Thread-safe. `follow`: a link will do."""

    found: os.stat_result
    """What the file was when it was opened last."""

    def __init__(self, path: Path, *, follow: bool = False) -> None:
        self.path, self._follow = path, follow
        self._fd = self._direct_fd = -1
        self._takes_direct = True
        self._can_tell = hasattr(os, "RWF_NOWAIT")  # not where Python was built for an older libc
        self._lock = threading.Lock()

    def open(self) -> int:
        """Return the descriptor of the open file. Raises: CorruptError (it is no regular file), OSError."""
        with self._lock:
            if self._fd < 0:
                fd = open_regular(self.path, follow=self._follow)
                try:
                    self.found = os.fstat(fd)
                except BaseException:
                    os.close(fd)
                    raise
                self._fd = fd
            return self._fd

    def is_cached(self, offset: int) -> bool | None:
        """Return whether a byte is in the page cache; None where the file system cannot say."""
        fd = self.open()
        if not self._can_tell:
            return None
        try:
            return bool(os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT))
        except BlockingIOError:
            return False
        except OSError:  # an error of the disk comes again with the read itself
            self._can_tell = False
            return None

    def is_cold(self, offset: int, size: int) -> bool | None:
        """Return whether a piece begins with what is not in the page cache; None where it is too small to be read past
        it, or that cannot be told."""
        if not self._takes_direct or size < DIRECT_BYTES:
            return None
        cached = self.is_cached(offset)
        return None if cached is None else not cached

    def read(self, segments: list[memoryview], offset: int) -> int:
        """Fill segments from `offset` on, and return how many bytes there were: fewer only where the file ends.

        Raises: OSError.
        """
        fd, filled, wanted = self.open(), 0, sum(map(len, segments))
        while filled < wanted:
            count = os.preadv(fd, segments[:_IOV_MAX], offset + filled)
            if not count:
                break
            filled += count
            if filled < wanted:
                segments = after(segments, count)
        return filled

    def read_direct(self, offset: int, size: int, scratch: memoryview) -> int:
        """Read past the page cache, in one call, to `scratch` from `offset % ALIGN_BYTES` on.

        `scratch` begins on a page and has room for whole pages. Return how much came: where that is refused or gives
        less, the rest is for the page cache, which says best what is wrong.
        """
        fd = self.open()
        with self._lock:
            if self._direct_fd < 0 and self._takes_direct:
                with suppress(OSError, CorruptError):
                    self._direct_fd = open_regular(self.path, follow=self._follow, direct=True)
                # Another file may have taken its name since it was opened first.
                self._takes_direct = self._direct_fd >= 0 and os.path.sameopenfile(fd, self._direct_fd)
            if not self._takes_direct:
                return 0
        inside = offset % ALIGN_BYTES
        try:
            count = os.preadv(self._direct_fd, [scratch[: pages(inside + size)]], offset - inside)
        except OSError:
            self._takes_direct = False
            return 0
        return min(max(count - inside, 0), size)

    def close(self) -> None:
        """Let go of the file, until it is wanted again."""
        with self._lock:
            for fd in {self._fd, self._direct_fd} - {-1}:
                os.close(fd)
            self._fd = self._direct_fd = -1


def read_to_cache(path: Path, go_on: Callable[[], bool]) -> None:
    """Read a file into the page cache and nowhere else, for as long as `go_on()` is true.

    Piece by piece, so that whoever waits for the same disk does not wait for long. Raises: CorruptError, OSError.
    """
    with open(open_regular(path), "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            return
        with mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as seen:
            seen.madvise(mmap.MADV_SEQUENTIAL)  # so that it does not count as in use
            for offset in range(0, size, STRIDE_BYTES):
                if not go_on():
                    return
                try:
                    seen.madvise(_POPULATE_READ, offset, min(STRIDE_BYTES, size - offset))
                except OSError:
                    os.pread(file.fileno(), STRIDE_BYTES, offset)


def drop_from_cache(path: Path) -> None:
    """Give up the page cache of a file. Raises: CorruptError, OSError."""
    fd = open_regular(path)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def after(segments: list[memoryview], count: int) -> list[memoryview]:
    """Return what is left of segments when the first `count` bytes are taken away."""
    for number, segment in enumerate(segments):
        if count < len(segment):
            return [segment[count:], *segments[number + 1 :]]
        count -= len(segment)
    return []


def pages(size: int) -> int:
    """Return a size in whole pages."""
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES
