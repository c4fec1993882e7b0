"""The limit of the file system: the same bytes moved by threads that do nothing else.

Buffered, the bytes move straight between the tensors and the file. Direct, they move between the file and aligned
memory on huge pages: as much as the state has (`whole`), or one buffer a thread that is used again. That buffer stays
in the cache of the processor: it is the device alone that is measured, and not what it takes to have a state in memory.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.engine.state import State, flat_bytes

STRIDE_BYTES = 4 << 20
ALIGN_BYTES = 4096
HUGE_BYTES = 2 << 20
FILE = "raw.bin"


@dataclass(frozen=True)
class Raw:
    """One way to move bytes."""

    direct: bool
    threads: int
    whole: bool = False

    @property
    def name(self) -> str:
        return f"raw, {'direct' if self.direct else 'buffered'}, {self.threads} thread{'s' * (self.threads > 1)}"

    def save(self, state: State, folder: Path) -> None:
        """Write and flush: space taken first, then the bytes."""
        folder.mkdir()
        pieces, size = self._pieces(state)
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | (os.O_DIRECT if self.direct else 0)
        fd = os.open(folder / FILE, flags, 0o644)
        try:
            try:
                os.posix_fallocate(fd, 0, size)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
            self._move(os.pwrite, fd, pieces)
            os.fsync(fd)
        finally:
            os.close(fd)

    def load(self, state: State, folder: Path) -> None:
        """Read as many bytes as the state has from the largest file of a folder."""
        pieces, _ = self._pieces(state)
        path = max(folder.iterdir(), key=lambda each: each.stat().st_size)
        fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if self.direct else 0))
        try:
            self._move(lambda fd, view, offset: os.preadv(fd, [view], offset), fd, pieces)
        finally:
            os.close(fd)

    def _pieces(self, state: State) -> tuple[list[tuple[memoryview, int]], int]:
        """Strides of all tensors, each tensor from a page of the file on, and the size of the file."""
        found: list[tuple[memoryview, int]] = []
        at = 0
        for tensor in state.values():
            view = flat_bytes(tensor)
            found += [(view[i : i + STRIDE_BYTES], at + i) for i in range(0, len(view), STRIDE_BYTES)]
            at += _up(len(view))
        if self.whole:
            memory = _memory_of(at)
            found = [(memory[start : start + _up(len(view))], start) for view, start in found]
        return found, at

    def _move(self, call: Callable[[int, memoryview, int], int], fd: int, pieces: list[tuple[memoryview, int]]) -> None:
        numbers = itertools.count()
        errors: list[BaseException] = []

        def work() -> None:
            scratch = _huge_pages(STRIDE_BYTES) if self.direct and not self.whole else None
            try:
                while not errors and (number := next(numbers)) < len(pieces):
                    view, offset = pieces[number]
                    if scratch is not None:
                        view = scratch[: _up(len(view))]
                    while len(view):
                        moved = call(fd, view, offset)
                        if not moved:
                            raise OSError(errno.EIO, "the file has ended")
                        view, offset = view[moved:], offset + moved
            except BaseException as error:  # noqa: BLE001
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(self.threads)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        if errors:
            raise errors[0]


@cache
def _memory_of(size: int) -> memoryview:
    return _huge_pages(size)


def _up(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


def _huge_pages(size: int) -> memoryview:
    """Memory of a few connected pieces, and touched: what a disk likes best."""
    memory = mmap.mmap(-1, size + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    start = -np.frombuffer(memory, np.uint8).ctypes.data % HUGE_BYTES
    np.frombuffer(memory, np.uint8)[:] = 0
    return memoryview(memory)[start : start + size]


BUFFERED = [Raw(False, threads) for threads in (1, 2, 4, 8)]
RAW = [*BUFFERED, *(Raw(True, threads, whole=True) for threads in (1, 2, 4, 8))]
DEVICE = [Raw(True, threads) for threads in (1, 2, 4, 8)]
