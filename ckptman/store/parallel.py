"""A few threads that share out the pieces of one job, and the scratch memory they work in. Torch-free."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable

from ckptman.errors import ConfigError

THREADS_ENV = "CKPTMAN_IO_THREADS"
ALIGN_BYTES = 4096
"""What direct I/O wants offsets, sizes and addresses to be a multiple of, on every disk that is in use."""
STRIDE_BYTES = 4 * 1024 * 1024
"""The most that one call moves, as a rule."""
_THREADS = 4
_HUGE_BYTES = 2 * 1024 * 1024
_KEPT_BUFFERS = 8
_KEPT_BYTES = 4 * STRIDE_BYTES

# Appending to a deque and popping from it are atomic, so a fork in between leaves no lock behind.
_free: deque[memoryview] = deque()


def io_threads() -> int:
    """How many threads move the bytes of a save or a load: `CKPTMAN_IO_THREADS`, or 4, whatever the number of cores:
    they wait for storage more than they compute.

    Raises: ConfigError where the variable is no whole number from 1 on.
    """
    text = os.environ.get(THREADS_ENV)
    if text is None or not text.strip():
        return _THREADS
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise ConfigError(f"{THREADS_ENV}={text!r} is no number of threads: give a whole number from 1 on, or unset it")
    return count


def stride_of(block_bytes: int) -> int:
    """How much one piece of work is: whole blocks, as many as `STRIDE_BYTES` holds but at least one."""
    return max(block_bytes, STRIDE_BYTES // block_bytes * block_bytes)


def share_out(count: int, work: Callable[[int, memoryview], None], *, threads: int, scratch_bytes: int) -> None:
    """Call `work(number, scratch)` once for each number below `count`, from the calling thread and `threads - 1` more.

    Numbers are handed out in order. `scratch` is page-aligned memory of the thread, of at least `scratch_bytes`.
    The first error stops the others after the piece they are at, and is raised as it is. No thread outlives the call.
    """
    job = _Job(count, work, scratch_bytes)
    helpers = [threading.Thread(target=job.run, name="ckptman-io", daemon=True) for _ in range(min(threads, count) - 1)]
    try:
        for helper in helpers:
            try:
                helper.start()
            except RuntimeError:  # no more threads for this user, or the interpreter is leaving: slower, not wrong
                break
        job.run()
    except BaseException as error:  # noqa: BLE001
        job.stop(error)
    for helper in helpers:
        while helper.is_alive():
            try:
                helper.join()
            except BaseException as error:  # noqa: BLE001
                job.stop(error)
    first, job.error = job.error, None
    if first is not None:
        try:
            raise first
        finally:
            del first  # its traceback holds this frame


class _Job:
    def __init__(self, count: int, work: Callable[[int, memoryview], None], scratch_bytes: int) -> None:
        self.error: BaseException | None = None
        self._count, self._work, self._scratch_bytes = count, work, scratch_bytes
        self._next = 0
        self._lock = threading.Lock()

    def run(self) -> None:
        scratch = _borrow(self._scratch_bytes)
        try:
            while (number := self._take()) is not None:
                self._work(number, scratch)
        except BaseException as error:  # noqa: BLE001  (raised again by share_out)
            self.stop(error)
        finally:
            _give_back(scratch)

    def stop(self, error: BaseException) -> None:
        with self._lock:
            self.error = self.error or error

    def _take(self) -> int | None:
        with self._lock:
            if self.error is not None or self._next >= self._count:
                return None
            self._next += 1
            return self._next - 1


def _borrow(size: int) -> memoryview:
    # Fresh memory is several times slower than memory that was touched before, so buffers stay.
    try:
        buffer = _free.pop()
    except IndexError:
        buffer = memoryview(b"")
    return buffer if len(buffer) >= size else aligned_memory(-(-max(size, 1) // STRIDE_BYTES) * STRIDE_BYTES)


def aligned_memory(size_bytes: int) -> memoryview:
    """Zeroed memory on pages, on huge ones where the kernel has them.

    Direct I/O hands the disk each physically connected piece of memory by itself: 4 MiB are two pieces on huge pages,
    and up to a thousand on small ones, which was three times slower.
    """
    huge = size_bytes >= _HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE")
    room = size_bytes + (_HUGE_BYTES if huge else 0)
    memory = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = 0
    if huge:
        with contextlib.suppress(OSError):  # not on every kernel
            memory.madvise(mmap.MADV_HUGEPAGE)
        start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _HUGE_BYTES
    return memoryview(memory)[start : start + size_bytes]


def _give_back(buffer: memoryview) -> None:
    if len(_free) < _KEPT_BUFFERS and len(buffer) <= _KEPT_BYTES:
        _free.append(buffer)
