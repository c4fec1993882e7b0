"""Files read from end to end at the speed of storage, each block digested while it lies in the cache of the core.

The reader of a load (`io.checked_reader`) reads what somebody wants and stops at the first block that is not
right. This one, of `verify` and of copies, is independent of it on purpose, but for how a file is opened and read: it
reads everything, goes on past what cannot be read, and keeps the digest of each block. Which of them are wrong is for
the caller.

Where there is much to read and the caller can be forked, processes go first, which digest blocks where they lie in the
page cache: nothing is copied, and each has an interpreter of its own. Whoever looks at a page that is gone, because the
file was cut short or the disk no longer gives it, is killed by SIGBUS: so it is never this process that looks. What is
left undone for whatever reason is read again by threads, which say best what is wrong.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import cast

from xxhash import xxh3_128, xxh3_128_digest

from ckptman.errors import CorruptError
from ckptman.storage.io.checksums import DIGEST_BYTES, digests_bytes
from ckptman.storage.io.failure_cause import UNREADABLE
from ckptman.storage.io.file_reader import FileReader
from ckptman.storage.io.isolated_process import IsolatedProcess
from ckptman.storage.io.threads import (
    ALIGN_BYTES,
    STRIDE_BYTES,
    aligned_memory,
    cores,
    io_threads,
    share_out,
    stride_of,
)

BATCH_BYTES = 2 * 1024 * 1024
"""What one call reads out of the page cache: a call for less costs more a byte, and after one for more the first bytes
have left the cache of the core before they are digested."""
LEAST_BYTES = 256 * 1024 * 1024
"""Less than this is read before a process has begun."""
MOST_PIECES = 16
"""Pieces of one task of a process: for each task there is something to do here, too."""
_TASKS_AHEAD = 2
_MOST_THREADS = 8
_MAP_FIXED = 0x10  # the module mmap has no name for it

Stamp = tuple[int, int, int]
"""Inode, size and modification time (ns): what changes when somebody writes to a file or puts another in its place."""


@dataclass
class Scanned:
    """A file that was read.

    `blocks`: the digests of its blocks, 16 bytes each. `unreadable`: blocks that the disk did not give, and why.
    `refused`: what kept all of it from being read, where that says nothing about its bytes (permissions, no memory).
    """

    name: str
    blocks: bytearray
    unreadable: dict[int, str] = field(default_factory=dict)
    refused: OSError | None = None
    stamp: Stamp | None = None


def stamp_of(found: os.stat_result) -> Stamp:
    """Return what a file is known by, to see later whether it is still the same."""
    return found.st_ino, found.st_size, found.st_mtime_ns


def scan(
    folder: Path,
    sizes: Sequence[tuple[str, int]],
    block_bytes: int,
    *,
    finish: Callable[[Scanned], None],
    threads: int | None = None,
    done: Callable[[int], None] | None = None,
    processes: bool = False,
) -> None:
    """Read the first so many bytes of each of these files, shared out by pieces of a few MiB.

    `finish` is told each file when all of it is read, `done` the bytes that were. Both are called from several threads.
    Without `threads`: one for each core, at most 8, or `CKPTMAN_IO_THREADS`; twice as many where the disk is waited
    for. With `processes`, as many forked processes go before them where there is much to read.
    Memory: scratch of 4 MiB for each, and the digests of the files that are under way.
    """
    pieces = _Pieces(folder, sizes, block_bytes)
    for source in pieces.sources:
        if not source.size:
            source.is_open()
            source.reader.close()
            finish(source.scanned)
    hands: dict[int, _Hand] = {}

    def end(source: ScanFile, count: int) -> None:
        last = source.end(count)
        if done is not None:
            done(count)
        if last:
            finish(source.scanned)

    def work(place: int, scratch: memoryview) -> None:
        ((source, low, high),) = pieces.runs(range(left[place], left[place] + 1))
        hand = hands.get(id(scratch))
        if hand is None:
            hand = hands[id(scratch)] = _Hand(scratch, block_bytes)
        source.read(low, high, hand)
        end(source, high - low)

    try:
        threads = threads or default_threads() * (2 if pieces.begin_cold() else 1)
        left = _scan_apart(pieces, threads, end) if processes else range(pieces.count)
        share_out(len(left), work, threads=threads, scratch_bytes=STRIDE_BYTES)
    finally:
        for source in pieces.sources:
            source.reader.close()


def default_threads() -> int:
    """Return how many read: one for each core of this process, at most 8, or `CKPTMAN_IO_THREADS`.

    Raises: ConfigError.
    """
    return io_threads(min(_MOST_THREADS, cores()))


class _Hand:
    """The scratch memory of one thread, cut into blocks once and for all."""

    def __init__(self, scratch: memoryview, block_bytes: int) -> None:
        self.scratch, self._block_bytes = scratch, block_bytes
        self._blocks = [scratch[at : at + block_bytes] for at in range(0, STRIDE_BYTES - block_bytes + 1, block_bytes)]

    def digests(self, size: int) -> bytes:
        """Return the digests of the blocks in the first `size` bytes; the last block may be shorter."""
        whole, rest = divmod(size, self._block_bytes)
        found = b"".join(map(xxh3_128_digest, self._blocks[:whole]))
        return found + xxh3_128_digest(self.scratch[size - rest : size]) if rest else found


class _Window(_Hand):
    """Addresses at which pieces of files are seen one after the other, in place of one another, cut into blocks once.

    They begin where a huge page does: then what the page cache keeps in large folios takes a few entries to map.
    """

    def __init__(self, block_bytes: int) -> None:
        super().__init__(aligned_memory(STRIDE_BYTES), block_bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.scratch))

    def show(self, fd: int, low: int, size: int) -> None:
        """Show the bytes of a file from `low` on. Raises: OSError; then the addresses may not be used any more."""
        if _mmap(self._address, size, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, fd, low) != self._address:
            raise OSError(ctypes.get_errno(), "the file cannot be mapped")


class ScanFile:
    """A file that is being read: opened when it is wanted, closed after the last byte."""

    def __init__(self, path: Path, name: str, size: int, block_bytes: int) -> None:
        self.size, self.block_bytes, self._left = size, block_bytes, size
        self.scanned = Scanned(name, bytearray())
        self.reader = FileReader(path)
        self._batch_bytes = max(block_bytes, BATCH_BYTES // block_bytes * block_bytes)
        self._lock = threading.Lock()

    def is_open(self) -> bool:
        """Open it, if it is not yet. False where that was refused, as `scanned` then says."""
        if self.scanned.refused is None:
            try:
                self.reader.open()
                self._begin(stamp_of(self.reader.found))
            except CorruptError:
                self.scanned.refused = OSError(errno.EINVAL, "it is not a regular file")
            except MemoryError:
                self.reader.close()
                self.scanned.refused = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            except OSError as error:
                self.scanned.refused = error
        return self.scanned.refused is None

    def is_cold(self, low: int, high: int) -> bool:
        """Return whether a piece is worth being read past the page cache, as it has to come from the disk."""
        return self.block_bytes % ALIGN_BYTES == 0 and self.reader.is_cold(low, high - low) is True

    def read(self, low: int, high: int, hand: _Hand) -> None:
        """Digest the blocks of bytes [low, high), a piece, and note those that cannot be read."""
        if not self.is_open():
            return
        try:
            self.keep(low, self.digests(low, high, hand))
            return
        except OSError:
            pass
        for begin in range(low, high, self.block_bytes):  # which of them is it?
            try:
                self.keep(begin, self.digests(begin, min(begin + self.block_bytes, high), hand))
            except OSError as error:
                if error.errno not in UNREADABLE:
                    self.scanned.refused = self.scanned.refused or error
                    return
                self.scanned.unreadable[begin // self.block_bytes] = error.strerror or str(error)

    def digests(self, low: int, high: int, hand: _Hand, window: _Window | None = None) -> bytes:
        """Return the digests of the blocks of a piece. With a window, what is in the page cache is digested there.

        Whoever meets a page there that is gone is killed by SIGBUS: not for a process that matters.
        Raises: OSError; then the window is lost.
        """
        if self.block_bytes > STRIDE_BYTES:
            return self._digest_large(low, high, hand)
        if window is not None and self.reader.is_cached(low):
            window.show(self.reader.open(), low, high - low)
            return window.digests(high - low)
        if self.is_cold(low, high) and self.reader.read_direct(low, high - low, hand.scratch) == high - low:
            return hand.digests(high - low)
        found = b""
        for begin in range(low, high, self._batch_bytes):
            size = min(self._batch_bytes, high - begin)
            self._fill(hand.scratch[:size], begin)
            found += hand.digests(size)
        return found

    def keep(self, low: int, digests: bytes) -> None:
        """Take in the digests of the blocks from byte `low` on."""
        at = low // self.block_bytes * DIGEST_BYTES
        self.scanned.blocks[at : at + len(digests)] = digests

    def keep_from(self, low: int, stamp: Stamp, digests: bytes) -> bool:
        """Take in what another process found. False where that was another file than was read before."""
        try:
            self._begin(stamp)
        except MemoryError:
            return False
        self.keep(low, digests)
        return self.scanned.stamp == stamp

    def end(self, count: int) -> bool:
        """So many bytes less to read. Whether they were the last."""
        with self._lock:
            self._left -= count
            last = not self._left
        if last:
            self.reader.close()
        return last

    def _begin(self, stamp: Stamp) -> None:
        with self._lock:
            if self.scanned.stamp is None:
                # Only now: the digests of all files would be much at a time.
                self.scanned.blocks = bytearray(digests_bytes(self.size, self.block_bytes))
                self.scanned.stamp = stamp

    def _digest_large(self, low: int, high: int, hand: _Hand) -> bytes:
        hasher = xxh3_128()
        for at in range(low, high, STRIDE_BYTES):
            view = hand.scratch[: min(STRIDE_BYTES, high - at)]
            self._fill(view, at)
            hasher.update(view)
        return hasher.digest()

    def _fill(self, view: memoryview, offset: int) -> None:
        if self.reader.read([view], offset) < len(view):
            raise OSError(errno.ENODATA, "the file was cut short while it was read")


class _Pieces:
    """The first so many bytes of files, cut into numbered pieces of one stride; the last of a file may be shorter."""

    def __init__(self, folder: Path, sizes: Sequence[tuple[str, int]], block_bytes: int) -> None:
        self.block_bytes, self.piece_bytes = block_bytes, stride_of(block_bytes)
        self.sources = [ScanFile(folder / name, name, size, block_bytes) for name, size in sizes]
        self._starts = list(accumulate((-(-size // self.piece_bytes) for _, size in sizes), initial=0))

    @property
    def count(self) -> int:
        return self._starts[-1]

    def runs(self, numbers: range) -> Iterator[tuple[ScanFile, int, int]]:
        """Pieces that follow one another: each of their files, and its bytes [low, high)."""
        begin = numbers.start
        while begin < numbers.stop:
            which = bisect_right(self._starts, begin) - 1
            first, stop = self._starts[which], min(numbers.stop, self._starts[which + 1])
            source = self.sources[which]
            yield source, (begin - first) * self.piece_bytes, min((stop - first) * self.piece_bytes, source.size)
            begin = stop

    def begin_cold(self) -> bool:
        """Return whether the first of them has to come from the disk. Leaves its file closed."""
        for source, low, high in self.runs(range(min(1, self.count))):
            cold = source.is_open() and source.is_cold(low, high)
            source.reader.close()
            return cold
        return False


# ---- forked processes that digest -------------------------------------------------------------------------------


def _scan_apart(pieces: _Pieces, processes: int, end: Callable[[ScanFile, int], None]) -> Sequence[int]:
    """Have the pieces digested by forked processes. `end` is told how much of which file is done.

    The numbers of those that are not: because a process died, or met an error, or because none is worth it.
    """
    aligned = pieces.piece_bytes % mmap.ALLOCATIONGRANULARITY == 0 and pieces.piece_bytes <= STRIDE_BYTES
    if sum(source.size for source in pieces.sources) < LEAST_BYTES or not aligned:
        return range(pieces.count)
    tasks, undone = _tasks(pieces.count, processes), list[range]()
    at_work: dict[Connection, deque[range]] = {}
    with ExitStack() as stack:
        for _ in range(processes):
            try:
                child = IsolatedProcess(partial(_serve, pieces), duplex=True, keeps_files=True)
            except OSError:
                break
            stack.callback(child.end)
            at_work[child.pipe] = deque()
        for _ in range(_TASKS_AHEAD):
            for pipe, given in at_work.items():
                _give(pipe, given, tasks)
        while busy := [pipe for pipe, given in at_work.items() if given]:
            for pipe in cast("list[Connection]", wait(busy)):
                given = at_work[pipe]
                try:
                    found: list[tuple[Stamp, bytes]] = pipe.recv()
                except (EOFError, OSError):  # it has died
                    undone += given
                    given.clear()
                    continue
                task = given.popleft()
                _give(pipe, given, tasks)
                runs = list(pieces.runs(task))
                if found and all(source.keep_from(low, *each) for (source, low, _), each in zip(runs, found)):
                    for source, low, high in runs:
                        end(source, high - low)
                else:
                    undone.append(task)
        for pipe in at_work:
            pipe.close()  # all of them end now, and give back their memory at the same time
    return [number for task in (*undone, *tasks) for number in task]


def _tasks(count: int, processes: int) -> Iterator[range]:
    """Large ones first, and small ones at the end, so that all processes are done at about the same time."""
    begin = 0
    while begin < count:
        stop = begin + max(1, min(MOST_PIECES, (count - begin) // (4 * processes)))
        yield range(begin, stop)
        begin = stop


def _give(pipe: Connection, given: deque[range], tasks: Iterator[range]) -> None:
    if (task := next(tasks, None)) is not None:
        given.append(task)
        with suppress(OSError):  # of one that has died, as is found next
            pipe.send(task)


def _serve(pieces: _Pieces, pipe: Connection) -> None:
    """What a process does until nothing is asked of it: for a task, stamp and digests of each run of pieces, or
    nothing where there was an error, which whoever reads them again will tell."""
    hand, window = _Hand(aligned_memory(STRIDE_BYTES), pieces.block_bytes), _Window(pieces.block_bytes)
    current: ScanFile | None = None
    with suppress(EOFError, ConnectionError):
        while True:
            task: range = pipe.recv()
            found = list[tuple[Stamp, bytes]]()
            try:
                for source, low, high in pieces.runs(task):
                    if current is not None and current is not source:
                        current.reader.close()
                    current = source
                    step, stamp = pieces.piece_bytes, stamp_of(os.fstat(source.reader.open()))
                    parts = (source.digests(at, min(at + step, high), hand, window) for at in range(low, high, step))
                    found.append((stamp, b"".join(parts)))
            except (CorruptError, OSError):
                found, window = [], _Window(pieces.block_bytes)
            pipe.send(found)


_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_mmap.restype = ctypes.c_void_p
